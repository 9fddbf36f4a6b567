# SPDX-License-Identifier: Apache-2.0
"""What two long texts have in common, as token sequences and sentence by sentence.

Hyyro's bit-parallel recurrence (H. Hyyro, "Bit-parallel LCS-length computation revisited", AWOCA 2004) keeps
one row of the dynamic programme of a longest common subsequence (LCS) as bits: bit p is 0 where the row grows
at token p. No table is ever held. The C++ kernel ``text_alignment.cc`` does it when it was built; otherwise
Python's integers are the bit vectors, about four times slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_longctx import kernels

_ROWS_PER_BLOCK = 32
Sentences = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Alignment:
    """Numbers of tokens that a prediction shares with a reference.

    Args:
        common: length of the longest common subsequence of the two texts.
        in_order: the most tokens that pairs of sentences can share (by their own LCS) when each sentence is
            in one pair at most and the pairs stand in the same order in both texts.
        anywhere: tokens shared when each reference sentence takes its best prediction sentence, wherever it
            stands; never below ``in_order``.
    """

    common: int
    in_order: int
    anywhere: int


def align(prediction: Sentences, reference: Sentences) -> Alignment:
    """Align two texts given as the tokens of their sentences.

    Time grows with the product of the lengths, memory with their sum.
    """
    kernel = _kernel()
    return align_in_python(prediction, reference) if kernel is None else kernel(prediction, reference)


@functools.lru_cache(maxsize=1)
def _kernel() -> Callable[[Sentences, Sentences], Alignment] | None:
    if not kernels.available():
        return None
    function = ctypes.CDLL(str(kernels.library_path())).ms_longctx_text_alignment
    ints, longs = (np.ctypeslib.ndpointer(kind, flags="C_CONTIGUOUS") for kind in (np.int32, np.int64))
    text: list[Any] = [ints, longs, ctypes.c_int64]
    function.argtypes = [*text, *text, ctypes.c_int32, longs]
    function.restype = None

    def align_in_kernel(prediction: Sentences, reference: Sentences) -> Alignment:
        numbers: dict[str, int] = {}
        predicted, wanted = _numbered(prediction, numbers), _numbered(reference, numbers)
        out = np.zeros(3, dtype=np.int64)
        function(*predicted, *wanted, len(numbers), out)
        return Alignment(*out.tolist())

    return align_in_kernel


def _numbered(sentences: Sentences, numbers: dict[str, int]) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    tokens = [numbers.setdefault(token, len(numbers)) for sentence in sentences for token in sentence]
    ends = np.cumsum([len(sentence) for sentence in sentences], dtype=np.int64)
    return np.array(tokens, dtype=np.int32), ends, len(sentences)


def align_in_python(prediction: Sentences, reference: Sentences) -> Alignment:
    """The same as :func:`align` without the kernel."""
    index = _SentenceIndex(prediction)
    common = index.common([token for sentence in reference for token in sentence])
    # best[j]: most tokens shared in order by the reference so far and the first j prediction sentences
    best = np.zeros(len(prediction) + 1, dtype=np.int64)
    anywhere = 0
    if prediction:
        for shared in index.common_by_sentence(reference):
            best[1:] = np.maximum(best[1:], best[:-1] + shared)
            np.maximum.accumulate(best, out=best)
            anywhere += int(shared.max())
    return Alignment(common=common, in_order=int(best[-1]), anywhere=anywhere)


class _SentenceIndex:
    """Bit masks of the places of each token in a text made of sentences.

    One guard bit follows each sentence. It is in no mask, so it never matches; set in the state it lets the
    recurrence's carry through (one long text), cleared it stops the carry (every sentence on its own).
    """

    def __init__(self, sentences: Sentences) -> None:
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        self._starts = np.cumsum(lengths + 1) - (lengths + 1)
        self._bits = int(lengths.sum()) + len(sentences)
        places: dict[str, list[int]] = {}
        for start, sentence in zip(self._starts.tolist(), sentences, strict=True):
            for place, token in enumerate(sentence, start):
                places.setdefault(token, []).append(place)
        self._masks = {token: self._mask(at) for token, at in places.items()}
        self._all = (1 << self._bits) - 1
        self._inside = self._all ^ self._mask((self._starts + lengths).tolist())

    def _mask(self, places: list[int]) -> int:
        bits = np.zeros(self._bits, dtype=np.uint8)
        bits[places] = 1
        return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")

    def _grown(self, tokens: Sequence[str], start: int) -> int:
        """Bits that are 1 where the LCS with ``tokens`` grows, from a state with guards set or clear."""
        state = start
        for token in tokens:
            mask = self._masks.get(token)
            if mask:
                hit = state & mask
                state = ((state + hit) | (state - hit)) & start
        return state ^ start

    def common(self, tokens: Sequence[str]) -> int:
        """LCS length of ``tokens`` and the whole text."""
        return self._grown(tokens, self._all).bit_count()

    def common_by_sentence(self, sentences: Sentences) -> Iterator[NDArray[np.int64]]:
        """For each of ``sentences`` in turn, its LCS length with every sentence of the text."""
        width = (self._bits + 7) // 8
        for start in range(0, len(sentences), _ROWS_PER_BLOCK):
            block = sentences[start : start + _ROWS_PER_BLOCK]
            rows = b"".join(self._grown(tokens, self._inside).to_bytes(width, "little") for tokens in block)
            packed = np.frombuffer(rows, dtype=np.uint8).reshape(len(block), width)
            grown = np.unpackbits(packed, axis=1, count=self._bits, bitorder="little")
            yield from np.add.reduceat(grown, self._starts, axis=1, dtype=np.int64)
