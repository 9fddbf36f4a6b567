# SPDX-License-Identifier: Apache-2.0
"""Which units stay more exact, so that the model stays within the accuracy that was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.layer import UNITS
from ms_longctx.quant.measure import Accuracy
from ms_longctx.quant.methods import KEPT
from ms_longctx.quant.model import Levels, Unit
from ms_longctx.quant.quantizer import Quantizer

log = logging.getLogger(__name__)
_STEPS = 16  # a level is tried in this many shares of the units


class NotReached(MsLongctxError):
    """The accuracy is out of reach within the share of weights that may be kept.

    Args:
        message: says how far it came.
        table: lines on what each unit loses.
    """

    def __init__(self, message: str, table: list[str]) -> None:
        super().__init__(message)
        self.table = table


class Search:
    """Moves the units that disturb most up by a level, as few as possible, until the threshold holds.

    Units are ordered by how much a level up lessens their disturbance (:class:`~ms_longctx.quant.quantizer.Damage`)
    for each weight that it moves, which needs one layer; the number that moves is found by bisection, which measures
    the whole model. If all units have to leave a level, the model is quantized anew, without what that level needed.

    Args:
        quantizer: makes candidates and measures what units disturb.
        threshold: see :meth:`ms_longctx.quant.measure.Accuracy.holds`; 0 takes the lowest levels as they are.
        max_kept: largest share of the weights in decoder layers that may stay fp16.

    Attributes:
        model: the best found so far.
    """

    def __init__(self, quantizer: Quantizer, threshold: float, max_kept: float) -> None:
        self._quantizer = quantizer
        self._threshold, self._max_kept = threshold, max_kept
        self.model, self._comparison = quantizer.run()

    def run(self) -> Accuracy:
        """The accuracy of the model as it is left; where the threshold cannot be held, with all that may be moved."""
        accuracy = self._measure({})
        levels: Levels = {}
        method_levels = self.model.method.levels
        for lower, upper in zip(method_levels[:-1], method_levels[1:], strict=True):
            if levels:
                del self.model  # its memory is needed
                self.model, self._comparison = self._quantizer.run(levels)
                accuracy = self._measure(levels)
            if accuracy.holds(self._threshold):
                break
            order = self._order(lower, upper)
            allowed = self._allowed(order) if upper == KEPT else len(order)
            accuracy = self._measure({**levels, **dict.fromkeys(order[:allowed], upper)})
            if accuracy.holds(self._threshold):
                return self._fewest(levels, order[:allowed], upper, accuracy)
            levels = self.model.levels
        return accuracy

    def table(self) -> Iterator[str]:
        """One line a unit: what it is and what it disturbs at each level, the worst first."""
        levels = [level for level in self.model.method.levels if level != KEPT]
        yield f"{'layer':>5} {'unit':8} {'level':13}" + "".join(f"{'error ' + level:>20}" for level in levels)
        lowest = self.model.method.levels[0]
        worst = sorted(self.model.units(), key=lambda unit: -self._quantizer.damage[unit].by_level[lowest])
        for layer, unit in worst:
            errors = self._quantizer.damage[layer, unit].by_level
            level = self.model.levels.get((layer, unit), lowest)
            yield f"{layer:5d} {unit:8} {level:13}" + "".join(f"{errors[name]:20.3e}" for name in levels)

    def _order(self, lower: str, upper: str) -> list[Unit]:
        def gain(unit: Unit) -> float:
            errors = self._quantizer.damage[unit].by_level
            return (errors[lower] - errors.get(upper, 0.0)) / self._size(unit)

        return sorted(self.model.units(), key=gain, reverse=True)

    def _allowed(self, order: list[Unit]) -> int:
        """How many of the units may be kept."""
        sizes = [self._size(unit) for unit in order]
        limit, total = self._max_kept * sum(sizes), 0
        for count, size in enumerate(sizes):
            total += size
            if total > limit:
                return count
        return len(order)

    def _size(self, unit: Unit) -> int:
        layer, name = unit
        return sum(self.model.weights[layer][module].q.size for module in UNITS[name])

    def _fewest(self, levels: Levels, order: list[Unit], upper: str, accuracy: Accuracy) -> Accuracy:
        """Bisect; ``order`` as a whole is known to be enough."""
        low, high = 0, len(order)
        best = (dict.fromkeys(order, upper), accuracy)
        while high - low > max(1, len(order) // _STEPS):
            middle = (low + high) // 2
            candidate = dict.fromkeys(order[:middle], upper)
            accuracy = self._measure({**levels, **candidate})
            if accuracy.holds(self._threshold):
                high, best = middle, (candidate, accuracy)
            else:
                low = middle
        self.model.levels = {**levels, **best[0]}
        return best[1]

    def _measure(self, levels: Levels) -> Accuracy:
        self.model.levels = levels
        accuracy = self._comparison.measure(self._quantizer.measure_states(self.model), self.model.rows)
        counts = {level: 0 for level in self.model.method.levels}
        for unit in self.model.units():
            counts[levels.get(unit, self.model.method.levels[0])] += 1
        log.info("%s: %s", ", ".join(f"{count} units {level}" for level, count in counts.items() if count), accuracy)
        return accuracy
