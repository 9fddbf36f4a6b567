# SPDX-License-Identifier: Apache-2.0
"""The host: disk, shared memory, limits, memory, names, ports and the clock."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import socket
import struct
import time
from pathlib import Path

from ms_longctx.doctor.check import Check, Host, Result

_GB = 1e9
_SEGMENTS = "ms_longctx."  # prefix of csrc/comm_segment.cc
_HCCL_PORTS = (60000, 60031)
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


def check_disk(folder: Path, least_gb: float = 2.0, good_gb: float = 50.0) -> Check:
    """Free space where a run would be saved.

    Args:
        folder: directory of the runs.
        least_gb, good_gb: less than this fails, less than that is a warning (a 7B checkpoint with AdamW: 84 GB).
    """
    free = shutil.disk_usage(folder).free / _GB
    value = f"{free:.0f} GB free in {folder.absolute()}"
    if not os.access(folder, os.W_OK):
        return Check(
            "disk", Result.FAILURE, f"{folder.absolute()} cannot be written", advice="change to another directory"
        )
    advice = "free some, or set train.output_dir elsewhere"
    if free < least_gb:
        return Check("disk", Result.FAILURE, value, f"at least {least_gb:.0f} GB", advice)
    if free < good_gb:
        return Check("disk", Result.WARNING, value, f"{good_gb:.0f} GB for checkpoints of large models", advice)
    return Check("disk", Result.OK, value)


def check_shared_memory(host: Host) -> list[Check]:
    """Size of /dev/shm, and segments of jobs that were killed."""
    folder = host.path("/dev/shm")
    if not folder.is_dir():
        return [Check("/dev/shm", Result.FAILURE, "does not exist", "a tmpfs", "mount -t tmpfs tmpfs /dev/shm")]
    usage = shutil.disk_usage(folder)
    value = f"{usage.free / _GB:.2f} of {usage.total / _GB:.2f} GB free"
    advice = "docker run --shm-size=16g (or --ipc=host); mount -o remount,size=16g /dev/shm"
    checks = [Check("/dev/shm", Result.OK, value)]
    if usage.free < 0.25 * _GB:
        checks = [Check("/dev/shm", Result.FAILURE, value, "at least 0.25 GB", advice)]
    elif usage.free < 1 * _GB:
        checks = [Check("/dev/shm", Result.WARNING, value, "1 GB or more for several workers", advice)]
    left = [path for path in sorted(folder.glob(f"{_SEGMENTS}*")) if not _is_held(path)]
    if left:
        names = " ".join(f"/dev/shm/{path.name}" for path in left)
        checks.append(Check("/dev/shm leftovers", Result.WARNING, names, "none", f"of killed jobs: rm {names}"))
    return checks


def _is_held(path: Path) -> bool:
    """Whether a process holds a lock on the segment, as every rank of a running job does."""
    try:
        with path.open("r+b") as file:
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, lock)
    except OSError:
        return True  # of another user, or gone by now
    return int(struct.unpack("hhqqi4x", answer)[0]) != fcntl.F_UNLCK


def check_open_files(limit: int | None = None) -> Check:
    """The limit of file descriptors (the soft one: what a process has unless it asks for more)."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY or soft >= 4096:
        return Check("open files", Result.OK, "no limit" if soft == resource.RLIM_INFINITY else f"{soft}")
    advice = "ulimit -n 65536; docker run --ulimit nofile=65536:65536"
    result = Result.WARNING if soft >= 1024 else Result.FAILURE
    return Check("open files", result, f"{soft}", "4096 or more for many workers", advice)


def check_memory(host: Host, least_gb: float = 2.0, good_gb: float = 8.0) -> Check:
    """Host memory that is left, also within the limit of a container."""
    facts = dict(
        (line.split(":")[0], int(line.split()[1]) * 1024)
        for line in (host.read("/proc/meminfo") or "").splitlines()
        if line.startswith(("MemTotal:", "MemAvailable:"))
    )
    if len(facts) < 2:
        return Check("host memory", Result.ABSENT, "no /proc/meminfo")
    free, total, where = facts["MemAvailable"], facts["MemTotal"], ""
    limit = (host.read("/sys/fs/cgroup/memory.max") or "").strip()
    used = (host.read("/sys/fs/cgroup/memory.current") or "").strip()
    if limit.isdigit() and used.isdigit() and int(limit) - int(used) < free:
        free, total, where = int(limit) - int(used), int(limit), " (limit of the container)"
    value = f"{free / _GB:.1f} of {total / _GB:.1f} GB free{where}"
    if free < least_gb * _GB:
        return Check("host memory", Result.FAILURE, value, f"{least_gb:.0f} GB or more", "end other programs")
    if free < good_gb * _GB:
        return Check("host memory", Result.WARNING, value, f"{good_gb:.0f} GB", "load large models with fewer workers")
    return Check("host memory", Result.OK, value)


def check_hostname(name: str | None = None) -> Check:
    """Whether the machine's own name has an address; MPI and HCCL look for it."""
    own = name or socket.gethostname()
    try:
        address = socket.gethostbyname(own)
    except OSError as error:
        advice = f"add '<address of this machine> {own}' to /etc/hosts"
        return Check("host name", Result.FAILURE, f"{own}: {error.strerror or error}", "an address", advice)
    value = f"{own} is {address}"
    if address.startswith("127."):
        advice = "for several nodes give it its network address in /etc/hosts, or set HCCL_IF_IP and HCCL_SOCKET_IFNAME"
        return Check("host name", Result.WARNING, value, "an address that other nodes reach", advice)
    return Check("host name", Result.OK, value)


def check_ports(host: Host) -> list[Check]:
    """The scheduler's port, and on machines with devices those of HCCL."""
    port = host.environment.get("MS_SCHED_PORT") or host.environment.get("MASTER_PORT") or "8118"
    if not port.isdigit() or not 0 < int(port) < 65536:
        return [Check("scheduler port", Result.FAILURE, repr(port), "a number from 1 to 65535", "correct MASTER_PORT")]
    checks = [_port("scheduler port", int(port), f"see 'ss -ltnp sport = :{port}', or choose another MASTER_PORT")]
    if not host.has_devices:
        return checks
    reserved = (host.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").strip()
    first, last = _HCCL_PORTS
    taken = [number for number in range(first, last + 1) if not _is_free(number)]
    advice = f"sysctl -w net.ipv4.ip_local_reserved_ports={first}-{last}, or HCCL_HOST_SOCKET_PORT_RANGE=auto"
    if taken:
        return [*checks, Check("HCCL ports", Result.WARNING, f"{taken[0]} is in use", f"{first}-{last} free", advice)]
    if str(first) not in reserved:
        value = f"{first}-{last} free, but not reserved"
        return [*checks, Check("HCCL ports", Result.WARNING, value, "reserved from other programs", advice)]
    return [*checks, Check("HCCL ports", Result.OK, f"{first}-{last} free and reserved")]


def _port(name: str, number: int, advice: str) -> Check:
    if _is_free(number):
        return Check(name, Result.OK, f"{number} is free")
    return Check(name, Result.WARNING, f"{number} is in use", "a free port, where this node runs the scheduler", advice)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def check_clock(now: float | None = None) -> Check:
    """A plausible time that the kernel calls synchronized; times of several nodes are compared in logs."""
    seconds = time.time() if now is None else now
    value = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    if seconds < Path(__file__).stat().st_mtime - 86400:
        return Check("clock", Result.FAILURE, value, "the present", "set the clock: timedatectl set-ntp true")
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        state = -1
    if state == _TIME_ERROR:
        advice = "several nodes need one time: chrony or timedatectl set-ntp true on the host"
        return Check("clock", Result.WARNING, f"{value}, not synchronized", "synchronized by NTP", advice)
    return Check("clock", Result.OK, value if state < 0 else f"{value}, synchronized")
