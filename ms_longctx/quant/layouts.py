# SPDX-License-Identifier: Apache-2.0
"""How quantized matrices lie in files: AutoAWQ's GEMM layout and the layouts of compressed-tensors.

AutoAWQ (https://github.com/casper-hansen/AutoAWQ, ``awq/modules/linear/gemm.py``): everything transposed, eight
int4 of neighbouring output features in an int32, in the order 0, 2, 4, 6, 1, 3, 5, 7.
compressed-tensors (https://github.com/neuralmagic/compressed-tensors, ``pack_quantized``, ``int_quantized``): values
in order along the input features, stored with an offset that makes them unsigned.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.weights import Int4Weight, Int8Weight

Arrays = dict[str, NDArray[np.generic]]
Ints = NDArray[np.int32]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Reader(Protocol):
    """Gives a tensor of one matrix by the suffix of its name, such as ``weight_packed``."""

    def __call__(self, suffix: str) -> NDArray[np.generic]: ...


def pack_bits(values: NDArray[np.uint8], bits: int, order: tuple[int, ...] | None = None) -> Ints:
    """``(rows, columns)`` unsigned -> int32 ``(rows, ceil(columns * bits / 32))``, the first value lowest.

    Args:
        values: each below ``2 ** bits``.
        bits: of one value.
        order: which of the ``32 / bits`` neighbours goes to the first, second, ... place.
    """
    count = 32 // bits
    rest = -values.shape[1] % count
    padded = np.pad(values, ((0, 0), (0, rest))) if rest else values
    split = padded.reshape(len(values), -1, count).astype(np.uint32)
    packed = np.zeros(split.shape[:2], np.uint32)
    for place, index in enumerate(order or range(count)):
        packed |= split[:, :, index] << np.uint32(bits * place)
    return packed.view(np.int32)


def unpack_bits(packed: Ints, bits: int, columns: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """The inverse of :func:`pack_bits`."""
    count = 32 // bits
    words = np.ascontiguousarray(packed).view(np.uint32)
    values = np.empty((*packed.shape, count), np.uint8)
    for place, index in enumerate(order or range(count)):
        values[:, :, index] = words >> np.uint32(bits * place) & np.uint32(2**bits - 1)
    return values.reshape(len(packed), -1)[:, :columns]


def awq_arrays(weight: Int4Weight) -> Arrays:
    """``qweight (k, n / 8)``, ``qzeros (groups, n / 8)``, ``scales (groups, n)``.

    Raises:
        MsLongctxError: the layout has no place for this shape.
    """
    rows, columns = weight.q.shape
    if rows % 8 or columns % weight.group:
        raise MsLongctxError(
            f"a matrix of {rows} x {columns} in groups of {weight.group}: the AWQ layout needs outputs that are a "
            "multiple of 8 and inputs that are a multiple of the group; use --layout compressed-tensors for the first, "
            "another --group_size for the second"
        )
    return {
        "qweight": pack_bits(weight.q.T, 4, AWQ_ORDER),
        "qzeros": pack_bits(weight.zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(weight.scales.T),
    }


def read_awq(read: Reader) -> Int4Weight:
    """The matrix that :func:`awq_arrays` or AutoAWQ stored.

    Raises:
        ValueError: the tensors do not fit together.
    """
    scales, qweight, qzeros = read("scales"), read("qweight"), read("qzeros")
    groups, rows = scales.shape
    columns = len(qweight)
    _expect_shape("qweight", qweight, (columns, -(-rows // 8)))
    _expect_shape("qzeros", qzeros, (groups, -(-rows // 8)))
    q = unpack_bits(qweight.view(np.int32), 4, rows, AWQ_ORDER).T
    zeros = unpack_bits(qzeros.view(np.int32), 4, rows, AWQ_ORDER).T
    return Int4Weight(
        np.ascontiguousarray(q), _half_scales(scales.T), np.ascontiguousarray(zeros), _group(columns, groups)
    )


def packed_arrays(weight: Int4Weight | Int8Weight) -> Arrays:
    """compressed-tensors ``pack-quantized``: int4 with zero points, or int8 whose inputs stay as they are."""
    scales: NDArray[np.generic]
    if isinstance(weight, Int8Weight):
        values, bits, scales = (weight.q.astype(np.int16) + 128).astype(np.uint8), 8, weight.scales[:, None]
    else:
        if weight.q.shape[1] % weight.group:
            raise MsLongctxError(
                f"a matrix with {weight.q.shape[1]} inputs in groups of {weight.group}: compressed-tensors needs a "
                "multiple; use another --group_size"
            )
        values, bits, scales = weight.q, 4, weight.scales
    arrays: Arrays = {
        "weight_packed": pack_bits(values, bits),
        "weight_scale": np.ascontiguousarray(scales),
        "weight_shape": np.array(weight.q.shape, np.int64),
    }
    if isinstance(weight, Int4Weight):
        arrays["weight_zero_point"] = np.ascontiguousarray(pack_bits(weight.zeros.T, 4).T)
    return arrays


def read_packed(read: Reader, has_zeros: bool, bits: int, symmetric_zero: int = 8) -> Int4Weight | Int8Weight:
    """The matrix that :func:`packed_arrays` or llm-compressor stored.

    Args:
        read: gives its tensors.
        has_zeros: whether zero points are stored; otherwise all are ``symmetric_zero``.
        bits: 4 or 8.
        symmetric_zero: zero point of symmetric int4.

    Raises:
        ValueError: the tensors do not fit together.
    """
    rows, columns = (int(n) for n in read("weight_shape"))
    packed, scales = read("weight_packed"), read("weight_scale")
    _expect_shape("weight_packed", packed, (rows, -(-columns * bits // 32)))
    values = unpack_bits(packed.view(np.int32), bits, columns)
    if bits == 8:
        return Int8Weight((values.astype(np.int16) - 128).astype(np.int8), _row_scales(scales, rows))
    groups = scales.shape[-1]
    _expect_shape("weight_scale", scales, (rows, groups))
    if has_zeros:
        stored = read("weight_zero_point").view(np.int32)
        _expect_shape("weight_zero_point", stored, (-(-rows // 8), groups))
        zeros = unpack_bits(np.ascontiguousarray(stored.T), 4, rows).T
    else:
        zeros = np.full((rows, groups), symmetric_zero, np.uint8)
    group = _group(columns, groups)
    return Int4Weight(np.ascontiguousarray(values), _half_scales(scales), np.ascontiguousarray(zeros), group)


def int_arrays(weight: Int8Weight) -> Arrays:
    """compressed-tensors ``int-quantized``: int8 whose inputs are rounded to int8 as well."""
    return {"weight": weight.q, "weight_scale": weight.scales[:, None]}


def read_int(read: Reader) -> Int8Weight:
    """The matrix that :func:`int_arrays` or llm-compressor stored.

    Raises:
        ValueError: the tensors do not fit together.
    """
    q = read("weight").astype(np.int8, copy=False)
    return Int8Weight(q, _row_scales(read("weight_scale"), len(q)))


def _row_scales(scales: NDArray[np.generic], rows: int) -> NDArray[np.float32]:
    """One a row, from one a row or one for all."""
    flat = scales.astype(np.float32).reshape(-1)
    if flat.size not in (1, rows):
        raise ValueError(f"weight_scale has {flat.size} values for {rows} rows")
    return np.ascontiguousarray(np.broadcast_to(flat, rows))


def _half_scales(scales: NDArray[np.generic]) -> NDArray[np.floating]:
    """In fp16, as the kernels want them, unless that would change them (models saved in fp32, tiny ones in bf16)."""
    exact = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        half = exact.astype(np.float16)
    return np.ascontiguousarray(half if np.array_equal(half.astype(np.float32), exact) else exact)


def _group(columns: int, groups: int) -> int:
    if groups < 1 or columns % groups:
        raise ValueError(f"{columns} columns do not make {groups} equal groups")
    return columns // groups


def _expect_shape(name: str, array: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} is {array.shape}, expected {shape}")
