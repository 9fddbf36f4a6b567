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
    """The matrix that :func:`awq_arrays` or AutoAWQ stored."""
    scales = read("scales").astype(np.float16).T
    qweight = read("qweight").view(np.int32)
    rows = scales.shape[0]
    q = unpack_bits(qweight, 4, rows, AWQ_ORDER).T
    zeros = unpack_bits(read("qzeros").view(np.int32), 4, rows, AWQ_ORDER).T
    group = q.shape[1] // scales.shape[1]
    return Int4Weight(np.ascontiguousarray(q), np.ascontiguousarray(scales), np.ascontiguousarray(zeros), group)


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
    """
    rows, columns = (int(n) for n in read("weight_shape"))
    values = unpack_bits(read("weight_packed").view(np.int32), bits, columns)
    scales = read("weight_scale")
    if bits == 8:
        return Int8Weight((values.astype(np.int16) - 128).astype(np.int8), scales.astype(np.float32).reshape(rows))
    groups = scales.shape[1]
    if has_zeros:
        zeros = unpack_bits(np.ascontiguousarray(read("weight_zero_point").view(np.int32).T), 4, rows).T
    else:
        zeros = np.full((rows, groups), symmetric_zero, np.uint8)
    group = -(-columns // groups)
    return Int4Weight(np.ascontiguousarray(values), scales.astype(np.float16), np.ascontiguousarray(zeros), group)


def int_arrays(weight: Int8Weight) -> Arrays:
    """compressed-tensors ``int-quantized``: int8 whose inputs are rounded to int8 as well."""
    return {"weight": weight.q, "weight_scale": weight.scales[:, None]}


def read_int(read: Reader) -> Int8Weight:
    """The matrix that :func:`int_arrays` stored."""
    return Int8Weight(read("weight").astype(np.int8, copy=False), read("weight_scale").astype(np.float32).reshape(-1))
