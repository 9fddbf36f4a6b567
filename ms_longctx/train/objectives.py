# SPDX-License-Identifier: Apache-2.0
"""What a training step minimises: the cross entropy of the next token, over whole texts or answers only."""

from collections.abc import Mapping

import numpy as np
from mindspore import Tensor, nn

IGNORE_INDEX = -100
Batch = Mapping[str, np.ndarray]


class NextToken(nn.Cell):
    """Summed cross entropy of a language model on one micro batch.

    ``pretrain`` and ``sft`` share it: which positions count is written in the labels (``data.layout`` ``lm``
    supervises every token of a text, ``sft`` only the answer), so the two differ in data, not in arithmetic.

    Args:
        model: has ``loss_sum(input_ids, labels, position_ids, document_ids) -> (sum, count)``.

    Inputs:
        input_ids, labels, position_ids, document_ids: ``(B, S)`` int32; the last two may be ``None``.

    Returns:
        Sum of the losses in nats over the positions whose label is not -100, fp32 scalar.
    """

    def __init__(self, model: nn.Cell):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        return self.model.loss_sum(input_ids, labels, position_ids, document_ids)[0]


def count_supervised(batch: Batch) -> int:
    """Positions of a batch that count in the loss."""
    return int(np.count_nonzero(batch["labels"] != IGNORE_INDEX))


def count_tokens(batch: Batch) -> int:
    """Positions of a batch that are not padding."""
    if "document_ids" not in batch:
        return int(batch["input_ids"].size)
    return int(np.count_nonzero(batch["document_ids"] >= 0))
