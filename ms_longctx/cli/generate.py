# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx generate``: answers to one prompt, or to every line of a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
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
    from ms_longctx.data.tokenizer import Tokenizer

_EPILOG = """\
the prompt comes from --prompt, --prompt_file or standard input; or from each line of --input:
  {"prompt": ...} or {"messages": [...]}, to which --output adds "completion" and "finish_reason".

examples:
  %(prog)s --model SmolLM2-135M-Instruct.gguf --prompt "What is a transformer?" --max_new_tokens 64
  %(prog)s --model Llama-2-7b/ --input questions.jsonl --output answers.jsonl --batch_size 4
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt",
        description="Let a model answer one prompt (printed as it is written) or a file of prompts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add_key_option(parser)
    prompts = parser.add_argument_group("prompts")
    one = prompts.add_mutually_exclusive_group()
    one.add_argument("--prompt", metavar="TEXT", help="the prompt")
    one.add_argument("--prompt_file", "-f", metavar="FILE", help="a file that holds the prompt")
    one.add_argument("--input", metavar="FILE", help="JSON lines of prompts; needs --output")
    prompts.add_argument("--output", metavar="FILE", help="JSON lines of answers, in the order of --input")
    prompts.add_argument("--system", metavar="TEXT", help="system message")
    prompts.add_argument("--raw", action="store_true", help="continue the prompt as it is: no chat template")
    prompts.add_argument("--batch_size", type=int, default=1, metavar="N", help="lines answered side by side")
    add_generation_options(parser)
    parser.take_defaults_from_config({**ANSWER_KEYS, "system": "data.system"})


def run(args: argparse.Namespace) -> int:
    """Generate and return the exit code."""
    settings = generation_settings(args)
    if bool(args.input) != bool(args.output):
        raise MsLongctxError("--input and --output belong together: a file of prompts and one for the answers")
    if args.batch_size < 1:
        raise MsLongctxError("--batch_size should be 1 or more")
    requests = _read_requests(Path(args.input)) if args.input else [{"prompt": _read_prompt(args)}]

    from ms_longctx.generation.generate import complete, stream_text
    from ms_longctx.generation.loading import load_answering_model, load_text_tokenizer

    model = load_answering_model(args.model, args.adapter, args.dtype, args.device_target, args.key_file)
    tokenizer = load_text_tokenizer(args.tokenizer, args.model, model, args.chat_template)
    prompts = [_encode(tokenizer, request, args.system, args.raw) for request in requests]
    if not args.input:
        for piece in stream_text(model, tokenizer, prompts, settings):
            print(piece.text, end="", flush=True)
        print()
        return 0

    from tqdm import tqdm

    part = Path(f"{args.output}.part")
    with part.open("w", encoding="utf-8") as sink, tqdm(total=len(prompts), desc="generate") as bar:
        for start in range(0, len(prompts), args.batch_size):
            batch = slice(start, start + args.batch_size)
            answers = complete(model, tokenizer, prompts[batch], settings)
            for request, answer in zip(requests[batch], answers, strict=True):
                added = {"completion": answer.text, "finish_reason": answer.finish_reason}
                sink.write(json.dumps({**request, **added}, ensure_ascii=False) + "\n")
            sink.flush()
            bar.update(len(answers))
    os.replace(part, args.output)
    print(f"wrote {args.output}")
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is not None:
        try:
            return Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MsLongctxError(f"--prompt_file {args.prompt_file}: cannot be read as UTF-8 text: {error}") from error
    if sys.stdin.isatty():
        raise MsLongctxError("no prompt: give --prompt, --prompt_file, --input, or text on standard input")
    return sys.stdin.read().removesuffix("\n")


def _read_requests(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of prompts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MsLongctxError(f"--input {path}: cannot be read as UTF-8 text: {error}") from error
    requests = list(_parse(path, lines))
    if not requests:
        raise MsLongctxError(f'--input {path} has no lines; expected {{"prompt": ...}} on each')
    return requests


def _parse(path: Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            raise MsLongctxError(f"{path}:{number}: not JSON: {error}") from error
        known = isinstance(request, dict) and (
            isinstance(request.get("prompt"), str) or isinstance(request.get("messages"), list)
        )
        if not known:
            raise MsLongctxError(f'{path}:{number}: expected {{"prompt": "..."}} or {{"messages": [...]}}')
        yield request


def _encode(tokenizer: Tokenizer, request: dict[str, Any], system: str | None, raw: bool) -> list[int]:
    if raw:
        if "prompt" not in request:
            raise MsLongctxError("--raw continues a 'prompt'; 'messages' need the chat template")
        return tokenizer.encode(request["prompt"], add_bos=tokenizer.adds_bos)
    messages = request.get("messages") or [{"role": "user", "content": request["prompt"]}]
    if system and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.encode_chat(messages, add_generation_prompt=True)
