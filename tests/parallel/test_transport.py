# SPDX-License-Identifier: Apache-2.0
"""The shared-memory transport with real processes: results equal NumPy's bit for bit; what goes wrong ends in words."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ms_longctx import kernels
from tests.parallel.processes import HERE, Job, check, environment, segments

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no kernel library")
WORKER = "transport_worker.py"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("scenario", ["sums", "moves", "counted_bytes"])
def test_results_equal_numpy(scenario: str, size: int) -> None:
    """Exact: the order of every sum is that of the ranks, in float32 (wider integers as they are)."""
    check(Job(WORKER, size, [scenario]))


def test_subgroups_in_turn() -> None:
    check(Job(WORKER, 4, ["subgroups"]))


def test_more_ranks_than_cores() -> None:
    check(Job(WORKER, 8, ["random_delays"]))


def run(scenario: str, size: int = 2) -> tuple[list[int], str, float]:
    """Exit codes, all output and the seconds from the first end of a process to the last."""
    with Job(WORKER, size, [scenario]) as job:
        codes = job.wait(25.0)
        ends = [rank.ended or time.monotonic() for rank in job.ranks]
        return codes, job.output(), max(ends) - job.started


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("wrong_order", ["all_reduce number 0", "all_reduce number 1", "same order"]),
        ("wrong_shape", ["[3, 4]", "[4, 3]"]),
        ("wrong_type", ["float32 [4]", "int32 [4]"]),
        ("wrong_kind", ["all_gather number 0", "broadcast number 0"]),
    ],
)
def test_a_mismatch_names_both_sides(scenario: str, words: list[str]) -> None:
    codes, output, seconds = run(scenario)
    assert codes == [2, 2], output
    assert seconds < 5
    for word in ["rank 0 (process ", "rank 1 (process ", "over ranks 0, 1", *words]:
        assert word in output, output


@pytest.mark.parametrize(
    ("scenario", "codes", "words"),
    [
        ("one_ends", [2, 0, 2], "has ended while rank"),
        ("one_is_killed", [2, -9, 2], "was killed or crashed while rank"),
    ],
)
def test_a_rank_that_is_gone(scenario: str, codes: list[int], words: str) -> None:
    got, output, seconds = run(scenario, 3)
    assert got == codes, output
    assert seconds < 5
    assert "rank 1 (process" in output and words in output


def test_ranks_that_wait_for_each_other() -> None:
    """Three ranks in three groups: no message is wrong, none ever comes."""
    codes, output, seconds = run("cycle", 3)
    assert codes == [2, 2, 2], output
    assert seconds < 8
    assert output.count("wait for each other: rank 0") == 3 and "over ranks 0, 2" in output


def test_a_rank_that_fails_says_why_to_all() -> None:
    with Job(WORKER, 3, ["one_fails"]) as job:
        job.ranks[0].process.wait(10)
        job.ranks[2].process.wait(10)
        for rank in (0, 2):
            assert "rank 1 found no data" in job.ranks[rank].text()


def test_timeout_while_the_other_lives() -> None:
    with Job(WORKER, 2, ["one_is_slow"]) as job:
        assert job.ranks[0].process.wait(8) == 2
        assert "waited 1 s for rank 1" in job.ranks[0].text()


def test_two_jobs_at_once() -> None:
    with Job(WORKER, 2, ["random_delays"]) as first, Job(WORKER, 3, ["sums"]) as second:
        assert first.wait() == [0, 0], first.output()
        assert second.wait() == [0, 0, 0], second.output()


def test_a_rank_that_is_taken() -> None:
    """As when two jobs share a name: the second rank 1 is refused, the first job goes on."""
    with Job(WORKER, 3, ["sums"], first=[0, 1, 1]) as job:
        job.wait_until(lambda: "rank 1 is taken by process" in job.output())
        job.start(2)
        assert sorted(job.wait()) == [0, 0, 0, 2], job.output()


def test_nothing_is_left_behind() -> None:
    """No name in /dev/shm while a job runs, nor after kill -9 of all its ranks."""
    with Job(WORKER, 2, ["idle"]) as job:
        job.wait_until(lambda: all("joined" in rank.text() for rank in job.ranks))
        assert not segments(job.name)
        for rank in range(2):
            job.kill(rank)
        assert job.wait() == [-9, -9]
        assert not segments(job.name)


def test_rank_0_is_killed_while_others_start() -> None:
    with Job(WORKER, 3, ["idle"], first=[0, 1]) as job:
        job.wait_until(lambda: segments(job.name) != [])
        time.sleep(0.5)
        job.kill(0)
        assert job.ranks[1].process.wait(5) == 2
        assert "ended before all ranks had started" in job.ranks[1].text()
        assert not segments(job.name)


def test_leftovers_of_a_start_that_was_killed() -> None:
    """Rank 0 alone, killed while it waits, leaves a name; the next job takes it away, and may have the same name."""
    for next_name in ("test-next", "test-killed"):
        with Job(WORKER, 2, ["idle"], name="test-killed", first=[0]) as job:
            job.wait_until(lambda: segments("test-killed") != [])
            job.kill(0)
            job.wait()
        assert segments("test-killed")
        check(Job(WORKER, 2, ["counted_bytes"], name=next_name))
        assert not segments("test-killed")


def test_too_little_shared_memory() -> None:
    """Refused when the job starts; written to later, the memory would end the process by a signal."""
    worker = f"{sys.executable} {HERE / WORKER} 0 2 test-small sums"
    command = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=256k tmpfs /dev/shm && {worker}"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=30, check=False)
    if "permitted" in result.stderr or "permission" in result.stderr:
        pytest.skip("only root can mount a small /dev/shm")
    assert result.returncode == 2
    assert "2 ranks need 3 MB in /dev/shm/: No space left on device" in result.stdout, result
