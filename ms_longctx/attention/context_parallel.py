# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is spread over several devices: ring, Ulysses, and Ulysses inside a ring."""

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx.attention.flash import FlashAttention
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.ring import RingAttention
from ms_longctx.attention.ulysses import UlyssesExchange
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.collectives import Group, make_all_gather
from ms_longctx.parallel.strategy import Strategy


class ContextParallelAttention(nn.Cell):
    """:class:`~ms_longctx.attention.flash.FlashAttention` where each rank holds a part of the tokens.

    The mask means the same as on one device: positions and documents are those of the whole sequence. Ranks hold the
    tokens that ``parallel.sequence.split_sequence`` gives them. All ranks of ``strategy.group("cp", rank)`` make this
    Cell and call it together.

    Ulysses gathers whole sequences of a share of the heads (see :class:`UlyssesExchange`); a ring sends keys and
    values around (see :class:`RingAttention`). In a hybrid the ranks of a Ulysses group first gather the tokens of
    their place in the ring, for a share of the heads, and each of them is in a ring with its peers of the other
    places. Bytes sent per rank are the sum of what those two state, with the ring's B, S and Hkv as it meets them, and
    ``4 B S/n (n - 1)`` for the document ids of the n places of the ring.

    Args:
        spec: the mask.
        strategy: degrees of context parallelism.
        rank: of this process among all workers.
        scale: factor of the scores; None means ``head_dim ** -0.5``.
        implementation: of the attention on one device, see ``FlashAttention``.
        length: tokens of the whole sequence without padding, where a mask without causality and documents would let
            padding be seen; None means that there is none.

    Inputs:
        - **q** (B, S/cp, H, D), **k**, **v** (B, S/cp, Hkv, D), **q_documents**, **k_documents** (B, S/cp) int32,
          **alibi_slopes** (H,) float32: as ``FlashAttention``'s, of the tokens of this rank; all heads.

    Outputs:
        (B, S/cp, H, D) like ``q``.

    Raises:
        MsLongctxError: shapes that do not fit, heads that cannot be shared out, a missing or an unused optional input.
    """

    def __init__(
        self,
        spec: MaskSpec,
        strategy: Strategy,
        rank: int,
        scale: float | None = None,
        implementation: str = "auto",
        length: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.length = length
        self.ring_degree = strategy.ring_degree
        self.exchange = UlyssesExchange(Group(strategy.group("ulysses", rank), rank), spec.documents)
        if self.ring_degree > 1:
            ring = Group(strategy.group("ring", rank), rank)
            self.gather_documents = make_all_gather(ring, 1, ordered=False)
            self.ring = RingAttention(spec, ring, scale, implementation, length)
        else:
            self.attend = FlashAttention(spec, scale, implementation)
        self.no_documents = Tensor([[0]], mstype.int32)
        self.no_slopes = Tensor([0.0], mstype.float32)
        self.offsets = None if length is None else Tensor([0, length], mstype.int32)

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor | None = None,
        k_documents: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        _check_shapes(q.shape, k.shape, v.shape)
        _check_presence("q_documents", self.spec.documents, q_documents is not None)
        _check_presence("alibi_slopes", self.spec.alibi, alibi_slopes is not None)
        if q_documents is None:
            q_documents, k_documents = self.no_documents, self.no_documents
        else:
            k_documents = q_documents if k_documents is None else k_documents
            _check_documents(q_documents.shape, k_documents.shape, q.shape[:2])
        slopes = self.no_slopes if alibi_slopes is None else alibi_slopes
        _check_slopes(slopes.shape, q.shape[2], self.spec.alibi)
        q, k, v, q_documents, k_documents, slopes = self.exchange(q, k, v, q_documents, k_documents, slopes)
        if self.ring_degree > 1:
            if self.spec.documents:
                # The order of communication, by data: what comes before, the documents, the ring.
                k_documents = self.gather_documents(ops.depend(k_documents, (q, k, v)))
                k = ops.depend(k, k_documents)
            out, _ = self.ring(q, k, v, q_documents, k_documents, slopes)
        else:
            out = self._on_one_device(q, k, v, q_documents, k_documents, slopes)
        return self.exchange.back(out)

    def _on_one_device(
        self, q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor, k_documents: Tensor, slopes: Tensor
    ) -> Tensor:
        ids, keys_ids, given_slopes = q_documents, k_documents, slopes
        if not self.spec.documents:
            ids, keys_ids = None, None
        if not self.spec.alibi:
            given_slopes = None
        return self.attend(q, k, v, ids, keys_ids, given_slopes, self.offsets)


@ms.constexpr
def _check_shapes(q: tuple, k: tuple, v: tuple) -> None:
    if len(q) != 4 or k != v or len(k) != 4 or q[:2] != k[:2] or q[3] != k[3] or q[2] % k[2] != 0:
        raise MsLongctxError(
            f"context parallel attention: q {q}, k {k}, v {v}; expected q (B, S/cp, H, D) and k, v (B, S/cp, Hkv, D) "
            "with H a multiple of Hkv"
        )


@ms.constexpr
def _check_presence(name: str, needed: bool, given: bool) -> None:
    if needed and not given:
        raise MsLongctxError(f"context parallel attention: the mask needs {name}, which is missing")
    if given and not needed:
        raise MsLongctxError(f"context parallel attention: {name} is given, but the mask (MaskSpec) does not use it")


@ms.constexpr
def _check_documents(q_documents: tuple, k_documents: tuple, expected: tuple) -> None:
    if q_documents != expected or k_documents != expected:
        raise MsLongctxError(
            f"context parallel attention: document ids have shapes {q_documents} and {k_documents}; expected {expected}"
        )


@ms.constexpr
def _check_slopes(slopes: tuple, heads: int, used: bool) -> None:
    if used and slopes != (heads,):
        raise MsLongctxError(f"context parallel attention: alibi_slopes has shape {slopes}; expected {(heads,)}")
