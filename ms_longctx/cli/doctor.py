# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx doctor``: is this machine fit to train, and what was wrong with a run?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ms_longctx.cli.options import UsageError
from ms_longctx.errors import MsLongctxError

_FAILED = 1


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, or find the cause in the logs of a failed run",
        description="Without --log: check versions (Python, MindSpore, NumPy, CANN, driver, firmware), devices and "
        "their free memory, a matrix product, collectives, and the host. With --log: name the failures that logs show, "
        "the first one first, with cause and cure.",
        epilog="Exit code: 0 nothing failed (warnings do not count), 1 something failed, 2 wrong usage.",
    )
    parser.add_argument(
        "--log", nargs="+", metavar="PATH", help="read these logs, or all in these directories, of one or several ranks"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--device_target", default="auto", choices=("auto", "Ascend", "CPU"), help="for the products")
    parser.add_argument(
        "--healthcheck",
        action="store_true",
        help="for containers, under 5 s: versions, kernel library, device files and health, disk, /dev/shm and open "
        "files; nothing is computed and MindSpore is not imported",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if nothing failed, 1 if something did."""
    if args.log is not None and (args.healthcheck or args.device_target != "auto"):
        raise UsageError("doctor: --log reads logs only; leave out --healthcheck and --device_target")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json: the directory of {args.json} does not exist")
    return _read_logs(args) if args.log is not None else _check_machine(args)


def _read_logs(args: argparse.Namespace) -> int:
    from ms_longctx.doctor import logs
    from ms_longctx.doctor.logs.reading import find_logs

    diagnosis = logs.diagnose(find_logs(args.log))
    print(logs.as_text(diagnosis))
    _write(args.json, logs.as_data(diagnosis))
    return _FAILED if diagnosis.findings else 0


def _check_machine(args: argparse.Namespace) -> int:
    from ms_longctx.doctor import checks, report

    found = []
    for check in checks.run_checks(args.device_target, quick=args.healthcheck):
        found.append(check)
        print(report.line(check), flush=True)
    print(report.summary(found))
    _write(args.json, report.as_data(found))
    return _FAILED if report.failed(found) else 0


def _write(file: str | None, data: dict[str, Any]) -> None:
    if file is None:
        return
    partial = Path(file).with_name(f"{Path(file).name}.partial")
    try:
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise MsLongctxError(f"--json: cannot write {file}: {error.strerror}") from error
