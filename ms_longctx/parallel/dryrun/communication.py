# SPDX-License-Identifier: Apache-2.0
"""What a rank's communication operators are, between whom, and how many bytes they move in one step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ms_longctx.parallel.dryrun.graph_file import CompiledGraph, GraphFileError, Operator, TensorType

# Bytes that one rank sends, from the bytes of its input and the size of the group, with the algorithms that send
# the least (Chan et al. 2007, "Collective communication: theory, practice, and experience", table 2).
_SENT: dict[str, Callable[[int, int], int]] = {
    "AllReduce": lambda size, n: 2 * size * (n - 1) // n,
    "AllGather": lambda size, n: size * (n - 1),
    "ReduceScatter": lambda size, n: size * (n - 1) // n,
    "AlltoAll": lambda size, n: size * (n - 1) // n,
    "Broadcast": lambda size, n: size if n > 1 else 0,
    "Send": lambda size, n: size,
    "NeighborExchange": lambda size, n: size,
    "Receive": lambda size, n: 0,
    "Barrier": lambda size, n: 0,
}


@dataclass(frozen=True)
class Traffic:
    """All executions of one kind of operator in one group, in one step of one rank.

    Args:
        operator: MindSpore's name.
        ranks: members of the group, in its order.
        times: executions a step.
        exact: ``False`` if some stand in a branch or a loop, which are counted once.
        operand_bytes: sum over the executions of what the operator takes (``Receive``: what it gives).
        sent_bytes: what the rank sends with the algorithm that sends the least; ``None`` where none is known.
    """

    operator: str
    ranks: tuple[int, ...]
    times: int
    exact: bool
    operand_bytes: int
    sent_bytes: int | None


@dataclass(frozen=True)
class Message:
    """One message between two ranks, as the sender or the receiver sees it."""

    sender: int
    receiver: int
    channel: str
    tensor: TensorType
    times: int


# (operator, ranks, operand) -> executions a step
Collectives = dict[tuple[str, tuple[int, ...], TensorType], int]


def summarize(graph: CompiledGraph, groups: Mapping[str, tuple[int, ...]]) -> list[Traffic]:
    """The communication of one rank, most bytes first.

    Args:
        graph: its program.
        groups: name of each communication group -> its ranks.
    """
    totals: dict[tuple[str, tuple[int, ...]], Traffic] = {}
    for execution in graph.communication():
        operator, ranks = execution.operator, _ranks(execution.operator, groups)
        size = _operand_bytes(operator)
        formula = _SENT.get(operator.name)
        sent = None if formula is None else formula(size, len(ranks)) * execution.times
        before = totals.get((operator.name, ranks), Traffic(operator.name, ranks, 0, True, 0, 0))
        totals[operator.name, ranks] = Traffic(
            operator.name,
            ranks,
            before.times + execution.times,
            before.exact and execution.exact,
            before.operand_bytes + size * execution.times,
            None if sent is None or before.sent_bytes is None else before.sent_bytes + sent,
        )
    return sorted(totals.values(), key=lambda traffic: (-(traffic.sent_bytes or 0), traffic.operator, traffic.ranks))


def messages(
    graph: CompiledGraph, rank: int, groups: Mapping[str, tuple[int, ...]]
) -> tuple[list[Message], list[Message]]:
    """What a rank sends and what it receives point to point: Send, Receive and NeighborExchange.

    The channel of a Send is its tag; that of a NeighborExchange its group, by its ranks.
    """
    sent: list[Message] = []
    received: list[Message] = []
    for execution in graph.communication():
        operator, times = execution.operator, execution.times
        if operator.name == "Send":
            channel = f"tag {operator.numbers('sr_tag')[0]}"
            receiver = operator.numbers("dst_global_rank")[0]
            sent += [Message(rank, receiver, channel, tensor, times) for tensor in _operands(operator)]
        elif operator.name == "Receive":
            channel = f"tag {operator.numbers('sr_tag')[0]}"
            sender = operator.numbers("src_global_rank")[0]
            received += [Message(sender, rank, channel, tensor, times) for tensor in _operands(operator)]
        elif operator.name == "NeighborExchange":
            ranks = _ranks(operator, groups)
            channel = f"ring of {', '.join(map(str, ranks))}"
            targets = zip(operator.numbers("send_rank_ids"), _declared(operator, "send_shapes"), strict=True)
            sent += [Message(rank, ranks[place], channel, tensor, times) for place, tensor in targets]
            sources = zip(operator.numbers("recv_rank_ids"), _declared(operator, "recv_shapes"), strict=True)
            received += [Message(ranks[place], rank, channel, tensor, times) for place, tensor in sources]
    return sent, received


def collectives(graph: CompiledGraph, groups: Mapping[str, tuple[int, ...]]) -> Collectives:
    """The operators in which every rank of a group takes part, and how often."""
    found: Collectives = {}
    for execution in graph.communication():
        operator = execution.operator
        if operator.name in ("Send", "Receive", "NeighborExchange"):
            continue
        for tensor in _operands(operator):
            key = (operator.name, _ranks(operator, groups), tensor)
            found[key] = found.get(key, 0) + execution.times
    return found


def _ranks(operator: Operator, groups: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    # The graph has a list of ranks too, but for groups that the program made itself it lists all workers.
    if operator.group not in groups:
        raise GraphFileError(f"{operator.name} uses the group {operator.group!r}, which is not known")
    return groups[operator.group]


def _operand_bytes(operator: Operator) -> int:
    return sum(tensor.nbytes for tensor in _operands(operator))


def _operands(operator: Operator) -> list[TensorType]:
    """Tensors that are communicated; a Receive has none as input, but says what it expects."""
    if operator.name == "Receive":
        return _declared(operator, "shape")
    return list(operator.inputs)


def _declared(operator: Operator, attribute: str) -> list[TensorType]:
    """Tensors that an attribute describes: ``[2, 3]``, ``([2, 3], [2])`` or ``((2, 3), (2))``, all of one type."""
    text = operator.attributes.get(attribute, "")
    dtype = _long_name(operator.attributes.get("dtype") or operator.attributes.get("recv_type") or "")
    shapes = re.findall(r"[\[(]([\d, ]*)[\])]", text)
    return [TensorType(dtype, tuple(int(number) for number in shape.split(",") if number.strip())) for shape in shapes]


def _long_name(dtype: str) -> str:
    """``BF16`` -> ``BFloat16``; graphs use both."""
    for short, long in (("BF", "BFloat"), ("F", "Float"), ("I", "Int"), ("U", "UInt")):
        if dtype.startswith(short) and dtype[len(short) :].isdigit():
            return long + dtype[len(short) :]
    return dtype


def total_sent(traffic: list[Traffic]) -> int | None:
    """Bytes that a rank sends in a step; ``None`` if one of its operators has no known formula."""
    parts = [row.sent_bytes for row in traffic]
    return None if None in parts else sum(part or 0 for part in parts)
