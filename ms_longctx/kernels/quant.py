# SPDX-License-Identifier: Apache-2.0
"""Matrices of fp16, int8 and int4 values as the kernels read them (csrc/quant_matrix.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError

FLOAT, INT8, INT8_INPUTS, INT4, HALF = range(5)  # MatrixKind of the kernels; INT8_INPUTS rounds its inputs as well
BLOCK, PIECE = 128, 16


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A weight ``(out_features, in_features)`` that takes two bytes, one byte or half a byte an element.

    Args:
        kind: ``HALF``, ``INT8``, ``INT8_INPUTS`` or ``INT4``.
        shape: ``(n, k)``.
        group: columns that share a scale (int4); k for int8 and fp16.
        values: fp16 or int8 ``(n, k)``, or uint8 ``(n, bytes)`` of int4 in the kernels' order.
        scales: fp32 ``(n,)`` of int8, fp16 ``(n, groups)`` of int4, else ``None``.
        extra: zero points of int4, uint8 ``(n, groups)``; factors of the columns of int8, fp32 ``(k,)``, or ``None``.
    """

    kind: int
    shape: tuple[int, int]
    group: int
    values: NDArray[np.generic]
    scales: NDArray[np.generic] | None = None
    extra: NDArray[np.generic] | None = None

    @classmethod
    def half(cls, w: NDArray[np.float16]) -> PackedMatrix:
        """``w`` itself."""
        rows, columns = w.shape
        return cls(HALF, (rows, columns), columns, np.ascontiguousarray(w, np.float16))

    @classmethod
    def int8(
        cls,
        q: NDArray[np.int8],
        scales: NDArray[np.float32],
        quantize_inputs: bool = False,
        factors: NDArray[np.float32] | None = None,
    ) -> PackedMatrix:
        """``w[i, j] = q[i, j] * scales[i]``, times ``factors[j]`` where given (not with ``quantize_inputs``)."""
        rows, columns = q.shape
        if factors is not None:
            if quantize_inputs:
                raise ValueError("inputs are rounded to int8 without factors")
            factors = np.ascontiguousarray(factors, np.float32)
        kind = INT8_INPUTS if quantize_inputs else INT8
        q, scales = np.ascontiguousarray(q), np.ascontiguousarray(scales, np.float32)
        return cls(kind, (rows, columns), columns, q, scales, factors)

    @classmethod
    def int4(
        cls, q: NDArray[np.uint8], scales: NDArray[np.float16], zeros: NDArray[np.uint8], group: int
    ) -> PackedMatrix:
        """``w[i, j] = (q[i, j] - zeros[i, g]) * scales[i, g]`` with ``g = j // group``; q is 0 to 15.

        Raises:
            MsLongctxError: the kernels cannot read it (:func:`packable`).
        """
        rows, columns = q.shape
        if not packable(columns, group):
            raise MsLongctxError(f"int4 with {columns} columns in groups of {group}: the kernel needs multiples of 16")
        scales, zeros = np.ascontiguousarray(scales, np.float16), np.ascontiguousarray(zeros, np.uint8)
        return cls(INT4, (rows, columns), group, _pack(q), scales, zeros)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(part.nbytes for part in self.arrays())

    def arrays(self) -> list[NDArray[np.generic]]:
        """Values, scales and extra, where there are any."""
        return [part for part in (self.values, self.scales, self.extra) if part is not None]

    def unpack(self) -> NDArray[np.float32]:
        """The weight in fp32."""
        if self.scales is None:
            return self.values.astype(np.float32)
        if self.kind != INT4:
            scaled: NDArray[np.float32] = self.values.astype(np.float32) * self.scales.astype(np.float32)[:, None]
            return scaled if self.extra is None else scaled * self.extra.astype(np.float32)
        assert self.extra is not None
        q = _unpack(self.values.astype(np.uint8, copy=False), self.shape[1])
        spread = [np.repeat(part.astype(np.float32), self.group, 1) for part in (self.extra, self.scales)]
        zeros, scales = (part[:, : self.shape[1]] for part in spread)
        result: NDArray[np.float32] = (q - zeros) * scales
        return result


def packable(columns: int, group: int) -> bool:
    """Whether the kernels read int4 of this form."""
    return columns % PIECE == 0 and group % PIECE == 0


def describe(weight: PackedMatrix | NDArray[np.float32]) -> NDArray[np.int64]:
    """A ``Matrix`` of the kernels; it holds addresses, so keep ``weight`` alive."""
    if isinstance(weight, PackedMatrix):
        parts = [part.ctypes.data for part in weight.arrays()]
        return np.array([weight.kind, weight.group, *parts, 0, 0][:5], np.int64)
    if not weight.flags.c_contiguous:
        raise ValueError("the kernel needs contiguous arrays")
    return np.array([FLOAT, 0, weight.ctypes.data, 0, 0], np.int64)


def make_quant_linear(kind: int, group: int, out_features: int) -> Callable:
    """``linear(x, values[, scales[, extra]])``: ``x (m, k)`` fp32 times the transpose of a packed matrix."""
    from ms_longctx.kernels.custom import operator

    return operator("QuantLinear", lambda x, *parts: [x[0], out_features], lambda x, *parts: x, kind=kind, group=group)


def make_quant_rows(kind: int, group: int, columns: int) -> Callable:
    """``rows(ids, values[, scales[, extra]])``: rows ``ids (m,)`` int32 of a packed matrix, fp32 ``(m, columns)``."""
    import mindspore as ms

    from ms_longctx.kernels.custom import operator

    return operator(
        "QuantRows", lambda ids, *parts: [ids[0], columns], lambda ids, *parts: ms.float32, kind=kind, group=group
    )


def _block_words(columns: int) -> np.dtype:
    """Type of the 16 words that hold a block of ``columns``."""
    return np.dtype("<u4" if columns > 64 else "<u2" if columns > 32 else "u1")


def _blocks(columns: int) -> list[tuple[int, int]]:
    """Begin and end of the blocks of a row."""
    return [(start, min(start + BLOCK, columns)) for start in range(0, columns, BLOCK)]


def _pack(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows, columns = q.shape
    parts = []
    for start, end in _blocks(columns):
        words = np.zeros((rows, PIECE), _block_words(end - start))
        for s in range((end - start) // PIECE):
            words |= q[:, start + s * PIECE : start + (s + 1) * PIECE].astype(words.dtype) << words.dtype.type(4 * s)
        parts.append(words.view(np.uint8))
    return np.concatenate(parts, 1)


def _unpack(packed: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    q = np.empty((len(packed), columns), np.uint8)
    offset = 0
    for start, end in _blocks(columns):
        size = PIECE * _block_words(end - start).itemsize
        words = np.ascontiguousarray(packed[:, offset : offset + size]).view(_block_words(end - start))
        for s in range((end - start) // PIECE):
            q[:, start + s * PIECE : start + (s + 1) * PIECE] = (words >> words.dtype.type(4 * s)) & 15
        offset += size
    return q
