# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary embedding and SwiGLU as one operator each (csrc/fused_{norm,rotary,swiglu}.cc)."""

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, ops

from ms_longctx.kernels.custom import operator

Tensors = tuple[Tensor, ...]


def make_rms_norm(eps: float) -> Callable:
    """``norm(x, weight)``: RMSNorm of ``x (..., n)`` fp32 or fp16, ``weight (n,)`` fp32; result like x."""
    grad = operator("FusedRmsNormGrad", lambda x, w, r, d: (x, w), lambda x, w, r, d: (x, w))

    def bprop(x: Tensor, weight: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        return grad(x, weight, out[1], dout[0])

    forward = operator("FusedRmsNorm", lambda x, w: (x, x[:-1]), lambda x, w: (x, ms.float32), bprop, eps=float(eps))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return forward(x, weight)[0]

    return norm


def make_add_rms_norm(eps: float) -> Callable:
    """``add_norm(x, delta, weight) -> (x + delta, RMSNorm(x + delta))``; types as in `make_rms_norm`."""
    grad = operator("FusedAddRmsNormGrad", lambda x, w, r, s, d: (x, w), lambda x, w, r, s, d: (x, w))

    def bprop(x: Tensor, delta: Tensor, weight: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        dx, dweight = grad(out[0], weight, out[2], dout[0], dout[1])
        return dx, dx, dweight

    forward = operator(
        "FusedAddRmsNorm",
        lambda x, d, w: (x, x, x[:-1]),
        lambda x, d, w: (x, x, ms.float32),
        bprop,
        eps=float(eps),
    )

    def add_norm(x: Tensor, delta: Tensor, weight: Tensor) -> Tensors:
        out = forward(x, delta, weight)
        return out[0], out[1]

    return add_norm


def make_rotary() -> Callable:
    """``rotary(x, cos, sin)``: rotate-half embedding of ``x (B, S, H, D)`` fp32 or fp16, D even.

    ``cos`` and ``sin`` are ``(B or 1, S, D)`` fp32 and get no gradient; the result is like x.
    """
    grad = operator("FusedRotaryGrad", lambda d, c, s: d, lambda d, c, s: d)

    def bprop(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, dout: Tensor) -> Tensors:
        return grad(dout, cos, sin), ops.zeros_like(cos), ops.zeros_like(sin)

    return operator("FusedRotary", lambda x, c, s: x, lambda x, c, s: x, bprop)


def make_swiglu() -> Callable:
    """``swiglu(gate, up)``: ``silu(gate) * up`` of two tensors of one shape and type (fp32 or fp16)."""
    grad = operator("FusedSwiGluGrad", lambda g, u, d: (g, u), lambda g, u, d: (g, u))

    def bprop(gate: Tensor, up: Tensor, out: Tensor, dout: Tensor) -> Tensors:
        return grad(gate, up, dout)

    return operator("FusedSwiGlu", lambda g, u: g, lambda g, u: g, bprop)
