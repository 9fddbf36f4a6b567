# SPDX-License-Identifier: Apache-2.0
"""Metrics files, speed figures, the loss curve and what a terminal or a pipe shows."""

from __future__ import annotations

import builtins
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import LlamaConfig as TorchLlamaConfig
from transformers import LlamaForCausalLM as TorchLlama

from ms_longctx.config.model import LlamaConfig
from ms_longctx.train.flops import ASCEND_910B_FLOPS, flops_per_token, peak_flops
from ms_longctx.train.metrics_log import MetricsLog, read_metrics
from ms_longctx.train.monitor import Monitor, StepReport, Throughput
from ms_longctx.train.plot import smooth

REPOSITORY = Path(__file__).parents[2]


def report(step: int, **changes: Any) -> StepReport:
    values: dict[str, Any] = {
        "step": step,
        "loss": 3.0 - 0.1 * step,
        "lr": 1e-4,
        "grad_norm": 1.5,
        "tokens": 2048,
        "supervised_tokens": 1000,
        "seconds": 0.5,
    }
    return StepReport(**{**values, **changes})


def run_monitor(directory: Path, first: int, last: int, **settings: Any) -> None:
    throughput = Throughput(flops_per_token=1e6, peak_flops=1e11)
    monitor = Monitor(directory, 10, first - 1, settings.get("log_steps", 1), throughput)
    for step in range(first, last + 1):
        monitor.step(report(step))
    monitor.close()


def tensorboard_steps(directory: Path) -> list[int]:
    """What TensorBoard's own reader shows of the training loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def test_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    run_monitor(tmp_path, 1, 7)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "loss"')  # killed in the middle of a line
    run_monitor(tmp_path, 5, 10)  # the checkpoint held 4 steps
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 11))
    assert tensorboard_steps(tmp_path) == list(range(1, 11))


def test_fresh_log_is_empty(tmp_path: Path) -> None:
    run_monitor(tmp_path, 1, 3)
    MetricsLog(tmp_path).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_record_fields(tmp_path: Path) -> None:
    run_monitor(tmp_path, 1, 10, log_steps=4)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 4, 8, 10]
    last = records[-1]
    assert last["loss"] == pytest.approx(2.0) and last["lr"] == 1e-4 and last["supervised_tokens"] == 1000
    assert last["tokens_per_second"] == pytest.approx(2048 / 0.5)
    assert last["mfu"] == pytest.approx(2048 / 0.5 * 1e6 / 1e11)
    assert 50e6 < last["memory_bytes"] < 1e12
    assert "skipped" not in last


def test_skipped_steps_are_always_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path, 10, 0, log_steps=5, throughput=Throughput(1e6, None))
    monitor.step(report(1, loss=None, grad_norm=None, skipped="no supervised token"))
    monitor.close()
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert record["skipped"] == "no supervised token" and record["loss"] is None and record["mfu"] is None
    assert "step 1 skipped: no supervised token" in capsys.readouterr().out


def test_first_step_which_compiles_does_not_count() -> None:
    throughput = Throughput(flops_per_token=10.0, peak_flops=1000.0)
    throughput.add(100, 60.0)
    assert throughput.tokens_per_second is None and throughput.mfu is None
    assert throughput.remaining_seconds(5) is None
    throughput.add(100, 2.0)
    throughput.add(100, 3.0)
    assert throughput.tokens_per_second == pytest.approx(40.0)
    assert throughput.mfu == pytest.approx(0.4)
    throughput.peak_flops = 399.0  # measured while the machine was busy: 400 were seen since
    assert throughput.mfu is None
    assert throughput.remaining_seconds(10) == pytest.approx(25.0)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_against_torch_counter(tied: bool) -> None:
    """Reference: torch's FlopCounterMode over transformers' forward and backward pass, eager attention (which
    computes the full square, so K = S instead of S / 2). Tolerance 1e-9: both count products exactly."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    shape = dict(
        vocab_size=97,
        hidden_size=30,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=tied,
    )
    length = 31
    model = TorchLlama(TorchLlamaConfig(**shape, attn_implementation="eager"))
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        # Gradients of the embeddings' output too: our formula counts the gradient of every product's input.
        inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=inputs).logits.sum().backward()
    config = LlamaConfig(**shape)
    causal = 12 * 3 * 30 * (length - length / 2)
    # transformers also multiplies positions and frequencies as a matrix product, 2 * S * D / 2 FLOPs, once.
    rotary = length * 6
    expected = (flops_per_token(config, length) + causal) * length + rotary
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_flops_of_adapters_and_windows() -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 32) + 100 * 16
    attention = 12 * 2 * 16 * 64 / 2
    assert flops_per_token(config, 64) == 6 * weights + attention
    assert flops_per_token(config, 64, adapter_weights=10) == 4 * weights + 60 + attention
    # The mean of min(i, 8) over 64 positions, in the continuous limit: 8 - 8 * 8 / (2 * 64) keys.
    windowed = LlamaConfig(**{**config.to_dict(), "sliding_window": 8})
    assert flops_per_token(windowed, 64) == 6 * weights + 12 * 2 * 16 * 7.5


def test_peak_flops() -> None:
    assert peak_flops("Ascend", "bf16") == ASCEND_910B_FLOPS
    assert peak_flops("Ascend", "fp32") is None
    measured = peak_flops("CPU", "fp32")
    assert measured is not None and 1e9 < measured < 1e14


def test_loss_curve_is_drawn(tmp_path: Path) -> None:
    run_monitor(tmp_path, 1, 3)
    with Image.open(tmp_path / "loss.png") as few:
        assert few.size[0] > 500 and few.convert("L").getextrema() == (0, 255)
    log = MetricsLog(tmp_path, resumed_step=3)
    for step in range(4, 80):
        log.write({"step": step, "loss": 1 / step, "lr": 1e-3})
        if step % 10 == 0:
            log.write({"step": step, "eval_loss": 1.1 / step})
    log.close()
    monitor = Monitor(tmp_path, 79, 79, 1, Throughput(1.0, None))
    monitor.close()
    with Image.open(tmp_path / "loss.png") as many:
        assert many.getbbox() is not None


def test_smoothing_is_exact_on_a_constant() -> None:
    assert smooth([2.5] * 7) == pytest.approx([2.5] * 7)


@pytest.mark.parametrize("package, note", [("tensorboard", "no TensorBoard events"), ("matplotlib", "not drawn")])
def test_without_optional_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, package: str, note: str
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    run_monitor(tmp_path, 1, 3)
    assert note in caplog.text and "ms_longctx[monitor]" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ms_longctx.train.monitor import Monitor, StepReport, Throughput
    monitor = Monitor(Path(sys.argv[1]), 6, 0, 2, Throughput(1e6, 1e11))
    for step in range(1, 7):
        monitor.step(StepReport(step, 3.0 / step, 1e-4, 1.0, 2048, 2000, 0.5))
    monitor.evaluation(6, 1.25, 5000)
    monitor.close()
    """
)


def test_pipe_gets_a_line_every_log_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["1/6", "2/6", "4/6", "6/6"]
    for part in ("loss 0.7500", "lr 1.00e-04", "4,096 tok/s", "MFU 4.1%", "mem ", "ETA 0:00:01"):
        assert part in lines[2], (part, lines[2])
    assert lines[4] == "step 6: evaluation loss 1.2500 over 5,000 tokens"
    assert "\r" not in done.stdout + done.stderr


@pytest.mark.parametrize("size", [(30, 140), (0, 0)])
def test_terminal_gets_one_bar(tmp_path: Path, size: tuple[int, int]) -> None:
    ours, theirs = pty.openpty()
    rows, columns = size
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    os.close(theirs)
    shown = io.BytesIO()
    try:
        while chunk := os.read(ours, 4096):
            shown.write(chunk)
    except OSError:  # Linux reports the closed terminal this way
        pass
    process.wait()
    os.close(ours)
    text = shown.getvalue().decode()
    final = text.rstrip().split("\r")[-1]
    assert "100%" in final and "6/6" in final and "loss 0.5000" in final and "tok/s" in final and "MFU" in final
    assert "evaluation loss 1.2500" in text
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
