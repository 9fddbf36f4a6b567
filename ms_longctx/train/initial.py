# SPDX-License-Identifier: Apache-2.0
"""First weights of a model that is cut over workers: each draws its pieces, and all strategies give one model.

MindSpore draws a parameter that was cut already without regard to which piece it is, so the workers of a tensor
parallel group would begin with the same numbers, and heads that begin equal stay equal for ever. Here every row of
every matrix has a random stream of its own.
"""

from __future__ import annotations

import zlib

import numpy as np

from ms_longctx.config.model import LlamaConfig
from ms_longctx.parallel.slices import Piece


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
