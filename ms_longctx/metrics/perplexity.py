# SPDX-License-Identifier: Apache-2.0
"""Perplexity, weighted by tokens: exp of the mean negative log likelihood (Jelinek et al., 1977)."""

from __future__ import annotations

import math

from ms_longctx.errors import MsLongctxError


class Perplexity:
    """Collects sums of token losses; a long text counts with each of its tokens, a short one likewise."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that were counted."""
        return self._tokens

    def add(self, loss_sum: float, tokens: int) -> None:
        """Add texts of ``tokens`` predicted tokens whose losses, in nats, sum to ``loss_sum``."""
        self._loss += loss_sum
        self._tokens += tokens

    def compute(self) -> float:
        """The perplexity of everything that was added.

        Raises:
            MsLongctxError: nothing was added.
        """
        if not self._tokens:
            raise MsLongctxError("perplexity: no tokens were added; the data holds nothing to predict")
        try:
            return math.exp(self._loss / self._tokens)
        except OverflowError:
            return math.inf
