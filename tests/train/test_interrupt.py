# SPDX-License-Identifier: Apache-2.0
"""Signals during a call that does not return to Python: noticed at once, the second ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ms_longctx.train.interrupt import StopRequest

REPOSITORY = Path(__file__).parents[2]

# time.sleep releases the GIL and resumes after a signal, as a running graph does.
PROGRAM = textwrap.dedent(
    """
    import sys, time
    from ms_longctx.train.interrupt import StopRequest
    with StopRequest() as stop:
        print("ready", flush=True)
        for _ in range(int(sys.argv[1])):
            time.sleep(0.9)
            if stop.requested:
                break
    print("stopped" if stop.requested else "finished", stop.signal, flush=True)
    """
)


def start(rounds: int, **options: bool) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(rounds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        **options,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_answered_and_the_loop_ends(number: signal.Signals) -> None:
    process = start(30)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert out == f"stopped {int(number)}\n" and process.returncode == 0
    assert "finishing this step" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_at_once(number: signal.Signals) -> None:
    process = start(30)
    process.send_signal(number)
    time.sleep(0.1)
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number and time.monotonic() - sent < 0.5
    assert out == "" and "stopping at once" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_the_terminal_sends(number: signal.Signals) -> None:
    """A Ctrl-C goes to the whole group; MindSpore's handler makes SIGTERM of it, which the process sends itself."""
    process = start(30, start_new_session=True)
    witness = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(witness), number)  # what the terminal does beside
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == f"stopped {int(number)}\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(witness), 0)


def test_without_signal_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
    assert not stop.requested and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
