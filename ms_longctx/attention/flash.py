# SPDX-License-Identifier: Apache-2.0
"""One attention cell over the mask description; the implementation follows the device."""

from mindspore import nn

from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.reference import reference_attention


class FlashAttention(nn.Cell):
    """Attention of queries ``(B, Sq, H, D)`` over keys and values ``(B, Sk, Hkv, D)``.

    Args:
        spec: static mask description.
        scale: factor of the scores; ``None`` means ``D ** -0.5``.
        implementation: ``auto`` or ``reference``.
        return_lse: also return the log-sum-exp ``(B, H, Sq)`` in fp32.
    """

    def __init__(
        self,
        spec: MaskSpec,
        scale: float | None = None,
        implementation: str = "auto",
        return_lse: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.scale = scale
        self.return_lse = return_lse

    def construct(
        self, q, k, v, q_documents=None, k_documents=None, alibi_slopes=None, offsets=None
    ):
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        q_start, kv_len = k.shape[1] - q.shape[1], k.shape[1]
        if offsets is not None:
            q_start, kv_len = offsets[0], offsets[1]
        out, lse = reference_attention(
            q, k, v, self.spec, scale, q_documents, k_documents, alibi_slopes, q_start, kv_len
        )
        if self.return_lse:
            return out, lse
        return out
