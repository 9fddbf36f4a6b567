# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx quantize``: int8 or int4 weights, calibrated on text and measured on other text."""

from __future__ import annotations

import argparse
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError

_EPILOG = """\
int8: a scale a channel, inputs int8 a token, SmoothQuant; units that lose too much keep their inputs, then their
weights in fp16, until the threshold holds. awq, gptq, rtn: int4 in groups. Nothing is written if it does not hold.

example:
  %(prog)s --model Llama-2-7b/ --calibrate_data pubmed.jsonl --output Llama-2-7b-int8 --accuracy_threshold 0.98
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "quantize",
        help="int8 or int4 weights",
        description="Quantize a model layer by layer; write it for transformers, vLLM and this package.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input_options(parser)
    parser.add_argument("--method", choices=("int8", "awq", "gptq", "rtn"), default="int8", help="default int8")
    parser.add_argument("--layout", choices=("awq", "compressed-tensors"), help="of int4 files; default awq")
    parser.add_argument(
        "--accuracy_threshold",
        type=float,
        metavar="X",
        help="least top-1 agreement, logits cosine and 1 / perplexity ratio; default 0.98 for int8, none for int4",
    )
    parser.add_argument(
        "--max_kept", type=float, default=0.2, metavar="X", help="largest share of weights left in fp16; default 0.2"
    )
    parser.add_argument("--group_size", type=int, metavar="N", help="of int4; default 128, or less where it must")
    parser.add_argument(
        "--activations",
        choices=("token", "none"),
        default="none",
        help="int8 inputs, a scale a token, or fp; default none",
    )
    parser.add_argument("--alpha", type=float, metavar="X", help="SmoothQuant's strength; default: searched")
    parser.add_argument("--head", choices=("int8", "fp"), default="int8", help="embedding and output head")


def _add_input_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="PATH",
        help="Hugging Face directory, .gguf file, training run, or export in MindIR",
    )
    add("--output", required=True, metavar="DIR", help="directory to write")
    add("--calibrate_data", required=True, metavar="FILE", help=".jsonl or .jsonl.gz in any format 'prepare' reads")
    add("--heldout_data", metavar="FILE", help="to measure on; default: every tenth text of the above, kept apart")
    add("--tokenizer", metavar="PATH", help="if it is not beside the model")
    add("--samples", type=int, default=512, metavar="N", help="windows to calibrate on; default 512")
    add("--seq_length", type=int, default=256, metavar="N", help="tokens of a window; default 256")
    add("--heldout_samples", type=int, default=32, metavar="N", help="windows to measure on; default 32")
    add("--device_target", default="auto", metavar="NAME", help="auto, Ascend, GPU or CPU")


def run(args: argparse.Namespace) -> int:
    """Quantize and report; returns the exit code."""
    _check(args)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from ms_longctx.device import select_device
    from ms_longctx.generation.loading import newest_checkpoint
    from ms_longctx.quant.run import Options, quantize
    from ms_longctx.quant.search import NotReached

    select_device(args.device_target)
    path = newest_checkpoint(Path(args.model))
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise MsLongctxError(
            f"{args.model} holds an adapter; merge it with 'ms-longctx export --model BASE --adapter {args.model} "
            "--format mindir' and quantize that export"
        )
    args.model = str(path)
    given = {name: getattr(args, name) for name in Options.__dataclass_fields__}
    try:
        with _interruptible():
            report, table = quantize(Options(**given))
    except NotReached as error:
        print("\n".join(error.table))
        raise
    for line in table[:11]:
        print(line)
    accuracy, units = report["accuracy"], report["units"]
    for name, value in accuracy.items():
        print(f"{name:20} {value:.5g}")
    print(f"{'units':20} {', '.join(f'{count} {level}' for level, count in units.items())}")
    print(f"{'time, peak memory':20} {report['seconds']} s, {report['peak_memory_mb']} MB")
    print(f"wrote {args.output}" + (" (its report has all units, the ten worst are above)" if len(table) > 11 else ""))
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C: MindSpore sends it in place of a Ctrl-C that meets a running graph."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check(args: argparse.Namespace) -> None:
    for name in ("samples", "seq_length", "heldout_samples"):
        least = 2 if name == "seq_length" else 1
        if getattr(args, name) < least:
            raise MsLongctxError(f"--{name} {getattr(args, name)}: expected {least} or more")
    for name in ("accuracy_threshold", "max_kept", "alpha"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= 1:
            raise MsLongctxError(f"--{name} {value}: expected 0 to 1")
    for name in ("alpha", "activations"):
        if args.method != "int8" and getattr(args, name) not in (None, "none"):
            raise MsLongctxError(f"--{name} belongs to --method int8, not {args.method}")
    if args.alpha is not None and args.activations != "token":
        raise MsLongctxError("--alpha is SmoothQuant's, for inputs in int8: add --activations token")
    if args.method == "int8" and args.group_size is not None:
        raise MsLongctxError("--group_size belongs to int4; int8 has a scale a channel")
