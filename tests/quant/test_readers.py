# SPDX-License-Identifier: Apache-2.0
"""What is written here is read by the programs it is for: AutoAWQ 0.2.9, transformers with compressed-tensors 0.17,
and the configuration classes of vLLM 0.11. The first run makes their environment (:mod:`tests.quant.readers`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.quant.files import save_quantized
from ms_longctx.quant.methods import INT8_WEIGHTS, KEPT
from ms_longctx.quant.model import Levels
from tests.quant import readers
from tests.quant.conftest import make_llama, random_tokens
from tests.quant.test_quantize import quantized

pytestmark = [pytest.mark.long, pytest.mark.skipif(not kernels.available(), reason=kernels.reason())]

# 5 heads of one key-value head; groups of 32 divide the inputs, nothing else is a power of two.
ODD: dict[str, Any] = {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 224}
ODD |= {"eos_token_id": None}  # nothing ends early
BIASED = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
PROMPT, NEW = 7, 8


class Case(NamedTuple):
    """A directory to write: method, layout, fields of the model, what is raised, and options of the method."""

    method: str
    layout: str
    fields: dict[str, Any] = {}
    levels: Levels = {}
    options: dict[str, Any] = {}


BOTH = {"activations": "token"}
CASES = {
    "awq": Case("awq", "awq"),
    "awq, tied, biases": Case("awq", "awq", TIED | BIASED),
    "awq, parts kept": Case("awq", "awq", {}, {(0, "down"): KEPT, (1, "qkv"): KEPT, (1, "gate_up"): KEPT}),
    "rtn": Case("rtn", "awq", TIED),
    "gptq": Case("gptq", "awq"),
    "awq, packed": Case("awq", "compressed-tensors", TIED),
    "gptq, packed, biases, parts kept": Case("gptq", "compressed-tensors", BIASED, {(1, "o"): KEPT, (0, "qkv"): KEPT}),
    "int8 weights": Case("int8", "compressed-tensors", BIASED),
    "int8": Case("int8", "compressed-tensors", TIED, {}, BOTH),
    "int8, mixed": Case("int8", "compressed-tensors", {}, {(0, "down"): INT8_WEIGHTS, (1, "qkv"): KEPT}, BOTH),
}
WITH_INPUTS = [name for name, case in CASES.items() if case.options == BOTH]
WEIGHTS_ONLY = [name for name in CASES if name not in WITH_INPUTS]


IDS = random_tokens(4, 5)
SHORT_IDS = IDS.reshape(16, 8)  # what differs in a token differs in all behind it, but not in other rows


class Answer(NamedTuple):
    """Logits ``(rows, length, vocab)``, greedy tokens after the prompt, what read the file, and matrices alone."""

    logits: np.ndarray
    tokens: list[int]
    read_by: str = ""
    recorded: dict[str, np.ndarray] = {}


def ours(directory: Path, ids: np.ndarray) -> Answer:
    model = LlamaForCausalLM.from_pretrained(directory).set_train(False)
    prompt = ids[0, :PROMPT].tolist()
    tokens = model.generate([prompt], max_new_tokens=NEW)[0][-NEW:]
    return Answer(model(Tensor(ids)).asnumpy(), [int(token) for token in tokens])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All cases as directories."""
    root = tmp_path_factory.mktemp("written")
    result = {}
    for index, (name, case) in enumerate(CASES.items()):
        _, folder = make_llama(root / f"model{index}", **ODD, **case.fields)
        model, _, _ = quantized(folder, random_tokens, case.method, **case.options)
        model.levels = dict(case.levels)
        save_quantized(model, root / f"out{index}", case.layout, {})
        result[name] = root / f"out{index}"
    return result


def reader_of(case: Case) -> str:
    """AutoAWQ cannot keep a matrix in one layer only, transformers and vLLM can."""
    if case.layout != "awq":
        return "transformers"
    return "transformers awq" if case.levels else "autoawq"


@pytest.fixture(scope="module")
def read(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Answer]:
    """What the other programs make of them, by name and whether inputs are rounded as vLLM rounds them."""
    scratch = tmp_path_factory.mktemp("read")
    np.save(scratch / "long.npy", IDS)
    np.save(scratch / "short.npy", SHORT_IDS)
    keys = [(name, False) for name in CASES] + [(name, True) for name in WITH_INPUTS]
    jobs = [
        {
            "reader": reader_of(CASES[name]),
            "directory": str(written[name]),
            "ids": str(scratch / ("short.npy" if name in WITH_INPUTS else "long.npy")),
            "out": str(scratch / f"{index}.npz"),
            "prompt": PROMPT,
            "new": NEW,
            "vllm_inputs": as_vllm,
            "record": as_vllm,
        }
        for index, (name, as_vllm) in enumerate(keys)
    ]
    answers = readers.run("reader.py", jobs, scratch)
    result = {}
    for index, (key, read_by) in enumerate(zip(keys, answers, strict=True)):
        with np.load(scratch / f"{index}.npz") as arrays:
            recorded = {name: arrays[name] for name in arrays.files if name.startswith("model.")}
            result[key] = Answer(arrays["logits"], arrays["tokens"].tolist(), read_by, recorded)
    return result


def matrices(case: Case) -> int:
    """How many are quantized."""
    return 14 - sum({"qkv": 3, "gate_up": 2}.get(unit, 1) for (_, unit), level in case.levels.items() if level == KEPT)


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_equal_logits_and_text(name: str, written: dict[str, Path], read: dict[tuple[str, bool], Answer]) -> None:
    """Logits 2e-5 of the largest (both compute in fp32 from the same integers and fp16 scales), 8 greedy tokens equal;
    the other program quantized as many matrices as were written."""
    found, expected = ours(written[name], IDS), read[name, False]
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=2e-5 * np.abs(expected.logits).max())
    assert found.tokens == expected.tokens
    assert expected.read_by.split(" x ")[0] == str(matrices(CASES[name])), expected.read_by


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_rounded_inputs(name: str, written: dict[str, Path], read: dict[tuple[str, bool], Answer]) -> None:
    """With inputs rounded as vLLM's kernels round them (see ``reader.py``): each matrix gives the same outputs for the
    same inputs, 3e-6 of the largest; one in a thousand may have an input that is so near the middle of two integers
    that the order of fp32 operations decides. In the whole model such an input changes its token and all behind it,
    so logits are equal to 2e-5 for three tokens in four, and the rest within 10 %.

    compressed-tensors' own rounding is another definition, as far from ours as a rounding is from none: seen 2 % of
    the largest logit, likeliest tokens equal for 0.93 and 0.97 of the positions."""
    found = ours(written[name], SHORT_IDS)
    same_rule, own_rule = read[name, True], read[name, False]
    apart = readers.differences(LlamaForCausalLM.from_pretrained(written[name]), same_rule.recorded)
    assert len(apart) == matrices(CASES[name]) and np.quantile(apart, 0.999) < 3e-6
    size = np.abs(found.logits).max()
    distance = np.abs(found.logits - same_rule.logits).max(-1) / size
    assert np.quantile(distance, 0.75) < 2e-5 and distance.max() < 0.1
    assert found.tokens == same_rule.tokens
    assert np.median(np.abs(found.logits - own_rule.logits).max(-1)) < 0.04 * size
    assert np.mean(found.logits.argmax(-1) == own_rule.logits.argmax(-1)) > 0.85


def test_vllm_takes_the_configurations(written: dict[str, Path], tmp_path: Path) -> None:
    """Each layer gets the class of kernels that was meant, kept ones none: also q, k and v, which vLLM joins."""
    meant = {"int8": "CompressedTensorsW8A8Int8", "int8 weights": "CompressedTensorsWNA16", KEPT: None}
    jobs = [{"directory": str(directory)} for directory in written.values()]
    answers = readers.run("vllm_rules.py", jobs, tmp_path, readers.vllm_sources())
    layers = {
        "qkv": "self_attn.qkv_proj",
        "o": "self_attn.o_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    }
    for (name, case), answer in zip(CASES.items(), answers, strict=True):
        lowest = {"awq": "AWQ"}.get(case.layout, meant["int8 weights"]) if case.method != "int8" else None
        lowest = lowest or meant["int8" if case.options else "int8 weights"]
        for index in (0, 1):
            for unit, layer in layers.items():
                level = case.levels.get((index, unit))
                expected = lowest if level is None else meant[level]
                assert answer[f"model.layers.{index}.{layer}"] == expected, (name, index, unit)
