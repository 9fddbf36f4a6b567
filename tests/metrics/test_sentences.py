# SPDX-License-Identifier: Apache-2.0
"""Sentence splitting and tokens."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import tokenizers as google

from ms_longctx.metrics import sentences
from ms_longctx.metrics.sentences import MixedTokenizer, split_sentences


def test_docstring_examples() -> None:
    assert doctest.testmod(sentences).failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("He met Dr. Smith et al. (2003) in Fig. 3 of J. Doe.", None),
        ('She said "Go." Then left.', ['She said "Go."', "Then left."]),
        ("pH 7.4 and v1.2 of a.b. then more", None),
        ("line one\nline two\n\nline three", ["line one", "line two", "line three"]),
        ("今天天气很好。我们去公园吧！你来吗？好", ["今天天气很好。", "我们去公园吧！", "你来吗？", "好"]),
        ("他说：“走吧！”然后走了。", ["他说：“走吧！”", "然后走了。"]),
        ("我用 GPT-4. It works. 很好。", ["我用 GPT-4.", "It works.", "很好。"]),
        ("Wait... what? Yes…", ["Wait... what?", "Yes…"]),
        (" \n\t ", []),
        ("", []),
    ],
)
def test_split(text: str, expected: list[str] | None) -> None:
    assert split_sentences(text) == ([text] if expected is None else expected)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aB1 .!?。！？\n\"'()…中\u3000", max_size=80))
def test_split_loses_only_white_space(text: str) -> None:
    joined = "".join("".join(split_sentences(text)).split())
    assert joined == "".join(text.split())


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.booleans())
def test_tokens_are_rouge_scores_on_text_without_cjk(text: str, stem: bool) -> None:
    """Reference: Google's rouge-score tokenizer."""
    if sentences.has_characters(text):
        return
    assert MixedTokenizer(stem).tokenize(text) == google.DefaultTokenizer(stem).tokenize(text)


def test_mixed_text_keeps_latin_tokens_and_adds_characters() -> None:
    tokens = MixedTokenizer(use_stemmer=True).tokenize("第２章：Running 模型 in ﾃｽﾄ 한국어, naïve")
    assert tokens == [
        "第",
        "2",
        "章",
        "run",
        "模",
        "型",
        "in",
        "テ",
        "ス",
        "ト",
        "한",
        "국",
        "어",
        "na",
        "ve",
    ]
