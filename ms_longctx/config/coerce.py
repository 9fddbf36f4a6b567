# SPDX-License-Identifier: Apache-2.0
"""Checking a stated value against the annotated type of its field."""

from __future__ import annotations

import math
import types
from typing import Any, Literal, Union, get_args, get_origin

from ms_longctx.config.source import Entry, describe

_EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}

_PLURAL = {"text": "texts", "an integer": "integers"}


def coerce(entry: Entry, annotation: Any) -> Any:
    """``entry.value`` as the type ``annotation`` asks for: exact kinds, but an integer is a good number.

    Raises:
        ConfigError: the value is of another kind; the message says what was found and what was expected.
    """
    if entry.typed is not None and _wants_text(annotation, entry.value):
        return entry.typed
    try:
        return _convert(entry.value, annotation)
    except _Mismatch:
        expected = " or ".join(_expected(annotation))
        raise entry.error(f"expected {expected}, found {describe(entry.value)}{_hint(entry, annotation)}") from None


class _Mismatch(Exception):
    pass


def _convert(value: Any, annotation: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is Literal:
        return _require(value, isinstance(value, str) and value in arguments)
    if origin is list:
        _require(value, isinstance(value, list))
        return [_convert(item, arguments[0]) for item in value]
    if origin is tuple:
        _require(value, isinstance(value, list) and len(value) == len(arguments))
        return tuple(_convert(item, kind) for item, kind in zip(value, arguments, strict=True))
    if origin is dict:
        _require(value, isinstance(value, dict))
        return {_convert(key, arguments[0]): _convert(item, arguments[1]) for key, item in value.items()}
    if annotation is Any:
        return value
    if annotation is float:
        _require(value, isinstance(value, (int, float)) and not isinstance(value, bool))
        return _finite(value)
    return _require(value, type(value) is annotation or (annotation is type(None) and value is None))


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise _Mismatch from None
    return float(_require(number, math.isfinite(number)))


def _convert_union(value: Any, members: tuple[Any, ...]) -> Any:
    for member in members:
        try:
            return _convert(value, member)
        except _Mismatch:
            continue
    raise _Mismatch


def _require(value: Any, holds: bool) -> Any:
    if not holds:
        raise _Mismatch
    return value


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _wants_text(annotation: Any, value: Any) -> bool:
    """A command line value goes to a text key as typed, unless the key takes the null or list it is."""
    members = _members(annotation)
    takes_value = any(get_origin(member) is type(value) for member in members)
    return str in members and not takes_value and not (value is None and type(None) in members)


def _expected(annotation: Any) -> list[str]:
    words = []
    for member in _members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if origin is Literal:
            words.append(f"{'one of ' if len(arguments) > 1 else ''}{', '.join(arguments)}")
        elif origin is tuple:
            words.append(f"a list of {len(arguments)} numbers")
        elif origin is list:
            item = _expected(arguments[0])[0].removeprefix("one of ")
            words.append(f"a list of {_PLURAL.get(item, item)}")
        else:
            words.append(_EXPECTED[origin or member])
    return words


def _hint(entry: Entry, annotation: Any) -> str:
    value = entry.value
    if isinstance(value, (int, float)) and str in _members(annotation) and entry.typed is None:
        return "; put it in quotes"
    return ""
