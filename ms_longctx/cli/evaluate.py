# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx evaluate``: perplexity and ROUGE of a model on held-out data."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from ms_longctx.cli.options import (
    ANSWER_KEYS,
    add_generation_options,
    add_model_options,
    generation_settings,
)
from ms_longctx.errors import MsLongctxError

_EVALUATE_KEYS = ("metrics", "max_samples", "batch_size")
_EPILOG = """\
data is a set that 'ms-longctx prepare' wrote (name.mindrecord), or JSON lines in any format it reads; those
are prepared first, as prompt and answer, into the output directory.

example:
  %(prog)s --model Llama-2-7b/ --adapter outputs/ --data_path heldout.mindrecord --output_dir evaluation
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "evaluate",
        help="perplexity and ROUGE on held-out data",
        description="Predict and write the answers of held-out samples; score them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    work = parser.add_argument_group("evaluation")
    work.add_argument("--data_path", required=True, metavar="FILE", help="name.mindrecord, .jsonl or .jsonl.gz")
    work.add_argument("--output_dir", required=True, metavar="DIR", help="predictions.jsonl and report.json")
    work.add_argument("--metrics", nargs="+", choices=("perplexity", "rouge"), default=["perplexity", "rouge"])
    work.add_argument("--max_samples", type=int, metavar="N", help="the first N samples only")
    work.add_argument("--batch_size", type=int, default=1, metavar="N", help="answers written side by side")
    work.add_argument("--overwrite", action="store_true", help="delete an earlier evaluation in the directory")
    add_generation_options(parser)
    evaluation = {name: f"evaluate.{name}" for name in _EVALUATE_KEYS}
    parser.take_defaults_from_config({**ANSWER_KEYS, "data_path": "data.eval_path", **evaluation})


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the scores and write them; returns the exit code."""
    from ms_longctx.config import EvaluateConfig

    generation = generation_settings(args)
    if (args.max_samples or 1) < 1 or args.batch_size < 1:
        raise MsLongctxError("--max_samples and --batch_size should be 1 or more")
    source, output = Path(args.data_path), Path(args.output_dir)
    if not source.exists():
        raise MsLongctxError(f"--data_path {source} does not exist; expected name.mindrecord, .jsonl or .jsonl.gz")

    from ms_longctx.generation.evaluate import Evaluation
    from ms_longctx.generation.loading import load_model, load_text_tokenizer, newest_checkpoint

    if args.overwrite and output.exists():
        shutil.rmtree(output)
    model = load_model(args.model, args.adapter, args.dtype, args.device_target)
    tokenizer = load_text_tokenizer(args.tokenizer, args.model, model, args.chat_template)
    if source.suffix != ".mindrecord":
        origin = newest_checkpoint(Path(args.tokenizer or args.model))
        limit = model.config.max_position_embeddings
        source = _prepared(source, output, origin, limit, generation.max_new_tokens, args.chat_template)
    settings = EvaluateConfig(list(args.metrics), args.max_samples, args.batch_size)
    note = {
        "model": str(args.model),
        "adapter": args.adapter,
        "data_path": str(args.data_path),
        "dtype": args.dtype,
    }
    report = Evaluation(model, tokenizer, source, output, settings, generation, note).run()
    for name, value in report.items():
        if isinstance(value, float) and name != "seconds":
            print(f"{name:11} {value:.4f}")
    print(f"wrote {output / 'report.json'} and {output / 'predictions.jsonl'} ({report['samples']} samples)")
    return 0


def _prepared(source: Path, output: Path, tokenizer: Path, limit: int, answer: int, chat_template: str | None) -> Path:
    """JSON lines as a set of prompts that leave room for ``answer`` tokens in the model's context."""
    from ms_longctx.data.convert import Settings
    from ms_longctx.data.prepare import prepare
    from ms_longctx.data.samples import Lengths

    if answer >= limit:
        raise MsLongctxError(f"--max_new_tokens {answer} leaves no room for a prompt: the context is {limit}")
    settings = Settings(
        tokenizer=str(tokenizer),
        layout="sft",
        lengths=Lengths(limit, prompt_length=limit - answer),
        chat_template=chat_template,
    )
    output.mkdir(parents=True, exist_ok=True)
    prepared = prepare([str(source)], output / "data.mindrecord", settings)
    if not prepared.finished:
        raise KeyboardInterrupt
    return prepared.outputs["train"]
