# SPDX-License-Identifier: Apache-2.0
"""Which implementation the cells of this package use."""

from __future__ import annotations

import functools
import logging

import mindspore as ms

from ms_longctx import kernels

IMPLEMENTATIONS = ("ascend", "cpu_kernel", "operators")


def implementation(wanted: str = "auto") -> str:
    """``"ascend"`` (fused there), ``"cpu_kernel"`` (our C++ operators) or ``"operators"`` (plain ones).

    Args:
        wanted: one of these, or ``"auto"``: what suits the device target that is set now.

    Raises:
        ValueError: no such implementation.
    """
    if wanted in IMPLEMENTATIONS:
        return wanted
    if wanted != "auto":
        raise ValueError(f"implementation {wanted!r} is none of auto, {', '.join(IMPLEMENTATIONS)}")
    target = ms.get_context("device_target")
    if target == "Ascend":
        return "ascend"
    if target == "CPU" and _kernels_available():
        return "cpu_kernel"
    return "operators"


@functools.lru_cache(maxsize=1)
def _kernels_available() -> bool:
    """As :func:`kernels.available`, but says once what is missing."""
    if kernels.available():
        return True
    logging.getLogger(__name__).warning("slower without the C++ kernels: %s", kernels.reason())
    return False
