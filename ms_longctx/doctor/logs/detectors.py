# SPDX-License-Identifier: Apache-2.0
"""Failures that no single pattern shows: text that repeats itself, and memory lost to fragmentation."""

from __future__ import annotations

import re

from ms_longctx.doctor.logs.rules import Rule

REPEATED_OUTPUT = Rule(
    id="repeated_output",
    title="the model repeats itself",
    cause="Greedy decoding fell into a loop: the model was trained too little or too long, its prompt does not have "
    "the form it was trained with (chat template, end token), or the text is longer than its positions reach.",
    cure="generate with --repetition_penalty 1.1 or --do_sample --temperature 0.7 --top_p 0.9; check the chat "
    "template and that the end token is learned (labels); for long texts set model.rope_scaling.",
    source="https://huggingface.co/docs/transformers/generation_strategies",
)
FRAGMENTATION = Rule(
    id="fragmentation",
    title="the device's memory is fragmented",
    covers=("device_memory", "ascend_inner_error", "own_error"),
    cause="Enough memory is free in total, but not in one piece: tensors of changing sizes left gaps.",
    cure="Set MS_ALLOC_CONF=enable_vmm:True (needs driver 24.0 or newer), keep shapes fixed (pad or pack to one "
    "length), and lower the peak a little (train.recompute, a smaller batch).",
    source="https://www.mindspore.cn/docs/zh-CN/r2.10.0/api_python/env_var_list.html",
)

_LOG_LINE = re.compile(
    r"^\s*(\[(DEBUG|INFO|WARNING|ERROR|CRITICAL|EVENT)\b|(DEBUG|INFO|WARNING|ERROR)\b|File \"|\d{4}-\d\d)"
)
_HEX = re.compile(r"[0-9a-fA-Fx\s]+")
_NO_TEXT = re.compile(
    r"\s*[\[(]?(<[^<>]+>|\[PAD\]|nan|inf|none|null|true|false|[,;:|\s.\-+*=#_\[\]()]|\d)+\s*", re.IGNORECASE
)
_LEAST_LENGTH, _LEAST_TIMES, _LEAST_LINES, _LONGEST_UNIT = 60, 8, 8, 120


class Repetition:
    """Finds loops in generated text: at the end of a line, or a line that comes at least eight times in a row."""

    def __init__(self) -> None:
        self._last = ""
        self._count = 0

    def feed(self, line: str) -> str | None:
        """What repeats, once it does."""
        if _LOG_LINE.match(line):
            self._last, self._count = "", 0
            return None
        unit = _loop(line)
        if unit is not None:
            return unit
        text = line.strip()
        if not text:
            return None
        self._count = self._count + 1 if text == self._last else 1
        self._last = text
        is_sentence = len(text.split()) >= 3 or len(text) >= 12
        return text if self._count == _LEAST_LINES and is_sentence and not _is_no_text(text) else None


def _loop(line: str) -> str | None:
    """What the end of the line repeats: a text that loops goes on until it is cut off."""
    if len(line) < _LEAST_LENGTH:
        return None
    for text in dict.fromkeys((line, line.rstrip(" \"'"))):
        for period in range(2, min(_LONGEST_UNIT, len(text) // _LEAST_TIMES) + 1):
            unit = text[-period:]
            times = max(_LEAST_TIMES, -(-_LEAST_LENGTH // period))
            if text.endswith(unit * times):
                return None if _is_no_text(unit * times) else unit.strip()
    return None


def _is_no_text(text: str) -> bool:
    return not any(letter.isalpha() for letter in text) or bool(_HEX.fullmatch(text) or _NO_TEXT.fullmatch(text))


_GIGABYTES = {"K": 2**-20, "M": 2**-10, "G": 1.0, "B": 2**-30, "": 2**-30}
_PEAK = re.compile(r"peak memory usage \((without|with) fragments\): *([\d.]+) ?([KMGB]?)", re.IGNORECASE)
_POOL = re.compile(
    r"Tried to allocate ([\d.]+) ([KMG])iB.*?"
    r"([\d.]+) ([KMG])iB already allocated.*?([\d.]+) ([KMG])iB reserved in total",
    re.IGNORECASE,
)
_SHARE = 0.1


class Fragmentation:
    """Compares the memory in use with the memory taken from the device, as allocators print both."""

    def __init__(self) -> None:
        self._used: float | None = None

    def feed(self, line: str) -> str | None:
        """The figures, where more than a tenth of the memory is lost in gaps."""
        if "peak memory" not in line and "already allocated" not in line:
            return None
        if peak := _PEAK.search(line):
            size = float(peak[2]) * _GIGABYTES[peak[3].upper()]
            if peak[1].lower() == "without":
                self._used = size
            elif self._used is not None and size - self._used > _SHARE * size:
                return f"{self._used:.1f} GB in use, {size:.1f} GB taken"
        elif pool := _POOL.search(line):
            wanted, used, taken = (float(pool[i]) * _GIGABYTES[pool[i + 1].upper()] for i in (1, 3, 5))
            if taken - used >= wanted and taken - used > _SHARE * taken:
                return f"{wanted:.1f} GB wanted, {used:.1f} GB in use, {taken:.1f} GB taken"
        return None
