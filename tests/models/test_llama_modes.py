# SPDX-License-Identifier: Apache-2.0
"""The model against itself: graph mode and PyNative, packed and separate documents, recomputation, fp16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor

from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.llama import LlamaForCausalLM
from tests.models.reference import (
    TINY,
    assert_gradients_close,
    batch,
    our_gradients,
    same_model,
    torch_gradients,
    torch_logits,
    torch_model,
)

GQA = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}


@pytest.fixture(autouse=True)
def restore_mode() -> Iterator[None]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def packed(lengths: list[int], total: int) -> tuple[np.ndarray, np.ndarray]:
    """Position and document ids ``(1, total)`` of documents one after another, then padding."""
    documents = np.full((1, total), -1, np.int32)
    positions = np.zeros((1, total), np.int32)
    start = 0
    for number, length in enumerate(lengths):
        documents[0, start : start + length] = number
        positions[0, start : start + length] = np.arange(length)
        start += length
    return positions, documents


@pytest.mark.parametrize("kind", ["plain", "fused tied bias", "dynamic"])
def test_graph_mode_equals_pynative(kind: str, tmp_path: Path) -> None:
    """Logits within 1e-5, gradients within 1e-5 relative; packed documents and explicit positions."""
    fields: dict = {**GQA, "max_position_embeddings": 32}
    if kind == "dynamic":
        fields["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    if kind == "fused tied bias":
        fields.update(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    model = same_model(torch_model(**fields), tmp_path, parallel_attention="fused" in kind)
    ids, labels = batch(103, 1, 77)
    positions, documents = (Tensor(array) for array in packed([40, 30], 77))
    results = []
    for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE):
        ms.set_context(mode=mode)
        logits = model(Tensor(ids), None, positions, documents).asnumpy()
        results.append((logits, *our_gradients(model, ids, labels, positions, documents)))
    (eager, eager_loss, eager_gradients), (graph, graph_loss, graph_gradients) = results
    np.testing.assert_allclose(graph[:, :70], eager[:, :70], rtol=0, atol=1e-5)
    assert graph_loss == pytest.approx(eager_loss, rel=1e-6)
    assert_gradients_close(graph_gradients, eager_gradients, 1e-5)


def test_packed_documents_equal_separate_rows(tmp_path: Path) -> None:
    """References: transformers on each document alone; changing one changes the others by exactly 0."""
    reference = torch_model(**GQA)
    model = same_model(reference, tmp_path)
    lengths, total = [31, 24, 13], 77
    positions, documents = packed(lengths, total)
    ids, labels = batch(103, 1, total)
    labels[documents < 0] = -100
    inputs = (Tensor(positions), Tensor(documents))
    logits = model(Tensor(ids), None, *inputs).asnumpy()
    ends = np.cumsum(lengths)
    losses = []
    for start, end in zip(ends - lengths, ends, strict=True):
        alone = torch_logits(reference, ids[:, start:end])
        np.testing.assert_allclose(logits[:, start:end], alone, rtol=0, atol=1e-4)
        targets = torch.tensor(labels[0, start:end]).long()
        losses.append(torch.nn.functional.cross_entropy(torch.tensor(alone[0]), targets, reduction="sum"))
    total_loss, count = model.loss_sum(Tensor(ids), Tensor(labels), *inputs)
    assert float(total_loss) == pytest.approx(float(sum(losses)), rel=1e-5)
    assert float(count) == (labels != -100).sum()
    changed = ids.copy()
    changed[0, :31] = (changed[0, :31] + 7) % 103
    after = model(Tensor(changed), None, *inputs).asnumpy()
    np.testing.assert_array_equal(after[:, 31:68], logits[:, 31:68])
    assert np.abs(after[:, :31] - logits[:, :31]).max() > 1e-2


def test_left_padding_changes_nothing(tmp_path: Path) -> None:
    """Reference: transformers on the unpadded row."""
    reference = torch_model(**GQA)
    model = same_model(reference, tmp_path)
    ids, _ = batch(103, 1, 31)
    padded = np.concatenate([np.zeros((1, 9), np.int32), ids], 1)
    documents = np.where(np.arange(40) < 9, -1, 0)[None].astype(np.int32)
    positions = np.maximum(np.arange(40) - 9, 0)[None].astype(np.int32)
    logits = model(Tensor(padded), None, Tensor(positions), Tensor(documents)).asnumpy()
    np.testing.assert_allclose(logits[:, 9:], torch_logits(reference, ids), rtol=0, atol=1e-4)


def test_loss_without_targets_is_zero_and_finite(tmp_path: Path) -> None:
    model = same_model(torch_model(**GQA), tmp_path)
    ids, labels = batch(103, 1, 31)
    loss, gradients = our_gradients(model, ids, np.full_like(labels, -100))
    assert loss == 0.0
    assert all(np.all(gradient == 0) for gradient in gradients.values())


def test_fp16_compute_keeps_fp32_parameters(tmp_path: Path) -> None:
    """Reference: transformers in fp32; fp16 rounds to 11 bits, so gradients within 2 %."""
    reference = torch_model(**GQA)
    model = same_model(reference, tmp_path, compute_dtype="fp16")
    ids, labels = batch(103, 2, 31)
    logits = model(Tensor(ids))
    assert logits.dtype == ms.float16
    np.testing.assert_allclose(logits.asnumpy(), torch_logits(reference, ids), rtol=0, atol=3e-2)
    _, expected = torch_gradients(reference, ids, labels)
    _, gradients = our_gradients(model, ids, labels)
    assert all(gradient.dtype == np.float32 for gradient in gradients.values())
    assert_gradients_close(gradients, expected, 2e-2)


def test_parameter_names_and_initial_values() -> None:
    """Names as transformers gives them; matrices normal of the configured deviation, norms 1, biases 0."""
    fields = {key: value for key, value in TINY.items() if key not in ("attn_implementation", "initializer_range")}
    model = LlamaForCausalLM(LlamaConfig(**fields, attention_bias=True, initializer_range=0.05))
    expected = torch_model(attention_bias=True).state_dict()
    found = {name: parameter.asnumpy() for name, parameter in model.parameters_and_names()}
    assert {name: array.shape for name, array in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert all(parameter.name == name for name, parameter in model.parameters_and_names())
    for name, array in found.items():
        if name.endswith("bias"):
            assert np.all(array == 0)
        elif "norm" in name:
            assert np.all(array == 1)
        else:
            assert array.std() == pytest.approx(0.05, rel=0.1)
