# SPDX-License-Identifier: Apache-2.0
"""How well a model predicts reference answers (perplexity) and writes its own (ROUGE)."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray
from tqdm import tqdm

from ms_longctx.config import EvaluateConfig, GenerationConfig
from ms_longctx.data.dataset import read_samples
from ms_longctx.data.labels import IGNORE, shift_labels
from ms_longctx.data.manifest import load_manifest, write_json
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.generation.generate import complete
from ms_longctx.metrics.perplexity import Perplexity
from ms_longctx.metrics.rouge import RougeLXT
from ms_longctx.models.llama import LlamaForCausalLM

SETTINGS = "settings.json"
PREDICTIONS = "predictions.jsonl"
REPORT = "report.json"


@dataclass(frozen=True)
class Sample:
    """A prompt and the answer it should get; in the ``lm`` layout everything is answer."""

    tokens: NDArray[np.int32]
    runs: NDArray[np.int32]

    @property
    def prompt(self) -> list[int]:
        """Ids before the last answer."""
        ids: list[int] = self.tokens[: len(self.tokens) - int(self.runs[-1])].tolist()
        return ids

    @property
    def answer(self) -> list[int]:
        """Ids of the last answer, its end token included."""
        ids: list[int] = self.tokens[len(self.tokens) - int(self.runs[-1]) :].tolist()
        return ids


class Evaluation:
    """One evaluation of one model on one prepared set.

    Each finished sample is a line in ``predictions.jsonl``: an interrupted evaluation goes on from there.

    Args:
        model: without adapters, or with them merged.
        tokenizer: the one the set was prepared with.
        data: set that ``ms-longctx prepare`` wrote.
        output: directory of predictions and report; made if missing.
        settings: metrics, number of samples, batch size.
        generation: how answers are chosen.
        note: what else describes this evaluation (names of files), kept in the report.

    Raises:
        MsLongctxError: the set was prepared with another tokenizer, has no answers to compare with, or the
            directory holds another evaluation.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: Tokenizer,
        data: Path,
        output: Path,
        settings: EvaluateConfig,
        generation: GenerationConfig,
        note: dict[str, Any],
    ) -> None:
        manifest = load_manifest(data)
        if manifest.tokenizer != tokenizer.fingerprint():
            raise MsLongctxError(f"{data} was prepared with another tokenizer; prepare it with this model's own")
        if "rouge" in settings.metrics and manifest.layout != "sft":
            raise MsLongctxError(
                f"{data} has the layout {manifest.layout}: no answers to compare with; "
                "use --metrics perplexity, or prepare it with --layout sft"
            )
        self._model, self._tokenizer, self._data, self._output = model, tokenizer, data, output
        self._settings, self._generation = settings, generation
        self._described = {**note, "evaluate": asdict(settings), "generation": asdict(generation)}
        self._total = min(manifest.samples, settings.max_samples or manifest.samples)
        output.mkdir(parents=True, exist_ok=True)
        self._claim(output / SETTINGS)

    def run(self) -> dict[str, Any]:
        """Evaluate what is not done yet and return the report, which is also written."""
        start = time.monotonic()
        path = self._output / PREDICTIONS
        done = _read_lines(path)
        samples = islice(read_samples(self._data), len(done), self._total)
        with (
            path.open("a", encoding="utf-8") as sink,
            tqdm(total=self._total, initial=len(done), desc="evaluate", unit="sample") as bar,
        ):
            while batch := [Sample(*pair) for pair in islice(samples, self._settings.batch_size)]:
                for line in self._evaluate(batch):
                    sink.write(json.dumps(line, ensure_ascii=False) + "\n")
                    done.append(line)
                sink.flush()
                bar.update(len(batch))
        report = {
            **self._score(done),
            "seconds": round(time.monotonic() - start, 1),
            "settings": self._described,
        }
        write_json(self._output / REPORT, report)
        return report

    def _evaluate(self, batch: list[Sample]) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = [{"prompt_tokens": len(sample.prompt)} for sample in batch]
        if "perplexity" in self._settings.metrics:
            for line, sample in zip(lines, batch, strict=True):
                line["loss_sum"], line["tokens"] = self._loss(sample)
        if "rouge" in self._settings.metrics:
            prompts = [sample.prompt for sample in batch]
            answers = complete(self._model, self._tokenizer, prompts, self._generation)
            for line, sample, answer in zip(lines, batch, answers, strict=True):
                line["prediction"] = answer.text.strip()
                line["reference"] = self._tokenizer.decode(sample.answer).strip()
                line["finish_reason"] = answer.finish_reason
        return lines

    def _loss(self, sample: Sample) -> tuple[float, int]:
        labels = shift_labels(sample.tokens, sample.runs)
        total, _ = self._model.loss_sum(Tensor(sample.tokens[None]), Tensor(labels[None]))
        return float(total.asnumpy()), int((labels != IGNORE).sum())

    def _score(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        scores: dict[str, Any] = {"samples": len(lines)}
        if "perplexity" in self._settings.metrics:
            perplexity = Perplexity()
            for line in lines:
                perplexity.add(line["loss_sum"], line["tokens"])
            scores |= {"perplexity": perplexity.compute(), "tokens": perplexity.tokens}
        if "rouge" in self._settings.metrics:
            rouge = RougeLXT()
            rouge.add_batch(
                predictions=[line["prediction"] for line in lines],
                references=[line["reference"] for line in lines],
            )
            scores |= rouge.compute()
        return scores

    def _claim(self, path: Path) -> None:
        """Keep one directory for one evaluation: lines of another must not be counted here."""
        if not path.exists():
            write_json(path, self._described)
        elif json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(self._described)):
            raise MsLongctxError(
                f"{self._output} holds an evaluation with other settings ({path.name}); "
                "set another --output_dir or add --overwrite"
            )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Finished lines; one that was cut short by a kill is taken away."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
