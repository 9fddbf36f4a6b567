# SPDX-License-Identifier: Apache-2.0
"""What a preparation leaves beside the set: ``name.report.json`` and ``name.lengths.png``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ms_longctx.data.convert import Settings
from ms_longctx.data.manifest import write_json
from ms_longctx.data.tally import LENGTH_STEP, Tally

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_BINS = 48


def report_path(output: Path) -> Path:
    """Return where the report of the set ``output`` is."""
    return output.with_name(f"{output.stem}.report.json")


def picture_path(output: Path) -> Path:
    """Return where the picture of the lengths of the set ``output`` is."""
    return output.with_name(f"{output.stem}.lengths.png")


def write_report(outputs: Mapping[str, Path], files: Sequence[Path], settings: Settings, tally: Tally) -> None:
    """Write the report and the picture beside the training set."""
    output = outputs["train"]
    content = tally.to_json()
    lengths, source = content.pop("lengths"), content.pop("source_lengths")
    write_json(
        report_path(output),
        {
            "outputs": {split: str(path) for split, path in outputs.items()},
            "inputs": [str(file) for file in files],
            "settings": asdict(settings),
            **content,
            "length_quantiles": quantiles(tally.lengths),
            "source_length_quantiles": quantiles(tally.source_lengths),
            "lengths": dict(sorted(lengths.items())),
            "source_lengths": {"step": LENGTH_STEP, "rows": dict(sorted(source.items()))},
        },
    )
    draw_lengths(picture_path(output), tally, settings.lengths.seq_length)


def quantiles(lengths: Counter[int]) -> dict[str, int]:
    """Return lengths by share of the samples that are not longer, such as ``{"0.5": 812}``."""
    values = np.array(sorted(lengths))
    below = np.cumsum([lengths[value] for value in values.tolist()])
    ranks = [min(int(np.searchsorted(below, share * below[-1])), len(values) - 1) for share in _QUANTILES]
    return {str(share): int(values[rank]) for share, rank in zip(_QUANTILES, ranks, strict=True)}


def draw_lengths(path: Path, tally: Tally, seq_length: int) -> None:
    """Draw the lengths of source rows and of stored samples to the PNG file ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    longest = max(*tally.source_lengths, *tally.lengths, seq_length)
    edges = np.linspace(0, longest * 1.02, _BINS + 1)
    for counts, label, color, filled in (
        (tally.source_lengths, f"{tally.rows['written']} source rows", "#9aa5b1", True),
        (tally.lengths, f"{sum(tally.samples.values())} samples as stored", "#d1495b", False),
    ):
        axes.hist(
            list(counts),
            bins=edges,
            weights=list(counts.values()),
            histtype="stepfilled" if filled else "step",
            linewidth=1.8,
            color=color,
            label=label,
        )
    axes.axvline(seq_length, color="#30638e", linestyle="--", linewidth=1, label=f"seq_length {seq_length}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("count")
    axes.set_title(f"Lengths, {tally.tokens['written']:,} tokens stored, {tally.rows['shortened']} rows shortened")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, path)
