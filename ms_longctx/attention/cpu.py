# SPDX-License-Identifier: Apache-2.0
"""Attention by the C++ kernels ``FlashForward`` and ``FlashBackward`` (``ms_longctx/kernels/csrc/flash_*``)."""

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_longctx import kernels
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.errors import MsLongctxError

Shape = Sequence[int]


def _operator(name: str, spec: MaskSpec, scale: float | None, shapes: Callable, dtypes: Callable,
              bprop: Callable | None) -> ops.Custom:  # fmt: skip
    op = ops.Custom(f"{kernels.library_path()}:{name}", shapes, dtypes, func_type="aot", bprop=bprop)
    # 0 stands for "no limit", and for the scale head_dim ** -0.5.
    op.add_prim_attr("scale", 0.0 if scale is None else float(scale))
    op.add_prim_attr("causal", spec.causal)
    op.add_prim_attr("window", spec.window or 0)
    op.add_prim_attr("chunk", spec.chunk or 0)
    op.add_prim_attr("alibi", spec.alibi)
    op.add_prim_attr("documents", spec.documents)
    return op


def _forward_shapes(q: Shape, *rest: Shape) -> tuple[Shape, Shape]:
    return q, (q[0], q[2], q[1])


def _forward_dtypes(q: Any, *rest: Any) -> tuple[Any, Any]:
    return q, mstype.float32


def _backward_shapes(q: Shape, k: Shape, v: Shape, *rest: Shape) -> tuple[Shape, Shape, Shape]:
    return q, k, v


def _backward_dtypes(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any, Any]:
    return q, k, v


class CpuFlashAttention(nn.Cell):
    """Flash attention on the CPU; arguments and results as :class:`ReferenceAttention`'s.

    Memory beyond inputs and outputs is a few hundred KB for each thread (backward: plus (B, H, Sq) float32, and in
    float16 one float32 copy of dq). Differentiable in q, k and v, through ``out`` and through ``lse``. The result is
    the same, bit for bit, at every repetition and for every number of threads.
    """

    def __init__(self, spec: MaskSpec, scale: float | None = None) -> None:
        super().__init__()
        backward = _operator("FlashBackward", spec, scale, _backward_shapes, _backward_dtypes, None)

        def bprop(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            q_documents: Tensor,
            k_documents: Tensor,
            slopes: Tensor,
            offsets: Tensor,
            out: tuple[Tensor, Tensor],
            dout: tuple[Tensor, Tensor],
        ) -> tuple[Tensor, ...]:
            dq, dk, dv = backward(q, k, v, q_documents, k_documents, slopes, offsets, out[0], out[1], dout[0], dout[1])
            return (
                dq, dk, dv, ops.zeros_like(q_documents), ops.zeros_like(k_documents), ops.zeros_like(slopes),
                ops.zeros_like(offsets),
            )  # fmt: skip

        self.forward = _operator("FlashForward", spec, scale, _forward_shapes, _forward_dtypes, bprop)
        self.backward = backward  # for those who bring out and lse themselves

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor,
        k_documents: Tensor,
        alibi_slopes: Tensor,
        offsets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        _check_types(q.dtype, k.dtype, v.dtype)
        return self.forward(q, k, v, q_documents, k_documents, alibi_slopes, offsets)


@ms.constexpr
def _check_types(q: object, k: object, v: object) -> None:
    if q not in (mstype.float32, mstype.float16) or k != q or v != q:
        raise MsLongctxError(f"attention on a CPU takes q, k, v of one type, float32 or float16; got {q}, {k}, {v}")
