# SPDX-License-Identifier: Apache-2.0
"""Reference: the layers that peft adapts for the same configuration."""

from __future__ import annotations

from typing import Any

import peft
import pytest

from ms_longctx.config.sections import LoraSection
from ms_longctx.errors import MsLongctxError
from ms_longctx.tuning import LoraConfig, get_pe_model
from ms_longctx.tuning.targets import select

SELECTIONS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "v_proj"]},
    "longer ends": {"target_modules": ["self_attn.o_proj", "mlp.up_proj"]},
    "a whole path": {
        "target_modules": ["model.layers.1.mlp.down_proj", "k_proj"],
        "layers_to_transform": [0],
    },
    "an end that is no whole name": {"target_modules": r".*_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "one layer": {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]},
    "no layers given": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "a regex": {"target_modules": r"model\.layers\.0\.(self_attn\.[qk]|mlp\.gate)_proj"},
    "beside saved modules": {"target_modules": r".*_proj", "modules_to_save": ["o_proj", "lm_head"]},
}


@pytest.mark.parametrize("values", SELECTIONS.values(), ids=SELECTIONS.keys())
def test_equals_peft(make_pair: Any, values: dict, fused: bool) -> None:
    theirs, ours = make_pair(fused)
    reference = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    expected = sorted(name for name in reference.base_model.targeted_module_names)
    assert sorted(place.name for place in select(ours, LoraConfig(**values))) == expected


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        {"target_modules": ["q_proj", "qproj"]},
        "no linear layer is called 'qproj'; linear layers of this model: q_proj, k_proj, v_proj, o_proj",
    ),
    "no match": (
        {"target_modules": r".*query"},
        r"matches no linear layer; .*model\.layers\.0\.self_attn\.q_proj",
    ),
    "not linear": ({"target_modules": ["embed_tokens"]}, "no linear layer is called 'embed_tokens'"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "output head lm_head, which takes no adapter"),
    "layer": (
        {"target_modules": ["q_proj"], "layers_to_transform": [7]},
        r"layers_to_transform = \[7\] leaves",
    ),
    "module": ({"modules_to_save": ["heads"]}, "no module is called 'heads'; modules: .*embed_tokens"),
}


@pytest.mark.parametrize(("values", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_leave_the_model_alone(make_pair: Any, values: dict, message: str, fused: bool) -> None:
    ours = make_pair(fused)[1]
    names = [name for name, _ in ours.parameters_and_names()]
    with pytest.raises(MsLongctxError, match=message):
        get_pe_model(ours, LoraConfig(**values))
    assert [name for name, _ in ours.parameters_and_names()] == names
    assert all(param.requires_grad for param in ours.get_parameters())


def test_tied_modules_train_together(make_pair: Any) -> None:
    ours = make_pair(tie_word_embeddings=True)[1]
    with pytest.raises(MsLongctxError, match="embed_tokens.weight, which is tied to lm_head.weight; name both"):
        get_pe_model(ours, LoraConfig(modules_to_save=["embed_tokens"]))


def test_what_a_fused_layer_cannot_do(make_pair: Any) -> None:
    ours = make_pair(True, attention_bias=True)[1]
    with pytest.raises(MsLongctxError, match="qkv_proj.*parallel_attention: false"):
        get_pe_model(ours, LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"]))
    with pytest.raises(MsLongctxError, match="lora_only with parallel_attention needs q_proj, k_proj and v_proj"):
        get_pe_model(ours, LoraConfig(bias="lora_only"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 0}, "lora.r = 0"),
        ({"lora_alpha": 0}, "lora.lora_alpha = 0"),
        ({"lora_dropout": 1.0}, "lora.lora_dropout = 1.0"),
        ({"bias": "some"}, "lora.bias = 'some'"),
        ({"target_modules": []}, "lora.target_modules is empty"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "needs a list of names"),
        ({"target_modules": "q_proj("}, "lora.target_modules = 'q_proj\\(' is not a regular expression"),
    ],
)
def test_impossible_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MsLongctxError, match=message):
        LoraConfig(**values)


def test_from_section() -> None:
    section = LoraSection(enabled=True, r=64, lora_alpha=128, target_modules="all-linear", use_rslora=True)
    expected = LoraConfig(r=64, lora_alpha=128, target_modules="all-linear", use_rslora=True)
    assert LoraConfig.from_section(section) == expected
    assert LoraConfig.from_section(section).scaling == 16.0


def test_config_is_one_of_peft() -> None:
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["a", "b"], use_rslora=True, layers_to_transform=[1])
    theirs = peft.LoraConfig(**{k: v for k, v in config.to_peft().items() if k != "peft_type"})
    assert LoraConfig.from_peft(theirs.to_dict() | {"target_modules": ["a", "b"], "peft_type": "LORA"}, "") == config
