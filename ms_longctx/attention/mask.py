# SPDX-License-Identifier: Apache-2.0
"""What a query may see, as a description: never a dense matrix of sequence length squared."""

from __future__ import annotations

from dataclasses import dataclass

from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class MaskSpec:
    """The static half of an attention mask; tensors (document ids, slopes, offsets) travel beside it.

    The query at position i sees the key at position j when all of these hold.

    Args:
        causal: ``j <= i``.
        window: ``i - j < window``; ``None`` means no limit.
        chunk: ``i // chunk == j // chunk``; ``None`` means no limit.
        alibi: adds ``slope[head] * (j - i)`` to the scores (Press et al., 2022, arXiv 2108.12409).
        documents: both tokens have the same document id, and it is not -1 (padding).
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    alibi: bool = False
    documents: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MsLongctxError(f"attention mask: {name} is {value}; expected a positive number or None")
