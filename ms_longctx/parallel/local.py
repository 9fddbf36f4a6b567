# SPDX-License-Identifier: Apache-2.0
"""Cells of the model that each worker computes on its own share, inside MindSpore's semi-automatic graph.

The compiler splits operators one by one; a fused operator, a rotation or a whole attention it cannot split, or only
with detours. Where the result on a share needs nothing but that share (or says itself what it sends to whom), the
cell is put into the graph as one ``ops.Morph`` with the layouts of its inputs and outputs, and its own code runs on
the share. So the arithmetic stays in :mod:`ms_longctx.nn` and :mod:`ms_longctx.attention`, as on one device.

Layouts are over the mesh ``(data, mp)``: activations have one row a data worker, heads and features are split over mp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

Axes = tuple[str, ...]  # of one tensor: a name of the mesh or "None" for each dimension


def local_operator(
    mesh: Any, function: Callable, shape: Callable, dtype: Callable, inputs: Sequence[Axes], outputs: Sequence[Axes]
) -> Any:
    """``function`` of shares as an operator of whole tensors.

    Args:
        mesh: ``mindspore.parallel.Layout``.
        function: of as many tensors as ``inputs``; graph mode parses its source.
        shape, dtype: shapes and types of the results from those of the inputs, whole or shares.
        inputs, outputs: how each tensor is split.
    """
    operator = ops.Morph(function, shape, dtype).add_prim_attr("self_define_shard", True)
    for effect in ("side_effect_backprop", "side_effect_mem", "side_effect_io"):
        operator.add_prim_attr(effect, False)
    ins, outs = (tuple(mesh(*axes) for axes in tensors) for tensors in (inputs, outputs))
    return operator.shard(in_strategy=ins, out_strategy=outs)


class LocalAttention(nn.Cell):
    """Attention with its heads split over mp; replaces :class:`~ms_longctx.attention.flash.FlashAttention`.

    Args:
        attention: what each worker computes.
        mesh: of the layouts.
        sequences: how many sequences (or pieces of them) stand one after another in a worker's row.
    """

    def __init__(self, attention: nn.Cell, mesh: Any, sequences: int) -> None:
        super().__init__(auto_prefix=False)
        heads = ("data", "None", "mp", "None")
        spec = attention.spec
        inputs: list[Axes] = [heads, heads, heads]
        if spec.documents:
            inputs.append(("data", "None"))
        if spec.alibi:
            inputs.append(("mp",))
        self.spec = spec
        self.operator = local_operator(mesh, _attention_function(attention, sequences), _first, _first, inputs, [heads])

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor | None = None,
        k_documents: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        if self.spec.documents and self.spec.alibi:
            return self.operator(q, k, v, q_documents, alibi_slopes)
        if self.spec.documents:
            return self.operator(q, k, v, q_documents)
        if self.spec.alibi:
            return self.operator(q, k, v, alibi_slopes)
        return self.operator(q, k, v)


class LocalRotary(nn.Cell):
    """Rotation of queries or keys; replaces :class:`~ms_longctx.nn.rotary.RotaryEmbedding`."""

    def __init__(self, rotary: nn.Cell, mesh: Any) -> None:
        super().__init__(auto_prefix=False)
        heads, table = ("data", "None", "mp", "None"), ("data", "None", "None")

        def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotary(x, cos, sin)

        self.operator = local_operator(mesh, rotate, _first, _first, [heads, table, table], [heads])

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.operator(x, cos, sin)


class LocalRotaryTables(nn.Cell):
    """Cosines and sines of the positions; replaces :class:`~ms_longctx.nn.rope.RotaryTables`."""

    def __init__(self, tables: nn.Cell, mesh: Any, head_dim: int) -> None:
        super().__init__(auto_prefix=False)

        def look_up(position_ids: Tensor) -> Any:
            return tables(position_ids.shape[1], position_ids)

        def shape(positions: Any) -> Any:
            full = list(positions) + [head_dim]
            return (full, full)

        def dtype(_: Any) -> Any:
            return (ms.float32, ms.float32)

        table = ("data", "None", "None")
        self.operator = local_operator(mesh, look_up, shape, dtype, [("data", "None")], [table, table])

    def construct(self, seq_length: int, position_ids: Tensor) -> Any:
        cos, sin = self.operator(position_ids)
        return ops.stop_gradient(cos), ops.stop_gradient(sin)


class LocalSplitQKV(nn.Cell):
    """Queries, keys and values of each worker's heads; replaces :class:`~ms_longctx.nn.qkv.SplitQKV`."""

    def __init__(self, split: nn.Cell, mesh: Any) -> None:
        super().__init__(auto_prefix=False)
        group, head_dim = split.group, split.head_dim

        def take_apart(qkv: Tensor) -> Any:
            return split(qkv)

        def shape(qkv: Any) -> Any:
            kv_heads = qkv[2] // ((group + 2) * head_dim)
            kv = [qkv[0], qkv[1], kv_heads, head_dim]
            return ([qkv[0], qkv[1], kv_heads * group, head_dim], kv, kv)

        def dtype(qkv: Any) -> Any:
            return (qkv, qkv, qkv)

        heads = ("data", "None", "mp", "None")
        self.operator = local_operator(mesh, take_apart, shape, dtype, [("data", "None", "mp")], [heads, heads, heads])

    def construct(self, qkv: Tensor) -> Any:
        return self.operator(qkv)


class LocalSwiGLU(nn.Cell):
    """The gate with its features split over mp; replaces :class:`~ms_longctx.nn.mlp.SwiGLU`."""

    def __init__(self, act: nn.Cell, mesh: Any) -> None:
        super().__init__(auto_prefix=False)
        features = ("data", "None", "mp")

        def gate_up(gate: Tensor, up: Tensor) -> Tensor:
            return act(gate, up)

        self.operator = local_operator(mesh, gate_up, _first, _first, [features, features], [features])

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.operator(gate, up)


def _first(*arguments: Any) -> Any:
    return arguments[0]


def _attention_function(attention: nn.Cell, sequences: int) -> Callable:
    """``attention`` on rows that hold several sequences; one function for each set of optional inputs."""
    spec = attention.spec

    def apart(x: Tensor) -> Tensor:
        return ops.reshape(x, (sequences, x.shape[1] // sequences) + x.shape[2:])

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.reshape(attention(apart(q), apart(k), apart(v)), q.shape)

    def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        ids = apart(documents)
        return ops.reshape(attention(apart(q), apart(k), apart(v), ids, ids), q.shape)

    def biased(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return ops.reshape(attention(apart(q), apart(k), apart(v), None, None, slopes), q.shape)

    def packed_biased(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, slopes: Tensor) -> Tensor:
        ids = apart(documents)
        return ops.reshape(attention(apart(q), apart(k), apart(v), ids, ids, slopes), q.shape)

    if spec.documents:
        return packed_biased if spec.alibi else packed
    return biased if spec.alibi else plain
