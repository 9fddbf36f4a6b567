# SPDX-License-Identifier: Apache-2.0
"""The mask of attention as a description. No dense (Sq, Sk) tensor is ever part of an interface."""

from __future__ import annotations

from dataclasses import dataclass

from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees, and what is added to their scores. Conditions are joined by *and*.

    A query at position ``i`` sees a key at position ``j`` if and only if

    - ``j <= i`` where ``causal``;
    - ``i - j < window`` where ``window`` is given (so ``window=1`` with ``causal`` is the token itself);
    - ``i // chunk == j // chunk`` where ``chunk`` is given;
    - both carry the same document id, and that id is not -1 (padding), where ``documents``.

    ``alibi`` adds ``slope_h * (j - i)`` to the scaled score of head ``h`` (Press et al. 2022, arXiv:2108.12409).
    A query that sees no key yields output 0 and log-sum-exp ``-inf``.

    Tensors travel beside the description: positions, document ids and slopes are arguments of the attention.

    Raises:
        MsLongctxError: ``window`` or ``chunk`` is less than 1.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    alibi: bool = False
    documents: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise MsLongctxError(f"MaskSpec.{name} is {value!r}; expected None or a whole number of at least 1")
