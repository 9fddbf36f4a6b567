# SPDX-License-Identifier: Apache-2.0
"""How sequences are split over context parallel ranks and joined again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.sequence import PADDING, join_sequence, padded_length, split_sequence, token_order
from ms_longctx.parallel.strategy import Strategy


def make_strategy(ring: int, ulysses: int, dp: int = 1, mp: int = 1) -> Strategy:
    return Strategy(dp=dp, mp=mp, cp=ring * ulysses, ring_degree=ring, ulysses_degree=ulysses, attention_mode="hybrid")


DEGREES = st.tuples(st.integers(1, 5), st.integers(1, 4))


def test_zigzag_by_hand() -> None:
    assert token_order(12, make_strategy(3, 1)).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_ulysses_is_contiguous_by_hand() -> None:
    assert token_order(6, make_strategy(1, 3)).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_hybrid_by_hand() -> None:
    """The first place of the ring has chunks 0 and 3, which its three Ulysses ranks share out."""
    expected = [[0, 1], [2, 9], [10, 11], [3, 4], [5, 6], [7, 8]]
    assert token_order(12, make_strategy(2, 3)).tolist() == expected


@given(DEGREES, st.integers(1, 60), st.integers(1, 3))
def test_join_is_the_inverse_of_split(degrees: tuple[int, int], length: int, rows: int) -> None:
    strategy = make_strategy(*degrees, dp=2, mp=2)
    ids = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
    batch = {"input_ids": ids, "labels": ids + 1, "position_ids": ids % 7, "document_ids": ids // 5}
    ranks = [strategy.rank(dp=1, ring=r, ulysses=u, mp=1) for r in range(degrees[0]) for u in range(degrees[1])]
    pieces = [split_sequence(batch, strategy, rank) for rank in ranks]
    for name, whole in batch.items():
        joined = join_sequence([piece[name] for piece in pieces], strategy, length)
        assert joined.dtype == whole.dtype and np.array_equal(joined, whole)
        padded = join_sequence([piece[name] for piece in pieces], strategy)
        assert padded.shape[1] == padded_length(length, strategy) and (padded[:, length:] == PADDING[name]).all()


@given(DEGREES, st.integers(1, 60))
def test_every_label_goes_to_one_rank_and_stays_with_its_token(degrees: tuple[int, int], length: int) -> None:
    """Labels are shifted before: the token after the border is the target of the one before it."""
    strategy = make_strategy(*degrees)
    ids = np.arange(length, dtype=np.int32)[None] + 100
    labels = np.concatenate([ids[:, 1:], [[-100]]], axis=1).astype(np.int32)
    pieces = [split_sequence({"input_ids": ids, "labels": labels}, strategy, rank) for rank in range(strategy.cp)]
    with_target = [(i, t) for x in pieces for i, t in zip(x["input_ids"][0], x["labels"][0], strict=True) if t >= 0]
    assert sorted(with_target) == [(100 + i, 101 + i) for i in range(length - 1)]
    for piece in pieces:
        real = piece["input_ids"] > 0
        assert np.array_equal(piece["position_ids"][real] + 100, piece["input_ids"][real])


def test_join_other_axes() -> None:
    """Hidden states, and log-sum-exps, whose tokens are on the last axis."""
    strategy = make_strategy(2, 2)
    order = token_order(16, strategy)
    whole = np.random.default_rng(0).standard_normal((2, 3, 16))
    pieces = [whole[:, :, order[rank]] for rank in range(4)]
    assert np.array_equal(join_sequence(pieces, strategy, 13, axis=-1), whole[:, :, :13])


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_zigzag_shares_out_a_causal_mask_evenly(degree: int) -> None:
    """Exact balance: the same number of visible (query, key) pairs at every place."""
    work = (token_order(28 * degree, make_strategy(degree, 1)) + 1).sum(axis=1)
    assert len(set(work.tolist())) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: split_sequence({"tokens": np.zeros((1, 8))}, s, 0), "unknown tokens; expected input_ids"),
        (lambda s: split_sequence({"labels": np.zeros((1, 8)), "input_ids": np.zeros((1, 7))}, s, 0), r"\(1, 7\)"),
        (lambda s: split_sequence({"input_ids": np.zeros((1, 0))}, s, 0), "0 tokens"),
        (lambda s: token_order(6, s), "multiple of 4"),
        (lambda s: join_sequence([np.zeros((1, 4))], s), "cp = 2 pieces"),
        (lambda s: join_sequence([np.zeros((1, 4)), np.zeros((1, 2))], s), "of one shape"),
        (lambda s: split_sequence({"input_ids": np.zeros((1, 8))}, s, 2), "rank 2"),
    ],
)
def test_mistakes_are_named(call, words: str) -> None:  # noqa: ANN001
    with pytest.raises(MsLongctxError, match=words):
        call(make_strategy(2, 1))
