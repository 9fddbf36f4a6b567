# SPDX-License-Identifier: Apache-2.0
"""Endless micro batches of a prepared set, epoch after epoch, from any position."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import mindspore.dataset as ds
import numpy as np

from ms_longctx.config import DataConfig
from ms_longctx.data.dataset import create_dataset
from ms_longctx.data.manifest import Manifest, load_manifest
from ms_longctx.errors import MsLongctxError
from ms_longctx.train.state import Progress

logger = logging.getLogger(__name__)


class MicroBatches:
    """Iterates over micro batches and counts in ``progress`` what has been taken.

    Args:
        data: section ``data`` of the run; ``path`` must be given.
        batch_size: sequences of a micro batch.
        samples: of the whole set.
        progress: where to begin; its ``epoch`` and ``sample`` move with every batch.
        checks: further arguments of :func:`~ms_longctx.data.dataset.create_dataset` (vocabulary, tokenizer).
    """

    def __init__(self, data: DataConfig, batch_size: int, samples: int, progress: Progress, **checks: Any):
        self.data = data
        self.batch_size = batch_size
        self.samples = samples
        self.progress = progress
        self.checks = checks
        self._begin_epoch_if_at_end()  # a resumed run may have another batch size

    def open(self) -> ds.Dataset:
        """The rest of the current epoch.

        Raises:
            MsLongctxError: the set does not fit the model, or the position is not in it.
        """
        return create_dataset(
            str(self.data.path),
            self.batch_size,
            self.data.seq_length,
            num_parallel_workers=self.data.num_parallel_workers,
            shuffle=self.data.shuffle,
            seed=self.data.seed,
            epoch=self.progress.epoch,
            start_sample=self.progress.sample,
            drop_last=self.data.drop_last,
            **self.checks,
        )

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            for batch in self.open().create_dict_iterator(num_epochs=1, output_numpy=True):
                self.progress.sample += self.batch_size
                self._begin_epoch_if_at_end()
                yield batch

    def _begin_epoch_if_at_end(self) -> None:
        left = self.samples - self.progress.sample
        if left < (self.batch_size if self.data.drop_last else 1):
            self.progress.epoch += 1
            self.progress.sample = 0


def open_evaluation_set(data: DataConfig, batch_size: int, **checks: Any) -> ds.Dataset:
    """All of ``data.eval_path`` in its own order; rows of padding complete the last batch."""
    return create_dataset(
        str(data.eval_path),
        batch_size,
        data.seq_length,
        num_parallel_workers=data.num_parallel_workers,
        shuffle=False,
        drop_last=False,
        **checks,
    )


def describe_set(manifest: Manifest) -> dict[str, Any]:
    """What a checkpoint records about the training set, to notice when it is another one."""
    names = ("samples", "tokens", "supervised_tokens", "seq_length", "layout", "tokenizer", "source")
    return {name: getattr(manifest, name) for name in names}


def open_training_set(data: DataConfig) -> Manifest:
    """The description of the training set, checked against the layout that the objective needs.

    Raises:
        MsLongctxError: no path, no prepared set there, or one of another layout.
    """
    if data.path is None:
        raise MsLongctxError("data.path: missing; give the set that 'ms-longctx prepare' wrote (--data_path)")
    manifest = load_manifest(data.path)
    if manifest.layout != data.layout:
        raise MsLongctxError(
            f"data.path: {data.path} was prepared with layout {manifest.layout!r} and this run needs "
            f"{data.layout!r} (train.objective: sft trains on answers, pretrain on whole texts); prepare it "
            "again, or change the objective"
        )
    if data.seq_length > manifest.seq_length:
        logger.warning(
            "data.seq_length is %d, but %s was prepared with %d: no sample is longer than that, the rest of each row "
            "is padding; prepare the texts again for longer ones",
            data.seq_length,
            data.path,
            manifest.seq_length,
        )
    return manifest
