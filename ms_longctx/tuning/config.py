# SPDX-License-Identifier: Apache-2.0
"""What an adapter is made of, under peft's names, and as ``adapter_config.json`` (no MindSpore here)."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ms_longctx.config.sections import LoraSection
from ms_longctx.errors import MsLongctxError

ALL_LINEAR = "all-linear"
# Keys of peft's file that say nothing about the arithmetic of an adapter that is already trained.
_DESCRIPTIVE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"}
    | {"task_type", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
)
# Initialisations of peft that leave the base weights alone.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): ``y = W x + scaling * B A x``, fields as in peft.

    Args:
        r: rank.
        lora_alpha: numerator of the scaling.
        lora_dropout: probability with which an input of A is dropped in training.
        target_modules: linear layers that get an adapter: names (``q_proj``, or longer ends of the path), one
            regular expression that matches whole paths, or ``all-linear`` (all but the output head).
        bias: which biases of the base train: ``none``, ``all``, or ``lora_only`` (of the adapted layers).
        modules_to_save: ends of the paths of other modules that train in full and are saved with the adapter.
        use_rslora: scale by ``alpha / sqrt(r)`` (arXiv 2312.03732) instead of ``alpha / r``.
        layers_to_transform: indices of the layers that get adapters; with names in ``target_modules`` only.

    Raises:
        MsLongctxError: a value is impossible.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: list[str] | str = field(default_factory=lambda: ["q_proj", "v_proj"])
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    layers_to_transform: list[int] | int | None = None

    def __post_init__(self) -> None:
        if self.r < 1:
            raise MsLongctxError(f"lora.r = {self.r} must be at least 1")
        if self.lora_alpha <= 0:
            raise MsLongctxError(f"lora.lora_alpha = {self.lora_alpha} must be above 0")
        if not 0 <= self.lora_dropout < 1:
            raise MsLongctxError(f"lora.lora_dropout = {self.lora_dropout} must be at least 0 and below 1")
        if self.bias not in ("none", "all", "lora_only"):
            raise MsLongctxError(f"lora.bias = {self.bias!r} is unknown; expected none, all or lora_only")
        if not self.target_modules:
            raise MsLongctxError("lora.target_modules is empty; name linear layers, e.g. [q_proj, v_proj]")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise MsLongctxError(
                    f"lora.target_modules = {self.target_modules!r} is not a regular expression: {error}"
                ) from error
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise MsLongctxError(
                "lora.layers_to_transform needs a list of names in lora.target_modules; put the layers into "
                "the regular expression instead"
            )

    @property
    def scaling(self) -> float:
        """Factor on ``B A x``."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @classmethod
    def from_section(cls, section: LoraSection) -> LoraConfig:
        """The adapter that section ``lora`` of a run describes."""
        values = asdict(section)
        del values["enabled"]
        return cls(**values)

    def to_peft(self, base_model: str = "") -> dict[str, Any]:
        """Contents of ``adapter_config.json``; ``base_model`` is the path or name of the base model."""
        alpha = self.lora_alpha
        return asdict(self) | {
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "init_lora_weights": True,
            "fan_in_fan_out": False,
        }

    @classmethod
    def from_peft(cls, values: dict[str, Any], where: str) -> LoraConfig:
        """Read the contents of an ``adapter_config.json``; ``where`` names the file in messages.

        Raises:
            MsLongctxError: not LoRA, or a variant with other arithmetic than this class's.
        """
        if values.get("peft_type") != "LORA":
            raise MsLongctxError(f"{where}: peft_type = {values.get('peft_type')!r}; only LORA can be loaded")
        if values.get("init_lora_weights", True) not in _PLAIN_INITIALISATIONS:
            raise MsLongctxError(
                f"{where}: init_lora_weights = {values['init_lora_weights']!r} has changed the base weights; "
                "convert the adapter to plain LoRA in peft (path_initial_model_for_weight_conversion)"
            )
        known = cls.__dataclass_fields__.keys()
        for key, value in values.items():
            if key not in known | _DESCRIPTIVE | {"init_lora_weights"} and value not in (None, False, {}, []):
                raise MsLongctxError(f"{where}: {key} = {value!r} is a variant of LoRA that cannot be loaded")
        given = {key: value for key, value in values.items() if key in known}
        if given.get("target_modules") is None:
            raise MsLongctxError(f"{where}: target_modules is missing")
        return cls(**given)
