# SPDX-License-Identifier: Apache-2.0
"""Reads the key-value part of a GGUF file: a tokenizer must not wait for the weights.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ms_longctx.errors import MsLongctxError

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all metadata of ``path``: numbers, strings, lists of strings and numpy arrays by key.

    Raises:
        MsLongctxError: not a GGUF file of version 2 or 3, or cut short.
    """
    with path.open("rb") as stream:
        start = stream.read(4)
        if start != b"GGUF":
            raise MsLongctxError(f"{path} is not a GGUF file: it starts with {start!r}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content, path).metadata()


class _Reader:
    """Walks through the mapped file from just after its magic."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content = content
        self._path = path
        self._position = 4

    def metadata(self) -> dict[str, Any]:
        version, _, count = self._unpack("<IQQ")
        if version not in (2, 3):
            raise MsLongctxError(f"{self._path} is GGUF version {version}; versions 2 and 3 can be read")
        return {self._string(): self._value() for _ in range(count)}

    def _value(self) -> Any:
        (kind,) = self._unpack("<I")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        kind, count = self._unpack("<IQ")
        return [self._string() for _ in range(count)] if kind == _STRING else self._numbers(kind, count)

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode("utf-8", "replace")

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:
            raise MsLongctxError(f"{self._path}: GGUF value of unknown type {kind}; the file is damaged")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._content):
            raise MsLongctxError(
                f"{self._path} is not a complete GGUF file: it ends at byte {len(self._content)} "
                f"inside its metadata, {size} bytes are expected at {self._position}"
            )
        taken = self._content[self._position : end]
        self._position = end
        return taken
