# SPDX-License-Identifier: Apache-2.0
"""Sentences and tokens of English, Chinese and mixed text, for ROUGE."""

from __future__ import annotations

import re
import unicodedata

from rouge_score_rs import tokenizers

# A dot after one of these does not end a sentence (lower case, without the dot).
_ABBREVIATIONS = frozenset(
    "al approx ca cf dr eq eqs etc ex fig figs i.e e.g jr mr mrs ms no nos p pp prof ref refs resp sec sr st "
    "suppl tab u.k u.s vol vs".split()
)
# Group 1: the end of a Latin sentence (needs white space after it). Otherwise a line break, or the end of a
# Chinese or Japanese one, which needs no white space. Closing quotes and brackets stay with their sentence.
_BREAK = re.compile(
    r"""([.!?\u2026]+["'\u2019\u201d)\]]*)(?=\s)"""
    r"""|[\u3002\uff01\uff1f]+["'\u2019\u201d)\]\u300d\u300f\uff09\u300b]*"""
    r"""|\n"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'\u2018\u201c]*\Z")

# Scripts written without spaces whose characters count as one token each: kana, Han (with its extensions and
# compatibility forms) and Hangul syllables.
_CHARACTERS = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U000323af"
)
_ONE_CHARACTER = re.compile(f"([{_CHARACTERS}])")


def split_sentences(text: str) -> list[str]:
    """Split ``text`` into sentences; every character but the white space between them is kept.

    A sentence ends at a line break, at ``. ! ?`` or an ellipsis before white space unless what follows starts
    with a lower-case letter or the dot belongs to an abbreviation or an initial, and at the full-width stops
    ``\u3002\uff01\uff1f`` anywhere.

    >>> split_sentences("See Fig. 2. It works! \u5929\u6c14\u5f88\u597d\u3002\u8d70\u5427\uff01")
    ['See Fig. 2.', 'It works!', '\u5929\u6c14\u5f88\u597d\u3002', '\u8d70\u5427\uff01']
    """
    sentences, start = [], 0
    for match in _BREAK.finditer(text):
        if match.group(1) and not _ends_sentence(text, start, match):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the Latin stop in ``match`` ends the sentence that begins at ``start``."""
    after = text[match.end() : match.end() + 16].lstrip()
    if after[:1].islower():
        return False
    if match.group(1) != ".":
        return True
    # An abbreviation is short, so a short look back is enough and keeps the whole pass linear.
    word = _LAST_WORD.search(text[max(start, match.start() - 16) : match.start()])
    last = word.group() if word else ""
    initial = len(last) == 1 and last.isupper()
    return not initial and last.lower() not in _ABBREVIATIONS


def has_characters(text: str) -> bool:
    """Whether ``text`` holds Chinese, Japanese or Korean characters."""
    return _ONE_CHARACTER.search(text) is not None


class MixedTokenizer(tokenizers.Tokenizer):
    """Google rouge-score's tokens, and each Chinese, Japanese or Korean character as one more token.

    On text without such characters the tokens are exactly rouge-score's (which has none for those scripts).
    Text with them is first brought to NFKC, so that full-width digits and letters count.

    Args:
        use_stemmer: apply the Porter stemmer to Latin words of more than three letters, as rouge-score does.
    """

    def __init__(self, use_stemmer: bool = False) -> None:
        self._latin = tokenizers.DefaultTokenizer(use_stemmer)

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of ``text`` in order.

        >>> MixedTokenizer().tokenize("GPT-4 \u5f88\u597d\u3002")
        ['gpt', '4', '\u5f88', '\u597d']
        """
        if not has_characters(text):
            return self._latin.tokenize(text)
        pieces = _ONE_CHARACTER.split(unicodedata.normalize("NFKC", text))
        tokens = []
        for i, piece in enumerate(pieces):
            if i % 2:  # re.split puts what the group matched at the odd places
                tokens.append(piece)
            elif piece:
                tokens.extend(self._latin.tokenize(piece))
        return tokens
