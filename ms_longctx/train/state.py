# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds besides the weights: position, optimizer, random numbers, loss scale."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.pieces import FilePiece, PieceSource, file_pieces, read_parameter
from ms_longctx.models.safetensors_io import read_header, write_file
from ms_longctx.models.sharded import BlockSource, is_sharded, open_pieces
from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.loss_scale import DynamicLossScale
from ms_longctx.parallel.slices import Piece
from ms_longctx.train.checkpoint import DamagedCheckpointError, write_json

# Subdirectory, so that the checkpoint itself is a plain Hugging Face or peft directory.
DIRECTORY = "trainer"
_STATE = "state.json"
_FORMAT = 1
_SHARD_BYTES = 4 << 30


@dataclass
class Progress:
    """How far a run is.

    Args:
        step: optimizer steps done, skipped ones included.
        epoch: passes over the data that are complete.
        sample: samples of the current pass that were used.
        tokens: supervised tokens trained on.
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0
    tokens: int = 0


def write_state(
    checkpoint: Path,
    progress: Progress,
    optimizer: AdamW,
    loss_scale: DynamicLossScale,
    facts: dict[str, Any],
) -> None:
    """Write everything but weights and moments into ``checkpoint/trainer``.

    Args:
        facts: plain data that :func:`read_state` returns, to compare with the resuming run.
    """
    directory = checkpoint / DIRECTORY
    directory.mkdir(exist_ok=True)
    step = int(optimizer.step.asnumpy())
    write_json(
        directory / _STATE,
        {
            "format": _FORMAT,
            "progress": asdict(progress),
            "optimizer": {"step": step, "hyperparameters": optimizer.hyperparameters()},
            "loss_scale": loss_scale.state_dict(),
            "random": random_state(),
            **facts,
        },
    )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The plain data that :func:`save_state` wrote.

    Raises:
        DamagedCheckpointError: not a training checkpoint of this version.
    """
    file = checkpoint / DIRECTORY / _STATE
    if not file.is_file():
        raise DamagedCheckpointError(f"{checkpoint}: no training checkpoint, {DIRECTORY}/{_STATE} is missing")
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if values.get("format") != _FORMAT:
        raise DamagedCheckpointError(f"{file}: format {values.get('format')!r}, this version reads {_FORMAT}")
    return values


def restore_state(values: dict[str, Any], loss_scale: DynamicLossScale) -> Progress:
    """Continue loss scale and random numbers from :func:`read_state`, and say how far the run was."""
    loss_scale.load_state_dict(values["loss_scale"])
    set_random_state(values["random"])
    return Progress(**values["progress"])


def random_state() -> dict[str, Any]:
    """State of every random generator of the process, as plain data."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "mindspore_seed": ms.get_seed(),
        "mindspore_generator": ms.get_rng_state().asnumpy().tolist(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from :func:`random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if state["mindspore_seed"] is not None:
        ms.set_seed(state["mindspore_seed"])  # seeds numpy too, so numpy comes after it
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    ms.set_rng_state(Tensor(np.array(state["mindspore_generator"], np.uint8)))


def write_moments(checkpoint: Path, optimizer: AdamW, config: LlamaConfig) -> None:
    """Write the whole state of the optimizer into ``checkpoint/trainer``, names as in files of weights."""
    directory = checkpoint / DIRECTORY
    directory.mkdir(exist_ok=True)
    shards: list[list[tuple[FilePiece, Parameter]]] = [[]]
    used = 0
    for name, parameter in _moments(optimizer).items():
        if shards[-1] and used + parameter.nbytes > _SHARD_BYTES:
            shards.append([])
            used = 0
        pieces = file_pieces(name, Piece.all_of(parameter.shape), config)
        shards[-1] += [(piece, parameter) for piece in pieces]
        used += parameter.nbytes
    for number, shard in enumerate(shards, start=1):
        path = directory / f"optimizer-{number:05d}-of-{len(shards):05d}.safetensors"
        shapes = {place.name: place.piece.whole for place, _ in shard}
        write_file(path, "F32", shapes, (place.take(parameter.asnumpy()) for place, parameter in shard))


def open_moments(checkpoint: Path) -> PieceSource:
    """The optimizer's state in a checkpoint that has been verified, whole or in pieces."""
    if is_sharded(checkpoint):
        return open_pieces(checkpoint, verified=True)[1]
    found = {}
    for path in sorted((checkpoint / DIRECTORY).glob("optimizer-*.safetensors")):
        found.update({name: {Piece.all_of(tensor.shape): tensor} for name, tensor in read_header(path).items()})
    return BlockSource(checkpoint / DIRECTORY, found)


def read_moments(checkpoint: Path, optimizer: AdamW, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The whole state of the optimizer by its own names; what the checkpoint has beyond it, by the file's."""
    source = open_moments(checkpoint)
    left, arrays = set(source.shapes()), {}
    for name, parameter in _moments(optimizer).items():
        whole = Piece.all_of(parameter.shape)
        places = {place.name for place in file_pieces(name, whole, config)}
        if places <= source.shapes().keys():
            arrays[name] = read_parameter(source, name, whole, config, checkpoint)
            left -= places
    return arrays | {name: source.read(name) for name in left}


def _moments(optimizer: AdamW) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in optimizer.state().items() if name != "step"}
