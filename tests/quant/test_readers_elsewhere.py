# SPDX-License-Identifier: Apache-2.0
"""Directories that AutoAWQ 0.2.9 and compressed-tensors 0.17 (of llm-compressor) wrote are read here as their own
programs read them, or refused in one line. Environment: :mod:`tests.quant.readers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.quant.cells import QuantizedLinear
from tests.quant import readers
from tests.quant.conftest import make_llama, random_tokens

pytestmark = [pytest.mark.long, pytest.mark.skipif(not kernels.available(), reason=kernels.reason())]

FIELDS = {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 224}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def tensors(dtype: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A job of the writer: one scheme for all."""
    return {"dtype": dtype, "groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}}}


MLP = {"targets": [r"re:.*mlp\..*_proj"], "weights": INT4}
READ: dict[str, dict[str, Any]] = {
    "AutoAWQ": {"dtype": "float16", "version": "gemm"},
    "int4": tensors("bfloat16", INT4),
    "int4 with zero points": tensors("float16", INT4 | {"symmetric": False}),
    "int4 a channel": tensors("bfloat16", INT4 | {"strategy": "channel", "group_size": None}),
    "int4 with fp32 scales": tensors("float32", INT4 | {"symmetric": False}),
    "int8 weights": tensors("bfloat16", INT8),
    "int8": tensors("bfloat16", INT8, input_activations=INPUTS),
    "int8 a tensor": tensors("float16", INT8 | {"strategy": "tensor"}, input_activations=INPUTS),
    "int4 in the MLP, int8 elsewhere": {
        "dtype": "float16",
        "groups": {"group_0": {"targets": ["Linear"], "weights": INT8}, "group_1": MLP},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemv": ({"dtype": "float16", "version": "gemv"}, r"AWQ with \(bits, version, zero_point\) = \(4, 'gemv', True\)"),
    "static inputs": (
        tensors("float16", INT8, input_activations=INPUTS | {"strategy": "tensor", "dynamic": False}),
        r"input_activations with dynamic = False \(expected True\)",
    ),
    "asymmetric int8 groups": (
        tensors("float16", INT8 | {"strategy": "group", "group_size": 32, "symmetric": False}),
        "asymmetric int8 weights with the strategy 'group'",
    ),
    "fp8": (
        tensors("float16", INT8 | {"type": "float"}, input_activations=INPUTS | {"type": "float"}),
        "format = 'float-quantized'",
    ),
}
IDS = random_tokens(4, 5).reshape(16, 8)
FLOATS_HERE = ("int4 with fp32 scales",)  # fp16 would change the scales, so the kernels cannot have them


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All cases as directories, by name."""
    root = tmp_path_factory.mktemp("elsewhere")
    _, folder = make_llama(root / "model", **FIELDS, attention_bias=True)
    cases = READ | {name: job for name, (job, _) in REFUSED.items()}
    result = {name: root / f"out{index}" for index, name in enumerate(cases)}
    readers.run(
        "writer.py", [job | {"model": str(folder), "out": str(result[name])} for name, job in cases.items()], root
    )
    return result


@pytest.fixture(scope="module")
def logits(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What their own programs compute from them in fp32."""
    scratch = tmp_path_factory.mktemp("logits")
    np.save(scratch / "ids.npy", IDS)
    jobs = [
        {
            "reader": "autoawq" if "version" in job else "transformers",
            "directory": str(written[name]),
            "ids": str(scratch / "ids.npy"),
            "out": str(scratch / f"{index}.npz"),
            "prompt": 7,
            "new": 1,
            "vllm_inputs": True,
        }
        for index, (name, job) in enumerate(READ.items())
    ]
    readers.run("reader.py", jobs, scratch)
    return {name: np.load(scratch / f"{index}.npz")["logits"] for index, name in enumerate(READ)}


@pytest.mark.parametrize("name", READ)
def test_equal_logits(name: str, written: dict[str, Path], logits: dict[str, np.ndarray]) -> None:
    """2e-5 of the largest logit; with rounded inputs for three tokens in four (see ``test_rounded_inputs``). The layers
    stay packed."""
    model = LlamaForCausalLM.from_pretrained(written[name]).set_train(False)
    cells = [cell for _, cell in model.model.layers.cells_and_names()]
    packed = [cell for cell in cells if isinstance(cell, QuantizedLinear) and cell.packed.scales is not None]
    assert len(packed) == (0 if name in FLOATS_HERE else 14)
    distance = np.abs(model(Tensor(IDS)).asnumpy() - logits[name]).max(-1) / np.abs(logits[name]).max()
    inputs_too = any("input_activations" in group for group in READ[name].get("groups", {}).values())
    assert np.quantile(distance, 0.75 if inputs_too else 1) < 2e-5 and distance.max() < 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, written: dict[str, Path]) -> None:
    with pytest.raises(MsLongctxError, match=REFUSED[name][1]) as caught:
        LlamaForCausalLM.from_pretrained(written[name])
    assert "read are int4 and int8 weights of AutoAWQ" in str(caught.value)
