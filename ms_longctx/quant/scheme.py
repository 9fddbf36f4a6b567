# SPDX-License-Identifier: Apache-2.0
"""What ``quantization_config`` of a ``config.json`` says about each matrix: AutoAWQ's and compressed-tensors' form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError

_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_ABSENT = ("kv_cache_scheme", "sparsity_config", "transform_config")  # would change what the model computes
_ADVICE = "; read are int4 and int8 weights of AutoAWQ (GEMM) and of compressed-tensors, inputs int8 a token or none"
_CLASSES = ("Linear", "LlamaForCausalLM")  # what a target may call the matrices, besides their names
Group = dict[str, Any]


class Scheme:
    """How the matrices of a directory are stored, as far as the tensors do not say it themselves.

    Args:
        path: of the ``config.json``, for messages.
        values: its ``quantization_config``.

    Raises:
        MsLongctxError: a kind of quantization that cannot be read.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._groups: list[Group] = []
        method = values.get("quant_method")
        if method == "awq":
            self._check_awq(values)
        elif method == "compressed-tensors":
            self._groups = self._read_groups(values)
        else:
            raise self._refusal(f"quant_method = {method!r}")

    def bits(self, module: str) -> int:
        """Of the weights of a module in compressed-tensors' layouts."""
        return int(self._group(module)["weights"]["num_bits"])

    def int8_inputs(self, module: str) -> bool:
        """Whether its inputs are rounded to int8."""
        return bool(self._groups) and self._group(module).get("input_activations") is not None

    def _group(self, module: str) -> Group:
        """Names come before patterns, and both before classes, as compressed-tensors matches."""
        tests = (
            lambda target: target == module,
            lambda target: target.startswith("re:") and re.match(target[3:], module),
            lambda target: target in _CLASSES,
        )
        for test in tests:
            for group in self._groups:
                if any(test(target) for target in group["targets"]):
                    return group
        raise MsLongctxError(f"{self._path}: no config_group of quantization_config has {module} as a target")

    def _check_awq(self, values: dict[str, Any]) -> None:
        version = str(values.get("version", "gemm")).lower()
        found = (values.get("bits"), version, values.get("zero_point", True))
        if found != (4, "gemm", True):
            raise self._refusal(f"AWQ with (bits, version, zero_point) = {found}")

    def _read_groups(self, values: dict[str, Any]) -> list[Group]:
        if values.get("format") not in _FORMATS:
            raise self._refusal(f"format = {values.get('format')!r}")
        for key in _ABSENT:
            section = values.get(key)
            if section and section.get("format") != "dense":
                raise self._refusal(f"{key} = {section}")
        groups = list((values.get("config_groups") or {}).values())
        for group in groups:
            try:
                self._check_group(group, group.get("format") or values["format"])
            except (KeyError, TypeError, AttributeError) as error:
                raise MsLongctxError(f"{self._path}: config_group {group} lacks or misuses {error}") from error
        if not groups:
            raise MsLongctxError(f"{self._path}: quantization_config has no config_groups")
        return groups

    def _check_group(self, group: Group, form: str) -> None:
        weights, inputs = group["weights"], group.get("input_activations")
        bits, strategy = weights["num_bits"], weights["strategy"]
        if weights.get("type", "int") != "int" or bits not in (4, 8) or weights.get("dynamic"):
            raise self._refusal(f"weights of type {weights.get('type')} with {bits} bits")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise self._refusal(f"columns ordered by activations (actorder = {weights['actorder']!r})")
        if bits == 8 and (not weights["symmetric"] or strategy not in ("channel", "tensor")):
            kind = "" if weights["symmetric"] else "asymmetric "
            raise self._refusal(f"{kind}int8 weights with the strategy {strategy!r}")
        if bits == 4 and (form != "pack-quantized" or strategy not in ("group", "channel")):
            raise self._refusal(f"int4 weights with the strategy {strategy!r} in the format {form!r}")
        if inputs is not None:
            self._check_inputs(inputs, bits)
        if group.get("output_activations") is not None:
            raise self._refusal("output_activations")
        if not all(isinstance(target, str) for target in group["targets"]):
            raise TypeError("targets")

    def _check_inputs(self, inputs: dict[str, Any], bits: int) -> None:
        wanted = {"type": "int", "num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
        for key, value in wanted.items():
            if inputs.get(key, value if key == "type" else None) != value:
                raise self._refusal(f"input_activations with {key} = {inputs.get(key)!r} (expected {value!r})")
        if bits != 8:
            raise self._refusal(f"int8 input_activations beside weights of {bits} bits")

    def _refusal(self, what: str) -> MsLongctxError:
        return MsLongctxError(f"{self._path}: quantization_config: {what} is not supported{_ADVICE}")
