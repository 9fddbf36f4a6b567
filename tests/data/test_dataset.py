# SPDX-License-Identifier: Apache-2.0
"""create_dataset through MindSpore's engine: what is read is what was stored, in the promised order."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_longctx.data.batching import Collator
from ms_longctx.data.convert import Converted
from ms_longctx.data.dataset import batches_per_epoch, create_dataset
from ms_longctx.data.manifest import Manifest, manifest_path, write_manifest
from ms_longctx.data.mindrecord_file import file_sizes, write_mindrecord
from ms_longctx.data.order import epoch_order
from ms_longctx.data.work import Work
from ms_longctx.errors import MsLongctxError

SEQ_LEN = 31
COUNT = 23
Stored = tuple[Path, list[tuple[np.ndarray, np.ndarray]]]


def make_set(path: Path, count: int = COUNT, longest: int = SEQ_LEN, shards: int = 2) -> Stored:
    """A set of random samples in several files; sample i starts with token i."""
    rng = np.random.default_rng(7)
    samples = []
    for index in range(count):
        length = int(rng.integers(3, longest + 1))
        tokens = rng.integers(0, 32000, length).astype(np.int32)
        tokens[0] = index
        samples.append((tokens, np.array([length // 2, length - length // 2], np.int32)))
    work = Work({"train": path}, longest, 1 << 20, "test", discard=True)
    for part in np.array_split(np.arange(count), shards):
        work.add(Converted(samples={"train": [samples[index] for index in part]}))
        work.commit()
    work.publish()
    write_manifest(path, Manifest(longest, "sft", "text", "fingerprint", 32000, 2, "x", tuple(work.shards["train"])))
    work.remove()
    return path, samples


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return make_set(tmp_path_factory.mktemp("set") / "a.mindrecord")


def read(path: Path, batch_size: int = 4, seq_len: int = SEQ_LEN, **options: Any) -> list[dict[str, np.ndarray]]:
    dataset = create_dataset(path, batch_size, seq_len, **options)
    batches = list(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
    assert len(batches) == dataset.get_dataset_size()
    return batches


def first_tokens(batches: list[dict[str, np.ndarray]]) -> list[int]:
    """Sample numbers in reading order, without filler rows."""
    return [
        int(row[0]) for batch in batches
        for row, document in zip(batch["input_ids"], batch["document_ids"], strict=True) if document[0] == 0
    ]  # fmt: skip


def test_columns_hold_the_stored_samples(stored: Stored) -> None:
    path, samples = stored
    batches = read(path, shuffle=False, drop_last=False)
    assert len(batches) == 6
    for number, batch in enumerate(batches):
        part = samples[number * 4 : number * 4 + 4]
        expected = Collator(SEQ_LEN, 2)([tokens for tokens, _ in part], [runs for _, runs in part])
        for name, values in zip(("input_ids", "labels", "position_ids", "document_ids"), expected, strict=True):
            assert batch[name].dtype == np.int32 and batch[name].shape == (4, SEQ_LEN)
            np.testing.assert_array_equal(batch[name][: len(part)], values)
    last = batches[-1]
    assert (last["document_ids"][3:] == -1).all() and (last["labels"][3:] == -100).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_order_is_that_of_seed_and_epoch(stored: Stored, workers: int) -> None:
    """Threads do not change the order."""
    path, _ = stored
    for epoch in (0, 1):
        expected = epoch_order(COUNT, True, 5, epoch).tolist()
        for batch_size in (1, 4):
            batches = read(path, batch_size, seed=5, epoch=epoch, drop_last=False, num_parallel_workers=workers)
            assert first_tokens(batches) == expected


def test_resume_at_the_exact_sample(stored: Stored) -> None:
    path, _ = stored
    whole = read(path, 2, seed=1)
    for start in (0, 2, 8, 20):
        rest = read(path, 2, seed=1, start_sample=start)
        assert len(rest) == len(whole) - start // 2
        for mine, expected in zip(rest, whole[start // 2 :], strict=True):
            for name in expected:
                np.testing.assert_array_equal(mine[name], expected[name])


@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_read_everything_once(stored: Stored, drop_last: bool) -> None:
    path, _ = stored
    shares = [read(path, 3, dp_rank=rank, dp_size=4, drop_last=drop_last) for rank in range(4)]
    assert {len(share) for share in shares} == {batches_per_epoch(path, 3, 4, drop_last)}
    used = [number for share in shares for number in first_tokens(share)]
    assert len(used) == len(set(used)) == (12 if drop_last else COUNT)


def test_a_rank_without_samples_gets_rows_of_padding(tmp_path: Path) -> None:
    path, _ = make_set(tmp_path / "one.mindrecord", count=1, shards=1)
    batches = [read(path, 2, dp_rank=rank, dp_size=3, drop_last=False) for rank in range(3)]
    assert [first_tokens(batch) for batch in batches] == [[0], [], []]
    assert all((batch[0]["document_ids"] == -1).all() for batch in batches[1:])


def test_rows_may_be_longer_than_the_samples(stored: Stored) -> None:
    path, samples = stored
    batch = read(path, 4, 64, shuffle=False)[0]
    assert batch["input_ids"].shape == (4, 64)
    assert (batch["document_ids"][0] == 0).sum() == len(samples[0][0])


def test_more_workers_than_cores_are_limited(stored: Stored) -> None:
    assert len(read(stored[0], num_parallel_workers=64)) == 5
    with pytest.raises(MsLongctxError, match="num_parallel_workers"):
        create_dataset(stored[0], 4, SEQ_LEN, num_parallel_workers=0)


def test_nothing_left_says_so(stored: Stored) -> None:
    with pytest.raises(MsLongctxError, match="no batch is left"):
        create_dataset(stored[0], 4, SEQ_LEN, start_sample=COUNT - 1)


def test_ranks_in_processes_of_their_own(stored: Stored, tmp_path: Path) -> None:
    """Two real processes read disjoint halves, as two ranks do."""
    code = (
        "import sys, json; from ms_longctx.data.dataset import create_dataset\n"
        f"d = create_dataset({str(stored[0])!r}, 2, {SEQ_LEN}, dp_rank=int(sys.argv[1]), dp_size=2, seed=9)\n"
        "print(json.dumps([b['input_ids'][:, 0].tolist() for b in "
        "d.create_dict_iterator(num_epochs=1, output_numpy=True)]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    halves = [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    order = epoch_order(COUNT, True, 9, 0).tolist()
    together = [number for steps in zip(*halves, strict=True) for pair in zip(*steps, strict=True) for number in pair]
    assert together == order[:20]


# --- names and places ---


@pytest.mark.parametrize("name", [
    "a-b.mindrecord", "rank_0-1.v2.mindrecord", "数据 集-一.é.mindrecord", "🚀.mindrecord",
    "with space.mindrecord", "..mindrecord", "a.mindrecord.mindrecord"])  # fmt: skip
def test_unusual_names(tmp_path: Path, name: str) -> None:
    """Names with "-", dots, spaces or other scripts (mindformers 2d3b2515f parsed them apart)."""
    path, _ = make_set(tmp_path / "目录 with-dash.v1 'q'" / name, count=5)
    assert first_tokens(read(path, 1, shuffle=False)) == [0, 1, 2, 3, 4]


def test_a_set_can_be_moved_and_named_by_its_directory(stored: Stored, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(stored[0].parent, moved)
    assert first_tokens(read(moved, 1, shuffle=False)) == list(range(COUNT))
    shutil.copy(manifest_path(moved / "a.mindrecord"), moved / "b.mindrecord.json")
    with pytest.raises(MsLongctxError, match="one prepared set.*a.mindrecord.json, b.mindrecord.json"):
        create_dataset(moved, 1, SEQ_LEN)


def test_relative_path(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored[0].parent)
    assert len(read(Path("a.mindrecord"), 4)) == 5


# --- what cannot be read is named before MindSpore sees it ---


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return make_set(tmp_path / "a.mindrecord", shards=2)[0]


def _fails(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(MsLongctxError, match=message) as caught:
        create_dataset(path, 4, **({"seq_len": SEQ_LEN} | options))
    assert "\n" not in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    _fails(tmp_path / "none.mindrecord", "none.mindrecord does not exist; make it with")
    _fails(tmp_path, "should hold one prepared set.*found none")


def test_truncated(copy: Path) -> None:
    second = copy.with_name("a-00001.mindrecord")
    second.write_bytes(second.read_bytes()[:-1])
    _fails(copy, "a-00001.mindrecord has .* bytes, expected .*truncated")


def test_missing_index(copy: Path) -> None:
    copy.with_name("a.mindrecord.db").unlink()
    _fails(copy, "a.mindrecord.db is missing.*the index of a.mindrecord")


def test_missing_shard(copy: Path) -> None:
    copy.with_name("a-00001.mindrecord").unlink()
    _fails(copy, "a-00001.mindrecord is missing")


def test_missing_manifest(copy: Path) -> None:
    manifest_path(copy).unlink()
    _fails(copy, "a.mindrecord.json is not beside it")


def test_empty_and_foreign_files(tmp_path: Path) -> None:
    file = tmp_path / "x.mindrecord"
    file.write_bytes(b"")
    _fails(file, "empty file")
    file.write_text('{"text": "jsonl under a wrong name"}\n')
    _fails(file, "is not a MindRecord file")


def test_foreign_mindrecord(tmp_path: Path) -> None:
    file = tmp_path / "x.mindrecord"
    write_mindrecord(file, [(np.arange(3, dtype=np.int32), np.array([0, 3], np.int32))], file_sizes(5, 5, 1))
    _fails(file, "made by another tool")


def test_damaged_manifest(copy: Path) -> None:
    for content in ("{", "[]", '{"made_by": "other"}', '{"made_by": "ms_longctx prepared set 1"}'):
        manifest_path(copy).write_text(content)
        _fails(copy, "a.mindrecord.json is not a manifest")


def test_renamed(copy: Path) -> None:
    for file in list(copy.parent.glob("a*")):
        renamed = file.with_name(file.name.replace("a", "b", 1))
        file.rename(renamed)
    manifest = manifest_path(copy.with_name("b.mindrecord"))
    manifest.write_text(manifest.read_text().replace('"a', '"b'))
    _fails(copy.with_name("b.mindrecord"), "written under another name")


def test_damaged_header(copy: Path) -> None:
    content = bytearray(copy.read_bytes())
    content[8:40] = b"\0" * 32
    copy.write_bytes(content)
    _fails(copy, "a.mindrecord is damaged")


def test_unfinished(copy: Path) -> None:
    manifest_path(copy).unlink()
    copy.with_name("a.mindrecord.partial").mkdir()
    _fails(copy, "not finished: run the same prepare command again")


def test_set_that_does_not_fit_the_model(copy: Path) -> None:
    _fails(copy, "up to 31 tokens.*rows of 16", seq_len=16)
    _fails(copy, "tokenizer of 32000 tokens, the model has only 100", vocab_size=100)
    _fails(copy, "another tokenizer", tokenizer="f" * 64)
    assert create_dataset(copy, 4, SEQ_LEN, vocab_size=32000, tokenizer="fingerprint").get_dataset_size() == 5
