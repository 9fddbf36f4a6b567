# SPDX-License-Identifier: Apache-2.0
"""Weights of the base that train along with the adapters: ``modules_to_save`` and biases."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_longctx.errors import MsLongctxError
from ms_longctx.nn.linear import Linear
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.lora import Adapted, LoraQKVLinear, QKVLayout
from ms_longctx.tuning.targets import FUSED, QKV_PARTS


@dataclass(frozen=True, eq=False)
class Extra:
    """One tensor of an adapter file that is not a LoRA matrix.

    Args:
        key: its name in the file, without the prefix that all names have there.
        parameter: where the values are.
        rows: which rows of it, for the biases of a fused q, k and v; ``None`` means all.
    """

    key: str
    parameter: Parameter
    rows: np.ndarray | None = None

    def read(self) -> np.ndarray:
        """The values as fp32, in memory of their own."""
        values = self.parameter.astype(ms.float32).asnumpy()
        return values.copy() if self.rows is None else values[self.rows]

    def write(self, values: np.ndarray) -> None:
        """Set the values, rounded to the type of the parameter."""
        whole = self.parameter.astype(ms.float32).asnumpy().copy()
        whole[slice(None) if self.rows is None else self.rows] = values
        self.parameter.set_data(Tensor(whole).astype(self.parameter.dtype))


def extras(model: nn.Cell, config: LoraConfig) -> list[Extra]:
    """What ``config`` trains beside the adapters of a model that has them.

    Raises:
        MsLongctxError: ``modules_to_save`` or ``bias`` ask for something the model cannot do.
    """
    return [Extra(key, param) for key, param in _saved_modules(model, config).items()] + _biases(
        model, config
    )


def _saved_modules(model: nn.Cell, config: LoraConfig) -> dict[str, Parameter]:
    chosen: dict[str, Parameter] = {}
    owners: dict[int, list[str]] = {}
    for name in config.modules_to_save or []:
        paths = [path for path, _ in model.cells_and_names() if path.endswith(name)]
        if not paths:
            parts = ", ".join(
                dict.fromkeys(path.rsplit(".", 1)[-1] for path, _ in model.cells_and_names() if path)
            )
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
    return chosen


def _biases(model: nn.Cell, config: LoraConfig) -> list[Extra]:
    if config.bias == "none":
        return []
    found = []
    for path, cell in model.cells_and_names():
        parent, _, attribute = path.rpartition(".")
        if not isinstance(cell, (Linear, Adapted)) or attribute == "base_layer" or cell.bias is None:
            continue
        if config.bias == "lora_only" and not isinstance(cell, Adapted):
            continue
        if attribute == FUSED:
            layout = QKVLayout.of(dict(model.cells_and_names())[parent])
            found += _fused_biases(parent, cell, layout, config)
        else:
            inner = ".base_layer" if isinstance(cell, Adapted) else ""
            found.append(Extra(f"{path}{inner}.bias", cell.bias))
    return found


def _fused_biases(parent: str, cell: nn.Cell, layout: QKVLayout, config: LoraConfig) -> list[Extra]:
    adapted = cell.adapters() if isinstance(cell, LoraQKVLinear) else {}
    if config.bias == "lora_only" and len(adapted) < len(QKV_PARTS):
        raise MsLongctxError(
            "lora.bias = lora_only with parallel_attention needs q_proj, k_proj and v_proj in "
            "lora.target_modules, because their biases are one parameter; or set parallel_attention: false"
        )
    return [
        Extra(f"{parent}.{part}{'.base_layer' if part in adapted else ''}.bias", cell.bias, layout.rows(part))
        for part in QKV_PARTS
    ]
