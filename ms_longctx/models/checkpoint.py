# SPDX-License-Identifier: Apache-2.0
"""Moves tensors between files with Hugging Face's names and a model, one at a time.

A file stores q, k and v apart; a model with ``parallel_attention`` holds them in one matrix. Nothing else
differs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.slices import Piece

DTYPES = {
    "fp32": ms.float32,
    "float32": ms.float32,
    "fp16": ms.float16,
    "float16": ms.float16,
    "bf16": ms.bfloat16,
    "bfloat16": ms.bfloat16,
}
# Old Hugging Face files carry these tables, which follow from the configuration.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class TensorSource(Protocol):
    """Tensors in a file or a set of files, read one at a time.

    ``config`` is the architecture they are for; ``read`` gives fp32 or fp16 in memory of its own (bf16 and
    quantized types come as fp32).
    """

    path: Path
    config: LlamaConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name."""
        ...

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """The values of one tensor, or of a block of it."""
        ...

    def types(self) -> set[str]:
        """Safetensors names (F32, F16, BF16) of the types the tensors have."""
        ...


def as_dtype(dtype: ms.Type | str) -> ms.Type:
    """A MindSpore type from itself or from a name such as ``bf16`` or ``float32``."""
    if not isinstance(dtype, str):
        return dtype
    if dtype not in DTYPES:
        raise MsLongctxError(f"dtype = {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True)
class StoredPart:
    """One tensor of a file and what it is made of: a parameter, or one of the three parts of a fused one.

    Args:
        name, shape: as in the file.
        parameter: where the values are.
        index: 0, 1, 2 for q, k, v of a fused parameter; ``None`` for a parameter stored as it is.
        config: the model's configuration.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Parameter
    index: int | None
    config: LlamaConfig

    def values(self, dtype: ms.Type) -> np.ndarray:
        """The tensor in ``dtype``; bf16 has MindSpore's numpy type of two bytes."""
        array = self.parameter.astype(dtype).asnumpy()
        return array if self.index is None else split_qkv(array, self.config)[self.index]


def stored_parts(model: nn.Cell, config: LlamaConfig) -> list[StoredPart]:
    """The tensors a file of this model holds, in the order of the parameters."""
    parts = []
    heads = (config.num_attention_heads, config.kv_heads, config.kv_heads)
    for name, parameter in model.parameters_and_names():
        shape = tuple(parameter.shape)
        if ".qkv_proj." not in name:
            parts.append(StoredPart(name, shape, parameter, None, config))
            continue
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            part_shape = (heads[index] * config.head_size, *shape[1:])
            parts.append(StoredPart(name.replace("qkv_proj", part), part_shape, parameter, index, config))
    return parts


def load_parameters(model: nn.Cell, source: TensorSource) -> None:
    """Set every parameter of ``model`` from ``source``; beyond the model, one tensor at a time is in memory.

    Raises:
        MsLongctxError: names or shapes do not fit; the message lists them.
    """
    parts = stored_parts(model, source.config)
    _check_shapes({part.name: part.shape for part in parts}, source)
    _check_tied_head(source)
    fused: list[np.ndarray] = []
    for part in parts:
        array = source.read(part.name)
        if part.index is not None:
            fused.append(array)
            if part.index < 2:
                continue
            array = fuse_qkv(fused, source.config)
            fused = []
        tensor = Tensor.from_numpy(np.ascontiguousarray(array))
        part.parameter.set_data(tensor.astype(part.parameter.dtype))


def fuse_qkv(parts: list[np.ndarray], config: LlamaConfig) -> np.ndarray:
    """One matrix (or bias) whose rows are grouped by key/value head: its queries, its key, its value."""
    grouped = [part.reshape(config.kv_heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])


def split_qkv(fused: np.ndarray, config: LlamaConfig) -> list[np.ndarray]:
    """The q, k and v that :func:`fuse_qkv` put together."""
    dim = config.head_size
    queries = config.num_attention_heads // config.kv_heads * dim
    grouped = fused.reshape(config.kv_heads, -1, *fused.shape[1:])
    parts = np.split(grouped, [queries, queries + dim], axis=1)
    return [np.ascontiguousarray(part).reshape(-1, *fused.shape[1:]) for part in parts]


def _check_shapes(wanted: dict[str, tuple[int, ...]], source: TensorSource) -> None:
    found = source.shapes()
    if missing := sorted(wanted.keys() - found.keys()):
        raise MsLongctxError(f"{source.path}: no tensor {_listed(missing)}; the model is not complete")
    surplus = found.keys() - wanted.keys()
    if source.config.tie_word_embeddings:
        surplus = surplus - {"lm_head.weight"}
    if extra := sorted(name for name in surplus if not name.endswith(DERIVED_SUFFIXES)):
        raise MsLongctxError(
            f"{source.path}: unexpected tensor {_listed(extra)}; the configuration has no place for it"
        )
    if wrong := [f"{name} {found[name]} (expected {shape})" for name, shape in wanted.items() if found[name] != shape]:
        raise MsLongctxError(f"{source.path}: wrong shape of {_listed(wrong)}; check the configuration")


def _check_tied_head(source: TensorSource) -> None:
    if not source.config.tie_word_embeddings or "lm_head.weight" not in source.shapes():
        return
    if not np.array_equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight")):
        raise MsLongctxError(
            f"{source.path}: lm_head.weight differs from the embedding although tie_word_embeddings is true; "
            "set it to false in the configuration"
        )


def _listed(items: list[str], limit: int = 5) -> str:
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
