# SPDX-License-Identifier: Apache-2.0
"""ALiBi slopes against transformers' Bloom, which follows the authors' code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from ms_longctx.nn.alibi import alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 20, 32, 40, 71, 112])
def test_slopes_equal_bloom(heads: int) -> None:
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    slopes = alibi_slopes(heads)
    assert slopes.dtype == np.float32 and slopes.shape == (heads,)
    np.testing.assert_allclose(slopes, expected.numpy(), rtol=1e-6)
