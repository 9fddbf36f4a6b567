# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence spread over processes, beside one process and beside axolotl-ringmaster's ring on gloo.

    pip install --no-deps axolotl-ringmaster      # needs torch; without it only ours is measured
    python tests/benchmarks/bench_context_parallel.py [--check]

Forward + backward, batch 1, causal, float32, the same whole sequence for all. One process has as many threads as there
are cores; several have one each. Of ringmaster both rings that run on a CPU are measured (``p2p``, and ``zigzag``,
which there needs its documents form), and the faster one counts. Every round starts each job once; times are the
median over all rounds of the calls of rank 0, each between two barriers.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from machine import free_port

ROOT = Path(__file__).resolve().parents[2]
LEAST_RATIO, MOST_OVER_ONE = 2.0, 1.15


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=3, help="calls in each start of a job")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["one", "ring", "ulysses", "p2p", "zigzag"])
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--worker", nargs=4, metavar=("KIND", "RANK", "SIZE", "JOB"), help=argparse.SUPPRESS)
    return parser.parse_args()


def our_call(arguments: argparse.Namespace, kind: str, rank: int, size: int, job: str) -> tuple[Callable, Callable]:
    """(forward + backward, barrier) of this rank."""
    import mindspore as ms
    import numpy as np

    from ms_longctx.attention.context_parallel import ContextParallelAttention
    from ms_longctx.attention.mask import MaskSpec
    from ms_longctx.kernels import comm
    from ms_longctx.parallel.strategy import Strategy
    from ms_longctx.parallel.world import World

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    if size > 1:
        comm.join(job, rank, size, timeout=120.0)
    ulysses = size if kind == "ulysses" else 1
    strategy = Strategy(cp=size, ring_degree=size // ulysses, ulysses_degree=ulysses, attention_mode="hybrid")
    attention = ContextParallelAttention(MaskSpec(), strategy, rank)
    rng = np.random.default_rng(rank)

    def random(heads: int) -> ms.Tensor:
        return ms.Tensor(rng.standard_normal((1, arguments.length // size, heads, arguments.head_dim), np.float32))

    q, d_out, k, v = (random(heads) for heads in (arguments.heads,) * 2 + (arguments.kv_heads,) * 2)
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(attention)

    def both() -> None:
        for x in gradient(q, k, v, d_out):
            x[0, 0, 0, 0].asnumpy()

    return both, World(rank, size).barrier


def ringmaster_call(
    arguments: argparse.Namespace, kind: str, rank: int, size: int, job: str
) -> tuple[Callable, Callable]:
    """The same of ringmaster, whose layout is (B, H, S, D)."""
    import torch
    import torch.distributed as dist
    from ringmaster.ring.p2p_attn import ring_p2p_attention
    from ringmaster.ring.zigzag import zigzag_ring_attention

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job}", rank=rank, world_size=size)
    torch.manual_seed(rank)
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    shape = (arguments.length // size, arguments.head_dim)
    inputs = [torch.randn(1, h, *shape, requires_grad=True) for h in heads]
    d_out = torch.randn(1, shape[0], arguments.heads, shape[1])
    one_document = torch.tensor([0, arguments.length], dtype=torch.int32)

    def both() -> None:
        if kind == "p2p":
            out = ring_p2p_attention(*inputs, group=dist.group.WORLD, causal=True, scaling=None)
        else:
            out = zigzag_ring_attention(*inputs, group=dist.group.WORLD, scaling=None, cu_seqlens=one_document)
        torch.autograd.grad(out, inputs, d_out.reshape(out.shape))

    return both, dist.barrier


def work(arguments: argparse.Namespace) -> None:
    """One rank: rank 0 prints the milliseconds of each call."""
    kind, rank, size, job = arguments.worker[0], *map(int, arguments.worker[1:3]), arguments.worker[3]
    make = our_call if kind in ("one", "ring", "ulysses") else ringmaster_call
    both, barrier = make(arguments, kind, rank, size, job)
    both()
    for _ in range(arguments.repetitions):
        barrier()
        start = time.perf_counter()
        both()
        barrier()
        if rank == 0:
            print("ms", 1e3 * (time.perf_counter() - start), flush=True)


def run_job(kind: str, size: int) -> list[float]:
    """Milliseconds of the calls of one start of ``size`` processes."""
    job = str(free_port()) if kind in ("p2p", "zigzag") else f"bench-{uuid.uuid4().hex[:12]}"
    threads = str(os.cpu_count()) if size == 1 else "1"
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive", "GLOG_v": "3",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", kind, str(rank), str(size), job],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{kind} with {size} processes failed")
    return [float(line.split()[1]) for line in outputs[0].splitlines() if line.startswith("ms ")]


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return 0
    has_peer = importlib.util.find_spec("ringmaster") is not None
    sizes = {"one": [1]}
    kinds = [kind for kind in arguments.kinds if has_peer or kind not in ("p2p", "zigzag")]
    jobs = [(kind, size) for kind in kinds for size in sizes.get(kind, arguments.sizes)]
    taken: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    for _ in range(arguments.rounds):
        for job in jobs:
            taken[job] += run_job(*job)
    print(f"{datetime.date.today()}  {os.cpu_count()} cores, length {arguments.length}, {arguments.heads} heads "
          f"({arguments.kv_heads} key/value) of {arguments.head_dim}, float32, causal, forward + backward")  # fmt: skip
    medians = {job: statistics.median(times) for job, times in taken.items()}
    return report(medians, arguments.check)


def report(medians: dict[tuple[str, int], float], check: bool) -> int:
    """Print the table; 1 if a bar is missed and ``check``."""
    missed = False
    one = medians.get(("one", 1))
    print(f"{'job':12}{'processes':>10}{'ms':>10}{'of one process':>16}{'speed-up over ringmaster':>26}")
    for (kind, size), median in medians.items():
        peers = [ms for (name, n), ms in medians.items() if n == size and name in ("p2p", "zigzag")]
        ours = kind in ("ring", "ulysses")
        over = median / one if one else None
        ratio = min(peers) / median if peers and ours else None
        missed |= ours and ((over or 0) > MOST_OVER_ONE or (ratio is not None and ratio < LEAST_RATIO))
        print(f"{kind:12}{size:10}{median:10.0f}{over or float('nan'):16.2f}{f'{ratio:.1f}' if ratio else '-':>26}")
    return 1 if check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
