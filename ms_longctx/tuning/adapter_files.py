# SPDX-License-Identifier: Apache-2.0
"""Adapters as files in peft's own format: ``adapter_config.json`` and ``adapter_model.safetensors``.

A run whose adapters are split over devices leaves them in pieces (:mod:`ms_longctx.models.sharded`) under the names of
peft's file; :func:`load_adapter` reads those, too, and :func:`gather_adapter` makes peft's file of them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from mindspore import nn

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.safetensors_io import read_header, to_bits, write_file
from ms_longctx.models.sharded import SHARDS, BlockSource, is_sharded, open_pieces
from ms_longctx.parallel.slices import Piece
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.prepare import get_pe_model, take_out
from ms_longctx.tuning.trained import TrainedTensor, adapted_cells, lora_config, trained_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_log = logging.getLogger(__name__)


def save_adapter(model: nn.Cell, directory: str | Path, base_model: str = "") -> None:
    """Write the adapters (and what trains with them) of ``model`` as peft does; peft can open the result.

    All tensors are fp32. Each file is written beside its place and renamed.

    Args:
        model: a model from :func:`ms_longctx.tuning.get_pe_model`, not merged.
        directory: created where it does not exist.
        base_model: path or name of the base model, for readers of the file.

    Raises:
        MsLongctxError: no adapters, they are merged, or the directory cannot be written.
    """
    config = lora_config(model)
    _require_unmerged(model, "save_adapter")
    tensors = {PREFIX + name: tensor for name, tensor in sorted(trained_tensors(model).items())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(
            folder / WEIGHTS_FILE,
            lambda path: write_file(path, "F32", shapes, (tensor.read() for tensor in tensors.values())),
        )
        write_adapter_config(config, folder, base_model)
    except OSError as error:
        raise MsLongctxError(f"{folder}: the adapter cannot be written ({error.strerror})") from error


def write_adapter_config(config: LoraConfig, folder: Path, base_model: str = "") -> None:
    """Write ``adapter_config.json`` alone; ``base_model`` as for :func:`save_adapter`."""
    text = json.dumps(config.to_peft(base_model), indent=2, sort_keys=True) + "\n"
    _replace(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def open_adapter(folder: Path) -> BlockSource:
    """The tensors of an adapter, whole or in pieces, by the names in peft's file.

    Raises:
        MsLongctxError: files missing or damaged.
    """
    if is_sharded(folder):
        return open_pieces(folder)[0]
    stored = read_header(folder / WEIGHTS_FILE)
    return BlockSource(folder, {name: {Piece.all_of(tensor.shape): tensor} for name, tensor in stored.items()})


def gather_adapter(source: Path, folder: Path, file_type: str = "F32") -> None:
    """Copy an adapter, whole or in pieces, into a new directory that peft can open; one tensor is in memory at a time.

    Args:
        source: directory of the adapter.
        folder: must not exist yet; it appears when it is complete.
        file_type: ``F32``, ``F16`` or ``BF16``, of the tensors.

    Raises:
        MsLongctxError: the directory exists or cannot be written, or the source is not complete.
    """
    if folder.exists():
        raise MsLongctxError(f"{folder}: exists already; choose another directory, or remove it")
    read_adapter_config(source)
    tensors = open_adapter(source)
    shapes = dict(sorted(tensors.shapes().items()))
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        try:
            arrays = (to_bits(tensors.read(name), file_type) for name in shapes)
            write_file(partial / WEIGHTS_FILE, file_type, shapes, arrays)
            shutil.copyfile(source / CONFIG_FILE, partial / CONFIG_FILE)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise MsLongctxError(f"{folder}: the adapter cannot be written ({error.strerror or error})") from error


def load_adapter(model: nn.Cell, directory: str | Path) -> nn.Cell:
    """Read an adapter that this package or peft has written into ``model``, and return the model.

    Without adapters the model gets them as the files say. With adapters, the files must fit them.

    Raises:
        MsLongctxError: files missing or damaged, a variant of LoRA that is not built here, or names or shapes
            that do not fit the model; the model is not changed then.
    """
    folder = Path(directory)
    config = read_adapter_config(folder)
    stored = open_adapter(folder)
    if not adapted_cells(model):
        return _load_into_plain_model(model, folder, config, stored)
    _require_unmerged(model, "load_adapter")
    if lora_config(model).scaling != config.scaling:
        raise MsLongctxError(
            f"{folder}: the adapter's scaling is {config.scaling:g}, that of the model is "
            f"{lora_config(model).scaling:g}; prepare it with the adapter's r, lora_alpha and use_rslora"
        )
    _fill(model, _place(folder), stored, config)
    return model


def _load_into_plain_model(model: nn.Cell, folder: Path, config: LoraConfig, stored: BlockSource) -> nn.Cell:
    trained = [(param, param.requires_grad) for _, param in model.parameters_and_names()]
    get_pe_model(model, config)
    try:
        _fill(model, _place(folder), stored, config)
    except MsLongctxError:
        take_out(model)
        for param, flag in trained:
            param.requires_grad = flag
        raise
    return model


def _place(folder: Path) -> Path:
    """What messages about the tensors name."""
    return folder / (SHARDS if is_sharded(folder) else WEIGHTS_FILE)


def _fill(model: nn.Cell, path: Path, stored: BlockSource, config: LoraConfig) -> None:
    """Set all tensors of an adapter, or none if names or shapes do not fit."""
    tensors = {PREFIX + name: tensor for name, tensor in trained_tensors(model).items()}
    _check(path, stored.shapes(), {name: tensor.shape for name, tensor in tensors.items()}, config.bias == "lora_only")
    _check_tied(path, stored, tensors)
    for name in stored.shapes():
        tensors[name].write(stored.read(name))


def read_adapter_config(directory: str | Path) -> LoraConfig:
    """The configuration of an adapter on disk.

    Raises:
        MsLongctxError: not there, not JSON, or a variant of LoRA that is not built here.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MsLongctxError(f"{path}: cannot be read ({error.strerror}); expected an adapter of peft") from error
    except ValueError as error:
        raise MsLongctxError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise MsLongctxError(f"{path}: expected a JSON object")
    return LoraConfig.from_peft(values, str(path))


def _check(
    path: Path, stored: Mapping[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], optional_biases: bool
) -> None:
    missing = sorted(wanted.keys() - stored.keys())
    if optional_biases and missing and all(name.endswith(".bias") for name in missing):
        _log.warning("%s: no biases, as peft writes it for bias = lora_only; those of the base stay", path)
        missing = []
    if missing:
        raise MsLongctxError(f"{path}: no tensor {missing[0]} ({len(missing)} missing); is it another model's?")
    if extra := sorted(stored.keys() - wanted.keys()):
        raise MsLongctxError(f"{path}: {extra[0]} has no place in the model ({len(extra)} such tensors)")
    for name, shape in stored.items():
        if shape != wanted[name]:
            raise MsLongctxError(
                f"{path}: {name} has shape {shape}, the model needs {wanted[name]}; is it for a model of another size?"
            )


def _check_tied(path: Path, stored: BlockSource, tensors: dict[str, TrainedTensor]) -> None:
    """peft trains a tied embedding and head apart when both are in ``modules_to_save``."""
    seen: dict[int, str] = {}
    for name in stored.shapes():
        key = id(tensors[name].parameter)
        if tensors[name].rows is not None or key not in seen:
            seen[key] = name
        elif not np.array_equal(stored.read(name), stored.read(seen[key])):
            raise MsLongctxError(
                f"{path}: {name} and {seen[key]} differ, but the model ties them (tie_word_embeddings); "
                "the adapter was trained on a copy of the head and cannot be loaded"
            )


def _require_unmerged(model: nn.Cell, function: str) -> None:
    if any(cell.before_merge is not None for cell in adapted_cells(model).values()):
        raise MsLongctxError(f"the adapters are merged into the base; call unmerge before {function}")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside ``path``, then rename, so that no reader sees half a file."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
