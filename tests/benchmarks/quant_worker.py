# SPDX-License-Identifier: Apache-2.0
"""One side of bench_quant.py: a process that decodes a model's tokens when told to.

    python quant_worker.py MODEL PROMPT_LENGTH NEW_TOKENS

Prints ``ready``; then for every number on standard input it gives that many tokens, greedily, and prints the seconds
it took and the MB of all weights in memory. At the end of input it prints its peak memory in MB.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from ms_longctx.config import GenerationConfig
from ms_longctx.generation.generate import generate_ids
from ms_longctx.generation.loading import load_model
from ms_longctx.models.llama import LlamaForCausalLM


def tokens_of(model: LlamaForCausalLM, length: int, new_tokens: int) -> Iterator[int]:
    """Greedy tokens, the first one with the prompt."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, length).tolist()
    while True:
        for (token,) in generate_ids(model, [prompt], GenerationConfig(max_new_tokens=new_tokens)):
            assert token is not None
            yield token


def main() -> None:
    path, length, new_tokens = sys.argv[1:]
    model = load_model(path, device="CPU")
    weights = sum(parameter.nbytes for parameter in {id(p): p for p in model.get_parameters()}.values())
    tokens = tokens_of(model, int(length), int(new_tokens))
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            next(tokens)
        print(time.perf_counter() - start, weights / 1e6, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


if __name__ == "__main__":
    main()
