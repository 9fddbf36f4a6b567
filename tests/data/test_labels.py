# SPDX-License-Identifier: Apache-2.0
"""Labels and batch columns. Reference: transformers' convention (labels as long as the input, -100 on the
prompt), shifted by one as its loss does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForCausalLMLoss

from ms_longctx.data.batching import Collator, filler_sample
from ms_longctx.data.labels import IGNORE, shift_labels, supervised_mask, supervised_tokens

RUNS = st.lists(st.integers(0, 6), min_size=2, max_size=7).filter(sum)


def _document(runs: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 50, sum(runs)).astype(np.int32)
    return tokens, np.array(runs, np.int32)


@given(RUNS)
def test_labels_equal_transformers_convention(runs: list[int]) -> None:
    tokens, stretches = _document(runs)
    unshifted = np.where(supervised_mask(stretches), tokens, IGNORE)
    expected = np.append(unshifted[1:], IGNORE)
    labels = shift_labels(tokens, stretches)
    np.testing.assert_array_equal(labels, expected)
    assert labels.dtype == np.int32
    assert supervised_tokens(stretches) == int((expected != IGNORE).sum())


def test_two_documents_by_hand() -> None:
    """[1,2,3] and [4,5] become [2,3,-100] and [5,-100]: the last token of a document has no target."""
    joined = [shift_labels(np.array(ids, np.int32), np.array([0, len(ids)])) for ids in ([1, 2, 3], [4, 5])]
    assert np.concatenate(joined).tolist() == [2, 3, -100, 5, -100]


def test_prompt_tokens_never_count() -> None:
    labels = shift_labels(np.arange(10, 20, dtype=np.int32), np.array([4, 2, 3, 1]))
    assert labels.tolist() == [-100, -100, -100, 14, 15, -100, -100, -100, 19, -100]


def test_end_token_is_learned_where_pad_equals_eos() -> None:
    """Masking by id would hide the end token and the model would never stop (trl#976)."""
    eos = 2
    tokens, runs = np.array([7, 8, 9, eos], np.int32), np.array([2, 2], np.int32)
    input_ids, labels, _, document_ids = Collator(seq_len=7, pad_id=eos)([tokens], [runs])
    assert labels[0].tolist() == [-100, 9, eos, -100, -100, -100, -100]
    assert input_ids[0].tolist() == [7, 8, 9, eos, eos, eos, eos]
    assert document_ids[0].tolist() == [0, 0, 0, 0, -1, -1, -1]


@given(st.lists(RUNS, min_size=1, max_size=4), st.integers(0, 3))
def test_columns(documents: list[list[int]], spare: int) -> None:
    """Length of tokens, labels and positions is the same, whatever the row (swift#5665)."""
    samples = [_document(runs, seed) for seed, runs in enumerate(documents)]
    seq_len = max(len(tokens) for tokens, _ in samples) + spare
    columns = Collator(seq_len, pad_id=49)([t for t, _ in samples], [r for _, r in samples])
    for column in columns:
        assert column.shape == (len(samples), seq_len) and column.dtype == np.int32
    for row, (tokens, runs) in enumerate(samples):
        n = len(tokens)
        input_ids, labels, position_ids, document_ids = (column[row] for column in columns)
        assert input_ids[:n].tolist() == tokens.tolist() and set(input_ids[n:]) <= {49}
        assert labels[:n].tolist() == shift_labels(tokens, runs).tolist() and set(labels[n:]) <= {IGNORE}
        assert position_ids[:n].tolist() == list(range(n))
        assert document_ids.tolist() == [0] * n + [-1] * (seq_len - n)


def test_filler_row_is_padding_from_end_to_end() -> None:
    tokens, runs = filler_sample()
    input_ids, labels, _, document_ids = Collator(seq_len=5, pad_id=3)([tokens], [runs])
    assert set(labels[0]) == {IGNORE} and set(document_ids[0]) == {-1} and set(input_ids[0]) == {3}


def test_loss_equals_transformers_loss() -> None:
    """Mean cross entropy over our shifted labels equals transformers' ForCausalLMLoss, tolerance 1e-6."""
    tokens, runs = _document([3, 4, 2, 5])
    labels = Collator(seq_len=17, pad_id=0)([tokens], [runs])[1]
    logits = torch.randn(1, 17, 50, generator=torch.Generator().manual_seed(0))
    unshifted = np.full((1, 17), IGNORE, dtype=np.int64)
    unshifted[0, :14] = np.where(supervised_mask(runs), tokens, IGNORE)
    expected = ForCausalLMLoss(logits, torch.from_numpy(unshifted), vocab_size=50)
    mine = torch.nn.functional.cross_entropy(logits[0], torch.from_numpy(labels[0]).long())
    assert mine.item() == pytest.approx(expected.item(), abs=1e-6)
