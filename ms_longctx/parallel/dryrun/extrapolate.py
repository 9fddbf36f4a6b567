# SPDX-License-Identifier: Apache-2.0
"""From two programs with few layers to the one with all of them: a straight line through two points.

All decoder layers are alike, so parameters and communication grow by the same amount with each; for them the line is
exact. Peak memory follows it where the peak falls into the same place of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.dryrun.communication import Traffic
from ms_longctx.parallel.dryrun.launch import RankResult
from ms_longctx.parallel.strategy import Strategy

_ACCUMULATED = "accu_grads."
KINDS = ("weights", "optimizer state", "accumulated gradients")


@dataclass(frozen=True)
class Amounts:
    """What one rank holds and sends.

    Args:
        layers: decoder layers of its stage.
        parameters: kind (:data:`KINDS`) -> bytes of this rank's slices.
        traffic: communication a step.
        memory_bytes: lower bound of the peak, or ``None``.
    """

    layers: int
    parameters: dict[str, int]
    traffic: list[Traffic]
    memory_bytes: int | None


def measure(result: RankResult, layers: int) -> Amounts:
    """The amounts of a compiled rank whose stage has ``layers`` layers."""
    sizes = dict.fromkeys(KINDS, 0)
    for name, tensor in result.parameters.items():
        sizes[kind(name, result.full_shapes)] += tensor.nbytes
    return Amounts(layers, sizes, result.traffic, result.memory_bytes)


def kind(name: str, weights: Mapping[str, object]) -> str:
    """Which of :data:`KINDS` a parameter is."""
    if name in weights:
        return KINDS[0]
    return KINDS[2] if name.startswith(_ACCUMULATED) else KINDS[1]


def cut(strategy: Strategy, layers: int, full: int) -> tuple[Strategy, int]:
    """The strategy for fewer layers, and the smaller of the two layer counts that are compiled.

    Args:
        strategy: of the full model.
        layers: the larger count.
        full: layers of the full model.

    Raises:
        MsLongctxError: the stages cannot get the same number of layers, twice.
    """
    stages = strategy.pp
    if layers % stages or layers < 2 * stages or layers >= full:
        raise MsLongctxError(
            f"--layers: {layers} cannot stand for {full} layers on {stages} stage{'s' if stages > 1 else ''}; expected "
            f"a multiple of {stages} from {2 * stages} to {full - 1}: programs of so many layers, and of one a stage "
            "less, give the line that is drawn to all layers"
        )
    return replace(strategy, pipeline_layers=None), layers - stages


def extrapolate(few: Amounts, more: Amounts, layers: int) -> Amounts:
    """The line through two amounts, at ``layers``."""
    steps = (layers - more.layers) / (more.layers - few.layers)

    def line(low: int, high: int) -> int:
        return round(high + (high - low) * steps)

    before = {(row.operator, row.ranks): row for row in few.traffic}
    traffic = []
    for row in more.traffic:
        low = before.get((row.operator, row.ranks), replace(row, times=0, operand_bytes=0, sent_bytes=0))
        is_known = row.sent_bytes is not None and low.sent_bytes is not None
        traffic.append(
            replace(
                row,
                times=line(low.times, row.times),
                operand_bytes=line(low.operand_bytes, row.operand_bytes),
                sent_bytes=line(low.sent_bytes or 0, row.sent_bytes or 0) if is_known else None,
            )
        )
    memory = None
    if few.memory_bytes is not None and more.memory_bytes is not None:
        memory = line(few.memory_bytes, more.memory_bytes)
    parameters = {name: line(few.parameters[name], size) for name, size in more.parameters.items()}
    return Amounts(layers, parameters, traffic, memory)
