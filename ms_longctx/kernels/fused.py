# SPDX-License-Identifier: Apache-2.0
"""Fused CPU operators: each ``make_*`` returns a callable for ``construct``, in graph mode and PyNative.

All need the kernel library (:func:`ms_longctx.kernels.available`); the cells in :mod:`ms_longctx.nn` choose
between them and MindSpore's operators. Values are fp32, or fp16 with fp32 arithmetic inside; anything else is
an error. Repeating a call with the same number of threads gives the same bits.
"""

from ms_longctx.kernels.fused_elementwise import (
    make_add_rms_norm,
    make_rms_norm,
    make_rotary,
    make_swiglu,
)
from ms_longctx.kernels.fused_linear import MAX_ROWS, make_linear, make_skinny_linear
from ms_longctx.kernels.fused_loss import has_gemm, make_linear_cross_entropy
from ms_longctx.kernels.fused_state import make_adamw, make_cache_append, make_global_norm

__all__ = [
    "MAX_ROWS",
    "has_gemm",
    "make_adamw",
    "make_add_rms_norm",
    "make_cache_append",
    "make_global_norm",
    "make_linear",
    "make_linear_cross_entropy",
    "make_rms_norm",
    "make_rotary",
    "make_skinny_linear",
    "make_swiglu",
]
