# SPDX-License-Identifier: Apache-2.0
"""The collectives of :mod:`ms_longctx.parallel.collectives` by HCCL's operators.

Compiled for Ascend without a device; no part of it has run on one. HCCL keeps program order by itself
(``ordered`` changes nothing here) and sums in the type of the tensor.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, communication, nn, ops

from ms_longctx.errors import MsLongctxError

Ranks = tuple[int, ...]


def make_all_reduce(ranks: Ranks, index: int, gradient: str, ordered: bool) -> Callable:
    all_reduce = ops.AllReduce(ops.ReduceOp.SUM, hccl_group(ranks))
    return all_reduce if gradient == "all_reduce" else _IdentityGradient(all_reduce)


def make_all_gather(ranks: Ranks, index: int, axis: int, ordered: bool) -> Callable:
    return _on_first_axis(ops.AllGather(hccl_group(ranks)), axis)


def make_reduce_scatter(ranks: Ranks, index: int, axis: int, ordered: bool) -> Callable:
    return _on_first_axis(ops.ReduceScatter(ops.ReduceOp.SUM, hccl_group(ranks)), axis)


def make_all_to_all(ranks: Ranks, index: int, split_axis: int, concat_axis: int, ordered: bool) -> Callable:
    return ops.AlltoAll(len(ranks), split_axis, concat_axis, hccl_group(ranks))


def make_ring_shift(ranks: Ranks, index: int, offset: int, count: int, ordered: bool) -> Callable:
    group = hccl_group(ranks)
    # NeighborExchange counts within its group: MindSpore's backend refuses the rank of a worker beyond its size.
    target, source = (index + offset) % len(ranks), (index - offset) % len(ranks)

    def shift_one(x: Tensor) -> Tensor:
        exchange = ops.NeighborExchange([target], [source], (x.shape,), (x.shape,), x.dtype, group)
        return exchange((x,))[0]

    def shift_all(*tensors: Tensor) -> tuple[Tensor, ...]:
        # One message: of several, the compiler drops those whose results this worker does not use, while their
        # senders keep them.
        _check_one_type(*[x.dtype for x in tensors])
        message = shift_one(ops.concat([ops.reshape(x, (-1,)) for x in tensors]))
        moved: tuple[Tensor, ...] = ()
        start = 0
        for x in tensors:
            moved = (*moved, ops.reshape(message[start : start + x.size], x.shape))
            start = start + x.size
        return moved

    return shift_one if count == 1 else shift_all


def make_broadcast(ranks: Ranks, index: int, root: int, ordered: bool) -> Callable:
    # As a sum, because the gradient of ops.Broadcast is the identity on every rank.
    all_reduce = ops.AllReduce(ops.ReduceOp.SUM, hccl_group(ranks))

    def broadcast_own(x: Tensor) -> Tensor:
        return all_reduce(x)

    def broadcast_other(x: Tensor) -> Tensor:
        return all_reduce(ops.zeros_like(x))

    return broadcast_own if index == root else broadcast_other


@ms.constexpr
def _check_one_type(*types: object) -> None:
    if len(set(types)) > 1:
        raise MsLongctxError(
            f"ring_shift on Ascend: tensors of {', '.join(map(str, types))}; those that travel together have one type"
        )


@functools.cache
def hccl_group(ranks: Ranks) -> str:
    """Name of the communication group of these ranks, which is created when it is first asked for."""
    if ranks == tuple(range(communication.get_group_size())):
        return str(communication.GlobalComm.WORLD_COMM_GROUP)
    name = "ms_longctx-" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    communication.create_group(name, list(ranks))
    return name


def _on_first_axis(collective: Callable, axis: int) -> Callable:
    """HCCL gathers and scatters along axis 0; other axes change places with it."""

    def swapped(x: Tensor) -> Tensor:
        return ops.swapaxes(collective(ops.swapaxes(x, 0, axis)), 0, axis)

    return collective if axis == 0 else swapped


class _IdentityGradient(nn.Cell):
    """Runs an operator whose gradient is that of the identity."""

    def __init__(self, forward: Callable) -> None:
        super().__init__()
        self.forward = forward

    def construct(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout,)
