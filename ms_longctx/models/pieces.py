# SPDX-License-Identifier: Apache-2.0
"""Pieces of parameters and the tensors of files they come from and go to.

Files hold tensors under Hugging Face's names, q, k and v apart. A model with ``parallel_attention`` has them in one
matrix whose rows are grouped by key/value head, so a piece of that matrix is up to three pieces in a file. The same
holds for the moments of an optimizer, whose names begin with ``exp_avg.`` and ``exp_avg_sq.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.slices import Piece

_FUSED = re.compile(r"\.qkv_proj\.(weight|bias)$")


class PieceSource(Protocol):
    """Tensors by name of which any block can be read alone; blocks come in memory of their own, fp32 or fp16."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every tensor."""
        ...

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """A block of a tensor; ``None``: all of it."""
        ...


@dataclass(frozen=True)
class FilePiece:
    """A block of a tensor in a file.

    Args:
        name, piece: in the file.
        rows: which rows of the parameter's piece these are; ``None``: all.
    """

    name: str
    piece: Piece
    rows: np.ndarray | None = None

    def take(self, values: np.ndarray) -> np.ndarray:
        """These rows out of the parameter's piece."""
        return values if self.rows is None else values[self.rows]


def file_pieces(name: str, piece: Piece, config: LlamaConfig) -> list[FilePiece]:
    """What stands in files for a piece of a parameter (or of a moment) of a model."""
    if not _FUSED.search(name):
        return [FilePiece(name, piece)]
    dim, heads = config.head_size, config.kv_heads
    queries = config.num_attention_heads // heads * dim
    group, inside = np.divmod(np.arange(piece.start[0], piece.stop[0]), queries + 2 * dim)
    found = []
    for part, first, rows in (("q_proj", 0, queries), ("k_proj", queries, dim), ("v_proj", queries + dim, dim)):
        chosen = np.flatnonzero((inside >= first) & (inside < first + rows))
        if not len(chosen):
            continue
        # In the file the rows of all groups follow one another, so those of a run of fused rows are a run again.
        places = group[chosen] * rows + inside[chosen] - first
        whole = (heads * rows, *piece.whole[1:])
        block = Piece(whole, (int(places[0]), *piece.start[1:]), (int(places[-1]) + 1, *piece.stop[1:]))
        found.append(FilePiece(name.replace("qkv_proj", part), block, chosen))
    return found


def read_parameter(source: PieceSource, name: str, piece: Piece, config: LlamaConfig, path: Path) -> np.ndarray:
    """A piece of a parameter from files; beyond it, one block of a file is in memory.

    Raises:
        MsLongctxError: the files lack it or have another shape; ``path`` is what the message names.
    """
    parts = file_pieces(name, piece, config)
    shapes = source.shapes()
    for part in parts:
        if part.name not in shapes:
            raise MsLongctxError(f"{path}: no tensor {part.name}; the checkpoint is not complete or not of this model")
        if tuple(shapes[part.name]) != part.piece.whole:
            raise MsLongctxError(
                f"{path}: {part.name} has shape {tuple(shapes[part.name])}, expected {part.piece.whole}; check the "
                "configuration"
            )
    if parts[0].rows is None:
        return source.read(name, piece)
    values: np.ndarray | None = None
    for part in parts:
        block = source.read(part.name, part.piece)
        if values is None:
            values = np.empty(piece.shape, block.dtype)
        values[part.rows] = block
    assert values is not None  # a piece has at least one row
    return values
