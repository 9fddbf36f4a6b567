# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block of Llama (SwiGLU: Shazeer 2020, arXiv 2002.05202)."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_longctx.nn.backend import implementation as choose
from ms_longctx.nn.linear import Linear


class SwiGLU(nn.Cell):
    """``silu(gate) * up``, computed in fp32; inputs and result share shape and type.

    Args:
        implementation: see :func:`ms_longctx.nn.backend.implementation`.
    """

    def __init__(self, implementation: str = "auto") -> None:
        super().__init__()
        self.implementation = choose(implementation)
        if self.implementation == "cpu_kernel":
            from ms_longctx.kernels.fused import make_swiglu

            self.kernel = make_swiglu()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.implementation == "cpu_kernel":
            return self.kernel(gate, up)
        if self.implementation == "ascend":
            # Keeps two tensors for the backward pass; silu(gate) * up keeps three.
            return ops.swiglu(ops.concat((gate, up), -1), -1)
        g = ops.cast(gate, ms.float32)
        return ops.cast(g * ops.sigmoid(g) * ops.cast(up, ms.float32), gate.dtype)


class MLP(nn.Cell):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``.

    Args:
        hidden_size: last axis of the input and the result.
        intermediate_size: width between them.
        bias: whether the three projections have a bias.
        dtype: type of the parameters.
        std: standard deviation of the initial weights.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        dtype: ms.Type = ms.float32,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, dtype, std)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, dtype, std)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype, std)
        self.act = SwiGLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
