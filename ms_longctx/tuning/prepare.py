# SPDX-License-Identifier: Apache-2.0
"""Puts adapters into a model, counts what trains, merges the adapters and takes them out again."""

from __future__ import annotations

import numpy as np
from mindspore import nn

from ms_longctx.errors import MsLongctxError
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.dropout import KEY_NAME, KeyedDropout, dropout_key
from ms_longctx.tuning.lora import Adapted, LoraLinear, LoraQKVLinear, LowRank, QKVLayout
from ms_longctx.tuning.targets import FUSED, Place, select
from ms_longctx.tuning.trained import adapted_cells, lora_config, trained_tensors


def get_pe_model(model: nn.Cell, config: LoraConfig, seed: int = 0) -> nn.Cell:
    """Put adapters into ``model`` and freeze everything else; the model is changed in place and returned.

    Build training steps and generators afterwards: a function compiled with ``mindspore.jit`` keeps its graph
    even where the cells in it have changed.

    Args:
        model: a model of :class:`ms_longctx.nn.linear.Linear` layers, without adapters.
        config: which adapters.
        seed: of their first values.

    Raises:
        MsLongctxError: ``config`` names what the model does not have, or the model has adapters already.
    """
    if adapted_cells(model):
        raise MsLongctxError("the model has adapters already; take them out with merge_and_unload first")
    places = select(model, config)
    base = [param for _, param in model.parameters_and_names()]
    _insert(places, config, np.random.default_rng(seed))
    try:
        trained = trained_tensors(model)
    except MsLongctxError:
        take_out(model)
        raise
    for param in base:
        param.requires_grad = False
    for tensor in trained.values():
        tensor.parameter.requires_grad = True
    _forget_graphs(model)
    return model


def prepare_model(model: nn.Cell, config: LoraConfig, seed: int = 0) -> nn.Cell:
    """The same as :func:`get_pe_model`."""
    return get_pe_model(model, config, seed)


def count_parameters(model: nn.Cell) -> tuple[int, int]:
    """Numbers of trained and of all elements in the parameters of a model, each parameter counted once."""
    sizes = [(param.size, param.requires_grad) for _, param in model.parameters_and_names() if param.name != KEY_NAME]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def print_trainable_parameters(model: nn.Cell) -> None:
    """Print both counts in peft's words."""
    trained, total = count_parameters(model)
    print(f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {100 * trained / total:.4f}")


def merge(model: nn.Cell) -> nn.Cell:
    """Add every adapter to its weight (in fp32, then rounded), e.g. to evaluate; :func:`unmerge` undoes it.

    A copy of each changed weight is kept. Do not train between the two.

    Raises:
        MsLongctxError: no adapters, or a merged weight would not be finite; nothing is changed then.
    """
    lora_config(model)
    try:
        for cell in adapted_cells(model).values():
            cell.merge()
    except MsLongctxError:
        unmerge(model)
        raise
    return model


def unmerge(model: nn.Cell) -> nn.Cell:
    """Bring back all weights and adapters as they were before :func:`merge`, bit for bit."""
    for cell in adapted_cells(model).values():
        cell.unmerge()
    return model


def merge_and_unload(model: nn.Cell) -> nn.Cell:
    """Merge the adapters for good and take them out: the result is a model without adapters, all frozen.

    Raises:
        MsLongctxError: as :func:`merge`.
    """
    merge(model)
    take_out(model)
    for _, param in model.parameters_and_names():
        param.requires_grad = False
    return model


def _insert(places: list[Place], config: LoraConfig, rng: np.random.Generator) -> None:
    """Wrap the layers; parts of one fused layer are wrapped together. Base parameters keep their names."""
    key = dropout_key() if config.lora_dropout else None
    fused: dict[int, dict[str, LowRank]] = {}
    for index, place in enumerate(places):
        base = place.parent.name_cells()[place.attribute]
        out_features, layout = base.out_features, None
        if place.part:
            layout = QKVLayout.of(place.parent)
            out_features = len(layout.rows(place.part))
        dropout = None if key is None else KeyedDropout(config.lora_dropout, key, index + 1)
        adapter = LowRank(base.in_features, out_features, config, rng, dropout)
        adapter.lora_A.weight.name = f"{place.name}.lora_A.weight"
        adapter.lora_B.weight.name = f"{place.name}.lora_B.weight"
        if place.part:
            fused.setdefault(id(place.parent), {})[place.part] = adapter
        else:
            _replace(place.parent, place.attribute, LoraLinear(base, config, adapter))
    for parent in {id(place.parent): place.parent for place in places if place.part}.values():
        base, layout = parent.name_cells()[FUSED], QKVLayout.of(parent)
        _replace(parent, FUSED, LoraQKVLinear(base, config, layout, fused[id(parent)]))


def _replace(parent: nn.Cell, attribute: str, cell: Adapted) -> None:
    cell.set_train(parent.training)
    parent.insert_child_to_cell(attribute, cell)


def take_out(model: nn.Cell) -> None:
    """Remove the adapters as if they had never been there; what is merged stays merged."""
    cells = dict(model.cells_and_names())
    for path, cell in adapted_cells(model).items():
        parent, _, attribute = path.rpartition(".")
        cells[parent].insert_child_to_cell(attribute, cell.base_layer)
    _forget_graphs(model)


def _forget_graphs(model: nn.Cell) -> None:
    """Make graph mode compile the changed cells again; it looks at the types of the inputs only."""
    for _, cell in model.cells_and_names():
        cell.compile_cache.clear()
