# SPDX-License-Identifier: Apache-2.0
"""Operators that change tensors in place, and the norm the optimizer needs first (csrc/fused_adamw.cc).

MindSpore does not know that an input is changed, which is what keeps it from copying it first. Order is
therefore the caller's duty: whatever reads the old value must feed the call, and whatever reads the new value
must depend on its result (``ops.depend``).
"""

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor
from mindspore.ops.signature import make_sig, sig_kind, sig_rw

from ms_longctx.kernels.custom import operator

Tensors = tuple[Tensor, ...]


def make_adamw(beta1: float, beta2: float, eps: float, weight_decay: float) -> Callable:
    """AdamW as ``torch.optim.AdamW`` computes it, in place, for one group of k parameters in one call.

    ``update(learning_rate, step, grad_scale, skip, params, exp_avg, exp_avg_sq, grads) -> done``

    - ``learning_rate``: fp32 tensor of one element;
    - ``step``: int32 tensor of one element, 1 for the first update;
    - ``grad_scale``: fp32 tensor of one element the gradients are multiplied with (clipping, loss scale);
    - ``skip``: bool tensor of one element; if true nothing is changed (overflow);
    - ``params``, ``exp_avg``, ``exp_avg_sq``: tuples of k fp32 Parameters, all changed in place;
    - ``grads``: tuple of k gradients, fp32 or fp16, each of the shape of its parameter;
    - ``done``: int32 ``(1,)``, 1 or 0 (skipped). Return it, or ``ops.depend`` something on it, or the call is
      pruned.

    ``grad_scale`` or ``skip`` must come from *all* gradients (:func:`make_global_norm`): it is what keeps a
    parameter from changing while the backward pass still reads it.
    """
    update_all = operator(
        "FusedAdamW",
        lambda *shapes: [1],
        lambda *dtypes: ms.int32,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(eps),
        weight_decay=float(weight_decay),
    )
    # Declared as a write, MindSpore hands over the parameters themselves and keeps the order. Undeclared, it
    # hands over copies as soon as the graph has another side effect, and training silently does nothing.
    update_all.add_prim_attr("side_effect_mem", True)
    scalars = [make_sig(name) for name in ("learning_rate", "step", "grad_scale", "skip")]
    update_all.set_signatures([*scalars, make_sig("tensors", sig_rw.RW_WRITE, sig_kind.KIND_VAR_POSITIONAL)])

    def update(
        learning_rate: Tensor,
        step: Tensor,
        grad_scale: Tensor,
        skip: Tensor,
        params: Tensors,
        exp_avg: Tensors,
        exp_avg_sq: Tensors,
        grads: Tensors,
    ) -> Tensor:
        return update_all(learning_rate, step, grad_scale, skip, *params, *exp_avg, *exp_avg_sq, *grads)

    return update


def make_global_norm() -> Callable:
    """``global_norm(grads) -> (norm, finite)`` of a tuple of fp32 or fp16 tensors.

    ``norm``: fp32 ``(1,)``, square root of the sum of all squares (in fp64; it overflows only where the norm
    itself exceeds fp32); ``finite``: bool ``(1,)``, whether no element is infinite or NaN.
    """
    reduce_all = operator("FusedGlobalNorm", lambda *shapes: ([1], [1]), lambda *dtypes: (ms.float32, ms.bool_))

    def global_norm(grads: Tensors) -> tuple[Tensor, Tensor]:
        return reduce_all(*grads)

    return global_norm


def make_cache_append() -> Callable:
    """``append(key_cache, value_cache, keys, values, start) -> offsets``: write into a cache, in place.

    - ``key_cache``, ``value_cache``: Parameters ``(B, L, H, D)``, changed in place;
    - ``keys``, ``values``: ``(B, C, H, D)`` of the same type (fp32 or fp16);
    - ``start``: int32 tensor whose first element is the position of the first row; raises if start + C > L;
    - ``offsets``: int32 ``(2,)``: start and start + C, which is what ``FlashAttention`` takes. Attention must
      use this tensor (or caches that ``ops.depend`` on it): then reading follows writing.
    """
    return operator("FusedCacheAppend", lambda *shapes: [2], lambda *dtypes: ms.int32)
