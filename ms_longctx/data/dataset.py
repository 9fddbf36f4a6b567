# SPDX-License-Identifier: Apache-2.0
"""Reads prepared sets through MindSpore's dataset engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore.dataset as ds
import numpy as np

from ms_longctx.data.batching import COLUMNS, Collator, filler_sample
from ms_longctx.data.manifest import Manifest, load_manifest, shard_paths
from ms_longctx.data.order import RankOrder, epoch_order, rank_order
from ms_longctx.errors import MsLongctxError

_STORED = ["input_ids", "runs"]
_LOG = logging.getLogger(__name__)


def create_dataset(
    path: str | Path,
    batch_size: int,
    seq_len: int,
    *,
    num_parallel_workers: int = 2,
    shuffle: bool = True,
    seed: int = 42,
    epoch: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
    start_sample: int = 0,
    drop_last: bool = True,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
) -> ds.Dataset:
    """Return one epoch of a prepared set as a MindSpore dataset.

    Every batch has the columns ``input_ids``, ``labels`` (already shifted, -100 is ignored), ``position_ids``
    and ``document_ids`` (-1 is padding), each int32 ``(batch_size, seq_len)``. ``get_dataset_size()`` is the
    number of batches. The order depends on ``seed`` and ``epoch`` only; make a new dataset for every epoch.

    Args:
        path: the set that ``ms-longctx prepare`` wrote (``name.mindrecord``).
        batch_size: samples of this rank in a batch.
        seq_len: length of a row; at least the longest sample of the set.
        num_parallel_workers: reading threads; no more than the machine's cores are used.
        shuffle: mix the samples, differently in each epoch.
        seed, epoch: fix the order.
        dp_rank, dp_size: this rank and the number of data-parallel ranks.
        start_sample: samples of this epoch that all ranks together have used; reading starts just after.
        drop_last: leave out the samples that do not fill a batch on every rank; otherwise the last batch is
            completed with rows of padding, which no loss counts.
        vocab_size: rows of the model's embedding; checked against the set.
        tokenizer: fingerprint of the model's tokenizer; checked against the set.

    Raises:
        MsLongctxError: files missing, unfinished, truncated, renamed or foreign, or not fit for the model.
    """
    manifest = load_manifest(path)
    _check(path, manifest, seq_len, vocab_size, tokenizer)
    order = rank_order(
        epoch_order(manifest.samples, shuffle, seed, epoch),
        batch_size,
        dp_rank,
        dp_size,
        start_sample,
        drop_last,
    )
    workers = _workers(num_parallel_workers)
    collate = Collator(seq_len, manifest.pad_id)

    def to_columns(
        tokens: list[np.ndarray], runs: list[np.ndarray], _: Any
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        input_ids, labels, position_ids, document_ids = collate(tokens, runs)
        return list(input_ids), list(labels), list(position_ids), list(document_ids)

    return _samples(path, manifest, order, workers).batch(
        batch_size,
        num_parallel_workers=workers,
        per_batch_map=to_columns,
        input_columns=_STORED,
        output_columns=list(COLUMNS),
    )


def batches_per_epoch(path: str | Path, batch_size: int, dp_size: int = 1, drop_last: bool = True) -> int:
    """Return how many batches each rank reads in a whole epoch of the set ``path``."""
    step = batch_size * dp_size
    samples = load_manifest(path).samples
    return samples // step if drop_last else -(-samples // step)


def _samples(path: str | Path, manifest: Manifest, order: RankOrder, workers: int) -> ds.Dataset:
    """The stored samples of this rank in order, then the filler."""
    parts: list[ds.Dataset] = []
    if len(order.indices):
        sampler = ds.SubsetSampler(order.indices.tolist())
        files = shard_paths(path, manifest)
        parts.append(ds.MindDataset(files, _STORED, num_parallel_workers=workers, sampler=sampler))
    if order.filler:
        parts.append(ds.GeneratorDataset([filler_sample()] * order.filler, _STORED, shuffle=False))
    if not parts:
        raise MsLongctxError(
            f"{path} holds {manifest.samples} samples, no batch is left of them after start_sample; use a "
            "smaller batch_size or drop_last=False, or go on with the next epoch"
        )
    return parts[0] if len(parts) == 1 else parts[0].concat(parts[1])


def _check(path: str | Path, manifest: Manifest, seq_len: int, vocab_size: int | None, tokenizer: str | None) -> None:
    if manifest.longest > seq_len:
        raise MsLongctxError(
            f"{path} holds samples of up to {manifest.longest} tokens (prepared for seq_length "
            f"{manifest.seq_length}), rows of {seq_len} were asked for; prepare it for this length"
        )
    if vocab_size is not None and manifest.vocab_size > vocab_size:
        raise MsLongctxError(
            f"{path} was prepared with a tokenizer of {manifest.vocab_size} tokens, the model has only "
            f"{vocab_size}; prepare it with the model's own tokenizer"
        )
    if tokenizer is not None and tokenizer != manifest.tokenizer:
        raise MsLongctxError(
            f"{path} was prepared with another tokenizer (fingerprint {manifest.tokenizer[:12]}, the model's "
            f"is {tokenizer[:12]}); prepare it again with the model's own"
        )


def _workers(asked: int) -> int:
    """MindSpore refuses more threads than cores."""
    if asked < 1:
        raise MsLongctxError(f"num_parallel_workers is {asked}; expected 1 or more")
    cores = os.cpu_count() or 1
    if asked > cores:
        _LOG.info("num_parallel_workers %d: this machine has %d cores, so many are used", asked, cores)
    return min(asked, cores)


def read_samples(path: str | Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the stored samples of a prepared set in order: tokens int32 ``(n,)`` and runs int32 ``(k,)``.

    Raises:
        MsLongctxError: as :func:`create_dataset`.
    """
    manifest = load_manifest(path)
    files = shard_paths(path, manifest)
    stored = ds.MindDataset(files, _STORED, num_parallel_workers=1, shuffle=False)
    for row in stored.create_dict_iterator(num_epochs=1, output_numpy=True):
        yield row["input_ids"], row["runs"]
