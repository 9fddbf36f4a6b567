# SPDX-License-Identifier: Apache-2.0
"""RougeLXT: its definition, and rouge1/2/L against Google's rouge-score."""

from __future__ import annotations

import doctest
import random
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from ms_longctx import assets
from ms_longctx.errors import MsLongctxError
from ms_longctx.metrics import RougeLXT, rouge
from ms_longctx.metrics.sentences import has_characters

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ARTICLE = assets.Asset(
    package="allofplos",
    version="0.11.1",
    member="allofplos/starter_corpus/journal.pone.0066742.xml",
    sha256="136fd0628fdb8b1fb643fd5c783b31d380f7ee580ed59c9869c9180eaa683924",
    licence="CC-BY-4.0",
)
WORDS = st.sampled_from("the a cat cats sat runs running 12 x_y don't naïve Ünder α-synuclein …".split())
ENGLISH = st.one_of(
    st.lists(WORDS, max_size=30).map(" ".join),
    st.lists(st.one_of(WORDS, st.sampled_from([".", ". The", "\n", "?!", "_"])), max_size=40).map(" ".join),
    st.text(max_size=60),
)
CHINESE = ["今天天气很好。", "我们去公园散步吧！", "你带相机了吗？", "湖边的花都开了。"]


def distinct_sentences(count: int) -> list[str]:
    """Sentences of 3-7 words; no word occurs twice."""
    return [" ".join(f"W{i}x{k}" for k in range(3 + i % 5)) + "." for i in range(count)]


def lxt(prediction: str, reference: str) -> float:
    return RougeLXT().score(prediction, reference)["rougeLxt"]


def test_docstring_example() -> None:
    result = doctest.testmod(rouge)
    assert result.attempted >= 8 and result.failed == 0


@pytest.mark.parametrize("stem", [False, True])
def test_equals_rouge_score_on_random_text(stem: bool) -> None:
    """Reference: rouge-score 0.1.2; tolerance 1e-9 in percent."""
    ours = RougeLXT(use_stemmer=stem, rouge_types=TYPES)
    google = rouge_scorer.RougeScorer(list(TYPES), use_stemmer=stem)

    @settings(max_examples=500, deadline=None)
    @given(ENGLISH, ENGLISH)
    def check(prediction: str, reference: str) -> None:
        if has_characters(prediction + reference):
            return
        scores = ours.score(prediction, reference)
        for name, expected in google.score(reference, prediction).items():
            assert abs(scores[name] - 100 * expected.fmeasure) < 1e-9, name

    check()


@pytest.mark.parametrize("stem", [False, True])
def test_equals_rouge_score_on_a_paper_and_its_abstract(stem: bool) -> None:
    """Reference: rouge-score 0.1.2 on a PLOS ONE article of 6,000 words; tolerance 1e-9 in percent."""
    root = ET.parse(assets.fetch(ARTICLE)).getroot()
    body, abstract = (
        "\n".join(re.sub(r"\s+", " ", "".join(p.itertext())) for p in part.iter("p"))
        for part in (root.find("body"), root.find(".//abstract"))
        if part is not None
    )
    names = TYPES[:3]
    scores = RougeLXT(use_stemmer=stem).score(abstract, body)
    google = rouge_scorer.RougeScorer(list(names), use_stemmer=stem).score(body, abstract)
    for name in names:
        assert abs(scores[name] - 100 * google[name].fmeasure) < 1e-9, name
    assert 0 < scores["rougeLxt"] <= scores["rougeL"]
    assert lxt(body, body) == 100.0


@given(st.integers(2, 9), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_skipped_and_shuffled_sentences_lose(count: int, rng: random.Random) -> None:
    sentences = distinct_sentences(count)
    whole = " ".join(sentences)
    kept = sorted(rng.sample(range(count), rng.randrange(1, count)))
    skipped = " ".join(sentences[i] for i in kept)
    fewer = " ".join(sentences[i] for i in kept[1:])
    assert lxt(whole, whole) == 100.0
    assert lxt(fewer, whole) < lxt(skipped, whole) < 100.0
    order = rng.sample(kept, len(kept))
    if order != kept:
        assert lxt(" ".join(sentences[i] for i in order), whole) < lxt(skipped, whole)


def test_shuffling_costs_more_than_in_rouge_l_and_more_the_worse_it_is() -> None:
    sentences = distinct_sentences(12)
    whole = " ".join(sentences)
    swapped = " ".join([sentences[1], sentences[0], *sentences[2:]])
    halves = " ".join(sentences[6:] + sentences[:6])
    backwards = " ".join(sentences[::-1])
    scores = [RougeLXT().score(text, whole) for text in (whole, swapped, halves, backwards)]
    values = [score["rougeLxt"] for score in scores]
    assert values == sorted(values, reverse=True) and len(set(values)) == 4
    assert all(score["rougeLxt"] < score["rougeL"] for score in scores[1:])
    assert all(score["rouge1"] == 100.0 for score in scores)


@given(st.integers(1, 8), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_repeated_sentences_do_not_gain(count: int, copies: int, rng: random.Random) -> None:
    sentences = distinct_sentences(count)
    whole = " ".join(sentences)
    part = sorted(rng.sample(range(count), rng.randrange(1, count + 1)))
    twice = rng.choice(part)
    repeated = [i for i in part for _ in range(1 + copies * (i == twice))]
    plain = lxt(" ".join(sentences[i] for i in part), whole)
    assert lxt(" ".join(sentences[i] for i in repeated), whole) < plain


def test_chinese_and_mixed_text() -> None:
    whole = "".join(CHINESE)
    shuffled = "".join([CHINESE[2], CHINESE[0], CHINESE[3], CHINESE[1]])
    skipped = "".join(CHINESE[:1] + CHINESE[2:])
    assert lxt(whole, whole) == 100.0
    assert 0 < lxt(shuffled, whole) < lxt(skipped, whole) < 100.0
    mixed = "模型 SmolLM2 很小。 It runs on a CPU. 结果不错！"
    assert RougeLXT().score(mixed, mixed) == dict.fromkeys(("rougeLxt", "rouge1", "rouge2", "rougeL"), 100.0)
    # 6 characters, 4 shared in order (hand count): P = R = 4/6
    assert RougeLXT().score("今天天气很好", "今天空气不好")["rougeL"] == pytest.approx(100 * 4 / 6, abs=1e-12)


@pytest.mark.parametrize(("prediction", "reference"), [("", "A b."), ("A b.", ""), ("", ""), ("?!", "A b.")])
def test_texts_without_tokens_score_zero(prediction: str, reference: str) -> None:
    assert set(RougeLXT().score(prediction, reference).values()) == {0.0}


def test_one_sentence_equals_rouge_l() -> None:
    scores = RougeLXT().score("the cat sat on a mat", "the cat lay on the mat today")
    assert scores["rougeLxt"] == scores["rougeL"] > 0


def test_batches_average_and_reset() -> None:
    metric = RougeLXT()
    metric.add_batch(predictions=["A b c."], references=["A b c."])
    metric.add_batch(predictions=["X y."], references=["A b."])
    assert metric.compute() == dict.fromkeys(("rougeLxt", "rouge1", "rouge2", "rougeL"), 50.0)
    metric.reset()
    with pytest.raises(MsLongctxError, match="no pairs"):
        metric.compute()


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a", "b"], ["a"], "2 predictions but 1 references"),
        ("a", ["a"], "predictions is one string"),
        (["a"], [None], r"references\[0\] is of type NoneType"),
    ],
)
def test_bad_batches_are_refused_whole(predictions: list[str], references: list[str], message: str) -> None:
    metric = RougeLXT()
    with pytest.raises(MsLongctxError, match=message):
        metric.add_batch(predictions=predictions, references=references)
    with pytest.raises(MsLongctxError, match="no pairs"):
        metric.compute()


def test_unknown_type_is_refused() -> None:
    with pytest.raises(MsLongctxError, match="rouge_types: 'rouge3x'"):
        RougeLXT(rouge_types=["rouge3x"])
