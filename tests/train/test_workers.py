# SPDX-License-Identifier: Apache-2.0
"""Training on several processes: ten steps give the losses and the parameters of one process.

Tolerance: 1e-5 absolute on losses and on parameters, which move by up to 3e-3; one parameter in a thousand may be up to
2e-5 off: AdamW divides gradients by their own size, so that the rounding of the smallest ones shows (those of a LoRA A
while B is near zero).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ms_longctx.data.tokenizer import load_tokenizer
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.train.workers import Workers
from tests.models.reference import torch_model
from tests.parallel.processes import ROOT, Job, check, environment, free_port

STEPS = 10
LONG = dict.fromkeys(("dp2 cp2 ring", "cp4 ulysses recompute lora"), pytest.mark.long)
ARTICLES = Path(__file__).parents[2] / "run_scripts/data/plos_articles_heldout.jsonl.gz"
HEADS_8_2 = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}
RING = {"cp": 4, "attention_mode": "ring"}
# strategy, LoRA, micro batches, recompute
CASES: dict[str, tuple[dict[str, Any], bool, int, bool]] = {
    "dp4 accumulation lora": ({"dp": 4}, True, 3, False),
    "cp4 ring recompute accumulation": (RING, False, 2, True),
    "cp4 hybrid": ({"cp": 4, "attention_mode": "hybrid", "ulysses_degree": 2}, False, 1, False),
    "dp2 cp2 ring": ({"dp": 2, "cp": 2, "attention_mode": "ring"}, False, 1, False),
    "cp4 ulysses recompute lora": ({"cp": 4, "attention_mode": "ulysses"}, True, 1, True),
}


def real_text() -> list[bytes]:
    with gzip.open(ARTICLES, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [part.encode() for row in rows for part in row["article"].split("\n\n") if len(part) > 40]


def make_batches(documents: list[list[int]], accumulation: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows that hold several documents and end in padding: (steps, accumulation, rows, length) columns."""
    rng = np.random.default_rng(0)
    shape = (STEPS, accumulation, rows, length)
    columns = {
        "input_ids": np.zeros(shape, np.int32),
        "labels": np.full(shape, -100, np.int32),
        "position_ids": np.zeros(shape, np.int32),
        "document_ids": np.full(shape, -1, np.int32),
    }
    source = iter(documents)
    for place in np.ndindex(shape[:3]):
        filled, number = 0, 0
        while filled < length - 4:
            tokens = next(source)[: min(int(rng.integers(5, length // 2)), length - filled)]
            if len(tokens) < 2:
                continue
            part = slice(filled, filled + len(tokens))
            columns["input_ids"][place][part] = tokens
            columns["labels"][place][part] = [*tokens[1:], -100]
            columns["position_ids"][place][part] = np.arange(len(tokens))
            columns["document_ids"][place][part] = number
            filled, number = filled + len(tokens), number + 1
    assert (columns["document_ids"].max(-1) >= 1).all() and (columns["document_ids"] == -1).any()
    return columns


def run(tmp_path: Path, model: Path, size: int, strategy: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """What each process has after the steps."""
    output = tmp_path / f"out-{size}"
    output.mkdir()
    text = json.dumps({"model": str(model), "strategy": strategy, "batches": str(tmp_path / "batches.npz"), **settings})
    check(Job("../train/step_worker.py", size, [text, str(output)]), timeout=600)
    return [dict(np.load(output / f"{rank}.npz")) for rank in range(size)]


def compare(alone: dict[str, Any], several: list[dict[str, Any]]) -> None:
    for other in several[1:]:
        for name, value in several[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)  # to the bit
    assert alone.keys() == several[0].keys()
    np.testing.assert_allclose(several[0].pop("losses"), alone.pop("losses"), rtol=0, atol=1e-5)
    for name, value in alone.items():
        error = np.abs(several[0][name] - value)
        assert error.max() < 2e-5 and np.mean(error > 1e-5) < 1e-3, (name, error.max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "lora", "accumulation", "recompute"),
    [pytest.param(*case, id=name, marks=LONG.get(name, ())) for name, case in CASES.items()],
)
def test_random_model_trains_as_in_one_process(
    strategy: dict[str, Any], lora: bool, accumulation: int, recompute: bool, tmp_path: Path
) -> None:
    """8 query and 2 key/value heads; rows of 61 tokens, which no strategy divides."""
    torch_model(**HEADS_8_2, vocab_size=256).save_pretrained(tmp_path / "model")
    batches = make_batches([list(part) for part in real_text()], accumulation, 4, 61)
    np.savez(tmp_path / "batches.npz", **batches)
    settings = {"lora": lora, "recompute": recompute}
    alone = run(tmp_path, tmp_path / "model", 1, {}, **settings)
    compare(alone[0], run(tmp_path, tmp_path / "model", 4, strategy, **settings))


SMOLLM2: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "dp4 lora": ({"dp": 4}, True, False),
    "cp4 ring lora recompute": (RING, True, True),
    "dp2 cp2 ring full": ({"dp": 2, "cp": 2, "attention_mode": "ring"}, False, False),
    "cp3 ulysses lora": ({"cp": 3, "attention_mode": "ulysses"}, True, False),
}


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "lora", "recompute"), SMOLLM2.values(), ids=SMOLLM2)
def test_smollm2_trains_as_in_one_process(
    strategy: dict[str, Any], lora: bool, recompute: bool, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """SmolLM2-135M: 9 query and 3 key/value heads."""
    tokenizer = load_tokenizer(smollm2_gguf)
    texts = [tokenizer.encode(part.decode()[:400]) for part in real_text()[:400]]
    np.savez(tmp_path / "batches.npz", **make_batches(texts, 1, 4, 61))
    settings = {"lora": lora, "recompute": recompute}
    alone = run(tmp_path, smollm2_gguf, 1, {}, **settings)
    compare(
        alone[0],
        run(tmp_path, smollm2_gguf, int(np.prod([strategy.get("dp", 1), strategy.get("cp", 1)])), strategy, **settings),
    )


def test_resume_under_another_strategy(
    make_set: Callable[..., Path], arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Saved by four processes under msrun, continued by two and by one: the same steps, in fp32 to 1e-6."""
    data = make_set(tmp_path / "a.mindrecord")

    def train(output: Path, workers: int, steps: int, **changes: object) -> None:
        given = arguments(data, output, train__max_steps=steps, optimizer__scheduler="constant", **changes)
        script = [str(ROOT / "run_scripts/run_train.py"), *given, "--resume"]
        launcher = [sys.executable]
        if workers > 1:
            launcher = [str(Path(sys.executable).with_name("msrun")), "--worker_num", str(workers)]
            launcher += ["--local_worker_num", str(workers), "--join", "True", "--master_port", str(free_port())]
            launcher += ["--log_dir", str(output / "logs")]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # msrun starts "python"
        done = subprocess.run(
            [*launcher, *script], capture_output=True, text=True, env=environment(PATH=path), check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "not as it would have" not in done.stdout + done.stderr

    train(tmp_path / "four", 4, 3, parallel__dp=2, parallel__cp=2, train__batch_size=1)
    shutil.copytree(tmp_path / "four", tmp_path / "two")
    train(tmp_path / "two", 2, 5, parallel__cp=2, train__batch_size=2)
    train(tmp_path / "four", 1, 5, train__batch_size=2)
    saved = [tmp_path / name / "checkpoints/step-00000005/model.safetensors" for name in ("two", "four")]
    two, one = (load_file(path) for path in saved)
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_shards_are_rows_and_pieces() -> None:
    """dp 2 x cp 2 of a batch of 4 rows of 7 tokens: each token is on one rank, padding on the last."""
    strategy = Strategy.read({"dp": 2, "cp": 2, "attention_mode": "ulysses"}, 4)
    ids = np.arange(28, dtype=np.int32).reshape(4, 7)
    shards = [Workers(strategy, rank).shard({"input_ids": ids, "labels": ids}) for rank in range(4)]
    assert [shard["input_ids"].tolist() for shard in shards] == [
        [[0, 1, 2, 3], [7, 8, 9, 10]],
        [[4, 5, 6, 0], [11, 12, 13, 0]],
        [[14, 15, 16, 17], [21, 22, 23, 24]],
        [[18, 19, 20, 0], [25, 26, 27, 0]],
    ]
    assert shards[1]["labels"][:, -1].tolist() == [-100, -100]
    assert shards[3]["position_ids"].tolist() == [[4, 5, 6, 0]] * 2
