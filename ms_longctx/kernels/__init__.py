# SPDX-License-Identifier: Apache-2.0
"""Optional C++ kernels for CPUs. Without them everything runs through MindSpore's operators, only slower.

``MS_LONGCTX_KERNELS=off`` switches them off; ``MS_LONGCTX_KERNELS=/path/to/library.so`` uses another build.
``MS_LONGCTX_ISA=baseline|avx2|avx512`` limits the instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path

_HERE = Path(__file__).resolve().parent
SOURCE_DIR = _HERE / "csrc"
_BUILD = "python -m ms_longctx.kernels.build"


def library_path() -> Path:
    """Path of the kernel library, whether it exists or not."""
    chosen = os.environ.get("MS_LONGCTX_KERNELS", "")
    return Path(chosen) if chosen not in ("", "off") else _HERE / "libms_longctx_kernels.so"


def available() -> bool:
    """Whether the kernels can be used in this process."""
    return reason() == ""


@functools.lru_cache(maxsize=1)
def reason() -> str:
    """Why the kernels cannot be used; empty when they can."""
    if os.environ.get("MS_LONGCTX_KERNELS") == "off":
        return "switched off by MS_LONGCTX_KERNELS=off"
    path = library_path()
    if not path.exists():
        note = _HERE / "build" / "failure.txt"
        why = note.read_text().strip() if note.exists() else "they were never built"
        return f"{path} does not exist: {why} (to build them: {_BUILD})"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    built_from = getattr(library, "ms_longctx_sources", None)
    if built_from is not None:
        built_from.restype = ctypes.c_char_p
    if built_from is None or built_from().decode() != source_hash(SOURCE_DIR):
        return f"{path} was built from other sources than these (to build it anew: {_BUILD})"
    return ""


def source_hash(folder: Path) -> str:
    """Identity of the C++ sources in ``folder``; a library carries that of the sources it was built from."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.h"), *folder.glob("*.cc")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def instruction_set() -> str:
    """Name of the variant that runs on this CPU: ``baseline``, ``avx2`` or ``avx512``.

    Raises:
        OSError: the library is not there (ask :func:`available` first).
    """
    function = ctypes.CDLL(str(library_path())).ms_longctx_isa
    function.restype = ctypes.c_char_p
    return function().decode()
