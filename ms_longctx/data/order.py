# SPDX-License-Identifier: Apache-2.0
"""Which sample comes when: a pure function of seed and epoch, so that any position can be resumed exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class RankOrder:
    """The samples one data-parallel rank reads in one epoch.

    Attributes:
        indices: int64, sample numbers in reading order.
        filler: rows of padding that complete the last batch.
    """

    indices: np.ndarray
    filler: int


def epoch_order(samples: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Return the order of all samples in ``epoch``: int64 ``(samples,)``, the same on every machine."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    # numpy keeps the raw stream of a bit generator stable over versions, not what permutation() makes of it.
    keys = np.random.PCG64([seed, epoch]).random_raw(samples)
    return np.argsort(keys, kind="stable")


def rank_order(
    order: np.ndarray, batch_size: int, dp_rank: int, dp_size: int, start_sample: int, drop_last: bool
) -> RankOrder:
    """Deal ``order`` out to the ranks.

    The k-th step of all ranks together reads ``batch_size * dp_size`` consecutive samples of ``order``; a run
    may therefore go on with another number of ranks. Samples that do not fill a step are left out
    (``drop_last``) or completed with filler; all ranks make the same number of steps.

    Raises:
        MsLongctxError: a number is out of range.
    """
    if batch_size < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise MsLongctxError(
            f"batch_size {batch_size}, dp_rank {dp_rank}, dp_size {dp_size}: expected batch_size >= 1 and "
            "0 <= dp_rank < dp_size"
        )
    if not 0 <= start_sample <= len(order):
        raise MsLongctxError(f"start_sample {start_sample} is outside this epoch of {len(order)} samples")
    left = order[start_sample:]
    step = batch_size * dp_size
    batches = len(left) // step if drop_last else -(-len(left) // step)
    mine = left[: batches * step][dp_rank::dp_size]
    return RankOrder(mine, batches * batch_size - len(mine))
