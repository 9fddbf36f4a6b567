# SPDX-License-Identifier: Apache-2.0
"""Choosing the device of this process, and refusing with a reason what this MindSpore cannot initialise."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError

TARGETS = ("auto", "Ascend", "GPU", "CPU")
_BEST_FIRST = ("Ascend", "GPU", "CPU")
_MINDSPORE_RANGE = ((2, 9), (2, 11))
_INSTALL = "install it with: pip install 'mindspore>=2.9,<2.11' 'numpy<2'"


class DeviceError(MsLongctxError):
    """The wanted device, or the installed MindSpore or NumPy, cannot be used."""


def select_device(target: str = "auto") -> str:
    """Make ``target`` the device of this process and return its name (``Ascend``, ``GPU`` or ``CPU``).

    ``auto`` takes the first of Ascend, GPU, CPU that initialises. Call it before the first operator.

    Raises:
        DeviceError: unknown target, a version outside the supported range, or a device that this MindSpore cannot
            initialise; the message gives the reason.
    """
    if target not in TARGETS:
        raise DeviceError(f"device_target {target!r} is unknown; expected one of {', '.join(TARGETS)}")
    check_versions()
    import mindspore as ms

    if target == "auto":
        target = next(name for name in _BEST_FIRST if unavailable_reason(name) is None)
    elif reason := unavailable_reason(target):
        raise DeviceError(f"device_target {target} cannot be used: {reason}")
    _set_device(ms, target)
    if target == "CPU":
        # Without it PyNative queues every operator to another thread, which costs more than a small operator.
        ms.runtime.launch_blocking()
    return target


def check_versions() -> None:
    """Refuse a missing or unsupported MindSpore or NumPy; with NumPy 2 MindSpore would import and fail later.

    Raises:
        DeviceError: names what was found and the command that installs the right version.
    """
    low, high = _MINDSPORE_RANGE
    mindspore = _installed("mindspore")
    if mindspore is None:
        raise DeviceError(f"MindSpore is not installed; {_INSTALL}")
    if not low <= _major_minor(mindspore) < high:
        raise DeviceError(f"MindSpore {mindspore} is installed, expected 2.9 or 2.10; {_INSTALL}")
    numpy = _installed("numpy")
    if numpy is None or _major_minor(numpy) >= (2, 0):
        raise DeviceError(f"NumPy {numpy or 'is missing'}: MindSpore needs a version below 2; {_INSTALL}")


def unavailable_reason(target: str) -> str | None:
    """Why ``target`` cannot be initialised here, or ``None`` when it can."""
    import mindspore as ms

    if target == "CPU":
        return None
    with _without_log():
        device = getattr(ms.device_context, target.lower())
        if not device.is_available():
            return _ascend_reason(ms) if target == "Ascend" else _gpu_reason(ms)
        if "MS_SIMULATION_LEVEL" in os.environ:
            return None  # a dry run compiles for devices that are not there
        try:
            count = device.device_count()
        except RuntimeError as error:
            return f"its driver does not answer ({str(error).splitlines()[0]})"
    visible = "ASCEND_RT_VISIBLE_DEVICES" if target == "Ascend" else "CUDA_VISIBLE_DEVICES"
    return None if count else f"the driver shows no device; check {visible}"


def _ascend_reason(ms: Any) -> str:
    missing = re.search(r"failed\. (\S+: cannot open shared object file)", _refusal(ms, "Ascend"))
    detail = f" ({missing[1]})" if missing else ""
    return f"CANN is not installed or its libraries are not found{detail}; source its set_env.sh, or use CPU"


def _gpu_reason(ms: Any) -> str:
    plugins = Path(ms.__file__).parent.glob("lib/plugin/libmindspore_gpu.so.*")
    versions = sorted((path.name.rpartition(".so.")[2] for path in plugins), key=_major_minor)
    if not versions:
        return f"MindSpore {ms.__version__} was built without a GPU plugin; use Ascend or CPU"
    return (
        f"the GPU plugin of MindSpore {ms.__version__} does not load; it is built for "
        f"CUDA {' and '.join(versions)} with cuDNN and no later CUDA; use Ascend or CPU"
    )


def _refusal(ms: Any, target: str) -> str:
    """MindSpore's own words on why a target is not supported; asking leaves the process usable."""
    try:
        ms.set_context(device_target=target)
    except RuntimeError as error:
        return str(error)
    return ""


def _set_device(ms: Any, target: str) -> None:
    try:
        with _without_log():
            ms.set_device(target)
    except RuntimeError as error:
        # Too late to choose, which is no fault when the choice would not change anything.
        if ms.get_context("device_target") != target:
            raise DeviceError(
                f"device_target {target} cannot be used: this process already runs on "
                f"{ms.get_context('device_target')}; choose the device before the first operator"
            ) from error


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec(package) is None:
        return None
    return str(importlib.import_module(package).__version__)


def _major_minor(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


@contextmanager
def _without_log() -> Iterator[None]:
    """Hold back MindSpore's log lines about plugins; the reason goes into one error line instead."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
