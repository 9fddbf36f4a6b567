# SPDX-License-Identifier: Apache-2.0
"""FlashAttention against torch in float64 (oracle.py): every mask, odd sizes, gradients, both modes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.attention.flash import FlashAttention
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.errors import MsLongctxError
from tests.attention.oracle import Problem, make_problem, solve, worst_error

NAMES = ("out", "lse", "dq", "dk", "dv")
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no CPU kernels")


@pytest.fixture(params=[ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=ms.PYNATIVE_MODE)


def run(problem: Problem, implementation: str = "cpu_kernel") -> dict[str, np.ndarray]:
    attention = FlashAttention(problem.spec, implementation=implementation, return_lse=True)
    optional = (problem.q_documents, problem.k_documents, problem.slopes, problem.offsets)
    q_documents, k_documents, slopes, offsets = (None if x is None else Tensor(x) for x in optional)

    def loss(q, k, v, d_out, d_lse):  # noqa: ANN001, ANN202
        out, lse = attention(q, k, v, q_documents, k_documents, slopes, offsets)
        finite = ms.ops.select(lse == float("-inf"), ms.ops.zeros_like(lse), lse)
        total = (out.astype(ms.float32) * d_out.astype(ms.float32)).sum() + (finite * d_lse).sum()
        return total, out, lse

    inputs = [Tensor(problem.arrays[name]) for name in ("q", "k", "v", "d_out", "d_lse")]
    (_, out, lse), grads = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)(*inputs)
    return dict(zip(NAMES, (x.asnumpy() for x in (out, lse, *grads)), strict=True))


def check(problem: Problem, tolerance: float = 1e-5, implementation: str = "cpu_kernel") -> None:
    got, expected = run(problem, implementation), solve(problem)
    for name in NAMES:
        assert got[name].shape == expected[name].shape
        assert worst_error(got[name], expected[name]) < tolerance, name


SHAPES = [  # B, H, Hkv, Sq, Sk, D
    (1, 5, 1, 31, 31, 16),
    (2, 6, 3, 200, 200, 80),
    (1, 9, 3, 257, 257, 72),
    (1, 4, 4, 200, 333, 128),
    (1, 4, 2, 257, 200, 96),
    (2, 6, 3, 1, 700, 64),
    (1, 5, 1, 1, 300, 20),
]
MASKS = [
    MaskSpec(causal=causal, window=window, chunk=chunk, alibi=alibi, documents=documents)
    for causal, window, chunk, alibi, documents in itertools.product(
        (True, False), (None, 19), (None, 37), (False, True), (False, True)
    )
]


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_causal_in_both_modes(shape: tuple[int, ...], mode: int) -> None:
    check(make_problem(shape, MaskSpec()))


@needs_kernels
@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_every_mask(spec: MaskSpec) -> None:
    check(make_problem((2, 6, 3, 131, 150, 24), spec))


@pytest.mark.parametrize("spec", MASKS[::3], ids=str)
def test_reference_means_the_same(spec: MaskSpec) -> None:
    check(make_problem((2, 6, 3, 40, 57, 24), spec), implementation="reference")


@needs_kernels
@pytest.mark.parametrize("implementation", ["cpu_kernel", "reference"])
@pytest.mark.parametrize(
    "offsets", [(100, 150), (149, 150, 20), ((100, 150), (0, 1)), ((100, 150, 0), (70, 0, 20))], ids=str
)
@pytest.mark.parametrize("spec", [MaskSpec(), MaskSpec(window=70, alibi=True), MaskSpec(chunk=64)], ids=str)
@pytest.mark.parametrize("q_length", [1, 50])
def test_offsets(q_length: int, spec: MaskSpec, offsets: object, implementation: str) -> None:
    check(make_problem((2, 6, 3, q_length, 300, 32), spec, offsets), implementation=implementation)


@needs_kernels
@pytest.mark.parametrize("spec", [MaskSpec(), MaskSpec(documents=True, alibi=True)], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 3, 200, 200, 80), (1, 3, 1, 1, 400, 64)], ids=str)
def test_float16(shape: tuple[int, ...], spec: MaskSpec) -> None:
    check(make_problem(shape, spec, dtype=np.float16), tolerance=3e-3)


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (5, 1), (9, 3)]), st.integers(1, 300), st.integers(1, 300),
    st.integers(1, 130), st.sampled_from(MASKS), st.integers(0, 99),
)  # fmt: skip
def test_any_size(
    batch: int, heads: tuple[int, int], q_length: int, k_length: int, dim: int, spec: MaskSpec, seed: int
) -> None:
    check(make_problem((batch, *heads, q_length, k_length, dim), spec, seed=seed), tolerance=2e-5)


@needs_kernels
def test_documents_do_not_see_each_other() -> None:
    """Other tokens in the first document change the second by exactly nothing."""
    problem = make_problem((1, 4, 2, 300, 300, 64), MaskSpec(documents=True))
    problem.q_documents = problem.k_documents = np.repeat([0, 1], [133, 167]).astype(np.int32)[None]
    before = run(problem)
    for name in "qkv":
        problem.arrays[name][:, :133] += 1.0
    after = run(problem)
    for name in ("out", "dq", "dk", "dv"):
        assert np.array_equal(before[name][:, 133:], after[name][:, 133:]), name
        assert not np.array_equal(before[name][:, :133], after[name][:, :133]), name


@needs_kernels
def test_document_equals_the_document_alone() -> None:
    packed = make_problem((1, 4, 2, 300, 300, 64), MaskSpec(documents=True))
    packed.q_documents = packed.k_documents = np.repeat([0, 1, -1], [133, 150, 17]).astype(np.int32)[None]
    got = run(packed)
    alone = make_problem((1, 4, 2, 150, 150, 64), MaskSpec())
    for name in ("q", "k", "v", "d_out"):
        alone.arrays[name] = packed.arrays[name][:, 133:283]
    alone.arrays["d_lse"] = packed.arrays["d_lse"][:, :, 133:283]
    expected = solve(alone)
    for name in ("out", "dq", "dk", "dv"):
        assert worst_error(got[name][:, 133:283], expected[name]) < 1e-5, name
        assert not got[name][:, 283:].any(), f"padding: {name}"
    assert np.isneginf(got["lse"][:, :, 283:]).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_same_bits_every_time(dtype: type) -> None:
    """One key/value head, so that all threads add to the same dq."""
    problem = make_problem((1, 3, 1, 900, 900, 64), MaskSpec(), dtype=dtype)
    first = run(problem)
    for _ in range(5):
        again = run(problem)
        for name in NAMES:
            assert np.array_equal(first[name], again[name]), name


@needs_kernels
def test_far_apart_scores_and_nan() -> None:
    """Scores of some 1000 carry rounding errors of 1e-4 in float32, and so do the weights made of them."""
    problem = make_problem((1, 2, 1, 70, 70, 16), MaskSpec())
    problem.arrays["q"] *= 300.0
    check(problem, tolerance=2e-4)
    problem.arrays["q"][0, 5, 1, 3] = np.nan
    out = run(problem)["out"]
    assert np.isnan(out[0, 5, 1]).all() and np.isfinite(np.delete(out[0], 5, axis=0)).all()


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("isa", [pytest.param("baseline", marks=pytest.mark.long), "avx2"])
def test_lesser_instruction_sets(isa: str) -> None:
    """The same tests, where the CPU has less: run in a process of its own, as the choice is made once."""
    chosen = "test_causal_in_both_modes or test_float16"
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", chosen]
    result = subprocess.run(
        command, env={**os.environ, "MS_LONGCTX_ISA": isa}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:]


@needs_kernels
def test_transposed_views() -> None:
    """Views that are not contiguous reach the kernel in the right order."""
    problem = make_problem((1, 4, 2, 64, 64, 32), MaskSpec())
    q, k, v = (Tensor(problem.arrays[name].transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3) for name in "qkv")
    out = FlashAttention(MaskSpec(), implementation="cpu_kernel")(q, k, v)
    assert worst_error(out.asnumpy(), solve(problem)["out"]) < 1e-5


@pytest.mark.parametrize(
    ("spec", "kwargs", "words"),
    [
        (MaskSpec(documents=True), {}, "q_documents"),
        (MaskSpec(), {"q_documents": (1, 8)}, "does not use"),
        (MaskSpec(alibi=True), {}, "alibi_slopes"),
        (MaskSpec(documents=True), {"q_documents": (1, 7)}, "has shape"),
        (MaskSpec(), {"offsets": (4,)}, "offsets"),
    ],
)
def test_wrong_inputs_are_refused(spec: MaskSpec, kwargs: dict, words: str, mode: int) -> None:
    x = Tensor(np.zeros((1, 8, 2, 4), np.float32))
    optional = {name: Tensor(np.zeros(shape, np.int32)) for name, shape in kwargs.items()}
    with pytest.raises(MsLongctxError, match=words):
        FlashAttention(spec, implementation="reference")(x, x, x, **optional)


def test_wrong_heads_types_and_names_are_refused() -> None:
    q, k = Tensor(np.zeros((1, 8, 3, 4), np.float32)), Tensor(np.zeros((1, 8, 2, 4), np.float32))
    with pytest.raises(MsLongctxError, match="multiple of Hkv"):
        FlashAttention(MaskSpec())(q, k, k)
    with pytest.raises(MsLongctxError, match="expected one of"):
        FlashAttention(MaskSpec(), implementation="fast")
    with pytest.raises(MsLongctxError, match="Ascend"):
        FlashAttention(MaskSpec(), implementation="ascend")
    with pytest.raises(MsLongctxError, match="window"):
        MaskSpec(window=0)


@needs_kernels
def test_types_must_agree() -> None:
    x = Tensor(np.zeros((1, 8, 2, 4), np.float32))
    with pytest.raises(MsLongctxError, match="one type"):
        FlashAttention(MaskSpec(), implementation="cpu_kernel")(x, x.astype(ms.float16), x.astype(ms.float16))
