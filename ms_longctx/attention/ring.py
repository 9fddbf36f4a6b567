# SPDX-License-Identifier: Apache-2.0
"""Ring attention: queries stay, keys and values travel (Liu et al. 2023, arXiv:2310.01889), balanced by zigzag.

A place in a ring of n holds chunks ``place`` and ``2n - 1 - place`` of the sequence (``parallel/sequence.py``). Step t
brings it the keys of the place t before it. Of the four pairs of chunks at a step only those are computed that the
mask leaves: under a causal mask always two, of the same size at every place.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention.block import make_block
from ms_longctx.attention.flash import resolve_implementation
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.merge import make_merge
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.collectives import Group, make_ring_shift
from ms_longctx.parallel.sequence import zigzag_chunks

# (half of the queries, half of the keys, chunk of the queries, chunk of the keys); halves are 0 or 1
Pair = tuple[int, int, int, int]


def ring_plan(spec: MaskSpec, degree: int, place: int, chunk: int, length: int) -> tuple[tuple[Pair, ...], ...]:
    """Which pairs of chunks a place computes at each step.

    Args:
        spec: the mask. Documents are not known here; the kernel leaves out blocks of other documents.
        degree: places in the ring.
        place: one of them.
        chunk: tokens in a chunk.
        length: tokens of the sequence without padding.

    Returns:
        For each step its pairs; the first two of step 0 are those of a chunk with itself. The steps after the last
        one that any place needs are left out, so the number of steps is the same at all places.
    """
    plans = [_steps(spec, degree, other, chunk, length) for other in range(degree)]
    needed = max(step for plan in plans for step, pairs in enumerate(plan) if pairs)
    return plans[place][: needed + 1]


def _steps(spec: MaskSpec, degree: int, place: int, chunk: int, length: int) -> tuple[tuple[Pair, ...], ...]:
    own = zigzag_chunks(place, degree)
    steps = []
    for step in range(degree):
        pairs = []
        for k_half, k_chunk in enumerate(zigzag_chunks((place - step) % degree, degree)):
            for q_half, q_chunk in enumerate(own):
                if q_chunk != k_chunk and _may_see(spec, q_chunk, k_chunk, chunk, length):
                    pairs.append((q_half, k_half, q_chunk, k_chunk))
        if step == 0:
            pairs = [(0, 0, own[0], own[0]), (1, 1, own[1], own[1]), *pairs]
        steps.append(tuple(pairs))
    return tuple(steps)


def _may_see(spec: MaskSpec, q_chunk: int, k_chunk: int, chunk: int, length: int) -> bool:
    """Whether some real query of one chunk sees some key of the other by position."""
    q_first, k_first = q_chunk * chunk, k_chunk * chunk
    q_last, k_last = min(q_first + chunk, length) - 1, min(k_first + chunk, length) - 1
    if q_last < q_first or k_last < k_first:
        return False
    if spec.causal and k_first > q_last:
        return False
    if spec.window is not None and q_first - k_last >= spec.window:
        return False
    if spec.chunk is not None:
        return q_first // spec.chunk <= k_last // spec.chunk and k_first // spec.chunk <= q_last // spec.chunk
    return True


class RingAttention(nn.Cell):
    """Attention of one place in a ring.

    K and V of the next step are sent before the present step is computed; nothing of it depends on them, so a backend
    that can will do both at once. Partial results are merged in float32 by their log-sum-exp. Backward is a second
    trip around the ring: the gradients of K and V travel with them, summed up in float32, and end at home; of the
    forward pass only the inputs, the output and its log-sum-exp are kept.

    With E = B * S/n * Hkv * D elements in the K of one place, W bytes each, and T steps (n, unless a window or chunks
    leave far keys out), a place sends ``2 E W (T - 1)`` bytes forward, and backward ``2 E W (T - 1) + 8 E T`` (the
    last term only if T > 1).

    Args:
        spec: the mask.
        group: the places of the ring in order.
        scale: factor of the scores; None means ``head_dim ** -0.5``.
        implementation: see :class:`ms_longctx.attention.flash.FlashAttention`.
        length: tokens of the whole sequence without padding; None means that there is none. Only a mask that is
            neither causal nor has documents must know it.

    Inputs:
        - **q** (B, S/n, H, D), **k**, **v** (B, S/n, Hkv, D): the tokens of this place, zigzag.
        - **q_documents** (B, S/n) int32, those of this place; **documents** (B, S) int32, those of all places in the
          order of the ring.
        - **slopes** (H,) float32.

        What the mask does not use is not read, but must be a tensor.

    Outputs:
        out (B, S/n, H, D) like ``q`` and log-sum-exp (B, H, S/n) float32.

    Raises:
        MsLongctxError: the number of tokens of this place is odd.
    """

    def __init__(
        self,
        spec: MaskSpec,
        group: Group,
        scale: float | None = None,
        implementation: str = "auto",
        length: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        implementation = resolve_implementation(implementation)
        self.block = make_block(spec, scale, implementation)
        self.merge = make_merge(implementation)
        # Cells with a bprop cannot hold ordered collectives; here each one waits for the one before by data.
        self.shift = make_ring_shift(group, 1, count=4, ordered=False)
        # One for each direction: of a function that both call, MindSpore's Ascend compiler loses the graph.
        self.shift_again = make_ring_shift(group, 1, count=4, ordered=False)
        self.shift_gradients = make_ring_shift(group, 1, count=4, ordered=False)
        self.home = [make_ring_shift(group, -step, count=4, ordered=False) for step in range(group.size)]
        degree, place = group.size, group.index

        def plan(chunk: int) -> tuple[tuple[Pair, ...], ...]:
            return ring_plan(spec, degree, place, chunk, 2 * degree * chunk if length is None else length)

        def valid(k_chunk: int, chunk: int) -> int:
            return chunk if length is None else min(max(length - k_chunk * chunk, 0), chunk)

        def column(step: int, k_half: int, chunk: int) -> int:
            return (2 * ((place - step) % degree) + k_half) * chunk

        self.plan = ms.constexpr(plan)
        self.valid = ms.constexpr(valid)
        self.column = ms.constexpr(column)

    def construct(
        self, q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor, documents: Tensor, slopes: Tensor
    ) -> tuple[Tensor, Tensor]:
        _check_even(q.shape[1])
        plan = self.plan(q.shape[1] // 2)
        queries, ids = _halves(q), self._halves_of_ids(q_documents)
        keys = _halves(k) + _halves(v)
        out_0, lse_0 = self._attend(plan[0][0], 0, queries, keys, ids, documents, slopes)
        out_1, lse_1 = self._attend(plan[0][1], 0, queries, keys, ids, documents, slopes)
        for step in range(len(plan)):
            ahead = keys
            if step + 1 < len(plan):
                ahead = self.shift(*keys)
            for i in range(2 if step == 0 else 0, len(plan[step])):
                out, lse = self._attend(plan[step][i], step, queries, keys, ids, documents, slopes)
                if plan[step][i][0] == 0:
                    out_0, lse_0 = self.merge(out_0, lse_0, out, lse)
                else:
                    out_1, lse_1 = self.merge(out_1, lse_1, out, lse)
            keys = ahead
        out_0 = ops.depend(out_0, keys[0])  # passed on to the next place even if nothing here is computed from them
        return ops.cast(ops.concat((out_0, out_1), 1), q.dtype), ops.concat((lse_0, lse_1), 2)

    def _attend(
        self, pair: Any, step: Any, queries: Tensor, keys: Tensor, ids: Tensor, documents: Tensor, slopes: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_half, k_half, q_chunk, k_chunk = pair
        chunk = queries[0].shape[1]
        k_ids = self._k_documents(documents, self.column(step, k_half, chunk), chunk)
        return self.block(
            queries[q_half], keys[k_half], keys[2 + k_half], ids[q_half], k_ids, slopes,
            q_chunk * chunk, k_chunk * chunk, self.valid(k_chunk, chunk),
        )  # fmt: skip

    def bprop(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        documents: Tensor,
        slopes: Tensor,
        results: tuple[Tensor, Tensor],
        d_results: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, ...]:
        chunk = q.shape[1] // 2
        plan = self.plan(chunk)
        queries, ids = _halves(q), self._halves_of_ids(q_documents)
        # out, lse and their gradients of the first half, then of the second
        outs, lses = _halves(_wide(results[0])), ops.chunk(results[1], 2, 2)
        d_outs, d_lses = _halves(_wide(d_results[0])), ops.chunk(d_results[1], 2, 2)
        # Not before its turn: when the forward trip is over and the gradient, which may not depend on it, is here.
        keys = _halves(ops.depend(k, (results[0], d_results[0]))) + _halves(v)
        dq_0, dq_1 = _zeros(outs[0]), _zeros(outs[1])
        zero = _zeros(_wide(keys[0]))
        dk_0, dk_1, dv_0, dv_1 = zero, zero, zero, zero
        for step in range(len(plan)):
            ahead = keys
            if step + 1 < len(plan):
                ahead = self.shift_again(*keys)
            for i in range(len(plan[step])):
                q_half, k_half, q_chunk, k_chunk = plan[step][i]
                k_ids = self._k_documents(documents, self.column(step, k_half, chunk), chunk)
                dq, dk, dv = self.block.gradient(
                    queries[q_half], keys[k_half], keys[2 + k_half], ids[q_half], k_ids, slopes,
                    q_chunk * chunk, k_chunk * chunk, self.valid(k_chunk, chunk),
                    outs[q_half], lses[q_half], d_outs[q_half], d_lses[q_half],
                )  # fmt: skip
                if q_half == 0:
                    dq_0 = dq_0 + dq
                else:
                    dq_1 = dq_1 + dq
                if k_half == 0:
                    dk_0, dv_0 = dk_0 + dk, dv_0 + dv
                else:
                    dk_1, dv_1 = dk_1 + dk, dv_1 + dv
            if step + 1 < len(plan):
                dk_0 = ops.depend(dk_0, ahead[0])
                dk_0, dk_1, dv_0, dv_1 = self.shift_gradients(dk_0, dk_1, dv_0, dv_1)
                ahead = (ops.depend(ahead[0], dk_0), ahead[1], ahead[2], ahead[3])
            keys = ahead
        dk_0, dk_1, dv_0, dv_1 = self.home[len(plan) - 1](dk_0, dk_1, dv_0, dv_1)
        return (
            ops.cast(ops.concat((dq_0, dq_1), 1), q.dtype),
            ops.cast(ops.concat((dk_0, dk_1), 1), k.dtype),
            ops.cast(ops.concat((dv_0, dv_1), 1), v.dtype),
            _zeros(q_documents), _zeros(documents), _zeros(slopes),
        )  # fmt: skip

    def _halves_of_ids(self, q_documents: Tensor) -> Any:
        if self.spec.documents:
            return _halves(q_documents)
        return q_documents, q_documents

    def _k_documents(self, documents: Tensor, column: Any, chunk: Any) -> Any:
        if self.spec.documents:
            return documents[:, column : column + chunk]
        return documents


def _halves(x: Tensor) -> Any:
    """The two chunks of (B, 2c, ...)."""
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def _zeros(x: Tensor) -> Any:
    return ops.zeros(x.shape, x.dtype)


def _wide(x: Tensor) -> Any:
    return ops.cast(x, mstype.float32)


@ms.constexpr
def _check_even(tokens: int) -> None:
    if tokens % 2 != 0:
        raise MsLongctxError(
            f"ring attention: {tokens} tokens at this place do not make two chunks; expected an even number "
            "(parallel/sequence.py splits sequences so)"
        )
