# SPDX-License-Identifier: Apache-2.0
"""Conversations as text segments: what the model reads, and what it is to write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ms_longctx.data.formats import Conversation, RowError
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class Segment:
    """A stretch of the rendered conversation; ``supervised`` if the model is to learn to write it."""

    text: str
    supervised: bool


class Renderer:
    """Renders conversations with the tokenizer's chat template and finds the answers in the result.

    An answer is what stands between the generation prompt, where the model starts to write when it is used,
    and the end token (included). Where a template closes answers with no special token, EOS is put.

    Args:
        tokenizer: its chat template is used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ends = tokenizer.special_ids if tokenizer.eos_id is None else tokenizer.special_ids | {tokenizer.eos_id}
        texts = {tokenizer.token_text(index) for index in ends} - {""}
        longest_first = sorted(texts, key=len, reverse=True)
        self._end = re.compile(rf"\s*(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._eos = "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id)

    def whole(self, conversation: Conversation) -> str:
        """The text of a conversation."""
        return self._render(conversation, conversation.messages)

    def segments(self, conversation: Conversation) -> list[Segment]:
        """Return the segments up to the last learned answer, others and supervised ones taking turns.

        Raises:
            RowError: no answer to learn, or the template rewrites earlier messages.
        """
        whole = self.whole(conversation)
        segments: list[Segment] = []
        position = 0
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or not message["loss"]:
                continue
            start, end, text = self._answer(conversation, index, whole)
            segments += [Segment(whole[position:start], False), Segment(text, True)]
            position = end
        if not segments:
            raise RowError("no_answer", "no assistant message to learn from")
        return segments

    def _answer(self, conversation: Conversation, index: int, whole: str) -> tuple[int, int, str]:
        """Return start and end of an answer in ``whole`` and its text, closed by an end token."""
        content = conversation.messages[index]["content"].strip()
        if not content:
            raise RowError("empty", f"message {index + 1} (assistant) is empty")
        prompt = self._render(conversation, conversation.messages[:index], add_generation_prompt=True)
        until = self._render(conversation, conversation.messages[: index + 1])
        found = until.find(content, len(prompt)) if until.startswith(prompt) else -1
        end = found + len(content)
        end_token = self._end.match(until, end)
        if end_token:
            end = end_token.end()
        if found < 0 or not whole.startswith(until[:end]):
            raise RowError("template", f"the chat template changes message {index + 1} when others follow it")
        # White space before the answer is the model's to write; a header that the prompt lacked is not.
        start = len(prompt) if until[len(prompt) : found].isspace() else found
        return start, end, until[start:end] + ("" if end_token else self._eos)

    def _render(
        self,
        conversation: Conversation,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt, tools=conversation.tools)
        except MsLongctxError as error:
            raise RowError("template", str(error)) from error
