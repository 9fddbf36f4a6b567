# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: the first asks the training loop to save and stop, the second ends the process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The same signal reaches two processes within a few milliseconds.
_WITNESS_SECONDS = 0.2


class StopRequest:
    """Context manager that turns signals into a flag to read between two steps.

    A Python signal handler runs only after a running graph has returned, which can take minutes. Python's C
    handler writes the signal number into a socket at once, however; a thread reads it there, so that the user
    gets an answer to the first Ctrl-C immediately and a second one works in the middle of a step.

    While a graph runs, MindSpore's own handler turns SIGINT into SIGTERM. The terminal sends Ctrl-C to all processes of
    the group, however: a process that waits beside this one and dies of it tells which of the two it was. (A SIGINT
    sent to this process alone while a graph runs still counts as SIGTERM.)

    Must be entered in the main thread.

    Args:
        quiet: say nothing on standard error; of the workers of a job only one need answer.

    Attributes:
        signal: number of the signal that has arrived, or ``None``.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._tell = _ignore_text if quiet else _tell
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        self._witness = _start_witness()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if self._witness is not None:
            self._witness.kill()
            self._witness.communicate()

    def _watch(self) -> None:
        while data := self._reader.recv(1):
            number = data[0]
            if number not in _SIGNALS:
                continue
            if number == signal.SIGTERM and self._is_interrupt():
                number = signal.SIGINT
            if self.requested:
                self._tell("stopping at once; the last complete checkpoint stays valid")
                os._exit(128 + number)
            self.signal = number
            self._tell("finishing this step, then saving; once more stops at once")

    def _is_interrupt(self) -> bool:
        """Whether the terminal sent the signal that arrived as SIGTERM."""
        if self._witness is None:
            return False
        try:
            return self._witness.wait(0 if self.requested else _WITNESS_SECONDS) == -signal.SIGINT
        except subprocess.TimeoutExpired:
            return False


def _start_witness() -> subprocess.Popen[bytes] | None:
    """A process that ends with this one, or of a signal to its group; ``None`` where there is no ``cat``."""
    try:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:
        return None


def _tell(message: str) -> None:
    sys.stderr.write(f"\n{message}\n")
    sys.stderr.flush()


def _ignore_text(message: str) -> None:
    """Another worker says it."""


def _ignore(number: int, frame: Any) -> None:
    """Present so that Python's C handler, which feeds the wake-up socket, is installed."""
