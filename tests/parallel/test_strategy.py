# SPDX-License-Identifier: Apache-2.0
"""Degrees, ranks and groups: reading, the meaning of ``sp``, the numbering of ranks, and every refusal."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_longctx.config import LlamaConfig, ParallelConfig, load_config
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.reading import check_device
from ms_longctx.parallel.strategy import AXES, Coordinates, Strategy

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA_7B = LlamaConfig()
EXAMPLE = {"dp": 4, "mp": 2, "sp": 2, "pp": 2}


def refusal(call: Any, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(MsLongctxError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- reading


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", '{"dp": 4, "mp": 2, "sp": 2, "pp": 2}'),
        ("s.yaml", "dp: 4\nmp: 2\nsp: 2\npp: 2\n"),
        ("s.yaml", "parallel: {data_parallel: 4, tensor_parallel: 2, sequence_parallel: true, pipeline_stage: 2}"),
    ],
)
def test_files_and_mappings_agree(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    expected = Strategy(dp=4, mp=2, pp=2, sequence_parallel=True, micro_batch_num=2)
    assert Strategy.read(path, 16) == Strategy.read(str(path), 16) == Strategy.read(EXAMPLE, 16) == expected


def test_the_example_file_of_the_repository() -> None:
    assert Strategy.read(REPOSITORY / "yaml_configs" / "parallel_16.json", 16) == Strategy.read(EXAMPLE, 16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"ddp": 2}, "strategy: parallel.ddp: unknown key; did you mean 'parallel.dp'?"),
        ({"dp": "two"}, "strategy: parallel.dp: expected an integer, found 'two' (text)"),
        ({"dp": 0}, "strategy: parallel.dp: expected a value of at least 1, found 0"),
        ({"attention_mode": "star"}, "strategy: parallel.attention_mode: expected one of none, ring, ulysses, hybrid"),
        ("nowhere.json", "nowhere.json: no such file"),
    ],
)
def test_sources_that_cannot_be_read(source: Any, message: str) -> None:
    assert refusal(Strategy.read, source, 4).startswith(message)


def test_a_run_gives_its_strategy() -> None:
    run = load_config(None, ["--parallel.pp=2", "--train.gradient_accumulation_steps=8"])
    assert Strategy.from_config(run, 2) == Strategy(pp=2, micro_batch_num=8)


# -- the meaning of sp


def test_sp_is_megatrons_where_the_other_degrees_give_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    strategy = Strategy.read(EXAMPLE, 16)
    assert (strategy.cp, strategy.sequence_parallel) == (1, True)
    assert caplog.messages == ["sp = 2: sequence parallel over the mp group (the workers are dp x mp x pp x cp)"]


def test_sp_is_cp_where_it_is_needed_for_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Strategy.read(EXAMPLE, 32)
    assert (strategy.cp, strategy.sequence_parallel, strategy.ring_degree) == (2, False, 2)
    assert caplog.messages == ["sp = 2 is read as cp, context parallel: the workers are dp x mp x pp x sp = 32"]


def test_both_kinds_at_once() -> None:
    strategy = Strategy.read({**EXAMPLE, "cp": 2}, 32)
    assert (strategy.cp, strategy.sequence_parallel) == (2, True)


@pytest.mark.parametrize(
    ("keys", "workers", "expected"),
    [
        (EXAMPLE, 8, "dp 4 x mp 2 x pp 2 x cp 1 = 16 (and with sp 2 read as cp: 32), but the number of workers is 8"),
        ({"dp": 4}, 2, "dp 4 x mp 1 x pp 1 x cp 1 = 4, but the number of workers is 2"),
        ({"dp": 2, "cp": 2, "sp": 2}, 8, "dp 2 x mp 1 x pp 1 x cp 2 = 4, but the number of workers is 8"),
        ({"dp": 2, "mp": 2, "sp": 3}, 4, "sp = 3 must be 1 or mp = 2"),
        ({"dp": 2, "sp": 2}, 2, "sp = 2 must be 1 or mp = 1"),
        # "true" means the mp group and nothing else
        ({"mp": 2, "sp": True}, 4, "dp 1 x mp 2 x pp 1 x cp 1 = 2 (and with sp 2 read as cp: 4), but the number"),
    ],
)
def test_workers_that_do_not_fit(keys: dict[str, Any], workers: int, expected: str) -> None:
    assert refusal(Strategy.read, keys, workers).startswith(f"strategy: {expected}")


# -- attention modes and micro batches


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("ring", 1, 12)),
        ({"attention_mode": "ring"}, ("ring", 1, 12)),
        ({"attention_mode": "ulysses"}, ("ulysses", 12, 1)),
        ({"attention_mode": "hybrid", "ulysses_degree": 3}, ("hybrid", 3, 4)),
        ({"ulysses_degree": 1}, ("ring", 1, 12)),
        ({"ulysses_degree": 12}, ("ulysses", 12, 1)),
        ({"ulysses_degree": 4}, ("hybrid", 4, 3)),
        ({"use_ring_attention": True}, ("ring", 1, 12)),
    ],
)
def test_attention_modes(keys: dict[str, Any], expected: tuple[str, int, int]) -> None:
    strategy = Strategy.read({"cp": 12, **keys}, 12)
    assert (strategy.attention_mode, strategy.ulysses_degree, strategy.ring_degree) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"ulysses_degree": 5}, "ulysses_degree = 5 must divide cp = 12"),
        ({"attention_mode": "none"}, "attention_mode 'none' cannot be with cp = 12"),
        ({"use_ring_attention": False}, "attention_mode 'none' cannot be with cp = 12"),
        ({"attention_mode": "hybrid"}, "attention_mode 'hybrid' needs ulysses_degree, a divisor of cp = 12"),
        (
            {"attention_mode": "ring", "ulysses_degree": 2},
            "ulysses_degree = 2 contradicts attention_mode 'ring', whose",
        ),
        ({"attention_mode": "ulysses", "ulysses_degree": 2}, "ulysses_degree = 2 contradicts attention_mode 'uly"),
        ({"micro_batch_num": 4}, "micro_batch_num = 4 needs a pipeline and pp is 1"),
    ],
)
def test_modes_that_cannot_be(keys: dict[str, Any], expected: str) -> None:
    assert refusal(Strategy.read, {"cp": 12, **keys}, 12).startswith(f"strategy: {expected}")


@pytest.mark.parametrize(
    ("keys", "accumulation", "expected"),
    [({}, 1, 4), ({}, 3, 4), ({}, 16, 16), ({"micro_batch_num": 6}, 1, 6), ({"micro_batch_num": 6}, 6, 6)],
)
def test_micro_batches_of_a_pipeline(keys: dict[str, Any], accumulation: int, expected: int) -> None:
    section = dataclasses.replace(ParallelConfig(pp=4), **keys)
    assert Strategy.from_section(section, 4, accumulation=accumulation).micro_batch_num == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"micro_batch_num": 3}, "micro_batch_num = 3 is below pp = 4"),
        ({"micro_batch_num": 6}, "micro_batch_num = 6 contradicts train.gradient_accumulation_steps = 8"),
        ({"pipeline_layers": [3, 4, 5]}, "pipeline_layers = [3, 4, 5] must have pp = 4 numbers"),
        ({"pipeline_layers": [3, 4, 5, 0]}, "pipeline_layers = [3, 4, 5, 0] must have pp = 4 numbers of at least 1"),
    ],
)
def test_pipelines_that_cannot_be(keys: dict[str, Any], expected: str) -> None:
    section = dataclasses.replace(ParallelConfig(pp=4), **keys)
    accumulation = 8 if keys.get("micro_batch_num") == 6 else 1
    assert refusal(Strategy.from_section, section, 4, accumulation=accumulation).startswith(f"parallel: {expected}")


def test_a_strategy_built_by_hand_is_checked_too() -> None:
    assert refusal(Strategy, cp=4).startswith("ring_degree 1 x ulysses_degree 1 = 1; expected cp = 4")
    assert refusal(Strategy, dp=0).startswith("dp = 0 must be an integer of at least 1")
    assert refusal(Strategy, attention_mode="star").startswith("attention_mode = 'star' is unknown")


# -- ranks and groups; the reference is a numpy array of ranks, indexed [pp, dp, ring, ulysses, mp]

MESHES = [
    Strategy(),
    Strategy(dp=4, mp=2, pp=2, micro_batch_num=2),
    Strategy(dp=2, mp=3, pp=2, cp=6, ring_degree=2, ulysses_degree=3, attention_mode="hybrid", micro_batch_num=2),
    Strategy(cp=5, ring_degree=5, dp=3),
    Strategy(cp=4, ulysses_degree=4, mp=2, attention_mode="ulysses"),
]


@pytest.mark.parametrize("strategy", MESHES)
def test_ranks_and_groups_are_those_of_an_array(strategy: Strategy) -> None:
    names = ("pp", "dp", "ring", "ulysses", "mp")
    shape = (strategy.pp, strategy.dp, strategy.ring_degree, strategy.ulysses_degree, strategy.mp)
    ranks = np.arange(strategy.worker_num).reshape(shape)
    for place in itertools.product(*map(range, shape)):
        rank = int(ranks[place])
        own = strategy.coordinates(rank)
        assert tuple(getattr(own, name) for name in names) == place
        assert own.cp == own.ring * strategy.ulysses_degree + own.ulysses
        assert strategy.rank(own.pp, own.dp, own.ring, own.ulysses, own.mp) == rank
        for axis, varying in AXES.items():
            cut = tuple(slice(None) if name in varying else i for name, i in zip(names, place, strict=True))
            assert strategy.group(axis, rank) == tuple(ranks[cut].ravel().tolist())


@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("axis", AXES)
def test_groups_part_the_workers(strategy: Strategy, axis: str) -> None:
    groups = strategy.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(strategy.worker_num))
    assert {len(group) for group in groups} == {strategy.degree(axis)}


def test_neighbours() -> None:
    strategy = Strategy(dp=3, pp=3, micro_batch_num=3)
    assert strategy.neighbours("dp", 3) == (5, 4) and strategy.neighbours("dp", 5) == (4, 3)
    assert strategy.neighbours("pp", 1) == (None, 4)
    assert strategy.neighbours("pp", 4) == (1, 7)
    assert strategy.neighbours("pp", 7) == (4, None)
    assert strategy.neighbours("mp", 7) == (7, 7)


def test_places_that_do_not_exist() -> None:
    strategy = Strategy(dp=2)
    assert strategy.coordinates(1) == Coordinates(pp=0, dp=1, ring=0, ulysses=0, cp=0, mp=0)
    for rank in (-1, 2):
        assert refusal(strategy.coordinates, rank) == f"rank {rank} does not exist; expected 0 to 1"
    assert refusal(strategy.group, "sp", 0).startswith("axis 'sp' is unknown; expected one of dp, mp, pp, cp")


# -- models


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        (Strategy(dp=4, mp=2, pp=2, micro_batch_num=2, sequence_parallel=True), LLAMA_7B),
        (Strategy(mp=8, pp=8, micro_batch_num=8, vocab_parallel=True), load_config("llama-70b").model),
        # SmolLM2: 9 heads, 3 kv heads
        (Strategy(cp=3, ulysses_degree=3, attention_mode="ulysses"), load_config("smollm2-135m").model),
        # kv heads are copied where the degree is a multiple of them
        (
            Strategy(cp=4, ulysses_degree=4, attention_mode="ulysses"),
            LlamaConfig(num_attention_heads=8, num_key_value_heads=2),
        ),
        (Strategy(pp=3, micro_batch_num=3, pipeline_layers=(10, 12, 10)), LLAMA_7B),
    ],
)
def test_models_that_can_be_split(strategy: Strategy, model: LlamaConfig) -> None:
    strategy.check_model(model, 6144, 1)
    assert sum(strategy.stage_layers(model.num_hidden_layers)) == model.num_hidden_layers


HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 768, "intermediate_size": 1024}


@pytest.mark.parametrize(
    ("strategy", "changes", "seq_length", "expected"),
    [
        (
            Strategy(mp=4),
            {"num_attention_heads": 32, "num_key_value_heads": 2},
            64,
            "num_key_value_heads = 2 is below mp = 4: tensor parallelism gives each worker whole key/value heads",
        ),
        (Strategy(mp=5), HEADS, 64, "num_attention_heads = 12 is not divisible by mp = 5"),
        (Strategy(mp=4), HEADS, 64, "num_key_value_heads = 6 is not divisible by mp = 4"),
        (Strategy(mp=3), HEADS, 64, "intermediate_size = 1024 is not divisible by mp = 3"),
        (
            Strategy(mp=2, vocab_parallel=True),
            {"vocab_size": 32001},
            64,
            "vocab_size = 32001 is not divisible by mp = 2 (vocab_parallel)",
        ),
        (
            Strategy(cp=5, ulysses_degree=5, attention_mode="ulysses"),
            {},
            60,
            "num_attention_heads = 32 must be divisible by ulysses_degree = 5",
        ),
        (
            Strategy(cp=32, ulysses_degree=32, mp=2, attention_mode="ulysses"),
            {},
            64,
            "num_attention_heads 32 / mp 2 = 16 must be divisible by ulysses_degree = 32",
        ),
        (
            Strategy(cp=4, ulysses_degree=4, attention_mode="ulysses"),
            HEADS,
            64,
            "num_key_value_heads = 6 and ulysses_degree = 4: one must divide the other",
        ),
        (
            Strategy(pp=3, micro_batch_num=3),
            {},
            64,
            "num_hidden_layers = 32 is not divisible by pp = 3; choose another pp, or say with pipeline_layers how "
            "many each stage has, for example [11, 11, 10]",
        ),
        (Strategy(pp=4, micro_batch_num=4), {"num_hidden_layers": 3}, 64, "num_hidden_layers = 3 is below pp = 4"),
        (
            Strategy(pp=2, micro_batch_num=2, pipeline_layers=(16, 15)),
            {},
            64,
            "pipeline_layers = [16, 15] are 31 layers; expected num_hidden_layers = 32",
        ),
        (Strategy(cp=4, ring_degree=4), {}, 60, "sequence length = 60 is not divisible by 2 x cp = 8 (a causal ring"),
        (
            Strategy(cp=4, ulysses_degree=4, attention_mode="ulysses"),
            {},
            62,
            "sequence length = 62 is not divisible by cp = 4",
        ),
        (
            Strategy(mp=4, cp=2, ring_degree=2, sequence_parallel=True),
            {},
            12,
            "batch size 3 x sequence length 12 / cp 2 = 18 is not divisible by mp = 4 (sequence parallel)",
        ),
    ],
)
def test_models_that_cannot_be_split(
    strategy: Strategy, changes: dict[str, Any], seq_length: int, expected: str
) -> None:
    model = LlamaConfig(**changes)
    assert refusal(strategy.check_model, model, seq_length, 3).startswith(expected)


def test_the_advice_for_layers_is_accepted() -> None:
    for layers, stages in ((32, 3), (30, 4), (81, 8), (5, 4)):
        model = LlamaConfig(num_hidden_layers=layers)
        message = refusal(Strategy(pp=stages, micro_batch_num=stages).check_model, model, 8, 1)
        advice = tuple(int(word) for word in message[message.rindex("[") + 1 : -1].split(", "))
        strategy = Strategy(pp=stages, micro_batch_num=stages, pipeline_layers=advice)
        strategy.check_model(model, 8, 1)
        assert strategy.stage_layers(layers) == advice and max(advice) - min(advice) == 1


# -- devices


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mp": 2, "pp": 2}, "parallel.mp: 2 cannot run on CPU"),
        ({"pp": 2}, "parallel.pp: 2 cannot run on CPU"),
        ({"optimizer_shard": True, "dp": 2}, "parallel.optimizer_shard: true cannot run on CPU"),
    ],
)
def test_what_only_ascend_can_do(keys: dict[str, Any], expected: str) -> None:
    section = ParallelConfig(**keys)
    message = refusal(check_device, section, "CPU")
    assert message.startswith(expected) and "'ms-longctx dryrun'" in message
    check_device(section, "Ascend")


def test_what_every_device_can_do() -> None:
    check_device(ParallelConfig(dp=2, cp=4, attention_mode="hybrid", ulysses_degree=2, vocab_parallel=True), "CPU")


def test_no_mindspore() -> None:
    program = "import sys, ms_longctx.parallel.strategy; sys.exit('mindspore' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0
