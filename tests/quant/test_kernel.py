# SPDX-License-Identifier: Apache-2.0
"""Products with packed matrices. Reference: numpy in float64 on the same rounded values, 1e-6 of the largest result."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.quant import PackedMatrix, make_quant_linear, make_quant_rows

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())
ROWS = (1, 3, 4, 7, 8, 9, 41)  # one, a few, and enough for matrix products


def check(matrix: PackedMatrix, x: np.ndarray, expected: np.ndarray) -> None:
    linear = make_quant_linear(matrix.kind, matrix.group, matrix.shape[0])
    y = linear(Tensor(x), *map(Tensor, matrix.arrays())).asnumpy()
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


# 576 and 1536: SmolLM2. Others: blocks that end short, groups that end short, groups that no kernel knows beforehand.
@pytest.mark.parametrize(("columns", "group"), [(576, 64), (1536, 128), (160, 32), (48, 16), (208, 128), (80, 48)])
def test_int4(columns: int, group: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16, (27, columns)).astype(np.uint8)
    groups = -(-columns // group)
    scales, zeros = rng.random((27, groups)).astype(np.float16), rng.integers(0, 16, (27, groups)).astype(np.uint8)
    matrix = PackedMatrix.int4(q, scales, zeros, group)
    wide = [np.repeat(part.astype(np.float64), group, 1)[:, :columns] for part in (zeros, scales)]
    w = (q - wide[0]) * wide[1]
    np.testing.assert_array_equal(matrix.unpack(), w)
    assert matrix.values.nbytes <= 27 * (columns / 2 + 24)
    for rows in ROWS:
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        check(matrix, x, x.astype(np.float64) @ w.T)


@pytest.mark.parametrize("columns", [576, 100, 33, 7])
@pytest.mark.parametrize("both", [False, True], ids=["weights", "both"])
def test_int8(columns: int, both: bool) -> None:
    """With inputs in int8 the extremes -127 and 127 everywhere would overflow or saturate sums of 16 bits."""
    rng = np.random.default_rng(1)
    q = rng.integers(-127, 128, (27, columns)).astype(np.int8)
    q[:9] = 127
    scales = rng.random(27).astype(np.float32)
    matrix = PackedMatrix.int8(q, scales, quantize_inputs=both)
    w = q * scales.astype(np.float64)[:, None]
    for rows in ROWS:
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        x[0] = 2.5
        x[-1] = 0
        inputs = x.astype(np.float64)
        if both:
            largest = np.abs(x).max(1, keepdims=True)
            rate = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            inputs = np.rint(x * rate) * (largest / np.float32(127)).astype(np.float64)
        check(matrix, x, inputs @ w.T)


@pytest.mark.parametrize("columns", [576, 33])
def test_factors_of_columns(columns: int) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(-127, 128, (27, columns)).astype(np.int8)
    scales, factors = rng.random(27).astype(np.float32), np.exp2(rng.integers(0, 5, columns)).astype(np.float32)
    matrix = PackedMatrix.int8(q, scales, factors=factors)
    w = q * scales.astype(np.float64)[:, None] * factors
    np.testing.assert_allclose(matrix.unpack(), w, rtol=1e-7)
    for rows in ROWS:
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        check(matrix, x, x.astype(np.float64) @ w.T)


@pytest.mark.parametrize("columns", [576, 100, 33, 7])
def test_half(columns: int) -> None:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((27, columns)).astype(np.float16)
    w[0], w[1] = 65504, 2.0**-24  # the ends of fp16; the smallest is subnormal
    matrix = PackedMatrix.half(w)
    np.testing.assert_array_equal(matrix.unpack(), w)
    assert matrix.nbytes == 27 * columns * 2
    for rows in ROWS:
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        check(matrix, x, x.astype(np.float64) @ w.astype(np.float64).T)


@pytest.mark.parametrize("kind", ["int8", "int8 with factors", "half"])
def test_rows_of_an_embedding(kind: str) -> None:
    q = np.arange(-60, 60, dtype=np.int8).reshape(8, 15)
    scales = np.linspace(0.1, 1, 8).astype(np.float32)
    factors = np.exp2(np.arange(15) % 3).astype(np.float32) if "factors" in kind else None
    matrix = (
        PackedMatrix.half(q.astype(np.float16)) if kind == "half" else PackedMatrix.int8(q, scales, factors=factors)
    )
    ids = np.array([3, 0, 7, 3], np.int32)
    rows = make_quant_rows(matrix.kind, matrix.group, 15)(Tensor(ids), *map(Tensor, matrix.arrays())).asnumpy()
    np.testing.assert_array_equal(rows, matrix.unpack()[ids])


def test_columns_that_do_not_fill_a_word() -> None:
    with pytest.raises(MsLongctxError, match="40 columns in groups of 16"):
        PackedMatrix.int4(np.zeros((2, 40), np.uint8), np.ones((2, 3), np.float16), np.zeros((2, 3), np.uint8), 16)


@pytest.mark.slow
@pytest.mark.parametrize("isa", [pytest.param("baseline", marks=pytest.mark.long), "avx2"])
def test_other_instruction_sets(isa: str) -> None:
    """The same tests on the variants that this CPU would not choose."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "not other", __file__]
    environment = {**os.environ, "MS_LONGCTX_ISA": isa}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
