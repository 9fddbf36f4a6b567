# SPDX-License-Identifier: Apache-2.0
"""The set-up of the scripts: which Python it takes, what it says, and that a second run does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMMON = REPOSITORY / "run_scripts" / "common.sh"


def bash(script: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script after common.sh with nothing on PATH but ``path`` and the tools that common.sh needs."""
    tools = path.parent / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("dirname", "cat", "cksum", "cut", "touch", "mkdir"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(str(shutil.which(tool)))
    inherited = {name: value for name, value in os.environ.items() if name != "MS_LONGCTX_PYTHON"}
    environment = {**inherited, "PATH": f"{path}:{tools}", **variables}
    command = [str(shutil.which("bash")), "-c", f"source {COMMON}\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def fake_python(folder: Path, name: str, version: str, has_venv: bool = True) -> None:
    """A program that answers the questions of common.sh like a Python of that version."""
    major, minor = version.split(".")[:2]
    is_good = int(major) == 3 and 10 <= int(minor) <= 12
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(
        f"#!{shutil.which('bash')}\n"
        'case "$*" in\n'
        f'  --version) echo "Python {version}" ;;\n'
        f"  *version_info*) exit {0 if is_good else 1} ;;\n"
        f"  *ensurepip*) exit {0 if has_venv else 1} ;;\n"
        "esac\n"
    )
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": ("3.12.4", True)}, "python3"),
        ({"python3": ("3.9.2", True), "python3.10": ("3.10.9", True)}, "python3.10"),
        ({"python3.10": ("3.10.9", True), "python3.12": ("3.12.0", True)}, "python3.12"),
        ({"python3.11": ("3.11.2", False), "python3.10": ("3.10.9", True)}, "python3.10"),
        ({"python3": ("3.13.0", True), "python": ("3.10.1", True)}, "python"),
    ],
)
def test_the_first_suitable_python_is_taken(pythons: dict[str, tuple[str, bool]], chosen: str, tmp_path: Path) -> None:
    for name, (version, has_venv) in pythons.items():
        fake_python(tmp_path / "bin", name, version, has_venv)
    result = bash("_find_python", tmp_path / "bin")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{tmp_path}/bin/{chosen}\n", "")


def test_a_named_python_is_the_only_candidate(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.11", "3.11.2")
    fake_python(tmp_path / "bin", "mine", "3.10.2")
    assert bash("_find_python", tmp_path / "bin", MS_LONGCTX_PYTHON="mine").stdout == f"{tmp_path}/bin/mine\n"


def test_no_suitable_python_says_what_was_found(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", "3.9.2")
    fake_python(tmp_path / "bin", "python3.11", "3.11.2", has_venv=False)
    result = bash("ensure_venv dev", tmp_path / "bin", MS_LONGCTX_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "error: no Python 3.10, 3.11 or 3.12 with the venv module on PATH; found:" in result.stderr
    assert "python3.11 (Python 3.11.2) without the venv module python3 (Python 3.9.2)" in result.stderr


def test_no_python_at_all(tmp_path: Path) -> None:
    result = bash("ensure_venv dev", tmp_path / "bin", MS_LONGCTX_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1 and "on PATH; found: none" in result.stderr


def test_steps_report_their_time_and_keep_the_exit_code(tmp_path: Path) -> None:
    result = bash("step 'good one' true && step 'bad one' bash_missing_command", tmp_path / "bin")
    assert result.returncode == 127
    assert result.stdout == "==> good one\n    done in 0 s\n==> bad one\n    FAILED (exit code 127) after 0 s\n"


def fake_environment(folder: Path) -> None:
    """An environment whose Python notes what it is asked to do and does nothing."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "python"
    program.write_text(f'#!{shutil.which("bash")}\necho "$*" >> "{folder}/calls"\n')
    program.chmod(0o755)


def test_the_second_run_installs_nothing(tmp_path: Path) -> None:
    fake_environment(tmp_path / "venv")
    calls = tmp_path / "venv" / "calls"
    for expected in (1, 0):
        calls.unlink(missing_ok=True)
        result = bash("ensure_venv monitor", tmp_path / "bin", MS_LONGCTX_VENV=str(tmp_path / "venv"))
        assert result.returncode == 0
        lines = calls.read_text().splitlines()
        installs = [line for line in lines if line.startswith("-m pip install")]
        assert len(installs) == expected
        assert lines[-1] == "-m ms_longctx.kernels.build"
        if installs:
            assert installs[0].endswith(
                f"--constraint {REPOSITORY}/run_scripts/constraints.txt --editable {REPOSITORY}[monitor]"
            )
