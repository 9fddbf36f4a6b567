# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests in this folder: both execution modes, and comparison with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
import torch
from mindspore import Tensor, nn

from ms_longctx import kernels

IMPLEMENTATIONS = ["operators"] + (["cpu_kernel"] if kernels.available() else [])


class Weighted(nn.Cell):
    """Sum of a cell's results times constants: a scalar whose gradient reaches every element."""

    def __init__(self, cell: nn.Cell, weights: Sequence[np.ndarray]) -> None:
        super().__init__()
        self.cell = cell
        self.weights = [Tensor(w) for w in weights]

    def construct(self, *inputs):
        out = self.cell(*inputs)
        if len(self.weights) == 1:
            return (out.astype(ms.float32) * self.weights[0]).sum()
        total = (out[0].astype(ms.float32) * self.weights[0]).sum()
        for i in range(1, len(self.weights)):
            total = total + (out[i].astype(ms.float32) * self.weights[i]).sum()
        return total


def run(cell: nn.Cell, inputs: Sequence[np.ndarray], weights: Sequence[np.ndarray], wrt: Sequence[int]):
    """Results of ``cell`` and the gradients of their weighted sum for ``inputs[wrt]`` and the parameters."""
    tensors = [Tensor(x) for x in inputs]
    out = cell(*tensors)
    out = [out] if isinstance(out, Tensor) else list(out)
    params = cell.trainable_params()
    grads = ms.grad(Weighted(cell, weights), tuple(wrt) or None, params or None)(*tensors)
    if wrt and params:
        grads = [*(grads[0] if len(wrt) > 1 else [grads[0]]), *grads[1]]
    elif len(wrt) == 1:
        grads = [grads]
    return [o.asnumpy() for o in out], [g.asnumpy() for g in grads]


def torch_run(function: Callable, inputs: Sequence[np.ndarray], weights: Sequence[np.ndarray], wrt: Sequence[int]):
    """What :func:`run` gives, in double precision by torch; parameters are passed as inputs."""
    tensors = [torch.tensor(x).double() if x.dtype.kind == "f" else torch.tensor(x) for x in inputs]
    for i in wrt:
        tensors[i].requires_grad_(True)
    out = function(*tensors)
    out = [out] if isinstance(out, torch.Tensor) else list(out)
    sum((o * torch.tensor(w).double()).sum() for o, w in zip(out, weights, strict=True)).backward()
    return [o.detach().numpy() for o in out], [tensors[i].grad.numpy() for i in wrt]


def assert_close(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> None:
    """Each array within ``tolerance`` of the reference, relative to the reference's largest value."""
    assert len(got) == len(expected)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert g.shape == e.shape, f"array {i}"
        scale = max(float(np.abs(e).max()), 1e-30)
        error = float(np.abs(g.astype(np.float64) - e).max()) / scale
        assert error <= tolerance, f"array {i}: relative error {error:.2e} > {tolerance:.0e}"
