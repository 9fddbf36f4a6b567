# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: found through ``msrun`` or ``mpirun``, or this process alone.

On a CPU they meet in shared memory (:mod:`ms_longctx.kernels.comm`), so MindSpore's own cluster is not started and
msrun's scheduler process has nothing to do. On Ascend ``mindspore.communication.init`` joins the cluster.

What the launchers set:

- msrun: ``MS_ROLE`` (MS_SCHED or MS_WORKER), ``MS_WORKER_NUM``, ``MS_SCHED_HOST``, ``MS_SCHED_PORT``; for a worker
  whose rank is known before the cluster stands ``MS_NODE_ID``.
- Open MPI's mpirun: ``OMPI_COMM_WORLD_RANK``, ``_SIZE`` and ``_LOCAL_SIZE``, ``PMIX_NAMESPACE`` (name of the job).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels import comm

if TYPE_CHECKING:
    from ms_longctx.parallel.collectives import Group


Default = TypeVar("Default", int, None)


class LaunchError(MsLongctxError):
    """The processes were started in a way that cannot work; the message says how to start them."""


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: ``"msrun"``, ``"mpirun"`` or ``"none"``.
        rank: of this process; ``None`` where only the cluster itself knows it.
        size: number of workers.
        job: a name that the workers of this job share with no other job on this host.
        scheduler: whether this is msrun's scheduler process.
        several_hosts: what shows that workers run on other hosts too; empty if nothing does.
    """

    launcher: str
    rank: int | None
    size: int
    job: str = ""
    scheduler: bool = False
    several_hosts: str = ""


@dataclass(frozen=True)
class World:
    """All processes of the job, seen from this one.

    Used as a context manager it tells the other ranks why this one fails, so that they end at once with the reason
    and not only when they next wait for it, and it turns MindSpore's error about a failed collective into a
    :class:`~ms_longctx.kernels.comm.CommunicationError` that names the ranks.
    """

    rank: int
    size: int
    target: str = "CPU"
    launcher: str = "none"

    def group(self, ranks: tuple[int, ...] | None = None) -> Group:
        """These ranks, by default all, as the group of collectives; this process must be among them."""
        from ms_longctx.parallel.collectives import Group

        group = Group(tuple(range(self.size)) if ranks is None else ranks, self.rank)
        if max(group.ranks) >= self.size:
            raise MsLongctxError(f"group {group.ranks}: the job has {self.size} ranks")
        return group

    def barrier(self) -> None:
        """Return when all processes have called it."""
        if self.size == 1:
            return
        if self.target == "CPU":
            comm.Collective(tuple(range(self.size)), comm.Kind.ALL_REDUCE)(np.ones(1, np.int32))
        else:
            from mindspore.communication import comm_func

            comm_func.barrier()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.size == 1 or self.target != "CPU":
            return
        if isinstance(error, SystemExit) and not error.code:
            return
        reason = comm.failure()
        if not reason:
            comm.stop(f"rank {self.rank} (process {os.getpid()}) failed: {type(error).__name__}: {error}")
        elif isinstance(error, Exception) and not isinstance(error, MsLongctxError):
            raise comm.CommunicationError(reason) from error


def join_world(target: str, timeout: float | None = None, join_timeout: float | None = None) -> World:
    """Find out which process of which job this is, and meet the others.

    Call it once, after the device was chosen. In msrun's scheduler process it does not return but raises
    ``SystemExit(0)``: at once on a CPU, on Ascend when the workers have ended.

    Args:
        target: the device target of this process, ``"CPU"`` or ``"Ascend"``.
        timeout, join_timeout: on a CPU, as for :func:`ms_longctx.kernels.comm.join`.

    Raises:
        LaunchError: an unknown launcher, or on a CPU workers on more than one host.
        CommunicationError: the processes do not find each other.
    """
    launch = read_launch(os.environ)
    if target == "Ascend":
        return _join_ascend(launch)
    if launch.scheduler:
        raise SystemExit(0)
    if launch.several_hosts:
        raise LaunchError(
            f"workers on several hosts ({launch.several_hosts}): with device_target {target} all "
            f"{launch.size} workers run on one host; use fewer workers, or Ascend"
        )
    if launch.size == 1:
        return World(0, 1, target, launch.launcher)
    if target != "CPU":
        raise LaunchError(f"{launch.size} workers with device_target {target}; expected CPU or Ascend")
    if launch.rank is None:
        raise LaunchError(f"{launch.size} workers, but this process was given no rank; start them by msrun or mpirun")
    comm.join(launch.job, launch.rank, launch.size, timeout, join_timeout)
    return World(launch.rank, launch.size, target, launch.launcher)


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Give each worker of this host its share of the cores, unless the user has said how many threads to use.

    Threads that wait actively for cores which others hold make a step many times slower. Call it before MindSpore is
    imported: the OpenMP runtime reads its settings once.
    """
    size = read_launch(environment).size
    if size == 1:
        return
    cores = len(os.sched_getaffinity(0))
    here = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    environment.setdefault("OMP_NUM_THREADS", str(max(cores // here, 1)))
    if cores < here:
        environment.setdefault("OMP_WAIT_POLICY", "passive")


def read_launch(environment: Mapping[str, str]) -> Launch:
    """What the environment says about how this process was started.

    Raises:
        LaunchError: a number that is none, or a launcher that is not supported.
    """
    if "MS_ROLE" in environment:
        return _msrun(environment)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _mpirun(environment)
    for name in ("PMI_SIZE", "RANK_SIZE"):
        if (size := _number(environment, name, 1)) > 1:
            if name == "PMI_SIZE":
                raise LaunchError(f"PMI_SIZE={size}: this mpirun is not Open MPI's; use Open MPI or msrun")
            return Launch("none", None, size)
    return Launch("none", 0, 1)


def _msrun(environment: Mapping[str, str]) -> Launch:
    size = _number(environment, "MS_WORKER_NUM", 1)
    if environment["MS_ROLE"] == "MS_SCHED":
        return Launch("msrun", None, size, scheduler=True)
    rank = _number(environment, "MS_NODE_ID", None)
    host, port = environment.get("MS_SCHED_HOST", "127.0.0.1"), environment.get("MS_SCHED_PORT", "0")
    job = f"msrun-{os.getuid()}-{port}"
    parent = Path(f"/proc/{os.getppid()}")
    words = _msrun_options(parent)
    hosts = ""
    if not _is_local(host):
        hosts = f"the scheduler's address {host} is not of this host"
    elif rank is None or int(words.get("local_worker_num", size)) < size:
        hosts = "msrun starts fewer workers here than there are"
    # With --join msrun lives as long as its workers, and tells apart jobs that use the same port. Otherwise it ends
    # before or after a worker gets here, so it cannot be part of the name.
    if words.get("join", "false").lower() == "true":
        job += f"-{parent.name}"
    return Launch("msrun", rank, size, job, several_hosts=hosts)


def _mpirun(environment: Mapping[str, str]) -> Launch:
    rank, size = _number(environment, "OMPI_COMM_WORLD_RANK", None), _number(environment, "OMPI_COMM_WORLD_SIZE", 1)
    here = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    name = environment.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}"
    job = f"mpirun-{os.getuid()}-" + re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return Launch("mpirun", rank, size, job, several_hosts=f"mpirun put {here} here" if here < size else "")


def _msrun_options(parent: Path) -> dict[str, str]:
    """Options of the msrun that started this process, or nothing if that is not its parent any more."""
    try:
        words = (parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    if not any(Path(word).name == "msrun" for word in words[:3]):
        return {}
    options: dict[str, str] = {}
    for word, following in zip(words, words[1:], strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            options.setdefault(name[2:], value if equals else following)
    return options


def _is_local(host: str) -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _number(environment: Mapping[str, str], name: str, default: Default) -> int | Default:
    """The value as a number; ``default`` where it is not set."""
    text = environment.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise LaunchError(f"{name}={text!r} in the environment: expected a whole number")
    return int(text)


def _join_ascend(launch: Launch) -> World:
    if launch.size == 1 and not launch.scheduler:
        return World(0, 1, "Ascend", launch.launcher)
    from mindspore import communication

    communication.init()
    if launch.scheduler:
        raise SystemExit(0)
    return World(communication.get_rank(), communication.get_group_size(), "Ascend", launch.launcher)
