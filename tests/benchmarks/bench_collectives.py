# SPDX-License-Identifier: Apache-2.0
"""Collectives on a CPU beside MindSpore's own and torch's gloo, all under msrun in one run.

    python tests/benchmarks/bench_collectives.py [--check]

Each rank gives `--megabytes` of float32; one thread a process. Every implementation runs in jobs of its own, in
turns, `--rounds` times; a figure is the median of all repetitions on rank 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from machine import cpu_name

WORKER = Path(__file__).resolve().parent / "collectives_worker.py"
ROOT = WORKER.parents[2]
# Least ratio of the other's time to ours.
BARS = {"mindspore": 8.0, "gloo": 2.0}
COMPARED = ("all_reduce", "all_gather")
Times = dict[str, list[float]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    return parser.parse_args()


def measure(implementation: str, processes: int, arguments: argparse.Namespace) -> Times:
    """Run one job; milliseconds of every repetition of each collective."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3",
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(binaries / "msrun"), "--worker_num", str(processes), "--local_worker_num", str(processes),
            "--master_port", str(port), "--log_dir", folder, "--join", "True", "--tail_worker_log", "-1",
            str(WORKER), implementation, str(arguments.megabytes), str(arguments.repetitions),
        ]  # fmt: skip
        result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            log = (Path(folder) / "worker_0.log").read_text()
            raise RuntimeError(f"{implementation} with {processes} processes failed:\n{log[-3000:]}\n{result.stderr}")
        return json.loads((Path(folder) / "result.json").read_text())


def compare(processes: int, arguments: argparse.Namespace) -> bool:
    """Measure and print one table; whether every bar is met."""
    times: dict[str, Times] = {"ours": {}, "mindspore": {}, "gloo": {}}
    for _ in range(arguments.rounds):
        for implementation, known in times.items():
            for name, samples in measure(implementation, processes, arguments).items():
                known.setdefault(name, []).extend(samples)
    print(f"\n{processes} processes, {arguments.megabytes:g} MB each, ms")
    print(f"{'':16}{'ours':>8}{'mindspore':>11}{'gloo':>8}   ratios")
    met = True
    for name, samples in times["ours"].items():
        own = statistics.median(samples)
        line, ratios = f"{name:16}{own:8.1f}", ""
        for peer, width in (("mindspore", 11), ("gloo", 8)):
            other = statistics.median(times[peer][name]) if name in times[peer] else None
            line += f"{other:{width}.1f}" if other else f"{'-':>{width}}"
            if other and name in COMPARED:
                good = other / own >= BARS[peer]
                ratios += f" {other / own:.1f}x ({'bar' if good else 'MISSES'} {BARS[peer]:g}x)"
                met &= good
        print(f"{line}  {ratios}", flush=True)
    return met


def main() -> int:
    arguments = parse_arguments()
    print(f"{datetime.date.today()}  {cpu_name()}  MindSpore {version('mindspore')}  torch {version('torch')}")
    met = [compare(processes, arguments) for processes in arguments.processes]
    return 1 if arguments.check and not all(met) else 0


if __name__ == "__main__":
    sys.exit(main())
