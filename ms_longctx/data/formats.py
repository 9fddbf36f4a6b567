# SPDX-License-Identifier: Apache-2.0
"""Source rows: which format a JSON object has and what conversation or text it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ms_longctx.errors import MsLongctxError

DEFAULT_INSTRUCTION = "Summarize the following article.\n\n{article}"
_ROLES = ("system", "user", "assistant", "tool")

# Our field name -> names under which published data sets carry it, the first that is there counts.
_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages",), "system": ("system", "system_prompt"), "tools": ("tools",)},
    "article": {
        "article": ("article", "article_text", "document"),
        "abstract": ("abstract", "abstract_text", "summary", "highlights"),
        "system": ("system", "system_prompt"),
    },
    "alpaca": {
        "instruction": ("instruction",),
        "input": ("input",),
        "output": ("output",),
        "system": ("system", "system_prompt"),
    },
    "query_response": {
        "query": ("query", "prompt", "input", "instruction", "question", "problem"),
        "response": (
            "response", "answer", "output", "targets", "target", "answer_key", "answers", "solution", "text",
            "completion", "content",
        ),
        "history": ("history",),
        "system": ("system", "system_prompt"),
    },
    "text": {"text": ("text", "content")},
}  # fmt: skip
_REQUIRED = {
    "messages": ("messages",),
    "article": ("article", "abstract"),
    "alpaca": ("instruction", "output"),
    "query_response": ("query", "response"),
    "text": ("text",),
}
FORMATS = tuple(_FIELDS)


class RowError(Exception):
    """A row that cannot be used.

    Attributes:
        reason: under which it is counted, such as ``missing_field``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages in order; what the assistant says is learned.

    Attributes:
        messages: each with ``role``, ``content`` and, for the assistant, ``loss``: whether it is learned.
        source: the part of a message that may be shortened to fit; ``None`` takes the longest user message.
        tools: descriptions handed to the chat template.
    """

    messages: tuple[Mapping[str, Any], ...]
    source: str | None = None
    tools: Any = None


class RowReader:
    """Turns rows of one format into conversations or plain texts.

    Args:
        format: one of ``FORMATS``.
        fields: our field name -> name in the rows, where they differ.
        system: system message of rows that have none.
        instruction: prompt of the article format; ``{article}`` stands for the article.

    Raises:
        MsLongctxError: unknown format or field, or an instruction without ``{article}``.
    """

    def __init__(
        self,
        format: str,
        fields: Mapping[str, str],
        system: str | None = None,
        instruction: str | None = None,
    ) -> None:
        if format not in _FIELDS:
            raise MsLongctxError(f"unknown format {format!r}; expected one of {', '.join(FORMATS)}")
        unknown = sorted(set(fields) - set(_FIELDS[format]))
        if unknown:
            raise MsLongctxError(
                f"format {format} has no field {unknown[0]!r}; its fields are {', '.join(_FIELDS[format])}"
            )
        self._instruction = DEFAULT_INSTRUCTION if instruction is None else instruction
        if self._instruction.count("{article}") != 1:
            raise MsLongctxError(f"instruction {self._instruction!r} should contain {{article}} exactly once")
        self._format = format
        self._names = _names(format, fields)
        self._system = system
        self._read = getattr(self, f"_{format}")

    def read(self, row: Any) -> Conversation | str:
        """Return what ``row`` holds.

        Raises:
            RowError: not an object, a field is missing, empty or of the wrong type.
        """
        if not isinstance(row, dict):
            raise RowError("not_an_object", f"expected a JSON object, found {type(row).__name__}")
        result: Conversation | str = self._read(row)
        return result

    def _messages(self, row: dict[str, Any]) -> Conversation:
        content = self._value(row, "messages")
        if not isinstance(content, list) or not content:
            raise RowError("bad_value", f"'messages' should be a list of messages, found {_kind(content)}")
        messages = [_message(message, index) for index, message in enumerate(content)]
        system = [] if messages[0]["role"] == "system" else self._system_message(row)
        return Conversation((*system, *messages), tools=self._value(row, "tools", required=False))

    def _article(self, row: dict[str, Any]) -> Conversation:
        article, abstract = self._text_of(row, "article"), self._text_of(row, "abstract")
        prompt = self._instruction.replace("{article}", article)
        return self._exchange(row, [], prompt, abstract, source=article)

    def _alpaca(self, row: dict[str, Any]) -> Conversation:
        instruction = self._text_of(row, "instruction")
        extra = self._value(row, "input", required=False)
        query = f"{instruction}\n{extra}" if isinstance(extra, str) and extra.strip() else instruction
        return self._exchange(row, [], query, self._text_of(row, "output"))

    def _query_response(self, row: dict[str, Any]) -> Conversation:
        history = self._value(row, "history", required=False) or []
        turns = isinstance(history, list) and all(
            isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)
            for turn in history
        )
        if not turns:
            raise RowError("bad_value", "'history' should be a list of [query, response] pairs")
        return self._exchange(row, history, self._text_of(row, "query"), self._text_of(row, "response"))

    def _text(self, row: dict[str, Any]) -> str:
        return self._text_of(row, "text")

    def _exchange(
        self,
        row: dict[str, Any],
        history: list[list[str]],
        query: str,
        response: str,
        source: str | None = None,
    ) -> Conversation:
        messages = self._system_message(row)
        for asked, answered in [*history, [query, response]]:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered, "loss": True})
        return Conversation(tuple(messages), source)

    def _system_message(self, row: dict[str, Any]) -> list[Mapping[str, Any]]:
        """The row's own system message goes before the general one."""
        system = self._value(row, "system", required=False) or self._system
        return [{"role": "system", "content": system}] if isinstance(system, str) and system else []

    def _value(self, row: dict[str, Any], field: str, required: bool = True) -> Any:
        for name in self._names[field]:
            if row.get(name) is not None:
                return row[name]
        if required:
            named = " or ".join(map(repr, self._names[field]))
            raise RowError("missing_field", f"no field {named}; the row has {_keys(row)}")
        return None

    def _text_of(self, row: dict[str, Any], field: str) -> str:
        """A text, or a list of texts (sentences, paragraphs) as lines; without surrounding white space."""
        value = self._value(row, field)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = "\n".join(value)
        if not isinstance(value, str):
            raise RowError("bad_value", f"field {field!r} should be a text, found {_kind(value)}")
        if not value.strip():
            raise RowError("empty", f"field {field!r} is empty")
        return value if self._format in ("text", "query_response", "alpaca") else value.strip()


def detect_format(row: Any, fields: Mapping[str, str]) -> str:
    """Return the format of ``row`` by its keys.

    Raises:
        RowError: no format fits; the keys found and those expected are named.
    """
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"expected a JSON object on each line, found {_kind(row)}")
    for format in FORMATS:
        if set(fields) <= set(_FIELDS[format]):
            names = _names(format, fields)
            if all(any(name in row for name in names[field]) for field in _REQUIRED[format]):
                return format
    expected = "; ".join(f"{format}: {' + '.join(required)}" for format, required in _REQUIRED.items())
    raise RowError(
        "missing_field",
        f"the row has {_keys(row)}, which no format fits (expected {expected}); name the fields, "
        "for example article=body abstract=summary",
    )


def _names(format: str, fields: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {field: (fields[field],) if field in fields else names for field, names in _FIELDS[format].items()}


def _message(message: Any, index: int) -> dict[str, Any]:
    """A checked copy of one message with its content as plain text."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        found = _keys(message) if isinstance(message, dict) else _kind(message)
        raise RowError("bad_value", f"message {index + 1} should have a role out of {', '.join(_ROLES)}; found {found}")
    result = {key: value for key, value in message.items() if key not in ("loss", "loss_scale")}
    result["content"] = _content(message.get("content"), index)
    if message["role"] == "assistant":
        result["loss"] = _loss(message, index)
    return result


def _content(content: Any, index: int) -> str:
    """Text, or OpenAI's list of parts as far as they are text."""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RowError("bad_value", f"content of message {index + 1} should be a text, found {_kind(content)}")
    return content


def _loss(message: dict[str, Any], index: int) -> bool:
    value = message.get("loss", message.get("loss_scale"))
    if value is None:
        return True
    if value not in (0, 1):
        raise RowError("bad_value", f"loss of message {index + 1} should be true, false, 0 or 1, found {value!r}")
    return bool(value)


def _keys(row: Mapping[str, Any]) -> str:
    names: Sequence[str] = sorted(map(str, row))
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"keys {listed}" if names else "no keys"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
