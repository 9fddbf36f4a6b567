# SPDX-License-Identifier: Apache-2.0
"""Hugging Face ``tokenizer.json`` files, run by the ``tokenizers`` library."""

from __future__ import annotations

import copy
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ms_longctx.data.hf_directory import read_model_directory
from ms_longctx.data.tokenizer import Tokenizer, TokenizerSettings
from ms_longctx.errors import MsLongctxError

_SPACE = "\u2581"


class HFTokenizer(Tokenizer):
    """A ``tokenizer.json`` behind the common interface.

    Args:
        definition: content of the file, parsed.
        settings: special tokens and chat template.

    Raises:
        MsLongctxError: the file's decoder is of a kind no Llama-like model uses.
    """

    def __init__(self, definition: dict[str, Any], settings: TokenizerSettings) -> None:
        self._definition = definition
        self._encoder = _build(definition)
        added = {entry["id"]: entry for entry in definition.get("added_tokens") or []}
        byte_level, strips = _decoder_kind(definition)
        vocabulary: dict[str, int] = self._encoder.get_vocab(with_added_tokens=True)
        token_bytes = [b""] * (max(vocabulary.values()) + 1)
        for text, index in vocabulary.items():
            token_bytes[index] = _byte_level_bytes(text) if byte_level else _byte_fallback_bytes(text)
        for index, entry in added.items():
            token_bytes[index] = entry["content"].encode("utf-8")
        super().__init__(
            token_bytes,
            [index for index, entry in added.items() if entry["special"]],
            settings,
            prefix_space=strips,
        )

    def _encode(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        encoder = self._continuing if continues else self._encoder
        if not parse_special:
            encoder = self._literal_continuing if continues else self._literal
        # The batch call leaves out the offsets of tokens, which takes a third of the time.
        return list(encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _write_vocabulary(self, directory: Path) -> dict[str, Any]:
        definition = self._definition
        if self.adds_bos and self.bos_id is not None and not definition.get("post_processor"):
            definition = {**definition, "post_processor": _bos_first(self.token_text(self.bos_id), self.bos_id)}
        text = json.dumps(definition, ensure_ascii=False)
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """The same tokenizer without the space some models put before a text."""
        definition = _without_prefix_space(self._definition)
        return self._encoder if definition == self._definition else _build(definition)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, reading special tokens in the text as ordinary characters."""
        return _build(self._definition, literal=True)

    @cached_property
    def _literal_continuing(self) -> tokenizers.Tokenizer:
        return _build(_without_prefix_space(self._definition), literal=True)


def load_hf_tokenizer(file: Path) -> HFTokenizer:
    """Load a ``tokenizer.json`` and what the other files of its directory say.

    Raises:
        MsLongctxError: not a tokenizer.json.
    """
    try:
        definition = json.loads(file.read_text(encoding="utf-8"))
        encoder = _build(definition)
    except Exception as error:  # the library raises bare Exception on anything malformed
        raise MsLongctxError(f"{file} is not a Hugging Face tokenizer.json: {error}") from error
    directory = read_model_directory(file.parent)
    known = directory.settings(encoder.token_to_id, TokenizerSettings())
    starts_with_bos = encoder.encode("a", add_special_tokens=True).ids[:1] == [known.bos_id]
    return HFTokenizer(definition, directory.settings(encoder.token_to_id, TokenizerSettings(adds_bos=starts_with_bos)))


def _build(definition: dict[str, Any], literal: bool = False) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer.from_str(json.dumps(definition))
    encoder.no_truncation()  # a file saved after training may carry limits that would cut texts silently
    encoder.no_padding()
    encoder.encode_special_tokens = literal
    return encoder


def _bos_first(text: str, index: int) -> dict[str, Any]:
    """The part of a definition that makes other programs start a text with BOS."""
    bos, first, second = (
        {"SpecialToken": {"id": text, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}},
    )
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }


def _decoder_kind(definition: dict[str, Any]) -> tuple[bool, bool]:
    """Return (token texts are byte-level, decoding strips one leading space)."""
    parts = _parts(definition.get("decoder"), "decoders")
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return True, False
    if not kinds & {"ByteFallback", "Metaspace", "Replace"}:
        raise MsLongctxError(
            f"tokenizer decoder {sorted(kinds) or 'none'} is not supported; "
            "expected ByteLevel, Metaspace or ByteFallback"
        )
    strips = any(part["type"] == "Strip" and part.get("start", 0) > 0 for part in parts) or any(
        part["type"] == "Metaspace" and _adds_space(part) for part in parts
    )
    return False, strips


def _adds_space(metaspace: dict[str, Any]) -> bool:
    return bool(metaspace.get("add_prefix_space", True)) and metaspace.get("prepend_scheme", "always") != "never"


def _without_prefix_space(definition: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy({key: value for key, value in definition.items() if key != "model"})
    result["model"] = definition["model"]
    kept = [part for part in _parts(result.get("normalizer"), "normalizers") if part["type"] != "Prepend"]
    if result.get("normalizer"):
        result["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    for part in _parts(result.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
    return result


def _parts(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The parts of a sequence, or the single component, or nothing."""
    if not component:
        return []
    parts: list[dict[str, Any]] = component[key] if component["type"] == "Sequence" else [component]
    return parts


def _byte_level_table() -> dict[str, int]:
    """GPT-2's map between bytes and printable characters (openai/gpt-2, encoder.py), character to byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_CHARACTER_BYTES = _byte_level_table()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_CHARACTER_BYTES[character] for character in text])
    except KeyError:  # a piece that was added as plain text
        return text.encode("utf-8")


def _byte_fallback_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode("utf-8")
