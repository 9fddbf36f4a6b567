# SPDX-License-Identifier: Apache-2.0
"""Parameter-efficient fine-tuning with peft's names, numbers and files."""

from ms_longctx.tuning.adapter_files import load_adapter, read_adapter_config, save_adapter
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.prepare import (
    count_parameters,
    get_pe_model,
    merge,
    merge_and_unload,
    prepare_model,
    print_trainable_parameters,
    unmerge,
)

__all__ = [
    "LoraConfig",
    "count_parameters",
    "get_pe_model",
    "load_adapter",
    "merge",
    "merge_and_unload",
    "prepare_model",
    "print_trainable_parameters",
    "read_adapter_config",
    "save_adapter",
    "unmerge",
]
