# SPDX-License-Identifier: Apache-2.0
"""Which workers see the same disk: the nodes of a cluster may share one, or have one each."""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from ms_longctx.train.workers import ALONE, Workers

_MARK = ".seen-by-"


@dataclass(frozen=True)
class Disk:
    """The workers that see what this one sees; a :class:`~ms_longctx.train.checkpoint.Peers`.

    Args:
        workers: all of the run.
        ranks: those on this disk, ascending, this one among them.
    """

    workers: Workers = ALONE
    ranks: tuple[int, ...] = (0,)

    @property
    def index(self) -> int:
        """Place of this worker among them."""
        return self.ranks.index(self.workers.rank)

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def is_lead(self) -> bool:
        """Whether this worker creates and names the checkpoints on this disk."""
        return self.index == 0

    def exchange(self, number: int) -> list[int]:
        """See :meth:`Workers.exchange`."""
        return self.workers.exchange(number)

    def first_text(self, text: str) -> str:
        """See :meth:`Workers.first_text`."""
        return self.workers.first_text(text)


def find_disk(workers: Workers, directory: Path) -> Disk:
    """Find out who else sees ``directory``; all workers call it together.

    Each leaves a file there and looks for those of the others. The directory is created where it is missing; a worker
    that cannot write there is alone with its disk, and learns the reason when it opens the directory for itself.
    """
    if workers.count == 1:
        return Disk(workers, (0,))
    job = workers.share(uuid.uuid4().hex)
    mark = directory / f"{_MARK}{job}-{workers.rank}"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    workers.any(False)  # all have left theirs
    names = os.listdir(directory) if directory.is_dir() else []
    found = {int(name.rpartition("-")[2]) for name in names if name.startswith(f"{_MARK}{job}-")}
    workers.any(False)  # all have looked
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)
    return Disk(workers, tuple(sorted(found | {workers.rank})))
