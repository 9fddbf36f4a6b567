# SPDX-License-Identifier: Apache-2.0
"""The model as it is exported: plain operators, the key-value cache as inputs and outputs.

One Cell serves the prompt and the answer: it reads ``C`` tokens that follow those in a cache of ``L`` columns and
returns logits with the keys and values of these tokens; whoever runs it writes them into the cache
(:mod:`ms_longctx.export.session`). The cache goes in unchanged, so nothing of its size is copied, and every row has a
length of its own, so prompts need no padding on the left.

Operators are those that MindSpore on every device, ONNX (opset 11) and MindSpore Lite 2.0 read: no fused kernels, no
Rsqrt (imprecise in Lite), no boolean selection, at most four axes, and numbers as tensors (``x * 2.0`` is an operator
of its own that older programs do not know). Norms, rotation and softmax are computed in fp32.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from ms_longctx.nn.alibi import alibi_slopes
from ms_longctx.nn.linear import Linear
from ms_longctx.nn.norm import RMSNorm
from ms_longctx.nn.rope import rope_frequencies

# Taken off the score of a column that is not seen: its weight becomes 0. It fits fp16, in which Lite may store it.
_HIDDEN = 3.0e4


class PlainLinear(nn.Cell):
    """``rows (N, in) @ weight.T + bias`` with the parameters of a :class:`~ms_longctx.nn.linear.Linear`."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(auto_prefix=False)
        self.weight = linear.weight
        self.bias = linear.bias
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, rows: Tensor) -> Tensor:
        out = self.matmul(rows, ops.cast(self.weight, rows.dtype))
        if self.bias is not None:
            out = out + ops.cast(self.bias, rows.dtype)
        return out


class PlainNorm(nn.Cell):
    """RMSNorm of fp32 ``rows (N, hidden)`` with the weight of a :class:`~ms_longctx.nn.norm.RMSNorm`."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__(auto_prefix=False)
        self.weight = norm.weight
        self.eps = _constant(norm.eps)
        self.mean = ops.ReduceMean(keep_dims=True)
        self.square = ops.Square()
        self.sqrt = ops.Sqrt()
        self.divide = ops.RealDiv()

    def construct(self, rows: Tensor) -> Tensor:
        root = self.sqrt(self.mean(self.square(rows), 1) + self.eps)
        return self.divide(rows, root) * ops.cast(self.weight, ms.float32)


class PlainAttention(nn.Cell):
    """Grouped-query attention over a cache and the new tokens.

    Query heads that share a key/value head are rows of one matrix: row ``g * C + i`` is head g of the group at new
    token i. Nothing is repeated.

    Inputs:
        rows: ``(B * C, hidden)`` of the compute dtype.
        cos, sin: ``(B, C, 1, D)`` fp32, or ``None`` with ALiBi.
        bias: added to the scores, fp32, broadcast to ``(B, Hkv, G * C, L + C)``.
        keys, values: ``(B, Hkv, L, D)`` of the compute dtype.

    Returns:
        ``(B * C, H * D)``, and the new keys and values ``(B, Hkv, C, D)``.
    """

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig, batch: int) -> None:
        super().__init__(auto_prefix=False)
        attention = layer.self_attn
        self.q_proj, self.k_proj = PlainLinear(attention.q_proj), PlainLinear(attention.k_proj)
        self.v_proj, self.o_proj = PlainLinear(attention.v_proj), PlainLinear(attention.o_proj)
        self.batch, self.heads, self.kv_heads = batch, config.num_attention_heads, config.kv_heads
        self.dim = config.head_size
        self.scale = _constant(config.head_size**-0.5)
        self.halves = ops.Split(axis=3, output_num=2)
        self.join = ops.Concat(axis=3)
        self.transpose = ops.Transpose()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.softmax = ops.Softmax(axis=3)

    def construct(
        self, rows: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = rows.dtype
        q = self.rotate(self.split_heads(self.q_proj(rows), self.heads), cos, sin) * self.scale
        k = self.rotate(self.split_heads(self.k_proj(rows), self.kv_heads), cos, sin)
        q = self.transpose(ops.cast(q, dtype), (0, 2, 1, 3))
        k = self.transpose(ops.cast(k, dtype), (0, 2, 1, 3))
        v = self.transpose(self.split_heads(self.v_proj(rows), self.kv_heads), (0, 2, 1, 3))
        q = ops.reshape(q, (self.batch, self.kv_heads, -1, self.dim))
        scores = self.join((self.scores(q, keys), self.scores(q, k)))
        weights = ops.cast(self.softmax(ops.cast(scores, ms.float32) + bias), dtype)
        past = keys.shape[2]
        out = self.mix(weights[:, :, :, :past], values) + self.mix(weights[:, :, :, past:], v)
        out = self.transpose(ops.reshape(out, (self.batch, self.heads, -1, self.dim)), (0, 2, 1, 3))
        return self.o_proj(ops.reshape(out, (-1, self.heads * self.dim))), k, v

    def split_heads(self, rows: Tensor, heads: int) -> Tensor:
        """``(B * C, heads * D)`` as ``(B, C, heads, D)``."""
        return ops.reshape(rows, (self.batch, -1, heads, self.dim))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding (see :mod:`ms_longctx.nn.rotary`) in fp32; without tables only the cast."""
        x = ops.cast(x, ms.float32)
        if cos is None:
            return x
        first, second = self.halves(x)
        return x * cos + self.join((-second, first)) * sin


class PlainLayer(nn.Cell):
    """A decoder layer over the fp32 residual stream ``(B * C, hidden)``; see :class:`PlainAttention`."""

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig, batch: int, dtype: ms.Type) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.input_norm = PlainNorm(layer.input_layernorm)
        self.attention = PlainAttention(layer, config, batch)
        self.output_norm = PlainNorm(layer.post_attention_layernorm)
        self.gate_proj, self.up_proj = PlainLinear(layer.mlp.gate_proj), PlainLinear(layer.mlp.up_proj)
        self.down_proj = PlainLinear(layer.mlp.down_proj)
        self.sigmoid = ops.Sigmoid()

    def construct(
        self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        h = ops.cast(self.input_norm(x), self.dtype)
        h, k, v = self.attention(h, cos, sin, bias, keys, values)
        x = ops.cast(ops.cast(x, self.dtype) + h, ms.float32)
        h = ops.cast(self.output_norm(x), self.dtype)
        gate = ops.cast(self.gate_proj(h), ms.float32)
        h = gate * self.sigmoid(gate) * ops.cast(self.up_proj(h), ms.float32)
        h = self.down_proj(ops.cast(h, self.dtype))
        return ops.cast(ops.cast(x, self.dtype) + h, ms.float32), k, v


class CachedGraph(nn.Cell):
    """What both exported graphs share: from token ids and a cache to hidden states and new keys and values.

    Args:
        model: gives the parameters, which keep their names.
        batch: rows B.
        chunk: new tokens C a row; ``None`` leaves it open.
        length: columns L of the cache; ``None`` leaves it open.
        rope_length: longest sequence in tokens; positions beyond ``rope_length + chunk`` do not exist.

    Raises:
        MsLongctxError: the model has adapters or a fused projection.
    """

    def __init__(
        self, model: LlamaForCausalLM, batch: int, chunk: int | None, length: int | None, rope_length: int
    ) -> None:
        super().__init__(auto_prefix=False)
        _refuse_unusual(model)
        config = model.config
        self.batch, self.chunk, self.length = batch, chunk, length
        self.dtype = model.model.compute_dtype
        self.hidden_size = config.hidden_size
        self.embedding: Parameter = model.model.embed_tokens.weight
        self.layers = nn.CellList(
            [PlainLayer(layer, config, batch, self.dtype) for layer in model.model.layers], auto_prefix=False
        )
        self.norm = PlainNorm(model.model.norm)
        self.lm_head = PlainLinear(model.lm_head)
        self.gather = ops.Gather()
        self.join = ops.Concat(axis=3)
        self.group = config.num_attention_heads // config.kv_heads
        self.kv_heads = config.kv_heads
        self.window = None if config.sliding_window is None else _constant(config.sliding_window)
        self.one, self.hidden_score = _constant(1.0), _constant(_HIDDEN)
        self.use_rope = config.position_embedding == "rope"
        self.positions = None if chunk is None else Tensor(np.arange(chunk, dtype=np.int32).reshape(1, -1))
        self.columns = None if length is None else Tensor(np.arange(length, dtype=np.int32).reshape(1, 1, 1, -1))
        if self.use_rope:
            cos, sin = _half_tables(config, rope_length, rope_length + (chunk or rope_length))
            self.cos_table, self.sin_table = Tensor(cos), Tensor(sin)
            self.widen = ops.Concat(axis=3)
        else:
            slopes = alibi_slopes(config.num_attention_heads).reshape(1, config.kv_heads, self.group, 1)
            self.slopes = Tensor(slopes)

    def hidden(
        self, input_ids: Tensor, offset: Tensor, caches: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states ``(B * C, hidden)`` fp32 after the last norm, and the new keys and values layer by layer."""
        steps = ops.reshape(ops.arange(input_ids.shape[1]), (1, -1)) if self.positions is None else self.positions
        columns = self.columns
        if columns is None:
            columns = ops.reshape(ops.arange(caches[0].shape[2]), (1, 1, 1, -1))
        steps = ops.cast(steps, ms.int32)
        offset = ops.reshape(offset, (self.batch, 1))
        cos, sin = None, None
        if self.use_rope:
            cos, sin = self.tables(offset + steps)
        bias = self.score_bias(steps, ops.cast(columns, ms.int32), ops.reshape(offset, (self.batch, 1, 1, 1)))
        x = ops.reshape(self.gather(self.embedding, input_ids, 0), (-1, self.hidden_size))
        x = ops.cast(x, ms.float32)
        fresh: tuple[Tensor, ...] = ()
        index = 0
        for layer in self.layers:
            x, k, v = layer(x, cos, sin, bias, caches[index], caches[index + 1])
            fresh += (k, v)
            index += 2
        return self.norm(x), fresh

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits of fp32 hidden states ``(N, hidden)``."""
        return ops.cast(self.lm_head(ops.cast(hidden, self.dtype)), ms.float32)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(B, C, 1, D)`` of ``positions (B, C)``."""
        cos = ops.expand_dims(self.gather(self.cos_table, positions, 0), 2)
        sin = ops.expand_dims(self.gather(self.sin_table, positions, 0), 2)
        return self.widen((cos, cos)), self.widen((sin, sin))

    def score_bias(self, steps: Tensor, columns: Tensor, offset: Tensor) -> Tensor:
        """What the mask (and ALiBi) adds to scores: ``(B, 1 or Hkv, G * C, L + C)`` fp32.

        A cache column is seen when it is filled, a new token by itself and by those after it.
        """
        rows = ops.reshape(ops.tile(steps, (1, self.group)), (1, 1, -1, 1))
        fresh = ops.reshape(steps, (1, 1, 1, -1))
        # Zeros that give the two parts the same rows: each row of the batch, each query.
        each_batch, each_query = offset - offset, rows - rows
        past_seen = ops.cast(ops.less(columns + each_query, offset), ms.float32)
        fresh_seen = ops.cast(ops.greater_equal(rows + each_batch, fresh), ms.float32)
        # Tokens from the column to the query, as fp32: exact up to 16 million.
        past_distance = ops.cast(rows + offset - columns, ms.float32)
        fresh_distance = ops.cast(rows + each_batch - fresh, ms.float32)
        if self.window is not None:
            past_seen = past_seen * ops.cast(ops.less(past_distance, self.window), ms.float32)
            fresh_seen = fresh_seen * ops.cast(ops.less(fresh_distance, self.window), ms.float32)
        bias = (self.join((past_seen, fresh_seen)) - self.one) * self.hidden_score
        if not self.use_rope:
            slopes = self.slopes + ops.cast(fresh - fresh, ms.float32)
            distance = self.join((past_distance, fresh_distance))
            bias = bias - ops.reshape(slopes, (1, self.kv_heads, -1, 1)) * distance
        return bias


class PrefillGraph(CachedGraph):
    """A piece of the prompts.

    Inputs:
        input_ids: ``(B, C)`` int32; what follows a row's last token is ignored.
        offset: ``(B,)`` int32, tokens of the row in the cache.
        last: ``(B,)`` int32, index in 0..C-1 of the token whose logits are wanted.
        caches: for each layer keys, then values ``(B, Hkv, L, D)``; finite beyond ``offset``.

    Returns:
        logits ``(B, V)`` fp32, then for each layer the new keys and values ``(B, Hkv, C, D)``.
    """

    def construct(self, input_ids: Tensor, offset: Tensor, last: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        hidden, fresh = self.hidden(input_ids, offset, caches)
        if self.batch > 1:
            starts = ops.arange(self.batch) * input_ids.shape[1]
            last = last + ops.cast(starts, ms.int32)
        return (self.logits(self.gather(hidden, last, 0)),) + fresh


class DecodeGraph(CachedGraph):
    """The next token of every row: as :class:`PrefillGraph` with C = 1 and without ``last``."""

    def construct(self, input_ids: Tensor, offset: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        hidden, fresh = self.hidden(input_ids, offset, caches)
        return (self.logits(hidden),) + fresh


def _constant(value: float) -> Tensor:
    """A number as an fp32 tensor."""
    return Tensor(np.array(value, np.float32))


def _half_tables(config: LlamaConfig, rope_length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``(rows, D / 2)``, computed in float64 and cast to fp32 last."""
    inv_freq, factor = rope_frequencies(config, rope_length)
    angles = np.arange(rows, dtype=np.float64)[:, None] * inv_freq
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _refuse_unusual(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if attention.parallel_attention:
            raise MsLongctxError("export: the model has a fused q, k, v; load it with parallel_attention=False")
        cells = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if any(type(cell) is not Linear for cell in (*cells, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            raise MsLongctxError("export: the model has adapters; put them into the weights with merge_and_unload")
