# SPDX-License-Identifier: Apache-2.0
"""The trainer on several Ascend devices: feeding against the CPU's sharding, pieces against numpy's slices.

Loading, steps and saving run in MindSpore's simulation of single ranks: what is loaded is real and compared to the bit
with slices of the files; what a step computes means nothing and is not compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_longctx.config import load_config
from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import fuse_qkv
from ms_longctx.models.hf_config import read_config
from ms_longctx.models.safetensors_io import read_header
from ms_longctx.parallel import virtual_cluster
from ms_longctx.parallel.slices import Piece
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.virtual_cluster import cluster, tools
from ms_longctx.train.checkpoint import CheckpointStore, verify
from ms_longctx.train.initial import initial_values
from ms_longctx.train.program_engine import ProgramEngine, program_rows
from ms_longctx.train.step import COLUMNS
from ms_longctx.train.workers import Workers
from tests.train.test_sharded import into_pieces, job, stored

WORKER = Path(__file__).with_name("program_engine_worker.py")
ROOT = WORKER.parents[2]
MODEL = {
    "model__vocab_size": 132,
    "model__hidden_size": 256,
    "model__intermediate_size": 512,
    "model__num_hidden_layers": 3,
    "model__num_attention_heads": 8,
    "model__num_key_value_heads": 4,
    "model__tie_word_embeddings": "false",
    "data__seq_length": 32,
    "optimizer__scheduler": "constant",
}
simulated = pytest.mark.skipif(
    tools.missing_reason() is not None and not cluster.has_cann(), reason=tools.missing_reason() or ""
)


@pytest.mark.parametrize("ring", [{"attention_mode": "ring"}, {"attention_mode": "ulysses", "ulysses_degree": 2}])
def test_rows_are_those_of_the_workers(ring: dict[str, Any]) -> None:
    """In each micro batch row ``dp_i * cp + cp_i`` is what that worker has on the CPU, its sequences in a row."""
    rng = np.random.default_rng(0)
    batches = [
        {name: rng.integers(0, 99, (4, 8), np.int32) for name in COLUMNS},
        {name: rng.integers(0, 99, (4, 8), np.int32) for name in COLUMNS},
    ]
    columns = program_rows(batches, Strategy.read({"dp": 2, "cp": 2, "mp": 2, **ring}, 8))
    assert [column.shape for column in columns] == [(8, 8)] * 4
    for rank in range(4):
        workers = Workers(Strategy.read({"dp": 2, "cp": 2, **ring}, 4), rank)
        for number, batch in enumerate(batches):
            own = workers.shard(batch)
            for name, column in zip(COLUMNS, columns, strict=True):
                np.testing.assert_array_equal(column[number * 4 + rank], own[name].reshape(-1))


def test_first_weights_do_not_depend_on_the_cut() -> None:
    config = LlamaConfig(initializer_range=0.05)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = initial_values(name, Piece.all_of((96, 80)), config, 3)
    part = initial_values(name, Piece((96, 80), (24, 20), (48, 60)), config, 3)
    np.testing.assert_array_equal(part, whole[24:48, 20:60])
    # 7,680 numbers: standard errors 0.0006 and 0.0004.
    assert abs(whole.mean()) < 0.003 and abs(whole.std() - 0.05) < 0.002
    assert not np.array_equal(whole, initial_values(name.replace("up", "gate"), Piece.all_of((96, 80)), config, 3))
    assert (initial_values("model.norm.weight", Piece.all_of((8,)), config, 3) == 1).all()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--train.dtype=fp16", "needs a loss scale"),
        ("--data.eval_path=x.mindrecord", "cannot evaluate between"),
        ("--lora.enabled=true", "does not split adapters"),
    ],
)
def test_refused_before_compiling(override: str, message: str) -> None:
    from ms_longctx.train.disks import Disk

    run = load_config(None, [override, "--train.device_target=Ascend"])
    with pytest.raises(MsLongctxError, match=message):
        ProgramEngine(run, Disk(), None)


def simulate(folder: Path, rank: int, workers: int, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``program_engine_worker.py`` finds for one rank: facts, and the pieces it loaded."""
    folder.mkdir()
    environment = virtual_cluster.prepare().environment(rank, workers) | {"GLOG_v": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, str(WORKER), str(folder / "result.npz"), *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    assert (folder / "result.npz").is_file(), done.stdout[-2000:] + done.stderr[-3000:]
    values = dict(np.load(folder / "result.npz"))
    return json.loads(str(values.pop("facts"))), values


def check_pieces(facts: dict[str, Any], values: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Rules and compiled program agree about every piece, and its values are the slices."""
    assert {name: piece[:3] for name, piece in facts["pieces"].items()} == facts["rules"]
    assert values.keys() == facts["pieces"].keys()
    for name, (_, start, stop, _) in facts["pieces"].items():
        np.testing.assert_array_equal(values[name], expected[name][tuple(map(slice, start, stop))], err_msg=name)


@pytest.mark.slow
@simulated
def test_runs_on_ascend(make_set: Callable[..., Path], arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A CPU's checkpoint goes on in pieces with pipeline and sharded optimizer, and another run begins with it."""
    data = make_set(tmp_path / "a.mindrecord")
    common = {**MODEL, "train__batch_size": 2}
    job(tmp_path / "cpu", 1, arguments(data, tmp_path / "run", **{**common, "train__max_steps": 1}), train=True)
    whole = tmp_path / "run/checkpoints/step-00000001"
    expected = stored(whole)
    assert any(value.any() for name, value in expected.items() if name.startswith("exp_avg_sq."))

    # Written by mp 4, resumed by stage 1 of dp 2 x mp 2 x pp 2.
    pieces = tmp_path / "pieces/checkpoints"
    written = Strategy(mp=4, vocab_parallel=True)
    moved = CheckpointStore(pieces).save(1, lambda folder: into_pieces(whole, folder, written))
    degrees = {"dp": 2, "mp": 2, "pp": 2, "pipeline_layers": "[1,2]", "micro_batch_num": 2}
    split = {f"parallel__{name}": value for name, value in degrees.items()}
    split |= {"parallel__optimizer_shard": "true", "parallel__vocab_parallel": "true"}
    ascend = {**common, "train__device_target": "Ascend", "train__dtype": "bf16"}
    given = arguments(data, tmp_path / "ascend", **{**ascend, **split, "train__max_steps": 3})
    facts, values = simulate(tmp_path / "a", 5, 8, [*given, f"--train.resume={moved}"])
    check_pieces(facts, values, expected)
    assert facts["step"] == facts["count"] == 1 and facts["trained"] == 3
    assert facts["pieces"]["lm_head.weight"] == [[132, 256], [66, 0], [99, 256], [5]]
    assert facts["pieces"]["model.norm.weight"][3] == [4, 5, 6, 7]
    checkpoint = Path(facts["checkpoint"])
    verify(checkpoint)
    header = read_header(checkpoint / "shards/rank-00005.safetensors")
    assert {name: list(tensor.shape) for name, tensor in header.items()} == {
        name: [last - first for first, last in zip(start, stop, strict=True)]
        for name, (_, start, stop, _) in facts["pieces"].items()
    }
    assert read_config(checkpoint) == read_config(whole)

    # A Hugging Face directory as first weights: fused attention, context parallel, gradient accumulation.
    degrees = {"dp": 2, "cp": 2, "mp": 2, "attention_mode": "ulysses"}
    other = {f"parallel__{name}": value for name, value in degrees.items()}
    other |= {"model__pretrained": whole, "model__parallel_attention": "true"}
    other |= {"train__gradient_accumulation_steps": 2, "train__max_steps": 1}
    facts, values = simulate(tmp_path / "b", 3, 8, arguments(data, tmp_path / "other", **{**ascend, **other}))
    for number in range(3):
        layer = f"model.layers.{number}.self_attn"
        parts = [expected[f"{layer}.{part}_proj.weight"] for part in "qkv"]
        expected[f"{layer}.qkv_proj.weight"] = fuse_qkv(parts, read_config(whole))
    moments = {name: np.zeros_like(expected[name.split(".", 1)[1]]) for name in values if name.startswith("exp_avg")}
    check_pieces(facts, values, {**expected, **moments})
    assert facts["trained"] == 1
