# SPDX-License-Identifier: Apache-2.0
"""The stand-in for CANN: built, checked, cached and removed; and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ms_longctx.parallel import virtual_cluster
from ms_longctx.parallel.virtual_cluster import canary, cluster, symbols, tools
from ms_longctx.parallel.virtual_cluster.log import failure_line

needs_compiler = pytest.mark.skipif(
    tools.missing_reason() is not None or cluster.has_cann(), reason=tools.missing_reason() or "CANN is installed"
)

_PREFIX = "(4711,7fead8bc5b80,python):2026-11-30-14:56:17.290.406 [mindspore/ccsrc/frontend/a.cc:269] "


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("MS_LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path / "cache" / "virtual_cluster"


@pytest.mark.slow
@needs_compiler
def test_build_check_reuse_remove(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    (own_cache / ".building-killed").mkdir()
    simulator = virtual_cluster.prepare()
    assert simulator.root is not None and simulator.build_seconds > 0
    assert [path.name for path in own_cache.iterdir() if path.is_dir()] == [simulator.root.parent.parent.name]
    again = virtual_cluster.prepare()
    assert again.root == simulator.root and again.build_seconds == 0

    # The library answers for itself: it names a chip and reports the memory that the description promises.
    code = (
        "import ctypes; cann = ctypes.CDLL('libascendcl.so'); name = cann.aclrtGetSocName; "
        "name.restype = ctypes.c_char_p; free, total = ctypes.c_size_t(), ctypes.c_size_t(); "
        "assert cann.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total)) == 0; "
        "print(name().decode(), total.value >> 30, cann.aclrtMalloc())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], env=simulator.environment(3, 8), capture_output=True, text=True, check=True
    )
    soc, gib, generated = answer.stdout.split()
    assert f"({soc}, {gib} GiB)" in simulator.description and generated == "0"

    assert virtual_cluster.remove() == [simulator.root.parent.parent]
    assert not simulator.root.exists()
    assert virtual_cluster.remove() == []


@pytest.mark.slow
@needs_compiler
def test_canaries_see_a_useless_cluster(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in whose checks fail is not kept. The programs are swapped, so each ends as the other must."""
    run = canary._run
    monkeypatch.setattr(canary, "_run", lambda program, *rest: run("reject" if program == "pass" else "pass", *rest))
    with pytest.raises(virtual_cluster.VirtualClusterError, match="correct program does not compile.*PARALLEL"):
        virtual_cluster.prepare()
    assert [path.name for path in own_cache.iterdir()] == ["lock"]


def test_canary_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every way in which the two programs can end wrongly is an error of its own."""
    refused = f"[ERROR] PARALLEL{_PREFIX}Check] MatMulInfo11: {canary._REJECTION}\n"
    good_graph = "%1 = AllReduce(%0) {group_rank_ids: (4, 5, 6, 7)}"

    def verdict(passed: tuple[int, str], rejected: tuple[int, str], graph: str) -> str:
        def run(program: str, environment: object, folder: str) -> tuple[int, str]:
            (Path(folder) / "rank_5").mkdir(exist_ok=True)
            (Path(folder) / "rank_5" / "21_validate_0001.ir").write_text(graph)
            return passed if program == "pass" else rejected

        monkeypatch.setattr(canary, "_run", run)
        try:
            canary.check({})
        except virtual_cluster.VirtualClusterError as error:
            return str(error)
        return ""

    memory = "simulated bytes: 9000\n"
    assert verdict((0, memory), (1, refused), good_graph) == ""
    assert "without the communication" in verdict((0, memory), (1, refused), "%1 = AllReduce(%0) {}")
    assert "took no memory" in verdict((0, "simulated bytes: 0\n"), (1, refused), good_graph)
    assert "compiled instead of refused" in verdict((0, memory), (0, memory), good_graph)
    assert "another reason: KeyError: 'x'" in verdict((0, memory), (1, "KeyError: 'x'"), good_graph)
    assert "crashed (SIGFPE)" in verdict((-8, ""), (1, refused), good_graph)


def test_failure_line() -> None:
    """What caused it comes before its consequences, and what is always there is left out."""
    noise = f"[ERROR] ME{_PREFIX}CheckFailed: No module named 'te'\n"
    parallel = f"[ERROR] PARALLEL{_PREFIX}CheckInputStrategy] MatMulInfo11: Invalid strategy\n"
    later = f"[ERROR] PARALLEL{_PREFIX}Init] MatMulInfo11 : Init failed.\n"
    raised = "Traceback (most recent call last):\n  File x\nRuntimeError: Failure:operator MatMul init failed\n\n- C\n"
    other = f"[CRITICAL] DEVICE{_PREFIX}Allocate] out of memory\n"
    assert failure_line(noise + parallel + later + raised, 1) == "[ERROR] PARALLEL: MatMulInfo11: Invalid strategy"
    assert failure_line(noise + other + raised, 1) == "RuntimeError: Failure:operator MatMul init failed"
    assert failure_line(noise + "ms_longctx.errors.MsLongctxError: mp = 3 is odd\n", 1) == "mp = 3 is odd"
    assert failure_line(noise + other, -11) == "the compiler crashed (SIGSEGV): [ERROR] DEVICE: out of memory"
    assert failure_line(noise, -8) == "the compiler crashed (SIGFPE): no error line in its log"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's variables do not reach a simulated rank; the user's own do."""
    for name in ("MS_WORKER_NUM", "MS_ROLE", "RANK_TABLE_FILE", "OMPI_COMM_WORLD_SIZE", "GLOG_v", "RANK_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("MS_LONGCTX_CACHE", "/cache")
    environment = cluster.Simulator(Path("/c")).environment(rank=5, worker_num=16, level=0)
    simulated = {name: value for name, value in environment.items() if name.startswith(("MS_", "RANK", "OMPI", "GLOG"))}
    assert simulated == {
        "RANK_ID": "5", "RANK_SIZE": "16", "MS_SIMULATION_LEVEL": "0", "MS_LONGCTX_CACHE": "/cache",
    }  # fmt: skip
    assert environment["PYTHONPATH"] == "/c/python:/mine"
    with_cann = cluster.Simulator(None).environment(rank=0, worker_num=2)
    assert with_cann["PYTHONPATH"] == "/mine" and "ASCEND_HOME_PATH" not in with_cann


def test_installed_cann_is_used(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib64").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib64"))
    assert not cluster.has_cann()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    assert cluster.has_cann()
    assert virtual_cluster.prepare() == cluster.Simulator(None)
    assert not own_cache.exists()


def test_without_compiler(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda name: None if name == "g++" else f"/usr/bin/{name}")
    monkeypatch.setattr(cluster, "has_cann", lambda: False)
    with pytest.raises(virtual_cluster.VirtualClusterError, match=r"no CANN.*g\+\+ not found; install gcc"):
        virtual_cluster.prepare()
    monkeypatch.setattr(tools.platform, "machine", lambda: "aarch64")
    with pytest.raises(virtual_cluster.VirtualClusterError, match="x86-64 only, this machine is aarch64"):
        virtual_cluster.prepare()


def test_no_plugin(tmp_path: Path) -> None:
    with pytest.raises(virtual_cluster.VirtualClusterError, match="no Ascend plugin for x86-64"):
        symbols.plugin_libraries(tmp_path)
