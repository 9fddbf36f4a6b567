#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the program of one rank for msrun.sh and mpirun.sh: ``run_rank.py LOG_DIR PROGRAM ARGUMENTS...``

It leaves in LOG_DIR ``worker_RANK.log`` (what the program prints; msrun itself writes it), ``worker_RANK.pid``
("host pid") and at the end ``worker_RANK.exit`` ("time code rank"; the code of a process killed by signal N is
128 + N), from which the scripts see who failed first. SIGINT and SIGUSR1 reach the program as SIGINT, so that it saves;
then this process waits for the other ranks of this host, because launchers kill all when the first one ends.

Needs nothing but Python: it must work where the rest does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

WAIT_SECONDS = 120.0


def main(argv: list[str]) -> int:
    """Run the program; its exit code."""
    folder, command = Path(argv[1]), [sys.executable, *argv[2:]]
    rank = os.environ.get("MS_NODE_ID") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if os.environ.get("MS_ROLE") == "MS_SCHED" or rank is None:
        os.execv(command[0], command)  # msrun's scheduler
    name = f"worker_{rank}"
    by_mpirun = "MS_ROLE" not in os.environ
    if by_mpirun:
        log = (folder / f"{name}.log").open("wb")
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    stopping: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopping.append(number)
        # mpirun signals process groups: its SIGTERM has reached the program too.
        if child and not (by_mpirun and number == signal.SIGTERM):
            if number == signal.SIGTERM:
                child[0].send_signal(signal.SIGTERM)
            else:
                _interrupt(child[0])

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    _write(folder / f"{name}.pid", f"{socket.gethostname()} {os.getpid()}\n")
    child.append(subprocess.Popen(command, preexec_fn=_ignore_usr1))
    code = child[0].wait()
    code = 128 - code if code < 0 else code
    _write(folder / f"{name}.exit", f"{time.time():.6f} {code} {rank}\n")
    if stopping:
        _wait_for_others(folder)
    return code


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    """SIGINT as a terminal sends it, to the group: by a helper in it the program knows Ctrl-C from SIGTERM."""
    if os.getpgrp() != os.getpid():  # not a group of this rank alone
        child.send_signal(signal.SIGINT)
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def _ignore_usr1() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _wait_for_others(folder: Path) -> None:
    """Return when every rank of this host has ended, or after :data:`WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline and any(_runs(path) for path in folder.glob("worker_*.pid")):
        time.sleep(0.1)


def _runs(path: Path) -> bool:
    if path.with_suffix(".exit").exists():
        return False
    host, pid = path.read_text().split()
    if host != socket.gethostname():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), 0)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv))
