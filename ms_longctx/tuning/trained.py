# SPDX-License-Identifier: Apache-2.0
"""The tensors that train: adapters, and of the base ``modules_to_save`` and biases."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_longctx.errors import MsLongctxError
from ms_longctx.nn.linear import Linear
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.lora import Adapted, LoraLinear, LoraQKVLinear, QKVLayout
from ms_longctx.tuning.targets import FUSED, QKV_PARTS


@dataclass(frozen=True, eq=False)
class TrainedTensor:
    """One tensor of an adapter file.

    Args:
        parameter: where the values are.
        rows: which rows of it, for the biases of a fused q, k and v; ``None`` means all.
    """

    parameter: Parameter
    rows: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return tuple(self.parameter.shape) if self.rows is None else (len(self.rows), *self.parameter.shape[1:])

    def read(self) -> np.ndarray:
        """The values as fp32, in memory of their own."""
        values = self.parameter.astype(ms.float32).asnumpy()
        return values.copy() if self.rows is None else values[self.rows]

    def write(self, values: np.ndarray) -> None:
        """Set the values, rounded to the type of the parameter."""
        whole = self.parameter.astype(ms.float32).asnumpy().copy()
        whole[slice(None) if self.rows is None else self.rows] = values
        self.parameter.copy_(Tensor(whole).astype(self.parameter.dtype))


def adapted_cells(model: nn.Cell) -> dict[str, Adapted]:
    """The layers with adapters by their paths."""
    return {path: cell for path, cell in model.cells_and_names() if isinstance(cell, Adapted)}


def lora_config(model: nn.Cell) -> LoraConfig:
    """The configuration of the adapters in a model.

    Raises:
        MsLongctxError: it has none.
    """
    for cell in adapted_cells(model).values():
        return cell.config
    raise MsLongctxError("the model has no adapters; put them in with get_pe_model or load_adapter")


def trained_tensors(model: nn.Cell) -> dict[str, TrainedTensor]:
    """What a model with adapters trains, by peft's names without the prefix of its files.

    Raises:
        MsLongctxError: no adapters, or ``modules_to_save`` or ``bias`` ask for what the model cannot do.
    """
    config = lora_config(model)
    return _matrices(model) | _saved_modules(model, config) | _biases(model, config)


def _matrices(model: nn.Cell) -> dict[str, TrainedTensor]:
    found = {}
    for path, cell in adapted_cells(model).items():
        named = {path: cell.adapter} if isinstance(cell, LoraLinear) else {}
        if isinstance(cell, LoraQKVLinear):
            parent = path.rpartition(".")[0]
            named = {f"{parent}.{part}": adapter for part, adapter in cell.adapters().items()}
        for name, adapter in named.items():
            found[f"{name}.lora_A.weight"] = TrainedTensor(adapter.lora_A.weight)
            found[f"{name}.lora_B.weight"] = TrainedTensor(adapter.lora_B.weight)
    return found


def _saved_modules(model: nn.Cell, config: LoraConfig) -> dict[str, TrainedTensor]:
    chosen: dict[str, Parameter] = {}
    owners: dict[int, list[str]] = {}
    for name in config.modules_to_save or []:
        paths = [path for path, _ in model.cells_and_names() if path.endswith(name)]
        if not paths:
            parts = ", ".join(dict.fromkeys(path.rsplit(".", 1)[-1] for path, _ in model.cells_and_names() if path))
            raise MsLongctxError(f"lora.modules_to_save: no module is called {name!r}; modules: {parts}")
    for path, cell in model.cells_and_names():
        for local, param in cell.parameters_and_names(expand=False):
            owners.setdefault(id(param), []).append(f"{path}.{local}")
        if any(path.endswith(name) for name in config.modules_to_save or []):
            chosen.update({f"{path}.{local}": param for local, param in cell.parameters_and_names()})
    for key, param in chosen.items():
        if FUSED in key.split("."):
            raise MsLongctxError(
                f"lora.modules_to_save includes {key}, which other tools store as q, k and v; "
                "load the model with parallel_attention: false"
            )
        if missing := [owner for owner in owners[id(param)] if owner not in chosen]:
            raise MsLongctxError(
                f"lora.modules_to_save includes {key}, which is tied to {missing[0]}; name both modules, "
                "so that every reader of the adapter gets both"
            )
    return {key: TrainedTensor(param) for key, param in chosen.items()}


def _biases(model: nn.Cell, config: LoraConfig) -> dict[str, TrainedTensor]:
    if config.bias == "none":
        return {}
    found: dict[str, TrainedTensor] = {}
    for path, cell in model.cells_and_names():
        parent, _, attribute = path.rpartition(".")
        if not isinstance(cell, (Linear, Adapted)) or attribute == "base_layer" or cell.bias is None:
            continue
        if config.bias == "lora_only" and not isinstance(cell, Adapted):
            continue
        if attribute == FUSED:
            layout = QKVLayout.of(dict(model.cells_and_names())[parent])
            found |= _fused_biases(parent, cell, layout, config)
        else:
            inner = ".base_layer" if isinstance(cell, Adapted) else ""
            found[f"{path}{inner}.bias"] = TrainedTensor(cell.bias)
    return found


def _fused_biases(parent: str, cell: nn.Cell, layout: QKVLayout, config: LoraConfig) -> dict[str, TrainedTensor]:
    adapted = cell.adapters() if isinstance(cell, LoraQKVLinear) else {}
    if config.bias == "lora_only" and len(adapted) < len(QKV_PARTS):
        raise MsLongctxError(
            "lora.bias = lora_only with parallel_attention needs q_proj, k_proj and v_proj in "
            "lora.target_modules, because their biases are one parameter; or set parallel_attention: false"
        )
    return {
        f"{parent}.{part}{'.base_layer' if part in adapted else ''}.bias": TrainedTensor(cell.bias, layout.rows(part))
        for part in QKV_PARTS
    }
