# SPDX-License-Identifier: Apache-2.0
"""From the logits of the last position to the next token, in NumPy.

The filters and their order are those of transformers' logits processors: repetition penalty (Keskar et al.
2019, "CTRL"), temperature, top-k (Fan et al. 2018), top-p (Holtzman et al. 2019), min-p (Nguyen et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ms_longctx.config import GenerationConfig

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


def penalize_repetition(logits: Logits, seen: Ids, penalty: float) -> Logits:
    """Divide positive logits of ``seen`` ids by ``penalty`` and multiply negative ones with it.

    Args:
        logits: ``(V,)``; not changed.
        seen: ids of the prompt and of what was generated, in any order.
        penalty: above 1 discourages repetition; 1 changes nothing.
    """
    if penalty == 1.0 or not len(seen):
        return logits
    logits = logits.copy()
    scores = logits[seen]
    logits[seen] = np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))
    return logits


def distribution(logits: Logits, seen: Ids, settings: GenerationConfig) -> tuple[Ids, NDArray[np.float64]]:
    """Tokens that may be drawn and their probabilities.

    Args:
        logits: ``(V,)`` of the last position.
        seen: ids the repetition penalty applies to.
        settings: temperature (above 0), top_k, top_p, min_p and repetition_penalty.

    Returns:
        Ids in rising order and their probabilities, which sum to 1.
    """
    scores = penalize_repetition(logits, seen, settings.repetition_penalty).astype(np.float64)
    scores /= settings.temperature
    ids = np.arange(len(scores))
    if 0 < settings.top_k < len(scores):
        kth = np.partition(scores, -settings.top_k)[-settings.top_k]
        ids = ids[scores >= kth]  # more than k where several are equal to the k-th
    if settings.top_p < 1.0:
        ids = _nucleus(ids, _softmax(scores[ids]), settings.top_p)
    probabilities = _softmax(scores[ids])
    if settings.min_p > 0.0:
        likely = probabilities >= settings.min_p * probabilities.max()
        ids, probabilities = ids[likely], probabilities[likely] / probabilities[likely].sum()
    return ids, probabilities


def _nucleus(ids: Ids, probabilities: NDArray[np.float64], top_p: float) -> Ids:
    """The most likely of ``ids``: those left out, from the least likely on, sum to 1 - top_p at most."""
    # All that are this unlikely are left out together, whatever they are: only the others need sorting.
    tail = probabilities <= (1.0 - top_p) / len(ids)
    ids, left_out, probabilities = ids[~tail], probabilities[tail].sum(), probabilities[~tail]
    rising = np.argsort(probabilities, kind="stable")
    dropped = left_out + np.cumsum(probabilities[rising]) <= 1.0 - top_p
    dropped[-1:] = False
    return np.sort(ids[rising[~dropped]])


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


class Sampler:
    """Chooses the next token of each row and remembers it for the repetition penalty.

    Each row draws from its own generator, seeded by ``(seed, row)``: a row's text depends on neither the
    other rows nor their number.

    Args:
        settings: how to choose; greedy if ``do_sample`` is false or the temperature is 0.
        prompts: token ids of each row's prompt.
    """

    def __init__(self, settings: GenerationConfig, prompts: Sequence[Iterable[int]]) -> None:
        self._settings = settings
        self._greedy = not settings.do_sample or settings.temperature == 0.0
        self._generators = [np.random.default_rng([settings.seed, row]) for row in range(len(prompts))]
        self._penalize = settings.repetition_penalty != 1.0
        self._seen = [set(prompt) if self._penalize else set() for prompt in prompts]

    def choose(self, row: int, logits: Logits) -> int:
        """The next token of ``row`` after logits ``(V,)``."""
        seen = np.fromiter(self._seen[row], dtype=np.int64)
        if self._greedy:
            token = int(penalize_repetition(logits, seen, self._settings.repetition_penalty).argmax())
        else:
            tokens, probabilities = distribution(logits, seen, self._settings)
            place = int(np.searchsorted(np.cumsum(probabilities), self._generators[row].random(), side="right"))
            token = int(tokens[min(place, len(tokens) - 1)])
        if self._penalize:
            self._seen[row].add(token)
        return token
