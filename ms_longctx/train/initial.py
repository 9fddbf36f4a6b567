# SPDX-License-Identifier: Apache-2.0
"""First weights of a model that is cut over workers: each keeps its pieces, and all strategies give one model.

MindSpore draws a parameter that was cut already without regard to which piece it is, so the workers of a tensor
parallel group would begin with the same numbers, and heads that begin equal stay equal for ever. Here every row of
every matrix has a random stream of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from ms_longctx.config.model import LlamaConfig
from ms_longctx.parallel.slices import Piece
from ms_longctx.tuning.lora import first_values


def initial_values(name: str, piece: Piece, config: LlamaConfig, seed: int) -> np.ndarray:
    """A piece of a parameter of an untrained model, fp32: norms 1, biases 0, matrices normal.

    Args:
        name: of the parameter.
        piece: which part of it.
        config: ``initializer_range`` is the standard deviation.
        seed: of the run.
    """
    if name.endswith(".bias"):
        return np.zeros(piece.shape, np.float32)
    if len(piece.whole) == 1:
        return np.ones(piece.shape, np.float32)
    stream = zlib.crc32(name.encode())
    values = np.empty(piece.shape, np.float32)
    for place, row in enumerate(range(piece.start[0], piece.stop[0])):
        numbers = np.random.default_rng([seed, stream, row]).standard_normal(piece.stop[1], np.float32)
        values[place] = numbers[piece.start[1] :]
    return values * np.float32(config.initializer_range)


def initial_adapters(
    shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Piece], seed: int
) -> dict[str, np.ndarray]:
    """Pieces of untrained adapters, fp32: to the bit what :func:`~ms_longctx.tuning.get_pe_model` gives one process.

    One generator draws all A in their order, so those of other workers are drawn, too, and dropped.

    Args:
        shapes: of every A and B of the model before it was cut, in the order of the model.
        pieces: what to return.
        seed: of the run.
    """
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes.items():
        is_down = name.endswith(".lora_A.weight")
        whole = first_values(rng, *shape) if is_down else None
        if (piece := pieces.get(name)) is None:
            continue
        if whole is None:
            values[name] = np.zeros(piece.shape, np.float32)
        else:
            values[name] = whole[piece.place_in(Piece.all_of(shape))].copy()
    return values
