# SPDX-License-Identifier: Apache-2.0
"""Taking queries, keys and values out of the result of one fused projection."""

from mindspore import Tensor, nn, ops


class SplitQKV(nn.Cell):
    """The three parts of a fused projection whose features are grouped by key/value head.

    Features are, for each key/value head, its queries, its key and its value, so that a share of the heads is a run of
    features; this Cell splits such a share as well as the whole.

    Args:
        group: query heads of one key/value head.
        head_dim: width of a head.

    Inputs:
        qkv: ``(B, S, Hkv * (group + 2) * head_dim)``.

    Returns:
        q ``(B, S, Hkv * group, head_dim)``, k and v ``(B, S, Hkv, head_dim)``.
    """

    def __init__(self, group: int, head_dim: int) -> None:
        super().__init__()
        self.group = group
        self.head_dim = head_dim

    def construct(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, features = qkv.shape
        kv_heads = features // ((self.group + 2) * self.head_dim)
        heads = ops.reshape(qkv, (batch, length, kv_heads, self.group + 2, self.head_dim))
        q = ops.reshape(heads[:, :, :, : self.group], (batch, length, kv_heads * self.group, self.head_dim))
        return q, heads[:, :, :, self.group], heads[:, :, :, self.group + 1]
