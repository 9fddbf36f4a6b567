# SPDX-License-Identifier: Apache-2.0
"""ONNX in onnxruntime: logits (1e-4 absolute) and greedy tokens against the model; names as in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.lite import export_lite
from ms_longctx.export.onnx import OnnxModel, export_onnx
from ms_longctx.export.plan import Plan
from tests.export.tiny import MODELS, PROMPTS, greedy, tiny_model

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install -e '.[dev]')")


@pytest.mark.parametrize("fields", [MODELS["6/2"], MODELS["6/3 alibi"]], ids=["6/2", "alibi"])
def test_onnx_equals_the_model(fields: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**fields)
    export_onnx(model, tmp_path / "out", Plan((21,), batch_size=2, chunk=5))
    exported = OnnxModel(tmp_path / "out")
    sizes = {name: found["bytes"] for name, found in exported.manifest.files.items()}
    weights = sum(parameter.nbytes for parameter in model.get_parameters())
    assert weights - 5 * 1024 < sizes["weights.bin"] < weights + 4096 * 20
    for graph in exported.manifest.graphs:
        session = exported.load(graph)
        assert [value.name for value in session.get_inputs()] == [info.name for info in graph.inputs]
        assert [value.name for value in session.get_outputs()] == [info.name for info in graph.outputs]
        assert [value.shape for value in session.get_inputs()] == [info.shape for info in graph.inputs]
        assert sizes[graph.file] < 50_000  # the weights are not in the graphs
    logits = exported.engine(PROMPTS, 8).prefill()
    for row, prompt in zip(logits, PROMPTS, strict=True):
        wanted = model(Tensor(np.array([prompt], np.int32))).asnumpy()[0, -1]
        np.testing.assert_allclose(row, wanted, rtol=0, atol=1e-4)
    assert greedy(exported, PROMPTS, 8) == greedy(model, PROMPTS, 8)
    weights_file = tmp_path / "out" / "weights.bin"
    content = bytearray(weights_file.read_bytes())
    content[5000] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(MsLongctxError, match="weights.bin: its SHA-256 is not"):
        OnnxModel(tmp_path / "out").load(exported.manifest.graphs[0])
    weights_file.unlink()
    with pytest.raises(MsLongctxError, match="weights.bin: missing"):
        OnnxModel(tmp_path / "out").load(exported.manifest.graphs[0])


def test_refuses(tmp_path: Path) -> None:
    """What the exporter or Lite cannot hold, before anything is written."""
    with pytest.raises(MsLongctxError, match="no bf16"):
        export_onnx(tiny_model(ms.bfloat16), tmp_path / "out", Plan((20,)))
    with pytest.raises(MsLongctxError, match="made of an fp32 model"):
        export_lite(tiny_model(ms.float16), tmp_path / "out", Plan((20,)))
    with pytest.raises(MsLongctxError, match="rewrite gives --lite_type mindir"):
        export_lite(tiny_model(), tmp_path / "out", Plan((20,)), "ms", "fp32", "rewrite")
    assert not (tmp_path / "out").exists()


def test_missing_python37(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python 3.7 Lite is refused with what to do, and nothing is left."""
    for name in ("PYENV_ROOT", "MS_LONGCTX_CACHE", "PATH"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    with pytest.raises(MsLongctxError, match="need Python 3.7, and none was found"):
        export_lite(tiny_model(), tmp_path / "out", Plan((20,)))
    assert not (tmp_path / "out").exists()
