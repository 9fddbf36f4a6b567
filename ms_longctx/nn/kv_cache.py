# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the tokens a generation has seen, kept on the device and written in place."""

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_longctx.config.model import LlamaConfig
from ms_longctx.nn.backend import implementation as choose


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
        implementation: see :func:`ms_longctx.nn.backend.implementation`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch_size: int,
        max_length: int,
        dtype: ms.Type = ms.float32,
        rope_length: int | None = None,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.rope_length = max_length if rope_length is None else rope_length
        shape = (batch_size, max_length, config.kv_heads, config.head_size)
        layers = range(config.num_hidden_layers)
        self.keys = ParameterTuple([_buffer(shape, dtype, f"cache.{i}.keys") for i in layers])
        self.values = ParameterTuple([_buffer(shape, dtype, f"cache.{i}.values") for i in layers])
        self.use_kernel = choose(implementation) == "cpu_kernel" and dtype in (ms.float32, ms.float16)
        if self.use_kernel:
            from ms_longctx.kernels.fused import make_cache_append

            self.write = make_cache_append()
        self.scatter = ops.ScatterNdUpdate()

    def append(self, layer: int, keys: Tensor, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write ``(B, C, kv_heads, head_dim)`` where ``offsets`` (int32, two elements) begin.

        Returns:
            All keys, all values and the offsets. Use these: they are what makes reading follow writing.
        """
        if self.use_kernel:
            written = self.write(self.keys[layer], self.values[layer], keys, values, offsets)
            return self.keys[layer], self.values[layer], written
        batch, count = keys.shape[:2]
        rows = ops.broadcast_to(ops.reshape(ops.arange(batch), (batch, 1)), (batch, count))
        columns = ops.broadcast_to(ops.reshape(ops.arange(count), (1, count)) + offsets[0], (batch, count))
        index = ops.cast(ops.stack((rows, columns), -1), ms.int32)
        all_keys = self.scatter(self.keys[layer], index, keys)
        return all_keys, self.scatter(self.values[layer], index, values), offsets


def _buffer(shape: tuple[int, ...], dtype: ms.Type, name: str) -> Parameter:
    return Parameter(ops.zeros(shape, dtype), name=name, requires_grad=False)
