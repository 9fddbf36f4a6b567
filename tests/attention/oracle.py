# SPDX-License-Identifier: Apache-2.0
"""The reference of the attention tests: torch's scaled_dot_product_attention in float64 with a dense mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ms_longctx.attention.mask import MaskSpec


@dataclass
class Problem:
    """Inputs of one attention; arrays as FlashAttention's arguments, plus output gradients."""

    spec: MaskSpec
    arrays: dict[str, np.ndarray]  # q, k, v, d_out, d_lse
    q_documents: np.ndarray | None
    k_documents: np.ndarray | None
    slopes: np.ndarray | None
    offsets: np.ndarray | None


def make_problem(
    shape: tuple[int, int, int, int, int, int],
    spec: MaskSpec,
    offsets: object = None,
    dtype: type = np.float32,
    seed: int = 0,
) -> Problem:
    """Random inputs of ``shape`` = (B, H, Hkv, Sq, Sk, D); documents are uneven and end in padding."""
    batch, heads, kv_heads, q_length, k_length, dim = shape
    rng = np.random.default_rng(seed)
    arrays = {
        "q": rng.standard_normal((batch, q_length, heads, dim)).astype(dtype),
        "k": rng.standard_normal((batch, k_length, kv_heads, dim)).astype(dtype),
        "v": rng.standard_normal((batch, k_length, kv_heads, dim)).astype(dtype),
        "d_out": rng.standard_normal((batch, q_length, heads, dim)).astype(dtype),
        "d_lse": rng.standard_normal((batch, heads, q_length)).astype(np.float32),
    }
    q_documents = k_documents = slopes = None
    if spec.documents:
        longest = max(q_length, k_length)
        ids = np.sort(rng.integers(0, 5, (batch, longest)), axis=1).astype(np.int32)
        ids[:, longest - longest // 9 :] = -1
        q_documents, k_documents = ids[:, longest - q_length :], ids[:, longest - k_length :]
    if spec.alibi:
        slopes = (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)
    given = None if offsets is None else np.array(offsets, np.int32)
    return Problem(spec, arrays, q_documents, k_documents, slopes, given)


def solve(problem: Problem) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv in float64."""
    spec = problem.spec
    tensors = {name: torch.tensor(x.astype(np.float64)) for name, x in problem.arrays.items()}
    q, k, v = (tensors[name].transpose(1, 2).requires_grad_(True) for name in "qkv")
    batch, heads, q_length, dim = q.shape
    k_length, group = k.shape[2], heads // k.shape[1]
    given = problem.offsets if problem.offsets is not None else np.array([k_length - q_length, k_length])
    rows = np.broadcast_to(given, (batch, given.shape[-1]))
    i = torch.tensor(rows[:, 0])[:, None] + torch.arange(q_length)
    j = torch.arange(k_length) + torch.tensor(rows[:, 2] if rows.shape[1] > 2 else rows[:, 0] * 0)[:, None]
    difference = i[:, :, None] - j[:, None, :]
    seen = (torch.arange(k_length) < torch.tensor(rows[:, 1])[:, None])[:, None, :] | (difference != difference)
    if spec.causal:
        seen = seen & (difference >= 0)
    if spec.window is not None:
        seen = seen & (difference < spec.window)
    if spec.chunk is not None:
        floor = torch.div(i, spec.chunk, rounding_mode="floor")
        seen = seen & (floor[:, :, None] == torch.div(j, spec.chunk, rounding_mode="floor")[:, None, :])
    if spec.documents:
        q_ids, k_ids = torch.tensor(problem.q_documents), torch.tensor(problem.k_documents)
        seen = seen & (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids[:, :, None] >= 0)
    seen = seen.expand(batch, q_length, k_length)[:, None].expand(batch, heads, q_length, k_length)
    bias = torch.zeros(batch, heads, q_length, k_length, dtype=torch.float64)
    if spec.alibi:
        bias = bias - torch.tensor(problem.slopes.astype(np.float64))[:, None, None] * difference[:, None]
    blind = ~seen.any(-1)
    bias = bias.masked_fill(~seen, float("-inf")).masked_fill(blind[..., None], 0.0)
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=bias)
    out = out.masked_fill(blind[..., None], 0.0)
    lse = torch.logsumexp(q @ wide_k.transpose(-1, -2) * dim**-0.5 + bias, -1)
    d_lse = tensors["d_lse"].masked_fill(blind, 0.0)
    loss = (out * tensors["d_out"].transpose(1, 2)).sum() + (lse * d_lse).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    result = {"out": out.transpose(1, 2), "lse": lse.masked_fill(blind, float("-inf"))}
    result |= {name: g.transpose(1, 2) for name, g in zip(("dq", "dk", "dv"), grads, strict=True)}
    return {name: x.detach().numpy() for name, x in result.items()}


def worst_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference, relative to the largest expected number; infinities must be the same."""
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite].astype(np.float64), expected[~finite]) or not np.isfinite(got[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(got[finite] - expected[finite]).max() / max(np.abs(expected[finite]).max(), 1e-3))
