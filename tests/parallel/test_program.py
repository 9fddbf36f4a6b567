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


def compiled(folder: Path, rank: int, *overrides: str, worker: Path = WORKER) -> dict[str, Any]:
    """What ``program_worker.py``, or another worker, finds for one rank."""
    graphs, result = folder / "graphs", folder / "result.json"
    environment = virtual_cluster.prepare().environment(rank, WORKERS, level=0)
    environment |= {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(graphs), "GLOG_v": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, str(worker), str(result), str(graphs), *overrides]
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


RING = ["--parallel.dp=2", "--parallel.mp=2", "--parallel.cp=4", "--parallel.attention_mode=ring"]
HYBRID = [*RING[:3], "--parallel.attention_mode=hybrid", "--parallel.ulysses_degree=2"]
# name -> overrides, and how often rank 5 (dp 0, cp 2, mp 1) runs the operators of context parallelism. A ring of n
# shifts n - 1 times forward, n - 1 times with K and V and n times with their gradients backward, in each of 2 layers.
CONTEXT = {
    "ring and ALiBi": ([*RING, "--model.position_embedding=alibi"], {("NeighborExchange", (1, 3, 5, 7)): 20}),
    "hybrid, window, fp16, recomputed": (
        [*HYBRID, "--model.sliding_window=64", "--train.dtype=fp16", "--train.recompute=true"],
        {("NeighborExchange", (1, 5)): 10, ("AlltoAll", (5, 7)): 12},
    ),
}
LONG = {"hybrid, window, fp16, recomputed": pytest.mark.long}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in CONTEXT])
def test_rings_inside(name: str, tmp_path: Path) -> None:
    overrides, expected = CONTEXT[name]
    result = compiled(tmp_path, 5, *overrides)
    counts = operators(result)
    assert {key: counts[key] for key in expected} == expected
    assert ("loss_scale" in result["pieces"]) == ("--train.dtype=fp16" in overrides)


@pytest.mark.long
def test_adapters(tmp_path: Path) -> None:
    """LoRA on all linear layers: they are cut beside their layers, and only they train."""
    overrides = ["--parallel.dp=4", "--parallel.mp=4", "--parallel.sp=true", "--lora.enabled=true"]
    result = compiled(tmp_path, 5, *overrides, "--lora.target_modules=all-linear", "--lora.r=8")
    pieces, layer = result["pieces"], "model.layers.0"
    assert pieces[f"{layer}.self_attn.q_proj.lora_A.weight"] == [8, 256]
    assert pieces[f"{layer}.self_attn.q_proj.lora_B.weight"] == [64, 8]
    assert pieces[f"{layer}.mlp.down_proj.lora_A.weight"] == [8, 128]
    assert pieces[f"{layer}.mlp.down_proj.lora_B.weight"] == [256, 8]
    assert pieces[f"{layer}.mlp.down_proj.weight"] == [256, 128]
    moments = {name for name in pieces if name.startswith("exp_avg.")}
    assert len(moments) == 2 * 2 * 7 and all(".lora_" in name for name in moments)
    counts = operators(result)
    assert counts["AllReduce", (1, 5, 9, 13)] + counts["AllReduce", ALL] == 2 * 2 * 7  # their gradients


def test_loss_in_chunks(tmp_path: Path) -> None:
    """1024 tokens of 131072 logits a worker, 512 MiB in fp32: two chunks, whose weight is summed over workers once."""
    overrides = ["--parallel.dp=8", "--parallel.mp=2", "--parallel.vocab_parallel=true", "--model.vocab_size=262144"]
    result = compiled(tmp_path, 5, *overrides, "--data.seq_length=1024", "--model.num_hidden_layers=1")
    found = [(name, times) for name, _, times, shapes in result["operators"] if [131072, 256] in shapes]
    assert {name for name, _ in found} == {"AllReduce"}
    assert sum(times for _, times in found) == 2  # embedding and output layer
    maxima = [times for _, ranks, times, shapes in result["operators"] if shapes == [[512, 1]] and ranks == [4, 5]]
    assert sum(maxima) == 2  # one a chunk; what was communicated is kept for the backward pass


def test_every_collective(tmp_path: Path) -> None:
    """Forward and gradient of each, on a group of 3 of 16 whose order is 3, 1, 5; input i has 18 i numbers."""
    result = compiled(tmp_path, 5, worker=WORKER.with_name("collectives_program.py"))
    found: Counter[tuple[str, int]] = Counter()
    for name, ranks, sizes, times in result["operators"]:
        assert sorted(ranks) == [1, 3, 5]
        found[name, sum(sizes)] += times
    expected = {
        ("AllReduce", 18): 2,
        ("AllReduce", 36): 1,  # its gradient is the identity
        ("AllGather", 54): 1, ("ReduceScatter", 3 * 54): 1,
        ("ReduceScatter", 72): 1, ("AllGather", 24): 1,
        ("AlltoAll", 90): 2,
        ("NeighborExchange", 108): 2,
        ("NeighborExchange", 2 * 126): 2,
        ("AllReduce", 144): 2,
    }  # fmt: skip
    # MindSpore repeats sums of which the backward pass uses the result; all else is there exactly as often.
    sums = {("AllReduce", 18), ("AllReduce", 144)}
    assert {key: min(found[key], expected[key]) if key in sums else found[key] for key in found} == expected
    assert "tensors of Float32, Float16; those that travel together have one type" in result["mixed"]


def test_refusals(tmp_path: Path) -> None:
    result = compiled(tmp_path, 0, "--parallel.dp=2", "--parallel.mp=8")
    assert result["refused"].startswith("num_key_value_heads = 4 is below mp = 8")
