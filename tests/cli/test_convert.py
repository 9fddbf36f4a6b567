# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx convert``: to pieces and back gives the same bytes, for every kind of strategy and type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ms_longctx.cli.main import main
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.llama import LlamaForCausalLM
from tests.models.reference import torch_model

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp4": (4, {"dp": 4}),
    "mp2 pp2": (4, {"mp": 2, "pp": 2}),
    "mp4 vocab_parallel": (4, {"mp": 4, "vocab_parallel": True}),
    "cp2 dp2": (4, {"cp": 2, "dp": 2}),
    "optimizer_shard": (8, {"dp": 4, "mp": 2, "optimizer_shard": True}),
    "uneven layers": (8, {"mp": 2, "dp": 2, "pp": 2, "pipeline_layers": [1, 3], "optimizer_shard": True}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of transformers, large enough that the optimizer is split, in bf16, with a tokenizer's file."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    reference = torch_model(**sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    reference.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    return folder


@pytest.mark.parametrize(("workers", "strategy"), STRATEGIES.values(), ids=STRATEGIES)
def test_to_pieces_and_back(model: Path, tmp_path: Path, workers: int, strategy: dict[str, Any]) -> None:
    file = tmp_path / "parallel.json"
    file.write_text(json.dumps(strategy))
    pieces, whole = tmp_path / "pieces", tmp_path / "whole"
    options = ["--worker_num", str(workers), "--parallel_config", str(file)]
    assert main(["convert", "--input", str(model), "--output", str(pieces), *options]) == 0
    assert main(["convert", "--input", str(pieces), "--output", str(whole)]) == 0
    original = load_file(model / "model.safetensors")
    result = load_file(whole / "model.safetensors")
    assert result.keys() == original.keys()
    for name, value in original.items():
        assert result[name].dtype == torch.bfloat16 and torch.equal(result[name], value), name
    assert (whole / "tokenizer_config.json").read_bytes() == (model / "tokenizer_config.json").read_bytes()
    sizes = {path.name: path.stat().st_size for path in (pieces / "shards").glob("*.safetensors")}
    expected = workers // (strategy.get("dp", 1) * strategy.get("cp", 1))
    assert len(sizes) == (workers if strategy.get("optimizer_shard") else expected), sizes
    total = sum(value.nbytes for value in original.values())
    assert total <= sum(sizes.values()) < 1.1 * total  # nothing twice


def test_types_and_files(model: Path, tmp_path: Path) -> None:
    """fp32 and fp16 are torch's conversions; a size limit splits the weights over files."""
    original = load_file(model / "model.safetensors")
    for dtype, kind in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        output = tmp_path / dtype
        arguments = ["--input", str(model), "--output", str(output), "--dtype", dtype, "--max_shard_size", "300KB"]
        assert main(["convert", *arguments]) == 0
        index = json.loads((output / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == original.keys()
        for file in set(index["weight_map"].values()):
            for name, value in load_file(output / file).items():
                assert torch.equal(value, original[name].to(kind)), name


def test_rounding_to_bf16_is_torchs(model: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "fp32"
    assert main(["convert", "--input", str(model), "--output", str(folder), "--dtype", "fp32"]) == 0
    values = load_file(folder / "model.safetensors")
    noisy = {name: value + torch.randn(value.shape, generator=generator) for name, value in values.items()}
    noisy["model.norm.weight"][:4] = torch.tensor([float("nan"), float("inf"), 3.4e38, 1e-40])
    save_file(noisy, folder / "model.safetensors")
    assert main(["convert", "--input", str(folder), "--output", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    for name, value in load_file(tmp_path / "bf16/model.safetensors").items():
        torch.testing.assert_close(value, noisy[name].to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_refusals(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "parallel.json"
    file.write_text('{"mp": 3}')
    pieces = tmp_path / "pieces"
    two = tmp_path / "two.json"
    two.write_text('{"mp": 2}')
    split = ["--input", str(model), "--output", str(pieces), "--worker_num", "2", "--parallel_config", str(two)]
    assert main(["convert", *split]) == 0
    damaged = shutil.copytree(pieces, tmp_path / "damaged")
    shard = damaged / "shards/rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    (pieces / "shards/rank-00001.json").unlink()
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)  # without its files
    existing = tmp_path / "existing"
    existing.mkdir()
    capsys.readouterr()
    output = ["--output", str(tmp_path / "out")]
    for arguments, message in (
        (["--input", str(model), *output, "--worker_num", "3"], "belong together"),
        (["--input", str(model), *output, "--worker_num", "3", "--parallel_config", str(file)], "divisible by mp = 3"),
        (["--input", str(model), "--output", str(existing)], "exists already"),
        (["--input", str(tmp_path / "nothing"), *output], "no model here"),
        (["--input", str(pieces), *output], "are in shards; copy the files of all ranks into one directory"),
        (["--input", str(damaged), *output], f"{shard}: contents changed, the SHA-256 differs from rank-00001.json"),
        (["--input", str(tmp_path / "run"), *output], "none of the 1 checkpoints is whole; copy the run again from"),
    ):
        assert main(["convert", *arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0], lines
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "out").exists()
    with pytest.raises(MsLongctxError, match="rank-00001.safetensors: contents changed"):
        LlamaForCausalLM.from_pretrained(damaged)  # as train --model.pretrained does
