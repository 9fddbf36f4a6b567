# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: written beside and renamed, verified by digests, one complete one always readable.

Layout of ``<output_dir>/checkpoints``::

    step-00000040/            one checkpoint; the name only ever appears when everything inside is complete
        manifest.json         every other file with its size and SHA-256
        ...                   whatever the trainer wrote (weights, optimizer, state)
    latest                    text file with the name of the newest checkpoint
    .writing-step-00000044/   a checkpoint that is being written, or was when the process died

Killing the process at any moment leaves either the old or the new set of checkpoints, never a mixture.

Several workers may write one checkpoint together, and may see different disks; then each disk has such a directory with
what its workers wrote, and the newest step is the one that is whole on all of them (:class:`Peers`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ms_longctx.digest import sha256
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.sharded import known_digests

MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Free space asked for above the estimate: room for logs and the file system's own records.
_SPARE_BYTES = 64 << 20
# In place of a step: none at all, and later than all.
_NONE, _NO_BOUND = -1, 1 << 62

logger = logging.getLogger(__name__)


class DamagedCheckpointError(MsLongctxError):
    """A file of a checkpoint is missing, truncated or changed."""


class Peers(Protocol):
    """The workers of a run, seen from one of them; those on the same disk share the work of verifying."""

    @property
    def index(self) -> int:
        """Place of this worker among those that see the same disk; 0 changes what is there."""
        ...

    @property
    def count(self) -> int:
        """How many see the same disk."""
        ...

    def exchange(self, number: int) -> list[int]:
        """The numbers of all workers of the run, whatever disk they see; all call it together."""
        ...

    def first_text(self, text: str) -> str:
        """The text of the first worker of the run whose text is not empty, on all; all call it together."""
        ...


class Alone:
    """:class:`Peers` of a process without others."""

    index, count = 0, 1

    def exchange(self, number: int) -> list[int]:
        """The number itself."""
        return [number]

    def first_text(self, text: str) -> str:
        """The text itself."""
        return text


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: ``<output_dir>/checkpoints``; created by the first :meth:`save`.
        keep: how many of the newest checkpoints stay; older ones are removed after a successful save.
    """

    def __init__(self, directory: Path, keep: int = 3):
        self.directory = directory
        self.keep = keep

    def path(self, step: int) -> Path:
        """Directory of the checkpoint of ``step`` (whether it exists or not)."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending. Their contents are not verified."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in names if match)

    def save(self, step: int, write: Callable[[Path], None], estimated_bytes: int = 0) -> Path:
        """Write one checkpoint completely, or leave everything as it was.

        Args:
            step: optimizer steps done. A step that has a checkpoint keeps it, and nothing is written.
            write: fills the empty directory it is given; nested directories are allowed.
            estimated_bytes: about how much ``write`` will write; refused early when the disk cannot hold it.

        Returns:
            The directory of the checkpoint.

        Raises:
            MsLongctxError: the disk is full; older checkpoints are untouched.
        """
        if (final := self.path(step)).exists():
            return final
        work = self.begin(step, estimated_bytes)
        try:
            write(work)
            return self.finish(step)
        except Exception as error:
            raise self.abandon(step, error) from error

    def begin(self, step: int, estimated_bytes: int = 0) -> Path:
        """The empty directory that the checkpoint of ``step`` is written into, until :meth:`finish`.

        Raises:
            MsLongctxError: the disk is full.
        """
        work = self.working(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._check_space(estimated_bytes)
            work.mkdir()
        except OSError as error:
            raise self.abandon(step, error) from error
        return work

    def working(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is while it is being written."""
        return self.directory / f".writing-{self.path(step).name}"

    def finish(self, step: int) -> Path:
        """Seal what was written, give it its name, and remove checkpoints that are too many."""
        work, final = self.working(step), self.path(step)
        _seal(work)
        os.replace(work, final)
        sync_directory(self.directory)
        write_text(self.directory / LATEST, final.name + "\n")
        for old in self.steps()[: -self.keep]:
            _remove(self.path(old))
        return final

    def abandon(self, step: int, error: Exception) -> Exception:
        """Remove what was written, and say what to raise because of ``error``."""
        shutil.rmtree(self.working(step), ignore_errors=True)
        if not _is_out_of_space(error):
            return error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        known = any(reason.lower() == os.strerror(code).lower() for code in _OUT_OF_SPACE)
        return MsLongctxError(
            f"checkpoint of step {step}: no space left in {self.directory}{'' if known else f' ({reason})'}; "
            "older checkpoints are untouched. Free some space and go on with --resume"
        )

    def newest(self, peers: Peers | None = None, advice: str = "start again with --overwrite") -> Path | None:
        """The newest checkpoint that verifies on every worker, ``None`` when there is no checkpoint at all.

        Later ones that are damaged or missing somewhere are reported and renamed to ``<name>.damaged``, so that the
        resumed run can write those steps again.

        Args:
            peers: the workers of the run, which all call this together.
            advice: what to do when none is whole.

        Raises:
            DamagedCheckpointError: there are checkpoints, but none is whole everywhere.
        """
        peers = peers or Alone()
        listed = self.steps()
        bound = _NO_BOUND
        while True:
            own = [step for step in listed if step < bound]
            candidate = min(peers.exchange(own[-1] if own else _NONE))
            if candidate == _NONE:
                break
            damage = self._damage(candidate, peers) if candidate in own else ""
            if min(peers.exchange(int(candidate in own and not damage))):
                self._set_aside([step for step in listed if step > candidate], peers)
                return self.path(candidate)
            # Only one worker may have looked at the file; the user reads the log of the main one, which is a lead.
            damage = peers.first_text(damage)
            if damage and peers.index == 0:
                logger.warning("%s; falling back to the checkpoint before it", damage)
            bound = candidate
        most = max(peers.exchange(len(listed)))
        if most:
            where = "" if isinstance(peers, Alone) else " on every worker"
            raise DamagedCheckpointError(f"{self.directory}: none of the {most} checkpoints is whole{where}; {advice}")
        return None

    def _damage(self, step: int, peers: Peers) -> str:
        """What this worker's share of the verification finds; empty when it is whole."""
        try:
            verify(self.path(step), peers.index, peers.count)
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def _set_aside(self, steps: list[int], peers: Peers) -> None:
        for step in steps if peers.index == 0 else []:
            broken = self.path(step)
            aside = broken.with_name(f"{broken.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(broken, aside)
        peers.exchange(0)  # nobody goes on before it is done

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints later than ``step``, the newest first."""
        for later in reversed([s for s in self.steps() if s > step]):
            _remove(self.path(later))

    def _check_space(self, estimated_bytes: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < estimated_bytes + _SPARE_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"needs about {_megabytes(estimated_bytes + _SPARE_BYTES)}, has {_megabytes(free)}",
            )

    def _remove_leftovers(self) -> None:
        """What a killed process was writing or removing."""
        for leftover in self.directory.glob(".*-step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def verify(path: Path, index: int = 0, count: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        path: the checkpoint.
        index, count: read only every ``count``-th file, from ``index`` on; sizes are compared of all.

    Raises:
        DamagedCheckpointError: names the first file that is missing, truncated or changed.
    """
    manifest = path / MANIFEST
    if not path.is_dir():
        raise DamagedCheckpointError(f"{path}: no such checkpoint directory")
    if not manifest.is_file():
        raise DamagedCheckpointError(f"{manifest}: missing; {path.name} is not a complete checkpoint")
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{manifest}: damaged ({error!r})") from error
    for number, (name, expected) in enumerate(files.items()):
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file}: missing from the checkpoint")
        if file.stat().st_size != expected["size"]:
            raise DamagedCheckpointError(
                f"{file}: truncated or changed, {file.stat().st_size} bytes instead of {expected['size']}"
            )
        if number % count == index and sha256(file) != expected["sha256"]:
            raise DamagedCheckpointError(f"{file}: contents changed, the SHA-256 differs from {MANIFEST}")


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically: readers see the old or the new contents, even after a crash."""
    work = path.with_name(f".{path.name}.writing")
    with open(work, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """:func:`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(work: Path) -> None:
    """Flush every file to the disk and write the manifest last; of shards their writers know the digests."""
    files = {}
    known = known_digests(work)
    for file in sorted(p for p in work.rglob("*") if p.is_file()):
        name = file.relative_to(work).as_posix()
        if name in known:
            files[name] = known[name]
            continue
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        files[name] = {"size": file.stat().st_size, "sha256": sha256(file)}
    write_json(work / MANIFEST, {"files": files})


def _remove(path: Path) -> None:
    """Delete a checkpoint so that a kill halfway leaves no half checkpoint under a valid name."""
    doomed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _is_out_of_space(error: BaseException) -> bool:
    """Also true for libraries (safetensors) that report the operating system's error only in words."""
    if isinstance(error, OSError) and error.errno in _OUT_OF_SPACE:
        return True
    return any(os.strerror(code) in str(error) for code in _OUT_OF_SPACE)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
