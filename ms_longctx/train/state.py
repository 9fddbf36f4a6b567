# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds besides the weights: position, optimizer, random numbers, loss scale."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ms_longctx.models.safetensors_io import read_header, write_file
from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.loss_scale import DynamicLossScale
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


def save_state(
    checkpoint: Path,
    progress: Progress,
    optimizer: AdamW,
    loss_scale: DynamicLossScale,
    facts: dict[str, Any],
) -> None:
    """Write everything but the weights into ``checkpoint/trainer``.

    Args:
        facts: plain data that :func:`read_state` returns, to compare with the resuming run.
    """
    directory = checkpoint / DIRECTORY
    directory.mkdir()
    state = optimizer.state()
    step = int(state.pop("step").asnumpy())
    _write_tensors(directory, state)
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


def restore_state(checkpoint: Path, values: dict[str, Any], optimizer: AdamW, loss_scale: DynamicLossScale) -> Progress:
    """Put the contents of a checkpoint back, and say how far it was.

    Args:
        values: from :func:`read_state`.

    Raises:
        MsLongctxError: the optimizer of this run is another one; the message names the difference.
    """
    arrays = dict(_read_tensors(checkpoint / DIRECTORY))
    arrays["step"] = np.asarray(values["optimizer"]["step"], np.int32)
    optimizer.load_state(arrays, values["optimizer"]["hyperparameters"])
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


def _write_tensors(directory: Path, state: dict[str, Parameter]) -> None:
    shards: list[dict[str, Parameter]] = [{}]
    used = 0
    for name, parameter in state.items():
        if shards[-1] and used + parameter.nbytes > _SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = parameter
        used += parameter.nbytes
    for number, shard in enumerate(shards, start=1):
        path = directory / f"optimizer-{number:05d}-of-{len(shards):05d}.safetensors"
        shapes = {name: tuple(parameter.shape) for name, parameter in shard.items()}
        write_file(path, "F32", shapes, (parameter.asnumpy() for parameter in shard.values()))


def _read_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    for path in sorted(directory.glob("optimizer-*.safetensors")):
        for name, tensor in read_header(path).items():
            yield name, tensor.read()
