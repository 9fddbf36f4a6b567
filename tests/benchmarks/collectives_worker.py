# SPDX-License-Identifier: Apache-2.0
"""One rank of bench_collectives.py: ``collectives_worker.py MEGABYTES REPETITIONS``, under msrun.

All implementations live in the same processes and take turns, so that what else the machine does meets them alike.
Rank 0 writes ``result.json``: ``{collective: {implementation: [milliseconds of each repetition]}}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops

from ms_longctx.parallel import collectives
from ms_longctx.parallel.world import World, join_world

MEGABYTES, REPETITIONS = float(sys.argv[1]), int(sys.argv[2])
COUNT = int(MEGABYTES * 2**20) // 4 // 840 * 840  # float32, divided evenly by up to 8 ranks
WARM_UP = 3
Runs = dict[str, Callable[[], None]]


class Call(nn.Cell):
    def __init__(self, operator: Callable) -> None:
        super().__init__()
        self.operator = operator

    def construct(self, x):
        return self.operator(x)


def in_graph_mode(operators: dict[str, Callable]) -> Runs:
    x = Tensor(np.ones(COUNT, np.float32))

    def make(operator: Callable) -> Callable[[], None]:
        net = Call(operator)

        def run() -> None:
            net(x)
            ms.runtime.synchronize()

        return run

    return {name: make(operator) for name, operator in operators.items()}


def ours(world: World) -> Runs:
    group = world.group()
    return in_graph_mode(
        {
            "all_reduce": collectives.make_all_reduce(group),
            "all_gather": collectives.make_all_gather(group),
            "reduce_scatter": collectives.make_reduce_scatter(group),
            "all_to_all": collectives.make_all_to_all(group, 0, 0),
            "ring_shift": collectives.make_ring_shift(group),
        }
    )


def mindspore() -> Runs:
    """MindSpore has no other collectives on a CPU."""
    return in_graph_mode({"all_reduce": ops.AllReduce(), "all_gather": ops.AllGather()})


def gloo(world: World) -> Runs:
    """torch.distributed with gloo over loopback, one thread a process like the others."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{int(os.environ['MS_SCHED_PORT']) + 1}"
    distributed.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    x, joined = torch.ones(COUNT), torch.empty(COUNT * world.size)
    return {
        "all_reduce": lambda: distributed.all_reduce(x),
        "all_gather": lambda: distributed.all_gather_into_tensor(joined, x),
    }


def milliseconds(run: Callable[[], None], barrier: Callable[[], None]) -> float:
    barrier()
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def main() -> int:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    communication.init()  # for MindSpore's own collectives, which need msrun's scheduler
    world = join_world("CPU")
    implementations = {"ours": ours(world), "mindspore": mindspore(), "gloo": gloo(world)}
    results: dict[str, dict[str, list[float]]] = {}
    for name in implementations["ours"]:
        runs = {implementation: known[name] for implementation, known in implementations.items() if name in known}
        results[name] = {implementation: [] for implementation in runs}
        for repetition in range(-WARM_UP, REPETITIONS):
            for implementation, run in runs.items():
                taken = milliseconds(run, world.barrier)
                if repetition >= 0:
                    results[name][implementation].append(taken)
    if world.rank == 0:
        Path("result.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
