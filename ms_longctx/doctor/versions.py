# SPDX-License-Identifier: Apache-2.0
"""Versions against the table in compatibility.json: Python, MindSpore, NumPy, CANN, driver and firmware."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

from ms_longctx.doctor.check import Check, Host, Result

_TABLE = Path(__file__).with_name("compatibility.json")
_HOMES = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/latest",
)
_CANN_FILES = ("compiler/version.info", "share/info/compiler/version.info", "toolkit/version.info", "version.cfg")
_DRIVER = "/usr/local/Ascend/driver"


@functools.lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The compatibility table."""
    content: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return content


def check_python(version: str | None = None) -> Check:
    """Python against the range of the package."""
    return _in_range("Python", version or platform.python_version(), table()["python"], "make an environment with it")


def check_numpy(version: str | None = None) -> Check:
    """NumPy against the range that MindSpore can use."""
    found = version or _installed("numpy")
    return _in_range("NumPy", found, table()["numpy"], "pip install 'numpy>=1.25,<2'")


def check_mindspore(version: str | None = None) -> Check:
    """MindSpore against the versions of the table."""
    found = version or _installed("mindspore")
    known = " or ".join(table()["mindspore"])
    advice = "pip install 'mindspore>=2.9,<2.11' 'numpy<2'"
    if found is None:
        return Check("MindSpore", Result.FAILURE, "not installed", known, advice)
    if row(found, table()["mindspore"]) is None:
        return Check("MindSpore", Result.FAILURE, found, known, advice)
    return Check("MindSpore", Result.OK, found)


def check_cann(host: Host, mindspore: str | None = None) -> Check:
    """CANN: installed, its environment set, and of a version that this MindSpore takes."""
    home, version = find_cann(host)
    if home is None:
        if not host.has_devices:
            return Check("CANN", Result.ABSENT, "no CANN and no device: this machine computes on its CPU")
        return Check("CANN", Result.FAILURE, "not found", advice="install CANN toolkit and kernels (ops) for 910B")
    shown = f"{version or 'of unknown version'} in {home}"
    if "ASCEND_OPP_PATH" not in host.environment:
        return Check(
            "CANN", Result.FAILURE, f"{shown}, but its environment is not set", advice=f"source {_set_env(host, home)}"
        )
    values = row(mindspore or _installed("mindspore") or "", table()["mindspore"])
    if version is None or values is None:
        return Check("CANN", Result.WARNING, shown, advice="compare it by hand with https://www.mindspore.cn/install")
    expected = f"{', '.join(values['cann'])} (built with {values['built_with']})"
    if not any(is_of(version, known) for known in values["cann"]):
        return Check("CANN", Result.FAILURE, shown, expected, f"install CANN {values['built_with']}")
    if not is_of(version, values["built_with"]):
        advice = f"CANN {values['built_with']} is the one that custom operators of this MindSpore were built with"
        return Check("CANN", Result.WARNING, shown, expected, advice)
    return Check("CANN", Result.OK, shown)


def check_driver(host: Host, printed: str | None = None) -> Check:
    """The driver against CANN.

    Args:
        printed: the version that ``npu-smi info`` shows, where the driver's own file is not there.
    """
    found = _field(host.read(f"{_DRIVER}/version.info"), "Version") or printed
    if found is None:
        if not host.has_devices:
            return Check("driver", Result.ABSENT, "no driver and no device")
        return Check(
            "driver",
            Result.FAILURE,
            "not found",
            advice=f"install the driver; in a container mount it: -v {_DRIVER}:{_DRIVER}:ro",
        )
    _, cann = find_cann(host)
    known = row(cann or "", table()["driver"])
    if known is None:
        return Check("driver", Result.WARNING, found, advice="there is no CANN in the table to compare it with")
    expected = f"{', '.join(known)} for CANN {cann}"
    if any(is_of(found, version) for version in known):
        return Check("driver", Result.OK, found)
    if _numbers(found) < _numbers(known[0]):
        return Check("driver", Result.FAILURE, found, expected, "upgrade driver and firmware (Ascend HDK), then reboot")
    return Check("driver", Result.WARNING, found, expected, "a newer driver mostly works; the table does not know it")


def check_firmware(host: Host) -> Check:
    """The firmware against the range that the driver states."""
    found = _field(host.read("/usr/local/Ascend/firmware/version.info"), "Version")
    if found is None:
        board = host.run("npu-smi", "info", "-t", "board", "-i", "0") or ""
        shown = re.search(r"Firmware Version\s*:\s*(\d\S*)", board)
        found = shown[1] if shown else None
        if re.search(r"Compatibility\s*:\s*NOK", board):
            advice = "install the firmware of the driver's package, then reboot"
            return Check("firmware", Result.FAILURE, f"{found}, not compatible with the driver", advice=advice)
    if found is None:
        return Check("firmware", Result.ABSENT, "neither its files nor npu-smi tell a version")
    stated = _field(host.read(f"{_DRIVER}/version.info"), "compatible_version_fw")
    bounds = re.fullmatch(r"\[([\d.]+),([\d.]+)\]", stated or "")
    if bounds is None:
        return Check("firmware", Result.OK, found)
    expected = f"{bounds[1]} to {bounds[2]} (stated by the driver)"
    if _numbers(bounds[1]) <= _numbers(found)[:3] <= _numbers(bounds[2]):
        return Check("firmware", Result.OK, found, expected)
    return Check(
        "firmware", Result.FAILURE, found, expected, "install the firmware of the driver's package, then reboot"
    )


def find_cann(host: Host) -> tuple[Path | None, str | None]:
    """``(directory, version)`` of the CANN that the environment names, or else of the usual places."""
    named = host.environment.get("ASCEND_HOME_PATH") or host.environment.get("ASCEND_TOOLKIT_HOME")
    own = f"{host.environment.get('HOME', '/root')}/Ascend/ascend-toolkit/latest"
    for home in (named,) if named else (*_HOMES, own):
        if not host.path(home).is_dir():
            continue
        for name in _CANN_FILES:
            content = host.read(f"{home}/{name}")
            if version := _field(content, "Version") or _field(content, "toolkit_installed_version"):
                return Path(home), version
        for file in sorted(host.path(home).glob("*-linux/ascend_*_install.info")):
            if version := _field(host.read("/" + str(file.relative_to(host.root))), "version"):
                return Path(home), version
        return Path(home), None
    return None, None


def _set_env(host: Host, home: Path) -> Path:
    above = home.parent / "set_env.sh"
    return above if host.path(above).exists() else home / "set_env.sh"


def _in_range(name: str, found: str | None, limits: dict[str, str], advice: str) -> Check:
    expected = f"{limits['least']} or newer, below {limits['below']}"
    if found is None:
        return Check(name, Result.FAILURE, "not installed", expected, advice)
    if _numbers(limits["least"]) <= _numbers(found) < _numbers(limits["below"]):
        return Check(name, Result.OK, found)
    return Check(name, Result.FAILURE, found, expected, advice)


def row(version: str, rows: dict[str, Any]) -> Any:
    """The row of a table whose key the version begins with; ``None`` where there is none."""
    return next((values for key, values in rows.items() if is_of(version, key)), None)


def is_of(version: str, series: str) -> bool:
    """Whether ``version`` is ``series`` or of it: 9.0.1 and 9.0.RC1 are of 9.0, 9.01 is not."""
    numbers = _numbers(series)
    return bool(numbers) and _numbers(version)[: len(numbers)] == numbers


def _numbers(version: str) -> tuple[int, ...]:
    whole = re.match(r"\s*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in whole[1].split(".")) if whole else ()


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _field(text: str | None, name: str) -> str | None:
    found = re.search(rf"^\s*{name}\s*=\s*\[?(?P<value>[^\n]*?)\s*$", text or "", re.MULTILINE)
    if found is None:
        return None
    value = found["value"]
    if name == "compatible_version_fw":
        return f"[{value}"
    # version.cfg: toolkit_installed_version=[7.7.0.1.238:8.2.RC1]
    return value.rstrip("]").rpartition(":")[2] or None
