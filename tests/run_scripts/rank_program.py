# SPDX-License-Identifier: Apache-2.0
"""A program for msrun.sh and mpirun.sh: ``rank_program.py SCENARIO``. Joins as training does, without MindSpore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.comm import Collective, Kind
from ms_longctx.parallel.world import World, join_world


def run(world: World, scenario: str) -> int:
    total = Collective(tuple(range(world.size)), Kind.ALL_REDUCE)(np.array([world.rank + 1], np.int32))
    print(f"rank {world.rank} of {world.size} by {world.launcher}: {int(total[0])}", flush=True)
    print(f"devices {os.environ.get('ASCEND_RT_VISIBLE_DEVICES', '-')} arguments {sys.argv[2:]}", flush=True)
    if scenario == "fail" and world.rank == 1:
        print("rank 1 has no more data", flush=True)
        raise SystemExit(37)
    if scenario == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    if scenario == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        print(f"process {os.getpid()}", flush=True)
        while scenario != "add":
            time.sleep(0.05)
            world.barrier()
    except KeyboardInterrupt:
        if world.rank == 0:
            time.sleep(1.5)  # saving takes longer than the others need to end
        print(f"rank {world.rank} saved; its helper ended with {helper.wait(5)}", flush=True)
        return 130
    return 0


def main() -> int:
    try:
        with join_world("CPU", join_timeout=20.0) as world:
            return run(world, sys.argv[1])
    except MsLongctxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
