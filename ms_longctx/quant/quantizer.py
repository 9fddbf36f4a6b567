# SPDX-License-Identifier: Apache-2.0
"""Quantizes a model layer by layer: one layer of the original is in memory at a time, and the quantized result."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.layer import UNITS, LayerRunner, LayerWeights
from ms_longctx.quant.measure import Comparison
from ms_longctx.quant.memory import release_memory
from ms_longctx.quant.methods import INT8_BOTH, Method
from ms_longctx.quant.model import Levels, QuantizedModel, Unit, embed
from ms_longctx.quant.propagation import Propagation
from ms_longctx.quant.rounder import LayerRounder
from ms_longctx.quant.rows import round_rows

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
        self._comparison: Comparison | None = None

    def run(self, levels: Levels | None = None, propagate: bool = False) -> tuple[QuantizedModel, Comparison]:
        """The quantized model, and what to compare it with.

        Args:
            levels: of the units; the others are at the lowest.
            propagate: round each layer for what the rounded ones before it give; it is right for these levels only.
        """
        model = QuantizedModel(self._source, self._method, levels=dict(levels or {}))
        # Statistics need no more than fp16; the states that are measured stay in fp32.
        states = embed(self._source, self._calibration).astype(np.float16)
        propagation = Propagation(states, self._runner) if propagate else None
        probed = max(1, _PROBE_TOKENS // self._heldout.shape[1])
        original = embed(self._source, self._heldout if self._comparison is None else self._heldout[:probed])
        for layer in range(model.layers):
            rounder = LayerRounder(model, layer, self._runner)
            rounder.load()
            behind = self._runner.run(original)
            rounder.round(states, propagation)
            if not propagate:
                self._probe(model, layer, rounder.weights, original[:probed], behind[:probed])
            original = behind
            release_memory()
            log.info("layer %d of %d", layer + 1, model.layers)
        if self._rows_too:
            model.rows = round_rows(self._source, states)
        if self._comparison is None:
            self._comparison = Comparison(self._source, original, self._heldout)
        return model, self._comparison

    def measure_states(self, model: QuantizedModel) -> Floats:
        """Hidden states of the held-out text through ``model``."""
        return model.states(self._heldout, self._runner)

    def _probe(
        self, model: QuantizedModel, layer: int, weights: LayerWeights, inputs: Floats, expected: Floats
    ) -> None:
        """Measure each unit alone at its level and those above it, but for the original's."""
        for unit, modules in UNITS.items():
            rounded = {f"{module}.weight": model.weights[layer][module].values() for module in modules}
            self._runner.load({**weights, **rounded})
            lowest = self._method.levels.index(model.level(layer, modules[0]))
            damage = self.damage.setdefault((layer, unit), Damage({}))
            for level in self._method.levels[lowest:-1]:  # the last is the original's
                damage.by_level[level] = self._disturbance(unit, level, inputs, expected)

    def _disturbance(self, unit: str, level: str, inputs: Floats, expected: Floats) -> float:
        units = frozenset([unit]) if level == INT8_BOTH else frozenset()
        error = np.square(self._runner.run(inputs, units) - expected).sum(-1)
        return float((error / np.maximum(np.square(expected).sum(-1), 1e-30)).mean())
