# SPDX-License-Identifier: Apache-2.0
"""Exported graphs and MindIR: every logit and every greedy token against the model they were made of.

Reference: the same model run without a cache in one pass (``LlamaForCausalLM.construct``) for logits, and
``generate_ids`` of the model for tokens. Tolerance of logits: 2e-5 absolute in fp32, 2e-2 in fp16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.key import read_key
from ms_longctx.export.manifest import read_manifest
from ms_longctx.export.mindir import MindIRModel, export_mindir
from ms_longctx.export.plan import Plan
from ms_longctx.export.session import CacheSession
from ms_longctx.export.source import build_graph
from tests.export.tiny import MODELS, PROMPTS, greedy, tiny_model


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_graphs_equal_the_model(fields: dict[str, Any]) -> None:
    """Prompts of 13 and 2 tokens in pieces of 5, then four tokens each, through the Cells as they are exported."""
    model = tiny_model(**fields)
    config, plan = model.config, Plan((19,), batch_size=2, chunk=5)
    nets = {graph.role: build_graph(model, plan, graph)[0] for graph in plan.graphs(config, "fp32", "")}

    def run(role: str, inputs: list[Any]) -> list[Any]:
        return [output.asnumpy() for output in nets[role](*[Tensor(array) for array in inputs])]

    shape = {"layers": 2, "kv_heads": config.kv_heads, "head_dim": config.head_size}
    session = CacheSession(run, {**shape, "batch": 2, "chunk": 5, "length": 19, "exact": False}, PROMPTS, np.float32, 4)
    rows = [list(prompt) for prompt in PROMPTS]
    logits = session.prefill()
    for new in ([7, 8], [90, 1], [33, 2], [0, 100]):
        for row, found in zip(rows, logits, strict=True):
            wanted = model(Tensor(np.array([row], np.int32))).asnumpy()[0, -1]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
        logits = session.step(new)
        for row, token in zip(rows, new, strict=True):
            row.append(token)


@pytest.mark.parametrize("shapes", ["20,40", "dynamic"])
def test_mindir_generates_the_same_tokens(shapes: str, tmp_path: Path) -> None:
    """From the files alone, two rows side by side and one alone, in the shorter and in the longer cache."""
    model = tiny_model()
    export_mindir(model, tmp_path / "out", Plan.parse(shapes, batch_size=2, chunk=6))
    exported = MindIRModel(tmp_path / "out")
    assert exported.manifest.versions["mindspore"] == ms.__version__
    stored = exported.manifest.files["weights.bin"]["bytes"]
    assert abs(stored - sum(parameter.nbytes for parameter in model.get_parameters())) < 2000  # once for all graphs
    for prompts, count in ((PROMPTS, 7), (PROMPTS[1:], 20)):
        assert greedy(exported, prompts, count) == greedy(model, prompts, count)
    on_device = MindIRModel(tmp_path / "out", device_cache=True)
    assert greedy(on_device, PROMPTS, 7) == greedy(model, PROMPTS, 7)


def test_mindir_refuses(tmp_path: Path) -> None:
    """What does not fit the files is one clear line each."""
    folder = tmp_path / "out"
    model = tiny_model()
    with pytest.raises(MsLongctxError, match="longer than the model's context of 64"):
        export_mindir(model, folder, Plan((65,)))
    export_mindir(model, folder, Plan((20,), chunk=8))
    with pytest.raises(MsLongctxError, match="exists already"):
        export_mindir(model, folder, Plan((20,)))
    exported = MindIRModel(folder)
    with pytest.raises(MsLongctxError, match="33 tokens, but the exported graphs hold 20"):
        exported.engine(PROMPTS[:1], 20)
    with pytest.raises(MsLongctxError, match="2 prompts side by side"):
        exported.engine(PROMPTS, 2)
    decode = exported.manifest.graph("decode", 20)
    caches = [np.zeros((1, 2, 20, 8), np.float32)] * 4
    with pytest.raises(MsLongctxError, match=r"input_ids is int32 \[1, 2\]; it takes int32 \[1, 1\]"):
        exported.run(decode, [np.zeros((1, 2), np.int32), np.zeros(1, np.int32), *caches])
    with pytest.raises(MsLongctxError, match="offset is int64"):
        exported.run(decode, [np.zeros((1, 1), np.int32), np.zeros(1, np.int64), *caches])
    with pytest.raises(MsLongctxError, match="not encrypted"):
        MindIRModel(folder, bytes(16))
    with pytest.raises(MsLongctxError, match="no manifest"):
        MindIRModel(tmp_path)
    for file in (folder / decode.file, folder / "weights.bin"):
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(MsLongctxError, match=f"{file.name}: its SHA-256 is not .* changed or damaged"):
            exported.load(decode)
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**values, "batch_size": 2}))
    with pytest.raises(MsLongctxError, match="was changed after the export"):
        read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps({**values, "schema": 99}))
    with pytest.raises(MsLongctxError, match="another version"):
        read_manifest(folder)


def test_encrypted(tmp_path: Path) -> None:
    """AES-GCM: the right key gives the same tokens, no weight is readable, a wrong key is said to be wrong."""
    model = tiny_model()
    (tmp_path / "key").write_text("00112233445566778899aabbccddeeff" * 2 + "\n")
    key = read_key(tmp_path / "key")
    assert len(key) == 32
    export_mindir(model, tmp_path / "out", Plan((20,), chunk=8), key)
    weight = model.model.norm.weight.asnumpy().tobytes()
    assert all(weight not in file.read_bytes() for file in (tmp_path / "out").iterdir())
    assert greedy(MindIRModel(tmp_path / "out", key), PROMPTS[:1], 4) == greedy(model, PROMPTS[:1], 4)
    with pytest.raises(MsLongctxError, match="give --key_file"):
        MindIRModel(tmp_path / "out")
    with pytest.raises(MsLongctxError, match="is not the one it was encrypted with") as caught:
        MindIRModel(tmp_path / "out", bytes(32))
    assert key.hex() not in str(caught.value) + (tmp_path / "out" / "manifest.json").read_text()
    (tmp_path / "short").write_text("secret-word")
    with pytest.raises(MsLongctxError, match="holds 11 bytes") as caught:
        read_key(tmp_path / "short")
    assert "secret-word" not in str(caught.value)


def test_half_precision(tmp_path: Path) -> None:
    """fp16 runs here; bf16 is written, and refused by the CPU with the reason."""
    model = tiny_model(ms.float16)
    export_mindir(model, tmp_path / "fp16", Plan((20,), chunk=8))
    engine = MindIRModel(tmp_path / "fp16").engine(PROMPTS[:1], 4)
    wanted = model(Tensor(np.array(PROMPTS[:1], np.int32))).asnumpy()[:, -1]
    np.testing.assert_allclose(engine.prefill(), wanted.astype(np.float32), rtol=0, atol=2e-2)
    manifest = export_mindir(tiny_model(ms.bfloat16), tmp_path / "bf16", Plan((20,), chunk=8))
    assert manifest.dtype == "bf16" and manifest.graphs[0].inputs[-1].dtype == "bf16"
    with pytest.raises(MsLongctxError, match="bf16"):
        MindIRModel(tmp_path / "bf16")
