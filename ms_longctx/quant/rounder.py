# SPDX-License-Identifier: Apache-2.0
"""One decoder layer on its way into a quantized model: statistics, scales, rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.layer import HALVES, UNITS, InputStats, LayerRunner, read_layer, token_stride
from ms_longctx.quant.methods import KEPT
from ms_longctx.quant.model import QuantizedModel, half
from ms_longctx.quant.propagation import DisturbedMoments, Propagation
from ms_longctx.quant.rounding import Moments
from ms_longctx.quant.scaling import apply_scales

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class LayerRounder:
    """Rounds a layer of ``model.source`` into ``model``, as its method and its levels say.

    Args:
        model: gets scales and weights.
        layer: index.
        runner: its weights come and go.

    Attributes:
        weights: of the layer, fp32, scaled as far as it has come.
    """

    def __init__(self, model: QuantizedModel, layer: int, runner: LayerRunner) -> None:
        self._model, self._layer, self._runner = model, layer, runner
        self.weights = read_layer(model.source, layer)
        model.weights[layer] = {}

    def round(self, states: Halves, propagation: Propagation | None) -> None:
        """Round all units.

        Args:
            states: hidden states of the calibration text ``(rows, length, hidden)``; they move behind the layer.
            propagation: moves behind the rounded layer; ``None``: each matrix is rounded for the original's inputs.
        """
        for index in range(len(HALVES)):
            self._half(index, states, propagation)

    def load(self, *rounded: str) -> None:
        """Give the runner the weights, units ``rounded`` in their final form."""
        weights = dict(self.weights)
        for unit in rounded:
            for module in UNITS[unit]:
                name = f"{module}.weight"
                kept = self._level(unit) == KEPT
                weights[name] = half(weights[name]) if kept else self._model.weights[self._layer][module].values()
        self._runner.load(weights)

    def _half(self, index: int, states: Halves, propagation: Propagation | None) -> None:
        first, second = HALVES[index]
        every = token_stride(states.shape[0] * states.shape[1])
        rounded = self._model.int8_inputs(self._layer)
        self.load()
        moments = self._scale(first, self._first_stats(first, states))
        if propagation is not None:
            self.load()  # inputs are rounded after they were scaled
            moments = propagation.first(first, states, every, rounded)
        later = self._scale(second, self._second_stats(index, states))
        self._round(first, moments)
        if propagation is not None:
            self.load(first)
            later = propagation.second(second, states, every, rounded)
        self._round(second, later)
        if propagation is not None:
            self.load(first, second)
            propagation.advance(index, rounded)

    def _level(self, unit: str) -> str:
        return self._model.level(self._layer, UNITS[unit][0])

    def _scale(self, unit: str, stats: InputStats) -> Moments:
        """Scale the unit's matrices and what gives their inputs; second moments of the scaled inputs."""
        matrices = [self.weights[f"{module}.weight"] for module in UNITS[unit]]
        method, config = self._model.method, self._model.source.config
        scales = method.scales(unit, matrices, stats, config, self._level(unit))
        if scales is None:
            return Moments(stats.gram)
        self._model.scales[self._layer, unit] = scales
        apply_scales(self.weights, unit, scales, config)
        return Moments(stats.gram / np.outer(scales, scales))

    def _round(self, unit: str, moments: Moments) -> None:
        if self._level(unit) == KEPT:
            return
        for module in UNITS[unit]:
            w = self.weights[f"{module}.weight"]
            if isinstance(moments, DisturbedMoments):
                w = moments.corrected(w)
            self._model.weights[self._layer][module] = self._model.method.quantize(module, w, moments)

    def _first_stats(self, unit: str, states: Halves) -> InputStats:
        """Of a unit that reads a norm."""
        stats = None
        for part in self._runner.chunks(states):
            x = self._runner.inputs(unit, states[part])
            stats = stats or InputStats(x.shape[1], states.shape[0] * states.shape[1])
            stats.add(x)
        assert stats is not None
        return stats

    def _second_stats(self, index: int, states: Halves) -> InputStats:
        """Of the other unit of a half; ``states`` move behind it."""
        stats: list[InputStats] = []

        def watch(unit: str, x: Floats) -> None:
            if unit == HALVES[index][1]:
                if not stats:
                    stats.append(InputStats(x.shape[1], states.shape[0] * states.shape[1]))
                stats[0].add(x)

        self._runner.run(states, watch=watch, in_place=True, halves=(index,))
        if not np.isfinite(states).all():
            raise MsLongctxError("hidden states of the calibration text are not finite in fp16; the model is broken")
        return stats[0]
