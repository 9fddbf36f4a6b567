# SPDX-License-Identifier: Apache-2.0
"""The output directory of a run: who may write there, what is started over and what is resumed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError
from ms_longctx.train.checkpoint import MANIFEST, CheckpointStore, verify
from ms_longctx.train.disks import Disk
from ms_longctx.train.metrics_log import EVENTS_DIRECTORY, METRICS_FILE
from ms_longctx.train.monitor import LOSS_CURVE

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
# Values of --resume that mean the newest complete checkpoint of the output directory.
LATEST = ("latest", "auto")
_OWN = (CHECKPOINTS, CONFIG_FILE, METRICS_FILE, EVENTS_DIRECTORY, LOSS_CURVE)

Writer = Callable[[Path], None]

logger = logging.getLogger(__name__)


class RunDirectory:
    """Output directory, locked against a second run. All workers of a run open it together.

    Args:
        path: created when it does not exist.
        keep: checkpoints to keep.
        resume: ``None`` starts a new run. ``latest`` or ``auto``: the newest complete checkpoint here, or a
            new run when there is none yet. Else the directory of a checkpoint, or of another run.
        overwrite: an earlier run here (or what it has beyond the resumed checkpoint) may be deleted.
        disk: which workers see this directory. The first of them does what changes it.

    Attributes:
        checkpoint: verified directory to resume from, of the same step on all workers; ``None`` for a new run.
        store: the checkpoints of this run.

    Raises:
        MsLongctxError: another run is here or is writing here, or the checkpoint is missing or damaged.
    """

    def __init__(
        self, path: Path, keep: int, resume: str | None = None, overwrite: bool = False, disk: Disk | None = None
    ):
        self.path = path
        self.disk = disk or Disk()
        self.store = CheckpointStore(path / CHECKPOINTS, keep)
        self._lock: int | None = None
        try:
            self._together(self._take, "take the output directory")
            self.checkpoint = self._find(resume, overwrite)
        except MsLongctxError:
            self.close()
            raise

    def save(self, step: int, write_share: Writer, write_rest: Writer, estimated_bytes: int) -> Path:
        """Write a checkpoint together with the other workers, or leave everything as it was.

        Args:
            step: optimizer steps done. A step that has a checkpoint keeps it, and nothing is written.
            write_share: writes what is this worker's into the directory it is given.
            write_rest: writes, on the first worker of a disk, what belongs to all.
            estimated_bytes: about how much this worker will write.

        Raises:
            MsLongctxError: the disk of some worker is full; older checkpoints are untouched.
        """
        if min(self.disk.exchange(int(self.store.path(step).exists()))):
            return self.store.path(step)
        sizes = self.disk.exchange((estimated_bytes >> 20) + 1)
        total = sum(sizes[rank] for rank in self.disk.ranks) << 20
        self._together(lambda: self.store.begin(step, total), f"begin the checkpoint of step {step}")
        self._write_all(step, lambda: write_share(self.store.working(step)))
        self._write_all(step, lambda: self._finish(step, write_rest))
        return self.store.path(step)

    def close(self) -> None:
        """Let another run use the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _finish(self, step: int, write_rest: Writer) -> None:
        if self.disk.is_lead:
            write_rest(self.store.working(step))
            self.store.finish(step)

    def _write_all(self, step: int, action: Callable[[], None]) -> None:
        """Every worker does its part; when one fails, all take back what they wrote."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        if self.disk.workers.any(failure is not None):
            other = MsLongctxError(f"checkpoint of step {step}: another worker could not write its part")
            raise self.store.abandon(step, failure or other) from failure

    def _together(self, action: Callable[[], Any], what: str) -> None:
        """The first worker of each disk does something; when it fails on one, all stop."""
        failure: MsLongctxError | None = None
        if self.disk.is_lead:
            try:
                action()
            except MsLongctxError as error:
                failure = error
        self.disk.workers.together(failure, what)

    def _take(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise MsLongctxError(f"train.output_dir: {self.path} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MsLongctxError(
                f"train.output_dir: another process is training in {self.path}; wait for it, or take another directory"
            ) from error

    def _find(self, resume: str | None, overwrite: bool) -> Path | None:
        if resume is None:
            advice = "add --resume to go on with it, --overwrite to delete it"
            self._together(lambda: self._start_over(overwrite, advice), "begin a run here")
            return None
        if resume in LATEST:
            found = self.store.newest(self.disk)
            if found is None:
                if self.disk.workers.is_main:
                    logger.warning("%s has no checkpoint yet: starting from the first step", self.path)
                self._together(lambda: self._start_over(True, ""), "begin a run here")
            return found
        found = _checkpoint_at(Path(resume), self.disk)
        if found.parent.resolve() == self.store.directory.resolve():
            self._together(lambda: self._drop_later(found, overwrite), "go on from here")
        else:
            advice = "take another directory, or --overwrite to delete it"
            self._together(lambda: self._start_over(overwrite, advice), "begin a run here")
        return found

    def _start_over(self, overwrite: bool, advice: str) -> None:
        existing = [name for name in _OWN if (self.path / name).exists()]
        if existing and not overwrite:
            raise MsLongctxError(
                f"train.output_dir: {self.path} holds another run ({', '.join(existing)}); {advice}, or set "
                "another train.output_dir"
            )
        for name in existing:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()

    def _drop_later(self, found: Path, overwrite: bool) -> None:
        """Two histories in one directory would end in the wrong one being resumed later."""
        step = int(found.name.rpartition("-")[2])
        later = [s for s in self.store.steps() if s > step]
        if later and not overwrite:
            raise MsLongctxError(
                f"train.output_dir: {self.path} has checkpoints after {found.name} (the last of step "
                f"{later[-1]}); add --overwrite to delete them, or set another train.output_dir"
            )
        self.store.remove_after(step)


def _checkpoint_at(path: Path, disk: Disk) -> Path:
    """The checkpoint that a path means, verified by all workers."""
    is_run = path.is_dir() and not (path / MANIFEST).is_file() and (path / CHECKPOINTS).is_dir()
    if min(disk.exchange(int(is_run))):
        found = CheckpointStore(path / CHECKPOINTS).newest(disk)
        if found is not None:
            return found
    failure: MsLongctxError | None = None
    try:
        if not path.is_dir():
            raise MsLongctxError(
                f"train.resume: {path} does not exist; expected 'latest' or the directory of a checkpoint"
            )
        verify(path, disk.index, disk.count)
    except MsLongctxError as error:
        failure = error
    disk.workers.together(failure, f"use the checkpoint {path}")
    return path
