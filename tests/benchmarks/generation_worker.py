# SPDX-License-Identifier: Apache-2.0
"""One side of bench_generation.py: a process that reads a prompt and writes tokens when told to.

    python generation_worker.py {ours,peer} MODEL_DIR PROMPT_LENGTH NEW_TOKENS

Prints ``ready``; then for every number on standard input it gives that many tokens, greedily, and prints the
seconds it took and the tokens. The first token of all comes with the prompt; after NEW_TOKENS the prompt is read
again. At the end of input it prints its peak memory in MB.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import decoding
import numpy as np


def ours(model_dir: Path, prompt: list[int], new_tokens: int) -> Iterator[int]:
    """Tokens by ms_longctx."""
    from ms_longctx.models.llama import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(str(model_dir))
    yield -1  # loaded
    yield from decoding.ours(model, prompt, new_tokens)


def peer(model_dir: Path, prompt: list[int], new_tokens: int) -> Iterator[int]:
    """Tokens by transformers and torch, with sdpa attention and without the bookkeeping of its generate()."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa", dtype=torch.float32).eval()
    yield -1  # loaded
    yield from decoding.peer(model, prompt, new_tokens)


def main() -> None:
    side, model_dir, length, new_tokens = sys.argv[1:]
    vocab = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
    prompt = np.random.default_rng(0).integers(0, vocab, int(length)).tolist()
    tokens = (ours if side == "ours" else peer)(Path(model_dir), prompt, int(new_tokens))
    next(tokens)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        answer = [next(tokens) for _ in range(int(line))]
        print(time.perf_counter() - start, *answer, flush=True)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, flush=True)


if __name__ == "__main__":
    main()
