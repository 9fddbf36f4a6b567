# SPDX-License-Identifier: Apache-2.0
"""Llama models in GGUF files (llama.cpp), dequantized to fp32 tensor by tensor."""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.slices import Piece

# GGUF name -> Hugging Face name, outside and inside a block.
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tensors that hold rotary factors; they become part of the configuration.
_CHUNK = 1 << 20  # elements that are dequantized at a time
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufCheckpoint:
    """A GGUF file as a :class:`ms_longctx.models.checkpoint.TensorSource`.

    Args:
        path: the file.
        overrides: configuration fields to replace.

    Raises:
        MsLongctxError: not a complete GGUF file, or not a model this package can run.
    """

    def __init__(self, path: Path, **overrides: Any) -> None:
        self.path = path
        reader = _open(path)
        self._mapping = reader.data._mmap
        self._tensors = {}
        factors = {}
        for tensor in reader.tensors:
            if tensor.name in _ROPE_TENSORS:
                factors[tensor.name] = np.array(tensor.data, np.float64)
            else:
                self._tensors[_hugging_face_name(path, tensor.name)] = tensor
        metadata = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")}
        try:
            values = _Metadata(path, metadata).config_values(factors, self.shapes())
            self.config = LlamaConfig.from_dict({**values, **overrides})
        except MsLongctxError as error:
            message = str(error)
            raise MsLongctxError(message if str(path) in message else f"{path}: {message}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
        """One tensor, or a block of it, in fp32, with the rows of q and k in Hugging Face's order."""
        array = self._read(name)
        return array if piece is None else np.array(array[piece.place_in(Piece.all_of(array.shape))])

    def types(self) -> set[str]:
        """Safetensors name of the type that the tensors are given in."""
        return {"F32"}

    def _read(self, name: str) -> np.ndarray:
        from gguf import dequantize

        tensor = self._tensors[name]
        array = np.empty(self.shapes()[name], np.float32)
        # By rows: the intermediate results of a large table would take several times its memory.
        step = max(1, _CHUNK // max(1, math.prod(array.shape[1:])))
        for start in range(0, len(array), step):
            array[start : start + step] = dequantize(tensor.data[start : start + step], tensor.tensor_type)
        # What was read stays in the cache of the system but no longer counts as memory of this process.
        self._mapping.madvise(mmap.MADV_DONTNEED)
        if ".q_proj." in name:
            return unpermute(array, self.config.num_attention_heads)
        if ".k_proj." in name:
            return unpermute(array, self.config.kv_heads)
        return array


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of q and k, from pairs side by side to rotate-half.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates feature i with feature i + D / 2.
    """
    split = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except OSError as error:
        raise MsLongctxError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise MsLongctxError(f"{path}: not a complete GGUF file ({error}); copy or download it again") from error
    size = path.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise MsLongctxError(f"{path}: ends before tensor {tensor.name}; copy or download it again")
    return reader


def _hugging_face_name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in _BLOCK_NAMES:
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{kind}"
    raise MsLongctxError(f"{path}: tensor {name} is not part of a Llama model; this model is not supported")


class _Metadata:
    """Key-value pairs of a GGUF file, read as a configuration."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self.fields = fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise MsLongctxError(f"{self.path}: metadata key {key} is missing")
        return value

    def config_values(self, factors: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        """Fields of a :class:`LlamaConfig`."""
        architecture = self.need("general.architecture")
        if architecture != "llama":
            raise MsLongctxError(f"{self.path}: architecture {architecture!r} is not supported; expected 'llama'")
        if self.get("llama.expert_count"):
            raise MsLongctxError(f"{self.path}: mixture-of-experts models are not supported")
        heads = self.need("llama.attention.head_count")
        hidden = self.need("llama.embedding_length")
        head_dim = self.get("llama.attention.key_length", hidden // heads)
        rotated = self.get("llama.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise MsLongctxError(f"{self.path}: only {rotated} of {head_dim} features are rotated; not supported")
        return {
            "vocab_size": shapes.get("model.embed_tokens.weight", (self.get("llama.vocab_size"),))[0],
            "hidden_size": hidden,
            "intermediate_size": self.need("llama.feed_forward_length"),
            "num_hidden_layers": self.need("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.need("llama.context_length"),
            "rms_norm_eps": _shortest(self.need("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.get("llama.rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(factors),
            "sliding_window": self.get("llama.attention.sliding_window"),
            "tie_word_embeddings": "lm_head.weight" not in shapes,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }

    def _rope_scaling(self, factors: dict[str, np.ndarray]) -> dict[str, Any] | None:
        original = self.get("llama.rope.scaling.original_context_length")
        kind = self.get("llama.rope.scaling.type", "none")
        factor = self.get("llama.rope.scaling.factor", self.get("llama.rope.scale_linear", 1.0))
        if "rope_freqs.weight" in factors:  # Llama 3.1: the divisors of the frequencies, already worked out
            divisors = factors["rope_freqs.weight"].tolist()
            return _longrope(divisors, divisors, 1.0, None)
        if "rope_factors_long.weight" in factors:
            short, long = (factors[f"rope_factors_{name}.weight"].tolist() for name in ("short", "long"))
            return _longrope(short, long, self.get("llama.rope.scaling.attn_factor"), original)
        if kind == "yarn":
            # llama.cpp multiplies its factor with YaRN's own; a configuration holds the product.
            attention = self.get("llama.rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
            values = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            return {**values, "attention_factor": attention}
        if kind not in ("none", "linear"):
            raise MsLongctxError(f"{self.path}: rope scaling {kind!r} is not supported")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _longrope(short: list[float], long: list[float], attention: float | None, original: int | None) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))
