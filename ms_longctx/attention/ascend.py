# SPDX-License-Identifier: Apache-2.0
"""Attention by MindSpore's ``FlashAttentionScore`` on Ascend, never with a dense mask of S x S.

How the description maps to the operator (its ``sparse_mode`` and compressed masks are described in MindSpore's
documentation of ``ops.operations.nn_ops.FlashAttentionScore``):

- causal: mode 3 (lower right triangle), compressed mask 2048 x 2048;
- window: mode 4 (band), the same mask;
- documents and chunks: layout TND, each run of equal document and chunk is a sequence of its own;
- ALiBi: ``real_shift``; under a causal mask its last 1024 rows are enough;
- a chunk of queries over a cache (``offsets``): mode 1 with a mask of (Sq, Sk), linear in the cache.

Written from the documentation: no part of it has run on a device.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.reference import visible
from ms_longctx.errors import MsLongctxError

COMPRESSED = 2048  # side of the compressed mask
ALIBI_ROWS = 1024  # rows of real_shift under a causal mask
MAX_CACHED_QUERIES = 2048  # query rows over a cache, which need an explicit mask
MAX_SEQUENCES = 1024  # of the TND layout, in one batch
_UNLIMITED = 2147483647


class AscendFlashAttention(nn.Cell):
    """Flash attention on Ascend; arguments and results as :class:`ReferenceAttention`'s.

    Equal document ids must stand side by side (as packing leaves them), at most :data:`MAX_SEQUENCES` documents and
    chunks in a batch. q, k, v are float16 or bfloat16. The log-sum-exp carries no gradient.

    Raises:
        MsLongctxError: a combination that the operator cannot express.
    """

    def __init__(self, spec: MaskSpec, scale: float | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.scale = scale
        self.packed = spec.documents or spec.chunk is not None
        self.triangle = Tensor(np.triu(np.ones((COMPRESSED, COMPRESSED), np.uint8), 1))
        # Refused when it is used, not here: a model has such a mask at hand even if its rows are not packed.
        self.unsupported = self.packed and (spec.window is not None or spec.alibi or not spec.causal)

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        alibi_slopes: Tensor,
        offsets: Tensor,
    ) -> Any:
        _check_inputs(q.dtype, q.shape)
        if offsets.shape[-1] > 1:
            return self._over_cache(q, k, v, q_documents, k_documents, alibi_slopes, offsets)
        if self.packed:
            _check_packed(self.unsupported)
            return self._packed(q, k, v, q_documents)
        mode, mask, before, after = 0, None, _UNLIMITED, _UNLIMITED
        if self.spec.window is not None:
            mode, mask, before = 4, self.triangle, self.spec.window - 1
            after = 0 if self.spec.causal else _UNLIMITED
        elif self.spec.causal:
            mode, mask, after = 3, self.triangle, 0
        shift = None
        if self.spec.alibi:
            rows = q.shape[1]
            if self.spec.causal and self.spec.window is None and rows > ALIBI_ROWS:
                rows = ALIBI_ROWS
            _check_alibi_rows(rows)
            positions = ops.arange(k.shape[1] - rows, k.shape[1]).expand_dims(0)
            shift = self._alibi(alibi_slopes, positions, ops.arange(k.shape[1]).expand_dims(0), q.dtype)
        operator = self._operator(q, "BSND", mode, before, after)
        top, total, _, out = operator(q, k, v, shift, None, None, mask, None, None, None)
        return out, _log_sum_exp(top, total)

    def _operator(self, q: Tensor, layout: str, mode: int, before: int, after: int) -> Any:
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return ops.operations.nn_ops.FlashAttentionScore(q.shape[-2], 1.0, scale, before, after, 0, layout, mode)

    def _alibi(self, slopes: Tensor, q_position: Tensor, k_position: Tensor, dtype: Tensor) -> Any:
        distance = (k_position.expand_dims(1) - q_position.expand_dims(2)).astype(mstype.float32)
        return (slopes.reshape((1, -1, 1, 1)) * distance.expand_dims(1)).astype(dtype)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Any:
        batch, length, heads, dim = q.shape
        _check_same_length(length, k.shape[1])
        ends = self._sequence_ends(documents, batch, length)
        flat_q = q.reshape((batch * length, heads, dim))
        flat_k = k.reshape((batch * length, k.shape[2], dim))
        flat_v = v.reshape((batch * length, k.shape[2], dim))
        operator = self._operator(flat_q, "TND", 3, _UNLIMITED, 0)
        top, total, _, out = operator(flat_q, flat_k, flat_v, None, None, None, self.triangle, None, ends, ends)
        out = out.reshape(q.shape)
        lse = (top[..., 0] + ops.log(total[..., 0])).reshape((batch, length, heads)).transpose((0, 2, 1))
        if self.spec.documents:  # padding is a sequence of its own for the operator; here it sees nothing
            real = documents >= 0
            out = out * real.astype(out.dtype).expand_dims(2).expand_dims(3)
            blind = ops.broadcast_to(ops.logical_not(real).expand_dims(1), lse.shape)
            lse = ops.select(blind, ops.full_like(lse, float("-inf")), lse)
        return out, ops.stop_gradient(lse)

    def _sequence_ends(self, documents: Tensor, batch: Tensor, length: Tensor) -> Any:
        """Cumulated lengths of the runs, (MAX_SEQUENCES,) int64, filled up with the last: batch * length."""
        position = ops.arange(length)
        last = (position == length - 1).expand_dims(0).broadcast_to((batch, length))
        if self.spec.chunk is not None:
            last = ops.logical_or(last, ((position + 1) % self.spec.chunk == 0).expand_dims(0))
        if self.spec.documents:
            following = ops.concat((documents[:, 1:], documents[:, -1:]), axis=1)
            last = ops.logical_or(last, documents != following)
        total = batch * length
        index = ops.arange(total) + 1
        ends = ops.select(last.reshape((total,)), index, ops.full_like(index, total)).astype(mstype.float32)
        # More runs than places would leave an end short of the total, which the operator refuses.
        ends, _ = ops.sort(ends)
        return ends[: min(MAX_SEQUENCES, total)].astype(mstype.int64)

    def _over_cache(
        self, q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor, k_documents: Tensor, slopes: Tensor, offsets: Tensor
    ) -> Any:
        _check_cached_queries(q.shape[1])
        offsets = offsets.reshape((-1, offsets.shape[-1]))
        rows = ops.arange(k.shape[1]).astype(mstype.int32).expand_dims(0)
        k_position = rows
        if offsets.shape[1] == 3:
            k_position = rows + offsets[:, 2:3]
        q_position = ops.arange(q.shape[1]).astype(mstype.int32).expand_dims(0) + offsets[:, 0:1]
        seen = visible(self.spec, q_position, k_position, q_documents, k_documents)
        seen = ops.logical_and(seen, (rows < offsets[:, 1:2]).expand_dims(1))
        hidden = ops.logical_not(seen).expand_dims(1).broadcast_to((q.shape[0], 1, q.shape[1], k.shape[1]))
        shift = None
        if self.spec.alibi:
            shift = self._alibi(slopes, q_position, k_position, q.dtype)
        operator = self._operator(q, "BSND", 1, _UNLIMITED, _UNLIMITED)
        top, total, _, out = operator(q, k, v, shift, None, None, hidden.astype(mstype.uint8), None, None, None)
        # The operator averages over everything where nothing is seen.
        blind = ops.logical_not(seen.any(axis=-1))  # (B or 1, Sq)
        out = out * ops.logical_not(blind).astype(out.dtype).expand_dims(2).expand_dims(3)
        lse = _log_sum_exp(top, total)
        blind = blind.expand_dims(1).broadcast_to(lse.shape)
        return out, ops.select(blind, ops.full_like(lse, float("-inf")), lse)


def _log_sum_exp(top: Tensor, total: Tensor) -> Any:
    """(B, H, S) from the operator's maximum and sum, each (B, H, S, 8) with eight equal numbers."""
    return ops.stop_gradient(top[..., 0] + ops.log(total[..., 0]))


@ms.constexpr
def _check_packed(unsupported: bool) -> None:
    if unsupported:
        raise MsLongctxError(
            "attention on Ascend: documents and chunks go with a causal mask only, without window or ALiBi "
            "(FlashAttentionScore, layout TND)"
        )


@ms.constexpr
def _check_inputs(dtype: object, shape: tuple) -> None:
    if dtype not in (mstype.float16, mstype.bfloat16) or shape[-1] % 16 != 0:
        raise MsLongctxError(
            "attention on Ascend takes float16 or bfloat16 and a head size that is a multiple of 16; got "
            f"{dtype} and {shape[-1]}"
        )


@ms.constexpr
def _check_same_length(q_length: int, k_length: int) -> None:
    if q_length != k_length:
        raise MsLongctxError(
            f"attention on Ascend: documents and chunks need as many queries as keys without offsets; got "
            f"{q_length} and {k_length}"
        )


@ms.constexpr
def _check_cached_queries(q_length: int) -> None:
    if q_length > MAX_CACHED_QUERIES:
        raise MsLongctxError(
            f"attention on Ascend over a cache: {q_length} queries at a time; expected at most {MAX_CACHED_QUERIES} "
            "(prefill in chunks)"
        )


@ms.constexpr
def _check_alibi_rows(rows: int) -> None:
    if rows > ALIBI_ROWS:
        raise MsLongctxError(
            f"attention on Ascend: ALiBi beyond {ALIBI_ROWS} tokens needs a plain causal mask (compressed "
            f"real_shift); {rows} rows of bias would be dense"
        )
