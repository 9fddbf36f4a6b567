# SPDX-License-Identifier: Apache-2.0
"""Real interruptions of real runs: Ctrl-C, kill -9, dead workers, a stop while files are moved."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore.dataset as ds
import psutil
import pytest

from ms_longctx.data.convert import Settings
from ms_longctx.data.dataset import create_dataset
from ms_longctx.data.manifest import load_manifest, manifest_path, shard_paths, work_directory
from ms_longctx.data.prepare import prepare
from ms_longctx.data.report import report_path
from ms_longctx.data.samples import Lengths
from ms_longctx.errors import MsLongctxError

SCRIPT = """
import sys
from ms_longctx.data.convert import Settings
from ms_longctx.data.prepare import prepare
from ms_longctx.data.samples import Lengths

if __name__ == "__main__":
    settings = Settings(sys.argv[3], "lm", Lengths(128), eval_ratio=0.2)
    result = prepare([sys.argv[1]], sys.argv[2], settings, num_workers=2, shard_bytes=60_000)
    sys.exit(0 if result.finished else 130)
"""


@dataclass
class Job:
    """A preparation that takes some seconds in a process group of its own."""

    folder: Path
    rows: Path
    tokenizer: Path

    @property
    def output(self) -> Path:
        return self.folder / "a.mindrecord"

    @property
    def settings(self) -> Settings:
        return Settings(str(self.tokenizer), "lm", Lengths(128), eval_ratio=0.2)

    def start(self) -> subprocess.Popen[str]:
        script = self.folder / "job.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), str(self.rows), str(self.output), str(self.tokenizer)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def shards_done(self) -> int:
        try:
            state = json.loads((work_directory(self.output) / "state.json").read_text())
        except FileNotFoundError:
            return 0
        return len(state["shards"]["train"])

    def wait_for_shards(self, process: subprocess.Popen[str], count: int) -> None:
        until = time.monotonic() + 60
        while self.shards_done() < count:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, paragraphs: list[dict[str, str]]) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w", encoding="utf-8") as stream:
        for copy in range(4):
            stream.writelines(json.dumps({"text": f"{copy} {row['text']}"}) + "\n" for row in paragraphs)
    return file


@pytest.fixture
def job(tmp_path: Path, rows: Path, sentencepiece_model: Path) -> Job:
    return Job(tmp_path, rows, sentencepiece_model)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, rows: Path, sentencepiece_model: Path) -> Path:
    """The same set, prepared without an interruption."""
    job = Job(tmp_path_factory.mktemp("reference"), rows, sentencepiece_model)
    prepare([str(rows)], job.output, job.settings, num_workers=2, shard_bytes=60_000, progress=False)
    return job.output


def finish(job: Job) -> None:
    result = prepare([str(job.rows)], job.output, job.settings, num_workers=2, shard_bytes=60_000, progress=False)
    assert result.finished and not work_directory(job.output).exists()


def assert_same_bytes(output: Path, reference: Path) -> None:
    files = [file.name for file in sorted(reference.parent.glob("a*.mindrecord*"))]
    assert [file.name for file in sorted(output.parent.glob("a*.mindrecord*"))] == files
    for name in files:
        assert (output.parent / name).read_bytes() == (reference.parent / name).read_bytes(), name


def assert_same_samples(output: Path, reference: Path) -> None:
    for mine, expected in ((output, reference), (evaluation(output), evaluation(reference))):
        assert list(samples(mine)) == list(samples(expected))
    report, other = (json.loads(report_path(path).read_text()) for path in (output, reference))
    assert {k: report[k] for k in ("rows", "tokens", "lengths")} == {k: other[k] for k in ("rows", "tokens", "lengths")}


def evaluation(output: Path) -> Path:
    return output.with_name("a.eval.mindrecord")


def samples(output: Path) -> Iterator[list[int]]:
    rows = ds.MindDataset(shard_paths(output, load_manifest(output)), ["input_ids"], shuffle=False)
    for (ids,) in rows.create_tuple_iterator(num_epochs=1, output_numpy=True):
        yield ids.tolist()


@pytest.mark.slow
def test_kill_at_any_moment_and_go_on(job: Job, reference: Path) -> None:
    """Killed three times (the parent only, as the out-of-memory killer does), then finished: same bytes."""
    moments = random.Random(4)
    for shards in (1, 4, 9):
        process = job.start()
        job.wait_for_shards(process, shards)
        time.sleep(moments.random() * 0.15)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        with pytest.raises(MsLongctxError, match="not finished: run the same prepare command again"):
            create_dataset(job.output, 1, 128)
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive, "workers must end with their parent"
    finish(job)
    assert_same_bytes(job.output, reference)
    assert_same_samples(job.output, reference)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(job: Job, reference: Path) -> None:
    process = job.start()
    job.wait_for_shards(process, 2)
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    kept = job.shards_done()
    assert kept >= 2 and not job.output.exists()
    finish(job)
    assert_same_samples(job.output, reference)


@pytest.mark.slow
def test_dead_worker_is_reported_and_work_goes_on(job: Job, reference: Path) -> None:
    process = job.start()
    job.wait_for_shards(process, 1)
    workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    workers[0].kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 130)
    assert "a worker process died" in errors.splitlines()[-1]
    finish(job)
    assert_same_samples(job.output, reference)


@pytest.mark.slow
def test_two_at_once_are_refused(job: Job) -> None:
    process = job.start()
    job.wait_for_shards(process, 1)
    with pytest.raises(MsLongctxError, match="another process is preparing"):
        finish(job)
    assert process.wait(timeout=100) == 0


@pytest.mark.parametrize("moves", [0, 1, 3, 6, 7])
def test_stop_while_files_are_moved(job: Job, reference: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    """The last step moves files one by one; stopped after any of them, the next call completes it."""
    job.rows = job.folder / "few.jsonl"
    job.rows.write_text("".join(json.dumps({"text": f"row {index} of text"}) + "\n" for index in range(400)))
    expected = job.folder / "expected" / "a.mindrecord"
    prepare([str(job.rows)], expected, job.settings, num_workers=1, shard_bytes=6_000, progress=False)
    real, done = os.replace, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal done
        if ".mindrecord" in Path(source).name and Path(target).parent == job.folder:
            if done == moves:
                raise KeyboardInterrupt
            done += 1
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        prepare([str(job.rows)], job.output, job.settings, num_workers=1, shard_bytes=6_000, progress=False)
    assert not manifest_path(job.output).exists()
    result = prepare([str(job.rows)], job.output, job.settings, num_workers=1, shard_bytes=6_000, progress=False)
    assert result.finished
    assert_same_bytes(job.output, expected)


def test_unfinished_work_of_other_settings_is_not_mixed_in(job: Job) -> None:
    few = job.folder / "few.jsonl"
    few.write_text("".join(json.dumps({"text": f"row {index} of text"}) + "\n" for index in range(2000)))
    work = work_directory(job.output)
    work.mkdir()
    state = {"source": "something else", "chunks": 1, "complete": False, "tally": {}, "shards": {}}
    (work / "state.json").write_text(json.dumps(state))
    with pytest.raises(MsLongctxError, match="unfinished preparation with other settings.*--overwrite"):
        prepare([str(few)], job.output, job.settings, num_workers=1, progress=False)
    result = prepare([str(few)], job.output, job.settings, num_workers=1, progress=False, overwrite=True)
    assert result.finished and not work.exists()


def test_convert_script_alone(tmp_path: Path, sentencepiece_model: Path) -> None:
    """The tool runs from its file, in any directory, with nothing installed."""
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n')
    script = Path(__file__).resolve().parents[2] / "mindrecord_tools" / "convert.py"
    command = [
        sys.executable,
        str(script),
        "--input",
        "rows.jsonl",
        "--output",
        "a.mindrecord",
        "--layout",
        "lm",
    ]
    options = ["--tokenizer", str(sentencepiece_model), "--seq_length", "16", "--num_workers", "2"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "1 rows read = 1 written + 0 dropped" in done.stdout
    assert load_manifest(tmp_path / "a.mindrecord").samples == 1
    failed = subprocess.run([*command[:4], *options], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert failed.returncode == 2 and failed.stderr.startswith("error: ") and "--output" in failed.stderr
