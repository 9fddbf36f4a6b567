# SPDX-License-Identifier: Apache-2.0
"""Smoke tests that compute: a matrix product and collectives, in processes of their own that may crash or hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ms_longctx import kernels
from ms_longctx.doctor.check import Check, Result

_WORKER = "ms_longctx.doctor.worker"
_SECONDS = 120.0
_PROCESSES = 2


def check_kernels() -> Check:
    """The library of C++ kernels for CPUs."""
    if kernels.available():
        return Check("CPU kernels", Result.OK, f"built, {kernels.instruction_set()}")
    advice = "several workers on a CPU need it, one is slow without; install g++, python -m ms_longctx.kernels.build"
    return Check("CPU kernels", Result.WARNING, kernels.reason(), "a built library", advice)


def check_matmul(target: str) -> Check:
    """A matrix product on the device, compared with NumPy in double precision.

    Args:
        target: ``auto``, ``Ascend`` or ``CPU``.
    """
    (result,) = _run([[sys.executable, "-m", _WORKER, "matmul", target]], [dict(os.environ)])
    name = "matrix product"
    if isinstance(result, str):
        advice = f"see its reason; for all messages: python -m {_WORKER} matmul {target}"
        return Check(name, Result.FAILURE, result, "a result", advice)
    value = f"on {result['device']} in {result['seconds']:.1f} s with MindSpore's start, error {result['error']:.1e}"
    expected = f"at most {result['tolerance']:.0e}"
    if result["error"] > result["tolerance"]:
        advice = "the device computes wrong results: test it with another job, and take it out of service"
        return Check(name, Result.FAILURE, value, expected, advice)
    return Check(name, Result.OK, value, expected)


def check_collectives(target: str, devices: int) -> Check:
    """Collectives between processes, with their results checked.

    Args:
        target: ``CPU``: two processes in shared memory; ``Ascend``: one process a device, over HCCL, by msrun.
        devices: number of visible devices.
    """
    name = "collectives"
    if target == "CPU":
        if not kernels.available():
            return Check(name, Result.ABSENT, "the CPU kernels, which bring them, are not built")
        job = f"doctor-{os.getuid()}-{os.getpid()}"
        commands = [
            [sys.executable, "-m", _WORKER, "collectives", "CPU", str(rank), str(_PROCESSES), job]
            for rank in range(_PROCESSES)
        ]
        results = _run(commands, [dict(os.environ)] * _PROCESSES)
        size = _PROCESSES
    elif devices < 2:
        return Check(name, Result.ABSENT, "one device needs none")
    else:
        results, size = _hccl(devices), devices
    passed = ""
    for rank, result in enumerate(results):
        if isinstance(result, str):
            advice = "read its reason; on Ascend also the ports and 'hccn_tool -i N -link -g'"
            return Check(name, Result.FAILURE, f"rank {rank}: {result}", "the sums of all ranks", advice)
        passed = ", ".join(result["passed"])
    how = "shared memory" if target == "CPU" else "HCCL"
    return Check(name, Result.OK, f"{passed} between {size} processes over {how}")


def _run(commands: Sequence[list[str]], environments: Sequence[dict[str, str]]) -> list[dict[str, Any] | str]:
    """Run workers side by side; what each printed as JSON, or why it did not."""
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    results: list[dict[str, Any] | str] = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            results.append(f"no result within {_SECONDS:.0f} s")
            continue
        results.append(_result(output, errors, process.returncode))
    return results


def _result(output: str, errors: str, code: int) -> dict[str, Any] | str:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer.get("failure") or answer
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it printed nothing")
    return f"ended with {'signal' if code < 0 else 'exit code'} {abs(code)}: {last}"


def _hccl(devices: int) -> list[dict[str, Any] | str]:
    msrun = shutil.which("msrun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if msrun is None:
        return ["msrun is not on PATH"]
    with tempfile.TemporaryDirectory(prefix="ms_longctx_doctor_") as folder:
        command = [
            msrun, f"--worker_num={devices}", f"--local_worker_num={devices}", "--join=True", f"--log_dir={folder}",
            "--cluster_time_out=60", str(Path(__file__).with_name("worker.py")), "collectives", "Ascend",
        ]  # fmt: skip
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        try:
            subprocess.run(
                command, capture_output=True, timeout=2 * _SECONDS, env={**os.environ, "PATH": path}, check=False
            )
        except subprocess.TimeoutExpired:
            return [f"no result within {2 * _SECONDS:.0f} s"]
        logs = [Path(folder) / f"worker_{rank}.log" for rank in range(devices)]
        return [_result(log.read_text(errors="replace"), log.read_text(errors="replace"), 1) for log in logs]
