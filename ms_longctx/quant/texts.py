# SPDX-License-Identifier: Apache-2.0
"""Calibration and held-out text: JSON lines to windows of tokens."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from ms_longctx.data.conversation import Renderer
from ms_longctx.data.formats import RowError, RowReader, detect_format
from ms_longctx.data.source import find_inputs, read_chunks
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.errors import MsLongctxError

Tokens = NDArray[np.int32]
_SPARE = 4  # windows read for each that is used, so that they come from more texts


def read_texts(path: str, tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Texts of a ``.jsonl`` or ``.jsonl.gz`` file in any format ``ms-longctx prepare`` reads; chats are rendered.

    Args:
        path: the file.
        tokenizer: its chat template renders conversations.
        tokens: about as many are wanted; reading stops when there are several times more.

    Raises:
        MsLongctxError: no such file, or no row that can be read (the message has the first reason).
    """
    texts: list[str] = []
    characters, first_problem = 0, "it is empty"
    reader: RowReader | None = None
    render = Renderer(tokenizer)
    for chunk in read_chunks(find_inputs([path])):
        for number, line in enumerate(chunk.lines, chunk.first_line):
            try:
                row = json.loads(line)
                reader = reader or RowReader(detect_format(row, {}), {})
                content = reader.read(row)
                texts.append(content if isinstance(content, str) else render.whole(content))
            except (ValueError, RowError) as error:
                if not texts and first_problem == "it is empty":
                    first_problem = f"line {number}: {error}"
                continue
            characters += len(texts[-1])
            if characters > 8 * tokens * _SPARE:  # a token has rarely more than 8 characters
                return texts
    if not texts:
        raise MsLongctxError(f"{path}: no text to calibrate with: {first_problem}")
    return texts


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
        raise MsLongctxError(f"no text has {length} tokens; give longer texts or a smaller --seq_length")
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return np.stack([windows[index] for index in chosen])


def split_heldout(texts: list[str]) -> tuple[list[str], list[str]]:
    """Every tenth text apart, at least one; they are never calibrated on.

    Raises:
        MsLongctxError: there is one text only.
    """
    if len(texts) < 2:
        raise MsLongctxError("one text is too little to keep some apart; give --heldout_data")
    held = texts[9::10] or texts[-1:]
    return [text for text in texts if text not in set(held)], held
