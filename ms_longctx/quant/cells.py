# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights stay packed in memory and are read so by the CPU kernels."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from ms_longctx import kernels
from ms_longctx.config.model import LlamaConfig
from ms_longctx.errors import MsLongctxError
from ms_longctx.kernels.quant import PackedMatrix, make_quant_linear, make_quant_rows
from ms_longctx.models.llama import LlamaForCausalLM
from ms_longctx.nn.embedding import Embedding
from ms_longctx.nn.linear import Linear
from ms_longctx.quant.checkpoint import QuantizedCheckpoint
from ms_longctx.quant.weights import Int4Weight

PARTS = ("values", "scales", "extra")
_LOSS_TOKENS = 256


class Packed(nn.Cell):
    """Parameters of a packed matrix, what it has of ``values``, ``scales`` and ``extra``; none of them trains."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self._form = (matrix.kind, matrix.shape, matrix.group)
        for name, array in zip(PARTS, matrix.arrays(), strict=False):
            setattr(self, name, Parameter(Tensor.from_numpy(array), name=name, requires_grad=False))
        self.parts = len(matrix.arrays())

    @property
    def packed(self) -> PackedMatrix:
        """The matrix, sharing the memory of the parameters."""
        kind, shape, group = self._form
        parts = [getattr(self, part).asnumpy() for part in PARTS[: self.parts]]
        return PackedMatrix(kind, shape, group, *parts)


class QuantizedLinear(Packed):
    """:class:`ms_longctx.nn.linear.Linear` with a packed weight, in fp32 on the CPU.

    Args:
        matrix: the weight.
        bias: fp32 ``(out_features,)`` or ``None``.
    """

    def __init__(self, matrix: PackedMatrix, bias: NDArray[np.float32] | None = None) -> None:
        super().__init__(matrix)
        self.out_features, self.in_features = matrix.shape
        self.bias = None
        if bias is not None:
            self.bias = Parameter(Tensor.from_numpy(bias), name="bias", requires_grad=False)
        self.linear = make_quant_linear(matrix.kind, matrix.group, self.out_features)

    def construct(self, x: Tensor) -> Tensor:
        rows = ops.reshape(x, (-1, self.in_features))
        if self.parts == 3:
            y = self.linear(rows, self.values, self.scales, self.extra)
        elif self.parts == 2:
            y = self.linear(rows, self.values, self.scales)
        else:
            y = self.linear(rows, self.values)
        if self.bias is not None:
            y = y + self.bias
        return ops.reshape(y, x.shape[:-1] + (self.out_features,))


class QuantizedEmbedding(Packed):
    """:class:`ms_longctx.nn.embedding.Embedding` with an int8 or fp16 table."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__(matrix)
        self.columns = matrix.shape[1]
        self.rows = make_quant_rows(matrix.kind, matrix.group, self.columns)

    def construct(self, ids: Tensor) -> Tensor:
        ids32 = ops.cast(ops.reshape(ids, (-1,)), ms.int32)
        if self.parts == 3:
            out = self.rows(ids32, self.values, self.scales, self.extra)
        elif self.parts == 2:
            out = self.rows(ids32, self.values, self.scales)
        else:
            out = self.rows(ids32, self.values)
        return ops.reshape(out, ids.shape + (self.columns,))


class QuantizedLlamaForCausalLM(LlamaForCausalLM):
    """A Llama that runs on packed weights; it generates and evaluates but does not train."""

    def __init__(self, source: QuantizedCheckpoint) -> None:
        super().__init__(source.config, ms.float32)
        _pack(self, source)
        for parameter in self.get_parameters():
            parameter.requires_grad = False
        self.companions = source.path

    def loss_sum(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`LlamaForCausalLM.loss_sum`; logits are made for 256 tokens at a time."""
        hidden = self.model(input_ids, position_ids, document_ids)
        rows, targets = ops.reshape(hidden, (-1, hidden.shape[-1])), ops.reshape(labels, (-1,))
        loss = ops.zeros((), ms.float32)
        for start in range(0, rows.shape[0], _LOSS_TOKENS):
            target = targets[start : start + _LOSS_TOKENS]
            logits = self.lm_head(rows[start : start + _LOSS_TOKENS])
            index = ops.expand_dims(ops.maximum(target, 0), -1)
            picked = ops.gather_elements(ops.log_softmax(logits, -1), -1, index).squeeze(-1)
            loss = loss - (picked * ops.cast(target != -100, ms.float32)).sum()
        return loss, ops.cast(targets != -100, ms.float32).sum()

    @property
    def head_is_frozen(self) -> bool:
        """It is."""
        return True

    def save_pretrained(self, *args: object, **options: object) -> None:
        """Refused: the directory it was loaded from is its file form.

        Raises:
            MsLongctxError: always.
        """
        raise MsLongctxError(f"a quantized model is not written again; copy its directory {self.companions}")


def packed_model(source: QuantizedCheckpoint, dtype: ms.Type, compute_dtype: ms.Type) -> LlamaForCausalLM | None:
    """The model on packed weights, or ``None`` where only its dequantized form can run.

    It needs the CPU kernels, fp32 activations and separate q, k and v.
    """
    wanted = ms.get_context("device_target") == "CPU" and dtype == compute_dtype == ms.float32
    if not wanted or not kernels.available() or source.config.parallel_attention:
        return None
    with no_init_parameters():
        return QuantizedLlamaForCausalLM(source)


def _pack(model: LlamaForCausalLM, source: QuantizedCheckpoint) -> None:
    """Replace the cells whose weights are quantized and load everything."""
    shapes = source.shapes()
    config: LlamaConfig = source.config
    for path, cell in list(model.cells_and_names()):
        for attribute, child in list(cell.name_cells().items()):
            name = f"{path}.{attribute}.weight".lstrip(".")
            if not isinstance(child, Linear | Embedding) or name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if name in shapes:
                _check_shape(source, name, shapes[name], tuple(child.weight.shape))
            replacement = _replacement(source, name, f"{name[:-6]}bias" in shapes)
            if replacement is not None:
                cell.insert_child_to_cell(attribute, replacement)
    table = model.model.embed_tokens
    if config.tie_word_embeddings and isinstance(table, QuantizedEmbedding):
        head = QuantizedLinear(table.packed)
        for part in PARTS[: table.parts]:  # the same memory
            setattr(head, part, getattr(table, part))
        model.insert_child_to_cell("lm_head", head)
    for name, parameter in model.parameters_and_names():
        if name in shapes:
            _check_shape(source, name, shapes[name], tuple(parameter.shape))
            parameter.set_data(Tensor.from_numpy(np.ascontiguousarray(source.read(name), np.float32)))
        elif name.rpartition(".")[2] not in PARTS:
            raise MsLongctxError(f"{source.path}: no tensor {name}; the model is not complete")


def _check_shape(source: QuantizedCheckpoint, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise MsLongctxError(f"{source.path}: {name} has shape {found}, expected {expected}")


def _replacement(source: QuantizedCheckpoint, name: str, has_bias: bool) -> Packed | None:
    matrix = _packed(source, name)
    if matrix is None:
        return None
    if name == "model.embed_tokens.weight":
        return QuantizedEmbedding(matrix)
    bias = source.read(f"{name[:-6]}bias").astype(np.float32) if has_bias else None
    return QuantizedLinear(matrix, bias)


def _packed(source: QuantizedCheckpoint, name: str) -> PackedMatrix | None:
    """The matrix as the kernels take it; ``None`` if it has to be unpacked to fp32."""
    weight = source.weight(name)
    if weight is None:
        kept = source.half(name)
        return None if kept is None else PackedMatrix.half(kept)
    return weight.packed() if isinstance(weight, Int4Weight) else weight.packed(source.int8_inputs(name))
