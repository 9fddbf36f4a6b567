# SPDX-License-Identifier: Apache-2.0
"""What the keys of a strategy file mean together, and what a device can do of it."""

from __future__ import annotations

import logging
from typing import Literal

from ms_longctx.config import ParallelConfig
from ms_longctx.errors import MsLongctxError

logger = logging.getLogger(__name__)

AttentionMode = Literal["ring", "ulysses", "hybrid"]


def check_device(section: ParallelConfig, device: str) -> None:
    """Refuse what only Ascend can do.

    Raises:
        MsLongctxError: tensor or pipeline parallelism or a sharded optimizer on another device.
    """
    if device == "Ascend":
        return
    for key, wanted in (("mp", section.mp > 1), ("pp", section.pp > 1), ("optimizer_shard", section.optimizer_shard)):
        if wanted:
            value = str(getattr(section, key)).lower()
            raise MsLongctxError(
                f"parallel.{key}: {value} cannot run on {device}: MindSpore splits models on Ascend only; use dp and "
                "cp here, or compile this strategy for Ascend with 'ms-longctx dryrun'"
            )


def read_sp(section: ParallelConfig, worker_num: int) -> tuple[int, bool]:
    """``(cp, sequence_parallel)``; see :meth:`~ms_longctx.parallel.strategy.Strategy.from_section`."""
    sp = section.mp if section.sp is True else int(section.sp)
    copies = section.dp * section.mp * section.pp
    if copies * section.cp == worker_num:
        if sp not in (1, section.mp):
            raise MsLongctxError(
                f"sp = {sp} must be 1 or mp = {section.mp}, because it splits the sequence over the mp group; to split "
                "it over more workers use cp"
            )
        if sp > 1:
            logger.info("sp = %d: sequence parallel over the mp group (the workers are dp x mp x pp x cp)", sp)
        return section.cp, sp > 1
    if section.cp == 1 and section.sp is not True and copies * sp == worker_num:
        logger.warning(
            "sp = %d is read as cp, context parallel: the workers are dp x mp x pp x sp = %d", sp, worker_num
        )
        return sp, False
    degrees = f"dp {section.dp} x mp {section.mp} x pp {section.pp}"
    message = f"{degrees} x cp {section.cp} = {copies * section.cp}"
    if section.cp == 1 and sp > 1:
        message += f" (and with sp {sp} read as cp: {copies * sp})"
    raise MsLongctxError(
        f"{message}, but the number of workers is {worker_num}; start as many as the strategy needs (msrun "
        "--worker_num), or change its degrees"
    )


def read_attention(section: ParallelConfig, cp: int) -> tuple[AttentionMode, int]:
    """``(attention_mode, ulysses_degree)``; what is left open follows from the other."""
    mode, degree = section.attention_mode, section.ulysses_degree
    if mode == "none" and cp > 1:
        raise MsLongctxError(f"attention_mode 'none' cannot be with cp = {cp}; expected ring, ulysses or hybrid")
    if degree is not None and cp % degree:
        raise MsLongctxError(f"ulysses_degree = {degree} must divide cp = {cp}")
    if mode in (None, "none"):
        if degree in (None, 1):
            return "ring", 1
        return ("ulysses" if degree == cp else "hybrid"), int(degree or 1)
    if cp == 1:
        logger.info("attention_mode '%s' has no effect with cp 1: no sequence is split", mode)
    if mode == "hybrid":
        if degree is None and cp > 1:
            raise MsLongctxError(f"attention_mode 'hybrid' needs ulysses_degree, a divisor of cp = {cp}")
        return "hybrid", degree or 1
    implied = 1 if mode == "ring" else cp
    if degree not in (None, implied):
        raise MsLongctxError(
            f"ulysses_degree = {degree} contradicts attention_mode '{mode}', whose degree is {implied} with cp = {cp}; "
            "leave it out, or use hybrid"
        )
    return ("ring" if mode == "ring" else "ulysses"), implied


def read_micro_batches(section: ParallelConfig, accumulation: int) -> int:
    """Micro batches of the pipeline; without a stated number the accumulated ones, and no fewer than stages."""
    if section.micro_batch_num is None:
        return 1 if section.pp == 1 else max(accumulation, section.pp)
    if section.pp > 1 and accumulation not in (1, section.micro_batch_num):
        raise MsLongctxError(
            f"micro_batch_num = {section.micro_batch_num} contradicts train.gradient_accumulation_steps = "
            f"{accumulation}: with a pipeline they are the same micro batches; leave one out"
        )
    return section.micro_batch_num
