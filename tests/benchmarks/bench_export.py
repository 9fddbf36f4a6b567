#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every export format of SmolLM2-135M-Instruct, opened by the program it is for and compared with the model.

One row a format: largest difference of logits over a prompt and 47 forced tokens, whether the greedy answer is the
same (that is, each of the 48 likeliest tokens), size of the directory, and median time of a token. The first row is
the model itself in fp32, which is the reference.

``python tests/benchmarks/bench_export.py [--only onnx] [--folder DIR] [--write]``: an export that is in DIR already
is not written again; ``--write`` only writes, so that a second run can measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import free_port
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ms_longctx import __version__, assets  # noqa: E402
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from ms_longctx.device import select_device  # noqa: E402

LENGTH, CHUNK, COUNT = 256, 64, 48
CLIENT = Path(__file__).with_name("serving_client.py")
PROMPT = "Explain in two sentences why the sky is blue. " * 8


class Reference:
    """What the model itself answers.

    Attributes:
        prompt: token ids.
        tokens: its greedy answer, ``COUNT`` ids.
        logits: ``(COUNT, V)``, from which they were chosen.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from ms_longctx.generation.generate import make_engine

        messages = [{"role": "user", "content": PROMPT}]
        self.prompt = tokenizer.encode_chat(messages, add_generation_prompt=True)
        model = load("fp32")
        run(make_engine(model, [self.prompt], COUNT), None)  # compiles
        self.logits, milliseconds = run(make_engine(model, [self.prompt], COUNT), None)
        self.tokens: list[int] = self.logits.argmax(-1).tolist()
        row("the model", f"ms_longctx {__version__}", self, self.logits, None, milliseconds)


def load(dtype: str) -> Any:
    """SmolLM2-135M-Instruct in ``dtype``."""
    from ms_longctx.generation.loading import load_model

    return load_model(assets.fetch(assets.SMOLLM2_135M), dtype=dtype)


def run(engine: Any, tokens: list[int] | None) -> tuple[NDArray[np.float32], float]:
    """Logits of ``COUNT`` steps, forced to ``tokens`` or greedy, and the median milliseconds of a step."""
    logits, seconds = [engine.prefill()[0]], []
    for index in range(COUNT - 1):
        token = int(logits[-1].argmax()) if tokens is None else tokens[index]
        started = time.perf_counter()
        logits.append(engine.step(np.array([token], np.int32))[0].copy())
        seconds.append(time.perf_counter() - started)
    return np.stack(logits), statistics.median(seconds) * 1000


def formats() -> dict[str, tuple[str, Callable[[Any, Path], Any]]]:
    """Name -> dtype of the model, and how it is written."""
    from ms_longctx.export.lite import export_lite
    from ms_longctx.export.mindir import export_mindir
    from ms_longctx.export.onnx import export_onnx
    from ms_longctx.export.plan import Plan
    from ms_longctx.export.serving import export_serving

    plan, key = Plan((LENGTH,), chunk=CHUNK), bytes(range(32))
    return {
        "mindir": ("fp32", lambda model, folder: export_mindir(model, folder, plan)),
        "mindir_dynamic": ("fp32", lambda model, folder: export_mindir(model, folder, Plan((), chunk=CHUNK))),
        "mindir_encrypted": ("fp32", lambda model, folder: export_mindir(model, folder, plan, key)),
        "mindir_fp16": ("fp16", lambda model, folder: export_mindir(model, folder, plan)),
        "onnx": ("fp32", lambda model, folder: export_onnx(model, folder, plan)),
        "lite_ms": ("fp32", lambda model, folder: export_lite(model, folder, plan, "ms")),
        "lite_ms_fp16": ("fp32", lambda model, folder: export_lite(model, folder, plan, "ms", "fp16")),
        "lite_mindir": ("fp32", lambda model, folder: export_lite(model, folder, plan, "mindir")),
        "lite_rewritten": ("fp32", lambda model, folder: export_lite(model, folder, plan, "mindir", "fp32", "rewrite")),
        "serving": ("fp32", lambda model, folder: export_serving(model, folder, plan)),
    }


def write(name: str, folder: Path) -> None:
    """Write one format unless it is there."""
    dtype, export = formats()[name]
    if not folder.exists():
        export(load(dtype), folder)


def measure(name: str, reference: Reference, folder: Path) -> None:
    """Open one format and print its row."""
    from ms_longctx.export.open import open_export

    exported = open_export(folder, bytes(range(32)) if "encrypted" in name else None)
    logits, milliseconds = run(exported.engine([reference.prompt], COUNT), reference.tokens)
    row(name, program(exported.format), reference, logits, folder, milliseconds)


def measure_serving(reference: Reference, folder: Path) -> None:
    """Serve the folder and ask over both transports; print a row for each."""
    from ms_longctx.export.environment import SERVING, lite_python

    python = str(lite_python())
    ports = {"grpc": free_port(), "rest": free_port()}
    command = [python, "server.py", "--grpc_port", str(ports["grpc"]), "--rest_port", str(ports["rest"])]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None and any(line.startswith("serving ") for line in server.stdout)
        with tempfile.TemporaryDirectory() as scratch:
            request, output = Path(scratch) / "request.json", Path(scratch) / "logits.npy"
            request.write_text(json.dumps({"ids": reference.prompt, "tokens": reference.tokens[:-1]}))
            for transport, port in ports.items():
                ask = [python, str(CLIENT), str(folder), transport, f"127.0.0.1:{port}", str(request), str(output)]
                printed = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True).stdout
                version = f"mindspore-serving {SERVING}"
                row(f"serving {transport}", version, reference, np.load(output), folder, float(printed))
    finally:
        server.terminate()
        server.wait(30)


def program(kind: str) -> str:
    """The program that opens a format, and its version."""
    from ms_longctx.export.environment import LITE

    if kind == "lite":
        return f"mindspore-lite {LITE}"
    package = "onnxruntime" if kind == "onnx" else "mindspore"
    return f"{package} {importlib.metadata.version(package)}"


def size(folder: Path) -> float:
    """Megabytes in a directory."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def row(
    name: str,
    program: str,
    reference: Reference,
    logits: NDArray[np.float32],
    folder: Path | None,
    milliseconds: float,
) -> None:
    """Print a row of the table."""
    difference = float(np.abs(logits - reference.logits).max())
    same = "yes" if logits.argmax(-1).tolist() == reference.tokens else "no"
    megabytes = "" if folder is None else f"{size(folder):.0f} MB"
    print(f"| {name} | {program} | {difference:.1e} | {same} | {megabytes} | {milliseconds:.1f} ms |", flush=True)


def main() -> None:
    """Measure all formats, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=formats(), help="this format only")
    parser.add_argument("--folder", type=Path, help="keep the exports there")
    parser.add_argument("--write", action="store_true", help="write them, measure nothing")
    args = parser.parse_args()
    select_device("CPU")
    with tempfile.TemporaryDirectory() as scratch:
        home = args.folder or Path(scratch)
        names = [args.only] if args.only else list(formats())
        for name in names:
            write(name, home / name)
        if args.write:
            return
        reference = Reference(load_tokenizer(assets.fetch(assets.SMOLLM2_135M)))
        for name in names:
            if name == "serving":
                measure_serving(reference, home / name)
            else:
                measure(name, reference, home / name)


if __name__ == "__main__":
    main()
