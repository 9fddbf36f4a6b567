# SPDX-License-Identifier: Apache-2.0
"""From the configuration of a run to its model, optimizer and loss scale."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms

from ms_longctx.config import RunConfig, merge_architecture
from ms_longctx.config.model import LlamaConfig
from ms_longctx.data.tokenizer import load_tokenizer
from ms_longctx.data.tokenizer_files import write_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.auto import open_checkpoint
from ms_longctx.models.checkpoint import as_dtype
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.groups import decay_groups
from ms_longctx.optim.loss_scale import DynamicLossScale
from ms_longctx.train.workers import ALONE, Workers
from ms_longctx.tuning import LoraConfig, get_pe_model, load_adapter


def build_model(run: RunConfig, checkpoint: Path | None = None, workers: Workers = ALONE) -> LlamaForCausalLM:
    """The model that a run trains, in training mode.

    Parameters are fp32 whatever ``train.dtype`` says; that is the type of activations and matrix products.

    Args:
        run: its ``model.pretrained`` gives the first weights, else they are random.
        checkpoint: of this run: its weights (or adapters) replace the first ones.
        workers: who trains; with context parallelism the model works on a piece of each sequence.

    Raises:
        MsLongctxError: files are missing or do not fit.
    """
    config = architecture(run)
    weights = run.model.pretrained
    if checkpoint is not None and not run.lora.enabled:
        weights = str(checkpoint)
    compute_dtype = as_dtype(run.train.dtype)
    if weights is None:
        model = LlamaForCausalLM(config, ms.float32, compute_dtype)
    else:
        model = LlamaForCausalLM.from_pretrained(weights, ms.float32, compute_dtype, packed=False, **config.to_dict())
        # Not the checkpoint: it is deleted when enough newer ones are there.
        model.companions = None if run.model.pretrained is None else Path(run.model.pretrained)
    if run.lora.enabled:
        get_pe_model(model, LoraConfig.from_section(run.lora), run.train.seed)
        if checkpoint is not None:
            load_adapter(model, checkpoint)
    if workers.strategy.cp > 1:
        model.set_context_parallel(workers.strategy, workers.rank)
    if run.train.recompute:
        model.set_recompute(selective=run.train.recompute == "selective")
    model.set_train()
    return model


def build_optimizer(run: RunConfig, model: LlamaForCausalLM) -> AdamW:
    """AdamW over the trainable parameters; matrices decay, norm weights and biases do not."""
    section = run.optimizer
    groups = decay_groups(model.trainable_params(), section.weight_decay)
    return AdamW(groups, section.betas, section.eps, section.max_grad_norm)


def build_loss_scale(run: RunConfig) -> DynamicLossScale:
    """The dynamic scale of fp16; in fp32 and bf16 a scale that stays at 1 and only counts skipped steps."""
    section = run.train
    if section.dtype == "fp16":
        return DynamicLossScale(
            section.loss_scale_init,
            section.loss_scale_window,
            section.loss_scale_min,
            section.max_skipped_steps,
        )
    return DynamicLossScale(1.0, sys.maxsize, 1.0, section.max_skipped_steps)


def check_dtype(dtype: str, device: str, key: str = "train.dtype") -> None:
    """Refuse a precision that the device cannot compute in; ``key`` is what the message calls it.

    Raises:
        MsLongctxError: bf16 anywhere but on Ascend.
    """
    if dtype == "bf16" and device != "Ascend":
        raise MsLongctxError(
            f"{key}: bf16 cannot be used on {device}: MindSpore has no bf16 matrix product, softmax or "
            "gather there; expected fp32 or fp16 (or device_target Ascend)"
        )


def tokenizer_fingerprint(run: RunConfig) -> str | None:
    """Fingerprint of the tokenizer that the run names, or that lies beside its first weights, if any."""
    if run.data.tokenizer is not None:
        return load_tokenizer(run.data.tokenizer).fingerprint()
    if run.model.pretrained is None:
        return None
    try:
        return load_tokenizer(run.model.pretrained).fingerprint()
    except MsLongctxError:  # weights without a tokenizer are fine: the vocabulary size is still checked
        return None


def copy_tokenizer(run: RunConfig, directory: Path) -> None:
    """Put the tokenizer that the run names beside the weights, if it names one."""
    if run.data.tokenizer is None:
        return
    write_tokenizer(Path(run.data.tokenizer), directory)


def architecture(run: RunConfig) -> LlamaConfig:
    """The model that a run describes; that of its first weights where it names some."""
    if run.model.pretrained is not None:
        return merge_architecture(run, open_checkpoint(Path(run.model.pretrained)).config)
    values = {name: getattr(run.model, name) for name in LlamaConfig.__dataclass_fields__}
    return LlamaConfig(**values)
