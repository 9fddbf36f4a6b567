# SPDX-License-Identifier: Apache-2.0
"""Reading, merging and presets: what is stated arrives under its own name, whatever name the user gave it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ms_longctx.config import (
    ConfigError,
    LlamaConfig,
    ParallelConfig,
    find_config,
    load_config,
    load_strategy,
    merge_architecture,
    preset_names,
)
from ms_longctx.config.aliases import canonical
from ms_longctx.config.sections import SECTIONS, RunConfig
from ms_longctx.config.source import Entry

REPOSITORY = Path(__file__).resolve().parents[2]


def load(text: str, tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def value(run: RunConfig, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(run, section), field)


def test_no_file_gives_the_defaults() -> None:
    run = load_config(None)
    assert run == RunConfig() and run.given == frozenset()


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("recompute: True", "train.recompute", True),
        ("model: {recompute: True}", "train.recompute", True),
        ("train: {recompute: yes}", "train.recompute", True),
        ("use_flash_attention: False", "model.use_flash_attention", False),
        ("model: {use_flash_attention: False}", "model.use_flash_attention", False),
        ("parallel_attention: true", "model.parallel_attention", True),
        ("model: {context_length: 4096}", "model.max_position_embeddings", 4096),
        ("optimizer: {type: AdamW}", "optimizer.type", "adamw"),
        ("optimizer: {lr: 3}", "optimizer.learning_rate", 3.0),
        ("train: {torch_dtype: float16}", "train.dtype", "fp16"),
        ("train: {device_target: ascend}", "train.device_target", "Ascend"),
        ("device_target: NPU", "train.device_target", "Ascend"),
        ("train: {resume: true}", "train.resume", "latest"),
        ("train: {resume: false}", "train.resume", None),
        ("train: {resume: out/step-5}", "train.resume", "out/step-5"),
        ("train: {num_train_epochs: 3}", "train.epochs", 3),
        ("data: {max_length: 512}", "data.seq_length", 512),
        ("lora: {rank: 64, alpha: 128}", "lora.r", 64),
        ("lora: {target_modules: all-linear}", "lora.target_modules", "all-linear"),
        ("lora: {target_modules: [o_proj]}", "lora.target_modules", ["o_proj"]),
        ("optimizer: {betas: [0.9, 0.999]}", "optimizer.betas", (0.9, 0.999)),
        ("train: {save_steps: null}", "train.save_steps", None),
        ("model: {eos_token_id: [2, 3]}", "model.eos_token_id", [2, 3]),
        ("data: {fields: {article: text}}", "data.fields", {"article": "text"}),
        ("model.num_hidden_layers: 3", "model.num_hidden_layers", 3),
        ("parallel: {sequence_parallel_size: 4}", "parallel.cp", 4),
        ("parallel: {tensor_parallel: 4}", "parallel.mp", 4),
        ("sequence_parallel: true", "parallel.sp", True),
        ("model: {sequence_parallel: false}", "parallel.sp", 1),
        ("use_ring_attention: true", "parallel.attention_mode", "ring"),
        ("model: {use_ring_attention: false}", "parallel.attention_mode", "none"),
        ("parallel: {pipeline_layers: [3, 4]}", "parallel.pipeline_layers", [3, 4]),
    ],
)
def test_accepted_spellings(text: str, key: str, expected: Any, tmp_path: Path) -> None:
    run = load(text, tmp_path)
    assert value(run, key) == expected and type(value(run, key)) is type(expected)
    assert key in run.given


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "+1e-4", ".0001"])
def test_numbers_with_exponents(text: str, tmp_path: Path) -> None:
    assert load(f"optimizer: {{learning_rate: {text}}}", tmp_path).optimizer.learning_rate == 1e-4
    assert load("{}\n", tmp_path, "--optimizer.learning_rate", text).optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    "text",
    [
        "parallel: {dp: 1, mp: 1, sp: 1, pp: 1, cp: 1, sequence_parallel_size: 1}",
        "parallel: {attention_mode: null, ulysses_degree: null, micro_batch_num: null, optimizer_shard: false}",
        "{sequence_parallel: false}",
        "model: {sequence_parallel: false}",
        "optimizer: {rank: null, quantization_bit: null, type: adamw}",
    ],
)
def test_neutral_values(text: str, tmp_path: Path) -> None:
    run = load(text, tmp_path)
    assert dataclasses.replace(run, given=frozenset()) == RunConfig()


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"train": {"seed": 7}}')
    assert load_config(path).train.seed == 7


def test_byte_order_mark_and_non_ascii_text(tmp_path: Path) -> None:
    path = tmp_path / "設定.yaml"
    path.write_text("data: {system: 你好 🙂}", encoding="utf-8-sig")
    assert load_config(path).data.system == "你好 🙂"


def test_merge_keys(tmp_path: Path) -> None:
    text = "generation: &base {seed: 5, top_k: 3}\nlora: {<<: {r: 4}, lora_alpha: 9}\n"
    run = load(text, tmp_path)
    assert (run.generation.seed, run.lora.r, run.lora.lora_alpha) == (5, 4, 9)


def test_overrides_win_and_come_in_both_forms(tmp_path: Path) -> None:
    text = "train: {seed: 1, dtype: fp16}\nrecompute: true\n"
    run = load(text, tmp_path, "--train.seed", "2", "--train.dtype=fp32", "--train.recompute", "false")
    assert (run.train.seed, run.train.dtype, run.train.recompute) == (2, "fp32", False)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("--train.max_steps=null", "train.max_steps", None),
        ("--train.output_dir=2024", "train.output_dir", "2024"),
        ("--train.output_dir=true", "train.output_dir", "true"),
        ("--train.output_dir=a=b", "train.output_dir", "a=b"),
        ("--data.system=You are: [helpful", "data.system", "You are: [helpful"),
        ("--data.system=You are: helpful", "data.system", "You are: helpful"),
        ("--data.system=null", "data.system", None),
        ("--generation.stop=['</s>', END]", "generation.stop", ["</s>", "END"]),
        ("--lora.target_modules=[q_proj, k_proj]", "lora.target_modules", ["q_proj", "k_proj"]),
        ("--lora.target_modules=all-linear", "lora.target_modules", "all-linear"),
        ("--data.fields={article: text}", "data.fields", {"article": "text"}),
        ("--data.fields.article=text", "data.fields", {"article": "text"}),
        ("--optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
        ("--train.resume=true", "train.resume", "latest"),
        ("--recompute=true", "train.recompute", True),
        ("--model.context_length=4096", "model.max_position_embeddings", 4096),
    ],
)
def test_override_values(override: str, key: str, expected: Any) -> None:
    assert value(load_config(None, [override]), key) == expected


def test_last_override_wins() -> None:
    assert load_config(None, ["--train.seed=1", "--train.seed=2"]).train.seed == 2


def test_nested_overrides_keep_the_rest_of_a_mapping(tmp_path: Path) -> None:
    text = "model: {rope_scaling: {rope_type: linear, factor: 2}, max_position_embeddings: 4096}"
    run = load(text, tmp_path, "--model.rope_scaling.rope_type=dynamic", "--model.rope_scaling.factor", "4")
    assert run.model.rope_scaling == {"rope_type": "dynamic", "factor": 4}


def test_strategy_file_wins_over_config_and_loses_to_overrides(tmp_path: Path) -> None:
    config, strategy = tmp_path / "run.yaml", tmp_path / "parallel.json"
    config.write_text("parallel: {dp: 4}")
    strategy.write_text('{"dp": 1, "mp": 1, "sp": 1, "pp": 1}')
    assert load_config(config).parallel.dp == 4
    assert load_config(config, parallel_config=strategy).parallel.dp == 1
    assert load_config(config, ["--parallel.dp=2"], strategy).parallel.dp == 2


def test_strategy_is_read_from_files_and_mappings(tmp_path: Path) -> None:
    strategy = tmp_path / "parallel.json"
    strategy.write_text('{"dp": 4, "sequence_parallel_size": 2, "use_ring_attention": true}')
    assert load_strategy(strategy) == ParallelConfig(dp=4, cp=2, attention_mode="ring")
    assert load_strategy({"dp": 4, "tp": 2, "sequence_parallel": True}) == ParallelConfig(dp=4, mp=2, sp=True)


def test_objective_and_layout_follow_each_other(tmp_path: Path) -> None:
    assert load("train: {objective: sft}", tmp_path).data.layout == "sft"
    assert load("data: {layout: sft}", tmp_path).train.objective == "sft"
    assert load("{}", tmp_path).data.layout == "lm"


def test_a_later_source_moves_objective_and_layout_together() -> None:
    for override in ("--train.objective=pretrain", "--data.layout=lm"):
        run = load_config("smollm2-135m", [override])
        assert (run.train.objective, run.data.layout) == ("pretrain", "lm")
    for override in ("--train.objective=sft", "--data.layout=sft"):
        run = load_config("llama-tiny", [override])
        assert (run.train.objective, run.data.layout) == ("sft", "sft")


@pytest.mark.parametrize(("key", "prompt", "answer"), [("prompt_length", 90, 10), ("answer_length", 10, 90)])
def test_one_part_of_the_split_gives_the_other(key: str, prompt: int, answer: int, tmp_path: Path) -> None:
    run = load(f"data: {{seq_length: 100, {key}: 90}}", tmp_path)
    assert (run.data.prompt_length, run.data.answer_length) == (prompt, answer)


def test_dumped_configuration_loads_again(tmp_path: Path) -> None:
    run = load_config("llama3-8b-128k", ["--generation.stop=[a]"])
    again = load(yaml.safe_dump(run.as_dict()), tmp_path)
    assert dataclasses.replace(again, given=run.given) == run


# Parameters of the published checkpoints, counted by their authors' weights (tied embeddings once).
PARAMETERS = {
    "llama-7b-32k": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b-128k": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}


def count_parameters(model: LlamaConfig) -> int:
    width, head = model.hidden_size, model.head_size
    attention = 2 * width * head * (model.num_attention_heads + model.kv_heads)
    layer = attention + 3 * width * model.intermediate_size + 2 * width
    tables = 1 if model.tie_word_embeddings else 2
    return tables * model.vocab_size * width + model.num_hidden_layers * layer + width


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_size_of_the_published_models(name: str) -> None:
    assert count_parameters(load_config(name).model) == PARAMETERS[name]


def test_every_preset_loads() -> None:
    assert set(preset_names()) == {*PARAMETERS, "llama-tiny"}
    for name in preset_names():
        run = load_config(name)
        assert run.model.use_flash_attention and run.parallel == ParallelConfig()


@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny.yaml", "yaml_configs/llama-tiny.yaml"])
def test_presets_are_found_from_any_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == REPOSITORY / "yaml_configs" / "llama-tiny.yaml"


def test_a_file_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-tiny.yaml").write_text("train: {seed: 9}")
    assert load_config("llama-tiny.yaml").train.seed == 9
    assert load_config("llama-tiny").train.seed == 42


@pytest.mark.parametrize(
    "name", ["recompute", "model.recompute", "use_ring_attention", "parallel.sequence_parallel_size", "seed"]
)
def test_aliases_lead_to_keys_of_the_schema(name: str) -> None:
    section, field = canonical(name, Entry(False, name, "here"))[0].split(".")
    assert field in SECTIONS[section].__dataclass_fields__ or (section, field) == (
        "parallel",
        "attention_mode",
    )


def test_configuration_does_not_import_mindspore() -> None:
    script = "import sys, ms_longctx.config as c; c.load_config('llama-tiny'); print('mindspore' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "False"


CHECKPOINT = LlamaConfig(vocab_size=49152, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)


def test_stated_keys_change_the_checkpoint_and_defaults_do_not() -> None:
    overrides = [
        "--model.pretrained=x.gguf",
        "--model.max_position_embeddings=8192",
        "--model.hidden_size=576",
    ]
    run = load_config(None, [*overrides, "--model.num_attention_heads=9"])
    merged = merge_architecture(run, CHECKPOINT)
    assert type(merged) is LlamaConfig
    assert merged == dataclasses.replace(CHECKPOINT, max_position_embeddings=8192)


def test_keys_that_contradict_the_weights() -> None:
    run = load_config(None, ["--model.pretrained=x.gguf", "--model.vocab_size=32000"])
    expected = "model.vocab_size: 32000 contradicts the weights of x.gguf, which have 49152; remove the key"
    with pytest.raises(ConfigError, match=expected):
        merge_architecture(run, CHECKPOINT)


def test_samples_longer_than_the_checkpoint() -> None:
    run = load_config(None, ["--model.pretrained=x.gguf", "--data.seq_length=2049"])
    with pytest.raises(ConfigError, match="data.seq_length: 2049 is longer than the 2048 tokens of x.gguf"):
        merge_architecture(run, CHECKPOINT)
