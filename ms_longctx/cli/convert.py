# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx convert``: checkpoints in pieces to Hugging Face directories, and models to the pieces of a strategy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError

_EPILOG = """\
examples:
  %(prog)s --input outputs/run1 --output llama-long/
      the newest checkpoint of a run on any number of devices, as a Hugging Face directory
  %(prog)s --input Llama-2-7b/ --output pieces/ --worker_num 16 --parallel_config parallel_16.json
      a model in the pieces that 16 devices hold, to train from with --model.pretrained pieces/
  %(prog)s --input outputs/lora1 --output adapter/
      the adapter of a LoRA run on any number of devices, as peft's two files
"""


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "convert",
        help="merge a checkpoint's pieces into a Hugging Face directory, or split a model",
        description="Merge the weights of a checkpoint into a Hugging Face directory, or split a model into pieces.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", required=True, metavar="PATH", help="output directory of a run, checkpoint, model directory or .gguf"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), help="of the numbers (default: as they are)")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="of a file of a whole model")
    parser.add_argument("--worker_num", type=int, metavar="N", help="split for so many devices")
    parser.add_argument("--parallel_config", metavar="FILE", help="their strategy (JSON or YAML)")


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    if (args.worker_num is None) != (args.parallel_config is None):
        raise MsLongctxError("--worker_num and --parallel_config belong together: give both to split, none to merge")
    if args.worker_num is not None and args.worker_num < 1:
        raise MsLongctxError(f"--worker_num {args.worker_num} should be 1 or more")
    from ms_longctx.models.auto import open_checkpoint
    from ms_longctx.models.merge import merge, split
    from ms_longctx.parallel.strategy import Strategy

    strategy = None if args.worker_num is None else Strategy.read(args.parallel_config, args.worker_num)
    path, folder = _checkpoint(Path(args.input)), Path(args.output)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        return _convert_adapter(path, folder, args.dtype or "fp32", strategy is not None)
    source = open_checkpoint(path)
    if strategy is None:
        merge(source, folder, args.dtype, args.max_shard_size)
    else:
        # Of a length that divides: which one a run will have is not known here.
        strategy.check_model(source.config, strategy.sequence_multiple * strategy.mp, 1)
        split(source, folder, strategy, args.dtype)
    print(f"{path} -> {folder}{'' if strategy is None else f' ({strategy.describe()})'}")
    return 0


def _convert_adapter(path: Path, folder: Path, dtype: str, to_pieces: bool) -> int:
    if to_pieces:
        raise MsLongctxError(f"{path} holds an adapter, which needs no pieces; leave out --worker_num")
    from ms_longctx.models.merge import FILE_TYPES
    from ms_longctx.tuning.adapter_files import gather_adapter

    gather_adapter(path, folder, FILE_TYPES[dtype][0])
    print(f"{path} -> {folder} (adapter)")
    return 0


def _checkpoint(path: Path) -> Path:
    """The path itself, or the newest checkpoint of a run's output directory; a training checkpoint is verified."""
    from ms_longctx.train.checkpoint import MANIFEST, CheckpointStore, verify
    from ms_longctx.train.rundir import CHECKPOINTS

    if (path / CHECKPOINTS).is_dir():
        newest = CheckpointStore(path / CHECKPOINTS).newest(
            advice="copy the run again from where it was made, or train again"
        )
        if newest is None:
            raise MsLongctxError(f"{path / CHECKPOINTS} holds no checkpoint; train first")
        return newest
    if (path / MANIFEST).is_file():
        verify(path)
    return path
