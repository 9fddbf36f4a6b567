# SPDX-License-Identifier: Apache-2.0
"""Real processes that are killed, interrupted and resumed from the command line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "run_scripts" / "run_train.py"
Arguments = Callable[..., list[str]]
MakeSet = Callable[..., Path]

# Dies by SIGKILL with half of the n-th file of tensors written. A checkpoint has two: weights, moments.
KILLED_WHILE_WRITING = textwrap.dedent(
    """
    import os, signal, sys
    import ms_longctx.models.safetensors_io as io
    countdown = int(os.environ["DIE_AT_FILE"])
    write_file = io.write_file
    def half(path, dtype, shapes, arrays):
        global countdown
        countdown -= 1
        write_file(path, dtype, shapes, arrays)
        if countdown == 0:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    io.write_file = half
    from ms_longctx.cli.main import main
    sys.exit(main())
    """
)


def start(arguments: list[str], program: list[str] | None = None, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *(program or [str(SCRIPT)]), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return out


def wait_for_step(process: subprocess.Popen[str], output: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step}' not in metrics.read_text():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended too early"
        time.sleep(0.01)


def losses(output: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def same_tensors(first: Path, second: Path) -> None:
    files = sorted((first / "checkpoints" / "step-00000010").rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        twin = second / file.relative_to(first)
        assert file.read_bytes() == twin.read_bytes(), file.name


@pytest.fixture(scope="module")
def data(make_set: MakeSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("data") / "sft.mindrecord", layout="sft")


CHANGES: dict[str, Any] = {
    "train__objective": "sft",
    "train__gradient_accumulation_steps": 2,
    "train__save_steps": 2,
    "lora__enabled": "true",
    "lora__r": 3,
    "lora__lora_dropout": 0.3,
}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory, arguments: Arguments) -> Path:
    """Ten steps without a break."""
    output = tmp_path_factory.mktemp("whole")
    finish(start(arguments(data, output, **CHANGES)))
    return output


@pytest.mark.slow
def test_killed_between_checkpoints(data: Path, whole: Path, tmp_path: Path, arguments: Arguments) -> None:
    run = arguments(data, tmp_path, **CHANGES)
    process = start(run)
    wait_for_step(process, tmp_path, 5)
    process.kill()
    process.wait()
    assert "resuming after step" in finish(start([*run, "--resume"]))
    assert losses(tmp_path) == losses(whole)
    same_tensors(whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", [pytest.param(5, marks=pytest.mark.long), 6])
def test_killed_while_writing_a_checkpoint(
    file: int, data: Path, whole: Path, tmp_path: Path, arguments: Arguments
) -> None:
    """In the middle of the weights (file 5) or of the moments (file 6) of the third checkpoint, step 6."""
    run = arguments(data, tmp_path, **CHANGES)
    killed = start(["train", *run], program=["-c", KILLED_WHILE_WRITING], DIE_AT_FILE=str(file))
    out, _ = killed.communicate(timeout=200)
    assert killed.returncode == -signal.SIGKILL, out
    assert losses(tmp_path)[-1][0] == 6
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004\n"
    assert "resuming after step 4" in finish(start([*run, "--resume", "auto"]))
    assert losses(tmp_path) == losses(whole)
    same_tensors(whole, tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step-00000006",
        "step-00000008",
        "step-00000010",
    ]


@pytest.mark.slow
def test_interrupted_and_continued_by_the_printed_command(
    data: Path, whole: Path, tmp_path: Path, arguments: Arguments
) -> None:
    process = start(arguments(data, tmp_path, **{**CHANGES, "train__save_steps": 100}))
    wait_for_step(process, tmp_path, 3)
    os.killpg(process.pid, signal.SIGINT)  # what the terminal does
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, out
    assert "finishing this step, then saving" in out
    [command] = [line for line in out.splitlines() if line.startswith("go on with: ")]
    words = shlex.split(command.removeprefix("go on with: "))
    assert words[0] == "python" and words[1] == str(SCRIPT) and words[-1] == "--resume"
    finish(start(words[2:]))
    assert losses(tmp_path) == losses(whole)
    same_tensors(whole, tmp_path)
