# SPDX-License-Identifier: Apache-2.0
"""The workers of one training run: which part of a batch is whose, and what they sum up or agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_longctx.errors import MsLongctxError
from ms_longctx.optim.adamw import LOOP_PIECE
from ms_longctx.parallel.collectives import Group, make_all_reduce, make_broadcast
from ms_longctx.parallel.sequence import split_sequence
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.train.objectives import Batch


@dataclass(frozen=True)
class Workers:
    """This process among the workers of a run.

    Every worker reads whole batches, those of all data parallel copies, and works on its part of them. So each one
    knows how many supervised tokens a step has, and positions in the data mean the same under every strategy.

    Args:
        strategy: how the run is spread.
        rank: of this process.
    """

    strategy: Strategy = Strategy()
    rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0

    @property
    def count(self) -> int:
        """How many workers there are."""
        return self.strategy.worker_num

    @property
    def group(self) -> Group:
        """The workers that hold the same weights; all of them, where tensor and pipeline parallel degrees are 1."""
        return Group(self.strategy.group("dp_cp", self.rank), self.rank)

    @property
    def everyone(self) -> Group:
        """All workers."""
        return Group(tuple(range(self.count)), self.rank)

    def shard(self, batch: Batch) -> Batch:
        """The rows of this data parallel copy, and of each row the tokens of this worker.

        Args:
            batch: ``(dp * B, S)`` columns.

        Returns:
            ``(B, S / cp)`` columns; S is padded where it does not divide.
        """
        if self.count == 1:
            return batch
        rows = len(batch["input_ids"]) // self.strategy.dp
        first = self.strategy.coordinates(self.rank).dp * rows
        own = {name: np.asarray(column)[first : first + rows] for name, column in batch.items()}
        return own if self.strategy.cp == 1 else split_sequence(own, self.strategy, self.rank)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any worker; all call it together."""
        if self.count == 1:
            return flag
        return int(self._sum(Tensor([int(flag)], ms.int32)).asnumpy()[0]) > 0

    def exchange(self, number: int) -> list[int]:
        """The numbers (int32) of all workers, by rank; all call it together."""
        if self.count == 1:
            return [number]
        own = np.zeros(self.count, np.int32)
        own[self.rank] = number
        return [int(value) for value in self._sum(Tensor(own)).asnumpy()]

    def from_rank(self, number: float, rank: int) -> float:
        """The number (fp32) of one worker, on all; all call it together."""
        if self.count == 1:
            return number
        own = number if self.rank == rank else 0.0
        return float(self._sum(Tensor([own], ms.float32)).asnumpy()[0])

    def together(self, error: MsLongctxError | None, what: str) -> None:
        """Go on if no worker has failed; all call it together, also the one that has.

        Raises:
            MsLongctxError: ``error`` itself where it happened, elsewhere one that names the rank.
        """
        failed = [rank for rank, flag in enumerate(self.exchange(int(error is not None))) if flag]
        if error is not None:
            raise error
        if failed:
            raise MsLongctxError(f"rank {failed[0]} could not {what}; its own message says why")

    @cached_property
    def _sum(self) -> Callable[[Tensor], Tensor]:
        """One operator for every step: each new one would be kept for ever."""
        return make_all_reduce(self.everyone)

    def share(self, text: str | None) -> str | None:
        """The text of the main worker, on all; all call it together."""
        if self.count == 1:
            return text
        content = None if text is None else text.encode()
        length = self._from_main(np.array([-1 if content is None else len(content)], np.int32))
        if length[0] < 0:
            return None
        received = np.frombuffer(content, np.uint8) if self.is_main and content else np.zeros(length[0], np.uint8)
        return self._from_main(received.astype(np.int32)).astype(np.uint8).tobytes().decode()

    def first_text(self, text: str) -> str:
        """The text of the first worker whose text is not empty, on all; all call it together."""
        content = text.encode()
        lengths = self.exchange(len(content))
        first = next((rank for rank, length in enumerate(lengths) if length), None)
        if first is None or self.count == 1:
            return text
        own = np.zeros(lengths[first], np.int32)
        if self.rank == first:
            own[:] = np.frombuffer(content, np.uint8)
        return bytes(self._sum(Tensor(own)).asnumpy().astype(np.uint8)).decode()

    def _from_main(self, values: np.ndarray) -> np.ndarray:
        return values if not len(values) else make_broadcast(self.everyone)(Tensor(values)).asnumpy()


ALONE = Workers()


class SumOverWorkers(nn.Cell):
    """Sums of gradients and loss over the workers.

    All gradients are computed before the first of them is sent: where the workers' graphs differ, as the rings of their
    attention do, the order of what depends on nothing would differ too.

    Inputs:
        grads: tuple of tensors. loss: scalar.

    Returns:
        The sums, in the same order, equal to the bit on all workers.
    """

    def __init__(self, workers: Workers) -> None:
        super().__init__(auto_prefix=False)
        self.alone = workers.count == 1
        self.all_reduce = make_all_reduce(workers.group)

    def construct(self, grads: tuple, loss: Tensor) -> Any:
        if self.alone:
            return grads, loss
        done = loss
        for i in range(0, len(grads), LOOP_PIECE):
            done = self._after(done, grads[i : i + LOOP_PIECE])
        done = self.all_reduce(done)
        summed: tuple = ()
        for i in range(0, len(grads), LOOP_PIECE):
            summed += self._sums(grads[i : i + LOOP_PIECE], done)
        return summed, done

    def _after(self, done: Tensor, grads: tuple) -> Tensor:
        for grad in grads:
            done = ops.depend(done, grad)
        return done

    def _sums(self, grads: tuple, done: Tensor) -> tuple:
        summed: tuple = ()
        for grad in grads:
            summed += (self.all_reduce(ops.depend(grad, done)),)
        return summed
