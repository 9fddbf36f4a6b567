# SPDX-License-Identifier: Apache-2.0
"""Checks of machines laid out in a folder: versions, devices as npu-smi shows them, limits; and of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_longctx import kernels
from ms_longctx.doctor import npu, smoke, system, versions
from ms_longctx.doctor.check import Check, Host, Result
from ms_longctx.doctor.checks import run_checks

# As shown for a server with 910B in https://github.com/Project-HAMi/HAMi-WebUI/issues/47, with a process.
NPU_SMI_910B = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
| 1     910B4-1             | Alarm         | 88.1        32                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          41032/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 71122         | python                   | 37800                   |
+===========================+===============+====================================================+
"""
# Two chips on a card, as in https://github.com/vllm-project/vllm-ascend/issues/12980.
NPU_SMI_A3 = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 3     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     6                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 3     Ascend910           | OK            | -                    34                      0    / 0                |
| 1     7                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536            |
+===========================+===============+======================================================================+
"""
DRIVER_INFO = """\
Version=25.2.0
ascendhal_version=7.35.23
compatible_version_fw=[7.0.0,7.7.99]
package_version=25.2.0
"""


class Machine:
    """Files of a machine below a folder, and programs on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.root, self.environment = folder, {"PATH": str(folder / "bin"), "HOME": "/home/user"}
        (folder / "bin").mkdir()

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def program(self, name: str, output: str, code: int = 0) -> None:
        self.write(f"bin/{name}.txt", output)
        self.write(f"bin/{name}", f"#!/bin/sh\n/bin/cat '{self.root}/bin/{name}.txt'\nexit {code}\n")
        (self.root / "bin" / name).chmod(0o755)

    def devices(self, number: int = 2) -> None:
        for name in ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{i}" for i in range(number))):
            self.write(f"/dev/{name}")

    def cann(self, version: str, home: str = "/usr/local/Ascend/ascend-toolkit/latest") -> None:
        self.write(f"{home}/compiler/version.info", f"Version={version}\nversion_dir={version}\n")
        self.environment["ASCEND_OPP_PATH"] = f"{home}/opp"

    @property
    def host(self) -> Host:
        return Host(self.root, self.environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def outcome(check: Check) -> tuple[Result, str]:
    return check.result, check.value


class TestVersions:
    @pytest.mark.parametrize(
        ("version", "result"),
        [("3.9.18", "failure"), ("3.10.0", "ok"), ("3.12.9", "ok"), ("3.13.0", "failure"), ("3.100.0", "failure")],
    )
    def test_python(self, version: str, result: str) -> None:
        assert versions.check_python(version).result.value == result

    @pytest.mark.parametrize(("version", "result"), [("1.24.4", "failure"), ("1.26.4", "ok"), ("2.0.1", "failure")])
    def test_numpy(self, version: str, result: str) -> None:
        assert versions.check_numpy(version).result.value == result

    @pytest.mark.parametrize(
        ("version", "result"), [("2.8.0", "failure"), ("2.9.0", "ok"), ("2.10.1", "ok"), ("2.1.0", "failure")]
    )
    def test_mindspore(self, version: str, result: str) -> None:
        """2.1 is not 2.10."""
        assert versions.check_mindspore(version).result.value == result

    @pytest.mark.parametrize(
        ("mindspore", "cann", "result"),
        [
            ("2.10.0", "9.1.0", "ok"), ("2.10.0", "9.0.0", "warning"), ("2.10.0", "8.0.RC3", "failure"),
            ("2.9.0", "9.0.0", "ok"), ("2.9.0", "9.1.0", "failure"), ("2.9.0", "8.5.2", "warning"),
        ],
    )  # fmt: skip
    def test_cann(self, mindspore: str, cann: str, result: str, machine: Machine) -> None:
        machine.cann(cann)
        check = versions.check_cann(machine.host, mindspore)
        assert check.result.value == result and check.value.startswith(cann)

    def test_the_table_is_that_of_mindspore(self) -> None:
        """AscendEnvChecker of the installed wheel, and what its custom operators were built with."""
        import importlib.metadata
        import re

        root = Path(str(importlib.metadata.distribution("mindspore").locate_file("mindspore")))
        source = (root / "run_check" / "_check_version.py").read_text()
        known = re.findall(
            r'"([\d.]+)"',
            source.partition("class AscendEnvChecker")[2].partition("self.version = ")[2].partition("]")[0],
        )
        built = (root / "lib/plugin/ascend/custom_ascendc_910b/version.info").read_text()
        values = versions.row(importlib.metadata.version("mindspore"), versions.table()["mindspore"])
        assert values["cann"] == known and values["built_with"] in built
        assert set(known) <= set(versions.table()["driver"])

    def test_cann_without_its_environment(self, machine: Machine) -> None:
        machine.cann("9.1.0")
        machine.write("/usr/local/Ascend/ascend-toolkit/set_env.sh")
        del machine.environment["ASCEND_OPP_PATH"]
        check = versions.check_cann(machine.host)
        assert check.result is Result.FAILURE
        assert check.advice == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"

    def test_where_cann_is_looked_for(self, machine: Machine) -> None:
        machine.cann("9.1.0", "/opt/cann")
        assert versions.find_cann(machine.host) == (None, None)
        machine.environment["ASCEND_HOME_PATH"] = "/opt/cann"
        assert versions.find_cann(machine.host) == (Path("/opt/cann"), "9.1.0")
        machine.write("/usr/local/Ascend/latest/version.cfg", "toolkit_installed_version=[7.7.0.1.238:8.2.RC1]\n")
        del machine.environment["ASCEND_HOME_PATH"]
        assert versions.find_cann(machine.host)[1] == "8.2.RC1"

    @pytest.mark.parametrize(
        ("cann", "driver", "result"),
        [
            ("9.1.0", "25.2.0", "ok"), ("9.1.0", "25.0.RC1", "failure"), ("9.0.0", "25.0.RC1", "ok"),
            ("9.1.0", "26.0.rc2", "ok"), ("9.1.0", "27.0.0", "warning"), ("8.2.RC1", "23.0.6", "failure"),
        ],
    )  # fmt: skip
    def test_driver(self, cann: str, driver: str, result: str, machine: Machine) -> None:
        machine.cann(cann)
        machine.write("/usr/local/Ascend/driver/version.info", DRIVER_INFO.replace("25.2.0", driver))
        assert versions.check_driver(machine.host).result.value == result

    def test_driver_in_a_container(self, machine: Machine) -> None:
        machine.devices()
        assert "in a container mount it" in versions.check_driver(machine.host).advice
        machine.cann("9.1.0")
        assert outcome(versions.check_driver(machine.host, printed="25.2.0")) == (Result.OK, "25.2.0")

    @pytest.mark.parametrize(
        ("firmware", "result"), [("7.5.0.2.220", "ok"), ("7.7.99", "ok"), ("7.8.0.1", "failure"), ("6.4.12", "failure")]
    )
    def test_firmware(self, firmware: str, result: str, machine: Machine) -> None:
        machine.write("/usr/local/Ascend/driver/version.info", DRIVER_INFO)
        machine.write("/usr/local/Ascend/firmware/version.info", f"Version={firmware}\n")
        assert versions.check_firmware(machine.host).result.value == result

    def test_firmware_from_the_board(self, machine: Machine) -> None:
        text = "\tSoftware Version   : 25.2.0\n\tFirmware Version   : 7.7.0.6.236\n\tCompatibility      : {}\n"
        machine.program("npu-smi", text.format("OK"))
        assert outcome(versions.check_firmware(machine.host)) == (Result.OK, "7.7.0.6.236")
        machine.program("npu-smi", text.format("NOK"))
        assert versions.check_firmware(machine.host).result is Result.FAILURE

    def test_nothing_of_ascend(self, machine: Machine) -> None:
        for check in (versions.check_cann, versions.check_driver, versions.check_firmware):
            assert check(machine.host).result is Result.ABSENT


class TestDevices:
    def test_parse_910b(self) -> None:
        version, (first, second) = npu.parse(NPU_SMI_910B)
        assert version == "25.2.0"
        assert first == npu.Device(0, 0, 0, "910B4-1", "OK", 3197, 65536)
        assert second == npu.Device(1, 1, 0, "910B4-1", "Alarm", 41032, 65536, ((71122, "python", 37800),))

    def test_parse_two_chips_a_card(self) -> None:
        version, devices = npu.parse(NPU_SMI_A3)
        assert version == "26.0.rc2"
        assert [(d.index, d.npu, d.chip, d.used_mb, d.total_mb) for d in devices] == [
            (6, 3, 0, 3419, 65536), (7, 3, 1, 2874, 65536),
        ]  # fmt: skip

    def test_parse_what_is_no_table(self) -> None:
        assert npu.parse("dcmi module initialize failed. ret is -8005") == (None, ())

    def results(self, machine: Machine) -> list[tuple[str, str, str]]:
        return [(check.name, check.result.value, check.value) for check in npu.check_devices(machine.host)[1]]

    def test_health_and_processes(self, machine: Machine) -> None:
        machine.devices()
        machine.program("npu-smi", NPU_SMI_910B)
        files, first, second = self.results(machine)
        assert files == ("device files", "ok", "2 devices, readable and writable")
        assert first == ("device 0", "ok", "910B4-1, 60.9 of 64.0 GB free, health OK")
        assert second[:2] == ("device 1", "failure")
        machine.program("npu-smi", NPU_SMI_910B.replace("Alarm", "OK   "))
        assert self.results(machine)[2][1:] == (
            "warning", "910B4-1, 23.9 of 64.0 GB free, health OK, used by python (71122, 37800 MB)",
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("visible", "names", "result"),
        [
            ("0", ["device 0"], "ok"), ("1,0", ["device 0", "device 1"], "ok"), ("0,9", ["devices"], "failure"),
            ("0-1", ["devices"], "failure"), ("0,0", ["devices"], "failure"), ("", ["devices"], "failure"),
        ],
    )  # fmt: skip
    def test_visible_devices(self, visible: str, names: list[str], result: str, machine: Machine) -> None:
        machine.devices()
        machine.environment["ASCEND_RT_VISIBLE_DEVICES"] = visible
        machine.program("npu-smi", NPU_SMI_910B)
        found = self.results(machine)[1:]
        assert [name for name, _, _ in found] == names and found[0][1] == result

    def test_no_device_no_smi_no_file(self, machine: Machine) -> None:
        assert [result for _, result, _ in self.results(machine)] == ["not here"]
        machine.devices()
        assert self.results(machine)[1] == ("devices", "warning", "npu-smi does not run")
        machine.program("npu-smi", "dcmi module initialize failed. ret is -8005", code=1)
        assert self.results(machine)[1][1] == "warning"
        (machine.root / "dev/hisi_hdc").unlink()
        assert self.results(machine)[0] == ("device files", "failure", "/dev/hisi_hdc is missing")

    @pytest.mark.skipif(os.getuid() == 0, reason="root may open everything")
    def test_closed_files(self, machine: Machine) -> None:
        machine.devices()
        (machine.root / "dev/davinci1").chmod(0)
        assert self.results(machine)[0][2] == "/dev/davinci1 cannot be opened by this user"


class TestHost:
    def test_disk(self, tmp_path: Path) -> None:
        assert system.check_disk(tmp_path, least_gb=0, good_gb=0).result is Result.OK
        assert system.check_disk(tmp_path, least_gb=0, good_gb=1e9).result is Result.WARNING
        assert system.check_disk(tmp_path, least_gb=1e9, good_gb=1e9).result is Result.FAILURE

    def test_leftovers_of_shared_memory(self, machine: Machine) -> None:
        """A segment is left over when no process holds a lock on it, as every rank of a running job does."""
        for name in ("ms_longctx.dead", "ms_longctx.alive", "other"):
            machine.write(f"/dev/shm/{name}", "x")
        code = (
            "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 0); "
            "print('held', flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(machine.root / "dev/shm/ms_longctx.alive")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        with holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            checks = system.check_shared_memory(machine.host)
            holder.kill()
        assert [check.value for check in checks if check.name == "/dev/shm leftovers"] == ["/dev/shm/ms_longctx.dead"]

    def test_no_shared_memory(self, machine: Machine) -> None:
        assert system.check_shared_memory(machine.host)[0].result is Result.FAILURE

    def test_open_files(self) -> None:
        assert [system.check_open_files(limit).result.value for limit in (256, 1024, 65536)] == [
            "failure", "warning", "ok",
        ]  # fmt: skip

    def test_memory_of_a_container(self, machine: Machine) -> None:
        machine.write("/proc/meminfo", "MemTotal: 263000000 kB\nMemFree: 100 kB\nMemAvailable: 200000000 kB\n")
        assert system.check_memory(machine.host).value == "204.8 of 269.3 GB free"
        machine.write("/sys/fs/cgroup/memory.max", "8000000000\n")
        machine.write("/sys/fs/cgroup/memory.current", "7000000000\n")
        check = system.check_memory(machine.host)
        assert outcome(check) == (Result.FAILURE, "1.0 of 8.0 GB free (limit of the container)")

    def test_names(self) -> None:
        assert system.check_hostname("localhost").result is Result.WARNING
        assert system.check_hostname("no-such-host.invalid").result is Result.FAILURE

    def test_ports(self, machine: Machine) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            number = taken.getsockname()[1]
            machine.environment["MS_SCHED_PORT"] = str(number)
            (check,) = system.check_ports(machine.host)
            assert outcome(check) == (Result.WARNING, f"{number} is in use")
        assert system.check_ports(machine.host)[0].result is Result.OK
        machine.environment["MS_SCHED_PORT"] = "many"
        assert system.check_ports(machine.host)[0].result is Result.FAILURE
        machine.environment["MS_SCHED_PORT"] = str(number)
        machine.devices()
        machine.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60031\n")
        assert system.check_ports(machine.host)[1].value == "60000-60031 free and reserved"

    def test_clock(self) -> None:
        assert system.check_clock(now=0.0).result is Result.FAILURE
        assert system.check_clock().result in (Result.OK, Result.WARNING)


class TestSmoke:
    def test_a_worker_that_crashes_or_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both are failures with a reason, never an exception."""
        crash = [sys.executable, "-c", "import os, sys; print('bad luck', file=sys.stderr, flush=True); os.abort()"]
        (result,) = smoke._run([crash], [dict(os.environ)])
        assert result == "ended with signal 6: bad luck"
        monkeypatch.setattr(smoke, "_SECONDS", 0.3)
        (result,) = smoke._run([[sys.executable, "-c", "import time; time.sleep(60)"]], [dict(os.environ)])
        assert result == "no result within 0 s"

    @pytest.mark.skipif(not kernels.available(), reason="no kernel library")
    def test_collectives(self) -> None:
        check = smoke.check_collectives("CPU", 0)
        assert outcome(check) == (
            Result.OK, "all_reduce, all_gather, all_to_all between 2 processes over shared memory",
        )  # fmt: skip

    def test_one_device_needs_no_collectives(self) -> None:
        assert smoke.check_collectives("Ascend", 1).result is Result.ABSENT


def test_healthcheck(tmp_path: Path) -> None:
    """Under 5 s and without MindSpore: a container is asked every minute."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "ms_longctx.cli.main",
        "doctor",
        "--healthcheck",
        "--json",
        str(report),
    ]
    start = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.monotonic() - start < 5.0
    assert " mindspore\n" not in result.stderr
    data = json.loads(report.read_text())
    assert result.returncode == int(data["failed"]), result.stdout
    names = [check["name"] for check in data["checks"]]
    assert names[:3] == ["Python", "MindSpore", "NumPy"] and "matrix product" not in names and "/dev/shm" in names


@pytest.mark.slow
def test_this_machine() -> None:
    """All checks run here, and a matrix product gives the numbers of NumPy."""
    checks = {check.name: check for check in run_checks("CPU")}
    assert checks["matrix product"].result is Result.OK, checks["matrix product"]
    assert {"CANN", "driver", "disk", "host name", "scheduler port", "clock", "collectives"} <= set(checks)
    for check in checks.values():
        assert check.result in (Result.OK, Result.ABSENT) or (check.advice and check.expected), check
