# SPDX-License-Identifier: Apache-2.0
"""JSON lines to a prepared set, in several processes, safe to interrupt and to go on with."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from ms_longctx.data.convert import Settings, load_tools
from ms_longctx.data.formats import RowError, detect_format
from ms_longctx.data.manifest import (
    SUFFIX,
    Manifest,
    load_manifest,
    manifest_path,
    work_directory,
    write_manifest,
)
from ms_longctx.data.pool import convert_chunks, stop_requests
from ms_longctx.data.report import write_report
from ms_longctx.data.source import find_inputs, read_chunks
from ms_longctx.data.tally import Tally
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.data.work import Work
from ms_longctx.errors import MsLongctxError

#: Bytes of samples in one MindRecord file; also what an interruption can cost at most.
SHARD_BYTES = 128 << 20
_FORBIDDEN_IN_NAMES = "\\/:*?\"<>|`&;'"  # MindSpore refuses them


@dataclass(frozen=True)
class Prepared:
    """Outcome of :func:`prepare`.

    Attributes:
        outputs: path of the set of each split that was asked for.
        tally: the accounting; ``None`` if the set was there already.
        finished: False if it was interrupted; the same call goes on.
    """

    outputs: dict[str, Path]
    tally: Tally | None
    finished: bool


def prepare(
    inputs: Sequence[str],
    output: str | Path,
    settings: Settings,
    *,
    num_workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = True,
) -> Prepared:
    """Turn JSON lines into the MindRecord set ``output``, with a report and a picture of lengths beside it.

    Ctrl-C (or SIGTERM) keeps what was done; calling again with the same arguments goes on and gives the same
    samples in the same order. So does a call after the process was killed.

    Args:
        inputs: files or globs, plain or gzip.
        output: ``name.mindrecord``; with ``settings.eval_ratio`` also ``name.eval.mindrecord`` is made.
        settings: what the samples are to be.
        num_workers: processes; ``None`` takes one a core, 1 works in this process.
        shard_bytes: size of one MindRecord file, counted in bytes of int32 tokens.
        overwrite: replace a set that is there and forget unfinished work.
        progress: show a progress bar.

    Raises:
        MsLongctxError: bad input, settings or paths; nothing usable in the input.
    """
    outputs = _outputs(Path(output), settings.eval_ratio)
    files = find_inputs(inputs)
    settings = _with_format(settings, files)
    tokenizer = load_tools(settings).tokenizer
    source = _digest(settings, tokenizer, files)
    if not overwrite and _already_there(outputs, source):
        return Prepared(outputs, None, finished=True)
    work = Work(outputs, settings.lengths.seq_length, shard_bytes, source, discard=overwrite)
    try:
        if not work.complete and not _fill(work, files, settings, num_workers, progress):
            return Prepared(outputs, work.tally, finished=False)
        _publish(work, outputs, settings, tokenizer, source, files)
    except BaseException:
        if work.chunks:
            work.close()
        else:
            work.remove()
        raise
    return Prepared(outputs, work.tally, finished=True)


def _fill(
    work: Work,
    files: list[Path],
    settings: Settings,
    num_workers: int | None,
    progress: bool,
) -> bool:
    """Convert what is left of the input; returns False if it was interrupted."""
    chunks = read_chunks(files)
    done = sum(chunk.file_bytes for chunk in islice(chunks, work.chunks))
    total = sum(file.stat().st_size for file in files)
    workers = num_workers or os.cpu_count() or 1
    with stop_requests() as stop, _bar(total, done, progress) as bar:
        for file_bytes, converted in convert_chunks(settings, chunks, workers):
            work.add(converted)
            bar.update(file_bytes)
            if work.full or stop.is_set():
                work.commit()
            if stop.is_set():
                work.close()
                return False
        work.commit(complete=True)
    return True


def _bar(total: int, done: int, shown: bool) -> tqdm:
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        desc="prepare",
        total=total,
        initial=done,
        unit="B",
        unit_scale=True,
        mininterval=interval,
        disable=not shown,
    )


def _publish(
    work: Work,
    outputs: dict[str, Path],
    settings: Settings,
    tokenizer: Tokenizer,
    source: str,
    files: list[Path],
) -> None:
    tally = work.tally
    if not tally.balanced():
        raise RuntimeError(f"accounting does not add up, please report this: {tally.to_json()}")
    for split in outputs:
        if not tally.samples[split]:
            summary, problems = tally.summary(), "; ".join(tally.problems[:3])
            work.remove()
            raise MsLongctxError(f"no sample for the {split} set: {summary}{f'. {problems}' if problems else ''}")
    work.publish()
    for split, output in outputs.items():
        write_manifest(
            output,
            Manifest(
                seq_length=settings.lengths.seq_length,
                layout=settings.layout,
                format=settings.format,
                tokenizer=tokenizer.fingerprint(),
                vocab_size=tokenizer.vocab_size,
                pad_id=tokenizer.pad_id,
                source=source,
                shards=tuple(work.shards[split]),
            ),
        )
    write_report(outputs, files, settings, tally)
    work.remove()


def _outputs(output: Path, eval_ratio: float) -> dict[str, Path]:
    if not 0 <= eval_ratio < 1:
        raise MsLongctxError(f"eval_ratio {eval_ratio} should be at least 0 and less than 1")
    if output.suffix != SUFFIX or not output.stem:
        raise MsLongctxError(f"output {output} should be a file name that ends in {SUFFIX}")
    bad = sorted(set(output.name) & set(_FORBIDDEN_IN_NAMES))
    if bad:
        raise MsLongctxError(f"output name {output.name} contains {' '.join(bad)}, which MindSpore does not accept")
    outputs = {"train": output}
    return outputs | {"eval": output.with_name(f"{output.stem}.eval{SUFFIX}")} if eval_ratio else outputs


def _with_format(settings: Settings, files: list[Path]) -> Settings:
    """Settle ``auto`` by the first row that is JSON."""
    if settings.format != "auto":
        return settings
    for chunk in read_chunks(files):
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            try:
                return replace(settings, format=detect_format(row, dict(settings.fields)))
            except RowError as error:
                raise MsLongctxError(f"{chunk.file}:{number}: {error}") from error
    names = ", ".join(map(str, files))
    if not any(file.stat().st_size for file in files):
        raise MsLongctxError(f"{names}: empty; expected one JSON object on each line")
    raise MsLongctxError(
        f'no line of {names} is JSON; expected one JSON object on each line, plain text as {{"text": "..."}}'
    )


def _digest(settings: Settings, tokenizer: Tokenizer, files: list[Path]) -> str:
    """Names everything the result depends on; how many processes work on it is not part of it."""
    described = {
        **asdict(settings),
        "tokenizer": tokenizer.fingerprint(),
        "chat_template": tokenizer.chat_template,
        "files": [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _already_there(outputs: dict[str, Path], source: str) -> bool:
    """Whether the same set is there already; another one is an error."""
    found = [output for output in outputs.values() if manifest_path(output).is_file()]
    for output in found:
        try:
            same = load_manifest(output).source == source
        except MsLongctxError as error:
            raise MsLongctxError(f"{error}; --overwrite replaces it") from error
        if not same:
            raise MsLongctxError(
                f"{output} was prepared with other settings or inputs; replace it with --overwrite, or use another name"
            )
    foreign = [output for output in outputs.values() if output.exists() and not found]
    if foreign and not work_directory(outputs["train"]).is_dir():
        raise MsLongctxError(f"{foreign[0]} exists and was not made by this tool; remove it or use another name")
    return len(found) == len(outputs)
