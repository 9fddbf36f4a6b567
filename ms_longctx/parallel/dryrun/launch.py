# SPDX-License-Identifier: Apache-2.0
"""Compiles ranks in processes of their own, so that a crash of the compiler is a result and not an end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

import ms_longctx
from ms_longctx.config import RunConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.dryrun import worker
from ms_longctx.parallel.dryrun.communication import Traffic, collectives, messages, summarize
from ms_longctx.parallel.dryrun.graph_file import CompiledGraph, TensorType, find_graph_file, read_graph_file
from ms_longctx.parallel.dryrun.match import RankTraffic
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.virtual_cluster import Simulator, failure_line


@dataclass(frozen=True)
class RankResult:
    """What is known of one rank after its compilation was tried.

    Args:
        rank: its number.
        log: path of everything that its process printed.
        seconds: from the start of the process to its end.
        failure: why it does not compile, one line; ``None`` if it does. All below is empty then.
        compile_seconds: building and compiling the program.
        parameters: name -> this rank's slice: weights, optimizer state, accumulated gradients.
        full_shapes: name -> shape before splitting, for the weights.
        traffic: communication a step.
        point_to_point: the same, to be compared with other ranks.
        memory_bytes: peak of MindSpore's simulated allocator, a lower bound; ``None`` with a reason in
            ``memory_failure``.
        unknown_calls: calls in the program whose target is not known; communication in it is not counted.
    """

    rank: int
    log: Path
    seconds: float
    failure: str | None = None
    compile_seconds: float = 0.0
    parameters: dict[str, TensorType] = dataclasses.field(default_factory=dict)
    full_shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    traffic: list[Traffic] = dataclasses.field(default_factory=list)
    point_to_point: RankTraffic | None = None
    memory_bytes: int | None = None
    memory_failure: str | None = None
    host_bytes: int = 0
    unknown_calls: int = 0


def compile_rank(
    run: RunConfig, strategy: Strategy, rank: int, simulator: Simulator, folder: Path, program: str = worker.PROGRAM
) -> RankResult:
    """Compile the program of one rank and simulate two steps of it.

    Args:
        run: checked configuration, its layer count cut already.
        strategy: how it is split.
        rank: which rank.
        simulator: of this machine.
        folder: empty or missing directory for configuration, graphs and log.
        program: ``module:function`` that compiles; see :mod:`.worker`.

    Raises:
        MsLongctxError: the program refuses this run, in words of this package; other ranks would say the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    graphs, log = folder / "graphs", folder / "log.txt"
    (folder / "run.yaml").write_text(yaml.safe_dump(run.as_dict()))
    request = worker.Request(str(folder / "run.yaml"), dataclasses.asdict(strategy), rank, str(graphs), program)
    (folder / "request.json").write_text(json.dumps(dataclasses.asdict(request)))
    result_path = folder / "result.json"
    environment = simulator.environment(rank, strategy.worker_num) | {
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(graphs),
        "MS_DEV_DUMP_IR_PASSES": "validate",
    }
    start = time.perf_counter()
    code = _run([worker.__name__, str(folder / "request.json"), str(result_path)], environment, folder, log)
    seconds = time.perf_counter() - start
    reason = failure_line(log.read_text(errors="replace"), code) if code else None
    if code == worker.REFUSED:
        raise MsLongctxError(str(reason))
    if not result_path.exists():
        return RankResult(rank, log, seconds, failure=reason or "its process ended without a result")
    found = worker.Result(**json.loads(result_path.read_text()))
    graph = read_graph_file(find_graph_file(graphs, rank))
    return _result(rank, log, seconds, found, graph, reason)


def _result(
    rank: int, log: Path, seconds: float, found: worker.Result, graph: CompiledGraph, reason: str | None
) -> RankResult:
    groups = {name: tuple(ranks) for name, ranks in found.groups.items()}
    sent, received = messages(graph, rank, groups)
    return RankResult(
        rank,
        log,
        seconds,
        compile_seconds=found.compile_seconds,
        parameters=graph.parameters,
        full_shapes={name: tuple(shape) for name, shape in found.full_shapes.items()},
        traffic=summarize(graph, groups),
        point_to_point=RankTraffic(sent, received, collectives(graph, groups)),
        memory_bytes=found.memory_bytes,
        memory_failure=reason if found.memory_bytes is None else None,
        host_bytes=found.host_bytes,
        unknown_calls=graph.unknown_calls,
    )


def _run(arguments: list[str], environment: dict[str, str], folder: Path, log: Path) -> int:
    """Exit code of a worker; the worker does not outlive this call."""
    # The worker runs in its own folder, because MindSpore writes files where it runs.
    sources = str(Path(ms_longctx.__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), sources)))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
