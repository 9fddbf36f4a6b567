# SPDX-License-Identifier: Apache-2.0
"""One simulated rank: compiles every collective for Ascend, with its gradient, and writes down the operators.

python collectives_program.py RESULT.json GRAPHS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops
from mindspore.communication import get_process_group_ranks

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel import collectives
from ms_longctx.parallel.collectives import Group
from ms_longctx.parallel.dryrun.graph_file import find_graph_file, read_graph_file

RANKS = (3, 1, 5)  # a group in an order of its own


class Net(nn.Cell):
    """Each collective on an input of its own."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.all_reduce = collectives.make_all_reduce(group)
        self.identity = collectives.make_all_reduce(group, gradient="identity")
        self.all_gather = collectives.make_all_gather(group, 1)
        self.reduce_scatter = collectives.make_reduce_scatter(group, 1)
        self.all_to_all = collectives.make_all_to_all(group, 1, 0)
        self.shift = collectives.make_ring_shift(group, -1)
        self.shift_two = collectives.make_ring_shift(group, 1, count=2)
        self.broadcast = collectives.make_broadcast(group, 2)

    def construct(
        self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
    ) -> Tensor:
        pair = self.shift_two(g, ops.reshape(g, (-1,)))
        results = (
            self.all_reduce(a), self.identity(b), self.all_gather(c), self.reduce_scatter(d), self.all_to_all(e),
            self.shift(f), pair[0], pair[1], self.broadcast(h),
        )  # fmt: skip
        total = ops.zeros((), ms.float32)
        for result in results:
            total = total + ops.sum(result * result)
        return total


class WithGradient(nn.Cell):
    """Its value and the gradients of all inputs."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.gradient = ops.GradOperation(get_all=True)

    def construct(
        self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
    ) -> tuple:
        inputs = (a, b, c, d, e, f, g, h)
        return self.net(*inputs), self.gradient(self.net)(*inputs)


def main(result_path: str, graphs: str, rank: int) -> None:
    """Compile and write."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    communication.init()
    group = Group(RANKS, rank)
    # A size that tells the collectives apart.
    inputs = [Tensor(np.zeros((6, 3 * place), np.float32)) for place in range(1, 9)]
    WithGradient(Net(group)).compile(*inputs)
    operators = []
    for execution in read_graph_file(find_graph_file(Path(graphs), rank)).communication():
        operator = execution.operator
        ranks = list(get_process_group_ranks(operator.group))
        sizes = [int(np.prod(tensor.shape)) for tensor in operator.inputs]
        operators.append([operator.name, ranks, sizes, execution.times])
    mixed = ""
    try:
        collectives.make_ring_shift(group, 1, count=2)(inputs[0], inputs[1].astype(ms.float16))
    except MsLongctxError as error:
        mixed = str(error)
    Path(result_path).write_text(json.dumps({"operators": operators, "mixed": mixed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(os.environ["RANK_ID"]))
    sys.stdout.flush()
    os._exit(0)  # the exit of a simulated process takes seconds and may crash
