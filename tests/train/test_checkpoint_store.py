# SPDX-License-Identifier: Apache-2.0
"""The checkpoint store: complete or absent, whatever happens while it writes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ms_longctx
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.pieces import FilePiece
from ms_longctx.models.sharded import Block, BlockSource, read_blocks, write_shard
from ms_longctx.parallel.slices import Piece
from ms_longctx.train import checkpoint
from ms_longctx.train.checkpoint import CheckpointStore, DamagedCheckpointError, verify

REPOSITORY = Path(ms_longctx.__file__).parents[1]


def write_step(step: int):
    def write(directory: Path) -> None:
        (directory / "trainer").mkdir()
        save_file({"w": np.full(257, step, np.float32)}, directory / "model.safetensors")
        (directory / "trainer" / "state.json").write_text(f'{{"step": {step}}}')

    return write


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    # The names that broke other tools' parsers: dashes, digits, dots, Chinese.
    store = CheckpointStore(tmp_path / "运行 rank_0-step-7.x" / "checkpoints", keep=2)
    for step in (4, 8, 12):
        store.save(step, write_step(step))
    return store


def test_keeps_the_newest_and_points_at_it(store: CheckpointStore) -> None:
    assert store.steps() == [8, 12]
    assert (store.directory / "latest").read_text().strip() == "step-00000012"
    assert store.newest() == store.path(12)
    assert load_file(store.path(12) / "model.safetensors")["w"][0] == 12
    assert sorted(os.listdir(store.directory)) == ["latest", "step-00000008", "step-00000012"]


@pytest.mark.parametrize("file", ["model.safetensors", "trainer/state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_damage_is_named_and_the_previous_one_used(
    store: CheckpointStore, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = store.path(12) / file
    content = victim.read_bytes()
    if damage == "remove":
        victim.unlink()
    elif damage == "truncate":
        victim.write_bytes(content[:-3])
    else:
        middle = len(content) // 2
        victim.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(DamagedCheckpointError) as caught:
        verify(store.path(12))
    assert Path(file).name in str(caught.value) or victim.name == "manifest.json"
    assert store.newest() == store.path(8)
    assert "falling back" in caplog.text and "step-00000012" in caplog.text
    # The resumed run reaches step 12 again and can write it.
    store.save(12, write_step(12))
    assert store.newest() == store.path(12)


def test_all_damaged_is_an_error(store: CheckpointStore) -> None:
    for step in store.steps():
        (store.path(step) / "model.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="none of the 2 checkpoints is whole"):
        store.newest()
    assert store.steps() == [8, 12]  # nothing was moved
    with pytest.raises(DamagedCheckpointError, match="is whole; copy it again$"):
        store.newest(advice="copy it again")


class Together:
    """:class:`~ms_longctx.train.checkpoint.Peers` of one of two threads on one disk."""

    count = 2

    def __init__(self, index: int, barrier: threading.Barrier, places: list[Any]) -> None:
        self.index, self.barrier, self.places = index, barrier, places

    def exchange(self, number: Any) -> list[Any]:
        self.places[self.index] = number
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found

    def first_text(self, text: str) -> str:
        return next(filter(None, self.exchange(text)), "")


@pytest.mark.parametrize("number", [0, 1])
def test_the_lead_reports_what_any_worker_found(
    store: CheckpointStore, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each worker hashes half of the files; the damage is in one of either half."""
    name = list(json.loads((store.path(12) / "manifest.json").read_text())["files"])[number]
    victim = store.path(12) / name
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    barrier, places = threading.Barrier(2, timeout=20), [None, None]
    with ThreadPoolExecutor(2, "worker") as pool:
        found = list(pool.map(lambda index: store.newest(Together(index, barrier, places)), range(2)))
    assert found == [store.path(8)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{victim}: contents changed, the SHA-256 differs from manifest.json; falling back to the checkpoint before it"
    ]


def test_writer_that_fails_leaves_the_old_state(store: CheckpointStore) -> None:
    before = sorted(os.listdir(store.directory))

    def broken(directory: Path) -> None:
        write_step(16)(directory)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        store.save(16, broken)
    assert sorted(os.listdir(store.directory)) == before
    verify(store.path(12))


def test_full_disk_is_refused_before_writing(store: CheckpointStore) -> None:
    with pytest.raises(MsLongctxError, match="no space left.*older checkpoints are untouched") as caught:
        store.save(16, write_step(16), estimated_bytes=1 << 60)
    assert "Errno" not in str(caught.value) and "needs about 1,152,9" in str(caught.value)
    verify(store.path(12))


def test_shards_are_sealed_by_what_their_writers_recorded(store: CheckpointStore) -> None:
    """A byte that changes in a shard is found, whichever of the workers on a disk looks at that file."""
    values = np.arange(12, dtype=np.float32).reshape(4, 3)

    def write(folder: Path) -> None:
        for rank in range(2):
            piece = Piece.all_of((4, 3)).cut(0, 2, rank)
            write_shard(folder, rank, [Block(FilePiece("w", piece), lambda rank=rank: np.split(values, 2)[rank])])

    path = store.save(16, write)
    verify(path)
    source = BlockSource(path, read_blocks(path))
    np.testing.assert_array_equal(source.read("w", Piece((4, 3), (1, 0), (3, 2))), values[1:3, :2])
    shard = path / "shards/rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    outcomes = []
    for index in range(3):
        try:
            verify(path, index, 3)
            outcomes.append("")
        except DamagedCheckpointError as error:
            outcomes.append(str(error))
    assert outcomes.count("") == 2 and "rank-00001.safetensors: contents changed" in "".join(outcomes)
    assert store.newest() == store.path(12)


def test_disk_that_fills_up_while_writing(store: CheckpointStore) -> None:
    """A real write error of the operating system (a file size limit), through safetensors' own writer."""
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(MsLongctxError, match="no space left"):
            store.save(16, lambda d: save_file({"w": np.zeros(1 << 20)}, d / "model.safetensors"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert store.steps() == [8, 12]
    verify(store.path(12))


def test_kill_at_every_system_call(tmp_path: Path) -> None:
    """The process dies before its n-th rename, fsync or removal, for every n; one checkpoint stays valid."""
    script = textwrap.dedent(
        """
        import os, shutil, signal, sys
        from pathlib import Path
        from ms_longctx.train.checkpoint import CheckpointStore
        countdown = int(sys.argv[2])
        def deadly(function):
            def call(*args, **kwargs):
                global countdown
                countdown -= 1
                if countdown < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)
            return call
        os.replace, os.fsync, os.unlink, os.rmdir = map(deadly, (os.replace, os.fsync, os.unlink, os.rmdir))
        def write(directory):
            (directory / "a.bin").write_bytes(b"1" * 1000)
            (directory / "b.bin").write_bytes(b"2" * 1000)
        store = CheckpointStore(Path(sys.argv[1]), keep=1)
        store.save(2, write)
        store.save(3, write)
        """
    )
    program = tmp_path / "save.py"
    program.write_text(script)
    outcomes = set()
    for countdown in range(60):
        directory = tmp_path / f"run{countdown}"
        store = CheckpointStore(directory, keep=1)
        store.save(1, write_step(1))
        arguments = [sys.executable, str(program), str(directory), str(countdown)]
        done = subprocess.run(arguments, check=False, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)})
        newest = store.newest()
        if done.returncode == 0:
            assert newest == store.path(3)
            break
        assert done.returncode == -signal.SIGKILL
        assert newest is not None
        outcomes.add(newest.name)
        store.save(9, write_step(9))
        assert sorted(os.listdir(directory)) == ["latest", "step-00000009"]
    else:
        pytest.fail("the program never finished")
    assert outcomes == {"step-00000001", "step-00000002", "step-00000003"}


def test_write_text_replaces(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    checkpoint.write_text(path, "a\n")
    checkpoint.write_text(path, "b\n")
    assert path.read_text() == "b\n" and os.listdir(tmp_path) == ["latest"]
