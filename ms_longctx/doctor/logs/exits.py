# SPDX-License-Identifier: Apache-2.0
"""How ranks ended: the files ``worker_RANK.exit`` that run_scripts/run_rank.py leaves beside their logs."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from ms_longctx.doctor.logs.rules import Rule, load_rules

_CRASHED = Rule(
    id="crashed",
    title="the process was ended by a signal",
    cause="Compiled code failed (139: it used memory that is not its own; 134: it gave up itself), or somebody sent "
    "the signal.",
    cure="Read the last lines of this rank's log; 'ulimit -c unlimited' before the start keeps a core file for gdb.",
    source="https://man7.org/linux/man-pages/man7/signal.7.html",
)
# Signals that rules about lines of logs explain.
_KNOWN = {signal.SIGKILL: "oom_killer", signal.SIGBUS: "shared_memory", signal.SIGINT: "terminated"}


@dataclass(frozen=True)
class Exit:
    """The end of a rank.

    Attributes:
        path, text: the file and its line.
        time: seconds since 1970.
        code: exit code; 128 + N for a process that signal N killed.
    """

    path: Path
    text: str
    time: float
    code: int

    @property
    def rule(self) -> Rule | None:
        """The failure that the code tells; ``None`` for one that only the log explains.

        SIGTERM tells nothing: it is what launchers send to all ranks after the failure of one.
        """
        try:
            number = signal.Signals(self.code - 128)
        except ValueError:
            return None
        if number == signal.SIGTERM:
            return None
        known = {rule.id: rule for rule in load_rules()}.get(_KNOWN.get(number, ""), _CRASHED)
        how = "ended by Ctrl-C" if number == signal.SIGINT else f"killed by {number.name}"
        return replace(known, title=f"{how} (exit code {self.code})")


def exit_of(log: Path) -> Exit | None:
    """How the rank of this log ended; ``None`` where no file beside it tells."""
    path = log.with_suffix(".exit")
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) (\d{1,3}) \d+", text)
    if found is None or not math.isfinite(float(found[1])):
        return None
    return Exit(path, text, float(found[1]), int(found[2]))
