# SPDX-License-Identifier: Apache-2.0
"""The attention of this package: one Cell, one meaning, an implementation chosen for the hardware."""

import logging
from functools import lru_cache

import mindspore as ms
from mindspore import Tensor, nn

from ms_longctx import kernels
from ms_longctx.attention.cpu import CpuFlashAttention
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.attention.reference import ReferenceAttention
from ms_longctx.errors import MsLongctxError

IMPLEMENTATIONS = ("auto", "ascend", "cpu_kernel", "reference")


class FlashAttention(nn.Cell):
    """Softmax attention under a described mask, in memory linear in the sequence length.

    Args:
        spec: the mask.
        scale: factor of the scores; None means ``head_dim ** -0.5``.
        implementation: ``ascend`` (FlashAttentionScore), ``cpu_kernel`` (C++), ``reference`` (plain operators,
            memory of Sq x Sk), or ``auto``: the first on an Ascend, else the second where it was built.
        return_lse: also return the log-sum-exp of the scores, (B, H, Sq) float32; -inf for a row that sees nothing.

    Inputs:
        - **q** (B, Sq, H, D), **k**, **v** (B, Sk, Hkv, D): H is a multiple of Hkv; query head h reads key/value
          head ``h // (H // Hkv)``. float32 or float16 (CPU), float16 or bfloat16 (Ascend); sums are float32.
        - **q_documents** (B, Sq), **k_documents** (B, Sk) int32: needed where ``spec.documents``, refused elsewhere.
          Without ``k_documents`` keys have the queries' ids.
        - **alibi_slopes** (H,) float32: needed where ``spec.alibi``, refused elsewhere.
        - **offsets** (2,) int32: position of query row 0 and number of valid key rows, for a chunk of queries over a
          cache longer than what it holds. Without it all keys are valid and the last query stands at the last key.
          A third number is the position of key row 0 (default 0). (B, 2) or (B, 3) sets them for each sequence.

    Outputs:
        (B, Sq, H, D) like ``q``; with ``return_lse`` a tuple of it and the log-sum-exp.

    Raises:
        MsLongctxError: unknown implementation, one that cannot run here, shapes or types that do not fit, a missing
            or an unused optional input.
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
        self.return_lse = return_lse
        self.implementation = resolve_implementation(implementation)
        if self.implementation == "ascend":
            from ms_longctx.attention.ascend import AscendFlashAttention

            self.attend = AscendFlashAttention(spec, scale)
        elif self.implementation == "cpu_kernel":
            self.attend = CpuFlashAttention(spec, scale)
        else:
            self.attend = ReferenceAttention(spec, scale)
        # Stand-ins for what the mask does not use; implementations never read them.
        self.no_documents = Tensor([[0]], ms.int32)
        self.no_slopes = Tensor([0.0], ms.float32)
        self.no_offsets = Tensor([0], ms.int32)

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_documents: Tensor | None = None,
        k_documents: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        _check_shapes(q.shape, k.shape, v.shape)
        _check_presence("q_documents", self.spec.documents, q_documents is not None)
        _check_presence("alibi_slopes", self.spec.alibi, alibi_slopes is not None)
        if q_documents is None:
            q_documents = self.no_documents
            k_documents = self.no_documents
        else:
            k_documents = q_documents if k_documents is None else k_documents
            found, expected = (q_documents.shape, k_documents.shape), (q.shape[:2], k.shape[:2])
            if found != expected:
                _refuse("q_documents, k_documents", found, expected)
        if alibi_slopes is None:
            alibi_slopes = self.no_slopes
        elif alibi_slopes.shape != (q.shape[2],):
            _refuse("alibi_slopes", alibi_slopes.shape, (q.shape[2],))
        if offsets is None:
            offsets = self.no_offsets
        elif offsets.shape[-1] not in (2, 3) or offsets.shape[:-1] not in ((), (q.shape[0],)):
            _refuse("offsets", offsets.shape, "(2,), (3,), (B, 2) or (B, 3)")
        out, lse = self.attend(q, k, v, q_documents, k_documents, alibi_slopes, offsets)
        if self.return_lse:
            return out, lse
        return out


def resolve_implementation(name: str) -> str:
    """``ascend``, ``cpu_kernel`` or ``reference`` for one of :data:`IMPLEMENTATIONS` on the current device.

    Raises:
        MsLongctxError: an unknown name, or an implementation that this device or installation does not have.
    """
    target = ms.get_context("device_target")
    if name not in IMPLEMENTATIONS:
        raise MsLongctxError(f"attention implementation {name!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    if name == "auto":
        if target == "Ascend":
            return "ascend"
        if target == "CPU" and kernels.available():
            return "cpu_kernel"
        if target == "CPU":
            _warn_reference(kernels.reason())
        return "reference"
    if name == "ascend" and target != "Ascend":
        raise MsLongctxError(f"attention implementation 'ascend' needs an Ascend device; this one is {target}")
    if name == "cpu_kernel" and target != "CPU":
        raise MsLongctxError(f"attention implementation 'cpu_kernel' needs device target CPU; this one is {target}")
    if name == "cpu_kernel" and not kernels.available():
        raise MsLongctxError(f"attention implementation 'cpu_kernel' is not available: {kernels.reason()}")
    return name


@lru_cache(maxsize=1)  # once a process
def _warn_reference(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "attention runs through plain operators, slowly and with memory of Sq x Sk: no CPU kernels (%s)", reason
    )


@ms.constexpr
def _check_shapes(q: tuple, k: tuple, v: tuple) -> None:
    if len(q) != 4 or len(k) != 4 or k != v or q[0] != k[0] or q[3] != k[3] or k[2] == 0 or q[2] % k[2] != 0:
        raise MsLongctxError(
            f"attention: q {q}, k {k}, v {v}; expected q (B, Sq, H, D) and k, v (B, Sk, Hkv, D) with H a multiple "
            "of Hkv"
        )


@ms.constexpr
def _check_presence(name: str, needed: bool, given: bool) -> None:
    if needed and not given:
        raise MsLongctxError(f"attention: the mask needs {name}, which is missing")
    if given and not needed:
        raise MsLongctxError(f"attention: {name} is given, but the mask (MaskSpec) does not use it")


@ms.constexpr
def _refuse(name: str, got: object, expected: object) -> None:
    raise MsLongctxError(f"attention: {name} has shape {got}; expected {expected}")
