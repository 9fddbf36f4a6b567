# SPDX-License-Identifier: Apache-2.0
"""Quantizes a model layer by layer: one layer of the original is in memory at a time, and the quantized result."""

from __future__ import annotations

import ctypes
import gc
import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.layer import HALVES, UNITS, InputStats, LayerRunner, LayerWeights, read_layer, token_stride
from ms_longctx.quant.measure import Comparison
from ms_longctx.quant.methods import INT8_BOTH, KEPT, Method
from ms_longctx.quant.model import QuantizedModel, Unit, embed
from ms_longctx.quant.propagation import DisturbedMoments, Propagation
from ms_longctx.quant.rounding import Moments
from ms_longctx.quant.rows import round_rows
from ms_longctx.quant.scaling import apply_scales

Floats = NDArray[np.float32]
Tokens = NDArray[np.int32]
log = logging.getLogger(__name__)
_PROBE_TOKENS = 1024  # on which the damage of each unit is measured


@dataclass
class Damage:
    """How much a unit at a level disturbs the hidden states behind its layer.

    Squares relative to those of the token, whose size the next norm takes away, averaged over the tokens: a few tokens
    (the first above all) are a thousand times as large as the others and would decide alone.
    """

    by_level: dict[str, float]


class Quantizer:
    """Calibrates and rounds every layer.

    Args:
        source: the model, in fp32, fp16 or dequantized GGUF.
        method: how.
        calibration: tokens ``(rows, length)``.
        heldout: tokens ``(rows, length)`` to measure with.
        quantize_rows_too: whether embedding and output head become int8.
    """

    def __init__(
        self,
        source: TensorSource,
        method: Method,
        calibration: Tokens,
        heldout: Tokens,
        quantize_rows_too: bool = True,
    ) -> None:
        if source.config.parallel_attention:
            raise MsLongctxError("quantize: the model's q, k and v have to be apart; leave parallel_attention off")
        self._source, self._method = source, method
        self._calibration, self._heldout = calibration, heldout
        self._rows_too = quantize_rows_too
        self._runner = LayerRunner(source.config, calibration.shape[1])
        if heldout.shape[1] != calibration.shape[1]:
            raise MsLongctxError("quantize: calibration and held-out windows have to be of one length")
        self.damage: dict[Unit, Damage] = {}

    def run(self) -> tuple[QuantizedModel, Comparison]:
        """The quantized model, every unit at its lowest level, and what to compare candidates with."""
        source = self._source
        model = QuantizedModel(source, self._method)
        # Statistics need no more than fp16; the states that are measured stay in fp32.
        states = embed(source, self._calibration).astype(np.float16)
        propagation = Propagation(states, self._runner) if self._method.propagates else None
        original = embed(source, self._heldout)
        for layer in range(source.config.num_hidden_layers):
            original = self._layer(model, layer, states, original, propagation)
            release_memory()
            log.info("layer %d of %d", layer + 1, source.config.num_hidden_layers)
        if self._rows_too:
            model.rows = round_rows(source, states)
        return model, Comparison(source, original, self._heldout)

    def measure_states(self, model: QuantizedModel) -> Floats:
        """Hidden states of the held-out text through ``model``."""
        return model.states(self._heldout, self._runner)

    def _layer(
        self,
        model: QuantizedModel,
        layer: int,
        states: NDArray[np.float16],
        original: Floats,
        propagation: Propagation | None,
    ) -> Floats:
        """Quantize a layer; ``states`` move behind it in place, the held-out ones are returned."""
        weights = read_layer(self._source, layer)
        self._runner.load(weights)
        behind = self._runner.run(original)
        model.weights[layer] = {}
        for half in range(len(HALVES)):
            self._half(model, layer, half, weights, states, propagation)
        self._probe(model, layer, weights, original[: max(1, _PROBE_TOKENS // original.shape[1])], behind)
        return behind

    def _half(
        self,
        model: QuantizedModel,
        layer: int,
        half: int,
        weights: LayerWeights,
        states: NDArray[np.float16],
        propagation: Propagation | None,
    ) -> None:
        """Attention or MLP: scale ``weights`` in place, round them into ``model``."""
        first, second = HALVES[half]
        every = token_stride(states.shape[0] * states.shape[1])
        self._runner.load(weights)
        moments = None if propagation is None else propagation.first(first, states, every)
        stats = self._calibrate(states, half)
        for unit in (first, second):
            matrices = [weights[f"{module}.weight"] for module in UNITS[unit]]
            scales = self._method.scales(unit, matrices, stats[unit], self._source.config)
            if scales is not None:
                model.scales[layer, unit] = scales
                stats[unit] = stats[unit].scaled(scales)
                if moments is not None and unit == first:
                    moments = moments.scaled(scales)
        for unit in (first, second):
            if (layer, unit) in model.scales:
                apply_scales(weights, unit, model.scales[layer, unit], self._source.config)
        self._round(model, layer, first, weights, moments or Moments(stats[first].gram))
        if propagation is not None:
            rounded = dict(weights)
            self._replace(rounded, model, layer, first)
            self._runner.load(rounded)
            moments = propagation.second(second, states, every)
        self._round(model, layer, second, weights, moments or Moments(stats[second].gram))
        if propagation is not None:
            self._replace(rounded, model, layer, second)
            self._runner.load(rounded)
            propagation.advance(half)

    def _round(
        self,
        model: QuantizedModel,
        layer: int,
        unit: str,
        weights: LayerWeights,
        moments: Moments,
    ) -> None:
        for module in UNITS[unit]:
            w = weights[f"{module}.weight"]
            if isinstance(moments, DisturbedMoments):
                w = moments.corrected(w)
            model.weights[layer][module] = self._method.quantize(module, w, moments)

    def _replace(self, weights: LayerWeights, model: QuantizedModel, layer: int, unit: str) -> None:
        for module in UNITS[unit]:
            weights[f"{module}.weight"] = model.weights[layer][module].values()

    def _calibrate(self, states: NDArray[np.float16], half: int) -> dict[str, InputStats]:
        """What the units of a half get; ``states`` move behind it."""
        stats = {}

        def watch(unit: str, x: Floats) -> None:
            if unit not in stats:
                stats[unit] = InputStats(x.shape[1], states.shape[0] * states.shape[1])
            stats[unit].add(x)

        self._runner.run(states, watch=watch, in_place=True, halves=(half,))
        if not np.isfinite(states).all():
            raise MsLongctxError("hidden states of the calibration text are not finite in fp16; the model is broken")
        return stats

    def _probe(self, model: QuantizedModel, layer: int, weights: LayerWeights, inputs: Floats, behind: Floats) -> None:
        """Measure each unit alone at each level below the original."""
        expected = behind[: len(inputs)]
        for unit, modules in UNITS.items():
            rounded = {f"{module}.weight": model.weights[layer][module].values() for module in modules}
            self._runner.load({**weights, **rounded})
            levels = [level for level in self._method.levels if level != KEPT]
            self.damage[layer, unit] = Damage(
                {level: self._disturbance(unit, level, inputs, expected) for level in levels}
            )

    def _disturbance(self, unit: str, level: str, inputs: Floats, expected: Floats) -> float:
        units = frozenset([unit]) if level == INT8_BOTH else frozenset()
        error = np.square(self._runner.run(inputs, units) - expected).sum(-1)
        return float((error / np.maximum(np.square(expected).sum(-1), 1e-30)).mean())


def release_memory() -> None:
    """Give freed memory back to the system; glibc would keep the holes that large arrays leave."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
