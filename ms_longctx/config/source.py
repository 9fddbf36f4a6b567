# SPDX-License-Identifier: Apache-2.0
"""Reading YAML and command line overrides into values that remember where they were written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ms_longctx.errors import MsLongctxError


class ConfigError(MsLongctxError):
    """A configuration that cannot be used; the message is ``where: key: what is wrong``."""


@dataclass(frozen=True)
class Entry:
    """One stated value.

    Args:
        value: as YAML reads it.
        name: the key as the user wrote it, dotted.
        where: ``file:line`` or ``command line``.
        typed: the characters of a command line value, for keys that want text whatever YAML makes of it.
    """

    value: Any
    name: str
    where: str
    typed: str | None = None

    def error(self, message: str) -> ConfigError:
        """A :class:`ConfigError` about this entry."""
        return ConfigError(f"{self.where}: {self.name}: {message}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads ``1e-4`` and ``1E4`` as numbers, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_sections(path: Path, expected: str = "sections such as 'model:' and 'train:'") -> list[Entry]:
    """Entries of a YAML (or JSON) file whose top level is a mapping, in the order of the file.

    A top-level mapping is a section and gives one entry a key (``train.dtype``); any other top-level value is
    an entry of its own.

    Args:
        path: of the file.
        expected: what messages say that the top level should have.

    Raises:
        ConfigError: the file cannot be read, is no YAML, is empty, or states a key twice.
    """
    entries = []
    with _document(read_text(path), str(path)) as (loader, node):
        if node is None or node.tag.endswith(":null"):
            raise ConfigError(f"{path}: the file is empty; expected {expected}")
        if not isinstance(node, yaml.MappingNode):
            found = describe(loader.construct_object(node, deep=True))
            raise ConfigError(f"{path}: expected {expected} at the top level, found {found}")
        loader.flatten_mapping(node)
        for key, content in node.value:
            if isinstance(content, yaml.MappingNode) and content.value:
                loader.flatten_mapping(content)
                pairs = [(f"{key.value}.{child.value}", child, value) for child, value in content.value]
            else:
                pairs = [(key.value, key, content)]
            entries += [
                Entry(loader.construct_object(value, deep=True), str(name), f"{path}:{at.start_mark.line + 1}")
                for name, at, value in pairs
            ]
    return entries


def read_overrides(arguments: Iterable[str]) -> list[Entry]:
    """Entries of ``--section.key value`` and ``--section.key=value``; values are YAML (``null``, ...).

    Raises:
        ConfigError: an argument is not of that form.
    """
    entries = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("--") or len(argument) == 2:
            raise ConfigError(f"command line: unexpected argument {argument!r}; overrides are '--section.key value'")
        name, equals, text = argument[2:].partition("=")
        if not equals:
            following = next(remaining, None)
            if following is None:
                raise ConfigError(f"command line: --{name}: a value is missing; expected '--{name} VALUE'")
            text = following
        entries.append(Entry(_yaml_value(text), f"--{name}", "command line", typed=text))
    return entries


def read_text(path: Path) -> str:
    """Content of a UTF-8 text file, or a :class:`ConfigError` that says why it cannot be had."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; expected a file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def show(value: Any) -> str:
    """A value as YAML writes it, short enough for one line."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe(value: Any) -> str:
    """A value and its kind in the user's words."""
    kinds = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
        type(None): "nothing",
    }
    return f"{show(value)} ({kinds.get(type(value), type(value).__name__)})"


@contextmanager
def _document(text: str, name: str) -> Iterator[tuple[_Loader, yaml.Node | None]]:
    """A loader and the node tree of one YAML document; YAML's errors become :class:`ConfigError`."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_duplicates(node, name)
        yield loader, node
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, name)) from error
    except (ValueError, RecursionError) as error:  # such as the date 2024-13-01, or a list inside itself
        raise ConfigError(f"{name}: is not valid {_language(name)}: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _yaml_value(text: str) -> Any:
    try:
        with _document(text, "value") as (loader, node):
            return None if node is None else loader.construct_object(node, deep=True)
    except ConfigError:
        return text  # not YAML, such as a sentence with a quote in it: taken as it is


def _yaml_message(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    if mark is None:
        return f"{name}: is not valid {_language(name)}: {problem}"
    return f"{name}:{mark.line + 1}: is not valid {_language(name)}: {problem} (column {mark.column + 1})"


def _language(name: str) -> str:
    """What the user means a file to be; JSON is read as the YAML that it is too."""
    return "JSON" if name.lower().endswith(".json") else "YAML"


def _refuse_duplicates(node: yaml.Node | None, name: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, name)
    if not isinstance(node, yaml.MappingNode):
        return
    first_line: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{name}:{line}: a list or mapping cannot be a key; expected 'name: value'")
        if key.value != "<<":
            if key.value in first_line:
                before = first_line[key.value]
                raise ConfigError(f"{name}:{line}: {key.value}: stands here and in line {before}; keep one")
            first_line[key.value] = line
        _refuse_duplicates(value, name)
