# SPDX-License-Identifier: Apache-2.0
"""Small random models for the tests of exports, and their greedy answers."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np

from ms_longctx.config import GenerationConfig
from ms_longctx.config.model import LlamaConfig
from ms_longctx.generation.generate import generate_ids
from ms_longctx.models.llama import LlamaForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "6/2": {},
    "5/5 tied bias": {
        "hidden_size": 50,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "4/1 window": {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 5},
    "6/3 alibi": {"num_key_value_heads": 3, "position_embedding": "alibi"},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}
PROMPTS = [[3, 9, 27, 81, 43, 28, 84, 52, 55, 64, 91, 71, 11], [5, 25]]


def tiny_model(dtype: ms.Type = ms.float32, **fields: Any) -> LlamaForCausalLM:
    ms.set_seed(1)
    np.random.seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **fields}), dtype)
    model.set_train(False)
    return model


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int | None]]:
    return list(generate_ids(model, prompts, GenerationConfig(max_new_tokens=count, do_sample=False)))
