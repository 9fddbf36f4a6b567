# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job for tests, and never leaves one behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def free_port() -> int:
    """A port that nobody uses now, on any address of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """The environment without a launcher's variables: one thread a process, this source tree first."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("MS_ROLE", "MS_WORKER", "MS_SCHED", "OMPI_", "PMI"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3", **more}


@dataclass
class Rank:
    """One process; its output goes to a file, which cannot fill up as a pipe does."""

    process: subprocess.Popen
    output: Path
    ended: float = 0.0

    def text(self) -> str:
        return self.output.read_text(errors="replace")


@dataclass
class Job:
    """``size`` processes that run ``script RANK SIZE JOB ARGUMENTS...``; leaving the context kills what still runs.

    ``first`` starts these ranks instead of all; :meth:`start` adds others.
    """

    script: str
    size: int
    arguments: Sequence[str] = ()
    name: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    first: Sequence[int] | None = None
    ranks: list[Rank] = field(default_factory=list)

    def __enter__(self) -> Job:
        self.started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size) if self.first is None else self.first:
            self.start(rank)
        return self

    def start(self, rank: int) -> Rank:
        output = Path(self._folder.name) / f"{len(self.ranks)}.txt"
        command = [sys.executable, str(HERE / self.script), str(rank), str(self.size), self.name, *self.arguments]
        with output.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(), cwd=self._folder.name
            )
        self.ranks.append(Rank(process, output))
        return self.ranks[-1]

    def kill(self, rank: int) -> None:
        self.ranks[rank].process.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Exit codes, once all have ended. Fails after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while running := [rank for rank in self.ranks if rank.ended == 0]:
            for rank in running:
                if rank.process.poll() is not None:
                    rank.ended = time.monotonic()
            assert time.monotonic() < deadline, f"not all processes ended in {timeout} s:\n{self.output()}"
            time.sleep(0.02)
        return [rank.process.returncode for rank in self.ranks]

    def wait_until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Return when the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"nothing in {timeout} s:\n{self.output()}"
            time.sleep(0.02)

    def output(self) -> str:
        return "\n".join(f"--- rank {i}\n{rank.text()}" for i, rank in enumerate(self.ranks))

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
        self._folder.cleanup()


def check(job: Job, timeout: float = 60.0) -> None:
    """Run a job to its end; every process must end with 0."""
    with job:
        codes = job.wait(timeout)
        assert codes == [0] * len(codes), job.output()


def segments(job: str) -> list[str]:
    """Names of a job in /dev/shm."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"ms_longctx.{job}*"))
