# SPDX-License-Identifier: Apache-2.0
"""From a YAML file, a strategy file and command line overrides to one checked :class:`RunConfig`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from ms_longctx.config.aliases import canonical
from ms_longctx.config.coerce import coerce
from ms_longctx.config.planned import PLANNED
from ms_longctx.config.presets import find_config
from ms_longctx.config.rules import check_range, check_run, split_lengths
from ms_longctx.config.sections import SECTIONS, ParallelConfig, RunConfig
from ms_longctx.config.source import ConfigError, Entry, read_overrides, read_sections
from ms_longctx.errors import MsLongctxError

_FOLLOWS = {"train.objective": "data.layout", "data.layout": "train.objective"}


def load_config(
    name_or_path: str | Path | None,
    overrides: Iterable[str] = (),
    parallel_config: str | Path | None = None,
) -> RunConfig:
    """Read, merge and check one run.

    Args:
        name_or_path: a file, the name of a preset, or ``None`` for the defaults alone.
        overrides: ``["--section.key", "value", "--section.key=value", ...]``; they win over both files.
        parallel_config: strategy file (JSON or YAML) ``{"dp": 4, "mp": 2, ...}``; wins over ``name_or_path``.

    Raises:
        ConfigError: one line ``where: key: what was found, what was expected``.
    """
    stated = _Stated("defaults" if name_or_path is None else str(name_or_path))
    if name_or_path is not None:
        stated.add(read_sections(find_config(name_or_path)))
    if parallel_config is not None:
        stated.add(_read_strategy(Path(parallel_config)))
    stated.add(read_overrides(overrides))
    run = stated.build()
    check_run(run, stated.error)
    prompt, answer = split_lengths(run.data)
    return replace(run, data=replace(run.data, prompt_length=prompt, answer_length=answer))


def load_strategy(source: str | Path | Mapping[str, Any]) -> ParallelConfig:
    """The section ``parallel`` of a strategy file, or of its keys as a mapping.

    Raises:
        ConfigError: as :func:`load_config` raises it.
    """
    if not isinstance(source, Mapping):
        return load_config(None, parallel_config=source).parallel
    stated = _Stated("strategy")
    stated.add([Entry(value, f"parallel.{name}", "strategy") for name, value in source.items()])
    return stated.build().parallel


def override_keys(overrides: Iterable[str]) -> dict[str, str]:
    """Canonical name (``section.key``) of each override -> the option as the user wrote it."""
    entries = [(canonical(entry.name.removeprefix("--"), entry)[0], entry.name) for entry in read_overrides(overrides)]
    return {".".join(key.split(".")[:2]): name for key, name in entries}


class _Stated:
    """The keys that the sources state, under their canonical names; later sources replace earlier ones."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._entries: dict[str, Entry] = {}

    def add(self, entries: list[Entry]) -> None:
        """Take the entries of one source. Two names of one key in it must not disagree."""
        fresh: dict[str, Entry] = {}
        for written in entries:
            name = written.name.removeprefix("--")
            if name in SECTIONS and written.value in (None, {}):
                continue
            key, entry = canonical(name, written)
            key, entry = self._nested(key, entry, fresh)
            _require_known(key, entry)
            twin = fresh.get(key)
            if twin is not None and twin.value != entry.value and entry.where != "command line":
                raise entry.error(f"contradicts {twin.name} ({twin.where}), which means the same; keep one")
            fresh[key] = entry
        # The objective and the layout follow each other: a source that states one drops the other of before.
        for key, follower in _FOLLOWS.items():
            if key in fresh and follower not in fresh:
                self._entries.pop(follower, None)
        self._entries.update(fresh)

    def build(self) -> RunConfig:
        """Every section from its stated keys, types and ranges checked."""
        self._align_layout()
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for key, entry in self._entries.items():
            section, field = key.split(".", 1)
            hint = _hints(section).get(field)
            if key in PLANNED:
                PLANNED[key].check(entry)
            if hint is not None:
                values[section][field] = coerce(entry, hint)
                check_range(key, values[section][field], self.error)
        sections = {name: self._section(name, stated) for name, stated in values.items()}
        return RunConfig(**sections, given=frozenset(self._entries))

    def error(self, key: str, message: str) -> ConfigError:
        """A :class:`ConfigError` that says where the key was written, or which source left it out."""
        entry = self._entries.get(key) or Entry(None, key, self._source)
        return entry.error(message)

    def _section(self, name: str, values: dict[str, Any]) -> Any:
        try:
            return SECTIONS[name](**values)
        except ConfigError:
            raise
        except MsLongctxError as error:
            field = re.match(r"\w*", str(error))
            entry = self._entries.get(f"{name}.{field[0] if field else ''}")
            raise ConfigError(f"{entry.where if entry else self._source}: {name}.{error}") from error

    def _nested(self, key: str, entry: Entry, fresh: dict[str, Entry]) -> tuple[str, Entry]:
        """``model.rope_scaling.factor`` changes one item of a mapping that the sources before it state."""
        section, _, rest = key.partition(".")
        field, _, item = rest.partition(".")
        outer = f"{section}.{field}"
        if not item or section not in SECTIONS or "dict[" not in str(_hints(section).get(field)):
            return key, entry
        before = fresh.get(outer) or self._entries.get(outer)
        base = dict(before.value) if before is not None and isinstance(before.value, dict) else {}
        return outer, replace(entry, value={**base, item: entry.value}, typed=None)

    def _align_layout(self) -> None:
        """Where only one of objective and layout is stated, ``sft`` goes for both; the defaults agree."""
        for key, follower in _FOLLOWS.items():
            entry = self._entries.get(key)
            if entry is not None and entry.value == "sft" and follower not in self._entries:
                self._entries[follower] = entry


def _read_strategy(path: Path) -> list[Entry]:
    return [
        entry if entry.name.startswith("parallel.") else replace(entry, name=f"parallel.{entry.name}")
        for entry in read_sections(path, "keys such as 'dp' and 'mp'")
    ]


def _hints(section: str) -> dict[str, Any]:
    return get_type_hints(SECTIONS[section])


def _require_known(key: str, entry: Entry) -> None:
    section, _, field = key.partition(".")
    if section in SECTIONS and not field:
        first = next(iter(_hints(section)))
        raise entry.error(f"expected keys below this section, such as '{section}.{first}'")
    if key in PLANNED or (section in SECTIONS and field in _hints(section)):
        return
    raise entry.error(f"unknown key; {_suggestion(section, field)}")


def _suggestion(section: str, field: str) -> str:
    """What the user may have meant: the nearest key of that section, or of any other."""
    by_field = {key: name for name in reversed(SECTIONS) for key in _hints(name)}
    here = list(_hints(section)) if section in SECTIONS else []
    last = (field or section).rsplit(".", 1)[-1]
    nearest_section = "".join(_close(section, SECTIONS, 0.6))
    if not here and nearest_section and (not field or field in _hints(nearest_section)):
        return f"did you mean '{nearest_section}{'.' if field else ''}{field}'?"
    if last in by_field:
        return f"did you mean '{by_field[last]}.{last}'?"
    if near := _close(field, here, 0.6):
        return f"did you mean '{section}.{near[0]}'?"
    if near := _close(last, by_field, 0.75):
        return f"did you mean '{by_field[near[0]]}.{near[0]}'?"
    known = [f"{section}.{name}" for name in here] or list(SECTIONS)
    return f"known {'keys' if here else 'sections'}: {', '.join(known)}"


def _close(word: str, known: Iterable[str], cutoff: float) -> list[str]:
    """The nearest word, if any; of equally near ones that with the same first letter."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=cutoff)
    return sorted(near, key=lambda found: (-_likeness(word, found), found[:1] != word[:1]))[:1]


def _likeness(word: str, found: str) -> float:
    return difflib.SequenceMatcher(a=found, b=word).ratio()
