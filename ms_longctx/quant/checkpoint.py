# SPDX-License-Identifier: Apache-2.0
"""Reads quantized model directories: ours, AutoAWQ's (GEMM) and compressed-tensors' (int, packed)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.hf import INDEX_FILE, SINGLE_FILE
from ms_longctx.models.hf_config import CONFIG_FILE, read_config, read_json
from ms_longctx.parallel.slices import Piece
from ms_longctx.quant.files import ROW_SCALES
from ms_longctx.quant.layouts import read_awq, read_int, read_packed
from ms_longctx.quant.weights import Int8Weight, Weight, round_int8

_FORMATS = ("int-quantized", "pack-quantized", "mixed-precision")
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
        self._scheme = _Scheme(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE)["quantization_config"])
        self.config = read_config(folder, quantized=True, **overrides)
        self._files = _tensor_files(folder)
        rows = folder / ROW_SCALES
        self._row_scales = dict(np.load(rows)) if rows.is_file() else {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model, dequantized, by its name."""
        result = {}
        for name in self._files:
            module, _, suffix = name.rpartition(".")
            if suffix not in _STORED:
                result[name] = self._shape(name)
            elif suffix in ("qweight", "weight_packed"):
                result[f"{module}.weight"] = self._module_shape(module, suffix)
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
        """A quantized matrix by the name its fp32 form has (``....weight``), ``None`` for what is a float."""
        module = name.removesuffix(".weight")
        if name in self._row_scales:
            return self._int8_rows(name)
        if module == name:
            return None

        def read(suffix: str) -> NDArray[np.generic]:
            return self._tensor(f"{module}.{suffix}")

        if f"{module}.qweight" in self._files:
            return read_awq(read)
        if f"{module}.weight_packed" in self._files:
            bits = self._scheme.bits(module)
            return read_packed(read, f"{module}.weight_zero_point" in self._files, bits)
        return read_int(read) if f"{module}.weight_scale" in self._files else None

    def int8_inputs(self, name: str) -> bool:
        """Whether the inputs of this matrix are to be rounded to int8."""
        return self._scheme.int8_inputs(name.removesuffix(".weight"))

    def _int8_rows(self, name: str) -> Int8Weight:
        scales = self._row_scales[name]
        weight = round_int8(self._tensor(name).astype(np.float32), scales)
        return weight

    def _module_shape(self, module: str, suffix: str) -> tuple[int, ...]:
        if suffix == "qweight":
            columns, packed = self._shape(f"{module}.{suffix}")
            return packed * 8, columns
        return tuple(int(n) for n in self._tensor(f"{module}.weight_shape"))

    def _shape(self, name: str) -> tuple[int, ...]:
        with _open(self._files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def _tensor(self, name: str) -> NDArray[np.generic]:
        if name not in self._files:
            raise MsLongctxError(f"{self.path}: no tensor {name}; the model is not complete")
        with _open(self._files[name]) as file:
            array: NDArray[np.generic] = file.get_tensor(name)
        return array


class _Scheme:
    """What ``quantization_config`` says, as far as the tensors do not say it themselves."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._groups: list[dict[str, Any]] = []
        method = values.get("quant_method")
        if method == "awq":
            found = (values.get("bits"), values.get("version", "gemm"), values.get("zero_point", True))
            if found != (4, "gemm", True):
                raise MsLongctxError(f"{path}: AWQ of {found} (bits, version, zero_point); expected (4, 'gemm', True)")
        elif method == "compressed-tensors":
            self._groups = list(values.get("config_groups", {}).values())
            if values.get("format") not in _FORMATS:
                expected = ", ".join(_FORMATS)
                raise MsLongctxError(f"{path}: format {values.get('format')!r} is not supported; expected {expected}")
            for group in self._groups:
                self._check(path, group)
        else:
            raise MsLongctxError(
                f"{path}: quantization_config = {values} is not supported; expected the quant_method 'awq' or "
                "'compressed-tensors'"
            )

    def bits(self, module: str) -> int:
        """Of the weights of a module."""
        return int(self._group(module)["weights"]["num_bits"])

    def int8_inputs(self, module: str) -> bool:
        """Whether its inputs are rounded."""
        return bool(self._groups) and bool(self._group(module).get("input_activations"))

    def _group(self, module: str) -> dict[str, Any]:
        for group in self._groups:
            for target in group["targets"]:
                is_pattern = target.startswith("re:") and re.match(target[3:], module)
                if target in ("Linear", module) or is_pattern:
                    return group
        raise MsLongctxError(f"quantization_config has no config_group for {module}")

    def _check(self, path: Path, group: dict[str, Any]) -> None:
        weights, inputs = group["weights"], group.get("input_activations") or {}
        dynamic = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
        for key, value in dynamic.items() if inputs else ():
            if inputs.get(key) != value:
                raise MsLongctxError(f"{path}: input_activations.{key} = {inputs.get(key)!r}; expected {value!r}")
        if weights["num_bits"] not in (4, 8) or weights.get("type", "int") != "int" or weights.get("actorder"):
            raise MsLongctxError(f"{path}: weights {weights} are not supported; expected int of 4 or 8 bits")
        if weights["num_bits"] == 8 and (not weights["symmetric"] or weights["strategy"] != "channel"):
            raise MsLongctxError(f"{path}: int8 weights have to be symmetric with a scale a channel")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "numpy")
    except (OSError, SafetensorError) as error:
        raise MsLongctxError(f"{path}: not a complete safetensors file ({error}); copy or download it again") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    if (folder / SINGLE_FILE).is_file():
        with _open(folder / SINGLE_FILE) as file:
            return {name: folder / SINGLE_FILE for name in file.keys()}  # noqa: SIM118 (no mapping)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise MsLongctxError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}")
    return {name: folder / shard for name, shard in read_json(index).get("weight_map", {}).items()}
