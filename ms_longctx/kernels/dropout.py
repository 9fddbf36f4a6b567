# SPDX-License-Identifier: Apache-2.0
"""Dropout by a hash of the position as one operator (csrc/dropout.cc)."""

from collections.abc import Callable

from mindspore import Tensor, ops

from ms_longctx.kernels.custom import operator


def make_keyed_dropout(salt: int, limit: int, factor: float) -> Callable:
    """``dropout(x, key)`` with the arithmetic of :class:`ms_longctx.tuning.dropout.KeyedDropout`.

    - ``x``: ``(..., columns)`` fp32 or fp16; ``key``: int32 scalar; the result is like ``x``.

    Args:
        salt: int32 added to the key.
        limit: int32; elements whose hash is below it are kept.
        factor: on the elements that are kept.
    """

    def make(bprop: Callable | None) -> Callable:
        return operator("KeyedDropout", lambda x, k: x, lambda x, k: x, bprop, salt=salt, limit=limit, factor=factor)

    masked = make(None)

    def bprop(x: Tensor, key: Tensor, out: Tensor, dout: Tensor) -> tuple:
        return masked(dout, key), ops.zeros_like(key)

    return make(bprop)
