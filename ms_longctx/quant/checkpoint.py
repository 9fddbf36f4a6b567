# SPDX-License-Identifier: Apache-2.0
"""Reads quantized model directories: ours, AutoAWQ's (GEMM) and compressed-tensors' (int, packed)."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.hf import find_tensors
from ms_longctx.models.hf_config import CONFIG_FILE, read_config, read_json
from ms_longctx.models.safetensors_io import FLOATS, INTEGERS
from ms_longctx.parallel.slices import Piece
from ms_longctx.quant.files import FACTORS, ROW_SCALES
from ms_longctx.quant.layouts import read_awq, read_int, read_packed
from ms_longctx.quant.scheme import Scheme
from ms_longctx.quant.weights import Weight, round_int8

_STORED = {"qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}


def is_quantized(folder: Path) -> bool:
    """Whether ``folder/config.json`` says that the weights are quantized."""
    return (folder / CONFIG_FILE).is_file() and bool(read_json(folder / CONFIG_FILE).get("quantization_config"))


class QuantizedCheckpoint:
    """A quantized directory as a :class:`ms_longctx.models.checkpoint.TensorSource` (which dequantizes), and packed.

    Args:
        folder: holds ``config.json`` with ``quantization_config`` and safetensors.
        overrides: configuration fields to replace.

    Raises:
        MsLongctxError: a kind of quantization that is not supported, or files that are missing or broken.
    """

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.path = folder
        self._scheme = Scheme(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE)["quantization_config"])
        self.config = read_config(folder, quantized=True, **overrides)
        self._tensors = find_tensors(folder, (*FLOATS, *INTEGERS))
        self._row_scales = _read_row_scales(folder / ROW_SCALES)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model, dequantized, by its name."""
        result = {}
        for name, stored in self._tensors.items():
            module, _, suffix = name.rpartition(".")
            if suffix not in _STORED:
                result[name] = stored.shape
            elif suffix == "qweight":
                columns, packed = stored.shape
                result[f"{module}.weight"] = packed * 8, columns
            elif suffix == "weight_packed":
                result[f"{module}.weight"] = tuple(int(n) for n in self._tensor(f"{module}.weight_shape"))
        return result

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """A tensor, or a block of it; quantized ones in fp32."""
        weight = self.weight(name)
        array = self._tensor(name) if weight is None else weight.values()
        return array if piece is None else np.array(array[piece.place_in(Piece.all_of(array.shape))])

    def types(self) -> set[str]:
        """Safetensors name of the type that dequantized tensors are given in."""
        return {"F32"}

    def weight(self, name: str) -> Weight | None:
        """A quantized matrix by the name its fp32 form has (``....weight``), ``None`` for what is a float.

        Raises:
            MsLongctxError: parts of it are missing or do not fit together.
        """
        if name in self._row_scales:
            factors = self._row_scales.get(name + FACTORS)
            return round_int8(self._tensor(name).astype(np.float32), self._row_scales[name], factors)
        module = name.removesuffix(".weight")
        if module == name:
            return None

        def read(suffix: str) -> NDArray[np.generic]:
            return self._tensor(f"{module}.{suffix}")

        def has(suffix: str) -> bool:
            return f"{module}.{suffix}" in self._tensors

        try:
            if has("qweight"):
                return read_awq(read)
            if has("weight_packed"):
                return read_packed(read, has("weight_zero_point"), self._scheme.bits(module))
            return read_int(read) if has("weight") and self._tensors[name].dtype == "I8" else None
        except ValueError as error:
            raise MsLongctxError(f"{self.path}: the tensors of {module} do not fit together ({error})") from error

    def half(self, name: str) -> NDArray[np.float16] | None:
        """A matrix that is stored in fp16 as it is, else ``None``."""
        stored = self._tensors.get(name)
        return stored.read() if stored is not None and stored.dtype == "F16" else None

    def int8_inputs(self, name: str) -> bool:
        """Whether the inputs of this matrix are to be rounded to int8."""
        return name not in self._row_scales and self._scheme.int8_inputs(name.removesuffix(".weight"))

    def _tensor(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise MsLongctxError(f"{self.path}: no tensor {name}; the model is not complete")
        return self._tensors[name].read()


def _read_row_scales(path: Path) -> dict[str, NDArray[np.float32]]:
    if not path.is_file():  # the directory is another program's, or embedding and head are not quantized
        return {}
    try:
        return dict(np.load(path))
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise MsLongctxError(f"{path}: not complete ({error}); copy it or quantize again") from error
