# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as compiled graphs: forward, backward, accumulation, clipping and update."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_longctx.errors import MsLongctxError
from ms_longctx.optim.adamw import LOOP_PIECE, AdamW
from ms_longctx.train.objectives import Batch, count_supervised
from ms_longctx.train.workers import ALONE, SumOverWorkers, Workers
from ms_longctx.tuning.dropout import KeyedDropout

COLUMNS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Args:
        loss: mean over the supervised tokens of all micro batches, in nats; 0 when there are none.
        supervised_tokens: how many there were.
        grad_norm: global norm of the gradient before clipping.
        finite: false when a gradient was infinite or NaN; nothing was changed then.
    """

    loss: float
    supervised_tokens: int
    grad_norm: float
    finite: bool


class TrainStep:
    """Trains on the micro batches of one optimizer step.

    The gradient is that of the mean over all supervised tokens of the step, so ``accumulation_steps`` micro
    batches give what one large batch gives, however unevenly their tokens count. A gradient that is not
    finite changes neither parameters nor moments.

    With one micro batch everything is one graph and gradients live only until the update. With more, they are
    summed in place in one fp32 buffer a parameter.

    Args:
        objective: ``(input_ids, labels, position_ids, document_ids) -> summed loss``; see
            :mod:`ms_longctx.train.objectives`.
        optimizer: updates its ``parameters``; clips.
        accumulation_steps: micro batches of a step.
        seed: of the dropout masks, where the model has dropout (adapters). The mask of a micro batch follows
            from this seed and the numbers of step, micro batch and worker, so there is no state to save.
        workers: the processes that take the step together; the result is the same on all of them.
    """

    def __init__(
        self,
        objective: nn.Cell,
        optimizer: AdamW,
        accumulation_steps: int = 1,
        seed: int = 0,
        workers: Workers = ALONE,
    ):
        self.accumulation_steps = accumulation_steps
        self._seed = seed
        self._workers = workers
        dropouts = [cell for _, cell in objective.cells_and_names() if isinstance(cell, KeyedDropout)]
        self._dropout_key = dropouts[0].key if dropouts else None
        if accumulation_steps == 1:
            self._whole = _WholeStep(objective, optimizer, workers)
        else:
            self._accumulate = _AccumulateStep(objective, optimizer.parameters)
            self._apply = _ApplyStep(self._accumulate.sums, self._accumulate.total, optimizer, workers)

    def __call__(
        self, batches: Sequence[Batch], learning_rate: float, loss_scale: float = 1.0, step: int = 0
    ) -> StepResult:
        """Run one optimizer step.

        Args:
            batches: ``accumulation_steps`` micro batches, of all workers together, with the columns ``input_ids`` and
                ``labels`` and, if sequences are packed or padded, ``position_ids`` and ``document_ids``; int32
                ``(dp * B, S)``.
            learning_rate: of this step.
            loss_scale: factor on the loss during the backward pass (fp16); divided out of the gradient.
            step: number of the step, for dropout.
        """
        if len(batches) != self.accumulation_steps:
            raise ValueError(f"a step takes {self.accumulation_steps} micro batches, not {len(batches)}")
        with graph_mode():
            return self._run(batches, learning_rate, loss_scale, step)

    def _run(self, batches: Sequence[Batch], learning_rate: float, loss_scale: float, step: int) -> StepResult:
        supervised = sum(count_supervised(batch) for batch in batches)
        # Each token's loss enters with this weight: sums over micro batches are the scaled mean already.
        weight = _scalar(loss_scale / max(supervised, 1))
        rate, unscale = _scalar(learning_rate), _scalar(1.0 / loss_scale)
        for index, batch in enumerate(batches):
            self._draw_dropout(step, index)
            inputs = _tensors(self._workers.shard(batch))
            if self.accumulation_steps == 1:
                total, norm, finite = self._whole(*inputs, weight, rate, unscale)
            else:
                self._accumulate(*inputs, weight)
        if self.accumulation_steps > 1:
            total, norm, finite = self._apply(rate, unscale)
        return StepResult(
            loss=float(total.asnumpy()) / max(supervised, 1),
            supervised_tokens=supervised,
            grad_norm=float(norm.asnumpy()),
            finite=bool(finite.asnumpy()),
        )

    def _draw_dropout(self, step: int, index: int) -> None:
        if self._dropout_key is not None:
            numbers = [self._seed, step, index, *([self._workers.rank] if self._workers.count > 1 else [])]
            drawn = np.random.SeedSequence(numbers).generate_state(1).view(np.int32)
            # In place: a compiled graph does not see new data of a Parameter.
            self._dropout_key.copy_(Tensor(int(drawn[0]), ms.int32))


@contextmanager
def graph_mode() -> Iterator[None]:
    """Graph mode for a while: in PyNative mode the wait for a graph keeps a core busy that the kernels need."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=before)


class EvalStep:
    """Loss of batches without training.

    Args:
        objective, workers: as for :class:`TrainStep`.
    """

    def __init__(self, objective: nn.Cell, workers: Workers = ALONE):
        self._workers = workers
        self._forward = _Forward(objective, workers)

    def __call__(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and number of supervised tokens of one batch."""
        with graph_mode():
            loss = self._forward(*_tensors(self._workers.shard(batch)))
            return float(loss.asnumpy()), count_supervised(batch)


class _Forward(nn.Cell):
    def __init__(self, objective: nn.Cell, workers: Workers):
        super().__init__(auto_prefix=False)
        self.objective = objective
        self.sum_over_workers = SumOverWorkers(workers)

    @ms.jit
    def construct(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor) -> Any:
        return self.sum_over_workers((), self.objective(input_ids, labels, position_ids, document_ids))[1]


class _WeightedLoss(nn.Cell):
    """Loss to differentiate (scaled) and, beside it, the plain sum."""

    def __init__(self, objective: nn.Cell):
        super().__init__(auto_prefix=False)
        self.objective = objective

    def construct(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor, weight: Tensor
    ) -> Any:
        total = self.objective(input_ids, labels, position_ids, document_ids)
        return total * weight, total


class _WholeStep(nn.Cell):
    def __init__(self, objective: nn.Cell, optimizer: AdamW, workers: Workers):
        super().__init__(auto_prefix=False)
        self.gradient = ms.value_and_grad(_WeightedLoss(objective), None, optimizer.parameters, has_aux=True)
        self.sum_over_workers = SumOverWorkers(workers)
        self.optimizer = optimizer

    @ms.jit
    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        weight: Tensor,
        rate: Tensor,
        unscale: Tensor,
    ) -> Any:
        (_, total), grads = self.gradient(input_ids, labels, position_ids, document_ids, weight)
        grads, total = self.sum_over_workers(grads, total)
        norm, finite = self.optimizer(grads, rate, unscale)
        return total, norm, finite


class _AccumulateStep(nn.Cell):
    def __init__(self, objective: nn.Cell, parameters: ParameterTuple):
        super().__init__(auto_prefix=False)
        self.gradient = ms.value_and_grad(_WeightedLoss(objective), None, parameters, has_aux=True)
        self.sums = parameters.clone(prefix="gradient", init="zeros")
        self.total = Parameter(Tensor(0.0, ms.float32), name="total_loss", requires_grad=False)

    @ms.jit
    def construct(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor, weight: Tensor
    ) -> Any:
        (_, total), grads = self.gradient(input_ids, labels, position_ids, document_ids, weight)
        for start in range(0, len(grads), LOOP_PIECE):
            total = self._add(total, self.sums[start : start + LOOP_PIECE], grads[start : start + LOOP_PIECE])
        return ops.assign_add(self.total, total)

    def _add(self, total: Tensor, sums: tuple, grads: tuple) -> Tensor:
        for i in range(len(grads)):
            total = ops.depend(total, ops.assign_add(sums[i], grads[i]))
        return total


class _ApplyStep(nn.Cell):
    """Updates from the summed gradients and sets the sums back to zero."""

    def __init__(self, sums: ParameterTuple, total: Parameter, optimizer: AdamW, workers: Workers):
        super().__init__(auto_prefix=False)
        self.sums = sums
        self.total = total
        self.sum_over_workers = SumOverWorkers(workers)
        self.optimizer = optimizer

    @ms.jit
    def construct(self, rate: Tensor, unscale: Tensor) -> Any:
        grads, total = self.sum_over_workers(self.sums, self.total + 0.0)
        norm, finite = self.optimizer(grads, rate, unscale)
        for start in range(0, len(self.sums), LOOP_PIECE):
            norm = self._clear(norm, self.sums[start : start + LOOP_PIECE])
        norm = ops.depend(norm, ops.assign(self.total, ops.depend(ops.zeros_like(self.total), total)))
        return total, norm, finite

    def _clear(self, norm: Tensor, sums: tuple) -> Tensor:
        for i in range(len(sums)):
            norm = ops.depend(norm, ops.assign(sums[i], ops.depend(ops.zeros_like(sums[i]), norm)))
        return norm


def _tensors(batch: Batch) -> list[Tensor | None]:
    missing = [name for name in COLUMNS[:2] if name not in batch]
    if missing:
        raise MsLongctxError(f"a batch has no column {missing[0]!r}; expected {', '.join(COLUMNS)}")
    return [Tensor(batch[name]) if name in batch else None for name in COLUMNS]


def _scalar(value: float) -> Tensor:
    return Tensor(value, ms.float32)
