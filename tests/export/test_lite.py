# SPDX-License-Identifier: Apache-2.0
"""MindSpore Lite 2.0.0 itself: logits (1e-4 absolute, 1e-2 with fp16 weights) and greedy tokens against the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.environment import find_python37
from ms_longctx.export.lite import REWRITTEN, LiteModel, export_lite
from ms_longctx.export.plan import Plan
from tests.export.tiny import PROMPTS, greedy, tiny_model


def _missing() -> str:
    try:
        find_python37()
    except MsLongctxError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_missing()), reason=_missing() or "Python 3.7 is there")]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kind": "ms"}, 1e-4),
        ({"kind": "ms", "weights": "fp16"}, 1e-2),
        ({"kind": "mindir"}, 1e-4),
        ({"kind": "mindir", "route": "rewrite"}, 1e-4),
    ],
    ids=["ms", "ms fp16", "mindir", "mindir rewritten"],
)
def test_lite_equals_the_model(options: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    model = tiny_model()
    manifest = export_lite(model, tmp_path / "out", Plan((21,), batch_size=2, chunk=5), **options)
    assert (REWRITTEN in manifest.notes) == (options.get("route") == "rewrite")
    exported = LiteModel(tmp_path / "out")
    logits = exported.engine(PROMPTS, 8).prefill()
    for row, prompt in zip(logits, PROMPTS, strict=True):
        wanted = model(Tensor(np.array([prompt], np.int32))).asnumpy()[0, -1]
        np.testing.assert_allclose(row, wanted, rtol=0, atol=tolerance)
    assert greedy(exported, PROMPTS, 8) == greedy(model, PROMPTS, 8)


def test_lite_that_dies_is_reported(tmp_path: Path) -> None:
    """A process that is gone and a file that was cut are one line each."""
    export_lite(tiny_model(), tmp_path / "out", Plan((21,), chunk=5))
    exported = LiteModel(tmp_path / "out")
    engine = exported.engine(PROMPTS[:1], 2)
    engine.prefill()
    engine.close()
    with pytest.raises(MsLongctxError, match="MindSpore Lite stopped"):
        engine.step(np.array([1], np.int32))
    file = tmp_path / "out" / exported.manifest.graphs[0].file
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(MsLongctxError, match="changed or damaged"):
        exported.engine(PROMPTS[:1], 2)
