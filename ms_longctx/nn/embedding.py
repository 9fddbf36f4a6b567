# SPDX-License-Identifier: Apache-2.0
"""The token embedding table."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer


class Embedding(nn.Cell):
    """Looks rows up in ``weight`` ``(vocab_size, hidden_size)``.

    Inputs:
        ids: integers of any shape, each in ``[0, vocab_size)``.

    Returns:
        ``ids.shape + (hidden_size,)`` of the type of the weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: ms.Type = ms.float32, std: float = 0.02) -> None:
        super().__init__()
        weight = initializer(Normal(std), (vocab_size, hidden_size), dtype)
        self.weight = Parameter(weight, name="weight")
        self.gather = ops.Gather()

    def construct(self, ids: Tensor) -> Tensor:
        return self.gather(self.weight, ids, 0)
