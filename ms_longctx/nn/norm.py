# SPDX-License-Identifier: Apache-2.0
"""Root mean square layer normalisation (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from ms_longctx.nn.backend import implementation as choose


class RMSNorm(nn.Cell):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last axis, computed in fp32.

    Args:
        hidden_size: length of the last axis.
        eps: added to the mean square.
        dtype: type of the weight.
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        x: ``(..., hidden_size)``, fp32, fp16 or bf16.
        delta: like ``x``, or ``None``. If given, ``x + delta`` is normalised.

    Returns:
        The norm, of the shape and type of ``x``; with ``delta`` the pair ``(x + delta, norm)``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: ms.Type = ms.float32,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(initializer("ones", (hidden_size,), dtype), name="weight")
        self.implementation = choose(implementation)
        if self.implementation == "cpu_kernel":
            from ms_longctx.kernels.fused import make_add_rms_norm, make_rms_norm

            self.kernel = make_rms_norm(eps)
            self.add_kernel = make_add_rms_norm(eps)
        elif self.implementation == "ascend":
            # Members, so that a parallel program can say how each of them is split.
            self.rms_norm = ops.RmsNorm(eps)
            self.add = ops.Add()
            self.fuse_add = True

    def construct(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if self.implementation == "cpu_kernel":
            weight = ops.cast(self.weight, ms.float32)
            if delta is None:
                return self.kernel(x, weight)
            return self.add_kernel(x, delta, weight)
        if self.implementation == "ascend":
            weight = ops.cast(self.weight, x.dtype)
            if delta is None:
                return self.rms_norm(x, weight)[0]
            if self.fuse_add:
                out = ops.add_rms_norm(x, delta, weight, self.eps)
                return out[2], out[0]
            total = self.add(x, delta)
            return total, self.rms_norm(total, weight)[0]
        if delta is None:
            return self.normalise(x)
        total = x + delta
        return total, self.normalise(total)

    def normalise(self, x: Tensor) -> Tensor:
        """The norm in MindSpore's operators."""
        y = ops.cast(x, ms.float32)
        y = y * ops.rsqrt(ops.square(y).mean(-1, keep_dims=True) + self.eps)
        return ops.cast(y * ops.cast(self.weight, ms.float32), x.dtype)
