# SPDX-License-Identifier: Apache-2.0
"""Llama: decoder layers of grouped-query attention and SwiGLU, with Hugging Face's parameter names."""

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from numpy.typing import ArrayLike, NDArray

from ms_longctx.attention.context_parallel import ContextParallelAttention
from ms_longctx.attention.flash import FlashAttention
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.auto import open_checkpoint
from ms_longctx.models.checkpoint import as_dtype, load_parameters
from ms_longctx.models.hf import save_model
from ms_longctx.nn.alibi import alibi_slopes
from ms_longctx.nn.embedding import Embedding
from ms_longctx.nn.kv_cache import KVCache
from ms_longctx.nn.linear import Linear
from ms_longctx.nn.loss import LinearCrossEntropy
from ms_longctx.nn.mlp import MLP
from ms_longctx.nn.norm import RMSNorm
from ms_longctx.nn.qkv import SplitQKV
from ms_longctx.nn.rope import RotaryTables
from ms_longctx.nn.rotary import RotaryEmbedding
from ms_longctx.parallel.strategy import Strategy


class LlamaAttention(nn.Cell):
    """Grouped-query self-attention.

    With ``parallel_attention`` one matrix ``qkv_proj`` gives all three projections. Its rows are grouped by
    key/value head (that head's queries, then its key, then its value), so that it can be cut by heads.
    """

    def __init__(self, config: LlamaConfig, dtype: ms.Type) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_size
        self.parallel_attention = config.parallel_attention
        self.use_rope = config.position_embedding == "rope"
        q_size, kv_size = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        options = (config.attention_bias, dtype, config.initializer_range)
        if self.parallel_attention:
            self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, *options)
            self.split_qkv = SplitQKV(self.num_heads // self.kv_heads, self.head_dim)
        else:
            self.q_proj = Linear(config.hidden_size, q_size, *options)
            self.k_proj = Linear(config.hidden_size, kv_size, *options)
            self.v_proj = Linear(config.hidden_size, kv_size, *options)
        self.o_proj = Linear(q_size, config.hidden_size, *options)
        self.rotary = RotaryEmbedding()
        self.implementation = "auto" if config.use_flash_attention else "reference"
        alibi = not self.use_rope
        self.slopes = Tensor(alibi_slopes(self.num_heads)) if alibi else None
        plain = MaskSpec(causal=True, window=config.sliding_window, alibi=alibi)
        packed = MaskSpec(causal=True, window=config.sliding_window, alibi=alibi, documents=True)
        self.attention = FlashAttention(plain, implementation=self.implementation)
        self.packed_attention = FlashAttention(packed, implementation=self.implementation)

    def context_parallel(self, strategy: Strategy, rank: int) -> tuple[nn.Cell, nn.Cell]:
        """Counterparts of ``attention`` and ``packed_attention`` over several devices."""
        plain, packed = (
            ContextParallelAttention(cell.spec, strategy, rank, implementation=self.implementation)
            for cell in (self.attention, self.packed_attention)
        )
        return plain, packed

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        if documents is None:
            out = self.attention(q, k, v, None, None, self.slopes)
        else:
            out = self.packed_attention(q, k, v, documents, documents, self.slopes)
        return self.o_proj(ops.reshape(out, x.shape[:-1] + (self.num_heads * self.head_dim,)))

    def cached(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        layer: int,
        offsets: Tensor,
        kv_documents: Tensor | None,
    ) -> Tensor:
        """Attend to everything in the cache, the tokens ``x`` included."""
        q, k, v = self.project(x, cos, sin)
        keys, values, offsets = cache.append(layer, k, v, offsets)
        if kv_documents is None:
            out = self.attention(q, keys, values, None, None, self.slopes, offsets)
        else:
            columns = ops.arange(x.shape[1]) + offsets[0]
            q_documents = ops.gather(kv_documents, columns, 1)
            out = self.packed_attention(q, keys, values, q_documents, kv_documents, self.slopes, offsets)
        return self.o_proj(ops.reshape(out, x.shape[:-1] + (self.num_heads * self.head_dim,)))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, S, H, D)`` and keys and values ``(B, S, Hkv, D)``, rotated."""
        batch, length = x.shape[:2]
        if self.parallel_attention:
            q, k, v = self.split_qkv(self.qkv_proj(x))
        else:
            q = ops.reshape(self.q_proj(x), (batch, length, self.num_heads, self.head_dim))
            k = ops.reshape(self.k_proj(x), (batch, length, self.kv_heads, self.head_dim))
            v = ops.reshape(self.v_proj(x), (batch, length, self.kv_heads, self.head_dim))
        if self.use_rope:
            q = self.rotary(q, cos, sin)
            k = self.rotary(k, cos, sin)
        return q, k, v


class LlamaDecoderLayer(nn.Cell):
    """Attention and MLP, each behind a norm and added to the residual stream ``(B, S, hidden)``."""

    def __init__(self, config: LlamaConfig, dtype: ms.Type) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, dtype, config.initializer_range)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.add = ops.Add()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        h = self.self_attn(self.input_layernorm(x), cos, sin, documents)
        x, h = self.post_attention_layernorm(x, h)
        return self.add(x, self.mlp(h))

    def cached(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        layer: int,
        offsets: Tensor,
        kv_documents: Tensor | None,
    ) -> Tensor:
        """The same layer over a chunk of tokens whose predecessors are in ``cache``."""
        h = self.self_attn.cached(self.input_layernorm(x), cos, sin, cache, layer, offsets, kv_documents)
        x, h = self.post_attention_layernorm(x, h)
        return self.add(x, self.mlp(h))


class LlamaModel(nn.Cell):
    """Embedding, decoder layers and last norm: token ids ``(B, S)`` to hidden states ``(B, S, hidden)``."""

    def __init__(self, config: LlamaConfig, dtype: ms.Type, compute_dtype: ms.Type) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.use_rope = config.position_embedding == "rope"
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, config.initializer_range)
        self.layers = nn.CellList([LlamaDecoderLayer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.sequence_pieces = 1  # of which this process has one, see LlamaForCausalLM.set_context_parallel
        if self.use_rope:
            self.rope = RotaryTables(config)

    def construct(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        x = ops.cast(self.embed_tokens(input_ids), self.compute_dtype)
        cos, sin = None, None
        if self.use_rope:
            cos, sin = self.rope(input_ids.shape[1] * self.sequence_pieces, position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, document_ids)
        return self.norm(x)

    def cached(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: KVCache,
        offsets: Tensor,
        kv_documents: Tensor | None,
    ) -> Tensor:
        """Hidden states of a chunk of tokens ``(B, C)`` whose predecessors are in ``cache``."""
        x = ops.cast(self.embed_tokens(input_ids), self.compute_dtype)
        cos, sin = None, None
        if self.use_rope:
            cos, sin = self.rope(cache.max_length, position_ids, cache.rope_length)
        index = 0
        for layer in self.layers:
            x = layer.cached(x, cos, sin, cache, index, offsets, kv_documents)
            index += 1
        return self.norm(x)


class LlamaForCausalLM(nn.Cell):
    """A Llama language model.

    Args:
        config: the architecture.
        dtype: type of the parameters.
        compute_dtype: type of the activations and matrix products; ``None`` means ``dtype``. Norms, rotation,
            softmax and loss are computed in fp32 anyway.

    Inputs:
        input_ids: ``(B, S)`` int32.
        labels: ``(B, S)`` int32, already shifted (``labels[t]`` is the target of position t), -100 = no
            target.
        position_ids: ``(B, S)`` int32, restarting in each document; ``None`` means 0, 1, 2, ...
        document_ids: ``(B, S)`` int32; tokens see only their own document, -1 is padding. ``None`` means that
            each row is one document.

    Returns:
        Logits ``(B, S, V)`` without ``labels``, else the mean loss in nats a token, an fp32 scalar.
    """

    def __init__(self, config: LlamaConfig, dtype: ms.Type = ms.float32, compute_dtype: ms.Type | None = None) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.companions: Path | None = None
        self.model = LlamaModel(config, dtype, compute_dtype or dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, config.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss = LinearCrossEntropy()
        # construct may not ask a Parameter whether it trains; this runs in Python whenever a graph is compiled.
        self._frozen = ms.constexpr(lambda: self.head_is_frozen, reuse_result=False)

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        if labels is None:
            return self.lm_head(self.model(input_ids, position_ids, document_ids))
        total, count = self.loss_sum(input_ids, labels, position_ids, document_ids)
        return total / ops.maximum(count, 1.0)

    def loss_sum(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sum of the token losses in nats and the number of tokens with a target, both fp32 scalars."""
        hidden = self.model(input_ids, position_ids, document_ids)
        rows = ops.reshape(hidden, (-1, hidden.shape[-1]))
        return self.loss(rows, self.lm_head.weight, ops.reshape(labels, (-1,)), self._frozen())

    @property
    def head_is_frozen(self) -> bool:
        """Whether the output head does not train."""
        return not self.lm_head.weight.requires_grad

    def forward_cached(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: KVCache,
        offsets: Tensor,
        kv_documents: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(B, V)`` of the last of the tokens ``(B, C)`` that follow those in ``cache``.

        Args:
            input_ids: ``(B, C)`` int32; C = a chunk of the prompt, or 1 when decoding.
            position_ids: ``(B, C)`` int32 position of each token in its own row, padding not counted.
            cache: a :class:`ms_longctx.nn.kv_cache.KVCache`; the chunk is appended.
            offsets: int32 ``(2,)``: column of the cache the chunk begins at, and columns valid with the
                chunk.
            kv_documents: ``(B, cache.max_length)`` int32, -1 in padded columns, or ``None`` without padding.
        """
        hidden = self.model.cached(input_ids, position_ids, cache, offsets, kv_documents)
        return self.lm_head(hidden[:, -1])

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: ms.Type | str = ms.float32,
        compute_dtype: ms.Type | str | None = None,
        packed: bool = True,
        **overrides: Any,
    ) -> "LlamaForCausalLM":
        """Load a Hugging Face directory or a GGUF file.

        Args:
            path: a directory with ``config.json`` and safetensors, or a ``.gguf`` file (dequantized). Int8 and int4
                weights (AWQ, compressed-tensors) stay packed in fp32 on the CPU and are dequantized elsewhere.
            dtype, compute_dtype: as of the class, or names such as ``bf16``.
            packed: ``False``: int8 and int4 weights are dequantized everywhere.
            overrides: fields of :class:`LlamaConfig` to replace, for example ``parallel_attention=True``.

        Raises:
            MsLongctxError: files are missing or broken, or do not describe a supported model.
        """
        from ms_longctx.quant.cells import packed_model
        from ms_longctx.quant.checkpoint import QuantizedCheckpoint

        source = open_checkpoint(Path(path), **overrides)
        if packed and isinstance(source, QuantizedCheckpoint):
            quantized = packed_model(source, as_dtype(dtype), as_dtype(compute_dtype or dtype))
            if quantized is not None:
                return quantized
        with no_init_parameters():
            model = cls(source.config, as_dtype(dtype), as_dtype(compute_dtype or dtype))
        load_parameters(model, source)
        model.companions = source.path
        return model

    def save_pretrained(
        self, path: str | Path, dtype: ms.Type | str | None = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write a Hugging Face directory: ``config.json``, safetensors, and the tokenizer it was loaded with.

        Args:
            path: the directory; it appears when it is complete.
            dtype: type of the stored tensors; ``None`` means that of the parameters.
            max_shard_size: bytes, or for example ``5GB``; a larger model is split into several files.
        """
        stored = as_dtype(dtype or self.dtype)
        save_model(self, self.config, Path(path), stored, max_shard_size, self.companions)

    def generate(self, input_ids: ArrayLike, **options: Any) -> NDArray[np.int32]:
        """Prompts and answers as one array: see :func:`ms_longctx.generation.generate.generate`."""
        from ms_longctx.generation.generate import generate

        return generate(self, input_ids, **options)

    def set_context_parallel(self, strategy: Strategy, rank: int) -> None:
        """From now on inputs and outputs are this process's piece of each sequence, and attention reaches all pieces.

        Pieces are those of :func:`ms_longctx.parallel.sequence.split_sequence`; ``position_ids`` must be given. Call it
        once, before :meth:`set_recompute` and before the model is compiled.

        Args:
            strategy: degrees of context parallelism.
            rank: of this process among all workers; the others of its group must call the model with it.
        """
        self.model.sequence_pieces = strategy.cp
        cells = None
        for layer in self.model.layers:
            # One pair for all layers: a ring's operators are read and set up once, which is a third of compiling it.
            # A cell belongs to one pipeline stage, though.
            if cells is None or strategy.pp > 1:
                cells = layer.self_attn.context_parallel(strategy, rank)
            layer.self_attn.attention, layer.self_attn.packed_attention = cells

    def set_recompute(self, selective: bool = False, **communication: bool) -> None:
        """Compute activations again in the backward pass instead of keeping them.

        Call it once, before the model is compiled; MindSpore cannot take it back.

        Args:
            selective: norms and the gate of the MLP, which are cheap; otherwise everything but each decoder layer's
                input.
            communication: ``mp_comm_recompute`` and ``parallel_optimizer_comm_recompute`` of MindSpore's
                ``Cell.recompute``, on several devices.
        """
        for layer in self.model.layers:
            parts = (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.act) if selective else (layer,)
            for part in parts:
                part.recompute(**communication)


class CachedLlama(nn.Cell):
    """A model and a cache as one callable for graph mode: see :meth:`LlamaForCausalLM.forward_cached`."""

    def __init__(self, model: LlamaForCausalLM, cache: KVCache) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.cache = cache

    def construct(
        self, input_ids: Tensor, position_ids: Tensor, offsets: Tensor, kv_documents: Tensor | None = None
    ) -> Tensor:
        return self.model.forward_cached(input_ids, position_ids, self.cache, offsets, kv_documents)
