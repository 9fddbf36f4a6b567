# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx strategy show``: the grid, the groups and every kind of mistake."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ms_longctx.cli.main import main

GRID = """\
4 workers: dp 2, mp 2

      mp 0  mp 1
dp 0     0     1
dp 1     2     3

mp (tensor parallel: shares of every matrix), 2 groups of 2
  0 1
  2 3

dp (data parallel: other samples), 2 groups of 2
  0 2
  1 3
"""

HYBRID = """\
8 workers: pp 2, cp 4, attention hybrid (ring 2 x ulysses 2), 2 micro batches

stage 0                mp 0
dp 0 ring 0 ulysses 0     0
dp 0 ring 0 ulysses 1     1
dp 0 ring 1 ulysses 0     2
dp 0 ring 1 ulysses 1     3

stage 1                mp 0
dp 0 ring 0 ulysses 0     4
dp 0 ring 0 ulysses 1     5
dp 0 ring 1 ulysses 0     6
dp 0 ring 1 ulysses 1     7

cp (context parallel: pieces of every sequence), 2 groups of 4
  0 1 2 3
  4 5 6 7

ulysses (heads exchanged for tokens, inside cp), 4 groups of 2
  0 1
  2 3
  4 5
  6 7

ring (keys and values travel, inside cp), 4 groups of 2
  0 2
  1 3
  4 6
  5 7

pp (pipeline: one rank of each stage), 4 groups of 2
  0 4
  1 5
  2 6
  3 7
"""


def show(keys: dict[str, object], tmp_path: Path, *arguments: str) -> int:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(keys))
    return main(["strategy", "show", "--parallel_config", str(path), *arguments])


@pytest.mark.parametrize(
    ("keys", "workers", "expected"),
    [
        ({"dp": 2, "mp": 2}, 4, GRID),
        ({"pp": 2, "cp": 4, "ulysses_degree": 2}, 8, HYBRID),
        ({}, 1, "1 worker\n\n      mp 0\ndp 0     0\n"),
    ],
)
def test_grid(
    keys: dict[str, object], workers: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys or {"dp": 1}
    assert show(keys, tmp_path, "--worker_num", str(workers)) == 0
    assert capsys.readouterr().out == expected


def test_many_workers_show_the_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100000 workers are drawn at once: the work grows with their number, not with its square."""
    started = time.perf_counter()
    assert show({"dp": 10000, "mp": 10}, tmp_path, "--worker_num", "100000") == 0
    assert time.perf_counter() - started < 5
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 10 + 11 + 11 and max(map(len, lines)) < 120
    assert lines[1].startswith("of more than 256 workers only the first and last are shown")
    assert lines[4].split() == ["dp", "0", "0", "1", "2", "3", "...", "6", "7", "8", "9"]
    assert lines[-11:-9] == ["", "dp (data parallel: other samples), 10 groups of 10000"]
    assert lines[-1] == "  9 19 29 39 ... 99969 99979 99989 99999"


def test_attention_mode_without_cp_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert show({"dp": 2, "attention_mode": "ring"}, tmp_path, "--worker_num", "2") == 0
    assert caplog.messages == ["attention_mode 'ring' has no effect with cp 1: no sequence is split"]


def test_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show({"dp": 2, "cp": 4, "pp": 2}, tmp_path, "--worker_num", "16", "--rank", "7") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rank 7: pp 0, dp 1, cp 3, mp 0",
        "cp      4 5 6 7   before: 6, after: 4",
        "dp      3 7   before: 3, after: 3",
        "dp_cp   0 1 2 3 4 5 6 7   before: 6, after: 0",
        "pp      7 15   before: -, after: 15",
    ]


@pytest.mark.parametrize(
    ("keys", "arguments", "expected"),
    [
        ({"dp": 4}, ["--worker_num", "0"], "--worker_num: expected at least 1, found 0"),
        (
            {"dp": 4},
            ["--worker_num", "2"],
            "strategy.json: dp 4 x mp 1 x pp 1 x cp 1 = 4, but the number of workers is 2",
        ),
        ({"dp": 4}, ["--worker_num", "4", "--rank", "4"], "rank 4 does not exist; expected 0 to 3"),
        ({"mp": 4}, ["--worker_num", "4", "--config", "smollm2-135m"], "num_key_value_heads = 3 is below mp = 4"),
        ({"dp": "a"}, ["--worker_num", "4"], "strategy.json:1: parallel.dp: expected an integer, found 'a' (text)"),
        ({"dp": 4}, [], "the following arguments are required: --worker_num"),
    ],
)
def test_mistakes(
    keys: dict[str, object],
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show(keys, tmp_path, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and expected in captured.err
