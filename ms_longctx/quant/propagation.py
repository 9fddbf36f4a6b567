# SPDX-License-Identifier: Apache-2.0
"""Rounding that knows what the rounded layers before it give.

A matrix gets inputs x' that earlier rounding has disturbed and should still give what the original gives for its own
inputs x. ``|Q x' - t|^2`` is ``|(Q - W') x'|^2`` plus a constant with ``W' = (sum t x'^T) (sum x' x'^T)^-1``, so W' is
rounded in the place of W (as GPTAQ, arXiv 2504.02692, equation 6, and QEP, arXiv 2504.09629). For matrices that read
a norm t is ``W x``. For those that write to the residual stream it is the original stream behind them less the
disturbed one before them: they also make up for what was lost on the way. There tokens count relative to their size,
which the next norm takes away; a few are a thousand times as large as the others and would decide alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ms_longctx.quant.layer import LayerRunner
from ms_longctx.quant.rounding import Moments

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
_SMALLEST = 1e-3  # size of a token, so that padding does not count for more than any other


class DisturbedMoments(Moments):
    """Those of the disturbed inputs x' of a unit, and what its matrices should give for them.

    Args:
        gram: ``sum x' x'^T (k, k)``.
        wanted: ``sum t x'^T (n, k)``, or with ``of_inputs`` ``sum x x'^T (k, k)``, to be multiplied with W.
        of_inputs: see ``wanted``.
        tokens: how many were summed.
    """

    def __init__(self, gram: Floats, wanted: Floats, of_inputs: bool, tokens: int) -> None:
        super().__init__(gram)
        self._wanted, self._of_inputs, self._tokens = wanted, of_inputs, tokens

    def corrected(self, w: Floats) -> Floats:
        """W' of ``w (n, k)``, as far as the tokens determine it.

        A fit of k numbers to n tokens explains k / n of what is mere chance, so that share of the change is left out.
        """
        share = max(0.0, 1 - len(self.gram) / max(self._tokens, 1))
        wanted = w @ self._wanted if self._of_inputs else self._wanted
        change = ((wanted - w @ self.gram) @ self.factor.T) @ self.factor
        result: Floats = w + np.float32(share) * change
        return result


class Propagation:
    """The calibration text behind the rounded layers.

    Args:
        states: hidden states ``(rows, length, hidden)`` in fp16 before the first layer.
        runner: holds the layer that is being worked on.
    """

    def __init__(self, states: Halves, runner: LayerRunner) -> None:
        self._states, self._runner = states.copy(), runner

    def first(self, unit: str, original: Halves, every: int, int8_inputs: frozenset[str]) -> DisturbedMoments:
        """Of a unit that reads a norm.

        Args:
            unit: its name; the norm before it has to be loaded.
            original: states of the original before this half of the layer.
            every: one in so many tokens counts.
            int8_inputs: units whose inputs are rounded to int8.
        """
        sums = _Sums()
        for part in self._runner.chunks(original):
            disturbed = self._runner.inputs(unit, self._states[part], int8_inputs)[::every]
            sums.add(self._runner.inputs(unit, original[part])[::every], disturbed)
        return DisturbedMoments(sums.gram, sums.wanted, of_inputs=True, tokens=sums.tokens)

    def second(self, unit: str, behind: Halves, every: int, int8_inputs: frozenset[str]) -> DisturbedMoments:
        """Of a unit that writes to the residual stream.

        Args:
            unit: its name; what comes before it in the layer has to be loaded in its rounded form.
            behind: states of the original behind this half of the layer.
            every: one in so many tokens counts.
            int8_inputs: units whose inputs are rounded to int8.
        """
        sums = _Sums()
        for part in self._runner.chunks(behind):
            target = behind[part].astype(np.float32).reshape(-1, behind.shape[-1])[::every]
            before = self._states[part].reshape(-1, behind.shape[-1])[::every]
            rates = 1 / np.maximum(np.sqrt(np.square(target).mean(1, keepdims=True)), _SMALLEST)
            inputs = self._runner.inputs(unit, self._states[part], int8_inputs)[::every]
            sums.add((target - before) * rates, inputs * rates)
        return DisturbedMoments(sums.gram, sums.wanted, of_inputs=False, tokens=sums.tokens)

    def advance(self, half: int, int8_inputs: frozenset[str]) -> None:
        """Through a half of the layer, which has to be loaded in its rounded form."""
        self._runner.run(self._states, int8_inputs, in_place=True, halves=(half,))


class _Sums:
    def __init__(self) -> None:
        self.gram: Floats = np.zeros((), np.float32)
        self.wanted: Floats = np.zeros((), np.float32)
        self.tokens = 0

    def add(self, wanted: Floats, inputs: Floats) -> None:
        inputs = np.ascontiguousarray(inputs)
        self.tokens += len(inputs)
        self.gram = self.gram + inputs.T @ inputs
        self.wanted = self.wanted + np.ascontiguousarray(wanted).T @ inputs
