# SPDX-License-Identifier: Apache-2.0
"""The weights of an exported MindIR, to quantize what was kept of a model."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.manifest import is_export, read_manifest
from ms_longctx.models.auto import open_checkpoint
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.parallel.slices import Piece


class MindIRCheckpoint:
    """Parameters of an exported graph as a :class:`ms_longctx.models.checkpoint.TensorSource`.

    MindSpore loads a MindIR as a whole: the model is in memory once, beside what works on it.

    Args:
        folder: a directory that ``ms-longctx export --format mindir`` wrote.

    Raises:
        MsLongctxError: another format, or an encrypted one.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest.format != "mindir" or manifest.encryption:
            kind = f"encrypted {manifest.format}" if manifest.encryption else manifest.format
            raise MsLongctxError(f"{folder}: weights are read from plain MindIR, this is {kind}; quantize the original")
        self.path, self.config = folder, manifest.config
        graph = nn.GraphCell(ms.load(str(folder / manifest.graphs[0].file)))
        self._parameters = {parameter.name: parameter for parameter in graph.get_parameters()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its name."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """A tensor, or a block of it: fp32 (also for bf16) or fp16."""
        parameter = self._parameters[name]
        array = (parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter).asnumpy()
        return array if piece is None else np.array(array[piece.place_in(Piece.all_of(array.shape))])

    def types(self) -> set[str]:
        """Safetensors names of the types of the tensors."""
        names = {ms.float32: "F32", ms.float16: "F16", ms.bfloat16: "BF16"}
        return {names[parameter.dtype] for parameter in self._parameters.values()}


def open_weights(path: Path) -> TensorSource:
    """A model directory, a ``.gguf`` file, or an export: its directory or the ``.mindir`` file in it.

    Raises:
        MsLongctxError: nothing usable there.
    """
    folder = path.parent if path.suffix == ".mindir" else path
    return MindIRCheckpoint(folder) if is_export(folder) else open_checkpoint(path)
