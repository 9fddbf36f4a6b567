# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask is a pure function of a key.

MindSpore's own dropout keeps hidden state on CPU: recomputation draws a second, different mask and a resumed
run cannot continue the sequence. Here an element's mask is a hash of its position, the layer and the key.
"""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_longctx.nn.backend import implementation as choose

KEY_NAME = "dropout_key"


def _wrap(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


# Odd multipliers of well-known hashes; int32 products wrap around.
_SALT, _ROW, _COLUMN = map(_wrap, (0x9E3779B9, 0x9E3779B1, 0x27D4EB2F))
_MIX_1, _MIX_2, _JOIN_1, _JOIN_2 = map(_wrap, (0x85EBCA6B, 0xC2B2AE35, 0x7FEB352D, 0x2C1B3C6D))


def dropout_key() -> Parameter:
    """A key to be shared by all dropouts of a model; the trainer draws it anew before every forward pass.

    It has to be set in place (``copy_``): a compiled graph does not see new data of a Parameter.
    """
    return Parameter(Tensor(0, ms.int32), name=KEY_NAME, requires_grad=False)


class KeyedDropout(nn.Cell):
    """Sets elements to 0 with probability ``p`` and divides the others by ``1 - p``; only in training.

    Args:
        p: probability.
        key: from :func:`dropout_key`. The mask changes with its value and nothing else.
        salt: tells the dropouts of one model apart.
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        x: ``(..., features)``, fp32, fp16 or bf16.

    Returns:
        The same shape and type as ``x``.
    """

    def __init__(self, p: float, key: Parameter, salt: int, implementation: str = "auto") -> None:
        super().__init__(auto_prefix=False)  # the key is shared and keeps its name
        self.key = key
        settings = (_wrap(salt * _SALT), int(round((1 - p) * 2**32)) - 2**31, 1 / (1 - p))
        if choose(implementation) == "cpu_kernel":
            from ms_longctx.kernels.dropout import make_keyed_dropout

            self.mask = make_keyed_dropout(*settings)
        else:
            self.mask = _Mask(*settings)

    def construct(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        rows = ops.reshape(x, (-1, x.shape[-1]))
        return ops.reshape(self.mask(rows, self.key), x.shape)


class _Mask(nn.Cell):
    """``x`` ``(N, C)`` times its mask. The backward pass hashes again instead of keeping the mask."""

    def __init__(self, salt: int, limit: int, factor: float) -> None:
        super().__init__(auto_prefix=False)
        self.salt = salt
        self.limit = limit
        self.factor = factor
        self.range = ops.Range()

    def construct(self, x: Tensor, key: Tensor) -> Tensor:
        return self.apply_mask(x, key)

    def bprop(self, x: Tensor, key: Tensor, out: Tensor, dout: Tensor) -> tuple:
        return self.apply_mask(dout, key), ops.zeros_like(key)

    def apply_mask(self, x: Tensor, key: Tensor) -> Tensor:
        """Rows and columns are hashed apart and mixed once more: cheaper than a full hash per element."""
        key = _mix(key + self.salt)
        rows = _mix(self.positions(x.shape[0]) * _ROW + key)
        columns = _mix(self.positions(x.shape[1]) * _COLUMN - key)
        bits = ops.bitwise_xor(ops.expand_dims(rows, 1), ops.expand_dims(columns, 0)) * _JOIN_1
        # This shift keeps the sign, so the xor clears it; the product brings the other 31 bits there.
        bits = ops.bitwise_xor(bits, ops.bitwise_right_shift(bits, 15)) * _JOIN_2
        return x * (ops.cast(bits < self.limit, x.dtype) * self.factor)

    def positions(self, count: int) -> Tensor:
        """0, 1, ... as int32. (The control flow in ``ops.arange`` does not compile under recomputation.)"""
        numbers = self.range(Tensor(0, ms.int32), Tensor(count, ms.int32), Tensor(1, ms.int32))
        return ops.cast(numbers, ms.int32)


def _mix(x: Tensor) -> Tensor:
    """Finaliser of MurmurHash3, short of its last round; the shifts are logical, on int32."""
    x = ops.bitwise_xor(x, ops.bitwise_and(ops.bitwise_right_shift(x, 16), 0xFFFF)) * _MIX_1
    return ops.bitwise_xor(x, ops.bitwise_and(ops.bitwise_right_shift(x, 13), 0x7FFFF)) * _MIX_2
