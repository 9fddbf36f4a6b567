# SPDX-License-Identifier: Apache-2.0
"""Which graphs an export has: batch size, cache lengths and pieces of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.export.manifest import GraphInfo, TensorInfo

DYNAMIC = "dynamic"


@dataclass(frozen=True)
class Plan:
    """What to export.

    Args:
        lengths: cache lengths in tokens, prompt and answer together; empty means open shapes.
        batch_size: rows of every graph.
        chunk: tokens of a prompt that are read at a time.
    """

    lengths: tuple[int, ...]
    batch_size: int = 1
    chunk: int = 256

    @classmethod
    def parse(cls, shapes: str, batch_size: int, chunk: int) -> Plan:
        """A plan from ``512,2048`` or ``dynamic``.

        Raises:
            MsLongctxError: not a list of lengths, or a number below 1.
        """
        for name, value in (("--batch_size", batch_size), ("--chunk", chunk)):
            if value < 1:
                raise MsLongctxError(f"{name} is {value}; expected 1 or more")
        if shapes == DYNAMIC:
            return cls((), batch_size, chunk)
        words = [word.strip() for word in shapes.split(",")]
        if not all(word.isdigit() and int(word) > 1 for word in words):
            raise MsLongctxError(
                f"--shapes {shapes!r}: expected cache lengths of 2 or more such as '512,2048', or '{DYNAMIC}'"
            )
        return cls(tuple(sorted({int(word) for word in words})), batch_size, chunk)

    def check(self, config: LlamaConfig) -> None:
        """Raise a MsLongctxError for lengths beyond the model's context."""
        if self.lengths and self.lengths[-1] > config.max_position_embeddings:
            raise MsLongctxError(
                f"--shapes {self.lengths[-1]} is longer than the model's context of {config.max_position_embeddings} "
                "tokens; export shorter graphs or set rope_scaling in its configuration"
            )

    def rope_length(self, config: LlamaConfig) -> int:
        """Longest sequence in tokens that any graph holds."""
        return self.lengths[-1] if self.lengths else config.max_position_embeddings

    def graphs(self, config: LlamaConfig, dtype: str, suffix: str) -> list[GraphInfo]:
        """The graphs to write: for each length one that reads prompts and one that decodes."""
        found = []
        for length in self.lengths or (None,):
            for role in ("prefill", "decode"):
                chunk = 1 if role == "decode" else min(self.chunk, length or self.chunk)
                inputs, outputs = self._tensors(config, dtype, role, chunk, length)
                name = f"{role}_{length or DYNAMIC}{suffix}"
                found.append(GraphInfo(role, name, chunk, length, inputs, outputs))
        return found

    def _tensors(
        self, config: LlamaConfig, dtype: str, role: str, chunk: int, length: int | None
    ) -> tuple[list[TensorInfo], list[TensorInfo]]:
        batch, heads, dim = self.batch_size, config.kv_heads, config.head_size
        tokens = None if length is None and role == "prefill" else chunk
        inputs = [TensorInfo("input_ids", [batch, tokens], "int32"), TensorInfo("offset", [batch], "int32")]
        if role == "prefill":
            inputs.append(TensorInfo("last", [batch], "int32"))
        outputs = [TensorInfo("logits", [batch, config.vocab_size], "fp32")]
        for layer in range(config.num_hidden_layers):
            for name in (f"keys.{layer}", f"values.{layer}"):
                inputs.append(TensorInfo(name, [batch, heads, length, dim], dtype))
                outputs.append(TensorInfo(f"new_{name}", [batch, heads, tokens, dim], dtype))
        return inputs, outputs
