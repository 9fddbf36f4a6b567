# SPDX-License-Identifier: Apache-2.0
"""Rounding to int8 and int4. Reference: the bound of half a step that rounding to nearest keeps."""

from __future__ import annotations

import numpy as np
import pytest

from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.weights import quantize_int4, quantize_int8, round_int8, row_scales, spread


def random(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_int8_is_within_half_a_step() -> None:
    w = random(7, 37)
    w[3] = 0
    rounded = quantize_int8(w)
    step = np.abs(w).max(1, keepdims=True) / 127
    assert (np.abs(rounded.values() - w) <= step / 2 * (1 + 1e-5)).all()
    assert rounded.q.min() >= -127 and not rounded.values()[3].any()


@pytest.mark.parametrize("group", [16, 24, 128])
def test_int4_is_within_half_a_step(group: int) -> None:
    """24 and 128 leave a short last group. Zero points are whole numbers: an end of the range may lose half a step."""
    w = random(5, 80, 1)
    rounded = quantize_int4(w, group)
    assert rounded.scales.shape == (5, -(-80 // group)) and rounded.q.max() == 15
    step = spread(rounded.scales.astype(np.float32), group, 80)
    error = np.abs(rounded.values() - w)
    assert (error <= step * 1.01).all()
    assert (error <= step * 0.501).mean() > 0.95


def test_groups_of_zeros_and_of_one_value_are_exact() -> None:
    """Reference: the value in fp16, which is what the format can hold."""
    w = random(4, 64, 2)
    w[0, :16], w[1, 16:32], w[2, 32:48], w[3] = 0, 0.3, -1.7, 5e-4
    rounded = quantize_int4(w, 16).values()
    np.testing.assert_array_equal(rounded[0, :16], 0)
    for row, part in ((1, slice(16, 32)), (2, slice(32, 48)), (3, slice(None))):
        np.testing.assert_array_equal(rounded[row, part], w[row, part].astype(np.float16).astype(np.float32))


def test_groups_of_one_sign() -> None:
    """The zero point cannot leave 0 to 15, so the range has to begin at 0."""
    w = np.linspace(1, 2, 32, dtype=np.float32)[None]
    np.testing.assert_allclose(quantize_int4(w, 32).values(), w, atol=2 / 15 / 2 * 1.01, rtol=0)
    np.testing.assert_allclose(quantize_int4(-w, 32).values(), -w, atol=2 / 15 / 2 * 1.01, rtol=0)


def test_rows_are_exact_in_fp16() -> None:
    w = random(50, 33, 3) * np.logspace(-5, 2, 50, dtype=np.float32)[:, None]
    w[8] = 0
    values = round_int8(w, row_scales(w)).values()
    np.testing.assert_array_equal(values.astype(np.float16).astype(np.float32), values)
    step = np.abs(w).max(1, keepdims=True) / 127 * 1.125 + 2.0**-24
    assert (np.abs(values - w) <= step / 2 * 1.001).all()


def test_weights_that_cannot_be_rounded() -> None:
    w = random(2, 32)
    w[1, 4] = np.nan
    for quantize in (quantize_int8, row_scales, lambda x: quantize_int4(x, 16)):
        with pytest.raises(MsLongctxError, match="not finite"):
            quantize(w)
    with pytest.raises(MsLongctxError, match="does not fit fp16"):
        quantize_int4(random(2, 32) * 1e7, 16)
    with pytest.raises(MsLongctxError, match="--head fp"):
        row_scales(random(2, 32) * 1e7)
