# SPDX-License-Identifier: Apache-2.0
"""Known failures are found in realistic logs with their line, in the order of cause and effect, and nowhere else."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ms_longctx.doctor.logs import as_data, as_text, diagnose, load_rules
from ms_longctx.doctor.logs.detectors import FRAGMENTATION, REPEATED_OUTPUT, Fragmentation, Repetition
from ms_longctx.doctor.logs.reading import CHUNK, LONGEST_LINE, find_logs, rank_of, read_chunks, time_of
from ms_longctx.errors import MsLongctxError

DATA = yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text(encoding="utf-8"))
NOISE: list[str] = DATA["noise"].splitlines()
SAMPLES: dict[str, str] = DATA["samples"]
RULES = {rule.id: rule for rule in (*load_rules(), REPEATED_OUTPUT, FRAGMENTATION)}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ids(*paths: Path) -> list[str]:
    return [finding.rule.id for finding in diagnose(paths).findings]


class TestRules:
    def test_each_is_complete(self) -> None:
        assert set(RULES) == set(SAMPLES)
        assert len(RULES) == len(load_rules()) + 2  # no id stands twice
        for rule in RULES.values():
            assert rule.title and rule.cause and rule.cure, rule.id
            assert rule.source.startswith("https://") or Path(rule.source).is_file(), rule.id
            assert set(rule.covers) <= set(RULES), rule.id
            assert all(word == word.lower() for word in rule.words), rule.id

    @pytest.mark.parametrize("name", sorted(SAMPLES))
    def test_each_finds_its_log_in_noise(self, name: str, tmp_path: Path) -> None:
        """The failure comes first, at one of its own lines, with its text; nothing unrelated is named."""
        sample = SAMPLES[name].splitlines()
        log = write(tmp_path / "worker_3.log", *NOISE, *sample, *NOISE[:6])
        diagnosis = diagnose([log])
        assert diagnosis.first is not None and diagnosis.first.rule.id == name, as_text(diagnosis)
        assert len(NOISE) < diagnosis.first.line <= len(NOISE) + len(sample)
        assert diagnosis.first.rank == 3
        if name not in ("repeated_output", "fragmentation"):
            assert diagnosis.first.text == sample[diagnosis.first.line - len(NOISE) - 1].strip()
        assert [finding.rule.id for finding in diagnosis.findings] == [name], as_text(diagnosis)

    def test_a_healthy_log_gives_nothing(self, tmp_path: Path) -> None:
        diagnosis = diagnose([write(tmp_path / "worker_0.log", *NOISE)])
        assert diagnosis.findings == () and diagnosis.unknown == (), as_text(diagnosis)
        assert "no known failure found" in as_text(diagnosis)

    @pytest.mark.parametrize(
        "line",
        [
            "loss_nan_check: loss nan", "config.detect_nan_loss=True  loss=nan detect", "loss scale: inf",
            "closs: nano", "gloss = nan", "loss: nanometre", '{"loss": null, "note": "nan"}', "weight_loss nanny",
        ],
    )  # fmt: skip
    def test_words_that_only_look_like_a_lost_loss(self, line: str, tmp_path: Path) -> None:
        assert ids(write(tmp_path / "a.log", line)) == []

    @pytest.mark.parametrize(
        "line",
        [
            "step 3/10 loss nan lr 1e-5", "loss: -inf", '{"step": 3, "loss": NaN}', "train_loss=nan", "Loss is [nan]",
            "{'loss': 'nan', 'grad_norm': 3.0}",
        ],
    )  # fmt: skip
    def test_ways_to_print_a_lost_loss(self, line: str, tmp_path: Path) -> None:
        assert ids(write(tmp_path / "a.log", line)) == ["loss_nan"]

    def test_advice_of_cann_is_no_failure(self, tmp_path: Path) -> None:
        advice = (
            "        Solution: 1. If EI0002 or EI0006 is reported, see 'error cqe' in the plog. Address already in use."
        )
        assert ids(write(tmp_path / "a.log", advice)) == []


class TestOrder:
    """Cause before consequence, over several ranks."""

    def stamp(self, clock: str, text: str) -> str:
        return f"[ERROR] X(1,2,python):2026-11-30-{clock}.000.000 [a.cc:1] {text}"

    def test_the_first_rank_to_fail_comes_first(self, tmp_path: Path) -> None:
        a = write(tmp_path / "worker_0.log", *NOISE, self.stamp("10:34:20", "EI0002: notify wait timeout"))
        b = write(
            tmp_path / "worker_1.log", *NOISE, self.stamp("10:04:10", "#umsg#Memory not enough:#umsg#Device(id:1)")
        )
        c = write(tmp_path / "worker_2.log", *NOISE, self.stamp("10:34:21", "EI0002: notify wait timeout"))
        diagnosis = diagnose([a, b, c])
        assert [(f.rule.id, f.rank) for f in diagnosis.findings] == [
            ("device_memory", 1), ("hccl_execute_timeout", 0), ("hccl_execute_timeout", 2),
        ]  # fmt: skip
        text = as_text(diagnosis)
        assert "first failure: rank 1: the device's memory (HBM) is full" in text
        assert text.count("(follows from a failure above)") == 2
        assert as_data(diagnosis)["first_rank"] == 1

    def test_clocks_may_differ_a_little(self, tmp_path: Path) -> None:
        """A heartbeat that seems lost 2 s before the worker was killed follows from it all the same."""
        a = write(tmp_path / "scheduler.log", self.stamp("10:04:08", "worker 1 is the first one timed out"))
        b = write(tmp_path / "worker_1.log", self.stamp("10:04:10", "Error code: -9."))
        assert ids(a, b) == ["oom_killer", "heartbeat"]

    def test_a_timeout_long_before_is_the_first(self, tmp_path: Path) -> None:
        a = write(tmp_path / "worker_0.log", self.stamp("10:00:00", "EI0006: Getting socket times out."))
        b = write(tmp_path / "worker_1.log", self.stamp("10:04:10", "Error code: -9."))
        assert ids(a, b) == ["hccl_connect_timeout", "oom_killer"]

    def test_without_times_causes_come_first(self, tmp_path: Path) -> None:
        a = write(tmp_path / "worker_0.log", "error: rank 1 (process 7) failed: MsLongctxError: no more data")
        b = write(tmp_path / "worker_1.log", "OSError: [Errno 24] Too many open files")
        assert ids(a, b) == ["open_files", "peer_failed"]

    def test_the_rank_that_others_blame(self, tmp_path: Path) -> None:
        """Rank 1 died without a word that is known."""
        a = write(tmp_path / "worker_0.log", "error: rank 1 (process 7) was killed or crashed while rank 0 waits")
        b = write(tmp_path / "worker_1.log", "fine", "ValueError: strange")
        diagnosis = diagnose([a, b])
        assert diagnosis.first_rank == as_data(diagnosis)["first_rank"] == 1
        text = as_text(diagnosis)
        assert "first failure: rank 1, says another rank" in text and f"not known: {b}:2: ValueError" in text

    def test_a_killed_rank_by_its_exit_file(self, tmp_path: Path) -> None:
        """Its own log says nothing; launcher and other ranks only tell what follows, with older times or none."""
        started = self.stamp("10:00:00", "starting").replace("[ERROR]", "[INFO]")
        echo = "error: rank 2 (process 7) was killed or crashed while rank 1 (process 6) waits"
        ended = self.stamp("10:04:10", "There's worker exits with exception, kill all other workers.")
        logs = [write(tmp_path / "launcher.log", ended), write(tmp_path / "worker_1.log", started, echo)]
        logs.append(write(tmp_path / "worker_2.log", started))
        assert ids(*logs) == ["peer_failed", "launcher_ended"] and diagnose(logs).first_rank == 2
        time = time_of("2026-11-30-10:04:09.000.000")
        assert time is not None
        write(tmp_path / "worker_2.exit", f"{time:.6f} 137 2")
        write(tmp_path / "worker_1.exit", f"{time + 0.1:.6f} 2 1")
        diagnosis = diagnose(logs)
        assert [f.rule.id for f in diagnosis.findings] == ["oom_killer", "peer_failed", "launcher_ended"]
        text = as_text(diagnosis)
        assert f"first failure: rank 2: killed by SIGKILL (exit code 137) ({tmp_path}/worker_2.exit:1)" in text
        assert text.count("(follows from a failure above)") == 2

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("17.5 139 0", ["crashed"]), ("17.5 135 0", ["shared_memory"]), ("17.5 130 0", ["terminated"]),
            ("17.5 143 0", []), ("17.5 0 0", []), ("17.5 2 0", []), ("17.5 255 0", []), ("", []),
            ("nonsense 137 0", []),
        ],
    )  # fmt: skip
    def test_exit_files(self, content: str, expected: list[str], tmp_path: Path) -> None:
        write(tmp_path / "worker_0.exit", content)
        assert ids(write(tmp_path / "worker_0.log", "step 4")) == expected

    def test_ctrl_c_comes_before_what_the_launcher_says(self, tmp_path: Path) -> None:
        ended = self.stamp("10:04:10", "There's worker exits with exception, kill all other workers.")
        logs = [write(tmp_path / "launcher.log", ended), write(tmp_path / "worker_0.log", "stopped after 2 of 3")]
        time = time_of("2026-11-30-10:04:11.000.000")
        write(tmp_path / "worker_0.exit", f"{time} 130 0")
        assert ids(*logs) == ["terminated", "launcher_ended"]
        assert "first failure: rank 0: ended by Ctrl-C (exit code 130)" in as_text(diagnose(logs))

    def test_echoes_of_a_full_disk(self, tmp_path: Path) -> None:
        """Ranks 1 and 2 end before rank 0, whose own message says why."""
        echo = "error: rank 0 could not begin the checkpoint of step 4; its own message says why"
        lines = ["error: no space left in /data: 3.1 GB are needed", echo, echo]
        logs = [write(tmp_path / f"worker_{rank}.log", line) for rank, line in enumerate(lines)]
        for rank, end in enumerate((30, 10, 20)):
            write(tmp_path / f"worker_{rank}.exit", f"{end} 2 {rank}")
        diagnosis = diagnose(logs)
        assert [(f.rule.id, f.rank) for f in diagnosis.findings] == [
            ("disk_full", 0), ("peer_failed", 1), ("peer_failed", 2),
        ]  # fmt: skip
        assert as_text(diagnosis).count("(follows from a failure above)") == 2
        assert diagnose(logs[1:]).first_rank == 0

    def test_a_consequence_without_a_time_of_its_own(self, tmp_path: Path) -> None:
        """Rank 0's last time is that of its start, an hour before rank 1's memory was full."""
        started = self.stamp("09:04:10", "starting").replace("[ERROR]", "[INFO]")
        a = write(tmp_path / "worker_0.log", started, "EI0002: notify wait timeout")
        b = write(tmp_path / "worker_1.log", self.stamp("10:04:10", "std::bad_alloc"))
        assert ids(a, b) == ["host_memory", "hccl_execute_timeout"]

    def test_lines_without_a_time_take_that_of_the_line_before(self, tmp_path: Path) -> None:
        log = write(tmp_path / "worker_0.log", "std::bad_alloc", self.stamp("10:00:05", "fine"), "EI0005: arguments")
        times = {finding.rule.id: finding.time for finding in diagnose([log]).findings}
        assert times["host_memory"] == times["hccl_arguments"] == time_of("2026-11-30-10:00:05.000.000")

    def test_a_failure_is_named_once_a_file(self, tmp_path: Path) -> None:
        log = write(tmp_path / "a.log", *["RuntimeError: Memory not enough: x", "fine"] * 5)
        (finding,) = diagnose([log]).findings
        assert (finding.line, finding.count) == (1, 5)

    def test_unknown_errors_are_shown_when_nothing_is_known(self, tmp_path: Path) -> None:
        log = write(tmp_path / "a.log", "fine", "Traceback (most recent call last):", "ValueError: strange")
        assert f"not known: {log}:2: Traceback" in as_text(diagnose([log]))


class TestRepetition:
    @pytest.mark.parametrize(
        "line",
        [
            "the cat sat on the mat, " * 8, "研究结果表明该方法有效。" * 8, "ha" * 40, "A: yes. B: no, it is. " * 8,
        ],
    )  # fmt: skip
    def test_loops(self, line: str) -> None:
        assert Repetition().feed(line) is not None

    @pytest.mark.parametrize(
        "line",
        [
            "=" * 200, "0, " * 100, "ffff" * 50, "[nan, nan, nan, " * 20, "<pad>" * 50, "very " * 8, " ".join(NOISE),
            "[WARNING] " + "slow data " * 20, "█" * 100, "None, True, False, " * 20,
        ],
    )  # fmt: skip
    def test_what_is_no_text(self, line: str) -> None:
        assert Repetition().feed(line) is None

    def test_the_same_line_eight_times(self) -> None:
        detector = Repetition()
        found = [detector.feed("- The patients were treated.") for _ in range(8)]
        assert found == [None] * 7 + ["- The patients were treated."]

    def test_the_same_warning_is_no_text(self) -> None:
        detector = Repetition()
        assert all(detector.feed("WARNING the data is slow today") is None for _ in range(50))


class TestFragmentation:
    def test_the_pool_of_another_framework(self) -> None:
        line = (
            "RuntimeError: NPU out of memory. Tried to allocate 4.00 GiB (NPU 0; 60.97 GiB total capacity; 44.00 GiB "
            "already allocated; 44.00 GiB current active; 1.00 GiB free; 58.00 GiB reserved in total by PyTorch)"
        )
        assert Fragmentation().feed(line) == "4.0 GB wanted, 44.0 GB in use, 58.0 GB taken"
        assert Fragmentation().feed(line.replace("44.00 GiB already", "57.50 GiB already")) is None

    def test_gaps_are_no_failure_while_all_fits(self, tmp_path: Path) -> None:
        assert ids(write(tmp_path / "a.log", *SAMPLES["fragmentation"].splitlines()[:2])) == []


class TestReading:
    def test_ranks_of_files(self) -> None:
        names = {
            "a/worker_3.log": 3,
            "rank_12/stdout.txt": 12,
            "log/rank.7": 7,
            "device_0/train.log": 0,
            "plog-99_2.log": None,
        }
        assert {name: rank_of(Path(name)) for name in names} == names

    def test_times(self) -> None:
        wanted = time_of("2026-11-30 10:04:09,261 INFO")
        assert wanted is not None
        assert time_of("[ERROR] A(1):2026-11-30-10:04:09.261.455 x") == pytest.approx(wanted + 455e-6)
        assert time_of("2026-11-30T10:04:09Z") == pytest.approx(wanted - 0.261)
        assert time_of('{"step": 1, "time": 1796033035.5}') == 1796033035.5
        assert time_of("2026-99-99 10:04:09") is None and time_of("step 3") is None

    def test_directories(self, tmp_path: Path) -> None:
        (tmp_path / "rank_1").mkdir()
        logs = [write(tmp_path / "rank_1" / "out.txt", "a"), write(tmp_path / "scheduler.log", "b")]
        (tmp_path / "core.bin").write_bytes(b"\0\1\2")
        assert find_logs([str(tmp_path)]) == logs
        assert find_logs([str(logs[0]), str(tmp_path)]) == logs
        for wrong in (tmp_path / "missing.log", tmp_path / "empty"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            with pytest.raises(MsLongctxError, match="--log: .*(does not exist|holds no text file); expected"):
                find_logs([str(wrong)])

    def test_files_that_hold_no_text(self, tmp_path: Path) -> None:
        noise = random.Random(3).randbytes(9000).replace(b"\0", b"")
        for name, content in (("a.mindrecord", b"\0\0\0\x08header" * 99), ("random.log", noise)):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(MsLongctxError, match=f"--log: .*{name} is not a text file; expected a log"):
                find_logs([str(tmp_path / name)])
        bar = tmp_path / "bar.log"
        bar.write_bytes("\x1b[32mtrain\x1b[0m \r\b\b 研究结果\n".encode("gbk") * 50)
        assert find_logs([str(tmp_path)]) == find_logs([str(bar)]) == [bar]

    def test_line_numbers_survive_pieces_and_broken_bytes(self, tmp_path: Path) -> None:
        log = tmp_path / "a.log"
        log.write_bytes(b"\xff\xfe broken\r\n" + b"x" * (3 * LONGEST_LINE + 5) + b"\nstd::bad_alloc")
        (finding,) = diagnose([log]).findings
        assert finding.line == 3 and diagnose([log]).lines == 3
        assert sum(len(chunk) for chunk in read_chunks(log)) == 6

    @pytest.mark.slow
    def test_a_large_file_is_not_held(self, tmp_path: Path) -> None:
        """13 MB with a failure in its last line; the process may use 6 MB more than it has."""
        log = tmp_path / "worker_0.log"
        block = "\n".join([*NOISE, *[os.urandom(1500).hex()] * 60]) + "\n"
        with log.open("w") as file:
            for _ in range(13_500_000 // len(block.encode())):
                file.write(block)
            file.write("epoch: 9 step: 1, loss is nan\n")
        assert log.stat().st_size > 50 * CHUNK
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        diagnosis = diagnose([log])
        assert [finding.rule.id for finding in diagnosis.findings] == ["loss_nan"]
        assert diagnosis.first is not None and diagnosis.first.line == diagnosis.lines
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 6 * 1024


def test_command_line(tmp_path: Path) -> None:
    """Exit code 1 and the failure for a broken run, 0 for a healthy one, 2 for no log; JSON as documented."""
    write(tmp_path / "worker_0.log", *NOISE, SAMPLES["port_in_use"])
    (tmp_path / "good").mkdir()
    write(tmp_path / "good" / "worker_0.log", *NOISE)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", "-m", "ms_longctx.cli.main", "doctor", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)

    broken = run("--log", str(tmp_path / "worker_0.log"), "--json", str(tmp_path / "report.json"))
    assert broken.returncode == 1 and "the scheduler's port is in use" in broken.stdout, broken.stderr
    assert " mindspore\n" not in broken.stderr and " numpy\n" not in broken.stderr  # quick, and on a broken machine
    (finding,) = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert finding["id"] == "port_in_use" and finding["line"] == len(NOISE) + 1
    assert run("--log", str(tmp_path / "good")).returncode == 0
    missing = run("--log", str(tmp_path / "nothing.log"))
    assert missing.returncode == 2 and "error: --log: " in missing.stderr
