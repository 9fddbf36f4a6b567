# SPDX-License-Identifier: Apache-2.0
"""Linear cross entropy against torch in double precision.

Tolerance: 3e-6 of the largest value in fp32 (a logit of 30 has a rounding error of 2e-6), 3e-3 in fp16 (inputs
are the same fp16 numbers in both).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from torch.nn import functional as F

from ms_longctx.nn.loss import LinearCrossEntropy
from tests.nn.reference import IMPLEMENTATIONS, assert_close, run, torch_run

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def problem(rng: np.random.Generator, rows: int, vocab: int, hidden: int, ignored: float = 0.3):
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    weight = rng.standard_normal((vocab, hidden)).astype(np.float32)
    labels = rng.integers(0, vocab, rows, dtype=np.int32)
    labels[rng.random(rows) < ignored] = -100
    return x, weight, labels


def reference(x, weight, labels):
    return F.cross_entropy(x @ weight.T, labels.long(), reduction="sum")


class FirstOnly(nn.Cell):
    """The loss without the count."""

    def __init__(self, loss: nn.Cell) -> None:
        super().__init__()
        self.loss = loss

    def construct(self, x, weight, labels):
        return self.loss(x, weight, labels)[0]


@each
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("rows, vocab, hidden, chunk", [(67, 1301, 35, 16), (5, 3, 2, 100), (31, 2500, 48, 31)])
def test_values_and_gradients(mode, rng, implementation, training, dtype, rows, vocab, hidden, chunk):
    x, weight, labels = problem(rng, rows, vocab, hidden)
    x, weight = x.astype(dtype), weight.astype(dtype)
    loss = LinearCrossEntropy(chunk, implementation)
    loss.set_train(training)
    total, count = loss(Tensor(x), Tensor(weight), Tensor(labels))
    assert total.dtype == ms.float32 and total.shape == () and count.shape == ()
    assert int(count) == (labels != -100).sum()
    out, grads = run(FirstOnly(loss).set_train(training), [x, weight, labels], [np.float32(0.37)], [0, 1])
    expected = torch_run(reference, [x, weight, labels], [np.float32(0.37)], [0, 1])
    assert [g.dtype for g in grads] == [dtype, dtype]
    assert_close(out + grads, expected[0] + expected[1], 3e-6 if dtype == np.float32 else 3e-3)


@each
@pytest.mark.parametrize("training", [True, False])
def test_no_labelled_token(mode, rng, implementation, training):
    x, weight, labels = problem(rng, 9, 33, 5, ignored=1.1)
    loss = FirstOnly(LinearCrossEntropy(4, implementation)).set_train(training)
    out, grads = run(loss, [x, weight, labels], [np.float32(1)], [0, 1])
    assert out[0] == 0 and not grads[0].any() and not grads[1].any()


@each
def test_large_logits_do_not_overflow(mode, rng, implementation):
    x, weight, labels = problem(rng, 12, 77, 6)
    x *= 1e4
    out, grads = run(FirstOnly(LinearCrossEntropy(5, implementation)), [x, weight, labels], [np.float32(1)], [0, 1])
    expected = torch_run(reference, [x, weight, labels], [np.float32(1)], [0, 1])
    assert_close(out + grads, expected[0] + expected[1], 3e-6)


@each
def test_tied_embedding_gets_both_gradients(mode, rng, implementation):
    """One Parameter both embeds and projects; reference: torch's autograd over the same two uses."""
    _, weight, labels = problem(rng, 31, 203, 12)
    ids = rng.integers(0, 203, 31, dtype=np.int32)

    class Tied(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(weight), name="weight")
            self.loss = LinearCrossEntropy(8, implementation)

        def construct(self, ids, labels):
            return self.loss(self.weight[ids], self.weight, labels)[0]

    net = Tied().set_train()
    out, grads = run(net, [ids, labels], [np.float32(1)], [])
    expected = torch_run(lambda i, t, w: reference(w[i.long()], w, t), [ids, labels, weight], [np.float32(1)], [2])
    assert_close(out + grads, expected[0] + expected[1], 3e-6)


@pytest.mark.skipif("cpu_kernel" not in IMPLEMENTATIONS, reason="no kernel library")
class TestKernel:
    def test_same_bits_every_time(self, rng):
        inputs = problem(rng, 300, 3000, 64)
        loss = FirstOnly(LinearCrossEntropy(64, "cpu_kernel")).set_train()
        first = run(loss, inputs, [np.float32(1)], [0, 1])
        for _ in range(3):
            again = run(loss, inputs, [np.float32(1)], [0, 1])
            assert all(np.array_equal(a, b) for a, b in zip(first[0] + first[1], again[0] + again[1], strict=True))

    def test_chunks_give_the_same_numbers(self, rng):
        inputs = problem(rng, 300, 3000, 64)
        results = []
        for chunk in (1, 64, 1000):
            loss = FirstOnly(LinearCrossEntropy(chunk, "cpu_kernel")).set_train()
            out, grads = run(loss, inputs, [np.float32(1)], [0, 1])
            results.append(out + grads)
        assert_close(results[0], results[2], 3e-6)
        assert_close(results[1], results[2], 3e-6)

    @pytest.mark.parametrize("label", [50, -1, -101])
    def test_label_outside_the_vocabulary_is_an_error(self, rng, label):
        x, weight, labels = problem(rng, 4, 50, 8)
        labels[2] = label
        with pytest.raises(RuntimeError):
            LinearCrossEntropy(4, "cpu_kernel")(Tensor(x), Tensor(weight), Tensor(labels))[0].asnumpy()


MEMORY_PROBE = """
import sys, numpy as np, mindspore as ms
from mindspore import Tensor, nn
from ms_longctx.nn.loss import LinearCrossEntropy
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
loss = LinearCrossEntropy(256, sys.argv[1]).set_train()
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.loss = loss
    def construct(self, x, w, t):
        return self.loss(x, w, t)[0]
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
x, w = Tensor(np.ones((8192, 16), np.float32)), Tensor(np.ones((32000, 16), np.float32))
t = Tensor(np.zeros(8192, np.int32))
before = peak()
for grad in ms.grad(Net().set_train(), (0, 1))(x, w, t):
    grad.asnumpy()
print(peak() - before)
"""


@pytest.mark.slow
@each
def test_logits_are_never_held_whole(tmp_path, implementation):
    """8192 x 32000 fp32 logits are 1000 MB; a chunk of 256 rows is 31 MB."""
    script = tmp_path / "probe.py"  # graph mode reads the source, so it has to be a file
    script.write_text(MEMORY_PROBE)
    command = [sys.executable, str(script), implementation]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert float(result.stdout.split()[-1]) < 350


def test_loss_of_a_uniform_model_is_log_vocab():
    loss, count = LinearCrossEntropy()(
        Tensor(np.zeros((7, 4), np.float32)),
        Tensor(np.ones((32, 4), np.float32)),
        Tensor(np.zeros(7, np.int32)),
    )
    assert float(loss) / float(count) == pytest.approx(math.log(32), rel=1e-6)
