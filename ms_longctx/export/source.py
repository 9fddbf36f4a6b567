# SPDX-License-Identifier: Apache-2.0
"""What every export begins and ends with: the model in the wanted type, its graphs, its files and the manifest."""

from __future__ import annotations

import logging
from pathlib import Path

import mindspore as ms
from mindspore import Tensor

from ms_longctx.data.tokenizer_files import write_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.export.graphs import CachedGraph, DecodeGraph, PrefillGraph
from ms_longctx.export.key import ENCRYPTION, check_of
from ms_longctx.export.manifest import GraphInfo, Manifest, describe_files, written_by
from ms_longctx.export.plan import Plan
from ms_longctx.models.checkpoint import as_dtype
from ms_longctx.models.hf_config import write_config
from ms_longctx.models.llama import LlamaForCausalLM

_NAMES = {ms.float32: "fp32", ms.float16: "fp16", ms.bfloat16: "bf16"}
_TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_SENSITIVE = ("dynamic", "longrope")


def dtype_name(model: LlamaForCausalLM) -> str:
    """``fp32``, ``fp16`` or ``bf16``: the type the model computes in."""
    return _NAMES[model.model.compute_dtype]


def build_graph(model: LlamaForCausalLM, plan: Plan, graph: GraphInfo) -> tuple[CachedGraph, list[Tensor]]:
    """The Cell of one graph, and inputs without data that say its shapes."""
    is_prefill = graph.role == "prefill"
    kind = PrefillGraph if is_prefill else DecodeGraph
    chunk = None if is_prefill and graph.length is None else graph.chunk
    net = kind(model, plan.batch_size, chunk, graph.length, plan.rope_length(model.config))
    net.set_train(False)
    types = {"int32": ms.int32}
    inputs = [Tensor(shape=info.shape, dtype=types.get(info.dtype) or as_dtype(info.dtype)) for info in graph.inputs]
    return net, inputs


def write_model_files(model: LlamaForCausalLM, folder: Path) -> None:
    """Configuration and tokenizer, in Hugging Face's layout."""
    write_config(model.config, folder, _TORCH_NAMES[dtype_name(model)])
    if model.companions is not None:
        try:
            write_tokenizer(model.companions, folder)
        except MsLongctxError as error:  # graphs are of use without text
            logging.getLogger(__name__).warning("exported without a tokenizer: %s", error)


def finish(
    folder: Path,
    model: LlamaForCausalLM,
    plan: Plan,
    graphs: list[GraphInfo],
    kind: str,
    *,
    key: bytes | None = None,
    versions: dict[str, str] | None = None,
    notes: list[str] | None = None,
) -> Manifest:
    """Write the manifest over everything in ``folder``."""
    notes = list(notes or [])
    scaling = (model.config.rope_scaling or {}).get("rope_type")
    length = plan.rope_length(model.config)
    if scaling in _SENSITIVE:
        notes.append(f"rope_scaling {scaling}: the frequencies are those of a sequence of {length} tokens")
    manifest = Manifest(
        format=kind,
        config=model.config,
        dtype=dtype_name(model),
        batch_size=plan.batch_size,
        rope_length=length,
        graphs=graphs,
        files=describe_files(folder),
        encryption=ENCRYPTION if key else None,
        key_check=None if key is None else check_of(key),
        versions=written_by(mindspore=ms.__version__, **(versions or {})),
        notes=notes,
    )
    manifest.write(folder)
    return manifest
