# SPDX-License-Identifier: Apache-2.0
"""The training loop: data, steps, evaluation, checkpoints and what the user sees."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import yaml

from ms_longctx.config import RunConfig
from ms_longctx.data.dataset import batches_per_epoch
from ms_longctx.device import select_device
from ms_longctx.errors import MsLongctxError
from ms_longctx.optim.schedule import Schedule
from ms_longctx.parallel.reading import check_device
from ms_longctx.parallel.strategy import Strategy
from ms_longctx.parallel.world import join_world
from ms_longctx.train.build import build_loss_scale, check_dtype, tokenizer_fingerprint
from ms_longctx.train.checkpoint import write_text
from ms_longctx.train.disks import find_disk
from ms_longctx.train.engine import Engine, LocalEngine
from ms_longctx.train.flops import flops_per_token, peak_flops
from ms_longctx.train.interrupt import StopRequest
from ms_longctx.train.monitor import Monitor, SilentMonitor, StepReport, Throughput
from ms_longctx.train.objectives import Batch, count_supervised, count_tokens
from ms_longctx.train.resume import check_changes, check_data
from ms_longctx.train.rundir import CONFIG_FILE, RunDirectory
from ms_longctx.train.state import Progress, read_state, restore_state, write_state
from ms_longctx.train.step import StepResult
from ms_longctx.train.stream import MicroBatches, describe_set, open_evaluation_set, open_training_set
from ms_longctx.train.workers import Workers

NO_TOKENS = "no supervised token in the batch"
NOT_FINITE = "gradient is infinite or NaN"
DIVERGED = 4  # skipped steps in a row that mean it; fp16 skips two or three until its loss scale fits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """How a call of :meth:`Trainer.train` ended.

    Args:
        step: optimizer steps done.
        total_steps: of the whole run.
        checkpoint: the last one written.
        stopped_by: number of the signal that ended it early, or ``None``.
    """

    step: int
    total_steps: int
    checkpoint: Path
    stopped_by: int | None


class Trainer:
    """One training run, new or resumed.

    Args:
        run: the checked configuration.
        overwrite: an earlier run in ``train.output_dir`` may be deleted.

    Raises:
        MsLongctxError: device, data, model, output directory or checkpoint cannot be used, with the reason.
    """

    def __init__(self, run: RunConfig, overwrite: bool = False):
        self.run = run
        self.manifest = open_training_set(run.data)
        self.device = select_device(run.train.device_target)
        check_dtype(run.train.dtype, self.device)
        check_device(run.parallel, self.device)
        self.world = join_world(self.device)
        with self.world:
            self.workers = Workers(Strategy.from_config(run, self.world.size), self.world.rank)
            section, path = run.train, Path(run.train.output_dir)
            strategy = self.workers.strategy
            accumulated = run.train.gradient_accumulation_steps
            self.micro_batches = strategy.micro_batch_num if strategy.pp > 1 else accumulated
            self.total_steps = _total_steps(run, self._rows, self.micro_batches)
            self.disk = find_disk(self.workers, path)
            self.directory = RunDirectory(path, section.keep_checkpoints, section.resume, overwrite, self.disk)
            try:
                self._build()
            except BaseException:
                self.directory.close()
                raise

    @property
    def _rows(self) -> int:
        """Sequences of a micro batch of all workers together."""
        return self.run.train.batch_size * self.workers.strategy.dp

    def _build(self) -> None:
        run, checkpoint = self.run, self.directory.checkpoint
        saved = None if checkpoint is None else read_state(checkpoint)
        if saved is not None:
            check_changes(saved["config"], run.as_dict())
            check_data(saved["data"], describe_set(self.manifest))
        if run.lora.enabled and run.model.pretrained is None and self.workers.is_main:
            logger.warning(
                "lora.enabled without model.pretrained: the adapters are trained on random weights, and no checkpoint "
                "holds those; give the model they are for as --model.pretrained"
            )
        _seed_everything(run.train.seed)
        self.engine = self._build_engine(checkpoint)
        self.model = self.engine.model
        self.loss_scale = build_loss_scale(run)
        self.schedule = Schedule.from_config(run.optimizer, self.total_steps)
        self.progress = Progress()
        if checkpoint is not None and saved is not None:
            self.engine.load_moments(checkpoint, saved["optimizer"])
            self.progress = restore_state(saved, self.loss_scale)
        self._checks = {
            "vocab_size": self.model.config.vocab_size,
            "tokenizer": tokenizer_fingerprint(run),
        }
        self._batches = MicroBatches(run.data, self._rows, self.manifest.samples, self.progress, **self._checks)
        # What does not fit is to be found now, not at the first step or evaluation.
        self._batches.open()
        if run.data.eval_path is not None:
            self._open_evaluation_set()

    def _build_engine(self, checkpoint: Path | None) -> Engine:
        """Several Ascend devices run one program, except for adapters beside a model that each of them holds whole."""
        strategy = self.workers.strategy
        is_split = strategy.mp * strategy.pp > 1 or strategy.optimizer_shard
        if self.device == "Ascend" and self.workers.count > 1 and (is_split or not self.run.lora.enabled):
            from ms_longctx.train.program_engine import ProgramEngine

            return ProgramEngine(self.run, self.disk, checkpoint)
        return LocalEngine(self.run, self.workers, checkpoint)

    def train(self) -> Summary:
        """Train to the end, or to the first Ctrl-C or SIGTERM, and save.

        Raises:
            MsLongctxError: too many skipped steps in a row, or the disk is full.
        """
        self.monitor = self._open_monitor()
        self.monitor.say(self._describe())
        try:
            with self.world, StopRequest(quiet=not self.workers.is_main) as stop:
                stopped = self._loop(stop)
                if self.loss_scale.skipped_steps >= DIVERGED:
                    raise self._divergence()
                checkpoint = self._save()
        finally:
            self.monitor.close()
            self.directory.close()
        by = (stop.signal or signal.SIGTERM) if stopped else None  # the signal may have reached another worker only
        return Summary(self.progress.step, self.total_steps, checkpoint, by)

    def _divergence(self) -> MsLongctxError:
        steps = self.directory.store.steps()
        kept = f"the newest checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint"
        advice = "Lower optimizer.learning_rate, or look at the data"
        if self.run.train.dtype != "fp32":
            advice = "Lower optimizer.learning_rate, look at the data, or train in fp32"
        return MsLongctxError(
            f"the last {self.loss_scale.skipped_steps} steps had infinite or NaN gradients and were skipped: the model "
            f"has diverged and is not saved; {kept}. {advice}"
        )

    def evaluate(self) -> tuple[float, int]:
        """Mean loss in nats over the supervised tokens of ``data.eval_path``, and how many there are."""
        dataset = self._open_evaluation_set()
        self.model.set_train(False)
        total, tokens = 0.0, 0
        batches = iter(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
        while group := list(itertools.islice(batches, self.micro_batches)):
            loss, count = self.engine.evaluate(group)
            total += loss
            tokens += count
        self.model.set_train()
        return total / max(tokens, 1), tokens

    def _open_evaluation_set(self) -> ds.Dataset:
        return open_evaluation_set(self.run.data, self._rows, **self._checks)

    def _loop(self, stop: StopRequest) -> bool:
        """Whether it ended because some worker was asked to stop."""
        section, progress = self.run.train, self.progress
        batches = iter(self._batches)
        while progress.step < self.total_steps:
            if self.workers.any(stop.requested):
                return True
            step_batches: list[Batch] = [next(batches) for _ in range(self.micro_batches)]
            self._step(step_batches)
            # Evaluated before saved: a checkpoint means that everything up to its step is in the log.
            if self.run.data.eval_path is not None and self._is_due(section.eval_steps):
                self.monitor.evaluation(progress.step, *self.evaluate())
            # Weights after which gradients are not finite must not take the place of good ones.
            doubtful = self.loss_scale.skipped_steps >= (DIVERGED if section.dtype == "fp16" else 1)
            if self._is_due(section.save_steps) and not doubtful:
                self._save()
        return stop.requested

    def _is_due(self, every: int | None) -> bool:
        step = self.progress.step
        return step == self.total_steps or (every is not None and step % every == 0)

    def _step(self, batches: list[Batch]) -> None:
        scale, rate = self.loss_scale.scale, self.schedule(self.progress.step)
        start = time.perf_counter()
        result = None
        if any(count_supervised(batch) for batch in batches):
            result = self.engine.step(batches, rate, scale, self.progress.step)
        self.progress.step += 1
        report = _report(self.progress.step, result, batches, rate, scale, time.perf_counter() - start)
        self.progress.tokens += 0 if report.skipped else report.supervised_tokens
        self.monitor.step(report)
        if result is not None:
            self.loss_scale.update(result.finite)

    def _save(self) -> Path:
        """Return when the checkpoint is complete: no worker goes on, or ends, before."""
        size = self.engine.saved_bytes(self.disk.is_lead)
        return self.directory.save(self.progress.step, self.engine.write_share, self._write_rest, size)

    def _write_rest(self, directory: Path) -> None:
        self.engine.write_rest(directory)
        facts = {"config": self.run.as_dict(), "data": describe_set(self.manifest)}
        write_state(directory, self.progress, self.engine.optimizer, self.loss_scale, facts)

    def _open_monitor(self) -> Monitor | SilentMonitor:
        if not self.workers.is_main:
            return SilentMonitor()
        stated = {key: self._stated(key) for key in sorted({key.split(".")[0] for key in self.run.given})}
        write_text(self.directory.path / CONFIG_FILE, yaml.safe_dump(stated, sort_keys=False))
        trained, _ = self.engine.count_parameters()
        adapters = trained if self.run.lora.enabled else 0
        flops = flops_per_token(self.model.config, self.run.data.seq_length, adapters)
        peak = peak_flops(self.device, self.run.train.dtype)
        if self.workers.count > 1:  # on a CPU they share one processor, whose peak none of them can measure
            peak = peak * self.workers.count if peak is not None and self.device == "Ascend" else None
        throughput = Throughput(flops, peak)
        return Monitor(
            self.directory.path,
            self.total_steps,
            self.progress.step,
            self.run.train.log_steps,
            throughput,
            self.device,
        )

    def _describe(self) -> str:
        trained, total = self.engine.count_parameters()
        section = self.run.train
        start = f"resuming after step {self.progress.step}" if self.progress.step else "starting"
        workers = f" with {self.workers.strategy.describe()}" if self.workers.count > 1 else ""
        return (
            f"{start}: {trained:,} of {total:,} parameters train on {self.device}{workers} in {section.dtype}, "
            f"{self.total_steps} steps of {self._rows} x {self.micro_batches} "
            f"sequences of {self.run.data.seq_length} tokens from {self.manifest.samples:,} samples"
        )

    def _stated(self, section: str) -> dict[str, Any]:
        """The keys of a section that file and command line state."""
        values = self.run.as_dict()[section]
        return {name: value for name, value in values.items() if f"{section}.{name}" in self.run.given}


def _report(
    step: int, result: StepResult | None, batches: list[Batch], rate: float, scale: float, seconds: float
) -> StepReport:
    skipped = NO_TOKENS if result is None else None if result.finite else NOT_FINITE
    done = skipped is None and result is not None
    return StepReport(
        step=step,
        loss=result.loss if result is not None and np.isfinite(result.loss) else None,
        lr=rate,
        grad_norm=result.grad_norm if done and result is not None else None,
        tokens=sum(count_tokens(batch) for batch in batches),
        supervised_tokens=0 if result is None else result.supervised_tokens,
        seconds=seconds,
        loss_scale=scale,
        skipped=skipped,
    )


def _total_steps(run: RunConfig, rows: int, micro_batches: int) -> int:
    section = run.train
    batches = batches_per_epoch(str(run.data.path), rows, drop_last=run.data.drop_last)
    if not batches:
        copies = f" x dp = {rows // section.batch_size}" if rows > section.batch_size else ""
        raise MsLongctxError(
            f"data.path: {run.data.path} has fewer samples than train.batch_size = {section.batch_size}{copies}; "
            "prepare more data, lower the batch size, or set data.drop_last to false"
        )
    if section.max_steps is not None and section.epochs is None:
        return section.max_steps
    steps = (section.epochs or 1) * batches // micro_batches
    if not steps:
        raise MsLongctxError(
            f"data.path: {section.epochs or 1} epoch(s) of {batches} batches give no step of "
            f"train.gradient_accumulation_steps = {micro_batches}; lower it, or set "
            "train.max_steps"
        )
    return min(steps, section.max_steps or steps)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    ms.set_seed(seed)  # numpy's too
    ms.manual_seed(seed)
