# SPDX-License-Identifier: Apache-2.0
"""One rank of bench_collectives.py: ``collectives_worker.py IMPLEMENTATION MEGABYTES REPETITIONS``, under msrun.

Rank 0 writes ``result.json``: for each collective the milliseconds of every repetition.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

IMPLEMENTATION, MEGABYTES, REPETITIONS = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
COUNT = int(MEGABYTES * 2**20) // 4 // 840 * 840  # float32, divided evenly by up to 8 ranks
Collectives = dict[str, Callable[[], None]]


def ours() -> tuple[int, Collectives]:
    """This package's operators in graph mode."""
    import mindspore as ms

    from ms_longctx.parallel import collectives
    from ms_longctx.parallel.world import join_world

    ms.set_device("CPU")
    world = join_world("CPU")
    group = world.group()
    return world.rank, _graphs(
        all_reduce=collectives.make_all_reduce(group),
        all_gather=collectives.make_all_gather(group),
        reduce_scatter=collectives.make_reduce_scatter(group),
        all_to_all=collectives.make_all_to_all(group, 0, 0),
        ring_shift=collectives.make_ring_shift(group),
    )


def mindspore() -> tuple[int, Collectives]:
    """MindSpore's own CPU operators in graph mode; it has no others."""
    import mindspore as ms
    from mindspore import communication, ops

    ms.set_device("CPU")
    communication.init()
    return communication.get_rank(), _graphs(all_reduce=ops.AllReduce(), all_gather=ops.AllGather())


def _graphs(**operators: Callable) -> Collectives:
    import mindspore as ms
    from mindspore import Tensor, nn

    class Call(nn.Cell):
        def __init__(self, operator: Callable) -> None:
            super().__init__()
            self.operator = operator

        def construct(self, x):
            return self.operator(x)

    ms.set_context(mode=ms.GRAPH_MODE)
    x = Tensor(np.ones(COUNT, np.float32))

    def make(operator: Callable) -> Callable[[], None]:
        net = Call(operator)

        def run() -> None:
            net(x)
            ms.runtime.synchronize()

        return run

    return {name: make(operator) for name, operator in operators.items()}


def gloo() -> tuple[int, Collectives]:
    """torch.distributed with gloo over loopback, one thread a process like the others."""
    import torch
    from torch import distributed

    rank, size = int(os.environ["MS_NODE_ID"]), int(os.environ["MS_WORKER_NUM"])
    torch.set_num_threads(1)
    port = int(os.environ["MS_SCHED_PORT"]) + 1
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    x = torch.ones(COUNT)
    joined = torch.empty(COUNT * size)
    return rank, {
        "all_reduce": lambda: distributed.all_reduce(x),
        "all_gather": lambda: distributed.all_gather_into_tensor(joined, x),
    }


def main() -> int:
    if os.environ.get("MS_ROLE") == "MS_SCHED" and IMPLEMENTATION != "mindspore":
        return 0
    rank, collectives = {"ours": ours, "mindspore": mindspore, "gloo": gloo}[IMPLEMENTATION]()
    results: dict[str, list[float]] = {}
    for name, run in collectives.items():
        for _ in range(3):
            run()
        results[name] = []
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            run()
            results[name].append(1e3 * (time.perf_counter() - start))
    if rank == 0:
        Path("result.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
