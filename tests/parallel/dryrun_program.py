# SPDX-License-Identifier: Apache-2.0
"""Programs for the tests of the dry run: a few matrix products with the strategies of a Megatron MLP.

Each function stands in for ``ms_longctx.parallel.program:compile_program``.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import lazy_inline
from mindspore.common.initializer import initializer
from mindspore.communication import init
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import Pipeline

from ms_longctx.config import RunConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.strategy import Strategy


@dataclass
class Program:
    """What the dry run's worker expects."""

    cell: nn.Cell
    inputs: tuple[Tensor, ...]
    full_shapes: dict[str, tuple[int, ...]]

    def step(self) -> Any:
        return self.cell(*self.inputs)


class Layer(nn.Cell):
    """``x + relu(x @ up) @ down``; columns of ``up`` and rows of ``down`` are split."""

    def __init__(self, run: RunConfig, strategy: Strategy, place: int, is_wrong: bool) -> None:
        super().__init__()
        data, mp = strategy.dp * strategy.cp, strategy.mp
        hidden, wide = run.model.hidden_size, run.model.intermediate_size
        self.up = Parameter(initializer("zeros", (hidden, wide), ms.float32), name=f"model.layers.{place}.up")
        self.down = Parameter(initializer("zeros", (wide, hidden), ms.float32), name=f"model.layers.{place}.down")
        self.columns = ops.MatMul().shard(((data, mp if is_wrong else 1), (1, mp)))
        self.relu = ops.ReLU().shard(((data, mp),))
        self.rows = ops.MatMul().shard(((data, mp), (mp, 1)))
        self.add = ops.Add().shard(((data, 1), (data, 1)))

    def construct(self, x: Tensor) -> Tensor:
        return self.add(x, self.rows(self.relu(self.columns(x, self.up)), self.down))


class Net(nn.Cell):
    """Layers of the model, spread evenly over the stages, and a sum."""

    @lazy_inline
    def __init__(self, run: RunConfig, strategy: Strategy, is_wrong: bool = False) -> None:
        super().__init__()
        count = run.model.num_hidden_layers
        self.layers = nn.CellList([Layer(run, strategy, place, is_wrong) for place in range(count)])
        self.total = ops.ReduceSum().shard(((strategy.dp * strategy.cp, 1),))
        if strategy.pp > 1:
            for place, layer in enumerate(self.layers):
                layer.pipeline_stage = place * strategy.pp // count

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.total(x)


def compile_program(run: RunConfig, strategy: Strategy, is_wrong: bool = False) -> Program:
    """A training step with AdamW; rows of the input are split over dp, weights over mp, layers over pp."""
    _start()
    net: nn.Cell = Net(run, strategy, is_wrong)
    shapes = {parameter.name: parameter.shape for parameter in net.trainable_params()}
    if strategy.pp > 1:
        net = Pipeline(net, strategy.micro_batch_num)
    optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=1e-3)
    step = (_TrainGradAccuStepCell if strategy.pp > 1 else nn.TrainOneStepCell)(net, optimizer)
    step.set_train()
    parallel = AutoParallel(step, parallel_mode="semi_auto")
    parallel.dataset_strategy("full_batch")
    if strategy.pp > 1:
        parallel.pipeline(stages=strategy.pp, scheduler="1f1b")
    rows = 4 * strategy.dp * strategy.cp * strategy.micro_batch_num
    inputs = (Tensor(np.zeros((rows, run.model.hidden_size), np.float32)),)
    parallel.compile(*inputs)
    return Program(parallel, inputs, shapes)


def compile_wrong(run: RunConfig, strategy: Strategy) -> Program:
    """A product whose two factors split the sum differently."""
    return compile_program(run, strategy, is_wrong=True)


def compile_crash(run: RunConfig, strategy: Strategy) -> Program:
    """The compiler dies."""
    os.kill(os.getpid(), signal.SIGFPE)
    raise AssertionError("unreachable")


def compile_without_step(run: RunConfig, strategy: Strategy) -> Program:
    """Compiles; the simulated step fails."""
    program = compile_program(run, strategy)
    return Program(_Broken(), program.inputs, program.full_shapes)


class _Broken(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        raise RuntimeError("no memory model for this operator")


def compile_refused(run: RunConfig, strategy: Strategy) -> Program:
    """The package itself refuses the run."""
    raise MsLongctxError("lora.enabled: adapters are not split")


def compile_forever(run: RunConfig, strategy: Strategy) -> Program:
    """Writes its process id beside the graphs and never ends."""
    Path("worker.pid").write_text(str(os.getpid()))
    time.sleep(600)
    raise AssertionError("unreachable")


def _start() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    init()
