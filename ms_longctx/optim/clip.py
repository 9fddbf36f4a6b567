# SPDX-License-Identifier: Apache-2.0
"""The global norm of gradients, as ``torch.nn.utils.clip_grad_norm_`` computes it."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_longctx.nn.backend import implementation as choose


class GlobalNorm(nn.Cell):
    """Square root of the sum of the squares of all elements.

    Args:
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        grads: tuple of tensors, fp32, fp16 or bf16.

    Returns:
        fp32 scalar; inf or NaN if any element is, or if the norm exceeds fp32.
    """

    def __init__(self, implementation: str = "auto") -> None:
        super().__init__()
        self.kernel = None
        if choose(implementation) == "cpu_kernel":
            from ms_longctx.kernels.fused import make_global_norm

            self.kernel = make_global_norm()

    def construct(self, grads: tuple) -> Tensor:
        if self.kernel is not None:
            return ops.reshape(self.kernel(grads)[0], ())
        total = ops.zeros((), ms.float32)
        for grad in grads:
            # Rows first, then their sums: one long fp32 sum loses digits.
            total = total + ops.square(ops.cast(grad, ms.float32)).sum(-1).sum()
        return ops.sqrt(total)
