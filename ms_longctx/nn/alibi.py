# SPDX-License-Identifier: Apache-2.0
"""Slopes of ALiBi, linear biases on attention scores (Press et al. 2021, arXiv 2108.12409)."""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Slope of each head: head h adds ``slope_h * (j - i)`` to the score of query i and key j.

    For n heads, n a power of two: ``2 ** (-8 / n)`` and its powers. Otherwise the slopes of the power of two
    below n, then every second slope of the power of two above it, as in the authors' code.

    Returns:
        float32 ``(num_heads,)``.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric(power)
    if power < num_heads:
        slopes = np.concatenate([slopes, _geometric(2 * power)[0::2][: num_heads - power]])
    return slopes.astype(np.float32)


def _geometric(n: int) -> np.ndarray:
    return 2.0 ** (-8.0 / n * np.arange(1, n + 1))
