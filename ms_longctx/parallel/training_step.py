# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over many Ascend devices as one graph: micro batches, backward, clipping and update."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import lazy_inline

from ms_longctx.optim.adamw import AdamW


def loss_scale() -> Parameter:
    """The factor on an fp16 loss, fp32, 1 at first."""
    return Parameter(Tensor(1.0, ms.float32), name="loss_scale", requires_grad=False)


class MicroBatchLoss(nn.Cell):
    """Summed loss of one micro batch in nats; MindSpore compiles it once and calls it for each micro batch.

    Args:
        objective: the loss.
        scale: factor on it; ``None``: 1.
    """

    @lazy_inline
    def __init__(self, objective: nn.Cell, scale: Parameter | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.objective = objective
        self.scale = scale

    def construct(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        loss = self.objective(input_ids, labels, position_ids, document_ids)
        if self.scale is not None:
            loss = loss * self.scale
        return loss


class ShardedStep(nn.Cell):
    """Forward and backward over all micro batches, then the update.

    Args:
        network: summed loss over the micro batches.
        optimizer: its norm is replaced by one over all workers.
        accumulates: MindSpore sums the gradients of several micro batches in ``accu_grads``.
        optimizer_shard: they are scattered to their owners after the last one.
        workers: of one pipeline stage.
        scale: that of fp16, by which ``network`` multiplies its loss; ``None``: 1.

    Inputs:
        input_ids, labels, position_ids, document_ids: ``(micro batches * data workers, tokens)`` int32.

    Set ``learning_rate`` and ``grad_scale`` (1 / number of supervised tokens), with fp16 also ``loss_scale`` (then
    ``grad_scale`` is 1 / (loss scale * number of tokens)), before each call, in place: they are parameters, because
    MindSpore does not find the pipeline in a step with other inputs than the batch.

    Returns:
        Summed loss (on the last pipeline stage, without the scale), global norm of the gradient, whether it is finite.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: AdamW,
        accumulates: bool,
        optimizer_shard: bool,
        workers: int,
        scale: Parameter | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        network.set_grad()
        self.network = network
        self.optimizer = optimizer
        self.norm = ShardedNorm(optimizer.parameters, workers)
        optimizer.norm = self.norm
        self.weights = optimizer.parameters
        self.gradient = ops.GradOperation(get_by_list=True)
        self.accumulates = accumulates
        self.takes_sums = accumulates and not optimizer_shard
        self.learning_rate = Parameter(Tensor(0.0, ms.float32), name="learning_rate", requires_grad=False)
        self.grad_scale = Parameter(Tensor(1.0, ms.float32), name="grad_scale", requires_grad=False)
        self.loss_scale = scale
        self.map = ops.HyperMap()
        if accumulates:
            self.accu_grads = self.weights.clone(prefix="accu_grads", init="zeros")

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
    ) -> Any:
        batch = (input_ids, labels, position_ids, document_ids)
        loss = self.network(*batch)
        grads = self.gradient(self.network, self.weights)(*batch)
        sums = grads
        if self.takes_sums:
            sums = ops.depend(self.accu_grads, grads)
        norm, finite = self.optimizer(sums, self.learning_rate, self.grad_scale)
        loss = ops.depend(loss, norm)
        if self.loss_scale is not None:
            loss = loss / self.loss_scale
        if self.accumulates:
            loss = ops.depend(loss, self.map(ops.partial(_clear, norm), self.accu_grads))
        return loss, norm, finite


class ShardedNorm(nn.Cell):
    """Global norm of gradients whose pieces lie on different workers.

    Every worker adds up the squares of its pieces, each divided by the number of workers that hold the same piece; the
    sum over all workers is the square of the norm. How MindSpore cut a parameter is known when the program is compiled,
    so the divisors are a parameter that :meth:`set_pieces` fills afterwards.

    Args:
        parameters: of the gradients, whole.
        workers: of one pipeline stage.
    """

    def __init__(self, parameters: Sequence[Parameter], workers: int) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = tuple(parameters)
        self.workers = workers
        self.whole = [parameter.size for parameter in parameters]
        shares = [
            Parameter(Tensor(1.0, ms.float32), name=f"norm_share.{parameter.name}", requires_grad=False)
            for parameter in parameters
        ]
        self.shares = ParameterTuple(shares)
        self.map = ops.HyperMap()
        self.sum_over_workers = ops.AllReduce(ops.ReduceOp.SUM)

    def set_pieces(self) -> list[float]:
        """Take the sizes that the parameters have now, after compilation; returns the factors."""
        pairs = zip(self.whole, self.parameters, strict=True)
        shares = [whole / (self.workers * parameter.size) for whole, parameter in pairs]
        for parameter, share in zip(self.shares, shares, strict=True):
            parameter.set_data(Tensor(share, ms.float32))
        return shares

    def construct(self, grads: tuple) -> Tensor:
        squares = self.map(_weighted_square, self.shares, grads)
        return ops.sqrt(self.sum_over_workers(ops.addn(squares)))


# Maps over the parameters and not loops: of a map a pipeline takes out what belongs to other stages.
_weighted_square = ops.MultitypeFuncGraph("weighted_square")
_clear = ops.MultitypeFuncGraph("clear")


@_weighted_square.register("Tensor", "Tensor")
def _weighted_square_one(share: Tensor, grad: Tensor) -> Tensor:
    return ops.ReduceSum()(ops.square(ops.cast(grad, ms.float32))) * share


@_clear.register("Tensor", "Tensor")
def _clear_one(norm: Tensor, total: Tensor) -> Tensor:
    return ops.assign(total, ops.depend(ops.zeros_like(total), norm))
