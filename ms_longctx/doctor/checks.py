# SPDX-License-Identifier: Apache-2.0
"""All checks of a machine, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ms_longctx.doctor import npu, smoke, system, versions
from ms_longctx.doctor.check import Check, Host, Result


def run_checks(target: str = "auto", quick: bool = False, host: Host | None = None) -> Iterator[Check]:
    """Check the machine; results come as they are found.

    Args:
        target: device of the products: ``auto`` (Ascend where its driver is), ``Ascend`` or ``CPU``.
        quick: for a container's health: no products, no collectives, no ports, names and clock.
        host: what to look at; the default is this machine.
    """
    host = host or Host()
    yield versions.check_python()
    yield versions.check_mindspore()
    yield versions.check_numpy()
    printed, devices = npu.check_devices(host)
    yield versions.check_cann(host)
    yield versions.check_driver(host, printed)
    yield versions.check_firmware(host)
    yield from devices
    yield smoke.check_kernels()
    yield system.check_disk(Path.cwd())
    yield from system.check_shared_memory(host)
    yield system.check_open_files()
    yield system.check_memory(host)
    if quick:
        return
    yield system.check_hostname()
    yield from system.check_ports(host)
    yield system.check_clock()
    if target == "auto":
        target = "Ascend" if host.has_devices else "CPU"
    yield smoke.check_matmul(target)
    usable = sum(check.name.startswith("device ") and check.result is not Result.FAILURE for check in devices)
    yield smoke.check_collectives(target, usable)
