# SPDX-License-Identifier: Apache-2.0
"""Rotary tables against transformers' modeling_rope_utils and LlamaRotaryEmbedding (fp32, torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
import transformers
from mindspore import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ms_longctx.config.model import LlamaConfig
from ms_longctx.nn.rope import RotaryTables, rope_frequencies
from tests.models.reference import SCALINGS

HEAD_DIM = 10


def both_configs(scaling: dict[str, Any] | None, **fields: Any) -> tuple[LlamaConfig, transformers.LlamaConfig]:
    values = {"hidden_size": 50, "num_attention_heads": 5, "max_position_embeddings": 128, **fields}
    theirs = dict(scaling) if scaling else None
    return LlamaConfig(rope_scaling=scaling, **values), transformers.LlamaConfig(rope_scaling=theirs, **values)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [31, 128, 129, 1000])
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    ours, theirs = both_configs(SCALINGS[name])
    kind = (SCALINGS[name] or {"rope_type": "default"})["rope_type"]
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
    inv_freq, factor = rope_frequencies(ours, length)
    assert inv_freq.dtype == np.float64 and inv_freq.shape == (HEAD_DIM // 2,)
    np.testing.assert_allclose(inv_freq, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.fixture(autouse=True)
def pynative() -> Iterator[None]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize(
    ("name", "mode", "length"),
    [(name, ms.PYNATIVE_MODE, length) for name in SCALINGS for length in (77, 150)]
    + [(name, ms.GRAPH_MODE, 150) for name in ("yarn", "dynamic", "longrope")],
)
def test_tables_equal_transformers(name: str, mode: int, length: int) -> None:
    """150 is past max_position_embeddings; the reference's fp32 angles are off by up to 150 * 6e-8."""
    ms.set_context(mode=mode)
    ours, theirs = both_configs(SCALINGS[name])
    positions = np.arange(length, dtype=np.int32)[None]
    reference = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.tensor(positions).long())
    tables = RotaryTables(ours)
    for cos_sin in (tables(length), tables(length, Tensor(positions))):
        for actual, expected in zip(cos_sin, reference, strict=True):
            np.testing.assert_allclose(actual.asnumpy(), expected.numpy(), rtol=0, atol=2e-5)


def test_yarn_amplitude_is_its_attention_factor() -> None:
    """Position 0 has cosine 1, so the table shows the factor 0.1 ln(s) + 1 of the paper (section 3.3)."""
    for factor in (4.0, 40.0):
        config, _ = both_configs({"rope_type": "yarn", "factor": factor})
        cos, _ = RotaryTables(config)(3)
        np.testing.assert_allclose(cos.asnumpy()[0, 0], 0.1 * np.log(factor) + 1, rtol=1e-7)


def test_far_positions_keep_float64_accuracy() -> None:
    """The reference is float64 throughout; an fp32 angle would be off by about 4e-3 at this position."""
    config, _ = both_configs(None, max_position_embeddings=131072)
    position = 131071
    cos, sin = RotaryTables(config)(1, Tensor(np.array([[position]], np.int32)))
    angles = position * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(cos.asnumpy()[0, 0, :5], np.cos(angles), rtol=0, atol=1e-7)
    np.testing.assert_allclose(sin.asnumpy()[0, 0, 5:], np.sin(angles), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_dependent_rows_do_not_depend_on_each_other(name: str) -> None:
    """A short row beside a long one, and after a long call, equals the short row alone."""
    config, _ = both_configs(SCALINGS[name], max_position_embeddings=32)
    tables = RotaryTables(config)
    long = np.arange(80, dtype=np.int32)
    short = np.where(long < 20, long, 0).astype(np.int32)
    alone = tables(20)[0].asnumpy()[0]
    beside = tables(80, Tensor(np.stack([short, long])))[0].asnumpy()
    np.testing.assert_allclose(beside[0, :20], alone, rtol=0, atol=2e-6)
    assert np.abs(beside[1, :20] - alone).max() > 1e-2
    np.testing.assert_array_equal(tables(20)[0].asnumpy()[0], alone)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_rope_length_fixes_the_frequencies(name: str) -> None:
    config, _ = both_configs(SCALINGS[name], max_position_embeddings=32)
    tables = RotaryTables(config)
    whole = tables(80)[1].asnumpy()[0]
    piece = tables(80, Tensor(np.array([[3, 4, 5]], np.int32)), 80)[1].asnumpy()[0]
    np.testing.assert_array_equal(piece, whole[3:6])


def test_original_length_inside_rope_scaling_decides_where_longrope_switches() -> None:
    """Phi-3 keeps the original length outside rope_scaling; transformers then takes the stretch from it."""
    scaling = {key: value for key, value in (SCALINGS["longrope"] or {}).items() if key != "factor"}
    _, theirs = both_configs(scaling)
    theirs.original_max_position_embeddings = 32
    ours, _ = both_configs({**scaling, "original_max_position_embeddings": 32})
    also_ours, _ = both_configs(scaling, original_max_position_embeddings=32)
    for length in (32, 33):
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=length)
        for config in (ours, also_ours):
            inv_freq, our_factor = rope_frequencies(config, length)
            np.testing.assert_allclose(inv_freq, expected.numpy(), rtol=2e-6)
            assert our_factor == pytest.approx(factor, rel=1e-12)
