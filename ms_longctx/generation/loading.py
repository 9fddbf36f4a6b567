# SPDX-License-Identifier: Apache-2.0
"""A model with its adapters merged, and its tokenizer, from what training or another tool left on disk."""

from __future__ import annotations

from pathlib import Path

from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.export.key import read_key
from ms_longctx.export.manifest import is_export
from ms_longctx.generation.engine import EngineSource
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.train.build import check_dtype
from ms_longctx.train.checkpoint import CheckpointStore
from ms_longctx.train.rundir import CHECKPOINTS
from ms_longctx.tuning import load_adapter, merge_and_unload


def load_model(
    model: str | Path,
    adapter: str | Path | None = None,
    dtype: str = "fp32",
    device: str = "auto",
    computes: bool = True,
) -> LlamaForCausalLM:
    """A model ready to generate.

    Args:
        model: ``.gguf`` file, Hugging Face directory, checkpoint, or output directory of a training run.
        adapter: directory of an adapter in peft's format, a checkpoint of a LoRA run, or that run's output
            directory. It is merged into the weights; quantized ones are dequantized for that.
        dtype: fp32, fp16 or bf16 (the latter on Ascend).
        device: see :func:`ms_longctx.device.select_device`.
        computes: ``False`` for a model that is only stored: bf16 is allowed everywhere, quantized weights are
            dequantized.

    Raises:
        MsLongctxError: nothing usable there, or model and adapter do not fit each other.
    """
    from ms_longctx.device import select_device

    if is_export(Path(model)):
        raise MsLongctxError(
            f"{model} is an export, which only answers (generate, chat); give the model it was made of"
        )
    target = select_device(device)
    if computes:
        check_dtype(dtype, target, "dtype")
    path = newest_checkpoint(Path(model))
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise MsLongctxError(
            f"{model} holds an adapter, not a model; give it as --adapter and its base model as --model"
        )
    loaded = LlamaForCausalLM.from_pretrained(path, dtype=dtype, packed=computes and adapter is None)
    if adapter is not None:
        merge_and_unload(load_adapter(loaded, newest_checkpoint(Path(adapter))))
    loaded.set_train(False)
    return loaded


def load_answering_model(
    model: str | Path,
    adapter: str | Path | None = None,
    dtype: str = "fp32",
    device: str = "auto",
    key_file: str | Path | None = None,
) -> LlamaForCausalLM | EngineSource:
    """As :func:`load_model`, or the export (MindIR, ONNX, Lite) in the directory ``model``.

    Args:
        key_file: holds the key of an encrypted export.

    Raises:
        MsLongctxError: as :func:`load_model`; an adapter, or another dtype than its own, for an export; a key for
            anything else.
    """
    if not is_export(Path(model)):
        if key_file is not None:
            raise MsLongctxError(f"--key_file is for encrypted exports, {model} is none; leave it out")
        return load_model(model, adapter, dtype, device)
    from ms_longctx.device import select_device
    from ms_longctx.export.open import open_export

    select_device(device)
    if adapter is not None:
        raise MsLongctxError(f"{model} is an export: an adapter is merged when it is written (export --adapter)")
    exported = open_export(Path(model), None if key_file is None else read_key(key_file))
    if dtype not in ("fp32", exported.manifest.dtype):
        raise MsLongctxError(f"--dtype {dtype}: {model} was exported in {exported.manifest.dtype}; leave --dtype out")
    return exported


def load_text_tokenizer(
    tokenizer: str | Path | None,
    model: str | Path,
    loaded: LlamaForCausalLM | EngineSource,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer that was named, or the one beside the model; its ids must fit the model's vocabulary."""
    path = newest_checkpoint(Path(tokenizer or model))
    try:
        result = load_tokenizer(path, chat_template)
    except MsLongctxError as error:
        raise MsLongctxError(str(error) if tokenizer else f"{error}; or give another as --tokenizer") from error
    if result.vocab_size > loaded.config.vocab_size:
        raise MsLongctxError(
            f"the tokenizer {path} has {result.vocab_size} tokens, the model {model} only "
            f"{loaded.config.vocab_size}; give the model's own as --tokenizer"
        )
    return result


def newest_checkpoint(path: Path) -> Path:
    """``path`` itself, or the newest checkpoint when it is the output directory of a training run."""
    if not (path / CHECKPOINTS).is_dir():
        return path
    found = CheckpointStore(path / CHECKPOINTS).newest()
    if found is None:
        raise MsLongctxError(f"{path / CHECKPOINTS} holds no checkpoint; train first")
    return found
