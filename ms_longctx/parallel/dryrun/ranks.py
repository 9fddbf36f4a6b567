# SPDX-License-Identifier: Apache-2.0
"""Which ranks have to be compiled: those that differ only in their data parallel index run the same program."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.strategy import Coordinates, Strategy

CLASSES = "classes"
STAGES = "stages"


@dataclass(frozen=True)
class RankClass:
    """Ranks with the same program.

    Args:
        rank: the one that is compiled.
        ranks: all of them, in order.
    """

    rank: int
    ranks: tuple[int, ...]


def select_ranks(text: str, strategy: Strategy) -> tuple[int, ...]:
    """The ranks that a user asks for.

    Args:
        text: ``classes`` (one rank of each class), ``stages`` (one rank of each pipeline stage), or numbers and
            ranges, ``0,5,8-11``.

    Raises:
        MsLongctxError: not of this form, or a rank that does not exist.
    """
    if text == CLASSES:
        return tuple(dict.fromkeys(_first_alike(strategy, rank) for rank in range(strategy.worker_num)))
    if text == STAGES:
        return tuple(strategy.rank(pp=stage) for stage in range(strategy.pp))
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first:
            raise MsLongctxError(
                f"--ranks: {part!r} in {text!r} is no rank; expected '0,5,8-11', 'stages' or 'classes'"
            )
        if last >= strategy.worker_num:
            raise MsLongctxError(f"--ranks: rank {last} does not exist; expected 0 to {strategy.worker_num - 1}")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def rank_classes(strategy: Strategy, ranks: Iterable[int]) -> list[RankClass]:
    """The classes of ``ranks``; of each, the first of ``ranks`` that belongs to it is compiled."""
    chosen: dict[int, int] = {}
    for rank in ranks:
        chosen.setdefault(_first_alike(strategy, rank), rank)
    return [RankClass(rank, strategy.group("dp", rank)) for rank in chosen.values()]


def describe_group(strategy: Strategy, group: Iterable[int]) -> str:
    """The axes on which the ranks of a group differ: ``mp``, ``dp x cp``, ``world``; with a count if it is a part."""
    ranks = sorted(set(group))
    if ranks == list(range(strategy.worker_num)) and len(ranks) > 1:
        return "world"
    places = [strategy.coordinates(rank) for rank in ranks]
    axes = [axis for axis in ("pp", "dp", "ring", "ulysses", "mp") if _varies(places, axis)]
    full = 1
    for axis in axes:
        full *= strategy.degree(axis)
    if "ring" in axes and "ulysses" in axes:
        axes[axes.index("ring")] = "cp"
        axes.remove("ulysses")
    elif strategy.attention_mode != "hybrid":
        axes = ["cp" if axis in ("ring", "ulysses") else axis for axis in axes]
    name = " x ".join(axes) or "itself"
    return name if len(ranks) == full else f"{name} ({len(ranks)} of {full})"


def format_ranks(ranks: Iterable[int]) -> str:
    """``0-3, 8``: consecutive ranks as a range; evenly spaced ones as ``0, 4, .. 28``."""
    ordered = list(ranks)
    steps = {after - before for before, after in zip(ordered, ordered[1:], strict=False)}
    if len(ordered) > 4 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}, {ordered[1]}, .. {ordered[-1]}"
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _first_alike(strategy: Strategy, rank: int) -> int:
    return strategy.group("dp", rank)[0]


def _varies(places: list[Coordinates], axis: str) -> bool:
    return len({getattr(place, axis) for place in places}) > 1
