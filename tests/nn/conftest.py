# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the building blocks."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import numpy as np
import pytest


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs the test in both execution modes."""
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
