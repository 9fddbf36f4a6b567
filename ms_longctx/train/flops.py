# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of a training step and the peak of the device: what MFU is made of.

MFU (model FLOPs utilisation: Chowdhery et al. 2022, arXiv 2204.02311, appendix B)::

    MFU = tokens per second * FLOPs per token / peak FLOPS of the device
    FLOPs per token = 6 * W + 12 * L * H * D * K        training all weights
                      4 * W + 6 * A + 12 * L * H * D * K    training A adapter weights beside W frozen ones

with W the weights used in matrix products (the output layer counts, the lookup in the embedding does not),
L layers, H query heads of size D, and K the keys that a query sees on average: S / 2 of a causal sequence of
S tokens, fewer with a sliding window. A weight costs 2 FLOPs forward, 2 for the gradient of its input, and 2
for its own gradient, which a frozen weight does not have. Work done twice by recomputation is not counted,
nor are element-wise operators. Packed documents see fewer keys than S / 2, which is not taken off.
"""

from __future__ import annotations

import time

from ms_longctx.config.model import LlamaConfig

# Ascend 910B, fp16 and bf16 matrix products: 24 cores * 8192 FLOPs per cycle * 1.8 GHz.
ASCEND_910B_FLOPS = 354e12


def flops_per_token(config: LlamaConfig, seq_length: int, adapter_weights: int = 0) -> float:
    """FLOPs that training spends on one token.

    Args:
        config: architecture.
        seq_length: tokens of one sequence.
        adapter_weights: trainable weights of a run with frozen base weights; 0 means that all weights train.
    """
    width = config.num_attention_heads * config.head_size
    kv_width = config.kv_heads * config.head_size
    attention = config.hidden_size * (2 * width + 2 * kv_width)
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    matrix = 4 * weights + 6 * adapter_weights if adapter_weights else 6 * weights
    window = min(config.sliding_window or seq_length, seq_length)
    keys_seen = window - window * window / (2 * seq_length)
    return matrix + 12 * config.num_hidden_layers * width * keys_seen


def peak_flops(device_target: str, dtype: str) -> float | None:
    """Highest FLOPS of matrix products on the device; ``None`` where no figure is known.

    Args:
        device_target: ``Ascend``: the published figure of the 910B. ``CPU``: measured once (about 0.2 s) as
            the best of several 1024 x 1024 products in fp32, with the threads that MindSpore uses.
        dtype: compute precision of the run.
    """
    if device_target == "Ascend":
        return ASCEND_910B_FLOPS if dtype in ("fp16", "bf16") else None
    return _measure_matmul()


def _measure_matmul(size: int = 1024, repeats: int = 8) -> float:
    import numpy as np
    from mindspore import Tensor, ops

    x = Tensor(np.random.default_rng(0).standard_normal((size, size)).astype(np.float32))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        ops.matmul(x, x).asnumpy()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
