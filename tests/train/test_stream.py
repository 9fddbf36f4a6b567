# SPDX-License-Identifier: Apache-2.0
"""Micro batches continue exactly where a run stopped, over epochs and incomplete last batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ms_longctx.config import DataConfig
from ms_longctx.train.state import Progress
from ms_longctx.train.stream import MicroBatches


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_any_position_continues(make_set: Callable[..., Path], tmp_path: Path, shuffle: bool, drop_last: bool) -> None:
    """Reference: the stream that was not interrupted, over three epochs of 7 samples in batches of 2."""
    data = DataConfig(
        path=str(make_set(tmp_path / "a.mindrecord", samples=7)),
        seq_length=31,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    progress = Progress()
    whole, positions = [], []
    for batch in islice(MicroBatches(data, 2, 7, progress), 10):
        whole.append(batch["input_ids"])
        positions.append(replace(progress))
    per_epoch = 3 if drop_last else 4
    assert [position.epoch for position in positions] == [i // per_epoch for i in range(1, 11)]
    for done, position in enumerate(positions, start=1):
        rest = list(islice(MicroBatches(data, 2, 7, replace(position)), 10 - done))
        assert len(rest) == 10 - done
        for batch, expected in zip(rest, whole[done:], strict=True):
            assert np.array_equal(batch["input_ids"], expected)
    seen = np.concatenate(whole[:per_epoch])
    later = np.concatenate(whole[per_epoch : 2 * per_epoch])
    assert np.array_equal(seen, later) != shuffle
