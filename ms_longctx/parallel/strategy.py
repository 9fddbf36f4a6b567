# SPDX-License-Identifier: Apache-2.0
"""How a run is spread over its workers: all arithmetic of degrees, ranks and groups stands here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_longctx.config import LlamaConfig, ParallelConfig, RunConfig, load_strategy
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.model_rules import check_model
from ms_longctx.parallel.reading import AttentionMode, read_attention, read_micro_batches, read_sp

ATTENTION_MODES: tuple[AttentionMode, ...] = ("ring", "ulysses", "hybrid")

# The coordinates that vary inside a group; the others are those of the rank that asks.
AXES: dict[str, tuple[str, ...]] = {
    "dp": ("dp",),
    "mp": ("mp",),
    "pp": ("pp",),
    "cp": ("ring", "ulysses"),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "dp_cp": ("dp", "ring", "ulysses"),
}


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank on every axis, each counted from 0; ``cp`` is ``ring * ulysses_degree + ulysses``."""

    pp: int
    dp: int
    ring: int
    ulysses: int
    cp: int
    mp: int


@dataclass(frozen=True)
class Strategy:
    """Degrees of every kind of parallelism, checked, for a known number of workers.

    The rank of a worker is ``((pp_i * dp + dp_i) * cp + cp_i) * mp + mp_i``: the workers of a tensor parallel group
    are neighbours, those of different pipeline stages are far apart.

    Args:
        dp: data parallel copies.
        mp: tensor parallel degree.
        pp: pipeline stages.
        cp: context parallel degree: pieces of every sequence; ``ring_degree * ulysses_degree``.
        sequence_parallel: norms and the residual stream are split over the mp group too (Korthikanti et al. 2022,
            arXiv 2205.05198).
        attention_mode: how attention sees the other pieces: ``ring`` (K and V travel), ``ulysses`` (heads are
            exchanged for tokens), ``hybrid`` (Ulysses inside, ring outside).
        ulysses_degree, ring_degree: factors of ``cp``.
        micro_batch_num: micro batches that go through the pipeline in one step; 1 without a pipeline.
        optimizer_shard: optimizer state is split over the workers that hold the same weights.
        vocab_parallel: embedding and output layer are split by vocabulary over the mp group.
        pipeline_layers: decoder layers of each stage; ``None``: the same number in each.

    Raises:
        MsLongctxError: degrees that contradict each other.
    """

    dp: int = 1
    mp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    attention_mode: AttentionMode = "ring"
    ulysses_degree: int = 1
    ring_degree: int = 1
    micro_batch_num: int = 1
    optimizer_shard: bool = False
    vocab_parallel: bool = False
    pipeline_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "mp", "pp", "cp", "ulysses_degree", "ring_degree", "micro_batch_num"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise MsLongctxError(f"{name} = {value!r} must be an integer of at least 1")
        if self.attention_mode not in ATTENTION_MODES:
            raise MsLongctxError(
                f"attention_mode = {self.attention_mode!r} is unknown; expected one of {', '.join(ATTENTION_MODES)}"
            )
        if self.ring_degree * self.ulysses_degree != self.cp:
            raise MsLongctxError(
                f"ring_degree {self.ring_degree} x ulysses_degree {self.ulysses_degree} = "
                f"{self.ring_degree * self.ulysses_degree}; expected cp = {self.cp}"
            )
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        if self.pp == 1 and self.micro_batch_num > 1:
            raise MsLongctxError(
                f"micro_batch_num = {self.micro_batch_num} needs a pipeline and pp is 1; to accumulate gradients use "
                "train.gradient_accumulation_steps"
            )
        if self.micro_batch_num < self.pp:
            raise MsLongctxError(
                f"micro_batch_num = {self.micro_batch_num} is below pp = {self.pp}: some stages would never work; "
                "expected at least pp"
            )
        layers = self.pipeline_layers
        if isinstance(layers, list):  # from JSON
            object.__setattr__(self, "pipeline_layers", tuple(layers))
        if layers is not None and (len(layers) != self.pp or min(layers) < 1):
            raise MsLongctxError(
                f"pipeline_layers = {list(layers)} must have pp = {self.pp} numbers of at least 1, one a stage"
            )

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any], worker_num: int) -> Strategy:
        """The strategy of a JSON or YAML file, or of a mapping such as ``{"dp": 4, "mp": 2, "sp": 2, "pp": 2}``.

        Keys are those of :class:`~ms_longctx.config.ParallelConfig` and their other names.

        Args:
            source: path, or the keys themselves.
            worker_num: how many workers there are.

        Raises:
            MsLongctxError: the file cannot be read, has an unknown key or a wrong type, or the degrees do not
                give ``worker_num``.
        """
        name = "strategy" if isinstance(source, Mapping) else str(source)
        return cls.from_section(load_strategy(source), worker_num, name)

    @classmethod
    def from_config(cls, run: RunConfig, worker_num: int) -> Strategy:
        """The strategy of a run: its section ``parallel`` and, for a pipeline, the accumulated micro batches."""
        return cls.from_section(run.parallel, worker_num, "parallel", run.train.gradient_accumulation_steps)

    @classmethod
    def from_section(
        cls, section: ParallelConfig, worker_num: int, source: str = "parallel", accumulation: int = 1
    ) -> Strategy:
        """The strategy that a section describes on ``worker_num`` workers; decides what ``sp`` means.

        ``sp`` is Megatron's sequence parallelism over the mp group, 1 or equal to mp, where dp x mp x pp x cp is the
        number of workers. If dp x mp x pp x sp is that number instead, ``sp`` is read as ``cp``.

        Args:
            section: types and ranges are checked already.
            worker_num: how many workers there are.
            source: what error messages begin with.
            accumulation: micro batches of an optimizer step, for a pipeline without ``micro_batch_num``.
        """
        try:
            cp, sequence_parallel = read_sp(section, worker_num)
            mode, ulysses = read_attention(section, cp)
            return cls(
                dp=section.dp,
                mp=section.mp,
                pp=section.pp,
                cp=cp,
                sequence_parallel=sequence_parallel,
                attention_mode=mode,
                ulysses_degree=ulysses,
                ring_degree=cp // ulysses,
                micro_batch_num=read_micro_batches(section, accumulation),
                optimizer_shard=section.optimizer_shard,
                vocab_parallel=section.vocab_parallel,
                pipeline_layers=None if section.pipeline_layers is None else tuple(section.pipeline_layers),
            )
        except MsLongctxError as error:
            raise MsLongctxError(f"{source}: {error}") from None

    @property
    def worker_num(self) -> int:
        """Number of workers: dp x mp x pp x cp."""
        return self.dp * self.mp * self.pp * self.cp

    @property
    def sequence_multiple(self) -> int:
        """Sequences are split into equal pieces if their length is a multiple of this.

        A causal ring is balanced by giving each of its workers an early and a late piece, hence twice as many.
        """
        return self.cp * (2 if self.ring_degree > 1 else 1)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands on every axis."""
        if not 0 <= rank < self.worker_num:
            raise MsLongctxError(f"rank {rank} does not exist; expected 0 to {self.worker_num - 1}")
        rest, mp = divmod(rank, self.mp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        ring, ulysses = divmod(cp, self.ulysses_degree)
        return Coordinates(pp=pp, dp=dp, ring=ring, ulysses=ulysses, cp=cp, mp=mp)

    def rank(self, pp: int = 0, dp: int = 0, ring: int = 0, ulysses: int = 0, mp: int = 0) -> int:
        """The rank at these coordinates."""
        cp = ring * self.ulysses_degree + ulysses
        return ((pp * self.dp + dp) * self.cp + cp) * self.mp + mp

    def degree(self, axis: str) -> int:
        """Number of ranks of a group of ``axis``, one of :data:`AXES`."""
        if axis not in AXES:
            raise MsLongctxError(f"axis {axis!r} is unknown; expected one of {', '.join(AXES)}")
        sizes = {"dp": self.dp, "mp": self.mp, "pp": self.pp, "ring": self.ring_degree, "ulysses": self.ulysses_degree}
        return math.prod(sizes[name] for name in AXES[axis])

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks, ``rank`` among them, that differ from it on ``axis`` only, in the order of that axis.

        ``dp_cp`` are the ranks that hold the same weights: gradients are summed over them.
        """
        self.degree(axis)
        own = self.coordinates(rank)
        fixed = {name: getattr(own, name) for name in ("pp", "dp", "ring", "ulysses", "mp")}
        places = itertools.product(*(range(self.degree(name)) for name in AXES[axis]))
        return tuple(self.rank(**{**fixed, **dict(zip(AXES[axis], place, strict=True))}) for place in places)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ``axis``, by its first rank: the one at 0 on this axis."""
        self.degree(axis)
        others = [name for name in ("pp", "dp", "ring", "ulysses", "mp") if name not in AXES[axis]]
        places = itertools.product(*(range(self.degree(name)) for name in others))
        firsts = (self.rank(**dict(zip(others, place, strict=True))) for place in places)
        return [self.group(axis, first) for first in firsts]

    def neighbours(self, axis: str, rank: int) -> tuple[int | None, int | None]:
        """Ranks before and after ``rank`` on ``axis``: around a ring, but ``None`` beyond the ends of a pipeline."""
        group = self.group(axis, rank)
        place, last = group.index(rank), len(group) - 1
        if axis == "pp":
            return (group[place - 1] if place else None, group[place + 1] if place < last else None)
        return group[place - 1], group[(place + 1) % len(group)]

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Decoder layers of each pipeline stage, for a model that :meth:`check_model` accepts."""
        return self.pipeline_layers or (num_layers // self.pp,) * self.pp

    def check_model(self, config: LlamaConfig, seq_length: int, batch_size: int) -> None:
        """Refuse a model or a batch that cannot be split this way.

        Args:
            config: the architecture.
            seq_length: tokens of a sequence. Pad it to :attr:`sequence_multiple` before, where padding is wanted.
            batch_size: sequences of one micro batch on one data parallel copy.

        Raises:
            MsLongctxError: what does not divide, with the numbers.
        """
        check_model(self, config, seq_length, batch_size)

    def describe(self) -> str:
        """One line for logs: degrees that are not 1, and what they do."""
        parts = [f"{name} {value}" for name in ("dp", "mp", "pp", "cp") if (value := getattr(self, name)) > 1]
        if self.cp > 1:
            detail = f" (ring {self.ring_degree} x ulysses {self.ulysses_degree})"
            parts.append(f"attention {self.attention_mode}{detail if self.attention_mode == 'hybrid' else ''}")
        if self.pp > 1:
            parts.append(f"{self.micro_batch_num} micro batches")
        if self.sequence_parallel:
            parts.append("sequence parallel over mp")
        parts += [text for text in ("optimizer_shard", "vocab_parallel") if getattr(self, text)]
        workers = f"{self.worker_num} worker{'s' if self.worker_num > 1 else ''}"
        return f"{workers}: {', '.join(parts)}" if parts else workers
