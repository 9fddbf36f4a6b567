# SPDX-License-Identifier: Apache-2.0
"""One simulated rank of a training run on Ascend: opens it, writes down what it loaded, trains and saves.

python program_engine_worker.py RESULT.npz [--section.key=value ...]

The workers of a simulation have nobody to talk to: what the others would say is taken to be what this one says. Values
after a step mean nothing.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from ms_longctx.config import load_config
from ms_longctx.parallel.slices import piece_of
from ms_longctx.train import trainer as module
from ms_longctx.train.program_engine import ProgramEngine
from ms_longctx.train.workers import Workers


class AloneInASimulation(Workers):
    def any(self, flag: bool) -> bool:
        return flag

    def exchange(self, number: int) -> list[int]:
        return [number] * self.count

    def from_rank(self, number: float, rank: int) -> float:
        return number

    def share(self, text: str | None) -> str | None:
        return text or "simulation"


def main(result: str, overrides: list[str]) -> None:
    """Open, write, train."""
    module.Workers = AloneInASimulation  # type: ignore[misc]
    trainer = module.Trainer(load_config(None, overrides))
    engine = trainer.engine
    assert isinstance(engine, ProgramEngine)
    values = {name: p.asnumpy() for name, p in {**engine._frozen, **engine._weights, **engine._moments}.items()}
    pieces, rules = {}, {}
    config, strategy = trainer.model.config, trainer.workers.strategy
    trained, frozen = engine.program.full_shapes, engine.program.frozen_shapes
    for name, shape in (trained | frozen).items():
        piece = piece_of(name, shape, config, strategy, trainer.workers.rank)
        for kind in ("", "exp_avg.", "exp_avg_sq.") if name in trained else ("",):
            if piece is not None:
                rules[kind + name] = [piece.whole, piece.start, piece.stop]
    for name, (piece, ranks) in engine.pieces.items():
        pieces[name] = [piece.whole, piece.start, piece.stop, ranks]
    facts = {"rules": rules, "pieces": pieces, "step": trainer.progress.step, "count": int(engine.optimizer.step)}
    facts["parameters"] = engine.count_parameters()
    summary = trainer.train()
    facts |= {"trained": summary.step, "checkpoint": str(summary.checkpoint)}
    np.savez(result, facts=np.array(json.dumps(facts)), **values)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # the exit of a simulated process takes seconds and may crash
