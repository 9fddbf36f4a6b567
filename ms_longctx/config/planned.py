# SPDX-License-Identifier: Apache-2.0
"""Keys and values of what is not built yet or cannot be: refused with that reason, never accepted and ignored.

A key listed here may be stated with a neutral value, which asks for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ms_longctx.config.source import Entry, show


@dataclass(frozen=True)
class Planned:
    """What is refused: ``values`` when given, else everything that is not ``neutral``; and why."""

    reason: str
    neutral: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()

    def check(self, entry: Entry) -> None:
        """Raise a :class:`ConfigError` when the entry asks for the missing feature."""
        is_refused = entry.value in self.values if self.values else not self._is_neutral(entry.value)
        if is_refused:
            advice = f"; leave it at {show(self.neutral[0])}" if self.neutral else ""
            raise entry.error(f"{show(entry.value)} is refused: {self.reason}{advice}")

    def _is_neutral(self, value: Any) -> bool:
        return any(value == known and type(value) is type(known) for known in self.neutral)


_GALORE = "the GaLore optimizers are not built yet"

_RECURSIVE = "MindSpore 2.10's recursive planner fails on attention and rotation that a worker computes on its share"

PLANNED: dict[str, Planned] = {
    "parallel.mode": Planned(_RECURSIVE, values=("recursive_programming",)),
    "optimizer.type": Planned(_GALORE, values=("galore", "qgalore", "galore_adamw", "qgalore_adamw")),
    "optimizer.rank": Planned(_GALORE, neutral=(None,)),
    "optimizer.quantization_bit": Planned(_GALORE, neutral=(None,)),
    "train.objective": Planned("preference training is not built yet", values=("dpo", "grpo")),
}
