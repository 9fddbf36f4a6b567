# SPDX-License-Identifier: Apache-2.0
"""Shortens a text inside an encoded prompt token by token, leaving every other token as it is."""

from __future__ import annotations

import numpy as np

from ms_longctx.data.tokenizer import Tokenizer

#: Where a text that is too long loses tokens.
CUTS = ("right", "left", "middle")


def shorten(
    tokenizer: Tokenizer, text: str, ids: np.ndarray, source: str, keep: int, cut: str, continues: bool
) -> np.ndarray | None:
    """Return ``ids`` without tokens of ``source``, at most ``keep`` of them; characters are never split.

    Args:
        tokenizer: made ``ids`` out of ``text``.
        text: the whole prompt segment.
        ids: int32 ``(n,)``, its tokens without BOS.
        source: the part of ``text`` that may lose tokens.
        keep: tokens to keep at most.
        cut: one of ``CUTS``.
        continues: ``text`` goes on after earlier tokens.

    Returns:
        int32 ``(m,)``, or ``None`` if nothing of ``source`` would be left.
    """
    ids, start, end = _source_tokens(tokenizer, text, ids, source, continues)
    surplus = len(ids) - keep
    if surplus >= end - start:
        return None
    first = {"right": end - surplus, "left": start, "middle": (start + end - surplus) // 2}[cut]
    last = first + surplus
    while first > start and _inside_character(tokenizer, ids, first):
        first -= 1
    while last < end and _inside_character(tokenizer, ids, last):
        last += 1
    return None if last - first >= end - start else np.concatenate((ids[:first], ids[last:]))


def _source_tokens(
    tokenizer: Tokenizer, text: str, ids: np.ndarray, source: str, continues: bool
) -> tuple[np.ndarray, int, int]:
    """Return the tokens and the range of those that lie wholly in ``source``.

    A tokenizer that changes the text has no offsets; then the three parts are encoded one by one.
    """
    position = text.index(source)
    offsets = tokenizer.byte_offsets(text, ids.tolist(), continues)
    if offsets is not None:
        begin = len(text[:position].encode("utf-8"))
        stop = begin + len(source.encode("utf-8"))
        start = int(np.searchsorted(offsets[:-1], begin, side="left"))
        return ids, start, int(np.searchsorted(offsets[1:], stop, side="right"))
    before = tokenizer.encode(text[:position], continues=continues)
    inside = tokenizer.encode(source, continues=continues or position > 0)
    after = tokenizer.encode(text[position + len(source) :], continues=True)
    joined = np.array(before + inside + after, dtype=np.int32)
    return joined, len(before), len(before) + len(inside)


def _inside_character(tokenizer: Tokenizer, ids: np.ndarray, index: int) -> bool:
    """Whether token ``index`` starts with a UTF-8 continuation byte."""
    return index < len(ids) and (tokenizer.token_bytes(int(ids[index]))[:1] or b"\0")[0] & 0xC0 == 0x80
