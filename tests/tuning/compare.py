# SPDX-License-Identifier: Apache-2.0
"""The same quantities of a peft model and of ours."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import torch
from mindspore import Tensor, nn

from ms_longctx.tuning.dropout import KeyedDropout


def torch_logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.float().numpy()


def our_logits(model: nn.Cell, ids: np.ndarray) -> np.ndarray:
    return model(Tensor(ids)).astype(ms.float32).asnumpy()


def torch_loss(model: torch.nn.Module, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    logits = model(torch.tensor(ids, dtype=torch.long)).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, torch.tensor(labels, dtype=torch.long).flatten())


def randomize(peft_model: torch.nn.Module, seed: int = 1) -> None:
    """Give every trained tensor a value, so that adapters do something (B starts at 0)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in peft_model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)


def file_names(peft_model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Trained tensors of a peft model under the names of its files."""
    return {
        name.replace("base_model.model.", "", 1).replace(".default", "").replace(".modules_to_save", ""): param
        for name, param in peft_model.named_parameters()
        if param.requires_grad
    }


def draw_dropout(model: nn.Cell, seed: int, count: int) -> None:
    """Choose the masks of forward pass number ``count``."""
    for cell in model.cells():
        draw_dropout(cell, seed, count)
    if isinstance(model, KeyedDropout):
        drawn = np.random.SeedSequence([seed, count]).generate_state(1).view(np.int32)
        model.key.copy_(Tensor(int(drawn[0]), ms.int32))
