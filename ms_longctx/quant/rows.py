# SPDX-License-Identifier: Apache-2.0
"""Embedding and output head in int8.

The columns of a real model's table differ in size by ten and more, and the largest decide the scale of every row. So
columns get factors, powers of two: the stored fp16 values stay exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.model import EMBEDDING, HEAD, LAST_NORM, normed
from ms_longctx.quant.rounding import compensated_int8, inverse_factor
from ms_longctx.quant.scaling import moment_error
from ms_longctx.quant.weights import Int8Weight, round_int8, row_scales

Floats = NDArray[np.float32]
_CHUNK = 4096  # rows or tokens: they are many, and copies of them all should not be
_TOKENS = 16384  # for the second moments
_SOME_ROWS = 2048  # on which factors are compared
_POWERS = (0.0, 0.25, 0.5, 0.75)


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
        return {EMBEDDING: _round_head(_read(source, EMBEDDING), gram)}
    embedding = _read(source, EMBEDDING)
    return {
        EMBEDDING: round_int8(embedding, row_scales(embedding)),
        HEAD: _round_head(_read(source, HEAD), gram),
    }


def _read(source: TensorSource, name: str) -> Floats:
    table: Floats = source.read(name).astype(np.float32, copy=False)
    return table


def _round_head(table: Floats, gram: Floats) -> Int8Weight:
    some = np.ascontiguousarray(table[:: max(1, len(table) // _SOME_ROWS)])
    sizes = _column_sizes(table)
    candidates = [_factors(sizes, power) for power in _POWERS]
    errors = [moment_error(_compensated(some, gram, f).values() - some, gram) for f in candidates]
    return _compensated(table, gram, candidates[int(np.argmin(errors))])


def _column_sizes(table: Floats) -> Floats:
    """Root mean squares ``(k,)``."""
    total = np.zeros(table.shape[1], np.float64)
    for start in range(0, len(table), _CHUNK):
        total += np.square(table[start : start + _CHUNK]).sum(0, dtype=np.float64)
    return np.sqrt(total / len(table)).astype(np.float32)


def _factors(sizes: Floats, power: float) -> Floats:
    """``2^n`` of columns larger than the median, closest to their ratio to that power."""
    ratios = np.maximum(sizes / max(float(np.median(sizes)), 1e-30), 1)
    factors: Floats = np.exp2(np.round(power * np.log2(ratios))).astype(np.float32)
    return factors


def _compensated(table: Floats, gram: Floats, factors: Floats) -> Int8Weight:
    upper = inverse_factor(gram * np.outer(factors, factors))
    q, scales = np.empty(table.shape, np.int8), np.empty(len(table), np.float32)
    for start in range(0, len(table), _CHUNK):
        part = slice(start, start + _CHUNK)
        rows = table[part] / factors
        scales[part] = row_scales(rows)
        q[part] = compensated_int8(rows, scales[part], upper).q
    return Int8Weight(q, scales, factors)


def _moments(source: TensorSource, states: NDArray[np.floating]) -> Floats:
    """``sum x x^T (hidden, hidden)`` over some of the inputs ``x`` of the head."""
    flat = states.reshape(-1, states.shape[-1])
    some = flat[:: max(1, len(flat) // _TOKENS)]
    norm = source.read(LAST_NORM).astype(np.float32)
    gram: Floats = np.zeros((flat.shape[1], flat.shape[1]), np.float32)
    for start in range(0, len(some), _CHUNK):
        x = normed(source, some[start : start + _CHUNK].astype(np.float32), norm)
        gram += x.T @ x
    return gram
