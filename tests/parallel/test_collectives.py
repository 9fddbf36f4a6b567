# SPDX-License-Identifier: Apache-2.0
"""MindSpore's collectives with real processes: results and gradients equal NumPy's bit for bit, in both modes."""

from __future__ import annotations

import pytest

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError
from tests.parallel.processes import Job, check

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no kernel library")
WORKER = "collectives_worker.py"
modes = pytest.mark.parametrize("mode", ["graph", "pynative"])
# Errors take the same way in both modes.
failing_modes = pytest.mark.parametrize("mode", ["graph", pytest.param("pynative", marks=pytest.mark.long)])


@needs_kernels
@modes
@pytest.mark.parametrize(
    ("size", "scenarios"),
    [
        (2, ["gradients", "several_tensors"]),
        (3, ["gradients", "types", "program_order", "own_gradient"]),
        (4, ["gradients", "subgroups"]),
    ],
)
@pytest.mark.slow
def test_results_and_gradients(mode: str, size: int, scenarios: list[str]) -> None:
    check(Job(WORKER, size, [mode, *scenarios]), timeout=240)


@needs_kernels
@failing_modes
@pytest.mark.parametrize(
    ("scenario", "codes", "words"),
    [
        ("one_is_killed", [2, -9, 2], "CommunicationError: rank 1 (process "),
        ("one_raises", [2, 2, 2], "failed: MsLongctxError: no more data"),
    ],
)
def test_a_rank_that_is_gone(mode: str, scenario: str, codes: list[int], words: str) -> None:
    """The others end with the reason, a few seconds after it (most of which MindSpore takes to end)."""
    with Job(WORKER, 3, [mode, scenario]) as job:
        assert job.wait(40) == codes, job.output()
        ends = [rank.ended for rank in job.ranks]
        assert max(ends) - ends[1] < 10
        for rank in (0, 2):
            assert words in job.ranks[rank].text()


@needs_kernels
@failing_modes
def test_a_mismatch_names_both_sides(mode: str) -> None:
    with Job(WORKER, 2, [mode, "wrong_order"]) as job:
        assert job.wait(40) == [2, 2], job.output()
        for rank in job.ranks:
            assert "CommunicationError: rank" in rank.text()
            assert "all_reduce number 1 of float32 [3, 5]" in rank.text()
            assert "all_gather number 3 (axis 0) of float32 [3, 5]" in rank.text()


def test_one_rank_needs_nothing() -> None:
    """Groups of one give back the very tensor, without kernels and without a job."""
    from mindspore import Tensor

    from ms_longctx.parallel import collectives

    group, x = collectives.Group((5,), 5), Tensor([1.0, 2.0])
    for make in (collectives.make_all_reduce, collectives.make_all_gather, collectives.make_reduce_scatter):
        assert make(group)(x) is x
    assert collectives.make_all_to_all(group, 0, 1)(x) is x
    assert collectives.make_broadcast(group)(x) is x
    assert collectives.make_ring_shift(group)(x) is x
    assert collectives.make_ring_shift(group, 1, count=2)(x, x) == (x, x)


@pytest.mark.parametrize(
    ("ranks", "rank", "message"),
    [((0, 1), 2, "rank 2 is not in group"), ((0, 0), 0, "different ranks"), ((-1, 0), 0, "from 0 on")],
)
def test_groups_that_are_none(ranks: tuple[int, ...], rank: int, message: str) -> None:
    from ms_longctx.parallel.collectives import Group

    with pytest.raises(MsLongctxError, match=message):
        Group(ranks, rank)


def test_arguments_that_are_refused() -> None:
    from ms_longctx.parallel import collectives

    group = collectives.Group((0, 1), 0)
    with pytest.raises(MsLongctxError, match="root 2 is no index of a group of 2"):
        collectives.make_broadcast(group, 2)
    with pytest.raises(MsLongctxError, match="neither 'all_reduce' nor 'identity'"):
        collectives.make_all_reduce(group, "mean")
    with pytest.raises(MsLongctxError, match="ring_shift of 5 tensors; expected 1 to 4"):
        collectives.make_ring_shift(group, 1, 5)
