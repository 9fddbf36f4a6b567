# SPDX-License-Identifier: Apache-2.0
"""How a Llama model is split over Ascend devices: every operator's strategy, from one :class:`Strategy`.

MindSpore's compiler splits tensors and inserts the communication; it has to know how each operator is split. All of
that is said here, from outside: the model's code knows nothing of it. Two kinds of places are named:

- operators that are members of the model's cells (``linear.matmul``, ``norm.rms_norm``, ...) get a strategy;
- cells that a worker can compute on its share alone are replaced by their counterparts of
  :mod:`ms_longctx.parallel.local`, and the loss by one whose logits are split.

The scheme is Megatron's: columns of the first matrix of a pair and rows of the second are split over mp, with one sum
after the second; with ``sequence_parallel`` that sum leaves its result split over the tokens, where norms and residual
additions work on a share (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198).

Activations have one row a data worker, ``(dp * cp, tokens)``; several sequences of a worker stand one after another in
its row, so that every reshape between rows and tokens keeps each worker's tokens together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import nn
from mindspore.parallel import Layout

from ms_longctx.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from ms_longctx.nn.linear import Linear
from ms_longctx.nn.norm import RMSNorm
from ms_longctx.parallel.cross_entropy import ShardedCrossEntropy
from ms_longctx.parallel.local import LocalAttention, LocalRotary, LocalRotaryTables, LocalSplitQKV, LocalSwiGLU
from ms_longctx.parallel.lora import ShardedLora
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.tuning.lora import LoraLinear


def shard_model(model: LlamaForCausalLM, strategy: Strategy, sequences: int) -> None:
    """Set the strategies of a model that was built for Ascend; call it once.

    Args:
        model: changed in place; its parameters keep their names.
        strategy: must fit the model (:meth:`Strategy.check_model`).
        sequences: sequences, or pieces of them, in a worker's row.
    """
    _Sharding(model, strategy, sequences).apply()


class _Sharding:
    def __init__(self, model: LlamaForCausalLM, strategy: Strategy, sequences: int) -> None:
        self.model = model
        self.strategy = strategy
        self.sequences = sequences
        self.data, self.mp = strategy.dp * strategy.cp, strategy.mp
        self.mesh: Any = Layout((self.data, self.mp), ("data", "mp"))
        # The residual stream (rows, tokens, hidden).
        self.stream = (self.data, self.mp if strategy.sequence_parallel else 1, 1)

    def apply(self) -> None:
        body = self.model.model
        if self.strategy.vocab_parallel:
            body.embed_tokens.gather.shard(((self.mp, 1), (self.data, 1)))
        else:
            body.embed_tokens.gather.shard(((1, 1), (self.data, 1)))
        if body.use_rope:
            body.rope = LocalRotaryTables(body.rope, self.mesh, self.model.config.head_size)
        for layer in body.layers:
            self._layer(layer)
        self._norm(body.norm)
        vocabulary = self.model.config.vocab_size
        self.model.loss = ShardedCrossEntropy(self.data, self.mp, self.strategy.vocab_parallel, vocabulary)

    def _layer(self, layer: LlamaDecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        names = ("qkv_proj",) if attention.parallel_attention else ("q_proj", "k_proj", "v_proj")
        for cell, name in [*((attention, name) for name in names), (mlp, "gate_proj"), (mlp, "up_proj")]:
            self._linear(cell, name, self._columns)
        for cell, name in ((attention, "o_proj"), (mlp, "down_proj")):
            self._linear(cell, name, self._rows)
        if attention.parallel_attention:
            attention.split_qkv = LocalSplitQKV(attention.split_qkv, self.mesh)
        if attention.use_rope:
            attention.rotary = LocalRotary(attention.rotary, self.mesh)
        attention.attention = LocalAttention(attention.attention, self.mesh, self.sequences)
        attention.packed_attention = LocalAttention(attention.packed_attention, self.mesh, self.sequences)
        mlp.act = LocalSwiGLU(mlp.act, self.mesh)
        self._norm(layer.input_layernorm)
        self._norm(layer.post_attention_layernorm)
        layer.add.shard((self.stream, self.stream))

    def _linear(self, cell: nn.Cell, name: str, split: Callable[[Linear], None]) -> None:
        """Split a linear layer of ``cell``, and its adapter if it has one."""
        linear = getattr(cell, name)
        if isinstance(linear, LoraLinear):
            split(linear.base_layer)
            by_columns = split == self._columns
            replacement = ShardedLora(linear, self.data, self.mp, None if by_columns else self.stream)
            cell.insert_child_to_cell(name, replacement)  # an assignment would rename the parameters
        else:
            split(linear)

    def _columns(self, linear: Linear) -> None:
        """Outputs split over mp; every worker has the whole input."""
        linear.matmul.shard(((self.data, 1), (self.mp, 1)))
        linear.add.shard(((self.data, self.mp), (self.mp,)))

    def _rows(self, linear: Linear) -> None:
        """Inputs split over mp; the partial results are summed, and left split over tokens in the latter case."""
        tokens = self.data * self.stream[1]
        linear.matmul.shard(((self.data, self.mp), (1, self.mp)), ((tokens, 1),))
        linear.add.shard(((tokens, 1), (1,)))

    def _norm(self, norm: RMSNorm) -> None:
        # The compiler has no strategy for the fused addition; its backend fuses the two operators again.
        norm.fuse_add = False
        norm.add.shard((self.stream, self.stream))
        norm.rms_norm.shard((self.stream, (1,)))


def set_stages(model: LlamaForCausalLM, strategy: Strategy) -> None:
    """Give every cell its pipeline stage."""
    body = model.model
    body.embed_tokens.pipeline_stage = 0
    layers: list[nn.Cell] = list(body.layers)
    start = 0
    for stage, count in enumerate(strategy.stage_layers(len(layers))):
        for layer in layers[start : start + count]:
            layer.pipeline_stage = stage
        start += count
    for cell in (body.norm, model.lm_head, model.loss):
        cell.pipeline_stage = strategy.pp - 1
