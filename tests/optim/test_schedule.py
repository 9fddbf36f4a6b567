# SPDX-License-Identifier: Apache-2.0
"""Reference: the lr_scheduler objects of transformers; equal to 1e-12 relative at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from ms_longctx.config.sections import OptimizerConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.optim.schedule import Schedule

TOTAL = 37
GOOD: dict[str, Any] = {"learning_rate": 1.0, "kind": "cosine", "total_steps": 10}


def reference(name: str, warmup: int, **specific: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    total = None if name == "warmup_stable_decay" else TOTAL
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=specific)
    values = []
    for _ in range(TOTAL + 1):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_without_a_floor(kind: str, warmup: int) -> None:
    name = "constant_with_warmup" if kind == "constant" else kind
    ours = Schedule(3e-4, kind, TOTAL, warmup)  # type: ignore[arg-type]
    expected = reference(name, warmup)
    assert [ours(step) for step in range(TOTAL + 1)] == pytest.approx(expected, rel=1e-12, abs=1e-19)


@pytest.mark.parametrize("warmup", [0, 5])
def test_cosine_with_a_floor(warmup: int) -> None:
    ours = Schedule(3e-4, "cosine", TOTAL, warmup, min_lr_ratio=0.1)
    expected = reference("cosine_with_min_lr", warmup, min_lr_rate=0.1)
    assert [ours(step) for step in range(TOTAL + 1)] == pytest.approx(expected, rel=1e-12)


def test_linear_with_a_floor() -> None:
    ours = Schedule(3e-4, "linear", TOTAL, 0, min_lr_ratio=0.25)
    name, decay = (
        "warmup_stable_decay",
        {"num_decay_steps": TOTAL, "num_stable_steps": 0, "decay_type": "linear"},
    )
    expected = reference(name, 0, min_lr_ratio=0.25, **decay)
    assert [ours(step) for step in range(TOTAL + 1)] == pytest.approx(expected, rel=1e-12)


def test_stays_at_the_floor_after_the_last_step() -> None:
    assert Schedule(1.0, "cosine", 10, 2, 0.1)(1000) == pytest.approx(0.1)
    assert Schedule(1.0, "linear", 10, 2)(1000) == 0.0


def test_from_config() -> None:
    by_ratio = OptimizerConfig(learning_rate=2e-5, scheduler="linear", warmup_ratio=0.03, min_lr_ratio=0.2)
    assert Schedule.from_config(by_ratio, 101) == Schedule(2e-5, "linear", 101, 4, 0.2)  # 3.03 up
    by_steps = OptimizerConfig(learning_rate=2e-5, scheduler="constant", warmup_steps=9, warmup_ratio=0.03)
    assert Schedule.from_config(by_steps, 101).warmup_steps == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "cosin"}, "scheduler = 'cosin'"),
        ({"total_steps": 0}, "at least one step"),
        ({"warmup_steps": -1}, "must not be negative"),
        ({"min_lr_ratio": 1.5}, "between 0 and 1"),
    ],
)
def test_impossible_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MsLongctxError, match=message):
        Schedule(**GOOD | values)
