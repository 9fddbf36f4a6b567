# SPDX-License-Identifier: Apache-2.0
"""Embedding and head in int8. Reference: rounding to nearest, with the error of logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ms_longctx.models.auto import open_checkpoint
from ms_longctx.quant.model import EMBEDDING, HEAD
from ms_longctx.quant.rows import round_rows
from ms_longctx.quant.weights import Int8Weight, round_int8, row_scales


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_the_head_makes_up_for_its_rounding(make_model: Callable[..., Any], tied: bool) -> None:
    """Correlated states: the logits of the head are less than half as far off (mean squares); the table of
    embeddings is the nearest one, and where it is the head as well at most a quarter further from the original."""
    model, folder = make_model(tie_word_embeddings=tied)
    source = open_checkpoint(folder)
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((64, 64)) * np.logspace(0, -2, 64)[:, None]
    states = (rng.standard_normal((6, 200, 64)) @ mixing).astype(np.float16)
    rows = round_rows(source, states)
    assert set(rows) == ({EMBEDDING} if tied else {EMBEDDING, HEAD})
    norm = source.read("model.norm.weight").astype(np.float64)
    x = states.reshape(-1, 64).astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(1, keepdims=True) + source.config.rms_norm_eps) * norm

    def distances(name: str, weight: Int8Weight) -> tuple[float, float]:
        d = weight.values().astype(np.float64) - source.read(name)
        return float(np.square(x @ d.T).mean()), float(np.square(d).mean())

    for name, weight in rows.items():
        table = source.read(name).astype(np.float32)
        nearest = round_int8(table, row_scales(table))
        np.testing.assert_array_equal(weight.scales, nearest.scales)
        ours, plain = distances(name, weight), distances(name, nearest)
        if name == HEAD or tied:
            assert ours[0] < 0.5 * plain[0]
        if name == EMBEDDING:
            assert ours[1] < 1.25 * plain[1]
    if not tied:
        np.testing.assert_array_equal(rows[EMBEDDING].q, round_int8(*_grid(source.read(EMBEDDING))).q)


def _grid(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return table.astype(np.float32), row_scales(table.astype(np.float32))
