# SPDX-License-Identifier: Apache-2.0
"""How the operators of the kernel library become MindSpore operators."""

from __future__ import annotations

from collections.abc import Callable

from mindspore import ops

from ms_longctx import kernels


def operator(
    name: str,
    out_shape: Callable,
    out_dtype: Callable,
    bprop: Callable | None = None,
    **attributes: int | float,
) -> ops.Custom:
    """An operator of the kernel library, for graph mode and PyNative.

    Args:
        name: its C symbol.
        out_shape, out_dtype: functions from the shapes (dtypes) of all inputs to those of the results.
        bprop: gradient ``(*inputs, out, dout) -> gradients``; a ``def``, because graph mode parses it.
        attributes: numbers the operator reads once, when it is set up. Operators of one symbol that differ in
            ``bprop`` must differ here too: PyNative finds the gradient by symbol and attributes, and would use
            the first one's for all.
    """
    custom = ops.Custom(f"{kernels.library_path()}:{name}", out_shape, out_dtype, "aot", bprop)
    for key, value in attributes.items():
        custom.add_prim_attr(key, value)
    return custom
