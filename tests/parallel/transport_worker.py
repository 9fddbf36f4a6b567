# SPDX-License-Identifier: Apache-2.0
"""One rank of a job without MindSpore: ``transport_worker.py RANK SIZE JOB SCENARIO``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

import numpy as np

from ms_longctx.kernels import comm
from ms_longctx.kernels.comm import Collective, Kind

RANK, SIZE, JOB, SCENARIO = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
ALL = tuple(range(SIZE))


def random(shape: tuple[int, ...], dtype: type, ranks: tuple[int, ...] = ALL) -> list[np.ndarray]:
    """What each of the ranks holds."""
    return [(np.random.default_rng([r, *shape]).standard_normal(shape) * 50).astype(dtype) for r in ranks]


def total(parts: list[np.ndarray]) -> np.ndarray:
    """The sum in the order of the ranks, 16-bit floats added in float32."""
    wide = np.float32 if parts[0].dtype == np.float16 else parts[0].dtype
    result = parts[0].astype(wide)
    for part in parts[1:]:
        result = result + part.astype(wide)
    return result.astype(parts[0].dtype)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


def sums() -> None:
    """All sizes around the borders of the algorithm: empty, one trip, two trips, several turns of a channel."""
    for dtype in (np.float32, np.float16, np.int32, np.int64):
        for shape in ((), (0,), (3,), (7, 5), (8191,), (8193,), (300, 1001), (600011,)):
            parts = random(shape, dtype)
            same(Collective(ALL, Kind.ALL_REDUCE)(parts[RANK]), total(parts))
    parts = random((SIZE * 2, 5, SIZE * 3), np.float16)
    for axis in (0, 2, -1):
        expected = np.split(total(parts), SIZE, axis)[RANK]
        same(Collective(ALL, Kind.REDUCE_SCATTER, axis)(parts[RANK]), expected)
    for root in ALL:
        expected = total(parts) if root == RANK else np.zeros_like(parts[0])
        same(Collective(ALL, Kind.REDUCE, root)(parts[RANK]), expected)


def moves() -> None:
    for dtype, n in itertools.product((np.float32, np.int64, np.bool_, np.uint8), (1, 3, 5001)):
        parts = random((SIZE * 2, n, SIZE * 3), dtype)
        for axis in (0, 1, -1):
            same(Collective(ALL, Kind.ALL_GATHER, axis)(parts[RANK]), np.concatenate(parts, axis))
        for split, joined in itertools.product((0, 2), (0, 1, -1)):
            blocks = [np.split(part, SIZE, split)[RANK] for part in parts]
            same(Collective(ALL, Kind.ALL_TO_ALL, split, joined)(parts[RANK]), np.concatenate(blocks, joined))
        for offset in (1, -1, 2, SIZE):
            same(Collective(ALL, Kind.RING_SHIFT, offset)(parts[RANK]), parts[(RANK - offset) % SIZE])
        for root in ALL:
            same(Collective(ALL, Kind.BROADCAST, root)(parts[RANK]), parts[root])


def subgroups() -> None:
    """Rows and columns of a 2 x 2 grid in turn, and a group whose ranks do not ascend."""
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    for n in (5, 100003):
        for groups in (rows, columns, rows):
            ranks = next(group for group in groups if RANK in group)
            parts = random((n,), np.float32, ranks)
            same(Collective(ranks, Kind.ALL_REDUCE)(parts[ranks.index(RANK)]), total(parts))
        parts = random((n,), np.float32, (3, 1, 0))
        if RANK != 2:
            same(Collective((3, 1, 0), Kind.ALL_GATHER)(parts[(3, 1, 0).index(RANK)]), np.concatenate(parts))


def random_delays() -> None:
    """Every rank is late at random; each result would show a buffer that was used again too early."""
    rng = np.random.default_rng(RANK)
    shift, gather = Collective(ALL, Kind.RING_SHIFT, 1), Collective(ALL, Kind.ALL_GATHER)
    for turn in range(60):
        x = np.full(30000, 100 * turn + RANK, np.float32)
        time.sleep(rng.uniform(0, 0.004))
        moved = shift(x)
        x[:] = -1
        assert (moved == 100 * turn + (RANK - 1) % SIZE).all()
        joined = gather(moved).reshape(SIZE, -1)
        moved[:] = -1
        assert (joined == 100 * turn + (np.arange(SIZE)[:, None] - 1) % SIZE).all()


def counted_bytes() -> None:
    x = np.ones((SIZE, 1000), np.float32)  # more bytes than what all_reduce sends in one trip
    for kind, share in (
        (Kind.ALL_GATHER, SIZE - 1),
        (Kind.REDUCE_SCATTER, (SIZE - 1) / SIZE),
        (Kind.ALL_TO_ALL, (SIZE - 1) / SIZE),
        (Kind.RING_SHIFT, 1),
    ):
        before = comm.sent_bytes()
        Collective(ALL, kind, 1 if kind == Kind.RING_SHIFT else 0)(x)
        assert comm.sent_bytes() - before == share * x.nbytes


def wrong_order() -> None:
    first, second = Collective(ALL, Kind.ALL_REDUCE), Collective(ALL, Kind.ALL_REDUCE)
    for collective in (first, second) if RANK == 0 else (second, first):
        collective(np.ones(4, np.float32))


def wrong_shape() -> None:
    Collective(ALL, Kind.ALL_REDUCE)(np.ones((3, 4) if RANK == 0 else (4, 3), np.float32))


def wrong_type() -> None:
    Collective(ALL, Kind.ALL_GATHER)(np.ones(4, np.float32 if RANK == 0 else np.int32))


def wrong_kind() -> None:
    Collective(ALL, Kind.ALL_GATHER if RANK == 0 else Kind.BROADCAST)(np.ones(4, np.float32))


def cycle() -> None:
    """Each rank waits for the next one, in another group."""
    pairs = [tuple(sorted((r, (r + 1) % SIZE))) for r in ALL]
    collectives = {pair: Collective(pair, Kind.ALL_REDUCE) for pair in (pairs[RANK], pairs[RANK - 1])}
    collectives[pairs[RANK]](np.ones(4, np.float32))


def one_ends() -> None:
    if RANK != 1:
        Collective(ALL, Kind.ALL_REDUCE)(np.ones(4, np.float32))


def one_is_killed() -> None:
    collective = Collective(ALL, Kind.ALL_REDUCE)
    collective(np.ones(4, np.float32))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        collective(np.ones(1 << 22, np.float32))


def one_fails() -> None:
    if RANK == 1:
        comm.stop("rank 1 found no data")
        time.sleep(30)
    Collective(ALL, Kind.ALL_REDUCE)(np.ones(4, np.float32))


def one_is_slow() -> None:
    if RANK == 1:
        time.sleep(20)
    Collective(ALL, Kind.ALL_REDUCE)(np.ones(4, np.float32))


def idle() -> None:
    """Works until a file of the job's name appears (in the common working directory)."""
    collective = Collective(ALL, Kind.ALL_REDUCE)
    print("joined", flush=True)
    while not collective(np.array([os.path.exists("stop")], np.int32))[0]:
        time.sleep(0.01)


def main() -> int:
    timeout = 1.0 if SCENARIO == "one_is_slow" else 60.0
    try:
        comm.join(JOB, RANK, SIZE, timeout=timeout, join_timeout=10.0)
        globals()[SCENARIO]()
    except comm.CommunicationError as error:
        print(f"CommunicationError: {error}", flush=True)
        return 2
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
