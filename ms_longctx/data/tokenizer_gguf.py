# SPDX-License-Identifier: Apache-2.0
"""The tokenizer inside a GGUF file, rebuilt for ``tokenizers`` (byte-level BPE) or ``sentencepiece``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ms_longctx.data.gguf_metadata import read_gguf_metadata
from ms_longctx.data.tokenizer import Tokenizer, TokenizerSettings
from ms_longctx.data.tokenizer_hf import HFTokenizer
from ms_longctx.data.tokenizer_sentencepiece import SentencePieceTokenizer
from ms_longctx.errors import MsLongctxError

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How each family splits text before BPE, by the name GGUF gives it (llama.cpp, src/llama-vocab.cpp).
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def load_gguf_tokenizer(file: Path) -> Tokenizer:
    """Build the tokenizer that ``file`` describes.

    Raises:
        MsLongctxError: no tokenizer in the file, or a kind that is not supported.
    """
    metadata = read_gguf_metadata(file)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return HFTokenizer(_bpe_definition(metadata, file), _settings(metadata, adds_bos=False))
    if kind == "llama":
        return SentencePieceTokenizer(_sentencepiece_model(metadata), _settings(metadata, adds_bos=True))
    found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
    raise MsLongctxError(f"{file} holds {found}; expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")


def _settings(metadata: dict[str, Any], adds_bos: bool) -> TokenizerSettings:
    return TokenizerSettings(
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _bpe_definition(metadata: dict[str, Any], file: Path) -> dict[str, Any]:
    """The content of the ``tokenizer.json`` this vocabulary would have."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise MsLongctxError(
            f"{file}: tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's tokenizer.json instead"
        )
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    added = [
        {"id": index, "content": tokens[index], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == _CONTROL}
        for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
            "ignore_merges": pre == "llama-bpe",
        },
    }


def _sentencepiece_model(metadata: dict[str, Any]) -> bytes:
    """Serialize the ModelProto (sentencepiece_model.proto) that the vocabulary was taken from."""
    pieces = zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"].tolist(),
        metadata["tokenizer.ggml.token_type"].tolist(),
        strict=True,
    )
    body = b"".join(
        _field(1, _field(1, text.encode("utf-8")) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for text, score, kind in pieces
    )
    bpe, byte_fallback = _number(3, 2), _number(35, 1)
    special = b"".join(
        _number(number, metadata[key] if key in metadata else -1)
        for number, key in ((40, "tokenizer.ggml.unknown_token_id"), (41, "tokenizer.ggml.bos_token_id"),
                            (42, "tokenizer.ggml.eos_token_id"), (43, "tokenizer.ggml.padding_token_id"))
    )  # fmt: skip
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    trainer = _field(2, bpe + byte_fallback + special)
    normalizer = _field(3, _field(1, b"identity") + _number(3, prefix) + _number(4, 0) + _number(5, 1))
    return body + trainer + normalizer


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # protocol buffers write negative numbers in ten bytes of two's complement
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
