# SPDX-License-Identifier: Apache-2.0
"""A model above 2 GB, plain and encrypted: MindSpore keeps such weights in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.export.mindir import MindIRModel, export_mindir
from ms_longctx.export.plan import Plan
from tests.export.tiny import PROMPTS, tiny_model

LARGE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 16,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


@pytest.mark.long
@pytest.mark.parametrize("key", [None, bytes(range(16))], ids=["plain", "encrypted"])
def test_more_than_two_gigabytes(key: bytes | None, tmp_path: Path) -> None:
    """fp16 logits of a prompt and of a decoded token within 2e-2 of the model's in one pass; weights stored once."""
    model = tiny_model(ms.float16, **LARGE)
    manifest = export_mindir(model, tmp_path / "out", Plan((16,), chunk=13), key)
    weights = {name: found for name, found in manifest.files.items() if "_variables/" in name}
    assert sum(found["bytes"] for name, found in weights.items() if name.startswith("prefill")) > 2 * 2**30
    if key is None:
        links = {(tmp_path / "out" / name).stat().st_ino for name in weights}
        assert len(links) == len(weights) / 2
    engine = MindIRModel(tmp_path / "out", key).engine(PROMPTS[:1], 3)
    found = np.stack([engine.prefill()[0], engine.step([17])[0]])
    wanted = model(Tensor(np.array([[*PROMPTS[0], 17]], np.int32))).asnumpy()[0, -2:].astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-2)
    assert (found.argmax(-1) == wanted.argmax(-1)).all()
