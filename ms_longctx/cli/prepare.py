# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx prepare``: JSON lines to MindRecord."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ms_longctx.data.formats import FORMATS
from ms_longctx.errors import MsLongctxError

_EXIT_INTERRUPTED = 130
_DATA_KEYS = (
    *("tokenizer", "format", "fields", "system", "chat_template"),
    *("layout", "seq_length", "prompt_length", "answer_length"),
)
_EPILOG = """\
formats (one JSON object on each line; auto looks at the first):
  article         {"article": ..., "abstract": ...}
  messages        {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
  query_response  {"query": ..., "response": ..., "history": [[..., ...]], "system": ...}
  alpaca          {"instruction": ..., "input": ..., "output": ...}
  text            {"text": ...}

example:
  %(prog)s --input 'pubmed/*.jsonl.gz' --output pubmed.mindrecord --tokenizer Llama-2-7b/ \\
      --seq_length 8192 --prompt_length 7936 --answer_length 256 --fields article=body abstract=summary
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "prepare",
        help="turn JSON lines into MindRecord files",
        description="Tokenize JSON lines into MindRecord files that create_dataset reads.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, .jsonl.gz or globs")
    parser.add_argument("--output", required=True, metavar="FILE", help="name.mindrecord")
    keys = {name: f"data.{name}" for name in _DATA_KEYS}
    parser.take_defaults_from_config({"output": "data.path", **keys})
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help=".model, tokenizer.json, .gguf, or a model directory",
    )
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--format",
        default="auto",
        choices=("auto", *FORMATS),
    )
    rows.add_argument(
        "--fields", nargs="+", default=[], metavar="OURS=THEIRS", help="names of fields, such as article=body"
    )
    rows.add_argument("--system", metavar="TEXT", help="system message of rows that have none")
    rows.add_argument(
        "--instruction", metavar="TEXT", help="prompt of the article format; {article} stands for the article"
    )
    rows.add_argument("--chat_template", metavar="JINJA_OR_FILE", help="in place of the tokenizer's own")
    rows.add_argument("--strict", action="store_true", help="stop at the first row that cannot be used")
    samples = parser.add_argument_group("samples")
    samples.add_argument("--layout", default="sft", metavar="NAME", help="sft (default) learns answers, lm all")
    samples.add_argument("--seq_length", type=int, required=True, metavar="N", help="tokens of a sample at most")
    samples.add_argument("--prompt_length", type=int, metavar="N", help="of them for the prompt (sft)")
    samples.add_argument("--answer_length", type=int, metavar="N", help="of them for the last answer (sft)")
    samples.add_argument("--min_tokens", type=int, default=2, metavar="N", help="leave shorter samples out")
    samples.add_argument(
        "--truncation",
        default="right",
        metavar="WHERE",
        help="where too long a source text is cut: right (default), left, middle; delete drops the row",
    )
    samples.add_argument("--eval_ratio", type=float, default=0.0, metavar="R", help="share for name.eval.mindrecord")
    samples.add_argument("--split_seed", type=int, default=0, metavar="N", help="another seed divides otherwise")
    work = parser.add_argument_group("work")
    work.add_argument("--num_workers", type=int, metavar="N", help="processes (default: one a core)")
    work.add_argument("--shard_mb", type=int, default=128, metavar="N", help="megabytes of tokens in one file")
    work.add_argument("--overwrite", action="store_true", help="replace a set that is there")


def run(args: argparse.Namespace) -> int:
    """Prepare and report; returns the exit code."""
    from ms_longctx.data.convert import Settings
    from ms_longctx.data.prepare import prepare
    from ms_longctx.data.report import picture_path, report_path
    from ms_longctx.data.samples import Lengths

    prompt_length, answer_length = _split(args)
    settings = Settings(
        tokenizer=args.tokenizer,
        layout=args.layout,
        lengths=Lengths(args.seq_length, prompt_length, answer_length, args.min_tokens, args.truncation),
        format=args.format,
        fields=tuple(_field(item) for item in args.fields),
        system=args.system,
        instruction=args.instruction,
        chat_template=args.chat_template,
        eval_ratio=args.eval_ratio,
        split_seed=args.split_seed,
        strict=args.strict,
    )
    if (args.num_workers is not None and args.num_workers < 1) or args.shard_mb < 1:
        raise MsLongctxError("--num_workers and --shard_mb should be 1 or more")
    result = prepare(
        args.input,
        args.output,
        settings,
        num_workers=args.num_workers,
        shard_bytes=args.shard_mb << 20,
        overwrite=args.overwrite,
    )
    if result.tally is None:
        print(f"{args.output} is there already, prepared from the same files with the same settings")
        return 0
    print(result.tally.summary())
    if not result.finished:
        print("interrupted: what is done is kept; the same command goes on from there", file=sys.stderr)
        return _EXIT_INTERRUPTED
    for problem in result.tally.problems[:5]:
        print(f"  dropped {problem}")
    train = result.outputs["train"]
    for path in (*result.outputs.values(), report_path(train), picture_path(train)):
        print(f"  wrote {path}")
    return 0


def _split(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """With one length given the other is the rest."""
    prompt, answer = args.prompt_length, args.answer_length
    if prompt is not None and answer is None:
        answer = args.seq_length - prompt
    elif answer is not None and prompt is None:
        prompt = args.seq_length - answer
    return prompt, answer


def _field(item: str) -> tuple[str, str]:
    ours, equals, theirs = item.partition("=")
    if not (ours and equals and theirs):
        raise MsLongctxError(f"--fields {item}: expected OURS=THEIRS, for example article=body")
    return ours, theirs
