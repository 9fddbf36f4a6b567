# SPDX-License-Identifier: Apache-2.0
"""Embedding and output head in int8."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.model import EMBEDDING, HEAD, LAST_NORM, normed
from ms_longctx.quant.rounding import compensated_int8, inverse_factor
from ms_longctx.quant.weights import Int8Weight, round_int8, row_scales

Floats = NDArray[np.float32]
_CHUNK = 4096  # rows: the table is large, its copies should not be
_TOKENS = 16384  # for the second moments
# A tied table is an embedding too, whose error counts in all directions alike: more damping, less compensation.
_DAMPING, _TIED_DAMPING = 0.01, 1.0


def round_rows(source: TensorSource, states: NDArray[np.floating]) -> dict[str, Int8Weight]:
    """The embedding to nearest, the head by GPTQ; one table for both where they are tied.

    Args:
        source: the model.
        states: hidden states ``(rows, length, hidden)`` of the calibration text before the last norm.

    Raises:
        MsLongctxError: values that are not finite or beyond fp16.
    """
    gram = _moments(source, states)
    if source.config.tie_word_embeddings:
        return {EMBEDDING: _round(_read(source, EMBEDDING), inverse_factor(gram, _TIED_DAMPING))}
    return {
        EMBEDDING: _round(_read(source, EMBEDDING)),
        HEAD: _round(_read(source, HEAD), inverse_factor(gram, _DAMPING)),
    }


def _read(source: TensorSource, name: str) -> Floats:
    table: Floats = source.read(name).astype(np.float32, copy=False)
    return table


def _round(table: Floats, upper: Floats | None = None) -> Int8Weight:
    scales = row_scales(table)
    q = np.empty(table.shape, np.int8)
    for start in range(0, len(table), _CHUNK):
        part = slice(start, start + _CHUNK)
        rows, grid = table[part], scales[part]
        q[part] = (round_int8(rows, grid) if upper is None else compensated_int8(rows, grid, upper)).q
    return Int8Weight(q, scales)


def _moments(source: TensorSource, states: NDArray[np.floating]) -> Floats:
    """``sum x x^T (hidden, hidden)`` over some of the inputs ``x`` of the head."""
    flat = states.reshape(-1, states.shape[-1])
    some = flat[:: max(1, len(flat) // _TOKENS)].astype(np.float32)
    x = normed(source, some, source.read(LAST_NORM).astype(np.float32))
    gram: Floats = x.T @ x
    return gram
