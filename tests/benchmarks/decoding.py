# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens without end, by ms_longctx and by transformers; after ``new_tokens`` the prompt is read again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def ours(model: Any, prompt: list[int], new_tokens: int) -> Iterator[int]:
    """By a :class:`ms_longctx.LlamaForCausalLM`."""
    from ms_longctx.config import GenerationConfig
    from ms_longctx.generation.generate import generate_ids

    while True:
        for (token,) in generate_ids(model, [prompt], GenerationConfig(max_new_tokens=new_tokens)):
            assert token is not None
            yield token


def peer(model: Any, prompt: list[int], new_tokens: int) -> Iterator[int]:
    """By a model of transformers, without the bookkeeping of its generate()."""
    import torch

    while True:
        tokens, cache = torch.tensor([prompt]), None
        for _ in range(new_tokens):
            with torch.inference_mode():
                out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            yield int(tokens)
