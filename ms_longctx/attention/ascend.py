# SPDX-License-Identifier: Apache-2.0
"""Attention by MindSpore's ``FlashAttentionScore`` on Ascend, never with a dense mask of S x S.

How the description maps to the operator:

- causal: mode 3 (lower right triangle), compressed mask 2048 x 2048;
- window: mode 4 (band), the same mask;
- documents and chunks: layout TND, each run of equal document and chunk is a sequence of its own;
- ALiBi: features of queries and keys (:class:`ms_longctx.attention.ascend_operator.ColumnBias`);
- a chunk of queries over a cache (``offsets``): mode 1 with a mask of (Sq, Sk), linear in the cache.

Compiled for Ascend without a device; no part of it has run on one. Tests compare its arithmetic, with a double of the
operator, to torch.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention import ascend_operator as ascend
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.reference import visible
from ms_longctx.errors import MsLongctxError

MAX_CACHED_QUERIES = 2048  # query rows over a cache, which need an explicit mask


class AscendFlashAttention(nn.Cell):
    """Flash attention on Ascend; arguments and results as :class:`ReferenceAttention`'s.

    Equal document ids must stand side by side (as packing leaves them), at most 1024 documents and chunks in a batch.
    q, k, v are float16 or bfloat16. The log-sum-exp carries no gradient.

    Raises:
        MsLongctxError: a combination that the operator cannot express.
    """

    def __init__(self, spec: MaskSpec, scale: float | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.scale = ms.constexpr(lambda dim: dim**-0.5 if scale is None else scale)
        self.packed = spec.documents or spec.chunk is not None
        self.triangle = ascend.compressed_mask()
        self.bias = ascend.ColumnBias(spec.alibi)
        self.runs = ascend.PackedRuns(spec)
        # Refused when it is used, not here: a model has such a mask at hand even if its rows are not packed.
        self.unsupported = self.packed and not spec.causal
        # Of queries that are fewer than keys, the last stands at the last key: the operator's anchor too.
        self.mode = ms.constexpr(lambda length: ascend.sparse_mode(spec, 0, length))

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
        ascend.check_inputs(q.dtype, q.shape)
        dim = q.shape[3]
        scale = self.scale(dim)
        if self.spec.alibi:
            q, k, v = self.bias.queries(q, alibi_slopes, scale), self.bias.keys(k, None), ascend.no_features(v)
        if offsets.shape[-1] > 1:
            out, lse, position = self._over_cache(q, k, v, q_documents, k_documents, offsets, scale)
        else:
            position = ops.expand_dims(ops.arange(k.shape[1] - q.shape[1], k.shape[1]), 0)
            if self.packed:
                _check_packed(self.unsupported, q.shape[1], k.shape[1])
                out, lse = self._as_sequences(q, k, v, q_documents, scale)
            else:
                mode, before, after = self.mode(k.shape[1])
                mask = None if mode == 0 else self.triangle
                operator = ascend.score(q.shape[2], scale, "BSND", mode, before, after)
                top, total, _, out = operator(q, k, v, None, None, None, mask, None, None, None)
                lse = _log_sum_exp(top, total)
        if self.spec.alibi:
            # The features add slope * (j - last key).
            out = out[..., :dim]
            behind = ops.cast(k.shape[1] - 1 - position, mstype.float32)
            lse = lse + ops.reshape(alibi_slopes, (1, -1, 1)) * ops.expand_dims(behind, 1)
        return out, lse

    def _as_sequences(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: Any) -> Any:
        batch, length, heads, dim = q.shape
        ends, begins, lengths = self.runs(documents, batch, length)
        mode, before, after = self.mode(length)
        operator = ascend.score(heads, scale, "TND", mode, before, after)
        top, total, _, out = operator(
            ops.reshape(q, (batch * length, heads, dim)),
            ops.reshape(k, (batch * length, k.shape[2], dim)),
            ops.reshape(v, (batch * length, k.shape[2], dim)),
            None, None, None, self.triangle, None, ends, ends,
        )  # fmt: skip
        out = ops.reshape(out, q.shape)
        lse = ascend.from_statistics(top, begins, lengths) + ops.log(ascend.from_statistics(total, begins, lengths))
        lse = ops.transpose(ops.reshape(lse, (batch, length, heads)), (0, 2, 1))
        if self.spec.documents:  # padding is a sequence of its own for the operator; here it sees nothing
            out, lse = _without(ops.less(documents, 0), out, lse)
        return out, ops.stop_gradient(lse)

    def _over_cache(
        self, q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor, k_documents: Tensor, offsets: Tensor, scale: Any
    ) -> Any:
        _check_cached_queries(q.shape[1])
        offsets = offsets.reshape((-1, offsets.shape[-1]))
        rows = ops.arange(k.shape[1]).astype(mstype.int32).expand_dims(0)
        k_position = rows
        q_position = ops.arange(q.shape[1]).astype(mstype.int32).expand_dims(0) + offsets[:, 0:1]
        q_row = q_position
        if offsets.shape[1] == 3:
            k_position = rows + offsets[:, 2:3]
            q_row = q_position - offsets[:, 2:3]
        seen = visible(self.spec, q_position, k_position, q_documents, k_documents)
        seen = ops.logical_and(seen, (rows < offsets[:, 1:2]).expand_dims(1))
        hidden = ops.logical_not(seen).expand_dims(1).broadcast_to((q.shape[0], 1, q.shape[1], k.shape[1]))
        operator = ascend.score(q.shape[2], scale, "BSND", 1, ascend.UNLIMITED, ascend.UNLIMITED)
        top, total, _, out = operator(q, k, v, None, None, None, hidden.astype(mstype.uint8), None, None, None)
        blind = ops.logical_not(seen.any(axis=-1))  # (B or 1, Sq); the operator averages over everything there
        out, lse = _without(blind, out, _log_sum_exp(top, total))
        return out, lse, q_row


def _without(blind: Tensor, out: Tensor, lse: Tensor) -> Any:
    """Results of the operator where ``blind`` (B or 1, S) says which queries see nothing."""
    out = ops.masked_fill(out, blind.expand_dims(2).expand_dims(3), 0.0)
    return out, ops.masked_fill(lse, blind.expand_dims(1), float("-inf"))


def _log_sum_exp(top: Tensor, total: Tensor) -> Any:
    """(B, H, S) from the operator's maximum and sum, each (B, H, S, 8) with eight equal numbers."""
    return ops.stop_gradient(top[..., 0] + ops.log(total[..., 0]))


@ms.constexpr
def _check_packed(unsupported: bool, q_length: int, k_length: int) -> None:
    if unsupported:
        raise MsLongctxError(
            "attention on Ascend: documents and chunks go with a causal mask only (FlashAttentionScore, layout TND)"
        )
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
