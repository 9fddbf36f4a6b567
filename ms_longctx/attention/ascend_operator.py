# SPDX-License-Identifier: Apache-2.0
"""What every use of ``FlashAttentionScore`` and its gradient on Ascend shares: masks, biases, packed sequences.

Sources: MindSpore's documentation of ``ops.operations.nn_ops.FlashAttentionScore``, CANN's of
``aclnnFlashAttentionScore``, ``aclnnFlashAttentionVarLenScore`` and their gradients, and MindSpeed's ring attention
for the order of the softmax statistics. Compiled for Ascend without a device; no part of it has run on one. Tests
replace the two operators by a double that follows those documents.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.operations._grad_ops import FlashAttentionScoreGrad

from ms_longctx.attention.mask import MaskSpec
from ms_longctx.errors import MsLongctxError

COMPRESSED = 2048  # side of the compressed mask
MAX_SEQUENCES = 1024  # of the TND layout, in one batch
UNLIMITED = 2147483647
STATISTICS = 8  # equal numbers a row in the operator's maximum and sum
FEATURES = 16  # head sizes are multiples of it
_DIGITS, _BASE, _STEP = 3, 256, 16  # positions below 256 ** 3; 16 = sqrt(256)
_HIDING = _DIGITS * 3  # the feature that hides keys


def score(heads: int, scale: float, layout: str, mode: int, before: int, after: int) -> Any:
    """The forward operator: ``(q, k, v, shift, .., mask, .., ends, ends) -> (maximum, sum, _, out)``."""
    return ops.operations.nn_ops.FlashAttentionScore(heads, 1.0, scale, before, after, 0, layout, mode)


def score_gradient(heads: int, scale: float, layout: str, mode: int, before: int, after: int) -> Any:
    """Its gradient: ``(q, k, v, d_out, shift, .., mask, maximum, sum, _, out, ..) -> (dq, dk, dv, _)``."""
    return FlashAttentionScoreGrad(heads, 1.0, scale, before, after, 0, layout, mode)


def compressed_mask() -> Tensor:
    """The mask of the sparse modes 2, 3 and 4: 1 hides, above the diagonal."""
    return Tensor(np.triu(np.ones((COMPRESSED, COMPRESSED), np.uint8), 1))


def sparse_mode(spec: MaskSpec, gap: int, length: int) -> tuple[int, int, int]:
    """How the operator is told of a mask by position over as many keys as queries.

    Args:
        spec: its documents and chunks are not looked at.
        gap: position of query 0 less that of key 0.
        length: queries, and keys.

    Returns:
        ``sparse_mode`` (0: all is seen, 3: lower triangle, 4: band), ``pre_tokens``, ``next_tokens``: key ``s`` is
        seen by query ``r`` if ``r - pre_tokens <= s <= r + next_tokens``.
    """
    after = gap if spec.causal else UNLIMITED
    before = UNLIMITED if spec.window is None else spec.window - 1 - gap
    if before >= length - 1 and after >= length - 1:
        return 0, UNLIMITED, UNLIMITED
    if before >= length - 1 and after == 0:
        return 3, UNLIMITED, 0
    # The band has to be inside of the matrix.
    return 4, min(before, length), min(after, length)


class ColumnBias(nn.Cell):
    """A bias of keys, alike for all queries of a head, as 16 more features of queries and keys.

    The operator takes a bias of its own, but in the type of the queries, in which a distance has 8 bits. ALiBi,
    ``slope * (j - i)``, is a term of the key alone up to one of the query, which a softmax does not feel. So a key
    gets its distance from the last one in digits of base 256, and a query its head's slope in three parts of 8 bits:
    all exact in bfloat16, and their products are summed in float32. One more feature hides whole keys.

    Args:
        alibi: whether there are slopes.
    """

    def __init__(self, alibi: bool) -> None:
        super().__init__()
        self.alibi = alibi

        def distances(length: int) -> Tensor:
            digits = _digits(length - 1 - np.arange(length))
            return Tensor(np.pad(np.repeat(digits, 3, 1), ((0, 0), (0, FEATURES - 3 * _DIGITS)))[None, :, None])

        def unit() -> Tensor:
            return Tensor(np.eye(FEATURES, dtype=np.float32)[_HIDING])

        self.distances = ms.constexpr(distances)
        self.unit = ms.constexpr(unit)
        self.hiding = ms.constexpr(lambda dtype: -6e4 if dtype == mstype.float16 else -1e30)

    def queries(self, q: Tensor, slopes: Tensor, scale: float) -> Tensor:
        """q (B, S, H, D) with features, (B, S, H, D + 16)."""
        batch, length, heads, _ = q.shape
        more = ops.broadcast_to(ops.reshape(self.unit(), (1, FEATURES)), (heads, FEATURES))
        if self.alibi:
            more = more + _slope_features(slopes / scale)
        more = ops.cast(ops.reshape(more, (1, 1, heads, FEATURES)), q.dtype)
        return ops.concat((q, ops.broadcast_to(more, (batch, length, heads, FEATURES))), 3)

    def keys(self, k: Tensor, hidden: Tensor | None) -> Tensor:
        """k (B, S, Hkv, D) with features; no query sees a key where ``hidden`` (B, S) bool."""
        batch, length, heads, _ = k.shape
        more = ops.broadcast_to(ops.zeros((1, 1, 1, FEATURES), mstype.float32), (batch, length, 1, FEATURES))
        if self.alibi:
            more = more + self.distances(length)
        if hidden is not None:
            wall = ops.cast(ops.reshape(hidden, (batch, length, 1, 1)), mstype.float32) * self.hiding(k.dtype)
            more = more + wall * self.unit()
        return ops.concat((k, ops.broadcast_to(ops.cast(more, k.dtype), (batch, length, heads, FEATURES))), 3)


def no_features(x: Tensor) -> Any:
    """Values, outputs and their gradients (B, S, H, D) with 16 zeros."""
    return ops.concat((x, ops.zeros(x.shape[:3] + (FEATURES,), x.dtype)), 3)


def _digits(number: np.ndarray) -> np.ndarray:
    """(S, 3) float32: ``number = d0 + 16 d1 + 256 d2``, each with at most 8 bits set."""
    parts = [number // _BASE**place % _BASE * _STEP**place for place in range(_DIGITS)]
    return np.stack(parts, 1).astype(np.float32)


def _slope_features(slopes: Tensor) -> Any:
    """(H, 16) float32 for (H,): minus the parts of a slope, times 1, 16 and 256."""
    first = _upper_bits(slopes)
    second = _upper_bits(slopes - first)
    parts = -ops.stack((first, second, slopes - first - second), 1)
    rest = ops.zeros((slopes.shape[0], FEATURES - 3 * _DIGITS), mstype.float32)
    return ops.concat((parts, parts * _STEP, parts * _BASE, rest), 1)


def _upper_bits(x: Tensor) -> Any:
    """The first 8 bits of float32 (Veltkamp 1968: a product with 2**16 + 1 rounds the others away)."""
    wide = x * 65537.0
    return wide - (wide - x)


class PackedRuns(nn.Cell):
    """Rows of documents as sequences of the TND layout: each run of equal document and chunk is one.

    Inputs:
        documents (B, S) int32.

    Outputs:
        Their cumulated lengths (:data:`MAX_SEQUENCES`,) int64, filled up with B * S, as the operator wants them, and
        for each of the T = B * S tokens where its sequence begins and how long it is, (T,) int32.
    """

    def __init__(self, spec: MaskSpec) -> None:
        super().__init__()
        self.documents = spec.documents
        self.cumulated = ops.CumSum()
        self.sort = ops.Sort()

        def row_ends(batch: int, length: int) -> Tensor:
            position = np.arange(length)
            last = position == length - 1
            if spec.chunk is not None:
                last = last | ((position + 1) % spec.chunk == 0)
            return Tensor(np.broadcast_to(last, (batch, length)).copy())

        self.row_ends = ms.constexpr(row_ends)
        self.places = ms.constexpr(lambda total: min(MAX_SEQUENCES, total))
        self.count = ms.constexpr(lambda total: Tensor(np.arange(1, total + 1).astype(np.float32)))

    def construct(self, documents: Tensor, batch: Any, length: Any) -> Any:
        total = batch * length
        last = self.row_ends(batch, length)
        if self.documents:
            following = ops.concat((documents[:, 1:], documents[:, -1:]), 1)
            last = ops.logical_or(last, ops.not_equal(documents, following))
        last = ops.reshape(last, (total,))
        # float32 counts tokens exactly up to 2**24. More runs than places would leave an end short of the total,
        # which the operator refuses.
        ends, _ = self.sort(ops.masked_fill(self.count(total), ops.logical_not(last), float(total)))
        ends = ops.cast(ends[: self.places(total)], mstype.int32)
        ended = ops.cast(last, mstype.int32)
        run = self.cumulated(ended, 0) - ended
        begins = ops.gather(ops.concat((ops.zeros((1,), mstype.int32), ends), 0), run, 0)
        return ops.cast(ends, mstype.int64), begins, ops.gather(ends, run, 0) - begins


def from_statistics(statistics: Tensor, begins: Tensor, lengths: Tensor) -> Any:
    """(T, N) from the operator's maximum or sum in the layout TND.

    Its shape is (T, N, 8), but the numbers stand sequence by sequence, each as (N, length, 8).
    """
    total, heads, _ = statistics.shape
    flat = ops.reshape(statistics, (total * heads, STATISTICS))[:, 0]
    inside = _arange(total) - begins
    place = ops.reshape(begins * heads + inside, (total, 1)) + _row(heads) * ops.reshape(lengths, (total, 1))
    return ops.gather(flat, place, 0)


def as_statistics(rows: Tensor, begins: Tensor, lengths: Tensor) -> Any:
    """The inverse of :func:`from_statistics`: (T, N) as the gradient operator wants it, (T, N, 8)."""
    total, heads = rows.shape
    begins, lengths = ops.reshape(begins, (total, 1)), ops.reshape(lengths, (total, 1))
    inside = ops.reshape(_arange(total * heads), (total, heads)) - begins * heads
    head = ops.floor_div(inside, lengths)
    source = (begins + inside - head * lengths) * heads + head
    return eightfold(ops.gather(ops.reshape(rows, (total * heads,)), source, 0))


def eightfold(x: Tensor) -> Any:
    """(..., 8) of equal numbers."""
    return ops.broadcast_to(ops.expand_dims(x, -1), x.shape + (STATISTICS,))


@ms.constexpr
def _arange(count: int) -> Tensor:
    return Tensor(np.arange(count, dtype=np.int32))


@ms.constexpr
def _row(count: int) -> Tensor:
    return Tensor(np.arange(count, dtype=np.int32)[None])


@ms.constexpr
def check_inputs(dtype: object, shape: tuple) -> None:
    """Refuse types and head sizes that the operator does not take."""
    if dtype not in (mstype.float16, mstype.bfloat16) or shape[-1] % FEATURES != 0:
        raise MsLongctxError(
            "attention on Ascend takes float16 or bfloat16 (train.dtype fp16 or bf16) and a head size that is a "
            f"multiple of {FEATURES}; got {dtype} and {shape[-1]}"
        )
