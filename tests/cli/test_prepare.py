# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx prepare``: what a user gets wrong is one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ms_longctx.cli.main import main
from ms_longctx.data.manifest import load_manifest

ROW = json.dumps({"text": "A cell divides. Then it divides again."}) + "\n"


def prepare(tmp_path: Path, tokenizer: Path, *more: str, content: str = ROW, output: str = "a.mindrecord") -> int:
    (tmp_path / "a.jsonl").write_text(content)
    paths = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / output), "--tokenizer", str(tokenizer)]
    return main(["prepare", *paths, "--seq_length", "64", *more])


@pytest.mark.parametrize(
    ("more", "content", "output", "message"),
    [
        ((), "", "a.mindrecord", "a.jsonl: empty; expected one JSON object"),
        ((), "plain words\n", "a.mindrecord", 'plain text as {"text": "..."}'),
        (("--num_workers", "0"), ROW, "a.mindrecord", "--num_workers and --shard_mb should be 1 or more"),
        (("--layout", "lm"), ROW, "a.jsonl/b.mindrecord", "a.jsonl/b.mindrecord.partial: Not a directory"),
    ],
)
def test_mistakes(
    more: tuple[str, ...],
    content: str,
    output: str,
    message: str,
    sentencepiece_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepare(tmp_path, sentencepiece_model, *more, content=content, output=output) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("error: ") == 1 and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_layout_follows_the_objective_of_a_configuration(sentencepiece_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {objective: pretrain}\n")
    assert prepare(tmp_path, sentencepiece_model, "--config", str(tmp_path / "run.yaml")) == 0
    assert load_manifest(tmp_path / "a.mindrecord").layout == "lm"
