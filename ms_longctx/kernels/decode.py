# SPDX-License-Identifier: Apache-2.0
"""A whole Llama over a key-value cache in one call of the kernel library (csrc/llama_cached.cc).

MindSpore's runtime takes no part in a call. Started as an operator the same kernel needs half as long again for a
token of a small model, because the runtime's threads wait in a loop on the cores that the kernel works on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ms_longctx import kernels
from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.quant import PackedMatrix, describe

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
_BAD_TOKEN, _CACHE_FULL = 32, 33


class LlamaCached:
    """``LlamaForCausalLM.forward_cached`` on the CPU, with fp32 activations.

    Args:
        config: the architecture.
        weights: fp32 arrays, matrices packed as well: embedding, last norm, head, and for each layer: norm; query,
            key, value (or one fused matrix) and output projection; norm; gate, up and down projection. Each matrix
            of a layer is followed by its bias where the configuration has one. They are read in every call, not
            copied.
        keys, values: an fp32 array ``(B, L, kv_heads, head_dim)`` for each layer, written in place.
        slopes: fp32 ``(heads,)`` of ALiBi, or ``None``.
        kv_documents: int32 ``(B, L)``, -1 in padded columns, or ``None`` without padding.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Sequence[Floats | PackedMatrix],
        keys: Sequence[Floats],
        values: Sequence[Floats],
        slopes: Floats | None = None,
        kv_documents: Ints | None = None,
    ) -> None:
        self._function = ctypes.CDLL(str(kernels.library_path())).LlamaCached
        pointed = [
            describe(weight) if isinstance(weight, PackedMatrix) or weight.ndim == 2 else weight for weight in weights
        ]
        self._held = (list(weights), pointed, list(keys), list(values), slopes, kv_documents)
        self._batch, self._capacity = keys[0].shape[:2]
        self._vocabulary = config.vocab_size
        self._eps = np.array([config.rms_norm_eps], dtype=np.float32)
        self._static = [
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.vocab_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            config.sliding_window or 0,
            int(config.parallel_attention),
            int(config.attention_bias),
            int(config.mlp_bias),
        ]
        self._optional = [_address(kv_documents), _address(slopes)]
        self._weights = [_address(array) for array in (*pointed, *keys, *values)]

    def __call__(self, tokens: Ints, cos: Floats | None, sin: Floats | None, start: int) -> Floats:
        """Append a chunk of tokens and return the logits ``(B, V)`` of the last one of each row.

        Args:
            tokens: int32 ``(B, C)``.
            cos, sin: fp32 ``(B, C, head_dim)`` of their positions, ``None`` without rotary embedding.
            start: column of the cache the chunk begins at.

        Raises:
            MsLongctxError: a token is outside the vocabulary, or the chunk does not fit into the cache.
        """
        batch, length = tokens.shape
        settings = np.array([batch, length, start, self._capacity, *self._static], dtype=np.int64)
        logits = np.empty((batch, self._vocabulary), dtype=np.float32)
        chunk = [_address(array) for array in (settings, self._eps, tokens, cos, sin)]
        arguments = [*chunk, *self._optional, _address(logits), *self._weights]
        pointers = (ctypes.c_void_p * len(arguments))(*arguments)
        status = self._function(len(arguments), pointers, None, None, None, None, None)
        if status == _BAD_TOKEN:
            raise MsLongctxError(
                f"a token id is outside the model's vocabulary (0 to {self._vocabulary - 1}); "
                "was the text encoded with another model's tokenizer?"
            )
        if status == _CACHE_FULL:
            raise MsLongctxError(f"{start + length} tokens do not fit into a cache of {self._capacity}")
        return logits


def _address(array: np.ndarray | None) -> int | None:
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError("the kernel needs contiguous arrays")
    return array.ctypes.data
