# SPDX-License-Identifier: Apache-2.0
"""The training program for Ascend devices: model, optimizer and step of a run, split by its strategy and compiled.

Compiled in MindSpore's simulation: dp, mp, sp, pp, optimizer sharding, vocabulary parallel, context parallel (ring,
Ulysses, hybrid), documents, window, ALiBi, LoRA, fp16 with a loss scale, recomputation. No part of it has run on a
device.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline

from ms_longctx.config import RunConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import as_dtype
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.parallel.auto_parallel import set_stages, shard_model
from ms_longctx.parallel.program_rules import check_program
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.training_step import MicroBatchLoss, ShardedStep, loss_scale
from ms_longctx.train.build import architecture, build_optimizer
from ms_longctx.train.objectives import NextToken
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.prepare import get_pe_model

# MindSpore's switches that let communication run beside computation, written to a file for it.
_OVERLAP = {
    "recomputation_communication_overlap": True,
    "grad_matmul_communication_overlap": True,
    "grad_computation_allreduce_overlap": True,
    "computation_allgather_overlap": True,
}


@dataclass
class Program:
    """A compiled training step of this rank.

    Args:
        cell: takes what :class:`~ms_longctx.parallel.training_step.ShardedStep` takes.
        model: its parameters have the shapes of this rank's pieces; they have no values before :meth:`initialise`.
        full_shapes: of the trained parameters before they were cut, by name, in the order of the model.
        frozen_shapes: likewise, of those that do not train beside adapters.
        inputs: an empty batch: four int32 tensors ``(micro batches * data workers, tokens)``. Every worker is fed the
            whole batch; in each micro batch it has one row a data worker (``dp_i * cp + cp_i``).
        seconds: that compiling took.
    """

    cell: AutoParallel
    model: LlamaForCausalLM
    full_shapes: dict[str, tuple[int, ...]]
    frozen_shapes: dict[str, tuple[int, ...]]
    inputs: tuple[Tensor, ...]
    seconds: float
    is_initialised: bool = False

    def initialise(self) -> None:
        """Give parameters and optimizer state their first values, this rank's pieces of them."""
        self.cell.init_parameters_data(auto_parallel_mode=True)
        self.is_initialised = True

    def step(self) -> Any:
        """One optimizer step on the empty batch: ``(loss, norm, finite)``."""
        if not self.is_initialised:
            self.initialise()
        return self.cell(*self.inputs)


def compile_program(run: RunConfig, strategy: Strategy) -> Program:
    """Build and compile the training step of ``run`` for the rank of this process.

    Sets the device to Ascend and joins the communication; in MindSpore's simulation both work without devices. Weights
    are not allocated.

    Args:
        run: architecture, lengths, batch, optimizer, recomputation, switches of the section ``parallel``.
        strategy: as ``Strategy.from_config(run, worker_num)`` gives it.

    Raises:
        MsLongctxError: the strategy does not fit the model or the workers, or the run asks for what this program does
            not do.
        RuntimeError: MindSpore refuses to compile.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    communication.init()
    config = architecture(run)
    _check(run, strategy)
    strategy.check_model(config, run.data.seq_length, run.train.batch_size)
    check_program(run, config, strategy)
    with no_init_parameters():
        model = LlamaForCausalLM(config, ms.float32, as_dtype(run.train.dtype))
        if run.lora.enabled:
            get_pe_model(model, LoraConfig.from_section(run.lora), run.train.seed)
        model.set_train()
        _split(model, run, strategy)
        optimizer = build_optimizer(run, model)
        shapes = {parameter.name: tuple(parameter.shape) for parameter in model.trainable_params()}
        frozen = {parameter.name: tuple(parameter.shape) for parameter in model.untrainable_params()}
        step = _build_step(model, optimizer, run, strategy)
    cell = AutoParallel(step, run.parallel.mode)
    inputs = _empty_batch(run, strategy)
    with tempfile.TemporaryDirectory() as directory:
        _configure(cell, run, strategy, Path(directory))
        start = time.perf_counter()
        cell.compile(*inputs)
        seconds = time.perf_counter() - start
    step.norm.set_pieces()
    return Program(cell, model, shapes, frozen, inputs, seconds)


def micro_batches(run: RunConfig, strategy: Strategy) -> int:
    """Micro batches of one optimizer step: those of the pipeline, else those whose gradients are accumulated."""
    return strategy.micro_batch_num if strategy.pp > 1 else run.train.gradient_accumulation_steps


def _empty_batch(run: RunConfig, strategy: Strategy) -> tuple[Tensor, ...]:
    rows = micro_batches(run, strategy) * strategy.dp * strategy.cp
    tokens = run.train.batch_size * run.data.seq_length // strategy.cp
    columns = [Tensor(np.zeros((rows, tokens), np.int32)) for _ in range(4)]
    return tuple(columns)


def _check(run: RunConfig, strategy: Strategy) -> None:
    workers = communication.get_group_size()
    if workers != strategy.worker_num:
        raise MsLongctxError(f"the strategy is for {strategy.worker_num} workers and {workers} were started")


def _split(model: LlamaForCausalLM, run: RunConfig, strategy: Strategy) -> None:
    if strategy.cp > 1:
        model.set_context_parallel(strategy, communication.get_rank())
    shard_model(model, strategy, run.train.batch_size)
    if strategy.pp > 1:
        set_stages(model, strategy)
    if run.train.recompute:
        again = run.parallel.recompute_communication
        model.set_recompute(
            selective=run.train.recompute == "selective",
            mp_comm_recompute=again,
            parallel_optimizer_comm_recompute=again and strategy.optimizer_shard,
        )


def _build_step(model: LlamaForCausalLM, optimizer: Any, run: RunConfig, strategy: Strategy) -> ShardedStep:
    scale = loss_scale() if run.train.dtype == "fp16" else None
    network: nn.Cell = MicroBatchLoss(NextToken(model), scale)
    count = micro_batches(run, strategy)
    if strategy.pp > 1:
        network = Pipeline(network, count)
    elif count > 1:
        network = GradAccumulation(network, count)
    stage_workers = strategy.worker_num // strategy.pp
    return ShardedStep(network, optimizer, count > 1, strategy.optimizer_shard, stage_workers, scale)


def _configure(cell: AutoParallel, run: RunConfig, strategy: Strategy, directory: Path) -> None:
    section = run.parallel
    cell.dataset_strategy("full_batch")
    cell.no_init_parameters_in_compile()
    if strategy.pp > 1:
        cell.pipeline(stages=strategy.pp, scheduler="1f1b")
    if strategy.optimizer_shard:
        cell.hsdp()
    if section.comm_fusion is not None:
        fusion = {"mode": "size", "config": section.comm_fusion}
        cell.comm_fusion({"openstate": True, "allreduce": fusion, "allgather": fusion, "reducescatter": fusion})
    else:
        cell.comm_fusion({"openstate": False})
    if section.comm_overlap:
        path = directory / "overlap.json"
        path.write_text(json.dumps(_OVERLAP))
        cell.transformer_opt(str(path))
    if section.save_strategy is not None:
        cell.save_param_strategy_file(rank_file(section.save_strategy))
    if section.load_strategy is not None:
        cell.load_param_strategy_file(rank_file(section.load_strategy))


def rank_file(name: str) -> str:
    """``s_rank3.ckpt`` for ``s.ckpt`` on rank 3."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}_rank{communication.get_rank()}{path.suffix or '.ckpt'}"))
