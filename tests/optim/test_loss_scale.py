# SPDX-License-Identifier: Apache-2.0
"""Reference: torch.amp.GradScaler, exactly, on random runs of good steps and overflows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ms_longctx.errors import MsLongctxError
from ms_longctx.optim.loss_scale import DynamicLossScale


@pytest.mark.parametrize("window", [1, 3, 10])
def test_equals_torch(window: int) -> None:
    finite_steps = np.random.RandomState(window).rand(200) < 0.85
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=window)
    ours = DynamicLossScale(1024.0, window, minimum=1e-30, max_skipped_steps=1000)
    for finite in finite_steps:
        optimizer.zero_grad()
        scaler.scale((param * (1.0 if finite else float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ours.update(bool(finite))
        assert ours.scale == scaler.get_scale()


def test_floor() -> None:
    scale = DynamicLossScale(8.0, window=10, minimum=3.0)
    seen = []
    for _ in range(4):
        scale.update(False)
        seen.append(scale.scale)
    assert seen == [4.0, 3.0, 3.0, 3.0]


def test_gives_up_after_skips_in_a_row_only() -> None:
    scale = DynamicLossScale(2.0**20, window=100, max_skipped_steps=3)
    for finite in (False, False, True, False, False):
        scale.update(finite)
    with pytest.raises(MsLongctxError, match="3 optimizer steps in a row had inf or NaN gradients"):
        scale.update(False)


def test_continues_from_its_state() -> None:
    pattern = [True, True, False, True, True, True, False, True, True, True]
    whole, first = DynamicLossScale(64.0, window=3), DynamicLossScale(64.0, window=3)
    for finite in pattern:
        whole.update(finite)
    for finite in pattern[:5]:
        first.update(finite)
    second = DynamicLossScale(1024.0, window=3)
    second.load_state_dict(first.state_dict())
    for finite in pattern[5:]:
        second.update(finite)
    assert second.state_dict() == whole.state_dict()


def test_impossible_values() -> None:
    with pytest.raises(MsLongctxError, match="loss_scale_min = 4.0"):
        DynamicLossScale(2.0, minimum=4.0)
    with pytest.raises(MsLongctxError, match="at least 1"):
        DynamicLossScale(window=0)
