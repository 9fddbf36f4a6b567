# SPDX-License-Identifier: Apache-2.0
"""Reference models: transformers (torch, fp32), and how to compare with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import torch
import transformers
from mindspore import Tensor

from ms_longctx.models.llama import LlamaForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}

# One of each rotary scaling, for head_dim 10; the original length is 32 or that of the model.
FACTORS = [1.0, 1.1, 1.5, 2.5, 4.0]
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-40": {"rope_type": "yarn", "factor": 40.0},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "truncate": False},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def torch_model(seed: int = 0, **fields: Any) -> transformers.PreTrainedModel:
    """A small random Llama (with ``sliding_window``: a Mistral) whose biases and norms are not trivial."""
    torch.manual_seed(seed)
    values = {**TINY, **fields}
    if values.get("sliding_window"):
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**values))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def same_model(reference: transformers.PreTrainedModel, folder: Path, **overrides: Any) -> LlamaForCausalLM:
    """The same weights in our model, by way of the files transformers writes."""
    reference.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, **overrides).set_train(False)


def batch(vocab: int, rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and shifted labels, a fifth of them without a target."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    labels = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    labels[rng.random((rows, length)) < 0.2] = -100
    return ids, labels


def torch_logits(model: transformers.PreTrainedModel, ids: np.ndarray, **inputs: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids).long(), **inputs).logits.float().numpy()


def torch_gradients(
    model: transformers.PreTrainedModel, ids: np.ndarray, labels: np.ndarray, **inputs: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss over the labels (already shifted: transformers' own shift is not used) and all gradients."""
    model.zero_grad()
    logits = model(torch.tensor(ids).long(), **inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).long().flatten())
    loss.backward()
    return loss.item(), {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def our_gradients(
    model: LlamaForCausalLM, ids: np.ndarray, labels: np.ndarray, *inputs: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """The same from our model, by parameter name."""
    names, parameters = zip(*model.parameters_and_names(), strict=True)
    step = ms.value_and_grad(model, None, list(parameters))
    loss, gradients = step(Tensor(ids), Tensor(labels), *inputs)
    return float(loss.asnumpy()), {name: grad.asnumpy() for name, grad in zip(names, gradients, strict=True)}


def assert_gradients_close(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-3
) -> None:
    """Every gradient: norm of the difference at most ``tolerance`` times the norm of the reference."""
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        error = np.linalg.norm(actual[name] - reference) / np.linalg.norm(reference)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
