# SPDX-License-Identifier: Apache-2.0
"""In-place operators: AdamW and global norm against torch, cache appends against slice assignment."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_longctx import kernels

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no kernel library")
SHAPES = [(5, 7), (33,), (1,), (130, 300)]


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def mode(request: pytest.FixtureRequest):
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


class Optimizer(nn.Cell):
    """Clips to a global norm of 1 and updates, as a training step does."""

    def __init__(self, values: list[np.ndarray], learning_rate: float, weight_decay: float) -> None:
        super().__init__()
        from ms_longctx.kernels.fused import make_adamw, make_global_norm

        params = [Parameter(Tensor(v), name=f"p{i}") for i, v in enumerate(values)]
        self.params = ParameterTuple(params)
        self.exp_avg = self.params.clone("exp_avg", "zeros")
        self.exp_avg_sq = self.params.clone("exp_avg_sq", "zeros")
        self.step = Parameter(Tensor([0], ms.int32), name="step")
        self.learning_rate = Tensor(learning_rate, ms.float32)
        self.update = make_adamw(0.9, 0.95, 1e-8, weight_decay)
        self.norm = make_global_norm()

    def construct(self, *grads):
        norm, finite = self.norm(grads)
        step = self.step + ops.cast(finite, ms.int32)
        scale = ops.minimum(1.0 / (norm + 1e-6), 1.0)
        state = (self.params, self.exp_avg, self.exp_avg_sq)
        done = self.update(self.learning_rate, step, scale, ops.logical_not(finite), *state, grads)
        return ops.depend(done, ops.assign(self.step, step)), norm

    def arrays(self) -> list[np.ndarray]:
        return [p.asnumpy().copy() for p in (*self.params, *self.exp_avg, *self.exp_avg_sq)]


@pytest.mark.parametrize("grad_type", [np.float32, np.float16])
def test_adamw_equals_torch(mode, rng, grad_type):
    """Ten steps; parameters within 2e-6 of those of clip_grad_norm_ + torch.optim.AdamW (fp32 rounding)."""
    values = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    ours = Optimizer(values, 0.02, 0.1)
    theirs = [torch.nn.Parameter(torch.tensor(v)) for v in values]
    optimizer = torch.optim.AdamW(theirs, 0.02, (0.9, 0.95), 1e-8, 0.1)
    for _ in range(10):
        grads = [(rng.standard_normal(s) * 3).astype(grad_type) for s in SHAPES]
        done, norm = ours(*map(Tensor, grads))
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = torch.tensor(grad.astype(np.float32))
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        assert done.asnumpy() == 1
        assert norm.asnumpy()[0] == pytest.approx(float(expected_norm), rel=1e-5)
    for param, expected in zip(ours.params, theirs, strict=True):
        np.testing.assert_allclose(param.asnumpy(), expected.detach().numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_overflow_changes_nothing(mode, rng, bad):
    ours = Optimizer([rng.standard_normal(s).astype(np.float32) for s in SHAPES], 0.1, 0.1)
    grads = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    ours(*map(Tensor, grads))
    before = ours.arrays()
    grads[3][129, 299] = bad
    done, norm = ours(*map(Tensor, grads))
    assert done.asnumpy() == 0 and not np.isfinite(norm.asnumpy())
    assert all(np.array_equal(a, b) for a, b in zip(before, ours.arrays(), strict=True))
    assert ours.step.asnumpy() == 1


def test_same_bits_every_time(rng):
    values = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    grads = [[rng.standard_normal(s).astype(np.float32) for s in SHAPES] for _ in range(3)]
    results = []
    for _ in range(2):
        ours = Optimizer(values, 0.1, 0.1)
        for grad in grads:
            ours(*map(Tensor, grad))
        results.append(ours.arrays())
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_global_norm_beyond_the_square_root_of_fp32(mode):
    """Squares of 1e30 overflow fp32, their norm does not; one subnormal in fp16 must not be lost."""
    from ms_longctx.kernels.fused import make_global_norm

    norm, finite = make_global_norm()((Tensor(np.full(40, 1e30, np.float32)), Tensor(np.ones(3, np.float16))))
    assert norm.asnumpy()[0] == pytest.approx(np.sqrt(40.0) * 1e30, rel=1e-6) and finite.asnumpy()[0]
    norm, _ = make_global_norm()((Tensor(np.full(5, 6e-8, np.float16)),))
    assert norm.asnumpy()[0] == pytest.approx(float(np.float16(6e-8)) * np.sqrt(5.0), rel=1e-6)


def test_types_the_kernels_do_not_know_are_errors():
    from ms_longctx.kernels.fused import make_global_norm, make_swiglu

    with pytest.raises(RuntimeError):
        make_global_norm()((Tensor(np.ones(3, np.float64)),))[0].asnumpy()
    x = Tensor(np.ones((2, 3), np.float64))
    with pytest.raises(RuntimeError):
        make_swiglu()(x, x).asnumpy()


class Cached(nn.Cell):
    """Appends, then reads all of the cache: every read must see the write before it."""

    def __init__(self, shape: tuple[int, ...], dtype: ms.Type) -> None:
        super().__init__()
        from ms_longctx.kernels.fused import make_cache_append

        self.keys = Parameter(ops.zeros(shape, dtype), name="keys", requires_grad=False)
        self.values = Parameter(ops.zeros(shape, dtype), name="values", requires_grad=False)
        self.append = make_cache_append()

    def construct(self, keys, values, start):
        offsets = self.append(self.keys, self.values, keys, values, start)
        seen = ops.depend(self.keys, offsets), ops.depend(self.values, offsets)
        return seen[0] + 0, seen[1] + 0, offsets


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_cache_append(mode, rng, dtype):
    shape = (3, 31, 2, 5)
    cell = Cached(shape, ms.float32 if dtype == np.float32 else ms.float16)
    expected = np.zeros((2, *shape), dtype)
    start = 0
    for count in (7, 1, 1, 20, 2):  # a prompt in chunks and single tokens, up to the very end
        chunk = rng.standard_normal((2, 3, count, 2, 5)).astype(dtype)
        expected[:, :, start : start + count] = chunk
        keys, values, offsets = cell(Tensor(chunk[0]), Tensor(chunk[1]), Tensor([start], ms.int32))
        assert np.array_equal(keys.asnumpy(), expected[0]) and np.array_equal(values.asnumpy(), expected[1])
        start += count
        assert offsets.asnumpy().tolist() == [start - count, start]
    assert np.array_equal(cell.keys.asnumpy(), expected[0])
    with pytest.raises(RuntimeError):
        cell(Tensor(chunk[0]), Tensor(chunk[1]), Tensor([30], ms.int32))[2].asnumpy()
