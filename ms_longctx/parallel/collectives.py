# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives over any group of ranks, one interface for CPU and Ascend, graph mode and PyNative.

A factory such as :func:`make_all_gather` is called once, outside of ``construct``; its result is called on tensors.
All members of a group make their collectives in the same order and call them in the same order: the CPU transport
numbers them and turns a difference into an error that names both sides. A group of one rank needs no operator: its
collectives return what they get.

Gradients take the loss to be the sum of what the ranks compute (each rank starts from the gradient of its own part):

=================  ==========================================
forward            gradient
=================  ==========================================
all_reduce         all_reduce, or nothing (``gradient="identity"``)
all_gather         reduce_scatter
reduce_scatter     all_gather
all_to_all         all_to_all with the axes exchanged
ring_shift         ring_shift by the opposite offset
broadcast          sum to the root, zero elsewhere
=================  ==========================================

CPU: sums of float32, float16, bfloat16 (both added in float32, rounded once), int32 and int64, in the order of the
group's ranks, so that all ranks hold the same bits at every repetition; moves of any type. Ascend: HCCL's operators.

Order in graph mode: collectives of the forward pass run in the order of the program. Each one of the backward pass
runs after its own forward and is else ordered by its data alone. Ranks with the same graph run them in the same order;
where graphs differ from rank to rank, let each depend on the one before, as those of successive layers do.
``ordered=False`` leaves out the attribute that keeps program order. It is for cells with a ``bprop`` of their own,
which MindSpore cannot compile together with that attribute; there too, chain the collectives by their data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import mindspore as ms
from mindspore import Tensor

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel import collectives_ascend, collectives_cpu

_BACKENDS = {"CPU": collectives_cpu, "Ascend": collectives_ascend}


@dataclass(frozen=True)
class Group:
    """Some ranks of the job, in ring order, seen from one of them.

    Args:
        ranks: global ranks, each once.
        rank: the global rank of this process.

    Raises:
        MsLongctxError: a rank twice or negative, or ``rank`` is not a member.
    """

    ranks: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise MsLongctxError(f"group {self.ranks}: expected different ranks from 0 on")
        if self.rank not in self.ranks:
            raise MsLongctxError(f"rank {self.rank} is not in group {self.ranks}; only members make its collectives")

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Place of this process in the group."""
        return self.ranks.index(self.rank)


def make_all_reduce(group: Group, gradient: str = "all_reduce", ordered: bool = True) -> Callable[[Tensor], Tensor]:
    """``all_reduce(x)``: the sum of the members' x; any shape, the same on all.

    Args:
        group: who takes part.
        gradient: ``"all_reduce"`` where each rank's loss is a part of the whole; ``"identity"`` where all ranks
            compute the same loss from the sum, as after a row-parallel layer (arXiv 1909.08053, operator g).
        ordered: keep program order (see the module).
    """
    if gradient not in ("all_reduce", "identity"):
        raise MsLongctxError(f"all_reduce: gradient {gradient!r} is neither 'all_reduce' nor 'identity'")
    if group.size == 1:
        return _identity
    return _backend().make_all_reduce(group.ranks, group.index, gradient, ordered)


def make_all_gather(group: Group, axis: int = 0, ordered: bool = True) -> Callable[[Tensor], Tensor]:
    """``all_gather(x)``: the members' x, joined along ``axis`` in the order of the group."""
    if group.size == 1:
        return _identity
    return _backend().make_all_gather(group.ranks, group.index, axis, ordered)


def make_reduce_scatter(group: Group, axis: int = 0, ordered: bool = True) -> Callable[[Tensor], Tensor]:
    """``reduce_scatter(x)``: the sum of the members' x, of which each keeps its part along ``axis``.

    ``x.shape[axis]`` must be a multiple of the group's size.
    """
    if group.size == 1:
        return _identity
    return _backend().make_reduce_scatter(group.ranks, group.index, axis, ordered)


def make_all_to_all(
    group: Group, split_axis: int, concat_axis: int, ordered: bool = True
) -> Callable[[Tensor], Tensor]:
    """``all_to_all(x)``: part i of x along ``split_axis`` goes to member i; what arrives is joined on ``concat_axis``.

    ``x.shape[split_axis]`` must be a multiple of the group's size P. The result has P times fewer elements along
    ``split_axis`` and P times more along ``concat_axis``; equal axes exchange blocks and keep the shape.
    """
    if group.size == 1:
        return _identity
    return _backend().make_all_to_all(group.ranks, group.index, split_axis, concat_axis, ordered)


def make_ring_shift(group: Group, offset: int = 1, count: int = 1, ordered: bool = True) -> Callable:
    """``shift(x)``: x goes to the member at index + offset, the result comes from the one at index - offset.

    Args:
        group: the ring.
        offset: places to move; any integer.
        count: tensors that travel together, 1 to 4. With more than one, ``shift(a, b)`` returns a tuple of as many.
        ordered: keep program order (see the module).

    A tensor has the same shape and type on all members.
    """
    if not 1 <= count <= 4:
        raise MsLongctxError(f"ring_shift of {count} tensors; expected 1 to 4")
    if offset % group.size == 0:
        return _identity if count == 1 else _identities
    return _backend().make_ring_shift(group.ranks, group.index, offset % group.size, count, ordered)


def make_broadcast(group: Group, root: int = 0, ordered: bool = True) -> Callable[[Tensor], Tensor]:
    """``broadcast(x)``: the x of the member at index ``root``; the others give a tensor of its shape and type."""
    if not 0 <= root < group.size:
        raise MsLongctxError(f"broadcast: root {root} is no index of a group of {group.size}")
    if group.size == 1:
        return _identity
    return _backend().make_broadcast(group.ranks, group.index, root, ordered)


def _identity(x: Tensor) -> Tensor:
    return x


def _identities(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def _backend() -> ModuleType:
    """The module with the operators of the device target that is set now."""
    target = ms.get_context("device_target")
    if target not in _BACKENDS:
        raise MsLongctxError(f"collectives exist on {' and '.join(_BACKENDS)}, not on {target}")
    return _BACKENDS[target]
