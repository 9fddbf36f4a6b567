# SPDX-License-Identifier: Apache-2.0
"""Do the programs of different ranks fit together? A message that nobody receives would hang the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ms_longctx.parallel.dryrun.communication import Collectives, Message
from ms_longctx.parallel.dryrun.graph_file import TensorType
from ms_longctx.parallel.dryrun.ranks import RankClass, format_ranks
from ms_longctx.parallel.strategy import Strategy


@dataclass(frozen=True)
class RankTraffic:
    """What one compiled rank sends, receives and does together with others."""

    sent: Sequence[Message]
    received: Sequence[Message]
    collectives: Collectives


@dataclass
class MatchReport:
    """Result of comparing the compiled ranks.

    Args:
        messages: point-to-point messages of a step that were compared on both sides.
        unchecked_messages: those whose other side was not compiled.
        collectives: executions of collective operators that were compared between ranks of a group.
        problems: one line for each that does not fit.
    """

    messages: int = 0
    unchecked_messages: int = 0
    collectives: int = 0
    problems: list[str] = field(default_factory=list)


def match(strategy: Strategy, classes: Sequence[RankClass], traffic: Mapping[int, RankTraffic]) -> MatchReport:
    """Compare both sides of every message, and the collectives of the ranks of every group.

    Args:
        classes: of the compiled ranks.
        traffic: compiled rank -> what its program communicates.
    """
    report = MatchReport()
    represented = {rank: known.rank for known in classes for rank in known.ranks if known.rank in traffic}
    _match_messages(strategy, represented, traffic, report)
    _match_collectives(traffic, report)
    return report


_Side = Counter[tuple[int, int, str, TensorType]]


def _match_messages(
    strategy: Strategy, represented: Mapping[int, int], traffic: Mapping[int, RankTraffic], report: MatchReport
) -> None:
    sent: _Side = Counter()
    received: _Side = Counter()
    for rank, own in traffic.items():
        ends = [(message, sent, message.receiver) for message in own.sent]
        ends += [(message, received, message.sender) for message in own.received]
        for message, side, other in ends:
            if other not in represented:
                report.unchecked_messages += message.times
            elif strategy.coordinates(other).dp != strategy.coordinates(rank).dp:
                report.problems.append(f"rank {rank} exchanges {message.tensor} with rank {other} of another copy")
            else:
                sender, receiver = represented[message.sender], represented[message.receiver]
                side[sender, receiver, message.channel, message.tensor] += message.times
    report.messages = (sent & received).total()
    for (sender, receiver, channel, tensor), times in (sent - received).items():
        report.problems.append(
            f"rank {sender} sends {tensor} to rank {receiver} ({channel}, {times} a step), which does not receive it"
        )
    for (sender, receiver, channel, tensor), times in (received - sent).items():
        report.problems.append(
            f"rank {receiver} waits for {tensor} from rank {sender} ({channel}, {times} a step), which does not send it"
        )


def _match_collectives(traffic: Mapping[int, RankTraffic], report: MatchReport) -> None:
    by_group: dict[tuple[int, ...], dict[int, Counter[tuple[str, TensorType]]]] = {}
    for rank, own in traffic.items():
        for (operator, ranks, tensor), times in own.collectives.items():
            members = by_group.setdefault(ranks, {})
            members.setdefault(rank, Counter())[operator, tensor] += times
    for ranks, members in by_group.items():
        compiled = [rank for rank in ranks if rank in traffic]
        first = compiled[0]
        for rank in compiled[1:]:
            ours, theirs = members.get(first, Counter()), members.get(rank, Counter())
            report.collectives += (ours & theirs).total()
            for one, other, extra in ((first, rank, ours - theirs), (rank, first, theirs - ours)):
                report.problems += [
                    f"rank {one} runs {operator} of {tensor} {times} times more than rank {other}, in the group "
                    f"{format_ranks(ranks)}"
                    for (operator, tensor), times in extra.items()
                ]
