# SPDX-License-Identifier: Apache-2.0
"""One of several processes that open a run: trains to its end, or writes down what it has right after loading.

python resume_worker.py RANK SIZE JOB SETTINGS.json

Settings: ``arguments`` of the run, in which ``{rank}`` stands for the rank; ``train``; ``result``, a file name with
``{rank}`` in it; ``also``, another output directory whose newest common checkpoint is looked for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(rank: str, size: str, job: str, settings_path: str) -> None:
    """Open, train or look."""
    if int(size) > 1:
        os.environ.update(OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_SIZE=size, PMIX_NAMESPACE=job)
    import numpy as np

    from ms_longctx.config import load_config
    from ms_longctx.train.checkpoint import CheckpointStore
    from ms_longctx.train.disks import find_disk
    from ms_longctx.train.trainer import Trainer

    settings = json.loads(Path(settings_path).read_text())
    run = load_config(None, [argument.replace("{rank}", rank) for argument in settings["arguments"]])
    trainer = Trainer(run)
    if settings["train"]:
        trainer.train()
        return
    optimizer = trainer.engine.optimizer
    values = {parameter.name: parameter.asnumpy() for parameter in trainer.model.get_parameters()}
    values |= {name: parameter.asnumpy() for name, parameter in optimizer.state().items()}
    found = {"#step": np.array(trainer.progress.step), "#disk": np.array(trainer.disk.ranks)}
    with trainer.world:
        if also := settings.get("also"):
            disk = find_disk(trainer.workers, Path(also))
            newest = CheckpointStore(Path(also) / "checkpoints").newest(disk)
            found |= {"#also": np.array(int(newest.name[-8:]) if newest else -1), "#also_disk": np.array(disk.ranks)}
    np.savez(settings["result"].replace("{rank}", rank), **values, **found)


if __name__ == "__main__":
    main(*sys.argv[1:5])
