# SPDX-License-Identifier: Apache-2.0
"""ONNX (opset 11, static shapes) by MindSpore's exporter, with the names of the manifest instead of node numbers."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.exported import ExportedModel
from ms_longctx.export.manifest import GraphInfo, Manifest
from ms_longctx.export.output import new_directory
from ms_longctx.export.plan import Plan
from ms_longctx.export.source import build_graph, dtype_name, finish, write_model_files
from ms_longctx.export.weights import WEIGHTS, WeightsFile
from ms_longctx.models.llama import LlamaForCausalLM

SUFFIX = ".onnx"
MAX_BYTES = 2 * 10**9  # a protobuf message ends at 2 GiB
_ALIGNMENT = 4096  # of pages: onnxruntime maps the file
_SMALL = 1024  # bytes of a tensor that stays in its graph
_EXTERNAL = 1  # TensorProto.DataLocation
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {"string": _FIELD.TYPE_STRING, "bytes": _FIELD.TYPE_BYTES, "int32": _FIELD.TYPE_INT32}


def export_onnx(model: LlamaForCausalLM, folder: Path, plan: Plan) -> Manifest:
    """Write the graphs of ``plan``, tokenizer, configuration and manifest; see :func:`write_onnx`.

    Raises:
        MsLongctxError: as :func:`check_onnx`.
    """
    plan.check(model.config)
    check_onnx(model)
    graphs = plan.graphs(model.config, dtype_name(model), SUFFIX)
    with new_directory(folder) as partial:
        with WeightsFile(partial, _ALIGNMENT) as weights:
            for graph in graphs:
                write_onnx(model, plan, graph, partial / graph.file, weights)
        write_model_files(model, partial)
        return finish(partial, model, plan, graphs, "onnx", notes=["ONNX opset 11, static shapes"])


def check_onnx(model: LlamaForCausalLM) -> None:
    """Refuse what MindSpore's exporter or the format cannot hold.

    Raises:
        MsLongctxError: bf16, or weights above 2 GB.
    """
    if dtype_name(model) == "bf16":
        raise MsLongctxError("MindSpore's ONNX exporter has no bf16; export in fp32 or fp16 (--dtype)")
    size = sum(parameter.nbytes for parameter in {id(p): p for p in model.get_parameters()}.values())
    if size > MAX_BYTES:
        raise MsLongctxError(
            f"the weights have {size / 1e9:.1f} GB, an ONNX file holds at most 2 GB; export in fp16, or --format mindir"
        )


def write_onnx(
    model: LlamaForCausalLM, plan: Plan, graph: GraphInfo, path: Path, weights: WeightsFile | None = None
) -> None:
    """Export one graph to ``path``, its weights into it or into the file ``weights`` beside it."""
    net, inputs = build_graph(model, plan, graph)
    content = _model_message()()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported = Path(scratch) / path.name
        ms.export(net, *inputs, file_name=str(exported), file_format="ONNX")
        content.ParseFromString(exported.read_bytes())
    _rename(content.graph, [info.name for info in graph.inputs], [info.name for info in graph.outputs])
    if weights is not None:
        _move_weights(content.graph, weights)
    path.write_bytes(content.SerializeToString())


class OnnxModel(ExportedModel):
    """A directory of :func:`export_onnx` as a model that generates, in onnxruntime on the CPU.

    Args:
        folder: holds ``manifest.json``.

    Raises:
        MsLongctxError: not an ONNX export, or onnxruntime is not installed.
    """

    format = "onnx"

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        if importlib.util.find_spec("onnxruntime") is None:
            raise MsLongctxError(f"{folder}: an ONNX export runs in onnxruntime; pip install 'onnxruntime<2'")
        self._loaded: dict[str, Any] = {}

    def execute(self, graph: GraphInfo, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """See :class:`ExportedModel`."""
        feeds = {info.name: array for info, array in zip(graph.inputs, inputs, strict=True)}
        outputs: list[NDArray[Any]] = self.load(graph).run([info.name for info in graph.outputs], feeds)
        return outputs

    def load(self, graph: GraphInfo) -> Any:
        """The graph as an ``onnxruntime.InferenceSession``; loaded once."""
        if graph.file not in self._loaded:
            import onnxruntime

            self.verify(graph.file, WEIGHTS)
            path = str(self.folder / graph.file)
            self._loaded[graph.file] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return self._loaded[graph.file]


def _move_weights(graph: Any, weights: WeightsFile) -> None:
    """Let the tensors of a graph refer to the file; the smallest stay."""
    for tensor in graph.initializer:
        size = len(tensor.raw_data)
        if size < _SMALL:
            continue
        place = weights.place(tensor.raw_data)
        for key, value in (("location", WEIGHTS), ("offset", str(place)), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
        tensor.data_location = _EXTERNAL
        tensor.ClearField("raw_data")


def _rename(graph: Any, inputs: list[str], outputs: list[str]) -> None:
    """Give the values that go in and out of a graph their names of the manifest."""
    values = [*graph.input, *graph.output]
    names = dict(zip((value.name for value in values), [*inputs, *outputs], strict=True))
    for value in values:
        value.name = names[value.name]
    for node in graph.node:
        for ends in (node.input, node.output):
            for index, name in enumerate(ends):
                if name in names:
                    ends[index] = names[name]


@functools.cache
def _model_message() -> Any:
    """The part of ONNX's ``ModelProto`` with names and weights; protobuf keeps all other fields as they are."""
    file = descriptor_pb2.FileDescriptorProto(name="ms_longctx_onnx.proto", package="ms_longctx_onnx", syntax="proto2")
    _add_message(file, "Value", {"name": (1, "string", False)})
    _add_message(file, "Node", {"input": (1, "string", True), "output": (2, "string", True)})
    _add_message(file, "Entry", {"key": (1, "string", False), "value": (2, "string", False)})
    tensor = {"raw_data": (9, "bytes", False), "external_data": (13, "Entry", True)}
    _add_message(file, "Tensor", {**tensor, "data_location": (14, "int32", False)})
    parts = {"node": (1, "Node", True), "initializer": (5, "Tensor", True)}
    _add_message(file, "Graph", {**parts, "input": (11, "Value", True), "output": (12, "Value", True)})
    _add_message(file, "Model", {"graph": (7, "Graph", False)})
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ms_longctx_onnx.Model"))


def _add_message(file: Any, name: str, fields: Mapping[str, tuple[int, str, bool]]) -> None:
    """Describe a message whose fields (number, type or name of a message, repeated) are given."""
    message = file.message_type.add(name=name)
    for field_name, (number, kind, repeated) in fields.items():
        field = message.field.add(name=field_name, number=number)
        field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
        field.type = _TYPES.get(kind, field.TYPE_MESSAGE)
        if kind not in _TYPES:
            field.type_name = f".ms_longctx_onnx.{kind}"
