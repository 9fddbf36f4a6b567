# SPDX-License-Identifier: Apache-2.0
"""A dry run as text for people and as plain data for programs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ms_longctx.parallel.dryrun.communication import Traffic, total_sent
from ms_longctx.parallel.dryrun.extrapolate import KINDS, Amounts, kind
from ms_longctx.parallel.dryrun.graph_file import TensorType
from ms_longctx.parallel.dryrun.ranks import describe_group, format_ranks
from ms_longctx.parallel.dryrun.simulate import ClassReport, DryRun

_LAYER = re.compile(r"(^|\.)layers\.\d+\.")

CAVEATS = (
    "memory: peak of MindSpore's simulated allocator over two steps, a lower bound: HCCL's buffers, CANN's own memory, "
    "workspace of operators and fragmentation come on top",
    "sends: bytes that leave a rank in one step with the algorithms that send the least; operators that MindSpore "
    "fuses later are counted one by one",
    "a dry run shows neither numbers nor speed, nor whether a device has each kernel, nor how HCCL behaves",
)


def as_text(dry: DryRun) -> str:
    """The whole report."""
    return "\n".join(_lines(dry))


def _lines(dry: DryRun) -> Iterator[str]:
    yield from _header(dry)
    yield ""
    yield from _summary(dry, [(report, report.compiled) for report in dry.classes])
    if len(dry.layers) > 1:
        full, counts = dry.run.model.num_hidden_layers, " and ".join(map(str, dry.layers))
        yield ""
        yield f"extrapolated to {full} layers on a straight line through the programs of {counts} layers, not compiled:"
        yield from _summary(dry, [(report, report.extrapolated) for report in dry.classes], is_compiled=False)
    yield from _too_large(dry)
    described: dict[str, int] = {}
    for report in dry.classes:
        yield ""
        yield from _class_lines(dry, report, described)
    yield ""
    yield from _match_lines(dry)
    yield ""
    yield from (f"note: {caveat}" for caveat in CAVEATS)


def _header(dry: DryRun) -> Iterator[str]:
    model, train = dry.run.model, dry.run.train
    ranks = [rank for report in dry.classes for rank in report.ranks.ranks]
    compiled = dry.layers[-1]
    cut = "" if len(dry.layers) == 1 else f", compiled with {compiled}"
    yield f"strategy  {dry.strategy.describe()}"
    heads = f"{model.num_attention_heads} heads ({model.kv_heads} kv)"
    tokens = f"{dry.run.data.seq_length} tokens, batch {train.batch_size}, {train.dtype}"
    yield f"model     {model.num_hidden_layers} layers{cut}, hidden size {model.hidden_size}, {heads}, {tokens}"
    yield f"compiler  {dry.simulator.description}"
    yield (
        f"ranks     {len(dry.classes)} compiled, which stand for {len(set(ranks))} of {dry.strategy.worker_num} "
        "(ranks that differ only in dp run the same program)"
    )


def _summary(
    dry: DryRun, rows: Sequence[tuple[ClassReport, Amounts | None]], is_compiled: bool = True
) -> Iterator[str]:
    header = ["rank", "stands for", "stage", "layers", *KINDS, "comm. ops", "sends a step", "memory at least"]
    table = [[*header, "compiled in"] if is_compiled else header]
    for report, amounts in rows:
        cells = [str(report.ranks.rank), format_ranks(report.ranks.ranks), f"{report.stage} / {dry.strategy.pp}"]
        if amounts is None:
            table.append([*cells, "does not compile"])
            continue
        cells += [str(amounts.layers), *(_bytes(amounts.parameters[name]) for name in KINDS)]
        cells += [str(sum(row.times for row in amounts.traffic)), _sent(total_sent(amounts.traffic))]
        cells.append("?" if amounts.memory_bytes is None else _bytes(amounts.memory_bytes))
        table.append([*cells, f"{report.result.compile_seconds:.1f} s"] if is_compiled else cells)
    yield from _table(table)


def _too_large(dry: DryRun) -> Iterator[str]:
    device = dry.simulator.device_bytes
    for report in dry.classes:
        amounts = report.extrapolated or report.compiled
        needed = None if amounts is None else amounts.memory_bytes
        if device is not None and needed is not None and needed > device:
            sizes = f"at least {_bytes(needed)}, a device has {_bytes(device)}"
            yield f"DOES NOT FIT: rank {report.ranks.rank} needs {sizes}"


def _class_lines(dry: DryRun, report: ClassReport, described: dict[str, int]) -> Iterator[str]:
    rank, amounts = report.ranks.rank, report.compiled
    others = [other for other in report.ranks.ranks if other != rank]
    same = f" (and {format_ranks(others)})" if others else ""
    if amounts is None:
        yield f"rank {rank}{same}, stage {report.stage}: does not compile"
        yield f"  {report.failure}"
        yield f"  log: {report.result.log}"
        return
    yield f"rank {rank}{same}, stage {report.stage}, {amounts.layers} layers"
    slices = list(_slices(report))
    first = described.setdefault("\n".join(slices), rank)
    yield from (slices if first == rank else [f"  weights: split as those of rank {first}"])
    yield from _traffic_lines(dry, amounts.traffic)
    if report.result.memory_failure:
        yield f"  memory: not simulated: {report.result.memory_failure}"
    if report.result.unknown_calls:
        yield f"  {report.result.unknown_calls} calls have an unknown target; communication in it is not counted"


def _slices(report: ClassReport) -> Iterator[str]:
    """The weights of this rank; those of different layers in one line."""
    alike: dict[tuple[str, str, str], int] = {}
    for name, tensor in report.result.parameters.items():
        if kind(name, report.result.full_shapes) == KINDS[0]:
            full = report.result.full_shapes[name]
            piece = "whole" if tensor.shape == full else str(list(tensor.shape))
            key = (_LAYER.sub(r"\1layers.*.", name), f"{tensor.dtype}{list(full)}", piece)
            alike[key] = alike.get(key, 0) + 1
    rows = [[name, full, piece, str(times)] for (name, full, piece), times in alike.items()]
    yield from ("  " + line for line in _table([["weight", "all ranks", "this rank", "times"], *rows]))


def _traffic_lines(dry: DryRun, traffic: Sequence[Traffic]) -> Iterator[str]:
    if not traffic:
        yield "  no communication"
        return
    table = [["operator", "along", "ranks", "a step", "operands", "sends"]]
    for row in traffic:
        along = describe_group(dry.strategy, row.ranks)
        times = str(row.times) if row.exact else f"{row.times} or more"
        table.append(
            [row.operator, along, format_ranks(row.ranks), times, _bytes(row.operand_bytes), _sent(row.sent_bytes)]
        )
    yield from ("  " + line for line in _table(table))


def _match_lines(dry: DryRun) -> Iterator[str]:
    found = dry.match
    if any(report.failure for report in dry.classes):
        yield "ranks that do not compile were left out when ranks were compared"
    if found.messages or found.unchecked_messages:
        open_ends = (
            f"; {found.unchecked_messages} have an end that was not compiled" if found.unchecked_messages else ""
        )
        yield f"point to point: {found.messages} messages a step are sent and received alike{open_ends}"
    if found.collectives:
        yield f"collectives: {found.collectives} a step were compared between compiled ranks of a group"
    yield from (f"MISMATCH: {problem}" for problem in found.problems)
    if not (found.messages or found.unchecked_messages or found.collectives):
        yield "no two compiled ranks communicate with each other: nothing was compared"
    elif not found.problems:
        yield "nothing that was compared contradicts itself"


def as_data(dry: DryRun) -> dict[str, Any]:
    """Everything in the report, and each parameter, for JSON; sizes are bytes, times seconds."""
    return {
        "strategy": dataclasses.asdict(dry.strategy),
        "worker_num": dry.strategy.worker_num,
        "run": dry.run.as_dict(),
        "compiler": dry.simulator.description,
        "layers": {"model": dry.run.model.num_hidden_layers, "compiled": list(dry.layers)},
        "rank_classes": [_class_data(dry, report) for report in dry.classes],
        "match": dataclasses.asdict(dry.match),
        "notes": list(CAVEATS),
        "failed": dry.failed,
    }


def _class_data(dry: DryRun, report: ClassReport) -> dict[str, Any]:
    result = report.result
    return {
        "rank": report.ranks.rank,
        "ranks": list(report.ranks.ranks),
        "stage": report.stage,
        "failure": report.failure,
        "log": str(result.log) if report.failure or result.memory_failure else None,
        "compile_seconds": result.compile_seconds,
        "process_seconds": result.seconds,
        "process_memory": result.host_bytes,
        "memory_failure": result.memory_failure,
        "unknown_calls": result.unknown_calls,
        "compiled": _amounts_data(dry, report.compiled),
        "extrapolated": _amounts_data(dry, report.extrapolated),
        "parameters": [_parameter_data(report, name, tensor) for name, tensor in result.parameters.items()],
    }


def _amounts_data(dry: DryRun, amounts: Amounts | None) -> dict[str, Any] | None:
    if amounts is None:
        return None
    rows = [{**dataclasses.asdict(row), "along": describe_group(dry.strategy, row.ranks)} for row in amounts.traffic]
    return {
        "layers": amounts.layers,
        "parameter_bytes": amounts.parameters,
        "memory_at_least": amounts.memory_bytes,
        "sent_bytes": total_sent(amounts.traffic),
        "communication": rows,
    }


def _parameter_data(report: ClassReport, name: str, tensor: TensorType) -> dict[str, Any]:
    full = report.result.full_shapes.get(name)
    return {
        "name": name,
        "kind": kind(name, report.result.full_shapes),
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "full_shape": None if full is None else list(full),
        "bytes": tensor.nbytes,
    }


def keep_logs(dry: DryRun) -> list[Path]:
    """Logs that a user may want to read: of ranks that failed."""
    return [report.result.log for report in dry.classes if report.failure or report.result.memory_failure]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max((len(row[column]) for row in rows if column < len(row)), default=0) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()


def _sent(size: int | None) -> str:
    return "?" if size is None else _bytes(size)


def _bytes(size: float) -> str:
    """``1.50 GiB``, ``12.3 MiB``, ``512 B``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
