# SPDX-License-Identifier: Apache-2.0
"""Sampling against transformers' logits processors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ms_longctx.config import GenerationConfig
from ms_longctx.generation.sampling import Sampler, distribution

SAMPLED = GenerationConfig(do_sample=True)


def reference(logits: np.ndarray, seen: np.ndarray, settings: GenerationConfig) -> np.ndarray:
    """Probabilities ``(V,)`` by transformers, in the order its generate() applies the processors, in fp64."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(MinPLogitsWarper(settings.min_p))
    scores = processors(torch.tensor(seen)[None], torch.tensor(logits, dtype=torch.float64)[None])
    return scores.softmax(-1)[0].numpy()


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 5, 31, 1000]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
)
def test_distribution_equals_transformers(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    """Reference: the logits processors of transformers 4.57; tolerance 1e-6 absolute."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, vocabulary).astype(np.float32)
    seen = np.unique(rng.integers(0, vocabulary, 20))
    settings = replace(
        SAMPLED, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    ids, probabilities = distribution(logits, seen, settings)
    dense = np.zeros(vocabulary)
    dense[ids] = probabilities
    np.testing.assert_allclose(dense, reference(logits, seen, settings), rtol=0, atol=1e-6)
    assert abs(probabilities.sum() - 1) < 1e-12


def test_large_vocabulary_equals_transformers() -> None:
    """Reference: transformers 4.57 on 49152 logits; tolerance 1e-6 absolute."""
    logits = np.random.default_rng(1).normal(0, 2, 49152).astype(np.float32)
    settings = replace(SAMPLED, temperature=0.8, top_p=0.9)
    ids, probabilities = distribution(logits, np.array([5]), settings)
    expected = reference(logits, np.array([5]), settings)
    assert set(ids) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(probabilities, expected[ids], rtol=0, atol=1e-6)


def test_draws_follow_the_distribution() -> None:
    """Reference: the distribution itself; frequencies of 20,000 draws within 5 standard errors."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(SAMPLED, [[]])
    counts = np.bincount([sampler.choose(0, logits) for _ in range(20_000)], minlength=4) / 20_000
    p = np.exp(logits)
    assert np.all(np.abs(counts - p) < 5 * np.sqrt(p * (1 - p) / 20_000))


def test_rows_are_seeded_alone() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    three, one = Sampler(SAMPLED, [[], [], []]), Sampler(SAMPLED, [[]])
    rows = [[three.choose(row, logits) for row in range(3)] for _ in range(8)]
    assert [row[0] for row in rows] == [one.choose(0, logits) for _ in range(8)]
    assert len({tuple(column) for column in zip(*rows, strict=True)}) == 3
    other = Sampler(replace(SAMPLED, seed=43), [[]])
    assert [other.choose(0, logits) for _ in range(8)] != [row[0] for row in rows]


@pytest.mark.parametrize("settings", [GenerationConfig(), replace(SAMPLED, temperature=0.0)])
def test_greedy_takes_the_first_of_the_largest(settings: GenerationConfig) -> None:
    assert Sampler(settings, [[]]).choose(0, np.array([1, 4, 4, 2], dtype=np.float32)) == 1


def test_penalty_remembers_what_was_generated() -> None:
    sampler = Sampler(GenerationConfig(repetition_penalty=2.0), [[0]])
    logits = np.array([8, 5, 4, -1], dtype=np.float32)
    # 8/2=4 for the prompt's token 0; then 5/2 for token 1: the largest are 1, 0 (first of 4, 4), 0
    assert [sampler.choose(0, logits) for _ in range(3)] == [1, 0, 0]
    assert logits.tolist() == [8, 5, 4, -1]
