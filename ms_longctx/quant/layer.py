# SPDX-License-Identifier: Apache-2.0
"""One decoder layer at a time: its weights, what flows into its matrices, and statistics of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.models.llama import LlamaDecoderLayer
from ms_longctx.nn.rope import RotaryTables

Floats = NDArray[np.float32]
LayerWeights = dict[str, Floats]
# Matrices of a layer that share their inputs; they are scaled and kept together.
UNITS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
HALVES = (("qkv", "o"), ("gate_up", "down"))  # units of attention and MLP, in order
MODULES = tuple(module for modules in UNITS.values() for module in modules)
_TOKENS = 2048  # that go through a layer at a time
Watch = Callable[[str, Floats], None]


def read_layer(source: TensorSource, index: int) -> LayerWeights:
    """The tensors of a decoder layer in fp32, by their names inside the layer (``mlp.up_proj.weight``)."""
    prefix = f"model.layers.{index}."
    names = [name for name in source.shapes() if name.startswith(prefix) and not name.endswith("inv_freq")]
    return {name[len(prefix) :]: source.read(name).astype(np.float32, copy=False) for name in names}


class LayerRunner:
    """Runs decoder layers whose weights come and go; only one layer is in memory.

    Args:
        config: the architecture.
        length: tokens of each row.
    """

    def __init__(self, config: LlamaConfig, length: int) -> None:
        config = replace(config, parallel_attention=False)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        if ms.get_context("device_target") == "CPU":
            ms.runtime.launch_blocking()
        with no_init_parameters():
            self._layer = LlamaDecoderLayer(config, ms.float32)
        self._layer.set_train(False)
        self._parameters = dict(self._layer.parameters_and_names())
        self._length = length
        self._tables = RotaryTables(config)(length) if config.position_embedding == "rope" else (None, None)
        self._watch: Watch | None = None
        self._int8_inputs: frozenset[str] = frozenset()

    def load(self, weights: Mapping[str, Floats]) -> None:
        """Take these weights, by their names inside the layer."""
        for name, parameter in self._parameters.items():
            parameter.set_data(Tensor.from_numpy(np.ascontiguousarray(weights[name])))

    def run(
        self,
        states: NDArray[np.floating],
        int8_inputs: frozenset[str] = frozenset(),
        watch: Watch | None = None,
        in_place: bool = False,
        halves: Sequence[int] = (0, 1),
    ) -> NDArray[np.floating]:
        """Hidden states ``(rows, length, hidden)`` behind the layer, of the type of those before it.

        Args:
            states: before the layer.
            int8_inputs: units whose inputs are rounded to int8, a scale a token.
            watch: gets the name of a unit and a chunk of its inputs ``(tokens, features)`` as they come.
            in_place: overwrite ``states``.
            halves: 0 is attention, 1 the MLP.
        """
        self._watch, self._int8_inputs = watch, int8_inputs
        out = states if in_place else np.empty_like(states)
        for part in self.chunks(states):
            x = _tensor(states[part])
            for half in halves:
                x = x + self._leave(half, self._middle(half, self._enter(half, x)))
            out[part] = x.asnumpy()
        return out

    def chunks(self, states: NDArray[np.floating]) -> list[slice]:
        """Rows that go through a layer at a time."""
        step = max(1, _TOKENS // self._length)
        return [slice(start, start + step) for start in range(0, len(states), step)]

    def inputs(self, unit: str, states: NDArray[np.floating], int8_inputs: frozenset[str] = frozenset()) -> Floats:
        """What the unit's matrices get ``(tokens, features)`` when ``states`` come before its half of the layer."""
        self._watch, self._int8_inputs = None, int8_inputs
        half = next(half for half, units in enumerate(HALVES) if unit in units)
        x = self._enter(half, _tensor(states))
        if unit == HALVES[half][1]:
            x = self._middle(half, x)
        array: Floats = x.asnumpy()
        return array.reshape(-1, array.shape[-1])

    def _enter(self, half: int, x: Tensor) -> Tensor:
        norm = self._layer.post_attention_layernorm if half else self._layer.input_layernorm
        return self._input(HALVES[half][0], norm(x))

    def _middle(self, half: int, x: Tensor) -> Tensor:
        attention, mlp = self._layer.self_attn, self._layer.mlp
        if half:
            return self._input("down", mlp.act(mlp.gate_proj(x), mlp.up_proj(x)))
        q, k, v = attention.project(x, *self._tables)
        h = attention.attention(q, k, v, None, None, attention.slopes)
        return self._input("o", ops.reshape(h, (*x.shape[:-1], -1)))

    def _leave(self, half: int, x: Tensor) -> Tensor:
        return self._layer.mlp.down_proj(x) if half else self._layer.self_attn.o_proj(x)

    def _input(self, unit: str, x: Tensor) -> Tensor:
        if self._watch is None and unit not in self._int8_inputs:
            return x
        array = x.asnumpy()
        if self._watch is not None:
            self._watch(unit, array.reshape(-1, array.shape[-1]))
        return Tensor.from_numpy(round_inputs(array)) if unit in self._int8_inputs else x


def _tensor(states: NDArray[np.floating]) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(states, np.float32))


def round_inputs(x: Floats) -> Floats:
    """``x (..., k)`` rounded to int8 with a symmetric scale for each row, as the kernels and vLLM do it."""
    scales = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    rates = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    rounded: Floats = np.rint(x * rates) * scales
    return rounded


def token_stride(tokens: int) -> int:
    """One in so many tokens is enough for second moments."""
    return max(1, tokens // _GRAM_TOKENS)


class InputStats:
    """What is remembered of the inputs ``x`` of a unit.

    Args:
        features: of x.
        tokens: that will come.
    """

    def __init__(self, features: int, tokens: int) -> None:
        self._every = token_stride(tokens)
        self._sample_every = max(1, tokens // _SAMPLE_TOKENS)
        self._sum = np.zeros(features, np.float64)
        self._tokens = 0
        self._samples: list[Floats] = []
        self.gram = np.zeros((features, features), np.float32)
        self.largest = np.zeros(features, np.float32)

    def add(self, x: Floats) -> None:
        """Add tokens ``(n, features)``."""
        part = np.ascontiguousarray(x[:: self._every])
        self.gram += part.T @ part
        size = np.abs(x)
        np.maximum(self.largest, size.max(0), out=self.largest)
        self._sum += size.sum(0, dtype=np.float64)
        self._tokens += len(x)
        self._samples.append(x[:: self._sample_every].copy())

    @property
    def mean(self) -> Floats:
        """Mean of |x| of each feature."""
        return (self._sum / max(self._tokens, 1)).astype(np.float32)

    @property
    def sample(self) -> Floats:
        """Some of the tokens ``(about 1000, features)``."""
        return np.concatenate(self._samples)


_GRAM_TOKENS = 32768  # enough for the second moments of a few thousand features
_SAMPLE_TOKENS = 1024
