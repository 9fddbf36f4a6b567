# SPDX-License-Identifier: Apache-2.0
"""Real tokenizers and documents, and prepared sets made of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer

ARTICLES = Path(__file__).resolve().parents[2] / "run_scripts" / "data" / "plos_articles_heldout.jsonl.gz"


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def mistral(sentencepiece_model: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_model)


@pytest.fixture(scope="session")
def smollm2_directory(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory written by transformers from the same model."""
    folder = tmp_path_factory.mktemp("smollm2")
    reference = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    reference.eos_token = "<|im_end|>"  # transformers 4.57 reads BOS in its place from this file
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def articles() -> list[dict[str, Any]]:
    """Real articles with abstracts, 13 to 150 thousand characters each."""
    with gzip.open(ARTICLES, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


@pytest.fixture(scope="session")
def chapters() -> list[dict[str, str]]:
    """Eight chapters of a Chinese novel, about five thousand characters each."""
    with gzip.open(Path(__file__).parent / "sanguo.jsonl.gz", "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


@pytest.fixture(scope="session")
def paragraphs(articles: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Rows of plain text, a paragraph each."""
    return [{"text": text} for row in articles for text in row["article"].split("\n\n") if len(text) > 40]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines into a file of this test's directory."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if name.endswith(".gz"):
            file.write_bytes(gzip.compress(lines.encode()))
        else:
            file.write_text(lines, encoding="utf-8")
        return file

    return write
