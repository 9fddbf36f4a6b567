# SPDX-License-Identifier: Apache-2.0
"""Accounting of a preparation: every row read is written or dropped for a reason, every token likewise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

#: How many problems are kept with file and line.
_PROBLEMS = 50
#: Lengths of source rows are counted in steps of so many tokens.
LENGTH_STEP = 64


@dataclass
class Tally:
    """Counts that add up.

    Attributes:
        rows: ``read``, ``written`` and how many were ``shortened``.
        dropped: rows left out, by reason.
        samples: samples written, by split (``train``, ``eval``).
        tokens: ``encoded`` (of rows that were written), ``written``, ``supervised``.
        lost: tokens of written rows that were left out, by cause.
        lengths: samples by number of tokens.
        source_lengths: rows by number of tokens before anything was left out, in steps of ``LENGTH_STEP``.
        problems: the first dropped rows, as ``file:line: reason: detail``.
    """

    rows: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    source_lengths: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def drop(self, where: str, reason: str, detail: str) -> None:
        """Count a row that cannot be used."""
        self.dropped[reason] += 1
        if len(self.problems) < _PROBLEMS:
            self.problems.append(f"{where}: {reason}: {detail}")

    def add(self, other: Tally) -> None:
        """Add the counts of ``other``."""
        for name, value in vars(other).items():
            if name != "problems":
                getattr(self, name).update(value)
        self.problems += other.problems[: _PROBLEMS - len(self.problems)]

    def balanced(self) -> bool:
        """Whether rows and tokens read equal those written plus those left out."""
        return self.rows["read"] == self.rows["written"] + sum(self.dropped.values()) and self.tokens[
            "encoded"
        ] == self.tokens["written"] + sum(self.lost.values())

    def summary(self) -> str:
        """One line for the terminal."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.dropped.items()))
        dropped = sum(self.dropped.values())
        return (
            f"{self.rows['read']} rows read = {self.rows['written']} written + {dropped} dropped"
            f"{f' ({reasons})' if reasons else ''}; {sum(self.samples.values())} samples, "
            f"{self.tokens['written']} tokens ({self.tokens['supervised']} supervised)"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; keys of ``lengths`` become texts."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Tally:
        """Inverse of :meth:`to_json`, also after a round through a JSON file."""
        tally = cls(problems=list(content["problems"]))
        for name, value in content.items():
            if name != "problems":
                by_length = name in ("lengths", "source_lengths")
                counts = {int(key) if by_length else key: count for key, count in value.items()}
                getattr(tally, name).update(counts)
        return tally
