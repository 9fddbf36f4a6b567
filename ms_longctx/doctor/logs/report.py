# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as text and as data."""

from __future__ import annotations

import textwrap
from datetime import datetime
from typing import Any

from ms_longctx.doctor.logs.diagnosis import Diagnosis, Finding

_WIDTH, _TEXT = 110, 240


def as_text(diagnosis: Diagnosis) -> str:
    """What a user reads: the first failure, then the others."""
    files = "1 file" if diagnosis.files == 1 else f"{diagnosis.files} files"
    lines = [f"read {files}, {diagnosis.lines:,} lines"]
    if diagnosis.first is None:
        return "\n".join([*lines, "no known failure found", *_unknown(diagnosis)])
    first = diagnosis.first
    where = f"({first.path}:{first.line})"
    if first.blames is None:
        who = "" if first.rank is None else f"rank {first.rank}: "
        lines.append(f"first failure: {who}{first.rule.title} {where}")
    else:
        lines.append(f"first failure: rank {first.blames}, says another rank {where}; its own log shows no known one")
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += ["", *_finding(number, finding, finding is first)]
    if first.blames is not None:
        lines += ["", *_unknown(diagnosis)]
    return "\n".join(lines)


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "files": diagnosis.files,
        "lines": diagnosis.lines,
        "first_rank": diagnosis.first_rank,
        "findings": [
            {
                "id": finding.rule.id,
                "title": finding.rule.title,
                "file": str(finding.path),
                "line": finding.line,
                "text": finding.text,
                "rank": finding.rank,
                "time": finding.time,
                "count": finding.count,
                "consequence": finding.rule.consequence,
                "cause": finding.rule.cause,
                "cure": finding.rule.cure,
                "source": finding.rule.source,
            }
            for finding in diagnosis.findings
        ],
        "unknown": [{"file": str(path), "line": line, "text": text} for path, line, text in diagnosis.unknown],
    }


def _finding(number: int, finding: Finding, is_first: bool) -> list[str]:
    facts = [f"{finding.path}:{finding.line}"]
    if finding.rank is not None:
        facts.append(f"rank {finding.rank}")
    if finding.time is not None:
        facts.append(f"{datetime.fromtimestamp(finding.time):%Y-%m-%d %H:%M:%S}")
    if finding.count > 1:
        facts.append(f"{finding.count} lines")
    head = f"{number}. {finding.rule.title}"
    if finding.rule.consequence and not is_first:
        head += " (follows from a failure above)"
    return [
        head,
        f"     {', '.join(facts)}",
        *_field("found", _short(finding.text)),
        *_field("cause", finding.rule.cause),
        *_field("cure", finding.rule.cure),
        *_field("see", finding.rule.source),
    ]


def _field(name: str, text: str) -> list[str]:
    start = f"     {name + ':':<7}"
    return textwrap.wrap(
        text, _WIDTH, initial_indent=start, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
    )


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


def _unknown(diagnosis: Diagnosis) -> list[str]:
    return [f"  not known: {path}:{line}: {_short(text)}" for path, line, text in diagnosis.unknown]
