# SPDX-License-Identifier: Apache-2.0
"""Training steps beside transformers + torch: tokens per second and peak memory.

    python tests/benchmarks/bench_training.py [--threads 2] [--steps 7] [--case full-4x512 ...] [--check]

A Llama of 15 million parameters (hidden 288, 6 layers, 6 heads, vocabulary 32000, tied), fp32, AdamW with clipping,
the same weights and tokens on both sides. Each side is a process of its own; they take their steps in turn, so that
both see the same machine. The first steps (compilation, warm-up) are left out; the median of the others counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
# (batch, length, what trains, least ratio of our tokens/s to the peer's)
CASES = {
    "full-4x512": (4, 512, "full", 1.0),
    "lora-4x512": (4, 512, "lora", 1.0),
    "full-1x4096": (1, 4096, "full", 1.3),
    "lora-1x4096": (1, 4096, "lora", 1.3),
}
WARM_UP = 2


class Worker:
    """A training_worker.py process."""

    def __init__(self, side: str, model_dir: Path, case: str, threads: int) -> None:
        batch, length, kind, _ = CASES[case]
        arguments = [side, str(model_dir), str(batch), str(length), kind]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "training_worker.py"), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self._read("ready")

    def step(self) -> tuple[float, float]:
        """Seconds and loss of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, loss = self._read().split()
        return float(seconds), float(loss)

    def close(self) -> float:
        """End the process; peak resident memory in MB."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        peak = float(self._read())
        self.process.wait()
        return peak

    def _read(self, expected: str | None = None) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if expected is None or line.strip() == expected:
                return line
        raise SystemExit(f"error: a worker ended early; run by hand: {' '.join(map(str, self.process.args))}")


def make_model(folder: Path) -> None:
    """The peer's random initialisation, as a Hugging Face directory that both sides load."""
    code = (
        "import sys, torch; from transformers import LlamaConfig, LlamaForCausalLM; torch.manual_seed(0); "
        "LlamaForCausalLM(LlamaConfig(vocab_size=32000, hidden_size=288, intermediate_size=768, "
        "num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=4096, "
        "tie_word_embeddings=True)).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stderr=subprocess.DEVNULL)


def measure(case: str, model_dir: Path, threads: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """Median seconds of a step, peak MB and last loss of each side."""
    sides = ("ours", "peer")
    workers = {side: Worker(side, model_dir, case, threads) for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    losses = {}
    for index in range(WARM_UP + steps):
        for side in sides:
            seconds, losses[side] = workers[side].step()
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
        make_model(Path(folder))
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


def cpu_name() -> str:
    """Model name and number of the processors."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()} x {os.cpu_count()}"
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
