# SPDX-License-Identifier: Apache-2.0
"""One block of ring attention by ``FlashAttentionScore`` and ``FlashAttentionScoreGrad``.

The operator's maximum and sum give the block's log-sum-exp; backward they are replaced by the log-sum-exp over all
keys and 1, and the output by that over all keys, so that the operator's gradients are the block's share of the whole.

How masks are told (:mod:`ms_longctx.attention.ascend_operator`):

- by position: causal blocks on the diagonal are sparse mode 3, blocks behind it mode 0, windows mode 4;
- documents on the diagonal: layout TND, each run of one document is a sequence;
- documents elsewhere: of two chunks that lie apart only the document that reaches from one into the other can be seen,
  so a query sees all keys of it or none. Keys of other documents are hidden by a feature, and such queries' results
  are dropped: the block is computed as a whole whatever documents it holds;
- ALiBi: by features.

Compiled for Ascend without a device; no part of it has run on one. Its arithmetic is tested with doubles of the two
operators.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention import ascend_operator as ascend
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.errors import MsLongctxError

_NOTHING = 1e30  # a log-sum-exp before which every weight is 0


class AscendBlock(nn.Cell):
    """Arguments and results as :class:`ms_longctx.attention.block.CpuBlock`'s; q, k, v float16 or bfloat16.

    Queries and keys are as many; equal document ids stand side by side in the whole sequence. The gradient of the
    log-sum-exp cannot be told to the operator: where one is given, gradients are NaN.

    Raises:
        MsLongctxError: a mask that the operators cannot express; types, head sizes or lengths they do not take.
    """

    def __init__(self, spec: MaskSpec, scale: float | None) -> None:
        super().__init__()
        # Apart, because the compiler loses graphs that both a ring's construct and its bprop use.
        self.attend = _Forward(spec, scale)
        self.backward = _Backward(spec, scale)

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
        _check_lengths(q.shape[1], k.shape[1], valid)
        return self.attend(q, k, v, q_documents, k_documents, slopes, q_start - k_start)

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
        """See :meth:`ms_longctx.attention.block.CpuBlock.gradient`; ``d_lse`` must be 0."""
        gap = q_start - k_start
        return self.backward(q, k, v, q_documents, k_documents, slopes, gap, out, lse, d_out, d_lse)


class _Side(nn.Cell):
    """What forward and backward share; ``gap`` is the position of query 0 less that of key 0."""

    def __init__(self, spec: MaskSpec, scale: float | None) -> None:
        super().__init__()
        self.spec = spec
        self.scale = ms.constexpr(lambda dim: dim**-0.5 if scale is None else scale)
        self.triangle = ascend.compressed_mask()
        self.bias = ascend.ColumnBias(spec.alibi)
        self.runs = ascend.PackedRuns(spec)
        # Refused when it is used, not here: a model has such a mask at hand even if its rows are not packed.
        self.unsupported = _unsupported(spec)
        self.mode = ms.constexpr(lambda gap, length: ascend.sparse_mode(spec, gap, length))

        def beyond_window(gap: int, length: int) -> Tensor:
            unseen = np.zeros(length, bool)
            if spec.window is not None:
                unseen = gap + np.arange(length) - (length - 1) >= spec.window
            return Tensor(unseen[None])

        def bias_of_rows(gap: int, length: int) -> Tensor:
            # From what the features add, slope * (s - (length - 1)), to ALiBi's slope * (s - gap - r).
            return Tensor((length - 1 - gap - np.arange(length)).astype(np.float32)[None, None])

        self.beyond_window = ms.constexpr(beyond_window)
        self.bias_of_rows = ms.constexpr(bias_of_rows)

    def _with_features(
        self, q: Tensor, k: Tensor, v: Tensor, k_documents: Tensor, slopes: Tensor, gap: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        hides = self.spec.documents and gap != 0
        if not self.spec.alibi and not hides:
            return q, k, v
        scale = self.scale(q.shape[3])
        hidden = ops.not_equal(k_documents, k_documents[:, -1:]) if hides else None
        return self.bias.queries(q, slopes, scale), self.bias.keys(k, hidden), ascend.no_features(v)

    def _blind(self, q: Tensor, q_documents: Tensor, k_documents: Tensor, gap: int) -> Tensor:
        """(B, S) bool: queries that see no key of the block."""
        blind = ops.broadcast_to(self.beyond_window(gap, q.shape[1]), q.shape[:2])
        if self.spec.documents:
            blind = ops.logical_or(blind, ops.less(q_documents, 0))
            if gap != 0:
                blind = ops.logical_or(blind, ops.not_equal(q_documents, k_documents[:, -1:]))
        return blind

    def _mask(self, mode: int) -> Tensor | None:
        return None if mode == 0 else self.triangle

    def _check(self, q: Tensor) -> None:
        ascend.check_inputs(q.dtype, q.shape)
        _check_mask(self.unsupported)


class _Forward(_Side):
    def construct(
        self, q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor, k_documents: Tensor, slopes: Tensor, gap: int
    ) -> tuple[Tensor, Tensor]:
        self._check(q)
        dim = q.shape[3]
        blind = self._blind(q, q_documents, k_documents, gap)
        q, k, v = self._with_features(q, k, v, k_documents, slopes, gap)
        if self.spec.documents and gap == 0:
            out, lse = self._packed(q, k, v, q_documents, self.scale(dim))
        else:
            mode, before, after = self.mode(gap, q.shape[1])
            operator = ascend.score(q.shape[2], self.scale(dim), "BSND", mode, before, after)
            top, total, _, out = operator(q, k, v, None, None, None, self._mask(mode), None, None, None)
            lse = top[..., 0] + ops.log(total[..., 0])
        if self.spec.alibi:
            lse = lse + ops.reshape(slopes, (1, -1, 1)) * self.bias_of_rows(gap, q.shape[1])
        out = ops.masked_fill(ops.cast(out[..., :dim], mstype.float32), ops.reshape(blind, blind.shape + (1, 1)), 0.0)
        return out, ops.masked_fill(lse, ops.expand_dims(blind, 1), float("-inf"))

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: Any) -> Any:
        batch, length, heads, _ = q.shape
        ends, begins, lengths = self.runs(documents, batch, length)
        mode, before, after = self.mode(0, length)
        operator = ascend.score(heads, scale, "TND", mode, before, after)
        top, total, _, out = operator(
            _flat(q), _flat(k), _flat(v), None, None, None, self._mask(mode), None, ends, ends
        )
        lse = ascend.from_statistics(top, begins, lengths) + ops.log(ascend.from_statistics(total, begins, lengths))
        return ops.reshape(out, q.shape), ops.transpose(ops.reshape(lse, (batch, length, heads)), (0, 2, 1))


class _Backward(_Side):
    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        slopes: Tensor,
        gap: int,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim, length = q.shape[3], q.shape[1]
        lse = ops.masked_fill(lse, ops.not_equal(d_lse, 0.0), float("nan"))
        if self.spec.alibi:
            lse = lse - ops.reshape(slopes, (1, -1, 1)) * self.bias_of_rows(gap, length)
        blind = ops.expand_dims(self._blind(q, q_documents, k_documents, gap), 1)
        lse = ops.masked_fill(lse, ops.logical_or(blind, ops.equal(lse, float("-inf"))), _NOTHING)
        out, d_out = ops.cast(out, q.dtype), ops.cast(d_out, q.dtype)
        q, k, v = self._with_features(q, k, v, k_documents, slopes, gap)
        if q.shape[3] > dim:
            out, d_out = ascend.no_features(out), ascend.no_features(d_out)
        if self.spec.documents and gap == 0:
            dq, dk, dv = self._packed(q, k, v, q_documents, out, lse, d_out, self.scale(dim))
        else:
            mode, before, after = self.mode(gap, length)
            operator = ascend.score_gradient(q.shape[2], self.scale(dim), "BSND", mode, before, after)
            top = ascend.eightfold(lse)
            dq, dk, dv, _ = operator(
                q, k, v, d_out, None, None, None, self._mask(mode), top, _ones(top), None, out, None, None, None
            )
        return _wide(dq[..., :dim]), _wide(dk[..., :dim]), _wide(dv[..., :dim])

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, scale: Any
    ) -> Any:
        batch, length, heads, _ = q.shape
        ends, begins, lengths = self.runs(documents, batch, length)
        mode, before, after = self.mode(0, length)
        operator = ascend.score_gradient(heads, scale, "TND", mode, before, after)
        rows = ops.reshape(ops.transpose(lse, (0, 2, 1)), (batch * length, heads))
        top = ascend.as_statistics(rows, begins, lengths)
        dq, dk, dv, _ = operator(
            _flat(q), _flat(k), _flat(v), _flat(d_out), None, None, None, self._mask(mode), top, _ones(top), None,
            _flat(out), None, ends, ends,
        )  # fmt: skip
        return ops.reshape(dq, q.shape), ops.reshape(dk, k.shape), ops.reshape(dv, v.shape)


def _unsupported(spec: MaskSpec) -> str:
    """What of a mask a ring on Ascend cannot do, or nothing."""
    if spec.chunk is not None:
        return "chunks (MaskSpec.chunk)"
    if spec.documents and not spec.causal:
        return "documents without a causal mask"
    return ""


def _flat(x: Tensor) -> Any:
    """(B, S, H, D) as (T, H, D)."""
    return ops.reshape(x, (x.shape[0] * x.shape[1], x.shape[2], x.shape[3]))


def _ones(x: Tensor) -> Any:
    return ops.ones(x.shape, mstype.float32)


def _wide(x: Tensor) -> Any:
    return ops.cast(x, mstype.float32)


@ms.constexpr
def _check_mask(unsupported: str) -> None:
    if unsupported:
        raise MsLongctxError(
            f"ring attention on Ascend: FlashAttentionScore cannot express {unsupported}; expected attention_mode "
            "ulysses"
        )


@ms.constexpr
def _check_lengths(q_length: int, k_length: int, valid: int) -> None:
    if q_length != k_length or valid != k_length:
        raise MsLongctxError(
            f"ring attention on Ascend: {q_length} queries over {valid} of {k_length} keys; expected whole chunks of "
            "the same length (padding is document -1)"
        )
