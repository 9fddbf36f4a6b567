# SPDX-License-Identifier: Apache-2.0
"""Runs in the readers' environment with vLLM's sources: how vLLM's own configuration classes take a ``config.json``.

A job is ``{"directory": ...}``; the answer has for each linear layer as vLLM names it (q, k and v are one) the class
that would run it, ``None`` for fp16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.awq import AWQConfig, is_layer_skipped_awq
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # of vLLM's Llama
LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class ColumnParallelLinear(torch.nn.Module):
    """vLLM looks at the name of the class; its own needs a process group."""


def do(job: dict[str, Any]) -> dict[str, str | None]:
    """One job."""
    config = json.loads((Path(job["directory"]) / "config.json").read_text())
    names = [f"model.layers.{index}.{layer}" for index in range(config["num_hidden_layers"]) for layer in LAYERS]
    values = config["quantization_config"]
    if values["quant_method"] == "awq":
        awq = AWQConfig.from_config(values)
        return {name: None if is_layer_skipped_awq(name, awq.modules_to_not_convert) else "AWQ" for name in names}
    tensors = CompressedTensorsConfig.from_config(values)
    tensors.packed_modules_mapping = FUSED
    schemes = {name: tensors.get_scheme(ColumnParallelLinear(), name) for name in names}
    return {name: None if scheme is None else type(scheme).__name__ for name, scheme in schemes.items()}


if __name__ == "__main__":
    found = [do(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(found))
