# SPDX-License-Identifier: Apache-2.0
"""Build the stand-in: a directory that looks to MindSpore like an installed CANN and computes nothing.

Every function that :mod:`.symbols` finds becomes one of four bodies of a few machine instructions; those whose
answer matters are written in ``standin.cc``. All of them live in ``lib64/libascendcl.so``, because MindSpore finds
the root of CANN through the file that holds ``aclrtMalloc``; the other libraries are empty and link to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ms_longctx.parallel.virtual_cluster.symbols import read_needs
from ms_longctx.parallel.virtual_cluster.tools import run

SOURCE = Path(__file__).with_name("standin.cc")
SOC = "Ascend910B2"
DEVICE_GIB = 64
CANN_VERSION = "9.1.0"

_MAIN_LIBRARY = "libascendcl.so"
_VERSIONED = ("compiler", "opp", "runtime", "driver")

# Results of C++ functions that are objects: the caller passes where to put them, before the other arguments.
_RETURNS_OBJECT = re.compile(
    r"::(GetShape|GetOriginShape|GetDims|Get(In|Out)ControlNodes|Get(In|Out)DataNodesAndPortIndexs|GetDirectNode"
    r"|GetTensorDesc|GetOutputDesc|CreateOperator|GetCompiledGraphSummary)\("
)
_RETURNS_THIS = re.compile(r"Register::\w+Register\(|ge::Operator::(Set|Add|Update)|ge::Graph::Set")
_CONSTRUCTOR = re.compile(r"_ZN.*C[12]E")

# x86-64, System V calling convention: the first argument is in rdi, the result in rax. The objects of CANN that
# MindSpore passes around are as large as a std::shared_ptr, 16 bytes; zeros make an empty one.
_BODIES = {
    "zero": "xor %eax, %eax; ret",
    "this": "mov %rdi, %rax; ret",
    "constructor": "xor %eax, %eax; mov %rax, (%rdi); mov %rax, 8(%rdi); ret",
    "object": "xor %eax, %eax; mov %rax, (%rdi); mov %rax, 8(%rdi); mov %rdi, %rax; ret",
}


def build(mindspore: Path, root: Path) -> None:
    """Write the stand-in for the installed ``mindspore`` into the empty directory ``root``.

    Raises:
        VirtualClusterError: MindSpore has no Ascend plugin, or a tool fails.
    """
    needs = read_needs(mindspore)
    libraries = root / "lib64"
    (libraries / "driver").mkdir(parents=True)
    written = root / "standin.o"
    definitions = {"MSLC_SOC": f'"{SOC}"', "MSLC_DEVICE_GIB": str(DEVICE_GIB), "MSLC_CANN_VERSION": f'"{CANN_VERSION}"'}
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    run(["g++", "-O1", "-fPIC", "-std=c++17", "-Wall", *options, "-c", str(SOURCE), "-o", str(written)])
    by_hand = {line.split()[-1] for line in run(["nm", "--defined-only", str(written)]).splitlines()}
    generated = root / "generated.o"
    assembly = _assembly(needs.functions - by_hand)
    run(["gcc", "-x", "assembler", "-c", "-", "-o", str(generated)], assembly)
    main = libraries / _MAIN_LIBRARY
    objects = [str(written), str(generated)]
    run(["g++", "-shared", f"-Wl,-soname,{_MAIN_LIBRARY}", *objects, "-o", str(main)])
    for name in sorted(needs.libraries - {_MAIN_LIBRARY}):
        _link_empty(libraries, name)
    (libraries / "driver/libascend_hal.so").symlink_to("../libascend_hal.so")
    written.unlink()
    generated.unlink()
    _write_versions(root)


def _assembly(functions: Iterable[str]) -> str:
    """Source of the generated functions; those with the same body share it."""
    names = sorted(functions)
    readable = run(["c++filt"], "\n".join(names)).splitlines()
    by_body: dict[str, list[str]] = {body: [] for body in _BODIES}
    for name, signature in zip(names, readable, strict=True):
        by_body[_body(name, signature)].append(name)
    lines = [".text"]
    for body, members in by_body.items():
        lines += [f".globl {name}\n.type {name}, @function\n{name}:" for name in members]
        lines.append(_BODIES[body])
    return "\n".join([*lines, '.section .note.GNU-stack, "", @progbits', ""])


def _body(name: str, signature: str) -> str:
    if _RETURNS_THIS.search(signature):
        return "this"
    if _CONSTRUCTOR.match(name):
        return "constructor"
    return "object" if _RETURNS_OBJECT.search(signature) else "zero"


def _link_empty(folder: Path, name: str) -> None:
    main = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
    run(["gcc", "-shared", f"-Wl,-soname,{name}", *main, "-o", str(folder / name)])


def _write_versions(root: Path) -> None:
    for part in _VERSIONED:
        (root / part).mkdir(exist_ok=True)
        (root / part / "version.info").write_text(f"Version={CANN_VERSION}\nversion_dir={CANN_VERSION}\n")
    # mindspore.communication asks CANN's Python package for its version.
    package = root / "python/hccl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sys_version.py").write_text(f'__sys_version__ = "{CANN_VERSION}.0"\n')
