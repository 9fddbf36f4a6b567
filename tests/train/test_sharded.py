# SPDX-License-Identifier: Apache-2.0
"""Checkpoints across strategies and disks, with real processes on the CPU.

The reference of every comparison is what the safetensors package reads from the files that were written; all are equal
to the bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.hf_config import read_config
from ms_longctx.models.pieces import FilePiece
from ms_longctx.models.sharded import Block, write_shard
from ms_longctx.parallel.slices import piece_of
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.train.checkpoint import CheckpointStore
from tests.parallel.processes import Job

Arguments = Callable[..., list[str]]


def job(folder: Path, size: int, arguments: list[str], **settings: Any) -> list[dict[str, np.ndarray]]:
    """What each process of a job has after it opened the run, or nothing if it trains; main.txt: what rank 0 says."""
    folder.mkdir()
    path = folder / "settings.json"
    settings = {"train": False, "result": str(folder / "{rank}.npz"), **settings, "arguments": arguments}
    path.write_text(json.dumps(settings))
    with Job("../train/resume_worker.py", size, [str(path)]) as processes:
        codes = processes.wait(timeout=240)
        assert codes == [0] * size, processes.output()
        (folder / "main.txt").write_text(processes.ranks[0].text())
    return [] if settings["train"] else [dict(np.load(folder / f"{rank}.npz")) for rank in range(size)]


def stored(checkpoint: Path) -> dict[str, np.ndarray]:
    """Weights and moments of a whole checkpoint."""
    files = [checkpoint / "model.safetensors", *(checkpoint / "trainer").glob("optimizer-*.safetensors")]
    return {name: value for file in files for name, value in load_file(file).items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], config: LlamaConfig) -> None:
    values = {name: value for name, value in found.items() if not name.startswith("#") and name != "step"}
    assert values.keys() == expected.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def into_pieces(checkpoint: Path, folder: Path, strategy: Strategy) -> None:
    """The checkpoint as workers of a strategy would have written it."""
    config, values = read_config(checkpoint), stored(checkpoint)
    (folder / "trainer").mkdir()
    shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    shutil.copyfile(checkpoint / "trainer/state.json", folder / "trainer/state.json")
    seen = set()
    for rank in range(strategy.worker_num):
        blocks = []
        for name, value in values.items():
            weight = name.removeprefix("exp_avg.").removeprefix("exp_avg_sq.")
            piece = piece_of(weight, value.shape, config, strategy, rank)
            if piece is not None and (name, piece) not in seen:
                seen.add((name, piece))
                block = value[tuple(map(slice, piece.start, piece.stop))]
                blocks.append(Block(FilePiece(name, piece), lambda block=block: block))
        write_shard(folder, rank, blocks)


@pytest.mark.slow
def test_saved_by_four_loaded_by_two_and_one(
    make_set: Callable[..., Path], arguments: Arguments, tmp_path: Path
) -> None:
    """dp 2 x cp 2 on four disks that lose and damage files; then two processes and one, from whole files and pieces."""
    data = make_set(tmp_path / "a.mindrecord")

    def given(output: object, **changes: Any) -> list[str]:
        return arguments(data, output, train__max_steps=6, **changes)

    four = {"parallel__dp": 2, "parallel__cp": 2, "train__batch_size": 1}
    own = tmp_path / "disk-{rank}"
    job(tmp_path / "train", 4, given(own, train__save_steps=2, train__keep_checkpoints=3, **four), train=True)
    disks = [tmp_path / f"disk-{rank}" for rank in range(4)]
    assert all(CheckpointStore(disk / "checkpoints").steps() == [2, 4, 6] for disk in disks)
    assert [(disk / "metrics.jsonl").exists() for disk in disks] == [True, False, False, False]
    shared = tmp_path / "shared"
    shutil.copytree(disks[0], shared)

    # One disk lacks a file of the last step, another has the step before that one damaged.
    (disks[3] / "checkpoints/step-00000006/model.safetensors").unlink()
    victim = disks[1] / "checkpoints/step-00000004/trainer/optimizer-00001-of-00001.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x55")
    broken = shared / "checkpoints/step-00000006/model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"\x55")  # the worker that hashes this file is not the main one
    config = read_config(disks[0] / "checkpoints/step-00000002")
    # The set of step 2 is all that every worker has whole; in the shared directory all see step 4.
    resumed = job(tmp_path / "four", 4, [*given(own, **four), "--train.resume=latest"], also=str(shared))
    expected = stored(disks[0] / "checkpoints/step-00000002")
    for rank, found in enumerate(resumed):
        assert found["#step"] == 2 and found["#disk"].tolist() == [rank]
        assert found["#also"] == 4 and found["#also_disk"].tolist() == [0, 1, 2, 3]
        same(found, expected, config)
    said = (tmp_path / "four/main.txt").read_text()
    assert said.count("contents changed") == 2 and f"{broken}: contents changed" in said, said
    assert sorted(path.name for path in (disks[0] / "checkpoints").glob("*.damaged")) == [
        "step-00000004.damaged",
        "step-00000006.damaged",
    ]
    assert not list(disks[0].glob(".seen-by-*"))

    whole = disks[0] / "checkpoints/step-00000002"
    two = {"parallel__cp": 2, "train__batch_size": 2}
    for found in job(tmp_path / "two", 2, [*given(shared, **two), "--train.resume=latest"]):
        assert found["#step"] == 4
        same(found, stored(shared / "checkpoints/step-00000004"), config)
    strategy = Strategy(dp=2, pp=2, micro_batch_num=2, optimizer_shard=True, pipeline_layers=(1, 1))
    store = CheckpointStore(tmp_path / "pieces/checkpoints")
    pieces = store.save(2, lambda folder: into_pieces(whole, folder, strategy))
    one = [*given(tmp_path / "one", train__batch_size=2), f"--train.resume={pieces}"]
    same(job(tmp_path / "one-job", 1, one)[0], expected, config)
