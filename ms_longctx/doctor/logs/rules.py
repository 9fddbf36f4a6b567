# SPDX-License-Identifier: Apache-2.0
"""Known failures as data: ``ms_longctx/doctor/rules/*.yaml``.

Keys of a rule:

- ``id``, ``title``: a short name, and what a user reads;
- ``words``: lower-case pieces of text, of which every line that a pattern matches has one (they make reading fast);
- ``patterns``: regular expressions, case-insensitive, one of which must be found in a line; a group ``rank`` in them
  is the rank that the line blames;
- ``unless``: a regular expression that rules a line out;
- ``consequence``: ``true`` for what mostly follows from the failure of another rank;
- ``echo``: ``true`` for a consequence that says itself that another rank failed; never first where anything else is;
- ``covers``: ids that say less about the same failure, and are left out of a file that has this one;
- ``cause``, ``cure``: for the user; ``source``: where it is documented, or the file of ours that prints it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RULES_DIR = Path(__file__).resolve().parents[1] / "rules"

# Explanations that CANN prints after every error name other errors and settings.
_ADVICE = re.compile(r"^\s*(Solution|Possible Cause|Cause|Suggestion)\s*:", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """One known failure; the module's text explains the fields."""

    id: str
    title: str
    cause: str
    cure: str
    source: str
    words: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()
    unless: re.Pattern[str] | None = None
    consequence: bool = False
    echo: bool = False
    covers: tuple[str, ...] = ()

    def find(self, line: str, lower: str) -> re.Match[str] | None:
        """Where this line of a log (``lower``: the same in lower case) shows the failure, if it does."""
        if not any(word in lower for word in self.words) or _ADVICE.match(line):
            return None
        found = next((match for pattern in self.patterns if (match := pattern.search(line))), None)
        return None if found is None or (self.unless is not None and self.unless.search(line)) else found


@functools.lru_cache(maxsize=1)
def load_rules() -> tuple[Rule, ...]:
    """All rules, in the order of their files' names.

    Raises:
        KeyError, TypeError, re.error: a rule is not written as it should be.
    """
    import yaml

    return tuple(
        _rule(values)
        for path in sorted(RULES_DIR.glob("*.yaml"))
        for values in yaml.safe_load(path.read_text(encoding="utf-8"))
    )


def _rule(values: dict[str, Any]) -> Rule:
    unless = values.pop("unless", None)
    return Rule(
        words=tuple(str(word).lower() for word in values.pop("words")),
        patterns=tuple(re.compile(text, re.IGNORECASE) for text in values.pop("patterns")),
        unless=None if unless is None else re.compile(unless, re.IGNORECASE),
        covers=tuple(values.pop("covers", ())),
        **values,
    )
