# SPDX-License-Identifier: Apache-2.0
"""The dry run: compile every class of ranks, compare them, and extrapolate where layers were left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ms_longctx.config import RunConfig
from ms_longctx.parallel.dryrun.extrapolate import Amounts, cut, extrapolate, measure
from ms_longctx.parallel.dryrun.launch import RankResult, compile_rank
from ms_longctx.parallel.dryrun.match import MatchReport, match
from ms_longctx.parallel.dryrun.ranks import RankClass, rank_classes
from ms_longctx.parallel.dryrun.worker import PROGRAM
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.virtual_cluster import Simulator

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ClassReport:
    """One class of ranks.

    Args:
        ranks: the class, with the rank that was compiled.
        stage: pipeline stage, from 0.
        result: of the compilation (with the larger layer count).
        compiled: its amounts; ``None`` if it failed.
        extrapolated: amounts of the full model where layers were left out and both programs compile.
        failure: why a program does not compile, one line.
    """

    ranks: RankClass
    stage: int
    result: RankResult
    compiled: Amounts | None = None
    extrapolated: Amounts | None = None
    failure: str | None = None


@dataclass(frozen=True)
class DryRun:
    """Result of :func:`dry_run`; ``layers`` holds the layer counts that were compiled, the shown one last."""

    run: RunConfig
    strategy: Strategy
    simulator: Simulator
    layers: tuple[int, ...]
    classes: list[ClassReport]
    match: MatchReport

    @property
    def failed(self) -> bool:
        """Whether a rank does not compile or ranks do not fit together."""
        return bool(self.match.problems) or any(report.failure for report in self.classes)


def dry_run(
    run: RunConfig,
    strategy: Strategy,
    ranks: Sequence[int],
    simulator: Simulator,
    folder: Path,
    layers: int | None = None,
    progress: Progress = print,
    program: str = PROGRAM,
) -> DryRun:
    """Compile the training program for the classes of ``ranks``.

    Args:
        run: the full model's configuration.
        strategy: must fit it.
        ranks: of each class the first one named here is compiled.
        simulator: of this machine.
        folder: where configurations, graphs and logs go.
        layers: compile so many layers instead, and one a stage less, and extrapolate.
        progress: gets a line before each compilation.
        program: see :mod:`.worker`.

    Raises:
        MsLongctxError: ``layers`` does not suit the pipeline, or the program refuses this run.
    """
    asked, full = run, run.model.num_hidden_layers
    counts: tuple[int, ...] = (full,)
    compiled_strategy = strategy
    if layers is not None:
        compiled_strategy, fewer = cut(strategy, layers, full)
        counts = (fewer, layers)
        run = replace(run, parallel=replace(run.parallel, pipeline_layers=None))
    reports = []
    classes = rank_classes(strategy, ranks)
    for place, known in enumerate(classes, start=1):
        results = []
        for count in counts:
            progress(f"[{place}/{len(classes)}] compiling rank {known.rank} with {count} of {full} layers")
            fewer_layers = replace(run, model=replace(run.model, num_hidden_layers=count))
            target = folder / f"rank_{known.rank}_layers_{count}"
            results.append(compile_rank(fewer_layers, compiled_strategy, known.rank, simulator, target, program))
            if results[-1].failure:
                break
        reports.append(_report(known, strategy, results, counts, full))
    traffic = {
        report.ranks.rank: report.result.point_to_point
        for report in reports
        if report.result.point_to_point is not None and report.failure is None
    }
    return DryRun(asked, strategy, simulator, counts, reports, match(strategy, classes, traffic))


def _report(
    known: RankClass, strategy: Strategy, results: list[RankResult], counts: tuple[int, ...], full: int
) -> ClassReport:
    stage = strategy.coordinates(known.rank).pp
    last = results[-1]
    if last.failure:
        return ClassReport(known, stage, last, failure=last.failure)
    if len(counts) == 1:
        return ClassReport(known, stage, last, compiled=measure(last, strategy.stage_layers(full)[stage]))
    few, more = (measure(result, count // strategy.pp) for result, count in zip(results, counts, strict=True))
    target = strategy.stage_layers(full)[stage]
    return ClassReport(known, stage, last, compiled=more, extrapolated=extrapolate(few, more, target))
