# SPDX-License-Identifier: Apache-2.0
"""What computes the steps of a run, and owns its model and optimizer: one interface, two engines.

:class:`LocalEngine` computes each worker's share as a graph of its own and sums gradients over the workers by explicit
collectives (data and context parallelism). Every worker has the whole model, so the first one of a disk writes it as
a Hugging Face directory. It serves CPUs, a single Ascend device, and adapters (LoRA) on any number of devices that
each hold the whole model.

:class:`~ms_longctx.train.program_engine.ProgramEngine` runs MindSpore's semi-automatic program on several Ascend
devices, which cuts model and optimizer over the workers; each writes and reads its own pieces.

The trainer knows nothing of this: it hands an engine micro batches, and a directory to write to or to go on from.
Checkpoints of either engine load into the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ms_longctx.config import RunConfig
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.optim.adamw import AdamW
from ms_longctx.parallel.sequence import padded_length
from ms_longctx.train.build import build_model, build_optimizer, copy_tokenizer
from ms_longctx.train.objectives import Batch, NextToken
from ms_longctx.train.state import read_moments, write_moments
from ms_longctx.train.step import EvalStep, StepResult, TrainStep
from ms_longctx.train.workers import Workers
from ms_longctx.tuning import count_parameters, save_adapter


class Engine(Protocol):
    """Computes steps and moves weights and moments to and from checkpoints; all workers call every method together.

    Attributes:
        model: its parameters may be pieces.
        optimizer: for its hyperparameters and its count of steps.
        micro_batches: of one step.
    """

    model: LlamaForCausalLM
    optimizer: AdamW
    micro_batches: int

    def step(self, batches: Sequence[Batch], learning_rate: float, loss_scale: float, number: int) -> StepResult:
        """One optimizer step; see :class:`~ms_longctx.train.step.TrainStep`."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Summed loss in nats and number of supervised tokens of up to :attr:`micro_batches` batches, at least one."""
        ...

    def count_parameters(self) -> tuple[int, int]:
        """How many numbers train, and how many there are, on all workers together."""
        ...

    def load_moments(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """Continue with the optimizer of a checkpoint; ``saved`` is ``optimizer`` of its state file."""
        ...

    def saved_bytes(self, is_lead: bool) -> int:
        """About how much this worker writes into a checkpoint."""
        ...

    def write_share(self, directory: Path) -> None:
        """Write what this worker alone has to write."""
        ...

    def write_rest(self, directory: Path) -> None:
        """Write what the first worker of a disk writes for all."""
        ...


class LocalEngine:
    """The whole model on every worker; see the module.

    Args:
        run: the checked configuration.
        workers: their degrees of tensor and pipeline parallelism are 1.
        checkpoint: whose weights the model begins with.
    """

    def __init__(self, run: RunConfig, workers: Workers, checkpoint: Path | None) -> None:
        self.run = run
        self.model = build_model(run, checkpoint, workers)
        length = padded_length(run.data.seq_length, workers.strategy)
        workers.strategy.check_model(self.model.config, length, run.train.batch_size)
        self.optimizer = build_optimizer(run, self.model)
        self.micro_batches = run.train.gradient_accumulation_steps
        objective = NextToken(self.model)
        self._train_step = TrainStep(objective, self.optimizer, self.micro_batches, run.train.seed, workers)
        self._eval_step = EvalStep(objective, workers)

    def step(self, batches: Sequence[Batch], learning_rate: float, loss_scale: float, number: int) -> StepResult:
        """See :class:`Engine`."""
        return self._train_step(batches, learning_rate, loss_scale, number)

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """See :class:`Engine`."""
        losses, counts = zip(*map(self._eval_step, batches), strict=True)
        return sum(losses), sum(counts)

    def count_parameters(self) -> tuple[int, int]:
        """See :class:`Engine`."""
        return count_parameters(self.model)

    def load_moments(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """See :class:`Engine`."""
        arrays = read_moments(checkpoint, self.optimizer, self.model.config)
        arrays["step"] = np.asarray(saved["step"], np.int32)
        self.optimizer.load_state(arrays, saved["hyperparameters"])

    def saved_bytes(self, is_lead: bool) -> int:
        """See :class:`Engine`."""
        parameters = [*self.model.trainable_params(), *self.optimizer.state().values()]
        return sum(parameter.nbytes for parameter in parameters) if is_lead else 0

    def write_share(self, directory: Path) -> None:
        """Nothing: the first worker has everything."""

    def write_rest(self, directory: Path) -> None:
        """See :class:`Engine`."""
        if self.run.lora.enabled:
            save_adapter(self.model, directory, self.run.model.pretrained or "")
        else:
            self.model.save_pretrained(directory)
            copy_tokenizer(self.run, directory)
        write_moments(directory, self.optimizer, self.model.config)
