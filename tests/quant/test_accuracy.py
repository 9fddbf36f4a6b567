# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M on articles that were not calibrated on: accuracy, memory of the weights, memory of the job.

The bounds: INT8 within 1 % of the perplexity in fp32 and 98 % of the likeliest tokens, int4 within 8 % and better than
rounding to nearest; 0.3 and 0.2 of the memory of fp32 weights; the job within twice the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ms_longctx import kernels
from ms_longctx.generation.loading import load_model

pytestmark = [pytest.mark.long, pytest.mark.skipif(not kernels.available(), reason=kernels.reason())]

ROOT = Path(__file__).parents[2]
DATA = ROOT / "run_scripts" / "data"
MODEL_MB = 538  # of the weights in fp32


def quantize(gguf: Path, out: Path, *options: str) -> dict[str, Any]:
    """The report; a process of its own, so that its peak memory is that of the job."""
    data = ["--calibrate_data", str(DATA / "plos_articles.jsonl.gz"), "--samples", "128"]
    heldout = ["--heldout_data", str(DATA / "plos_articles_heldout.jsonl.gz"), "--heldout_samples", "16"]
    script = [sys.executable, str(ROOT / "run_scripts" / "quantize.py")]
    subprocess.run([*script, "--model", str(gguf), "--output", str(out), *data, *heldout, *options], check=True)
    report: dict[str, Any] = json.loads((out / "quantization_report.json").read_text())
    return report


def share(folder: Path) -> float:
    """Memory of the loaded weights beside fp32."""
    parameters = {id(p): p for p in load_model(str(folder), device="CPU").get_parameters()}
    return sum(p.nbytes for p in parameters.values()) / 1e6 / MODEL_MB


def test_int8(smollm2_gguf: Path, tmp_path: Path) -> None:
    report = quantize(smollm2_gguf, tmp_path / "int8", "--method", "int8", "--accuracy_threshold", "0.98")
    assert report["accuracy"]["top1"] >= 0.98 and report["accuracy"]["perplexity_ratio"] < 1.01
    assert share(tmp_path / "int8") < 0.3
    assert report["peak_memory_mb"] < 2 * MODEL_MB


def test_int4(smollm2_gguf: Path, tmp_path: Path) -> None:
    reports = {name: quantize(smollm2_gguf, tmp_path / name, "--method", name) for name in ("rtn", "gptq", "awq")}
    ratios = {name: report["accuracy"]["perplexity_ratio"] for name, report in reports.items()}
    assert ratios["awq"] < 1.08 and ratios["gptq"] < 1.08 and max(ratios["awq"], ratios["gptq"]) < ratios["rtn"]
    assert share(tmp_path / "awq") < 0.2
    assert max(report["peak_memory_mb"] for report in reports.values()) < 2 * MODEL_MB
