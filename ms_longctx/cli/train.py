# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx train``: pretraining, supervised fine-tuning and LoRA."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ms_longctx.cli.options import add_config_options, add_resume_option, load_run


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "train", help="train a model", description="Train a model on a set that 'ms-longctx prepare' wrote."
    )
    add_config_options(parser)
    add_resume_option(parser)
    parser.add_argument("--overwrite", action="store_true", help="delete the earlier run in the output directory")


def run(args: argparse.Namespace) -> int:
    """Train; 0 at the end, 128 + signal number after Ctrl-C or SIGTERM (a checkpoint is saved then)."""
    config = load_run(args)
    if not getattr(args, "debug", False):
        # MindSpore's own warnings would tear the progress bar; its errors stay.
        os.environ.setdefault("GLOG_v", "3")
    from ms_longctx.parallel.world import share_cores

    share_cores(os.environ)
    from ms_longctx.train.trainer import Trainer

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    trainer = Trainer(config, overwrite=args.overwrite)
    summary = trainer.train()
    stopped = summary.stopped_by is not None and summary.step < summary.total_steps
    if trainer.workers.is_main and stopped:
        script = os.environ.get("MS_LONGCTX_STARTED_BY", "")  # run_scripts/msrun.sh or mpirun.sh, with its settings
        launcher = f"{trainer.world.launcher} with the same options and "
        if script or trainer.workers.count == 1:
            launcher = ""
        print(f"stopped after step {summary.step} of {summary.total_steps}; saved {summary.checkpoint}")
        print(f"go on with: {launcher}{resume_command(sys.argv, script)}")
    elif trainer.workers.is_main:
        print(f"trained {summary.step} steps; saved {summary.checkpoint}")
        print(f"loss curve: {config.train.output_dir}/loss.png, metrics: {config.train.output_dir}/metrics.jsonl")
    return 128 + summary.stopped_by if stopped and summary.stopped_by else 0


def resume_command(argv: list[str], script: str = "") -> str:
    """The command line that goes on where this one stopped.

    Args:
        argv: program and arguments.
        script: what takes the place of the program, quoted for a shell: settings and path of a launching script.
    """
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument == "--overwrite":
            continue
        if name in ("--resume", "--train.resume"):
            following = "" if equals else next(arguments, "")
            # Alone, --resume is followed by the next option.
            if following.startswith("-"):
                kept.append(following)
            continue
        kept.append(argument)
    if script:
        return f"{script} {shlex.join([*kept[1:], '--resume'])}"
    program = Path(kept[0])
    start = ["python", kept[0]] if program.suffix == ".py" else [program.name]
    return shlex.join([*start, *kept[1:], "--resume"])
