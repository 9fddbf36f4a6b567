# SPDX-License-Identifier: Apache-2.0
"""Writes samples into a MindRecord file that is no larger than it needs to be.

MindSpore's defaults (16 MB of header, 32 MB pages) make every file at least 50 MB. Header and pages are sized
here from the samples, which are all known when a shard is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mindspore.mindrecord import FileWriter

#: A stored sample: tokens int32 ``(n,)`` and runs int32 ``(k,)`` (see :mod:`ms_longctx.data.labels`).
Sample = tuple[np.ndarray, np.ndarray]

SCHEMA = {"input_ids": {"type": "int32", "shape": [-1]}, "runs": {"type": "int32", "shape": [-1]}}
_SMALLEST_HEADER, _SMALLEST_PAGE, _LARGEST_PAGE = 1 << 14, 1 << 15, 1 << 28
_PAGE_ENTRY = 320  # bytes the header spends on a page, generously
_ROWS_A_CALL = 512


def write_mindrecord(path: Path, samples: Sequence[Sample]) -> None:
    """Write ``samples`` to ``path``, its index to ``path.db``. A file cannot be renamed later, only moved."""
    row_bytes = [_stored_bytes(len(tokens) + len(runs)) for tokens, runs in samples]
    page = _page_size(max(row_bytes, default=0), sum(row_bytes))
    writer = FileWriter(str(path), shard_num=1, overwrite=True)
    writer.set_page_size(page)
    writer.set_header_size(_header_size(page, max(row_bytes, default=0), sum(row_bytes), len(samples)))
    writer.add_schema(SCHEMA, "ms_longctx sample")
    for start in range(0, len(samples), _ROWS_A_CALL):
        writer.write_raw_data(
            [{"input_ids": tokens, "runs": runs} for tokens, runs in samples[start : start + _ROWS_A_CALL]]
        )
    writer.commit()


def _stored_bytes(integers: int) -> int:
    """Upper bound of a row: MindRecord stores an int32 in 1, 2 or 4 bytes and says which in 2 bits."""
    return integers * 9 // 2 + 256


def _page_size(largest_row: int, total: int) -> int:
    """Pages hold 16 rows or more, so that little is lost at their ends; there are a few hundred at most."""
    return min(
        max(_SMALLEST_PAGE, _power_of_two(max(min(16 * largest_row, total), total // 256))), _LARGEST_PAGE
    )


def _header_size(page: int, largest_row: int, total: int, rows: int) -> int:
    pages = total // max(page - largest_row, 1) + rows * 32 // page + 3
    return max(_SMALLEST_HEADER, _power_of_two(2048 + pages * _PAGE_ENTRY))


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length()
