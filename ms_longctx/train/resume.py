# SPDX-License-Identifier: Apache-2.0
"""Which changes of the configuration since a checkpoint matter to the run that resumes, and how much."""

from __future__ import annotations

import logging
from typing import Any

from ms_longctx.errors import MsLongctxError

# With these changed, the state of the checkpoint means nothing to the run.
_REFUSED = {
    "train.objective": "the checkpoint was trained for another objective",
    "optimizer.type": "the state of one optimizer cannot be used by another",
    "lora.enabled": "a checkpoint of adapters and one of a whole model cannot be exchanged",
    "lora.r": "the adapters have another shape",
    "lora.lora_alpha": "the adapters were trained with another scaling",
    "lora.use_rslora": "the adapters were trained with another scaling",
    "lora.target_modules": "the adapters sit on other layers",
    "lora.modules_to_save": "other modules were trained",
    "lora.bias": "other biases were trained",
    "optimizer.betas": "the moments were averaged with other factors",
    "optimizer.eps": "the optimizer's state belongs to another epsilon",
    "optimizer.weight_decay": "the parameter groups were trained with another decay",
}
# Changed, they do not change a single number of the training.
_FREE_SECTIONS = ("generation", "evaluate", "parallel")
_FREE = {
    "data.path",  # what the path holds is compared instead
    "data.tokenizer",
    "data.eval_path",
    "data.num_parallel_workers",
    "train.output_dir",
    "train.save_steps",
    "train.keep_checkpoints",
    "train.log_steps",
    "train.eval_steps",
    "train.resume",
    "train.max_skipped_steps",
    "train.recompute",
}
# Model keys that change speed or memory only.
_FREE_MODEL = {"use_flash_attention", "parallel_attention", "pretrained"}

# Keys that only say when the run ends, unless the learning rate depends on that.
_LENGTH = {"train.max_steps", "train.epochs"}

logger = logging.getLogger(__name__)

Sections = dict[str, dict[str, Any]]


def check_changes(saved: Sections, current: Sections) -> list[str]:
    """Compare the configuration of a checkpoint with that of the run that resumes from it.

    Args:
        saved, current: ``RunConfig.as_dict()`` of both.

    Returns:
        One warning per changed key after which the run is not what an uninterrupted run would have been. They
        are logged too.

    Raises:
        MsLongctxError: keys changed that cannot; the message names each with the reason.
    """
    refused, warnings = [], []
    free = _FREE | (_LENGTH if _ignores_length(saved) and _ignores_length(current) else set())
    if _sequences(saved) == _sequences(current):
        free = free | {"train.batch_size", "train.gradient_accumulation_steps"}
    for section in current:
        if section in _FREE_SECTIONS:
            continue
        for name, value in current[section].items():
            before = saved.get(section, {}).get(name)
            key = f"{section}.{name}"
            if before == value or key in free or (section == "model" and name in _FREE_MODEL):
                continue
            change = f"{key} was {before!r}, now it is {value!r}"
            if reason := _REFUSED.get(key):
                refused.append(f"{change} ({reason})")
            elif section == "model":
                refused.append(f"{change} (the weights belong to another architecture)")
            else:
                warnings.append(f"{change}: the run goes on, but not as it would have without a break")
    if refused:
        raise MsLongctxError(
            f"cannot resume: {'; '.join(refused)}. Set the old value, or start a new run with another train.output_dir"
        )
    for warning in warnings:
        logger.warning("resume: %s", warning)
    return warnings


def _sequences(sections: Sections) -> int:
    """Sequences of an optimizer step on all workers together, however they are cut into micro batches."""
    train, parallel = sections["train"], sections["parallel"]
    micro_batches = train["gradient_accumulation_steps"]
    if parallel["pp"] > 1:
        micro_batches = parallel["micro_batch_num"] or max(micro_batches, parallel["pp"])
    return int(train["batch_size"] * parallel["dp"] * micro_batches)


def _ignores_length(sections: Sections) -> bool:
    optimizer = sections["optimizer"]
    return optimizer["scheduler"] == "constant" and not optimizer["warmup_ratio"]


def check_data(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Warn when the training set is another one than the checkpoint's (its path alone does not matter).

    Args:
        saved, current: both sets as :func:`~ms_longctx.train.stream.describe_set` gives them.
    """
    different = [key for key in current if saved.get(key) != current[key]]
    if different:
        changes = "; ".join(f"{key} was {saved.get(key)}, now {current[key]}" for key in different)
        logger.warning(
            "resume: the training set is another one (%s): the run goes on at the same position in it, but "
            "not as it would have without a break",
            changes,
        )
