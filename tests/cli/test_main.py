# SPDX-License-Identifier: Apache-2.0
"""The command line framework, with a small verb of its own beside the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ms_longctx.cli
from ms_longctx import __version__
from ms_longctx.cli.main import main, verbs
from ms_longctx.cli.options import UsageError, split_overrides

REPOSITORY = Path(__file__).resolve().parents[2]

PROBE = """
import time
from ms_longctx.cli.options import add_config_options, add_resume_option, load_run
from ms_longctx.errors import MsLongctxError

def add_parser(subparsers):
    parser = subparsers.add_parser("probe", help="a verb for tests")
    add_config_options(parser)
    add_resume_option(parser)
    parser.add_argument("--fail", choices=["input", "bug", "interrupt", "pipe", "hang"])
    parser.add_argument("words", nargs="*")

def run(args):
    if args.fail == "input":
        raise MsLongctxError("a line\\nand another")
    if args.fail == "bug":
        raise ZeroDivisionError("oops")
    if args.fail == "interrupt":
        raise KeyboardInterrupt
    if args.fail == "pipe":
        raise BrokenPipeError
    if args.fail == "hang":
        print("hanging", flush=True)
        time.sleep(60)
    run = load_run(args)
    train = run.train
    print(run.data.path, train.max_steps, train.resume, train.output_dir, train.device_target, args.words)
    return 0
"""

FILLED = """
def add_parser(subparsers):
    parser = subparsers.add_parser("filled", help="a verb whose options a configuration may give")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--fields", nargs="+", default=[])
    parser.add_argument("--stop", nargs="+")
    parser.add_argument("--format", default="auto")
    keys = {name: f"data.{name}" for name in ("fields", "format")}
    parser.take_defaults_from_config({"length": "data.seq_length", "stop": "generation.stop", **keys})

def run(args):
    print(args.length, args.fields, args.stop, args.format)
    return 0
"""

PLAIN = """
def add_parser(subparsers):
    subparsers.add_parser("plain", help="a verb without configuration")

def run(args):
    return 3
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with three verbs that ``ms_longctx.cli`` looks into."""
    for name, text in (("probe", PROBE), ("filled", FILLED), ("plain", PLAIN)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"ms_longctx.cli.{name}", raising=False)
    monkeypatch.setattr(ms_longctx.cli, "__path__", [*ms_longctx.cli.__path__, str(tmp_path)])
    return tmp_path


def run_process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "ms_longctx.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60)


def test_verbs_are_the_modules_that_exist() -> None:
    files = {path.stem for path in (REPOSITORY / "ms_longctx" / "cli").glob("*.py")}
    assert set(verbs()) == files - {"__init__", "main", "options"}


def test_every_verb_has_help_and_imports_no_mindspore() -> None:
    script = (
        "import sys\nfrom ms_longctx.cli.main import main, verbs\n"
        "for words in [[], *([verb] for verb in verbs())]:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "heavy = {'mindspore', 'matplotlib', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert all(f"\n    {verb} " in result.stdout for verb in verbs())


def test_help_is_fast() -> None:
    durations = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_process("--help").returncode == 0
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.5


def test_version() -> None:
    result = run_process("--version")
    assert (result.returncode, result.stdout) == (0, f"ms-longctx {__version__}\n")


def test_no_verb_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: ms-longctx")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prob"], "argument VERB: invalid choice: 'prob' (choose from"),
        (["prob"], "did you mean 'probe'?; see 'ms-longctx --help'"),
        (["probe", "--confg", "x"], "unrecognized arguments: --confg"),
        (["probe", "--confg=x"], "did you mean '--config'?; see 'ms-longctx"),
        (["probe", "--conf", "x"], "unrecognized arguments: --conf"),
        (["probe", "--config"], "argument --config: expected one argument; see 'ms-longctx probe --help'"),
        (["probe", "--fail", "imput"], "did you mean 'input'?; see 'ms-longctx probe --help'"),
        (["probe", "--config", "nowhere.yaml"], "nowhere.yaml: no such file or preset; presets: llama-13b, "),
        (["probe", "--train.max_steps"], "command line: --train.max_steps: a value is missing; expected"),
        (["probe", "--train.max_steps", "--debug"], "command line: --train.max_steps: a value is missing"),
        (["probe", "--train.max_stps=1"], "--train.max_stps: unknown key; did you mean 'train.max_steps'?"),
        (["probe", "--parallel_config", "none.json"], "error: none.json: no such file"),
        (
            ["probe", "--device_target", "TPU"],
            "--train.device_target: expected one of auto, Ascend, GPU, CPU, found 'TPU'",
        ),
        (
            ["plain", "--train.max_steps=1"],
            "the verb 'plain' reads no configuration: --train.max_steps=1 has no use here",
        ),
        (["probe", "--fail", "input"], "error: a line and another\n"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(
    arguments: list[str], message: str, probe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word for word in arguments if word != "--debug"] if "--debug" not in arguments else arguments) == 2
    lines = capsys.readouterr().err
    assert message in lines
    if "--debug" not in arguments:
        assert lines.count("\n") == 1 and lines.startswith("error: ")


def test_debug_shows_the_traceback(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "probe", "--fail", "input"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback") and errors.endswith("error: a line and another\n")


def test_unexpected_errors_exit_with_1_and_name_debug(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--fail", "bug"]) == 1
    expected = "error: unexpected ZeroDivisionError: oops; run again with --debug for the traceback\n"
    assert capsys.readouterr().err == expected


def test_interrupt_exits_with_130(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--fail", "interrupt"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_ctrl_c_on_a_real_process(probe: Path) -> None:
    script = (
        f"import sys, ms_longctx.cli; ms_longctx.cli.__path__.append({str(probe)!r})\n"
        "from ms_longctx.cli.main import main; sys.exit(main(['probe', '--fail', 'hang']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None and process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "error: interrupted\n")


def test_reader_that_goes_away(probe: Path) -> None:
    command = f"{sys.executable} -m ms_longctx.cli.main --help | true"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert result.stderr == ""


def test_exit_code_of_the_verb(probe: Path) -> None:
    assert main(["plain"]) == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "None None None outputs auto []"),
        (["--train.max_steps", "5", "word"], "None 5 None outputs auto ['word']"),
        (
            ["word", "--train.max_steps=5", "--data_path", "a b.mindrecord"],
            "a b.mindrecord 5 None outputs auto ['word']",
        ),
        (["--resume", "--output_dir", "out"], "None None latest out auto []"),
        (["--resume", "out/step-4"], "None None out/step-4 outputs auto []"),
        (["--device_target", "cpu", "--train.max_steps=null"], "None None None outputs CPU []"),
        (["--config", "llama-tiny", "--train.max_steps=-0"], None),
        (["--data_path=x", "--data.path=y"], "x None None outputs auto []"),
    ],
)
def test_options_and_overrides(
    arguments: list[str], expected: str | None, probe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["probe", *arguments])
    assert code == (0 if expected else 2)
    assert capsys.readouterr().out.strip() == (expected or "")


FILLED_YAML = "data: {seq_length: 64, fields: {article: body, abstract: summary}}\ngeneration: {stop: [a, b]}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--length", "3"], "3 [] None auto"),
        (["--config", "run.yaml"], "64 ['article=body', 'abstract=summary'] ['a', 'b'] auto"),
        (["--config=run.yaml", "--length", "3", "--fields", "x=y"], "3 ['x=y'] ['a', 'b'] auto"),
        (
            ["--config", "run.yaml", "--data.max_length", "32", "--stop", "c"],
            "32 ['article=body', 'abstract=summary'] ['c'] auto",
        ),
        (
            ["--data.seq_length=32", "--data.format=text", "--data.fields.article=t"],
            "32 ['article=t'] None text",
        ),
    ],
)
def test_a_configuration_gives_the_options_that_are_left_out(
    arguments: list[str],
    expected: str,
    probe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILLED_YAML)
    assert main(["filled", *arguments]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --length"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file or preset"),
        (["--data.format=x"], "command line: --data.format: expected one of auto, article"),
        (["--train.seed=1"], "command line: --train.seed: 'ms-longctx filled' does not read this key"),
        (["--train.sed=1"], "command line: --train.sed: unknown key; did you mean 'train.seed'?"),
    ],
)
def test_mistakes_in_such_a_configuration(
    arguments: list[str], message: str, probe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["filled", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_split_overrides() -> None:
    argv = ["train", "--a.b", "-1", "--config", "x.yaml", "--c.d=e.f", "--", "--g.h", "1"]
    assert split_overrides(argv) == (
        ["train", "--config", "x.yaml", "--", "--g.h", "1"],
        ["--a.b=-1", "--c.d=e.f"],
    )
    with pytest.raises(UsageError):
        split_overrides(["--a.b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "nowhere.yaml"], "error: nowhere.yaml: no such file or preset; presets: "),
        (
            ["train", "--config", "llama-tiny", "--model.num_key_value_heads", "5"],
            "command line: model.num_key_value_heads = 5 must divide num_attention_heads = 6",
        ),
        (["train", "--config", "llama-tiny", "--parallel.dp=0"], "parallel.dp: expected a value of at least 1"),
    ],
)
def test_train_refuses_configurations(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run_process(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["run_scripts", "."])
def test_run_train_works_from_any_directory(folder: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = os.path.relpath(REPOSITORY / "run_scripts" / "run_train.py", REPOSITORY / folder)
    for arguments, code, message in [
        (["--help"], 0, "usage: run_train.py [-h]"),
        (
            ["--config", "llama-tiny", "--train.seed=x"],
            2,
            "error: command line: --train.seed: expected an integer",
        ),
    ]:
        result = subprocess.run(
            [sys.executable, script, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=REPOSITORY / folder,
        )
        assert result.returncode == code and message in result.stdout + result.stderr
