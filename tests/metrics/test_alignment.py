# SPDX-License-Identifier: Apache-2.0
"""Alignment of texts against the textbook dynamic programme."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_longctx import kernels
from ms_longctx.metrics.alignment import Alignment, Sentences, align, align_in_python

TOKENS = st.sampled_from("abcde")
SENTENCE = st.lists(TOKENS, min_size=1, max_size=9)
TEXT = st.lists(SENTENCE, max_size=6)


def lcs(a: list[str], b: list[str]) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def textbook(prediction: Sentences, reference: Sentences) -> Alignment:
    """The definition, word for word, with whole tables."""
    common = lcs([t for s in reference for t in s], [t for s in prediction for t in s])
    best = [[0] * (len(prediction) + 1) for _ in range(len(reference) + 1)]
    anywhere = 0
    for i, wanted in enumerate(reference):
        shared = [lcs(list(wanted), list(predicted)) for predicted in prediction]
        anywhere += max(shared, default=0)
        for j, weight in enumerate(shared):
            best[i + 1][j + 1] = max(best[i][j] + weight, best[i][j + 1], best[i + 1][j])
    return Alignment(common, best[-1][-1], anywhere)


@pytest.mark.parametrize("implementation", [align, align_in_python])
def test_equals_the_textbook(implementation: Callable[[Sentences, Sentences], Alignment]) -> None:
    @settings(max_examples=400, deadline=None)
    @given(TEXT, TEXT)
    def check(prediction: list[list[str]], reference: list[list[str]]) -> None:
        assert implementation(prediction, reference) == textbook(prediction, reference)

    check()


@pytest.mark.skipif(not kernels.available(), reason="kernels not built")
@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_kernel_equals_python_across_word_borders(random, vocabulary: int) -> None:
    def text() -> list[list[str]]:
        lengths = random.choices([1, 2, 30, 62, 63, 64, 65, 128, 300], k=random.randrange(1, 6))
        return [[str(random.randrange(vocabulary)) for _ in range(length)] for length in lengths]

    prediction, reference = text(), text()
    assert align(prediction, reference) == align_in_python(prediction, reference)
