# SPDX-License-Identifier: Apache-2.0
"""generate, chat and evaluate on the real SmolLM2-135M-Instruct, and what they refuse."""

from __future__ import annotations

import gzip
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_longctx.cli.main import main

ARTICLES = Path(__file__).parents[2] / "run_scripts/data/plos_articles_heldout.jsonl.gz"
COMMAND = [sys.executable, "-c", "import sys; from ms_longctx.cli.main import main; sys.exit(main())"]
QUESTION = "What is the capital of France?"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a refused command prints, after its progress bars if any."""
    assert main([str(argument) for argument in arguments]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def few_articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two held-out articles, short enough to be read in seconds."""
    path = tmp_path_factory.mktemp("articles") / "two.jsonl"
    with gzip.open(ARTICLES, "rt", encoding="utf-8") as source, path.open("w", encoding="utf-8") as sink:
        for line, _ in zip(source, range(2), strict=False):
            row = json.loads(line)
            sink.write(json.dumps({"article": row["article"][:1500], "abstract": row["abstract"][:300]}) + "\n")
    return path


def test_generate_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2_gguf: Path) -> None:
    assert "no-such-model" in refused(capsys, "generate", "--model", tmp_path / "no-such-model", "--prompt", "x")
    model = ("generate", "--model", smollm2_gguf)
    assert "temperature" in refused(capsys, *model, "--prompt", "x", "--temperature", "-1")
    assert "dtype: bf16 cannot be used on CPU" in refused(capsys, *model, "--prompt", "x", "--dtype", "bf16")
    assert "lower max_new_tokens" in refused(capsys, *model, "--prompt", "x", "--max_new_tokens", "100000")
    assert "belong together" in refused(capsys, *model, "--input", "a.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    assert f"{bad}:2" in refused(capsys, *model, "--input", bad, "--output", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    error = refused(capsys, *model, "--prompt", "word " * 9000, "--raw", "--max_new_tokens", "8")
    assert "9000 tokens" in error.replace("9001", "9000") and "8192" in error
    (tmp_path / "adapter").mkdir()
    assert "adapter" in refused(capsys, *model, "--prompt", "x", "--adapter", tmp_path / "adapter")


def test_generate_answers(capsys: pytest.CaptureFixture[str], smollm2_gguf: Path, tmp_path: Path) -> None:
    model = ["generate", "--model", str(smollm2_gguf), "--max_new_tokens", "12"]
    assert main([*model, "--prompt", QUESTION]) == 0
    answer = capsys.readouterr().out
    assert "Paris" in answer
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": QUESTION}]
    source.write_text(json.dumps({"prompt": QUESTION, "id": 7}) + "\n" + json.dumps({"messages": messages}) + "\n")
    assert main([*model, "--input", str(source), "--output", str(sink), "--batch_size", "2"]) == 0
    lines = [json.loads(line) for line in sink.read_text(encoding="utf-8").splitlines()]
    assert [line["completion"] for line in lines] == [answer.removesuffix("\n")] * 2
    assert lines[0]["id"] == 7


@pytest.mark.slow
def test_evaluate(capsys: pytest.CaptureFixture[str], smollm2_gguf: Path, few_articles: Path, tmp_path: Path) -> None:
    """Perplexity against transformers' cross entropy (1e-4); a second run with one line cut off goes on."""
    import torch
    import transformers

    from ms_longctx.data.dataset import read_samples
    from ms_longctx.models.llama import LlamaForCausalLM

    output = tmp_path / "evaluation"
    command = ["evaluate", "--model", str(smollm2_gguf), "--data_path", str(few_articles)]
    command += ["--output_dir", str(output), "--max_new_tokens", "24"]
    assert main(command) == 0
    report = json.loads((output / "report.json").read_text())
    predictions = (output / "predictions.jsonl").read_text()
    LlamaForCausalLM.from_pretrained(smollm2_gguf).save_pretrained(tmp_path / "model")
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    losses = []
    for tokens, runs in read_samples(output / "data.mindrecord"):
        ids = torch.tensor(tokens[None]).long()
        labels = ids.clone()
        labels[:, : int(runs[0])] = -100
        with torch.no_grad():
            logits = reference(ids).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="none")[labels[0, 1:] >= 0])
    assert report["perplexity"] == pytest.approx(math.exp(torch.cat(losses).mean().item()), rel=1e-4)
    assert report["tokens"] == sum(map(len, losses)) and report["samples"] == 2
    assert {"rougeLxt", "rouge1", "rouge2", "rougeL"} <= report.keys()

    (output / "predictions.jsonl").write_text(predictions[:-20])  # killed while writing the last line
    assert main(command) == 0
    again = json.loads((output / "report.json").read_text())
    assert again["rouge1"] == report["rouge1"] and (output / "predictions.jsonl").read_text() == predictions
    assert "other settings" in refused(capsys, *command, "--temperature", "0.5")


@pytest.mark.slow
def test_chat_reads_a_pipe(smollm2_gguf: Path) -> None:
    """Two turns, a reset and an end of input."""
    lines = f"{QUESTION}\n/reset\n/what\nSay hello.\n"
    result = subprocess.run(
        [*COMMAND, "chat", "--model", str(smollm2_gguf), "--max_new_tokens", "16"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "unknown command /what" in result.stdout


@pytest.mark.slow
def test_chat_in_a_terminal(smollm2_gguf: Path) -> None:
    """Ctrl-C stops the answer and leaves the conversation; /exit ends it with code 0."""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--model", str(smollm2_gguf), "--max_new_tokens", "2000"],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    screen = _read_until(terminal, "> ", 60)
    os.write(terminal, b"Write a long story about a ship.\n")
    screen = _read_until(terminal, "ship.\n", 60, more=40)
    process.send_signal(signal.SIGINT)
    screen += _read_until(terminal, "\n> ", 60)
    os.write(terminal, b"/exit\n")
    assert process.wait(60) == 0
    assert "Traceback" not in screen
    os.close(terminal)


def _read_until(terminal: int, wanted: str, seconds: float, more: int = 0) -> str:
    """What the terminal shows up to ``wanted`` and at least ``more`` characters after it."""
    text, end = "", time.monotonic() + seconds
    while wanted not in text or len(text.partition(wanted)[2]) < more:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{wanted!r} did not appear: {text!r}"
        text += os.read(terminal, 4096).decode("utf-8", "replace").replace("\r", "")
    return text
