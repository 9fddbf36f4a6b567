# SPDX-License-Identifier: Apache-2.0
"""Reference: peft over transformers. Logits within 1e-5, each gradient within 1e-4 of its largest element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import peft
import pytest
from mindspore import ParameterTuple, Tensor

from ms_longctx.errors import MsLongctxError
from ms_longctx.tuning import (
    LoraConfig,
    count_parameters,
    get_pe_model,
    load_adapter,
    merge,
    merge_and_unload,
    prepare_model,
    print_trainable_parameters,
    unmerge,
)
from ms_longctx.tuning.trained import trained_tensors
from tests.tuning.compare import file_names, our_logits, randomize, torch_logits, torch_loss

TASK = {"r": 64, "lora_alpha": 128, "target_modules": ["q_proj", "v_proj"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "q and v": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "k, rslora": {"r": 3, "lora_alpha": 7, "target_modules": ["k_proj", "o_proj"], "use_rslora": True},
    "all-linear": {"r": 5, "lora_alpha": 5, "target_modules": "all-linear"},
    "regex": {"r": 4, "target_modules": r"model\.layers\.1\..*\.(up|down|v)_proj"},
    "one layer": {"r": 4, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
    "head too": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "norm"],
    },
    "all biases": {"r": 4, "target_modules": ["q_proj", "v_proj"], "bias": "all"},
}


def adapted(make_pair: Any, tmp_path: Path, values: dict[str, Any], fused: bool = False, **base: Any) -> Any:
    """A peft model with random adapters, and ours with the same ones."""
    theirs, ours = make_pair(fused, attention_bias=values.get("bias", "none") != "none", **base)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    return theirs, load_adapter(ours, tmp_path / "adapter")


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_gradients(make_pair: Any, tmp_path: Path, batch: Any, values: dict, fused: bool) -> None:
    theirs, ours = adapted(make_pair, tmp_path, values, fused)
    ids, labels = batch
    np.testing.assert_allclose(our_logits(ours, ids), torch_logits(theirs, ids), rtol=0, atol=1e-5)
    torch_loss(theirs, ids, labels).backward()
    tensors = trained_tensors(ours)
    trained = ParameterTuple(ours.trainable_params())
    grads = ms.grad(ours, None, trained)(Tensor(ids), Tensor(labels))
    ours_by_id = {id(param): grad.asnumpy() for param, grad in zip(trained, grads, strict=True)}
    reference = file_names(theirs)
    assert tensors.keys() == reference.keys()
    for name, tensor in tensors.items():
        grad = ours_by_id[id(tensor.parameter)]
        expected = reference[name].grad.numpy()
        found = grad if tensor.rows is None else grad[tensor.rows]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_graph_mode_agrees(make_pair: Any, tmp_path: Path, batch: Any, fused: bool, graph_mode: None) -> None:
    theirs, ours = adapted(make_pair, tmp_path, CONFIGS["all-linear"], fused)
    np.testing.assert_allclose(our_logits(ours, batch[0]), torch_logits(theirs, batch[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("values", [TASK, *CONFIGS.values()], ids=["task", *CONFIGS.keys()])
def test_names_shapes_and_counts(make_pair: Any, values: dict, fused: bool, capsys: Any) -> None:
    theirs, ours = make_pair(fused, attention_bias="bias" in values)
    names = [name for name, _ in ours.parameters_and_names()]
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    assert get_pe_model(ours, LoraConfig(**values)) is ours
    expected = {name: tuple(param.shape) for name, param in file_names(theirs).items()}
    assert {name: tensor.read().shape for name, tensor in trained_tensors(ours).items()} == expected
    assert count_parameters(ours)[0] == theirs.get_nb_trainable_parameters()[0]
    base = [name for name, _ in ours.parameters_and_names() if "lora_" not in name]
    assert base == names and [p.name for _, p in ours.parameters_and_names() if "lora_" not in p.name] == names
    if "modules_to_save" not in values:  # peft counts the untrained copy of those too
        theirs.print_trainable_parameters()
        print_trainable_parameters(ours)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == lines[1]


def test_starts_as_the_base_with_the_spread_of_peft(make_pair: Any, batch: Any) -> None:
    theirs, ours = make_pair()
    before = our_logits(ours, batch[0])
    values = {"r": 48, "target_modules": ["q_proj", "down_proj"]}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    prepare_model(ours, LoraConfig(**values), seed=3)
    np.testing.assert_array_equal(our_logits(ours, batch[0]), before)
    reference = file_names(theirs)
    for name, tensor in trained_tensors(ours).items():
        mine, expected = tensor.read(), reference[name].detach().numpy()
        # uniform: about 2500 values, so the deviation is within 5 % and the extremes within 1 % of the bound
        assert mine.std() == pytest.approx(expected.std(), rel=0.05)
        assert np.abs(mine).max() == pytest.approx(np.abs(expected).max(), rel=0.01)
    first = [p.asnumpy() for p in ours.trainable_params()]
    again = [p.asnumpy() for p in get_pe_model(make_pair()[1], LoraConfig(**values), seed=3).trainable_params()]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("dtype", "eps"), [("fp32", 2**-24), ("fp16", 2**-11), ("bf16", 2**-8)])
def test_merge_rounds_once_and_unmerge_restores(
    make_pair: Any, tmp_path: Path, dtype: str, eps: float, fused: bool
) -> None:
    """Each merged weight is the exact sum (numpy, fp64) rounded to nearest: at most ``eps`` relative away."""
    _, ours = adapted(make_pair, tmp_path, CONFIGS["all-linear"], fused, dtype=dtype)
    start = {name: param.asnumpy().copy() for name, param in ours.parameters_and_names()}
    exact = {}
    for path, cell in ours.cells_and_names():
        if hasattr(cell, "parts"):
            exact[f"{path}.weight"] = total = cell.weight.astype(ms.float32).asnumpy().astype(np.float64)
            for adapter, rows in cell.parts():
                a, b = (part.weight.asnumpy().astype(np.float64) for part in (adapter.lora_A, adapter.lora_B))
                total[rows] += adapter.scaling * b @ a
    merge(ours)
    changed = dict(ours.parameters_and_names())
    assert len(exact) == (10 if fused else 14)
    for name, total in exact.items():
        merged = changed[name].astype(ms.float32).asnumpy()
        np.testing.assert_allclose(merged, total, rtol=eps * 1.01, atol=2e-7, err_msg=name)
        assert (merged != start[name].astype(np.float32)).any()
    merge(ours)  # twice is once
    unmerge(ours)
    for name, param in ours.parameters_and_names():
        assert param.asnumpy().tobytes() == start[name].tobytes(), name


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("fp16", 4e-3)])
def test_merged_logits(make_pair: Any, tmp_path: Path, batch: Any, dtype: str, bound: float, fused: bool) -> None:
    """Reference: the adapter model itself. Bound for fp16: logits of about 1 rounded through two layers."""
    _, ours = adapted(make_pair, tmp_path, CONFIGS["all-linear"], fused, dtype=dtype)
    names = [name for name, _ in ours.parameters_and_names() if "lora_" not in name]
    apart = our_logits(ours, batch[0])
    merge(ours)
    assert np.abs(our_logits(ours, batch[0]) - apart).max() < bound
    unmerge(ours)
    np.testing.assert_array_equal(our_logits(ours, batch[0]), apart)
    merge_and_unload(ours)
    assert np.abs(our_logits(ours, batch[0]) - apart).max() < bound
    assert [name for name, _ in ours.parameters_and_names()] == names
    assert [param.name for _, param in ours.parameters_and_names()] == names


def test_merged_logits_equal_peft(make_pair: Any, tmp_path: Path, batch: Any, fused: bool) -> None:
    theirs, ours = adapted(make_pair, tmp_path, CONFIGS["k, rslora"], fused)
    expected = torch_logits(theirs.merge_and_unload(), batch[0])
    np.testing.assert_allclose(our_logits(merge_and_unload(ours), batch[0]), expected, rtol=0, atol=1e-5)


def test_merge_refuses_to_overflow(make_pair: Any) -> None:
    ours = get_pe_model(make_pair(dtype="fp16")[1], LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    start = {name: param.asnumpy().copy() for name, param in ours.parameters_and_names()}
    last = ours.trainable_params()[-1]
    last.set_data(Tensor(np.full(last.shape, 1e7, np.float32)))
    start[last.name] = last.asnumpy().copy()
    with pytest.raises(MsLongctxError, match=r"layers\.1\.mlp\.down_proj\.weight: the sum .* is not finite in Float16"):
        merge(ours)
    for name, param in ours.parameters_and_names():
        np.testing.assert_array_equal(param.asnumpy(), start[name], err_msg=name)


def test_graphs_compiled_before_follow(make_pair: Any, tmp_path: Path, batch: Any, graph_mode: None) -> None:
    """A model that graph mode has compiled already gets its adapters, and stays right when they merge."""
    theirs, ours = make_pair()
    our_logits(ours, batch[0])
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS["q and v"])).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    load_adapter(ours, tmp_path / "adapter")
    expected = torch_logits(theirs, batch[0])
    for change in (lambda m: m, merge, unmerge, merge_and_unload):
        change(ours)
        np.testing.assert_allclose(our_logits(ours, batch[0]), expected, rtol=0, atol=1e-5)


def test_a_second_adapter_is_refused(make_pair: Any) -> None:
    ours = get_pe_model(make_pair()[1], LoraConfig(r=4))
    with pytest.raises(MsLongctxError, match="has adapters already"):
        get_pe_model(ours, LoraConfig(r=4))


def test_without_adapters(make_pair: Any) -> None:
    with pytest.raises(MsLongctxError, match="the model has no adapters"):
        merge(make_pair()[1])
