# SPDX-License-Identifier: Apache-2.0
"""What a user sees of a run: progress bar, log lines, metrics files and the loss curve."""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ms_longctx.train.metrics_log import MetricsLog, read_metrics

LOSS_CURVE = "loss.png"
_BAR = "train {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {desc}"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step as the monitor sees it.

    Args:
        step: its number, from 1.
        loss: mean cross entropy of its supervised tokens in nats; ``None`` when it had none.
        lr: learning rate.
        grad_norm: global norm before clipping; ``None`` when nothing was computed or it is not finite.
        tokens: tokens processed, without padding.
        supervised_tokens: positions that count in the loss.
        seconds: wall time of the step.
        loss_scale: factor on the loss (1 unless fp16).
        skipped: why no update was made; ``None`` when it was.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens: int
    supervised_tokens: int
    seconds: float
    loss_scale: float = 1.0
    skipped: str | None = None


class Throughput:
    """Tokens per second and time to go over the last steps. The first step, which compiles, is left out.

    Args:
        flops_per_token: see :mod:`ms_longctx.train.flops`.
        peak_flops: of the device; ``None`` gives no MFU.
    """

    def __init__(self, flops_per_token: float, peak_flops: float | None):
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._steps: deque[tuple[int, float]] = deque(maxlen=20)
        self._compiled = False

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        if not self._compiled:
            self._compiled = True
            return
        self._steps.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last 20 steps; ``None`` before the second step."""
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation between 0 and 1 (formula: :mod:`ms_longctx.train.flops`).

        ``None`` also where it would be above 1: then the peak was measured while the machine was busy.
        """
        speed = self.tokens_per_second
        if speed is None or not self.peak_flops:
            return None
        share = speed * self.flops_per_token / self.peak_flops
        return share if share <= 1 else None

    def remaining_seconds(self, steps: int) -> float | None:
        """Time that so many more steps take."""
        if not self._steps:
            return None
        return steps * sum(seconds for _, seconds in self._steps) / len(self._steps)


class Monitor:
    """Shows and records every step of a run.

    On a terminal there is one progress bar; elsewhere (a pipe, a log file) a line every ``log_steps`` steps.

    Args:
        output_dir: directory of the run; gets ``metrics.jsonl``, ``tensorboard/`` and ``loss.png``.
        total_steps: optimizer steps of the whole run.
        resumed_step: steps done before; their records stay in the log.
        log_steps: steps between records.
        throughput: measures speed.
        device_target: memory is the resident set of the process on ``CPU``, the device's peak on ``Ascend``.
    """

    def __init__(
        self,
        output_dir: Path,
        total_steps: int,
        resumed_step: int,
        log_steps: int,
        throughput: Throughput,
        device_target: str = "CPU",
    ):
        self.output_dir = output_dir
        self.total_steps = total_steps
        self.log_steps = log_steps
        self.throughput = throughput
        self.device_target = device_target
        self.log = MetricsLog(output_dir, resumed_step)
        self._bar = _progress_bar(total_steps, resumed_step) if sys.stderr.isatty() else None

    def step(self, report: StepReport) -> None:
        """Show a finished step; record it when it is a multiple of ``log_steps``, first, last or skipped."""
        self.throughput.add(report.tokens, report.seconds)
        due = report.step % self.log_steps == 0 or report.step in (1, self.total_steps)
        if due or report.skipped:
            self.log.write(self._record(report))
        text = self._describe(report)
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update()
        elif due or report.skipped:
            print(f"step {report.step}/{self.total_steps} {text}", flush=True)
        if report.skipped:
            self.say(f"step {report.step} skipped: {report.skipped}")

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Record and show a loss on held-out data: mean over ``tokens`` supervised tokens, in nats."""
        self.log.write({"step": step, "eval_loss": loss, "eval_tokens": tokens, "time": time.time()})
        self.say(f"step {step}: evaluation loss {loss:.4f} over {tokens:,} tokens")

    def say(self, text: str) -> None:
        """Print a line without tearing the progress bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the bar, close the files and draw the loss curve."""
        if self._bar is not None:
            self._bar.close()
        self.log.close()
        self._draw()

    def _record(self, report: StepReport) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": report.step,
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "tokens": report.tokens,
            "supervised_tokens": report.supervised_tokens,
            "step_seconds": report.seconds,
            "tokens_per_second": self.throughput.tokens_per_second,
            "mfu": self.throughput.mfu,
            "memory_bytes": memory_bytes(self.device_target),
            "loss_scale": report.loss_scale,
            "time": time.time(),
        }
        if report.skipped:
            record["skipped"] = report.skipped
        return record

    def _describe(self, report: StepReport) -> str:
        parts = [f"loss {report.loss:.4f}" if report.loss is not None else "loss -", f"lr {report.lr:.2e}"]
        speed, mfu = self.throughput.tokens_per_second, self.throughput.mfu
        if speed is not None:
            parts.append(f"{speed:,.0f} tok/s")
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        parts.append(f"mem {memory_bytes(self.device_target) / 1e9:.2f} GB")
        remaining = self.throughput.remaining_seconds(self.total_steps - report.step)
        if remaining is not None:
            parts.append(f"ETA {_clock(remaining)}")
        return " ".join(parts)

    def _draw(self) -> None:
        from ms_longctx.train.plot import plot_loss

        path = self.output_dir / LOSS_CURVE
        try:
            plot_loss(read_metrics(self.log.path), path, title=self.output_dir.name)
        except ImportError:
            logger.warning("matplotlib is not installed, so %s is not drawn; pip install 'ms_longctx[monitor]'", path)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error.strerror)


class SilentMonitor:
    """In place of :class:`Monitor` in workers that leave writing to the main one."""

    def step(self, report: StepReport) -> None:
        """Nothing."""

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _progress_bar(total_steps: int, resumed_step: int) -> tqdm[Any]:
    # A terminal that reports no size (some containers) would get an empty bar.
    has_size = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return tqdm(
        total=total_steps,
        initial=resumed_step,
        bar_format=_BAR,
        dynamic_ncols=has_size,
        ncols=None if has_size else 100,
        nrows=None if has_size else 24,
    )


def memory_bytes(device_target: str) -> int:
    """Resident memory of this process on a CPU, the device's allocation peak on Ascend."""
    if device_target == "Ascend":
        import mindspore as ms

        return int(ms.runtime.max_memory_allocated())
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: the peak is the nearest there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
