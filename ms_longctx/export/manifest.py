# SPDX-License-Identifier: Apache-2.0
"""``manifest.json`` of an exported directory: what the graphs take and give, and hashes of all files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_longctx import __version__
from ms_longctx.config.model import LlamaConfig
from ms_longctx.digest import sha256
from ms_longctx.errors import MsLongctxError

MANIFEST = "manifest.json"
_TRAINER = "trainer"  # state of the optimizer, which only a checkpoint has
SCHEMA = 1


@dataclass(frozen=True)
class TensorInfo:
    """An input or output: its name, shape (``None`` where it is open) and type (``int32``, ``fp32``, ...)."""

    name: str
    shape: list[int | None]
    dtype: str


@dataclass(frozen=True)
class GraphInfo:
    """One graph file.

    Args:
        role: ``prefill`` or ``decode``.
        file: name inside the directory.
        chunk: tokens a row it takes at a time; for an open prefill graph the most that are meant.
        length: columns of the cache, ``None`` if open.
        inputs, outputs: in order; see :mod:`ms_longctx.export.graphs`.
    """

    role: str
    file: str
    chunk: int
    length: int | None
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]


@dataclass(frozen=True)
class Manifest:
    """The description of an exported directory.

    Args:
        format: ``mindir``, ``onnx``, ``lite`` or ``serving``.
        config: the model's architecture.
        dtype: ``fp32``, ``fp16`` or ``bf16``: weights and cache.
        batch_size: rows of every graph.
        rope_length: longest sequence the rotary tables were made for.
        graphs: all graphs.
        files: name -> ``{"bytes": n, "sha256": hex}`` of every file but the manifest.
        encryption: ``AES-GCM`` or ``None``.
        key_check: of the key, see :func:`ms_longctx.export.key.check_of`.
        versions: of the programs that wrote the directory.
        notes: what a user must know, such as that a file was not tested here.
    """

    format: str
    config: LlamaConfig
    dtype: str
    batch_size: int
    rope_length: int
    graphs: list[GraphInfo]
    files: dict[str, dict[str, Any]]
    encryption: str | None = None
    key_check: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def graph(self, role: str, tokens: int) -> GraphInfo:
        """The graph of ``role`` with the shortest cache that holds ``tokens``.

        Raises:
            MsLongctxError: none is long enough.
        """
        found = [graph for graph in self.graphs if graph.role == role]
        fitting = [graph for graph in found if graph.length is None or graph.length >= tokens]
        if not fitting or tokens > self.rope_length:
            longest = max(graph.length or self.rope_length for graph in found)
            raise MsLongctxError(
                f"prompt and answer together have {tokens} tokens, but the exported graphs hold {longest}; lower "
                f"max_new_tokens, shorten the prompt, or export again with --shapes {tokens} or more"
            )
        return min(fitting, key=lambda graph: graph.length or self.rope_length)

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``."""
        values = {"schema": SCHEMA, **dataclasses.asdict(self)}
        values["check"] = _check_of(values)
        (folder / MANIFEST).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def is_export(path: Path) -> bool:
    """Whether ``path`` is a directory that :mod:`ms_longctx.export` wrote.

    A checkpoint of a training run has a file of the same name, which lists the checkpoint's files.
    """
    return (path / MANIFEST).is_file() and not (path / _TRAINER).is_dir()


def _check_of(values: dict[str, Any]) -> str:
    """SHA-256 of the content: graphs are run with what it says, and would fail far from the cause."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the exported directory ``path``.

    Raises:
        MsLongctxError: there is none, or it is broken or of another version of this package.
    """
    file = Path(path) / MANIFEST
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        check = values.pop("check", None)  # exports of older versions have none
        if values["schema"] == SCHEMA and check not in (None, _check_of(values)):
            raise MsLongctxError(f"{file}: was changed after the export; restore it or export the model again")
        if values.pop("schema") != SCHEMA:
            raise MsLongctxError(f"{file}: written by another version of ms_longctx; export the model again")
        graphs = [
            GraphInfo(
                **{
                    **graph,
                    "inputs": [TensorInfo(**tensor) for tensor in graph["inputs"]],
                    "outputs": [TensorInfo(**tensor) for tensor in graph["outputs"]],
                }
            )
            for graph in values.pop("graphs")
        ]
        return Manifest(config=LlamaConfig.from_dict(values.pop("config")), graphs=graphs, **values)
    except FileNotFoundError as error:
        raise MsLongctxError(
            f"{path}: no {MANIFEST} here; expected a directory that 'ms-longctx export' wrote"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MsLongctxError(f"{file}: not a manifest of an export ({type(error).__name__}: {error})") from error


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below ``folder`` except the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def verify_files(folder: Path, manifest: Manifest, names: Collection[str]) -> None:
    """Compare the files ``names`` of those in the manifest with it.

    Raises:
        MsLongctxError: a file is missing or has changed.
    """
    for name, found in manifest.files.items():
        if name not in names:
            continue
        path = folder / name
        if not path.is_file():
            raise MsLongctxError(f"{path}: missing; the export is not complete")
        if path.stat().st_size != found["bytes"] or sha256(path) != found["sha256"]:
            raise MsLongctxError(f"{path}: its SHA-256 is not that of {MANIFEST}: the file was changed or damaged")


def written_by(**programs: str) -> dict[str, str]:
    """Versions for :attr:`Manifest.versions`: this package's and those given."""
    return {"ms_longctx": __version__, **programs}
