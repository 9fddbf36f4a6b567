# SPDX-License-Identifier: Apache-2.0
"""What turns tokens into the logits of the next one: a model with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.llama import CachedLlama, LlamaForCausalLM
from ms_longctx.nn.kv_cache import KVCache

CHUNK = 256


class Engine(Protocol):
    """Prompts that grow by one token a row."""

    def prefill(self) -> NDArray[np.float32]:
        """Read the prompts; logits ``(rows, V)`` of their next tokens."""

    def step(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Append ``tokens (rows,)``; logits ``(rows, V)`` of the next ones."""


class EngineSource(Protocol):
    """What brings an engine of its own, such as an exported model, in place of a model."""

    @property
    def config(self) -> LlamaConfig:
        """The architecture."""

    def engine(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Engine:
        """An engine for these prompts, to each of which ``max_new_tokens`` may be appended."""


class GraphEngine:
    """An engine of MindSpore operators, for every device and dtype.

    Prompts are padded on the left to whole chunks of ``CHUNK`` tokens, so that two graphs (one for a chunk,
    one for a token) serve prompts of every length. Padding has document id -1: no token sees it.

    Args:
        model: the model, adapters included.
        prompts: token ids of each row, none empty.
        max_new_tokens: tokens that may be appended to each row.
    """

    def __init__(self, model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        lengths = np.array([len(prompt) for prompt in prompts])
        self._width = -(-int(lengths.max()) // CHUNK) * CHUNK
        self._shift = (self._width - lengths).astype(np.int32)[:, None]
        self._tokens = np.zeros((len(prompts), self._width), np.int32)
        for row, prompt in zip(self._tokens, prompts, strict=True):
            row[-len(prompt) :] = prompt
        # Room for whole chunks, and rounded up: fewer shapes mean fewer graphs to compile.
        room = -(-(self._width + max_new_tokens) // CHUNK) * CHUNK
        rope_length = int(lengths.max()) + max_new_tokens
        cache = KVCache(model.config, len(prompts), room, model.model.compute_dtype, rope_length)
        self._net = CachedLlama(model, cache)
        self._net.set_train(False)
        hidden = np.arange(room, dtype=np.int32)[None] < self._shift
        self._documents = Tensor(np.where(hidden, -1, 0).astype(np.int32))
        self._used = 0
        if ms.get_context("device_target") == "CPU":
            ms.runtime.launch_blocking()  # many small operators finish several times sooner

    def prefill(self) -> NDArray[np.float32]:
        """See :class:`Engine`."""
        for start in range(0, self._width, CHUNK):
            logits = self._forward(self._tokens[:, start : start + CHUNK])
        return logits

    def step(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """See :class:`Engine`."""
        return self._forward(tokens[:, None])

    def _forward(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        start, end = self._used, self._used + tokens.shape[1]
        positions = np.maximum(np.arange(start, end, dtype=np.int32)[None] - self._shift, 0)
        offsets = Tensor(np.array([start, end], np.int32))
        logits = self._net(Tensor(tokens), Tensor(positions), offsets, self._documents)
        self._used = end
        result: NDArray[np.float32] = logits.asnumpy().astype(np.float32)
        return result
