# SPDX-License-Identifier: Apache-2.0
"""Generation through the CPU kernel that holds a whole Llama."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from ms_longctx import kernels
from ms_longctx.kernels.decode import LlamaCached
from ms_longctx.kernels.quant import PackedMatrix
from ms_longctx.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from ms_longctx.nn.alibi import alibi_slopes
from ms_longctx.nn.linear import Linear
from ms_longctx.nn.rope import rope_frequencies
from ms_longctx.quant.cells import Packed, QuantizedLinear

# Tokens of a prompt at a time: enough for matrix products at full speed, and small beside the cache.
CHUNK = 1024


class KernelEngine:
    """An engine (see :class:`ms_longctx.generation.engine.Engine`) for models on the CPU with fp32 activations.

    Matrices are fp32, int8 or int4; nothing is compiled.

    Args:
        model: a model that :func:`usable` accepts.
        prompts: token ids of each row, none empty.
        max_new_tokens: tokens that may be appended to each row.
    """

    def __init__(self, model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        config = model.config
        lengths = np.array([len(prompt) for prompt in prompts])
        self._width = int(lengths.max())
        self._shift = (self._width - lengths)[:, None]
        self._tokens = np.zeros((len(prompts), self._width), np.int32)
        for row, prompt in zip(self._tokens, prompts, strict=True):
            row[self._width - len(prompt) :] = prompt
        room = self._width + max_new_tokens
        # Not initialised: memory is taken as tokens come, and only what was written is read.
        shape = (len(prompts), room, config.kv_heads, config.head_size)
        keys, values = ([np.empty(shape, np.float32) for _ in model.model.layers] for _ in range(2))
        documents = None
        if self._shift.any():
            documents = np.where(np.arange(room) < self._shift, -1, 0).astype(np.int32)
        rope = config.position_embedding == "rope"
        self._tables = _rotary_tables(*rope_frequencies(config, room), room) if rope else None
        slopes = None if rope else np.asarray(alibi_slopes(config.num_attention_heads), np.float32)
        weights = list(_weights(model))
        self._forward_all = LlamaCached(config, weights, keys, values, slopes, documents)
        self._used = 0

    def prefill(self) -> NDArray[np.float32]:
        """See :class:`ms_longctx.generation.engine.Engine`."""
        for start in range(0, self._width, CHUNK):
            logits = self._forward(np.ascontiguousarray(self._tokens[:, start : start + CHUNK]))
        return logits

    def step(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """See :class:`ms_longctx.generation.engine.Engine`."""
        return self._forward(tokens[:, None].astype(np.int32))

    def _forward(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        start = self._used
        self._used += tokens.shape[1]
        if self._tables is None:
            return self._forward_all(tokens, None, None, start)
        positions = np.maximum(np.arange(start, self._used) - self._shift, 0)
        cos, sin = (table[positions] for table in self._tables)
        return self._forward_all(tokens, cos, sin, start)


def usable(model: LlamaForCausalLM) -> bool:
    """Whether :class:`KernelEngine` can run ``model``: on the CPU, activations in fp32, no adapters around layers."""
    if not kernels.available() or ms.get_context("device_target") != "CPU":
        return False
    if model.model.compute_dtype != ms.float32:
        return False
    if any(type(cell) not in (Linear, QuantizedLinear) for layer in model.model.layers for cell in _projections(layer)):
        return False
    return all(isinstance(w, PackedMatrix) or w.dtype == np.float32 for w in _weights(model))


def _projections(layer: LlamaDecoderLayer) -> list[Linear]:
    """The projections of a layer in the kernel's order: those of the attention, then three of the MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (
        [attention.qkv_proj] if attention.parallel_attention else [attention.q_proj, attention.k_proj, attention.v_proj]
    )
    return [*inputs, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _weights(model: LlamaForCausalLM) -> Iterator[NDArray[np.float32] | PackedMatrix]:
    """The weights in the order of :class:`ms_longctx.kernels.decode.LlamaCached`, in the memory of the model."""
    yield from (_matrix(model.model.embed_tokens), model.model.norm.weight.asnumpy(), _matrix(model.lm_head))
    for layer in model.model.layers:
        *attention, gate, up, down = _projections(layer)
        yield layer.input_layernorm.weight.asnumpy()
        for cell in attention:
            yield from _affine(cell)
        yield layer.post_attention_layernorm.weight.asnumpy()
        for cell in (gate, up, down):
            yield from _affine(cell)


def _affine(cell: Linear | QuantizedLinear) -> Iterator[NDArray[np.float32] | PackedMatrix]:
    yield _matrix(cell)
    if cell.bias is not None:
        yield cell.bias.asnumpy()


def _matrix(cell: nn.Cell) -> NDArray[np.float32] | PackedMatrix:
    """The weight of a linear layer or an embedding."""
    array: NDArray[np.float32] | PackedMatrix = cell.packed if isinstance(cell, Packed) else cell.weight.asnumpy()
    return array


def _rotary_tables(inv_freq: NDArray[np.float64], factor: float, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``(length, head_dim)`` as :class:`ms_longctx.nn.rope.RotaryTables` has them."""
    angles = np.arange(length)[:, None] * inv_freq
    angles = np.concatenate([angles, angles], axis=1)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
