# SPDX-License-Identifier: Apache-2.0
"""Attention in plain operators, with the score matrix held whole: the meaning of every other implementation."""

import mindspore as ms
from mindspore import ops

from ms_longctx.attention.mask import MaskSpec

_MASKED = -1e30


def reference_attention(q, k, v, spec: MaskSpec, scale, q_documents, k_documents, slopes, q_start, kv_len):
    """Attention over the mask ``spec``, computed in fp32.

    Args:
        q: ``(B, Sq, H, D)``.
        k, v: ``(B, Sk, Hkv, D)``; H is a multiple of Hkv.
        q_documents, k_documents: ``(B, Sq)``, ``(B, Sk)`` int32, used if ``spec.documents``.
        slopes: ``(H,)`` fp32, used if ``spec.alibi``.
        q_start: position of query 0 (the keys begin at 0).
        kv_len: number of valid keys.

    Returns:
        ``(B, Sq, H, D)`` in q's dtype, and the log-sum-exp ``(B, H, Sq)`` in fp32. A query that sees nothing gets
        0 and -inf.
    """
    batch, q_length, heads, dim = q.shape
    k_length, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    grouped = ops.reshape(ops.cast(q, ms.float32), (batch, q_length, kv_heads, group, dim))
    grouped = ops.transpose(grouped, (0, 2, 3, 1, 4))
    keys = ops.expand_dims(ops.transpose(ops.cast(k, ms.float32), (0, 2, 3, 1)), 2)
    values = ops.expand_dims(ops.transpose(ops.cast(v, ms.float32), (0, 2, 1, 3)), 2)
    scores = ops.matmul(grouped, keys) * scale

    rows = ops.reshape(ops.arange(q_length), (q_length, 1)) + q_start
    columns = ops.reshape(ops.arange(k_length), (1, k_length))
    visible = ops.logical_and(columns < kv_len, rows == rows)
    if spec.causal:
        visible = ops.logical_and(visible, columns <= rows)
    if spec.window is not None:
        visible = ops.logical_and(visible, rows - columns < spec.window)
    if spec.chunk is not None:
        visible = ops.logical_and(visible, rows // spec.chunk == columns // spec.chunk)
    visible = ops.reshape(visible, (1, 1, 1, q_length, k_length))
    if spec.documents:
        same = ops.expand_dims(q_documents, 2) == ops.expand_dims(k_documents, 1)
        same = ops.logical_and(same, ops.expand_dims(k_documents, 1) >= 0)
        visible = ops.logical_and(visible, ops.reshape(same, (batch, 1, 1, q_length, k_length)))
    if spec.alibi:
        distance = ops.cast(columns - rows, ms.float32)
        scores = scores + ops.reshape(slopes, (1, kv_heads, group, 1, 1)) * distance
    scores = ops.where(visible, scores, ops.full_like(scores, _MASKED))

    top = ops.stop_gradient(ops.amax(scores, -1, True))
    weights = ops.exp(scores - top) * ops.cast(visible, ms.float32)
    total = ops.reduce_sum(weights, -1)
    empty = total == 0
    total = ops.where(empty, ops.ones_like(total), total)
    out = ops.matmul(weights / ops.expand_dims(total, -1), values)
    out = ops.reshape(ops.transpose(out, (0, 3, 1, 2, 4)), (batch, q_length, heads, dim))
    lse = ops.log(total) + ops.squeeze(top, -1)
    lse = ops.where(empty, ops.full_like(lse, -float("inf")), lse)
    return ops.cast(out, q.dtype), ops.reshape(lse, (batch, heads, q_length))
