# SPDX-License-Identifier: Apache-2.0
"""A process of the doctor's smoke tests; prints one JSON object.

``worker.py matmul TARGET``; ``worker.py collectives CPU RANK SIZE JOB``; under msrun ``worker.py collectives Ascend``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

# Ascend multiplies float32 in a shorter format unless told otherwise.
_TOLERANCES = {"CPU": 1e-5, "Ascend": 5e-3}


def matmul(target: str) -> dict[str, Any]:
    """A product of (129, 257) with (257, 65); ``error``: largest difference to NumPy over the largest value."""
    import numpy as np

    start = time.monotonic()
    from ms_longctx.device import select_device

    device = select_device(target)
    import mindspore as ms
    from mindspore import ops

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((129, 257), (257, 65)))
    found = ops.matmul(ms.Tensor(a), ms.Tensor(b)).asnumpy()
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    tolerance = _TOLERANCES.get(device, 5e-3)
    return {"device": device, "error": error, "tolerance": tolerance, "seconds": time.monotonic() - start}


def collectives_cpu(rank: int, size: int, job: str) -> dict[str, Any]:
    """Sum, gather and exchange between the processes of a job in shared memory."""
    import numpy as np

    from ms_longctx.kernels import comm

    comm.join(job, rank, size, timeout=20.0, join_timeout=20.0)
    ranks = tuple(range(size))
    own = np.arange(size * 3, dtype=np.float32) + 100 * rank
    everyone = [np.arange(size * 3, dtype=np.float32) + 100 * other for other in ranks]
    wanted = {
        "all_reduce": sum(everyone),
        "all_gather": np.concatenate(everyone),
        "all_to_all": np.concatenate([x.reshape(size, 3)[rank] for x in everyone]),
    }
    found = {
        "all_reduce": comm.Collective(ranks, comm.Kind.ALL_REDUCE)(own),
        "all_gather": comm.Collective(ranks, comm.Kind.ALL_GATHER)(own),
        "all_to_all": comm.Collective(ranks, comm.Kind.ALL_TO_ALL)(own),
    }
    return _compare(found, wanted)


def collectives_ascend() -> dict[str, Any]:
    """Sum and gather over HCCL, between all workers of msrun."""
    import mindspore as ms
    import numpy as np

    from ms_longctx.device import select_device
    from ms_longctx.parallel.collectives import make_all_gather, make_all_reduce
    from ms_longctx.parallel.world import join_world

    select_device("Ascend")
    with join_world("Ascend") as world:
        group = world.group()
        x = ms.Tensor(np.arange(6, dtype=np.float32) + 100 * world.rank)
        everyone = [np.arange(6, dtype=np.float32) + 100 * other for other in range(world.size)]
        found = {
            "all_reduce": make_all_reduce(group)(x).asnumpy(),
            "all_gather": make_all_gather(group)(x).asnumpy(),
        }
        return _compare(found, {"all_reduce": sum(everyone), "all_gather": np.concatenate(everyone)})


def _compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    wrong = [name for name in wanted if not np.array_equal(found[name], wanted[name])]
    return {"failure": f"{wrong[0]} gave wrong numbers"} if wrong else {"passed": list(wanted)}


def main(argv: list[str]) -> int:
    """Run what the command line names; a failure is an answer too."""
    try:
        if argv[0] == "matmul":
            answer = matmul(argv[1])
        elif argv[1] == "CPU":
            answer = collectives_cpu(int(argv[2]), int(argv[3]), argv[4])
        else:
            answer = collectives_ascend()
    except Exception as error:
        answer = {"failure": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
