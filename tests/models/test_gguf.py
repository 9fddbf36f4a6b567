# SPDX-License-Identifier: Apache-2.0
"""GGUF files written here from transformers models, in llama.cpp's order, with the gguf package's own
writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from mindspore import Tensor

from ms_longctx.errors import MsLongctxError
from ms_longctx.models.gguf import GgufCheckpoint, unpermute
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.nn.rope import rope_frequencies
from tests.models.reference import batch, torch_logits, torch_model

WIDE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute)."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF of the model: matrices in type ``kind``; a ``metadata`` value of ``None`` drops the key."""
    config = model.config
    values: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_theta),
        "tokenizer.ggml.bos_token_id": 3,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                array = permute(array, heads)
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[rest]}"
        else:
            stem = NAMES[stem]
        if array.ndim == 1:
            writer.add_tensor(f"{stem}.{suffix}", array)
        else:
            quantized = gguf.quantize(array, kind)
            writer.add_tensor(f"{stem}.{suffix}", quantized, raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_heads_unequal_to_kv_heads(bias: bool, tied: bool, tmp_path: Path) -> None:
    """The row order of q and k is hidden while heads == kv heads; here 8 and 2. Logits within 1e-4."""
    reference = torch_model(**WIDE, attention_bias=bias, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "m.gguf", reference)
    ids, _ = batch(103, 2, 31)
    expected = torch_logits(reference, ids)
    for fused in (False, True):
        model = LlamaForCausalLM.from_pretrained(path, parallel_attention=fused)
        assert model.config.tie_word_embeddings == tied and model.config.bos_token_id == 3
        np.testing.assert_allclose(model(Tensor(ids)).asnumpy(), expected, rtol=0, atol=1e-4)


def test_saved_as_a_hugging_face_directory(
    smollm2_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the tokenizer of the GGUF file; where it has none, the weights are saved all the same."""
    model = LlamaForCausalLM.from_pretrained(write_gguf(tmp_path / "m.gguf", torch_model(**WIDE)))
    model.save_pretrained(tmp_path / "plain")
    assert "plain is saved without a tokenizer: " in caplog.text and "holds no tokenizer" in caplog.text
    model.companions = smollm2_gguf
    model.save_pretrained(tmp_path / "with")
    names = {path.name for path in (tmp_path / "with").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "with")
    ids, _ = batch(103, 2, 31)
    np.testing.assert_allclose(model(Tensor(ids)).asnumpy(), torch_logits(opened, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("heads", "rows"), [(32, 4096), (4, 512), (3, 18)])
def test_unpermute_inverts_llama_cpp(heads: int, rows: int) -> None:
    for shape in ((rows, 5), (rows,)):
        array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(unpermute(permute(array, heads), heads), array)
        np.testing.assert_array_equal(permute(unpermute(array, heads), heads), array)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_dequantize_as_the_gguf_package(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    reference = torch_model(**WIDE)
    config = reference.config
    path = write_gguf(tmp_path / "m.gguf", reference, quantization)
    source = GgufCheckpoint(path)
    for name, tensor in reference.state_dict().items():
        array = tensor.numpy()
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        moved = "q_proj" in name or "k_proj" in name
        if array.ndim == 2:
            array = permute(array, heads) if moved else array
            array = gguf.dequantize(gguf.quantize(array, quantization), quantization)
            array = unpermute(array, heads) if moved else array
        np.testing.assert_array_equal(source.read(name), array)


def test_rope_metadata(tmp_path: Path) -> None:
    reference = torch_model(**WIDE)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    source = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", reference, metadata=linear))
    assert source.config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}
    scaling = GgufCheckpoint(write_gguf(tmp_path / "b.gguf", reference, metadata=yarn)).config.rope_scaling
    assert scaling is not None and scaling["attention_factor"] == pytest.approx(0.1 * np.log(4) + 1)
    assert (scaling["factor"], scaling["original_max_position_embeddings"]) == (4.0, 32)


def test_llama3_factors_become_equal_frequencies(tmp_path: Path) -> None:
    """Llama 3.1 files hold the divisors of the frequencies; reference: transformers' llama3 scaling."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    reference = torch_model(**WIDE, rope_scaling=scaling)
    plain = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    scaled = reference.model.rotary_emb.inv_freq.double().numpy()
    divisors = (plain / scaled).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", reference, tensors={"rope_freqs.weight": divisors})
    model = LlamaForCausalLM.from_pretrained(path)
    inv_freq, factor = rope_frequencies(model.config, 77)
    np.testing.assert_allclose(inv_freq, scaled, rtol=1e-6)
    assert factor == 1.0
    ids, _ = batch(103, 1, 77)
    np.testing.assert_allclose(model(Tensor(ids)).asnumpy(), torch_logits(reference, ids), rtol=0, atol=1e-4)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "gpt2"}, "architecture 'gpt2' is not supported"),
    "experts": ({"metadata": {"llama.expert_count": 4}}, "mixture-of-experts"),
    "missing key": ({"metadata": {"llama.block_count": None}}, "llama.block_count is missing"),
    "partial rotation": ({"metadata": {"llama.rope.dimension_count": 4}}, "only 4 of 8 features"),
    "foreign tensor": (
        {"tensors": {"blk.0.ssm_a": np.zeros(4, np.float32)}},
        "blk.0.ssm_a is not part of a Llama",
    ),
    "surplus layer": ({"metadata": {"llama.block_count": 1}}, "unexpected tensor model.layers.1"),
    "missing layer": ({"metadata": {"llama.block_count": 3}}, "no tensor model.layers.2.*and 4 more"),
    "wrong width": ({"metadata": {"llama.feed_forward_length": 57}}, "wrong shape of model.layers.0.mlp"),
    "impossible heads": (
        {"metadata": {"llama.attention.head_count_kv": 3}},
        "num_key_value_heads = 3 must divide",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_files_are_refused(case: str, tmp_path: Path) -> None:
    arguments, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", torch_model(**WIDE), **arguments)
    with pytest.raises(MsLongctxError, match=message) as caught:
        LlamaForCausalLM.from_pretrained(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: cut(p, 100000),
        lambda p: cut(p, 900),
        lambda p: cut(p, 0),
        lambda p: p.write_text("GGML" * 20),
    ],
    ids=["cut in the data", "cut in the metadata", "empty", "foreign"],
)
def test_broken_files_are_refused(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", torch_model(**WIDE))
    assert path.stat().st_size > 150000
    damage(path)
    with pytest.raises(MsLongctxError, match="m.gguf: (not a complete GGUF|ends before tensor)"):
        LlamaForCausalLM.from_pretrained(path)


def test_torch_reference_is_not_trivial() -> None:
    """Guards the comparisons above: permuting the rows of q and k wrongly changes the logits by far more."""
    reference = torch_model(**WIDE)
    ids, _ = batch(103, 2, 31)
    before = torch_logits(reference, ids)
    with torch.no_grad():
        weight = reference.model.layers[0].self_attn.k_proj.weight
        weight.copy_(torch.tensor(permute(weight.numpy().copy(), 2)))
    assert np.abs(torch_logits(reference, ids) - before).max() > 1e-2
