# SPDX-License-Identifier: Apache-2.0
"""Layouts of files. References: the packing loops of AutoAWQ 0.2.9 (awq/modules/linear/gemm.py) and of
compressed-tensors 0.13 (pack_to_int32), restated here value by value; everything is exact."""

from __future__ import annotations

import numpy as np
import pytest

from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.layouts import awq_arrays, int_arrays, packed_arrays, read_awq, read_int, read_packed
from ms_longctx.quant.weights import Int4Weight, Int8Weight, quantize_int4, quantize_int8


def int4(rows: int, columns: int, group: int) -> Int4Weight:
    return quantize_int4(np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32), group)


def autoawq_pack(values: np.ndarray) -> np.ndarray:
    """``(in, out)`` -> ``(in, out / 8)``."""
    packed = np.zeros((values.shape[0], values.shape[1] // 8), np.int64)
    for column in range(packed.shape[1]):
        for place, index in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed[:, column] |= values[:, column * 8 + index].astype(np.int64) << (4 * place)
    return packed.astype(np.uint32).view(np.int32)


def test_awq() -> None:
    weight = int4(24, 96, 32)
    arrays = awq_arrays(weight)
    np.testing.assert_array_equal(arrays["qweight"], autoawq_pack(weight.q.T))
    np.testing.assert_array_equal(arrays["qzeros"], autoawq_pack(weight.zeros.T))
    assert arrays["scales"].shape == (3, 24) and arrays["scales"].dtype == np.float16
    again = read_awq(arrays.__getitem__)
    assert again.group == 32
    np.testing.assert_array_equal(again.values(), weight.values())


def test_packed_int4() -> None:
    """Values lie along the inputs, zero points along the outputs, each minus 8 when read as signed."""
    weight = int4(21, 96, 32)
    arrays = packed_arrays(weight)
    for row, column in ((0, 0), (3, 17), (20, 95)):
        word = int(np.uint32(arrays["weight_packed"][row, column // 8].astype(np.int64) & 0xFFFFFFFF))
        assert word >> (4 * (column % 8)) & 15 == weight.q[row, column]
        word = int(arrays["weight_zero_point"][row // 8, column // 32].astype(np.int64) & 0xFFFFFFFF)
        assert word >> (4 * (row % 8)) & 15 == weight.zeros[row, column // 32]
    again = read_packed(arrays.__getitem__, True, 4)
    assert isinstance(again, Int4Weight)
    np.testing.assert_array_equal(again.values(), weight.values())


@pytest.mark.parametrize("columns", [32, 37])
def test_int8(columns: int) -> None:
    weight = quantize_int8(np.random.default_rng(1).standard_normal((5, columns)).astype(np.float32))
    packed = packed_arrays(weight)
    first = packed["weight_packed"][:, 0].astype(np.int64) & 0xFFFFFFFF
    np.testing.assert_array_equal((first >> 8 & 255) - 128, weight.q[:, 1])
    for again in (read_packed(packed.__getitem__, False, 8), read_int(int_arrays(weight).__getitem__)):
        assert isinstance(again, Int8Weight)
        np.testing.assert_array_equal(again.values(), weight.values())


def test_symmetric_int4_of_other_programs() -> None:
    """llm-compressor's W4A16 stores no zero points: all are 8."""
    weight = int4(8, 32, 16)
    symmetric = Int4Weight(weight.q, weight.scales, np.full_like(weight.zeros, 8), 16)
    arrays = packed_arrays(symmetric)
    del arrays["weight_zero_point"]
    again = read_packed(arrays.__getitem__, False, 4)
    np.testing.assert_array_equal(again.values(), symmetric.values())


def test_shapes_without_a_place() -> None:
    with pytest.raises(MsLongctxError, match="20 x 32 .* multiple of 8 .* --layout compressed-tensors"):
        awq_arrays(int4(20, 32, 16))
    with pytest.raises(MsLongctxError, match="another --group_size"):
        packed_arrays(int4(8, 40, 16))
