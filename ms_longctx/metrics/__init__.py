# SPDX-License-Identifier: Apache-2.0
"""Metrics of long-context models: ROUGE with sentence order (:class:`RougeLXT`) and perplexity."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "RougeLXT": "ms_longctx.metrics.rouge",
    "Perplexity": "ms_longctx.metrics.perplexity",
    "document_nll": "ms_longctx.metrics.perplexity",
    "split_sentences": "ms_longctx.metrics.sentences",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'ms_longctx.metrics' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
