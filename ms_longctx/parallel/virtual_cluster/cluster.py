# SPDX-License-Identifier: Apache-2.0
"""Gives a process what it needs to compile for Ascend devices that are not there.

MindSpore can simulate one rank of a cluster (``MS_SIMULATION_LEVEL``), but its Ascend plugin loads only where CANN
is installed. Where it is, it is used as it is. Elsewhere a stand-in is built once from the installed wheel, tried
with two programs (:mod:`.canary`), and kept in the user's cache directory under the hash of the wheel.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from ms_longctx.assets import cache_dir
from ms_longctx.parallel.virtual_cluster import canary
from ms_longctx.parallel.virtual_cluster.build import DEVICE_GIB, SOC, build
from ms_longctx.parallel.virtual_cluster.symbols import plugin_libraries
from ms_longctx.parallel.virtual_cluster.tools import VirtualClusterError, missing_reason

# MindSpore accepts a root of CANN only if its path has one of these words in it.
_ROOT = "cann/latest"
_VERIFIED = "verified.json"
_BUILDING = ".building-"

# A launcher's variables would make a simulated rank look for its peers; the rest would change what is compiled.
_FOREIGN = ("MS_", "OMPI_", "PMIX_", "RANK", "DEVICE_ID", "HCCL_", "GLOG_", "ASCEND_RT_VISIBLE_DEVICES")
_OWN = "MS_LONGCTX_"


@dataclass(frozen=True)
class Simulator:
    """CANN's libraries for MindSpore's simulation of Ascend devices.

    Args:
        root: root of the stand-in; ``None`` where CANN is installed.
        build_seconds: how long building and checking took; 0 if it was there already.
    """

    root: Path | None
    build_seconds: float = 0.0

    @property
    def description(self) -> str:
        """One line for users: what takes the place of the devices."""
        if self.root is None:
            return "MindSpore's simulation with the installed CANN"
        return f"MindSpore's simulation with a stand-in for CANN ({SOC}, {DEVICE_GIB} GiB)"

    @property
    def device_bytes(self) -> int | None:
        """Memory of a simulated device; ``None`` where the installed CANN decides."""
        return None if self.root is None else DEVICE_GIB << 30

    def environment(self, rank: int, worker_num: int, level: int = 1) -> dict[str, str]:
        """Variables of a process that is rank ``rank`` of ``worker_num`` simulated devices.

        Args:
            level: 0 compiles; 1 also runs the program without its kernels and simulates the allocator.
        """
        names = [name for name in os.environ if name.startswith(_OWN) or not name.startswith(_FOREIGN)]
        kept = {name: os.environ[name] for name in names}
        kept |= {"RANK_ID": str(rank), "RANK_SIZE": str(worker_num), "MS_SIMULATION_LEVEL": str(level)}
        if self.root is not None:
            kept |= {"ASCEND_HOME_PATH": str(self.root), "ASCEND_OPP_PATH": str(self.root / "opp")}
            for name, folder in (("LD_LIBRARY_PATH", "lib64"), ("PYTHONPATH", "python")):
                kept[name] = os.pathsep.join(filter(None, (str(self.root / folder), kept.get(name))))
        return kept


def prepare() -> Simulator:
    """The simulator of this machine; builds and checks the stand-in when it is needed and not there yet.

    Raises:
        VirtualClusterError: no compiler, no Ascend plugin in the installed MindSpore, or the checks fail. Nothing
            is left behind then.
    """
    if has_cann():
        return Simulator(root=None)
    mindspore = mindspore_directory()
    home = standin_directory(mindspore)
    if (home / _VERIFIED).is_file():
        return Simulator(home / _ROOT)
    if reason := missing_reason():
        raise VirtualClusterError(f"no CANN on this machine, and its stand-in cannot be built: {reason}")
    with _lock(home.parent):
        if (home / _VERIFIED).is_file():  # another process was faster
            return Simulator(home / _ROOT)
        start = time.perf_counter()
        _build_and_check(mindspore, home)
        return Simulator(home / _ROOT, time.perf_counter() - start)


def remove() -> list[Path]:
    """Delete every stand-in of this user, finished or not, and return their directories."""
    parent = _parent()
    if not parent.is_dir():
        return []
    with _lock(parent):
        found = sorted(path for path in parent.iterdir() if path.is_dir())
        for path in found:
            shutil.rmtree(path)
    return found


def has_cann() -> bool:
    """Whether the dynamic linker of this process finds a CANN (its ``set_env.sh`` sets the path)."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    found = [folder for folder in folders if (folder / "libascendcl.so").exists()]
    real = [folder for folder in found if not (folder / "../../.." / _VERIFIED).exists()]
    return bool(real) or find_library("ascendcl") is not None


def mindspore_directory() -> Path:
    """Directory of the installed MindSpore, which is not imported.

    Raises:
        VirtualClusterError: there is none.
    """
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        raise VirtualClusterError("MindSpore is not installed; install it with: pip install 'mindspore>=2.9,<2.11'")
    return Path(spec.origin).resolve().parent


def standin_directory(mindspore: Path) -> Path:
    """Where the stand-in for this MindSpore, built by these sources, belongs."""
    digest = hashlib.sha256(_wheel_contents(mindspore))
    for source in sorted(Path(__file__).parent.glob("*.[cp][cy]")):
        digest.update(source.read_bytes())
    return _parent() / digest.hexdigest()[:16]


def _parent() -> Path:
    return cache_dir().expanduser().resolve() / "virtual_cluster"


def _wheel_contents(mindspore: Path) -> bytes:
    """What identifies the wheel: its record, which has the hash of every file, or else the plugin itself."""
    try:
        distribution = importlib.metadata.distribution("mindspore")
        record = distribution.read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        record = None
    if record is not None:
        return record.encode()
    return b"".join(hashlib.sha256(path.read_bytes()).digest() for path in plugin_libraries(mindspore))


def _build_and_check(mindspore: Path, home: Path) -> None:
    for leftover in home.parent.glob(f"{_BUILDING}*"):  # of a build that was killed: the lock is ours
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=home.parent))
    try:
        root = partial / _ROOT
        root.mkdir(parents=True)
        build(mindspore, root)
        canary.check(Simulator(root).environment(canary.RANK, canary.WORKERS))
        facts = {"mindspore": str(mindspore), "built": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        (partial / _VERIFIED).write_text(json.dumps(facts))
        partial.rename(home)
    except VirtualClusterError as error:
        raise VirtualClusterError(
            f"the stand-in for CANN does not work with MindSpore {_version()}: {error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _version() -> str:
    try:
        return importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time build or remove."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
