# SPDX-License-Identifier: Apache-2.0
"""Labels: the one place where targets are shifted and masked. The model never shifts."""

from __future__ import annotations

import numpy as np

#: Label of a position that is not trained on.
IGNORE = -100


def supervised_mask(runs: np.ndarray) -> np.ndarray:
    """Return which tokens are to be learned: bool ``(n,)``.

    Args:
        runs: int32 ``(k,)``, lengths of alternating stretches, the first not supervised (it may be 0): prompt
            length, answer length, next prompt's length... They sum to ``n``.
    """
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def shift_labels(tokens: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Return the target of every position of one document: int32 ``(n,)``.

    Position t is to predict token t + 1 if that token is supervised; all others, and the last, are
    ``IGNORE``. Masking goes by position, never by token id, so an end token stays a target where the padding
    token is equal to it.

    Args:
        tokens: int32 ``(n,)``.
        runs: see :func:`supervised_mask`.
    """
    labels = np.full(len(tokens), IGNORE, dtype=np.int32)
    end = 0
    for index, length in enumerate(runs.tolist()):
        start, end = end, end + length
        if index % 2 and length:
            first = max(start, 1)  # the first token of a document has no predecessor
            labels[first - 1 : end - 1] = tokens[first:end]
    return labels


def supervised_tokens(runs: np.ndarray) -> int:
    """Return how many labels of a document are not ``IGNORE``."""
    stretches = np.flatnonzero(runs)
    starts_supervised = len(stretches) > 0 and stretches[0] % 2 == 1
    return int(runs[1::2].sum()) - int(starts_supervised)
