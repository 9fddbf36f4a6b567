# SPDX-License-Identifier: Apache-2.0
"""One rank of a job: ``collectives_worker.py RANK SIZE JOB MODE SCENARIO...`` with MODE graph or pynative."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_longctx.kernels import comm
from ms_longctx.parallel.collectives import (
    Group,
    make_all_gather,
    make_all_reduce,
    make_all_to_all,
    make_broadcast,
    make_reduce_scatter,
    make_ring_shift,
)
from ms_longctx.parallel.world import World

RANK, SIZE, JOB, MODE, *SCENARIOS = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
Arrays = list[np.ndarray]


class Call(nn.Cell):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


def total(parts: Arrays) -> np.ndarray:
    return sum(parts[1:], parts[0])


def check(group: Group, make: Callable, forward: Callable, gradient: Callable, shape: tuple[int, ...]) -> None:
    """Result and gradient equal NumPy's bit for bit: sums are fp32 in the order of the group.

    ``forward`` and ``gradient`` map what all members hold to what all of them get.
    """
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal(shape).astype(np.float32) for _ in group.ranks]
    net = Call(make(group))
    expected = forward(parts)
    np.testing.assert_array_equal(net(Tensor(parts[group.index])).asnumpy(), expected[group.index])
    d_parts = [rng.standard_normal(expected[0].shape).astype(np.float32) for _ in group.ranks]
    grad = ops.GradOperation(get_all=True, sens_param=True)(net)
    (got,) = grad(Tensor(parts[group.index]), Tensor(d_parts[group.index]))
    np.testing.assert_array_equal(got.asnumpy(), gradient(d_parts)[group.index])


def check_group(group: Group) -> None:
    n = group.size
    cube = (2 * n, 3 * n, n)

    def summed(parts: Arrays) -> Arrays:
        return [total(parts)] * n

    def exchanged(split: int, concat: int) -> Callable:
        return lambda parts: [np.concatenate([np.split(p, n, split)[i] for p in parts], concat) for i in range(n)]

    def shifted(offset: int) -> Callable:
        return lambda parts: [parts[(i - offset) % n] for i in range(n)]

    check(group, make_all_reduce, summed, summed, (7, 5))
    check(group, lambda g: make_all_reduce(g, "identity"), summed, lambda d: d, (7, 5))
    for axis in (0, 1, -1):
        joined = lambda parts, axis=axis: [np.concatenate(parts, axis)] * n  # noqa: E731
        split = lambda parts, axis=axis: np.split(total(parts), n, axis)  # noqa: E731
        check(group, lambda g, axis=axis: make_all_gather(g, axis), joined, split, (5, 7, 3))
        check(group, lambda g, axis=axis: make_reduce_scatter(g, axis), split, joined, cube)
    for a, b in ((1, 2), (2, 1), (0, 0)):
        check(group, lambda g, a=a, b=b: make_all_to_all(g, a, b), exchanged(a, b), exchanged(b, a), cube)
    for offset in (1, -1, 2):
        check(group, lambda g, o=offset: make_ring_shift(g, o), shifted(offset), shifted(-offset), (5, 3))
    root = n - 1
    check(
        group,
        lambda g: make_broadcast(g, root),
        lambda parts: [parts[root]] * n,
        lambda d: [total(d) if i == root else np.zeros_like(d[0]) for i in range(n)],
        (5, 3),
    )


def gradients() -> None:
    check_group(Group(tuple(range(SIZE)), RANK))


def subgroups() -> None:
    check_group(Group((0, 1) if RANK < 2 else (2, 3), RANK))
    check_group(Group((2, 0) if RANK % 2 == 0 else (1, 3), RANK))


def several_tensors() -> None:
    group = Group(tuple(range(SIZE)), RANK)
    for count in (2, 3, 4):
        net = Call(make_ring_shift(group, 1, count))
        inputs = [Tensor(np.full((2, i + 1), 10 * RANK + i, np.float32)) for i in range(count)]
        for i, out in enumerate(net(*inputs)):
            np.testing.assert_array_equal(out.asnumpy(), np.full((2, i + 1), 10 * ((RANK - 1) % SIZE) + i))
        grads = ops.GradOperation(get_all=True, sens_param=True)(net)(*inputs, tuple(inputs))
        for i, grad in enumerate(grads):
            np.testing.assert_array_equal(grad.asnumpy(), np.full((2, i + 1), 10 * ((RANK + 1) % SIZE) + i))


def types() -> None:
    """Sums of 16-bit floats are added in float32 and rounded once; other types are moved as they are."""
    group = Group(tuple(range(SIZE)), RANK)
    all_reduce, all_gather = Call(make_all_reduce(group)), Call(make_all_gather(group))
    x = np.array([2048, 1, -3, 0.1], np.float32)
    for dtype in (ms.float16, ms.bfloat16):
        # 1 is lost in every 16-bit sum with 2048 on the left, but not in 2048 + 1 + 1 + ... in float32.
        part = Tensor(x if RANK == 0 else np.ones_like(x)).astype(dtype)
        exact = Tensor(x).astype(dtype).astype(ms.float32) + (SIZE - 1)
        expected = exact.astype(dtype).astype(ms.float32).asnumpy()
        np.testing.assert_array_equal(all_reduce(part).astype(ms.float32).asnumpy(), expected)
    for dtype in (np.int32, np.int64):
        got = all_reduce(Tensor(np.array([RANK, 2**30], dtype))).asnumpy()
        expected = np.array([SIZE * (SIZE - 1) // 2, 2**30], dtype) * np.array([1, SIZE], dtype)
        np.testing.assert_array_equal(got, expected)
    for dtype in (np.bool_, np.uint8, np.int64):
        got = all_gather(Tensor(np.array([RANK, 1, 0]).astype(dtype))).asnumpy()
        expected = np.array([[r, 1, 0] for r in range(SIZE)]).astype(dtype).ravel()
        np.testing.assert_array_equal(got, expected)
    try:
        all_reduce(Tensor([True, False]))
    except comm.MsLongctxError as error:
        assert "all_reduce of Bool: expected one of Float32" in str(error)
    else:
        raise AssertionError("a sum of bool is no bool")
    try:
        Call(make_reduce_scatter(group))(Tensor(np.ones((SIZE + 1, 2), np.float32)))
    except comm.MsLongctxError as error:
        assert f"axis 0 of shape ({SIZE + 1}, 2) cannot be split over {SIZE} ranks" in str(error)
    else:
        raise AssertionError("it does not divide")


class Unequal(nn.Cell):
    """Independent collectives, each after an amount of work that differs from rank to rank."""

    COUNT = 8

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.collectives = [make_all_reduce(group) for _ in range(self.COUNT)]
        self.work = [1 + (i * 5 + 3 * group.rank) % self.COUNT for i in range(self.COUNT)]

    def worked(self, x, turns):
        y = x
        for _ in range(turns):
            y = ops.tanh(ops.matmul(y, y))
        return y * 0 + x

    def construct(self, *inputs):
        outs = ()
        for i in range(self.COUNT):
            outs = outs + (self.collectives[i](self.worked(inputs[i], self.work[i])),)
        return outs


class Layers(Unequal):
    """As :class:`Unequal`, but each collective takes the result of the one before, as the layers of a model do."""

    def construct(self, x):
        for i in range(self.COUNT):
            x = self.collectives[i](self.worked(x, self.work[i])) * 0.5
        return x


def program_order() -> None:
    """Collectives run in the order of the program although the graphs of the ranks differ."""
    group = Group(tuple(range(SIZE)), RANK)
    net, layers = Unequal(group), Layers(group)
    inputs = [Tensor(np.full((4 + i, 4 + i), RANK + 1, np.float32)) for i in range(net.COUNT)]
    for _ in range(5):
        for out in net(*inputs):
            np.testing.assert_array_equal(out.asnumpy(), np.full(out.shape, sum(range(1, SIZE + 1)), np.float32))
    gradient = ops.grad(layers)
    for _ in range(5):
        grad = gradient(inputs[0])
        np.testing.assert_array_equal(grad.asnumpy(), np.full(grad.shape, (SIZE / 2) ** net.COUNT, np.float32))


class Ring(nn.Cell):
    """x * (sum over the ring) by shifts, with a gradient of its own: unordered operators, chained by their data."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.steps = group.size - 1
        self.shifts = [make_ring_shift(group, 1, 2, ordered=False) for _ in range(self.steps)]
        self.back = [make_ring_shift(group, -1, 2, ordered=False) for _ in range(self.steps)]

    def construct(self, x, y):
        a, b, total_a, total_b = x, y, x, y
        for shift in self.shifts:
            a, b = shift(a, b)
            total_a, total_b = total_a + a, total_b + b
        return total_a, total_b

    def bprop(self, x, y, out, dout):
        a, b = dout[0], dout[1]
        d_a, d_b = a, b
        for shift in self.back:
            a, b = shift(a, b)
            d_a, d_b = d_a + a, d_b + b
        return d_a, d_b


def own_gradient() -> None:
    net = Ring(Group(tuple(range(SIZE)), RANK))
    x = Tensor(np.full((3, 5), RANK + 1, np.float32))
    expected = np.full((3, 5), sum(range(1, SIZE + 1)), np.float32)
    for _ in range(5):
        total_a, total_b = net(x, 2 * x)
        np.testing.assert_array_equal(total_a.asnumpy(), expected)
        np.testing.assert_array_equal(total_b.asnumpy(), 2 * expected)
        d_x, d_y = ops.GradOperation(get_all=True, sens_param=True)(net)(x, 2 * x, (x, 3 * x))
        np.testing.assert_array_equal(d_x.asnumpy(), expected)
        np.testing.assert_array_equal(d_y.asnumpy(), 3 * expected)


def one_is_killed() -> None:
    net = Call(make_all_reduce(Group(tuple(range(SIZE)), RANK)))
    x = Tensor(np.ones((1000, 1000), np.float32))
    for turn in itertools.count():
        net(x).asnumpy()
        if turn == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def one_raises() -> None:
    net = Call(make_all_reduce(Group(tuple(range(SIZE)), RANK)))
    x = Tensor(np.ones((1000, 1000), np.float32))
    for turn in itertools.count():
        net(x).asnumpy()
        if turn == 3 and RANK == 1:
            raise comm.MsLongctxError("no more data")


def wrong_order() -> None:
    group = Group(tuple(range(SIZE)), RANK)
    first, second = make_all_reduce(group), make_all_gather(group)
    net = Call(first if RANK == 0 else second)
    net(Tensor(np.ones((3, 5), np.float32))).asnumpy()


def main() -> int:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if MODE == "graph" else ms.PYNATIVE_MODE)
    ms.runtime.launch_blocking()
    comm.join(JOB, RANK, SIZE, timeout=120.0)
    try:
        with World(RANK, SIZE):
            for scenario in SCENARIOS:
                globals()[scenario]()
    except comm.MsLongctxError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
