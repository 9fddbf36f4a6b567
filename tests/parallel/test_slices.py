# SPDX-License-Identifier: Apache-2.0
"""Pieces of parameters: against numpy's own splitting, equal to the element, and covering every parameter.

That MindSpore's compiler cuts the same way is shown in ``tests/train/test_program_engine.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ms_longctx.config.model import LlamaConfig
from ms_longctx.models.checkpoint import fuse_qkv
from ms_longctx.models.pieces import file_pieces, read_parameter
from ms_longctx.parallel.slices import Piece, from_layout, holders, piece_of
from ms_longctx.parallel.strategy import Strategy

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=320,
    intermediate_size=448,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    attention_bias=True,
)
LAYER = "model.layers.{}.{}"
SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (96, 320)}
for number in range(5):
    for name, shape in {
        "input_layernorm.weight": (320,),
        "self_attn.q_proj.weight": (320, 320),
        "self_attn.q_proj.bias": (320,),
        "self_attn.k_proj.weight": (160, 320),
        "self_attn.o_proj.weight": (320, 320),
        "self_attn.o_proj.bias": (320,),
        "mlp.up_proj.weight": (448, 320),
        "mlp.down_proj.weight": (320, 448),
    }.items():
        SHAPES[LAYER.format(number, name)] = shape
SHAPES |= {"model.norm.weight": (320,), "lm_head.weight": (96, 320)}
STRATEGIES = {
    "dp4": Strategy(dp=4),
    "mp2 pp2": Strategy(mp=2, pp=2, micro_batch_num=2, pipeline_layers=(2, 3)),
    "mp4 vocab": Strategy(mp=4, vocab_parallel=True),
    "dp2 cp2": Strategy(dp=2, cp=2, ulysses_degree=2, attention_mode="ulysses"),
    "optimizer shard": Strategy(dp=2, cp=2, mp=2, ulysses_degree=2, attention_mode="ulysses", optimizer_shard=True),
    "uneven": Strategy(dp=2, mp=2, pp=3, micro_batch_num=3, pipeline_layers=(1, 3, 1), optimizer_shard=True),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_pieces_cover_every_parameter_once(strategy: Strategy) -> None:
    """Of a parameter that several hold, each element is held equally often."""
    for name, shape in SHAPES.items():
        held = np.zeros(shape, int)
        for rank in range(strategy.worker_num):
            piece = piece_of(name, shape, CONFIG, strategy, rank)
            if piece is not None:
                held[tuple(map(slice, piece.start, piece.stop))] += 1
        assert held.min() == held.max() > 0, name


def test_pieces_are_numpys() -> None:
    strategy = STRATEGIES["uneven"]
    values = np.arange(448 * 320).reshape(448, 320)
    for rank in range(12):
        own = strategy.coordinates(rank)
        up = piece_of("model.layers.3.mlp.up_proj.weight", values.shape, CONFIG, strategy, rank)
        down = piece_of("model.layers.4.mlp.down_proj.weight", values.T.shape, CONFIG, strategy, rank)
        assert (up is None, down is None) == (own.pp != 1, own.pp != 2)
        if up is not None:
            rows = np.split(np.split(values, 2)[own.mp], 2)[own.dp]
            np.testing.assert_array_equal(values[tuple(map(slice, up.start, up.stop))], rows)
        if down is not None:
            block = np.split(np.split(values.T, 2, axis=1)[own.mp], 2)[own.dp]
            np.testing.assert_array_equal(values.T[tuple(map(slice, down.start, down.stop))], block)


def test_layout_of_a_compiled_program() -> None:
    """As MindSpore 2.10 records it: device matrix (data 4, mp 2), rows over mp, then over the optimizer's group."""
    layout = ([4, 2], [0, -1], [224, 320], 0, True, "group", [448, 320], [224, 320], False, False, 0, 0)
    values = np.arange(448 * 320).reshape(448, 320)
    for place in range(8):
        data, mp = divmod(place, 2)
        same = list(range(mp, 8, 2))
        assert holders(layout, place) == same
        piece = from_layout(layout, place, same)
        expected = np.split(np.split(values, 2)[mp], 4)[data]
        np.testing.assert_array_equal(values[tuple(map(slice, piece.start, piece.stop))], expected)
    columns = ([4, 2], [-1, 0], [448, 160], 0, True, "", [448, 320], [448, 160], False, False, 0, 0)
    assert from_layout(columns, 5, []) == Piece((448, 320), (0, 160), (448, 320))
    assert holders(([8], [-1], [320], 0, True, "", [320]), 3) == list(range(8))


def test_fused_rows_of_any_piece() -> None:
    """Every run of fused rows is up to three runs of the file's rows, and comes back from them."""
    rng = np.random.default_rng(0)
    dim = CONFIG.head_size
    files = {
        f"m.{part}_proj.weight": rng.standard_normal((heads * dim, 7)).astype(np.float32)
        for part, heads in (("q", 8), ("k", 4), ("v", 4))
    }
    fused = fuse_qkv(list(files.values()), CONFIG)

    class Source:
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {name: value.shape for name, value in files.items()}

        def read(self, name: str, piece: Piece | None = None) -> np.ndarray:
            assert piece is not None
            return files[name][tuple(map(slice, piece.start, piece.stop))]

    for start, stop in [(0, 640), (0, 160), (80, 81), (33, 470), (100, 140), (639, 640)]:
        piece = Piece(fused.shape, (start, 2), (stop, 6))
        values = read_parameter(Source(), "m.qkv_proj.weight", piece, CONFIG, Path("x"))
        np.testing.assert_array_equal(values, fused[start:stop, 2:6])
        for part in file_pieces("m.qkv_proj.weight", piece, CONFIG):
            np.testing.assert_array_equal(part.take(values), Source().read(part.name, part.piece))
