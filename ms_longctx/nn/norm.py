# SPDX-License-Identifier: Apache-2.0
"""Root mean square layer normalisation (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer


class RMSNorm(nn.Cell):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last axis, computed in fp32.

    Args:
        hidden_size: length of the last axis.
        eps: added to the mean square.
        dtype: type of the weight.

    Inputs:
        x: ``(..., hidden_size)``, fp32, fp16 or bf16.

    Returns:
        The same shape and type as ``x``.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, dtype: ms.Type = ms.float32):
        super().__init__()
        self.eps = eps
        self.weight = Parameter(initializer("ones", (hidden_size,), dtype), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        y = ops.cast(x, ms.float32)
        y = y * ops.rsqrt(ops.square(y).mean(-1, keep_dims=True) + self.eps)
        return ops.cast(y * ops.cast(self.weight, ms.float32), x.dtype)
