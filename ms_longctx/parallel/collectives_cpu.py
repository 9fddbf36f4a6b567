# SPDX-License-Identifier: Apache-2.0
"""The collectives of :mod:`ms_longctx.parallel.collectives` on the shared-memory transport of the kernel library."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from mindspore import Tensor, ops

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.custom import operator

Ranks = tuple[int, ...]
Shape = list[int]
_REDUCED_TYPES = ("Float32", "Float16", "BFloat16", "Int32", "Int64")


class Kind(IntEnum):
    """What an operator does; the numbers are those of csrc/comm_collectives.h."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    RING_SHIFT = 4
    BROADCAST = 5
    REDUCE = 6


# Members of a group make their collectives in the same order, so equal numbers are the same operator on all ranks.
_numbers: defaultdict[Ranks, Iterator[int]] = defaultdict(itertools.count)


def make_all_reduce(ranks: Ranks, index: int, gradient: str, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.ALL_REDUCE, ordered=ordered) if gradient == "all_reduce" else _same
    return _operator(ranks, Kind.ALL_REDUCE, ordered=ordered, backward=backward)


def make_all_gather(ranks: Ranks, index: int, axis: int, ordered: bool) -> Callable:
    grown, shrunk = _times(axis, len(ranks)), _divided(axis, len(ranks), "all_gather")
    backward = _operator(ranks, Kind.REDUCE_SCATTER, axis, shape=shrunk, ordered=ordered)
    return _operator(ranks, Kind.ALL_GATHER, axis, shape=grown, ordered=ordered, backward=backward)


def make_reduce_scatter(ranks: Ranks, index: int, axis: int, ordered: bool) -> Callable:
    grown, shrunk = _times(axis, len(ranks)), _divided(axis, len(ranks), "reduce_scatter")
    backward = _operator(ranks, Kind.ALL_GATHER, axis, shape=grown, ordered=ordered)
    return _operator(ranks, Kind.REDUCE_SCATTER, axis, shape=shrunk, ordered=ordered, backward=backward)


def make_all_to_all(ranks: Ranks, index: int, split_axis: int, concat_axis: int, ordered: bool) -> Callable:
    def exchange(split: int, concat: int, backward: Callable | None) -> Callable:
        smaller, larger = _divided(split, len(ranks), "all_to_all"), _times(concat, len(ranks))
        return _operator(
            ranks,
            Kind.ALL_TO_ALL,
            split,
            concat,
            shape=lambda x: larger(smaller(x)),
            ordered=ordered,
            backward=backward,
        )

    return exchange(split_axis, concat_axis, exchange(concat_axis, split_axis, None))


def make_ring_shift(ranks: Ranks, index: int, offset: int, count: int, ordered: bool) -> Callable:
    back = len(ranks) - offset
    if count == 1:
        backward = _operator(ranks, Kind.RING_SHIFT, back, ordered=ordered)
        return _operator(ranks, Kind.RING_SHIFT, offset, ordered=ordered, backward=backward)
    shift_back = _custom(ranks, Kind.RING_SHIFT, back, 0, _all, _all, None, ordered)

    def bprop(*arguments: Any) -> tuple[Tensor, ...]:
        return shift_back(*arguments[-1])

    return _custom(ranks, Kind.RING_SHIFT, offset, 0, _all, _all, bprop, ordered)


def make_broadcast(ranks: Ranks, index: int, root: int, ordered: bool) -> Callable:
    backward = _operator(ranks, Kind.REDUCE, root, ordered=ordered)
    return _operator(ranks, Kind.BROADCAST, root, ordered=ordered, backward=backward)


def _operator(
    ranks: Ranks,
    kind: Kind,
    first: int = 0,
    second: int = 0,
    *,
    shape: Callable[[Shape], Shape] | None = None,
    ordered: bool,
    backward: Callable | None = None,
) -> ops.Custom:
    """An operator of one tensor whose gradient is ``backward(dout)``."""
    reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE)

    def dtype(x: Any) -> Any:
        if reduces and str(x) not in _REDUCED_TYPES:
            raise MsLongctxError(f"{kind.name.lower()} of {x}: expected one of {', '.join(_REDUCED_TYPES)}")
        return x

    def bprop(x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (backward(dout),)

    gradient = None if backward is None else bprop
    return _custom(ranks, kind, first, second, shape or _same, dtype, gradient, ordered)


def _custom(
    ranks: Ranks, kind: Kind, first: int, second: int, shape: Callable, dtype: Callable, bprop: Callable | None,
    ordered: bool,
) -> ops.Custom:  # fmt: skip
    if not kernels.available():
        raise MsLongctxError(f"several processes on CPU need the C++ kernels: {kernels.reason()}")
    number = next(_numbers[ranks])
    custom = operator("Collective", shape, dtype, bprop, kind=int(kind), first=first, second=second, number=number)
    custom.add_prim_attr("ranks", list(ranks))
    if ordered:
        custom.add_prim_attr("side_effect_io", True)
    return custom


def _same(x: Any) -> Any:
    return x


def _all(*tensors: Any) -> Any:
    return tensors


def _times(axis: int, factor: int) -> Callable[[Shape], Shape]:
    def shape(x: Shape) -> Shape:
        result = list(x)
        result[axis] *= factor if x[axis] >= 0 else 1  # negative: not known yet
        return result

    return shape


def _divided(axis: int, parts: int, what: str) -> Callable[[Shape], Shape]:
    def shape(x: Shape) -> Shape:
        result = list(x)
        if x[axis] >= 0:
            if x[axis] % parts:
                raise MsLongctxError(f"{what}: axis {axis} of shape {tuple(x)} cannot be split over {parts} ranks")
            result[axis] = x[axis] // parts
        return result

    return shape
