# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: written beside and renamed, verified by digests, one complete one always readable.

Layout of ``<output_dir>/checkpoints``::

    step-00000040/            one checkpoint; the name only ever appears when everything inside is complete
        manifest.json         every other file with its size and SHA-256
        ...                   whatever the trainer wrote (weights, optimizer, state)
    latest                    text file with the name of the newest checkpoint
    .writing-step-00000044/   a checkpoint that is being written, or was when the process died

Killing the process at any moment leaves either the old or the new set of checkpoints, never a mixture.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError

MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Free space asked for above the estimate: room for logs and the file system's own records.
_SPARE_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class DamagedCheckpointError(MsLongctxError):
    """A file of a checkpoint is missing, truncated or changed."""


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
        final = self.path(step)
        if final.exists():
            return final
        work = self.directory / f".writing-{final.name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._check_space(estimated_bytes)
            work.mkdir()
            write(work)
            _seal(work)
        except Exception as error:
            shutil.rmtree(work, ignore_errors=True)
            if _is_out_of_space(error):
                raise MsLongctxError(
                    f"checkpoint of step {step}: no space left in {self.directory} ({error}); "
                    "older checkpoints are untouched. Free some space and go on with --resume"
                ) from error
            raise
        os.replace(work, final)
        sync_directory(self.directory)
        write_text(self.directory / LATEST, final.name + "\n")
        for old in self.steps()[: -self.keep]:
            _remove(self.path(old))
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, ``None`` when there is no checkpoint at all.

        Damaged newer ones are reported and renamed to ``<name>.damaged``, so that the resumed run can write
        those steps again.

        Raises:
            DamagedCheckpointError: there are checkpoints, but none is whole.
        """
        damaged: list[Path] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                verify(path)
            except DamagedCheckpointError as error:
                logger.warning("%s; falling back to the checkpoint before it", error)
                damaged.append(path)
                continue
            for broken in damaged:
                aside = broken.with_name(f"{broken.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(broken, aside)
            return path
        if damaged:
            raise DamagedCheckpointError(
                f"{self.directory}: none of the {len(damaged)} checkpoints is whole; start again with --overwrite"
            )
        return None

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


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

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
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file}: missing from the checkpoint")
        if file.stat().st_size != expected["size"]:
            raise DamagedCheckpointError(
                f"{file}: truncated or changed, {file.stat().st_size} bytes instead of {expected['size']}"
            )
        if _sha256(file) != expected["sha256"]:
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
    """Flush every file to the disk and write the manifest last."""
    files = {}
    for file in sorted(p for p in work.rglob("*") if p.is_file()):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        files[file.relative_to(work).as_posix()] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    write_json(work / MANIFEST, {"files": files})


def _remove(path: Path) -> None:
    """Delete a checkpoint so that a kill halfway leaves no half checkpoint under a valid name."""
    doomed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_out_of_space(error: BaseException) -> bool:
    """Also true for libraries (safetensors) that report the operating system's error only in words."""
    if isinstance(error, OSError) and error.errno in _OUT_OF_SPACE:
        return True
    return any(os.strerror(code) in str(error) for code in _OUT_OF_SPACE)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
