# SPDX-License-Identifier: Apache-2.0
"""The directory in which a prepared set grows, shard by shard, until it is complete.

``state.json`` is the truth: it names the shards that are whole, how many chunks of the input they cover and
the accounting so far. It is replaced in one step, so a preparation killed at any moment goes on from there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ms_longctx.data.convert import Converted, Sample
from ms_longctx.data.labels import supervised_tokens
from ms_longctx.data.manifest import SUFFIX, Shard, manifest_path, work_directory, write_json
from ms_longctx.data.tally import Tally
from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class _Limits:
    """What one file holds at most.

    Attributes:
        bytes: of tokens and runs.
        seq_length: tokens of a sample.
    """

    bytes: int
    seq_length: int

    @property
    def rows(self) -> int:
        """Samples; each costs the file some bytes besides its tokens."""
        return max(4096, self.bytes // 1024)

    @property
    def sample(self) -> int:
        """Integers of a sample: its tokens, and no more runs than tokens."""
        return 2 * self.seq_length


class Work:
    """Samples on their way to the files of a set.

    Args:
        outputs: final path of the set of each split.
        seq_length: tokens of a sample at most.
        shard_bytes: bytes of samples in one file at most.
        source: digest of settings and inputs; work begun with another one is not gone on with.
        discard: throw unfinished work away and begin anew.

    Raises:
        MsLongctxError: unfinished work of another kind is there, or another process is at it.

    Attributes:
        chunks: chunks of the input that are accounted for.
        tally: accounting so far.
        complete: all input is in shards; only :meth:`publish` is left.
    """

    def __init__(
        self, outputs: Mapping[str, Path], seq_length: int, shard_bytes: int, source: str, discard: bool
    ) -> None:
        self._outputs = dict(outputs)
        self._limits = _Limits(shard_bytes, seq_length)
        self._source = source
        first = next(iter(outputs.values()))
        self.directory = work_directory(first)
        self._state_file = self.directory / "state.json"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.directory, first)
        self.chunks = 0
        self.tally = Tally()
        self.complete = False
        self.shards: dict[str, list[Shard]] = {split: [] for split in outputs}
        self._waiting = Converted()
        self._waiting_chunks = 0
        self._waiting_bytes = 0
        self._waiting_rows = 0
        self._sizes: dict[str, int] = {}
        if self._state_file.is_file() and not discard:
            self._load(json.loads(self._state_file.read_text(encoding="utf-8")))

    def _load(self, state: dict[str, Any]) -> None:
        if state["source"] != self._source:
            raise MsLongctxError(
                f"{self.directory} holds an unfinished preparation with other settings or inputs; "
                "finish that one, or throw it away with --overwrite"
            )
        self.chunks = state["chunks"]
        self.tally = Tally.from_json(state["tally"])
        self.complete = state["complete"]
        self._sizes = state["sizes"]
        self._limits = _Limits(**state["limits"])
        self.shards = {split: [Shard(**shard) for shard in state["shards"].get(split, [])] for split in self._outputs}

    @property
    def full(self) -> bool:
        """Whether enough waits for a file."""
        return self._waiting_bytes >= self._limits.bytes or self._waiting_rows >= self._limits.rows

    def add(self, converted: Converted) -> None:
        """Take the samples of the next chunk; they are kept in memory until :meth:`commit`."""
        for split, samples in converted.samples.items():
            self._waiting.samples[split] += samples
            self._waiting_bytes += sum(map(_bytes, samples))
            self._waiting_rows += len(samples)
        self._waiting.tally.add(converted.tally)
        self._waiting_chunks += 1

    def commit(self, complete: bool = False) -> None:
        """Write what waits into new files of each split and record it; ``complete`` after the last chunk."""
        self._write_waiting(only_shard=complete and not self._sizes and not self.full)
        self.tally.add(self._waiting.tally)
        self.chunks += self._waiting_chunks
        self.complete = complete
        self._waiting, self._waiting_chunks, self._waiting_bytes, self._waiting_rows = Converted(), 0, 0, 0
        write_json(
            self._state_file,
            {
                "source": self._source,
                "chunks": self.chunks,
                "complete": complete,
                "sizes": self._sizes,
                "limits": asdict(self._limits),
                "tally": self.tally.to_json(),
                "shards": {split: [asdict(shard) for shard in shards] for split, shards in self.shards.items()},
            },
        )

    def _write_waiting(self, only_shard: bool) -> None:
        if not any(self._waiting.samples.values()):
            return
        from ms_longctx.data.mindrecord_file import FileSizes, file_sizes, write_mindrecord  # loads MindSpore

        if not self._sizes:
            samples = [sample for split in self._outputs for sample in self._waiting.samples[split]]
            limits = self._limits  # more files may follow, of which only the limits are known
            unknown = (limits.sample, limits.bytes // 4 + limits.sample, limits.rows)
            counts = [_bytes(sample) // 4 for sample in samples]
            known = (max(counts), sum(counts), len(counts))
            self._sizes = asdict(file_sizes(*(known if only_shard else unknown)))
        for split, output in self._outputs.items():
            for samples in _parts(self._waiting.samples[split], self._limits):
                file = self.directory / _shard_name(output, len(self.shards[split]))
                write_mindrecord(file, samples, FileSizes(**self._sizes))
                self.shards[split].append(_measure(file, samples))

    def publish(self) -> None:
        """Move the shards to their final place. May be repeated after an interruption."""
        for split, output in self._outputs.items():
            if not self._moved(split):
                remove_set(output)
            for shard in self.shards[split]:
                for name in (shard.name, shard.name + ".db"):
                    if (self.directory / name).exists():
                        os.replace(self.directory / name, output.parent / name)

    def _moved(self, split: str) -> bool:
        """Whether an earlier attempt has begun to move the shards of ``split``."""
        return any(not (self.directory / shard.name).exists() for shard in self.shards[split])

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let other processes use the directory; it stays."""
        self._lock.close()


def remove_set(output: Path) -> None:
    """Delete the set ``output``, its manifest first, so that a half-deleted set cannot be used."""
    manifest = manifest_path(output)
    if not manifest.is_file():
        return
    try:
        names = [shard["name"] for shard in json.loads(manifest.read_text(encoding="utf-8"))["shards"]]
    except (ValueError, KeyError, TypeError):
        names = [output.name]
    manifest.unlink()
    for name in names:
        for file in (output.parent / name, output.parent / f"{name}.db"):
            file.unlink(missing_ok=True)


def _lock(directory: Path, output: Path) -> TextIO:
    stream = (directory / "lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        raise MsLongctxError(f"another process is preparing {output} now; wait for it or stop it") from error
    return stream


def _shard_name(output: Path, index: int) -> str:
    return output.name if index == 0 else f"{output.name.removesuffix(SUFFIX)}-{index:05d}{SUFFIX}"


def _parts(samples: list[Sample], limits: _Limits) -> Iterator[list[Sample]]:
    """Consecutive samples that a file can hold; one that is larger than a file has one of its own."""
    part: list[Sample] = []
    size = 0
    for sample in samples:
        if part and (size + _bytes(sample) > limits.bytes or len(part) == limits.rows):
            yield part
            part, size = [], 0
        part.append(sample)
        size += _bytes(sample)
    if part:
        yield part


def _bytes(sample: Sample) -> int:
    return int(sample[0].nbytes + sample[1].nbytes)


def _measure(file: Path, samples: list[Sample]) -> Shard:
    lengths = [len(tokens) for tokens, _ in samples]
    return Shard(
        name=file.name,
        size=file.stat().st_size,
        index_size=file.with_name(file.name + ".db").stat().st_size,
        samples=len(samples),
        tokens=sum(lengths),
        supervised_tokens=sum(supervised_tokens(runs) for _, runs in samples),
        longest=max(lengths),
    )
