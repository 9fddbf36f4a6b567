# SPDX-License-Identifier: Apache-2.0
"""Models in pieces: one safetensors file a rank, and beside it a record of where each block belongs.

::

    <directory>/
        config.json                 the architecture, as Hugging Face writes it (of adapters adapter_config.json)
        shards/rank-00003.safetensors   blocks of weights and, in a training checkpoint, of the optimizer's moments
        shards/rank-00003.json          {"format": 1, "rank": 3, "size": .., "sha256": .., "tensors":
                                         {name: {"shape": [..], "start": [..], "stop": [..]}}}

Names are Hugging Face's (:mod:`.pieces`), of adapters peft's; a moment's begins with ``exp_avg.`` or ``exp_avg_sq.``.
A block that several ranks hold stands in one file. So a reader needs neither the strategy that wrote the files nor a
compiler: it takes from each file what overlaps the block it wants, which is why a checkpoint of one strategy loads
under any other. Before the first block of a file is used, the whole file is compared with the digest in its record.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ms_longctx.digest import sha256
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.hf_config import read_config, read_json
from ms_longctx.models.pieces import FilePiece
from ms_longctx.models.safetensors_io import StoredTensor, read_header, to_bits, write_file
from ms_longctx.parallel.slices import Piece

SHARDS = "shards"
_FORMAT = 1
_RECORD = re.compile(r"rank-(\d{5,})\.json")
_MOMENT = re.compile(r"(exp_avg|exp_avg_sq|master)\.")


@dataclass(frozen=True)
class Block:
    """A block to be written: its place in a file's tensor, and where its values come from."""

    place: FilePiece
    values: Callable[[], np.ndarray]


def write_shard(directory: Path, rank: int, blocks: Sequence[Block], dtype: str = "F32") -> None:
    """Write the blocks of one rank, one in memory at a time, and their record, durably.

    Args:
        directory: of the model; ``shards`` in it is created where it is missing.
        rank: names the file.
        blocks: no name twice.
        dtype: safetensors name of the type of all of them.
    """
    folder = directory / SHARDS
    folder.mkdir(exist_ok=True)
    path = folder / f"rank-{rank:05d}.safetensors"
    shapes = {block.place.name: block.place.piece.shape for block in blocks}
    if len(shapes) != len(blocks):
        raise ValueError("a rank has one block of a tensor")
    write_file(path, dtype, shapes, (to_bits(block.place.take(block.values()), dtype) for block in blocks))
    record = {"format": _FORMAT, "rank": rank, **_seal(path)}
    record["tensors"] = {block.place.name: _describe(block.place.piece) for block in blocks}
    _record_of(path).write_text(json.dumps(record) + "\n", encoding="utf-8")


def _describe(piece: Piece) -> dict[str, list[int]]:
    return {"shape": list(piece.whole), "start": list(piece.start), "stop": list(piece.stop)}


def _seal(path: Path) -> dict[str, Any]:
    """Size and digest of a file that is on the disk then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def _record_of(shard: Path) -> Path:
    return shard.with_suffix(".json")


def known_digests(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the shards as their writers recorded them, by their path inside ``directory``."""
    found = {}
    for path, record in _records(directory):
        name = path.with_suffix(".safetensors").relative_to(directory).as_posix()
        found[name] = {"size": record["size"], "sha256": record["sha256"]}
    return found


def is_sharded(directory: Path) -> bool:
    """Whether a directory holds a model in pieces."""
    return (directory / SHARDS).is_dir()


class ShardedCheckpoint:
    """A directory of pieces as a :class:`~ms_longctx.models.checkpoint.TensorSource` of the weights.

    Args:
        folder: of the model.
        overrides: fields of its configuration to replace.

    Raises:
        MsLongctxError: a file is missing or broken, or does not fit its record.
    """

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.path = folder
        self.config = read_config(folder, **overrides)
        self.weights, self.moments = open_pieces(folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every weight by its name."""
        return self.weights.shapes()

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """A block of a weight, put together from those that were stored; ``None``: all of it."""
        return self.weights.read(name, piece)

    def types(self) -> set[str]:
        """Safetensors names of the types of the weights."""
        return self.weights.types()


class BlockSource:
    """Tensors of which blocks are stored, as a :class:`~ms_longctx.models.pieces.PieceSource`.

    Args:
        path: what messages name.
        blocks: of every tensor, and where they lie.
        unchecked: SHA-256 of the files that are still to be compared with it; sources of the same files share it.
    """

    def __init__(
        self, path: Path, blocks: dict[str, dict[Piece, StoredTensor]], unchecked: dict[Path, str] | None = None
    ) -> None:
        self.path = path
        self._blocks = blocks
        self._unchecked = {} if unchecked is None else unchecked

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor."""
        return {name: next(iter(found)).whole for name, found in self._blocks.items()}

    def types(self) -> set[str]:
        """Safetensors names of the types."""
        return {stored.dtype for found in self._blocks.values() for stored in found.values()}

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """A block, put together from the stored ones that overlap it.

        Raises:
            MsLongctxError: a part of it is in none of the files, or a file is not what was written.
        """
        found = self._blocks[name]
        piece = piece or Piece.all_of(next(iter(found)).whole)
        values, filled = None, 0
        for stored_piece, stored in found.items():
            common = stored_piece.overlap(piece)
            if common is None:
                continue
            self._check(stored.path)
            part = stored.read_part(common.place_in(stored_piece))
            if common == piece:
                return part
            if values is None:
                values = np.empty(piece.shape, part.dtype)
            values[common.place_in(piece)] = part
            filled += common.size
        if values is None or filled != piece.size:
            raise MsLongctxError(
                f"{self.path}: of {name} {list(piece.start)} to {list(piece.stop)} only {filled} of {piece.size} "
                f"numbers are in {SHARDS}; copy the files of all ranks into one directory"
            )
        return values

    def _check(self, file: Path) -> None:
        """Each file once, when it is first read: a worker needs only some of them."""
        expected = self._unchecked.get(file)
        if expected is None:
            return
        if sha256(file) != expected:
            raise MsLongctxError(
                f"{file}: contents changed, the SHA-256 differs from {_record_of(file).name}; copy the file and its "
                "record again from where they were made, or make the pieces again"
            )
        del self._unchecked[file]


def open_pieces(folder: Path, verified: bool = False) -> tuple[BlockSource, BlockSource]:
    """The weights, or adapters, of a directory of pieces, and the optimizer's moments.

    Args:
        folder: of the model.
        verified: the files have just been compared with their digests; else each is when it is first read.

    Raises:
        MsLongctxError: as :class:`ShardedCheckpoint`.
    """
    blocks = read_blocks(folder)
    moments = {name: blocks.pop(name) for name in list(blocks) if _MOMENT.match(name)}
    digests = {} if verified else {folder / name: entry["sha256"] for name, entry in known_digests(folder).items()}
    return BlockSource(folder, blocks, digests), BlockSource(folder, moments, digests)


def read_blocks(folder: Path) -> dict[str, dict[Piece, StoredTensor]]:
    """Where every block of every tensor lies; a block that was stored more than once is taken once."""
    blocks: dict[str, dict[Piece, StoredTensor]] = defaultdict(dict)
    for path, record in _records(folder):
        file = path.with_suffix(".safetensors")
        header = read_header(file)
        if missing := sorted(record["tensors"].keys() - header.keys()):
            raise MsLongctxError(f"{file}: lacks {missing[0]}, which {path.name} places there")
        for name, entry in record["tensors"].items():
            piece = Piece(tuple(entry["shape"]), tuple(entry["start"]), tuple(entry["stop"]))
            if piece.shape != header[name].shape:
                raise MsLongctxError(f"{file}: {name} has shape {header[name].shape}, its record says {piece.shape}")
            blocks[name].setdefault(piece, header[name])
            if next(iter(blocks[name])).whole != piece.whole:
                raise MsLongctxError(f"{folder}: the records of {name} disagree about its shape")
    if not blocks:
        raise MsLongctxError(f"{folder / SHARDS}: no record of a rank; copy the directory again")
    return dict(blocks)


def _records(folder: Path) -> Iterable[tuple[Path, dict[str, Any]]]:
    for path in sorted((folder / SHARDS).glob("rank-*.json")):
        if not _RECORD.fullmatch(path.name):
            continue
        record = read_json(path)
        complete = isinstance(record.get("tensors"), dict) and isinstance(record.get("sha256"), str)
        if record.get("format") != _FORMAT or not complete:
            raise MsLongctxError(f"{path}: not a record of this version's format {_FORMAT}")
        yield path, record
