# SPDX-License-Identifier: Apache-2.0
"""A fallback where ONNX cannot be used: MindIR of MindSpore 2.9/2.10 rewritten to what MindSpore Lite 2.0.0 reads.

Between MindIR version 3 and version 1

* arguments of operators (``MatMul.transpose_b``, ``Concat.axis``) were attributes, not constant inputs;
* operators named their inputs and outputs in attributes;
* the operator's description had no field for the kind of primitive.

Only operators of :mod:`ms_longctx.export.graphs` are known; any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.train import mind_ir_pb2 as mind_ir

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.manifest import GraphInfo
from ms_longctx.export.plan import Plan
from ms_longctx.export.source import build_graph
from ms_longctx.models.llama import LlamaForCausalLM

_TRANSPOSE = {2: ("transpose_a", "transpose_x1", "adj_x1"), 3: ("transpose_b", "transpose_x2", "adj_x2")}
_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
_REDUCE = {2: ("keep_dims",)}


@dataclass(frozen=True)
class Rule:
    """How an operator was written in version 1.

    Args:
        inputs: names of the inputs that stay inputs.
        moved: position of an input that became an attribute -> the attribute's names in version 1.
    """

    inputs: tuple[str, ...] = ()
    moved: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


_BINARY, _UNARY = Rule(("x", "y")), Rule(("x",))
RULES = {
    "MatMul": Rule(("x1", "x2"), _TRANSPOSE),
    "BatchMatMul": Rule(("x1", "x2"), _TRANSPOSE),
    "Gather": Rule(("params", "indices", "axis"), {3: ("batch_dims",)}),
    "ReduceMean": Rule(("input_x", "axis"), _REDUCE),
    "Softmax": Rule(("x",), {1: ("axis",)}),
    "Split": Rule(("x",), {1: ("axis",), 2: ("output_num",)}),
    "Concat": Rule((), {1: ("axis",)}),
    "StridedSlice": Rule(("x", "begin", "end", "strides"), {4 + i: (name,) for i, name in enumerate(_MASKS)}),
    "Reshape": Rule(("tensor", "shape")),
    "Transpose": Rule(("x", "perm")),
    "Tile": Rule(("x", "multiples")),
    "ExpandDims": Rule(("x", "axis")),
    "Cast": Rule(("x", "dst_type")),
    "Square": Rule(("input_x",)),
    **dict.fromkeys(("Add", "Sub", "Mul", "RealDiv", "Div", "Less", "LessEqual", "Greater", "GreaterEqual"), _BINARY),
    **dict.fromkeys(("Sqrt", "Neg", "Sigmoid"), _UNARY),
}
_STRUCTURE = {"Load", "MakeTuple", "TupleGetItem", "UpdateState", "Depend", "Return", "Constant", "Parameter"}


def write_rewritten(model: LlamaForCausalLM, plan: Plan, graph: GraphInfo, path: Path) -> None:
    """Export one graph as MindIR of MindSpore 2.0.

    Raises:
        MsLongctxError: the graph has an operator without a rule.
    """
    net, inputs = build_graph(model, plan, graph)
    ms.export(net, *inputs, file_name=str(path), file_format="MINDIR", custom_func=rewrite)
    if not path.is_file():
        raise MsLongctxError(f"{path.name}: above 1 GB MindSpore writes the weights apart, which this route cannot")


def rewrite(model: Any) -> None:
    """Change a ``ModelProto`` of version 3 into one of version 1, in place.

    Raises:
        MsLongctxError: an operator without a rule, or an argument that is not a constant.
    """
    model.mind_ir_version = 1
    model.ir_version = "0.1.1"
    model.model_version = "2.0.0"
    model.user_info.clear()
    primitives = {primitive.name: primitive for primitive in model.primitives}
    written: dict[bytes, Any] = {}
    for graph in (model.graph, *model.functions):
        _GraphRewriter(graph, primitives, written).run()
    used = {
        _operator(node)[0] for graph in (model.graph, *model.functions) for node in graph.node if _is_operator(node)
    }
    kept = [primitive for primitive in primitives.values() if primitive.name in used]
    del model.primitives[:]
    model.primitives.extend([*kept, *written.values()])
    for primitive in model.primitives:
        primitive.ClearField("prim_type")


class _GraphRewriter:
    """Rewrites the nodes of one graph.

    Args:
        graph: a ``GraphProto``.
        primitives: descriptions of operators by name.
        written: new descriptions by their content; extended.
    """

    def __init__(self, graph: Any, primitives: dict[str, Any], written: dict[bytes, Any]) -> None:
        self._graph, self._primitives, self._written = graph, primitives, written
        self._producers = {name: node for node in graph.node for name in node.output}

    def run(self) -> None:
        """Rewrite all operators, then drop constants that nothing reads any more."""
        for node in self._graph.node:
            if _is_operator(node) and _operator(node)[1] not in _STRUCTURE:
                self._rewrite(node)
        read = {name for node in self._graph.node for name in node.input}
        read |= {output.name for output in self._graph.output}
        kept = [node for node in self._graph.node if node.op_type != "Constant" or node.output[0] in read]
        nodes = [mind_ir.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _rewrite(self, node: Any) -> None:
        reference, kind = _operator(node)
        if kind not in RULES:
            raise MsLongctxError(f"the rewritten MindIR knows no operator {kind}; use --lite_route onnx")
        rule = RULES[kind]
        primitive = mind_ir.PrimitiveProto(op_type=kind)
        if reference in self._primitives:
            primitive.instance_name = self._primitives[reference].instance_name
        for position, names in rule.moved.items():
            if position < len(node.input):
                self._move(kind, node.input[position], names, primitive)
        self._describe(kind, node, rule, primitive)
        inputs = [name for position, name in enumerate(node.input) if position not in rule.moved]
        del node.input[:]
        node.input.extend(inputs)
        content = primitive.SerializeToString()
        if content not in self._written:
            primitive.name = f"{kind}:v1_{len(self._written)}"
            self._written[content] = primitive
        node.op_type = f"REF::{self._written[content].name}"

    def _move(self, kind: str, source: str, names: tuple[str, ...], primitive: Any) -> None:
        """Give an operator the constant ``source`` as its attribute ``names``."""
        constant = self._producers.get(source)
        if constant is None or constant.op_type != "Constant":
            raise MsLongctxError(f"the rewritten MindIR needs constant arguments, one of {kind} is not")
        for name in names:
            attribute = primitive.attribute.add()
            attribute.CopyFrom(constant.attribute[0])
            attribute.name = name

    def _describe(self, kind: str, node: Any, rule: Rule, primitive: Any) -> None:
        """Add what version 1 says besides: names, and numbers that follow from the inputs."""
        if rule.inputs:
            _add_names(primitive, "input_names", rule.inputs)
            _add_names(primitive, "output_names", ("output",))
        if kind == "Concat":
            count = len(self._producers[node.input[0]].input)
            for name in ("N", "inputNums"):
                _add_number(primitive, name, count)
        if kind == "Split":
            values = {attribute.name: attribute.i for attribute in primitive.attribute}
            count, axis = values["output_num"], values["axis"]
            _add_number(primitive, "num_split", count)
            size = self._shape(node.input[0])[axis] // count
            sizes = primitive.attribute.add(name="size_splits", type=mind_ir.AttributeProto.TUPLE)
            for _ in range(count):
                sizes.values.add(type=mind_ir.AttributeProto.INT64).ints.append(size)

    def _shape(self, name: str) -> list[int]:
        """Shape of a node's output, as the exporter noted it."""
        for attribute in self._producers[name].attribute:
            if attribute.name == "shape" and attribute.tensors:
                return list(attribute.tensors[0].dims)
        raise MsLongctxError(f"the rewritten MindIR needs the shape of {name}, which the export does not tell")


def _is_operator(node: Any) -> bool:
    return bool(node.op_type.startswith("REF::"))


def _operator(node: Any) -> tuple[str, str]:
    """The name of the description a node refers to, and the operator."""
    reference = node.op_type.split("::", 1)[1]
    return reference, reference.split(":")[0]


def _add_names(primitive: Any, name: str, values: tuple[str, ...]) -> None:
    attribute = primitive.attribute.add(name=name, type=mind_ir.AttributeProto.LIST)
    for value in values:
        attribute.values.add(type=mind_ir.AttributeProto.STRING).strings.append(value.encode())


def _add_number(primitive: Any, name: str, value: int) -> None:
    primitive.attribute.add(name=name, type=mind_ir.AttributeProto.INT64).i = value
