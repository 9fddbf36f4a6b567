# SPDX-License-Identifier: Apache-2.0
"""Files are as small as their content, hold anything that fits the limits, and read back exactly."""

from __future__ import annotations

import os
from pathlib import Path

import mindspore.dataset as ds
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ms_longctx.data.convert import Converted, Sample
from ms_longctx.data.mindrecord_file import file_sizes, write_mindrecord
from ms_longctx.data.work import Work


def _samples(lengths: list[int], vocabulary: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, vocabulary, n).astype(np.int32), np.array([n // 2, n - n // 2], np.int32)) for n in lengths
    ]


def _read(files: list[Path]) -> list[list[int]]:
    rows = ds.MindDataset([str(file) for file in files], ["input_ids"], shuffle=False)
    return [ids.tolist() for (ids,) in rows.create_tuple_iterator(num_epochs=1, output_numpy=True)]


def _write(path: Path, samples: list[Sample]) -> int:
    integers = [len(tokens) + len(runs) for tokens, runs in samples]
    write_mindrecord(path, samples, file_sizes(max(integers), sum(integers), len(samples)))
    return path.stat().st_size


@pytest.mark.parametrize("lengths, vocabulary, most", [
    ([5], 300, 50_000),
    ([20] * 10, 32000, 51_000),
    ([8192] * 60, 200, 1_100_000),
    ([8192] * 60, 128_000, 60 * 8192 * 5),
    ([1_000_000], 128_000, 9_000_000),
    ([3] * 20_000, 50, 2_500_000),
    ([1, 100_000, 2, 50_000, 3], 1 << 30, 1_300_000),
])  # fmt: skip
def test_size_and_content(tmp_path: Path, lengths: list[int], vocabulary: int, most: int) -> None:
    samples = _samples(lengths, vocabulary)
    assert _write(tmp_path / "a.mindrecord", samples) <= most
    assert _read([tmp_path / "a.mindrecord"]) == [tokens.tolist() for tokens, _ in samples]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.sampled_from([2, 300, 70_000, 1 << 31]))
def test_any_mixture_of_lengths(tmp_path: Path, lengths: list[int], vocabulary: int) -> None:
    samples = _samples(lengths, vocabulary)
    _write(tmp_path / "a.mindrecord", samples)
    assert _read([tmp_path / "a.mindrecord"]) == [tokens.tolist() for tokens, _ in samples]


@pytest.mark.parametrize("lengths", [[200] * 400, [1] * 9000 + [256] * 300, [256] * 300 + [1] * 9000])
def test_all_files_of_a_set_open_together(tmp_path: Path, lengths: list[int]) -> None:
    """MindSpore refuses files whose headers differ, however different their content."""
    samples = _samples(lengths, 1 << 30)
    work = Work({"train": tmp_path / "a.mindrecord"}, 256, 50_000, "test", discard=False)
    for start in range(0, len(samples), 37):
        work.add(Converted(samples={"train": samples[start : start + 37]}))
        if work.full:
            work.commit()
    work.commit(complete=True)
    work.publish()
    files = [tmp_path / shard.name for shard in work.shards["train"]]
    assert len(files) > 2 and sum(shard.samples for shard in work.shards["train"]) == len(lengths)
    assert _read(files) == [tokens.tolist() for tokens, _ in samples]
    work.remove()


def test_one_addition_larger_than_a_file_is_divided(tmp_path: Path) -> None:
    samples = _samples([250] * 1000, 1 << 30)
    work = Work({"train": tmp_path / "a.mindrecord"}, 256, 100_000, "test", discard=False)
    work.add(Converted(samples={"train": samples}))
    work.commit(complete=True)
    assert len(work.shards["train"]) == 11
    assert all(shard.tokens * 4 <= 100_000 for shard in work.shards["train"])
    work.publish()
    assert _read([tmp_path / shard.name for shard in work.shards["train"]]) == [t.tolist() for t, _ in samples]
    work.remove()


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Others of a group can read a set as they can read its manifest."""
    file, before = tmp_path / "a.mindrecord", os.umask(0o027)
    try:
        write_mindrecord(file, [(np.arange(3, dtype=np.int32), np.array([0, 3], np.int32))], file_sizes(5, 5, 1))
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "a.mindrecord": 0o640,
        "a.mindrecord.db": 0o640,
    }
