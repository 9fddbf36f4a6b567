# SPDX-License-Identifier: Apache-2.0
"""Steps by MindSpore's semi-automatic program on several Ascend devices, and checkpoints of its pieces.

MindSpore cuts model and optimizer; where it cut is known when the program is compiled (``parameter_layout_dict``), and
:mod:`ms_longctx.parallel.slices` reads it. From then on a worker only ever holds its pieces: first weights, those of a
Hugging Face directory and those of any checkpoint are read piece by piece, and a checkpoint gets the pieces that no
worker of the same disk with a lower rank holds, too. With adapters (LoRA) only those and their moments are saved.

No part of this has run on a device; it was compiled, fed and stepped in MindSpore's simulation, where values mean
nothing, and its pieces were compared with numpy's slices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common.initializer import Zero
from mindspore.communication import GlobalComm, get_process_group_ranks

from ms_longctx.config import RunConfig
from ms_longctx.data.tokenizer_files import write_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.auto import open_checkpoint
from ms_longctx.models.hf_config import write_config
from ms_longctx.models.pieces import PieceSource, file_pieces, read_parameter
from ms_longctx.models.sharded import Block, write_shard
from ms_longctx.parallel.program import Program, compile_program, micro_batches
from ms_longctx.parallel.sequence import split_sequence
from ms_longctx.parallel.slices import Piece, from_layout, holders
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.train.build import copy_tokenizer
from ms_longctx.train.disks import Disk
from ms_longctx.train.initial import initial_adapters, initial_values
from ms_longctx.train.objectives import IGNORE_INDEX, Batch, count_supervised
from ms_longctx.train.state import open_moments
from ms_longctx.train.step import COLUMNS, StepResult
from ms_longctx.tuning import LoraConfig
from ms_longctx.tuning.adapter_files import PREFIX, open_adapter, write_adapter_config

_MOMENTS = ("exp_avg.", "exp_avg_sq.")


class ProgramEngine:
    """An :class:`~ms_longctx.train.engine.Engine` of several Ascend devices.

    Args:
        run: the checked configuration.
        disk: all workers, and those that see this one's disk.
        checkpoint: whose weights the model begins with; ``None``: ``model.pretrained``, or random ones.

    Raises:
        MsLongctxError: the run asks for what the program cannot do, or files do not fit the model.
    """

    def __init__(self, run: RunConfig, disk: Disk, checkpoint: Path | None) -> None:
        self.run, self.disk = run, disk
        self.strategy, self.rank = disk.workers.strategy, disk.workers.rank
        self.program = compile_program(run, self.strategy)
        self.model = self.program.model
        self._step = self.program.cell.network
        self.optimizer = self._step.optimizer
        self.micro_batches = micro_batches(run, self.strategy)
        self.pieces = program_pieces(self.program, self.strategy, self.rank)
        self._start_from_zero()
        parameters = {parameter.name: parameter for parameter in self._step.get_parameters()}
        self._weights = {name: parameters[name] for name in self.pieces if name in self.program.full_shapes}
        self._frozen = {name: parameters[name] for name in self.pieces if name in self.program.frozen_shapes}
        self._moments = {name: parameters[name] for name in self.pieces if name.startswith(_MOMENTS)}
        self._check_pieces()
        self._load_weights(checkpoint)

    def step(self, batches: Sequence[Batch], learning_rate: float, loss_scale: float, number: int) -> StepResult:
        """See :class:`~ms_longctx.train.engine.Engine`; ``loss_scale`` counts in fp16 only, and nothing is drawn."""
        supervised = sum(count_supervised(batch) for batch in batches)
        _set(self._step.learning_rate, learning_rate)
        if self._step.loss_scale is None:
            loss_scale = 1.0
        else:
            _set(self._step.loss_scale, loss_scale)
        total, norm, finite = self._run(batches, 1.0 / (loss_scale * max(supervised, 1)))
        return StepResult(total / max(supervised, 1), supervised, float(norm.asnumpy()), bool(finite.asnumpy()))

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """See :class:`~ms_longctx.train.engine.Engine`.

        There is no program of the forward pass alone: this is a step whose update the optimizer leaves out, because NaN
        as ``grad_scale`` looks like an overflow to it. It takes as long as a step, but no more memory or compilation.
        """
        empty = {**batches[0], "labels": np.full_like(batches[0]["labels"], IGNORE_INDEX)}
        total, _, _ = self._run([*batches, *[empty] * (self.micro_batches - len(batches))], math.nan)
        return total, sum(count_supervised(batch) for batch in batches)

    def _run(self, batches: Sequence[Batch], grad_scale: float) -> tuple[float, Tensor, Tensor]:
        """Summed loss, which every worker gets, and norm and finiteness as the program returns them."""
        _set(self._step.grad_scale, grad_scale)
        inputs = [Tensor(rows) for rows in program_rows(batches, self.strategy)]
        total, norm, finite = self.program.cell(*inputs)
        last_stage = self.strategy.rank(pp=self.strategy.pp - 1)
        return self.disk.workers.from_rank(float(total.asnumpy()), last_stage), norm, finite

    def count_parameters(self) -> tuple[int, int]:
        """See :class:`~ms_longctx.train.engine.Engine`."""
        shapes = self.program.full_shapes, self.program.frozen_shapes
        trained, frozen = (sum(math.prod(shape) for shape in found.values()) for found in shapes)
        return trained, trained + frozen

    def load_moments(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """See :class:`~ms_longctx.train.engine.Engine`."""
        if saved["hyperparameters"] != self.optimizer.hyperparameters():
            raise MsLongctxError(
                f"{checkpoint}: the optimizer state does not fit this run: betas, eps, weight decay or the trained "
                "parameters differ; resume with the settings of the checkpoint or start a new run"
            )
        source = open_moments(checkpoint)
        for name, parameter in self._moments.items():
            self._fill(name, parameter, source, checkpoint)
        self.optimizer.step.set_data(Tensor(int(saved["step"]), ms.int32))

    def saved_bytes(self, is_lead: bool) -> int:
        """See :class:`~ms_longctx.train.engine.Engine`."""
        return sum(parameter.nbytes for parameter in self._written().values())

    def write_share(self, directory: Path) -> None:
        """See :class:`~ms_longctx.train.engine.Engine`."""
        blocks = []
        for name, parameter in self._written().items():
            values = functools.partial(_values, parameter)
            places = file_pieces(self._stored_name(name), self.pieces[name][0], self.model.config)
            blocks += [Block(place, values) for place in places]
        write_shard(directory, self.rank, blocks)

    def write_rest(self, directory: Path) -> None:
        """See :class:`~ms_longctx.train.engine.Engine`."""
        if self.run.lora.enabled:
            base = self.run.model.pretrained or ""
            write_adapter_config(LoraConfig.from_section(self.run.lora), directory, base)
            return
        write_config(self.model.config, directory, "float32")
        if self.run.data.tokenizer is not None:
            copy_tokenizer(self.run, directory)
        elif self.run.model.pretrained is not None:
            write_tokenizer(Path(self.run.model.pretrained), directory)

    def _check_pieces(self) -> None:
        """Refuse to go on where MindSpore's record and its parameters differ: files would be wrong."""
        for name, parameter in {**self._frozen, **self._weights, **self._moments}.items():
            expected = self.pieces[name][0].shape
            if tuple(parameter.shape) != expected:
                raise MsLongctxError(
                    f"rank {self.rank}: MindSpore's layout of {name} says {expected}, the compiled program has "
                    f"{tuple(parameter.shape)}; this version of MindSpore is not supported here"
                )

    def _written(self) -> dict[str, Parameter]:
        """Parameters whose pieces this worker writes: no lower rank of the same disk does."""
        own = {**self._weights, **self._moments}
        return {name: parameter for name, parameter in own.items() if self._is_first(self.pieces[name][1])}

    def _is_first(self, ranks: Sequence[int]) -> bool:
        return min(set(ranks) & set(self.disk.ranks)) == self.rank

    def _start_from_zero(self) -> None:
        """Allocate the pieces without drawing random numbers that would be overwritten."""
        for parameter in self._step.get_parameters():
            if parameter.has_init:
                parameter.init_mode.init = Zero()
        self.program.initialise()

    def _load_weights(self, checkpoint: Path | None) -> None:
        pretrained = None if self.run.model.pretrained is None else Path(self.run.model.pretrained)
        if not self.run.lora.enabled:
            self._load_model(self._weights, checkpoint or pretrained)
            return
        self._load_model(self._frozen, pretrained)
        if checkpoint is not None:
            source = open_adapter(checkpoint)
            for name, parameter in self._weights.items():
                self._fill(self._stored_name(name), parameter, source, checkpoint)
            return
        pieces = {name: self.pieces[name][0] for name in self._weights}
        for name, values in initial_adapters(self.program.full_shapes, pieces, self.run.train.seed).items():
            self._weights[name].set_data(Tensor(values))

    def _load_model(self, parameters: dict[str, Parameter], path: Path | None) -> None:
        """Weights that are no adapters, from files or drawn."""
        if path is not None:
            source = open_checkpoint(path)
            for name, parameter in parameters.items():
                self._fill(name, parameter, source, path)
            return
        for name, parameter in parameters.items():
            values = initial_values(name, self.pieces[name][0], self.model.config, self.run.train.seed)
            parameter.set_data(Tensor(values))

    def _fill(self, stored: str, parameter: Parameter, source: PieceSource, path: Path) -> None:
        values = read_parameter(source, stored, self.pieces[parameter.name][0], self.model.config, path)
        parameter.set_data(Tensor(np.ascontiguousarray(values, np.float32)))

    def _stored_name(self, name: str) -> str:
        """In files: adapters have peft's names there."""
        return PREFIX + name if self.run.lora.enabled and name in self._weights else name


def program_pieces(program: Program, strategy: Strategy, rank: int) -> dict[str, tuple[Piece, list[int]]]:
    """For each weight and moment that a rank holds: which piece, and all ranks of its stage that hold the same.

    Args:
        program: compiled, for this rank.
        strategy: that it was compiled for.
        rank: of this process.
    """
    workers = strategy.worker_num // strategy.pp
    first, place = rank - rank % workers, rank % workers
    weights = program.full_shapes.keys() | program.frozen_shapes.keys()
    found = {}
    for name, layout in program.cell.parameter_layout_dict.items():
        if name not in weights and not name.startswith(_MOMENTS):
            continue  # sums of gradients are zero between steps
        group = _places(layout[5], first, workers)
        same = holders(layout, place)
        if group:
            # Others than this group hold the same only where it is smaller than all that could share.
            same = [place] if len(group) == len(same) else [p for p in same if p % len(group) == place % len(group)]
        found[name] = (from_layout(layout, place, group), [first + p for p in same])
    return found


def _places(group: str, first: int, workers: int) -> list[int]:
    """Places in the stage of the ranks of a communication group; none for no group."""
    if not group:
        return []
    if group == GlobalComm.WORLD_COMM_GROUP:
        return list(range(workers))
    return sorted(rank - first for rank in get_process_group_ranks(group))


def program_rows(batches: Sequence[Batch], strategy: Strategy) -> list[np.ndarray]:
    """The micro batches of a step as the program takes them on every worker.

    Args:
        batches: ``(dp * B, S)`` columns each.
        strategy: its ``dp`` and ``cp`` decide.

    Returns:
        The columns in the order of :data:`~ms_longctx.train.step.COLUMNS`, int32
        ``(micro batches * dp * cp, B * S / cp)``: in each micro batch one row a data worker, ``dp_i * cp + cp_i``, in
        which the pieces of its B sequences stand one after another.
    """
    rows: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    for batch in batches:
        whole = {name: np.asarray(column, np.int32) for name, column in batch.items()}
        whole.setdefault("document_ids", np.zeros_like(whole["input_ids"]))
        count = len(whole["input_ids"]) // strategy.dp
        for copy in range(strategy.dp):
            own = {name: column[copy * count : (copy + 1) * count] for name, column in whole.items()}
            for piece in range(strategy.cp):
                ring, ulysses = divmod(piece, strategy.ulysses_degree)
                part = split_sequence(own, strategy, strategy.rank(dp=copy, ring=ring, ulysses=ulysses))
                for name in COLUMNS:
                    rows[name].append(part[name].reshape(-1))
    return [np.ascontiguousarray(np.stack(rows[name]), np.int32) for name in COLUMNS]


def _set(parameter: Parameter, value: float) -> None:
    # In place: a compiled graph does not see new data of a Parameter.
    parameter.copy_(Tensor(value, ms.float32))


def _values(parameter: Parameter) -> np.ndarray:
    return np.asarray(parameter.asnumpy())
