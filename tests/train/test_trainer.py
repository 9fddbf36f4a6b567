# SPDX-License-Identifier: Apache-2.0
"""The training loop in one process: records, skipped steps, evaluation, resuming, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from ms_longctx.config import DataConfig, load_config
from ms_longctx.data.dataset import create_dataset
from ms_longctx.data.manifest import load_manifest
from ms_longctx.errors import MsLongctxError
from ms_longctx.train.checkpoint import DamagedCheckpointError
from ms_longctx.train.metrics_log import read_metrics
from ms_longctx.train.stream import open_training_set
from ms_longctx.train.trainer import NO_TOKENS, NOT_FINITE, Trainer

Arguments = Callable[..., list[str]]
MakeSet = Callable[..., Path]


class Crash(Exception):
    """Stands for the death of the process."""


def make_trainer(arguments: list[str], overwrite: bool = False) -> Trainer:
    return Trainer(load_config(None, arguments), overwrite)


def train(arguments: list[str], overwrite: bool = False, crash_after: int | None = None) -> Path:
    """Train, or leave the loop right after a step without saving; gives the output directory."""
    trainer = make_trainer(arguments, overwrite)
    if crash_after is not None:
        step = trainer._step

        def step_and_crash(batches: Any) -> None:
            step(batches)
            if trainer.progress.step == crash_after:
                raise Crash

        trainer._step = step_and_crash  # type: ignore[method-assign]
        with pytest.raises(Crash):
            trainer.train()
    else:
        trainer.train()
    return trainer.directory.path


def records(output: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    timed = {"time", "step_seconds", "tokens_per_second", "mfu", "memory_bytes"}
    lines = read_metrics(output / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def same_checkpoint(first: Path, second: Path) -> None:
    """Weights, moments, position, loss scale and random state are equal bit for bit."""
    names = sorted(path.relative_to(first).as_posix() for path in first.rglob("*.safetensors"))
    assert names and names == sorted(path.relative_to(second).as_posix() for path in second.rglob("*.safetensors"))
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    states = [json.loads((path / "trainer" / "state.json").read_text()) for path in (first, second)]
    for key in ("progress", "optimizer", "loss_scale", "random"):
        assert states[0][key] == states[1][key], key


@pytest.fixture(scope="module")
def lm_set(make_set: MakeSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("数据 a-b.c") / "lm-1.mindrecord")


@pytest.fixture(scope="module")
def sft_set(make_set: MakeSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("sft") / "sft.mindrecord", layout="sft")


LORA = {"lora__enabled": "true", "lora__r": 3, "lora__lora_alpha": 6, "lora__lora_dropout": 0.3}
VARIANTS: dict[str, dict[str, Any]] = {
    # 23 samples: 10 steps of 2 x 3 cross the borders of two epochs in the middle of a step.
    "accumulation": {"train__gradient_accumulation_steps": 2, "train__batch_size": 3},
    "lora": {**LORA, "train__objective": "sft", "train__recompute": "true"},
    # The scale is too high at first: the state of the loss scale matters.
    "fp16": {"train__dtype": "fp16", "train__loss_scale_init": 2.0**26, "train__loss_scale_window": 4},
    "in_order": {"data__shuffle": "false", "optimizer__scheduler": "constant", "data__drop_last": "false"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.long if name == "in_order" else ()) for name in VARIANTS]
)
def test_ten_steps_equal_four_plus_six(
    variant: str, lm_set: Path, sft_set: Path, tmp_path: Path, arguments: Arguments
) -> None:
    changes = {**VARIANTS[variant], "train__save_steps": 4}
    data = sft_set if variant == "lora" else lm_set
    whole = train(arguments(data, tmp_path / "whole", **changes))
    broken = train(arguments(data, tmp_path / "broken", **changes), crash_after=6)
    assert [record["step"] for record in records(broken)] == [1, 2, 3, 4, 5, 6]
    train([*arguments(data, tmp_path / "broken", **changes), "--train.resume=latest"])
    assert records(broken) == records(whole)
    assert [record["step"] for record in records(whole)] == list(range(1, 11))
    same_checkpoint(whole / "checkpoints" / "step-00000010", broken / "checkpoints" / "step-00000010")
    losses = [record["loss"] for record in records(whole) if "skipped" not in record]
    assert losses[-1] < losses[0]


def test_checkpoint_loads_in_transformers(lm_set: Path, tmp_path: Path, arguments: Arguments) -> None:
    """Reference: transformers' own loader and loss on the same samples. Tolerance 1e-4."""
    output = train(arguments(lm_set, tmp_path / "run", train__max_steps=2, data__eval_path=lm_set))
    checkpoint = output / "checkpoints" / "step-00000002"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = make_trainer(
        [*arguments(lm_set, output, data__eval_path=lm_set, train__max_steps=2), "--train.resume=latest"]
    )
    expected, tokens = 0.0, 0
    for batch in create_dataset(lm_set, 1, 31, shuffle=False).create_dict_iterator(1, output_numpy=True):
        length = int((batch["document_ids"] == 0).sum())
        labels = torch.from_numpy(batch["labels"][0, :length]).long()
        with torch.no_grad():
            logits = model(torch.from_numpy(batch["input_ids"][:, :length]).long()).logits[0]
        expected += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        tokens += int((labels != -100).sum())
    loss, counted = trainer.evaluate()
    trainer.directory.close()
    assert counted == tokens and loss == pytest.approx(expected / tokens, abs=1e-4)
    assert records(output)[-1] == {"step": 2, "eval_loss": pytest.approx(loss), "eval_tokens": tokens}


def test_adapter_checkpoint_loads_in_peft(sft_set: Path, tmp_path: Path, arguments: Arguments) -> None:
    """The checkpoint of a LoRA run holds the adapter in peft's format and no base weights."""
    base = train(arguments(sft_set, tmp_path / "base", train__objective="sft", train__max_steps=1))
    pretrained = base / "checkpoints" / "step-00000001"
    run = arguments(sft_set, tmp_path / "lora", train__objective="sft", train__max_steps=2, **LORA)
    run = [argument for argument in run if not argument.startswith("--model.")]
    output = train([*run, f"--model.pretrained={pretrained}"])
    checkpoint = output / "checkpoints" / "step-00000002"
    assert {path.name for path in checkpoint.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "trainer",
    }
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), checkpoint)
    stored = load_file(checkpoint / "adapter_model.safetensors")
    loaded = {name: value for name, value in adapted.state_dict().items() if "lora_" in name}
    assert len(stored) == len(loaded) == 8
    for name, value in loaded.items():
        assert np.array_equal(value.numpy(), stored[name.replace(".default", "")])
    assert all(value.any() for value in stored.values())


def test_evaluation_every_few_steps(lm_set: Path, tmp_path: Path, arguments: Arguments) -> None:
    output = train(arguments(lm_set, tmp_path / "run", data__eval_path=lm_set, train__eval_steps=2, train__max_steps=5))
    evaluations = [record for record in records(output) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [2, 4, 5]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert (output / "loss.png").stat().st_size > 10_000


def test_diverged_run_keeps_its_checkpoints_and_fails(lm_set: Path, arguments: Arguments, tmp_path: Path) -> None:
    """A learning rate of 1e30 ruins the weights in step 2; what was saved before stays, and nothing after."""
    changes = {"optimizer__learning_rate": 1e30, "optimizer__scheduler": "constant", "train__save_steps": 1}
    trainer = make_trainer(arguments(lm_set, tmp_path / "run", **changes))
    with pytest.raises(
        MsLongctxError, match=r"last 9 steps .*diverged and is not saved; .* of step 1\. Lower optimizer"
    ):
        trainer.train()
    assert trainer.directory.store.steps() == [1]


def test_resumed_run_keeps_the_tokenizer_of_its_first_weights(
    lm_set: Path, arguments: Arguments, tmp_path: Path
) -> None:
    """Also when the checkpoint it goes on from has been deleted."""
    train(arguments(lm_set, tmp_path / "first", train__max_steps=1))
    base = tmp_path / "first/checkpoints/step-00000001"
    (base / "tokenizer_config.json").write_text("{}")
    given = {"model__pretrained": base, "train__save_steps": 1, "train__keep_checkpoints": 1}
    train(arguments(lm_set, tmp_path / "second", train__max_steps=1, **given))
    output = train(arguments(lm_set, tmp_path / "second", train__max_steps=4, train__resume="latest", **given))
    assert [path.name for path in (output / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert (output / "checkpoints/step-00000004/tokenizer_config.json").read_text() == "{}"


def test_adapters_of_random_weights_are_pointed_out(
    lm_set: Path, arguments: Arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(arguments(lm_set, tmp_path / "run", lora__enabled="true", lora__r=2)).directory.close()
    assert "trained on random weights" in caplog.text


@pytest.mark.parametrize(("more", "warned"), [(0, False), (4, True)])
def test_length_above_that_of_the_set_is_pointed_out(
    lm_set: Path, caplog: pytest.LogCaptureFixture, more: int, warned: bool
) -> None:
    prepared = load_manifest(lm_set).seq_length
    open_training_set(DataConfig(path=str(lm_set), seq_length=prepared + more, layout="lm"))
    message = f"data.seq_length is {prepared + more}, but {lm_set} was prepared with {prepared}"
    assert (message in caplog.text) == warned


def test_batches_without_targets_are_skipped(
    make_set: MakeSet, tmp_path: Path, arguments: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples 3, 4, 5 fill the second step and have no supervised token."""
    data = make_set(tmp_path / "masked.mindrecord", samples=9, masked=(3, 4, 5))
    output = train(arguments(data, tmp_path / "run", data__shuffle="false", train__max_steps=3))
    lines = records(output)
    assert [line.get("skipped") for line in lines] == [None, NO_TOKENS, None]
    assert lines[1]["loss"] is None and lines[1]["supervised_tokens"] == 0
    assert f"step 2 skipped: {NO_TOKENS}" in capsys.readouterr().out
    state = json.loads((output / "checkpoints" / "step-00000003" / "trainer" / "state.json").read_text())
    assert state["optimizer"]["step"] == 2 and state["progress"]["step"] == 3


def test_loss_scale_halves_down_to_its_floor_and_the_run_ends(
    lm_set: Path, tmp_path: Path, arguments: Arguments
) -> None:
    changes = {
        "train__dtype": "fp16",
        "train__loss_scale_init": 2.0**40,
        "train__loss_scale_min": 2.0**38,
        "train__max_skipped_steps": 4,
    }
    with pytest.raises(MsLongctxError, match="4 optimizer steps in a row had inf or NaN gradients"):
        train(arguments(lm_set, tmp_path / "run", **changes))
    lines = records(tmp_path / "run")
    assert [line["loss_scale"] for line in lines] == [2.0**40, 2.0**39, 2.0**38, 2.0**38]
    assert {line["skipped"] for line in lines} == {NOT_FINITE}
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_damaged_checkpoint(
    lm_set: Path, tmp_path: Path, arguments: Arguments, caplog: pytest.LogCaptureFixture
) -> None:
    """``auto`` falls back to the checkpoint before it and ends bit for bit where it should; a path fails."""
    run = arguments(lm_set, tmp_path / "run", train__save_steps=2, train__max_steps=6)
    output = train(run)
    kept = shutil.copytree(output / "checkpoints" / "step-00000006", tmp_path / "kept")
    shard = output / "checkpoints" / "step-00000006" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DamagedCheckpointError, match=r"step-00000006/model\.safetensors: truncated or changed"):
        make_trainer([*run, f"--train.resume={shard.parent}"])
    train([*run, "--train.resume=auto"])
    assert "falling back to the checkpoint before it" in caplog.text
    same_checkpoint(output / "checkpoints" / "step-00000006", kept)


def test_changed_settings(
    lm_set: Path, make_set: MakeSet, tmp_path: Path, arguments: Arguments, caplog: pytest.LogCaptureFixture
) -> None:
    train(arguments(lm_set, tmp_path / "run", train__max_steps=2))

    def resume(data: Path = lm_set, **changes: Any) -> list[str]:
        return [*arguments(data, tmp_path / "run", **changes), "--train.resume=latest"]

    with pytest.raises(MsLongctxError, match="model.hidden_size was 40, now it is 50.*another architecture"):
        make_trainer(resume(model__hidden_size=50))
    with pytest.raises(MsLongctxError, match="lora.enabled was False, now it is True"):
        make_trainer(resume(**LORA))
    with pytest.raises(MsLongctxError, match="optimizer.weight_decay was 0.1, now it is 0.3"):
        make_trainer(resume(optimizer__weight_decay=0.3))
    other = make_set(tmp_path / "other.mindrecord", samples=20)
    trainer = make_trainer(resume(other, train__batch_size=4, optimizer__learning_rate=0.02))
    trainer.directory.close()
    for change in ("train.batch_size was 3, now it is 4", "optimizer.learning_rate was 0.01, now it is 0.02"):
        assert f"resume: {change}: the run goes on, but not as it would have" in caplog.text
    assert "the training set is another one (samples was 23, now 20" in caplog.text
    caplog.clear()
    moved = shutil.copytree(lm_set.parent, tmp_path / "moved") / lm_set.name
    trainer = make_trainer(resume(moved, train__max_steps=2, train__log_steps=7))
    trainer.directory.close()
    assert "resume:" not in caplog.text


def test_output_directory_of_another_run(lm_set: Path, tmp_path: Path, arguments: Arguments) -> None:
    run = arguments(lm_set, tmp_path / "run", train__save_steps=1, train__max_steps=2)
    output = train(run)
    keep = output / "notes.txt"
    keep.write_text("mine")
    with pytest.raises(MsLongctxError, match="holds another run.*--resume.*--overwrite"):
        make_trainer(run)
    earlier = output / "checkpoints" / "step-00000001"
    with pytest.raises(MsLongctxError, match="has checkpoints after step-00000001 .the last of step 2"):
        make_trainer([*run, f"--train.resume={earlier}"])
    trainer = make_trainer([*run, f"--train.resume={earlier}"], overwrite=True)
    assert trainer.directory.store.steps() == [1]
    with pytest.raises(MsLongctxError, match="another process is training"):
        make_trainer([*run, "--train.resume=latest"])
    trainer.directory.close()
    train(run, overwrite=True)
    assert keep.read_text() == "mine"
    assert [record["step"] for record in records(output)] == [1, 2]


def test_resume_from_another_directory_and_from_nothing(
    lm_set: Path, tmp_path: Path, arguments: Arguments, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(arguments(lm_set, tmp_path / "first", train__save_steps=2, train__max_steps=4))
    other = arguments(lm_set, tmp_path / "second", train__max_steps=4)
    second = train([*other, f"--train.resume={first / 'checkpoints' / 'step-00000002'}"])
    same_checkpoint(first / "checkpoints" / "step-00000004", second / "checkpoints" / "step-00000004")
    # Killed before the first checkpoint: --resume starts from the beginning.
    shutil.rmtree(second / "checkpoints")
    train([*other, "--train.resume=latest"])
    assert "has no checkpoint yet: starting from the first step" in caplog.text
    same_checkpoint(first / "checkpoints" / "step-00000004", second / "checkpoints" / "step-00000004")


def test_full_disk(lm_set: Path, tmp_path: Path, arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    run = arguments(lm_set, tmp_path / "run", train__save_steps=2, train__max_steps=4)
    trainer = make_trainer(run)
    save = trainer._save

    def fill_disk_after_first() -> Path:
        path = save()
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        return path

    trainer._save = fill_disk_after_first  # type: ignore[method-assign]
    with pytest.raises(MsLongctxError, match="checkpoint of step 4: no space left.*older checkpoints are untouched"):
        trainer.train()
    assert trainer.directory.store.newest() == trainer.directory.store.path(2)


def test_refusals(lm_set: Path, sft_set: Path, tmp_path: Path, arguments: Arguments) -> None:
    output = tmp_path / "run"

    def refused(message: str, data: Path = lm_set, **changes: Any) -> None:
        with pytest.raises(MsLongctxError, match=message):
            make_trainer(arguments(data, output, **changes))

    refused("prepared with layout 'sft' and this run needs 'lm'", data=sft_set)
    refused("fewer samples than train.batch_size = 24", train__batch_size=24)
    refused("bf16 cannot be used on CPU: MindSpore has no bf16", train__dtype="bf16", train__device_target="auto")
    refused("parallel.mp: 2 cannot run on CPU.*'ms-longctx dryrun'", parallel__mp=2)
    refused("dp 2 x mp 1 x pp 1 x cp 1 = 2, but the number of workers is 1", parallel__dp=2)
    refused("tokenizer of 131 tokens, the model has only 130", model__vocab_size=130, train__max_steps=1)
    refused(r"samples of up to \d+ tokens", data__seq_length=20, train__max_steps=1)
    assert not (output / "checkpoints").exists()
    refused("eval.mindrecord does not exist", data__eval_path=tmp_path / "eval.mindrecord")
    with pytest.raises(MsLongctxError, match="data.path: missing"):
        make_trainer([a for a in arguments(lm_set, output) if not a.startswith("--data.path")])
    with pytest.raises(MsLongctxError, match="does not exist; expected 'latest'"):
        make_trainer([*arguments(lm_set, output), f"--train.resume={tmp_path / 'nowhere'}"])
