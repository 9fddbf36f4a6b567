# SPDX-License-Identifier: Apache-2.0
"""Stored samples to the four batch columns; packing several documents into a row belongs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ms_longctx.data.labels import IGNORE, shift_labels

#: Columns of a batch, each ``(batch, seq_len)`` int32, in this order.
COLUMNS = ("input_ids", "labels", "position_ids", "document_ids")
#: ``document_ids`` of padding.
PADDING = -1


@dataclass(frozen=True)
class Collator:
    """Fills rows of fixed length.

    Args:
        seq_len: columns of a row.
        pad_id: ``input_ids`` of padding.
    """

    seq_len: int
    pad_id: int

    def __call__(
        self, tokens: Sequence[np.ndarray], runs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return ``input_ids``, ``labels``, ``position_ids``, ``document_ids``: int32 ``(samples, seq_len)``.

        Args:
            tokens: an int32 array for each sample.
            runs: supervised stretches of each, see :func:`ms_longctx.data.labels.supervised_mask`. Their
                sum is the length of the document, at most ``seq_len``; with length 0 the row is all padding.
        """
        shape = (len(tokens), self.seq_len)
        input_ids = np.full(shape, self.pad_id, dtype=np.int32)
        labels = np.full(shape, IGNORE, dtype=np.int32)
        position_ids = np.zeros(shape, dtype=np.int32)
        document_ids = np.full(shape, PADDING, dtype=np.int32)
        positions = np.arange(self.seq_len, dtype=np.int32)
        for row, (document, stretches) in enumerate(zip(tokens, runs, strict=True)):
            length = int(stretches.sum())
            input_ids[row, :length] = document[:length]
            labels[row, :length] = shift_labels(document[:length], stretches)
            position_ids[row, :length] = positions[:length]
            document_ids[row, :length] = 0
        return input_ids, labels, position_ids, document_ids


def filler_sample() -> tuple[np.ndarray, np.ndarray]:
    """A sample that becomes a row of padding: MindSpore stores no empty array, so one token stands unused."""
    return np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
