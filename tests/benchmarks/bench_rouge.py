# SPDX-License-Identifier: Apache-2.0
"""RougeLXT beside rouge-score, rapidrouge and rouge-score-rs: pairs per second, seconds and memory of a long pair.

    python tests/benchmarks/bench_rouge.py [--check]

Texts are random sentences with Zipf-distributed words. rouge-score needs 9 GB and minutes for a pair of 32K tokens, so
it gets a pair of 2K there and the table says so; its work grows with the square of the length.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
from machine import cpu_name

LONG, SHORT, PAIRS = 32_768, 256, 200
LONG_OF_ROUGE_SCORE = 2_048
SECONDS_BAR, MB_BAR = 0.3, 60
SIDES = ("RougeLXT", "rouge-score", "rapidrouge", "rouge-score-rs")
TYPES = ["rouge1", "rouge2", "rougeL"]


def text(rng: np.random.Generator, tokens: int) -> str:
    """Sentences of 8 to 39 words from a vocabulary of 5000."""
    weights = 1 / np.arange(1, 5001)
    words = [f"w{i}" for i in rng.choice(5000, tokens, p=weights / weights.sum())]
    sentences, start = [], 0
    while start < tokens:
        end = start + int(rng.integers(8, 40))
        sentences.append(" ".join(words[start:end]).capitalize() + ".")
        start = end
    return " ".join(sentences)


def scorer(side: str) -> Callable[[str, str], object]:
    """``score(prediction, reference)`` of rouge1, rouge2, rougeL (and rougeLxt)."""
    if side == "RougeLXT":
        from ms_longctx.metrics import RougeLXT

        return RougeLXT().score
    if side == "rouge-score":
        from rouge_score.rouge_scorer import RougeScorer
    elif side == "rapidrouge":
        from rapidrouge.rouge_scorer import RougeScorer
    else:
        from rouge_score_rs.rouge_scorer import RougeScorer
    score = RougeScorer(TYPES).score
    return lambda prediction, reference: score(reference, prediction)


def peak_mb() -> float:
    """Most resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def measure(side: str) -> None:
    """Print ``pairs/s, tokens of the long pair, its seconds, its MB`` (best of three; memory beyond the texts)."""
    rng = np.random.default_rng(0)
    tokens = LONG_OF_ROUGE_SCORE if side == "rouge-score" else LONG
    long_pair = text(rng, tokens), text(rng, tokens)
    pairs = [(text(rng, SHORT), text(rng, SHORT)) for _ in range(PAIRS)]
    score = scorer(side)
    score(*pairs[0])
    start = time.perf_counter()
    for pair in pairs:
        score(*pair)
    rate = PAIRS / (time.perf_counter() - start)
    before = peak_mb()
    seconds = []
    for _ in range(1 if side == "rouge-score" else 3):
        start = time.perf_counter()
        score(*long_pair)
        seconds.append(time.perf_counter() - start)
    print(rate, tokens, min(seconds), peak_mb() - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if RougeLXT misses its bars")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure(args.side)
        return 0
    print(f"{date.today()}  {cpu_name()}  " + "  ".join(f"{p} {version(p)}" for p in SIDES[1:]))
    print(f"{'':15} {'256-token pairs/s':>18} {'long pair':>10} {'s':>8} {'MB':>7}")
    missed = False
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rate, tokens, seconds, memory = map(float, output.split())
        print(f"{side:15} {rate:18.0f} {tokens:10.0f} {seconds:8.3f} {memory:7.1f}", flush=True)
        missed |= side == "RougeLXT" and (seconds > SECONDS_BAR or memory > MB_BAR)
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
