# SPDX-License-Identifier: Apache-2.0
"""Device selection: what really happens on this machine, and every other machine through a stand-in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ms_longctx import device
from ms_longctx.device import DeviceError, check_versions, select_device, unavailable_reason

REPOSITORY = Path(__file__).resolve().parents[1]

# All refusals first, then the selections, then a real operator: a refusal must leave the process usable.
REAL_RUN = """
import json
from ms_longctx.device import DeviceError, select_device
answers = {}
for target in ("GPU", "Ascend", "auto", "CPU"):
    try:
        answers[target] = select_device(target)
    except DeviceError as error:
        answers[target] = f"error: {error}"
import mindspore as ms
answers["sum"] = float(ms.ops.ones((3,)).sum().asnumpy())
answers["late"] = select_device("CPU")
print(json.dumps(answers))
"""


def run_python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)


def test_this_machine_without_accelerator() -> None:
    if any(Path(path).exists() for path in ("/dev/davinci_manager", "/dev/nvidiactl")):
        pytest.skip("this machine has an accelerator")
    result = run_python(REAL_RUN)
    assert result.returncode == 0 and result.stderr == ""  # MindSpore's own warnings are held back
    answers = json.loads(result.stdout)
    assert answers["GPU"].startswith("error: device_target GPU cannot be used: the GPU plugin of MindSpore 2.")
    assert "CUDA 11.1 and 11.6" in answers["GPU"]
    assert answers["Ascend"].startswith("error: device_target Ascend cannot be used: CANN is not installed")
    assert "libge_runner.so" in answers["Ascend"]
    assert (answers["auto"], answers["CPU"], answers["sum"], answers["late"]) == ("CPU", "CPU", 3.0, "CPU")


def test_selection_after_the_first_operator() -> None:
    script = (
        "import mindspore as ms\nms.ops.ones((2,)).asnumpy()\n"
        "from ms_longctx.device import select_device\nprint(select_device('auto'))"
    )
    assert run_python(script).stdout == "CPU\n"


def test_unknown_target() -> None:
    with pytest.raises(DeviceError, match="^device_target 'TPU' is unknown; expected one of auto, Ascend, GPU, CPU$"):
        select_device("TPU")


@pytest.mark.parametrize(
    ("mindspore", "numpy", "message"),
    [
        (
            "2.8.0",
            "1.26.4",
            "MindSpore 2.8.0 is installed, expected 2.9 or 2.10; install it with: pip install",
        ),
        ("2.11.0rc1", "1.26.4", "MindSpore 2.11.0rc1 is installed, expected 2.9 or 2.10"),
        ("3.0", "1.26.4", "MindSpore 3.0 is installed, expected 2.9 or 2.10"),
        ("2.10.0", "2.0.1", "NumPy 2.0.1: MindSpore needs a version below 2; install it with: pip install"),
        ("2.9.0", "2.4.0", "NumPy 2.4.0: MindSpore needs a version below 2"),
        (
            None,
            "1.26.4",
            "MindSpore is not installed; install it with: pip install 'mindspore>=2.9,<2.11' 'numpy<2'",
        ),
        ("2.10.0", None, "NumPy is missing: MindSpore needs a version below 2"),
        ("2.9.1", "1.25.0", None),
        ("2.10.3", "1.26.4", None),
    ],
)
def test_versions(
    mindspore: str | None, numpy: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"mindspore": mindspore, "numpy": numpy}

    def version(package: str) -> str:
        found = installed[package]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda package: None)
    if message is None:
        check_versions()
        return
    with pytest.raises(DeviceError) as caught:
        check_versions()
    assert str(caught.value).startswith(message)


class StandIn:
    """What select_device touches of MindSpore, for a machine with so many devices (None: no plugin loads)."""

    __version__ = "2.10.0"

    def __init__(self, folder: Path, ascend: int | str | None = None, gpu: int | str | None = None) -> None:
        self.__file__ = str(folder / "__init__.py")
        self.selected = "none"
        self.device_context = SimpleNamespace(ascend=self._device(ascend), gpu=self._device(gpu))
        self.runtime = SimpleNamespace(launch_blocking=lambda: None)

    @staticmethod
    def _device(count: int | str | None) -> SimpleNamespace:
        def device_count() -> int:
            if isinstance(count, str):
                raise RuntimeError(f"{count}\nmore lines")
            assert count is not None
            return count

        return SimpleNamespace(is_available=lambda: count is not None, device_count=device_count)

    def set_context(self, device_target: str) -> None:
        raise RuntimeError("Unsupported device target. It was built without it.")

    def set_device(self, target: str) -> None:
        if self.selected not in ("none", target):
            raise RuntimeError("The 'mindspore.set_device' can not be modified.")
        self.selected = target

    def get_context(self, key: str) -> str:
        assert key == "device_target"
        return self.selected


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ({"ascend": 8}, "Ascend"),
        ({"ascend": 8, "gpu": 1}, "Ascend"),
        ({"ascend": 0, "gpu": 1}, "GPU"),
        ({"ascend": "drvGetDevNum failed", "gpu": 0}, "CPU"),
        ({}, "CPU"),
    ],
)
def test_auto_takes_the_best_that_initialises(
    devices: dict[str, int | str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn(tmp_path, **devices)
    monkeypatch.setitem(sys.modules, "mindspore", stand_in)
    assert select_device("auto") == chosen == stand_in.selected


@pytest.mark.parametrize(
    ("target", "devices", "reason"),
    [
        ("Ascend", {"ascend": 0}, "the driver shows no device; check ASCEND_RT_VISIBLE_DEVICES"),
        ("GPU", {"gpu": 0}, "the driver shows no device; check CUDA_VISIBLE_DEVICES"),
        ("Ascend", {"ascend": "drvGetDevNum failed"}, "its driver does not answer (drvGetDevNum failed)"),
        ("GPU", {}, "MindSpore 2.10.0 was built without a GPU plugin; use Ascend or CPU"),
        (
            "Ascend",
            {},
            "CANN is not installed or its libraries are not found; source its set_env.sh, or use CPU",
        ),
    ],
)
def test_reasons(
    target: str, devices: dict[str, int | str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", StandIn(tmp_path, **devices))
    assert unavailable_reason(target) == reason
    with pytest.raises(DeviceError) as caught:
        select_device(target)
    assert str(caught.value) == f"device_target {target} cannot be used: {reason}"


def test_a_dry_run_needs_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", StandIn(tmp_path, ascend=0))
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "0")
    assert select_device("Ascend") == "Ascend"


def test_a_process_keeps_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", StandIn(tmp_path, ascend=1))
    assert select_device("Ascend") == select_device("Ascend") == "Ascend"
    with pytest.raises(DeviceError, match="CPU cannot be used: this process already runs on Ascend"):
        select_device("CPU")
