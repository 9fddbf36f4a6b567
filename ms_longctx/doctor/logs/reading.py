# SPDX-License-Identifier: Apache-2.0
"""Log files: finding them, reading them piece by piece, their ranks and the times of their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from ms_longctx.errors import MsLongctxError

CHUNK = 256 * 1024
LONGEST_LINE = 8192

_NO_LOGS = {
    ".exit",
    ".pid",
    ".safetensors",
    ".ckpt",
    ".npy",
    ".npz",
    ".png",
    ".so",
    ".gz",
    ".zip",
    ".mindrecord",
    ".db",
    ".pyc",
}
_RANK = re.compile(r"(?:^|[_.\-/])(?:worker|rank|device|log|node)[_.\-]?(\d+)(?=[_.\-/]|$)")

# 2026-11-30-10:04:09.261.455 (MindSpore, CANN), 2026-11-30 10:04:09,261 (Python), 2026-11-30T10:04:09Z
_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[-T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3})(?:\.?(\d{3}))?)?")
# Control characters that terminals and progress bars do not use.
_CONTROL = re.compile(rb"[\x01-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_EPOCH = re.compile(r'"time": (\d{10}(?:\.\d+)?)')


def find_logs(paths: Sequence[str]) -> list[Path]:
    """The files that were named, and the text files of the directories that were.

    Raises:
        MsLongctxError: a path does not exist or is no text file, or a directory holds none.
    """
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file))
            if not inside:
                raise MsLongctxError(f"--log: directory {path} holds no text file; expected logs of a run")
            found += inside
        elif path.is_file():
            if not _holds_text(path):
                raise MsLongctxError(f"--log: {path} is not a text file; expected a log, or a directory of logs")
            found.append(path)
        else:
            raise MsLongctxError(f"--log: {path} does not exist; expected a log file or a directory of logs")
    return list(dict.fromkeys(found))


def _is_text(path: Path) -> bool:
    return path.suffix not in _NO_LOGS and _holds_text(path)


def _holds_text(path: Path) -> bool:
    """Whether the file begins as text, of whatever encoding that keeps ASCII: one byte of ten at random is no text."""
    with path.open("rb") as file:
        start = file.read(4096)
    return b"\0" not in start and len(_CONTROL.findall(start)) <= 0.03 * len(start)


def rank_of(path: Path) -> int | None:
    """The rank that a file's name, or that of its directory, tells: ``worker_3.log``, ``rank_3/out.txt``."""
    for part in (path.stem, path.name, path.parent.name):
        if found := _RANK.search(part):
            return int(found[1])
    return None


def read_chunks(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Groups of ``(line number from 1, line)`` of about :data:`CHUNK` bytes; a file of any size needs that much.

    A line longer than :data:`LONGEST_LINE` comes in pieces of one number. Bytes that are not UTF-8 are replaced.
    """
    lines: list[tuple[int, str]] = []
    size, number = 0, 1
    with path.open("rb") as file:
        while piece := file.readline(LONGEST_LINE):
            lines.append((number, piece.decode("utf-8", errors="replace").rstrip("\r\n")))
            number += piece.endswith(b"\n")
            size += len(piece)
            if size >= CHUNK:
                yield lines
                lines, size = [], 0
    if lines:
        yield lines


def time_of(line: str) -> float | None:
    """Seconds since 1970 of the time that a line carries (local time as it stands), if any."""
    if found := _STAMP.search(line):
        *whole, milliseconds, microseconds = found.groups()
        try:
            moment = datetime(*(int(part) for part in whole))  # type: ignore[arg-type]
        except ValueError:
            return None
        return moment.timestamp() + int(milliseconds or 0) / 1e3 + int(microseconds or 0) / 1e6
    found = _EPOCH.search(line) if '"time"' in line else None
    return float(found[1]) if found else None
