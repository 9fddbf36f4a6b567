# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx export`` and answers from what it wrote; what it refuses, in one line each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ms_longctx.cli.main import main
from ms_longctx.tuning import LoraConfig, get_pe_model, save_adapter
from tests.export.tiny import tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, sentencepiece_model: Path) -> Path:
    """A tiny model with a real tokenizer, and an adapter that changes what it says in ``adapter/``."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(vocab_size=32000)
    model.companions = sentencepiece_model
    model.save_pretrained(folder / "base")
    get_pe_model(model, LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"]))
    rng = np.random.default_rng(3)
    for name, parameter in model.parameters_and_names():
        if ".lora_B." in name:
            parameter.set_data(parameter.value() + parameter.value().from_numpy(_normal(rng, parameter.shape)))
    save_adapter(model, folder / "adapter")
    return folder


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_export_merges_the_adapter(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    """The MindIR answers as the model with its adapter does, which is not as the model alone does."""
    base, adapter, out = model_dir / "base", model_dir / "adapter", tmp_path / "out"
    ask = ("--prompt", "The quick brown fox", "--raw", "--max_new_tokens", "8")
    written = run(capsys, "export", "--model", base, "--adapter", adapter, "--format", "mindir", "--output", out,
                  "--shapes", "24", "--chunk", "4")  # fmt: skip
    assert "decode_24.mindir" in written and "tokenizer.model" in {file.name for file in out.iterdir()}
    answer = run(capsys, "generate", "--model", out, *ask)
    assert answer == run(capsys, "generate", "--model", base, "--adapter", adapter, *ask)
    assert answer != run(capsys, "generate", "--model", base, *ask)
    assert "adapter is merged when it is written" in refused(
        capsys, "generate", "--model", out, "--adapter", adapter, *ask
    )
    assert "exported in fp32" in refused(capsys, "generate", "--model", out, "--dtype", "fp16", *ask)
    assert "which only answers" in refused(
        capsys, "evaluate", "--model", out, "--data_path", base / "config.json", "--output_dir", tmp_path / "e"
    )
    (tmp_path / "key").write_bytes(bytes(16))
    assert "not encrypted" in refused(capsys, "generate", "--model", out, "--key_file", tmp_path / "key", *ask)
    assert "is none; leave it out" in refused(capsys, "generate", "--model", base, "--key_file", tmp_path / "key", *ask)
    assert "exists already" in refused(capsys, "export", "--model", base, "--format", "mindir", "--output", out)


def test_export_refuses(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export = ("export", "--model", model_dir / "base", "--output", out, "--format")
    (tmp_path / "key").write_bytes(bytes(16))
    assert "expected cache lengths" in refused(capsys, *export, "mindir", "--shapes", "12,x")
    assert "--chunk is 0" in refused(capsys, *export, "mindir", "--chunk", "0")
    assert "dynamic is for MindIR" in refused(capsys, *export, "onnx", "--shapes", "dynamic")
    assert "cannot be encrypted" in refused(capsys, *export, "lite", "--key_file", tmp_path / "key")
    assert "cannot be read" in refused(capsys, *export, "mindir", "--key_file", tmp_path / "none")
    assert "did you mean 'mindir'" in refused(capsys, *export, "mindri")
    assert "context of 64" in refused(capsys, *export, "mindir", "--shapes", "65")
    assert "takes one length" in refused(capsys, *export, "serving", "--shapes", "12,24")
    assert not out.exists()
