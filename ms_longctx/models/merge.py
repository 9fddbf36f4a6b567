# SPDX-License-Identifier: Apache-2.0
"""Models from one layout of files to another: pieces to a Hugging Face directory, and any model to pieces.

One tensor, or one block, is in memory at a time. Numbers keep their type and their bits unless another type is asked
for. Only weights are moved; the optimizer's state stays in the training checkpoint.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ms_longctx.config.model import LlamaConfig
from ms_longctx.data.tokenizer_files import write_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import DERIVED_SUFFIXES, TensorSource
from ms_longctx.models.hf import parse_size, write_tensors
from ms_longctx.models.hf_config import write_config
from ms_longctx.models.pieces import FilePiece
from ms_longctx.models.safetensors_io import to_bits
from ms_longctx.models.sharded import Block, write_shard
from ms_longctx.parallel.slices import Piece, piece_of
from ms_longctx.parallel.strategy import Strategy

FILE_TYPES = {"fp32": ("F32", "float32"), "fp16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}


def merge(source: TensorSource, folder: Path, dtype: str | None = None, max_shard_size: int | str = "5GB") -> None:
    """Write a whole model as a Hugging Face directory that appears only when it is complete.

    Args:
        source: the model.
        folder: must not exist yet.
        dtype: ``fp32``, ``fp16`` or ``bf16``; ``None``: that of the source, fp32 where it has several.
        max_shard_size: bytes, or for example ``5GB``; a larger model is split into several files.

    Raises:
        MsLongctxError: the directory exists or cannot be written, or the source is not complete.
    """
    file_type, name = _type(source, dtype)

    def write(partial: Path) -> None:
        shapes = _shapes(source)
        arrays = (to_bits(source.read(tensor), file_type) for tensor in shapes)
        write_tensors(partial, file_type, shapes, arrays, parse_size(max_shard_size))
        write_config(source.config, partial, name)

    _write_directory(source, folder, write)


def split(source: TensorSource, folder: Path, strategy: Strategy, dtype: str | None = None) -> None:
    """Write a model in the pieces that the ranks of a strategy hold.

    Args:
        source: the model.
        folder: must not exist yet.
        strategy: must fit the model.
        dtype: as for :func:`merge`.

    Raises:
        MsLongctxError: the directory exists or cannot be written, or the source is not complete.
    """
    file_type, name = _type(source, dtype)
    shapes = _shapes(source)

    def write(partial: Path) -> None:
        written: set[tuple[str, Piece]] = set()
        for rank in range(strategy.worker_num):
            blocks = []
            for tensor, piece in _pieces(shapes, source.config, strategy, rank):
                if (tensor, piece) not in written:
                    written.add((tensor, piece))
                    blocks.append(Block(FilePiece(tensor, piece), functools.partial(source.read, tensor, piece)))
            if blocks:
                write_shard(partial, rank, blocks, file_type)
        write_config(source.config, partial, name)

    _write_directory(source, folder, write)


def _pieces(
    shapes: dict[str, tuple[int, ...]], config: LlamaConfig, strategy: Strategy, rank: int
) -> Iterator[tuple[str, Piece]]:
    for name, shape in shapes.items():
        piece = piece_of(name, shape, config, strategy, rank)
        if piece is not None:
            yield name, piece


def _shapes(source: TensorSource) -> dict[str, tuple[int, ...]]:
    """The tensors that a model of this package has, layer by layer."""
    tied = source.config.tie_word_embeddings
    return {
        name: shape
        for name, shape in source.shapes().items()
        if not name.endswith(DERIVED_SUFFIXES) and not (tied and name == "lm_head.weight")
    }


def _type(source: TensorSource, dtype: str | None) -> tuple[str, str]:
    if dtype is not None:
        if dtype not in FILE_TYPES:
            raise MsLongctxError(f"dtype = {dtype!r} is unknown; expected one of {', '.join(FILE_TYPES)}")
        return FILE_TYPES[dtype]
    types = source.types()
    return next((pair for pair in FILE_TYPES.values() if types == {pair[0]}), FILE_TYPES["fp32"])


def _write_directory(source: TensorSource, folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a directory that gets its name, and the tokenizer, at the end."""
    if folder.exists():
        raise MsLongctxError(f"{folder}: exists already; choose another directory, or remove it")
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        try:
            write(partial)
            write_tokenizer(source.path, partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise MsLongctxError(f"{folder}: the model cannot be written ({error.strerror or error})") from error
