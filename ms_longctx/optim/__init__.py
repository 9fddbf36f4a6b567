# SPDX-License-Identifier: Apache-2.0
"""Optimizer, learning rate schedules and loss scale."""

from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.groups import ParamGroup, decay_groups
from ms_longctx.optim.loss_scale import DynamicLossScale
from ms_longctx.optim.schedule import Schedule

__all__ = ["AdamW", "DynamicLossScale", "ParamGroup", "Schedule", "decay_groups"]
