# SPDX-License-Identifier: Apache-2.0
"""MindSpore Lite 2.0.0: conversion through ONNX, the rewritten MindIR as a fallback, and generation in Lite itself.

Lite 2.0.0 refuses the MindIR of MindSpore 2.9 and later by its version. It runs under Python 3.7 in a process of its
own, see :mod:`ms_longctx.export.lite_worker`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.environment import LITE, lite_python
from ms_longctx.export.exported import ExportedModel
from ms_longctx.export.manifest import GraphInfo, Manifest, verify_files
from ms_longctx.export.on_device import write_converter_files
from ms_longctx.export.onnx import check_onnx, write_onnx
from ms_longctx.export.output import new_directory
from ms_longctx.export.plan import Plan
from ms_longctx.export.rewrite import write_rewritten
from ms_longctx.export.source import dtype_name, finish, write_model_files
from ms_longctx.models.llama import LlamaForCausalLM

LiteType = Literal["ms", "mindir"]
Weights = Literal["fp32", "fp16"]
Route = Literal["onnx", "rewrite"]
REWRITTEN = "fallback: MindIR rewritten to the version of MindSpore 2.0 by ms_longctx, not by a MindSpore converter"
WORKER = "lite_worker.py"
_HELPERS = (WORKER, "session.py")


def export_lite(
    model: LlamaForCausalLM,
    folder: Path,
    plan: Plan,
    kind: LiteType = "ms",
    weights: Weights = "fp32",
    route: Route = "onnx",
) -> Manifest:
    """Write graphs for Lite with tokenizer, configuration and manifest.

    Args:
        model: in fp32, adapters merged.
        folder: where to; it must not exist or be empty, and appears when it is complete.
        plan: static shapes.
        kind: ``ms`` (Lite's own format) or ``mindir`` (for Lite's cloud runtime and Serving).
        weights: ``fp16`` stores them in half the space; Lite computes in fp32 all the same.
        route: ``onnx`` through Lite's converter; ``rewrite`` changes MindSpore's MindIR to the older version.

    Raises:
        MsLongctxError: no Python 3.7, another dtype than fp32, or the route cannot give what is wanted.
    """
    plan.check(model.config)
    check_onnx(model)
    if dtype_name(model) != "fp32":
        raise MsLongctxError("Lite files are made of an fp32 model; --lite_weights fp16 stores their weights in fp16")
    if route == "rewrite" and (kind, weights) != ("mindir", "fp32"):
        raise MsLongctxError("--lite_route rewrite gives --lite_type mindir with --lite_weights fp32 only")
    python = lite_python()
    with new_directory(folder) as partial:
        graphs = plan.graphs(model.config, "fp32", f".{kind}")
        for graph in graphs:
            write_lite(model, plan, graph, partial / graph.file, python, weights, route)
        for helper in _HELPERS:
            shutil.copyfile(str(files("ms_longctx.export") / helper), partial / helper)
        write_converter_files(partial, plan, model.config)
        write_model_files(model, partial)
        notes = [REWRITTEN] if route == "rewrite" else []
        notes.append("converter files for newer Lite on Ascend were not tested: see convert_for_ascend.sh")
        return finish(partial, model, plan, graphs, "lite", versions={"mindspore_lite": LITE}, notes=notes)


def write_lite(
    model: LlamaForCausalLM,
    plan: Plan,
    graph: GraphInfo,
    path: Path,
    python: Path,
    weights: Weights = "fp32",
    route: Route = "onnx",
) -> None:
    """Write one graph for Lite to ``path``, whose suffix says the type."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        if route == "rewrite":
            write_rewritten(model, plan, graph, made)
        else:
            source = made.with_suffix(".onnx")
            write_onnx(model, plan, graph, source)
            _convert(python, source, made, weights)
        shutil.copyfile(made, path)  # MindSpore and Lite make files for the owner alone


def _convert(python: Path, source: Path, path: Path, weights: Weights) -> None:
    """One ONNX file to ``path`` by Lite's converter."""
    command = [str(python), _worker(), "convert", str(source), str(path.with_suffix("")), path.suffix[1:], weights]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if result.returncode or not path.is_file():
        lines = [line for line in (result.stdout + result.stderr).splitlines() if "ERROR" in line or "Error" in line]
        raise MsLongctxError(
            f"{path.name}: MindSpore Lite {LITE} cannot convert it: {(lines or ['no reason given'])[-1]}"
        )


class LiteModel(ExportedModel):
    """A directory of :func:`export_lite` as a model that generates, executed by MindSpore Lite 2.0.0.

    Args:
        folder: holds ``manifest.json``.

    Raises:
        MsLongctxError: not a Lite export, or no Python 3.7.
    """

    format = "lite"

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._python = lite_python()

    def engine(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> LiteEngine:
        """See :class:`ExportedModel`."""
        graphs, shape = self.choose(prompts, max_new_tokens)
        verify_files(self.folder, self.manifest, [graph.file for graph in graphs.values()])
        request = {
            "prompts": [list(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "shape": shape,
            "files": {role: graph.file for role, graph in graphs.items()},
        }
        return LiteEngine(self._python, self.folder, request)


class LiteEngine:
    """An engine (:class:`ms_longctx.generation.engine.Engine`) in a process that runs MindSpore Lite.

    Args:
        python: has ``mindspore_lite``.
        folder: of the export.
        request: what the worker is asked first: ``prompts``, ``max_new_tokens``, ``shape``, ``files``.
    """

    def __init__(self, python: Path, folder: Path, request: dict[str, Any]) -> None:
        self._request = request
        self._log = tempfile.TemporaryFile()
        threads = str(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        self._process = subprocess.Popen(
            [str(python), _worker(), "run", str(folder), threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
        )

    def prefill(self) -> NDArray[np.float32]:
        """See :class:`ms_longctx.generation.engine.Engine`."""
        return self._ask(self._request)

    def step(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """See :class:`ms_longctx.generation.engine.Engine`."""
        return self._ask({"tokens": np.asarray(tokens).tolist()})

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def __del__(self) -> None:
        if self._process.poll() is None:
            self.close()

    def _ask(self, request: dict[str, Any]) -> NDArray[np.float32]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            shape = json.loads(self._process.stdout.readline())["shape"]
        except (OSError, ValueError) as error:
            raise MsLongctxError(f"MindSpore Lite stopped: {self._last_words()}") from error
        data = self._process.stdout.read(4 * int(np.prod(shape)))
        return np.frombuffer(data, np.float32).reshape(shape)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"


def _worker() -> str:
    return str(files("ms_longctx.export") / WORKER)


def _environment() -> dict[str, str]:
    """The environment of Lite's process: nothing of this Python, and only errors in the log."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "GLOG_v": "3"}
