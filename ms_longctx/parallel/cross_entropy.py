# SPDX-License-Identifier: Apache-2.0
"""Output layer and cross entropy whose logits are split over the workers (Shoeybi et al. 2019, arXiv 1909.08053)."""

import mindspore as ms
from mindspore import Tensor, nn, ops

IGNORE_INDEX = -100
CHUNK_BYTES = 256 << 20  # of fp32 logits that a worker has at once
_MOST_CHUNKS = 64


class ShardedCrossEntropy(nn.Cell):
    """What :class:`~ms_longctx.nn.loss.LinearCrossEntropy` computes, operator by operator, each with its strategy.

    With ``vocab_parallel`` a worker has all its tokens' logits of a part of the vocabulary, and only maxima and sums
    are exchanged; without, the mp group shares the tokens, whose logits are whole, and nothing is exchanged. Tokens
    are taken in chunks of about :data:`CHUNK_BYTES` of logits, which the backward pass computes again; the weight's
    gradients of the chunks are added in the type of ``hidden``.

    Compiled for Ascend without a device; no part of it has run on one.

    Args:
        data, mp: degrees.
        vocab_parallel: see above; the weight is split likewise.
        vocabulary: V below; the compiler does not know the shape of a weight that was cast.

    Inputs:
        hidden: ``(N, h)``.
        weight: ``(V, h)``.
        labels: ``(N,)`` int32, -100 is left out.
        frozen: taken for the interface; the compiler drops the gradient of a weight that does not train.

    Returns:
        ``(loss_sum, n_valid)``, fp32 scalars.
    """

    def __init__(self, data: int, mp: int, vocab_parallel: bool, vocabulary: int) -> None:
        super().__init__()
        rows, columns = (data, mp) if vocab_parallel else (data * mp, 1)
        self.rows = rows
        self.whole = _ChunkLoss(rows, columns, vocabulary)
        self.chunk = _ChunkLoss(rows, columns, vocabulary)
        self.chunk.forget()
        self.cut_hidden = ops.StridedSlice().shard(((rows, 1, 1, 1),))
        self.cut_labels = ops.StridedSlice().shard(((rows, 1, 1),))

        def chunks(tokens: int) -> int:
            return chunk_count(tokens // rows, vocabulary // columns)

        self.chunks = ms.constexpr(chunks)
        self.add = ops.Add().shard(((rows,), (rows,)))
        self.total = ops.ReduceSum().shard(((rows,),))
        self.count = ops.ReduceSum().shard(((rows,),))

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        tokens, size = hidden.shape
        chunks = self.chunks(tokens)
        weight = ops.cast(weight, hidden.dtype)  # once: the gradients of its uses are added up before the workers' are
        if chunks == 1:
            losses, valid = self.whole(hidden, weight, labels)
            return self.total(losses), self.count(valid)
        rows, length = self.rows, tokens // self.rows // chunks
        # A worker's tokens stay together: chunks are cut where nothing is split.
        hidden = ops.reshape(hidden, (rows, chunks, length, size))
        labels = ops.reshape(labels, (rows, chunks, length))
        losses, valid = self.part(hidden, weight, labels, 0, length)
        for place in range(1, chunks):
            # One after another.
            more, more_valid = self.part(ops.depend(hidden, losses), weight, labels, place, length)
            losses, valid = self.add(losses, more), self.add(valid, more_valid)
        return self.total(losses), self.count(valid)

    def part(self, hidden: Tensor, weight: Tensor, labels: Tensor, place: int, length: int) -> tuple[Tensor, Tensor]:
        """Losses of one chunk of every worker's tokens."""
        rows, size = self.rows, hidden.shape[3]
        chunk = self.cut_hidden(hidden, (0, place, 0, 0), (rows, place + 1, length, size), (1, 1, 1, 1))
        target = self.cut_labels(labels, (0, place, 0), (rows, place + 1, length), (1, 1, 1))
        return self.chunk(ops.reshape(chunk, (rows * length, size)), weight, ops.reshape(target, (rows * length,)))


def chunk_count(tokens: int, vocabulary: int) -> int:
    """Chunks of equal size that a worker's logits (tokens, vocabulary) are cut into: a power of two, at most 64."""
    chunks = 1
    while tokens * vocabulary * 4 > CHUNK_BYTES * chunks and chunks < _MOST_CHUNKS and tokens % (2 * chunks) == 0:
        chunks *= 2
    return chunks


class _ChunkLoss(nn.Cell):
    """Loss of each of some tokens (0 where it has no label) and 1 for those that have one, both fp32 ``(N,)``.

    Args:
        rows, columns: workers that the tokens and the vocabulary are split over.
        vocabulary: size.
    """

    def __init__(self, rows: int, columns: int, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
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
        self.cast = ops.Cast()
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.ignored, self.zero = Tensor(IGNORE_INDEX, ms.int32), Tensor(0, ms.int32)

    def forget(self) -> None:
        """Have the backward pass compute everything again.

        By operator: the compiler loses the layout of a weight that it passes, cast, to a recomputed cell.
        """
        kept = (self.project, self.top, self.shift, self.exp, self.sum_columns, self.log, self.one_hot, self.pick)
        for operator in (*kept, self.subtract, self.clip, self.supervised, self.mask, self.cast):
            operator.recompute()

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.cast(self.project(hidden, weight), ms.float32)
        shifted = self.shift(logits, ops.stop_gradient(self.top(logits, -1)))
        target = self.one_hot(self.clip(labels, self.zero), self.vocabulary, self.on, self.off)
        log_sum = self.log(self.sum_columns(self.exp(shifted), -1))
        losses = self.subtract(log_sum, self.sum_columns(self.pick(shifted, target), -1))
        valid = self.cast(self.supervised(labels, self.ignored), ms.float32)
        return self.mask(losses, valid), valid
