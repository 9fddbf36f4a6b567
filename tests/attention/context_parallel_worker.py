# SPDX-License-Identifier: Apache-2.0
"""One rank of the context parallel tests: ``context_parallel_worker.py RANK SIZE JOB FOLDER``.

Runs every case of a folder and leaves its part of the results there. ``FOLDER/cases.json`` holds the fields of
:class:`Case` s by name, ``FOLDER/NAME.npz`` the whole inputs; this writes ``FOLDER/NAME.RANK.npz``. All cases share
one start of the processes, which takes longer than most of them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_longctx import kernels
from ms_longctx.attention.context_parallel import ContextParallelAttention
from ms_longctx.attention.mask import MaskSpec
from ms_longctx.kernels import comm
from ms_longctx.parallel.sequence import padded_length, token_order
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.world import World


@dataclass(frozen=True)
class Case:
    """What to run.

    Attributes:
        spec: fields of the mask.
        graph: graph mode or PyNative.
        hides_padding: the true length is handed to the attention.
        layers: more than one: queries go through the attention this often, with recomputation.
        repetitions: how often; results must be the same every time.
    """

    spec: dict
    ring: int
    ulysses: int
    graph: bool
    implementation: str = "cpu_kernel"
    hides_padding: bool = False
    layers: int = 1
    repetitions: int = 1

    @property
    def strategy(self) -> Strategy:
        degree = self.ring * self.ulysses
        return Strategy(cp=degree, ring_degree=self.ring, ulysses_degree=self.ulysses, attention_mode="hybrid")


class Stack(nn.Cell):
    """The attention on its own output, ``layers`` times; only then is the order between Cells at stake."""

    def __init__(self, make: Callable[[], nn.Cell], layers: int) -> None:
        super().__init__()
        self.attend = nn.CellList([make() for _ in range(layers)])
        if layers > 1:
            for cell in self.attend:
                cell.recompute()

    def construct(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, slopes: Tensor | None) -> Tensor:
        for cell in self.attend:
            q = cell(q, k, v, ids, ids, slopes)
        return q


def shard(array: np.ndarray, strategy: Strategy, rank: int, fill: int = 0) -> np.ndarray:
    """The tokens of a rank of (B, S, ...)."""
    padded = padded_length(array.shape[1], strategy)
    widths = [(0, 0), (0, padded - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    filled = np.pad(array, widths, constant_values=fill)
    return np.ascontiguousarray(filled[:, token_order(padded, strategy)[strategy.coordinates(rank).cp]])


def run(case: Case, arrays: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """out, dq, dk and dv of the tokens of this rank; bytes it sent and scores it computed."""
    ms.set_context(mode=ms.GRAPH_MODE if case.graph else ms.PYNATIVE_MODE)
    spec, strategy = MaskSpec(**case.spec), case.strategy
    length = arrays["q"].shape[1] if case.hides_padding else None
    net = Stack(lambda: ContextParallelAttention(spec, strategy, rank, None, case.implementation, length), case.layers)
    q, k, v, d_out = (Tensor(shard(arrays[name], strategy, rank)) for name in ("q", "k", "v", "d_out"))
    ids = Tensor(shard(arrays["documents"], strategy, rank, -1)) if spec.documents else None
    slopes = Tensor(arrays["slopes"]) if spec.alibi else None

    def loss(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
        out = net(q, k, v, ids, slopes)
        return (ops.cast(out, ms.float32) * ops.cast(d_out, ms.float32)).sum(), out

    differentiate = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)
    results: dict[str, np.ndarray] = {}
    for _ in range(case.repetitions):
        sent, scores = comm.sent_bytes(), computed_scores()
        (_, out), grads = differentiate(q, k, v, d_out)
        again = dict(zip(("out", "dq", "dk", "dv"), (x.asnumpy() for x in (out, *grads)), strict=True))
        assert all(np.array_equal(again[name], array, equal_nan=True) for name, array in results.items())
        results = again
    counted = {"sent": np.array(comm.sent_bytes() - sent), "scores": np.array(computed_scores() - scores)}
    return {**results, **counted}


def computed_scores() -> int:
    """Scores that the attention kernels of this process have computed, forward and backward."""
    count = ctypes.CDLL(str(kernels.library_path())).ms_longctx_flash_scores
    count.restype = ctypes.c_int64
    return count()


def main(rank: int, size: int, job: str, folder: Path) -> None:
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    comm.join(job, rank, size, timeout=60.0)
    with World(rank, size):
        for name, fields in json.loads((folder / "cases.json").read_text()).items():
            results = run(Case(**fields), dict(np.load(folder / f"{name}.npz")), rank)
            np.savez(folder / f"{name}.{rank}.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
