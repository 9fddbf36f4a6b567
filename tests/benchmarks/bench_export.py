#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every export format of SmolLM2-135M-Instruct, opened by the program it is for and compared with the model.

One row a format: largest difference of logits over a prompt and 47 forced tokens, whether the greedy answer is the
same, size of the directory, and median time of a token. The reference is the model itself in fp32.

``python tests/benchmarks/bench_export.py [--only onnx] [--folder DIR]``: an export that is in DIR already is not
written again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
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

from ms_longctx import assets  # noqa: E402
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from ms_longctx.device import select_device  # noqa: E402

LENGTH, CHUNK, COUNT = 256, 64, 48
PROMPT = "Explain in two sentences why the sky is blue. " * 8


class Reference:
    """What the model itself answers.

    Attributes:
        prompt: token ids.
        tokens: its greedy answer, ``COUNT`` ids.
        logits: ``(COUNT, V)``, from which they were chosen.
        text: the answer.
        milliseconds: median of a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.model = load(None)
        self.tokenizer = tokenizer
        messages = [{"role": "user", "content": PROMPT}]
        self.prompt = tokenizer.encode_chat(messages, add_generation_prompt=True)
        from ms_longctx.generation.generate import make_engine

        self.logits, self.milliseconds = run(make_engine(self.model, [self.prompt], COUNT), None)
        self.tokens = self.logits.argmax(-1).tolist()
        self.text = tokenizer.decode(self.tokens)


def load(dtype: str | None) -> Any:
    """SmolLM2-135M-Instruct in ``dtype``."""
    from ms_longctx.generation.loading import load_model

    return load_model(assets.fetch(assets.SMOLLM2_135M), dtype=dtype or "fp32")


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
    }


def measure(name: str, reference: Reference, folder: Path) -> None:
    """Write and open one format; print its row."""
    from ms_longctx.export.open import open_export

    dtype, write = formats()[name]
    if not folder.exists():
        write(reference.model if dtype == "fp32" else load(dtype), folder)
    exported = open_export(folder, bytes(range(32)) if "encrypted" in name else None)
    logits, milliseconds = run(exported.engine([reference.prompt], COUNT), reference.tokens)
    greedy = run(exported.engine([reference.prompt], COUNT), None)[0].argmax(-1).tolist()
    same = reference.tokenizer.decode(greedy) == reference.text
    row(
        name, program(exported.format), float(np.abs(logits - reference.logits).max()), same, size(folder), milliseconds
    )


def measure_serving(reference: Reference, folder: Path) -> None:
    """Write the servable folder, serve it, and let its client answer over both transports."""
    from ms_longctx.export.environment import SERVING, lite_python
    from ms_longctx.export.plan import Plan
    from ms_longctx.export.serving import export_serving

    if not folder.exists():
        export_serving(reference.model, folder, Plan((LENGTH,), chunk=CHUNK))
    ports = {"grpc": free_port(), "rest": free_port()}
    command = [str(lite_python()), "server.py", "--grpc_port", str(ports["grpc"]), "--rest_port", str(ports["rest"])]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None and any(line.startswith("serving ") for line in server.stdout)
        for transport, port in ports.items():
            ask = [sys.executable, str(folder / "client.py"), "--transport", transport]
            ask += ["--address", f"127.0.0.1:{port}", "--prompt", PROMPT, "--max_new_tokens"]
            seconds = {}
            for count in (2, 1, COUNT):  # the first warms the server
                started = time.perf_counter()
                answer = subprocess.run([*ask, str(count)], capture_output=True, text=True, check=True).stdout
                seconds[count] = time.perf_counter() - started
            milliseconds = (seconds[COUNT] - seconds[1]) / (COUNT - 1) * 1000
            row(
                f"serving {transport}",
                f"mindspore-serving {SERVING}",
                None,
                answer.strip() == reference.text,
                size(folder),
                milliseconds,
            )
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


def row(name: str, program: str, difference: float | None, same: bool, megabytes: float, milliseconds: float) -> None:
    """Print a row of the table."""
    shown = "" if difference is None else f"{difference:.1e}"
    print(f"| {name} | {program} | {shown} | {'yes' if same else 'no'} | {megabytes:.0f} MB | {milliseconds:.0f} ms |")
    sys.stdout.flush()


def main() -> None:
    """Measure all formats, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*formats(), "serving"], help="this format only")
    parser.add_argument("--folder", type=Path, help="keep the exports there")
    args = parser.parse_args()
    select_device("CPU")
    reference = Reference(load_tokenizer(assets.fetch(assets.SMOLLM2_135M)))
    print(f"answer of the model ({reference.milliseconds:.0f} ms a token): {reference.text}")
    with tempfile.TemporaryDirectory() as scratch:
        home = args.folder or Path(scratch)
        for name in [args.only] if args.only else [*formats(), "serving"]:
            if name == "serving":
                measure_serving(reference, home / name)
            else:
                measure(name, reference, home / name)


if __name__ == "__main__":
    main()
