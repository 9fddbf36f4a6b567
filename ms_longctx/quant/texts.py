# SPDX-License-Identifier: Apache-2.0
"""Calibration and held-out text: JSON lines to windows of tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ms_longctx.data.conversation import Renderer
from ms_longctx.data.formats import RowError, RowReader, detect_format
from ms_longctx.data.source import find_inputs, read_chunks
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.errors import MsLongctxError

Tokens = NDArray[np.int32]
log = logging.getLogger(__name__)
_SPARE = 4  # windows read for each that is used, so that they come from more texts


def read_texts(path: str, tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Texts of a ``.jsonl`` or ``.jsonl.gz`` file in any format ``ms-longctx prepare`` reads; chats are rendered.

    Args:
        path: the file.
        tokenizer: its chat template renders conversations.
        tokens: about as many are wanted; reading stops when there are several times more, in two texts at least.

    Raises:
        MsLongctxError: no such file, or no row that can be read (the message has the first reason).
    """
    texts: list[str] = []
    characters, skipped, first_problem = 0, 0, "it is empty"
    reader: RowReader | None = None
    render = Renderer(tokenizer)
    for place, line in _rows(path):
        try:
            row = json.loads(line)
            reader = reader or RowReader(detect_format(row, {}), {})
            content = reader.read(row)
            text = content if isinstance(content, str) else render.whole(content)
            text.encode()  # JSON can escape half of a surrogate pair, which no tokenizer takes
        except (ValueError, RowError) as error:
            first_problem = first_problem if skipped else f"{place}: {error}"
            skipped += 1
            continue
        texts.append(text)
        characters += len(text)
        enough = characters > 8 * tokens * _SPARE  # a token has rarely more than 8 characters
        if enough and texts[0] != text:  # one text can be a book; another has to be there to be kept apart
            break
    if not texts:
        raise MsLongctxError(f"{path}: no text to calibrate with: {first_problem}")
    if skipped:
        log.warning("%s: %d rows left out, %d texts read; the first: %s", path, skipped, len(texts), first_problem)
    return texts


def _rows(path: str) -> Iterator[tuple[str, bytes]]:
    """File and line for messages, and the line, of each that is not blank."""
    for chunk in read_chunks(find_inputs([path])):
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if line.strip():
                yield f"{chunk.file} line {number}", line


def cut_windows(texts: list[str], tokenizer: Tokenizer, count: int, length: int) -> Tokens:
    """At most ``count`` windows of ``length`` tokens, spread evenly over the texts: int32 ``(windows, length)``.

    Raises:
        MsLongctxError: no text is that long.
    """
    windows: list[Tokens] = []
    share = -(-count * _SPARE // len(texts))
    for text in texts:
        ids = np.array(tokenizer.encode(text[: share * length * 8], add_bos=tokenizer.adds_bos), np.int32)
        usable = len(ids) // length
        windows += list(ids[: usable * length].reshape(usable, length)[:share])
    if not windows:
        raise MsLongctxError(
            f"none of {len(texts)} texts has the {length} tokens of a window; give longer ones or less --seq_length"
        )
    if len(windows) < count:
        log.warning("%d texts give only %d of %d windows of %d tokens", len(texts), len(windows), count, length)
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return np.stack([windows[index] for index in chosen])


def split_heldout(texts: list[str]) -> tuple[list[str], list[str]]:
    """Every tenth text apart, at least one; they are never calibrated on.

    Raises:
        MsLongctxError: all texts are the same.
    """
    held = texts[9::10] or texts[-1:]
    apart = set(held)
    kept = [text for text in texts if text not in apart]
    if not kept:
        raise MsLongctxError("one text (or one many times) is too little to keep some apart; give --heldout_data")
    return kept, held
