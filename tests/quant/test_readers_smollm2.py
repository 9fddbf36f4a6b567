# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M through the command line, then through AutoAWQ and transformers (:mod:`tests.quant.readers`)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.cli.main import main
from ms_longctx.generation.loading import load_model, load_text_tokenizer
from tests.quant import readers

pytestmark = [pytest.mark.long, pytest.mark.skipif(not kernels.available(), reason=kernels.reason())]

DATA = Path(__file__).parents[2] / "run_scripts" / "data"
PROMPT, NEW = 24, 32


def quantize(gguf: Path, out: Path, *options: str) -> None:
    """Little calibration: the file counts here, not the accuracy."""
    data = ["--calibrate_data", str(DATA / "plos_articles.jsonl.gz")]
    heldout = ["--heldout_data", str(DATA / "plos_articles_heldout.jsonl.gz"), "--heldout_samples", "2"]
    sizes = ["--samples", "8", "--seq_length", "128"]
    assert main(["quantize", "--model", str(gguf), "--output", str(out), *data, *heldout, *sizes, *options]) == 0


def article_ids(directory: Path, length: int) -> np.ndarray:
    """Token ids ``(2, length)`` of articles."""
    with gzip.open(DATA / "plos_articles_heldout.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(next(lines))["article"] for _ in range(2)]
    tokenizer = load_text_tokenizer(None, str(directory), load_model(str(directory), device="CPU"))
    return np.array([tokenizer.encode(text)[:length] for text in texts], np.int32)


def read(reader: str, directory: Path, ids: np.ndarray, scratch: Path, **more: bool) -> dict[str, np.ndarray]:
    np.save(scratch / "ids.npy", ids)
    job = {"reader": reader, "directory": str(directory), "ids": str(scratch / "ids.npy"), "prompt": PROMPT, "new": NEW}
    readers.run("reader.py", [{**job, "out": str(scratch / "out.npz"), **more}], scratch)
    with np.load(scratch / "out.npz") as arrays:
        return dict(arrays)


def test_awq(smollm2_gguf: Path, tmp_path: Path) -> None:
    """AWQ's scales lie in norms and projections, and AutoAWQ gets the same logits (2e-5 of the largest) and the same
    greedy text."""
    quantize(smollm2_gguf, tmp_path / "awq", "--method", "awq")
    model, ids = load_model(str(tmp_path / "awq"), device="CPU"), article_ids(tmp_path / "awq", 128)
    expected = read("autoawq", tmp_path / "awq", ids, tmp_path)
    logits = model(Tensor(ids)).asnumpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5 * np.abs(logits).max())
    answer = model.generate([ids[0, :PROMPT].tolist()], max_new_tokens=NEW)[0][PROMPT:]
    np.testing.assert_array_equal(answer, expected["tokens"][: len(answer)])
    assert len(answer) > 8


def test_int8(smollm2_gguf: Path, tmp_path: Path) -> None:
    """All 210 matrices with rounded inputs, each for the same inputs as in transformers with compressed-tensors under
    vLLM's rule: 3e-6 of a token's largest output but for one in a thousand (see ``test_rounded_inputs``)."""
    quantize(
        smollm2_gguf, tmp_path / "int8", *"--method int8 --activations token --alpha 0.5 --accuracy_threshold 0".split()
    )
    ids = article_ids(tmp_path / "int8", 32)
    expected = read("transformers", tmp_path / "int8", ids, tmp_path, vllm_inputs=True, record=True)
    apart = readers.differences(load_model(str(tmp_path / "int8"), device="CPU"), expected)
    assert apart.shape == (210, 64)
    assert np.quantile(apart, 0.999) < 3e-6
