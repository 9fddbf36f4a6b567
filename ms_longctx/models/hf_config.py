# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's ``config.json``, read into a :class:`LlamaConfig` and written from one."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError

CONFIG_FILE = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
MISTRAL_DEFAULT_WINDOW = 4096
# Keys that do not change what the model computes.
_INERT_KEYS = frozenset(
    "_name_or_path architectures dtype model_type torch_dtype transformers_version use_cache pretraining_tp "
    "is_llama_config transformers.js_config".split()
)
# Keys that would change it, each with the value that leaves it a plain Llama.
_NEUTRAL_VALUES: dict[str, Any] = {
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rope_interleaved": False,
}
# Fields that choose a layout in memory or an implementation: they are no part of a saved model.
_RUNTIME_FIELDS = ("parallel_attention", "use_flash_attention")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MsLongctxError: the file cannot be read or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MsLongctxError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise MsLongctxError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise MsLongctxError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_config(folder: Path, quantized: bool = False, **overrides: Any) -> LlamaConfig:
    """The architecture in ``folder/config.json``, with fields replaced by ``overrides``.

    Args:
        folder: a model directory.
        quantized: the caller reads quantized weights, which are refused otherwise.
        overrides: fields.

    Raises:
        MsLongctxError: no such file, another architecture, or a value this package cannot honour.
    """
    path = folder / CONFIG_FILE
    values = read_json(path)
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        expected = " or ".join(ARCHITECTURES)
        raise MsLongctxError(f"{path}: model_type {kind!r} is not supported; expected {expected}")
    if quantized:
        values.pop("quantization_config", None)
    for key, neutral in _NEUTRAL_VALUES.items():
        if (value := values.pop(key, neutral)) not in (neutral, None):
            raise MsLongctxError(f"{path}: {key} = {value!r} is not supported; expected {neutral!r}")
    if rope := values.pop("rope_parameters", None):  # transformers 5 keeps theta and scaling together
        values["rope_theta"] = rope.pop("rope_theta", LlamaConfig.rope_theta)
        values["rope_scaling"] = rope
    if kind == "mistral":
        values.setdefault("sliding_window", MISTRAL_DEFAULT_WINDOW)
    fields = {field.name for field in dataclasses.fields(LlamaConfig)}
    if ignored := sorted(values.keys() - fields - _INERT_KEYS):
        logging.getLogger(__name__).warning("%s: keys not used: %s", path, ", ".join(ignored))
    known = {key: value for key, value in values.items() if key in fields}
    try:
        return LlamaConfig.from_dict({**known, **overrides})
    except MsLongctxError as error:
        raise MsLongctxError(f"{path}: {error}") from error


def write_config(config: LlamaConfig, folder: Path, dtype: str) -> None:
    """Write ``config.json`` so that transformers reads the same model; ``dtype`` as torch names it."""
    kind = "llama" if config.sliding_window is None else "mistral"
    values = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "torch_dtype": dtype}
    values.update(config.to_dict())
    for key in _RUNTIME_FIELDS:
        del values[key]
    for key in ("original_max_position_embeddings", "sliding_window"):
        if values[key] is None:
            del values[key]
    if config.position_embedding == "rope":
        del values["position_embedding"]
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
