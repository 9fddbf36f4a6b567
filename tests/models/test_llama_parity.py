# SPDX-License-Identifier: Apache-2.0
"""Small random models against transformers in fp32: logits within 1e-4, every gradient within 1e-3
relative."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor

from ms_longctx.models.checkpoint import split_qkv
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.nn.alibi import alibi_slopes
from tests.models.reference import (
    SCALINGS,
    assert_gradients_close,
    batch,
    our_gradients,
    same_model,
    torch_gradients,
    torch_logits,
    torch_model,
)

HEADS = {
    "5/5": {"num_attention_heads": 5, "num_key_value_heads": 5},
    "8/2": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6},
    "6/3": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": True},
    "bias": {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
}


@pytest.fixture(autouse=True)
def pynative() -> Iterator[None]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def unfused(gradients: dict[str, np.ndarray], model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Gradients of a fused qkv_proj under the names of its parts."""
    result = {}
    for name, gradient in gradients.items():
        if ".qkv_proj." in name:
            for part, values in zip("qkv", split_qkv(gradient, model.config), strict=True):
                result[name.replace("qkv_proj", f"{part}_proj")] = values
        else:
            result[name] = gradient
    return result


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("length", [31, 77])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads: str, length: int, fused: bool, tmp_path: Path) -> None:
    reference = torch_model(**HEADS[heads])
    model = same_model(reference, tmp_path, parallel_attention=fused)
    ids, labels = batch(103, 2, length)
    logits = model(Tensor(ids)).asnumpy()
    np.testing.assert_allclose(logits, torch_logits(reference, ids), rtol=0, atol=1e-4)
    expected_loss, expected = torch_gradients(reference, ids, labels)
    loss, gradients = our_gradients(model, ids, labels)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_gradients_close(unfused(gradients, model), expected)


@pytest.mark.parametrize("length", [31, 77], ids=["within", "past"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scalings(name: str, length: int, tmp_path: Path) -> None:
    """The original length of every scaling is 32 here, so 77 is past it."""
    scaling: Any = dict(SCALINGS[name] or {}) or None
    for key in ("short_factor", "long_factor"):
        if scaling and key in scaling:
            scaling[key] = scaling[key][:4]  # head_dim 8
    reference = torch_model(max_position_embeddings=32, rope_scaling=scaling)
    model = same_model(reference, tmp_path)
    ids, labels = batch(103, 2, length)
    positions = Tensor(np.tile(np.arange(length, dtype=np.int32), (2, 1)))
    expected_logits = torch_logits(reference, ids)
    for logits in (model(Tensor(ids)), model(Tensor(ids), None, positions)):
        np.testing.assert_allclose(logits.asnumpy(), expected_logits, rtol=0, atol=1e-4)
    _, expected = torch_gradients(reference, ids, labels)
    _, gradients = our_gradients(model, ids, labels)
    assert_gradients_close(gradients, expected)


def test_short_after_long_equals_short_alone(tmp_path: Path) -> None:
    """Dynamic NTK keeps no state from a longer call (a fault others shipped)."""
    reference = torch_model(max_position_embeddings=32, rope_scaling=dict(SCALINGS["dynamic"] or {}))
    model = same_model(reference, tmp_path)
    long, _ = batch(103, 1, 77)
    short = Tensor(long[:, :31])
    alone = model(short).asnumpy()
    model(Tensor(long))
    np.testing.assert_array_equal(model(short).asnumpy(), alone)


def test_sliding_window_equals_mistral(tmp_path: Path) -> None:
    reference = torch_model(sliding_window=7, num_attention_heads=4, num_key_value_heads=2, head_dim=10)
    model = same_model(reference, tmp_path)
    assert model.config.sliding_window == 7
    ids, labels = batch(103, 2, 31)
    np.testing.assert_allclose(model(Tensor(ids)).asnumpy(), torch_logits(reference, ids), rtol=0, atol=1e-4)
    _, expected = torch_gradients(reference, ids, labels)
    _, gradients = our_gradients(model, ids, labels)
    assert_gradients_close(gradients, expected)


def test_alibi_equals_biased_scores(tmp_path: Path) -> None:
    """Reference: transformers with all positions 0 (no rotation) and the biases as a 4-D additive mask."""
    heads, length = 6, 31
    reference = torch_model(num_attention_heads=heads, num_key_value_heads=3, head_dim=8)
    model = same_model(reference, tmp_path, position_embedding="alibi")
    ids, labels = batch(103, 2, length)
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    bias = torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    bias = bias.masked_fill(distance > 0, torch.finfo(torch.float32).min).expand(2, heads, length, length)
    inputs = {"attention_mask": bias, "position_ids": torch.zeros(2, length, dtype=torch.long)}
    expected_logits = torch_logits(reference, ids, **inputs)
    np.testing.assert_allclose(model(Tensor(ids)).asnumpy(), expected_logits, rtol=0, atol=1e-4)
    _, expected = torch_gradients(reference, ids, labels, **inputs)
    _, gradients = our_gradients(model, ids, labels)
    assert_gradients_close(gradients, expected)
