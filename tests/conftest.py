# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ms_longctx import assets

# A shell without job control starts what it puts in the background with Ctrl-C ignored, and all children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct (Llama architecture, 8K context) as a GGUF file."""
    return assets.fetch(assets.SMOLLM2_135M)


@pytest.fixture(scope="session")
def sentencepiece_model() -> Path:
    """A real SentencePiece BPE model with 32000 pieces and byte fallback."""
    return assets.fetch(assets.MISTRAL_SENTENCEPIECE)
