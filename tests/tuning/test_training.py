# SPDX-License-Identifier: Apache-2.0
"""Reference: peft and torch.optim.AdamW over transformers; losses and adapters of 10 steps within 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import peft
import pytest
import torch
from mindspore import Tensor, nn

from ms_longctx.optim import AdamW, decay_groups
from ms_longctx.tuning import LoraConfig, get_pe_model, load_adapter
from ms_longctx.tuning.trained import trained_tensors
from tests.tuning.compare import draw_dropout, file_names, torch_loss

STEPS, RATE, CLIP = 10, 5e-3, 0.5
CONFIGS: dict[str, dict[str, Any]] = {
    "task": {"r": 64, "lora_alpha": 128, "target_modules": ["q_proj", "v_proj"]},
    "rslora, head": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "use_rslora": True,
        "modules_to_save": ["lm_head"],
    },
}


class Step(nn.Cell):
    """One compiled training step; the loss is a mean, so the gradients need no scale."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = AdamW(decay_groups(model.trainable_params(), 0.1), max_grad_norm=CLIP)
        self.gradient = ms.value_and_grad(model, None, self.optimizer.parameters)

    @ms.jit
    def construct(self, ids, labels, rate, scale):  # noqa: ANN001
        loss, grads = self.gradient(ids, labels)
        norm, finite = self.optimizer(grads, rate, scale)
        return loss, norm, finite


def train(model: nn.Cell, batches: list, dropout_seed: int = 0) -> list[float]:
    step, losses = Step(model.set_train()), []
    for count, (ids, labels) in enumerate(batches):
        draw_dropout(model, dropout_seed, count)
        loss, _, finite = step(Tensor(ids), Tensor(labels), Tensor(RATE, ms.float32), Tensor(1.0, ms.float32))
        losses.append(float(loss.asnumpy()))
        assert bool(finite.asnumpy())
    return losses


def train_torch(model: torch.nn.Module, batches: list) -> list[float]:
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=0.1)
    losses = []
    for ids, labels in batches:
        optimizer.zero_grad()
        loss = torch_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        losses.append(float(loss))
    return losses


def make_batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.RandomState(3)
    return [tuple(rng.randint(0, 97, (2, 31)).astype(np.int32) for _ in range(2)) for _ in range(count)]


def snapshot(model: nn.Cell) -> dict[str, np.ndarray]:
    return {name: param.asnumpy().copy() for name, param in model.parameters_and_names()}


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_ten_steps(make_pair: Any, tmp_path: Path, values: dict, fused: bool) -> None:
    theirs, ours = make_pair(fused)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    theirs.save_pretrained(tmp_path / "start")
    load_adapter(ours, tmp_path / "start")
    start, batches = snapshot(ours), make_batches(STEPS)
    np.testing.assert_allclose(train(ours, batches), train_torch(theirs, batches), rtol=0, atol=1e-4)
    reference = file_names(theirs)
    trained = trained_tensors(ours)
    for name, tensor in trained.items():
        expected = reference[name].detach().numpy()
        np.testing.assert_allclose(tensor.read(), expected, rtol=0, atol=1e-4, err_msg=name)
    changing = {id(tensor.parameter) for tensor in trained.values()}
    for name, param in ours.parameters_and_names():
        assert (param.asnumpy().tobytes() != start[name].tobytes()) == (id(param) in changing), name


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [pytest.param("before", marks=pytest.mark.long), "after"])
def test_recompute_trains_every_adapter(make_pair: Any, prepared: str, fused: bool) -> None:
    """The input of the first layer needs no gradient, which must not stop the gradients inside it."""
    values = CONFIGS["task"] | {"target_modules": "all-linear", "r": 4}
    batches = make_batches(2)
    plain = get_pe_model(make_pair(fused)[1], LoraConfig(**values))
    losses = train(plain, batches)
    ours = make_pair(fused)[1]
    if prepared == "after":
        ours.set_recompute()
    get_pe_model(ours, LoraConfig(**values))
    if prepared == "before":
        ours.set_recompute()
    start = snapshot(ours)
    assert train(ours, batches) == losses
    for name, param in ours.parameters_and_names():
        assert (param.asnumpy() != start[name]).any() == ("lora_" in name), name
    for (name, param), (_, expected) in zip(ours.parameters_and_names(), plain.parameters_and_names(), strict=True):
        np.testing.assert_array_equal(param.asnumpy(), expected.asnumpy(), err_msg=name)


@pytest.mark.slow
def test_dropout_masks_follow_the_seed_alone(make_pair: Any, fused: bool) -> None:
    """Recomputation has to draw the same masks again; another seed draws others."""
    values = CONFIGS["task"] | {"r": 4, "lora_dropout": 0.3}
    batches = make_batches(4)

    def losses(seed: int, recompute: bool) -> list[float]:
        model = get_pe_model(make_pair(fused)[1], LoraConfig(**values)).set_train()
        if recompute:
            model.set_recompute()
        return train(model, batches, seed)

    plain = losses(5, False)
    assert losses(5, True) == plain
    assert losses(6, False)[1:] != plain[1:]
