# SPDX-License-Identifier: Apache-2.0
"""Linear layers: for few rows, bound by reading the weight once, and for many (csrc/fused_{linear,matmul}.cc)."""

from collections.abc import Callable

from mindspore import Tensor, ops

from ms_longctx.kernels.custom import operator

MAX_ROWS = 8  # beyond, a product that works on tiles is faster


def make_skinny_linear() -> Callable:
    """``linear(x, weight)``: ``x (m, k) @ weight (n, k).T``; fp32 or fp16, fp32 inside, result like x."""

    def bprop(x: Tensor, weight: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        dx = ops.matmul(dout, ops.cast(weight, x.dtype))
        return dx, ops.cast(ops.matmul(dout.T, x), weight.dtype)

    return operator("FusedSkinnyLinear", lambda x, w: [x[0], w[0]], lambda x, w: x, bprop)


def make_linear() -> Callable:
    """``linear(x, weight)``: ``x (m, k) @ weight (n, k).T`` in fp32; needs :func:`has_gemm`.

    The two gradients are operators of their own, so that a graph leaves out the one nobody asks for.
    """

    def product(transpose_a: bool, transpose_b: bool, bprop: Callable | None = None) -> ops.Custom:
        return operator(
            "FusedMatmul",
            lambda a, b: [a[1] if transpose_a else a[0], b[0] if transpose_b else b[1]],
            lambda a, b: a,
            bprop,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )

    to_x, to_weight = product(False, False), product(True, False)

    def bprop(x: Tensor, weight: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        return to_x(dout, weight), to_weight(dout, x)

    return product(False, True, bprop)
