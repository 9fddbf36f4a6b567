# SPDX-License-Identifier: Apache-2.0
"""A program under a launcher: ``world_worker.py TARGET SCENARIO``. Without MindSpore, as fast as Python starts."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.comm import Collective, Kind
from ms_longctx.parallel.world import World, join_world

TARGET, SCENARIO = sys.argv[1:]


def add_up(world: World) -> int:
    """The sum of rank + 1 over all ranks, the slow way round for rank 0."""
    if world.rank == 0:
        time.sleep(0.3)
    world.barrier()
    total = Collective(tuple(range(world.size)), Kind.ALL_REDUCE)(np.array([world.rank + 1], np.int32))
    return int(total[0])


def run(world: World) -> None:
    print(f"rank {world.rank} of {world.size} by {world.launcher}: {add_up(world)}", flush=True)
    if SCENARIO == "fail" and world.rank == 1:
        raise MsLongctxError("no more data")
    if SCENARIO == "crash" and world.rank == 1:
        raise ZeroDivisionError
    if SCENARIO == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while SCENARIO != "add":
        add_up(world)


def main() -> int:
    try:
        with join_world(TARGET, join_timeout=20.0) as world:
            run(world)
    except MsLongctxError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
