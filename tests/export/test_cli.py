# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx export`` and answers from what it wrote; what it refuses, in one line each."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from ms_longctx.cli.main import main
from ms_longctx.quant.mindir import open_weights
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


def test_full_disk(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    """Files that may not grow beyond 5 MB stand for a disk that is full: one line, and nothing is left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, limits[1]))
    try:
        error = refused(
            capsys, "export", "--model", model_dir / "base", "--format", "mindir", "--output", tmp_path / "out",
            "--shapes", "24",
        )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "out: cannot be written: File too large" in error
    assert not any(tmp_path.iterdir())


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
    assert "fp16 is for --format lite, not onnx" in refused(capsys, *export, "onnx", "--lite_weights", "fp16")
    assert "is for --format lite or serving" in refused(capsys, *export, "mindir", "--lite_route", "rewrite")
    assert "is not a directory; choose" in refused(capsys, *export, "mindir", "--output", tmp_path / "key" / "out")
    assert not out.exists()


def test_adapter_in_bf16(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    """bf16 runs on Ascend only, but what is written can be compared: weights of the fp32 merge, rounded to 8 bits."""
    for dtype in ("fp32", "bf16"):
        run(capsys, "export", "--model", model_dir / "base", "--adapter", model_dir / "adapter", "--format", "mindir",
            "--output", tmp_path / dtype, "--shapes", "24", "--chunk", "4", "--dtype", dtype)  # fmt: skip
    name = "model.layers.1.mlp.down_proj.weight"
    exact, rounded = (open_weights(tmp_path / dtype).read(name) for dtype in ("fp32", "bf16"))
    assert 0 < np.abs(rounded - exact).max()
    np.testing.assert_allclose(rounded, exact, rtol=2**-7, atol=1e-3)
    base = open_weights(model_dir / "base").read(name)
    assert np.abs(rounded - base).max() > 0.1  # the adapter is in it
