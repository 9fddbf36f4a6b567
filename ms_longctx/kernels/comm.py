# SPDX-License-Identifier: Apache-2.0
"""The shared-memory transport between the processes of one job on one host (csrc/comm_*), for NumPy arrays.

MindSpore's operators on the same transport are in :mod:`ms_longctx.parallel.collectives`; both kinds may be mixed.
A process joins once; a failure (a rank that ended, collectives that do not match, a timeout) ends communication for
all ranks: each gets a :class:`CommunicationError` that says what the first of them found.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from ms_longctx import kernels
from ms_longctx.errors import MsLongctxError

MOST_RANKS = 64
TIMEOUT_VARIABLE = "MS_LONGCTX_COMM_TIMEOUT"
DEFAULT_TIMEOUT, DEFAULT_JOIN_TIMEOUT = 1800.0, 120.0


class CommunicationError(MsLongctxError):
    """The processes of this job can no longer communicate; the message names the ranks and what they were doing."""


class Kind(IntEnum):
    """What a collective does; the numbers are those of csrc/comm_message.h."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    RING_SHIFT = 4
    BROADCAST = 5
    REDUCE = 6


# Members of a group make their collectives in the same order, so equal numbers mean the same one on all ranks.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


def next_number(ranks: tuple[int, ...]) -> int:
    """Number of a new collective among those of its group."""
    return next(_numbers[ranks])


def join(job: str, rank: int, size: int, timeout: float | None = None, join_timeout: float | None = None) -> None:
    """Meet the other processes of a job; returns when all are there.

    Args:
        job: name that only the processes of this job share, of letters, digits and ``._-``.
        rank, size: place of this process and number of processes (at most :data:`MOST_RANKS`).
        timeout: seconds that a collective waits for ranks that live but do not come (they may be compiling); the
            default is the environment variable ``MS_LONGCTX_COMM_TIMEOUT``, else 1800. Ranks that died, that wait
            for each other or that call something else are found within two seconds all the same.
        join_timeout: seconds to wait for processes that start late, by default 120.

    Raises:
        CommunicationError: no kernels, too little shared memory, a second job of that name, or a rank is missing.
    """
    if not kernels.available():
        raise CommunicationError(f"several processes on a CPU need the C++ kernels: {kernels.reason()}")
    limit = _seconds(timeout)
    waiting = DEFAULT_JOIN_TIMEOUT if join_timeout is None else join_timeout
    library = _library()
    if library.ms_longctx_comm_join(job.encode(), rank, size, ctypes.c_double(waiting), ctypes.c_double(limit)):
        raise CommunicationError(f"rank {rank} cannot join the other processes: {failure()}")
    atexit.register(library.ms_longctx_comm_leave)


def failure() -> str:
    """Why this process can no longer communicate; empty as long as it can."""
    return str(_library().ms_longctx_comm_failure().decode()) if kernels.available() else ""


def stop(reason: str) -> None:
    """Make all ranks fail with ``reason``, in the collective they wait in or in their next one."""
    _library().ms_longctx_comm_stop(reason.encode())


def sent_bytes() -> int:
    """Bytes of tensors that this process has sent to others so far."""
    return int(_library().ms_longctx_comm_sent_bytes())


class Collective:
    """A collective on C-contiguous arrays; ``ranks`` and the arguments as in :mod:`ms_longctx.parallel.collectives`.

    Args:
        ranks: the group, in order; all members create their collectives in the same order.
        kind: what it does.
        first, second: the axes, the offset or the root that this kind needs.
    """

    def __init__(self, ranks: tuple[int, ...], kind: Kind, first: int = 0, second: int = 0) -> None:
        self.ranks, self.kind, self.first, self.second = ranks, kind, first, second
        self.number = next_number(ranks)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Run it; every member must.

        Raises:
            CommunicationError: it cannot be completed.
        """
        x = np.asarray(x, order="C")
        out = np.empty(result_shape(self.kind, list(x.shape), len(self.ranks), self.first, self.second), x.dtype)
        code = _library().ms_longctx_comm_call(
            int(self.kind), self.first, self.second, self.number, (ctypes.c_int * len(self.ranks))(*self.ranks),
            len(self.ranks), x.dtype.name.encode(), (ctypes.c_int64 * x.ndim)(*x.shape), x.ndim,
            x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        if code:
            raise CommunicationError(failure())
        return out


def result_shape(kind: Kind, shape: list[int], size: int, first: int, second: int) -> list[int]:
    """Shape that a collective over ``size`` ranks makes of ``shape``; -1 stands for a length not known yet.

    Raises:
        MsLongctxError: a length does not divide, or there is no such axis.
    """
    result = list(shape)
    split = {Kind.REDUCE_SCATTER: first, Kind.ALL_TO_ALL: first}.get(kind)
    joined = {Kind.ALL_GATHER: first, Kind.ALL_TO_ALL: second}.get(kind)
    for axis in (split, joined):
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise MsLongctxError(f"{kind.name.lower()}: shape {tuple(shape)} has no axis {axis}")
    if split is not None and result[split] >= 0:
        if result[split] % size:
            raise MsLongctxError(
                f"{kind.name.lower()}: axis {split} of shape {tuple(shape)} cannot be split over {size} ranks"
            )
        result[split] //= size
    if joined is not None and result[joined] >= 0:
        result[joined] *= size
    return result


def _seconds(timeout: float | None) -> float:
    if timeout is not None:
        return timeout
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise CommunicationError(f"{TIMEOUT_VARIABLE}={text!r}: expected a number of seconds above 0")
    return seconds


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(kernels.library_path()))
    library.ms_longctx_comm_failure.restype = ctypes.c_char_p
    library.ms_longctx_comm_sent_bytes.restype = ctypes.c_int64
    return library
