# SPDX-License-Identifier: Apache-2.0
"""The output directory of a run: who may write there, what is started over and what is resumed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ms_longctx.errors import MsLongctxError
from ms_longctx.train.checkpoint import MANIFEST, CheckpointStore, verify
from ms_longctx.train.metrics_log import EVENTS_DIRECTORY, METRICS_FILE
from ms_longctx.train.monitor import LOSS_CURVE

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
# Values of --resume that mean the newest complete checkpoint of the output directory.
LATEST = ("latest", "auto")
_OWN = (CHECKPOINTS, CONFIG_FILE, METRICS_FILE, EVENTS_DIRECTORY, LOSS_CURVE)

logger = logging.getLogger(__name__)


class RunDirectory:
    """Output directory, locked against a second run.

    Args:
        path: created when it does not exist.
        keep: checkpoints to keep.
        resume: ``None`` starts a new run. ``latest`` or ``auto``: the newest complete checkpoint here, or a
            new run when there is none yet. Else the directory of a checkpoint, or of another run.
        overwrite: an earlier run here (or what it has beyond the resumed checkpoint) may be deleted.

    Attributes:
        checkpoint: verified directory to resume from; ``None`` for a new run.
        store: the checkpoints of this run.

    Raises:
        MsLongctxError: another run is here or is writing here, or the checkpoint is missing or damaged.
    """

    def __init__(self, path: Path, keep: int, resume: str | None = None, overwrite: bool = False):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise MsLongctxError(f"train.output_dir: {path} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise MsLongctxError(
                f"train.output_dir: another process is training in {path}; wait for it, or take another directory"
            ) from error
        self.store = CheckpointStore(path / CHECKPOINTS, keep)
        try:
            self.checkpoint = self._find(resume, overwrite)
        except MsLongctxError:
            self.close()
            raise

    def save(self, step: int, write: Callable[[Path], None], estimated_bytes: int) -> Path:
        """See :meth:`CheckpointStore.save`."""
        return self.store.save(step, write, estimated_bytes)

    def close(self) -> None:
        """Let another run use the directory."""
        os.close(self._lock)

    def _find(self, resume: str | None, overwrite: bool) -> Path | None:
        if resume is None:
            self._start_over(overwrite, "add --resume to go on with it, --overwrite to delete it")
            return None
        if resume in LATEST:
            found = self.store.newest()
            if found is None:
                logger.warning("%s has no checkpoint yet: starting from the first step", self.path)
                self._start_over(True, "")
            return found
        found = _checkpoint_at(Path(resume))
        if found.parent.resolve() == self.store.directory.resolve():
            self._drop_later(found, overwrite)
        else:
            self._start_over(overwrite, "take another directory, or --overwrite to delete it")
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


class FollowedDirectory:
    """The output directory as those workers see it that leave writing to the main one.

    Args:
        path: of the directory.
        checkpoint: what the main worker resumes from.
    """

    def __init__(self, path: Path, checkpoint: Path | None) -> None:
        self.path = path
        self.checkpoint = checkpoint
        self.store = CheckpointStore(path / CHECKPOINTS)

    def save(self, step: int, write: Callable[[Path], None], estimated_bytes: int) -> Path:
        """Where the main worker saves this step."""
        return self.store.path(step)

    def close(self) -> None:
        """Nothing is held."""


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means, verified."""
    if not path.is_dir():
        raise MsLongctxError(f"train.resume: {path} does not exist; expected 'latest' or the directory of a checkpoint")
    if not (path / MANIFEST).is_file() and (path / CHECKPOINTS).is_dir():
        found = CheckpointStore(path / CHECKPOINTS).newest()
        if found is not None:
            return found
    verify(path)
    return path
