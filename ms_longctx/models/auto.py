# SPDX-License-Identifier: Apache-2.0
"""Finds out what kind of model files a path holds."""

from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.models.gguf import GgufCheckpoint
from ms_longctx.models.hf import HfCheckpoint
from ms_longctx.models.sharded import ShardedCheckpoint, is_sharded


def open_checkpoint(path: Path, **overrides: Any) -> TensorSource:
    """The tensors and the configuration of a Hugging Face directory (quantized or not), one of pieces, or a GGUF file.

    Args:
        path: the directory, or a file whose name ends in ``.gguf``.
        overrides: configuration fields to replace.

    Raises:
        MsLongctxError: there is no such model, or it is not supported.
    """
    if path.is_dir() and is_sharded(path):
        return ShardedCheckpoint(path, **overrides)
    if path.is_dir():
        from ms_longctx.quant.checkpoint import QuantizedCheckpoint, is_quantized

        return QuantizedCheckpoint(path, **overrides) if is_quantized(path) else HfCheckpoint(path, **overrides)
    if path.suffix == ".gguf" and path.is_file():
        return GgufCheckpoint(path, **overrides)
    raise MsLongctxError(f"{path}: no model here; expected a Hugging Face directory or a .gguf file")
