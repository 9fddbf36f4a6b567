# SPDX-License-Identifier: Apache-2.0
"""Reads JSON lines files, plain or gzip, in chunks that do not depend on how many processes work on them."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ms_longctx.errors import MsLongctxError

_CHUNK_LINES = 256
_CHUNK_BYTES = 1 << 17
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of one file.

    Attributes:
        file: name for messages.
        first_line: number of the first line, from 1.
        lines: raw lines.
        file_bytes: bytes of the file (as stored, compressed or not) read since the chunk before.
    """

    file: str
    first_line: int
    lines: tuple[bytes, ...]
    file_bytes: int


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Return the files that ``patterns`` (paths, or globs such as ``data/**/*.jsonl.gz``) name, each once.

    Raises:
        MsLongctxError: a pattern names nothing, or a directory.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        named = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not named:
            raise MsLongctxError(f"input {pattern} does not exist; give .jsonl or .jsonl.gz files, or a glob")
        for name in named:
            if Path(name).is_dir():
                raise MsLongctxError(f"input {name} is a directory; give its files, for example '{name}/*.jsonl'")
            files[Path(name)] = None
    return list(files)


def read_chunks(files: Sequence[Path]) -> Iterator[Chunk]:
    """Yield all lines of ``files`` in order.

    Raises:
        MsLongctxError: a file cannot be read, or its gzip stream is damaged.
    """
    for file in files:
        try:
            with file.open("rb") as stored:
                yield from _file_chunks(file, stored)
        except (OSError, EOFError, zlib.error) as error:
            raise MsLongctxError(f"cannot read {file}: {error}") from error


def _file_chunks(file: Path, stored: BinaryIO) -> Iterator[Chunk]:
    is_gzip = stored.read(2) == b"\x1f\x8b"
    stored.seek(0)
    stream = gzip.GzipFile(fileobj=stored) if is_gzip else stored
    lines: list[bytes] = []
    size = position = 0
    first = 1
    for number, line in enumerate(stream, start=1):
        lines.append(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
        size += len(line)
        if len(lines) >= _CHUNK_LINES or size >= _CHUNK_BYTES:
            now = stored.tell() if is_gzip else position + size
            yield Chunk(str(file), first, tuple(lines), now - position)
            lines, size, position, first = [], 0, now, number + 1
    end = stored.seek(0, 2)
    if lines:
        yield Chunk(str(file), first, tuple(lines), end - position)
