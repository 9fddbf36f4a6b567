# SPDX-License-Identifier: Apache-2.0
"""What benchmarks beside transformers share: the model, and a process for each side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Side:
    """A worker process that prints ``ready``, answers each line it is given with one, and at the end its peak in MB.

    Args:
        script: file beside this one.
        arguments: of the script.
        threads: that it may use.
    """

    def __init__(self, script: str, arguments: list[str], threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self._read("ready")

    def ask(self, line: str = "") -> list[str]:
        """The words of the answer to a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._read().split()

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


def make_model(folder: Path, context: int) -> None:
    """The peer's random initialisation for ``context`` tokens, as a Hugging Face directory that both sides load."""
    code = (
        "import sys, torch; from transformers import LlamaConfig, LlamaForCausalLM; torch.manual_seed(0); "
        "LlamaForCausalLM(LlamaConfig(vocab_size=32000, hidden_size=288, intermediate_size=768, "
        "num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=int(sys.argv[2]), "
        "tie_word_embeddings=True)).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(context)], check=True, stderr=subprocess.DEVNULL)
