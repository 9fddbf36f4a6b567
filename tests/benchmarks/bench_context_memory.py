# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a training step of 32K tokens in one process and under context parallelism.

    python tests/benchmarks/bench_context_memory.py [--check]

``run_scripts/run_train.py`` trains a small random Llama on one sequence a step (forward, backward, AdamW), alone and
under msrun, ring and Ulysses. A figure is the highest resident set that the kernel has seen of a process (VmHWM,
shared memory included), at its end; of several processes the largest counts. The bar is on that total. Beside it
stands what is left above the resident set after the imports, which no strategy can split. The losses must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from machine import cpu_name, free_port

ROOT = Path(__file__).resolve().parents[2]
MOST_OF_ONE = 0.35
VOCAB = 4096
MODEL = {
    "vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "tie_word_embeddings": "true",
}  # fmt: skip
Peaks = dict[str, float]  # "peak", "imports" in MB, "loss"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--modes", nargs="+", default=["ring", "ulysses"], choices=["ring", "ulysses"])
    parser.add_argument("--check", action="store_true", help="exit 1 if the bar is missed or losses differ")
    return parser.parse_args()


def resident(field: str) -> float:
    """MB of this process: VmRSS is now, VmHWM the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def work(result: Path, arguments: list[str]) -> None:
    """One process of a run: ``run_train.py`` itself, and at its end its figures to ``result/RANK.json``."""
    import mindspore  # noqa: F401

    import ms_longctx.train.trainer  # noqa: F401

    imports = resident("VmRSS")
    sys.argv = ["run_train.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "run_scripts/run_train.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    rank = os.environ.get("RANK_ID", "0")
    (result / f"{rank}.json").write_text(json.dumps({"peak": resident("VmHWM"), "imports": imports}))


def write_data(path: Path, length: int, samples: int) -> None:
    """Documents of ``length`` random tokens as a prepared set."""
    import numpy as np

    from ms_longctx.data.manifest import Manifest, Shard, write_manifest
    from ms_longctx.data.mindrecord_file import file_sizes, write_mindrecord

    rng = np.random.default_rng(0)
    runs = np.array([0, length], np.int32)
    write_mindrecord(
        path,
        [(rng.integers(0, VOCAB, length).astype(np.int32), runs) for _ in range(samples)],
        file_sizes(length + 2, samples * (length + 2), samples),
    )
    shard = Shard(
        name=path.name, size=path.stat().st_size, index_size=path.with_name(f"{path.name}.db").stat().st_size,
        samples=samples, tokens=samples * length, supervised_tokens=samples * (length - 1), longest=length,
    )  # fmt: skip
    write_manifest(
        path,
        Manifest(
            seq_length=length, layout="lm", format="text", tokenizer="0" * 64, vocab_size=VOCAB, pad_id=0,
            source="random", shards=(shard,),
        ),
    )  # fmt: skip


def train_arguments(arguments: argparse.Namespace, data: Path, output: Path, mode: str, workers: int) -> list[str]:
    model = MODEL | {
        "hidden_size": arguments.hidden, "intermediate_size": arguments.intermediate,
        "num_hidden_layers": arguments.layers, "max_position_embeddings": arguments.length,
    }  # fmt: skip
    train = {
        "output_dir": output, "device_target": "CPU", "batch_size": 1, "max_steps": arguments.steps, "log_steps": 1,
    }  # fmt: skip
    given = {f"model.{name}": value for name, value in model.items()}
    given |= {f"train.{name}": value for name, value in train.items()}
    given |= {"data.path": data, "data.seq_length": arguments.length, "optimizer.learning_rate": 0.001}
    if workers > 1:
        given |= {"parallel.cp": workers, "parallel.attention_mode": mode}
    return [f"--{name}={value}" for name, value in given.items()]


def measure(arguments: argparse.Namespace, data: Path, folder: Path, mode: str, workers: int) -> list[Peaks]:
    """Train once; the figures of each process."""
    result = folder / f"{mode}-{workers}"
    result.mkdir()
    script = [__file__, "worker", str(result)]
    script += train_arguments(arguments, data, result / "run", mode, workers)
    launcher = [sys.executable]
    if workers > 1:
        launcher = [str(Path(sys.executable).with_name("msrun")), "--worker_num", str(workers)]
        launcher += ["--local_worker_num", str(workers), "--join", "True", "--master_port", str(free_port())]
        launcher += ["--log_dir", str(result / "logs")]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)), "OMP_WAIT_POLICY": "passive",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # msrun starts "python"
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run([*launcher, *script], capture_output=True, text=True, env=environment, check=False)
    files = sorted(result.glob("*.json"))
    if done.returncode or len(files) != workers:
        raise SystemExit(f"{mode} with {workers} processes failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    records = (result / "run/metrics.jsonl").read_text().splitlines()
    loss = [json.loads(line) for line in records if '"loss"' in line][-1]["loss"]
    return [json.loads(path.read_text()) | {"loss": loss} for path in files]


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        work(Path(sys.argv[2]), sys.argv[3:])
        return 0
    sys.path.insert(0, str(ROOT))
    arguments = parse_arguments()
    print(f"{date.today()}  {cpu_name()}, {os.cpu_count()} cores  MindSpore {version('mindspore')}")
    print(
        f"one sequence of {arguments.length} tokens, hidden {arguments.hidden}, intermediate {arguments.intermediate}, "
        f"{arguments.layers} layers, 4 heads of 32, vocabulary {VOCAB}, fp32, AdamW, no recompute"
    )
    print(
        f"{'':10}{'processes':>10}{'peak MB':>10}{'of one':>8}{'above imports':>15}{'of one':>8}{'loss':>10}",
        flush=True,
    )
    one, met = None, True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.mindrecord"
        write_data(data, arguments.length, arguments.steps)
        for mode, workers in [("one", 1), *((mode, arguments.workers) for mode in arguments.modes)]:
            figures = measure(arguments, data, folder, mode, workers)
            largest = max(figures, key=lambda figure: figure["peak"])
            above = largest["peak"] - largest["imports"]
            one = one or largest
            share = largest["peak"] / one["peak"]
            share_above = above / (one["peak"] - one["imports"])
            met &= workers == 1 or (share < MOST_OF_ONE and abs(largest["loss"] - one["loss"]) < 1e-4)
            print(f"{mode:10}{workers:10}{largest['peak']:10.0f}{share:8.1%}{above:15.0f}{share_above:8.1%}"
                  f"{largest['loss']:10.5f}", flush=True)  # fmt: skip
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
