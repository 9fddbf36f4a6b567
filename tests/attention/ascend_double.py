# SPDX-License-Identifier: Apache-2.0
"""Doubles of FlashAttentionScore and FlashAttentionScoreGrad in float64, as their documents describe them.

Of what they leave open the worst is done: rows that see nothing give NaN, unused mode arguments are ignored.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

HIDES = -np.inf


def score(heads: int, scale: float, layout: str, mode: int, before: int, after: int):  # noqa: ANN201
    """Stands in for :func:`ms_longctx.attention.ascend_operator.score`."""

    def run(q, k, v, shift, drop, padding, mask, prefix, q_ends=None, k_ends=None):  # noqa: ANN001, ANN202
        assert shift is None and drop is None and padding is None and prefix is None
        check(q, k, v, heads, layout, mode, mask)
        tops, totals, outs = [], [], []
        for q_piece, k_piece, v_piece, hidden in pieces(q, k, v, layout, mode, before, after, mask, q_ends, k_ends):
            scores = masked_scores(q_piece, k_piece, hidden, scale)
            with np.errstate(invalid="ignore"):
                top = scores.max(-1)
                weights = np.exp(scores - top[..., None])
                total = weights.sum(-1)
                outs.append(np.einsum("hqk,khd->qhd", weights / total[..., None], repeated(v_piece, heads)))
            tops.append(np.repeat(top[..., None], 8, -1))
            totals.append(np.repeat(total[..., None], 8, -1))
        out = join(outs, q.shape)
        return statistics(tops, q, layout), statistics(totals, q, layout), None, Tensor(out.astype(dtype_of(q)))

    return run


def score_gradient(heads: int, scale: float, layout: str, mode: int, before: int, after: int):  # noqa: ANN201
    """Stands in for :func:`ms_longctx.attention.ascend_operator.score_gradient`."""

    def run(q, k, v, dy, shift, drop, padding, mask, top, total, _, out, prefix, q_ends=None, k_ends=None):  # noqa: ANN001, ANN202
        assert shift is None and drop is None and padding is None and prefix is None
        assert dy.shape == q.shape == out.shape and dy.dtype == q.dtype == out.dtype
        check(q, k, v, heads, layout, mode, mask)
        cut = list(pieces(q, k, v, layout, mode, before, after, mask, q_ends, k_ends))
        lengths = [piece[0].shape[0] for piece in cut]
        tops, totals = (statistics_pieces(x, q, layout, lengths) for x in (top, total))
        others = zip(rows(dy, lengths), rows(out, lengths), tops, totals, strict=True)
        dqs, dks, dvs = [], [], []
        for (q_piece, k_piece, v_piece, hidden), (dy_piece, out_piece, top_piece, total_piece) in zip(
            cut, others, strict=True
        ):
            scores = masked_scores(q_piece, k_piece, hidden, scale)
            weights = np.exp(scores - top_piece[..., None]) / total_piece[..., None]
            delta = (dy_piece * out_piece).sum(-1).T[..., None]
            d_scores = weights * (np.einsum("qhd,khd->hqk", dy_piece, repeated(v_piece, heads)) - delta) * scale
            dqs.append(np.einsum("hqk,khd->qhd", d_scores, repeated(k_piece, heads)))
            dks.append(summed(np.einsum("hqk,qhd->khd", d_scores, q_piece), k_piece.shape[1]))
            dvs.append(summed(np.einsum("hqk,qhd->khd", weights, dy_piece), k_piece.shape[1]))
        results = (join(dqs, q.shape), join(dks, k.shape), join(dvs, v.shape))
        return *(Tensor(x.astype(dtype_of(q))) for x in results), None

    return run


def check(q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, mode: int, mask: Tensor | None) -> None:
    """What the documents demand of the arguments."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (ms.float16, ms.bfloat16)
    assert k.shape == v.shape and q.shape[-1] == k.shape[-1] and q.shape[-1] % 16 == 0 and q.shape[-1] <= 512
    assert q.shape[-2] == heads and heads % k.shape[-2] == 0
    assert len(q.shape) == {"BSND": 4, "TND": 3}[layout]
    if mode in (3, 4):
        assert mask is not None and np.array_equal(mask.asnumpy(), np.triu(np.ones((2048, 2048)), 1))
    else:
        assert mode == 1 or mask is None


def pieces(q, k, v, layout, mode, before, after, mask, q_ends, k_ends):  # noqa: ANN001, ANN201
    """Each sequence's q, k, v (S, H, D) and what is hidden (S, Sk)."""
    arrays = [x.asnumpy().astype(np.float64) for x in (q, k, v)]
    if layout == "TND":
        ends = [x.asnumpy() for x in (q_ends, k_ends)]
        for x, end in zip(arrays, ends, strict=False):
            assert (np.diff(end) >= 0).all() and end[-1] == x.shape[0] and len(end) <= 1024
        cuts = [np.split(x, end[:-1]) for x, end in zip(arrays, [ends[0], ends[1], ends[1]], strict=True)]
    else:
        assert q_ends is None and k_ends is None
        cuts = [list(x) for x in arrays]
    for place, (q_piece, k_piece, v_piece) in enumerate(zip(*cuts, strict=True)):
        if q_piece.shape[0] == 0:
            continue
        if mode == 1:
            yield (
                q_piece,
                k_piece,
                v_piece,
                np.broadcast_to(mask.asnumpy()[place, 0] != 0, (len(q_piece), len(k_piece))),
            )
            continue
        # Modes 3 and 4 count from the lower right corner.
        difference = (np.arange(len(q_piece)) + len(k_piece) - len(q_piece))[:, None] - np.arange(len(k_piece))
        hidden = np.zeros(difference.shape, bool)
        if mode == 3:
            hidden = difference < 0
        elif mode == 4:
            assert not (before < 0 and (after < -before or -before >= len(k_piece)))
            hidden = (difference > before) | (-difference > after)
        yield q_piece, k_piece, v_piece, hidden


def masked_scores(q: np.ndarray, k: np.ndarray, hidden: np.ndarray, scale: float) -> np.ndarray:
    return np.where(hidden, HIDES, np.einsum("qhd,khd->hqk", q, repeated(k, q.shape[1])) * scale)


def repeated(x: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(x, heads // x.shape[1], 1)


def summed(x: np.ndarray, kv_heads: int) -> np.ndarray:
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1]).sum(2)


def join(parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.concatenate(parts).reshape(shape)


def statistics(parts: list[np.ndarray], q: Tensor, layout: str) -> Tensor:
    """(B, N, S, 8), or in the layout TND each sequence's (N, S, 8) one after another in the shape (T, N, 8)."""
    if layout == "BSND":
        return Tensor(np.stack(parts).astype(np.float32))
    flat = np.concatenate([part.reshape(-1, 8) for part in parts])
    return Tensor(flat.reshape(q.shape[0], q.shape[1], 8).astype(np.float32))


def statistics_pieces(x: Tensor, q: Tensor, layout: str, lengths: list[int]) -> list[np.ndarray]:
    """The inverse: (N, S) of each sequence."""
    assert x.dtype == ms.float32 and x.shape[-1] == 8
    array = x.asnumpy().astype(np.float64)
    assert np.isnan(array).any() or (array == array[..., :1]).all()
    heads = q.shape[-2]
    flat = array.reshape(-1, 8)[:, 0]
    cuts = np.split(flat, np.cumsum([length * heads for length in lengths])[:-1])
    assert layout == "TND" or x.shape[1] == heads
    return [cut.reshape(heads, length) for cut, length in zip(cuts, lengths, strict=True)]


def rows(x: Tensor, lengths: list[int]) -> list[np.ndarray]:
    """(S, H, D) of each sequence."""
    flat = x.asnumpy().astype(np.float64).reshape(-1, *x.shape[-2:])
    return np.split(flat, np.cumsum(lengths)[:-1])


def dtype_of(x: Tensor) -> type:
    return np.float16 if x.dtype == ms.float16 else np.float32
