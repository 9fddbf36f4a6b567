# SPDX-License-Identifier: Apache-2.0
"""The quickstart's report: one HTML file with its pictures inside, and the same numbers as JSON."""

from __future__ import annotations

import base64
import html
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

METRICS = ("rougeLxt", "rouge1", "rouge2", "rougeL")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse } td, th { padding: .25rem .9rem .25rem 0; text-align: left }
th { border-bottom: 1px solid #9aa5b1 } td.number { font-variant-numeric: tabular-nums; text-align: right }
pre { background: #f5f7fa; padding: .6rem; overflow-x: auto } blockquote { margin: .5rem 0 .5rem 1rem }
"""


@dataclass(frozen=True)
class Step:
    """One command of the quickstart: what it does, what was typed, how long it took."""

    title: str
    command: str
    seconds: float


@dataclass(frozen=True)
class Results:
    """What the steps left on disk.

    Args:
        before, after: folders of the two evaluations, each with report.json and predictions.jsonl.
        training: output folder of the training run, with loss.png and metrics.jsonl.
        lengths: picture of the lengths of the prepared samples.
    """

    before: Path
    after: Path
    training: Path
    lengths: Path


def write_report(folder: Path, model: str, steps: Sequence[Step], results: Results) -> Path:
    """Write ``report.html`` and ``report.json`` into ``folder``; returns the HTML file's path."""
    scores = {name: _scores(path) for name, path in (("before", results.before), ("after", results.after))}
    losses = [json.loads(line) for line in (results.training / "metrics.jsonl").read_text().splitlines()]
    summary = {
        "model": model,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "scores": scores,
        "training_steps": len(losses),
        "first_loss": losses[0]["loss"],
        "last_loss": losses[-1]["loss"],
        "steps": [asdict(step) for step in steps],
    }
    (folder / "report.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _draw_scores(folder / "scores.png", scores)
    path = folder / "report.html"
    path.write_text(_page(folder, summary, steps, results), encoding="utf-8")
    return path


def _scores(folder: Path) -> dict[str, float]:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {name: float(report[name]) for name in (*METRICS, "perplexity")}


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("mindspore", "ms-longctx"))
    return f"{platform.platform()}, Python {platform.python_version()}, {packages}"


def _draw_scores(path: Path, scores: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.38
    for index, (name, colour) in enumerate((("before", "#9aa5b1"), ("after", "#2563eb"))):
        places = [place + (index - 0.5) * width for place in range(len(METRICS))]
        bars = axes.bar(places, [scores[name][metric] for metric in METRICS], width, label=name, color=colour)
        axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set_xticks(range(len(METRICS)), METRICS)
    axes.set_ylabel("F-measure, percent")
    axes.set_title("Summaries of held-out articles")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _page(folder: Path, summary: dict[str, Any], steps: Sequence[Step], results: Results) -> str:
    scores = summary["scores"]
    rows = "".join(
        f"<tr><td>{name}</td><td class=number>{scores['before'][name]:.2f}</td>"
        f"<td class=number>{scores['after'][name]:.2f}</td></tr>"
        for name in (*METRICS, "perplexity")
    )
    commands = "".join(
        f"<tr><td>{html.escape(step.title)}</td><td class=number>{step.seconds:.0f} s</td></tr>"
        f"<tr><td colspan=2><pre>{html.escape(step.command)}</pre></td></tr>"
        for step in steps
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>ms_longctx quickstart</title><style>{_STYLE}</style></head>
<body>
<h1>ms_longctx quickstart: summaries of scientific articles</h1>
<p>{html.escape(summary["model"])}, {summary["training_steps"]} optimizer steps.<br>
{html.escape(summary["machine"])}, {summary["date"]}</p>
<h2>Held-out articles, before and after</h2>
<table><tr><th></th><th>before</th><th>after</th></tr>{rows}</table>
<p>Rouge: percent, higher is better; perplexity of the abstract given the article: lower is better.
A few steps change little; the numbers are what was measured.</p>
{_picture(folder / "scores.png", "scores before and after")}
<h2>Training</h2>
{_picture(results.training / "loss.png", "loss of each step")}
<h2>Data</h2>
{_picture(results.lengths, "lengths of the samples")}
<h2>One article</h2>
{_example(results)}
<h2>What ran</h2>
<table>{commands}</table>
</body></html>
"""


def _picture(path: Path, description: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{description}" src="data:image/png;base64,{data}">'


def _example(results: Results) -> str:
    """The first held-out article: its abstract and both summaries."""
    before, after = (
        json.loads((folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()[0])
        for folder in (results.before, results.after)
    )
    parts = {
        "abstract": before["reference"],
        "before": before["prediction"],
        "after": after["prediction"],
    }
    return "".join(f"<p><b>{name}</b></p><blockquote>{html.escape(text)}</blockquote>" for name, text in parts.items())
