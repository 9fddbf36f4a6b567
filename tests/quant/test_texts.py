# SPDX-License-Identifier: Apache-2.0
"""Calibration text: rows that cannot be read, repeated texts, texts that are too short."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.quant.texts import cut_windows, read_texts, split_heldout


@pytest.fixture
def tokenizer(sentencepiece_model: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_model)


def test_rows_that_cannot_be_read_are_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [b"", b"no JSON", b'{"text": "\xff"}', rb'{"text": "half \ud800"}', b'{"text": "good"}', b'{"text": 3}']
    file = tmp_path / "calib.jsonl"
    file.write_bytes(b"\n".join(rows))
    with caplog.at_level(logging.WARNING):
        assert read_texts(str(file), tokenizer, 100) == ["good"]
    assert "4 rows left out, 1 texts read" in caplog.text and f"{file} line 2" in caplog.text
    file.write_bytes(b"\n \n")
    with pytest.raises(MsLongctxError, match="it is empty"):
        read_texts(str(file), tokenizer, 100)


def test_a_long_first_text_is_not_the_only_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "calib.jsonl"
    texts = ["long " * 1000, "long " * 1000, "short", "never read"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert read_texts(str(file), tokenizer, 4) == texts[:3]


def test_repeated_texts_are_not_on_both_sides() -> None:
    kept, held = split_heldout(["a", "b", "b"])
    assert (kept, held) == (["a"], ["b"])
    with pytest.raises(MsLongctxError, match="too little to keep some apart"):
        split_heldout(["a", "a"])


def test_windows_of_short_texts(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    texts = [json.dumps(list(range(size))) for size in (2, 30)]
    with caplog.at_level(logging.WARNING):
        windows = cut_windows(texts, tokenizer, 50, 16)
    assert windows.dtype == np.int32 and windows.shape[1] == 16
    assert f"only {len(windows)} of 50 windows of 16 tokens" in caplog.text
    with pytest.raises(MsLongctxError, match="none of 1 texts has the 16 tokens"):
        cut_windows(texts[:1], tokenizer, 50, 16)
