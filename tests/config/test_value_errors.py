# SPDX-License-Identifier: Apache-2.0
"""Values of the right type that cannot be, and features that are not built yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ms_longctx.config import ConfigError, load_config

Refusal = Callable[[str], tuple[Path, str]]

# What the YAML says, and the message after the file's name (exact up to where it is cut).
CASES: dict[str, tuple[str, str]] = {
    # -- the model's architecture
    "heads and width": (
        "model:\n  hidden_size: 64\n  num_attention_heads: 5\n",
        ":3: model.num_attention_heads = 5 must divide hidden_size = 64 when head_dim is not given",
    ),
    "kv heads": (
        "model:\n  num_attention_heads: 32\n  num_key_value_heads: 5\n",
        ":3: model.num_key_value_heads = 5 must divide num_attention_heads = 32",
    ),
    "odd head": ("model: {head_dim: 63}", ":1: model.head_dim = 63 must be even"),
    "negative size": (
        "model: {hidden_size: -64}",
        ":1: model.hidden_size = -64 must be a positive integer",
    ),
    "zero layers": (
        "model: {num_hidden_layers: 0}",
        ":1: model.num_hidden_layers = 0 must be a positive integer",
    ),
    "rope and alibi": (
        "model: {position_embedding: alibi, rope_scaling: {rope_type: linear, factor: 2}}",
        ":1: model.rope_scaling has no effect with position_embedding = 'alibi'; remove one of them",
    ),
    "position embedding": (
        "model: {position_embedding: learned}",
        ":1: model.position_embedding = 'learned' is unknown; expected 'rope' or 'alibi'",
    ),
    "rope type": (
        "model: {rope_scaling: {type: foo}}",
        ":1: model.rope_scaling.rope_type = 'foo' is unknown; expected one of default, linear, dynamic, yarn",
    ),
    "rope factor": (
        "model: {rope_scaling: {type: linear}}",
        ":1: model.rope_scaling.factor: missing, rope_type 'linear' needs it",
    ),
    # -- ranges
    "zero batch": (
        "train: {batch_size: 0}",
        ":1: train.batch_size: expected a value of at least 1, found 0",
    ),
    "negative rate": (
        "optimizer: {learning_rate: -1e-4}",
        ":1: optimizer.learning_rate: expected a value above 0, found -0.0001",
    ),
    "beta of one": (
        "optimizer: {betas: [0.9, 1]}",
        ":1: optimizer.betas: expected a value from 0 to below 1, found 1",
    ),
    "ratio": (
        "optimizer: {warmup_ratio: 3}",
        ":1: optimizer.warmup_ratio: expected a value from 0 to 1, found 3",
    ),
    "top_p": (
        "generation: {top_p: 0}",
        ":1: generation.top_p: expected a value from above 0 to 1, found 0",
    ),
    "dropout": (
        "lora: {lora_dropout: 1}",
        ":1: lora.lora_dropout: expected a value from 0 to below 1, found 1",
    ),
    "zero rank": ("lora: {r: 0}", ":1: lora.r: expected a value of at least 1, found 0"),
    # -- keys that contradict each other
    "prompt and answer": (
        "data:\n  seq_length: 100\n  prompt_length: 60\n  answer_length: 30\n",
        ":3: data.prompt_length: prompt_length 60 + answer_length 30 = 90; expected seq_length = 100",
    ),
    "prompt takes all": (
        "data:\n  seq_length: 100\n  prompt_length: 100\n",
        ":3: data.prompt_length: leaves nothing of seq_length = 100 for the other part",
    ),
    "answer takes all": (
        "data:\n  seq_length: 100\n  answer_length: 120\n",
        ":3: data.answer_length: leaves nothing of seq_length = 100 for the other part",
    ),
    "longer than the model": (
        "model: {max_position_embeddings: 512}\ndata:\n  seq_length: 513\n",
        ":3: data.seq_length: 513 is longer than model.max_position_embeddings = 512",
    ),
    "default is too long": (
        "model: {max_position_embeddings: 512}\n",
        ": data.seq_length: 2048 is longer than model.max_position_embeddings = 512",
    ),
    "warm-up": (
        "train: {max_steps: 5}\noptimizer:\n  warmup_steps: 6\n",
        ":3: optimizer.warmup_steps: 6 is longer than the training (train.max_steps = 5)",
    ),
    "two warm-ups": (
        "optimizer:\n  warmup_steps: 6\n  warmup_ratio: 0.1\n",
        ":3: optimizer.warmup_ratio: warmup_steps is given too; keep one of them",
    ),
    "layout": (
        "train: {objective: sft}\ndata: {layout: lm}\n",
        ":2: data.layout: 'lm' masks no prompt, and train.objective is 'sft'; expected 'sft'",
    ),
    "objective": (
        "train: {objective: pretrain}\ndata: {layout: sft}\n",
        ":2: data.layout: 'sft' masks the prompt, and train.objective is 'pretrain'; expected 'lm'",
    ),
    "loss scale": (
        "train: {loss_scale_init: 2, loss_scale_min: 4}",
        ":1: train.loss_scale_min: 4 is above loss_scale_init = 2",
    ),
    "bf16 on a CPU": (
        "train: {dtype: bf16, device_target: cpu}",
        ":1: train.dtype: bf16 needs Ascend and device_target is CPU; use fp32 or fp16",
    ),
    "evaluation of nothing": (
        "train: {eval_steps: 5}",
        ":1: train.eval_steps: there is nothing to evaluate on: data.eval_path is not given",
    ),
    "negative degree": ("parallel: {dp: -1}", ":1: parallel.dp: expected a value of at least 1, found -1"),
    "empty stage": (
        "parallel: {pp: 2, pipeline_layers: [4, 0]}",
        ":1: parallel.pipeline_layers: expected a value of at least 1, found 0",
    ),
    "ulysses degree": ("parallel: {ulysses_degree: 0}", ":1: parallel.ulysses_degree: expected a value of at least 1"),
    "attention mode": (
        "parallel: {attention_mode: star}",
        ":1: parallel.attention_mode: expected one of none, ring, ulysses, hybrid or null, found 'star' (text)",
    ),
    "sequence_parallel": (
        "model: {sequence_parallel: yes please}",
        ":1: model.sequence_parallel: expected an integer or true or false, found 'yes please' (text)",
    ),
    "text degree": ("parallel: {dp: two}", ":1: parallel.dp: expected an integer, found 'two' (text)"),
    "ring is not a flag": (
        "use_ring_attention: 3",
        ":1: use_ring_attention: expected true or false, found 3 (an integer)",
    ),
    # -- two names of one key
    "aliases disagree": (
        "recompute: true\ntrain:\n  recompute: false\n",
        ":3: train.recompute: contradicts recompute ({file}:1), which means the same; keep one",
    ),
    # -- features that are not built yet
    "recursive planner": (
        "parallel: {mode: recursive_programming}",
        ":1: parallel.mode: 'recursive_programming' is refused: MindSpore 2.10's recursive planner fails on attention",
    ),
    "GaLore": (
        "optimizer: {type: GaLore}",
        ":1: optimizer.type: 'galore' is refused: the GaLore optimizers are not built yet",
    ),
    "Q-GaLore": (
        "optimizer: {type: qgalore}",
        ":1: optimizer.type: 'qgalore' is refused: the GaLore optimizers are not built yet",
    ),
    "GaLore rank": (
        "optimizer: {rank: 128}",
        ":1: optimizer.rank: 128 is refused: the GaLore optimizers are not built yet; leave it at null",
    ),
    "GaLore bits": (
        "optimizer: {quantization_bit: 8}",
        ":1: optimizer.quantization_bit: 8 is refused: the GaLore optimizers are not built yet; leave it at null",
    ),
    "dpo": (
        "train: {objective: dpo}",
        ":1: train.objective: 'dpo' is refused: preference training is not built yet",
    ),
    "grpo": (
        "train: {objective: grpo}",
        ":1: train.objective: 'grpo' is refused: preference training is not built yet",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, refusal: Refusal) -> None:
    text, expected = CASES[name]
    path, message = refusal(text)
    assert message.startswith(f"{path}{expected.replace('{file}', str(path))}")


# Overrides, and the message.
OVERRIDE_CASES: dict[str, tuple[list[str], str]] = {
    "unknown key": (
        ["--train.max_stps", "3"],
        "command line: --train.max_stps: unknown key; did you mean 'train.max_steps'?",
    ),
    "wrong type": (
        ["--train.max_steps=many"],
        "command line: --train.max_steps: expected an integer or null, found 'many' (text)",
    ),
    "impossible model": (
        ["--model.num_attention_heads", "7"],
        "command line: model.num_attention_heads = 7 must divide hidden_size = 4096 when head_dim is not",
    ),
    "contradiction": (
        ["--train.max_steps", "3", "--optimizer.warmup_steps", "4"],
        "command line: --optimizer.warmup_steps: 4 is longer than the training (train.max_steps = 3)",
    ),
    "not built": (
        ["--optimizer.rank", "2"],
        "command line: --optimizer.rank: 2 is refused: the GaLore optimizers are not built yet; leave it at null",
    ),
    "no value": (["--train.max_steps"], "command line: --train.max_steps: a value is missing; expected"),
    "stray word": (["fast"], "command line: unexpected argument 'fast'; overrides are '--section.key value'"),
}


@pytest.mark.parametrize("name", OVERRIDE_CASES)
def test_overrides(name: str) -> None:
    overrides, expected = OVERRIDE_CASES[name]
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
