# SPDX-License-Identifier: Apache-2.0
"""Statistics of the masks against those of independent draws, and their use in a compiled step."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_longctx import kernels
from ms_longctx.tuning.dropout import KeyedDropout, dropout_key
from tests.tuning.compare import draw_dropout


@pytest.fixture(params=["cpu_kernel", "operators"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Both ways to compute a mask."""
    if request.param == "cpu_kernel" and not kernels.available():
        pytest.skip(kernels.reason())
    return request.param


def make(p: float, salt: int, implementation: str) -> KeyedDropout:
    return KeyedDropout(p, dropout_key(), salt, implementation).set_train()


def masks(p: float, salt: int, count: int, implementation: str, shape: Any = (512, 192)) -> np.ndarray:
    """1 where kept, standardised to mean 0 and variance 1 under the true probability."""
    dropout = make(p, salt, implementation)
    drawn = []
    for step in range(count):
        draw_dropout(dropout, 9, step)
        drawn.append(dropout(Tensor(np.ones(shape, np.float32))).asnumpy() > 0)
    return (np.stack(drawn) - (1 - p)) / np.sqrt(p * (1 - p))


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_masks_look_independent(p: float, implementation: str) -> None:
    """Each statistic is a mean over n products of independent draws: standard deviation 1 / sqrt(n)."""
    drawn = masks(p, 1, 4, implementation)
    other = masks(p, 2, 4, implementation)
    products = {
        "rate": drawn,
        "steps": drawn[1:] * drawn[:-1],
        "layers": drawn * other,
        "rows": drawn[:, 1:] * drawn[:, :-1],
        "columns": drawn[:, :, 1:] * drawn[:, :, :-1],
        "squares": drawn[:, 1:, 1:] * drawn[:, 1:, :-1] * drawn[:, :-1, 1:] * drawn[:, :-1, :-1],
    }
    for name, values in products.items():
        assert abs(values.mean()) * np.sqrt(values.size) < 4, name
    for matrix in (drawn[0], drawn[0].T):  # any two rows, not only neighbours
        pairs = (matrix @ matrix.T / np.sqrt(matrix.shape[1]))[np.triu_indices(len(matrix), 1)]
        assert pairs.std() == pytest.approx(1, abs=0.03)


@pytest.mark.skipif(not kernels.available(), reason="no kernels")
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (7, 64), (2, 5, 33)])
def test_kernel_and_operators_agree_exactly(shape: tuple[int, ...]) -> None:
    for p in (0.01, 0.9):
        drawn = [masks(p, 3, 2, implementation, shape) for implementation in ("cpu_kernel", "operators")]
        np.testing.assert_array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16])
def test_values_and_gradient(dtype: ms.Type, implementation: str) -> None:
    x = np.random.RandomState(0).randn(3, 5, 40).astype(np.float32)
    dropout = make(0.25, 1, implementation)
    y = dropout(Tensor(x, dtype))
    kept = y.asnumpy() != 0
    assert y.shape == x.shape and y.dtype == dtype and 0.6 < kept.mean() < 0.9
    np.testing.assert_allclose(y.asnumpy(), np.where(kept, x / 0.75, 0), rtol=2e-3)
    grad = ms.grad(lambda x: dropout(x).sum())(Tensor(x, dtype)).asnumpy()
    np.testing.assert_allclose(grad, np.where(kept, 1 / 0.75, 0), rtol=1e-3)


def test_off_outside_training(implementation: str) -> None:
    x = Tensor(np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(make(0.5, 1, implementation).set_train(False)(x).asnumpy(), 1)


def test_a_compiled_graph_follows_the_key(implementation: str) -> None:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = make(0.5, 1, implementation)

        @ms.jit
        def construct(self, x):  # noqa: ANN001
            return self.dropout(x)

    net = Net().set_train()
    x = Tensor(np.ones((8, 64), np.float32))
    drawn = []
    for count in (1, 2, 1):
        draw_dropout(net, 0, count)
        drawn.append(net(x).asnumpy())
    assert (drawn[0] != drawn[1]).any()
    np.testing.assert_array_equal(drawn[0], drawn[2])
