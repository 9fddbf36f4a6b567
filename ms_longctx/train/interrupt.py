# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: the first asks the training loop to save and stop, the second ends the process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager that turns signals into a flag to read between two steps.

    A Python signal handler runs only after a running graph has returned, which can take minutes. Python's C
    handler writes the signal number into a socket at once, however; a thread reads it there, so that the user
    gets an answer to the first Ctrl-C immediately and a second one works in the middle of a step.

    MindSpore turns a Ctrl-C that arrives while a graph runs into SIGTERM, so the two cannot be told apart.

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

    def _watch(self) -> None:
        while data := self._reader.recv(1):
            number = data[0]
            if number not in _SIGNALS:
                continue
            if self.requested:
                self._tell("stopping at once; the last complete checkpoint stays valid")
                os._exit(128 + number)
            self.signal = number
            self._tell("finishing this step, then saving; once more stops at once")


def _tell(message: str) -> None:
    sys.stderr.write(f"\n{message}\n")
    sys.stderr.flush()


def _ignore_text(message: str) -> None:
    """Another worker says it."""


def _ignore(number: int, frame: Any) -> None:
    """Present so that Python's C handler, which feeds the wake-up socket, is installed."""
