# SPDX-License-Identifier: Apache-2.0
"""Linear layer for few rows, bound by reading the weight once (csrc/fused_linear.cc)."""

from collections.abc import Callable

from mindspore import Tensor, ops

from ms_longctx.kernels.custom import operator

MAX_ROWS = 8  # beyond, MindSpore's MatMul is as fast


def make_skinny_linear() -> Callable:
    """``linear(x, weight)``: ``x (m, k) @ weight (n, k).T``; fp32 or fp16, fp32 inside, result like x."""

    def bprop(x: Tensor, weight: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        dx = ops.matmul(dout, ops.cast(weight, x.dtype))
        return dx, ops.cast(ops.matmul(dout.T, x), weight.dtype)

    return operator("FusedSkinnyLinear", lambda x, w: [x[0], w[0]], lambda x, w: x, bprop)
