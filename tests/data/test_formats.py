# SPDX-License-Identifier: Apache-2.0
"""Every row format, its aliases, and what is said about rows that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from ms_longctx.data.formats import Conversation, RowError, RowReader, detect_format
from ms_longctx.errors import MsLongctxError

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def _read(row: Any, format: str | None = None, **options: Any) -> Conversation:
    fields = options.pop("fields", {})
    record = RowReader(format or detect_format(row, fields), fields, **options).read(row)
    assert isinstance(record, Conversation)
    return record


def _turns(record: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in record.messages]


@pytest.mark.parametrize("row, expected", [
    ({"messages": MESSAGES}, "messages"),
    ({"article": "a", "abstract": "b"}, "article"),
    ({"article_text": ["a"], "abstract_text": ["b"]}, "article"),
    ({"document": "a", "summary": "b", "id": 3}, "article"),
    ({"article": "a", "highlights": "b"}, "article"),
    ({"instruction": "i", "input": "", "output": "o"}, "alpaca"),
    ({"instruction": "i", "output": "o"}, "alpaca"),
    ({"query": "q", "response": "r"}, "query_response"),
    ({"prompt": "q", "completion": "r"}, "query_response"),
    ({"question": "q", "answer": "r"}, "query_response"),
    ({"instruction": "q", "text": "r"}, "query_response"),
    ({"text": "t"}, "text"),
    ({"content": "t", "url": "u"}, "text"),
])  # fmt: skip
def test_detection(row: dict, expected: str) -> None:
    assert detect_format(row, {}) == expected


def test_detection_uses_named_fields() -> None:
    row = {"body": "a", "tldr": "b"}
    assert detect_format(row, {"article": "body", "abstract": "tldr"}) == "article"
    assert _turns(_read(row, fields={"article": "body", "abstract": "tldr"}))[1] == ("assistant", "b")
    with pytest.raises(RowError, match="keys body, tldr"):
        detect_format(row, {"article": "body"})


@pytest.mark.parametrize("row", [{"foo": 1, "bar": 2}, {}, [1], "text", None])
def test_detection_says_what_was_found(row: Any) -> None:
    with pytest.raises(RowError, match="keys bar, foo.*article \\+ abstract|no keys|expected a JSON object"):
        detect_format(row, {})


def test_article() -> None:
    record = _read({"article": " Long. ", "abstract": ["One.", "Two."]}, instruction="Sum: {article}!")
    assert _turns(record) == [("user", "Sum: Long.!"), ("assistant", "One.\nTwo.")]
    assert record.source == "Long."


def test_article_braces_in_the_text_stay() -> None:
    record = _read({"article": "{x} {article} %s", "abstract": "{}"}, instruction="{article}")
    assert _turns(record) == [("user", "{x} {article} %s"), ("assistant", "{}")]


def test_alpaca_joins_instruction_and_input() -> None:
    assert _turns(_read({"instruction": "i", "input": "x", "output": "o"}))[0] == ("user", "i\nx")
    for empty in ("", None, "  "):
        assert _turns(_read({"instruction": "i", "input": empty, "output": "o"}))[0] == ("user", "i")


def test_query_response_with_history_and_system() -> None:
    row = {"query": "q2", "response": "r2", "history": [["q1", "r1"]], "system": "own"}
    expected = [("system", "own"), ("user", "q1"), ("assistant", "r1"), ("user", "q2"), ("assistant", "r2")]
    assert _turns(_read(row, system="general")) == expected
    del row["system"]
    assert _turns(_read(row, system="general"))[0] == ("system", "general")
    assert _turns(_read(row))[0] == ("user", "q1")


def test_messages_keep_loss_flags() -> None:
    messages = [
        MESSAGES[0], MESSAGES[1] | {"loss": False}, MESSAGES[0], MESSAGES[1] | {"loss_scale": 0.0},
        MESSAGES[0], MESSAGES[1] | {"loss_scale": 1.0}, MESSAGES[0], MESSAGES[1],
    ]  # fmt: skip
    record = _read({"messages": messages})
    assert [m["loss"] for m in record.messages if m["role"] == "assistant"] == [False, False, True, True]


def test_messages_system_priority_and_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": parts}, MESSAGES[1]]}
    assert _turns(_read(own, system="general"))[:2] == [("system", "own"), ("user", "one two")]
    assert _turns(_read({"messages": MESSAGES}, system="general"))[0] == ("system", "general")
    assert _read({"messages": MESSAGES, "tools": [{"name": "f"}]}).tools == [{"name": "f"}]


@pytest.mark.parametrize("format, row, reason, message", [
    ("article", {"article": "a"}, "missing_field", "'abstract' or.*keys article"),
    ("article", {"article": "  ", "abstract": "b"}, "empty", "article"),
    ("article", {"article": 3, "abstract": "b"}, "bad_value", "a number"),
    ("article", ["a"], "not_an_object", "list"),
    ("text", {"text": None}, "missing_field", "text"),
    ("query_response", {"query": "q", "response": "r", "history": [["q"]]}, "bad_value", "pairs"),
    ("messages", {"messages": []}, "bad_value", "list of messages"),
    ("messages", {"messages": "hi"}, "bad_value", "a text"),
    ("messages", {"messages": [{"from": "human", "value": "x"}]}, "bad_value", "keys from, value"),
    ("messages", {"messages": [{"role": "robot", "content": "x"}]}, "bad_value", "role"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "bad_value", "message 1"),
    ("messages", {"messages": [MESSAGES[0], MESSAGES[1] | {"loss_scale": 0.5}]}, "bad_value", "0.5"),
])  # fmt: skip
def test_rows_that_do_not_fit(format: str, row: Any, reason: str, message: str) -> None:
    with pytest.raises(RowError, match=message) as caught:
        RowReader(format, {}).read(row)
    assert caught.value.reason == reason


def test_wrong_settings() -> None:
    with pytest.raises(MsLongctxError, match="article, messages|messages, article"):
        RowReader("csv", {})
    with pytest.raises(MsLongctxError, match="no field 'body'.*article, abstract"):
        RowReader("article", {"body": "x"})
    with pytest.raises(MsLongctxError, match="exactly once"):
        RowReader("article", {}, instruction="Summarize.")
