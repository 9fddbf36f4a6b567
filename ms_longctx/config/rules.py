# SPDX-License-Identifier: Apache-2.0
"""Values that have the right type and still cannot be: out of range, or in contradiction to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ms_longctx.config.sections import DataConfig, RunConfig
from ms_longctx.config.source import ConfigError

Fail = Callable[[str, str], ConfigError]
"""Makes the error for a dotted key and a message; knows where the key was written."""


@dataclass(frozen=True)
class Range:
    """An interval; ``open_low`` and ``open_high`` leave the ends out."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        if self.high is None:
            return above
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"a value {'above' if self.open_low else 'of at least'} {self.low:g}"
        low, high = ("above " if self.open_low else ""), ("below " if self.open_high else "")
        return f"a value from {low}{self.low:g} to {high}{self.high:g}"


_COUNT, _FROM_ZERO, _POSITIVE = Range(1), Range(0), Range(0, open_low=True)
_SEED = Range(0, 2**32 - 1)
_FRACTION, _PART = Range(0, 1), Range(0, 1, open_high=True)

RANGES: dict[str, Range] = {
    "data.seq_length": _COUNT,
    "data.prompt_length": _COUNT,
    "data.answer_length": _COUNT,
    "data.num_parallel_workers": _COUNT,
    "data.seed": _SEED,
    "parallel.dp": _COUNT,
    "parallel.mp": _COUNT,
    "parallel.sp": _COUNT,
    "parallel.pp": _COUNT,
    "parallel.cp": _COUNT,
    "parallel.ulysses_degree": _COUNT,
    "parallel.micro_batch_num": _COUNT,
    "parallel.pipeline_layers": _COUNT,
    "parallel.comm_fusion": _COUNT,
    "optimizer.learning_rate": _POSITIVE,
    "optimizer.betas": _PART,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _FROM_ZERO,
    "optimizer.warmup_steps": _FROM_ZERO,
    "optimizer.warmup_ratio": _FRACTION,
    "optimizer.min_lr_ratio": _FRACTION,
    "optimizer.max_grad_norm": _POSITIVE,
    "train.max_steps": _COUNT,
    "train.epochs": _COUNT,
    "train.batch_size": _COUNT,
    "train.gradient_accumulation_steps": _COUNT,
    "train.loss_scale_init": _POSITIVE,
    "train.loss_scale_window": _COUNT,
    "train.loss_scale_min": _POSITIVE,
    "train.max_skipped_steps": _COUNT,
    "train.seed": _SEED,
    "train.save_steps": _COUNT,
    "train.keep_checkpoints": _COUNT,
    "train.log_steps": _COUNT,
    "train.eval_steps": _COUNT,
    "lora.r": _COUNT,
    "lora.lora_alpha": _POSITIVE,
    "lora.lora_dropout": _PART,
    "generation.max_new_tokens": _COUNT,
    "generation.temperature": _FROM_ZERO,
    "generation.top_k": _FROM_ZERO,
    "generation.top_p": Range(0, 1, open_low=True),
    "generation.min_p": _FRACTION,
    "generation.repetition_penalty": _POSITIVE,
    "generation.seed": _SEED,
    "evaluate.max_samples": _COUNT,
    "evaluate.batch_size": _COUNT,
}


def check_range(key: str, value: Any, fail: Fail) -> None:
    """Refuse a number (or a number in a list) outside the interval of its key."""
    interval = RANGES.get(key)
    if interval is None or value is None:
        return
    for number in value if isinstance(value, (tuple, list)) else (value,):
        if not interval.holds(number):
            raise fail(key, f"expected {interval}, found {number:g}")


def check_run(run: RunConfig, fail: Fail) -> None:
    """Refuse keys that contradict each other. The model's own rules stand in ``LlamaConfig``."""
    _check_lengths(run, fail)
    _check_schedule(run, fail)
    _check_training(run, fail)


def split_lengths(data: DataConfig) -> tuple[int | None, int | None]:
    """``(prompt_length, answer_length)`` with the one that is not given as the rest of ``seq_length``."""
    prompt, answer = data.prompt_length, data.answer_length
    if prompt is None and answer is not None:
        prompt = data.seq_length - answer
    elif answer is None and prompt is not None:
        answer = data.seq_length - prompt
    return prompt, answer


def _check_lengths(run: RunConfig, fail: Fail) -> None:
    data, model = run.data, run.model
    prompt, answer = split_lengths(data)
    if prompt is not None and answer is not None:
        if prompt + answer != data.seq_length:
            raise fail(
                "data.prompt_length",
                f"prompt_length {prompt} + answer_length {answer} = {prompt + answer}; "
                f"expected seq_length = {data.seq_length}",
            )
        if min(prompt, answer) < 1:
            key = "data.prompt_length" if data.answer_length is None else "data.answer_length"
            raise fail(key, f"leaves nothing of seq_length = {data.seq_length} for the other part")
    is_length_known = model.pretrained is None or "model.max_position_embeddings" in run.given
    if is_length_known and data.seq_length > model.max_position_embeddings:
        raise fail(
            "data.seq_length",
            f"{data.seq_length} is longer than model.max_position_embeddings = "
            f"{model.max_position_embeddings}; shorten it, or raise the model's length (with rope_scaling)",
        )


def _check_schedule(run: RunConfig, fail: Fail) -> None:
    optimizer, max_steps = run.optimizer, run.train.max_steps
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        raise fail("optimizer.warmup_ratio", "warmup_steps is given too; keep one of them")
    if max_steps is not None and optimizer.warmup_steps > max_steps:
        raise fail(
            "optimizer.warmup_steps",
            f"{optimizer.warmup_steps} is longer than the training (train.max_steps = {max_steps})",
        )


def _check_training(run: RunConfig, fail: Fail) -> None:
    train = run.train
    if train.objective == "sft" and run.data.layout == "lm":
        raise fail("data.layout", "'lm' masks no prompt, and train.objective is 'sft'; expected 'sft'")
    if train.objective == "pretrain" and run.data.layout == "sft":
        raise fail("data.layout", "'sft' masks the prompt, and train.objective is 'pretrain'; expected 'lm'")
    if train.loss_scale_min > train.loss_scale_init:
        raise fail(
            "train.loss_scale_min",
            f"{train.loss_scale_min:g} is above loss_scale_init = {train.loss_scale_init:g}",
        )
    if train.dtype == "bf16" and train.device_target in ("CPU", "GPU"):
        raise fail("train.dtype", f"bf16 needs Ascend and device_target is {train.device_target}; use fp32 or fp16")
    if train.eval_steps is not None and run.data.eval_path is None:
        raise fail("train.eval_steps", "there is nothing to evaluate on: data.eval_path is not given")
