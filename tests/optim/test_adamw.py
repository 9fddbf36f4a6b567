# SPDX-License-Identifier: Apache-2.0
"""Reference: torch.optim.AdamW behind torch.nn.utils.clip_grad_norm_; 20 steps within 1e-6."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Parameter, Tensor, mutable

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError
from ms_longctx.optim import AdamW, ParamGroup, decay_groups

SHAPES = {"a.weight": (5, 7), "a.bias": (31,), "b.weight": (123, 65), "norm.weight": (3,)}
STEPS = 20


@pytest.fixture(params=["cpu_kernel", "operators"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Both ways to compute the update."""
    if request.param == "cpu_kernel" and not kernels.available():
        pytest.skip(kernels.reason())
    return request.param


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=before)


def values(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(seed)
    return {name: (rng.randn(*shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


def parameters(dtype: ms.Type = ms.float32) -> list[Parameter]:
    return [Parameter(Tensor(value, dtype), name=name) for name, value in values(0, 0.1).items()]


def torch_parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.tensor(value)) for name, value in values(0, 0.1).items()}


def run(optimizer: AdamW, grads: dict[str, np.ndarray], lr: float, scale: float = 1.0) -> tuple[float, bool]:
    ordered = mutable(tuple(Tensor(grads[param.name]) for param in optimizer.parameters))
    norm, finite = optimizer(ordered, Tensor(lr, ms.float32), Tensor(scale, ms.float32))
    return float(norm.asnumpy()), bool(finite.asnumpy())


def run_torch(optimizer: torch.optim.Optimizer, params: dict, grads: dict[str, np.ndarray], clip: float) -> float:
    for name, param in params.items():
        param.grad = torch.tensor(grads[name])
    norm = torch.nn.utils.clip_grad_norm_(params.values(), clip)
    optimizer.step()
    return float(norm)


def assert_close(ours: AdamW, theirs: dict[str, torch.nn.Parameter], tolerance: float = 1e-6) -> None:
    for param in ours.parameters:
        expected = theirs[param.name].detach().numpy()
        np.testing.assert_allclose(param.asnumpy(), expected, rtol=0, atol=tolerance)


def arrays(optimizer: AdamW) -> dict[str, np.ndarray]:
    return {name: param.asnumpy().copy() for name, param in optimizer.state().items()}


@pytest.mark.parametrize("clip", [0.5, 1e9], ids=["clipped", "below the limit"])
def test_equals_torch(implementation: str, mode: int, clip: float) -> None:
    theirs = torch_parameters()
    matrices = [param for param in theirs.values() if param.ndim > 1]
    vectors = [param for param in theirs.values() if param.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    ours = AdamW(
        decay_groups(parameters(), 0.1),
        betas=(0.9, 0.95),
        eps=1e-8,
        max_grad_norm=clip,
        implementation=implementation,
    )
    for step in range(STEPS):
        lr = 1e-2 / (1 + step)
        for group in reference.param_groups:
            group["lr"] = lr
        grads = values(step + 1)
        expected = run_torch(reference, theirs, grads, clip)
        norm, finite = run(ours, grads, lr)
        assert finite and norm == pytest.approx(expected, rel=1e-5)  # torch sums squares in fp32
    assert_close(ours, theirs)
    assert int(ours.step.asnumpy()) == STEPS


def test_groups_have_their_own_learning_rate_and_decay(implementation: str) -> None:
    theirs = torch_parameters()
    a, b = [theirs["a.weight"], theirs["a.bias"]], [theirs["b.weight"], theirs["norm.weight"]]
    reference = torch.optim.AdamW(
        [{"params": a, "weight_decay": 0.3, "lr": 1e-3}, {"params": b, "weight_decay": 0.01, "lr": 1.6e-2}]
    )
    mine = parameters()
    groups = [ParamGroup("slow", (mine[0], mine[1]), 0.3), ParamGroup("fast", (mine[2], mine[3]), 0.01, 16.0)]
    ours = AdamW(groups, implementation=implementation)
    for step in range(STEPS):
        run_torch(reference, theirs, values(step + 1), float("inf"))
        run(ours, values(step + 1), 1e-3)
    assert_close(ours, theirs)


def test_accumulated_sums_are_scaled_before_clipping(implementation: str) -> None:
    """Gradients summed over micro batches, loss scale 1024 and 300 tokens, equal one mean gradient."""
    theirs = torch_parameters()
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.0)
    ours = AdamW([ParamGroup("all", tuple(parameters()), 0.0)], max_grad_norm=1.0, implementation=implementation)
    for step in range(STEPS):
        parts = [values(100 * step + part, 1024.0) for part in range(3)]
        total = {name: np.sum([part[name] for part in parts], 0) for name in SHAPES}
        mean = {name: (value / np.float64(1024 * 300)).astype(np.float32) for name, value in total.items()}
        run_torch(reference, theirs, mean, 1.0)
        run(ours, total, 1e-2, 1 / (1024 * 300))
    assert_close(ours, theirs, 2e-6)  # the scale is rounded to fp32 once more


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_changes_nothing(implementation: str, mode: int, bad: float) -> None:
    ours = AdamW(decay_groups(parameters(), 0.1), max_grad_norm=1.0, implementation=implementation)
    for step in range(3):
        run(ours, values(step + 1), 1e-2)
    state, params = arrays(ours), [param.asnumpy().copy() for param in ours.parameters]
    broken = values(9)
    broken["norm.weight"][-1] = bad
    norm, finite = run(ours, broken, 1e-2)
    assert not finite and not np.isfinite(norm)
    for name, value in arrays(ours).items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)
    for param, value in zip(ours.parameters, params, strict=True):
        np.testing.assert_array_equal(param.asnumpy(), value, err_msg=param.name)
    assert run(ours, values(4), 1e-2)[1]
    assert all((param.asnumpy() != value).any() for param, value in zip(ours.parameters, params, strict=True))


def test_fp16_parameters_follow_an_fp32_master(implementation: str) -> None:
    """Reference: torch's fp32 AdamW from the same fp16 start; the parameter is its value rounded to fp16."""
    start = {name: value.astype(np.float16).astype(np.float32) for name, value in values(0, 0.1).items()}
    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    reference = torch.optim.AdamW(theirs.values(), lr=1e-5, weight_decay=0.1)
    ours = AdamW([ParamGroup("all", tuple(parameters(ms.float16)), 0.1)], implementation=implementation)
    for step in range(STEPS):  # the steps are below the spacing of fp16: without a master nothing would move
        grads = {name: value.astype(np.float16) for name, value in values(step + 1).items()}
        run_torch(reference, theirs, {n: g.astype(np.float32) for n, g in grads.items()}, float("inf"))
        run(ours, grads, 1e-5)
    state = ours.state()
    for param in ours.parameters:
        master = state[f"master.{param.name}"].asnumpy()
        np.testing.assert_allclose(master, theirs[param.name].detach().numpy(), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(param.asnumpy(), master.astype(np.float16))


def test_continues_from_its_state(implementation: str) -> None:
    whole = AdamW(decay_groups(parameters(), 0.1), max_grad_norm=1.0, implementation=implementation)
    for step in range(6):
        run(whole, values(step + 1), 1e-2)
    first = AdamW(decay_groups(parameters(), 0.1), max_grad_norm=1.0, implementation=implementation)
    for step in range(3):
        run(first, values(step + 1), 1e-2)
    second = AdamW(decay_groups(parameters(), 0.1), max_grad_norm=1.0, implementation=implementation)
    second.load_state(arrays(first), first.hyperparameters())
    for mine, theirs in zip(second.parameters, first.parameters, strict=True):
        mine.set_data(Tensor(theirs.asnumpy()))
    for step in range(3, 6):
        run(second, values(step + 1), 1e-2)
    for ours, expected in zip(second.parameters, whole.parameters, strict=True):
        np.testing.assert_array_equal(ours.asnumpy(), expected.asnumpy())


def test_state_of_other_settings_is_refused() -> None:
    saved = AdamW(decay_groups(parameters(), 0.1))
    other_decay = AdamW(decay_groups(parameters(), 0.2))
    with pytest.raises(MsLongctxError, match=r"optimizer.groups.decay.weight_decay was 0.1, now it is 0.2"):
        other_decay.load_state(arrays(saved), saved.hyperparameters())
    fewer = AdamW(decay_groups(parameters()[:2], 0.1))
    with pytest.raises(MsLongctxError, match="optimizer.groups.decay.params"):
        fewer.load_state(arrays(saved), saved.hyperparameters())
    truncated = arrays(saved)
    del truncated["exp_avg_sq.a.bias"]
    with pytest.raises(MsLongctxError, match="exp_avg_sq.a.bias is missing"):
        saved.load_state(truncated, saved.hyperparameters())


def test_names_of_parameters_stay() -> None:
    params = parameters()
    AdamW(decay_groups(params, 0.1))
    assert [param.name for param in params] == list(SHAPES)


def test_impossible_values() -> None:
    params = parameters()
    with pytest.raises(MsLongctxError, match="nothing in the model is trainable"):
        AdamW([])
    with pytest.raises(MsLongctxError, match="a.weight stands in the optimizer's groups more than once"):
        AdamW([ParamGroup("one", tuple(params), 0.0), ParamGroup("two", (params[0],), 0.0)])
    with pytest.raises(MsLongctxError, match="optimizer.betas"):
        AdamW(decay_groups(params, 0.1), betas=(0.9, 1.0))
    with pytest.raises(MsLongctxError, match="null switches clipping off"):
        AdamW(decay_groups(params, 0.1), max_grad_norm=0.0)
