# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ascend devices for MindSpore's compiler, on a machine without any.

What it shows: the program that each rank would run, its communication operators, the shapes of its parameters, and
MindSpore's rejections of wrong strategies. What it does not: numbers, speed, whether a device has each kernel, how
HCCL behaves.
"""

from ms_longctx.parallel.virtual_cluster.cluster import Simulator, has_cann, prepare, remove
from ms_longctx.parallel.virtual_cluster.log import failure_line
from ms_longctx.parallel.virtual_cluster.tools import VirtualClusterError, missing_reason

__all__ = ["Simulator", "VirtualClusterError", "failure_line", "has_cann", "missing_reason", "prepare", "remove"]
