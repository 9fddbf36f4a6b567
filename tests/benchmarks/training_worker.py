# SPDX-License-Identifier: Apache-2.0
"""One side of bench_training.py: a process that takes training steps when told to.

    python training_worker.py {ours,peer} MODEL_DIR BATCH LENGTH {full,lora}

Prints ``ready``; then for every line on standard input it takes one step and prints ``seconds loss``; at the end of
input it prints its peak memory in MB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
LORA = {"r": 64, "lora_alpha": 128, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
Step = Callable[[np.ndarray], float]


def batches(vocab: int, batch: int, length: int) -> Callable[[], np.ndarray]:
    """Token ids ``(batch, length)``, a new draw each call, the same in every process."""
    rng = np.random.default_rng(0)
    return lambda: rng.integers(0, vocab, (batch, length), dtype=np.int32)


def ours(model_dir: Path, lora: bool) -> Step:
    """A step of ms_longctx, set up as the trainer does it."""
    from ms_longctx import LoraConfig, get_pe_model
    from ms_longctx.device import select_device
    from ms_longctx.models.llama import LlamaForCausalLM
    from ms_longctx.optim.adamw import AdamW
    from ms_longctx.optim.groups import decay_groups
    from ms_longctx.train.objectives import NextToken
    from ms_longctx.train.step import TrainStep

    select_device("CPU")
    model = LlamaForCausalLM.from_pretrained(str(model_dir))
    if lora:
        get_pe_model(model, LoraConfig(**LORA))
    model.set_train()
    groups = decay_groups(model.trainable_params(), WEIGHT_DECAY)
    step = TrainStep(NextToken(model).set_train(), AdamW(groups, BETAS, max_grad_norm=CLIP))

    def run(ids: np.ndarray) -> float:
        labels = np.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        return step([{"input_ids": ids, "labels": labels}], LEARNING_RATE).loss

    return run


def peer(model_dir: Path, lora: bool) -> Step:
    """A step of transformers and torch with their fastest settings: sdpa attention, fused AdamW."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa", dtype=torch.float32)
    model.config.use_cache = False
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], LEARNING_RATE, BETAS, fused=True)

    def run(ids: np.ndarray) -> float:
        tokens = torch.tensor(ids).long()
        loss = model(input_ids=tokens, labels=tokens).loss  # shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def main() -> None:
    side, model_dir, batch, length, kind = sys.argv[1:]
    import json

    vocab = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
    step = (ours if side == "ours" else peer)(Path(model_dir), kind == "lora")
    draw = batches(vocab, int(batch), int(length))
    print("ready", flush=True)
    for _ in sys.stdin:
        ids = draw()
        start = time.perf_counter()
        loss = step(ids)
        print(time.perf_counter() - start, loss, flush=True)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, flush=True)


if __name__ == "__main__":
    main()
