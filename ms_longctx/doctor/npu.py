# SPDX-License-Identifier: Apache-2.0
"""Ascend devices, as ``npu-smi info`` shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ms_longctx.doctor.check import Check, Host, Result

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")
# A driver without any process of a user takes about 3.4 GB of 64; more means that somebody computes.
_IDLE_MB = 6000


@dataclass(frozen=True)
class Device:
    """A device (chip).

    Attributes:
        index: what ASCEND_RT_VISIBLE_DEVICES calls it.
        npu, chip: its place: the card and the chip on it.
        name, health: as shown, e.g. ``910B3`` and ``OK``.
        used_mb, total_mb: of its HBM.
        processes: ``(process id, name, MB)`` of those that use it.
    """

    index: int
    npu: int
    chip: int
    name: str
    health: str
    used_mb: int
    total_mb: int
    processes: tuple[tuple[int, str, int], ...] = ()


@dataclass
class _Table:
    version: str | None = None
    devices: list[Device] = field(default_factory=list)
    processes: dict[tuple[int, int], list[tuple[int, str, int]]] = field(default_factory=dict)


def parse(text: str) -> tuple[str | None, tuple[Device, ...]]:
    """``(driver version, devices)`` from what ``npu-smi info`` prints (formats of versions 23.0 to 26.0)."""
    table = _Table()
    first: list[str] | None = None
    for line in text.splitlines():
        if version := re.search(r"npu-smi \S+\s+Version: (\S+)", line):
            table.version = version[1]
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and re.match(r"\|\s+\d+\s+\S", line) and (not cells[0] or cells[0][0].isdigit()):
            if first is None and len(cells[0]) >= 2 and not _is_bus(cells[1]):
                first = [*cells[0][:2], *cells[1][:1]]
            elif first is not None and _is_bus(cells[1]):
                _add_device(table, first, cells)
                first = None
        elif len(cells) == 4 and all(cell and cell[0].isdigit() for cell in (cells[0], cells[1], cells[3])):
            place = int(cells[0][0]), int(cells[0][1]) if len(cells[0]) > 1 else 0
            process = int(cells[1][0]), " ".join(cells[2]), int(cells[3][0])
            table.processes.setdefault(place, []).append(process)
    return table.version, tuple(
        Device(**{**device.__dict__, "processes": tuple(table.processes.get((device.npu, device.chip), ()))})
        for device in table.devices
    )


def _is_bus(cell: list[str]) -> bool:
    return bool(cell) and (cell[0] == "NA" or bool(re.fullmatch(r"[0-9A-Fa-fx]+:[0-9A-Fa-fx]+:\S+", cell[0])))


def _add_device(table: _Table, first: list[str], cells: list[list[str]]) -> None:
    memory = re.findall(r"(\d+)\s*/\s*(\d+)", " ".join(cells[2]))
    if not memory:
        return
    used, total = (int(number) for number in memory[-1])  # the last pair is HBM; cards without it show one pair
    chip = int(cells[0][0])
    index = int(cells[0][1]) if len(cells[0]) > 1 else len(table.devices)
    table.devices.append(Device(index, int(first[0]), chip, first[1], first[2], used, total))


def check_devices(host: Host) -> tuple[str | None, list[Check]]:
    """``(driver version that npu-smi prints, checks of files and of each visible device)``."""
    if not host.has_devices:
        return None, [Check("devices", Result.ABSENT, "no /dev/davinci_manager: no Ascend device on this machine")]
    checks = [_check_files(host)]
    text = host.run("npu-smi", "info")
    if text is None:
        advice = "see what 'npu-smi info' says; in a container mount /usr/local/bin/npu-smi and /usr/local/dcmi"
        return None, [*checks, Check("devices", Result.WARNING, "npu-smi does not run", advice=advice)]
    version, devices = parse(text)
    if not devices:
        advice = "the driver shows no device: see 'dmesg | grep -i davinci' and whether another container holds them"
        return version, [*checks, Check("devices", Result.FAILURE, "none", advice=advice)]
    visible, problem = visible_devices(host, [device.index for device in devices])
    if problem is not None:
        return version, [*checks, problem]
    shown = [device for device in devices if device.index in visible]
    return version, [*checks, *(_check_device(device) for device in shown)]


def visible_devices(host: Host, present: Sequence[int]) -> tuple[tuple[int, ...], Check | None]:
    """The devices that ASCEND_RT_VISIBLE_DEVICES leaves, or a failed check where it is wrong."""
    text = host.environment.get(VISIBLE)
    if text is None:
        return tuple(present), None
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdigit()]
    expected = f"some of {','.join(map(str, present))}, with commas"
    if wrong:
        return (), Check("devices", Result.FAILURE, f"{VISIBLE}={text}", expected, "write numbers, such as 0,1,2,3")
    chosen = tuple(int(part) for part in parts)
    absent = [number for number in chosen if number not in present]
    if absent or len(set(chosen)) < len(chosen):
        what = f"has no device {absent[0]}" if absent else "names a device twice"
        return (), Check("devices", Result.FAILURE, f"{VISIBLE}={text} {what}", expected, f"correct {VISIBLE}")
    return chosen, None


def _check_files(host: Host) -> Check:
    files = [host.path(f"/dev/{name}") for name in _FILES]
    missing = [f"/dev/{file.name}" for file in files if not file.exists()]
    if missing:
        advice = "in a container pass --device for each of them"
        return Check("device files", Result.FAILURE, f"{missing[0]} is missing", advice=advice)
    numbered = sorted(host.path("/dev").glob("davinci[0-9]*"))
    if not numbered:
        advice = "in a container pass --device /dev/davinciN for each device"
        return Check("device files", Result.FAILURE, "no /dev/davinciN", advice=advice)
    closed = [f"/dev/{file.name}" for file in [*files, *numbered] if not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        advice = "add this user to the group of that file (HwHiAiUser); in a container --group-add with its number"
        return Check("device files", Result.FAILURE, f"{closed[0]} cannot be opened by this user", advice=advice)
    return Check("device files", Result.OK, f"{len(numbered)} devices, readable and writable")


def _check_device(device: Device) -> Check:
    name = f"device {device.index}"
    free = (device.total_mb - device.used_mb) / 1024
    value = f"{device.name}, {free:.1f} of {device.total_mb / 1024:.1f} GB free, health {device.health}"
    if device.health not in ("OK", "Warning"):
        advice = f"see 'npu-smi info -t health -i {device.npu}'; take it out with {VISIBLE}"
        return Check(name, Result.FAILURE, value, "health OK", advice)
    if device.processes:
        who = ", ".join(f"{program} ({number}, {memory} MB)" for number, program, memory in device.processes)
        return Check(name, Result.WARNING, f"{value}, used by {who}", "a free device", "end that process, or wait")
    if device.used_mb > _IDLE_MB:
        advice = "a process of another container may hold it: see 'npu-smi info' on the host"
        return Check(name, Result.WARNING, value, "a free device", advice)
    if device.health == "Warning":
        advice = f"see 'npu-smi info -t health -i {device.npu}'"
        return Check(name, Result.WARNING, value, "health OK", advice)
    return Check(name, Result.OK, value)
