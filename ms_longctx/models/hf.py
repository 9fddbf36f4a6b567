# SPDX-License-Identifier: Apache-2.0
"""Hugging Face model directories: weights in (sharded) safetensors, read and written tensor by tensor."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from ms_longctx.config.model import LlamaConfig
from ms_longctx.data.tokenizer_files import write_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import StoredPart, stored_parts
from ms_longctx.models.hf_config import read_config, read_json, write_config
from ms_longctx.models.safetensors_io import FLOATS, StoredTensor, read_header, tensor_bytes, write_file
from ms_longctx.parallel.slices import Piece

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE_TYPES = {
    ms.float32: ("F32", "float32"),
    ms.float16: ("F16", "float16"),
    ms.bfloat16: ("BF16", "bfloat16"),
}
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


class HfCheckpoint:
    """A Hugging Face directory as a :class:`ms_longctx.models.checkpoint.TensorSource`.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``, or the sharded form with its index.
        overrides: configuration fields to replace.

    Raises:
        MsLongctxError: a file is missing, broken or does not fit the index.
    """

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.path = folder
        self.config = read_config(folder, **overrides)
        self._tensors = find_tensors(folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """The values of one tensor, or of a block of it: fp32 (also for bf16) or fp16."""
        stored = self._tensors[name]
        return stored.read() if piece is None else stored.read_part(piece.place_in(Piece.all_of(stored.shape)))

    def types(self) -> set[str]:
        """Safetensors names of the types of the tensors."""
        return {tensor.dtype for tensor in self._tensors.values()}


def find_tensors(folder: Path, types: tuple[str, ...] = FLOATS) -> dict[str, StoredTensor]:
    """The tensors of a directory, in one file or several; see :func:`~ms_longctx.models.safetensors_io.read_header`.

    Raises:
        MsLongctxError: files are missing, broken, contradict their index or hold other types.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE, types)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise MsLongctxError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}; convert the weights to safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise MsLongctxError(f"{index}: has no weight_map")
    headers = {shard: read_header(folder / shard, types) for shard in sorted(set(weight_map.values()))}
    tensors = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise MsLongctxError(f"{folder / shard}: lacks {name}, which the index places there")
        tensors[name] = headers[shard][name]
    return tensors


def save_model(
    model: nn.Cell,
    config: LlamaConfig,
    folder: Path,
    dtype: ms.Type,
    max_shard_size: int | str = "5GB",
    companions: Path | None = None,
) -> None:
    """Write a model directory that appears only when it is complete.

    Args:
        model: its parameters carry Hugging Face's names.
        config: the model's configuration.
        folder: where to; weights of an earlier model there are replaced.
        dtype: type of all tensors in the files.
        max_shard_size: bytes, or for example ``5GB``; a larger model is split into several files.
        companions: source of the tokenizer (see :func:`ms_longctx.data.tokenizer_files.write_tokenizer`), if any.

    Raises:
        MsLongctxError: the directory cannot be written, an argument is impossible, or the model has adapters.
    """
    _refuse_adapters(model)
    file_type, torch_name = _FILE_TYPES[dtype]
    parts, limit = stored_parts(model, config), parse_size(max_shard_size)
    shapes = {part.name: part.shape for part in parts}
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        try:
            write_tensors(partial, file_type, shapes, _bits(parts, dtype), limit)
            write_config(config, partial, torch_name)
            if companions is not None:
                _write_companions(companions, partial, folder)
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise MsLongctxError(f"{folder}: the model cannot be written ({error})") from error


def _write_companions(source: Path, partial: Path, folder: Path) -> None:
    try:
        write_tokenizer(source, partial)
    except MsLongctxError as error:  # the weights are worth more than a tokenizer nobody could read
        logging.getLogger(__name__).warning("%s is saved without a tokenizer: %s", folder, error)


def _refuse_adapters(model: nn.Cell) -> None:
    """No other program would find them in the files, and the weights would seem to be the tuned ones."""
    adapter = next((name for name, _ in model.parameters_and_names() if ".lora_A." in name), None)
    if adapter is not None:
        raise MsLongctxError(
            f"the model has adapters (such as {adapter}): put them into the weights first with "
            "merge_and_unload(model), or save them alone with save_adapter(model, directory)"
        )


def parse_size(size: int | str) -> int:
    """Bytes from a number or from ``500MB``, ``5GB`` (powers of ten, as transformers counts)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", str(size).strip().upper())
    if match is None or float(match[1]) <= 0:
        raise MsLongctxError(f"max_shard_size = {size!r} is not a size; expected for example '5GB'")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def write_tensors(
    folder: Path, file_type: str, shapes: dict[str, tuple[int, ...]], arrays: Iterable[np.ndarray], limit: int
) -> None:
    """Write the weights of a Hugging Face directory: one file, or several with their index.

    Args:
        folder: it exists.
        file_type: safetensors name of the type of all tensors.
        shapes: of the tensors, in the order of ``arrays``.
        arrays: taken one by one, as :func:`~ms_longctx.models.safetensors_io.write_file` takes them.
        limit: bytes of a file; a larger tensor has a file of its own.
    """
    shards = _plan_shards(shapes, file_type, limit)
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    source = iter(arrays)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, file_type, shard, itertools.islice(source, len(shard)))
    if len(shards) > 1:
        total = sum(tensor_bytes(file_type, shape) for shape in shapes.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan_shards(shapes: dict[str, tuple[int, ...]], file_type: str, limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Consecutive tensors up to ``limit`` bytes a file."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = tensor_bytes(file_type, shape)
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _bits(parts: list[StoredPart], dtype: ms.Type) -> Iterator[np.ndarray]:
    for part in parts:
        array = part.values(dtype)
        yield array.view(np.uint16) if dtype == ms.bfloat16 else array


def _publish(partial: Path, folder: Path) -> None:
    """Give a complete directory its name, or move its files over an existing one, configuration last."""
    if not folder.exists():
        partial.rename(folder)
        return
    fresh = sorted(partial.iterdir(), key=lambda path: path.suffix == ".json")
    stale = {*folder.glob("model*.safetensors"), *folder.glob(INDEX_FILE)}
    for path in stale - {folder / path.name for path in fresh}:
        path.unlink()
    for path in fresh:
        path.replace(folder / path.name)
