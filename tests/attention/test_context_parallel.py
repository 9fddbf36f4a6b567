# SPDX-License-Identifier: Apache-2.0
"""Attention over several real processes against torch in float64 on the whole sequence (oracle.py).

Tolerance: 2e-5 of the largest expected number, in float32. 131 tokens never divide, so all cases pad.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.attention.block import make_block
from ms_longctx.attention.context_parallel import ContextParallelAttention
from ms_longctx.attention.flash import FlashAttention
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.merge import make_merge
from ms_longctx.attention.ring import ring_plan
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.sequence import join_sequence
from ms_longctx.parallel.strategy import Strategy
from tests.attention.context_parallel_worker import Case, computed_scores
from tests.attention.oracle import Problem, make_problem, solve, worst_error
from tests.parallel.processes import Job, check

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no CPU kernels")
WORKER = str(Path(__file__).with_name("context_parallel_worker.py"))
NAMES = ("out", "dq", "dk", "dv")
TOLERANCE = 2e-5
LENGTH = 131
LAYOUTS = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2), (1, 4)]}  # (ring, Ulysses) by processes
HEADS = {2: (6, 3), 3: (9, 3), 4: (8, 2)}  # query and key/value heads: 3 over 2 and 2 over 4 ranks are repeated
MASKS: dict[str, dict] = {
    "causal": {},
    "documents": {"documents": True},
    "alibi": {"documents": True, "alibi": True},
    "window": {"window": 19},
    "chunk": {"chunk": 37, "alibi": True},
    "full": {"causal": False},
    "band": {"causal": False, "window": 19, "documents": True},
}
SIZES = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]


def problem_of(size: int, spec: dict, **kwargs) -> Problem:  # noqa: ANN003
    problem = make_problem((2, *HEADS[size], LENGTH, LENGTH, 20), MaskSpec(**spec), **kwargs)
    problem.arrays["d_lse"][:] = 0.0
    return problem


def cases(size: int) -> dict[str, tuple[Case, Problem]]:
    """All that one start of ``size`` processes runs; in graph mode, which compiles for seconds, what differs most."""
    made = {}
    for ring, ulysses in LAYOUTS[size]:
        for mask, spec in MASKS.items():
            for graph in (True, False) if mask == "alibi" or (mask == "chunk" and ring > 1) else (False,):
                case = Case(spec, ring, ulysses, graph, hides_padding=not MaskSpec(**spec).causal)
                name = f"{mask}-{ring}-{ulysses}-{'graph' if graph else 'pynative'}"
                made[name] = (case, problem_of(size, spec))
        both = {"documents": True, "alibi": True}
        reference = Case(both, ring, ulysses, ring > 1 and ulysses > 1, implementation="reference")
        made[f"reference-{ring}-{ulysses}"] = (reference, problem_of(size, both))
        far = problem_of(size, {})
        far.arrays["k"][..., 0] += np.linspace(0, 1000, LENGTH, dtype=np.float32)[:, None]
        made[f"far-{ring}-{ulysses}"] = (Case({}, ring, ulysses, False), far)
        half = problem_of(size, {"documents": True}, dtype=np.float16)
        made[f"half-{ring}-{ulysses}"] = (Case({"documents": True}, ring, ulysses, False), half)
        empty = problem_of(size, {"documents": True})
        assert empty.q_documents is not None
        empty.q_documents[0] = -1  # a row of padding only, and ranks that see nothing in the other
        empty.q_documents[1, 40:] = -1
        empty.k_documents = empty.q_documents
        made[f"empty-{ring}-{ulysses}"] = (Case({"documents": True}, ring, ulysses, False, repetitions=10), empty)
    return made


@functools.lru_cache(maxsize=1)
def results(size: int) -> dict[str, dict[str, np.ndarray]]:
    """Joined results of :func:`cases` by name, and what each rank counted."""
    return run(size, cases(size))


def run(size: int, chosen: dict[str, tuple[Case, Problem]]) -> dict[str, dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps({k: dataclasses.asdict(case) for k, (case, _) in chosen.items()}))
        for key, (_, problem) in chosen.items():
            inputs = {x: problem.arrays[x] for x in ("q", "k", "v", "d_out")}
            optional = {"documents": problem.q_documents, "slopes": problem.slopes}
            np.savez(folder / f"{key}.npz", **inputs, **{k: x for k, x in optional.items() if x is not None})
        check(Job(WORKER, size, [name]), timeout=300)
        joined = {}
        for key, (case, problem) in chosen.items():
            parts = [dict(np.load(folder / f"{key}.{rank}.npz")) for rank in range(size)]
            length = problem.arrays["q"].shape[1]
            joined[key] = {x: join_sequence([part[x] for part in parts], case.strategy, length) for x in NAMES}
            joined[key] |= {x: np.stack([part[x] for part in parts]) for x in ("sent", "scores")}
    return joined


def assert_equal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = TOLERANCE) -> None:
    for name in NAMES:
        assert got[name].shape == expected[name].shape
        assert worst_error(got[name].astype(np.float32), expected[name]) < tolerance, name


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
def test_equals_one_process(size: int) -> None:
    """Every mask, layout and mode; the plain operators too; far apart scores; rows and ranks that see nothing."""
    got = results(size)
    for key, (_, problem) in cases(size).items():
        tolerance = {"half": 3e-3, "far": 2e-4}.get(key.split("-")[0], TOLERANCE)
        try:
            assert_equal(got[key], solve(problem), tolerance)
        except AssertionError as error:
            raise AssertionError(f"{size} processes, {key}: {error}") from error


@pytest.mark.parametrize("implementation", [pytest.param("cpu_kernel", marks=needs_kernels), "reference"])
def test_merge_of_far_apart_and_empty_parts(implementation: str) -> None:
    """Gaps of up to 400 either way, and parts without a key, against NumPy in float64; 2e-6."""
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((2, 2, 37, 5, 20))
    lses = rng.uniform(-200, 200, (2, 2, 5, 37))
    for part, rows in ((0, slice(3, 6)), (1, slice(5, 9))):  # row 5 sees nothing at all
        lses[part, 0, :, rows], outs[part, 0, rows] = -np.inf, 0.0
    arrays = [x.astype(np.float32) for pair in zip(outs, lses, strict=True) for x in pair]
    out, lse = (x.asnumpy() for x in make_merge(implementation)(*map(Tensor, arrays)))
    expected = np.logaddexp(*lses)
    assert worst_error(lse, expected) < 2e-6 and np.isneginf(lse[0, :, 5]).all()
    weights = np.exp(lses - np.where(np.isneginf(expected), 0.0, expected)).transpose(0, 1, 3, 2)[..., None]
    assert worst_error(out, (weights * outs).sum(axis=0)) < 2e-6 and not out[0, 5].any()


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
def test_bytes_sent_equal_the_formulas(size: int) -> None:
    """Those in the docstrings of RingAttention, UlyssesExchange and ContextParallelAttention, forward + backward."""
    got = results(size)
    for key, (case, problem) in cases(size).items():
        if key.split("-")[0] not in ("causal", "alibi", "half"):
            continue
        batch, _, heads, dim = problem.arrays["q"].shape
        kv_heads, width = problem.arrays["k"].shape[2], problem.arrays["q"].itemsize
        n, p = case.ring, case.ulysses
        multiple = size * (2 if n > 1 else 1)
        tokens = -(-LENGTH // multiple) * multiple // size
        repeated = int(np.lcm(kv_heads, p)) if p > 1 else kv_heads
        exchange = 2 * batch * tokens * (2 * heads + 2 * repeated) * dim * width * (p - 1) // p
        elements = batch * tokens * p * repeated // p * dim
        around = 4 * elements * width * (n - 1) + 8 * elements * n * (n > 1)
        if problem.spec.documents:
            exchange += 8 * batch * tokens * (p - 1)
            around += 4 * batch * tokens * p * (n - 1)
        assert got[key]["sent"].tolist() == [exchange + around] * size, key


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pynative"])
def test_layers_and_recomputation(graph: bool) -> None:
    """Three attentions one after the other, recomputed in the backward pass, hybrid; against torch's chain rule."""
    spec = {"documents": True, "alibi": True}
    problem = problem_of(4, spec)
    case = Case(spec, 2, 2, graph, layers=3)
    got = run(4, {"stack": (case, problem)})["stack"]
    inner, inputs = [], dataclasses.replace(problem, arrays=dict(problem.arrays))
    for _ in range(3):
        inner.append(solve(inputs))
        inputs = dataclasses.replace(inputs, arrays={**inputs.arrays, "q": inner[-1]["out"]})
    expected = {"out": inner[-1]["out"], "dk": 0.0, "dv": 0.0}
    d_out = problem.arrays["d_out"]
    for layer in (2, 1, 0):
        query = problem.arrays["q"] if layer == 0 else inner[layer - 1]["out"]
        part = solve(dataclasses.replace(problem, arrays={**problem.arrays, "q": query, "d_out": d_out}))
        d_out = part["dq"]
        expected |= {name: expected[name] + part[name] for name in ("dk", "dv")}
    assert_equal(got, {**expected, "dq": d_out}, tolerance=1e-4)


def ring_in_one_process(problem: Problem, degree: int) -> dict[str, np.ndarray]:
    """The plan, blocks and merges of every place of a ring, without communication."""
    spec, arrays = problem.spec, problem.arrays
    length = arrays["q"].shape[1]
    chunk = length // (2 * degree)
    block, merge = make_block(spec, None, "cpu_kernel"), make_merge("cpu_kernel")
    none, slopes = Tensor([[0]], ms.int32), Tensor(problem.slopes if spec.alibi else np.zeros(1, np.float32))
    ids = problem.q_documents

    def part(array: np.ndarray | None, index: int) -> Tensor:
        return none if array is None else Tensor(np.ascontiguousarray(array[:, index * chunk : (index + 1) * chunk]))

    def inputs(q_chunk: int, k_chunk: int) -> tuple:
        q, k, v = part(arrays["q"], q_chunk), part(arrays["k"], k_chunk), part(arrays["v"], k_chunk)
        return (
            q, k, v, part(ids, q_chunk), part(ids, k_chunk), slopes, q_chunk * chunk, k_chunk * chunk, chunk,
        )  # fmt: skip

    pairs = [
        (q, k) for place in range(degree) for step in ring_plan(spec, degree, place, chunk, length) for *_, q, k in step
    ]
    partial: dict[int, tuple[Tensor, Tensor]] = {}
    for q_chunk, k_chunk in pairs:
        new = block(*inputs(q_chunk, k_chunk))
        partial[q_chunk] = merge(*partial[q_chunk], *new) if q_chunk in partial else new
    sums = {name: np.zeros_like(arrays[name[1]]) for name in ("dq", "dk", "dv")}
    for q_chunk, k_chunk in pairs:
        out, lse = partial[q_chunk]
        d_lse = Tensor(np.zeros(lse.shape, np.float32))
        grads = block.gradient(*inputs(q_chunk, k_chunk), out, lse, part(arrays["d_out"], q_chunk), d_lse)
        for name, index, grad in zip(("dq", "dk", "dv"), (q_chunk, k_chunk, k_chunk), grads, strict=True):
            sums[name][:, index * chunk : (index + 1) * chunk] += grad.asnumpy()
    out = np.concatenate([partial[index][0].asnumpy() for index in range(2 * degree)], axis=1)
    return {"out": out, **sums}


@needs_kernels
@pytest.mark.parametrize("spec", [*MASKS.values(), {"window": 300}, {"chunk": 96}], ids=str)
def test_plans_of_larger_rings(spec: dict) -> None:
    """Rings of 6 and 8 places compute what the mask shows, each pair once."""
    for degree in (6, 8):
        problem = make_problem((1, 4, 2, 192, 192, 16), MaskSpec(**spec))
        problem.arrays["d_lse"][:] = 0.0
        assert_equal(ring_in_one_process(problem, degree), solve(problem))


@needs_kernels
def test_error_does_not_grow_with_the_ring() -> None:
    """Against float64, at most twice the error of one process for rings of up to 32 places."""
    problem = make_problem((1, 4, 2, 768, 768, 32), MaskSpec())
    problem.arrays["d_lse"][:] = 0.0
    expected = solve(problem)
    alone = ring_in_one_process(problem, 1)
    for degree in (2, 4, 8, 16, 32):
        got = ring_in_one_process(problem, degree)
        for name in NAMES:
            error, before = (worst_error(x[name], expected[name]) for x in (got, alone))
            assert error < 2 * max(before, 5e-7), (degree, name, error, before)


@needs_kernels
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_a_causal_ring_computes_little_more_than_the_mask_shows(degree: int) -> None:
    """At most 1.15 times the visible scores, forward (one product) and backward (one more), counted in the kernels."""
    length = 768 * degree
    problem = make_problem((1, 2, 1, length, length, 16), MaskSpec())
    before = computed_scores()
    ring_in_one_process(problem, degree)
    ideal = 2 * 2 * length * (length + 1) // 2
    assert ideal <= computed_scores() - before <= 1.15 * ideal


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_every_place_of_a_causal_ring_has_the_same_pairs_at_every_step(degree: int) -> None:
    plans = [ring_plan(MaskSpec(), degree, place, 64, 128 * degree) for place in range(degree)]
    assert {tuple(map(len, plan)) for plan in plans} == {(3, *[2] * (degree - 1))}


def test_steps_that_nobody_needs_are_left_out() -> None:
    assert len(ring_plan(MaskSpec(chunk=64), 4, 1, 64, 512)) == 1
    assert len(ring_plan(MaskSpec(), 4, 1, 64, 512)) == 4


@needs_kernels
def test_one_rank_is_flash_attention() -> None:
    problem = make_problem((1, 4, 2, 77, 77, 16), MaskSpec())
    q, k, v = (Tensor(problem.arrays[name]) for name in "qkv")
    got = ContextParallelAttention(MaskSpec(), Strategy(), 0)(q, k, v)
    assert np.array_equal(got.asnumpy(), FlashAttention(MaskSpec())(q, k, v).asnumpy())


@needs_kernels
@pytest.mark.parametrize(
    ("spec", "degrees", "shapes", "optional", "words"),
    [
        ({}, (1, 2), (3, 3), {}, "3 query heads cannot be shared out to 2 ranks"),
        ({}, (2, 1), (3, 2), {}, "multiple of Hkv"),
        ({}, (1, 1), (2, 2), {"q_documents": (1, 8)}, "does not use"),
        ({"documents": True}, (1, 1), (2, 2), {}, "needs q_documents"),
        ({"documents": True}, (1, 1), (2, 2), {"q_documents": (1, 7)}, r"expected \(1, 8\)"),
        ({"alibi": True}, (1, 2), (2, 2), {}, "needs alibi_slopes"),
        ({"alibi": True}, (1, 2), (2, 2), {"alibi_slopes": (1,)}, r"expected \(2,\)"),
    ],
)
def test_mistakes_are_named(spec: dict, degrees: tuple, shapes: tuple, optional: dict, words: str) -> None:
    strategy = Case(spec, *degrees, graph=False).strategy
    attention = ContextParallelAttention(MaskSpec(**spec), strategy, 0)
    q, k = (Tensor(np.zeros((1, 8, heads, 4), np.float32)) for heads in shapes)
    kinds = {"q_documents": np.int32, "alibi_slopes": np.float32}
    given = {name: Tensor(np.zeros(shape, kinds[name])) for name, shape in optional.items()}
    with pytest.raises(MsLongctxError, match=words):
        attention(q, k, k, **given)


@needs_kernels
def test_an_odd_number_of_tokens_is_refused() -> None:
    attention = ContextParallelAttention(MaskSpec(), Case({}, 2, 1, False).strategy, 0)
    x = Tensor(np.zeros((1, 7, 2, 4), np.float32))
    with pytest.raises(MsLongctxError, match="7 tokens at this place"):
        attention(x, x, x)
