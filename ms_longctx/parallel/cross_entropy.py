# SPDX-License-Identifier: Apache-2.0
"""Output layer and cross entropy whose logits are split over the workers (Shoeybi et al. 2019, arXiv 1909.08053)."""

import mindspore as ms
from mindspore import Tensor, nn, ops

IGNORE_INDEX = -100


class ShardedCrossEntropy(nn.Cell):
    """What :class:`~ms_longctx.nn.loss.LinearCrossEntropy` computes, operator by operator, each with its strategy.

    With ``vocab_parallel`` a worker has all its tokens' logits of a part of the vocabulary, and only maxima and sums
    are exchanged; without, the mp group shares the tokens, whose logits are whole, and nothing is exchanged.

    Args:
        data, mp: degrees.
        vocab_parallel: see above; the weight is split likewise.

    Inputs:
        hidden: ``(N, h)``.
        weight: ``(V, h)``.
        labels: ``(N,)`` int32, -100 is left out.
        frozen: taken for the interface; the compiler drops the gradient of a weight that does not train.

    Returns:
        ``(loss_sum, n_valid)``, fp32 scalars.
    """

    def __init__(self, data: int, mp: int, vocab_parallel: bool) -> None:
        super().__init__()
        rows, columns = (data, mp) if vocab_parallel else (data * mp, 1)
        logits, row, vector = (rows, columns), (rows, 1), (rows,)
        self.project = ops.MatMul(transpose_b=True).shard(((rows, 1), (columns, 1)))
        self.top = ops.ReduceMax(keep_dims=True).shard((logits,))
        self.shift = ops.Sub().shard((logits, row))
        self.exp = ops.Exp().shard((logits,))
        self.sum_columns = ops.ReduceSum().shard((logits,))
        self.log = ops.Log().shard((vector,))
        self.one_hot = ops.OneHot().shard((logits, (), ()))
        self.pick = ops.Mul().shard((logits, logits))
        self.subtract = ops.Sub().shard((vector, vector))
        self.clip = ops.Maximum().shard((vector, ()))
        self.supervised = ops.NotEqual().shard((vector, ()))
        self.mask = ops.Mul().shard((vector, vector))
        self.total = ops.ReduceSum().shard((vector,))
        self.count = ops.ReduceSum().shard((vector,))
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.ignored, self.zero = Tensor(IGNORE_INDEX, ms.int32), Tensor(0, ms.int32)

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        logits = ops.cast(self.project(hidden, ops.cast(weight, hidden.dtype)), ms.float32)
        shifted = self.shift(logits, ops.stop_gradient(self.top(logits, -1)))
        target = self.one_hot(self.clip(labels, self.zero), weight.shape[0], self.on, self.off)
        log_sum = self.log(self.sum_columns(self.exp(shifted), -1))
        losses = self.subtract(log_sum, self.sum_columns(self.pick(shifted, target), -1))
        valid = ops.cast(self.supervised(labels, self.ignored), ms.float32)
        return self.total(self.mask(losses, valid)), self.count(valid)
