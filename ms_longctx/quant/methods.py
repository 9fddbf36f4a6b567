# SPDX-License-Identifier: Apache-2.0
"""The ways to quantize a decoder layer: how each scales its units and rounds its matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.layer import InputStats
from ms_longctx.quant.rounding import Moments, gptq_int4, gptq_int8
from ms_longctx.quant.scaling import ALPHAS, awq_scales, smoothquant_scales
from ms_longctx.quant.weights import Weight, quantize_int4

Floats = NDArray[np.float32]
INT8_BOTH, INT8_WEIGHTS, INT4, KEPT = "int8", "int8 weights", "int4", "fp16"
METHODS = ("int8", "awq", "gptq", "rtn")
GROUPS = (128, 64, 32, 16)


class Method(ABC):
    """A way to quantize.

    Attributes:
        levels: what a unit can become, the smallest first; the search moves units up.
        propagates: whether matrices are at last rounded for what the rounded ones before them give
            (:mod:`ms_longctx.quant.propagation`).
    """

    levels: tuple[str, ...]
    propagates: bool = True

    @abstractmethod
    def scales(
        self, unit: str, matrices: Sequence[Floats], stats: InputStats, config: LlamaConfig, level: str
    ) -> Floats | None:
        """See :mod:`ms_longctx.quant.scaling`; ``None`` without scaling. ``level`` is that of the unit."""

    @abstractmethod
    def quantize(self, module: str, w: Floats, moments: Moments) -> Weight:
        """Round one matrix to whose inputs ``moments`` belong, both scaled."""


class Int8(Method):
    """Per-channel int8 weights, inputs int8 a token (``activations="token"``) or left alone (``"none"``).

    Args:
        activations: how inputs are treated where the search leaves a unit at its lowest level.
        alpha: SmoothQuant's migration strength; ``None`` searches it for each unit.
    """

    propagates = False  # so little is lost that making up for it gained no more likeliest tokens on SmolLM2-135M

    def __init__(self, activations: str = "none", alpha: float | None = None) -> None:
        self._smooth = activations == "token"
        self._alphas = ALPHAS if alpha is None else (alpha,)
        self.levels = (INT8_BOTH, INT8_WEIGHTS, KEPT) if self._smooth else (INT8_WEIGHTS, KEPT)

    def scales(
        self, unit: str, matrices: Sequence[Floats], stats: InputStats, config: LlamaConfig, level: str
    ) -> Floats | None:
        """SmoothQuant's, where inputs are rounded."""
        return smoothquant_scales(unit, matrices, stats, config, self._alphas) if level == INT8_BOTH else None

    def quantize(self, module: str, w: Floats, moments: Moments) -> Weight:
        """A scale a row; columns make up for one another's rounding (GPTQ)."""
        return gptq_int8(w, moments)


class RoundToNearest(Method):
    """Int4 over groups without looking at the inputs."""

    levels = (INT4, KEPT)
    propagates = False

    def __init__(self, group: int) -> None:
        self.group = group

    def scales(
        self, unit: str, matrices: Sequence[Floats], stats: InputStats, config: LlamaConfig, level: str
    ) -> Floats | None:
        """None."""
        return None

    def quantize(self, module: str, w: Floats, moments: Moments) -> Weight:
        """To nearest."""
        return quantize_int4(w, self.group)


class Awq(RoundToNearest):
    """Activation-aware weight quantization (arXiv 2306.00978): searched scales, then searched clipping.

    Columns and layers make up for one another's rounding, as with :class:`Gptq`.
    """

    propagates = True

    def scales(
        self, unit: str, matrices: Sequence[Floats], stats: InputStats, config: LlamaConfig, level: str
    ) -> Floats | None:
        """AWQ's."""
        if level == KEPT:
            return None
        return awq_scales(unit, matrices, stats, config, self.group)

    def quantize(self, module: str, w: Floats, moments: Moments) -> Weight:
        """GPTQ with clipping; queries and keys are not clipped, their product would feel it (as AutoAWQ)."""
        return gptq_int4(w, moments, self.group, clip=not module.endswith(("q_proj", "k_proj")))


class Gptq(RoundToNearest):
    """GPTQ (arXiv 2210.17323)."""

    propagates = True

    def quantize(self, module: str, w: Floats, moments: Moments) -> Weight:
        """Column by column."""
        return gptq_int4(w, moments, self.group)


def make_method(name: str, config: LlamaConfig, group: int | None = None, **int8: Any) -> Method:
    """The method called ``name``.

    Args:
        name: one of ``METHODS``.
        config: its matrices have to divide into groups.
        group: columns a group of int4; ``None``: the largest of 128, 64, 32, 16 that divides all matrices.
        int8: arguments of :class:`Int8`.

    Raises:
        MsLongctxError: no such method, or no such groups.
    """
    if name == "int8":
        return Int8(**int8)
    kinds = {"awq": Awq, "gptq": Gptq, "rtn": RoundToNearest}
    if name not in kinds:
        raise MsLongctxError(f"--method {name}: expected one of {', '.join(METHODS)}")
    return kinds[name](_group(config, group))


def _group(config: LlamaConfig, wanted: int | None) -> int:
    inputs = {config.hidden_size, config.num_attention_heads * config.head_size, config.intermediate_size}
    fitting = [size for size in GROUPS if all(n % size == 0 for n in inputs)]
    sizes = ", ".join(map(str, sorted(inputs)))
    if wanted is None and fitting:
        return fitting[0]
    if wanted is None:
        raise MsLongctxError(f"int4: none of the groups {GROUPS} divides the input sizes {sizes}; use --method int8")
    if wanted < 1 or any(n % wanted for n in inputs):
        advice = f"use --group_size {fitting[0]}" if fitting else "use --method int8"
        raise MsLongctxError(f"--group_size {wanted} does not divide the input sizes {sizes} of the matrices; {advice}")
    return wanted
