# SPDX-License-Identifier: Apache-2.0
"""A whole Llama over a key-value cache as one operator (csrc/llama_cached.cc)."""

from collections.abc import Callable

import mindspore as ms

from ms_longctx.config.model import LlamaConfig
from ms_longctx.kernels.custom import operator


def make_llama_cached(config: LlamaConfig, documents: bool) -> Callable:
    """``LlamaForCausalLM.forward_cached`` in fp32 on the CPU, without a MindSpore operator in between.

    ``forward(tokens, cos, sin, offsets, kv_documents, slopes, weights, keys, values) -> logits``

    - ``tokens``: int32 ``(B, C)``, those that follow what the cache holds;
    - ``cos``, ``sin``: fp32 ``(B, C, head_dim)`` of their positions (one element each without rotary embedding);
    - ``offsets``: int32 ``(2,)``: column of the cache the chunk begins at, and columns valid with the chunk;
    - ``kv_documents``: int32 ``(B, L)``, -1 in padded columns; one element where ``documents`` is false;
    - ``slopes``: fp32 ``(H,)`` of ALiBi, one element without it;
    - ``weights``: tuple of fp32 Parameters: embedding, last norm, head, and for each layer in its order: norm;
      query, key, value (or one fused matrix) and output projection; norm; gate, up and down projection. Each
      matrix is followed by its bias where the configuration has one;
    - ``keys``, ``values``: tuples of fp32 Parameters ``(B, L, kv_heads, head_dim)``, one a layer, written in place;
    - ``logits``: fp32 ``(B, V)`` of the last token of each row.

    The caller checks that tokens are below V and that the chunk fits into L.
    """
    forward_all = operator(
        "LlamaCached",
        lambda *shapes: [shapes[0][0], shapes[6][0]],
        lambda *dtypes: ms.float32,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_size,
        eps=float(config.rms_norm_eps),
        scale=float(config.head_size) ** -0.5,
        rope=config.position_embedding == "rope",
        alibi=config.position_embedding == "alibi",
        documents=documents,
        window=config.sliding_window or 0,
        fused_qkv=config.parallel_attention,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )

    def forward(tokens, cos, sin, offsets, kv_documents, slopes, weights, keys, values):
        return forward_all(tokens, cos, sin, offsets, kv_documents, slopes, *weights, *keys, *values)

    return forward
