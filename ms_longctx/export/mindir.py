# SPDX-License-Identifier: Apache-2.0
"""MindIR: written by ``ms.export``, opened by ``ms.load`` and run as a ``GraphCell`` without the model's code."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore._c_expression import _encrypt
from mindspore.train import mind_ir_pb2 as mind_ir
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.exported import ExportedModel
from ms_longctx.export.key import ENCRYPTION, is_key
from ms_longctx.export.manifest import GraphInfo, Manifest
from ms_longctx.export.output import new_directory
from ms_longctx.export.plan import Plan
from ms_longctx.export.session import CacheSession
from ms_longctx.export.source import build_graph, dtype_name, finish, write_model_files
from ms_longctx.export.weights import WEIGHTS, WeightsFile
from ms_longctx.generation.engine import Engine
from ms_longctx.models.checkpoint import as_dtype
from ms_longctx.models.llama import LlamaForCausalLM

SUFFIX = ".mindir"
_ALIGNMENT = 64
_HEADER = int(sys.byteorder == "little").to_bytes(1, "little") + bytes(_ALIGNMENT - 1)


def export_mindir(model: LlamaForCausalLM, folder: Path, plan: Plan, key: bytes | None = None) -> Manifest:
    """Write the graphs of ``plan``, their weights, tokenizer, configuration and manifest.

    The weights are in one file beside the graphs, in the form that ``ms.export`` gives to models above 1 GB.

    Args:
        model: adapters merged.
        folder: where to; it must not exist or be empty, and appears when it is complete.
        plan: shapes.
        key: AES key; the graphs and weights are encrypted with AES-GCM.

    Raises:
        MsLongctxError: the model cannot be exported with this plan.
    """
    plan.check(model.config)
    graphs = plan.graphs(model.config, dtype_name(model), SUFFIX)
    seal = functools.partial(_encrypted, key) if key else None
    with new_directory(folder) as partial:
        with WeightsFile(partial, _ALIGNMENT, _HEADER, seal) as weights:
            for graph in graphs:
                content = _write_weights(*_export_graph(model, plan, graph), weights)
                (partial / graph.file).write_bytes(content if seal is None else seal(content))
        write_model_files(model, partial)
        return finish(partial, model, plan, graphs, "mindir", key=key)


def _export_graph(
    model: LlamaForCausalLM, plan: Plan, graph: GraphInfo
) -> tuple[mind_ir.ModelProto, dict[str, Parameter]]:
    """One graph without the content of its parameters, and these parameters by name.

    ``ms.export`` hands the graph to a function and writes what that leaves of it: nothing.
    """
    net, inputs = build_graph(model, plan, graph)
    found = mind_ir.ModelProto()

    def take(exported: mind_ir.ModelProto) -> None:
        found.CopyFrom(exported)
        exported.Clear()

    with tempfile.TemporaryDirectory() as scratch:
        ms.export(net, *inputs, file_name=f"{scratch}/nothing", file_format="MINDIR", custom_func=take)
    return found, net.parameters_dict()


def _write_weights(graph: mind_ir.ModelProto, parameters: dict[str, Parameter], weights: WeightsFile) -> bytes:
    """Put the parameters of a graph into the file; the graph that refers to them, as it is stored."""
    for described in graph.graph.parameter:
        content = parameters[described.name.split(":", 1)[-1]].data.get_bytes()
        described.external_data.location = WEIGHTS
        described.external_data.offset = weights.place(content)
        described.external_data.length = len(content)
    stored: bytes = graph.SerializeToString()
    return stored


def _encrypted(key: bytes, content: bytes) -> bytes:
    """As ``ms.export`` encrypts, for ``ms.load`` to read."""
    sealed: bytes = _encrypt(content, len(content), key, len(key), ENCRYPTION)
    return sealed


class MindIRModel(ExportedModel):
    """A directory of :func:`export_mindir` as a model that generates; nothing but its files is used.

    Args:
        folder: holds ``manifest.json``.
        key: AES key of encrypted files.
        device_cache: keep keys and values in the device's memory between tokens; ``None`` means on Ascend. (On a CPU
            arrays of NumPy do the same with less work.)

    Raises:
        MsLongctxError: not a MindIR export, or the key is missing, wrong or not wanted.
    """

    format = "mindir"

    def __init__(self, folder: str | Path, key: bytes | None = None, device_cache: bool | None = None) -> None:
        super().__init__(folder)
        self._device_cache = ms.get_context("device_target") != "CPU" if device_cache is None else device_cache
        if self.manifest.encryption and key is None:
            raise MsLongctxError(f"{folder}: its files are encrypted ({self.manifest.encryption}); give --key_file")
        if key is not None and not self.manifest.encryption:
            raise MsLongctxError(f"{folder}: its files are not encrypted; leave --key_file out")
        if key is not None and not is_key(key, self.manifest.key_check or ""):
            raise MsLongctxError(f"{folder}: the key of --key_file is not the one it was encrypted with")
        if self.manifest.dtype == "bf16" and ms.get_context("device_target") == "CPU":
            raise MsLongctxError(f"{folder}: exported in bf16, which MindSpore cannot compute on a CPU; export in fp32")
        self._key = key
        self._loaded: dict[str, nn.GraphCell] = {}

    def engine(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Engine:
        """See :class:`ExportedModel`."""
        if not self._device_cache:
            return super().engine(prompts, max_new_tokens)
        graphs, shape = self.choose(prompts, max_new_tokens)

        def run(role: str, inputs: list[Any]) -> list[Any]:
            logits, *fresh = self._call(graphs[role], inputs)
            return [logits.asnumpy(), *fresh]

        return CacheSession(run, shape, prompts, as_dtype(self.manifest.dtype), max_new_tokens, ops.zeros)

    def execute(self, graph: GraphInfo, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """See :class:`ExportedModel`."""
        return [output.asnumpy() for output in self._call(graph, inputs)]

    def _call(self, graph: GraphInfo, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run a graph on arrays or tensors."""
        tensors = [value if isinstance(value, Tensor) else Tensor.from_numpy(value) for value in inputs]
        outputs: tuple[Tensor, ...] = self.load(graph)(*tensors)
        return outputs

    def array_type(self, dtype: str) -> np.dtype[Any]:
        """See :class:`ExportedModel`; bf16 has the type that MindSpore brings."""
        if dtype != "bf16":
            return super().array_type(dtype)
        found: np.dtype[Any] = Tensor(np.zeros(1), ms.bfloat16).asnumpy().dtype
        return found

    def load(self, graph: GraphInfo) -> nn.GraphCell:
        """The graph as a callable of MindSpore; loaded once.

        Raises:
            MsLongctxError: the file is damaged.
        """
        if graph.file not in self._loaded:
            self.verify(graph.file, WEIGHTS)
            options = {"dec_key": self._key, "dec_mode": ENCRYPTION} if self._key else {}
            try:
                self._loaded[graph.file] = nn.GraphCell(ms.load(str(self.folder / graph.file), **options))
            except (RuntimeError, ValueError) as error:
                raise MsLongctxError(f"{self.folder / graph.file}: cannot be loaded: {error}") from error
        return self._loaded[graph.file]
