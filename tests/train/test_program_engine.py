# SPDX-License-Identifier: Apache-2.0
"""The trainer on several Ascend devices: feeding against the CPU's sharding, pieces against numpy's slices.

Loading, steps and saving run in MindSpore's simulation of single ranks: what is loaded is real and compared to the bit
with slices of the files; what a step computes means nothing and is not compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from safetensors.numpy import load_file

from ms_longctx.cli.main import main
from ms_longctx.config import load_config
from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import fuse_qkv
from ms_longctx.models.hf_config import read_config
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.models.pieces import FilePiece
from ms_longctx.models.safetensors_io import read_header
from ms_longctx.models.sharded import Block, write_shard
from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.groups import ParamGroup
from ms_longctx.parallel import virtual_cluster
from ms_longctx.parallel.slices import Piece, piece_of
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.virtual_cluster import cluster, tools
from ms_longctx.train.build import build_optimizer
from ms_longctx.train.checkpoint import CheckpointStore, verify
from ms_longctx.train.disks import Disk
from ms_longctx.train.initial import initial_adapters, initial_values
from ms_longctx.train.program_engine import ProgramEngine, program_rows
from ms_longctx.train.state import read_moments
from ms_longctx.train.step import COLUMNS, StepResult
from ms_longctx.train.workers import Workers
from ms_longctx.tuning import LoraConfig, get_pe_model, load_adapter, read_adapter_config
from ms_longctx.tuning.adapter_files import PREFIX, write_adapter_config
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
ADAPTERS = LoraConfig(r=4, target_modules="all-linear")
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


def small_model(seed: int) -> LlamaForCausalLM:
    """On the CPU, with adapters on all linear layers whose B is not zero."""
    config = LlamaConfig(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config, ms.float32)
    get_pe_model(model, ADAPTERS, seed)
    return model


def test_first_adapters_are_those_of_one_process() -> None:
    model = small_model(5)
    parameters = {parameter.name: parameter for parameter in model.trainable_params()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    pieces = {name: Piece.all_of(shape).cut(1, 2, 1) for name, shape in list(shapes.items())[::3]}
    values = initial_adapters(shapes, pieces, 5)
    assert values.keys() == pieces.keys() and len(shapes) == 28
    for name, piece in pieces.items():
        np.testing.assert_array_equal(values[name], parameters[name].asnumpy()[:, piece.start[1] :])


def test_adapter_in_pieces_loads_whole(tmp_path: Path) -> None:
    """Pieces of 8 workers become one model's adapters and moments, and peft's file; all to the bit."""
    model, other = small_model(5), small_model(6)
    rng = np.random.default_rng(0)
    stored = {
        name: rng.standard_normal(p.shape, np.float32)
        for p in model.trainable_params()
        for name in (PREFIX + p.name, f"exp_avg.{p.name}", f"exp_avg_sq.{p.name}")
    }
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_adapter_config(ADAPTERS, folder, "base")
    adapters_into_pieces(stored, folder, model.config, Strategy(dp=2, mp=2, pp=2, micro_batch_num=2))
    load_adapter(other, folder)
    for parameter in other.trainable_params():
        np.testing.assert_array_equal(parameter.asnumpy(), stored[PREFIX + parameter.name])
    found = read_moments(folder, build_optimizer(load_config(None, []), other), other.config)
    assert found.keys() == {name for name in stored if name.startswith("exp_avg")}
    assert all(np.array_equal(value, stored[name]) for name, value in found.items())
    assert main(["convert", "--input", str(folder), "--output", str(tmp_path / "adapter")]) == 0
    whole = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert whole.keys() == {name for name in stored if name.startswith(PREFIX)}
    assert all(np.array_equal(value, stored[name]) for name, value in whole.items())
    assert read_adapter_config(tmp_path / "adapter") == read_adapter_config(folder) == ADAPTERS
    (folder / "shards/rank-00005.json").unlink()
    with pytest.raises(MsLongctxError, match="copy the files of all ranks into one directory"):
        load_adapter(small_model(7), folder)


def adapters_into_pieces(stored: dict[str, np.ndarray], folder: Path, config: LlamaConfig, strategy: Strategy) -> None:
    """What :meth:`ProgramEngine.write_share` writes on all ranks, each block once."""
    seen = set()
    for rank in range(strategy.worker_num):
        blocks = []
        for name, value in stored.items():
            parameter = name.removeprefix(PREFIX).removeprefix("exp_avg.").removeprefix("exp_avg_sq.")
            piece = piece_of(parameter, value.shape, config, strategy, rank)
            if piece is not None and (name, piece) not in seen:
                seen.add((name, piece))
                block = value[piece.place_in(Piece.all_of(value.shape))]
                blocks.append(Block(FilePiece(name, piece), lambda block=block: block))
        write_shard(folder, rank, blocks)


@pytest.mark.parametrize("is_fp16", [True, False])
def test_scales_of_a_step_and_an_evaluation(is_fp16: bool) -> None:
    """What the program is told, with a program that only writes it down: the loss is 6, the labels are 12."""
    scalars = {name: Parameter(Tensor(0.0, ms.float32), name=name) for name in ("learning_rate", "grad_scale")}
    scale = Parameter(Tensor(1.0, ms.float32), name="loss_scale") if is_fp16 else None
    told: list[dict[str, Any]] = []

    def program(*columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = {p.name: float(p.asnumpy()) for p in (*scalars.values(), scale) if p is not None}
        told.append({**values, "labels": columns[COLUMNS.index("labels")].asnumpy()})
        return Tensor(6.0), Tensor(2.0), Tensor(False)

    engine = ProgramEngine.__new__(ProgramEngine)
    engine._step = SimpleNamespace(**scalars, loss_scale=scale)
    engine.program, engine.disk, engine.strategy = SimpleNamespace(cell=program), Disk(), Strategy()
    engine.micro_batches = 2
    batch = {name: np.full((2, 3), 7, np.int32) for name in COLUMNS}
    assert engine.step([batch, batch], 0.5, 8.0, 0) == StepResult(0.5, 12, 2.0, False)
    assert told[0]["learning_rate"] == 0.5 and told[0].get("loss_scale") == (8.0 if is_fp16 else None)
    assert told[0]["grad_scale"] == pytest.approx(1 / 96 if is_fp16 else 1 / 12)
    # A single batch is completed with one that has no labels.
    assert engine.evaluate([batch]) == (6.0, 6)
    assert np.isnan(told[1]["grad_scale"]) and told[1]["labels"].tolist() == [[7] * 6, [-100] * 6]


def test_optimizer_takes_nan_for_an_evaluation() -> None:
    """What :meth:`ProgramEngine.evaluate` rests on: the operators of the Ascend program change no bit then."""
    rng = np.random.default_rng(0)
    parameters = [Parameter(Tensor(rng.standard_normal((5, 3), np.float32)), name=name) for name in "ab"]
    groups = [ParamGroup("all", tuple(parameters), weight_decay=0.1)]
    optimizer = AdamW(groups, max_grad_norm=1.0, implementation="operators")
    grads = tuple(Tensor(rng.standard_normal((5, 3), np.float32)) for _ in parameters)
    rate = Tensor(0.1, ms.float32)
    for scale, finite in ((0.5, True), (float("nan"), False)):
        before = [p.asnumpy().copy() for p in (*parameters, *optimizer.state().values())]
        assert bool(optimizer(grads, rate, Tensor(scale, ms.float32))[1]) is finite
        after = [p.asnumpy() for p in (*parameters, *optimizer.state().values())]
        same = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
        assert not any(same) if finite else all(same)


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


@pytest.mark.slow
@simulated
def test_adapters_on_ascend(make_set: Callable[..., Path], arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A CPU's adapters, cut into pieces, go on there and on Ascend in fp16 with evaluations; new ones begin alike."""
    data = make_set(tmp_path / "a.mindrecord")
    lora = {"lora__enabled": "true", "lora__r": 4, "lora__lora_dropout": 0, "lora__target_modules": "all-linear"}
    common = {**MODEL, **lora, "train__batch_size": 2}
    begun = arguments(data, tmp_path / "base", **{**MODEL, "train__batch_size": 2, "train__max_steps": 1})
    job(tmp_path / "cpu", 1, begun, train=True)
    base = tmp_path / "base/checkpoints/step-00000001"
    common["model__pretrained"] = base
    job(tmp_path / "lora", 1, arguments(data, tmp_path / "run", **{**common, "train__max_steps": 2}), train=True)
    trained = tmp_path / "run/checkpoints/step-00000002"
    adapters = {name.removeprefix(PREFIX): v for name, v in load_file(trained / "adapter_model.safetensors").items()}
    frozen = {name: value for name, value in stored(base).items() if not name.startswith("exp_avg")}
    moments = {k: v for file in (trained / "trainer").glob("*.safetensors") for k, v in load_file(file).items()}

    def cut(folder: Path) -> None:
        names = {name if name.startswith("exp_avg") else PREFIX + name: v for name, v in (adapters | moments).items()}
        adapters_into_pieces(names, folder, read_config(base), Strategy(mp=4))
        (folder / "trainer").mkdir()
        for file in ("adapter_config.json", "trainer/state.json"):
            shutil.copyfile(trained / file, folder / file)

    moved = CheckpointStore(tmp_path / "pieces/checkpoints").save(2, cut)
    again = arguments(data, tmp_path / "again", **{**common, "train__max_steps": 3})
    found = job(tmp_path / "back", 1, [*again, f"--train.resume={moved}"])[0]
    assert found["#step"] == found["step"] == 2
    for name, value in {**frozen, **adapters, **moments}.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)

    ascend = {**common, "train__device_target": "Ascend", "train__dtype": "fp16", "train__loss_scale_init": 1024}
    degrees = {"dp": 2, "mp": 2, "pp": 2, "pipeline_layers": "[1,2]", "micro_batch_num": 2}
    split = {f"parallel__{name}": value for name, value in degrees.items()}
    split |= {"parallel__optimizer_shard": "true", "parallel__vocab_parallel": "true", "data__eval_path": data}
    given = arguments(data, tmp_path / "ascend", **{**ascend, **split, "train__max_steps": 3})
    facts, values = simulate(tmp_path / "a", 5, 8, [*given, f"--train.resume={moved}"])
    check_pieces(facts, values, {**frozen, **adapters, **moments})
    assert facts["step"] == facts["count"] == 2 and facts["trained"] == 3
    counts = [sum(value.size for value in part.values()) for part in (adapters, frozen)]
    assert facts["parameters"] == [counts[0], sum(counts)]
    checkpoint = Path(facts["checkpoint"])
    verify(checkpoint)
    header = read_header(checkpoint / "shards/rank-00005.safetensors")
    own = {name for name in facts["pieces"] if ".lora_" in name}
    assert header.keys() == {PREFIX + name if name in adapters else name for name in own}
    assert read_adapter_config(checkpoint) == read_adapter_config(trained)

    # Without a checkpoint, on the second of four workers that share every layer.
    given = arguments(data, tmp_path / "new", **{**ascend, "parallel__mp": 4, "train__max_steps": 1})
    facts, values = simulate(tmp_path / "b", 1, 4, given)
    model = LlamaForCausalLM.from_pretrained(str(base), ms.float32)
    get_pe_model(model, LoraConfig(r=4, target_modules="all-linear"), load_config(None, given).train.seed)
    first = {parameter.name: parameter.asnumpy() for parameter in model.get_parameters()}
    assert any(".lora_A." in name for name in values)
    check_pieces(facts, values, {**first, **{name: np.zeros_like(value) for name, value in moments.items()}})
