# SPDX-License-Identifier: Apache-2.0
"""Scales that move size from the inputs of a unit into its weights, or back, without changing the layer.

``(x / s) (w s)^T = x w^T``. The division goes into what produces x: a norm, the up projection, or the value
projection. SmoothQuant (arXiv 2211.10438, equation 4) makes inputs easier to round, AWQ (arXiv 2306.00978, section
3.2) makes the weights of large inputs more exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ms_longctx.config.model import LlamaConfig
from ms_longctx.quant.layer import UNITS, InputStats, LayerWeights, round_inputs
from ms_longctx.quant.rounding import Moments, gptq_int4
from ms_longctx.quant.weights import quantize_int8

Floats = NDArray[np.float32]
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_PRODUCER = {
    "qkv": "input_layernorm",
    "o": "self_attn.v_proj",
    "gate_up": "post_attention_layernorm",
    "down": "mlp.up_proj",
}
_LIMIT = 1e4
_RATIOS, _BOTH_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8), (0.3, 0.5, 0.7)  # of AWQ
_ROWS = 512  # on which scales are compared


def apply_scales(weights: LayerWeights, unit: str, scales: Floats, config: LlamaConfig) -> None:
    """Multiply the columns of the unit's matrices with ``scales`` and divide what produces its inputs."""
    for module in UNITS[unit]:
        weights[f"{module}.weight"] = weights[f"{module}.weight"] * scales
    rows = scales
    if unit == "o":  # each value head feeds several heads, which tie_heads gave equal scales
        rows = scales.reshape(config.kv_heads, -1, config.head_size)[:, 0].reshape(-1)
    for part in ("weight", "bias"):
        name = f"{_PRODUCER[unit]}.{part}"
        if name in weights:
            array = weights[name]
            weights[name] = array / (rows[:, None] if array.ndim == 2 else rows)


def tie_heads(unit: str, sizes: Floats, config: LlamaConfig) -> Floats:
    """For inputs of ``o``: one size for all heads that share a value head, the largest of theirs."""
    if unit != "o":
        return sizes
    grouped = sizes.reshape(config.kv_heads, -1, config.head_size)
    return np.broadcast_to(grouped.max(1, keepdims=True), grouped.shape).reshape(-1)


def smoothquant_scales(
    unit: str, matrices: Sequence[Floats], stats: InputStats, config: LlamaConfig, alphas: Iterable[float] = ALPHAS
) -> Floats:
    """SmoothQuant's scales ``max|x|^alpha / max|w|^(1 - alpha)`` with the alpha of the smallest error, or ones.

    The error is that of the unit's outputs on a sample of tokens, inputs and weights rounded to int8. ``alphas`` with
    one element is not compared with no scaling at all.
    """
    alphas = list(alphas)
    sample = stats.sample
    matrices = _some_rows(matrices)
    inputs = tie_heads(unit, stats.largest, config)
    columns = tie_heads(unit, _column_sizes(matrices), config)
    candidates = [_normal(inputs**alpha / np.maximum(columns, 1e-5) ** (1 - alpha)) for alpha in alphas]
    if len(alphas) > 1:
        candidates.append(np.ones_like(inputs))
    exact = [sample @ w.T for w in matrices]

    def error(scales: Floats) -> float:
        rounded = round_inputs(sample / scales)
        outputs = (rounded @ quantize_int8(w * scales).values().T for w in matrices)
        return sum(float(np.square(y - right).sum()) for y, right in zip(outputs, exact, strict=True))

    return _best(candidates, error)


def awq_scales(unit: str, matrices: Sequence[Floats], stats: InputStats, config: LlamaConfig, group: int) -> Floats:
    """AWQ's scales ``mean|x|^r``, or ``mean|x|^r / mean|w|^(1 - r)`` as AutoAWQ tries it too, of the smallest error.

    The error is that of the outputs over all calibration tokens, which follows from their second moments
    G = sum x x^T: ``|(Q(w s) / s - w) x|^2 = tr(D G D^T)``. Q is GPTQ, which follows: for it the best scales are closer
    to 1 than for rounding to nearest.
    """
    matrices = _some_rows(matrices)
    inputs = np.maximum(tie_heads(unit, stats.mean, config), 1e-4)
    columns = np.maximum(tie_heads(unit, _relative_columns(matrices, group), config), 1e-4)
    candidates = [_normal(inputs**r) for r in _RATIOS] + [_normal(inputs**r / columns ** (1 - r)) for r in _BOTH_RATIOS]
    moments = Moments(stats.gram)

    def error(scales: Floats) -> float:
        scaled = moments.scaled(scales)
        rounded = (gptq_int4(w * scales, scaled, group).values() / scales for w in matrices)
        return sum(moment_error(q - w, stats.gram) for q, w in zip(rounded, matrices, strict=True))

    return _best(candidates, error)


def moment_error(difference: Floats, gram: Floats) -> float:
    """``sum |D x|^2`` over the tokens whose second moments are ``gram``."""
    return float(np.einsum("ij,ij->", difference @ gram, difference, dtype=np.float64))


def _best(candidates: Sequence[Floats], error: Callable[[Floats], float]) -> Floats:
    return candidates[int(np.argmin([error(scales) for scales in candidates]))]


def _some_rows(matrices: Sequence[Floats]) -> list[Floats]:
    """About ``_ROWS`` rows of all matrices: enough to compare candidates, whose errors are sums over the rows."""
    stride = max(1, sum(len(w) for w in matrices) // _ROWS)
    return [np.ascontiguousarray(w[::stride]) for w in matrices]


def _column_sizes(matrices: Sequence[Floats]) -> Floats:
    sizes: Floats = np.max([np.abs(w).max(0) for w in matrices], 0)
    return sizes


def _relative_columns(matrices: Sequence[Floats], group: int) -> Floats:
    """Mean over the rows of |w| relative to the largest of its group."""
    total = np.zeros(matrices[0].shape[1], np.float64)
    for w in matrices:
        size = np.abs(w)
        largest = np.maximum.reduceat(size, np.arange(0, w.shape[1], group), 1)
        total += (size / np.maximum(np.repeat(largest, group, 1)[:, : w.shape[1]], 1e-12)).sum(0)
    return (total / sum(len(w) for w in matrices)).astype(np.float32)


def _normal(scales: Floats) -> Floats:
    """Around 1: only the ratios matter to rounding, and fp16 has to hold the products."""
    scales = np.maximum(scales, 1e-12)
    scales = scales / np.sqrt(scales.max() * scales.min())
    return np.clip(scales, 1 / _LIMIT, _LIMIT).astype(np.float32)
