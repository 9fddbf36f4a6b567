# SPDX-License-Identifier: Apache-2.0
"""A linear layer with a low-rank adapter, split over Ascend devices beside it.

Compiled for Ascend without a device; no part of it has run on one.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_longctx.tuning.lora import LoraLinear


class ShardedLora(nn.Cell):
    """Computes what :class:`~ms_longctx.tuning.lora.LoraLinear` without dropout does, with a strategy an operator.

    Beside a layer split by columns every worker has A and its rows of B; beside one split by rows its columns of A
    and all of B, and r numbers a token are summed over the mp group.

    Args:
        linear: its parameters are taken over; its base is split already.
        data, mp: degrees.
        stream: strategy of the result (B, S, out) of a layer split by rows; ``None``: split by columns.
    """

    def __init__(self, linear: LoraLinear, data: int, mp: int, stream: tuple[int, int, int] | None) -> None:
        super().__init__(auto_prefix=False)
        self.in_features = linear.in_features
        self.base_layer = linear.base_layer
        self.lora_A, self.lora_B = linear.lora_A, linear.lora_B  # cells: their parameters keep their names
        self.scaling = Tensor(linear.adapter.scaling, ms.float32)
        if stream is None:
            tokens = data
            self.down = ops.MatMul(transpose_b=True).shard(((data, 1), (1, 1)))
            self.up = ops.MatMul(transpose_b=True).shard(((data, 1), (mp, 1)))
            whole = (data, 1, mp)
        else:
            tokens = data * stream[1]
            self.down = ops.MatMul(transpose_b=True).shard(((data, mp), (1, mp)), ((tokens, 1),))
            self.up = ops.MatMul(transpose_b=True).shard(((tokens, 1), (1, 1)))
            whole = stream
        self.scale = ops.Mul().shard(((tokens, 1), ()))
        self.add = ops.Add().shard((whole, whole))

    def construct(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        rows = ops.reshape(x, (-1, self.in_features))
        low = self.scale(self.down(rows, ops.cast(self.lora_A.weight, x.dtype)), ops.cast(self.scaling, x.dtype))
        return self.add(y, ops.reshape(self.up(low, ops.cast(self.lora_B.weight, x.dtype)), y.shape))
