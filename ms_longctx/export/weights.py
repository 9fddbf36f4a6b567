# SPDX-License-Identifier: Apache-2.0
"""The file of weights that all graphs of an export read: prefill and decode have the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

WEIGHTS = "weights.bin"


class WeightsFile:
    """Writes tensors one after another; what is there already is not written again.

    Args:
        folder: gets ``weights.bin``.
        alignment: every tensor starts at a multiple of it, in bytes; its content is filled up with zeros.
        header: what the file begins with; its length is a multiple of ``alignment``.
        seal: turns the header and each filled tensor into what is written, as encryption does. Positions count bytes
            before it.
    """

    def __init__(
        self, folder: Path, alignment: int, header: bytes = b"", seal: Callable[[bytes], bytes] | None = None
    ) -> None:
        self._alignment, self._seal = alignment, seal
        self._file = (folder / WEIGHTS).open("wb")
        self._places: dict[bytes, int] = {}
        self._end = 0
        if header:
            self._write(header)

    def place(self, content: bytes) -> int:
        """Position of a tensor in the file, in bytes."""
        digest = hashlib.sha256(content).digest()
        if digest not in self._places:
            self._places[digest] = self._end
            self._write(content + bytes(-len(content) % self._alignment))
        return self._places[digest]

    def _write(self, content: bytes) -> None:
        self._file.write(content if self._seal is None else self._seal(content))
        self._end += len(content)

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
