# SPDX-License-Identifier: Apache-2.0
"""Generation with exported graphs: feeds pieces of prompts, keeps the cache, asks for token after token.

Needs NumPy only and runs under Python 3.7: MindSpore Lite and Serving of that age use this very file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class CacheSession:
    """Prompts that grow by one token a row, over graphs of one batch size and cache length.

    Args:
        run: ``run(role, inputs)`` executes the graph ``"prefill"`` or ``"decode"``; inputs and outputs are lists of
            arrays in the order of :mod:`ms_longctx.export.graphs`.
        shape: ``layers``, ``kv_heads``, ``head_dim``, ``batch`` (rows of the graphs), ``chunk`` (tokens of the
            prefill graph), ``length`` (columns of the cache), ``exact`` (true if the prefill graph also takes fewer
            tokens than ``chunk``).
        prompts: token ids of each row, none empty; at most ``batch`` rows.
        dtype: NumPy type of the cache.
        max_new_tokens: tokens that may be appended to each row.
        zeros: makes a cache from its shape and ``dtype``; its result takes slices like an array of NumPy.

    Raises:
        ValueError: too many rows, or the cache is too short.
    """

    def __init__(
        self,
        run: Callable[[str, list[Any]], list[Any]],
        shape: dict[str, Any],
        prompts: Sequence[Sequence[int]],
        dtype: Any,
        max_new_tokens: int,
        zeros: Callable[[tuple[int, ...], Any], Any] = np.zeros,
    ) -> None:
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        if len(prompts) > shape["batch"]:
            raise ValueError(f"{len(prompts)} prompts, but the graphs have {shape['batch']} rows")
        if longest > shape["length"]:
            raise ValueError(f"{longest} tokens, but the cache has {shape['length']} columns")
        self._run, self._shape, self._prompts = run, shape, prompts
        size = (shape["batch"], shape["kv_heads"], shape["length"], shape["head_dim"])
        # Zeros: what is not seen has weight 0, which would not silence a NaN.
        self._caches = [zeros(size, dtype) for _ in range(2 * shape["layers"])]
        self._used = np.zeros(shape["batch"], np.int32)

    def prefill(self) -> np.ndarray:
        """Read the prompts; logits ``(rows, V)`` fp32 of their next tokens."""
        rows: list[Any] = [None for _ in self._prompts]
        chunk = self._shape["chunk"]
        for start in range(0, max(len(prompt) for prompt in self._prompts), chunk):
            pieces = [prompt[start : start + chunk] for prompt in self._prompts]
            logits = self._prefill_piece(pieces)
            for row, piece in enumerate(pieces):
                if len(piece):
                    rows[row] = logits[row]
        return np.stack(rows)

    def step(self, tokens: Any) -> np.ndarray:
        """Append ``tokens (rows,)``; logits ``(rows, V)`` fp32 of the next ones.

        Raises:
            ValueError: the cache is full.
        """
        if self._used.max() >= self._shape["length"]:
            raise ValueError(f"the cache of {self._shape['length']} columns is full")
        ids = np.zeros((self._shape["batch"], 1), np.int32)
        ids[: len(tokens), 0] = tokens
        outputs = self._run("decode", [ids, self._used.copy(), *self._caches])
        self._append(outputs[1:], [1 for _ in tokens])
        return np.asarray(outputs[0], np.float32)[: len(tokens)]

    def _prefill_piece(self, pieces: list[Sequence[int]]) -> np.ndarray:
        width = max(len(piece) for piece in pieces) if self._shape["exact"] else self._shape["chunk"]
        ids = np.zeros((self._shape["batch"], width), np.int32)
        last = np.zeros(self._shape["batch"], np.int32)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = piece
            last[row] = max(len(piece) - 1, 0)
        outputs = self._run("prefill", [ids, self._used.copy(), last, *self._caches])
        self._append(outputs[1:], [len(piece) for piece in pieces])
        return np.asarray(outputs[0], np.float32)

    def _append(self, fresh: list[Any], counts: list[int]) -> None:
        """Write the new keys and values of each row behind those it has."""
        for index, cache in enumerate(self._caches):
            for row, count in enumerate(counts):
                start = int(self._used[row])
                cache[row, :, start : start + count] = fresh[index][row, :, :count]
        self._used[: len(counts)] += np.array(counts, np.int32)
