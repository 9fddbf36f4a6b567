# SPDX-License-Identifier: Apache-2.0
"""A Llama architecture under Hugging Face's field names: the model section of a configuration."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

from ms_longctx.errors import MsLongctxError

POSITION_EMBEDDINGS = ("rope", "alibi")

# rope_scaling keys per type: (required, optional), as in transformers' modeling_rope_utils.
ROPE_SCALING_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale"}
            | {"mscale_all_dim", "truncate"}
        ),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"factor", "attention_factor", "original_max_position_embeddings"}),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture of a Llama model; the defaults are those of Hugging Face's ``LlamaConfig``.

    Args:
        vocab_size: rows of the embedding table.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; ``None`` means as many as query heads. Must divide the query
            heads.
        head_dim: width of one head; ``None`` means ``hidden_size // num_attention_heads``.
        hidden_act: only ``silu`` (SwiGLU).
        max_position_embeddings: longest sequence, in tokens, the model is meant for.
        original_max_position_embeddings: length before LongRoPE stretched it, where ``config.json`` keeps it
            outside ``rope_scaling``.
        initializer_range: standard deviation of freshly initialised matrices.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: ``{"rope_type": default|linear|dynamic|yarn|longrope|llama3, ...}`` with transformers'
            keys; the old spelling ``type`` is read as ``rope_type``. ``None`` means no scaling.
        tie_word_embeddings: the output head is the embedding table.
        attention_bias: biases in the q, k, v and o projections.
        mlp_bias: biases in the gate, up and down projections.
        bos_token_id, eos_token_id, pad_token_id: special tokens; ``eos_token_id`` may be a list.
        position_embedding: ``rope``, or ``alibi`` (linear biases on the attention scores instead of
            rotation).
        sliding_window: each token sees this many last tokens, itself included; ``None`` means all.
        use_flash_attention: the fused attention of the device; ``False`` means the plain reference.
        parallel_attention: one fused matrix for q, k and v (a layout in memory; files keep them apart).

    Raises:
        MsLongctxError: a value is impossible; the message begins with the key.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    position_embedding: str = "rope"
    sliding_window: int | None = None
    use_flash_attention: bool = True
    parallel_attention: bool = False

    def __post_init__(self) -> None:
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            _require_positive(key, getattr(self, key), int)
        for key in ("max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_theta"):
            _require_positive(key, getattr(self, key), int if key.startswith("max") else float)
        for key in ("head_dim", "num_key_value_heads", "original_max_position_embeddings", "sliding_window"):
            if getattr(self, key) is not None:
                _require_positive(key, getattr(self, key), int)
        self._fill_heads()
        if self.hidden_act != "silu":
            raise MsLongctxError(f"hidden_act = {self.hidden_act!r} is not supported; expected 'silu'")
        if self.position_embedding not in POSITION_EMBEDDINGS:
            raise MsLongctxError(
                f"position_embedding = {self.position_embedding!r} is unknown; expected 'rope' or 'alibi'"
            )
        self._fill_rope_scaling()

    def _fill_heads(self) -> None:
        """Give the two head fields that may be ``None`` their values, and check that they divide."""
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if heads % self.kv_heads:
            raise MsLongctxError(f"num_key_value_heads = {self.kv_heads} must divide num_attention_heads = {heads}")
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise MsLongctxError(
                    f"num_attention_heads = {heads} must divide hidden_size = {self.hidden_size} "
                    "when head_dim is not given"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.position_embedding == "rope" and self.head_size % 2:
            raise MsLongctxError(f"head_dim = {self.head_size} must be even: rotary embedding turns pairs of features")

    def _fill_rope_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        if self.position_embedding == "alibi":
            raise MsLongctxError("rope_scaling has no effect with position_embedding = 'alibi'; remove one of them")
        scaling = check_rope_scaling(self.rope_scaling, self.head_size)
        object.__setattr__(self, "rope_scaling", scaling)

    @property
    def head_size(self) -> int:
        """``head_dim`` as the plain integer it is after validation."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        """``num_key_value_heads`` as the plain integer it is after validation."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def eos_token_ids(self) -> list[int]:
        """End-of-sequence tokens as a list, empty when there is none."""
        if self.eos_token_id is None:
            return []
        return [self.eos_token_id] if isinstance(self.eos_token_id, int) else list(self.eos_token_id)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """Build a configuration from field names; an unknown one is an error that suggests the nearest."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise MsLongctxError(f"{key}: unknown model key{_nearest(key, known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, in declaration order."""
        return dataclasses.asdict(self)


def check_rope_scaling(scaling: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return a copy of a ``rope_scaling`` mapping with the type under ``rope_type``, or say what is wrong.

    Raises:
        MsLongctxError: unknown type, unknown or missing key, or an impossible value.
    """
    if not isinstance(scaling, dict):
        raise MsLongctxError(f"rope_scaling = {scaling!r} must be a mapping with the key 'rope_type'")
    values = dict(scaling)
    old_spelling = values.pop("type", None)
    kind = values.pop("rope_type", old_spelling)
    if old_spelling is not None and old_spelling != kind:
        raise MsLongctxError(f"rope_scaling.type = {old_spelling!r} contradicts rope_scaling.rope_type = {kind!r}")
    if not isinstance(kind, str) or kind not in ROPE_SCALING_KEYS:
        raise MsLongctxError(
            f"rope_scaling.rope_type = {kind!r} is unknown; expected one of {', '.join(ROPE_SCALING_KEYS)}"
        )
    required, optional = ROPE_SCALING_KEYS[kind]
    values = {key: value for key, value in values.items() if value is not None}
    for key in values:
        if key not in required | optional:
            suggestion = _nearest(key, sorted(required | optional))
            raise MsLongctxError(f"rope_scaling.{key}: unknown key for rope_type {kind!r}{suggestion}")
    if missing := sorted(required - values.keys()):
        raise MsLongctxError(f"rope_scaling.{missing[0]}: missing, rope_type {kind!r} needs it")
    _check_rope_values(values, head_dim)
    return {"rope_type": kind, **values}


def _check_rope_values(values: dict[str, Any], head_dim: int) -> None:
    for key, value in values.items():
        name = f"rope_scaling.{key}"
        if key == "truncate":
            if not isinstance(value, bool):
                raise MsLongctxError(f"{name} = {value!r} must be true or false")
        elif key in ("short_factor", "long_factor"):
            if not isinstance(value, (list, tuple)) or len(value) != head_dim // 2:
                raise MsLongctxError(f"{name} must be a list of head_dim / 2 = {head_dim // 2} numbers")
            for item in value:
                _require_positive(name, item, float)
        else:
            _require_positive(name, value, int if key == "original_max_position_embeddings" else float)
    if values.get("factor", 1) < 1:
        raise MsLongctxError(f"rope_scaling.factor = {values['factor']} must be at least 1")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in values and high in values and values[low] >= values[high]:
            raise MsLongctxError(f"rope_scaling.{low} = {values[low]} must be below {high} = {values[high]}")


def _require_positive(key: str, value: Any, kind: type) -> None:
    numeric = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, numeric) or not 0 < value < math.inf:
        article = "a positive integer" if kind is int else "a positive number"
        raise MsLongctxError(f"{key} = {value!r} must be {article}")


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
