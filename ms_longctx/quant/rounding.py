# SPDX-License-Identifier: Apache-2.0
"""Choices of int4 values that look at the inputs: AWQ's clipping and GPTQ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ms_longctx.quant.weights import (
    INT4_MAX,
    INT8_MAX,
    Int4Weight,
    Int8Weight,
    group_range,
    quantize_int4,
    quantize_int8,
)

Floats = NDArray[np.float32]
Ranges = tuple[Floats, Floats]
DAMPING = 0.01  # share of the mean diagonal that is added to the diagonal, as GPTQ does
_BLOCK = 128  # columns of int8 that are rounded before what is behind them is corrected
SHRINK = tuple(1 - 0.05 * step for step in range(11))  # AutoAWQ tries down to half as well


def inverse_factor(gram: Floats, damping: float = DAMPING) -> Floats:
    """Upper triangular U with ``U^T U`` the inverse of the damped Hessian. Features that are always 0 stay apart.

    Args:
        gram: second moments of the inputs ``(k, k)``.
        damping: share of the mean diagonal that is added to the diagonal.
    """
    hessian = gram.astype(np.float64)
    diagonal = np.diag(hessian).copy()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean or 1.0
    np.fill_diagonal(hessian, diagonal + damping * mean)
    inverse = np.linalg.inv(hessian)
    upper: Floats = np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)
    return upper


class Moments:
    """Second moments of the inputs of a unit and what follows from them, computed once for all its matrices.

    Args:
        gram: ``sum x x^T (k, k)``.
    """

    def __init__(self, gram: Floats) -> None:
        self.gram = gram

    @cached_property
    def factor(self) -> Floats:
        """:func:`inverse_factor` of ``gram``."""
        return inverse_factor(self.gram)

    def scaled(self, scales: Floats) -> Moments:
        """Those of ``x / scales``, with the damping of ``x``."""
        result = Moments(self.gram / np.outer(scales, scales))
        result.factor = self.factor * scales
        return result


def clipped_ranges(w: Floats, gram: Floats, group: int) -> Ranges:
    """The range of each group, clipped to 100 % ... 50 %, of the smallest output error of rounding to nearest.

    The error of a group is ``d G d^T`` with the block of G that belongs to its columns (AWQ's ``auto_clip``).

    Args:
        w: fp32 ``(n, k)``.
        gram: second moments of the inputs ``(k, k)``.
        group: columns a group.
    """
    low, high = group_range(w, group)
    best = np.full(low.shape, np.inf, np.float32)
    chosen = np.ones(low.shape, np.float32)
    for shrink in SHRINK:
        shrink32 = np.float32(shrink)
        difference = quantize_int4(w, group, (low * shrink32, high * shrink32)).values() - w
        error = _group_errors(difference, gram, group)
        better = error < best
        best[better], chosen[better] = error[better], shrink32
    return low * chosen, high * chosen


def _group_errors(difference: Floats, gram: Floats, group: int) -> Floats:
    starts = range(0, difference.shape[1], group)
    errors = np.empty((len(difference), len(starts)), np.float32)
    for index, start in enumerate(starts):
        part = difference[:, start : start + group]
        block = gram[start : start + group, start : start + group]
        errors[:, index] = np.einsum("ij,ij->i", part @ block, part)
    return errors


def gptq_int4(w: Floats, moments: Moments, group: int, clip: bool = False) -> Int4Weight:
    """GPTQ (arXiv 2210.17323, algorithm 1): round column by column and let the columns to come make up for it.

    Args:
        w: fp32 ``(n, k)``.
        moments: of the inputs.
        group: columns a group; its grid is chosen when its first column is reached, from what is left to round there.
        clip: choose grids by :func:`clipped_ranges`; else they reach from the smallest to the largest value.
    """
    parts: list[Int4Weight] = []

    def grid(block: Floats) -> _Grid:
        columns = slice(len(parts) * group, len(parts) * group + block.shape[1])
        ranges = clipped_ranges(block, moments.gram[columns, columns], group) if clip else None
        parts.append(quantize_int4(block, group, ranges))
        return _Grid(parts[-1].scales[:, 0].astype(np.float32), parts[-1].zeros[:, 0].astype(np.float32), 0, INT4_MAX)

    q = _gptq(w, moments.factor, group, grid).astype(np.uint8)
    scales, zeros = np.concatenate([p.scales for p in parts], 1), np.concatenate([p.zeros for p in parts], 1)
    return Int4Weight(q, scales, zeros, group)


def gptq_int8(w: Floats, moments: Moments) -> Int8Weight:
    """The same on the symmetric grid of :func:`~ms_longctx.quant.weights.quantize_int8`, one scale a row."""
    return compensated_int8(w, quantize_int8(w).scales, moments.factor)


def compensated_int8(w: Floats, scales: Floats, upper: Floats) -> Int8Weight:
    """GPTQ on a given grid; each row is on its own, so a large matrix can come in parts.

    Args:
        w: fp32 ``(n, k)``.
        scales: fp32 ``(n,)``; a row of scale 0 becomes 0.
        upper: :func:`inverse_factor` ``(k, k)``.
    """
    steps = np.where(scales > 0, scales, 1).astype(np.float32)
    grid = _Grid(steps, np.zeros_like(steps), -INT8_MAX, INT8_MAX)
    return Int8Weight(_gptq(w, upper, _BLOCK, lambda block: grid).astype(np.int8), scales)


@dataclass(frozen=True)
class _Grid:
    """``(q - zeros) * scales`` with q from ``low`` to ``high``; a scale and a zero point a row."""

    scales: Floats
    zeros: Floats
    low: int
    high: int


def _gptq(w: Floats, upper: Floats, size: int, grid: Callable[[Floats], _Grid]) -> Floats:
    """q ``(n, k)``; ``grid`` gives that of the next ``size`` columns from what is left to round there."""
    rest = w.astype(np.float32, copy=True)
    q = np.empty_like(rest)
    for start in range(0, w.shape[1], size):
        end = min(start + size, w.shape[1])
        block = rest[:, start:end]
        q[:, start:end], errors = _round_block(block, upper[start:end, start:end], grid(block))
        rest[:, end:] -= errors @ upper[start:end, end:]
    return q


def _round_block(block: Floats, upper: Floats, grid: _Grid) -> tuple[Floats, Floats]:
    """Values of the columns of a block, and what each column leaves to the columns behind the block."""
    block = np.ascontiguousarray(block.T)  # by columns: each is read and changed as a whole
    q, errors = np.empty_like(block), np.empty_like(block)
    for j, column in enumerate(block):
        q[j] = np.clip(np.rint(column / grid.scales) + grid.zeros, grid.low, grid.high)
        errors[j] = (column - (q[j] - grid.zeros) * grid.scales) / upper[j, j]
        block[j + 1 :] -= np.outer(upper[j, j + 1 :], errors[j])
    return q.T, np.ascontiguousarray(errors.T)
