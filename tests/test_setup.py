# SPDX-License-Identifier: Apache-2.0
"""Installing the package: with a compiler, without one, editable, and from an sdist."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest

from ms_longctx import __version__

REPOSITORY = Path(__file__).resolve().parents[1]
LIBRARY = "ms_longctx/kernels/libms_longctx_kernels.so"
# One small source stands for all of them: what is tested is the way from setup.py into the installed package.
KERNEL_SOURCES = ("dispatch.cc", "simd.h", "aot.h")

pytestmark = pytest.mark.slow

REPORT = """
import ms_longctx, ms_longctx.kernels as kernels
from ms_longctx.config import find_config, load_config
print(ms_longctx.__file__)
print(find_config("llama-7b-32k"))
print(load_config("llama-7b-32k").model.max_position_embeddings)
print(kernels.instruction_set() if kernels.available() else kernels.reason())
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what git tracks for the package, with few kernel sources and nothing built."""
    root = tmp_path / "source"
    shutil.copytree(REPOSITORY / "yaml_configs", root / "yaml_configs")
    ignore = shutil.ignore_patterns("*.so", "build", "csrc", "__pycache__")
    shutil.copytree(REPOSITORY / "ms_longctx", root / "ms_longctx", ignore=ignore)
    kernels = root / "ms_longctx" / "kernels"
    (kernels / "csrc").mkdir()
    for name in KERNEL_SOURCES:
        shutil.copy(REPOSITORY / "ms_longctx" / "kernels" / "csrc" / name, kernels / "csrc" / name)
    for name in ("setup.py", "LICENSE"):
        shutil.copy(REPOSITORY / name, root / name)
    return root


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """A fresh virtual environment that sees this one's packages, but not this package."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    # After the environment's own packages, and without the .pth of an editable installation of this package.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    yield folder


def pip(folder: Path, *arguments: str, **variables: str) -> None:
    command = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        *arguments,
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
    ]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    assert result.returncode == 0, result.stderr


def report(folder: Path, cwd: Path) -> list[str]:
    """Where package and preset were found, a value of the preset, and the state of the kernels."""
    program = subprocess.run(
        [folder / "bin/ms-longctx", "--version"], capture_output=True, text=True, cwd=cwd, check=True
    )
    assert program.stdout == f"ms-longctx {__version__}\n"
    command = [folder / "bin/python", "-c", REPORT]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True).stdout.splitlines()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


@needs_compiler
def test_wheel_holds_kernels_and_presets(source: Path, environment: Path, tmp_path: Path) -> None:
    pip(environment, "wheel", "--wheel-dir", str(tmp_path), str(source))
    wheel = next(tmp_path.glob("ms_longctx-*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    presets = {f"ms_longctx/presets/{path.name}" for path in (REPOSITORY / "yaml_configs").glob("*.yaml")}
    assert {LIBRARY, "ms_longctx/kernels/csrc/dispatch.cc", *presets} <= names
    assert not any("build/" in name or name.startswith("tests") for name in names)
    text = zipfile.ZipFile(wheel).read(f"ms_longctx-{__version__}.dist-info/METADATA").decode()
    metadata = message_from_string(text)
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    assert {"serve", "monitor", "dev"} <= set(metadata.get_all("Provides-Extra"))

    pip(environment, "install", str(wheel))
    package, preset, length, kernels = report(environment, tmp_path)
    assert package.startswith(str(environment)) and preset.startswith(str(environment))
    assert length == "32768"
    assert kernels in ("baseline", "avx2", "avx512")


def test_installs_without_a_compiler(source: Path, environment: Path, tmp_path: Path) -> None:
    pip(environment, "install", str(source), PATH=str(environment / "bin"), CXX="g++")
    package, _, length, kernels = report(environment, tmp_path)
    assert package.startswith(str(environment)) and length == "32768"
    assert "no C++ compiler: 'g++' is not on PATH" in kernels
    assert not list(environment.glob(f"lib/python*/site-packages/{LIBRARY}"))


def test_installs_when_a_kernel_does_not_compile(source: Path, environment: Path, tmp_path: Path) -> None:
    (source / "ms_longctx/kernels/csrc/broken.cc").write_text("this is no C++;")
    pip(environment, "install", str(source))
    assert "broken." in report(environment, tmp_path)[3]


@needs_compiler
def test_editable_installation(source: Path, environment: Path, tmp_path: Path) -> None:
    pip(environment, "install", "--editable", str(source))
    package, preset, length, kernels = report(environment, tmp_path)
    assert package == str(source / "ms_longctx/__init__.py")
    assert preset == str(source / "yaml_configs/llama-7b-32k.yaml")
    assert (source / LIBRARY).is_file() and kernels in ("baseline", "avx2", "avx512")


def test_sdist_builds_a_wheel(source: Path, environment: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path)
    unpacked = next(tmp_path.glob("ms_longctx-*/"))
    pip(environment, "install", str(unpacked), CXX="no-compiler")
    assert report(environment, tmp_path)[2] == "32768"
