# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies of every scaling, and the cosine and sine tables made of them.

Frequencies and tables are computed in float64 on the host and cast to fp32 last: at position 131071 an fp32
angle is wrong by 0.004 radians, a float64 one is not. :mod:`ms_longctx.nn.rotary` applies the tables.
"""

import functools
import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from ms_longctx.config.model import LlamaConfig


def rope_frequencies(config: LlamaConfig, length: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor on cosine and sine for a sequence of ``length`` tokens.

    Only the types ``dynamic`` and ``longrope`` depend on ``length``. The numbers are those of transformers'
    ``modeling_rope_utils``, except that an ``original_max_position_embeddings`` inside ``rope_scaling`` is
    honoured for ``dynamic`` and ``longrope`` too, where transformers 4.57 accepts and ignores it.

    Returns:
        ``(inv_freq, factor)``: float64 ``(head_dim / 2,)`` in radians a token, and a plain number.
    """
    scaling = config.rope_scaling or {"rope_type": "default"}
    dim = config.head_size
    inv_freq = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    kind = scaling["rope_type"]
    if kind == "linear":
        return inv_freq / scaling["factor"], 1.0
    if kind == "dynamic":
        return _dynamic(inv_freq, scaling, length, original_length(config)), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, scaling, config), _yarn_attention_factor(scaling)
    if kind == "longrope":
        return _longrope(inv_freq, scaling, length, config)
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    return inv_freq, 1.0


def original_length(config: LlamaConfig) -> int:
    """Length in tokens the model was first trained at, before any scaling."""
    inside = (config.rope_scaling or {}).get("original_max_position_embeddings")
    return inside or config.original_max_position_embeddings or config.max_position_embeddings


def _dynamic(inv_freq: np.ndarray, scaling: dict[str, Any], length: Any, original: int) -> np.ndarray:
    """NTK-aware scaling with a base that grows with the length (bloc97 and emozilla, 2023).

    base' = base * r ** (d / (d - 2)), hence inv_freq'_i = inv_freq_i * r ** (-2i / (d - 2)). ``length`` is a
    number, or an array ``(n, 1)`` for n rows of frequencies.
    """
    half = len(inv_freq)
    factor = scaling["factor"]
    ratio = factor * np.maximum(length, original) / original - (factor - 1)
    return inv_freq * ratio ** (-np.arange(half) / (half - 1))


def _yarn(inv_freq: np.ndarray, scaling: dict[str, Any], config: LlamaConfig) -> np.ndarray:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): only low frequencies are interpolated."""
    dim = config.head_size

    def dimension(rotations: float) -> float:
        """The index whose feature turns this often over the original length."""
        turns = original_length(config) / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return inv_freq / scaling["factor"] * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """Factor on cosine and sine: 0.1 ln(s) + 1 (section 3.3), or DeepSeek's quotient of two such terms."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope(
    inv_freq: np.ndarray, scaling: dict[str, Any], length: int, config: LlamaConfig
) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): searched factors, one set up to the original length."""
    original = original_length(config)
    per_feature = scaling["long_factor"] if length > original else scaling["short_factor"]
    stretch = config.max_position_embeddings / original
    if stretch == 1.0:
        stretch = scaling.get("factor", 1.0)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return inv_freq / np.asarray(per_feature, np.float64), float(attention_factor)


def _llama3(inv_freq: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3.1: wavelengths beyond the original length are divided by ``factor``, with a smooth crossing."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * inv_freq / scaling["factor"] + smooth * inv_freq


class RotaryTables(nn.Cell):
    """Cosines and sines of the positions of a batch.

    A table is exactly as long as the call needs (lengths are known when a graph is compiled) and becomes a
    constant of the graph. ``dynamic`` and ``longrope`` depend on how long a sequence is: with
    ``position_ids`` each row's length is its largest position plus one, so no row depends on its neighbours
    in the batch; in a packed row the longest document decides. A sequence that is generated piece by piece
    must be rotated with one set of frequencies throughout, hence ``rope_length``.

    Inputs:
        seq_length: number of positions (a Python integer).
        position_ids: ``(B, S)`` int32 or ``None`` for 0, 1, 2, ...; below
            ``max(seq_length, max_position_embeddings)``.
        rope_length: sequence length that decides the frequencies (a Python integer); ``None`` means that of
            the positions.

    Returns:
        ``(cos, sin)``: ``(B or 1, S, head_dim)`` fp32, both halves of a row equal.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kind = (config.rope_scaling or {"rope_type": "default"})["rope_type"]
        self.is_dynamic = kind == "dynamic"
        self.is_longrope = kind == "longrope"
        self.original = original_length(config)
        self.max_length = config.max_position_embeddings

        @functools.lru_cache(maxsize=4)
        def table(length: int, rope_length: int) -> Tensor:
            inv_freq, factor = rope_frequencies(config, rope_length)
            angles = np.arange(length, dtype=np.float64)[:, None] * inv_freq
            rows = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factor
            return Tensor(rows.astype(np.float32))

        @functools.lru_cache(maxsize=4)
        def frequency_rows(length: int) -> Tensor:
            base = rope_frequencies(config, 1)[0]
            rows = _dynamic(base, config.rope_scaling or {}, np.arange(length + 1)[:, None], self.original)
            return Tensor(rows.astype(np.float32))

        self.table = constexpr(table)
        self.frequency_rows = constexpr(frequency_rows)
        self.gather = ops.Gather()

    def construct(
        self, seq_length: int, position_ids: Tensor | None = None, rope_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if position_ids is None:
            length = seq_length if rope_length is None else rope_length
            return self._full_width(ops.expand_dims(self.table(seq_length, length), 0))
        longest = max(seq_length, self.max_length)
        if rope_length is not None:
            return self._full_width(self.gather(self.table(longest, rope_length), position_ids, 0))
        if self.is_dynamic:
            return self._dynamic_rows(position_ids, longest)
        if self.is_longrope:
            short = self.gather(self.table(longest, 1), position_ids, 0)
            long = self.gather(self.table(longest, self.original + 1), position_ids, 0)
            lengths = ops.expand_dims(position_ids.max(-1, keepdims=True), -1) + 1
            return self._full_width(ops.select(lengths > self.original, long, short))
        return self._full_width(self.gather(self.table(longest, 1), position_ids, 0))

    def _dynamic_rows(self, position_ids: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Each row with the frequencies of its own length; these angles are fp32 as the length is data."""
        lengths = position_ids.max(-1, keepdims=True) + 1
        inv_freq = self.gather(self.frequency_rows(longest), lengths, 0)
        angles = ops.expand_dims(ops.cast(position_ids, ms.float32), -1) * inv_freq
        return self._full_width(ops.concat((ops.cos(angles), ops.sin(angles)), -1))

    def _full_width(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = ops.chunk(rows, 2, -1)
        return ops.concat((cos, cos), -1), ops.concat((sin, sin), -1)
