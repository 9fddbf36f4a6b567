# SPDX-License-Identifier: Apache-2.0
"""Finds in the output of a MindSpore process the line that says why it failed."""

from __future__ import annotations

import re
import signal

# "[ERROR] PARALLEL(4711,7f..,python):2026-11-30-14:56:17.290.406 [mindspore/ccsrc/a.cc:269] Function] message"
_LOGGED = re.compile(r"\[(ERROR|CRITICAL)\] (?P<module>\w+)\([^)]*\):\S+ \[[^\]]*\] (\w+\] )?(?P<message>.*)")
_RAISED = re.compile(r"([A-Za-z_][\w.]*(Error|Exception)): ?(.*)")
# CANN's operator compiler is a Python package that a simulation does not need; MindSpore asks for it all the same.
_HARMLESS = re.compile(r"No module named 'te'|relies on whl package \"te\"")


def failure_line(log: str, exit_code: int) -> str:
    """One line on why a process failed.

    The first ``[ERROR]`` line of MindSpore's parallel engine comes first: what follows it are its consequences.
    Then the exception that ended the process, another logged error, and the exit code or signal.

    Args:
        log: standard output and error of the process.
        exit_code: as ``subprocess`` gives it: negative for a signal.
    """
    lines = log.splitlines()
    logged = [found for line in lines if (found := _LOGGED.search(line)) and not _HARMLESS.search(line)]
    parallel = next((found for found in logged if found["module"] == "PARALLEL"), None)
    raised = next((line for line in reversed(lines) if _RAISED.match(line)), None)
    if parallel is not None:
        reason = f"[ERROR] PARALLEL: {parallel['message']}"
    elif raised is not None:
        reason = re.sub(r"^ms_longctx\.[\w.]*: ", "", raised.strip())  # this package's errors speak for themselves
    elif logged:
        reason = f"[ERROR] {logged[-1]['module']}: {logged[-1]['message']}"
    else:
        reason = "no error line in its log"
    return f"{_crash(exit_code)}{reason}"


def _crash(exit_code: int) -> str:
    if exit_code >= 0:
        return ""
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"the compiler crashed ({name}): "
