# SPDX-License-Identifier: Apache-2.0
"""A model in the making: what each matrix became, and its hidden states layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.layer import MODULES, UNITS, LayerRunner, LayerWeights, read_layer
from ms_longctx.quant.methods import INT8_BOTH, KEPT, Method
from ms_longctx.quant.scaling import apply_scales
from ms_longctx.quant.weights import Int8Weight, Weight

Floats = NDArray[np.float32]
Unit = tuple[int, str]  # layer and name
Levels = dict[Unit, str]
EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass
class QuantizedModel:
    """Everything that was decided; original weights are read from ``source`` again where they are needed.

    Attributes:
        source: the model.
        method: how it is quantized.
        scales: of each unit that has some.
        weights: of each layer, its quantized matrices by module.
        rows: embedding and output head in int8, by tensor name, or empty.
        levels: what each unit is.
    """

    source: TensorSource
    method: Method
    scales: dict[Unit, Floats] = field(default_factory=dict)
    weights: dict[int, dict[str, Weight]] = field(default_factory=dict)
    rows: dict[str, Int8Weight] = field(default_factory=dict)
    levels: Levels = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.source.config.num_hidden_layers

    def units(self) -> list[Unit]:
        """All units in order."""
        return [(layer, unit) for layer in range(self.layers) for unit in UNITS]

    def level(self, layer: int, module: str) -> str:
        """What a matrix is."""
        unit = next(unit for unit, modules in UNITS.items() if module in modules)
        return self.levels.get((layer, unit), self.method.levels[0])

    def scaled_layer(self, layer: int) -> LayerWeights:
        """Its original weights with the scales applied: the same function as the original layer."""
        weights = read_layer(self.source, layer)
        for unit in UNITS:
            if (layer, unit) in self.scales:
                apply_scales(weights, unit, self.scales[layer, unit], self.source.config)
        return weights

    def rounded_layer(self, layer: int, weights: LayerWeights) -> LayerWeights:
        """``weights`` of the scaled layer with what is quantized in its rounded form, all fp32."""
        result = dict(weights)
        for module in MODULES:
            kept = self.level(layer, module) == KEPT
            name = f"{module}.weight"
            result[name] = half(weights[name]) if kept else self.weights[layer][module].values()
        return result

    def int8_inputs(self, layer: int) -> frozenset[str]:
        """Units of a layer whose inputs are rounded."""
        return frozenset(unit for unit, modules in UNITS.items() if self.level(layer, modules[0]) == INT8_BOTH)

    def states(self, tokens: NDArray[np.int32], runner: LayerRunner) -> Floats:
        """Hidden states ``(rows, length, hidden)`` before the last norm, through the quantized layers."""
        x = embed(self.source, tokens, self.rows.get(EMBEDDING))
        for layer in range(self.layers):
            runner.load(self.rounded_layer(layer, self.scaled_layer(layer)))
            x = runner.run(x, self.int8_inputs(layer))
        return x


def embed(source: TensorSource, tokens: NDArray[np.int32], rows: Int8Weight | None = None) -> Floats:
    """Embeddings ``(rows, length, hidden)`` in fp32, from the int8 table where there is one."""
    if rows is None:
        table: Floats = source.read(EMBEDDING)[tokens].astype(np.float32, copy=False)
        return table
    return rows.values(tokens)


def normed(source: TensorSource, x: Floats, weight: Floats) -> Floats:
    """What the output head gets: the last RMS norm of hidden states ``(..., hidden)``."""
    rate = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + source.config.rms_norm_eps)
    result: Floats = x * rate * weight
    return result


def half(w: Floats) -> Floats:
    """``w`` as a file of fp16 will hold it."""
    return w.astype(np.float16).astype(np.float32)
