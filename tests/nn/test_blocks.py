# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary embedding, MLP, linear and embedding against torch in double precision: values and gradients.

Tolerance: 1e-6 of the largest value in fp32 (about ten roundings), 2e-3 in fp16 (two roundings of 2^-11).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mindspore import Tensor
from torch.nn import functional as F

from ms_longctx.nn.backend import implementation
from ms_longctx.nn.embedding import Embedding
from ms_longctx.nn.linear import Linear
from ms_longctx.nn.mlp import MLP, SwiGLU
from ms_longctx.nn.norm import RMSNorm
from ms_longctx.nn.rotary import RotaryEmbedding
from tests.nn.reference import IMPLEMENTATIONS, assert_close, run, torch_run

TOLERANCE = {np.float32: 1e-6, np.float16: 2e-3}
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def draw(rng: np.random.Generator, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


@each
@both_types
@pytest.mark.parametrize("shape", [(2, 31, 35), (5, 288)])
def test_rms_norm(mode, rng, implementation, dtype, shape):
    x, g = draw(rng, *shape, dtype=dtype), draw(rng, *shape)
    norm = RMSNorm(shape[-1], 1e-5, implementation=implementation)
    weight = draw(rng, shape[-1])
    norm.weight.set_data(Tensor(weight))
    out, grads = run(norm, [x], [g], [0])
    assert out[0].dtype == dtype
    expected = torch_run(lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5), [x, weight], [g], [0, 1])
    assert_close(out + grads, expected[0] + expected[1], TOLERANCE[dtype])


@each
@both_types
def test_rms_norm_after_addition(mode, rng, implementation, dtype):
    shape = (2, 67, 30)
    x, delta = draw(rng, *shape, dtype=dtype), draw(rng, *shape, dtype=dtype)
    weights = [draw(rng, *shape), draw(rng, *shape)]
    norm = RMSNorm(30, implementation=implementation)
    gamma = draw(rng, 30)
    norm.weight.set_data(Tensor(gamma))
    out, grads = run(norm, [x, delta], weights, [0, 1])

    def reference(x, delta, w):
        return x + delta, F.rms_norm(x + delta, (30,), w, 1e-6)

    expected = torch_run(reference, [x, delta, gamma], weights, [0, 1, 2])
    assert_close(out + grads, expected[0] + expected[1], TOLERANCE[dtype])


@each
@both_types
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("dim", [6, 48])
def test_rotary(mode, rng, implementation, dtype, tables, dim):
    x, g = draw(rng, 3, 31, 5, dim, dtype=dtype), draw(rng, 3, 31, 5, dim)
    angles = np.tile(rng.uniform(0, 6, (tables, 31, dim // 2)), 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def reference(x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos[:, :, None] + torch.cat((-b, a), -1) * sin[:, :, None]

    out, grads = run(RotaryEmbedding(implementation), [x, cos, sin], [g], [0])
    expected = torch_run(reference, [x, cos, sin], [g], [0])
    assert out[0].dtype == dtype
    assert_close(out + grads, expected[0] + expected[1], TOLERANCE[dtype])


@each
@both_types
@pytest.mark.parametrize("shape", [(3, 37), (70, 211)])
def test_swiglu(mode, rng, implementation, dtype, shape):
    gate, up, g = draw(rng, *shape, dtype=dtype) * 4, draw(rng, *shape, dtype=dtype), draw(rng, *shape)
    gate.flat[:2] = -60000 if dtype == np.float16 else -1e30, 60000 if dtype == np.float16 else 1e20
    up.flat[:2] = 1e-3
    out, grads = run(SwiGLU(implementation), [gate, up], [g], [0, 1])
    expected = torch_run(lambda a, b: F.silu(a) * b, [gate, up], [g], [0, 1])
    for got, want in zip(out + grads, expected[0] + expected[1], strict=True):
        assert got.dtype == dtype
        # Element by element, because the two extreme values would hide the others.
        np.testing.assert_allclose(got, want, rtol=2e-6 if dtype == np.float32 else 4e-3, atol=2e-6)


@each
@both_types
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 31, 600])
def test_linear(mode, rng, implementation, dtype, bias, rows):
    if rows == 600 and dtype == np.float16 and bias:
        pytest.skip("MindSpore sums the bias gradient in fp16")
    x, g = draw(rng, rows, 1, 35, dtype=dtype), draw(rng, rows, 1, 101)
    linear = Linear(35, 101, bias, std=0.1, implementation=implementation)
    params = [p.asnumpy() for p in linear.get_parameters()]
    out, grads = run(linear, [x], [g], [0])
    expected = torch_run(F.linear, [x, *params], [g], range(1 + len(params)))
    assert out[0].dtype == dtype and out[0].shape == (rows, 1, 101)
    assert_close(out + grads, expected[0] + expected[1], TOLERANCE[dtype])


def test_mlp(mode, rng):
    x, g = draw(rng, 2, 31, 20), draw(rng, 2, 31, 20)
    mlp = MLP(20, 33, bias=True, std=0.3)
    names = [f"{layer}_proj.{kind}" for layer in ("gate", "up", "down") for kind in ("weight", "bias")]
    assert [p.name for p in mlp.get_parameters()] == names  # Hugging Face's names and order
    params = [p.asnumpy() for p in mlp.get_parameters()]

    def reference(x, gate, gate_bias, up, up_bias, down, down_bias):
        hidden = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
        return F.linear(hidden, down, down_bias)

    out, grads = run(mlp, [x], [g], [0])
    expected = torch_run(reference, [x, *params], [g], range(7))
    assert_close(out + grads, expected[0] + expected[1], 2e-6)


def test_embedding_sums_the_gradients_of_repeated_ids(mode, rng):
    ids, g = rng.integers(0, 13, (3, 31), dtype=np.int32), draw(rng, 3, 31, 7)
    embedding = Embedding(13, 7)
    weight = embedding.weight.asnumpy()
    out, grads = run(embedding, [ids], [g], [])
    expected = torch_run(lambda i, w: F.embedding(i, w), [ids, weight], [g], [1])
    assert_close(out + grads, expected[0] + expected[1], 1e-6)


@pytest.mark.parametrize("cell", [lambda: RMSNorm(300, implementation="cpu_kernel"), SwiGLU])
def test_same_bits_every_time(mode, rng, cell):
    if "cpu_kernel" not in IMPLEMENTATIONS:
        pytest.skip("no kernel library")
    block = cell()
    inputs = [draw(rng, 500, 300) for _ in range(1 if isinstance(block, RMSNorm) else 2)]
    g = draw(rng, 500, 300)
    first = run(block, inputs, [g], range(len(inputs)))
    for _ in range(3):
        again = run(block, inputs, [g], range(len(inputs)))
        for a, b in zip(first[0] + first[1], again[0] + again[1], strict=True):
            assert np.array_equal(a, b)


def test_unknown_implementation_is_an_error():
    with pytest.raises(ValueError, match="cuda.*none of auto, ascend, cpu_kernel, operators"):
        implementation("cuda")
