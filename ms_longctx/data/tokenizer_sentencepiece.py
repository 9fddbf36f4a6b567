# SPDX-License-Identifier: Apache-2.0
"""SentencePiece ``.model`` files (Llama 1 and 2, Mistral...)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from ms_longctx.data.hf_directory import read_model_directory
from ms_longctx.data.tokenizer import Tokenizer, TokenizerSettings
from ms_longctx.errors import MsLongctxError

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# A serialized ModelProto whose only content is normalizer_spec.add_dummy_prefix = false (fields 3 and 3).
# Protocol buffers merge a repeated sub-message, so appending it switches the space before the text off.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model behind the common interface.

    Args:
        model_proto: content of the ``.model`` file.
        settings: special tokens and chat template; ``None`` reads BOS, EOS and pad from the model.
        added_tokens: text to id of special tokens that the model itself does not have.

    Raises:
        MsLongctxError: not a SentencePiece model.
    """

    def __init__(
        self,
        model_proto: bytes,
        settings: TokenizerSettings | None = None,
        added_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self._model_proto = model_proto
        self._processor = _processor(model_proto)
        self._continuing = _processor(model_proto + _NO_DUMMY_PREFIX)
        count = self._processor.get_piece_size()
        pieces = [_piece_bytes(self._processor, index) for index in range(count)]
        control = {self._processor.id_to_piece(i): i for i in range(count) if self._processor.is_control(i)} | dict(
            added_tokens or {}
        )
        pieces += [b""] * (max(control.values(), default=-1) + 1 - count)
        for text, index in control.items():
            pieces[index] = text.encode("utf-8")
        self._control = control
        self._control_pattern = _alternatives(control)
        super().__init__(
            pieces,
            control.values(),
            settings or _model_settings(self._processor),
            prefix_space=self._processor.encode("a", out_type=str)[0].startswith(_SPACE),
        )

    def _encode(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        if not parse_special or self._control_pattern is None:
            return self._segment(text, continues)
        ids: list[int] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            ids += self._segment(text[end : match.start()], continues or bool(ids))
            ids.append(self._control[match.group()])
            end = match.end()
        return ids + self._segment(text[end:], continues or bool(ids))

    def _write_vocabulary(self, directory: Path) -> dict[str, Any]:
        (directory / "tokenizer.model").write_bytes(self._model_proto)
        count = self._processor.get_piece_size()
        added = {str(index): _added(text) for text, index in self._control.items() if index >= count}
        return {"tokenizer_class": "LlamaTokenizer", "legacy": False, "added_tokens_decoder": added}

    def _segment(self, text: str, continues: bool) -> list[int]:
        processor = self._continuing if continues else self._processor
        return list(processor.encode(text)) if text else []


def _added(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, **flags, "special": True}


def load_sentencepiece_tokenizer(file: Path) -> SentencePieceTokenizer:
    """Load a ``.model`` file; Hugging Face files beside it add chat template and special tokens.

    Raises:
        MsLongctxError: not a SentencePiece model.
    """
    model_proto = file.read_bytes()
    processor = _processor(model_proto, str(file))
    directory = read_model_directory(file.parent)
    count = processor.get_piece_size()
    added = {text: index for text, index in directory.added_tokens.items() if index >= count}

    def token_to_id(text: str) -> int | None:
        index = added.get(text, processor.piece_to_id(text))
        return None if index == processor.unk_id() and text != processor.id_to_piece(index) else index

    settings = directory.settings(token_to_id, _model_settings(processor))
    return SentencePieceTokenizer(model_proto, settings, added)


def _processor(model_proto: bytes, name: str = "the model") -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    try:
        loaded = bool(model_proto) and processor.LoadFromSerializedProto(model_proto)
    except RuntimeError:
        loaded = False
    if not loaded:
        raise MsLongctxError(f"{name} is not a SentencePiece model; expected a .model file, not text or JSON")
    return processor


def _piece_bytes(processor: SentencePieceProcessor, index: int) -> bytes:
    piece: str = processor.id_to_piece(index)
    if processor.is_byte(index):
        match = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(match.group(1), 16)]) if match else b""
    if processor.is_unknown(index):
        return " \u2047 ".encode()  # what SentencePiece itself decodes an unknown piece to
    return piece.replace(_SPACE, " ").encode("utf-8")


def _alternatives(texts: Mapping[str, int]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of ``texts``."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _model_settings(processor: SentencePieceProcessor) -> TokenizerSettings:
    def known(index: int) -> int | None:
        return index if index >= 0 else None

    bos = known(processor.bos_id())
    return TokenizerSettings(bos, known(processor.eos_id()), known(processor.pad_id()), adds_bos=bos is not None)
