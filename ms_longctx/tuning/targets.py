# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model a configuration means; the rules are peft's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspore import nn

from ms_longctx.errors import MsLongctxError
from ms_longctx.nn.linear import Linear
from ms_longctx.tuning.config import ALL_LINEAR, LoraConfig

QKV_PARTS = ("q_proj", "k_proj", "v_proj")
FUSED = "qkv_proj"
# The loss multiplies with the weight of the output head itself, so an adapter on it would not train.
OUTPUT_HEAD = "lm_head"


@dataclass(frozen=True)
class Place:
    """A linear layer, named as in a model with separate q, k and v.

    Args:
        name: path in the model.
        parent, attribute: the Cell that holds it and under which name (``qkv_proj`` for its parts).
        part: ``q_proj``, ``k_proj`` or ``v_proj`` of a fused layer, else ``None``.
    """

    name: str
    parent: nn.Cell
    attribute: str
    part: str | None = None


def linear_places(model: nn.Cell) -> dict[str, Place]:
    """All linear layers by name, the output head included, in the order of the model."""
    places = {}
    for path, cell in model.cells_and_names():
        prefix = f"{path}." if path else ""
        for attribute, child in cell.name_cells().items():
            if not isinstance(child, Linear):
                continue
            for part in QKV_PARTS if attribute == FUSED else (None,):
                name = prefix + (part or attribute)
                places[name] = Place(name, cell, attribute, part)
    return places


def select(model: nn.Cell, config: LoraConfig) -> list[Place]:
    """The linear layers that ``config`` gives an adapter.

    Raises:
        MsLongctxError: nothing fits, a name in ``target_modules`` fits nothing, or the output head was named.
    """
    places = linear_places(model)
    saved = config.modules_to_save or []
    # As in peft a module that is trained in full gets no adapter, nor does anything inside it.
    free = [name for name in places if not any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)]
    chosen = [name for name in free if _matches(name, config)]
    if OUTPUT_HEAD in chosen:
        raise MsLongctxError(
            f"lora.target_modules names the output head {OUTPUT_HEAD}, which takes no adapter; train it in "
            f"full with lora.modules_to_save: [{OUTPUT_HEAD}], or leave it out"
        )
    _check_every_name_fits(config, free, chosen, places)
    return [places[name] for name in chosen]


def _matches(name: str, config: LoraConfig) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        if targets == ALL_LINEAR:
            return name != OUTPUT_HEAD
        return re.fullmatch(targets, name) is not None
    if name in targets:  # a whole path is not subject to layers_to_transform
        return True
    if not any(name.endswith(f".{target}") for target in targets):
        return False
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    index = re.match(r".*\.[^.]*\.(\d+)\.", name)
    return index is not None and int(index[1]) in ([layers] if isinstance(layers, int) else layers)


def _check_every_name_fits(config: LoraConfig, free: list[str], chosen: list[str], places: dict[str, Place]) -> None:
    targets = config.target_modules
    layers = [name for name in places if name != OUTPUT_HEAD]
    kinds = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in layers))
    there = f"linear layers of this model: {kinds}"
    if not isinstance(targets, str):
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in free):
                raise MsLongctxError(f"lora.target_modules: no linear layer is called {target!r}; {there}")
    if chosen:
        return
    if config.layers_to_transform is not None:
        raise MsLongctxError(
            f"lora.layers_to_transform = {config.layers_to_transform} leaves nothing to adapt; "
            f"the last linear layer of the model is {layers[-1] if layers else 'missing'}"
        )
    raise MsLongctxError(
        f"lora.target_modules = {targets!r} matches no linear layer; {there}, with paths such as "
        f"{layers[0] if layers else '(none)'}"
    )
