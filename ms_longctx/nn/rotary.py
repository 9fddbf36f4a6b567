# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) in the rotate-half layout of Llama."""

import mindspore as ms
from mindspore import Tensor, nn, ops


class RotaryEmbedding(nn.Cell):
    """Rotates each head: ``x * cos + rotate_half(x) * sin`` with ``rotate_half((a, b)) = (-b, a)``.

    Inputs:
        x: ``(B, S, H, D)``, fp32, fp16 or bf16, D even.
        cos, sin: ``(B or 1, S, D)`` fp32 tables, one row a position; both halves of a row are equal.

    Returns:
        The same shape and type as ``x``; computed in fp32.
    """

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos = ops.expand_dims(cos, 2)
        sin = ops.expand_dims(sin, 2)
        y = ops.cast(x, ms.float32)
        half = x.shape[-1] // 2
        rotated = ops.concat((-y[..., half:], y[..., :half]), -1)
        return ops.cast(y * cos + rotated * sin, x.dtype)
