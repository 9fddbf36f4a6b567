# SPDX-License-Identifier: Apache-2.0
"""ms_longctx: train, evaluate and serve long-context Llama models with MindSpore on Ascend NPUs.

Public names are imported on first use, so that ``import ms_longctx`` does not load MindSpore.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "LlamaConfig": "ms_longctx.config.model",
    "LlamaForCausalLM": "ms_longctx.models.llama",
    "LoraConfig": "ms_longctx.tuning",
    "get_pe_model": "ms_longctx.tuning",
    "prepare_model": "ms_longctx.tuning",
    "create_dataset": "ms_longctx.data.dataset",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'ms_longctx' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
