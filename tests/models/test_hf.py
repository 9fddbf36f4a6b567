# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories: round trips bit by bit, what transformers reads back, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import fuse_qkv, split_qkv
from ms_longctx.models.hf import parse_size
from ms_longctx.models.llama import LlamaForCausalLM
from tests.models.reference import SCALINGS, torch_model

GQA = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "attention_bias": True}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, read by the safetensors package."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip_is_bit_exact(dtype: str, tied: bool, fused: bool, tmp_path: Path) -> None:
    reference = torch_model(**GQA, tie_word_embeddings=tied).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = LlamaForCausalLM.from_pretrained(tmp_path / "theirs", dtype, parallel_attention=fused)
    model.save_pretrained(tmp_path / "ours", max_shard_size="15KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert_same_bits(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", torch_dtype="auto")
    assert_same_bits(again.state_dict(), reference.state_dict())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_saving_in_another_type_rounds_as_torch_does(dtype: str, tmp_path: Path) -> None:
    reference = torch_model(**GQA)
    reference.save_pretrained(tmp_path / "theirs")
    LlamaForCausalLM.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours", dtype)
    expected = {name: t.to(getattr(torch, dtype)) for name, t in stored(tmp_path / "theirs").items()}
    assert_same_bits(stored(tmp_path / "ours"), expected)


@pytest.mark.parametrize("name", SCALINGS)
def test_config_survives_and_transformers_reads_the_same(name: str, tmp_path: Path) -> None:
    scaling = dict(SCALINGS[name] or {}) or None
    theirs = transformers.LlamaConfig(
        hidden_size=50, num_attention_heads=5, num_hidden_layers=1, intermediate_size=8, vocab_size=11,
        rope_scaling=scaling, rope_theta=5e5, eos_token_id=[2, 7], tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(theirs).save_pretrained(tmp_path / "theirs")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "ours").config == model.config
    assert model.config.eos_token_ids == [2, 7]
    before = transformers.LlamaConfig.from_pretrained(tmp_path / "theirs").to_dict()
    after = transformers.LlamaConfig.from_pretrained(tmp_path / "ours").to_dict()
    assert {k: v for k, v in after.items() if before.get(k) != v} == {}


def test_transformers_5_and_mistral_configs(tmp_path: Path) -> None:
    torch_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["rope_theta"], values["rope_scaling"]
    values["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}
    path.write_text(json.dumps(values))
    config = LlamaForCausalLM.from_pretrained(tmp_path).config
    assert (config.rope_theta, config.rope_scaling) == (12345.0, {"rope_type": "linear", "factor": 2.0})
    path.write_text(json.dumps({**values, "model_type": "mistral"}))
    assert LlamaForCausalLM.from_pretrained(tmp_path).config.sliding_window == 4096  # MistralConfig's default


def test_companions_are_copied_and_old_shards_removed(tmp_path: Path) -> None:
    torch_model().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"a": "é"}')
    (tmp_path / "theirs" / "notes.txt").write_text("not part of the model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours", max_shard_size=15000)
    model.save_pretrained(tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == b'{"a": "\xc3\xa9"}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_fused_rows_are_grouped_by_key_value_head() -> None:
    config = LlamaConfig(hidden_size=4, num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    q, k, v = (np.arange(n)[:, None] + base for n, base in ((8, 0), (4, 100), (4, 200)))
    fused = fuse_qkv([q, k, v], config)
    assert fused[:, 0].tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    for part, expected in zip(split_qkv(fused, config), (q, k, v), strict=True):
        np.testing.assert_array_equal(part, expected)


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
FAULTS: dict[str, tuple[Any, str]] = {
    "missing tensor": (lambda d: edit(d, lambda t: t.pop(O_PROJ)), rf"no tensor {O_PROJ}"),
    "extra tensor": (
        lambda d: edit(d, lambda t: t.update({"model.extra.weight": torch.zeros(2)})),
        "unexpected tensor model.extra.weight",
    ),
    "wrong shape": (
        lambda d: edit(d, lambda t: t.update({O_PROJ: torch.zeros(3, 4)})),
        rf"{O_PROJ} \(3, 4\) \(expected \(40, 40\)\)",
    ),
    "integer tensor": (
        lambda d: edit(d, lambda t: t.update({O_PROJ: torch.zeros(40, 40, dtype=torch.int8)})),
        f"{O_PROJ} has type I8",
    ),
    "truncated data": (lambda d: truncate(d / "model.safetensors", 60000), "not a complete safetensors file"),
    "truncated header": (lambda d: truncate(d / "model.safetensors", 300), "not a complete safetensors file"),
    "empty file": (lambda d: truncate(d / "model.safetensors", 0), "not a complete safetensors file"),
    "foreign file": (
        lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        "not a complete safetensors file",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "expected model.safetensors or"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: cannot be read"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "config.json: not valid JSON"),
    "other architecture": (
        lambda d: edit_config(d, model_type="qwen2"),
        "model_type 'qwen2' is not supported",
    ),
    "quantized": (
        lambda d: edit_config(d, quantization_config={"bits": 4}),
        "quantization_config: .* supported",
    ),
    "impossible heads": (
        lambda d: edit_config(d, num_key_value_heads=4),
        "num_key_value_heads = 4 must divide",
    ),
    "unknown rope key": (
        lambda d: edit_config(d, rope_scaling={"type": "linear", "factr": 2}),
        "did you mean 'factor'",
    ),
    "head that is not tied": (lambda d: edit_config(d, tie_word_embeddings=True), "lm_head.weight differs"),
    "shard missing": (
        lambda d: (
            (d / "model.safetensors").rename(d / "a.safetensors"),
            (d / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors"}}'),
        ),
        "b.safetensors: cannot be read",
    ),
    "index that lies": (
        lambda d: (
            (d / "model.safetensors").rename(d / "a.safetensors"),
            (d / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}'),
        ),
        "a.safetensors: lacks x",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    torch_model().save_pretrained(tmp_path)
    LlamaForCausalLM.from_pretrained(tmp_path)
    break_it, message = FAULTS[fault]
    break_it(tmp_path)
    with pytest.raises(MsLongctxError, match=message):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(MsLongctxError, match="no model here"):
        LlamaForCausalLM.from_pretrained(tmp_path / "nothing")
    torch_model().save_pretrained(tmp_path / "m")
    with pytest.raises(MsLongctxError, match="dtype = 'fp8' is unknown"):
        LlamaForCausalLM.from_pretrained(tmp_path / "m", "fp8")
    with pytest.raises(MsLongctxError, match="did you mean 'rope_theta'"):
        LlamaForCausalLM.from_pretrained(tmp_path / "m", rope_teta=1.0)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "m")
    (tmp_path / "file").write_text("")
    with pytest.raises(MsLongctxError, match="cannot be written"):
        model.save_pretrained(tmp_path / "file" / "model")
    with pytest.raises(MsLongctxError, match="max_shard_size = 'big'"):
        model.save_pretrained(tmp_path / "out", max_shard_size="big")
    assert not (tmp_path / "out").exists()
    assert [parse_size(size) for size in (7, "20KB", "1.5 GB")] == [7, 20_000, 1_500_000_000]


@pytest.mark.slow
def test_loading_needs_one_tensor_beyond_the_model(tmp_path: Path) -> None:
    """Peak memory of a fresh process above its imports: the model (bf16 on disk, fp32 loaded) and 15 %."""
    config = LlamaConfig(
        vocab_size=4000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=3, num_attention_heads=8
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "m", "bf16", max_shard_size="100MB")
    size = sum(p.size * 4 for p in model.get_parameters())
    assert size > 200e6
    code = (
        "import resource, sys, mindspore as ms\n"
        "from ms_longctx.models.llama import LlamaForCausalLM\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "model = LlamaForCausalLM.from_pretrained(sys.argv[1])\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "model.save_pretrained(sys.argv[2], 'bf16')\n"
        "saved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(after - before, saved - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m"), str(tmp_path / "again")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loading, saving = (int(n) * 1024 for n in output.split()[-2:])
    assert loading < 1.15 * size, f"{loading / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"
    assert saving < 1.15 * size, f"{saving / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"
