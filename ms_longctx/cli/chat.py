# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ms_longctx.cli.options import (
    ANSWER_KEYS,
    add_generation_options,
    add_key_option,
    add_model_options,
    generation_settings,
)
from ms_longctx.errors import MsLongctxError

if TYPE_CHECKING:
    from ms_longctx.config import GenerationConfig
    from ms_longctx.data.tokenizer import Tokenizer
    from ms_longctx.generation.engine import EngineSource
    from ms_longctx.models.llama import LlamaForCausalLM

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


def add_parser(subparsers: Any) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "chat", help="talk to a model in the terminal", description=f"Talk to a model; {_HELP}."
    )
    add_model_options(parser)
    add_key_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_generation_options(parser)
    parser.take_defaults_from_config({**ANSWER_KEYS, "system": "data.system"})


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends it; returns the exit code."""
    settings = generation_settings(args)

    from ms_longctx.generation.loading import load_answering_model, load_text_tokenizer

    model = load_answering_model(args.model, args.adapter, args.dtype, args.device_target, args.key_file)
    tokenizer = load_text_tokenizer(args.tokenizer, args.model, model, args.chat_template)
    chat = Chat(model, tokenizer, settings, args.system)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        print(_HELP)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()  # only the line that was being typed is gone
            continue
        if line == "/exit":
            return 0
        if line == "/reset":
            chat.reset()
        elif line.startswith("/") and line[1:].isalpha():
            print(f"unknown command {line}: {_HELP}")
        elif line:
            chat.answer(line)


class Chat:
    """A conversation whose answers are printed as they are written.

    Args:
        model, tokenizer: who answers.
        settings: how tokens are chosen.
        system: first message, kept by :meth:`reset`.
    """

    def __init__(
        self,
        model: LlamaForCausalLM | EngineSource,
        tokenizer: Tokenizer,
        settings: GenerationConfig,
        system: str | None,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._first)

    def answer(self, text: str) -> None:
        """Print the answer to ``text`` and remember both; Ctrl-C keeps what was written so far."""
        from ms_longctx.generation.generate import stream_text

        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._tokenizer.encode_chat(messages, add_generation_prompt=True)
        answer = ""
        try:
            for piece in stream_text(self._model, self._tokenizer, [prompt], self._settings):
                answer += piece.text
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except MsLongctxError as error:
            # The conversation has outgrown the context: say so and let the user go on.
            print(f"{error}; /reset starts over")
            return
        print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
