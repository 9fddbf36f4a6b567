# SPDX-License-Identifier: Apache-2.0
"""Runs in the readers' environment: quantized directories as AutoAWQ and compressed-tensors themselves write them.

A job is ``{"model": directory, "out": directory, "dtype": "bfloat16", ...}`` with ``"version": "gemm"`` for AutoAWQ or
``"groups": {name: fields of QuantizationScheme}`` for compressed-tensors. Rounding is to nearest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.activations as activations

activations.PytorchGELUTanh = activations.GELUTanh  # see reader.py
GROUP = 32  # of AutoAWQ


def write_autoawq(model: transformers.PreTrainedModel, out: str, version: str) -> None:
    """AutoAWQ's rounding, packing and saving, without its search, which wants a GPU."""
    import awq.quantize.quantizer as quantizer
    from awq.models._config import AwqConfig
    from awq.models.llama import LlamaAWQForCausalLM

    quantizer.get_best_device = lambda: "cpu"
    maker = quantizer.AwqQuantizer.__new__(quantizer.AwqQuantizer)
    maker.w_bit, maker.group_size, maker.zero_point, maker.version = 4, GROUP, True, version
    for layer in model.model.layers:
        linears = {name: module for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
        maker._apply_quant(layer, linears)
    config = AwqConfig(q_group_size=GROUP, version=version)
    LlamaAWQForCausalLM(model, "llama", True, model.config, config, None).save_quantized(out)


def write_compressed_tensors(model: transformers.PreTrainedModel, out: str, groups: dict[str, Any]) -> None:
    """What llm-compressor does after it has chosen scales, which are here those of smallest and largest values."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    schemes = {name: QuantizationScheme.model_validate(fields) for name, fields in groups.items()}
    apply_quantization_config(model, QuantizationConfig(config_groups=schemes, ignore=["lm_head"]))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        args = scheme.weights
        weight = module.weight.data.reshape(1, -1) if args.strategy == "tensor" else module.weight.data
        parts = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
        scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        if args.strategy == "tensor":
            scales, zeros = scales[0], zeros[0]
        module.weight_scale.data.copy_(scales)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zeros)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


@torch.no_grad()
def do(job: dict[str, Any]) -> dict[str, Any]:
    """One job; the quantization_config that was written."""
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
    if "version" in job:
        write_autoawq(model, job["out"], job["version"])
    else:
        write_compressed_tensors(model, job["out"], job["groups"])
    written: dict[str, Any] = json.loads((Path(job["out"]) / "config.json").read_text())["quantization_config"]
    return written


if __name__ == "__main__":
    found = [do(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(found))
