# SPDX-License-Identifier: Apache-2.0
"""The Ascend program, compiled for single ranks of simulated clusters of 16: pieces, communication and refusals.

The reference for pieces and communication is the arithmetic of Megatron (arXiv 1909.08053, 2205.05198) and ZeRO,
counted by hand for a Llama of two layers; nothing runs, so no number is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ms_longctx.parallel import virtual_cluster
from ms_longctx.parallel.virtual_cluster import cluster, tools

WORKER = Path(__file__).with_name("program_worker.py")
ROOT = WORKER.parents[2]
WORKERS = 16
ALL = tuple(range(WORKERS))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        tools.missing_reason() is not None and not cluster.has_cann(), reason=tools.missing_reason() or ""
    ),
]


def compiled(folder: Path, rank: int, *overrides: str) -> dict[str, Any]:
    """What ``program_worker.py`` finds for one rank."""
    graphs, result = folder / "graphs", folder / "result.json"
    environment = virtual_cluster.prepare().environment(rank, WORKERS, level=0)
    environment |= {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(graphs), "GLOG_v": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, str(WORKER), str(result), str(graphs), *overrides]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    assert result.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads(result.read_text()))


def operators(result: dict[str, Any], matrices: bool = True) -> Counter[tuple[str, tuple[int, ...]]]:
    """How often a step runs each operator in each group, on tensors (or on scalars)."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, ranks, times, shapes in result["operators"]:
        if any(shapes) == matrices:
            counts[name, tuple(ranks)] += times
    return counts


def test_tensor_and_sequence_parallel(tmp_path: Path) -> None:
    result = compiled(tmp_path, 5, "--parallel.dp=4", "--parallel.mp=4", "--parallel.sp=true")
    pieces = result["pieces"]
    layer = "model.layers.0"
    assert pieces[f"{layer}.self_attn.q_proj.weight"] == [64, 256]
    assert pieces[f"{layer}.self_attn.k_proj.weight"] == [32, 256]
    assert pieces[f"{layer}.self_attn.o_proj.weight"] == [256, 64]
    assert pieces[f"{layer}.mlp.down_proj.weight"] == [256, 128]
    assert pieces["lm_head.weight"] == [1024, 256] and pieces[f"exp_avg.{layer}.mlp.up_proj.weight"] == [128, 256]
    mp, dp = (4, 5, 6, 7), (1, 5, 9, 13)
    # Two pairs a layer: gather before and scatter after each, forward and backward; seven split matrices a layer; five
    # norms, embedding and output layer are whole on every worker.
    expected = {("AllGather", mp): 8, ("ReduceScatter", mp): 8, ("AllReduce", dp): 14, ("AllReduce", ALL): 7}
    assert operators(result) == expected
    assert operators(result, matrices=False) == {("AllReduce", ALL): 2}  # loss and gradient norm
    assert sorted(set(result["shares"])) == [1 / 16, 1 / 4]


def test_pipeline_with_sharded_optimizer(tmp_path: Path) -> None:
    overrides = ["--parallel.dp=4", "--parallel.mp=2", "--parallel.pp=2", "--parallel.optimizer_shard=true"]
    result = compiled(tmp_path, 8, *overrides, "--parallel.vocab_parallel=true", "--train.recompute=true")
    pieces = result["pieces"]
    assert not any(name in pieces for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"))
    assert pieces["model.layers.1.mlp.up_proj.weight"] == [64, 256]  # 512 / mp 2 / dp 4
    assert pieces["lm_head.weight"] == [128, 256] and pieces["model.norm.weight"] == [256]
    counts = operators(result) + operators(result, matrices=False)
    crossing = {name: sum(n for (kind, _), n in counts.items() if kind == name) for name in ("Send", "Receive")}
    assert crossing == {"Send": 2, "Receive": 2}  # two micro batches: gradients back, activations in
    own = (8, 10, 12, 14)
    assert counts["ReduceScatter", own] >= 8 and counts["AllGather", own] >= 8
    assert result["inputs"] == [[2 * 4, 256]] * 4


def test_context_parallel_inside(tmp_path: Path) -> None:
    overrides = ["--parallel.dp=2", "--parallel.mp=2", "--parallel.cp=4", "--parallel.attention_mode=ulysses"]
    result = compiled(tmp_path, 5, *overrides)
    counts = operators(result)
    # Rank 5 is dp 0, cp 2, mp 1. Heads and tokens change places before and after attention, forward and backward.
    assert counts["AlltoAll", (1, 3, 5, 7)] >= 8
    assert {kind for kind, _ in counts} == {"AlltoAll", "AllReduce", "AllGather"}
    assert result["inputs"] == [[2 * 4, 64]] * 4


def test_refusals(tmp_path: Path) -> None:
    result = compiled(tmp_path, 0, "--parallel.dp=2", "--parallel.mp=8")
    assert result["refused"].startswith("num_key_value_heads = 4 is below mp = 8")
