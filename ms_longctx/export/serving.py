# SPDX-License-Identifier: Apache-2.0
"""A folder that MindSpore Serving 2.0.2 serves: models, methods, start script and client."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.environment import LITE, SERVING, lite_python
from ms_longctx.export.lite import Route, write_lite
from ms_longctx.export.manifest import Manifest
from ms_longctx.export.onnx import check_onnx
from ms_longctx.export.output import new_directory
from ms_longctx.export.plan import Plan
from ms_longctx.export.source import dtype_name, finish, write_model_files
from ms_longctx.models.llama import LlamaForCausalLM

SERVABLE, VERSION = "llama", "1"
_BESIDE = ("server.py", "client.py", "start.sh")


def export_serving(model: LlamaForCausalLM, folder: Path, plan: Plan, route: Route = "onnx") -> Manifest:
    """Write the servable folder.

    ``llama/servable_config.py`` has the methods ``prefill``, ``decode`` and ``close``, ``llama/1/`` the graphs as
    MindIR for Lite; ``start.sh`` starts the server and ``client.py`` asks it.

    Args:
        model: in fp32, adapters merged.
        folder: where to; it must not exist or be empty, and appears when it is complete.
        plan: one cache length, batch size 1.
        route: see :func:`ms_longctx.export.lite.export_lite`.

    Raises:
        MsLongctxError: no Python 3.7, or the plan or dtype does not suit.
    """
    plan.check(model.config)
    check_onnx(model)
    if dtype_name(model) != "fp32":
        raise MsLongctxError("--format serving needs --dtype fp32: MindSpore Lite on the CPU computes in fp32")
    if len(plan.lengths) != 1 or plan.batch_size != 1:
        raise MsLongctxError("--format serving takes one length in --shapes and --batch_size 1")
    python = lite_python()
    with new_directory(folder) as partial:
        models = partial / SERVABLE / VERSION
        models.mkdir(parents=True)
        graphs = []
        for graph in plan.graphs(model.config, "fp32", ".mindir"):
            path = models / f"{graph.role}.mindir"
            write_lite(model, plan, graph, path, python, "fp32", route)
            graphs.append(replace(graph, file=path.relative_to(partial).as_posix()))
        _write_programs(partial, model, plan)
        write_model_files(model, partial)
        versions = {"mindspore_lite": LITE, "mindspore_serving": SERVING}
        return finish(partial, model, plan, graphs, "serving", versions=versions)


def _write_programs(folder: Path, model: LlamaForCausalLM, plan: Plan) -> None:
    """The methods, the server and the client."""
    package = files("ms_longctx.export")
    for name in _BESIDE:
        shutil.copyfile(str(package / "servable" / name), folder / name)
    (folder / "start.sh").chmod(0o755)
    shutil.copyfile(str(package / "servable" / "servable_config.py"), folder / SERVABLE / "servable_config.py")
    shutil.copyfile(str(package / "session.py"), folder / SERVABLE / "session.py")
    config, length = model.config, plan.lengths[0]
    shape = {
        "layers": config.num_hidden_layers,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "batch": 1,
        "chunk": min(plan.chunk, length),
        "length": length,
        "exact": False,
        "vocab_size": config.vocab_size,
    }
    (folder / SERVABLE / "shape.json").write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")
