# SPDX-License-Identifier: Apache-2.0
"""Other names for keys that users of the field write, and what each of them means here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ms_longctx.config.source import Entry, describe

Converter = Callable[[Entry], Entry]


def canonical(name: str, entry: Entry) -> tuple[str, Entry]:
    """The dotted name of the key that ``name`` stands for, and the entry with its value converted."""
    target = _NAMES.get(name, name)
    convert = _BY_NAME.get(name) or _BY_TARGET.get(target)
    return target, convert(entry) if convert else entry


def _ring(entry: Entry) -> Entry:
    if entry.value is not None and not isinstance(entry.value, bool):
        raise entry.error(f"expected true or false, found {describe(entry.value)}")
    return replace(entry, value="ring" if entry.value else "none")


def _sequence_parallel(entry: Entry) -> Entry:
    return replace(entry, value=1) if entry.value is None or entry.value is False else entry


def _attention_mode(entry: Entry) -> Entry:
    return replace(entry, value="none") if entry.value is False else entry


def _resume(entry: Entry) -> Entry:
    if isinstance(entry.value, bool):
        return replace(entry, value="latest" if entry.value else None, typed=None)
    return entry


def _dtype(entry: Entry) -> Entry:
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return replace(entry, value=short.get(entry.value, entry.value)) if isinstance(entry.value, str) else entry


def _lower(entry: Entry) -> Entry:
    return replace(entry, value=entry.value.lower()) if isinstance(entry.value, str) else entry


def _device(entry: Entry) -> Entry:
    proper = {"auto": "auto", "ascend": "Ascend", "npu": "Ascend", "gpu": "GPU", "cuda": "GPU", "cpu": "CPU"}
    if isinstance(entry.value, str):
        return replace(entry, value=proper.get(entry.value.lower(), entry.value))
    return entry


_NAMES = {
    "recompute": "train.recompute",
    "model.recompute": "train.recompute",
    "train.gradient_checkpointing": "train.recompute",
    "use_flash_attention": "model.use_flash_attention",
    "parallel_attention": "model.parallel_attention",
    "use_ring_attention": "parallel.attention_mode",
    "model.use_ring_attention": "parallel.attention_mode",
    "parallel.use_ring_attention": "parallel.attention_mode",
    "attention_mode": "parallel.attention_mode",
    "sequence_parallel": "parallel.sp",
    "model.sequence_parallel": "parallel.sp",
    "parallel.sequence_parallel": "parallel.sp",
    "sequence_parallel_size": "parallel.cp",
    "parallel.sequence_parallel_size": "parallel.cp",
    "parallel.context_parallel": "parallel.cp",
    "parallel.data_parallel": "parallel.dp",
    "parallel.model_parallel": "parallel.mp",
    "parallel.tensor_parallel": "parallel.mp",
    "parallel.tp": "parallel.mp",
    "parallel.pipeline_stage": "parallel.pp",
    "model.context_length": "model.max_position_embeddings",
    "data.max_length": "data.seq_length",
    "data.seq_len": "data.seq_length",
    "data.data_path": "data.path",
    "optimizer.lr": "optimizer.learning_rate",
    "optimizer.lr_scheduler_type": "optimizer.scheduler",
    "train.per_device_train_batch_size": "train.batch_size",
    "train.num_train_epochs": "train.epochs",
    "train.save_total_limit": "train.keep_checkpoints",
    "train.torch_dtype": "train.dtype",
    "train.logging_steps": "train.log_steps",
    "train.resume_from_checkpoint": "train.resume",
    "data_path": "data.path",
    "device_target": "train.device_target",
    "output_dir": "train.output_dir",
    "resume": "train.resume",
    "seed": "train.seed",
    "lora.rank": "lora.r",
    "lora.lora_rank": "lora.r",
    "lora.alpha": "lora.lora_alpha",
    "lora.dropout": "lora.lora_dropout",
}
_BY_NAME: dict[str, Converter] = {
    **{name: _ring for name in _NAMES if name.endswith("use_ring_attention")},
    **{name: _sequence_parallel for name in _NAMES if name.endswith("sequence_parallel")},
}
_BY_TARGET: dict[str, Converter] = {
    "parallel.attention_mode": _attention_mode,
    "train.resume": _resume,
    "train.dtype": _dtype,
    "train.device_target": _device,
    "optimizer.type": _lower,
}
