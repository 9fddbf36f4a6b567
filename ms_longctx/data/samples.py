# SPDX-License-Identifier: Apache-2.0
"""Conversations and texts to token samples that fit a row.

Layout ``sft``: prompt and answers of a conversation; only answers are learned. What does not fit is taken
from the source text inside the prompt (the article), never from the words around it nor from the answer.
Layout ``lm``: every token is learned; long texts become several samples. Sliding windows belong here too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ms_longctx.data.conversation import Renderer, Segment
from ms_longctx.data.formats import Conversation, RowError
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.data.truncation import CUTS, shorten
from ms_longctx.errors import MsLongctxError

LAYOUTS = ("sft", "lm")
TRUNCATIONS = (*CUTS, "delete")


@dataclass(frozen=True)
class Lengths:
    """Limits in tokens.

    Attributes:
        seq_length: a whole sample.
        prompt_length: everything before the last answer; ``None`` leaves it what the answer does not need.
        answer_length: the last answer, end token included; ``None`` keeps it whole.
        min_tokens: shorter samples are left out.
        truncation: where a source text that is too long loses tokens: at its ``right`` end, ``left`` end or
            in the ``middle``; ``delete`` leaves the row out.

    Raises:
        MsLongctxError: limits that contradict each other.
    """

    seq_length: int
    prompt_length: int | None = None
    answer_length: int | None = None
    min_tokens: int = 2
    truncation: str = "right"

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise MsLongctxError(f"truncation {self.truncation!r}; expected one of {', '.join(TRUNCATIONS)}")
        if self.seq_length < 2 or self.min_tokens < 2 or self.min_tokens > self.seq_length:
            raise MsLongctxError(
                f"seq_length {self.seq_length} and min_tokens {self.min_tokens}: expected 2 <= min_tokens <= seq_length"
            )
        parts = (self.prompt_length, self.answer_length)
        if min(part for part in (*parts, 1) if part is not None) < 1 or sum(filter(None, parts)) > self.seq_length:
            raise MsLongctxError(
                f"prompt_length {self.prompt_length} and answer_length {self.answer_length} should be "
                f"positive and together at most seq_length {self.seq_length}"
            )


@dataclass
class Built:
    """Samples of one row and what had to be left out of it.

    Attributes:
        samples: (tokens int32 ``(n,)``, runs int32 ``(k,)``) pairs.
        encoded: tokens of the row before anything was left out.
        lost: tokens left out, by cause.
    """

    samples: list[tuple[np.ndarray, np.ndarray]]
    encoded: int
    lost: Counter[str] = field(default_factory=Counter)


class SampleBuilder:
    """Builds the samples of one row.

    Args:
        tokenizer: encodes, and renders conversations.
        layout: one of ``LAYOUTS``.
        lengths: limits.
    """

    def __init__(self, tokenizer: Tokenizer, layout: str, lengths: Lengths) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._layout = layout
        self._lengths = lengths

    def build(self, record: Conversation | str) -> Built:
        """Return the samples of ``record``.

        Raises:
            RowError: nothing to learn, too short, or too long to be made to fit.
        """
        if self._layout == "lm":
            return self._pieces(record)
        if isinstance(record, str):
            raise RowError("no_answer", "plain text has no answer to learn; use --layout lm")
        return self._answers(record)

    def _pieces(self, record: Conversation | str) -> Built:
        """The text cut into pieces of ``seq_length`` tokens; a last piece that is too short is left out."""
        tokenizer = self._tokenizer
        is_text = isinstance(record, str)
        text = record if isinstance(record, str) else self._renderer.whole(record)
        ids = np.array(tokenizer.encode(text, tokenizer.adds_bos, add_eos=is_text), dtype=np.int32)
        size = self._lengths.seq_length
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        kept = [piece for piece in pieces if len(piece) >= self._lengths.min_tokens]
        if not kept:
            raise RowError("too_short", f"{len(ids)} tokens, fewer than {self._lengths.min_tokens}")
        lost = Counter(short_ends=len(ids) - sum(map(len, kept)))
        return Built([(piece, np.array([0, len(piece)], np.int32)) for piece in kept], len(ids), lost)

    def _answers(self, record: Conversation) -> Built:
        segments = self._renderer.segments(record)
        encoded = [
            np.array(self._tokenizer.encode(segment.text, continues=index > 0), dtype=np.int32)
            for index, segment in enumerate(segments)
        ]
        bos = self._missing_bos(encoded[0])
        total = len(bos) + sum(map(len, encoded))
        lost: Counter[str] = Counter()
        limit = self._lengths.answer_length
        if limit is not None and len(encoded[-1]) > limit:
            self._allow_cutting("answer", len(encoded[-1]), limit)
            lost["answers"] = len(encoded[-1]) - limit
            # The end token goes too: the model is not to learn to stop in the middle of a sentence.
            encoded[-1] = encoded[-1][:limit]
        lost["prompts"] = self._fit_prompt(record, segments, encoded, len(bos))
        encoded[0] = np.concatenate((bos, encoded[0]))
        tokens = np.concatenate(encoded)
        if len(tokens) < self._lengths.min_tokens:
            raise RowError("too_short", f"{len(tokens)} tokens, fewer than {self._lengths.min_tokens}")
        return Built([(tokens, np.array([len(ids) for ids in encoded], np.int32))], total, +lost)

    def _missing_bos(self, ids: np.ndarray) -> np.ndarray:
        """The BOS that the chat template did not write itself."""
        bos = self._tokenizer.bos_id
        needed = self._tokenizer.adds_bos and not (len(ids) and ids[0] == bos)
        return np.array([bos] if needed else [], dtype=np.int32)

    def _allow_cutting(self, part: str, length: int, room: int) -> None:
        if self._lengths.truncation == "delete":
            raise RowError("too_long", f"the {part} has {length} tokens, {room} fit")

    def _fit_prompt(self, record: Conversation, segments: list[Segment], encoded: list[np.ndarray], bos: int) -> int:
        """Take from the source text what is too much and return how many tokens that was."""
        length = bos + sum(map(len, encoded[:-1]))
        room = self._lengths.seq_length - len(encoded[-1])
        if self._lengths.prompt_length is not None:
            room = min(room, self._lengths.prompt_length)
        if length <= room:
            return 0
        self._allow_cutting("prompt", length, room)
        source = record.source or _longest_user_message(record)
        for index in range(0, len(segments), 2):
            if source and source in segments[index].text:
                keep = len(encoded[index]) - (length - room)
                cut = self._lengths.truncation
                ids = shorten(
                    self._tokenizer,
                    segments[index].text,
                    encoded[index],
                    source,
                    keep,
                    cut,
                    continues=index > 0,
                )
                if ids is not None:
                    encoded[index] = ids
                    return length - bos - sum(map(len, encoded[:-1]))
        if room < 0:
            raise RowError("too_long", f"the answer alone has {len(encoded[-1])} tokens, more than seq_length")
        raise RowError("too_long", f"the prompt has {length} tokens, {room} fit: nothing to take them from")


def _longest_user_message(record: Conversation) -> str:
    texts = [message["content"] for message in record.messages if message["role"] == "user"]
    return max(texts, key=len, default="").strip()
