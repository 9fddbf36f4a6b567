# SPDX-License-Identifier: Apache-2.0
"""The collectives of :mod:`ms_longctx.parallel.collectives` on the shared-memory transport of the kernel library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.comm import Kind, next_number, result_shape
from ms_longctx.kernels.custom import operator

Ranks = tuple[int, ...]
Tensors = tuple[Tensor, ...]
_ADDED_TYPES = ("Float32", "Float16", "BFloat16", "Int32", "Int64")


def make_all_reduce(ranks: Ranks, index: int, gradient: str, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.ALL_REDUCE, ordered=ordered) if gradient == "all_reduce" else _same
    return _operator(ranks, Kind.ALL_REDUCE, ordered=ordered, backward=backward)


def make_all_gather(ranks: Ranks, index: int, axis: int, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.REDUCE_SCATTER, axis, ordered=ordered)
    return _operator(ranks, Kind.ALL_GATHER, axis, ordered=ordered, backward=backward)


def make_reduce_scatter(ranks: Ranks, index: int, axis: int, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.ALL_GATHER, axis, ordered=ordered)
    return _operator(ranks, Kind.REDUCE_SCATTER, axis, ordered=ordered, backward=backward)


def make_all_to_all(ranks: Ranks, index: int, split_axis: int, concat_axis: int, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.ALL_TO_ALL, concat_axis, split_axis, ordered=ordered)
    return _operator(ranks, Kind.ALL_TO_ALL, split_axis, concat_axis, ordered=ordered, backward=backward)


def make_ring_shift(ranks: Ranks, index: int, offset: int, count: int, ordered: bool) -> Callable:
    back = len(ranks) - offset
    if count == 1:
        backward = _operator(ranks, Kind.RING_SHIFT, back, ordered=ordered)
        return _operator(ranks, Kind.RING_SHIFT, offset, ordered=ordered, backward=backward)
    shift_back = _custom(ranks, Kind.RING_SHIFT, back, 0, _all, _all, None, ordered)
    return _custom(ranks, Kind.RING_SHIFT, offset, 0, _all, _all, _gradient_of_several(shift_back, count), ordered)


def _gradient_of_several(shift_back: Callable, count: int) -> Callable:
    """A gradient that takes ``count`` inputs by name, which graph mode insists on."""

    def of_two(a: Tensor, b: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        return shift_back(ops.depend(dout[0], out[0]), dout[1])

    def of_three(a: Tensor, b: Tensor, c: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        return shift_back(ops.depend(dout[0], out[0]), dout[1], dout[2])

    def of_four(a: Tensor, b: Tensor, c: Tensor, d: Tensor, out: Tensors, dout: Tensors) -> Tensors:
        return shift_back(ops.depend(dout[0], out[0]), dout[1], dout[2], dout[3])

    return (of_two, of_three, of_four)[count - 2]


def make_broadcast(ranks: Ranks, index: int, root: int, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.REDUCE, root, ordered=ordered)
    return _operator(ranks, Kind.BROADCAST, root, ordered=ordered, backward=backward)


def _operator(
    ranks: Ranks, kind: Kind, first: int = 0, second: int = 0, *, ordered: bool, backward: Callable | None = None
) -> ops.Custom:
    """An operator of one tensor; its gradient is ``backward(dout)``."""
    adds = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE)

    def shape(x: list[int]) -> list[int]:
        return result_shape(kind, list(x), len(ranks), first, second)

    def dtype(x: Any) -> Any:
        name = str(x).removeprefix("Ref[").removeprefix("Tensor[").rstrip("]")  # a Parameter's type is a Ref
        if adds and name not in _ADDED_TYPES:
            raise MsLongctxError(f"{kind.name.lower()} of {name}: expected one of {', '.join(_ADDED_TYPES)}")
        return x

    if backward is None:
        return _custom(ranks, kind, first, second, shape, dtype, None, ordered)
    step = backward

    # A gradient may be known before anything is computed (that of a sum is 1), yet must not be sent before `out` came.
    def bprop(x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (step(ops.depend(dout, out)),)

    return _custom(ranks, kind, first, second, shape, dtype, bprop, ordered)


def _custom(
    ranks: Ranks, kind: Kind, first: int, second: int, shape: Callable, dtype: Callable, bprop: Callable | None,
    ordered: bool,
) -> ops.Custom:  # fmt: skip
    if not kernels.available():
        raise MsLongctxError(f"several processes on a CPU need the C++ kernels: {kernels.reason()}")
    number = next_number(ranks)
    custom = operator("Collective", shape, dtype, bprop, kind=int(kind), first=first, second=second, number=number)
    custom.add_prim_attr("ranks", list(ranks))
    if ordered:
        custom.add_prim_attr("side_effect_io", True)
    return custom


def _same(x: Any) -> Any:
    return x


def _all(*tensors: Any) -> Any:
    return tensors
