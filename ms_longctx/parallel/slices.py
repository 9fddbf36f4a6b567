# SPDX-License-Identifier: Apache-2.0
"""Which piece of a parameter a rank holds: from MindSpore's record of a compiled program, and from the strategy alone.

Two ways to the same answer. A running program knows for certain: MindSpore's compiler writes a layout for each
parameter (:func:`from_layout`). Without a compiler, to split files for a strategy, the rules of
:mod:`ms_longctx.parallel.auto_parallel` give it (:func:`piece_of`); a test holds the two against each other.

Files never depend on these rules being right: each piece is stored with its place in the whole tensor, and readers go
by that.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ms_longctx.config.model import LlamaConfig
from ms_longctx.parallel.strategy import Strategy

# Matrices whose outputs (rows) or inputs (columns) are split over mp; a bias of the former has rows, too. Of an adapter
# the matrix on the side that is split is, too.
_ROWS = re.compile(r"\.(qkv_proj|q_proj|k_proj|v_proj|gate_proj|up_proj)\.((lora_B\.)?weight|bias)$")
_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.(lora_A\.)?weight$")
_VOCABULARY = re.compile(r"(embed_tokens|lm_head)\.weight$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# What MindSpore leaves whole because splitting it is not worth a message (``AutoParallel.hsdp``, threshold=64).
_SMALLEST_SPLIT = 64 << 10
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Piece:
    """A block of a tensor.

    Args:
        whole: shape of the tensor.
        start, stop: of the block on every axis.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def all_of(cls, whole: Sequence[int]) -> Piece:
        """The tensor itself."""
        return cls(tuple(whole), (0,) * len(whole), tuple(whole))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements of the block."""
        return math.prod(self.shape)

    def overlap(self, other: Piece) -> Piece | None:
        """What two blocks of one tensor have in common, if anything."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(first >= last for first, last in zip(start, stop, strict=True)):
            return None
        return Piece(self.whole, start, stop)

    def place_in(self, outer: Piece) -> tuple[slice, ...]:
        """Where this block lies inside ``outer``, to index an array that holds ``outer``."""
        bounds = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in bounds)

    def cut(self, axis: int, parts: int, index: int) -> Piece:
        """Part ``index`` of ``parts`` equal ones along ``axis``, which they must divide."""
        length = (self.stop[axis] - self.start[axis]) // parts
        start, stop = list(self.start), list(self.stop)
        start[axis] += index * length
        stop[axis] = start[axis] + length
        return Piece(self.whole, tuple(start), tuple(stop))


def from_layout(layout: Sequence[Any], place: int, optimizer_group: Sequence[int]) -> Piece:
    """The piece that a compiled program gives to a rank.

    Args:
        layout: an entry of ``Cell.parameter_layout_dict``. Used are item 0, the device matrix of a stage; 1, for each
            axis of the tensor the axis of that matrix it is split over, counted from the last, or -1; 6, the whole
            shape.
        place: of the rank in its pipeline stage.
        optimizer_group: places of the ranks that share the optimizer state of this parameter (item 5 names the group);
            empty where it is not shared.
    """
    piece = Piece.all_of(layout[6])
    for axis, (index, degree) in enumerate(_coordinates(layout, place)):
        piece = piece.cut(axis, degree, index)
    if optimizer_group:
        piece = piece.cut(0, len(optimizer_group), list(optimizer_group).index(place))
    return piece


def holders(layout: Sequence[Any], place: int) -> list[int]:
    """Places in the stage, ascending, that a layout gives the same piece before the optimizer splits it."""
    own = _coordinates(layout, place)
    return [other for other in range(math.prod(layout[0])) if _coordinates(layout, other) == own]


def _coordinates(layout: Sequence[Any], place: int) -> list[tuple[int, int]]:
    """For each axis of the tensor: which part of how many a place has."""
    matrix = list(layout[0])
    own = list(itertools.product(*(range(degree) for degree in matrix)))[place] if matrix else ()
    return [(0, 1) if index < 0 else (own[-1 - index], matrix[-1 - index]) for index in layout[1]]


def piece_of(name: str, shape: Sequence[int], config: LlamaConfig, strategy: Strategy, rank: int) -> Piece | None:
    """The piece of a parameter that a rank holds under a strategy, moments included; ``None`` if another stage has it.

    Args:
        name, shape: of the model's parameter.
        config: of the model.
        strategy: must fit it (:meth:`Strategy.check_model`).
        rank: among all workers.
    """
    own = strategy.coordinates(rank)
    if own.pp not in _stages(name, config, strategy):
        return None
    piece = Piece.all_of(shape)
    axis = _split_axis(name, strategy)
    if axis is not None:
        piece = piece.cut(axis, strategy.mp, own.mp)
    copies = strategy.dp * strategy.cp * (strategy.mp if axis is None else 1)
    if strategy.optimizer_shard and _is_worth_splitting(piece, copies):
        data = own.dp * strategy.cp + own.cp
        piece = piece.cut(0, copies, data * strategy.mp + own.mp if axis is None else data)
    return piece


def _split_axis(name: str, strategy: Strategy) -> int | None:
    if strategy.mp == 1:
        return None
    if _ROWS.search(name) or (strategy.vocab_parallel and _VOCABULARY.search(name)):
        return 0
    return 1 if _COLUMNS.search(name) else None


def _is_worth_splitting(piece: Piece, parts: int) -> bool:
    return parts > 1 and piece.shape[0] % parts == 0 and piece.size * _FLOAT_BYTES >= _SMALLEST_SPLIT


def _stages(name: str, config: LlamaConfig, strategy: Strategy) -> tuple[int, ...]:
    """Pipeline stages that have a parameter."""
    last = strategy.pp - 1
    if layer := _LAYER.match(name):
        number = int(layer[1])
        ends = itertools.accumulate(strategy.stage_layers(config.num_hidden_layers))
        return (next(stage for stage, end in enumerate(ends) if number < end),)
    if name == "model.embed_tokens.weight":
        return (0, last) if config.tie_word_embeddings else (0,)
    return (last,)
