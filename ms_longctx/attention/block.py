# SPDX-License-Identifier: Apache-2.0
"""Attention of a stretch of queries to a stretch of keys, forward and backward apart: what a ring is made of.

Backward takes the output and the log-sum-exp over *all* keys, of which the block holds some: its dq is a summand of
the whole, its dk and dv are whole once all queries have been there (Liu et al. 2023, arXiv:2310.01889, appendix B).

Inputs are q (B, Sq, H, D), k and v (B, Sk, Hkv, D), document ids (B, Sq) and (B, Sk) int32, slopes (H,) float32, and
as Python integers the position of query 0, the position of key 0, and how many keys are real. What the mask does not
use is not read. Results are float32, whatever the inputs are, because they are summed up over the ring.

These Cells run inside one that has a ``bprop``. In graph mode the compiler loses functions that branch (``zeros_like``,
``arange``, ...) if they are called there in a loop and anywhere else; only operators and plain functions are used.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention.cpu import CpuFlashAttention
from ms_longctx.attention.mask import MaskSpec

_HIDDEN = -3.0e38  # a finite stand-in for -infinity


def make_block(spec: MaskSpec, scale: float | None, implementation: str) -> nn.Cell:
    """The block for ``ascend``, ``cpu_kernel`` or ``reference`` (see ``flash.resolve_implementation``)."""
    if implementation == "ascend":
        from ms_longctx.attention.block_ascend import AscendBlock

        return AscendBlock(spec, scale)
    if implementation == "cpu_kernel":
        return CpuBlock(spec, scale)
    return ReferenceBlock(spec, scale)


class CpuBlock(nn.Cell):
    """By the C++ kernels."""

    def __init__(self, spec: MaskSpec, scale: float | None) -> None:
        super().__init__()
        self.attend = CpuFlashAttention(spec, scale)

        def offsets(q_start: int, k_start: int, valid: int) -> Tensor:
            return Tensor(np.array([q_start, valid, k_start], np.int32))

        self.offsets = ms.constexpr(offsets)

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        slopes: Tensor,
        q_start: int,
        k_start: int,
        valid: int,
    ) -> tuple[Tensor, Tensor]:
        """out (B, Sq, H, D) and log-sum-exp (B, H, Sq), -inf where a query sees no key; float32."""
        offsets = self.offsets(q_start, k_start, valid)
        return self.attend(_wide(q), _wide(k), _wide(v), q_documents, k_documents, slopes, offsets)

    def gradient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        slopes: Tensor,
        q_start: int,
        k_start: int,
        valid: int,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, float32, from ``out`` and ``lse`` over all keys and their gradients, float32."""
        offsets = self.offsets(q_start, k_start, valid)
        return self.attend.backward(
            _wide(q), _wide(k), _wide(v), q_documents, k_documents, slopes, offsets, out, lse, d_out, d_lse
        )


class ReferenceBlock(nn.Cell):
    """By plain operators, in memory of Sq x Sk; arguments and results as :class:`CpuBlock`'s."""

    def __init__(self, spec: MaskSpec, scale: float | None) -> None:
        super().__init__()
        self.spec = spec
        self.scale = ms.constexpr(lambda dim: dim**-0.5 if scale is None else scale)

        def hidden(q_length: int, k_length: int, q_start: int, k_start: int, valid: int) -> Tensor:
            return Tensor(_hidden(spec, q_length, k_length, q_start, k_start, valid))

        def distance(q_length: int, k_length: int, q_start: int, k_start: int) -> Tensor:
            gap = (k_start + np.arange(k_length)) - (q_start + np.arange(q_length))[:, None]
            return Tensor(gap.astype(np.float32))

        self.hidden = ms.constexpr(hidden)
        self.distance = ms.constexpr(distance)

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        slopes: Tensor,
        q_start: int,
        k_start: int,
        valid: int,
    ) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        scores, unseen = self._scores(q, k, q_documents, k_documents, slopes, q_start, k_start, valid)
        top = ops.ReduceMax(True)(scores, -1)
        weights = ops.masked_fill(ops.exp(scores - top), unseen, 0.0)
        total = ops.ReduceSum(True)(weights, -1)
        blind = ops.equal(total, 0.0)
        total = ops.masked_fill(total, blind, 1.0)
        out = ops.matmul(weights / total, _by_kv_head(v, 1))
        lse = ops.masked_fill(top + ops.log(total), blind, float("-inf"))
        return _from_kv_head(out, group), ops.reshape(lse, (q.shape[0], q.shape[2], q.shape[1]))

    def gradient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        slopes: Tensor,
        q_start: int,
        k_start: int,
        valid: int,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`CpuBlock.gradient`."""
        group = q.shape[2] // k.shape[2]
        rows = (q.shape[0], k.shape[2], group, q.shape[1], 1)
        scores, unseen = self._scores(q, k, q_documents, k_documents, slopes, q_start, k_start, valid)
        # Unseen scores may lie far above lse, which is -inf for a row without keys.
        weights = ops.exp(ops.masked_fill(scores - ops.reshape(lse, rows), unseen, -1e4))
        out5, d_out5 = _by_kv_head(out, group), _by_kv_head(d_out, group)
        delta = ops.ReduceSum(True)(out5 * d_out5, -1) - ops.reshape(d_lse, rows)
        d_scores = weights * (ops.matmul(d_out5, ops.transpose(_by_kv_head(v, 1), (0, 1, 2, 4, 3))) - delta)
        d_scores = d_scores * self.scale(q.shape[3])
        dq = ops.matmul(d_scores, _by_kv_head(k, 1))
        dk = ops.ReduceSum(True)(ops.matmul(ops.transpose(d_scores, (0, 1, 2, 4, 3)), _by_kv_head(q, group)), 2)
        dv = ops.ReduceSum(True)(ops.matmul(ops.transpose(weights, (0, 1, 2, 4, 3)), d_out5), 2)
        return _from_kv_head(dq, group), _from_kv_head(dk, 1), _from_kv_head(dv, 1)

    def _scores(
        self,
        q: Tensor,
        k: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        slopes: Tensor,
        q_start: int,
        k_start: int,
        valid: int,
    ) -> tuple[Tensor, Tensor]:
        """Scores (B, Hkv, H // Hkv, Sq, Sk), very low where unseen, and where that is, to be broadcast to it."""
        group = q.shape[2] // k.shape[2]
        # Not ops.swapaxes: in the gradient on Ascend MindSpore's compiler loses the graph of that Python function.
        scores = ops.matmul(_by_kv_head(q, group), ops.transpose(_by_kv_head(k, 1), (0, 1, 2, 4, 3)))
        scores = scores * self.scale(q.shape[3])
        if self.spec.alibi:
            distance = self.distance(q.shape[1], k.shape[1], q_start, k_start)
            scores = scores + ops.reshape(slopes, (1, k.shape[2], group, 1, 1)) * distance
        unseen = self.hidden(q.shape[1], k.shape[1], q_start, k_start, valid)
        if self.spec.documents:
            own = ops.reshape(q_documents, (q.shape[0], 1, 1, -1, 1))
            others = ops.not_equal(own, ops.reshape(k_documents, (q.shape[0], 1, 1, 1, -1)))
            unseen = ops.logical_or(unseen, ops.logical_or(others, ops.less(own, 0)))
        return ops.masked_fill(scores, unseen, _HIDDEN), unseen


def _hidden(spec: MaskSpec, q_length: int, k_length: int, q_start: int, k_start: int, valid: int) -> np.ndarray:
    """(Sq, Sk) bool: which keys a query does not see by position."""
    i = (q_start + np.arange(q_length))[:, None]
    j = k_start + np.arange(k_length)
    unseen = np.broadcast_to(np.arange(k_length) >= valid, (q_length, k_length))
    if spec.causal:
        unseen = unseen | (j > i)
    if spec.window is not None:
        unseen = unseen | (i - j >= spec.window)
    if spec.chunk is not None:
        unseen = unseen | (i // spec.chunk != j // spec.chunk)
    return unseen


def _wide(x: Tensor) -> Tensor:
    return ops.cast(x, mstype.float32)


def _by_kv_head(x: Tensor, group: int) -> Tensor:
    """(B, S, Hkv * group, D) as (B, Hkv, group, S, D)."""
    batch, length, heads, dim = x.shape
    return ops.transpose(ops.reshape(_wide(x), (batch, length, heads // group, group, dim)), (0, 2, 3, 1, 4))


def _from_kv_head(x: Tensor, group: int) -> Tensor:
    """The inverse of :func:`_by_kv_head`."""
    batch, kv_heads, _, length, dim = x.shape
    return ops.reshape(ops.transpose(x, (0, 3, 1, 2, 4)), (batch, length, kv_heads * group, dim))
