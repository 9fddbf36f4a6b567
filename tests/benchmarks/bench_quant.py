# SPDX-License-Identifier: Apache-2.0
"""Decoding SmolLM2-135M at batch 1 with quantized weights beside our own fp32 and torch: milliseconds a token, memory.

    python tests/benchmarks/bench_quant.py [--threads 2] --models int8=DIR int4=DIR [--check]

Directories are what ``ms-longctx quantize`` wrote from SmolLM2-135M. Each model is a process of its own; they decode in
turn, a block of tokens at a time. Medians of the blocks count, the first of each is left out. Bars: int8 1.5 times as
fast and 0.3 of the weights' memory, int4 twice as fast and 0.2. ``--peer`` adds transformers in fp32 and with torch's
dynamic int8 quantization.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import date
from importlib.metadata import version

from machine import cpu_name
from side import Side

from ms_longctx import assets

BLOCK, BLOCKS, PROMPT = 16, 10, 128
BARS = {"int8": (1.5, 0.3), "int4": (2.0, 0.2)}


def measure(models: dict[str, tuple[str, str]], threads: int) -> dict[str, tuple[float, float, float]]:
    """Median seconds a token, MB of weights and peak MB of the process, by name of (side, path)."""
    arguments = [str(PROMPT), str(BLOCK * BLOCKS + 1)]
    sides = {name: Side("quant_worker.py", [*model, *arguments], threads) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    weights: dict[str, float] = {}
    for count in [1] + [BLOCK] * BLOCKS:
        for name, side in sides.items():
            seconds, weights[name] = map(float, side.ask(str(count)))
            times[name].append(seconds / count)
    return {name: (statistics.median(times[name][2:]), weights[name], side.close()) for name, side in sides.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--peer", action="store_true", help="beside transformers and torch")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    args = parser.parse_args()
    original = str(assets.fetch(assets.SMOLLM2_135M))
    given = dict(pair.split("=", 1) for pair in args.models)
    models = {"fp32": ("ours", original), **{name: ("ours", path) for name, path in given.items()}}
    versions = ["mindspore"]
    if args.peer:
        models |= {"torch": ("torch", original), "torch-int8": ("torch-int8", original)}
        versions += ["torch", "transformers"]
    used = "  ".join(f"{name} {version(name)}" for name in versions)
    print(f"{date.today()}  {cpu_name()}, {args.threads} threads  {used}")
    print("weights     ms a token  ratio   bar  weights MB  share   bar  peak MB")
    result = measure(models, args.threads)
    base_seconds, base_weights, _ = result["fp32"]
    missed = 0
    for name, (seconds, weights, peak) in result.items():
        ratio, share = base_seconds / seconds, weights / base_weights
        least_ratio, most_share = BARS.get(name, (0.0, 1.0))
        missed += name in BARS and (ratio < least_ratio or share > most_share)
        print(
            f"{name:11} {seconds * 1e3:10.2f} {ratio:6.2f} {least_ratio:5.1f} {weights:11.1f} {share:6.3f} "
            f"{most_share:5.1f} {peak:8.0f}"
        )
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
