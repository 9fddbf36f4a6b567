# SPDX-License-Identifier: Apache-2.0
"""One interface over SentencePiece, Hugging Face and GGUF tokenizers; imports no MindSpore.

Decoding is defined here once, over the bytes each token stands for, so decoding a whole answer and decoding
it token by token give the same text for every kind of tokenizer.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ms_longctx.data.chat_template import PLAIN_TEMPLATE, ChatTemplate, Message
from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class TokenizerSettings:
    """What a vocabulary alone does not say.

    Attributes:
        bos_id: token that opens a text, if the model has one.
        eos_id: token that ends an answer, if the model has one.
        pad_id: token that fills a row; ``None`` takes ``eos_id``, else 0 (rows are masked by length, not id).
        adds_bos: whether plain text of this model starts with ``bos_id``.
        chat_template: Jinja source, if the model brings one.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    adds_bos: bool = False
    chat_template: str | None = None


class Tokenizer(ABC):
    """Text to token ids and back; :func:`load_tokenizer` makes one.

    Args:
        token_bytes: for each id, the bytes it stands for in decoded text.
        special_ids: ids that ``decode`` leaves out by default.
        settings: special tokens and chat template.
        prefix_space: encoding puts one space before the text, decoding takes it away again.

    Attributes:
        vocab_size: number of ids (highest id + 1).
        bos_id, eos_id: special tokens or ``None``.
        pad_id: id that fills rows; always an int.
        adds_bos: whether plain text of this model starts with BOS.
        has_chat_template: False when the built-in plain template stands in.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        settings: TokenizerSettings,
        prefix_space: bool = False,
    ) -> None:
        self._token_bytes = list(token_bytes)
        self._byte_lengths = np.array([len(piece) for piece in self._token_bytes], dtype=np.int64)
        self.special_ids = frozenset(special_ids)
        self.prefix_space = prefix_space
        self.vocab_size = len(self._token_bytes)
        self.bos_id = settings.bos_id
        self.eos_id = settings.eos_id
        self.pad_id: int = next((i for i in (settings.pad_id, settings.eos_id) if i is not None), 0)
        self.adds_bos = settings.adds_bos and settings.bos_id is not None
        self.has_chat_template = settings.chat_template is not None
        self._chat_template = ChatTemplate(settings.chat_template or PLAIN_TEMPLATE, self._template_tokens())

    @abstractmethod
    def _encode(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        """Ids of ``text`` without BOS and EOS; see :meth:`encode` for the flags."""

    def encode(
        self,
        text: str,
        add_bos: bool = False,
        add_eos: bool = False,
        *,
        parse_special: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: any string.
            add_bos: put BOS first, unless the text already starts with it or the model has none.
            add_eos: put EOS last, unless the text already ends with it or the model has none.
            parse_special: read ``<|im_start|>`` and the like as the special token, as Hugging Face does.
            continues: the text goes on after earlier tokens, so no space is put before it.
        """
        ids = self._encode(text, parse_special, continues)
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        Raises:
            MsLongctxError: an id is outside the vocabulary.
        """
        decoder = self.stream_decoder(skip_special_tokens)
        return "".join([decoder.push(index) for index in ids]) + decoder.flush()

    def stream_decoder(self, skip_special_tokens: bool = True, continues: bool = False) -> StreamDecoder:
        """Return a decoder that takes ids one by one and never emits half a character.

        Args:
            skip_special_tokens: leave special tokens out of the text.
            continues: the ids go on after a prompt, so a leading space belongs to the text.
        """
        return StreamDecoder(self, skip_special_tokens, strip_space=self.prefix_space and not continues)

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes token ``index`` adds to a decoded text.

        Raises:
            MsLongctxError: the id is outside the vocabulary.
        """
        if not 0 <= index < self.vocab_size:
            raise MsLongctxError(
                f"token id {index} is outside this tokenizer's vocabulary (0 to {self.vocab_size - 1}); "
                "was the text encoded with another tokenizer?"
            )
        return self._token_bytes[index]

    def token_text(self, index: int) -> str:
        """Return :meth:`token_bytes` as text."""
        return self.token_bytes(index).decode("utf-8", "replace")

    def byte_offsets(self, text: str, ids: Sequence[int], continues: bool = False) -> np.ndarray | None:
        """Where each token starts in the UTF-8 bytes of ``text``: int64 ``(len(ids) + 1,)``, last the end.

        ``ids`` must be ``encode(text)`` without BOS and EOS. Returns ``None`` when the tokenizer changes the
        text (Unicode normalisation, unknown characters), because then no such offsets exist.
        """
        ends = np.cumsum(self._byte_lengths[np.asarray(ids, dtype=np.int64)]) if len(ids) else np.zeros(0, np.int64)
        offsets = np.concatenate(([0], ends))
        if self.prefix_space and not continues and len(ids) and self._token_bytes[ids[0]][:1] == b" ":
            offsets[1:] -= 1
        return offsets if offsets[-1] == len(text.encode("utf-8")) else None

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Return the text of ``messages`` as the model expects it; see :meth:`ChatTemplate.render`."""
        return self._chat_template.render(messages, add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any
    ) -> list[int]:
        """Return the ids of the rendered messages, with exactly one BOS where the model uses one."""
        return self.encode(
            self.apply_chat_template(messages, add_generation_prompt, **variables), add_bos=self.adds_bos
        )

    def set_chat_template(self, source: str) -> None:
        """Use ``source`` (Jinja) in place of the model's own chat template."""
        self._chat_template = ChatTemplate(source, self._template_tokens())
        self.has_chat_template = True

    @property
    def chat_template(self) -> str:
        """Jinja source in use."""
        return self._chat_template.source

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary: equal for the same tokenizer read from different file formats."""
        digest = hashlib.sha256(f"{self.vocab_size} {self.bos_id} {self.eos_id}".encode())
        for piece in self._token_bytes:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``tokenizer.json`` or ``tokenizer.model``, and ``tokenizer_config.json``, for Hugging Face to read.

        Args:
            directory: it exists; files of these names are replaced.
        """
        texts = {name: text for name, text in self._template_tokens().items() if text}
        config = {**texts, "add_bos_token": self.adds_bos, "add_eos_token": False}
        if self.has_chat_template:
            config["chat_template"] = self.chat_template
        config |= self._write_vocabulary(Path(directory))
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (Path(directory) / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    @abstractmethod
    def _write_vocabulary(self, directory: Path) -> dict[str, Any]:
        """Write the file of the vocabulary; what ``tokenizer_config.json`` says about it."""

    def _template_tokens(self) -> dict[str, str]:
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {name: "" if index is None else self.token_text(index) for name, index in named.items()}


class StreamDecoder:
    """Text from a stream of token ids; the concatenation of what it returns equals ``decode`` of all ids.

    Args:
        tokenizer: gives the bytes of each token.
        skip_special_tokens: leave special tokens out.
        strip_space: take away the space that encoding put before the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_space = strip_space
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, index: int) -> str:
        """Return the characters that token ``index`` completes, possibly none."""
        piece = self._tokenizer.token_bytes(index)
        special = index in self._tokenizer.special_ids
        if special and self._skip_special_tokens:
            return ""
        if self._strip_space and piece:
            if not special:
                piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._characters.decode(piece)

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for each incomplete character, usually nothing."""
        rest = self._characters.decode(b"", final=True)
        self._characters.reset()
        return rest


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        path: a SentencePiece ``.model`` file, a ``tokenizer.json``, a ``.gguf`` file, or a directory
            (Hugging Face layout) that holds one of them.
        chat_template: Jinja source, or the path of a file with it, to use in place of the model's own.

    Raises:
        MsLongctxError: nothing there, or not a tokenizer this package can read.
    """
    tokenizer = _load(_tokenizer_file(Path(path)))
    if chat_template is not None:
        tokenizer.set_chat_template(_template_source(chat_template))
    return tokenizer


def _load(file: Path) -> Tokenizer:
    if file.suffix == ".gguf":
        from ms_longctx.data.tokenizer_gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(file)
    if file.suffix == ".json":
        from ms_longctx.data.tokenizer_hf import load_hf_tokenizer

        return load_hf_tokenizer(file)
    from ms_longctx.data.tokenizer_sentencepiece import load_sentencepiece_tokenizer

    return load_sentencepiece_tokenizer(file)


def _tokenizer_file(path: Path) -> Path:
    """The file to read: ``path`` itself, or the one inside a model directory."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise MsLongctxError(
            f"tokenizer {path} does not exist; give a .model, .json or .gguf file, or a directory with one"
        )
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            return path / name
    found = sorted([*path.glob("*.gguf"), *path.glob("*.model")])
    if len(found) != 1:
        listed = ", ".join(file.name for file in found) or "none of them"
        raise MsLongctxError(
            f"directory {path} should hold tokenizer.json, tokenizer.model or one .gguf file; found {listed}"
        )
    return found[0]


def _template_source(template: str) -> str:
    """A template is Jinja when it has a tag or an expression, otherwise the name of a file."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MsLongctxError(f"cannot read the chat template file {template}: {error}") from error
