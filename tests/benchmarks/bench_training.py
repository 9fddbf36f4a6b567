# SPDX-License-Identifier: Apache-2.0
"""Training steps beside transformers + torch: tokens per second and peak memory.

    python tests/benchmarks/bench_training.py [--threads 2] [--steps 7] [--case full-4x512 ...] [--check]

A Llama of 15 million parameters (hidden 288, 6 layers, 6 heads, vocabulary 32000, tied), fp32, AdamW with clipping,
the same weights and tokens on both sides. Each side is a process of its own; they take their steps in turn, so that
both see the same machine. The first steps (compilation, warm-up) are left out; the median of the others counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from machine import cpu_name
from side import Side, make_model

# (batch, length, what trains, least ratio of our tokens/s to the peer's)
CASES = {
    "full-4x512": (4, 512, "full", 1.0),
    "lora-4x512": (4, 512, "lora", 1.0),
    "full-1x4096": (1, 4096, "full", 1.3),
    "lora-1x4096": (1, 4096, "lora", 1.3),
}
WARM_UP = 2


def measure(case: str, model_dir: Path, threads: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """Median seconds of a step, peak MB and last loss of each side."""
    sides = ("ours", "peer")
    batch, length, kind, _ = CASES[case]
    arguments = [str(model_dir), str(batch), str(length), kind]
    workers = {side: Side("training_worker.py", [side, *arguments], threads) for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    losses = {}
    for index in range(WARM_UP + steps):
        for side in sides:
            seconds, losses[side] = map(float, workers[side].ask())
            if index >= WARM_UP:
                times[side].append(seconds)
    return {side: (statistics.median(times[side]), workers[side].close(), losses[side]) for side in sides}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each side")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    args = parser.parse_args()
    packages = ("mindspore", "torch", "transformers", "peft")
    versions = "  ".join(f"{name} {version(name)}" for name in packages)
    print(f"{date.today()}  {cpu_name()}, {args.threads} threads  {versions}")
    print("case          ours tok/s  peer tok/s  ratio   bar  ours MB  peer MB  losses")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 4096)
        for case in args.case:
            batch, length, _, bar = CASES[case]
            result = measure(case, Path(folder), args.threads, args.steps)
            (our_time, our_peak, our_loss), (peer_time, peer_peak, peer_loss) = result["ours"], result["peer"]
            ratio, tokens = peer_time / our_time, batch * length
            missed += ratio < bar or our_peak > peer_peak or abs(our_loss - peer_loss) > 1e-3 * peer_loss
            print(
                f"{case:12} {tokens / our_time:11.0f} {tokens / peer_time:11.0f} {ratio:6.2f} {bar:5.1f} "
                f"{our_peak:8.0f} {peer_peak:8.0f}  {our_loss:.5f} {peer_loss:.5f}",
                flush=True,
            )
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
