# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) in the rotate-half layout of Llama."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_longctx.nn.backend import implementation as choose


class RotaryEmbedding(nn.Cell):
    """Rotates each head: ``x * cos + rotate_half(x) * sin`` with ``rotate_half((a, b)) = (-b, a)``.

    Args:
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        x: ``(B, S, H, D)``, fp32, fp16 or bf16, D even.
        cos, sin: ``(B or 1, S, D)`` fp32 tables, one row a position; both halves of a row are equal.

    Returns:
        The same shape and type as ``x``; computed in fp32 (on Ascend in the type of ``x``).
    """

    def __init__(self, implementation: str = "auto") -> None:
        super().__init__()
        self.implementation = choose(implementation)
        if self.implementation == "cpu_kernel":
            from ms_longctx.kernels.fused import make_rotary

            self.kernel = make_rotary()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.implementation == "cpu_kernel":
            return self.kernel(x, cos, sin)
        cos = ops.expand_dims(cos, 2)
        sin = ops.expand_dims(sin, 2)
        if self.implementation == "ascend":
            return ops.rotary_position_embedding(x, ops.cast(cos, x.dtype), ops.cast(sin, x.dtype))
        y = ops.cast(x, ms.float32)
        half = x.shape[-1] // 2
        rotated = ops.concat((-y[..., half:], y[..., :half]), -1)
        return ops.cast(y * cos + rotated * sin, x.dtype)
