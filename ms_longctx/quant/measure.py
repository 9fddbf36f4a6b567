# SPDX-License-Identifier: Apache-2.0
"""How far a quantized model is from the original, on text that was not used to quantize it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ms_longctx.metrics.perplexity import Perplexity
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.memory import release_memory
from ms_longctx.quant.model import EMBEDDING, HEAD, LAST_NORM, half, normed
from ms_longctx.quant.weights import Int8Weight

Floats = NDArray[np.float32]
_TOKENS, _ROWS = 16, 2048  # tokens whose logits exist at once, and rows of the head that are unpacked at once


@dataclass(frozen=True)
class Accuracy:
    """Of a quantized model beside the original in fp32.

    Attributes:
        perplexity, original_perplexity: on the same tokens.
        top1: share of tokens whose likeliest successor is the same.
        cosine: mean cosine between the logits of a token.
        tokens: how many were compared.
    """

    perplexity: float
    original_perplexity: float
    top1: float
    cosine: float
    tokens: int

    @property
    def ratio(self) -> float:
        """Perplexity over that of the original; 1 is no loss."""
        return self.perplexity / self.original_perplexity

    def holds(self, threshold: float) -> bool:
        """Whether top-1 agreement and cosine reach it and the perplexity is at most ``1 / threshold`` times."""
        return min(self.top1, self.cosine, 1 / self.ratio) >= threshold

    def __str__(self) -> str:
        return (
            f"perplexity {self.original_perplexity:.3f} -> {self.perplexity:.3f} (x {self.ratio:.4f}), top-1 agreement "
            f"{self.top1:.4f}, logits cosine {self.cosine:.5f}, {self.tokens} tokens"
        )


class Comparison:
    """The original's side of the measurement, kept for every candidate.

    Args:
        source: the original model.
        states: its hidden states ``(rows, length, hidden)`` before the last norm.
        tokens: ``(rows, length)``.
    """

    def __init__(self, source: TensorSource, states: Floats, tokens: NDArray[np.int32]) -> None:
        self._source, self.states, self._tokens = source, states, tokens
        self._norm = source.read(LAST_NORM).astype(np.float32)
        self._head_name = EMBEDDING if source.config.tie_word_embeddings else HEAD

    def measure(self, states: Floats, rows: dict[str, Int8Weight]) -> Accuracy:
        """Compare.

        Args:
            states: hidden states of the quantized model for the same tokens.
            rows: its int8 output head (the embedding where tied), if it has one.
        """
        release_memory()  # of the layers that were run; the head needs it
        head = self._source.read(self._head_name).astype(np.float32, copy=False)
        ours, original = Perplexity(), Perplexity()
        agreeing, cosines = 0, 0.0
        for index, chunk in self._chunks():
            expected = _logits(self._normed(self.states[index, chunk], half_norm=False), head, None)
            found = _logits(self._normed(states[index, chunk], half_norm=True), head, rows.get(self._head_name))
            agreeing += int((expected.argmax(1) == found.argmax(1)).sum())
            cosines += float(_cosines(expected, found).sum())
            targets = self._tokens[index, chunk.start + 1 : chunk.stop + 1]
            ours.add(_loss(found, targets), len(targets))
            original.add(_loss(expected, targets), len(targets))
        tokens = self._tokens.size
        return Accuracy(ours.compute(), original.compute(), agreeing / tokens, cosines / tokens, tokens)

    def _chunks(self) -> list[tuple[int, slice]]:
        length = self._tokens.shape[1]
        return [
            (row, slice(start, min(start + _TOKENS, length)))
            for row in range(len(self._tokens))
            for start in range(0, length, _TOKENS)
        ]

    def _normed(self, x: Floats, half_norm: bool) -> Floats:
        return normed(self._source, x, half(self._norm) if half_norm else self._norm)


def _logits(x: Floats, head: Floats, rows: Int8Weight | None) -> Floats:
    if rows is None:
        return x @ head.T
    parts = [slice(start, start + _ROWS) for start in range(0, len(rows.q), _ROWS)]
    return np.concatenate([x @ rows.values(part).T for part in parts], 1)


def _cosines(a: Floats, b: Floats) -> Floats:
    norms = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
    cosines: Floats = np.einsum("ij,ij->i", a, b) / np.maximum(norms, 1e-30)
    return cosines


def _loss(logits: Floats, targets: NDArray[np.int32]) -> float:
    """Sum of the negative log likelihoods of the targets, in nats; infinite for logits that are not numbers."""
    logits = logits[: len(targets)]
    largest = logits.max(1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(1, dtype=np.float64)) + largest[:, 0]
    loss = float((total - logits[np.arange(len(targets)), targets]).sum())
    return math.inf if math.isnan(loss) else loss
