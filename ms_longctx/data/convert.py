# SPDX-License-Identifier: Apache-2.0
"""Lines to samples: the work of one process of a preparation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ms_longctx.data.formats import RowError, RowReader
from ms_longctx.data.labels import supervised_tokens
from ms_longctx.data.samples import LAYOUTS, Built, Lengths, SampleBuilder
from ms_longctx.data.source import Chunk
from ms_longctx.data.tally import LENGTH_STEP, Tally
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError

SPLITS = ("train", "eval")
#: Tokens int32 ``(n,)`` and runs int32 ``(k,)`` (see :mod:`ms_longctx.data.labels`).
Sample = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Settings:
    """All that determines the samples of a line.

    Attributes:
        tokenizer: what :func:`ms_longctx.data.tokenizer.load_tokenizer` reads.
        format: a format of :mod:`ms_longctx.data.formats`, or ``auto``.
        layout: ``sft`` or ``lm``.
        lengths: limits in tokens.
        fields: (our field name, name in the rows) pairs.
        system: system message of rows without one.
        instruction: prompt of the article format, with ``{article}`` in it.
        chat_template: Jinja source or file, in place of the tokenizer's.
        eval_ratio: share of the rows that go to the evaluation set. A row's text decides, so that equal rows
            are on the same side whatever their order.
        split_seed: another seed makes another division.
        strict: stop at the first row that cannot be used.

    Raises:
        MsLongctxError: unknown layout.
    """

    tokenizer: str
    layout: str
    lengths: Lengths
    format: str = "auto"
    fields: tuple[tuple[str, str], ...] = ()
    system: str | None = None
    instruction: str | None = None
    chat_template: str | None = None
    eval_ratio: float = 0.0
    split_seed: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise MsLongctxError(f"layout {self.layout!r}; expected one of {', '.join(LAYOUTS)}")


@dataclass(frozen=True)
class Tools:
    """What turns a line into samples."""

    tokenizer: Tokenizer
    reader: RowReader
    builder: SampleBuilder


@dataclass
class Converted:
    """Samples of a chunk by split, and their accounting."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    tally: Tally = field(default_factory=Tally)


def convert(settings: Settings, chunk: Chunk) -> Converted:
    """Return the samples of ``chunk``.

    Raises:
        MsLongctxError: a row cannot be used and ``settings.strict``.
    """
    tools = load_tools(settings)
    result = Converted()
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        result.tally.rows["read"] += 1
        try:
            built = tools.builder.build(tools.reader.read(_parse(line)))
        except RowError as error:
            where = f"{chunk.file}:{number}"
            if settings.strict and error.reason != "blank":
                raise MsLongctxError(f"{where}: {error.reason}: {error}") from error
            result.tally.drop(where, error.reason, str(error))
            continue
        split = "eval" if _is_evaluation(line, settings) else "train"
        result.samples[split] += built.samples
        _count(result.tally, built, split)
    return result


@lru_cache(maxsize=1)
def load_tools(settings: Settings) -> Tools:
    """Make the tools once in a process.

    Raises:
        MsLongctxError: unknown format or field, no usable tokenizer.
    """
    reader = RowReader(settings.format, dict(settings.fields), settings.system, settings.instruction)
    tokenizer = load_tokenizer(settings.tokenizer, settings.chat_template)
    return Tools(tokenizer, reader, SampleBuilder(tokenizer, settings.layout, settings.lengths))


def _parse(line: bytes) -> object:
    if not line.strip():
        raise RowError("blank", "the line is blank")
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_json", str(error) or type(error).__name__) from error
    if b"\\u" in line:
        _check_surrogates(value)
    return value


def _check_surrogates(value: object) -> None:
    """JSON can escape one half of a surrogate pair, which is no character and cannot be tokenized."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("bad_text", "half of a surrogate pair (\\ud800 to \\udfff)") from error


def _is_evaluation(line: bytes, settings: Settings) -> bool:
    if not settings.eval_ratio:
        return False
    key = settings.split_seed.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(line.strip(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") < settings.eval_ratio * 2**64


def _count(tally: Tally, built: Built, split: str) -> None:
    tally.rows["written"] += 1
    tally.rows["shortened"] += bool(built.lost)
    tally.samples[split] += len(built.samples)
    tally.tokens["encoded"] += built.encoded
    tally.lost.update(built.lost)
    tally.source_lengths[built.encoded // LENGTH_STEP * LENGTH_STEP] += 1
    for tokens, runs in built.samples:
        tally.lengths[len(tokens)] += 1
        tally.tokens["written"] += len(tokens)
        tally.tokens["supervised"] += supervised_tokens(runs)
