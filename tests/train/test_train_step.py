# SPDX-License-Identifier: Apache-2.0
"""One optimizer step against torch and transformers: gradients, accumulation, clipping, fp16, recompute."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor
from transformers import LlamaConfig as TorchLlamaConfig
from transformers import LlamaForCausalLM as TorchLlama

from ms_longctx.config.model import LlamaConfig
from ms_longctx.device import select_device
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.optim.adamw import AdamW
from ms_longctx.optim.groups import decay_groups
from ms_longctx.train.objectives import NextToken
from ms_longctx.train.step import EvalStep, TrainStep
from ms_longctx.tuning import LoraConfig, get_pe_model

CONFIG = LlamaConfig(
    vocab_size=131,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
LENGTH = 31
RATE = 0.01
Batch = dict[str, np.ndarray]


@pytest.fixture(autouse=True, scope="module")
def cpu() -> None:
    select_device("CPU")


def make_batch(rows: int, seed: int, supervised: float = 0.7) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CONFIG.vocab_size, (rows, LENGTH)).astype(np.int32)
    labels = np.where(rng.random(ids.shape) < supervised, np.roll(ids, -1, 1), -100).astype(np.int32)
    labels[:, -1] = -100
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape).copy()
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "document_ids": np.zeros_like(ids),
    }


def make_model(compute_dtype: ms.Type = ms.float32, lora: LoraConfig | None = None) -> LlamaForCausalLM:
    ms.set_seed(3)
    model = LlamaForCausalLM(CONFIG, ms.float32, compute_dtype)
    # Larger weights than those of a fresh model, so that gradients are far from the rounding of fp32.
    for parameter in model.trainable_params():
        if parameter.ndim > 1:
            parameter.set_data(Tensor(parameter.asnumpy() * 5))
    if lora is not None:
        get_pe_model(model, lora)
    model.set_train()
    return model


def make_step(model: LlamaForCausalLM, accumulation: int = 1, **settings: Any) -> tuple[TrainStep, AdamW]:
    optimizer = AdamW(decay_groups(model.trainable_params(), 0.1), max_grad_norm=settings.get("clip", 1.0))
    return TrainStep(NextToken(model), optimizer, accumulation, seed=settings.get("seed", 0)), optimizer


def gradients(optimizer: AdamW) -> dict[str, np.ndarray]:
    """Of the first step: the first moment is (1 - beta1) times the clipped gradient."""
    return {
        name.removeprefix("exp_avg."): state.asnumpy() / (1 - optimizer.betas[0])
        for name, state in optimizer.state().items()
        if name.startswith("exp_avg.")
    }


def snapshot(optimizer: AdamW) -> dict[str, np.ndarray]:
    values = {parameter.name: parameter.asnumpy().copy() for parameter in optimizer.parameters}
    return values | {name: state.asnumpy().copy() for name, state in optimizer.state().items()}


def torch_copy(model: LlamaForCausalLM) -> TorchLlama:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    values = {name: getattr(CONFIG, name) for name in names + more}
    reference = TorchLlama(TorchLlamaConfig(**values, attn_implementation="eager"))
    arrays = {name: parameter.asnumpy().copy() for name, parameter in model.parameters_and_names()}
    reference.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return reference


def torch_loss_sum(reference: TorchLlama, batch: Batch) -> torch.Tensor:
    logits = reference(torch.from_numpy(batch["input_ids"]).long()).logits
    labels = torch.from_numpy(batch["labels"]).long()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Greatest difference of each tensor, relative to its greatest element."""
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        error = np.abs(actual[name] - reference).max() / max(np.abs(reference).max(), 1e-12)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_ten_steps_equal_torch(accumulation: int) -> None:
    """Reference: transformers' Llama, torch.optim.AdamW with the same groups, clip_grad_norm_, and the loss
    over all supervised tokens of a step. Tolerance 1e-4 on each loss, relative 1e-4 on each gradient norm.
    """
    model = make_model()
    reference = torch_copy(model)
    step, _ = make_step(model, accumulation)
    matrices = [p for p in reference.parameters() if p.ndim > 1]
    vectors = [p for p in reference.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    for number in range(10):
        batches = [make_batch(2, 100 * number + i, (0.9, 0.4, 0.1)[i]) for i in range(accumulation)]
        rate = RATE * (number + 1) / 10
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        optimizer.zero_grad()
        loss = sum(torch_loss_sum(reference, batch) for batch in batches) / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        result = step(batches, rate)
        assert result.supervised_tokens == tokens and result.finite
        assert result.loss == pytest.approx(loss.item(), abs=1e-4)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert loss.item() < 7  # it did train: the first loss is above 9


def test_accumulation_equals_one_large_batch() -> None:
    """Reference: one batch of all rows. Tolerance 1e-6 of each gradient's greatest element."""
    batches = [make_batch(2, seed, part) for seed, part in enumerate((0.95, 0.3, 0.05))]
    large = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    one_step, one = make_step(make_model())
    many_steps, many = make_step(make_model(), accumulation=3)
    first, second = one_step([large], RATE), many_steps(batches, RATE)
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-6)
    close(gradients(many), gradients(one), 1e-6)
    # The sums start from zero again.
    again = many_steps(batches, RATE)
    assert again.grad_norm == pytest.approx(one_step([large], RATE).grad_norm, rel=1e-4)


def test_clipping() -> None:
    """Reference: torch's clip_grad_norm_ over the gradient of transformers' model. Tolerance 1e-5."""
    model = make_model()
    reference = torch_copy(model)
    batch = make_batch(3, 5)
    (torch_loss_sum(reference, batch) / (batch["labels"] != -100).sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.25).item()
    assert norm > 1
    step, optimizer = make_step(model, clip=0.25)
    assert step([batch], RATE).grad_norm == pytest.approx(norm, rel=1e-5)
    expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}
    close(gradients(optimizer), expected, 1e-5)
    total = np.sqrt(sum(float((g**2).sum()) for g in gradients(optimizer).values()))
    assert total == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputation_gives_the_same_gradients(accumulation: int) -> None:
    """Reference: the same model without recomputation. Tolerance 1e-6."""
    batches = [make_batch(2, seed) for seed in range(accumulation)]
    plain_step, plain = make_step(make_model(), accumulation)
    model = make_model()
    model.set_recompute()
    step, optimizer = make_step(model, accumulation)
    assert step(batches, RATE).loss == plain_step(batches, RATE).loss
    close(gradients(optimizer), gradients(plain), 1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_only_adapters_move(recompute: bool) -> None:
    model = make_model(lora=LoraConfig(r=3, lora_alpha=6, lora_dropout=0.2))
    if recompute:
        model.set_recompute()
    before = {name: parameter.asnumpy().copy() for name, parameter in model.parameters_and_names()}
    step, optimizer = make_step(model)
    for number in range(2):  # B is zero at first, so A moves from the second step on
        step([make_batch(3, number)], RATE, step=number)
    adapters = {parameter.name for parameter in optimizer.parameters}
    assert len(adapters) == 8 and all("lora_" in name for name in adapters)
    for name, parameter in model.parameters_and_names():
        changed = not np.array_equal(before[name], parameter.asnumpy())
        assert changed == ("lora_" in name or "dropout" in name), name


def test_dropout_follows_seed_and_step_and_not_evaluation() -> None:
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.4)

    def losses(seed: int, steps: list[int]) -> list[float]:
        model = make_model(lora=config)
        for parameter in model.trainable_params():  # a B of zero would hide the dropout
            parameter.set_data(Tensor(np.full(parameter.shape, 0.2, np.float32)))
        step, _ = make_step(model, seed=seed)
        return [step([make_batch(2, 0)], 0.0, step=number).loss for number in steps]

    first = losses(1, [0, 1, 0])
    assert first[0] == first[2] != first[1]
    assert losses(1, [0]) == first[:1] != losses(2, [0])
    model = make_model(lora=config)
    evaluate = EvalStep(NextToken(model))
    model.set_train(False)
    assert evaluate(make_batch(2, 0)) == evaluate(make_batch(2, 0))
    plain = make_model()
    plain.set_train(False)
    # B is zero: an adapter without dropout changes nothing.
    assert evaluate(make_batch(2, 0)) == EvalStep(NextToken(plain))(make_batch(2, 0))


def test_evaluation_equals_torch() -> None:
    """Reference: transformers and torch's cross entropy. Tolerance 1e-5 relative."""
    model = make_model()
    batch = make_batch(3, 9)
    loss, tokens = EvalStep(NextToken(model))(batch)
    assert tokens == int((batch["labels"] != -100).sum())
    with torch.no_grad():
        assert loss == pytest.approx(torch_loss_sum(torch_copy(model), batch).item(), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_batch_without_targets(accumulation: int) -> None:
    """Loss and gradients of nothing are zero, not NaN."""
    batch = make_batch(2, 1)
    batch["labels"][:] = -100
    step, optimizer = make_step(make_model(), accumulation)
    result = step([batch] * accumulation, RATE)
    assert result.loss == 0 and result.grad_norm == 0 and result.finite and result.supervised_tokens == 0
    assert not any(gradient.any() for gradient in gradients(optimizer).values())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fp16_overflow_changes_nothing(accumulation: int) -> None:
    step, optimizer = make_step(make_model(ms.float16), accumulation)
    batches = [make_batch(2, seed) for seed in range(accumulation)]
    assert step(batches, RATE, loss_scale=1024.0).finite
    before = snapshot(optimizer)
    overflow = step(batches, RATE, loss_scale=2.0**40)
    assert not overflow.finite and np.isfinite(overflow.loss)
    for name, value in snapshot(optimizer).items():
        assert np.array_equal(value, before[name]), name
    # Nothing of the overflow stays behind in the sums.
    after = step(batches, RATE, loss_scale=1024.0)
    assert after.finite
    assert all(np.isfinite(value).all() for value in snapshot(optimizer).values())


def test_one_bad_parameter_stops_the_update() -> None:
    """In fp32: an infinite element of one gradient keeps all parameters and moments as they are."""
    model = make_model()
    weight = model.model.layers[1].mlp.up_proj.weight
    values = weight.asnumpy().copy()
    values[3, 5] = np.inf
    weight.set_data(Tensor(values))
    step, optimizer = make_step(model)
    before = snapshot(optimizer)
    assert not step([make_batch(2, 0)], RATE).finite
    for name, value in snapshot(optimizer).items():
        assert np.array_equal(value, before[name]), name


def test_fp16_trains_like_fp32() -> None:
    """Reference: the same run in fp32. Master weights are fp32; losses stay within 2e-2 over 12 steps."""
    low, _ = make_step(make_model(ms.float16))
    high, _ = make_step(make_model())
    batch = make_batch(4, 0)
    losses = [(low([batch], RATE, loss_scale=1024.0).loss, high([batch], RATE).loss) for _ in range(12)]
    assert losses[-1][0] < losses[0][0] - 2
    for in_fp16, in_fp32 in losses:
        assert in_fp16 == pytest.approx(in_fp32, abs=2e-2)


def test_wrong_number_of_batches() -> None:
    step, _ = make_step(make_model(), accumulation=2)
    with pytest.raises(ValueError, match="2 micro batches, not 1"):
        step([make_batch(2, 0)], RATE)
