# SPDX-License-Identifier: Apache-2.0
"""The kernel that holds a whole Llama: every logit of a generation against transformers.

Reference everywhere: transformers 4.57, fp32, the whole sequence in one pass without a cache (for ALiBi, which
its Llama lacks, our model of MindSpore operators). Tolerance: 2e-5 absolute on logits of standard deviation 0.5-2.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor, nn
from numpy.typing import NDArray

from ms_longctx import kernels
from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.generation import kernel_engine
from ms_longctx.generation.kernel_engine import KernelEngine, usable
from ms_longctx.models.llama import LlamaForCausalLM
from tests.models.reference import SCALINGS, TINY, same_model, torch_logits, torch_model

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())

ATOL = 2e-5
MODELS: dict[str, dict[str, Any]] = {
    "5/5": {},
    "8/2": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6},
    "6/3 tied": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": True},
    "4/1 bias": {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "12/1 window": {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 18, "sliding_window": 9},
}


def logits_of(model: LlamaForCausalLM, rows: list[list[int]], new: int) -> NDArray[np.float32]:
    """Logits ``(rows, new + 1, V)`` when the last ``new`` tokens of each row come one by one."""
    engine = KernelEngine(model, [row[: len(row) - new] for row in rows], new)
    steps = [engine.prefill()]
    for i in range(new):
        steps.append(engine.step(np.array([row[len(row) - new + i] for row in rows], np.int32)))
    return np.stack(steps, axis=1)


def random_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TINY["vocab_size"], length).tolist() for length in lengths]


def reference(model: torch.nn.Module, row: list[int], new: int) -> NDArray[np.float32]:
    return torch_logits(model, np.array([row]))[0, len(row) - new - 1 :]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("prompt", [1, 7, 31])
def test_equals_transformers(fields: dict[str, Any], fused: bool, prompt: int, tmp_path: Path) -> None:
    """A prompt of one token or in the few-rows path or in matrix products; queries of 1 to 12 heads a key."""
    expected_from = torch_model(**fields)
    model = same_model(expected_from, tmp_path, parallel_attention=fused)
    assert usable(model)
    (row,) = random_rows([prompt + 6])
    np.testing.assert_allclose(logits_of(model, [row], 6)[0], reference(expected_from, row, 6), rtol=0, atol=ATOL)


def test_prompt_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 over a prompt of 53, and more keys than one unit of work of the decoding kernel (128)."""
    expected_from = torch_model(**MODELS["8/2"], max_position_embeddings=512)
    model = same_model(expected_from, tmp_path)
    for length, chunk in ((53, 16), (301, 1024)):
        monkeypatch.setattr(kernel_engine, "CHUNK", chunk)
        (row,) = random_rows([length + 3])
        np.testing.assert_allclose(logits_of(model, [row], 3)[0], reference(expected_from, row, 3), rtol=0, atol=ATOL)


@pytest.mark.parametrize("rows", [2, 5, 11])
@pytest.mark.parametrize("fields", [MODELS["6/3 tied"], MODELS["12/1 window"]], ids=["6/3", "window"])
def test_left_padded_rows_equal_single_rows(rows: int, fields: dict[str, Any], tmp_path: Path) -> None:
    expected_from = torch_model(**fields)
    model = same_model(expected_from, tmp_path)
    prompts = random_rows([5 + 7 * i % 23 for i in range(rows)])
    together = logits_of(model, prompts, 4)
    for row, logits in zip(prompts, together, strict=True):
        np.testing.assert_allclose(logits, reference(expected_from, row, 4), rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["linear", "yarn", "yarn-mscale", "longrope", "llama3", "dynamic"])
def test_rotary_scalings(name: str, tmp_path: Path) -> None:
    """Past the original length of 32. ``dynamic``: with the frequencies of the whole length from the start."""
    expected_from = torch_model(head_dim=10, rope_scaling=SCALINGS[name], max_position_embeddings=128)
    model = same_model(expected_from, tmp_path)
    (row,) = random_rows([70])
    np.testing.assert_allclose(logits_of(model, [row], 5)[0], reference(expected_from, row, 5), rtol=0, atol=ATOL)


def alibi_model() -> LlamaForCausalLM:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    fields = {key: value for key, value in TINY.items() if key in LlamaConfig.__dataclass_fields__}
    return LlamaForCausalLM(LlamaConfig(**{**fields, "position_embedding": "alibi"})).set_train(False)


def test_alibi_equals_operators() -> None:
    """Reference: the model as MindSpore operators, whose ALiBi is tested against transformers' Bloom."""
    model = alibi_model()
    (row,) = random_rows([40])
    expected = model(Tensor(np.array([row], np.int32))).asnumpy()[0, 33:]
    np.testing.assert_allclose(logits_of(model, [row], 6)[0], expected, rtol=0, atol=ATOL)


def test_adapters_and_half_precision_are_left_to_operators(tmp_path: Path) -> None:
    reference_model = torch_model()
    assert not usable(same_model(reference_model, tmp_path / "half", dtype=ms.float16))
    model = same_model(reference_model, tmp_path / "adapted")

    class Wrapped(nn.Cell):
        def __init__(self, inner: nn.Cell) -> None:
            super().__init__()
            self.weight, self.bias = inner.weight, inner.bias

    assert usable(model)
    model.model.layers[1].self_attn.v_proj = Wrapped(model.model.layers[1].self_attn.v_proj)
    assert not usable(model)


def test_bad_token_and_full_cache(tmp_path: Path) -> None:
    model = same_model(torch_model(), tmp_path)
    with pytest.raises(MsLongctxError, match=r"outside the model's vocabulary \(0 to 102\)"):
        KernelEngine(model, [[5, 103]], 1).prefill()
    engine = KernelEngine(alibi_model(), [[1, 2]], 1)
    engine.prefill()
    engine.step(np.array([3], np.int32))
    with pytest.raises(MsLongctxError, match="4 tokens do not fit into a cache of 3"):
        engine.step(np.array([3], np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("isa", [pytest.param("baseline", marks=pytest.mark.long), "avx2"])
def test_other_instruction_sets(isa: str) -> None:
    """The same tests on the variants that this CPU would not choose."""
    selected = ["equals_transformers and 31", "left_padded"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(
        [*command, "-k", " or ".join(f"({part})" for part in selected)],
        env={**os.environ, "MS_LONGCTX_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
