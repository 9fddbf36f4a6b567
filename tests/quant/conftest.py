# SPDX-License-Identifier: Apache-2.0
"""A small random Llama whose inputs have large features, as those of real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.reference import torch_model

SIZES: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
}
Made = tuple[transformers.PreTrainedModel, Path]


def make_llama(folder: Path, **fields: Any) -> Made:
    """A model of ``SIZES`` and ``fields``, saved to ``folder``."""
    model = torch_model(**{**SIZES, **fields})
    with torch.no_grad():  # a few features are many times the others
        model.lm_head.weight[:, [5, 50]] *= 6
        for layer in model.model.layers:
            layer.input_layernorm.weight[[3, 40]] *= 20
            layer.post_attention_layernorm.weight[[7, 21]] *= 20
    model.save_pretrained(folder)
    return model, folder


def random_tokens(rows: int, seed: int) -> np.ndarray:
    """Ids ``(rows, 32)`` int32."""
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (rows, 32)).astype(np.int32)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Made]:
    """``make_model(**config)``: the model in torch and the directory it was saved to."""
    return lambda **fields: make_llama(tmp_path / "model", **fields)


@pytest.fixture
def tokens() -> Callable[[int, int], np.ndarray]:
    """``tokens(rows, seed)``: random ids ``(rows, 32)`` int32."""
    return random_tokens
