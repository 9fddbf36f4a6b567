# SPDX-License-Identifier: Apache-2.0
"""The loss of the Ascend program in chunks: its arithmetic on one CPU, where strategies of operators have no effect."""

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor

from ms_longctx.parallel import cross_entropy
from ms_longctx.parallel.cross_entropy import ShardedCrossEntropy, chunk_count
from ms_longctx.train.step import graph_mode


def test_chunks_divide_the_tokens() -> None:
    assert chunk_count(1024, 32000) == 1  # 125 MiB
    assert chunk_count(32768, 16000) == 8  # 1.95 GiB
    assert chunk_count(32768 - 4, 16000) == 4  # divides by no larger power of two
    assert chunk_count(1 << 20, 128256) == 64


@pytest.mark.parametrize(("rows", "chunk_bytes"), [(1, 1 << 20), (1, 6 * 13 * 4), (2, 3 * 13 * 4)])
def test_equals_torch(rows: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 tokens in 1 chunk and in 4, of one worker and of two; loss and gradients against torch in float64, 1e-6."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((24, 5)).astype(np.float32)
    weight = rng.standard_normal((13, 5)).astype(np.float32)
    labels = np.where(rng.random(24) < 0.3, -100, rng.integers(0, 13, 24)).astype(np.int32)
    x, w = (torch.from_numpy(array).double().requires_grad_() for array in (hidden, weight))
    expected = torch.nn.functional.cross_entropy(x @ w.T, torch.from_numpy(labels).long(), reduction="sum")
    expected.backward()
    loss = ShardedCrossEntropy(rows, 1, True, 13)
    with graph_mode():
        (total, valid), grads = ms.value_and_grad(loss, (0, 1), has_aux=True)(*map(Tensor, (hidden, weight, labels)))
    assert float(valid) == (labels != -100).sum()
    assert float(total) == pytest.approx(expected.item(), rel=1e-6)
    for grad, reference in zip(grads, (x.grad, w.grad), strict=True):
        np.testing.assert_allclose(grad.asnumpy(), reference.numpy(), atol=1e-6 * float(reference.abs().max()))
