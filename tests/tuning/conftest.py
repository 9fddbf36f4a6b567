# SPDX-License-Identifier: Apache-2.0
"""The same random Llama in transformers and here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
import transformers

from ms_longctx.models.llama import LlamaForCausalLM

LENGTH = 31
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
Pair = tuple[transformers.LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Pair]:
    """``make_pair(fused=False, dtype="fp32", **config) -> (theirs, ours)`` with equal weights."""

    def make(fused: bool = False, dtype: str = "fp32", **config: Any) -> Pair:
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **config})).eval()
        with torch.no_grad():  # transformers starts biases at 0, which hides a lost one
            for name, param in theirs.named_parameters():
                if name.endswith("bias"):
                    param.normal_(std=0.1)
        theirs.save_pretrained(tmp_path / "base")
        return theirs, LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype, parallel_attention=fused)

    return make


@pytest.fixture(scope="session")
def batch() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and shifted labels ``(2, 31)`` int32; some positions have no label."""
    rng = np.random.RandomState(7)
    ids = rng.randint(0, SIZES["vocab_size"], (2, LENGTH)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((2, 1), -100)], 1).astype(np.int32)
    labels[0, :11] = -100
    return ids, labels


@pytest.fixture(params=[False, True], ids=["separate", "fused"])
def fused(request: pytest.FixtureRequest) -> bool:
    """Whether q, k and v are one matrix in our model."""
    return request.param


@pytest.fixture
def graph_mode() -> Any:
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=before)
