# SPDX-License-Identifier: Apache-2.0
"""Attention out of plain MindSpore operators: what the numbers mean, and the way out where no kernel runs.

Needs memory of (Sq, Sk) for every head. Runs on every backend, in float32 inside.
"""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention.mask import MaskSpec

_HIDDEN = -3.0e38  # a finite stand-in for -infinity keeps gradients of unseen keys at 0 instead of NaN


def visible(spec: MaskSpec, q_position: Tensor, k_position: Tensor, q_documents: Tensor, k_documents: Tensor) -> Tensor:
    """The mask, dense.

    Args:
        spec: what to apply.
        q_position: (B or 1, Sq) int32.
        k_position: (B or 1, Sk) int32.
        q_documents: (B, Sq) int32; ignored unless ``spec.documents``.
        k_documents: (B, Sk) int32; ignored unless ``spec.documents``.

    Returns:
        (B or 1, Sq, Sk) bool, true where the query sees the key.
    """
    i = q_position.expand_dims(2)
    j = k_position.expand_dims(1)
    seen = ops.equal(i - i + j, j)
    if spec.causal:
        seen = ops.logical_and(seen, j <= i)
    if spec.window is not None:
        seen = ops.logical_and(seen, i - j < spec.window)
    if spec.chunk is not None:
        seen = ops.logical_and(seen, ops.floor_divide(i, spec.chunk) == ops.floor_divide(j, spec.chunk))
    if spec.documents:
        same = q_documents.expand_dims(2) == k_documents.expand_dims(1)
        seen = ops.logical_and(seen, ops.logical_and(same, q_documents.expand_dims(2) >= 0))
    return seen


class ReferenceAttention(nn.Cell):
    """Attention by dense operators; arguments and results as :class:`ms_longctx.attention.flash.FlashAttention`.

    ``construct`` takes every argument; those the description does not use are ignored. It returns ``(out, lse)``.
    """

    def __init__(self, spec: MaskSpec, scale: float | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.scale = scale

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        alibi_slopes: Tensor,
        offsets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        batch, q_length, heads, dim = q.shape
        k_length, kv_heads = k.shape[1], k.shape[2]
        group = heads // kv_heads
        scale = dim**-0.5 if self.scale is None else self.scale

        rows = ops.arange(k_length).astype(mstype.int32).expand_dims(0)
        q_position = ops.arange(q_length).astype(mstype.int32).expand_dims(0)
        k_position = rows
        if offsets.shape[-1] == 1:
            q_position = q_position + (k_length - q_length)
            seen = visible(self.spec, q_position, k_position, q_documents, k_documents)
        else:
            offsets = offsets.reshape((-1, offsets.shape[-1]))
            q_position = q_position + offsets[:, 0:1]
            if offsets.shape[1] == 3:
                k_position = rows + offsets[:, 2:3]
            seen = visible(self.spec, q_position, k_position, q_documents, k_documents)
            seen = ops.logical_and(seen, (rows < offsets[:, 1:2]).expand_dims(1))
        seen = seen.expand_dims(1).expand_dims(1)  # (B or 1, 1, 1, Sq, Sk)

        # Query heads that share a key/value head are one axis: k and v are not repeated.
        q5 = q.astype(mstype.float32).reshape((batch, q_length, kv_heads, group, dim)).transpose((0, 2, 3, 1, 4))
        k5 = k.astype(mstype.float32).transpose((0, 2, 3, 1)).expand_dims(2)
        v5 = v.astype(mstype.float32).transpose((0, 2, 1, 3)).expand_dims(2)
        scores = ops.matmul(q5, k5) * scale
        if self.spec.alibi:
            distance = (k_position.expand_dims(1) - q_position.expand_dims(2)).astype(mstype.float32)
            slopes = alibi_slopes.astype(mstype.float32).reshape((1, kv_heads, group, 1, 1))
            scores = scores + slopes * distance.expand_dims(1).expand_dims(1)
        scores = ops.select(seen.broadcast_to(scores.shape), scores, ops.full_like(scores, _HIDDEN))
        top = ops.stop_gradient(scores.max(axis=-1, keepdims=True))
        weights = ops.exp(scores - top) * seen.astype(mstype.float32)
        total = weights.sum(axis=-1, keepdims=True)
        blind = total == 0
        total = ops.select(blind, ops.ones_like(total), total)
        out = ops.matmul(weights, v5) / total
        out = out.transpose((0, 3, 1, 2, 4)).reshape(q.shape).astype(q.dtype)
        lse = ops.select(blind, ops.full_like(total, float("-inf")), top + ops.log(total))
        return out, lse.reshape((batch, heads, q_length))
