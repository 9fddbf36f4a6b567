# SPDX-License-Identifier: Apache-2.0
"""Runs in the readers' environment: logits and greedy tokens of quantized directories, by the programs they are for.

A job is ``{"reader": one of OPENERS, "directory": ..., "ids": file.npy, "out": file.npz, "prompt": n, "new": n,
"vllm_inputs": bool, "record": bool}``; the answer says how many matrices were read by which class. ``record`` adds the
inputs and outputs of every quantized matrix, ``<module>.x`` and ``<module>.y``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers.activations as activations

warnings.filterwarnings("ignore")
# AutoAWQ 0.2.9, the last release, imports a class that transformers 4.57 renamed; Llama does not use it.
activations.PytorchGELUTanh = activations.GELUTanh


def open_with_autoawq(directory: str) -> torch.nn.Module:
    """AutoAWQ's own loader."""
    import awq.models.base
    from awq import AutoAWQForCausalLM

    awq.models.base.get_best_device = lambda: "none"  # on CPUs it would take Intel's extension
    model = AutoAWQForCausalLM.from_quantized(
        directory, fuse_layers=False, device_map={"": "cpu"}, safetensors=True, max_seq_len=512
    ).model
    return awq_in_fp32(model)


def open_with_transformers_awq(directory: str) -> torch.nn.Module:
    """transformers' loader, which takes AutoAWQ's layers and would refuse to without a GPU."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.quantizer_awq import AwqQuantizer

    AwqQuantizer.validate_environment = lambda self, *args, **options: None
    return awq_in_fp32(AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float16))


def awq_in_fp32(model: torch.nn.Module) -> torch.nn.Module:
    """AutoAWQ computes in fp16, whose error would hide others: its layers are replaced by fp32 ones that hold what
    its own function makes of them."""
    from awq.modules.linear import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, WQLinear_GEMM):
                scales = child.scales.float()
                weight = dequantize_gemm(child.qweight, child.qzeros, scales, child.w_bit, child.group_size)
                linear = torch.nn.Linear(child.in_features, child.out_features, child.bias is not None)
                linear.weight.data = weight.T.contiguous()
                if child.bias is not None:
                    linear.bias.data = child.bias.float()
                setattr(parent, name, linear)
                found += 1
    model.read_by = f"{found} x {WQLinear_GEMM.__name__}"
    return torch.nn.Module.float(model)  # the method of quantized models refuses


def open_with_transformers(directory: str) -> torch.nn.Module:
    """The standard way, with nothing said about the kind of quantization."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32)
    schemes = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
    model.read_by = f"{len(schemes)} x {type(schemes[0]).__name__}"
    return model


OPENERS = {
    "autoawq": open_with_autoawq,
    "transformers awq": open_with_transformers_awq,
    "transformers": open_with_transformers,
}


@contextlib.contextmanager
def vllm_inputs() -> Iterator[None]:
    """compressed-tensors rounds inputs with scales of max / 127.5 and cuts the largest off at 127; vLLM's kernels
    (``dynamic_scaled_int8_quant``; in Triton ``per_token_quant_int8``) and Ascend's DynamicQuant with max / 127."""
    import compressed_tensors.quantization.lifecycle.forward as forward

    own = forward.compute_dynamic_scales_and_zp

    def by_127(value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales = value.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
        return scales, torch.zeros_like(scales)

    forward.compute_dynamic_scales_and_zp = by_127
    try:
        yield
    finally:
        forward.compute_dynamic_scales_and_zp = own


def record(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Filled by the next pass."""
    found: dict[str, np.ndarray] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        forward = module.forward  # the compressed-tensors wrapper that rounds: a hook would see rounded inputs

        def watched(x: torch.Tensor) -> torch.Tensor:
            y = forward(x)
            found[f"{name}.x"], found[f"{name}.y"] = (t.flatten(0, 1).numpy().copy() for t in (x, y))
            return y

        module.forward = watched

    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            watch(name, module)
    return found


def greedy(model: torch.nn.Module, ids: torch.Tensor, count: int) -> list[int]:
    """Tokens that continue one row of ids."""
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def do(job: dict[str, Any]) -> str:
    """One job; what read the directory."""
    model = OPENERS[job["reader"]](job["directory"]).eval()
    ids = torch.from_numpy(np.load(job["ids"])).long()
    with vllm_inputs() if job.get("vllm_inputs") else contextlib.nullcontext():
        tokens = greedy(model, ids[:1, : job["prompt"]], job["new"])
        matrices = record(model) if job.get("record") else {}
        logits = model(ids).logits.float().numpy()
    np.savez(job["out"], logits=logits, tokens=tokens, **matrices)
    return model.read_by


if __name__ == "__main__":
    with open(sys.argv[1]) as source:
        found = [do(job) for job in json.load(source)]
    with open(sys.argv[2], "w") as target:
        json.dump(found, target)
