# SPDX-License-Identifier: Apache-2.0
"""Reads a compiled program from the text file that MindSpore writes of it (``MS_DEV_SAVE_GRAPHS``).

The file has the parameters with the shapes of this rank's slices, and one section a sub-graph. A program with a
pipeline calls the same forward and backward sub-graphs once a micro batch, so what a step does is what each
sub-graph does times how often it is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ms_longctx.errors import MsLongctxError

_BYTES = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Int16": 2, "UInt16": 2, "Float16": 2, "BFloat16": 2, "Int32": 4, "UInt32": 4,
    "Float32": 4, "Int64": 8, "UInt64": 8, "Float64": 8, "Complex64": 8, "Complex128": 16,
}  # fmt: skip

_ENTRY = re.compile(r"# IR entry: @(\S+)")
_PARAMETER = re.compile(r"%para\d+_\S+: <Ref\[Tensor\[(\w+)\]\], \(([\d, ]*)\), ref_key=([^,>]+)")
_SUBGRAPH = re.compile(r"subgraph @([^\s(]+)\(")
_NODE = re.compile(r"  %\d+\([^)]*\) = (.*)")
_OPERATOR = re.compile(r"(?:PrimFunc_)?(\w+)\(")
_CALL = re.compile(r"call @([^\s(]+)\(")
_CLOSURE_CALL = re.compile(r"%\w+\[([^\]]*)\]\(")
_UNKNOWN_CALL = re.compile(r"%\w+\(")
_GROUP = re.compile(r'[{ ]group: "([^"]*)"')
_TENSOR = re.compile(r"<(?:Ref\[)?Tensor\[(\w+)\]\]?, \(([-\d, ]*)\)|<Tuple\[(.*?)\], TupleShape\((.*?\))\)")
_MEMBER = re.compile(r"Tensor\[(\w+)\]\]?(?:\*(\d+))?")


class GraphFileError(MsLongctxError):
    """MindSpore's file of a compiled program is not what is known of its format."""


@dataclass(frozen=True)
class TensorType:
    """Type and shape of a tensor, as one rank has it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        if self.dtype not in _BYTES:
            raise GraphFileError(f"tensors of type {self.dtype} have a size that is not known here")
        return math.prod(self.shape) * _BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Operator:
    """One communication operator of a sub-graph.

    Args:
        name: MindSpore's, such as ``AllReduce``.
        group: name of its communication group.
        attributes: of the primitive, as text.
        inputs: tensors that it takes; those of tuples one by one.
    """

    name: str
    group: str
    attributes: dict[str, str]
    inputs: tuple[TensorType, ...]

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The integers in an attribute: ``I64(3)`` and ``(3, 5)`` and ``[3]``."""
        return tuple(int(text) for text in re.findall(r"-?\b\d+\b", self.attributes.get(attribute, "")))


@dataclass
class _Graph:
    operators: list[Operator] = field(default_factory=list)
    calls: list[tuple[str, bool]] = field(default_factory=list)  # callee, and whether it is one of several


@dataclass(frozen=True)
class Execution:
    """An operator and how often a step runs it; ``exact`` is false inside a branch or a loop."""

    operator: Operator
    times: int
    exact: bool


@dataclass
class CompiledGraph:
    """The program of one rank: its parameters and, with :meth:`communication`, what it sends."""

    parameters: dict[str, TensorType]
    entry: str
    unknown_calls: int
    _graphs: dict[str, _Graph]

    def communication(self) -> list[Execution]:
        """Every communication operator with its number of executions in one step, callers before callees."""
        counts = self._executions()
        return [Execution(operator, *counts[name]) for name in counts for operator in self._graphs[name].operators]

    def _executions(self) -> dict[str, tuple[int, bool]]:
        counts: dict[str, tuple[int, bool]] = {name: (0, True) for name in self._callers_first()}
        position = {name: place for place, name in enumerate(counts)}
        counts[self.entry] = (1, True)
        for name in list(counts):
            times, exact = counts[name]
            for callee, is_branch in self._graphs[name].calls:
                before, was_exact = counts[callee]
                if position[callee] <= position[name]:  # a loop: how often it runs depends on the data
                    counts[callee] = (max(before, 1), False)
                else:
                    counts[callee] = (before + times, was_exact and exact and not is_branch)
        return counts

    def _callers_first(self) -> list[str]:
        done: list[str] = []
        seen = {self.entry}
        # Depth first without recursion: a graph is done after all that it calls.
        stack: list[tuple[str, Iterator[tuple[str, bool]]]] = [(self.entry, iter(self._graphs[self.entry].calls))]
        while stack:
            name, calls = stack[-1]
            callee = next(calls, None)
            if callee is None:
                done.append(name)
                stack.pop()
            elif callee[0] not in seen:
                seen.add(callee[0])
                stack.append((callee[0], iter(self._graphs[callee[0]].calls)))
        return done[::-1]


def find_graph_file(folder: Path, rank: int) -> Path:
    """The file of the largest program that MindSpore compiled for ``rank`` below ``folder``.

    Small functions that run before a training step are compiled on their own and have files too.

    Raises:
        GraphFileError: there is none.
    """
    files = list((folder / f"rank_{rank}").glob("*_validate_*.ir"))
    if not files:
        raise GraphFileError(f"MindSpore wrote no graph of rank {rank} below {folder}")
    return max(files, key=lambda path: path.stat().st_size)


def read_graph_file(path: Path) -> CompiledGraph:
    """Read a ``*_validate_*.ir`` file.

    Raises:
        GraphFileError: it is not such a file.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        return _read(lines, path)


def _read(lines: Iterable[str], path: Path) -> CompiledGraph:
    entry = ""
    parameters: dict[str, TensorType] = {}
    graphs: dict[str, _Graph] = {}
    graph: _Graph | None = None
    waiting: Operator | None = None
    unknown_calls = 0
    for line in lines:
        if graph is None:
            if found := _SUBGRAPH.match(line):
                graph = graphs.setdefault(found[1], _Graph())
            elif found := _PARAMETER.match(line):
                parameters[found[3]] = TensorType(found[1], _shape(found[2]))
            elif found := _ENTRY.match(line):
                entry = found[1]
        elif waiting is not None:
            inputs = tuple(_tensors(line.partition(") -> (")[0]))
            graph.operators.append(Operator(waiting.name, waiting.group, waiting.attributes, inputs))
            waiting = None
        elif found := _NODE.match(line):
            waiting = _operator(found[1])
            calls, is_known = _calls(found[1])
            graph.calls += calls
            unknown_calls += not is_known
        elif line.startswith("}"):
            graph = None
    called = {callee for known in graphs.values() for callee, _ in known.calls}
    if entry not in graphs or not called <= set(graphs):
        raise GraphFileError(f"{path}: expected a graph that MindSpore saved after its pass 'validate'")
    return CompiledGraph(parameters, entry, unknown_calls, graphs)


def _operator(node: str) -> Operator | None:
    """The operator of a node if it belongs to a communication group."""
    name = _OPERATOR.match(node)
    attributes = node.partition("primitive_attrs: ")[2].partition(" cnode_")[0]
    group = _GROUP.search(attributes)
    if name is None or group is None:
        return None
    return Operator(name[1], group[1], _attributes(attributes), ())


def _attributes(text: str) -> dict[str, str]:
    """``{a: I64(1), b: ((1, 2), [3])}`` as a dictionary of texts."""
    found: dict[str, str] = {}
    depth, start = 0, 1
    for place, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if (character == "," and depth == 1) or (character == "}" and depth == 0):
            name, _, value = text[start:place].partition(": ")
            found[name.strip()] = value
            start = place + 1
        if depth == 0:
            break
    return found


def _calls(node: str) -> tuple[list[tuple[str, bool]], bool]:
    """Sub-graphs that a node calls, and whether all of them are known."""
    if found := _CALL.match(node):
        return [(found[1], False)], True
    if found := _CLOSURE_CALL.match(node):
        # "@@graph", "@Partial(@graph)" or "@FuncUnion(@one, @other)", of which one runs.
        callees = re.findall(r"@([^\s,()@]+)(?=[,)]|$)", found[1])
        return [(callee, len(callees) > 1) for callee in callees], bool(callees)
    return [], not _UNKNOWN_CALL.match(node)


def _tensors(text: str) -> Iterator[TensorType]:
    for dtype, shape, members, shapes in _TENSOR.findall(text):
        if dtype:
            yield TensorType(dtype, _shape(shape))
            continue
        dtypes = [name for name, times in _MEMBER.findall(members) for _ in range(int(times or 1))]
        for member, inner in zip(dtypes, re.findall(r"\(([-\d, ]*)\)", shapes), strict=False):
            yield TensorType(member, _shape(inner))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
