# SPDX-License-Identifier: Apache-2.0
"""Collectives on a CPU beside MindSpore's own and torch's gloo, under msrun in one run.

    python tests/benchmarks/bench_collectives.py [--check]

Each rank gives `--megabytes` of float32; one thread a process. All run in the same processes and take turns; a
figure is the median on rank 0.
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
Times = dict[str, dict[str, list[float]]]  # collective, implementation, milliseconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    return parser.parse_args()


def measure(processes: int, arguments: argparse.Namespace) -> Times:
    """Run one job."""
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
            str(WORKER), str(arguments.megabytes), str(arguments.repetitions),
        ]  # fmt: skip
        subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=False)
        results = Path(folder) / "result.json"
        if not results.exists():
            logs = "".join(f"\n--- {path.name}\n{path.read_text()[-2000:]}" for path in Path(folder).glob("*.log"))
            raise RuntimeError(f"{processes} processes failed:{logs}")
        return json.loads(results.read_text())


def compare(processes: int, arguments: argparse.Namespace) -> bool:
    """Measure and print one table; whether every bar is met."""
    print(f"\n{processes} processes, {arguments.megabytes:g} MB each, ms")
    print(f"{'':16}{'ours':>10}{'mindspore':>12}{'gloo':>12}   ratios")
    met = True
    for name, samples in measure(processes, arguments).items():
        medians = {implementation: statistics.median(taken) for implementation, taken in samples.items()}
        line, ratios = f"{name:16}{medians['ours']:10.1f}", ""
        for peer, bar in BARS.items():
            if peer not in medians:
                line += f"{'-':>12}"
                continue
            ratio = medians[peer] / medians["ours"]
            line += f"{medians[peer]:12.1f}"
            ratios += f" {ratio:.1f}x ({'bar' if ratio >= bar else 'MISSES'} {bar:g}x)"
            met &= ratio >= bar
        print(f"{line}  {ratios}", flush=True)
    return met


def main() -> int:
    arguments = parse_arguments()
    print(f"{datetime.date.today()}  {cpu_name()}  MindSpore {version('mindspore')}  torch {version('torch')}")
    met = [compare(processes, arguments) for processes in arguments.processes]
    return 1 if arguments.check and not all(met) else 0


if __name__ == "__main__":
    sys.exit(main())
