# SPDX-License-Identifier: Apache-2.0
"""Stop strings across token borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_longctx.errors import MsLongctxError
from ms_longctx.generation.stopping import StopStrings


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.stopped


def splits(text: str) -> list[list[str]]:
    """Every way to cut ``text`` into pieces."""
    borders = range(1, len(text))
    chosen = itertools.chain.from_iterable(itertools.combinations(borders, n) for n in range(len(text)))
    return [[text[a:b] for a, b in zip((0, *cut), (*cut, len(text)), strict=True)] for cut in chosen]


def test_stop_string_split_in_every_way() -> None:
    for pieces in splits("abcDEFGHIJkl"):
        assert run(pieces, ["DEFGHIJ"]) == ("abc", True), pieces


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xxABCyy", ["BC", "ABCy"], "xxA"),  # overlapping: BC is complete first
        ("xxABCyy", ["BC", "ABC"], "xx"),  # they end together: the longest counts
        ("aab aac", ["aac"], "aab "),  # a false start
        ("客单价👩‍🚀好", ["👩‍🚀"], "客单价"),
    ],
)
def test_stops_that_overlap(text: str, stops: list[str], expected: str) -> None:
    for pieces in splits(text):
        assert run(pieces, stops) == (expected, True), pieces


def test_stop_inside_a_token_drops_the_rest_of_it() -> None:
    assert run(["one STOP two", " three"], ["STOP"]) == ("one ", True)


def test_beginning_of_a_stop_is_text_when_nothing_more_comes() -> None:
    matcher = StopStrings(["STOP"])
    assert [matcher.push(piece) for piece in ("one S", "TO")] == ["one ", ""]
    assert matcher.finish() == "STO" and not matcher.stopped


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1), max_size=3))
def test_result_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    ends = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    expected = (whole[: min(ends)[1]], True) if ends else (whole, False)
    assert run(pieces, stops) == run(list(whole), stops) == expected


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    matcher = StopStrings(["</s>"])
    shown = ""
    for piece in ("hi <", "/", "s", ">", " more"):
        shown += matcher.push(piece)
        assert shown in ("", "hi ")


def test_empty_stop_is_refused() -> None:
    with pytest.raises(MsLongctxError, match="empty string"):
        StopStrings(["a", ""])
