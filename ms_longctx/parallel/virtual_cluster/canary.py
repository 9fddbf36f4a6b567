# SPDX-License-Identifier: Apache-2.0
"""Two tiny programs that tell whether a simulated cluster can be trusted, each run in a process of its own.

    python -m ms_longctx.parallel.virtual_cluster.canary pass

``pass``: two matrix products split by rows and columns over 16 devices, one training step; MindSpore must compile
it for rank 5, put an AllReduce between ranks 4 to 7 into it, and take it through its simulated allocator.
``reject``: the same with a sum that its two factors split differently; MindSpore must refuse it with its own words.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ms_longctx.parallel.virtual_cluster.log import failure_line
from ms_longctx.parallel.virtual_cluster.tools import VirtualClusterError

RANK, WORKERS = 5, 16
_TIME_LIMIT_S = 300.0
_REJECTION = "the shard num of first input's column is 2, but the shard num of second input's row is 1"
_ALL_REDUCE = "AllReduce("
_GROUP = "group_rank_ids: (4, 5, 6, 7)"
_HIDDEN = 64  # columns of the first weight; 4 devices share them
_MEMORY = "simulated bytes:"


def check(environment: Mapping[str, str]) -> None:
    """Run both programs.

    Args:
        environment: variables of a process that simulates rank ``RANK`` of ``WORKERS`` at level 1.

    Raises:
        VirtualClusterError: one of them did not end as it must; the message has the line of the log.
    """
    with tempfile.TemporaryDirectory() as folder:
        code, log = _run("pass", environment, folder)
        if code != 0:
            raise VirtualClusterError(f"a correct program does not compile: {failure_line(log, code)}")
        graphs = "".join(path.read_text() for path in Path(folder).glob("rank_*/*_validate_*.ir"))
        if not any(_ALL_REDUCE in line and _GROUP in line for line in graphs.splitlines()):
            raise VirtualClusterError("a correct program was compiled without the communication that it needs")
        if int(log.rpartition(_MEMORY)[2].split()[0]) < _HIDDEN:
            raise VirtualClusterError("a correct program took no memory of the simulated device")
        code, log = _run("reject", environment, folder)
        if code == 0:
            raise VirtualClusterError("a wrong program was compiled instead of refused")
        if _REJECTION not in failure_line(log, code):
            raise VirtualClusterError(f"a wrong program was refused for another reason: {failure_line(log, code)}")


def _run(program: str, environment: Mapping[str, str], folder: str) -> tuple[int, str]:
    graphs = {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": folder, "MS_DEV_DUMP_IR_PASSES": "validate"}
    try:
        result = subprocess.run(
            [sys.executable, "-m", __name__, program],
            env={**environment, **graphs},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise VirtualClusterError(f"the program '{program}' is not compiled after {_TIME_LIMIT_S:.0f} s") from None
    return result.returncode, result.stdout


def main(program: str) -> int:
    """Compile one of the two programs in this process, whose environment asks for a simulation."""
    import mindspore as ms
    import numpy as np
    from mindspore import Parameter, Tensor, nn, ops
    from mindspore.communication import init
    from mindspore.parallel.auto_parallel import AutoParallel

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    init()
    rows_and_sum = (4, 2) if program == "reject" else (4, 1)

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first = Parameter(Tensor(np.zeros((32, _HIDDEN), np.float32)), name="first")
            self.second = Parameter(Tensor(np.zeros((_HIDDEN, 32), np.float32)), name="second")
            self.split_columns = ops.MatMul().shard((rows_and_sum, (1, 4)))
            self.split_sum = ops.MatMul().shard(((4, 4), (4, 1)))
            self.total = ops.ReduceSum().shard(((4, 1),))

        def construct(self, x: Tensor) -> Tensor:
            return self.total(self.split_sum(self.split_columns(x, self.first), self.second))

    net = Net()
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), learning_rate=1e-3))
    step.set_train()
    parallel = AutoParallel(step, parallel_mode="semi_auto")
    parallel.dataset_strategy("full_batch")
    parallel(Tensor(np.zeros((64, 32), np.float32)))
    ms.runtime.synchronize()
    print(_MEMORY, ms.runtime.max_memory_allocated(), flush=True)
    # The interpreter's exit would print the allocator's statistics; nothing is left to be saved.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
