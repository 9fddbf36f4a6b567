# SPDX-License-Identifier: Apache-2.0
"""From a model to a quantized directory and back: what is measured, written, loaded and generated is one thing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
import transformers
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.cli.main import main
from ms_longctx.errors import MsLongctxError
from ms_longctx.generation.kernel_engine import KernelEngine, usable
from ms_longctx.models.auto import open_checkpoint
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.quant.checkpoint import QuantizedCheckpoint
from ms_longctx.quant.files import save_quantized
from ms_longctx.quant.measure import Accuracy
from ms_longctx.quant.methods import INT8_BOTH, INT8_WEIGHTS, KEPT, make_method
from ms_longctx.quant.mindir import open_weights
from ms_longctx.quant.model import QuantizedModel
from ms_longctx.quant.quantizer import Quantizer
from ms_longctx.quant.run import decide
from ms_longctx.quant.search import NotReached
from ms_longctx.tuning import LoraConfig, get_pe_model, save_adapter
from tests.models.reference import torch_logits

EXPORT = ["--format", "mindir", "--shapes", "64", "--chunk", "16"]
Made = tuple[transformers.PreTrainedModel, Path]
MakeModel = Callable[..., Made]
Tokens = Callable[[int, int], np.ndarray]


def quantized(
    folder: Path,
    tokens: Tokens,
    method: str,
    threshold: float = 0.0,
    max_kept: float = 0.25,
    rows: bool = True,
    **options: Any,
) -> tuple[QuantizedModel, Accuracy, list[str]]:
    source = open_checkpoint(folder)
    chosen = make_method(method, source.config, **options)
    return decide(Quantizer(source, chosen, tokens(40, 1), tokens(8, 2), rows), chosen, threshold, max_kept)


def dequantized_in_torch(folder: Path, original: Path) -> transformers.PreTrainedModel:
    """The quantized weights as plain fp32 numbers in transformers' model of the original configuration."""
    source = QuantizedCheckpoint(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(original, attn_implementation="eager").eval()
    state = {name: torch.from_numpy(source.read(name).astype(np.float32)) for name in source.shapes()}
    model.load_state_dict(state, strict=not source.config.tie_word_embeddings)
    return model


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "awq": ("awq", "awq", {}, {}),
    "awq tied": ("awq", "awq", {}, {"tie_word_embeddings": True}),
    "gptq packed": ("gptq", "compressed-tensors", {"group_size": 16}, {"attention_bias": True, "mlp_bias": True}),
    "rtn": ("rtn", "awq", {}, {"num_key_value_heads": 4}),
    "int8 weights": ("int8", "compressed-tensors", {}, {"attention_bias": True}),
}


@pytest.mark.parametrize(("method", "layout", "options", "fields"), CASES.values(), ids=CASES)
def test_written_model_is_the_measured_one(
    method: str,
    layout: str,
    options: dict[str, Any],
    fields: dict[str, Any],
    make_model: MakeModel,
    tokens: Tokens,
    tmp_path: Path,
) -> None:
    """Reference: transformers with the dequantized weights, 2e-4 of the largest logit, through operators and through
    the kernel that generates; perplexity and agreement as they were measured while quantizing (0.2 % and 2 tokens:
    biases and norms are fp16 in the file)."""
    original, folder = make_model(**fields)
    options = {"group": options["group_size"]} if "group_size" in options else options
    model, accuracy, _ = quantized(folder, tokens, method, **options)
    save_quantized(model, tmp_path / "out", layout, {})
    reference = dequantized_in_torch(tmp_path / "out", folder)
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "out").set_train(False)
    assert usable(ours) is kernels.available()
    held = tokens(8, 2)
    expected = torch_logits(reference, held)
    atol = 2e-4 * np.abs(expected).max()
    np.testing.assert_allclose(ours(Tensor(held)).asnumpy(), expected, rtol=0, atol=atol)
    if kernels.available():
        engine = KernelEngine(ours, held[:2, :20].tolist(), 3)
        steps = [engine.prefill(), engine.step(held[:2, 20]), engine.step(held[:2, 21])]
        np.testing.assert_allclose(np.stack(steps, 1), expected[:2, 19:22], rtol=0, atol=atol)
    logits = torch.from_numpy(expected[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(held[:, 1:]).long().flatten())
    assert accuracy.perplexity == pytest.approx(float(loss.exp()), rel=2e-3)
    agreeing = (expected.argmax(-1) == torch_logits(original, held).argmax(-1)).sum()
    assert abs(agreeing - accuracy.top1 * accuracy.tokens) <= 2
    labels = np.concatenate([held[:, 1:], np.full((8, 1), -100)], 1).astype(np.int32)
    total, count = ours.loss_sum(Tensor(held), Tensor(labels))
    assert float(total.asnumpy()) / float(count.asnumpy()) == pytest.approx(float(loss), rel=1e-4)


@pytest.mark.skipif(not kernels.available(), reason=kernels.reason())
def test_int8_with_inputs(make_model: MakeModel, tokens: Tokens, tmp_path: Path) -> None:
    """Inputs are rounded in the kernels as they were in numpy while measuring: perplexity 0.2 %. A mixture of levels
    survives the files, and the graph of the model runs too."""
    _, folder = make_model()
    model, accuracy, _ = quantized(folder, tokens, "int8", activations="token")
    assert accuracy.cosine > 0.99
    model.levels = {(0, "down"): INT8_WEIGHTS, (1, "qkv"): KEPT}
    save_quantized(model, tmp_path / "mixed", "compressed-tensors", {})
    model.levels = {}
    save_quantized(model, tmp_path / "out", "compressed-tensors", {})
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "out").set_train(False)
    held = tokens(8, 2)
    labels = np.concatenate([held[:, 1:], np.full((8, 1), -100)], 1).astype(np.int32)
    total, count = ours.loss_sum(Tensor(held), Tensor(labels))
    perplexity = np.exp(float(total.asnumpy()) / float(count.asnumpy()))
    assert perplexity == pytest.approx(accuracy.perplexity, rel=2e-3)
    source = QuantizedCheckpoint(tmp_path / "mixed")
    names = [f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in ("mlp.down_proj",)]
    assert [source.int8_inputs(name) for name in names] == [False, True]
    assert source.weight("model.layers.1.self_attn.k_proj.weight") is None
    formats = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert formats["format"] == "mixed-precision" and "model.layers.1.self_attn.k_proj" in formats["ignore"]
    mixed = LlamaForCausalLM.from_pretrained(tmp_path / "mixed").set_train(False)
    plain = mixed(Tensor(held)).asnumpy()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        graph = mixed(Tensor(held)).asnumpy()
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    np.testing.assert_allclose(graph, plain, rtol=0, atol=1e-4 * np.abs(plain).max())


def test_without_kernels_weights_are_dequantized(
    make_model: MakeModel, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make_model()
    model, _, _ = quantized(folder, tokens, "rtn")
    save_quantized(model, tmp_path / "out", "awq", {})
    monkeypatch.setattr(kernels, "available", lambda: False)
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "out").set_train(False)
    assert type(ours) is LlamaForCausalLM
    held = tokens(2, 2)
    expected = torch_logits(dequantized_in_torch(tmp_path / "out", folder), held)
    np.testing.assert_allclose(ours(Tensor(held)).asnumpy(), expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_awq_and_gptq_beat_round_to_nearest(make_model: MakeModel, tokens: Tokens) -> None:
    _, folder = make_model()
    cosine = {method: quantized(folder, tokens, method)[1].cosine for method in ("rtn", "awq", "gptq")}
    assert cosine["awq"] > cosine["rtn"] and cosine["gptq"] > cosine["rtn"], cosine


def test_search_moves_units_until_the_threshold_holds(make_model: MakeModel, tokens: Tokens) -> None:
    """The lowest levels do not hold, the chosen ones do, and the table has a line for each unit."""
    _, folder = make_model()
    _, lowest, _ = quantized(folder, tokens, "int8", rows=False, activations="token")
    threshold = lowest.top1 + 0.01
    model, accuracy, lines = quantized(folder, tokens, "int8", threshold, 1.0, rows=False, activations="token")
    assert not lowest.holds(threshold) and accuracy.holds(threshold)
    assert set(model.levels.values()) <= {INT8_WEIGHTS, KEPT} and model.levels
    assert len(lines) == 1 + 8 and sum(INT8_BOTH in line.split(maxsplit=3)[2] for line in lines[1:])


def test_out_of_reach(make_model: MakeModel, tokens: Tokens) -> None:
    _, folder = make_model()
    with pytest.raises(NotReached, match=r"--accuracy_threshold 1\.0 is out of reach .* 10% .*: perplexity"):
        quantized(folder, tokens, "rtn", 1.0, max_kept=0.1)


def test_groups_that_do_not_divide(make_model: MakeModel) -> None:
    _, folder = make_model(hidden_size=72, num_attention_heads=4, head_dim=18)
    config = open_checkpoint(folder).config
    with pytest.raises(MsLongctxError, match=r"none of the groups .* divides the input sizes 72, 96"):
        make_method("awq", config)
    assert make_method("rtn", config, 8).group == 8
    with pytest.raises(MsLongctxError, match="--group_size 128 does not divide"):
        make_method("gptq", config, 128)


@pytest.fixture
def job(make_model: MakeModel, sentencepiece_model: Path, tmp_path: Path) -> list[str]:
    """A command line without its output, for a model with a real tokenizer."""
    _, folder = make_model(vocab_size=32000, num_hidden_layers=1)
    shutil.copy(sentencepiece_model, folder / "tokenizer.model")
    data = tmp_path / "calibration.jsonl"
    rows = [{"text": f"Number {n} is followed by {n + 1} and preceded by {n - 1}. " * 8} for n in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--samples", "8", "--seq_length", "32", "--heldout_samples", "4"]
    return ["quantize", "--model", str(folder), "--calibrate_data", str(data), *sizes]


def test_command_line(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*job, "--method", "awq", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "top1" in printed and f"wrote {out}" in printed
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["accuracy"]["tokens"] == 128 and report["group_size"] == 32
    assert main(["generate", "--model", str(out), "--prompt", "Number 3", "--max_new_tokens", "2"]) == 0
    assert main([*job, "--output", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*job, "--output", str(out / "config.json" / "inside")]) == 2
    refusal = capsys.readouterr()
    assert "config.json is not a directory" in refusal.err and "layer 1" not in refusal.err  # before the work
    assert main([*job[:2], str(out), *job[3:], "--output", str(tmp_path / "twice")]) == 2
    assert "quantized already" in capsys.readouterr().err


def test_export_dequantizes(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A MindIR of an int4 directory answers as the directory, which the CPU kernels read packed."""
    packed, exported = tmp_path / "packed", tmp_path / "exported"
    assert main([*job, "--method", "awq", "--output", str(packed)]) == 0
    assert main(["export", "--model", str(packed), "--output", str(exported), *EXPORT]) == 0
    assert f"{packed} is quantized; its weights were dequantized to fp32" in capsys.readouterr().out
    answers = []
    for folder in (packed, exported):
        assert main(["generate", "--model", str(folder), "--prompt", "Number 3", "--max_new_tokens", "8"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and len(answers[0].split()) > 1


def test_adapter_on_a_quantized_model(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is merged into dequantized weights; a new one, whose B is zero, leaves the answer as it is."""
    packed, adapter = tmp_path / "packed", tmp_path / "adapter"
    assert main([*job, "--method", "gptq", "--output", str(packed)]) == 0
    model = LlamaForCausalLM.from_pretrained(packed, packed=False)
    save_adapter(get_pe_model(model, LoraConfig(r=2, target_modules=["q_proj"])), adapter)
    ask = ["generate", "--model", str(packed), "--prompt", "Number 3", "--max_new_tokens", "8"]
    capsys.readouterr()
    answers = []
    for command in (ask, [*ask, "--adapter", str(adapter)]):
        assert main(command) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and len(answers[0].split()) > 1
    assert main([*job[:2], str(adapter), *job[3:], "--output", str(tmp_path / "out")]) == 2
    assert f"{adapter} holds an adapter; merge it" in capsys.readouterr().err


def test_checkpoint_of_a_training_run(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest.json is not that of an export; the run's directory stands for its newest checkpoint."""
    step = tmp_path / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(job[2], step)
    (step / "trainer").mkdir()
    (step / "manifest.json").write_text('{"files": {}}')
    assert main(["generate", "--model", str(step), "--prompt", "Number 3", "--max_new_tokens", "2"]) == 0
    for number, model in enumerate((step, step.parents[1])):
        out = tmp_path / f"out{number}"
        assert main([*job[:2], str(model), *job[3:], "--method", "rtn", "--output", str(out)]) == 0


def test_from_mindir(make_model: MakeModel, tokens: Tokens, tmp_path: Path) -> None:
    """An export holds the same weights as the directory it was made of: every tensor is equal."""
    _, folder = make_model()
    assert main(["export", "--model", str(folder), "--output", str(tmp_path / "ir"), *EXPORT]) == 0
    source, original = open_weights(next((tmp_path / "ir").glob("*.mindir"))), open_checkpoint(folder)
    assert source.shapes() == original.shapes() and source.config == original.config
    for name in original.shapes():
        np.testing.assert_array_equal(source.read(name), original.read(name))
    quantizer = Quantizer(source, make_method("rtn", source.config), tokens(2, 1), tokens(2, 2))
    assert quantizer.run()[0].weights[1]["mlp.up_proj"].q.shape == (96, 64)


def test_sigterm_counts_as_ctrl_c(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MindSpore makes one of a Ctrl-C that meets a running graph; it may come while the files are written."""

    def written(*args: object) -> None:
        assert list(tmp_path.glob(".out.*.partial"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("ms_longctx.quant.files._write", written)
    before = signal.getsignal(signal.SIGTERM)
    assert main([*job, "--method", "rtn", "--output", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.endswith("error: interrupted\n") and signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.glob("*out*"))


def test_nothing_is_written_when_the_threshold_fails(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sub" / "out"
    command = [*job, "--method", "rtn", "--output", str(out), "--accuracy_threshold", "1", "--max_kept", "0"]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert "out of reach" in printed.err and printed.out.count("\n") == 5 and "down" in printed.out
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--accuracy_threshold", "98"], "--accuracy_threshold 98.0: expected 0 to 1"),
        (["--samples", "0"], "--samples 0: expected 1 or more"),
        (["--method", "awq", "--alpha", "0.5"], "--alpha belongs to --method int8"),
        (["--alpha", "0.5"], "--alpha is SmoothQuant's, for inputs in int8: add --activations token"),
        (["--group_size", "64"], "--group_size belongs to int4"),
        (["--layout", "awq"], "--layout awq: --method int8 is stored as compressed-tensors"),
        (["--seq_length", "5000"], "texts has the 5000 tokens of a window"),
        (["--method", "awk"], "did you mean 'awq'?"),
    ],
)
def test_mistakes(
    options: list[str], message: str, job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*job, "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
