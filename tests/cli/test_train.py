# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx train``: one line and exit code 2 for every mistake, help without MindSpore."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ms_longctx.cli.main import main
from ms_longctx.cli.train import resume_command

REPOSITORY = Path(__file__).resolve().parents[2]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "data.path: missing"),
        (["--data_path", "nowhere.mindrecord"], "nowhere.mindrecord does not exist"),
        (["--optimizer.type", "galore"], "optimizer.type"),
        (["--optimizer.rank", "128"], "the GaLore optimizers are not built yet"),
        (["--optimizer.type", "adamw_torch_fused", "--optimizer.rank", "8"], "optimizer.type"),
        (["--train.dtype", "bf16", "--device_target", "CPU"], "bf16 needs Ascend"),
        (["--parallel.dp", "two"], "--parallel.dp: expected an integer"),
        (["--train.learning_rate", "1"], "did you mean"),
        (["--overwite"], "did you mean '--overwrite'"),
    ],
)
def test_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: str) -> None:
    assert expected in refused(capsys, *arguments, "--output_dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_device_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "data.mindrecord"
    data.write_bytes(b"no MindRecord file")
    assert "is not a MindRecord file" in refused(capsys, "--data_path", str(data), "--device_target", "GPU")


def test_help_is_fast() -> None:
    """Help loads neither MindSpore nor matplotlib."""
    program = (
        "import sys; from ms_longctx.cli.main import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'mindspore', 'matplotlib', 'torch'} & set(sys.modules), 'heavy imports'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    assert "--overwrite" in done.stdout and "--resume" in done.stdout


@pytest.mark.parametrize(
    "argv, expected",
    [
        (
            ["/env/bin/ms-longctx", "train", "--config", "a b.yaml"],
            "ms-longctx train --config 'a b.yaml' --resume",
        ),
        (
            ["run_train.py", "--overwrite", "--config", "a", "--train.max_steps", "9"],
            "python run_train.py --config a --train.max_steps 9 --resume",
        ),
        (["ms-longctx", "train", "--resume", "--config", "a"], "ms-longctx train --config a --resume"),
        (
            ["ms-longctx", "train", "--resume", "out/x", "--config", "a"],
            "ms-longctx train --config a --resume",
        ),
        (
            ["ms-longctx", "train", "--train.resume=latest", "--config", "a"],
            "ms-longctx train --config a --resume",
        ),
    ],
)
def test_resume_command(argv: list[str], expected: str) -> None:
    assert resume_command(argv) == expected


def test_resume_command_of_a_launching_script() -> None:
    argv = ["/src/run_train.py", "--config", "a b", "--overwrite"]
    assert resume_command(argv, "WORKERS=2 ./msrun.sh") == "WORKERS=2 ./msrun.sh --config 'a b' --resume"
