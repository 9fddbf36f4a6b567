# SPDX-License-Identifier: Apache-2.0
"""Which parameters an optimizer trains, and with which weight decay and learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspore import Parameter


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """Parameters that share their hyperparameters.

    Args:
        name: how checkpoints and messages call the group.
        params: its parameters.
        weight_decay: decoupled weight decay.
        lr_scale: the group's learning rate as a multiple of the schedule's.
    """

    name: str
    params: tuple[Parameter, ...]
    weight_decay: float
    lr_scale: float = 1.0


def decay_groups(params: Sequence[Parameter], weight_decay: float) -> list[ParamGroup]:
    """Two groups: matrices decay; norm weights and biases, which have one axis, do not.

    An empty group is left out.
    """
    matrices = tuple(param for param in params if param.ndim > 1)
    vectors = tuple(param for param in params if param.ndim <= 1)
    groups = [ParamGroup("decay", matrices, weight_decay), ParamGroup("no_decay", vectors, 0.0)]
    return [group for group in groups if group.params]
