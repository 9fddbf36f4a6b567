# SPDX-License-Identifier: Apache-2.0
"""The affine map of the model, with Hugging Face's parameter names and layout."""

from collections.abc import Callable

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from ms_longctx.nn.backend import implementation as choose


class Linear(nn.Cell):
    """``y = x @ weight.T + bias``.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        bias: whether there is a bias.
        dtype: type of the parameters; they are cast to the type of ``x`` where used.
        std: standard deviation of the initial weight (the bias starts at 0).
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        x: ``(..., in_features)``.

    Returns:
        ``(..., out_features)`` of the type of ``x``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        dtype: ms.Type = ms.float32,
        std: float = 0.02,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        weight = initializer(Normal(std), (out_features, in_features), dtype)
        self.weight = Parameter(weight, name="weight")
        self.bias = None
        if bias:
            self.bias = Parameter(initializer("zeros", (out_features,), dtype), name="bias")
        self.matmul = ops.MatMul(transpose_b=True)
        self.add = ops.Add()
        self.skinny: Callable | None = None
        self.skinny_rows = 0
        self.product: Callable | None = None
        if choose(implementation) == "cpu_kernel":
            from ms_longctx.kernels.fused import MAX_ROWS, has_gemm, make_linear, make_skinny_linear

            self.skinny = make_skinny_linear()
            self.skinny_rows = MAX_ROWS
            if has_gemm() and dtype == ms.float32:
                self.product = make_linear()

    def construct(self, x: Tensor) -> Tensor:
        rows = ops.reshape(x, (-1, self.in_features))
        if self.skinny is not None and rows.shape[0] <= self.skinny_rows:
            y = self.skinny(rows, self.weight)
        elif self.product is not None and x.dtype == ms.float32:
            y = self.product(rows, self.weight)
        else:
            y = self.matmul(rows, ops.cast(self.weight, x.dtype))
        if self.bias is not None:
            y = self.add(y, ops.cast(self.bias, x.dtype))
        return ops.reshape(y, x.shape[:-1] + (self.out_features,))
