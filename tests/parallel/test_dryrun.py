# SPDX-License-Identifier: Apache-2.0
"""The dry run: reading compiled programs, comparing ranks, extrapolating, and the real thing on a small program."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ms_longctx.cli.main import main
from ms_longctx.config import RunConfig, load_config
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel import virtual_cluster
from ms_longctx.parallel.dryrun import communication, report
from ms_longctx.parallel.dryrun.communication import Message, Traffic, collectives, messages, summarize, total_sent
from ms_longctx.parallel.dryrun.extrapolate import Amounts, cut, extrapolate
from ms_longctx.parallel.dryrun.graph_file import CompiledGraph, GraphFileError, TensorType, read_graph_file
from ms_longctx.parallel.dryrun.match import RankTraffic, match
from ms_longctx.parallel.dryrun.ranks import describe_group, format_ranks, rank_classes, select_ranks
from ms_longctx.parallel.dryrun.simulate import DryRun, dry_run
from ms_longctx.parallel.strategy import Strategy

HERE = Path(__file__).resolve().parent
needs_compiler = pytest.mark.skipif(
    not virtual_cluster.has_cann() and virtual_cluster.missing_reason() is not None,
    reason=virtual_cluster.missing_reason() or "",
)

# Cut from graphs that MindSpore 2.10 wrote: a pipeline stage that calls its forward and backward twice, a branch and
# a loop.
GRAPH = """\
# IR entry: @9_step_9
%para1_args0: <Tensor[Int32], (8, 512)> : [8, 512]
%para2_w: <Ref[Tensor[BFloat16]], (256, 12), ref_key=layers.0.w, is_parameter, is_inplace>  :  has_default
%para3_lr: <Ref[Tensor[Float32]], (), ref_key=lr, is_parameter>  :  has_default

subgraph attr:
subgraph @1_▸net_1(%para4_x) {
  %0(a) = PrimFunc_Mul(%para4_x, %para4_x) {instance name: mul} primitive_attrs: {in_strategy: ((2, 4), (2, 4))}
      : (<Tensor[BFloat16], (4, 8)>, <Tensor[BFloat16], (4, 8)>) -> (<Tensor[BFloat16], (4, 8)>)
  %1(b) = AllReduce(%0) {instance name: r} primitive_attrs: {comm_reuse: Bool(1), group: "mp", op: "sum", \
rank_list: (4, 5), index: I64(0)} cnode_primal_attrs: {unique_id: "36399", group: "other"}
      : (<Tensor[BFloat16], (4, 8)>) -> (<Tensor[BFloat16], (4, 8)>)
  %2(c) = Partial(@2_◂net_2, %1)
      : (<Func, NoShape>, <Tensor[BFloat16], (4, 8)>) -> (<Func, NoShape>)
}
subgraph @2_◂net_2(%para5_x) {
  %0(a) = PrimFunc_AlltoAll(%para5_x) primitive_attrs: {group: "cp", split_count: I64(2), rank_list: (0, 1, 2, 3)}
      : (<Tensor[Float32], (3, 5)>) -> (<Tensor[Float32], (3, 5)>)
}
subgraph @9_step_9() {
  %1(x) = call @1_▸net_1(%para2_w)
      : (<Ref[Tensor[BFloat16]], (256, 12), ref_key=w>) -> (<Tensor[BFloat16], (4, 8)>)
  %2(y) = call @1_▸net_1(%1)
      : (<Tensor[BFloat16], (4, 8)>) -> (<Tuple[Tensor[BFloat16],Func], TupleShape((4, 8), NoShape)>)
  %3(z) = %2[@Partial(@2_◂net_2)](%1, UMonad[U]) cnode_attrs: {micro: I64(0)}
      : (<Tensor[BFloat16], (4, 8)>) -> (<Tensor[BFloat16], (4, 8)>)
  %4(z) = %2[@@2_◂net_2](%3)
      : (<Tensor[BFloat16], (4, 8)>) -> (<Tensor[BFloat16], (4, 8)>)
  %5(s) = Send(%4) primitive_attrs: {shape: [4, 8], dest_rank: I64(1), dst_global_rank: I64(13), group: "pp", \
sr_tag: I64(1), dtype: BF16} cnode_primal_attrs: {order: I64(1)}
      : (<Tensor[BFloat16], (4, 8)>) -> (<Tensor[BFloat16], (4, 8)>)
  %6(r) = Receive(%5) primitive_attrs: {shape: [4, 8], group: "pp", src_rank: I64(1), src_global_rank: I64(13), \
sr_tag: I64(0), dtype: F32}
      : (<Tensor[BFloat16], (), value=...>) -> (<Tensor[Float32], (4, 8)>)
  %7(n) = NeighborExchange(%6) primitive_attrs: {recv_shapes: ([2, 3]), group: "cp", recv_rank_ids: [0], \
send_rank_ids: [3, 2], recv_type: F16, send_shapes: ((2, 3), (4))}
      : (<Tuple[Tensor[Float16]*2], TupleShape((2, 3), (4))>) -> (<Tuple[Tensor[Float16]], TupleShape((2, 3))>)
  %8(b) = %7[@FuncUnion(@3_if_3, @4_loop_4)]()
      : () -> (<Tensor[Float32], (4, 8)>)
  %9(u) = %8(%7)
      : () -> (<Tensor[Float32], (4, 8)>)
}
subgraph @3_if_3() {
  %1(g) = AllGather(%0) primitive_attrs: {group: "dp"}
      : (<Ref[Tensor[Int8]], (7), ref_key=w, is_parameter>) -> (<Tensor[Int8], (14)>)
}
subgraph @4_loop_4() {
  %1(x) = call @4_loop_4(%0)
      : () -> (<Tensor[Float32], (4, 8)>)
  %2(g) = Mystery(%0) primitive_attrs: {group: "dp"}
      : (<Tensor[Int8], (7)>) -> (<Tensor[Int8], (7)>)
}
"""
GROUPS = {"mp": (4, 5), "cp": (1, 5, 9, 7), "pp": (5, 13), "dp": (5, 7)}


@pytest.fixture
def graph(tmp_path: Path) -> CompiledGraph:
    path = tmp_path / "21_validate_0001.ir"
    path.write_text(GRAPH)
    return read_graph_file(path)


def test_graph_counts_executions(graph: CompiledGraph) -> None:
    found = {(e.operator.name, e.operator.group): (e.times, e.exact) for e in graph.communication()}
    assert found == {
        ("Send", "pp"): (1, True),
        ("Receive", "pp"): (1, True),
        ("NeighborExchange", "cp"): (1, True),
        ("AllReduce", "mp"): (2, True),
        ("AlltoAll", "cp"): (2, True),
        ("AllGather", "dp"): (1, False),
        ("Mystery", "dp"): (1, False),
    }
    assert graph.parameters == {"layers.0.w": TensorType("BFloat16", (256, 12)), "lr": TensorType("Float32", ())}
    assert graph.unknown_calls == 1


def test_traffic_of_a_graph(graph: CompiledGraph) -> None:
    """Bytes by hand: 4*8 bf16 = 64, 3*5 fp32 = 60, 2*3 + 4 fp16 = 20, 4*8 fp32 = 128."""
    rows = {row.operator: row for row in summarize(graph, GROUPS)}
    expected = {
        "AllReduce": (2 * 64, 2 * 64),  # 2 (n - 1) / n of 64, twice
        "AlltoAll": (2 * 60, 2 * 45),  # three quarters
        "Send": (64, 64),
        "Receive": (128, 0),
        "NeighborExchange": (20, 20),
        "AllGather": (7, 7),
        "Mystery": (7, None),
    }
    assert {name: (row.operand_bytes, row.sent_bytes) for name, row in rows.items()} == expected
    assert total_sent(list(rows.values())) is None
    del rows["Mystery"]
    assert total_sent(list(rows.values())) == 128 + 90 + 64 + 20 + 7


def test_messages_of_a_graph(graph: CompiledGraph) -> None:
    sent, received = messages(graph, 5, GROUPS)
    ring = "ring of 1, 5, 9, 7"
    assert sent == [
        Message(5, 13, "tag 1", TensorType("BFloat16", (4, 8)), 1),
        Message(5, 7, ring, TensorType("Float16", (2, 3)), 1),
        Message(5, 9, ring, TensorType("Float16", (4,)), 1),
    ]
    assert received == [
        Message(13, 5, "tag 0", TensorType("Float32", (4, 8)), 1),
        Message(1, 5, ring, TensorType("Float16", (2, 3)), 1),
    ]
    assert set(collectives(graph, GROUPS)) == {
        ("AllReduce", (4, 5), TensorType("BFloat16", (4, 8))),
        ("AlltoAll", (1, 5, 9, 7), TensorType("Float32", (3, 5))),
        ("AllGather", (5, 7), TensorType("Int8", (7,))),
        ("Mystery", (5, 7), TensorType("Int8", (7,))),
    }


def test_unknown_formats(tmp_path: Path, graph: CompiledGraph) -> None:
    path = tmp_path / "x.ir"
    path.write_text("subgraph @1() {\n}\n")
    with pytest.raises(GraphFileError, match="after its pass 'validate'"):
        read_graph_file(path)
    with pytest.raises(GraphFileError, match="group 'mp', which is not known"):
        summarize(graph, {name: ranks for name, ranks in GROUPS.items() if name != "mp"})
    with pytest.raises(GraphFileError, match="Float4"):
        _ = TensorType("Float4", (3,)).nbytes


@pytest.mark.parametrize(
    ("operator", "expected"),
    [("AllReduce", 1500), ("AllGather", 3000), ("ReduceScatter", 750), ("AlltoAll", 750), ("Broadcast", 1000)],
)
def test_sent_bytes(operator: str, expected: int) -> None:
    """Groups of 4 and an input of 1000 bytes, against the formulas for large messages; alone nothing is sent."""
    assert communication._SENT[operator](1000, 4) == expected
    assert communication._SENT[operator](1000, 1) == 0


MIXED = Strategy(
    dp=2, mp=2, pp=2, cp=4, attention_mode="hybrid", ulysses_degree=2, ring_degree=2, micro_batch_num=2
)  # fmt: skip


def test_rank_classes() -> None:
    """Of 32 ranks those with the same place but for dp are one class; every rank is in exactly one."""
    classes = rank_classes(MIXED, select_ranks("classes", MIXED))
    assert [known.rank for known in classes] == [*range(8), *range(16, 24)]
    assert sorted(rank for known in classes for rank in known.ranks) == list(range(32))
    assert rank_classes(MIXED, [9, 1, 20])[0].rank == 9 and rank_classes(MIXED, [9, 1, 20])[0].ranks == (1, 9)
    assert select_ranks("stages", MIXED) == (0, 16)
    assert select_ranks(" 3, 8-10,3", MIXED) == (3, 8, 9, 10)
    for wrong, text in (("x", "'x' in 'x' is no rank"), ("5-3", "is no rank"), ("32", "rank 32 does not exist")):
        with pytest.raises(MsLongctxError, match=text):
            select_ranks(wrong, MIXED)


def test_group_names() -> None:
    names = {
        (0, 1): "mp", (0, 2): "ulysses", (0, 4): "ring", (0, 2, 4, 6): "cp", (0, 8): "dp", (0, 16): "pp",
        (0, 1, 8, 9): "dp x mp", (0, 2, 4, 6, 8, 10, 12, 14): "dp x cp", tuple(range(32)): "world", (3,): "itself",
        (0, 2, 4): "cp (3 of 4)",
    }  # fmt: skip
    assert {group: describe_group(MIXED, group) for group in names} == names
    assert describe_group(Strategy(cp=4, ring_degree=4), (0, 1)) == "cp (2 of 4)"
    texts = {(0,): "0", (0, 1): "0, 1", (0, 1, 2, 5): "0-2, 5", (0, 4, 8, 12, 16): "0, 4, .. 16", (3, 1): "3, 1"}
    assert {ranks: format_ranks(ranks) for ranks in texts} == texts


def test_sizes() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 1000 << 20: "1000 MiB", 3 << 29: "1.50 GiB"}
    assert {size: report._bytes(size) for size in texts} == texts


def test_match() -> None:
    """Two stages of two copies: what fits, and each way in which it does not."""
    strategy = Strategy(dp=2, pp=2, micro_batch_num=2)
    classes = rank_classes(strategy, [0, 2])
    tensor, other = TensorType("BFloat16", (4, 8)), TensorType("BFloat16", (4, 9))
    forward, backward = Message(0, 2, "tag 0", tensor, 2), Message(2, 0, "tag 0", tensor, 2)
    both = {("AllReduce", (0, 2), tensor): 3}

    def problems(first: RankTraffic, second: RankTraffic) -> list[str]:
        return match(strategy, classes, {0: first, 2: second}).problems

    good = match(
        strategy, classes, {0: RankTraffic([forward], [backward], both), 2: RankTraffic([backward], [forward], both)}
    )
    assert (good.messages, good.unchecked_messages, good.collectives, good.problems) == (4, 0, 3, [])
    assert problems(RankTraffic([forward], [], {}), RankTraffic([], [], {})) == [
        "rank 0 sends BFloat16[4, 8] to rank 2 (tag 0, 2 a step), which does not receive it"
    ]
    assert problems(RankTraffic([], [backward], {}), RankTraffic([], [], {})) == [
        "rank 0 waits for BFloat16[4, 8] from rank 2 (tag 0, 2 a step), which does not send it"
    ]
    wrong_shape = Message(0, 2, "tag 0", other, 2)
    assert len(problems(RankTraffic([forward], [], {}), RankTraffic([], [wrong_shape], {}))) == 2
    assert problems(RankTraffic([], [], both), RankTraffic([], [], {("AllReduce", (0, 2), tensor): 1})) == [
        "rank 0 runs AllReduce of BFloat16[4, 8] 2 times more than rank 2, in the group 0, 2"
    ]
    across = Message(0, 3, "tag 0", tensor, 1)
    assert "of another copy" in problems(RankTraffic([across], [], {}), RankTraffic([], [], {}))[0]
    alone = match(strategy, rank_classes(strategy, [0]), {0: RankTraffic([forward], [], {})})
    assert (alone.messages, alone.unchecked_messages, alone.problems) == (0, 2, [])


def test_extrapolation() -> None:
    """The line through 2 and 3 layers at 10; what only the larger program has starts from nothing."""

    def amounts(layers: int, *rows: Traffic, memory: int | None = None) -> Amounts:
        return Amounts(layers, {"weights": 100 + 7 * layers}, list(rows), memory)

    few = amounts(2, Traffic("AllReduce", (0, 1), 5, True, 50, 40), memory=1000)
    more = amounts(
        3,
        Traffic("AllReduce", (0, 1), 7, True, 60, 45),
        Traffic("AllGather", (0, 1), 1, True, 8, 8),
        Traffic("Mystery", (0, 1), 1, True, 8, None),
        memory=1100,
    )
    full = extrapolate(few, more, 10)
    assert full == Amounts(
        10,
        {"weights": 170},
        [
            Traffic("AllReduce", (0, 1), 21, True, 130, 80),
            Traffic("AllGather", (0, 1), 8, True, 64, 64),
            Traffic("Mystery", (0, 1), 8, True, 64, None),
        ],
        1800,
    )
    assert extrapolate(dataclasses.replace(few, memory_bytes=None), more, 10).memory_bytes is None


def test_layers_that_cannot_stand_for_all() -> None:
    strategy = Strategy(pp=2, micro_batch_num=2, pipeline_layers=(15, 17))
    assert cut(strategy, 4, 32) == (Strategy(pp=2, micro_batch_num=2), 2)
    for layers in (2, 5, 32, 34):
        with pytest.raises(
            MsLongctxError, match=f"--layers: {layers} cannot stand for 32 .*multiple of 2 from 4 to 31"
        ):
            cut(strategy, layers, 32)


class SmallDevice(virtual_cluster.Simulator):
    """A cluster of devices with a mebibyte each."""

    device_bytes = 1 << 20  # type: ignore[assignment]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of six layers, whose programs are those of ``dryrun_program.py``."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return load_config("llama-tiny", ["--model.num_hidden_layers=6"])


def compile_small(
    run: RunConfig, strategy: Strategy, ranks: list[int], folder: Path, layers: int | None = None, program: str = ""
) -> DryRun:
    simulator = virtual_cluster.prepare()
    name = f"dryrun_program:{program or 'compile_program'}"
    return dry_run(run, strategy, ranks, simulator, folder, layers, lambda line: None, name)


@pytest.mark.slow
@needs_compiler
def test_pipeline_program(small: RunConfig, tmp_path: Path) -> None:
    """dp 2, mp 2, pp 2, two micro batches: everything that can be said by hand is found."""
    strategy = Strategy(dp=2, mp=2, pp=2, micro_batch_num=2)
    dry = compile_small(small, strategy, [0, 4], tmp_path)
    assert [known.failure for known in dry.classes] == [None, None]
    hidden, wide, layers, rows = small.model.hidden_size, small.model.intermediate_size, 3, 4
    weights = layers * 2 * hidden * (wide // strategy.mp) * 4
    activation = rows * hidden * 4
    for known in dry.classes:
        amounts = known.compiled
        assert amounts is not None and amounts.parameters["weights"] == weights
        assert amounts.parameters["accumulated gradients"] == weights
        assert 2 * weights <= amounts.parameters["optimizer state"] < 2 * weights + 100
        assert amounts.memory_bytes is not None and amounts.memory_bytes > 4 * weights
        along = {(row.operator, describe_group(strategy, row.ranks)): row for row in amounts.traffic}
        # Megatron: one sum forward and one backward a layer and micro batch.
        assert along["AllReduce", "mp"].times == 2 * 2 * layers
        assert along["AllReduce", "mp"].operand_bytes == 2 * 2 * layers * activation
        assert along["AllReduce", "dp"].operand_bytes >= weights
        assert along["Send", "pp"].operand_bytes == along["Receive", "pp"].operand_bytes == 2 * activation
    assert (dry.match.messages, dry.match.problems, dry.failed) == (4, [], False)
    text = report.as_text(dry)
    assert "DOES NOT FIT" not in text
    small_device = dataclasses.replace(dry, simulator=SmallDevice(dry.simulator.root))
    assert report.as_text(small_device).count("DOES NOT FIT: rank ") == 2
    assert "layers.*.up" in text and f"[{hidden}, {wide // 2}]" in text and "point to point: 4 messages" in text
    data = json.loads(json.dumps(report.as_data(dry)))
    shapes = {row["name"]: (row["full_shape"], row["shape"]) for row in data["rank_classes"][1]["parameters"]}
    assert shapes["layers.3.down"] == ([wide, hidden], [wide // 2, hidden])


@pytest.mark.slow
@needs_compiler
def test_extrapolated_is_compiled(small: RunConfig, tmp_path: Path) -> None:
    """Two and three layers, extrapolated to six, against all six compiled: equal; memory within 2%."""
    strategy = Strategy(dp=2, mp=2)
    short = compile_small(small, strategy, [1], tmp_path / "short", layers=3).classes[0]
    full = compile_small(small, strategy, [1], tmp_path / "full").classes[0]
    assert short.compiled is not None and short.compiled.layers == 3
    assert short.extrapolated is not None and full.compiled is not None
    # The optimizer's own scalars do not grow with the layers, all else does.
    assert short.extrapolated.parameters == full.compiled.parameters
    assert short.extrapolated.traffic == full.compiled.traffic
    assert full.compiled.memory_bytes is not None
    assert short.extrapolated.memory_bytes == pytest.approx(full.compiled.memory_bytes, rel=0.02)


@pytest.mark.slow
@needs_compiler
def test_ring_of_ranks(tmp_path: Path) -> None:
    """The training program of both places of a ring, whose masks differ: what one sends the other receives."""
    overrides = ["--model.num_hidden_layers=1", "--train.dtype=bf16", "--train.batch_size=1"]
    run = load_config("llama-tiny", overrides)
    strategy = Strategy(cp=2, ring_degree=2)
    dry = dry_run(run, strategy, [0, 1], virtual_cluster.prepare(), tmp_path, None, lambda line: None)
    assert [known.failure for known in dry.classes] == [None, None]
    # A place sends K and V forward and backward, and their gradients onwards and home.
    assert (dry.match.messages, dry.match.unchecked_messages, dry.match.problems) == (2 * 4, 0, [])


@pytest.mark.slow
@needs_compiler
def test_failures(small: RunConfig, tmp_path: Path) -> None:
    """A rejection, a crash of the compiler and a step that cannot be simulated: each in one line, no traceback."""
    strategy = Strategy(dp=2, mp=2)
    wrong = compile_small(small, strategy, [0], tmp_path / "wrong", program="compile_wrong")
    failure = wrong.classes[0].failure
    assert failure is not None and failure.startswith("[ERROR] PARALLEL: MatMul") and "\n" not in failure
    assert wrong.failed and wrong.classes[0].compiled is None and wrong.classes[0].result.log.is_file()
    assert "does not compile" in report.as_text(wrong)
    crash = compile_small(small, strategy, [0], tmp_path / "crash", program="compile_crash")
    assert crash.classes[0].failure == "the compiler crashed (SIGFPE): no error line in its log"
    unsimulated = compile_small(small, strategy, [0], tmp_path / "step", program="compile_without_step")
    known = unsimulated.classes[0]
    assert known.failure is None and known.compiled is not None and known.compiled.memory_bytes is None
    assert known.result.memory_failure == "RuntimeError: 'no memory model for this operator'"
    assert "memory: not simulated: RuntimeError" in report.as_text(unsimulated) and not unsimulated.failed
    with pytest.raises(MsLongctxError, match="^lora.enabled: adapters are not split$"):
        compile_small(small, strategy, [0, 1], tmp_path / "refused", program="compile_refused")


@pytest.mark.slow
@needs_compiler
def test_killed_parent(small: RunConfig, tmp_path: Path) -> None:
    """A dry run that is killed takes the process that compiles with it."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small.as_dict()))
    code = (
        "import sys; from pathlib import Path; from ms_longctx.config import load_config; "
        "from ms_longctx.parallel import virtual_cluster; from ms_longctx.parallel.strategy import Strategy; "
        "from ms_longctx.parallel.dryrun.launch import compile_rank; "
        "compile_rank(load_config('run.yaml'), Strategy(dp=2), 0, virtual_cluster.prepare(), Path('rank').absolute(), "
        "'dryrun_program:compile_forever')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1])))}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    note = tmp_path / "rank" / "worker.pid"
    try:
        wait_until(lambda: note.exists() and note.read_text() != "" or parent.poll() is not None)
        worker = Path("/proc") / note.read_text()
        assert worker.exists()
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not worker.exists() or "State:\tZ" in (worker / "status").read_text())


def wait_until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Until something holds; fails after a while."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.mark.slow
@needs_compiler
def test_command_line(tmp_path: Path) -> None:
    """The real training program of a tiny Llama on four devices; the report is valid JSON too."""
    (tmp_path / "strategy.json").write_text('{"dp": 2, "mp": 2, "sp": 2}')
    command = [sys.executable, "-m", "ms_longctx.cli.main", "dryrun", "--config", "llama-tiny", "--worker_num", "4"]
    command += ["--parallel_config", "strategy.json", "--layers", "2", "--ranks", "3", "--json", "out.json"]
    command += ["--train.dtype", "bf16"]
    environment = virtual_cluster.Simulator(None).environment(0, 1)
    for name in ("RANK_ID", "RANK_SIZE", "MS_SIMULATION_LEVEL"):
        del environment[name]
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3     1, 3" in done.stdout and "extrapolated to" in done.stdout and "ReduceScatter" in done.stdout
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["layers"] == {"model": data["run"]["model"]["num_hidden_layers"], "compiled": [1, 2]}
    assert data["rank_classes"][0]["compiled"]["memory_at_least"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "strategy.json"]


# Expected line -> configuration, strategy, workers, more arguments.
WRONG: dict[str, tuple[str, str, int, list[str]]] = {
    "dp 4 x mp 2 x pp 2 x cp 1 = 16, but the number of workers is 32": (
        "llama-7b-32k", '{"dp": 4, "mp": 2, "pp": 2}', 32, []
    ),
    "num_key_value_heads = 8 is below mp = 16": ("llama-70b", '{"mp": 16, "dp": 2}', 32, []),
    "num_attention_heads = 32 is not divisible by mp = 3": ("llama-7b-32k", '{"mp": 3}', 3, []),
    "sp = 4 must be 1 or mp = 2": ("llama-7b-32k", '{"dp": 8, "mp": 2, "sp": 4, "pp": 2}', 32, []),
    "num_hidden_layers = 80 is not divisible by pp = 32": ("llama-70b", '{"pp": 32}', 32, []),
    "sequence length = 32768 is not divisible by 2 x cp = 6": ("llama-7b-32k", '{"cp": 3}', 3, []),
    "vocab_size = 32001 is not divisible by mp = 2 (vocab_parallel)": (
        "llama-7b-32k", '{"mp": 2, "vocab_parallel": true}', 2, ["--model.vocab_size", "32001"]
    ),
    "ulysses_degree = 8 must divide cp = 4": ("llama-7b-32k", '{"cp": 4, "dp": 8, "ulysses_degree": 8}', 32, []),
    "num_attention_heads 32 / mp 2 = 16 must be divisible by ulysses_degree = 32": (
        "llama-7b-32k", '{"cp": 32, "mp": 2, "attention_mode": "ulysses"}', 64, []
    ),
    "micro_batch_num = 2 contradicts train.gradient_accumulation_steps = 16": (
        "llama-7b-32k", '{"dp": 8, "pp": 4, "micro_batch_num": 2}', 32, []
    ),
    "micro_batch_num = 2 is below pp = 4": (
        "llama-7b-32k", '{"pp": 4, "micro_batch_num": 2}', 4, ["--train.gradient_accumulation_steps", "1"]
    ),
    "rank 2 does not exist; expected 0 to 1": ("llama-7b-32k", '{"dp": 2}', 2, ["--ranks", "2"]),
    "parallel.mp: expected an integer, found 1.5": ("llama-7b-32k", '{"dp": 32, "mp": 1.5}', 32, []),
    "s.json:1: ": ("llama-7b-32k", '{"dp": 2,', 2, []),
    "train.dtype: fp32: attention on Ascend (FlashAttentionScore) takes fp16 or bf16": (
        "llama-7b-32k", '{"dp": 2}', 2, ["--train.dtype", "fp32"]
    ),
    "lora.lora_dropout: 0.1; expected 0": (
        "llama-7b-32k", '{"mp": 2}', 2, ["--lora.enabled", "true", "--lora.lora_dropout", "0.1"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("expected", WRONG)
def test_wrong_runs(
    expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be is refused in one line with the numbers, before anything is built."""
    monkeypatch.setenv("MS_LONGCTX_CACHE", str(tmp_path / "cache"))
    config, text, workers, more = WRONG[expected]
    (tmp_path / "s.json").write_text(text)
    arguments = ["dryrun", "--config", config, "--parallel_config", str(tmp_path / "s.json")]
    assert main([*arguments, "--worker_num", str(workers), *more]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and expected in errors[0]
    assert not (tmp_path / "cache").exists()


def test_command_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is refused before anything is built."""
    monkeypatch.setenv("MS_LONGCTX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "s.json").write_text('{"dp": 2, "mp": 2}')
    base = ["dryrun", "--config", "llama-tiny", "--parallel_config", str(tmp_path / "s.json"), "--train.dtype", "bf16"]
    cases = {
        "needs --config NAME_OR_FILE and --worker_num": base,
        "dp 2 x mp 2 x pp 1 x cp 1 = 4, but the number of workers is 6": [*base, "--worker_num", "6"],
        "rank 4 does not exist; expected 0 to 3": [*base, "--worker_num", "4", "--ranks", "4"],
        "--json: the directory of": [*base, "--worker_num", "4", "--json", str(tmp_path / "no/x.json")],
        "--layers: 1 cannot stand for": [*base, "--worker_num", "4", "--layers", "1"],
        "invalid int value: 'x'": [*base, "--worker_num", "x"],
    }
    for expected, arguments in cases.items():
        assert main(arguments) == 2
        assert expected in capsys.readouterr().err
    assert main(["dryrun", "--clean"]) == 0
    assert capsys.readouterr().out == "there is no stand-in for CANN\n"
    assert not (tmp_path / "cache").exists()
