# SPDX-License-Identifier: Apache-2.0
"""Embedding and head in int8. Reference: rounding to nearest, with the error of logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ms_longctx.models.auto import open_checkpoint
from ms_longctx.quant.model import EMBEDDING, HEAD
from ms_longctx.quant.rows import round_rows
from ms_longctx.quant.weights import Int8Weight, round_int8, row_scales


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_the_head_makes_up_for_its_rounding(make_model: Callable[..., Any], tied: bool) -> None:
    """Correlated states and two columns ten times the others: the logits of the head are less than a fifth as far off
    (mean squares); the table of embeddings is the nearest one, and where it is the head as well not further from the
    original. All of it is exact in fp16."""
    model, folder = make_model(tie_word_embeddings=tied)
    name = EMBEDDING if tied else HEAD
    with torch.no_grad():
        model.get_parameter(name)[:, [5, 50]] *= 10
    model.save_pretrained(folder)
    source = open_checkpoint(folder)
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((64, 64)) * np.logspace(0, -2, 64)[:, None]
    states = (rng.standard_normal((6, 200, 64)) @ mixing).astype(np.float16)
    rows = round_rows(source, states)
    assert set(rows) == ({EMBEDDING} if tied else {EMBEDDING, HEAD})
    norm = source.read("model.norm.weight").astype(np.float64)
    x = states.reshape(-1, 64).astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(1, keepdims=True) + source.config.rms_norm_eps) * norm
    table = source.read(name).astype(np.float32)
    plain = round_int8(table, row_scales(table))

    def distances(weight: Int8Weight) -> tuple[float, float]:
        d = weight.values().astype(np.float64) - table
        return float(np.square(x @ d.T).mean()), float(np.square(d).mean())

    ours, nearest = distances(rows[name]), distances(plain)
    assert ours[0] < 0.2 * nearest[0]
    assert not tied or ours[1] < nearest[1]
    assert rows[name].factors is not None and (rows[name].factors[[5, 50]] > 1).all()
    if not tied:
        embedding = source.read(EMBEDDING).astype(np.float32)
        np.testing.assert_array_equal(rows[EMBEDDING].q, round_int8(embedding, row_scales(embedding)).q)
    for weight in rows.values():
        values = weight.values()
        np.testing.assert_array_equal(values.astype(np.float16).astype(np.float32), values)
        again = round_int8(values, weight.scales, weight.factors)
        np.testing.assert_array_equal(again.q, weight.q)
