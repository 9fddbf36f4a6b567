# SPDX-License-Identifier: Apache-2.0
"""Output projection and cross entropy as one operator (csrc/fused_loss.cc)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, ops

from ms_longctx import kernels
from ms_longctx.kernels.custom import operator

Tensors = tuple[Tensor, ...]


@functools.lru_cache(maxsize=1)
def has_gemm() -> bool:
    """Whether MindSpore brought the matrix product (oneDNN) that the loss and linear kernels are built on."""
    return kernels.available() and bool(ctypes.CDLL(str(kernels.library_path())).ms_longctx_has_gemm())


def make_linear_cross_entropy(
    chunk_tokens: int, gradient_in_forward: bool = True, weight_gradient: bool = True
) -> Callable:
    """``loss(hidden, weight, labels) -> (loss_sum, n_valid)``; needs :func:`has_gemm`.

    - ``hidden``: ``(N, h)`` fp32 or fp16; ``weight``: ``(V, h)`` fp32 or fp16; logits are fp32;
    - ``labels``: ``(N,)`` int32 in [0, V), or -100: such rows are left out and cost nothing. Anything else
      raises;
    - ``loss_sum``: fp32 scalar, sum of the cross entropies; ``n_valid``: fp32 scalar, the labelled rows.

    Memory beside the gradients: the logits of ``chunk_tokens`` rows.

    Args:
        chunk_tokens: rows at a time.
        gradient_in_forward: compute the gradients together with the loss (for training: three matrix
            products). Otherwise the loss alone, and a backward pass, should there be one, does it all (four).
        weight_gradient: whether the weight trains; if not, its gradient is 0 and costs no product.
    """
    grad_count = 2 if weight_gradient else 1

    def with_gradients() -> ops.Custom:
        return operator(
            "FusedLinearCrossEntropyGrad",
            lambda x, w, t: ([1], [1], x, w)[: 2 + grad_count],
            lambda x, w, t: (ms.float32,) * (2 + grad_count),
            scaled_bprop,
            chunk_tokens=int(chunk_tokens),
            weight_gradient=weight_gradient,
        )

    def scaled_bprop(hidden: Tensor, weight: Tensor, labels: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        grad_hidden = ops.cast(out[2] * dout[0], hidden.dtype)
        if weight_gradient:
            grad_weight = ops.cast(out[3] * dout[0], weight.dtype)
        else:
            grad_weight = ops.zeros_like(weight)
        return grad_hidden, grad_weight, ops.zeros_like(labels)

    gradients = with_gradients()

    def recomputing_bprop(hidden: Tensor, weight: Tensor, labels: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        return scaled_bprop(hidden, weight, labels, gradients(hidden, weight, labels), dout)

    loss_only = operator(
        "FusedLinearCrossEntropy",
        lambda x, w, t: ([1], [1]),
        lambda x, w, t: (ms.float32, ms.float32),
        recomputing_bprop,
        chunk_tokens=int(chunk_tokens),
        weight_gradient=weight_gradient,
    )

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        if gradient_in_forward:
            out = gradients(hidden, weight, labels)
        else:
            out = loss_only(hidden, weight, labels)
        return ops.reshape(out[0], ()), ops.reshape(out[1], ())

    return loss
