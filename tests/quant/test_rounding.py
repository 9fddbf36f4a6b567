# SPDX-License-Identifier: Apache-2.0
"""Rounding that looks at the inputs, and scales between inputs and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ms_longctx.models.auto import open_checkpoint
from ms_longctx.quant.layer import UNITS, InputStats, read_layer
from ms_longctx.quant.rounding import Moments, clipped_ranges, gptq_int4, gptq_int8
from ms_longctx.quant.scaling import apply_scales, awq_scales, moment_error, smoothquant_scales, tie_heads
from ms_longctx.quant.weights import group_grid, group_range, quantize_int4, quantize_int8
from tests.models.reference import torch_logits


def problem(rows: int = 24, columns: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and inputs that are correlated and of very different size."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * 0.3 + np.eye(columns)
    x = (rng.standard_normal((400, columns)) @ mix * np.logspace(1, -1, columns)).astype(np.float32)
    return rng.standard_normal((rows, columns)).astype(np.float32), x


def reference_gptq(w: np.ndarray, gram: np.ndarray, group: int, damping: float) -> np.ndarray:
    """GPTQ as its derivation states it (equations 2 and 3): after each column all later ones are corrected with the
    inverse of the Hessian of what is left, in float64; no Cholesky factor, no blocks."""
    hessian = gram.astype(np.float64) + damping * np.diag(gram).mean() * np.eye(len(gram))
    rest, out = w.astype(np.float64), np.empty_like(w)
    for j in range(w.shape[1]):
        if j % group == 0:
            block = rest[:, j : j + group].astype(np.float32)
            scales, zeros = (part[:, 0].astype(np.float64) for part in group_grid(*group_range(block, group)))
        inverse = np.linalg.inv(hessian[j:, j:])
        q = np.clip(np.rint(rest[:, j] / scales) + zeros, 0, 15)
        out[:, j] = (q - zeros) * scales
        rest[:, j:] -= np.outer((rest[:, j] - out[:, j]) / inverse[0, 0], inverse[0])
    return out


def test_gptq_equals_its_derivation() -> None:
    """A value next to a border may round differently in fp32: 1 % may differ, and the errors agree within 2 %."""
    w, x = problem()
    gram = x.T @ x
    ours, reference = gptq_int4(w, Moments(gram), 16).values(), reference_gptq(w, gram, 16, 0.01)
    assert (np.abs(ours - reference) > 1e-3).mean() < 0.01
    assert moment_error(ours - w, gram) == pytest.approx(moment_error(reference - w, gram), rel=0.02)
    assert moment_error(ours - w, gram) < 0.7 * moment_error(quantize_int4(w, 16).values() - w, gram)


def test_gptq_of_int8() -> None:
    """At least a third below round-to-nearest; a row of zeros stays zero."""
    w, x = problem()
    w[5] = 0
    gram = x.T @ x
    plain, ours = quantize_int8(w), gptq_int8(w, Moments(gram))
    np.testing.assert_array_equal(ours.scales, plain.scales)
    assert not ours.values()[5].any() and np.abs(ours.q).max() <= 127
    assert moment_error(ours.values() - w, gram) < 0.67 * moment_error(plain.values() - w, gram)


def test_gptq_with_features_that_are_always_zero() -> None:
    w, x = problem()
    x[:, [0, 31]] = 0
    weight = gptq_int4(w, Moments(x.T @ x), 32).values()
    assert np.isfinite(weight).all()
    dead = gptq_int4(w, Moments(np.zeros((64, 64), np.float32)), 32).values()
    np.testing.assert_array_equal(dead, quantize_int4(w, 32).values())


def test_clipping_never_loses() -> None:
    """Reference: the error of each group of outputs on the inputs themselves."""
    w, x = problem(seed=3)
    w[:, ::16] *= 6

    def errors(q: np.ndarray) -> np.ndarray:
        split = [slice(start, start + 16) for start in range(0, 64, 16)]
        return np.array([np.square((q - w)[:, part] @ x[:, part].T).sum(1) for part in split])

    clipped = errors(quantize_int4(w, 16, clipped_ranges(w, x.T @ x, 16)).values())
    plain = errors(quantize_int4(w, 16).values())
    assert (clipped <= plain * (1 + 1e-3)).all() and (clipped / plain).mean() < 0.95


def test_moments_give_the_error_of_the_outputs() -> None:
    w, x = problem()
    d = quantize_int4(w, 16).values() - w
    assert moment_error(d, x.T @ x) == pytest.approx(float(np.square(x.astype(np.float64) @ d.T).sum()), rel=1e-4)


def make_stats(x: np.ndarray) -> InputStats:
    stats = InputStats(x.shape[1], len(x))
    for start in range(0, len(x), 90):
        stats.add(x[start : start + 90])
    return stats


def test_statistics() -> None:
    _, x = problem()
    stats = make_stats(x)
    np.testing.assert_allclose(stats.gram, x.T @ x, rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(stats.largest, np.abs(x).max(0))
    np.testing.assert_allclose(stats.mean, np.abs(x).mean(0), rtol=1e-5)


def test_searched_scales_help(make_model: Callable[..., Any]) -> None:
    """Outlier features: AWQ at least 20 % below GPTQ alone, the two steps of SmoothQuant below half of
    those of plain int8."""
    _, folder = make_model()
    config = open_checkpoint(folder).config
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 64)).astype(np.float32)
    x[:, [3, 40]] *= 40
    w = rng.standard_normal((32, 64)).astype(np.float32)
    stats = make_stats(x)
    scales = awq_scales("qkv", [w], stats, config, 32)
    moments = Moments(stats.gram)
    plain = moment_error(gptq_int4(w, moments, 32).values() - w, stats.gram)
    assert (
        moment_error(gptq_int4(w * scales, moments.scaled(scales), 32).values() / scales - w, stats.gram) < 0.8 * plain
    )
    smooth = smoothquant_scales("qkv", [w], stats, config)
    steps = [np.abs(x / s).max(1).mean() * np.abs(w * s).max(1).mean() for s in (np.float32(1), smooth)]
    assert steps[1] < steps[0] / 2 and smooth[3] > 3 * np.median(smooth)
    one = smoothquant_scales("qkv", [w], stats, config, [0.5])
    expected = np.abs(x).max(0) ** 0.5 / np.abs(w).max(0) ** 0.5
    np.testing.assert_allclose(one / one[0], expected / expected[0], rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_scales_do_not_change_the_model(make_model: Callable[..., Any], tmp_path: Path, bias: bool) -> None:
    """Reference: transformers before and after, relative 2e-5. Two query heads share a value head."""
    theirs, folder = make_model(attention_bias=bias, mlp_bias=bias)
    source = open_checkpoint(folder)
    ids = np.arange(40)[None] * 5 % 203
    before = torch_logits(theirs, ids)
    rng = np.random.default_rng(0)
    for index in range(2):
        weights = read_layer(source, index)
        for unit, modules in UNITS.items():
            columns = weights[f"{modules[0]}.weight"].shape[1]
            scales = np.exp(rng.standard_normal(columns)).astype(np.float32)
            apply_scales(weights, unit, tie_heads(unit, scales, source.config), source.config)
        state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in weights.items()}
        missing = theirs.model.layers[index].load_state_dict(state)
        assert not missing.missing_keys
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    np.testing.assert_allclose(torch_logits(theirs, ids), before, rtol=0, atol=2e-5 * np.abs(before).max())
