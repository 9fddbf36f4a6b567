# SPDX-License-Identifier: Apache-2.0
"""The other programs that read and write quantized directories, in an environment of their own in the user's cache.

AutoAWQ 0.2.9 (the last release), transformers with compressed-tensors, and the configuration classes of vLLM live in
one environment. AutoAWQ demands triton, which it uses on GPUs only, and vLLM all it serves with: both come without.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.assets import cache_dir
from ms_longctx.models.llama import LlamaForCausalLM

VLLM = "vllm==0.11.0"
REQUIREMENTS = (
    "torch==2.13.0",
    "transformers==4.57.1",
    "compressed-tensors==0.17.1",  # from 0.18 to 0.20.1 it does not load packed zero points, not even its own
    "accelerate==1.15.0",
    "datasets==3.6.0",
    # What importing vLLM's configuration classes takes.
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "pillow",
    "psutil",
    "pyzmq",
    "setproctitle",
)
BARE = ("autoawq==0.2.9",)
HERE = Path(__file__).parent
_COMPLETE = "complete"


def python() -> Path:
    """The interpreter of the environment; the first call makes it (a minute, 1.3 GB). Skips the test if it cannot."""
    pins = hashlib.sha256("\n".join(REQUIREMENTS + BARE).encode()).hexdigest()
    home = cache_dir() / f"quantized-readers-{pins[:8]}"
    interpreter = home / "bin" / "python"
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = ([sys.executable, "-m", "venv", str(home)], [*pip, *REQUIREMENTS], [*pip, "--no-deps", *BARE])
    home.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{home}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / _COMPLETE).is_file():
            shutil.rmtree(home, ignore_errors=True)
            for step in steps:
                _run_or_skip(step)
            (home / _COMPLETE).touch()
    return interpreter


def vllm_sources() -> Path:
    """Directory with the Python files of vLLM; the first call downloads its wheel (440 MB)."""
    home = cache_dir() / VLLM
    if not home.is_dir():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            _run_or_skip([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, VLLM])
            (wheel,) = Path(scratch).glob("*.whl")
            partial = Path(scratch) / "sources"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial, [name for name in archive.namelist() if name.endswith(".py")])
            partial.rename(home)
    return home


def _run_or_skip(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        pytest.skip(f"the readers cannot be installed: {' '.join(command[:5])} ...: {reason}")


def run(script: str, jobs: list[dict[str, Any]], scratch: Path, python_path: Path | None = None) -> list[Any]:
    """What ``script`` beside this file makes of ``jobs`` in the environment: JSON in, JSON out."""
    source, target = scratch / f"{script}.in.json", scratch / f"{script}.out.json"
    source.write_text(json.dumps(jobs))
    environment = {**os.environ, "PYTHONPATH": str(python_path or ""), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python()), str(HERE / script), str(source), str(target)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    answers: list[Any] = json.loads(target.read_text())
    return answers


def differences(model: LlamaForCausalLM, recorded: dict[str, np.ndarray]) -> np.ndarray:
    """Of the outputs of our quantized matrices from the recorded ones, given the recorded inputs: one a matrix and
    token, relative to the largest output of that token."""
    cells = {name: cell for name, cell in model.cells_and_names()}
    result = []
    for name in sorted(key[:-2] for key in recorded if key.endswith(".x")):
        x, expected = recorded[f"{name}.x"], recorded[f"{name}.y"]
        y = cells[name](Tensor(x)).asnumpy()
        result.append(np.abs(y - expected).max(-1) / np.abs(expected).max(-1))
    return np.array(result)
