# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a pure function of the optimizer step, so that there is no scheduler state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ms_longctx.config.sections import OptimizerConfig
from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0, then ``constant``, or ``cosine`` / ``linear`` decay to ``min_lr_ratio``.

    The values are those of transformers' ``get_scheduler`` (``cosine_with_min_lr``, ``linear``,
    ``constant_with_warmup``); past ``total_steps`` the rate stays at its last value.

    Args:
        learning_rate: peak rate, reached at step ``warmup_steps``.
        kind: shape after the warm-up.
        total_steps: optimizer steps of the whole run.
        warmup_steps: steps of the warm-up; step 0 has rate 0 when there is one.
        min_lr_ratio: last rate of ``cosine`` and ``linear`` as a part of the peak.

    Raises:
        MsLongctxError: a value is impossible.
    """

    learning_rate: float
    kind: Literal["cosine", "linear", "constant"]
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "linear", "constant"):
            raise MsLongctxError(f"scheduler = {self.kind!r} is unknown; expected cosine, linear or constant")
        if self.total_steps < 1:
            raise MsLongctxError(f"a schedule needs at least one step, not {self.total_steps}")
        if self.warmup_steps < 0 or self.learning_rate < 0:
            raise MsLongctxError("learning_rate and warmup_steps must not be negative")
        if not 0 <= self.min_lr_ratio <= 1:
            raise MsLongctxError(f"min_lr_ratio = {self.min_lr_ratio} must be between 0 and 1")

    @classmethod
    def from_config(cls, config: OptimizerConfig, total_steps: int) -> Schedule:
        """The schedule that section ``optimizer`` describes; ``warmup_steps`` wins over ``warmup_ratio``."""
        warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
        return cls(config.learning_rate, config.scheduler, total_steps, warmup, config.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """Rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.kind == "constant":
            return self.learning_rate
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        falling = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * falling)
