# SPDX-License-Identifier: Apache-2.0
"""The checks of a machine as text and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ms_longctx.doctor.check import Check, Result

_MARKS = {Result.OK: "ok", Result.WARNING: "WARNING", Result.FAILURE: "FAILURE", Result.ABSENT: "-"}


def line(check: Check) -> str:
    """A check on one line; what is expected and what to do on further ones, where something is wrong."""
    text = f"{_MARKS[check.result]:<8} {check.name:<18} {check.value}"
    if check.result in (Result.WARNING, Result.FAILURE):
        for label, words in (("expected", check.expected), ("do", check.advice)):
            if words:
                text += f"\n{'':<27} {label}: {words}"
    return text


def summary(checks: Sequence[Check]) -> str:
    """The last line: how many of each."""
    counts = Counter(check.result for check in checks)
    parts = [f"{counts[result]} {result.value}" for result in Result if counts[result]]
    return f"{len(checks)} checks: {', '.join(parts)}"


def failed(checks: Sequence[Check]) -> bool:
    """Whether one of them failed."""
    return any(check.result is Result.FAILURE for check in checks)


def as_data(checks: Sequence[Check]) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "failed": failed(checks),
        "checks": [{**asdict(check), "result": check.result.value} for check in checks],
    }
