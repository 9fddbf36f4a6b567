# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt and greedy decoding beside transformers + torch: seconds, tokens and peak memory.

    python tests/benchmarks/bench_generation.py [--threads 2] [--case prefill-8192 ...] [--check]

A Llama of 15 million parameters (hidden 288, 6 layers, 6 heads, vocabulary 32000, tied), fp32, random weights, the
same on both sides. Each side is a process of its own; they work in turn, a prompt or a block of tokens at a time, so
that both see the same machine. Medians of the prompts or blocks count; the first of each side is left out. ``equal``
is the number of tokens that both sides chose alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from machine import cpu_name
from side import Side, make_model

BLOCK = 32  # tokens a side decodes before the other one's turn


@dataclass(frozen=True)
class Case:
    """``prompt`` tokens are read; then ``blocks`` blocks are decoded, or the prompt itself is what counts."""

    prompt: int
    blocks: int
    least_ratio: float

    @property
    def new_tokens(self) -> int:
        return 1 + self.blocks * BLOCK if self.blocks else 1


CASES = {
    "prefill-8192": Case(8192, 0, 1.3),
    "decode-512": Case(512, 8, 1.0),
    "decode-4096": Case(4096, 8, 1.0),
}
PROMPTS = 5


def measure(case: Case, model_dir: Path, threads: int) -> dict[str, tuple[float, float, list[int]]]:
    """Median seconds (of a prompt, or of a token), peak MB and all tokens of each side."""
    sides = ("ours", "peer")
    arguments = [str(model_dir), str(case.prompt), str(case.new_tokens)]
    workers = {side: Side("generation_worker.py", [side, *arguments], threads) for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    tokens: dict[str, list[int]] = {side: [] for side in sides}
    counts = [1] + [BLOCK] * case.blocks if case.blocks else [1] * PROMPTS
    for count in counts:
        for side in sides:
            seconds, *answer = workers[side].ask(str(count))
            times[side].append(float(seconds) / count)
            tokens[side] += map(int, answer)
    return {side: (statistics.median(times[side][1:]), workers[side].close(), tokens[side]) for side in sides}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    args = parser.parse_args()
    packages = ("mindspore", "torch", "transformers")
    print(f"{date.today()}  {cpu_name()}, {args.threads} threads  " + "  ".join(f"{p} {version(p)}" for p in packages))
    print(
        f"{'case':12} {'ours ms':>9} {'peer ms':>9} {'ratio':>6} {'bar':>5} {'ours MB':>8} {'peer MB':>8}  same tokens"
    )
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 16384)
        for name in args.case:
            case = CASES[name]
            result = measure(case, Path(folder), args.threads)
            (our_time, our_peak, our_tokens), (peer_time, peer_peak, peer_tokens) = result["ours"], result["peer"]
            same = sum(a == b for a, b in zip(our_tokens, peer_tokens, strict=True))
            ratio = peer_time / our_time
            missed += ratio < case.least_ratio or our_peak > peer_peak or same < len(our_tokens)
            print(
                f"{name:12} {our_time * 1e3:9.2f} {peer_time * 1e3:9.2f} {ratio:6.2f} {case.least_ratio:5.1f} "
                f"{our_peak:8.0f} {peer_peak:8.0f}  {same} of {len(our_tokens)}",
                flush=True,
            )
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
