# SPDX-License-Identifier: Apache-2.0
"""The Python 3.7 environment of MindSpore Lite 2.0.0 and MindSpore Serving 2.0.2, made once in the user's cache.

Package indexes have no newer release of either, and these need Python 3.7.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ms_longctx.assets import cache_dir
from ms_longctx.errors import MsLongctxError

LITE, SERVING = "2.0.0", "2.0.2"
_REQUIREMENTS = (
    f"mindspore-lite=={LITE}",
    f"mindspore-serving=={SERVING}",
    "grpcio==1.47.0",
    "protobuf==3.20.3",
    "numpy==1.21.6",
    "packaging==21.3",
)
_COMPLETE = "complete"


def lite_python() -> Path:
    """The interpreter that imports ``mindspore_lite`` and ``mindspore_serving``; the first call installs them (600 MB).

    Raises:
        MsLongctxError: there is no Python 3.7, or pip cannot install.
    """
    home = cache_dir() / f"lite-{LITE}-serving-{SERVING}-py37"
    python = home / "bin" / "python"
    home.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{home}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two exports at once: one installs, the other waits
        if not (home / _COMPLETE).is_file():
            _install(find_python37(), home)
    return python


def find_python37() -> Path:
    """A Python 3.7 that runs: ``python3.7`` on the PATH, or one of pyenv's.

    Raises:
        MsLongctxError: there is none.
    """
    for candidate in _candidates():
        version = _output([str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        if version == "3.7":
            return candidate
    raise MsLongctxError(
        f"MindSpore Lite {LITE} and Serving {SERVING} need Python 3.7, and none was found: neither python3.7 on the "
        "PATH nor one of pyenv's; install it (pyenv install 3.7), or export mindir or onnx, which need no other Python"
    )


def _candidates() -> Iterator[Path]:
    if found := shutil.which("python3.7"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob("versions/3.7*/bin/python"))


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def _install(base: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    python = home / "bin" / "python"
    steps = (
        [str(base), "-m", "venv", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *_REQUIREMENTS],
    )
    for command in steps:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise MsLongctxError(f"cannot install {_REQUIREMENTS[0]} and {_REQUIREMENTS[1]} into {home}: {reason}")
    (home / _COMPLETE).touch()
