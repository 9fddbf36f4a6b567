# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU beside torch's scaled_dot_product_attention: speed in turns in one process, and memory.

    python tests/benchmarks/bench_attention.py [--check]

Batch 1, causal, float32. `process` columns are CPU seconds of all threads together: they show what a busy machine
hides. Memory is the growth of the peak resident size over inputs, measured in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEAST_RATIO, LEAST_RATIO_DOCUMENTS, MOST_MB = 1.3, 8.0, 300


@dataclass
class Timing:
    """Medians over the repetitions, in milliseconds."""

    wall: float
    process: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--document", type=int, default=512, help="length of the packed documents")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def take_turns(functions: list[Callable[[], None]], repetitions: int) -> list[Timing]:
    """Warm each function up, then call them in turns."""
    for function in functions:
        function()
    samples: list[list[tuple[float, float]]] = [[] for _ in functions]
    for _ in range(repetitions):
        for function, taken in zip(functions, samples, strict=True):
            process, wall = time.process_time(), time.perf_counter()
            function()
            taken.append((time.perf_counter() - wall, time.process_time() - process))
    return [Timing(*(1e3 * statistics.median(column) for column in zip(*taken, strict=True))) for taken in samples]


def our_functions(arguments: argparse.Namespace, length: int, document: int = 0) -> list[Callable[[], None]]:
    """Forward, and forward + backward, of the graph-mode Cell; each returns after the work is done."""
    import mindspore as ms
    import numpy as np

    from ms_longctx.attention.flash import FlashAttention
    from ms_longctx.attention.mask import MaskSpec

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    rng = np.random.default_rng(0)

    def random(heads: int) -> ms.Tensor:
        return ms.Tensor(rng.standard_normal((1, length, heads, arguments.head_dim), np.float32))

    query, d_out = random(arguments.heads), random(arguments.heads)
    key, value = random(arguments.kv_heads), random(arguments.kv_heads)
    ids = ms.Tensor(np.arange(length, dtype=np.int32)[None] // document) if document else None
    attention = FlashAttention(MaskSpec(documents=document > 0), implementation="cpu_kernel")
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(attention)

    def forward() -> None:
        if ids is None:
            attention(query, key, value)[0, 0, 0, 0].asnumpy()
        else:
            attention(query, key, value, ids)[0, 0, 0, 0].asnumpy()

    def both() -> None:
        inputs = (query, key, value) if ids is None else (query, key, value, ids)
        gradient(*inputs, d_out)[2][0, 0, 0, 0].asnumpy()

    return [forward, both]


def torch_functions(arguments: argparse.Namespace, length: int) -> list[Callable[[], None]]:
    """The same work in torch, in its own layout (B, H, S, D)."""
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    q, d_out = (torch.randn(1, arguments.heads, length, arguments.head_dim) for _ in range(2))
    k, v = (torch.randn(1, arguments.kv_heads, length, arguments.head_dim) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = arguments.heads != arguments.kv_heads

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, is_causal=True, enable_gqa=grouped)

    def both() -> None:
        inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
        torch.autograd.grad(attend(*inputs, is_causal=True, enable_gqa=grouped), inputs, d_out)

    return [forward, both]


def print_memory(arguments: argparse.Namespace) -> None:
    """Peak resident size of forward + backward over what was resident before it, in MB, after a small warm-up."""
    our_functions(arguments, 64)[1]()
    functions = our_functions(arguments, arguments.memory)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    functions[1]()
    print(resident("VmHWM") - before)


def resident(field: str) -> float:
    """A resident size of this process in MB: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure_memory(arguments: argparse.Namespace, length: int) -> float:
    options = ("heads", "kv_heads", "head_dim", "threads")
    flags = [x for name in options for x in (f"--{name}", str(getattr(arguments, name)))]
    command = [sys.executable, __file__, "--memory", str(length), *flags]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def print_header(arguments: argparse.Namespace) -> None:
    import mindspore as ms
    import torch

    from ms_longctx import kernels

    print(
        f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, {arguments.threads} threads, "
        f"kernels {kernels.instruction_set()}, mindspore {ms.__version__}, torch {torch.__version__}"
    )
    print(
        f"batch 1, {arguments.heads} heads ({arguments.kv_heads} key/value) of {arguments.head_dim}, float32, causal, "
        f"median of {arguments.repetitions} in turns"
    )
    print(f"{'case':30}{'ours ms':>10}{'torch ms':>10}{'speed-up':>10}{'process ms: ours':>18}{'torch':>9}")


def main() -> int:
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if arguments.memory:
        print_memory(arguments)
        return 0
    print_header(arguments)
    bars = [compare(arguments, length) for length in arguments.lengths]
    longest = max(arguments.lengths)
    bars.append(compare_documents(arguments, longest))
    grown = measure_memory(arguments, longest)
    print(f"{longest} forward + backward: peak memory grows by {grown:.0f} MB (bar {MOST_MB})")
    return 1 if arguments.check and not (all(bars) and grown < MOST_MB) else 0


def compare(arguments: argparse.Namespace, length: int) -> bool:
    """Print our times beside torch's; whether both are fast enough."""
    ours, theirs = our_functions(arguments, length), torch_functions(arguments, length)
    ratios = []
    for name, pair in zip(("forward", "forward + backward"), zip(ours, theirs, strict=True), strict=True):
        mine, peer = take_turns(list(pair), arguments.repetitions)
        ratios.append(peer.wall / mine.wall)
        print(
            f"{length} {name:24}{mine.wall:10.1f}{peer.wall:10.1f}{ratios[-1]:10.2f}"
            f"{mine.process:18.1f}{peer.process:9.1f}",
            flush=True,
        )
    return min(ratios) >= LEAST_RATIO


def compare_documents(arguments: argparse.Namespace, length: int) -> bool:
    """Print the time of packed documents beside that of one long one; whether the empty blocks are skipped."""
    full, packed = our_functions(arguments, length), our_functions(arguments, length, arguments.document)
    ratios = []
    for name, pair in zip(("forward", "forward + backward"), zip(packed, full, strict=True), strict=True):
        parts, whole = take_turns(list(pair), arguments.repetitions)
        ratios.append(whole.wall / parts.wall)
        print(
            f"{length} in documents of {arguments.document}, {name}: {parts.wall:.1f} ms, "
            f"{ratios[-1]:.1f} times as fast as full causal"
        )
    return min(ratios) >= LEAST_RATIO_DOCUMENTS


if __name__ == "__main__":
    sys.exit(main())
