# SPDX-License-Identifier: Apache-2.0
"""A model above 2 GB, plain and encrypted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters

from ms_longctx.config.model import LlamaConfig
from ms_longctx.export.mindir import MindIRModel, export_mindir
from ms_longctx.export.plan import Plan
from ms_longctx.models.llama import LlamaForCausalLM
from tests.export.tiny import PROMPTS

LARGE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 16,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def large_model() -> LlamaForCausalLM:
    """Weights repeat one random block of a million: to draw a billion numbers takes minutes."""
    with no_init_parameters():
        model = LlamaForCausalLM(LlamaConfig(**LARGE), ms.float16).set_train(False)
    block = np.random.default_rng(0).normal(0, 0.02, 10**6 + 3).astype(np.float16)
    for name, parameter in model.parameters_and_names():
        values = np.ones(parameter.shape, np.float16) if "norm" in name else np.resize(block, parameter.shape)
        parameter.set_data(Tensor.from_numpy(values))
    return model


@pytest.mark.long
@pytest.mark.parametrize("key", [None, bytes(range(16))], ids=["plain", "encrypted"])
def test_more_than_two_gigabytes(key: bytes | None, tmp_path: Path) -> None:
    """fp16 logits of a prompt and of a decoded token within 2e-2 of the model's in one pass; weights stored once."""
    model = large_model()
    manifest = export_mindir(model, tmp_path / "out", Plan((16,), chunk=13), key)
    weights = sum(parameter.nbytes for parameter in model.get_parameters())
    assert weights > 2 * 2**30
    assert sum(found["bytes"] for found in manifest.files.values()) < weights + 2 * 2**20
    engine = MindIRModel(tmp_path / "out", key).engine(PROMPTS[:1], 3)
    found = np.stack([engine.prefill()[0], engine.step([17])[0]])
    wanted = model(Tensor(np.array([[*PROMPTS[0], 17]], np.int32))).asnumpy()[0, -2:].astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-2)
    assert (found.argmax(-1) == wanted.argmax(-1)).all()
