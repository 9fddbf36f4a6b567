# SPDX-License-Identifier: Apache-2.0
"""From log files to findings, the cause before what follows from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ms_longctx.doctor.logs.detectors import FRAGMENTATION, REPEATED_OUTPUT, Fragmentation, Repetition
from ms_longctx.doctor.logs.exits import exit_of
from ms_longctx.doctor.logs.reading import rank_of, read_chunks, time_of
from ms_longctx.doctor.logs.rules import Rule, load_rules

# What follows from another failure may carry a slightly earlier time: clocks of hosts differ, files are written late.
CLOCK_SLACK = 5.0

_UNKNOWN = re.compile(r"\[?(ERROR|CRITICAL)\b|Traceback \(most recent call last\)|(\w+\.)*\w+(Error|Exception): ")


@dataclass(frozen=True)
class Finding:
    """A known failure in one log.

    Attributes:
        rule: what it is.
        path, line: the file, and the number of the first line that shows it.
        text: that line, or what a detector has to say about it.
        rank: of the file, where its name tells.
        time: seconds since 1970, of that line or the one with a time before it (else the next after it, else of the
            rank's end).
        dated: whether the line itself carries that time.
        count: lines of the file that show it.
        blames: another rank that the line names as the one that failed.
    """

    rule: Rule
    path: Path
    line: int
    text: str
    rank: int | None = None
    time: float | None = None
    dated: bool = False
    count: int = 1
    blames: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What the logs say.

    Attributes:
        findings: the first failure first.
        unknown: first lines that look like errors and that no rule knows, as ``(path, line number, text)``.
        files, lines: how much was read.
    """

    findings: tuple[Finding, ...]
    unknown: tuple[tuple[Path, int, str], ...]
    files: int
    lines: int

    @property
    def first(self) -> Finding | None:
        """The failure that came first, as far as the logs tell."""
        return self.findings[0] if self.findings else None

    @property
    def first_rank(self) -> int | None:
        """The rank that failed first: that of the first finding, or the one that it blames."""
        if self.first is None:
            return None
        return self.first.rank if self.first.blames is None else self.first.blames


def diagnose(paths: Sequence[Path]) -> Diagnosis:
    """Read logs and name the failures that they show.

    Args:
        paths: log files, one rank or several; they are read piece by piece.

    Raises:
        OSError: a file cannot be read.
    """
    logs = [_read(path) for path in paths]
    findings = [finding for log in logs for finding in log.reduced()]
    return Diagnosis(
        findings=tuple(_in_order(findings)),
        unknown=tuple((log.path, *log.unknown) for log in logs if log.unknown is not None),
        files=len(logs),
        lines=sum(log.lines for log in logs),
    )


@dataclass
class _Log:
    path: Path
    rank: int | None
    found: dict[str, Finding] = field(default_factory=dict)
    unknown: tuple[int, str] | None = None
    lines: int = 0
    time: float | None = None

    def add(self, rule: Rule, number: int, text: str, dated: bool = False, blames: int | None = None) -> None:
        known = self.found.get(rule.id)
        if known is None:
            self.found[rule.id] = Finding(
                rule, self.path, number, text.strip(), self.rank, self.time, dated, blames=blames
            )
        elif known.line != number:
            self.found[rule.id] = replace(known, count=known.count + 1)

    def give_times(self, time: float) -> None:
        """Failures before the first time that the file shows get that one."""
        for name, finding in self.found.items():
            if finding.time is None:
                self.found[name] = replace(finding, time=time)

    def add_exit(self) -> None:
        """What the file beside the log says about the end of its rank."""
        end = exit_of(self.path)
        if end is None or end.code == 0:
            return
        self.give_times(end.time)
        if end.rule is not None and end.rule.id not in self.found:
            self.found[end.rule.id] = Finding(end.rule, end.path, 1, end.text, self.rank, end.time, dated=True)

    def reduced(self) -> list[Finding]:
        covered = {name for finding in self.found.values() for name in finding.rule.covers}
        return [finding for name, finding in self.found.items() if name not in covered]


def _read(path: Path) -> _Log:
    rules = load_rules()
    log = _Log(path, rank_of(path))
    repetition, fragmentation = Repetition(), Fragmentation()
    for lines in read_chunks(path):
        text = "\n".join(line for _, line in lines).lower()
        active = [rule for rule in rules if any(word in text for word in rule.words)]
        for number, line in lines:
            _read_line(log, number, line, active)
            if (unit := repetition.feed(line)) is not None:
                log.add(REPEATED_OUTPUT, number, f"repeats: {unit}")
            if (figures := fragmentation.feed(line)) is not None:
                log.add(FRAGMENTATION, number, f"{figures}: {line.strip()}")
        log.lines = lines[-1][0]
    if "device_memory" not in log.found:
        log.found.pop(FRAGMENTATION.id, None)  # gaps are no failure as long as everything fits
    log.add_exit()
    return log


def _read_line(log: _Log, number: int, line: str, active: list[Rule]) -> None:
    if (time := time_of(line)) is not None:
        is_first, log.time = log.time is None, time
        if is_first:
            log.give_times(time)
    is_known = False
    lower = line.lower()
    for rule in active:
        if (found := rule.find(line, lower)) is not None:
            blamed = found.groupdict().get("rank")
            log.add(rule, number, line, time is not None, None if blamed is None else int(blamed))
            is_known = True
    if not is_known and log.unknown is None and _UNKNOWN.match(line):
        log.unknown = (number, line.strip())


def _in_order(findings: list[Finding]) -> list[Finding]:
    """By time where every finding has one. Else causes come before consequences, and known times before others.

    Echoes come last, those first that name a rank. A consequence is the first one only by a time of its own: that of
    a line long before it would make it older than its cause.
    """

    def echo(finding: Finding) -> tuple[bool, bool]:
        return finding.rule.echo, finding.rule.echo and finding.blames is None

    def by_time(finding: Finding) -> tuple[object, ...]:
        assert finding.time is not None
        return *echo(finding), finding.time + CLOCK_SLACK * finding.rule.consequence, finding.path, finding.line

    def by_kind(finding: Finding) -> tuple[object, ...]:
        time = float("inf") if finding.time is None else finding.time
        return *echo(finding), finding.rule.consequence, time, finding.path, finding.line

    if findings and all(finding.time is not None for finding in findings):
        ordered = sorted(findings, key=by_time)
        if ordered[0].dated or not ordered[0].rule.consequence:
            return ordered
    return sorted(findings, key=by_kind)
