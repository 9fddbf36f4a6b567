# SPDX-License-Identifier: Apache-2.0
"""MindSpore Lite 2.0 under Python 3.7: converts ONNX, or runs exported graphs for a process that asks over pipes.

``lite_worker.py convert SOURCE.onnx OUTPUT ms|mindir fp32|fp16``
``lite_worker.py run FOLDER THREADS``: see :class:`ms_longctx.export.lite.LiteEngine` for what is asked and answered.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import mindspore_lite as lite
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from session import CacheSession  # noqa: E402  (beside this file, here and in exported directories)


def convert(source: str, output: str, kind: str, weights: str) -> None:
    """One ONNX file to ``.ms`` or to MindIR for Lite."""
    converter = lite.Converter()
    converter.save_type = lite.ModelType.MINDIR_LITE if kind == "ms" else lite.ModelType.MINDIR
    converter.input_format = lite.Format.NCHW  # otherwise inputs of four axes are silently transposed
    converter.weight_fp16 = weights == "fp16"
    converter.convert(fmk_type=lite.FmkType.ONNX, model_file=source, output_file=output)


class Graph:
    """A graph file in Lite.

    Args:
        path: ``.ms`` or ``.mindir``.
        threads: of the CPU.
    """

    def __init__(self, path: str, threads: int) -> None:
        context = lite.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = threads
        kind = lite.ModelType.MINDIR_LITE if path.endswith(".ms") else lite.ModelType.MINDIR
        self._model = lite.Model()
        self._model.build_from_file(path, kind, context)

    def __call__(self, arrays: list[Any]) -> list[Any]:
        inputs = self._model.get_inputs()
        for tensor, array in zip(inputs, arrays):  # noqa: B905  (Python 3.7)
            tensor.set_data_from_numpy(np.ascontiguousarray(array))
        # Copies: the arrays show memory of the outputs, which end here.
        return [output.get_data_to_numpy().copy() for output in self._model.predict(inputs)]


def serve(folder: str, threads: int, requests: Any, answers: Any) -> None:
    """Answer requests until there are none: one JSON line each; an answer is a JSON line and the logits' bytes."""
    graphs = {}  # type: dict[str, Graph]
    session = None  # type: Any
    for line in requests:
        request = json.loads(line.decode("utf-8"))
        if "prompts" in request:
            files = request["files"]
            for name in files.values():
                if name not in graphs:
                    graphs[name] = Graph(os.path.join(folder, name), threads)

            def run(role: str, arrays: list[Any], files: dict[str, str] = files) -> list[Any]:
                return graphs[files[role]](arrays)

            session = CacheSession(run, request["shape"], request["prompts"], np.float32, request["max_new_tokens"])
            logits = session.prefill()
        else:
            logits = session.step(request["tokens"])
        answers.write(json.dumps({"shape": list(logits.shape)}).encode("utf-8") + b"\n")
        answers.write(np.ascontiguousarray(logits, np.float32).tobytes())
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:6])
    else:
        # Lite prints to standard output; the answers go where it does not write.
        channel = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        serve(sys.argv[2], int(sys.argv[3]), sys.stdin.buffer, channel)
