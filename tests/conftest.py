# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ms_longctx import assets


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct (Llama architecture, 8K context) as a GGUF file."""
    return assets.fetch(assets.SMOLLM2_135M)


@pytest.fixture(scope="session")
def sentencepiece_model() -> Path:
    """A real SentencePiece BPE model with 32000 pieces and byte fallback."""
    return assets.fetch(assets.MISTRAL_SENTENCEPIECE)
