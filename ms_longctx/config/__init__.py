# SPDX-License-Identifier: Apache-2.0
"""Configuration: dataclasses are the YAML schema; :func:`load_config` reads, merges and checks one run."""

from __future__ import annotations

from ms_longctx.config.load import load_config, load_strategy, override_keys
from ms_longctx.config.model import LlamaConfig
from ms_longctx.config.presets import find_config, preset_names
from ms_longctx.config.pretrained import merge_architecture
from ms_longctx.config.sections import (
    DataConfig,
    EvaluateConfig,
    GenerationConfig,
    LoraSection,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from ms_longctx.config.source import ConfigError

__all__ = [
    "ConfigError",
    "DataConfig",
    "EvaluateConfig",
    "GenerationConfig",
    "LlamaConfig",
    "LoraSection",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "find_config",
    "load_config",
    "load_strategy",
    "merge_architecture",
    "override_keys",
    "preset_names",
]
