# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx dryrun``: does this strategy compile for Ascend, and what does each rank hold, send and need?"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ms_longctx.cli.options import UsageError, load_run
from ms_longctx.config import RunConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel import virtual_cluster
from ms_longctx.parallel.program_rules import check_program
from ms_longctx.parallel.strategy import Strategy

_FAILED = 1


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "dryrun",
        help="compile a strategy for Ascend without devices",
        description="Compile the training program of every kind of rank for Ascend on this machine, and show pipeline "
        "stage, weight slices, communication, a lower bound of memory, and whether the ranks fit together.",
    )
    parser.add_argument("--config", metavar="NAME_OR_FILE", help="preset name or YAML file")
    parser.set_defaults(overrides=[])
    parser.epilog = "Any key of the configuration can be set with '--section.key value': --data.seq_length 131072."
    parser.add_argument("--parallel_config", metavar="FILE", help='strategy file, e.g. {"dp": 4, "mp": 2, "pp": 2}')
    parser.add_argument("--worker_num", type=int, metavar="N", help="number of devices")
    parser.add_argument(
        "--ranks",
        default="classes",
        metavar="WHICH",
        help="'classes': one rank of each kind (default); 'stages': one of each pipeline stage; or '0,5,8-11'",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="compile N layers, and one a stage less, and extrapolate to all layers",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report, with every parameter, as JSON")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="delete the stand-in for CANN that earlier dry runs built; alone: only that",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if all compiles and fits together, 1 if not."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    if args.clean:
        _clean()
        if args.config is None and args.worker_num is None:
            return 0
    if args.config is None or args.worker_num is None or args.worker_num < 1:
        raise UsageError("dryrun needs --config NAME_OR_FILE and --worker_num N of at least 1")
    config = _without_weights(load_run(args))
    strategy = Strategy.from_config(config, args.worker_num)
    strategy.check_model(config.model, config.data.seq_length, config.train.batch_size)
    check_program(config, config.model, strategy)
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json: the directory of {args.json} does not exist")
    return _dry_run(args, config, strategy)


def _without_weights(config: RunConfig) -> RunConfig:
    """The run with the architecture of its first weights written out: only that is needed, and layers may be cut."""
    if config.model.pretrained is None:
        return config
    from ms_longctx.train.build import architecture

    found = architecture(config)
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return replace(config, model=replace(config.model, pretrained=None, **fields))


def _clean() -> None:
    removed = virtual_cluster.remove()
    for path in removed:
        print(f"deleted {path}")
    if not removed:
        print("there is no stand-in for CANN")


def _dry_run(args: argparse.Namespace, config: RunConfig, strategy: Strategy) -> int:
    from ms_longctx.parallel.dryrun import report
    from ms_longctx.parallel.dryrun.extrapolate import cut
    from ms_longctx.parallel.dryrun.ranks import select_ranks
    from ms_longctx.parallel.dryrun.simulate import dry_run

    ranks = select_ranks(args.ranks, strategy)
    if args.layers is not None:
        cut(strategy, args.layers, config.model.num_hidden_layers)  # refuses before the stand-in is built
    _say("preparing MindSpore's simulation")
    simulator = virtual_cluster.prepare()
    if simulator.build_seconds:
        _say(f"built and checked the stand-in for CANN in {simulator.build_seconds:.0f} s: {simulator.root}")
    folder = Path(tempfile.mkdtemp(prefix="ms_longctx_dryrun_"))
    keep = True
    try:
        found = dry_run(config, strategy, ranks, simulator, folder, args.layers, _say)
        keep = bool(report.keep_logs(found))
    except MsLongctxError:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(report.as_text(found))
    if args.json is not None:
        _write(Path(args.json), json.dumps(report.as_data(found), indent=1))
    if found.failed:
        print(f"error: {_first_problem(found)}", file=sys.stderr)
    return _FAILED if found.failed else 0


def _first_problem(found: Any) -> str:
    for known in found.classes:
        if known.failure:
            return f"rank {known.ranks.rank} does not compile: {known.failure}"
    return str(found.match.problems[0])


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise MsLongctxError(f"--json: cannot write {path}: {error.strerror}") from error


def _say(message: str) -> None:
    """Progress goes to standard error; standard output is the report."""
    print(message, file=sys.stderr, flush=True)
