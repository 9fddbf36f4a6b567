# SPDX-License-Identifier: Apache-2.0
"""Architecture of a run that starts from a checkpoint: the checkpoint's own with the run's changes."""

from __future__ import annotations

from dataclasses import fields, replace

from ms_longctx.config.model import LlamaConfig
from ms_longctx.config.sections import RunConfig
from ms_longctx.config.source import ConfigError

_DECIDED_BY_WEIGHTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)


def merge_architecture(run: RunConfig, checkpoint: LlamaConfig) -> LlamaConfig:
    """The checkpoint's architecture with the model keys that the run states (``run.given``).

    Keys that shape the weights may be stated, but must agree with the checkpoint. Every other stated key
    replaces the checkpoint's value: ``rope_scaling`` and ``max_position_embeddings`` to stretch the context,
    ``position_embedding``, ``sliding_window``, ``use_flash_attention``, ``parallel_attention``, token ids.

    Raises:
        ConfigError: a stated key contradicts the weights, or ``data.seq_length`` exceeds the model's length.
    """
    changes = {}
    for name in (field.name for field in fields(LlamaConfig)):
        if f"model.{name}" not in run.given:
            continue
        stated, found = getattr(run.model, name), getattr(checkpoint, name)
        if name in _DECIDED_BY_WEIGHTS and stated != found:
            raise ConfigError(
                f"model.{name}: {stated} contradicts the weights of {run.model.pretrained}, "
                f"which have {found}; remove the key"
            )
        changes[name] = stated
    merged = replace(checkpoint, **changes)
    if run.data.seq_length > merged.max_position_embeddings:
        raise ConfigError(
            f"data.seq_length: {run.data.seq_length} is longer than the {merged.max_position_embeddings} "
            f"tokens of {run.model.pretrained}; shorten it, or set model.max_position_embeddings and "
            "model.rope_scaling"
        )
    return merged
