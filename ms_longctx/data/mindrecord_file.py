# SPDX-License-Identifier: Apache-2.0
"""Writes samples into MindRecord files that are no larger than they need to be.

MindSpore's defaults (16 MB of header, 32 MB pages) make every file at least 50 MB. Header and pages are sized
here from what is to be stored.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspore.mindrecord import FileWriter

from ms_longctx.data.convert import Sample
from ms_longctx.errors import MsLongctxError

SCHEMA = {"input_ids": {"type": "int32", "shape": [-1]}, "runs": {"type": "int32", "shape": [-1]}}
_SMALLEST_HEADER, _SMALLEST_PAGE, _LARGEST_PAGE = 1 << 14, 1 << 15, 1 << 28
_PAGE_ENTRY = 320  # bytes the header spends on a page, generously
_ROWS_A_CALL = 512


@dataclass(frozen=True)
class FileSizes:
    """Bytes of a page and of the header; MindSpore wants them equal in all files of a set."""

    page: int
    header: int


def file_sizes(largest: int, total: int, rows: int) -> FileSizes:
    """Return sizes that suffice for a file, or for each file of a set.

    Args:
        largest: integers of the largest sample, tokens and runs together.
        total: integers of all samples of a file.
        rows: samples of a file.
    """
    row = _stored_bytes(largest, 1)
    everything = _stored_bytes(total, rows)
    # 16 rows or more a page, so that little is lost at their ends, and a few hundred pages at most.
    page = max(_SMALLEST_PAGE, _power_of_two(max(min(16 * row, everything), everything // 256)))
    page = min(page, _LARGEST_PAGE)
    pages = everything // max(page - row, 1) + rows * 32 // page + 3
    return FileSizes(page, max(_SMALLEST_HEADER, _power_of_two(2048 + pages * _PAGE_ENTRY)))


def write_mindrecord(path: Path, samples: Sequence[Sample], sizes: FileSizes) -> None:
    """Write ``samples`` to ``path``, its index to ``path.db``. A file cannot be renamed later, only moved.

    Raises:
        MsLongctxError: there is no space left.
    """
    try:
        _write(path, samples, sizes)
    except RuntimeError as error:  # MindSpore does not say why
        if shutil.disk_usage(path.parent).free < sizes.header + 2 * sizes.page:
            raise MsLongctxError(f"no space left in {path.parent}; free some, or choose another place") from error
        raise


def _write(path: Path, samples: Sequence[Sample], sizes: FileSizes) -> None:
    writer = FileWriter(str(path), shard_num=1, overwrite=True)
    writer.set_page_size(sizes.page)
    writer.set_header_size(sizes.header)
    writer.add_schema(SCHEMA, "ms_longctx sample")
    for start in range(0, len(samples), _ROWS_A_CALL):
        writer.write_raw_data(
            [{"input_ids": tokens, "runs": runs} for tokens, runs in samples[start : start + _ROWS_A_CALL]]
        )
    writer.commit()
    for file in (path, path.with_name(path.name + ".db")):
        file.chmod(0o666 & ~_umask())  # MindSpore makes them for the owner alone


def _umask() -> int:
    """What this process takes from the modes of new files; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _stored_bytes(integers: int, rows: int) -> int:
    """Upper bound: MindRecord stores an int32 in 1, 2 or 4 bytes and says which in 2 bits."""
    return integers * 9 // 2 + 256 * rows


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length()
