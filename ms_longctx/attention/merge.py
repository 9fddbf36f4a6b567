# SPDX-License-Identifier: Apache-2.0
"""Attention over all keys out of attentions over parts of them."""

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from ms_longctx.kernels.custom import operator


def merge_partial(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join what two disjoint sets of keys give the same queries.

    With l the log-sum-exps, ``l = log(exp(l1) + exp(l2))`` and ``out = out1 * exp(l1 - l) + out2 * exp(l2 - l)``
    (arXiv:2205.14135, section 3.1). All exponents are at most 0, so that no gap between l1 and l2 overflows.

    Args:
        out, other_out: (B, S, H, D) float32.
        lse, other_lse: (B, H, S) float32; ``-inf`` where a query sees no key of the set, and then out is 0.

    Returns:
        out and lse of the union, shaped alike. It carries no gradient for training: rings have one of their own.
    """
    top = ops.maximum(lse, other_lse)
    blind = top == float("-inf")
    base = ops.masked_fill(top, blind, 0.0)  # -inf - (-inf) would be NaN
    weight, other_weight = ops.exp(lse - base), ops.exp(other_lse - base)
    total = ops.masked_fill(weight + other_weight, blind, 1.0)
    merged = out * _per_row(weight / total) + other_out * _per_row(other_weight / total)
    return merged, ops.select(blind, top, base + ops.log(total))


def make_merge(implementation: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """:func:`merge_partial`; with ``cpu_kernel`` as one C++ operator."""
    if implementation == "cpu_kernel":
        return operator("CpMerge", _first_two, _first_two)
    return merge_partial


def _first_two(*arguments: Any) -> Any:
    return arguments[:2]


def _per_row(x: Tensor) -> Tensor:
    """(B, H, S) as (B, S, H, 1)."""
    return ops.expand_dims(ops.transpose(x, (0, 2, 1)), 3)
