# SPDX-License-Identifier: Apache-2.0
"""The key-value cache against transformers without one: the same logits for every token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.models.llama import CachedLlama, LlamaForCausalLM
from ms_longctx.nn.kv_cache import KVCache
from tests.models.reference import SCALINGS, batch, same_model, torch_logits, torch_model

GQA = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
LENGTH, ROOM, CHUNK = 31, 40, 8


@pytest.fixture(autouse=True)
def restore_mode() -> Iterator[None]:
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def run(
    model: LlamaForCausalLM, cache: KVCache, ids: np.ndarray, pad: int, documents: Tensor | None = None
) -> dict[int, np.ndarray]:
    """Logits by column: the first 24 columns in chunks of 8, the others one by one."""
    net = CachedLlama(model, cache).set_train(False)
    starts = [*range(0, 24, CHUNK), *range(24, ids.shape[1]), ids.shape[1]]
    logits = {}
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        positions = np.maximum(np.arange(start, end, dtype=np.int32) - pad, 0)
        positions = np.broadcast_to(positions, (ids.shape[0], end - start))
        offsets = Tensor(np.array([start, end], np.int32))
        out = net(Tensor(ids[:, start:end]), Tensor(positions.copy()), offsets, documents)
        logits[end - 1] = out.asnumpy()
    return logits


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
@pytest.mark.parametrize("implementation", ["auto", "operators"])
def test_chunks_and_single_tokens(implementation: str, mode: int, tmp_path: Path) -> None:
    """fp32, within 1e-4; the buffers are longer than what is valid, and used twice."""
    ms.set_context(mode=mode)
    reference = torch_model(**GQA)
    model = same_model(reference, tmp_path)
    cache = KVCache(model.config, 2, ROOM, implementation=implementation)
    for seed in (0, 1):
        ids, _ = batch(103, 2, LENGTH, seed)
        expected = torch_logits(reference, ids)
        for column, logits in run(model, cache, ids, 0).items():
            assert logits.shape == (2, 103)
            np.testing.assert_allclose(logits, expected[:, column], rtol=0, atol=1e-4)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused qkv, bias, tied": (
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"parallel_attention": True},
    ),
    "sliding window": ({"sliding_window": 7}, {}),
    "yarn": ({"rope_scaling": SCALINGS["yarn"], "max_position_embeddings": 16}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tmp_path: Path) -> None:
    fields, overrides = VARIANTS[variant]
    reference = torch_model(**GQA, **fields)
    model = same_model(reference, tmp_path, **overrides)
    ids, _ = batch(103, 2, LENGTH)
    expected = torch_logits(reference, ids)
    for column, logits in run(model, KVCache(model.config, 2, ROOM), ids, 0).items():
        np.testing.assert_allclose(logits, expected[:, column], rtol=0, atol=1e-4)


@pytest.mark.parametrize("position_embedding", ["rope", "alibi"])
def test_left_padding(position_embedding: str, tmp_path: Path) -> None:
    """A padded row equals the row alone, whose reference is the model without a cache."""
    model = same_model(torch_model(**GQA), tmp_path, position_embedding=position_embedding)
    ids, _ = batch(103, 1, LENGTH)
    pad = 5
    padded = np.concatenate([np.zeros((1, pad), np.int32), ids], 1)
    documents = Tensor(np.where(np.arange(ROOM) < pad, -1, 0)[None].astype(np.int32))
    expected = model(Tensor(ids)).asnumpy()
    for column, logits in run(model, KVCache(model.config, 1, ROOM), padded, pad, documents).items():
        np.testing.assert_allclose(logits, expected[:, column - pad], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_scalings_that_depend_on_the_length(name: str, tmp_path: Path) -> None:
    """Cached keys keep their rotation, so the final length decides from the start: then the last token's
    logits equal those without a cache (which transformers' own cache does not achieve)."""
    fields = {"max_position_embeddings": 16, "rope_scaling": SCALINGS[name]}
    reference = torch_model(**GQA, **fields)
    model = same_model(reference, tmp_path)
    ids, _ = batch(103, 2, LENGTH)
    cache = KVCache(model.config, 2, ROOM, rope_length=LENGTH)
    logits = run(model, cache, ids, 0)[LENGTH - 1]
    np.testing.assert_allclose(logits, torch_logits(reference, ids)[:, -1], rtol=0, atol=1e-4)


def test_fp16(tmp_path: Path) -> None:
    reference = torch_model(**GQA)
    model = same_model(reference, tmp_path, dtype="fp16")
    ids, _ = batch(103, 2, LENGTH)
    expected = torch_logits(reference, ids)
    for column, logits in run(model, KVCache(model.config, 2, ROOM, ms.float16), ids, 0).items():
        np.testing.assert_allclose(logits, expected[:, column], rtol=0, atol=3e-2)
