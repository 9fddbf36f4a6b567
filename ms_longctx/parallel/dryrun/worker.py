# SPDX-License-Identifier: Apache-2.0
"""One simulated rank: builds and compiles the training program and writes down what it took.

    python -m ms_longctx.parallel.dryrun.worker REQUEST.json RESULT.json

The environment makes this process a rank of a simulated cluster
(:meth:`ms_longctx.parallel.virtual_cluster.Simulator.environment`). The result is written after the compilation and
again after the simulated step, so that a crash in between loses nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ms_longctx.config import RunConfig, load_config
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.dryrun.graph_file import find_graph_file, read_graph_file
from ms_longctx.parallel.strategy import Strategy

PROGRAM = "ms_longctx.parallel.program:compile_program"
REFUSED = 2  # exit code: this package itself says that the run cannot be
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FIRST_AND_SETTLED = 2  # steps: the first one allocates, in the second the optimizer state is there already


@dataclass
class Request:
    """What a worker compiles.

    Args:
        run: path of the configuration (YAML).
        strategy: fields of the :class:`Strategy`.
        rank: this worker's.
        graphs: directory where MindSpore saves its graphs.
        program: ``module:function`` that compiles; called with the run and the strategy.
    """

    run: str
    strategy: dict[str, Any]
    rank: int
    graphs: str
    program: str = PROGRAM


@dataclass
class Result:
    """What a worker found.

    Args:
        compile_seconds: building and compiling the program.
        full_shapes: parameter -> its shape before it was split.
        groups: name of each communication group in the program -> its ranks.
        memory_bytes: peak of MindSpore's simulated allocator over two steps; ``None`` until they are simulated.
        host_bytes: peak of this process's own memory.
    """

    compile_seconds: float
    full_shapes: dict[str, list[int]]
    groups: dict[str, list[int]] = field(default_factory=dict)
    memory_bytes: int | None = None
    host_bytes: int = 0

    def write(self, path: Path) -> None:
        """Replace the file in one go."""
        self.host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.__dict__))
        partial.replace(path)


def main(request_path: str, result_path: str) -> None:
    """Do what the request says."""
    # Compiling takes minutes: this process must not outlive a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = Request(**json.loads(Path(request_path).read_text()))
    run = load_config(request.run)
    strategy = Strategy(**request.strategy)
    result = _compile(request, run, strategy, Path(result_path))
    result.write(Path(result_path))


def _compile(request: Request, run: RunConfig, strategy: Strategy, path: Path) -> Result:
    import mindspore as ms

    module, _, function = request.program.partition(":")
    start = time.perf_counter()
    program = getattr(importlib.import_module(module), function)(run, strategy)
    result = Result(time.perf_counter() - start, {name: list(shape) for name, shape in program.full_shapes.items()})
    graph = read_graph_file(find_graph_file(Path(request.graphs), request.rank))
    names = {execution.operator.group for execution in graph.communication()}
    result.groups = {name: _group_ranks(name, strategy.worker_num) for name in sorted(names)}
    result.write(path)
    _start_from_zero(program.cell)
    for _ in range(_FIRST_AND_SETTLED):
        program.step()
    ms.runtime.synchronize()
    result.memory_bytes = int(ms.runtime.max_memory_allocated())
    return result


def _group_ranks(name: str, worker_num: int) -> list[int]:
    from mindspore.communication import GlobalComm, get_process_group_ranks

    # Of the group of all workers a simulation knows only the name.
    everyone = list(range(worker_num))
    return everyone if name == GlobalComm.WORLD_COMM_GROUP else list(get_process_group_ranks(name))


def _start_from_zero(cell: Any) -> None:
    """Let parameters without values start from zeros: drawing random numbers takes longer than compiling."""
    from mindspore.common.initializer import Zero

    for parameter in cell.get_parameters():
        if parameter.has_init:
            parameter.init_mode.init = Zero()


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
        code = 0
    except MsLongctxError:
        traceback.print_exc()
        code = REFUSED
    # The exit of a simulated process takes seconds and may crash; all it would free is not real.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
