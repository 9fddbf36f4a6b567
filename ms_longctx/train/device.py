# SPDX-License-Identifier: Apache-2.0
"""Choosing the device of a run, and refusing what this MindSpore or this machine cannot do."""

from __future__ import annotations

from pathlib import Path

from ms_longctx.errors import MsLongctxError

_ASCEND_DRIVER = Path("/dev/davinci_manager")


def select_device(target: str, dtype: str) -> str:
    """Make a device MindSpore's default, in graph mode.

    Args:
        target: ``auto`` (Ascend where its driver is present, else CPU), ``Ascend``, ``GPU`` or ``CPU``.
        dtype: compute precision ``fp32``, ``fp16`` or ``bf16``.

    Returns:
        ``Ascend`` or ``CPU``.

    Raises:
        MsLongctxError: the device cannot be used, with the reason.
    """
    import mindspore as ms

    chosen = target
    if target == "auto":
        chosen = "Ascend" if _ASCEND_DRIVER.exists() else "CPU"
    if chosen == "GPU":
        raise MsLongctxError(
            f"train.device_target: GPU cannot be used: the GPU plugin of MindSpore {ms.__version__} ends at "
            "CUDA 11.6 and is not maintained; expected Ascend or CPU"
        )
    if chosen == "CPU" and dtype == "bf16":
        raise MsLongctxError(
            "train.dtype: bf16 cannot be used on a CPU: MindSpore has no bf16 matrix product, softmax or "
            "gather there; expected fp32 or fp16 (or device_target Ascend)"
        )
    try:
        ms.set_device(chosen)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise MsLongctxError(
            f"train.device_target: MindSpore {ms.__version__} cannot use {chosen} here: {reason}"
        ) from error
    ms.set_context(mode=ms.GRAPH_MODE)
    return chosen
