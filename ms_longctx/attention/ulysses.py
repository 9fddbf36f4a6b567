# SPDX-License-Identifier: Apache-2.0
"""Ulysses: tokens are exchanged for heads around attention (Jacobs et al. 2023, arXiv:2309.14509)."""

import math

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.collectives import Group, make_all_gather, make_all_to_all


class UlyssesExchange(nn.Cell):
    """From all heads of some tokens to some heads of all tokens, and back.

    Rank i of a group of P gets query heads ``i * H/P`` to ``(i + 1) * H/P`` and the key/value heads they read. If P
    does not divide Hkv, each key/value head is repeated ``P / gcd(P, Hkv)`` times, in place, so that every rank's
    query heads share its key/value heads evenly; the gradients of the copies are summed.

    q, k and v travel in one message. With N = B * S/P tokens at a rank, heads of D numbers, W bytes each, and
    Hkv' key/value heads after the repetition, a rank sends ``N (H + 2 Hkv') D W (P - 1)/P`` bytes for them,
    ``N H D W (P - 1)/P`` for the output, the same again backward, and ``8 N (P - 1)`` for document ids (an
    all_gather of both kinds of ids).

    Args:
        group: the ranks, in the order of their tokens.
        documents: whether document ids are exchanged too.
    """

    def __init__(self, group: Group, documents: bool) -> None:
        super().__init__()
        self.group_size = group.size
        self.rank_index = group.index
        self.documents = documents
        self.gather_heads = make_all_to_all(group, 2, 1)
        self.gather_tokens = make_all_to_all(group, 1, 2)
        self.gather_ids = make_all_gather(group, 1, ordered=False)

    def construct(
        self, q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor, k_documents: Tensor, slopes: Tensor
    ) -> tuple[Tensor, ...]:
        """(B, S/P, H, D) and so on to (B, S, H/P, D); ids (B, S/P) to (B, S); slopes (H,) to (H/P,)."""
        ranks, heads = self.group_size, q.shape[2]
        if ranks == 1:
            return q, k, v, q_documents, k_documents, slopes
        _check_heads(heads, ranks)
        k, v = self._repeated(k), self._repeated(v)
        batch, tokens, kv_heads, dim = k.shape
        q_part, kv_part = heads // ranks, kv_heads // ranks
        parts = (
            q.reshape((batch, tokens, ranks, q_part, dim)),
            k.reshape((batch, tokens, ranks, kv_part, dim)),
            v.reshape((batch, tokens, ranks, kv_part, dim)),
        )
        mixed = ops.concat(parts, 3).reshape((batch, tokens, heads + 2 * kv_heads, dim))
        mixed = self.gather_heads(mixed)
        if self.documents:
            # The order of communication, by data: heads, then documents, then all that uses them.
            ids = self.gather_ids(ops.depend(ops.concat((q_documents, k_documents), 0), mixed))
            mixed = ops.depend(mixed, ids)
            q_documents, k_documents = ids[:batch], ids[batch:]
        if slopes.shape[0] == heads:
            slopes = slopes[self.rank_index * q_part : (self.rank_index + 1) * q_part]
        after_k = q_part + kv_part
        return (
            mixed[:, :, :q_part],
            mixed[:, :, q_part:after_k],
            mixed[:, :, after_k:],
            q_documents,
            k_documents,
            slopes,
        )

    def back(self, out: Tensor) -> Tensor:
        """(B, S, H/P, D) to (B, S/P, H, D)."""
        if self.group_size == 1:
            return out
        return self.gather_tokens(out)

    def _repeated(self, x: Tensor) -> Tensor:
        batch, tokens, kv_heads, dim = x.shape
        times = _repetitions(kv_heads, self.group_size)
        if times == 1:
            return x
        wide = ops.broadcast_to(ops.expand_dims(x, 3), (batch, tokens, kv_heads, times, dim))
        return wide.reshape((batch, tokens, kv_heads * times, dim))


@ms.constexpr
def _repetitions(kv_heads: int, ranks: int) -> int:
    return ranks // math.gcd(kv_heads, ranks)


@ms.constexpr
def _check_heads(heads: int, ranks: int) -> None:
    if heads % ranks != 0:
        raise MsLongctxError(
            f"Ulysses attention: {heads} query heads cannot be shared out to {ranks} ranks; expected a multiple "
            "(set parallel.ulysses_degree, or use ring attention)"
        )
