# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx export``: a model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ms_longctx.cli.options import add_model_options
from ms_longctx.errors import MsLongctxError

if TYPE_CHECKING:
    from ms_longctx.export.manifest import Manifest
    from ms_longctx.export.plan import Plan
    from ms_longctx.models.llama import LlamaForCausalLM

FORMATS = ("mindir", "onnx", "lite", "serving")
_LITE_OPTIONS = (
    ("lite_type", "ms", ("lite",)),
    ("lite_weights", "fp32", ("lite",)),
    ("lite_route", "onnx", ("lite", "serving")),
)
_EPILOG = """\
formats:
  mindir   MindSpore's own, for CPU and Ascend; 'ms-longctx generate --model OUTPUT' runs it
  onnx     opset 11, static shapes
  lite     MindSpore Lite: .ms and Lite MindIR, converted by MindSpore Lite 2.0.0 under Python 3.7
  serving  a folder that MindSpore Serving 2.0.2 serves over gRPC and REST

examples:
  %(prog)s --model SmolLM2-135M-Instruct.gguf --format mindir --shapes 512,2048 --output exported
  %(prog)s --model Llama-2-7b/ --adapter outputs/lora1 --format mindir --shapes dynamic --dtype fp16 --output exported
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "export",
        help="write MindIR, ONNX, Lite or Serving files",
        description="Write a model's prefill and decode graphs with the key-value cache as inputs and outputs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    work = parser.add_argument_group("export")
    work.add_argument("--format", choices=FORMATS, required=True)
    work.add_argument("--output", required=True, metavar="DIR", help="appears when it is complete")
    work.add_argument(
        "--shapes",
        default="2048",
        metavar="LENGTHS",
        help="cache lengths (prompt and answer together) such as 512,2048, or 'dynamic' (mindir); default 2048",
    )
    work.add_argument("--batch_size", type=int, default=1, metavar="N", help="rows of the graphs; default 1")
    work.add_argument("--chunk", type=int, default=256, metavar="N", help="prompt tokens read at a time; default 256")
    work.add_argument("--key_file", metavar="FILE", help="AES key (16, 24 or 32 bytes): encrypt with AES-GCM (mindir)")
    work.add_argument(
        "--lite_type", choices=("ms", "mindir"), default="ms", help="Lite's own format or MindIR for Lite"
    )
    work.add_argument("--lite_weights", choices=("fp32", "fp16"), default="fp32", help="fp16 halves the file")
    work.add_argument(
        "--lite_route",
        choices=("onnx", "rewrite"),
        default="onnx",
        help="through ONNX and Lite's converter, or MindIR rewritten to the older version (a fallback)",
    )
    parser.take_defaults_from_config(
        {
            "model": "model.pretrained",
            "tokenizer": "data.tokenizer",
            "dtype": "train.dtype",
            "device_target": "train.device_target",
        }
    )


def run(args: argparse.Namespace) -> int:
    """Export and return the exit code."""
    from ms_longctx.export.key import read_key
    from ms_longctx.export.output import check_output
    from ms_longctx.export.plan import Plan

    plan = Plan.parse(args.shapes, args.batch_size, args.chunk)
    _check_format(args, plan)
    key = read_key(args.key_file) if args.key_file else None
    output = Path(args.output)
    check_output(output)

    from ms_longctx.generation.loading import load_model, newest_checkpoint
    from ms_longctx.quant.checkpoint import is_quantized

    model = load_model(args.model, args.adapter, args.dtype, args.device_target, computes=False)
    if args.tokenizer is not None:
        model.companions = Path(args.tokenizer)
    manifest = _export(args, model, plan, output, key)
    size = sum(file["bytes"] for file in manifest.files.values())
    for graph in manifest.graphs:
        print(f"{graph.file}: {graph.role}, {graph.chunk} tokens at a time, cache of {graph.length or 'any'} tokens")
    notes = list(manifest.notes)
    if is_quantized(newest_checkpoint(Path(args.model))):
        notes.append(f"{args.model} is quantized; its weights were dequantized to {args.dtype}, inputs are not rounded")
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {output} ({len(manifest.files)} files, {size / 1e6:.0f} MB)")
    return 0


def _check_format(args: argparse.Namespace, plan: Plan) -> None:
    """Refuse options that the format does not have."""
    if args.format != "mindir":
        if args.key_file:
            raise MsLongctxError(f"--key_file encrypts MindIR; {args.format} files cannot be encrypted")
        if not plan.lengths:
            raise MsLongctxError(f"--shapes dynamic is for MindIR; {args.format} needs lengths such as 512,2048")
    for option, default, formats in _LITE_OPTIONS:
        value = getattr(args, option)
        if value != default and args.format not in formats:
            raise MsLongctxError(f"--{option} {value} is for --format {' or '.join(formats)}, not {args.format}")


def _export(args: argparse.Namespace, model: LlamaForCausalLM, plan: Plan, output: Path, key: bytes | None) -> Manifest:
    """Hand over to the format."""
    if args.format == "mindir":
        from ms_longctx.export.mindir import export_mindir

        return export_mindir(model, output, plan, key)
    if args.format == "onnx":
        from ms_longctx.export.onnx import export_onnx

        return export_onnx(model, output, plan)
    if args.format == "serving":
        from ms_longctx.export.serving import export_serving

        return export_serving(model, output, plan, args.lite_route)
    from ms_longctx.export.lite import export_lite

    return export_lite(model, output, plan, args.lite_type, args.lite_weights, args.lite_route)
