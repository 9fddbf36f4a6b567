# SPDX-License-Identifier: Apache-2.0
"""LlamaConfig: defaults as transformers', and a message for every impossible value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError


def test_defaults_are_those_of_transformers() -> None:
    theirs = transformers.LlamaConfig()
    ours = LlamaConfig()
    shared = [field.name for field in dataclasses.fields(ours) if hasattr(theirs, field.name)]
    assert len(shared) >= 19
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(theirs, name) for name in shared}


def test_absent_heads_follow_from_the_others() -> None:
    config = LlamaConfig(hidden_size=60, num_attention_heads=6)
    assert (config.kv_heads, config.head_size) == (6, 10)
    assert LlamaConfig(hidden_size=7, num_attention_heads=3, head_dim=4).head_size == 4
    assert LlamaConfig(eos_token_id=[2, 5]).eos_token_ids == [2, 5]
    assert LlamaConfig(eos_token_id=None).eos_token_ids == []


def test_round_trip_as_a_dict() -> None:
    config = LlamaConfig(rope_scaling={"type": "linear", "factor": 2}, num_key_value_heads=8)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert LlamaConfig.from_dict(config.to_dict()) == config


YARN = {"rope_type": "yarn", "factor": 4.0}
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"hidden_size": 0}, "hidden_size = 0 must be a positive integer"),
    "bool": ({"num_hidden_layers": True}, "num_hidden_layers = True must be a positive integer"),
    "float": ({"vocab_size": 10.0}, "vocab_size = 10.0 must be a positive integer"),
    "text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' must be a positive number"),
    "infinite": ({"rope_theta": float("inf")}, "rope_theta = inf must be a positive number"),
    "window": ({"sliding_window": -1}, "sliding_window = -1 must be"),
    "heads": ({"num_attention_heads": 3}, "num_attention_heads = 3 must divide hidden_size = 4096"),
    "kv heads": ({"num_key_value_heads": 5}, "num_key_value_heads = 5 must divide num_attention_heads = 32"),
    "odd head": ({"head_dim": 5}, "head_dim = 5 must be even"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    "positions": ({"position_embedding": "none"}, "position_embedding = 'none' is unknown"),
    "alibi and rope": (
        {"position_embedding": "alibi", "rope_scaling": YARN},
        "rope_scaling has no effect with position_embedding = 'alibi'",
    ),
    "no mapping": ({"rope_scaling": 4}, "rope_scaling = 4 must be a mapping"),
    "no type": ({"rope_scaling": {"factor": 4.0}}, "rope_type = None is unknown"),
    "unknown type": ({"rope_scaling": {"type": "su"}}, "rope_type = 'su' is unknown; expected one of default"),
    "two types": ({"rope_scaling": {**YARN, "type": "linear"}}, "'linear' contradicts"),
    "unknown key": ({"rope_scaling": {**YARN, "beta_fats": 1}}, "beta_fats: .* did you mean 'beta_fast'"),
    "foreign key": (
        {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 32}},
        "beta_fast: unknown key for rope_type 'linear'",
    ),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
    "small factor": ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor = 0.5 must be at least 1"),
    "betas": ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_slow = 2 must be below"),
    "truncate": ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate = 1 must be true or false"),
    "factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor must be a list of head_dim / 2 = 64 numbers",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_values_are_named(case: str) -> None:
    values, message = IMPOSSIBLE[case]
    with pytest.raises(MsLongctxError, match=message):
        LlamaConfig(**values)


def test_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(MsLongctxError, match="hiden_size: unknown model key; did you mean 'hidden_size'"):
        LlamaConfig.from_dict({"hiden_size": 3})
