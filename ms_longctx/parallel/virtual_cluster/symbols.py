# SPDX-License-Identifier: Apache-2.0
"""What MindSpore's Ascend plugin expects of CANN, read from the plugin's own libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ms_longctx.parallel.virtual_cluster.tools import VirtualClusterError, run

_X86_64 = b"\x3e\x00"  # e_machine of an ELF file, bytes 18 and 19

# Optional plugins that need more than CANN and are not loaded by a simulation.
_LEFT_OUT = re.compile(r"libdvpp_utils|_atb_")

_SYSTEM_LIBRARIES = (
    "libc.so.6", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libgomp.so.1", "ld-linux-x86-64.so.2", "libz.so.1",
)  # fmt: skip

# Libraries that the plugin opens by name (dlopen) instead of linking to them.
_OPENED_LIBRARIES = ("acl_op_compiler", "acl_tdt_channel", "acl_tdt_queue", "msprofiler", "opapi", "ascend_hal")

# Functions that the plugin looks up by name (dlsym): their names are among its strings.
_LOOKED_UP = re.compile(
    r"acl(rt|mdl|op|prof|tdt|sys|dump|Get|Set|Create|Destroy|Init|Finalize|Update|Data|Gen)[A-Za-z0-9]*"
    r"|(Hccl|Hcom|Msprof)[A-Z]\w*|rt[A-Z]\w+|hal[A-Z]\w+|mspti\w+"
)
# Fused operators: each has a second function that says how much workspace it wants.
_OPERATOR = re.compile(r"aclnn[A-Z][A-Za-z0-9]*")
_WORKSPACE = "GetWorkspaceSize"


@dataclass(frozen=True)
class Needs:
    """Names of ``functions`` and of shared ``libraries`` that the plugin wants and nobody else provides."""

    functions: frozenset[str]
    libraries: frozenset[str]


def read_needs(mindspore: Path) -> Needs:
    """Read what the plugin of an installed MindSpore needs of CANN.

    Args:
        mindspore: the package's directory.

    Raises:
        VirtualClusterError: this MindSpore has no Ascend plugin for this machine.
    """
    plugin = plugin_libraries(mindspore)
    providers = [*mindspore.glob("lib/*.so*"), *mindspore.glob("*.so"), *plugin]
    providers += [*mindspore.glob("lib/plugin/libmindspore_ops_cpu.so"), *_system_libraries()]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        provided = frozenset[str]().union(*pool.map(_defined, providers))
        undefined = frozenset[str]().union(*pool.map(_undefined, plugin))
        texts = frozenset[str]().union(*pool.map(_strings, plugin))
        linked = frozenset[str]().union(*pool.map(_linked, plugin))
    wanted = {name for name in undefined - provided if not re.match("_?Py", name)}
    named = {text for text in texts if _LOOKED_UP.fullmatch(text) and not text.startswith("aclnn")}
    operators = {text for text in texts if _OPERATOR.fullmatch(text)} | _operators_in_headers(mindspore)
    operators = {name.removesuffix(_WORKSPACE) for name in operators}
    functions = wanted | named | operators | {name + _WORKSPACE for name in operators}
    return Needs(frozenset(functions), frozenset(_missing_libraries(mindspore, linked)))


def plugin_libraries(mindspore: Path) -> list[Path]:
    """Libraries of the Ascend plugin that a simulation loads, sorted.

    Raises:
        VirtualClusterError: there are none.
    """
    plugin = mindspore / "lib/plugin"
    found = [*plugin.glob("libmindspore_ascend.so*"), *plugin.glob("libmindspore_ops_ascend.so")]
    found += [*plugin.glob("ascend/*.so"), *plugin.glob("ascend/ms_kernels*/**/*.so")]
    ours = sorted(path for path in found if _is_x86(path) and not _LEFT_OUT.search(path.name))
    if not any(path.name.startswith("libmindspore_ascend.so") for path in ours):
        raise VirtualClusterError(f"{mindspore} has no Ascend plugin for x86-64 (lib/plugin/libmindspore_ascend.so)")
    return ours


def _is_x86(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20)[18:] == _X86_64


def _system_libraries() -> list[Path]:
    folders = (Path("/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/lib64"))
    found = []
    for name in _SYSTEM_LIBRARIES:
        places = [Path(run(["gcc", f"-print-file-name={name}"]).strip()), *(folder / name for folder in folders)]
        # gcc answers with the bare name when it does not know the library; GNU ld scripts are text.
        found += [path for path in places if path.is_absolute() and path.is_file() and _is_x86(path)]
    return found


def _names(path: Path, kind: str, types: str) -> frozenset[str]:
    lines = (line.split() for line in run(["nm", "-D", kind, str(path)]).splitlines())
    return frozenset(words[-1].split("@")[0] for words in lines if len(words) >= 2 and words[-2] in types)


def _defined(path: Path) -> frozenset[str]:
    return _names(path, "--defined-only", "ABDGRSTVWuiw")


def _undefined(path: Path) -> frozenset[str]:
    return _names(path, "--undefined-only", "U")


def _strings(path: Path) -> frozenset[str]:
    lines = run(["strings", "-n", "4", str(path)]).splitlines()
    return frozenset(line for line in lines if line.isidentifier())


def _linked(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", str(path)])))


def _operators_in_headers(mindspore: Path) -> set[str]:
    headers = mindspore.glob("include/**/*.h")
    return {name for path in headers for name in _OPERATOR.findall(path.read_text(errors="ignore"))}


def _missing_libraries(mindspore: Path, linked: Iterable[str]) -> set[str]:
    own = {path.name for path in mindspore.glob("**/*.so*")}
    cache = run(["/sbin/ldconfig", "-p"]).splitlines()
    system = {line.split()[0] for line in cache if "=>" in line}
    missing = {name for name in linked if name not in own | system and not re.match("ld-linux|libpython", name)}
    return missing | {f"lib{name}.so" for name in _OPENED_LIBRARIES}
