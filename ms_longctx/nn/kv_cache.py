# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the tokens a generation has seen, kept on the device and written in place."""

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_longctx.config.model import LlamaConfig


class KVCache(nn.Cell):
    """One pair of buffers ``(batch_size, max_length, kv_heads, head_dim)`` a layer.

    All rows share one write position, so rows of unequal length are padded on the left (document id -1).

    Args:
        config: the model's configuration.
        batch_size: rows.
        max_length: tokens a row can hold, prompt and answer together.
        dtype: type of the keys and values.
        rope_length: sequence length that decides the rotary frequencies of ``dynamic`` and ``longrope``
            scaling for the whole generation (cached keys are never rotated again); ``None`` means
            ``max_length``.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch_size: int,
        max_length: int,
        dtype: ms.Type = ms.float32,
        rope_length: int | None = None,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.rope_length = max_length if rope_length is None else rope_length
        shape = (batch_size, max_length, config.kv_heads, config.head_size)
        layers = range(config.num_hidden_layers)
        self.keys = ParameterTuple([_buffer(shape, dtype, f"cache.{i}.keys") for i in layers])
        self.values = ParameterTuple([_buffer(shape, dtype, f"cache.{i}.values") for i in layers])
        self.scatter = ops.ScatterNdUpdate()

    def append(self, layer: int, keys: Tensor, values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``(B, C, kv_heads, head_dim)`` at positions ``start ...`` and return the whole buffers.

        ``start`` is an int32 scalar tensor. The returned tensors must be used instead of the parameters, so
        that reading follows writing.
        """
        batch, count = keys.shape[:2]
        rows = ops.broadcast_to(ops.reshape(ops.arange(batch), (batch, 1)), (batch, count))
        columns = ops.broadcast_to(ops.reshape(ops.arange(count), (1, count)) + start, (batch, count))
        index = ops.cast(ops.stack((rows, columns), -1), ms.int32)
        return (
            self.scatter(self.keys[layer], index, keys),
            self.scatter(self.values[layer], index, values),
        )


def _buffer(shape: tuple[int, ...], dtype: ms.Type, name: str) -> Parameter:
    return Parameter(ops.zeros(shape, dtype), name=name, requires_grad=False)
