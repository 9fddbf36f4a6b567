# SPDX-License-Identifier: Apache-2.0
"""Reading a prepared set beside tokenizing the same JSON lines on the fly, both through MindSpore's engine.

    python tests/benchmarks/bench_data.py [--samples 2000] [--seq_length 8192]

Rows are made of the paragraphs of the bundled articles, long enough to fill ``seq_length``. Both sides deliver
the same four columns in batches of 4. Prints a table; --check fails where reading is not 50 times as fast.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import mindspore
import mindspore.dataset as ds
import numpy as np
import tokenizers

from ms_longctx import assets
from ms_longctx.data.batching import COLUMNS, Collator
from ms_longctx.data.convert import Settings, load_tools
from ms_longctx.data.dataset import create_dataset
from ms_longctx.data.manifest import load_manifest
from ms_longctx.data.mindrecord_file import SCHEMA
from ms_longctx.data.prepare import prepare
from ms_longctx.data.samples import Lengths

BATCH = 4
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seq_length", type=int, default=8192)
    parser.add_argument("--on_the_fly_samples", type=int, default=200, help="of them, for the slow side")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    settings = Settings(str(assets.fetch(assets.SMOLLM2_135M)), "sft", Lengths(args.seq_length))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = write_rows(folder / "rows.jsonl", args.samples, args.seq_length)
        start = time.perf_counter()
        prepare([str(rows)], folder / "set.mindrecord", settings, progress=False)
        prepared = time.perf_counter() - start
        results = [
            ("tokenize on the fly, 1 process", on_the_fly(rows, settings, args.on_the_fly_samples, 1)),
            ("tokenize on the fly, 2 processes", on_the_fly(rows, settings, args.on_the_fly_samples, 2)),
            ("MindRecord, 1 worker", from_set(folder / "set.mindrecord", args.seq_length, 1)),
            ("MindRecord, 2 workers", from_set(folder / "set.mindrecord", args.seq_length, 2)),
        ]
        report(results, args, rows, folder / "set.mindrecord", prepared, default_file_size(folder))
    ratio = max(rate for name, rate in results if "MindRecord" in name) / results[0][1]
    return 1 if args.check and ratio < 50 else 0


def write_rows(file: Path, samples: int, seq_length: int) -> Path:
    """Articles of real paragraphs in random order, ``seq_length`` tokens and more, with real abstracts."""
    with gzip.open(ROOT / "run_scripts" / "data" / "plos_articles.jsonl.gz", "rt", encoding="utf-8") as stream:
        articles = [json.loads(line) for line in stream]
    paragraphs = [text for row in articles for text in row["article"].split("\n\n")]
    chance = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for index in range(samples):
            parts: list[str] = []
            while sum(map(len, parts)) < 4.3 * seq_length:  # characters a token, generously
                parts.append(chance.choice(paragraphs))
            row = {"article": "\n\n".join(parts), "abstract": articles[index % len(articles)]["abstract"]}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return file


class JsonLines:
    """Rows of a file, tokenized when asked for: what a training without preparation does."""

    def __init__(self, file: Path, settings: Settings, count: int) -> None:
        with file.open("rb") as stream:
            self._lines = [line for line, _ in zip(stream, range(count), strict=False)]
        self._settings = settings

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        tools = load_tools(self._settings)
        tokens, runs = tools.builder.build(tools.reader.read(json.loads(self._lines[index]))).samples[0]
        columns = Collator(self._settings.lengths.seq_length, tools.tokenizer.pad_id)([tokens], [runs])
        return tuple(column[0] for column in columns)


def on_the_fly(rows: Path, settings: Settings, count: int, processes: int) -> float:
    """Samples a second of tokenizing while reading."""
    settings = Settings(settings.tokenizer, settings.layout, settings.lengths, format="article")
    load_tools(settings)
    source = JsonLines(rows, settings, count)
    dataset = ds.GeneratorDataset(
        source,
        list(COLUMNS),
        shuffle=True,
        num_parallel_workers=processes,
        python_multiprocessing=processes > 1,
    ).batch(BATCH)
    return rate(dataset, epochs=1)


def from_set(path: Path, seq_length: int, workers: int) -> float:
    """Samples a second of reading the prepared set, shuffled; the best of five epochs."""
    return max(
        rate(create_dataset(path, BATCH, seq_length, num_parallel_workers=workers, epoch=epoch), epochs=1)
        for epoch in range(5)
    )


def rate(dataset: ds.Dataset, epochs: int) -> float:
    """Samples a second, from the first batch asked for to the last delivered."""
    start = time.perf_counter()
    batches = sum(1 for _ in _batches(dataset, epochs))
    return batches * BATCH / (time.perf_counter() - start)


def _batches(dataset: ds.Dataset, epochs: int) -> Iterator[list[np.ndarray]]:
    yield from dataset.create_tuple_iterator(num_epochs=epochs, output_numpy=True)


def default_file_size(folder: Path) -> int:
    """Bytes of a file with one row as MindSpore writes it when no sizes are set."""
    from mindspore.mindrecord import FileWriter

    file = folder / "default.mindrecord"
    writer = FileWriter(str(file))
    writer.add_schema(SCHEMA)
    writer.write_raw_data([{"input_ids": np.zeros(3, np.int32), "runs": np.zeros(2, np.int32)}])
    writer.commit()
    return file.stat().st_size


def report(
    results: list[tuple[str, float]],
    args: argparse.Namespace,
    rows: Path,
    path: Path,
    prepared: float,
    default: int,
) -> None:
    """Print the table and what stands behind it."""
    manifest = load_manifest(path)
    size = sum(shard.size + shard.index_size for shard in manifest.shards)
    print(f"{date.today()}, {platform.machine()}, {_processor()}, MindSpore {mindspore.__version__}, "
          f"tokenizers {tokenizers.__version__}, Python {platform.python_version()}")  # fmt: skip
    print(f"python tests/benchmarks/bench_data.py --samples {args.samples} --seq_length {args.seq_length}")
    print(f"\n| batches of {BATCH} x {args.seq_length} | samples/s | times on the fly |\n|---|---|---|")
    for name, speed in results:
        print(f"| {name} | {speed:,.0f} | {speed / results[0][1]:.1f} |")
    print(f"\npreparation: {rows.stat().st_size / 1e6:.0f} MB of JSON lines, {manifest.tokens:,} tokens in "
          f"{prepared:.1f} s ({manifest.tokens / prepared:,.0f} tokens/s); stored in {size / 1e6:.1f} MB "
          f"({size / manifest.tokens:.2f} bytes a token)")  # fmt: skip
    print(f"one row as MindSpore stores it by default: {default / 1e6:.1f} MB")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


if __name__ == "__main__":
    sys.exit(main())
