# SPDX-License-Identifier: Apache-2.0
"""Rounding of matrices ``(out_features, in_features)`` to int8 and int4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.quant import PackedMatrix, packable

Floats = NDArray[np.float32]
INT8_MAX, INT4_MAX = 127, 15


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """``w[i, j] = q[i, j] * scales[i]``: int8 ``(n, k)`` and fp32 ``(n,)``; times ``factors[j]``, where there are any.

    Factors are powers of two, at least 1.
    """

    q: NDArray[np.int8]
    scales: Floats
    factors: Floats | None = None

    def values(self, rows: NDArray[np.integer] | slice = slice(None)) -> Floats:
        """The weight in fp32, or some rows of it."""
        result: Floats = self.q[rows].astype(np.float32) * self.scales[rows][..., None]
        return result if self.factors is None else result * self.factors

    def packed(self, quantize_inputs: bool = False) -> PackedMatrix:
        """For the kernels; with inputs rounded to int8 as well if wanted."""
        return PackedMatrix.int8(self.q, self.scales, quantize_inputs, self.factors)


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """``w[i, j] = (q[i, j] - zeros[i, g]) * scales[i, g]``, ``g = j // group``.

    Args:
        q: uint8 ``(n, k)``, 0 to 15.
        scales: fp16 ``(n, groups)``; fp32 of other writers where fp16 would change them.
        zeros: uint8 ``(n, groups)``, 0 to 15.
        group: columns that share a scale; the last group of a row may have fewer.
    """

    q: NDArray[np.uint8]
    scales: NDArray[np.floating]
    zeros: NDArray[np.uint8]
    group: int

    def values(self) -> Floats:
        """The weight in fp32."""
        columns = self.q.shape[1]
        scales = spread(self.scales.astype(np.float32), self.group, columns)
        return (self.q - spread(self.zeros.astype(np.float32), self.group, columns)) * scales

    def packed(self) -> PackedMatrix | None:
        """For the kernels; ``None`` if they cannot read groups of this size, or scales that fp16 cannot hold."""
        if self.scales.dtype != np.float16 or not packable(self.q.shape[1], self.group):
            return None
        return PackedMatrix.int4(self.q, self.scales, self.zeros, self.group)


Weight = Int8Weight | Int4Weight


def quantize_int8(w: Floats) -> Int8Weight:
    """Symmetric, one scale a row; a row of zeros stays zero."""
    largest = np.abs(_finite(w)).max(1)
    return round_int8(w, largest / np.float32(INT8_MAX))


def round_int8(w: Floats, scales: Floats, factors: Floats | None = None) -> Int8Weight:
    """The nearest values of the grid that ``scales (n,)`` and ``factors (k,)`` span; scale 0 gives 0."""
    rate = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    q = np.rint((w if factors is None else w / factors) * rate[:, None])
    return Int8Weight(np.clip(q, -INT8_MAX, INT8_MAX, out=q).astype(np.int8), scales.astype(np.float32), factors)


def row_scales(w: Floats) -> Floats:
    """The scales of :func:`quantize_int8` rounded up to four significant bits: ``q * scale`` is exact in fp16.

    An embedding or output head rounded so is stored as ordinary fp16, which every program reads, and taken from
    there as int8 without a further error.

    Raises:
        MsLongctxError: values beyond the range of fp16.
    """
    raw = np.maximum(_finite(w).max(1), -w.min(1)) / INT8_MAX
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(raw, 2.0**-30))) - 3, -24))
    scales: Floats = (np.ceil(raw / step) * step).astype(np.float32)
    if scales.max(initial=0) * INT8_MAX > np.finfo(np.float16).max:
        raise MsLongctxError("an embedding or output head has values beyond the range of fp16; keep it: --head fp")
    return scales


def group_range(w: Floats, group: int) -> tuple[Floats, Floats]:
    """Smallest and largest value of each group ``(n, groups)``, widened to include 0 (zero points are 0 to 15)."""
    padded = _finite(w)
    if rest := -w.shape[1] % group:
        padded = np.pad(padded, ((0, 0), (0, rest)))
    split = padded.reshape(len(w), -1, group)
    return np.minimum(split.min(2), 0), np.maximum(split.max(2), 0)


def group_grid(low: Floats, high: Floats) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales and zero points whose 16 values reach from ``low <= 0`` to ``high >= 0``.

    A group of zeros gets scale 1 and stays exactly zero.

    Raises:
        MsLongctxError: a scale beyond the range of fp16.
    """
    exact = (high - low) / INT4_MAX
    with np.errstate(over="ignore"):
        scales = np.where(exact > 0, np.maximum(exact, np.float32(2**-24)), 1).astype(np.float16)
    if not np.isfinite(scales).all():
        raise MsLongctxError(f"a group of weights reaches {exact.max() * INT4_MAX:.3g}: its scale does not fit fp16")
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, INT4_MAX).astype(np.uint8)
    return scales, zeros


def round_int4(w: Floats, scales: NDArray[np.float16], zeros: NDArray[np.uint8], group: int) -> Int4Weight:
    """The nearest values of the grids."""
    columns = w.shape[1]
    q = np.rint(w / spread(scales.astype(np.float32), group, columns))
    q += spread(zeros.astype(np.float32), group, columns)
    return Int4Weight(np.clip(q, 0, INT4_MAX, out=q).astype(np.uint8), scales, zeros, group)


def quantize_int4(w: Floats, group: int, ranges: tuple[Floats, Floats] | None = None) -> Int4Weight:
    """Asymmetric round-to-nearest over groups of columns.

    A group whose elements are all equal gets that value as its scale and is exact to fp16.

    Args:
        w: fp32 ``(n, k)``.
        group: columns a group; the last one of a row may be shorter.
        ranges: what each group should reach, ``(low, high)`` of ``(n, groups)``; ``None``: all of it.
    """
    low, high = group_range(w, group)
    constant = _constant(w, group)
    scales, zeros = group_grid(*(ranges or (low, high)))
    if constant.any():
        value = np.where(high > 0, high, low)[constant]
        scales[constant] = np.where(value == 0, 1, np.maximum(np.abs(value), np.float32(2**-24)))
        zeros[constant] = value < 0
    return round_int4(w, scales, zeros, group)


def spread(parts: NDArray[np.float32], group: int, columns: int) -> Floats:
    """One value a group ``(n, groups)`` -> one a column ``(n, columns)``."""
    return np.repeat(parts, group, 1)[:, :columns]


def _constant(w: Floats, group: int) -> NDArray[np.bool_]:
    starts = np.arange(0, w.shape[1], group)
    equal: NDArray[np.bool_] = np.minimum.reduceat(w, starts, 1) == np.maximum.reduceat(w, starts, 1)
    return equal


def _finite(w: Floats) -> Floats:
    if not np.isfinite(w.sum(dtype=np.float64)):
        raise MsLongctxError("a weight is not finite (NaN or infinity); the model is broken")
    return w
