# SPDX-License-Identifier: Apache-2.0
"""Writes a quantized model as a directory that transformers, vLLM and AutoAWQ read, tensor by tensor."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_longctx.data.tokenizer_files import write_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.export.output import new_directory
from ms_longctx.models.hf import SINGLE_FILE
from ms_longctx.models.hf_config import CONFIG_FILE, write_config
from ms_longctx.quant.layer import MODULES
from ms_longctx.quant.layouts import Arrays, awq_arrays, int_arrays, packed_arrays
from ms_longctx.quant.methods import INT8_BOTH, INT8_WEIGHTS, KEPT, RoundToNearest
from ms_longctx.quant.model import EMBEDDING, HEAD, LAST_NORM, QuantizedModel
from ms_longctx.quant.weights import Int4Weight, Int8Weight

log = logging.getLogger(__name__)
Floats = NDArray[np.float32]
LAYOUTS = ("awq", "compressed-tensors")
ROW_SCALES = "row_scales.npz"  # of an embedding or head in int8; other programs read its values as fp16
FACTORS = ":factors"  # behind the name of a table there: those of its columns
REPORT = "quantization_report.json"
_FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_TYPES = {"int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32"}


def save_quantized(model: QuantizedModel, folder: Path, layout: str, report: dict[str, Any]) -> None:
    """Write the model; the directory appears when it is complete.

    Args:
        model: after its levels are decided.
        folder: it must not exist yet, or be empty.
        layout: one of ``LAYOUTS``; int8 has the second one only.
        report: is written beside the weights.

    Raises:
        MsLongctxError: the directory cannot be written, or a tensor does not fit the layout or fp16.
    """
    with new_directory(folder) as partial:
        _write(model, partial, layout, report)


def _write(model: QuantizedModel, partial: Path, layout: str, report: dict[str, Any]) -> None:
    config = model.source.config
    with TensorWriter(partial / SINGLE_FILE) as writer:
        for name, array in _outer_tensors(model):
            writer.add(name, array)
        for layer in range(model.layers):
            for name, array in _layer_tensors(model, layer, layout):
                writer.add(f"model.layers.{layer}.{name}", array)
    if model.rows:
        np.savez(partial / ROW_SCALES, **_scales(model.rows))
    write_config(config, partial, "float16")
    path = partial / CONFIG_FILE
    values = json.loads(path.read_text(encoding="utf-8"))
    if any(model.levels.get(unit) != KEPT for unit in model.units()):
        values["quantization_config"] = _awq_config(model) if layout == "awq" else _compressed_config(model)
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (partial / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(model.source.path, partial)


def _scales(rows: dict[str, Int8Weight]) -> dict[str, Floats]:
    """What turns the stored fp16 values of each table back to int8."""
    scales = {name: table.scales for name, table in rows.items()}
    return scales | {name + FACTORS: table.factors for name, table in rows.items() if table.factors is not None}


def _outer_tensors(model: QuantizedModel) -> Iterator[tuple[str, NDArray[np.generic]]]:
    names = [EMBEDDING, LAST_NORM] if model.source.config.tie_word_embeddings else [EMBEDDING, LAST_NORM, HEAD]
    for name in names:
        rows = model.rows.get(name)
        yield name, to_half(name, model.source.read(name) if rows is None else rows.values())


def _layer_tensors(model: QuantizedModel, layer: int, layout: str) -> Iterator[tuple[str, NDArray[np.generic]]]:
    weights = model.scaled_layer(layer)
    for module in MODULES:
        level = model.level(layer, module)
        if level == KEPT:
            continue
        del weights[f"{module}.weight"]
        weight = model.weights[layer][module]
        for suffix, array in _arrays(weight, level, layout).items():
            yield f"{module}.{suffix}", array
    for name, array in weights.items():
        yield name, to_half(f"model.layers.{layer}.{name}", array)


def _arrays(weight: Int4Weight | Int8Weight, level: str, layout: str) -> Arrays:
    if isinstance(weight, Int8Weight):
        return int_arrays(weight) if level == INT8_BOTH else packed_arrays(weight)
    return awq_arrays(weight) if layout == "awq" else packed_arrays(weight)


def to_half(name: str, array: NDArray[np.generic]) -> NDArray[np.float16]:
    """The array in fp16.

    Raises:
        MsLongctxError: it does not fit.
    """
    with np.errstate(over="ignore"):
        result = array.astype(np.float16)
    if not np.isfinite(result).all():
        raise MsLongctxError(f"{name} reaches {np.abs(array).max():.3g}, beyond fp16, the type of what stays a float")
    return result


def _modules(model: QuantizedModel, level: str) -> list[str]:
    pairs = [(layer, module) for layer in range(model.layers) for module in MODULES]
    return [f"model.layers.{layer}.{module}" for layer, module in pairs if model.level(layer, module) == level]


def _awq_config(model: QuantizedModel) -> dict[str, Any]:
    assert isinstance(model.method, RoundToNearest)
    if kept := _modules(model, KEPT):
        log.warning(
            "%d matrices stay fp16, such as %s: transformers and vLLM read that, AutoAWQ itself cannot leave out a "
            "matrix of one layer; for it use --accuracy_threshold 0",
            len(kept),
            kept[0],
        )
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": model.method.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [*_modules(model, KEPT), *_fused(model)] or None,
    }


def _fused(model: QuantizedModel) -> list[str]:
    """Kept modules by the names they have in vLLM, which looks up the fused ones only."""
    pairs = [(layer, unit) for layer, unit in model.units() if model.levels.get((layer, unit)) == KEPT]
    return [f"model.layers.{layer}.{_FUSED[unit]}" for layer, unit in pairs if unit in _FUSED]


def _compressed_config(model: QuantizedModel) -> dict[str, Any]:
    groups = []
    for level in model.method.levels:
        modules = _modules(model, level)
        if level != KEPT and modules:
            groups.append(_group_config(model, level, modules))
    formats = {group["format"] for group in groups}
    if len(groups) == 1:
        groups[0]["targets"] = ["Linear"]
    # Packed zero points: compressed-tensors from 0.18 on loads them (its own as well) only where transformers 5 is told
    # to unpack; other programs do not know the key.
    unpack = {"dequantize": True} if isinstance(model.method, RoundToNearest) else {}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *_modules(model, KEPT)],
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        **unpack,
    }


def _group_config(model: QuantizedModel, level: str, modules: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False}
    if level not in (INT8_BOTH, INT8_WEIGHTS):
        assert isinstance(model.method, RoundToNearest)
        weights |= {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": model.method.group}
    inputs = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": modules,
        "weights": weights,
        "input_activations": inputs if level == INT8_BOTH else None,
        "output_activations": None,
        "format": "int-quantized" if level == INT8_BOTH else "pack-quantized",
    }


class TensorWriter:
    """A safetensors file of any types, written tensor by tensor; the header follows from what came.

    Args:
        path: the file; it appears when the ``with`` block ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = path.with_suffix(".data").open("w+b")
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offset = 0

    def add(self, name: str, array: NDArray[np.generic]) -> None:
        """Append a tensor."""
        array = np.ascontiguousarray(array)
        size = math.prod(array.shape) * array.itemsize
        offsets = [self._offset, self._offset + size]
        self._header[name] = {"dtype": _TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        self._offset += size
        self._data.write(array.data if array.size else b"")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                text = json.dumps(self._header, separators=(",", ":")).encode()
                text += b" " * (-len(text) % 8)
                self._data.seek(0)
                with self._path.open("wb") as sink:
                    sink.write(len(text).to_bytes(8, "little") + text)
                    shutil.copyfileobj(self._data, sink, 1 << 22)
        finally:
            self._data.close()
            self._path.with_suffix(".data").unlink()
