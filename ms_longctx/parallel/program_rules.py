# SPDX-License-Identifier: Apache-2.0
"""What the Ascend program does not do, refused before MindSpore is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ms_longctx.errors import MsLongctxError

if TYPE_CHECKING:
    from ms_longctx.config import LlamaConfig, RunConfig
    from ms_longctx.parallel.strategy import Strategy

_HEAD_MULTIPLE = 16  # of FlashAttentionScore's head size


def check_program(run: RunConfig, config: LlamaConfig, strategy: Strategy) -> None:
    """Refuse a run that :func:`ms_longctx.parallel.program.compile_program` cannot compile.

    Args:
        run: what is asked for.
        config: its architecture.
        strategy: must fit the architecture (``Strategy.check_model``).

    Raises:
        MsLongctxError: the key, what it is and what is expected.
    """
    if config.use_flash_attention and run.train.dtype == "fp32":
        raise MsLongctxError(
            "train.dtype: fp32: attention on Ascend (FlashAttentionScore) takes fp16 or bf16; expected bf16, or "
            "model.use_flash_attention false"
        )
    if config.use_flash_attention and config.head_size % _HEAD_MULTIPLE:
        raise MsLongctxError(
            f"model.head_dim: {config.head_size}: FlashAttentionScore takes multiples of {_HEAD_MULTIPLE}; expected "
            "one, or model.use_flash_attention false"
        )
    if run.lora.enabled:
        _check_adapters(run, config)


def _check_adapters(run: RunConfig, config: LlamaConfig) -> None:
    section = run.lora
    problem = None
    if config.parallel_attention:
        problem = ("model.parallel_attention", "true", "false: adapters of a fused qkv_proj are not split over devices")
    elif section.lora_dropout > 0:
        problem = ("lora.lora_dropout", str(section.lora_dropout), "0: masks are not split over devices")
    elif section.bias != "none" or section.modules_to_save:
        key = "bias" if section.bias != "none" else "modules_to_save"
        problem = (f"lora.{key}", getattr(section, key), "none: only adapters train on Ascend")
    if problem is not None:
        key, found, expected = problem
        raise MsLongctxError(f"{key}: {found}; expected {expected}")
