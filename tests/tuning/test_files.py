# SPDX-License-Identifier: Apache-2.0
"""Reference: peft over transformers opens what is written here, and the other way round; logits in 1e-5."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from mindspore import Tensor
from safetensors.torch import load_file, save_file

from ms_longctx.errors import MsLongctxError
from ms_longctx.tuning import LoraConfig, get_pe_model, load_adapter, merge, merge_and_unload, save_adapter
from ms_longctx.tuning.trained import trained_tensors
from tests.tuning.compare import our_logits, randomize, torch_logits

CONFIGS: dict[str, dict[str, Any]] = {
    "task": {"r": 64, "lora_alpha": 128, "target_modules": ["q_proj", "v_proj"]},
    "all-linear, rslora": {"r": 5, "lora_alpha": 2.5, "target_modules": "all-linear", "use_rslora": True},
    "regex": {"r": 4, "target_modules": r".*layers\.0.*\.(k|o)_proj", "lora_dropout": 0.1},
    "saved modules": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "norm"],
    },
    "all biases": {"r": 4, "target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "own biases": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "lora_only"},
}


def randomize_ours(model: Any) -> None:
    """Give every trained tensor another value."""
    rng = np.random.RandomState(5)
    for param in model.trainable_params():
        param.copy_(Tensor(param.asnumpy() + rng.randn(*param.shape).astype(np.float32) * 0.1))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_peft_opens_ours(make_pair: Any, tmp_path: Path, batch: Any, values: dict, tied: bool, fused: bool) -> None:
    theirs, ours = make_pair(fused, tie_word_embeddings=tied, attention_bias=True)
    get_pe_model(ours, LoraConfig(**values))
    randomize_ours(ours)
    expected = our_logits(ours, batch[0])
    save_adapter(ours, tmp_path / "a-b" / "适配器")
    opened = peft.PeftModel.from_pretrained(theirs, tmp_path / "a-b" / "适配器").eval()
    np.testing.assert_allclose(torch_logits(opened, batch[0]), expected, rtol=0, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "a-b" / "适配器").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_ours_opens_peft(make_pair: Any, tmp_path: Path, batch: Any, values: dict, fused: bool, caplog: Any) -> None:
    theirs, ours = make_pair(fused, attention_bias=True)
    biases = {name: param.clone() for name, param in theirs.named_parameters() if name.endswith("bias")}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    with caplog.at_level(logging.WARNING):
        load_adapter(ours, tmp_path / "adapter")
    if values.get("bias") == "lora_only":  # which peft does not write
        assert "no biases" in caplog.text
        with torch.no_grad():
            for name, param in theirs.named_parameters():
                if name.endswith("bias"):
                    param.copy_(biases[name.replace("base_model.model.", "").replace(".base_layer", "")])
    np.testing.assert_allclose(our_logits(ours, batch[0]), torch_logits(theirs, batch[0]), rtol=0, atol=1e-5)
    expected = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    names = {f"base_model.model.{name}" for name in trained_tensors(ours)}
    assert {name for name in names if "lora_only" != values.get("bias") or "bias" not in name} == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(make_pair: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """16-bit values are fp32 values, so they arrive exactly."""
    theirs, ours = make_pair()
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS["task"]))
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    stored = {n: t.to(dtype) for n, t in load_file(tmp_path / "adapter_model.safetensors").items()}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    load_adapter(ours, tmp_path)
    for name, tensor in trained_tensors(ours).items():
        expected = stored[f"base_model.model.{name}"].float().numpy()
        np.testing.assert_array_equal(tensor.read(), expected, err_msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_round_trip_is_exact(make_pair: Any, tmp_path: Path, dtype: str, fused: bool) -> None:
    first = get_pe_model(make_pair(fused, dtype)[1], LoraConfig(**CONFIGS["saved modules"]))
    if dtype == "fp32":
        randomize_ours(first)
    save_adapter(first, tmp_path / "a", base_model="a/base")
    second = load_adapter(make_pair(fused, dtype)[1], tmp_path / "a")
    for name, tensor in trained_tensors(second).items():
        np.testing.assert_array_equal(tensor.read(), trained_tensors(first)[name].read(), err_msg=name)
    third = load_adapter(
        get_pe_model(make_pair(fused, dtype)[1], LoraConfig(**CONFIGS["saved modules"])), tmp_path / "a"
    )
    assert [p.asnumpy().tobytes() for p in third.trainable_params()] == [
        p.asnumpy().tobytes() for p in second.trainable_params()
    ]
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "a/base"


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_save_pretrained_refuses_adapters(make_pair: Any, tmp_path: Path, batch: Any) -> None:
    """They would be missing in the file; merged into the weights they are there."""
    _, ours = make_pair(False)
    get_pe_model(ours, LoraConfig(r=4, target_modules=["q_proj"]))
    randomize_ours(ours)
    expected = our_logits(ours, batch[0])
    with pytest.raises(MsLongctxError, match=r"has adapters .*q_proj\.lora_A.*merge_and_unload"):
        ours.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    merge_and_unload(ours).save_pretrained(tmp_path / "model")
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    np.testing.assert_allclose(torch_logits(opened, batch[0]), expected, rtol=0, atol=1e-5)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BREAKAGES: dict[str, tuple[Any, str]] = {
    "no config": (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json: cannot be read"),
    "no weights": (
        lambda d: (d / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors: cannot be read",
    ),
    "bad json": (lambda d: (d / "adapter_config.json").write_text("{"), "not valid JSON"),
    "json list": (lambda d: (d / "adapter_config.json").write_text("[]"), "expected a JSON object"),
    "cut weights": (
        lambda d: (d / "adapter_model.safetensors").write_bytes((d / "adapter_model.safetensors").read_bytes()[:-9]),
        "not a complete safetensors file",
    ),
    "other method": (lambda d: edit_config(d, peft_type="ADALORA"), "peft_type = 'ADALORA'"),
    "dora": (lambda d: edit_config(d, use_dora=True), "use_dora = True"),
    "ranks": (lambda d: edit_config(d, rank_pattern={"q_proj": 3}), "rank_pattern"),
    "pissa": (lambda d: edit_config(d, init_lora_weights="pissa"), "has changed the base weights"),
    "other rank": (lambda d: edit_config(d, r=8), "has shape"),
    "other layers": (lambda d: edit_config(d, target_modules=["q_proj"]), "has no place in the model"),
    "more layers": (
        lambda d: edit_config(d, target_modules=["q_proj", "v_proj", "k_proj"]),
        "no tensor .*k_proj",
    ),
    "missing": (lambda d: edit_weights(d, lambda t: t.pop(FIRST)), "no tensor .*q_proj.lora_A.weight"),
    "transposed": (
        lambda d: edit_weights(d, lambda t: t.update({FIRST: t[FIRST].T.contiguous()})),
        r"q_proj.lora_A.weight has shape \(48, 4\), the model needs \(4, 48\)",
    ),
}


@pytest.mark.parametrize(("breakage", "message"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_broken_adapters_change_nothing(make_pair: Any, tmp_path: Path, breakage: Any, message: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    save_adapter(get_pe_model(make_pair()[1], config), tmp_path / "a")
    breakage(tmp_path / "a")
    ours = make_pair()[1]
    names = [name for name, _ in ours.parameters_and_names()]
    with pytest.raises(MsLongctxError, match=message):
        load_adapter(ours, tmp_path / "a")
    assert [name for name, _ in ours.parameters_and_names()] == names
    assert all(param.requires_grad for param in ours.get_parameters())


def test_a_head_trained_apart_from_its_embedding_is_refused(make_pair: Any, tmp_path: Path) -> None:
    theirs, ours = make_pair(tie_word_embeddings=True)
    values = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    theirs.save_pretrained(tmp_path / "start")
    load_adapter(ours, tmp_path / "start")
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "end")
    with pytest.raises(MsLongctxError, match="embed_tokens.weight and .*lm_head.weight differ, but the model ties"):
        load_adapter(ours, tmp_path / "end")


def test_another_scaling_is_refused(make_pair: Any, tmp_path: Path) -> None:
    save_adapter(get_pe_model(make_pair()[1], LoraConfig(r=4, lora_alpha=16)), tmp_path)
    ours = get_pe_model(make_pair()[1], LoraConfig(r=4, lora_alpha=8))
    with pytest.raises(MsLongctxError, match="scaling is 4, that of the model is 2"):
        load_adapter(ours, tmp_path)


def test_what_cannot_be_saved(make_pair: Any, tmp_path: Path) -> None:
    ours = make_pair()[1]
    with pytest.raises(MsLongctxError, match="has no adapters"):
        save_adapter(ours, tmp_path / "a")
    merge(get_pe_model(ours, LoraConfig(r=4)))
    with pytest.raises(MsLongctxError, match="are merged"):
        save_adapter(ours, tmp_path / "a")
    save_adapter(get_pe_model(make_pair()[1], LoraConfig(r=4)), tmp_path / "b")
    with pytest.raises(MsLongctxError, match="are merged"):
        load_adapter(ours, tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(MsLongctxError, match="cannot be written"):
        save_adapter(get_pe_model(make_pair()[1], LoraConfig(r=4)), tmp_path / "file" / "a")
    assert not (tmp_path / "a").exists()
