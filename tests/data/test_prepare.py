# SPDX-License-Identifier: Apache-2.0
"""prepare end to end on real files: accounting, splits, repeats and errors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore.dataset as ds
import numpy as np
import pytest

from ms_longctx.cli.main import main
from ms_longctx.data.convert import Settings
from ms_longctx.data.manifest import load_manifest, shard_paths
from ms_longctx.data.prepare import prepare
from ms_longctx.data.report import picture_path, report_path
from ms_longctx.data.samples import Lengths
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError

Write = Callable[..., Path]


def samples_of(path: Path) -> list[tuple[list[int], list[int]]]:
    """(tokens, runs) of a set, as MindSpore reads them."""
    files = shard_paths(path, load_manifest(path))
    rows = ds.MindDataset(files, ["input_ids", "runs"], shuffle=False)
    return [(ids.tolist(), runs.tolist()) for ids, runs in rows.create_tuple_iterator(num_epochs=1, output_numpy=True)]


@pytest.fixture
def settings(sentencepiece_model: Path) -> Settings:
    return Settings(str(sentencepiece_model), "lm", Lengths(128))


def run(inputs: Any, output: Path, settings: Settings, **options: Any) -> dict[str, Path]:
    result = prepare([str(i) for i in inputs], output, settings, **({"num_workers": 1, "progress": False} | options))
    assert result.finished
    return result.outputs


def test_several_processes_give_the_same_files(
    tmp_path: Path, settings: Settings, write_rows: Write, paragraphs: list[dict], mistral: Tokenizer
) -> None:
    """Real paragraphs, plain and gzip, two processes and one: the same bytes, in the order of the lines."""
    middle = len(paragraphs) // 2
    inputs = [write_rows(paragraphs[:middle], "1.jsonl"), write_rows(paragraphs[middle:], "2.jsonl.gz")]
    one, two = tmp_path / "one" / "a.mindrecord", tmp_path / "two" / "a.mindrecord"
    settings = Settings(settings.tokenizer, "lm", Lengths(4096))  # long enough for every paragraph
    run(inputs, one, settings, shard_bytes=100_000)
    run([tmp_path / "*.jsonl*"], two, settings, shard_bytes=100_000, num_workers=2)
    assert len(load_manifest(one).shards) > 3
    for file in sorted(one.parent.glob("a*.mindrecord*")):
        if file.suffix != ".json":
            assert file.read_bytes() == (two.parent / file.name).read_bytes()
    tokens = np.concatenate([ids for ids, _ in samples_of(one)]).tolist()
    assert tokens == [i for row in paragraphs for i in mistral.encode(row["text"], add_bos=True, add_eos=True)]


def test_article_set_of_the_bundled_articles(
    tmp_path: Path, smollm2_gguf: Path, smollm2: Tokenizer, articles: list[dict[str, Any]], write_rows: Write
) -> None:
    settings = Settings(str(smollm2_gguf), "sft", Lengths(8192, 7936, 256))
    output = run([write_rows(articles)], tmp_path / "a.mindrecord", settings)["train"]
    samples = samples_of(output)
    assert len(samples) == len(articles)
    manifest = load_manifest(output)
    assert (manifest.tokenizer, manifest.vocab_size) == (smollm2.fingerprint(), 49152)
    assert manifest.tokens == sum(len(ids) for ids, _ in samples)
    assert manifest.supervised_tokens == sum(runs[1] for _, runs in samples)
    for (ids, runs), row in zip(samples, articles, strict=True):
        assert runs[0] <= 7936 and runs[1] <= 256 and sum(runs) == len(ids)
        answer = smollm2.decode(ids[runs[0] :])
        assert row["abstract"].startswith(answer) and (ids[-1] == smollm2.eos_id) == (answer == row["abstract"])


def test_chinese_novel_comes_back_whole(
    tmp_path: Path, sentencepiece_model: Path, smollm2_gguf: Path, chapters: list[dict], write_rows: Write
) -> None:
    """Long Chinese texts in pieces: joined again they are the text, with either kind of tokenizer."""
    rows = write_rows(chapters, "三国.jsonl")
    for number, source in enumerate((sentencepiece_model, smollm2_gguf)):
        settings = Settings(str(source), "lm", Lengths(1000))
        output = run([rows], tmp_path / str(number) / "三国.mindrecord", settings)["train"]
        tokenizer = load_tokenizer(source)
        pieces = [ids for ids, _ in samples_of(output)]
        ends = [index for index, ids in enumerate(pieces) if ids[-1] == tokenizer.eos_id]
        assert len(ends) == len(chapters) and max(map(len, pieces)) == 1000
        starts = [0, *(end + 1 for end in ends[:-1])]
        for start, end, row in zip(starts, ends, chapters, strict=True):
            ids = [index for piece in pieces[start : end + 1] for index in piece]
            assert tokenizer.decode(ids) == row["text"]


def test_every_row_is_accounted_for(tmp_path: Path, smollm2_gguf: Path) -> None:
    """In = written + dropped, each for its reason, with file and line."""
    rows = [
        '{"query": "q", "response": "r"}', "", "{bad json", "[1, 2]", '{"query": "q"}',
        '{"query": "q", "response": ""}', '{"query": "q", "response": 5}', "\xff",
        '{"query": "q", "response": "r"}',
        '{"query": "' + "long " * 300 + '", "response": "r"}', "   ", r'{"query": "\ud83d", "response": "r"}',
        r'{"query": "\ud83d\ude80", "response": "tail"}',
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_bytes("\n".join(rows).encode("latin-1"))  # the last line has no newline
    settings = Settings(str(smollm2_gguf), "sft", Lengths(64, truncation="delete"))
    output = run([file], tmp_path / "a.mindrecord", settings)["train"]
    report = json.loads(report_path(output).read_text())
    assert report["rows"] == {"read": 13, "written": 3, "shortened": 0}
    assert report["dropped"] == {
        "blank": 2, "bad_json": 2, "not_an_object": 1, "missing_field": 1, "empty": 1, "bad_value": 1,
        "too_long": 1, "bad_text": 1,
    }  # fmt: skip
    assert sum(report["dropped"].values()) + report["rows"]["written"] == report["rows"]["read"]
    assert any(problem.startswith(f"{file}:3: bad_json:") for problem in report["problems"])
    assert any(problem.startswith(f"{file}:5: missing_field:") for problem in report["problems"])
    assert len(samples_of(output)) == 3


def test_strict_stops_at_the_line_and_leaves_nothing(tmp_path: Path, settings: Settings, write_rows: Write) -> None:
    file = write_rows([{"text": "fine"}, {"txt": "wrong"}])
    strict = Settings(settings.tokenizer, "lm", settings.lengths, strict=True)
    with pytest.raises(MsLongctxError, match="rows.jsonl:2: missing_field: no field 'text'.*keys txt"):
        run([file], tmp_path / "a.mindrecord", strict)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_report_and_picture(tmp_path: Path, settings: Settings, write_rows: Write, paragraphs: list[dict]) -> None:
    output = run([write_rows(paragraphs[:200])], tmp_path / "a-b.v1.mindrecord", settings)["train"]
    report = json.loads(report_path(output).read_text())
    lengths = [len(ids) for ids, _ in samples_of(output)]
    assert sum(report["lengths"].values()) == len(lengths)
    assert report["length_quantiles"]["1.0"] == max(lengths) and report["length_quantiles"]["0.0"] == min(lengths)
    assert report["tokens"]["encoded"] == report["tokens"]["written"] + sum(report["lost"].values())
    picture = picture_path(output).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_split_is_by_content(tmp_path: Path, settings: Settings, write_rows: Write, paragraphs: list[dict]) -> None:
    """Equal rows are on one side; order and file do not matter; another seed divides otherwise."""
    rows = paragraphs[:400]
    split = {"eval_ratio": 0.2}
    base = [settings.tokenizer, "lm", settings.lengths]

    def divide(name: str, inputs: list[Path], seed: int = 0) -> tuple[set, set]:
        outputs = run(inputs, tmp_path / name / "a.mindrecord", Settings(*base, **split, split_seed=seed))
        assert outputs["eval"].name == "a.eval.mindrecord"
        train, held_out = ({tuple(ids) for ids, _ in samples_of(outputs[s])} for s in ("train", "eval"))
        return train, held_out

    first = divide("1", [write_rows(rows + rows)])
    again = divide("2", [write_rows(rows[::-1], "other.jsonl.gz")])
    assert first == again and 40 <= len(first[1]) <= 250
    assert divide("3", [write_rows(rows)], seed=1)[1] != first[1]


def test_repeating_the_same_call_does_nothing(tmp_path: Path, settings: Settings, write_rows: Write) -> None:
    file, output = write_rows([{"text": "one two three"}]), tmp_path / "a.mindrecord"
    run([file], output, settings)
    before = output.stat().st_mtime_ns
    assert prepare([str(file)], output, settings, num_workers=1).tally is None
    assert output.stat().st_mtime_ns == before
    other = Settings(settings.tokenizer, "lm", Lengths(64))
    with pytest.raises(MsLongctxError, match="other settings or inputs; replace it with --overwrite"):
        run([file], output, other)
    run([file], output, other, overwrite=True)
    assert load_manifest(output).seq_length == 64
    write_rows([{"text": "changed input"}])
    with pytest.raises(MsLongctxError, match="other settings or inputs"):
        run([file], output, other)


def test_overwrite_removes_what_is_left_of_the_old_set(
    tmp_path: Path, settings: Settings, write_rows: Write, paragraphs: list[dict]
) -> None:
    output = tmp_path / "a.mindrecord"
    run([write_rows(paragraphs)], output, settings, shard_bytes=200_000)
    assert output.with_name("a-00002.mindrecord").exists()
    run([write_rows(paragraphs[:10])], output, settings, overwrite=True)
    assert len(load_manifest(output).shards) == 1
    assert not list(tmp_path.glob("a-0*"))


def test_small_sets_are_small(tmp_path: Path, settings: Settings, write_rows: Write) -> None:
    """MindSpore's own defaults make 50 MB of one row."""
    output = run([write_rows([{"text": "tiny"}])], tmp_path / "a.mindrecord", settings)["train"]
    assert sum(file.stat().st_size for file in tmp_path.glob("a.mindrecord*")) < 80_000
    assert len(samples_of(output)) == 1


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path, settings: Settings) -> None:
    file = tmp_path / "w.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert len(samples_of(run([file], tmp_path / "a.mindrecord", settings)["train"])) == 2


# --- inputs and paths that cannot be used ---


@pytest.mark.parametrize("make, message", [
    (lambda folder: folder / "none.jsonl", "does not exist"),
    (lambda folder: folder / "*.nothing", "does not exist"),
    (lambda folder: folder, "is a directory"),
])  # fmt: skip
def test_inputs_that_are_not_there(tmp_path: Path, settings: Settings, make: Any, message: str) -> None:
    with pytest.raises(MsLongctxError, match=message):
        run([make(tmp_path)], tmp_path / "a.mindrecord", settings)


def test_damaged_gzip(tmp_path: Path, settings: Settings, paragraphs: list[dict]) -> None:
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in paragraphs).encode())
    for name, content in (
        ("cut.jsonl.gz", whole[: len(whole) // 2]),
        ("bad.jsonl.gz", whole[:3000] + b"x" * 99),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MsLongctxError, match=f"cannot read .*{name}"):
            run([tmp_path / name], tmp_path / "a.mindrecord", settings)
    assert not list(tmp_path.glob("a.mindrecord*"))


@pytest.mark.parametrize("content, message", [
    (b"", "rows.jsonl: empty; expected one JSON object"), (b"\n\n", "no line"), (b"plain words\n", "no line"),
    (b'{"foo": 1, "bar": 2}\n', r"rows.jsonl:1: the row has keys bar, foo.*article \+ abstract"),
    (b'\n[1]\n', "rows.jsonl:2: expected a JSON object"),
])  # fmt: skip
def test_format_that_cannot_be_seen(tmp_path: Path, settings: Settings, content: bytes, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(MsLongctxError, match=message):
        run([file], tmp_path / "a.mindrecord", settings)


def test_nothing_usable_leaves_no_set(tmp_path: Path, settings: Settings, write_rows: Write) -> None:
    file = write_rows([{"text": " "}, {"text": ""}])
    with pytest.raises(MsLongctxError, match="no sample for the train set: 2 rows read = 0 written.*empty 2"):
        run([file], tmp_path / "a.mindrecord", settings)
    held_out = Settings(settings.tokenizer, "lm", settings.lengths, eval_ratio=0.01)
    with pytest.raises(MsLongctxError, match="no sample for the eval set"):
        run([write_rows([{"text": "just one"}])], tmp_path / "a.mindrecord", held_out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


@pytest.mark.parametrize("name, message", [
    ("a", "ends in .mindrecord"), (".mindrecord", "ends in .mindrecord"), ("a;b.mindrecord", "contains ;"),
    ("a*.mindrecord", "contains")])  # fmt: skip
def test_output_names(tmp_path: Path, settings: Settings, write_rows: Write, name: str, message: str) -> None:
    with pytest.raises(MsLongctxError, match=message):
        run([write_rows([{"text": "t"}])], tmp_path / name, settings)


def test_output_that_someone_else_made_is_kept(tmp_path: Path, settings: Settings, write_rows: Write) -> None:
    output = tmp_path / "a.mindrecord"
    output.write_text("mine")
    with pytest.raises(MsLongctxError, match="not made by this tool"):
        run([write_rows([{"text": "t"}])], output, settings)
    assert output.read_text() == "mine"


# --- command line ---


def test_command_line(
    tmp_path: Path, sentencepiece_model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows([{"body": "An article. " * 50, "tldr": "The gist."}] * 3)
    output = tmp_path / "输出.mindrecord"
    base = ["prepare", "--input", str(rows), "--output", str(output), "--tokenizer", str(sentencepiece_model)]
    options = ["--seq_length", "64", "--prompt_length", "48", "--num_workers", "1"]
    assert main([*base, *options, "--fields", "article=body", "abstract=tldr"]) == 0
    assert "3 rows read = 3 written + 0 dropped; 3 samples" in capsys.readouterr().out
    assert load_manifest(output).longest <= 64
    assert main([*base, *options, "--fields", "article=body", "abstract=tldr"]) == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize("change, message", [
    (["--fields", "article"], "expected OURS=THEIRS"), (["--fields", "body=x"], "no format fits|no field"),
    (["--layout", "chat"], "layout 'chat'"), (["--truncation", "top"], "truncation 'top'"),
    (["--eval_ratio", "1.5"], "eval_ratio"), (["--seq_length", "1"], "seq_length 1"),
    (["--tokenizer", "none"], "tokenizer none does not exist"), (["--shard_mb", "0"], "1 or more"),
    (["--instruction", "Sum up."], "exactly once"), (["--output", "x.txt"], "ends in .mindrecord"),
    (["--prompt_length", "64"], "answer_length 0"),
])  # fmt: skip
def test_command_line_errors(
    tmp_path: Path, sentencepiece_model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str],
    change: list[str], message: str,
) -> None:  # fmt: skip
    rows = write_rows([{"article": "a", "abstract": "b"}])
    base = ["prepare", "--input", str(rows), "--output", str(tmp_path / "a.mindrecord"), "--seq_length", "64"]
    assert main([*base, "--tokenizer", str(sentencepiece_model), "--num_workers", "1", *change]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("error: ")
    assert re.search(message, error[0])
    assert not list(tmp_path.glob("a.mindrecord*"))
