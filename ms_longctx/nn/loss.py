# SPDX-License-Identifier: Apache-2.0
"""Output projection and cross entropy in one, over chunks of tokens."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_longctx.nn.backend import implementation as choose

IGNORE_INDEX = -100


class _OperatorLoss(nn.Cell):
    """Chunked loss of plain operators; the backward pass computes the logits of each chunk again.

    No operator broadcasts over the logits: on CPU such an operator keeps buffers of their size for good, one set
    for every chunk. Rows are weighted where they are small, in the hidden states and their gradient. Each chunk
    depends on the one before, or all of them would be started at once.
    """

    def __init__(self, chunk_tokens: int, weight_gradient: bool = True) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.weight_gradient = weight_gradient
        self.project = ops.MatMul(transpose_b=True)
        self.to_hidden = ops.MatMul()
        self.to_weight = ops.MatMul(transpose_a=True)

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = ops.zeros((), ms.float32)
        for start in range(0, hidden.shape[0], self.chunk_tokens):
            chunk = ops.depend(hidden[start : start + self.chunk_tokens], loss)
            target = ops.depend(labels[start : start + self.chunk_tokens], loss)
            logits = ops.cast(self.project(chunk, weight), ms.float32)
            index = ops.expand_dims(ops.maximum(target, 0), -1)
            picked = ops.gather_elements(ops.log_softmax(logits, -1), -1, index).squeeze(-1)
            loss = loss - (picked * ops.cast(target != IGNORE_INDEX, ms.float32)).sum()
        return loss

    def bprop(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        one, zero = ops.ones((), ms.float32), ops.zeros((), ms.float32)
        grad_hidden: tuple[Tensor, ...] = ()
        grad_weight = ops.zeros(weight.shape, ms.float32)
        last = grad_weight
        for start in range(0, hidden.shape[0], self.chunk_tokens):
            chunk = ops.depend(hidden[start : start + self.chunk_tokens], last)
            target = ops.depend(labels[start : start + self.chunk_tokens], grad_weight)
            logits = ops.cast(self.project(chunk, weight), ms.float32)
            grad = ops.softmax(logits, -1) - ops.one_hot(target, weight.shape[0], one, zero)
            grad = ops.cast(grad, hidden.dtype)
            scale = ops.expand_dims(ops.cast(target != IGNORE_INDEX, ms.float32) * dout, -1)
            rows = ops.cast(self.to_hidden(grad, weight), ms.float32) * scale
            grad_hidden = grad_hidden + (ops.cast(rows, hidden.dtype),)
            last = rows
            if self.weight_gradient:
                scaled = ops.cast(ops.cast(chunk, ms.float32) * scale, hidden.dtype)
                grad_weight = grad_weight + ops.cast(self.to_weight(grad, scaled), ms.float32)
                last = grad_weight
        grad_weight = ops.cast(grad_weight, weight.dtype)
        return ops.concat(grad_hidden, 0), grad_weight, ops.zeros_like(labels)


class LinearCrossEntropy(nn.Cell):
    """Sum of the cross entropies of ``hidden @ weight.T`` against ``labels``, never holding all logits.

    In training mode (``set_train``) the CPU kernel computes the gradients together with the loss; otherwise a
    backward pass, should there be one, computes the logits again. Both give the same numbers.

    Args:
        chunk_tokens: how many tokens' logits ``(chunk_tokens, V)`` may exist at once.
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        hidden: ``(N, h)``, fp32, fp16 or bf16.
        weight: ``(V, h)``: the output layer or the tied embedding.
        labels: ``(N,)`` int32 class of each row, already shifted; -100 is left out.
        frozen: the weight does not train: in training its gradient is 0 and costs nothing.

    Returns:
        ``(loss_sum, n_valid)``: fp32 scalars, the sum in nats and the number of rows that count.
    """

    def __init__(self, chunk_tokens: int = 256, implementation: str = "auto") -> None:
        super().__init__()
        self.use_kernel = False
        if choose(implementation) == "cpu_kernel":
            from ms_longctx.kernels.fused import has_gemm, make_linear_cross_entropy

            self.use_kernel = has_gemm()
        if self.use_kernel:
            self.train_kernel = make_linear_cross_entropy(chunk_tokens, True)
            self.frozen_kernel = make_linear_cross_entropy(chunk_tokens, True, False)
            self.kernel = make_linear_cross_entropy(chunk_tokens, False)
        else:
            self.loss = _OperatorLoss(chunk_tokens)
            self.frozen_loss = _OperatorLoss(chunk_tokens, False)

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        frozen = frozen and self.training
        if self.use_kernel:
            if frozen:
                return self.frozen_kernel(hidden, weight, labels)
            if self.training:
                return self.train_kernel(hidden, weight, labels)
            return self.kernel(hidden, weight, labels)
        n_valid = ops.cast(labels != IGNORE_INDEX, ms.float32).sum()
        weight = ops.cast(weight, hidden.dtype)
        if frozen:
            return self.frozen_loss(hidden, weight, labels), n_valid
        return self.loss(hidden, weight, labels), n_valid
