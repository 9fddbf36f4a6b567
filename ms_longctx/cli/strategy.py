# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx strategy show``: what a strategy file means on so many workers, before anything is started."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from ms_longctx.cli.options import UsageError
from ms_longctx.config import load_config
from ms_longctx.parallel.strategy import Strategy

_Item = TypeVar("_Item")

# Above so many workers only the ends of tables and lists are drawn, so many entries of each.
_DRAWN_WHOLE = 256
_ENDS = 4

_MEANING = {
    "mp": "tensor parallel: shares of every matrix",
    "cp": "context parallel: pieces of every sequence",
    "ulysses": "heads exchanged for tokens, inside cp",
    "ring": "keys and values travel, inside cp",
    "dp": "data parallel: other samples",
    "dp_cp": "same weights: gradients are summed",
    "pp": "pipeline: one rank of each stage",
}


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "strategy",
        help="show what a strategy file means",
        description="Check a strategy file for a number of workers and draw which rank does what.",
    )
    parser.add_argument("action", choices=["show"], help="draw the rank grid and list the groups")
    parser.add_argument("--parallel_config", required=True, metavar="FILE", help='e.g. {"dp": 4, "mp": 2, "pp": 2}')
    parser.add_argument("--worker_num", required=True, type=int, metavar="N", help="number of workers")
    parser.add_argument("--config", metavar="NAME_OR_FILE", help="also check that this run's model can be split so")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank: its place, groups and neighbours")


def run(args: argparse.Namespace) -> int:
    """Print the grid; 0 if the strategy is possible."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    if args.worker_num < 1:
        raise UsageError(f"--worker_num: expected at least 1, found {args.worker_num}")
    if args.config is None:
        strategy = Strategy.read(args.parallel_config, args.worker_num)
    else:
        config = load_config(args.config, parallel_config=args.parallel_config)
        strategy = Strategy.from_config(config, args.worker_num)
        strategy.check_model(config.model, config.data.seq_length, config.train.batch_size)
    lines = draw(strategy) if args.rank is None else describe_rank(strategy, args.rank)
    print("\n".join(lines))
    return 0


def draw(strategy: Strategy) -> Iterator[str]:
    """The rank grid, a table a pipeline stage with a column a tensor parallel share; then the groups.

    Of more than :data:`_DRAWN_WHOLE` workers only the first and last stages, rows, columns and groups.
    """
    yield strategy.describe()
    short = strategy.worker_num > _DRAWN_WHOLE
    if short:
        yield f"of more than {_DRAWN_WHOLE} workers only the first and last are shown; ... stands for those between"
    for stage in _ends(range(strategy.pp), short):
        yield ""
        yield from ["..."] if stage is None else _draw_stage(strategy, stage, short)
    for axis, meaning in _MEANING.items():
        if strategy.degree(axis) > 1 and not _repeats(strategy, axis):
            groups = strategy.groups(axis)
            yield f"\n{axis} ({meaning}), {len(groups)} group{'s' if len(groups) > 1 else ''} of {len(groups[0])}"
            for group in _ends(groups, short):
                ranks = [None] if group is None else _ends(group, short)
                yield f"  {' '.join(map(_dots, ranks))}"


def _draw_stage(strategy: Strategy, stage: int, short: bool) -> Iterator[str]:
    shares = _ends(range(strategy.mp), short)
    width = max(len(str(strategy.worker_num - 1)), len(f"mp {strategy.mp - 1}"))
    label = max(len(_row_label(strategy, dp, cp)) for dp in (0, strategy.dp - 1) for cp in (0, strategy.cp - 1))
    columns = "  ".join(_dots(None if mp is None else f"mp {mp}").rjust(width) for mp in shares)
    yield f"{f'stage {stage}' if strategy.pp > 1 else '':{label}}  {columns}"
    for row in _ends(range(strategy.dp * strategy.cp), short):
        if row is None:
            yield "..."
            continue
        dp, cp = divmod(row, strategy.cp)
        ring, ulysses = divmod(cp, strategy.ulysses_degree)
        ranks = [None if mp is None else strategy.rank(stage, dp, ring, ulysses, mp) for mp in shares]
        cells = "  ".join(_dots(rank).rjust(width) for rank in ranks)
        yield f"{_row_label(strategy, dp, cp):{label}}  {cells}"


def _ends(items: Sequence[_Item], short: bool) -> list[_Item | None]:
    """The items; if ``short``, only the first and last of many, and ``None`` in place of those between."""
    if not short or len(items) <= 2 * _ENDS + 1:
        return list(items)
    return [*items[:_ENDS], None, *items[-_ENDS:]]


def _dots(item: object | None) -> str:
    return "..." if item is None else str(item)


def describe_rank(strategy: Strategy, rank: int) -> Iterator[str]:
    """Place, groups and neighbours of one rank."""
    place = strategy.coordinates(rank)
    yield strategy.describe()
    yield f"rank {rank}: pp {place.pp}, dp {place.dp}, cp {place.cp}, mp {place.mp}"
    for axis in _MEANING:
        if strategy.degree(axis) > 1 and not _repeats(strategy, axis):
            before, after = strategy.neighbours(axis, rank)
            group = " ".join(map(_dots, _ends(strategy.group(axis, rank), strategy.worker_num > _DRAWN_WHOLE)))
            yield f"{axis:8}{group}   before: {_name(before)}, after: {_name(after)}"


def _row_label(strategy: Strategy, dp: int, cp: int) -> str:
    if strategy.cp == 1:
        return f"dp {dp}"
    if strategy.attention_mode != "hybrid":
        return f"dp {dp} cp {cp}"
    ring, ulysses = divmod(cp, strategy.ulysses_degree)
    return f"dp {dp} ring {ring} ulysses {ulysses}"


def _repeats(strategy: Strategy, axis: str) -> bool:
    """Whether the groups of ``axis`` are those of a plainer axis."""
    if axis in ("ring", "ulysses"):
        return strategy.attention_mode != "hybrid" or strategy.degree(axis) == strategy.cp
    return axis == "dp_cp" and 1 in (strategy.dp, strategy.cp)


def _name(rank: int | None) -> str:
    return "-" if rank is None else str(rank)
