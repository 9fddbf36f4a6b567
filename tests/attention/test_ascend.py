# SPDX-License-Identifier: Apache-2.0
"""Attention for Ascend with doubles of its operators (ascend_double.py), against torch in float64 (oracle.py).

No device is needed and none is replaced: this tests what is around the operators. Inputs are float16, and so are the
operators' results: 2e-3 of the largest expected number.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.attention import ascend_operator
from ms_longctx.attention.ascend import AscendFlashAttention
from ms_longctx.attention.block_ascend import AscendBlock
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.merge import merge_partial
from ms_longctx.attention.ring import ring_plan
from ms_longctx.errors import MsLongctxError
from tests.attention import ascend_double
from tests.attention.oracle import Problem, make_problem, solve, worst_error

TOLERANCE = 2e-3
DEGREE, CHUNK = 3, 13
LENGTH = 2 * DEGREE * CHUNK
MASKS: dict[str, dict] = {
    "causal": {},
    "full": {"causal": False},
    "documents": {"documents": True},
    "window": {"window": 19},
    "band": {"window": 19, "causal": False},
    "alibi": {"alibi": True},
    "documents_window": {"documents": True, "window": 19},
    "documents_alibi": {"documents": True, "alibi": True},
    "all": {"documents": True, "alibi": True, "window": 9},
}


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_operator, "score", ascend_double.score)
    monkeypatch.setattr(ascend_operator, "score_gradient", ascend_double.score_gradient)


def problem_of(spec: dict, length: int = LENGTH, **kwargs: object) -> Problem:
    """4 query and 2 key heads of 16; d_lse is 0, as in training."""
    problem = make_problem((2, 4, 2, length, length, 16), MaskSpec(**spec), dtype=np.float16, **kwargs)
    problem.arrays["d_lse"][:] = 0.0
    return problem


class Ring:
    """All places of a ring in one process: every pair of chunks that ring_plan names."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.block = AscendBlock(problem.spec, None)
        plans = [ring_plan(problem.spec, DEGREE, place, CHUNK, LENGTH) for place in range(DEGREE)]
        self.pairs = [pair[2:] for plan in plans for step in plan for pair in step]
        assert len(set(self.pairs)) == len(self.pairs)

    def of(self, name: str, chunk: int, axis: int = 1) -> Tensor:
        return self.cut(self.problem.arrays[name], chunk, axis)

    @staticmethod
    def cut(array: np.ndarray, chunk: int, axis: int = 1) -> Tensor:
        return Tensor(np.take(array, np.arange(chunk * CHUNK, (chunk + 1) * CHUNK), axis))

    def inputs(self, q_chunk: int, k_chunk: int) -> tuple:
        problem = self.problem
        ids = [Tensor([[0]], ms.int32)] * 2
        if problem.spec.documents:
            ids = [self.cut(problem.q_documents, q_chunk), self.cut(problem.k_documents, k_chunk)]
        slopes = Tensor([0.0] if problem.slopes is None else problem.slopes, ms.float32)
        tensors = (self.of("q", q_chunk), self.of("k", k_chunk), self.of("v", k_chunk))
        return (*tensors, *ids, slopes, q_chunk * CHUNK, k_chunk * CHUNK, CHUNK)

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for q_chunk, k_chunk in self.pairs:
            part = self.block(*self.inputs(q_chunk, k_chunk))
            assert part[0].dtype == part[1].dtype == ms.float32
            found[q_chunk] = merge_partial(*found[q_chunk], *part) if q_chunk in found else part
        outs, lses = zip(*(found[chunk] for chunk in range(2 * DEGREE)), strict=True)
        return np.concatenate([x.asnumpy() for x in outs], 1), np.concatenate([x.asnumpy() for x in lses], 2)

    def backward(self, out: np.ndarray, lse: np.ndarray, d_lse: float = 0.0) -> dict[str, np.ndarray]:
        sums = {name: np.zeros(self.problem.arrays[name[1]].shape) for name in ("dq", "dk", "dv")}
        for q_chunk, k_chunk in self.pairs:
            lse_piece = self.cut(lse, q_chunk, 2)
            rest = (self.cut(out, q_chunk), lse_piece, self.of("d_out", q_chunk), ms.ops.full_like(lse_piece, d_lse))
            grads = self.block.gradient(*self.inputs(q_chunk, k_chunk), *rest)
            for name, chunk, grad in zip(sums, (q_chunk, k_chunk, k_chunk), grads, strict=True):
                sums[name][:, chunk * CHUNK : (chunk + 1) * CHUNK] += grad.asnumpy()
        return sums


@pytest.mark.parametrize("name", MASKS)
def test_ring_of_blocks(name: str) -> None:
    """Six chunks of 13 tokens; documents end inside chunks and reach over several."""
    problem = problem_of(MASKS[name])
    expected = solve(problem)
    ring = Ring(problem)
    out, lse = ring.forward()
    results = {"out": out, **ring.backward(out, lse)}
    for key, found in results.items():
        assert worst_error(found, expected[key]) < TOLERANCE, key
    assert np.array_equal(np.isinf(lse), np.isinf(expected["lse"]))
    seen = np.isfinite(lse)
    assert np.abs(lse[seen] - expected["lse"][seen]).max() < TOLERANCE


def test_gradient_of_log_sum_exp_is_not_left_out() -> None:
    ring = Ring(problem_of({}))
    out, lse = ring.forward()
    assert np.isnan(ring.backward(out, lse, d_lse=1.0)["dq"]).all()


@pytest.mark.parametrize(
    ("spec", "chunk", "text"),
    [
        ({"chunk": 5}, CHUNK, "cannot express chunks"),
        ({"documents": True, "causal": False}, CHUNK, "cannot express documents without a causal mask"),
        ({}, CHUNK - 1, "13 queries over 12 of 13 keys"),
    ],
)
def test_refusals(spec: dict, chunk: int, text: str) -> None:
    ring = Ring(problem_of(spec))
    with pytest.raises(MsLongctxError, match=text):
        ring.block(*ring.inputs(1, 0)[:-1], chunk)
    ring.problem.arrays["q"] = ring.problem.arrays["q"].astype(np.float32)
    with pytest.raises(MsLongctxError, match="takes float16 or bfloat16 .*got Float32 and 16"):
        ring.block(*ring.inputs(1, 0))


@pytest.mark.parametrize(
    "name", ["causal", "full", "window", "alibi", "documents_window", "documents_alibi", "chunk", "cache", "places"]
)
def test_one_device(name: str) -> None:
    """The forward pass; backward is MindSpore's own."""
    offsets = {"cache": [17, 30], "places": [[17, 30, 5], [12, 31, 0]]}.get(name)
    spec = {"chunk": {"chunk": 7}, "cache": {"alibi": True}, "places": {"alibi": True, "window": 11}}.get(name)
    problem = problem_of(MASKS[name] if spec is None else spec, 31, offsets=offsets)
    if offsets is not None:
        for key in ("q", "d_out"):
            problem.arrays[key] = problem.arrays[key][:, :11]
        problem.arrays["d_lse"] = problem.arrays["d_lse"][:, :, :11]
    expected = solve(problem)
    arrays = [Tensor(problem.arrays[key]) for key in "qkv"]
    ids = Tensor([[0]] if problem.q_documents is None else problem.q_documents, ms.int32)
    slopes = Tensor([0.0] if problem.slopes is None else problem.slopes, ms.float32)
    given = Tensor([0] if offsets is None else offsets, ms.int32)
    out, lse = AscendFlashAttention(problem.spec)(*arrays, ids, ids, slopes, given)
    assert worst_error(out.asnumpy(), expected["out"]) < TOLERANCE
    seen = np.isfinite(expected["lse"])
    assert np.array_equal(np.isfinite(lse.asnumpy()), seen)
    assert np.abs(lse.asnumpy()[seen] - expected["lse"][seen]).max() < TOLERANCE


def test_far_keys_of_alibi() -> None:
    """Features are exact in bfloat16 up to 2**17 keys: as many bits as float32 has, whatever the head's slope."""
    slopes = np.array([0.5, 0.3333, 0.0039], np.float32) * 11.3137
    parts = ascend_operator._slope_features(Tensor(slopes)).asnumpy()[:, :9]
    places = np.array([0, 1, 255, 256, 65535, 131071])
    digits = np.repeat(ascend_operator._digits(places), 3, 1)
    for x in (parts, digits):
        assert np.array_equal(x.view(np.uint32) & 0xFFFF, np.zeros_like(x, np.uint32))  # nothing below bfloat16
    found = digits.astype(np.float64) @ parts.astype(np.float64).T
    assert np.allclose(found, -places[:, None] * slopes.astype(np.float64), rtol=1e-7)
