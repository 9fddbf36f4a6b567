# SPDX-License-Identifier: Apache-2.0
"""Build the CPU kernels: every ``csrc/*.cc`` becomes part of ``libms_longctx_kernels.so``.

    python -m ms_longctx.kernels.build

To add a kernel, drop a ``.cc`` into ``csrc/``; nothing has to be registered. Each source is compiled once per
instruction set (on x86-64: baseline, AVX2 + FMA + F16C, AVX-512; elsewhere the baseline alone, whose vectors
are GCC's portable ones) and chooses the variant at run time. ``csrc/simd.h`` shows the few lines a source
needs. Threads: OpenMP. Objects are kept by the hash of all they depend on, so only what changed is compiled.

The compiler is ``$CXX`` or ``g++``. A failed build raises :class:`KernelBuildError` and leaves a note that
``ms_longctx.kernels.reason()`` shows; the package then works through MindSpore's operators.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels import SOURCE_DIR, source_hash

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY_NAME = "libms_longctx_kernels.so"
FAILURE_NOTE = "build/failure.txt"

# MindSpore's wheels use the old std::string ABI. FMA contraction is wanted, -ffast-math is not (infinities).
COMMON_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip
# In order of rising requirements, and linked in this order: where objects carry the same inline function the
# linker keeps the first, which must run on the lesser CPU.
X86_LEVELS: dict[str, tuple[str, ...]] = {
    "baseline": ("-DMLK_IS_BASELINE",),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
}
OTHER_LEVELS: dict[str, tuple[str, ...]] = {"baseline": ("-DMLK_IS_BASELINE",)}


class KernelBuildError(MsLongctxError):
    """The CPU kernels could not be compiled; the message carries the compiler's first complaints."""


def levels() -> dict[str, tuple[str, ...]]:
    """Instruction sets to compile for on this machine, with their compiler flags."""
    return X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_LEVELS


def compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        KernelBuildError: there is none.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise KernelBuildError(f"no C++ compiler: {name!r} is not on PATH; install g++ or set CXX")
    return path


def build(output_dir: Path = PACKAGE_DIR, source_dir: Path = SOURCE_DIR) -> Path:
    """Compile what changed and link the library.

    Args:
        output_dir: where the library goes (objects: its sub-folder ``build``).
        source_dir: folder of the ``.cc`` and ``.h`` files.

    Returns:
        Path of the library.

    Raises:
        KernelBuildError: no compiler, or it reports an error. An existing library is left as it was.
    """
    note = output_dir / FAILURE_NOTE
    object_dir = output_dir / "build"
    object_dir.mkdir(parents=True, exist_ok=True)
    with _lock(object_dir / "lock"):
        try:
            library = _build(output_dir, object_dir, source_dir)
        except KernelBuildError as error:
            note.write_text(f"{error}\n")
            raise
        note.unlink(missing_ok=True)
    return library


def _build(output_dir: Path, object_dir: Path, source_dir: Path) -> Path:
    cxx = compiler()
    headers = b"".join(path.read_bytes() for path in sorted(source_dir.glob("*.h")))
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False).stdout
    jobs: list[tuple[list[str], Path]] = []
    objects: list[Path] = []
    origin = f'-DMLK_SOURCES="{source_hash(source_dir)}"'
    for level, level_flags in levels().items():
        for source in sorted(source_dir.glob("*.cc")):
            flags = [*COMMON_FLAGS, *level_flags, f"-DMLK_ISA={level}"]
            if source.name == "dispatch.cc":
                flags.append(origin)
            parts = [version, headers, source.read_bytes(), " ".join(flags).encode()]
            key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
            target = object_dir / f"{source.stem}.{level}.{key}.o"
            objects.append(target)
            if not target.exists():
                jobs.append(([cxx, *flags, "-c", str(source)], target))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda job: _run(*job), jobs))
    library = output_dir / LIBRARY_NAME
    linked = object_dir / "linked"
    names = "\n".join(path.name for path in objects)
    if not library.exists() or not linked.exists() or linked.read_text() != names:
        _run([cxx, "-shared", "-fopenmp", *map(str, objects)], library)
        linked.write_text(names)
    for stale in set(object_dir.glob("*.o")) - set(objects):
        stale.unlink()
    return library


def _run(command: list[str], target: Path) -> None:
    """Run a compiler command that writes ``target``; the file appears only when it is complete."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    result = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        partial.unlink(missing_ok=True)
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise KernelBuildError(f"building {target.name} failed: " + "; ".join(lines[:5]))
    partial.replace(target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process build at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build in place and say what happened."""
    start = time.perf_counter()
    try:
        library = build()
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{library} ({', '.join(levels())}) in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
