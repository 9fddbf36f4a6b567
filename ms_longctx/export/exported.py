# SPDX-License-Identifier: Apache-2.0
"""Exported directories as models that generate: what MindIR, ONNX and Lite have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.export.manifest import GraphInfo, Manifest, read_manifest, verify_files
from ms_longctx.export.session import CacheSession
from ms_longctx.generation.engine import Engine

_TYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype(np.int32),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
}


class ExportedModel:
    """The files of an export in the place of a model (:class:`ms_longctx.generation.engine.EngineSource`).

    Subclasses execute graphs.

    Args:
        folder: holds ``manifest.json``.

    Raises:
        MsLongctxError: not an export of this class's format.
    """

    format = ""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        if self.manifest.format != self.format:
            raise MsLongctxError(
                f"{folder}: an export of format {self.manifest.format}, expected one of format {self.format}"
            )
        self._verified: set[str] = set()

    @property
    def config(self) -> LlamaConfig:
        """The architecture."""
        return self.manifest.config

    def engine(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Engine:
        """An engine for prompts of this length.

        Raises:
            MsLongctxError: more rows or tokens than the graphs hold.
        """
        graphs, shape = self.choose(prompts, max_new_tokens)

        def run(role: str, inputs: list[NDArray[Any]]) -> list[NDArray[Any]]:
            return self.execute(graphs[role], inputs)

        return CacheSession(run, shape, prompts, self.array_type(self.manifest.dtype), max_new_tokens)

    def choose(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[dict[str, GraphInfo], dict[str, Any]]:
        """The graphs for these prompts by role, and the shape that :class:`CacheSession` wants.

        Raises:
            MsLongctxError: as :meth:`engine`.
        """
        tokens = max(len(prompt) for prompt in prompts) + max_new_tokens
        graphs = {role: self.manifest.graph(role, tokens) for role in ("prefill", "decode")}
        if len(prompts) > self.manifest.batch_size:
            raise MsLongctxError(
                f"{len(prompts)} prompts side by side, but {self.folder} was exported for "
                f"{self.manifest.batch_size}; export again with --batch_size {len(prompts)}, or answer fewer at a time"
            )
        prefill = graphs["prefill"]
        shape = {
            "layers": self.config.num_hidden_layers,
            "kv_heads": self.config.kv_heads,
            "head_dim": self.config.head_size,
            "batch": self.manifest.batch_size,
            "chunk": prefill.chunk,
            "length": prefill.length or tokens,
            "exact": prefill.length is None,
        }
        return graphs, shape

    def run(self, graph: GraphInfo, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Execute one graph on arrays in the order of its manifest.

        Raises:
            MsLongctxError: an input has another shape or type than the graph takes.
        """
        if len(inputs) != len(graph.inputs):
            raise MsLongctxError(f"{graph.file}: {len(inputs)} inputs given, it takes {len(graph.inputs)}")
        for info, array in zip(graph.inputs, inputs, strict=True):
            fits = len(info.shape) == array.ndim and all(
                size in (None, found) for size, found in zip(info.shape, array.shape, strict=True)
            )
            if not fits or array.dtype != self.array_type(info.dtype):
                raise MsLongctxError(
                    f"{graph.file}: input {info.name} is {array.dtype} {list(array.shape)}; it takes {info.dtype} "
                    f"{['any' if size is None else size for size in info.shape]}"
                )
        return self.execute(graph, inputs)

    def verify(self, *names: str) -> None:
        """Compare files with the manifest before they are used, each once.

        Raises:
            MsLongctxError: a file is missing or has changed.
        """
        verify_files(self.folder, self.manifest, set(names) - self._verified)
        self._verified.update(names)

    def execute(self, graph: GraphInfo, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Execute one graph on arrays that fit it."""
        raise NotImplementedError

    def array_type(self, dtype: str) -> np.dtype[Any]:
        """NumPy's type of a tensor of ``dtype``."""
        return _TYPES[dtype]
