# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a sequence are spread over the ranks of context parallelism: the only place that knows.

A ring gives each of its n places two of 2n equal chunks, an early and a late one (0 and 2n - 1, 1 and 2n - 2, ...), so
that a causal mask leaves the same work to everyone ("zigzag"). Ulysses cuts into contiguous pieces. In a hybrid the
tokens of a place in the ring are cut into contiguous pieces for the Ulysses group at that place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.strategy import Strategy

# What a batch may hold, and what fills it up: padding belongs to no document and has no target.
PADDING = {"input_ids": 0, "labels": -100, "position_ids": 0, "document_ids": -1}


def padded_length(length: int, strategy: Strategy) -> int:
    """The least length of at least ``length`` tokens that the strategy splits into equal pieces."""
    if length < 1:
        raise MsLongctxError(f"a sequence of {length} tokens cannot be split; expected at least 1")
    return -(-length // strategy.sequence_multiple) * strategy.sequence_multiple


def zigzag_chunks(place: int, ring_degree: int) -> tuple[int, int]:
    """Which two of the ``2 * ring_degree`` chunks of a sequence a place in the ring holds."""
    return place, 2 * ring_degree - 1 - place


def token_order(length: int, strategy: Strategy) -> NDArray[np.int64]:
    """Which tokens each rank holds, in its order.

    Args:
        length: tokens of the whole sequence, padding included.
        strategy: its ``ring_degree`` and ``ulysses_degree`` decide.

    Returns:
        (cp, length // cp) places in the whole sequence; row i is for ``cp_i = ring_i * ulysses_degree + ulysses_i``.

    Raises:
        MsLongctxError: the length does not divide.
    """
    if length != padded_length(length, strategy):
        raise MsLongctxError(
            f"a sequence of {length} tokens does not split over {strategy.describe()}; expected a multiple of "
            f"{strategy.sequence_multiple}"
        )
    ring = strategy.ring_degree
    places = np.arange(length)
    if ring > 1:
        chunks = places.reshape(2 * ring, -1)
        places = np.concatenate([chunks[list(zigzag_chunks(place, ring))] for place in range(ring)])
    return places.reshape(strategy.cp, -1)


def split_sequence(batch: Mapping[str, NDArray[Any]], strategy: Strategy, rank: int) -> dict[str, NDArray[Any]]:
    """The piece of a batch that a rank works on.

    Args:
        batch: (B, S) arrays by name, those of :data:`PADDING`. Labels are shifted already: ``labels[t]`` is the target
            of token t, so none is lost where pieces meet. Every data parallel copy has a batch of its own.
        strategy: how many pieces, and of what kind.
        rank: of all workers.

    Returns:
        (B, :func:`padded_length` // cp) arrays of the same names and types. ``position_ids`` is always among them,
        because a piece need not begin at 0 nor be contiguous; without one in the batch they count from 0.

    Raises:
        MsLongctxError: an unknown name, or arrays of different shapes.
    """
    shapes = {name: array.shape for name, array in batch.items()}
    unknown = sorted(set(batch) - set(PADDING))
    if unknown:
        raise MsLongctxError(f"split_sequence: unknown {', '.join(unknown)}; expected {', '.join(PADDING)}")
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise MsLongctxError(f"split_sequence: expected arrays of one shape (B, S); got {shapes}")
    rows, length = next(iter(shapes.values()))
    whole = dict(batch)
    if "position_ids" not in whole:
        whole["position_ids"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    padded = padded_length(length, strategy)
    own = token_order(padded, strategy)[strategy.coordinates(rank).cp]
    widths = ((0, 0), (0, padded - length))
    return {name: np.pad(array, widths, constant_values=PADDING[name])[:, own] for name, array in whole.items()}


def join_sequence(
    pieces: Sequence[NDArray[Any]], strategy: Strategy, length: int | None = None, axis: int = 1
) -> NDArray[Any]:
    """The inverse of :func:`split_sequence`: whole sequences out of the pieces.

    Args:
        pieces: one array for each ``cp_i``, in that order, of any shape; ``axis`` counts tokens.
        strategy: what they were split by.
        length: tokens without padding, which is cut off; ``None`` keeps it.
        axis: the axis of the tokens.

    Raises:
        MsLongctxError: as many pieces as ``cp`` were expected, or they differ in shape.
    """
    if len(pieces) != strategy.cp or len({piece.shape for piece in pieces}) != 1:
        shapes = [piece.shape for piece in pieces]
        raise MsLongctxError(f"join_sequence: expected cp = {strategy.cp} pieces of one shape; got {shapes}")
    joined = np.concatenate(pieces, axis=axis)
    order = token_order(joined.shape[axis], strategy).reshape(-1)
    kept = np.argsort(order)[:length]
    return np.take(joined, kept, axis=axis)
