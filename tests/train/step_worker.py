# SPDX-License-Identifier: Apache-2.0
"""One process of a job that takes training steps: step_worker.py RANK SIZE JOB SETTINGS OUTPUT.

SETTINGS is JSON: ``model`` (path), ``batches`` (.npz with the columns as (steps, accumulation, rows, tokens) arrays),
``strategy``, ``lora``, ``recompute``. Each rank writes its losses and trained parameters to ``OUTPUT/RANK.npz``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from ms_longctx import LlamaForCausalLM, LoraConfig, get_pe_model
from ms_longctx.device import select_device
from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.groups import decay_groups
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.world import join_world
from ms_longctx.train.objectives import NextToken
from ms_longctx.train.step import TrainStep
from ms_longctx.train.workers import Workers

LEARNING_RATE = 3e-4


def main(settings: dict, output: Path) -> None:
    with join_world("CPU") as world:
        workers = Workers(Strategy.read(settings["strategy"], world.size), world.rank)
        model = LlamaForCausalLM.from_pretrained(settings["model"])
        if settings["lora"]:
            get_pe_model(model, LoraConfig(r=8, target_modules="all-linear"), seed=1)
        if workers.strategy.cp > 1:
            model.set_context_parallel(workers.strategy, workers.rank)
        if settings["recompute"]:
            model.set_recompute()
        model.set_train()
        arrays = dict(np.load(settings["batches"]))
        steps, accumulation = arrays["input_ids"].shape[:2]
        optimizer = AdamW(decay_groups(model.trainable_params(), 0.1), max_grad_norm=1.0)
        take = TrainStep(NextToken(model), optimizer, accumulation, workers=workers)
        losses = []
        for step in range(steps):
            micro = [{name: array[step, i] for name, array in arrays.items()} for i in range(accumulation)]
            losses.append(take(micro, LEARNING_RATE, step=step).loss)
        parameters = {parameter.name: parameter.asnumpy() for parameter in optimizer.parameters}
        np.savez(output / f"{world.rank}.npz", losses=np.array(losses), **parameters)


if __name__ == "__main__":
    rank, size, job, given, folder = sys.argv[1:]
    if int(size) > 1:  # as mpirun would
        os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "PMIX_NAMESPACE": job}
    select_device("CPU")
    main(json.loads(given), Path(folder))
