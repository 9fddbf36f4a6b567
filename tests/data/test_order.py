# SPDX-License-Identifier: Apache-2.0
"""Every sample once an epoch, on exactly one rank, and from any point on again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_longctx.data.order import epoch_order, rank_order
from ms_longctx.errors import MsLongctxError


def test_order_depends_on_seed_and_epoch_only() -> None:
    orders = {(seed, epoch): epoch_order(97, True, seed, epoch).tolist() for seed in (1, 2) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order) == list(range(97)) for order in orders.values())
    assert epoch_order(97, True, 1, 1).tolist() == orders[1, 1]
    assert epoch_order(5, False, 1, 3).tolist() == [0, 1, 2, 3, 4]


def test_order_is_pinned() -> None:
    """A run resumed on another machine or version must see the same order."""
    assert epoch_order(10, True, 42, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


@given(
    samples=st.integers(0, 60), batch=st.integers(1, 5), ranks=st.integers(1, 5), start=st.integers(0, 60),
    drop_last=st.booleans(),
)  # fmt: skip
def test_ranks_share_what_is_left(samples: int, batch: int, ranks: int, start: int, drop_last: bool) -> None:
    start = min(start, samples)
    order = epoch_order(samples, True, 3, 1)
    shares = [rank_order(order, batch, rank, ranks, start, drop_last) for rank in range(ranks)]
    steps = {(len(share.indices) + share.filler) / batch for share in shares}
    assert len(steps) == 1 and steps.pop().is_integer()
    used = sorted(index for share in shares for index in share.indices.tolist())
    left = order[start:].tolist()
    if drop_last:
        left = left[: len(left) // (batch * ranks) * batch * ranks]
        assert all(share.filler == 0 for share in shares)
    assert used == sorted(left)


@given(batch=st.integers(1, 4), ranks=st.integers(1, 4), steps=st.integers(0, 4), new_ranks=st.integers(1, 4))
def test_resume_with_another_number_of_ranks(batch: int, ranks: int, steps: int, new_ranks: int) -> None:
    order = epoch_order(64, True, 0, 0)
    before = [rank_order(order, batch, rank, ranks, 0, True).indices[: steps * batch] for rank in range(ranks)]
    done = np.concatenate(before)
    after = [rank_order(order, 1, rank, new_ranks, len(done), False).indices for rank in range(new_ranks)]
    assert sorted(np.concatenate([done, *after]).tolist()) == list(range(64))


@pytest.mark.parametrize("change", [{"dp_rank": 2}, {"dp_rank": -1}, {"batch_size": 0}, {"start_sample": 11}])
def test_impossible_numbers(change: dict[str, int]) -> None:
    arguments = {"batch_size": 2, "dp_rank": 0, "dp_size": 2, "start_sample": 0, "drop_last": True} | change
    with pytest.raises(MsLongctxError, match="|".join(change)):
        rank_order(np.arange(10), **arguments)
