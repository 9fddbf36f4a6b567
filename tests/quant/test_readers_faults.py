# SPDX-License-Identifier: Apache-2.0
"""Quantized directories that are broken or of an unknown kind: one line says what is wrong and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ms_longctx.cli.main import main
from ms_longctx.errors import MsLongctxError
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.quant.checkpoint import QuantizedCheckpoint
from ms_longctx.quant.files import save_quantized
from tests.quant.conftest import make_llama, random_tokens
from tests.quant.test_quantize import quantized

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each layout: awq, packed (int4), int8 (with inputs)."""
    root = tmp_path_factory.mktemp("good")
    _, folder = make_llama(root / "model")
    int4, _, _ = quantized(folder, random_tokens, "rtn")
    save_quantized(int4, root / "awq", "awq", {})
    save_quantized(int4, root / "packed", "compressed-tensors", {})
    int8, _, _ = quantized(folder, random_tokens, "int8", activations="token", alpha=0.5)
    save_quantized(int8, root / "int8", "compressed-tensors", {})
    return {name: root / name for name in ("awq", "packed", "int8")}


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Change:
    def edit(folder: Path) -> None:
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / WEIGHTS)

    return edit


def without(name: str) -> Change:
    return edit_tensors(lambda tensors: tensors.pop(name))


def cut(name: str) -> Change:
    """Without the last row."""
    return edit_tensors(lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))


def edit_config(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change ``quantization_config``."""

    def edit(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        change(values["quantization_config"])
        (folder / "config.json").write_text(json.dumps(values))

    return edit


def set_config(**fields: Any) -> Change:
    return edit_config(lambda values: values.update(fields))


def set_group(section: str | None, **fields: Any) -> Change:
    """Change the first config_group, or a section of it."""

    def change(values: dict[str, Any]) -> None:
        group = values["config_groups"]["group_0"]
        (group[section] if section else group).update(fields)

    return edit_config(change)


def replace_config(**fields: Any) -> Change:
    def change(values: dict[str, Any]) -> None:
        values.clear()
        values.update(fields)

    return edit_config(change)


def halve(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def smaller_model(folder: Path) -> None:
    """config.json of another size."""
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": 64}))


FAULTS: dict[str, tuple[str, Change, str]] = {
    "half of the file": ("awq", halve, rf"{WEIGHTS}: not a complete safetensors file .* copy or download it again"),
    "no weights": ("awq", lambda folder: (folder / WEIGHTS).unlink(), f"expected {WEIGHTS} or"),
    "no scales": ("awq", without(f"{DOWN}.scales"), f"no tensor {DOWN}.scales"),
    "no zero points": ("awq", without(f"{DOWN}.qzeros"), f"no tensor {DOWN}.qzeros"),
    "no int8 scales": ("int8", without(f"{DOWN}.weight_scale"), f"no tensor {DOWN}.weight_scale"),
    "no packed scales": ("packed", without(f"{DOWN}.weight_scale"), f"no tensor {DOWN}.weight_scale"),
    "no shape": ("packed", without(f"{DOWN}.weight_shape"), f"no tensor {DOWN}.weight_shape"),
    "a matrix less": ("int8", without(f"{DOWN}.weight"), f"no tensor {DOWN}.weight; the model is not complete"),
    "short scales": ("awq", cut(f"{DOWN}.scales"), rf"{DOWN} do not fit together \(qzeros is .*, expected"),
    "short values": ("packed", cut(f"{DOWN}.weight_packed"), rf"{DOWN} do not fit together \(weight_packed is"),
    "short int8 scales": ("int8", cut(f"{DOWN}.weight_scale"), rf"{DOWN} do not fit together \(weight_scale has 63"),
    "another size": ("int8", smaller_model, r"mlp\.(gate|up|down)_proj\.weight has shape .*, expected"),
    "gptq": (
        "awq",
        replace_config(quant_method="gptq", bits=4, group_size=32, desc_act=True),
        "config.json: quantization_config: quant_method = 'gptq' is not supported; read are int4 and int8",
    ),
    "bitsandbytes": ("awq", replace_config(load_in_4bit=True, quant_method="bitsandbytes"), "'bitsandbytes'"),
    "3 bits": ("awq", set_config(bits=3), r"AWQ with \(bits, version, zero_point\) = \(3, 'gemm', True\)"),
    "gemv": ("awq", set_config(version="GEMV"), r"\(4, 'gemv', True\)"),
    "fp8 format": ("int8", set_config(format="float-quantized"), "format = 'float-quantized' is not supported"),
    "fp8 weights": ("int8", set_group("weights", type="float"), "weights of type float with 8 bits"),
    "act-order": ("packed", set_group("weights", actorder="group"), r"ordered by activations \(actorder = 'group'\)"),
    "static inputs": ("int8", set_group("input_activations", dynamic=False), "with dynamic = False"),
    "tensor inputs": ("int8", set_group("input_activations", strategy="tensor"), "with strategy = 'tensor'"),
    "asymmetric inputs": ("int8", set_group("input_activations", symmetric=False), "with symmetric = False"),
    "int4 with inputs": (
        "packed",
        set_group(None, input_activations={"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}),
        "int8 input_activations beside weights of 4 bits",
    ),
    "cache": ("int8", set_config(kv_cache_scheme={"num_bits": 8, "type": "float"}), "kv_cache_scheme = "),
    "rotations": ("int8", set_config(transform_config={"config_groups": {"u": {}}}), "transform_config = "),
    "no groups": ("int8", set_config(config_groups={}), "quantization_config has no config_groups"),
    "no targets": ("int8", edit_config(lambda v: v["config_groups"]["group_0"].pop("targets")), "misuses 'targets'"),
    "others targeted": (
        "packed",
        set_group(None, targets=["re:.*experts"]),
        r"no config_group .* has model\.layers\.0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, good: dict[str, Path], tmp_path: Path) -> None:
    kind, change, message = FAULTS[fault]
    folder = tmp_path / kind
    shutil.copytree(good[kind], folder)
    change(folder)
    with pytest.raises(MsLongctxError, match=message) as caught:
        LlamaForCausalLM.from_pretrained(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_command_line(good: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["awq"], folder)
    halve(folder)
    assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 2
    assert capsys.readouterr().err.count("not a complete safetensors file") == 1


def test_scales_of_embedding_and_head_are_cut(good: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["int8"], folder)
    (folder / "row_scales.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(MsLongctxError, match=r"row_scales.npz: not complete"):
        QuantizedCheckpoint(folder)


def test_names_before_patterns_before_classes(good: dict[str, Path], tmp_path: Path) -> None:
    """A group for all Linear comes first in the file, and yet counts last."""
    folder = tmp_path / "model"
    shutil.copytree(good["int8"], folder)

    def change(values: dict[str, Any]) -> None:
        general = values["config_groups"]["group_0"]
        plain = general | {"input_activations": None}
        values["config_groups"] = {
            "all": general,
            "pattern": plain | {"targets": [r"re:.*layers\.1\.mlp.*"]},
            "name": general | {"targets": [DOWN]},
        }

    edit_config(change)(folder)
    source = QuantizedCheckpoint(folder)
    names = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", DOWN]
    assert [source.int8_inputs(f"{name}.weight") for name in names] == [True, False, True]


def test_scales_that_fp16_cannot_hold(good: dict[str, Path], tmp_path: Path) -> None:
    """Other writers keep scales in fp32: the values are then exactly ``(q - zero) * scale`` in fp32."""
    folder = tmp_path / "model"
    shutil.copytree(good["packed"], folder)
    before = QuantizedCheckpoint(folder).read(f"{DOWN}.weight")
    factor = np.float32(1.0001)

    def change(tensors: dict[str, np.ndarray]) -> None:
        name = f"{DOWN}.weight_scale"
        tensors[name] = tensors[name].astype(np.float32) * factor

    edit_tensors(change)(folder)
    after = QuantizedCheckpoint(folder)
    np.testing.assert_allclose(after.read(f"{DOWN}.weight"), before * factor, rtol=3e-7)
    weight = after.weight(f"{DOWN}.weight")
    assert weight is not None and weight.packed() is None
    LlamaForCausalLM.from_pretrained(folder)
