# SPDX-License-Identifier: Apache-2.0
"""What the files beside a tokenizer say in a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ms_longctx.data.tokenizer import TokenizerSettings
from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class ModelDirectory:
    """Tokenizer settings of a model directory; anything may be absent.

    Attributes:
        tokens: ``bos_token``, ``eos_token``, ``pad_token`` as texts.
        token_ids: ``bos``, ``eos``, ``pad`` as ids (from config.json), for what ``tokens`` lacks.
        adds_bos: ``add_bos_token``.
        chat_template: Jinja source.
        added_tokens: special tokens by text.
    """

    tokens: dict[str, str] = field(default_factory=dict)
    token_ids: dict[str, int] = field(default_factory=dict)
    adds_bos: bool | None = None
    chat_template: str | None = None
    added_tokens: dict[str, int] = field(default_factory=dict)

    def settings(self, token_to_id: Callable[[str], int | None], default: TokenizerSettings) -> TokenizerSettings:
        """Combine with what the vocabulary knows (``default``)."""

        def find(name: str, fallback: int | None) -> int | None:
            text = self.tokens.get(f"{name}_token")
            index = None if text is None else token_to_id(text)
            return index if index is not None else self.token_ids.get(name, fallback)

        return TokenizerSettings(
            bos_id=find("bos", default.bos_id),
            eos_id=find("eos", default.eos_id),
            pad_id=find("pad", default.pad_id),
            adds_bos=default.adds_bos if self.adds_bos is None else self.adds_bos,
            chat_template=self.chat_template or default.chat_template,
        )


def read_model_directory(folder: Path) -> ModelDirectory:
    """Read tokenizer_config.json, special_tokens_map.json, config.json and chat_template.jinja, if there.

    Raises:
        MsLongctxError: a file is not valid JSON.
    """
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "pad_token")
    tokens = {name: text for name in names if (text := _token_text(named.get(name))) is not None}
    model = _read_json(folder / "config.json")
    adds_bos = config.get("add_bos_token")
    return ModelDirectory(
        tokens=tokens,
        token_ids={
            name: _first_id(model[f"{name}_token_id"])
            for name in ("bos", "eos", "pad")
            if model.get(f"{name}_token_id") not in (None, [])
        },
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        chat_template=_chat_template(folder, config),
        added_tokens={entry["content"]: int(index) for index, entry in config.get("added_tokens_decoder", {}).items()},
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MsLongctxError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise MsLongctxError(f"{path} should hold a JSON object, found a {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """A token is written as a string or as ``{"content": ...}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _first_id(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template is a file of its own, a string, or a list of named ones of which ``default`` counts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
