# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: training and evaluation loss over steps, and the learning rate below."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_loss(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the loss curve of a metrics log as a PNG.

    Args:
        records: lines of the metrics log; those with ``loss`` (and ``lr``) or ``eval_loss`` are drawn.
        path: file to write.
        title: text above the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # The object interface draws without pyplot's global state and without a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [record for record in records if record.get("loss") is not None]
    held_out = [record for record in records if record.get("eval_loss") is not None]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    steps = [record["step"] for record in train]
    losses = [record["loss"] for record in train]
    if len(train) <= 50:
        loss_axes.plot(steps, losses, color="C0", marker=".", label="training loss")
    else:
        loss_axes.plot(steps, losses, color="C0", alpha=0.35, label="training loss")
        loss_axes.plot(steps, smooth(losses), color="C0", label="training loss, smoothed")
    if held_out:
        loss_axes.plot(
            [record["step"] for record in held_out],
            [record["eval_loss"] for record in held_out],
            color="C3",
            marker="o",
            label="evaluation loss",
        )
    if train or held_out:
        loss_axes.legend()
    loss_axes.set_ylabel("cross entropy (nats per token)")
    loss_axes.set_title(title)
    loss_axes.grid(alpha=0.3)
    rate_axes.plot(steps, [record["lr"] for record in train], color="C2")
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("optimizer step")
    rate_axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def smooth(values: list[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015, section 3)."""
    smoothed = []
    average = 0.0
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**count))
    return smoothed
