# SPDX-License-Identifier: Apache-2.0
"""Choices of int4 values that look at the inputs: AWQ's clipping and GPTQ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ms_longctx.quant.weights import INT4_MAX, Int4Weight, group_range, quantize_int4

Floats = NDArray[np.float32]
SHRINK = tuple(1 - 0.05 * step for step in range(11))  # AutoAWQ tries down to half as well


def clipped_int4(w: Floats, gram: Floats, group: int) -> Int4Weight:
    """Round to nearest, each group over the range, clipped to 100 % ... 50 %, of the smallest output error.

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
    return quantize_int4(w, group, (low * chosen, high * chosen))


def _group_errors(difference: Floats, gram: Floats, group: int) -> Floats:
    starts = range(0, difference.shape[1], group)
    errors = np.empty((len(difference), len(starts)), np.float32)
    for index, start in enumerate(starts):
        part = difference[:, start : start + group]
        block = gram[start : start + group, start : start + group]
        errors[:, index] = np.einsum("ij,ij->i", part @ block, part)
    return errors


def gptq_int4(w: Floats, gram: Floats, group: int, damping: float = 0.01) -> Int4Weight:
    """GPTQ (arXiv 2210.17323, algorithm 1): round column by column and let the columns to come make up for it.

    Args:
        w: fp32 ``(n, k)``.
        gram: second moments of the inputs ``(k, k)``; the Hessian up to a factor.
        group: columns a group; its grid is chosen when its first column is reached.
        damping: share of the mean diagonal that is added to the diagonal.
    """
    upper = _inverse_factor(gram, damping)
    rest = w.astype(np.float32, copy=True)
    parts: list[Int4Weight] = []
    for start in range(0, w.shape[1], group):
        end = min(start + group, w.shape[1])
        block = rest[:, start:end]
        template = quantize_int4(block, group)
        q, errors = _round_block(block, upper[start:end, start:end], template)
        rest[:, end:] -= errors @ upper[start:end, end:]
        parts.append(Int4Weight(q, template.scales, template.zeros, group))
    q, scales, zeros = (np.concatenate([getattr(p, name) for p in parts], 1) for name in ("q", "scales", "zeros"))
    return Int4Weight(q, scales, zeros, group)


def _round_block(block: Floats, upper: Floats, grid: Int4Weight) -> tuple[NDArray[np.uint8], Floats]:
    """Values of the columns of one group, and what each column leaves to the columns behind the group."""
    scales, zeros = grid.scales[:, 0].astype(np.float32), grid.zeros[:, 0].astype(np.float32)
    block = np.ascontiguousarray(block.T)  # by columns: each is read and changed as a whole
    q = np.empty(block.shape, np.uint8)
    errors = np.empty_like(block)
    for j, column in enumerate(block):
        values = np.clip(np.rint(column / scales) + zeros, 0, INT4_MAX)
        errors[j] = (column - (values - zeros) * scales) / upper[j, j]
        block[j + 1 :] -= np.outer(upper[j, j + 1 :], errors[j])
        q[j] = values
    return np.ascontiguousarray(q.T), np.ascontiguousarray(errors.T)


def _inverse_factor(gram: Floats, damping: float) -> Floats:
    """Upper triangular U with ``U^T U`` the inverse of the damped Hessian. Features that are always 0 stay apart."""
    hessian = gram.astype(np.float64)
    diagonal = np.diag(hessian).copy()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean or 1.0
    np.fill_diagonal(hessian, diagonal + damping * mean)
    inverse = np.linalg.inv(hessian)
    upper: Floats = np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)
    return upper
