# SPDX-License-Identifier: Apache-2.0
"""One side of bench_quant.py: a process that decodes a model's tokens when told to.

    python quant_worker.py {ours,torch,torch-int8} MODEL PROMPT_LENGTH NEW_TOKENS

Prints ``ready``; then for every number on standard input it gives that many tokens, greedily, and prints the seconds
it took and the MB of all weights in memory. At the end of input it prints its peak memory in MB.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import decoding
import numpy as np

PROMPT_TOKENS = 49152  # ids of prompts are below


def ours(path: Path, prompt: list[int], new_tokens: int) -> Iterator[float]:
    """MB of the weights, then tokens, by ms_longctx."""
    from ms_longctx.generation.loading import load_model

    model = load_model(str(path), device="CPU")
    yield sum(parameter.nbytes for parameter in {id(p): p for p in model.get_parameters()}.values()) / 1e6
    yield from decoding.ours(model, prompt, new_tokens)


def peer(path: Path, prompt: list[int], new_tokens: int, int8: bool) -> Iterator[float]:
    """The same by transformers and torch; ``int8``: torch's dynamic quantization of all linear layers."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if options else path
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, **options)
    model.eval()
    if int8:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    yield sum(_storages(model).values()) / 1e6
    yield from decoding.peer(model, prompt, new_tokens)


def _storages(model: object) -> dict[int, int]:
    """Bytes of all weights by where they lie; torch keeps those of int8 layers in packed parameters."""
    import torch

    assert isinstance(model, torch.nn.Module)
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, torch.ao.nn.quantized.dynamic.Linear):
            tensors.append(module.weight())
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}


def main() -> None:
    side, path, length, new_tokens = sys.argv[1:]
    prompt = np.random.default_rng(0).integers(0, PROMPT_TOKENS, int(length)).tolist()
    if side == "ours":
        tokens = ours(Path(path), prompt, int(new_tokens))
    else:
        tokens = peer(Path(path), prompt, int(new_tokens), side == "torch-int8")
    weights = next(tokens)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            next(tokens)
        print(time.perf_counter() - start, weights, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


if __name__ == "__main__":
    main()
