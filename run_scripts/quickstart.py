#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The main job from beginning to end: real articles in, a fine-tuned and evaluated Llama and a report out.

Each step is an ``ms-longctx`` command that is printed before it runs, so that it can be typed by hand. A step
that has finished is not done again: after an interruption the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quickstart_report import Results, Step, write_report  # noqa: E402

from ms_longctx import assets  # noqa: E402
from ms_longctx.errors import MsLongctxError  # noqa: E402

ARTICLES = ROOT / "run_scripts/data/plos_articles.jsonl.gz"
HELD_OUT = ROOT / "run_scripts/data/plos_articles_heldout.jsonl.gz"
CLI = Path(sys.executable).with_name("ms-longctx")


@dataclass(frozen=True)
class Plan:
    """How long the job goes on.

    Args:
        seq_length: tokens of a training sample, article and abstract together.
        answer_length: of them for the abstract.
        steps: optimizer steps.
        accumulation: articles of one step.
        summaries: held-out articles that are summarised before and after.
        new_tokens: tokens of a summary at most.
    """

    seq_length: int
    answer_length: int
    steps: int
    accumulation: int
    summaries: int
    new_tokens: int


SHORT = Plan(seq_length=4096, answer_length=512, steps=10, accumulation=1, summaries=6, new_tokens=160)
FULL = Plan(seq_length=8192, answer_length=512, steps=129, accumulation=2, summaries=16, new_tokens=256)


def quickstart(folder: Path, plan: Plan) -> Path:
    """Run every step and return the path of the report.

    Raises:
        MsLongctxError: a step failed; what was finished stays.
    """
    print("fetching SmolLM2-135M-Instruct (about 90 MB, once)", flush=True)
    model = assets.fetch(assets.SMOLLM2_135M)
    runner = Runner(folder, total=5)
    train, held_out = folder / "articles.mindrecord", folder / "heldout.mindrecord"
    for title, source, output in (("articles", ARTICLES, train), ("held-out articles", HELD_OUT, held_out)):
        runner.run(
            f"prepare {title}: article and abstract in {plan.seq_length} tokens",
            *("prepare", "--input", source, "--output", output, "--tokenizer", model),
            *("--seq_length", plan.seq_length, "--answer_length", plan.answer_length),
        )
    results = Results(folder / "before", folder / "after", folder / "training", train.with_suffix(".lengths.png"))
    judge = (
        *("evaluate", "--model", model, "--data_path", held_out, "--max_samples", plan.summaries),
        *("--max_new_tokens", plan.new_tokens, "--batch_size", 2),
    )
    runner.run("summarise held-out articles with the model as it is", *judge, "--output_dir", results.before)
    training = (
        *("train", "--config", "smollm2-135m", "--model.pretrained", model, "--data_path", train),
        *("--data.seq_length", plan.seq_length, "--train.max_steps", plan.steps, "--train.epochs", 10),
        *("--train.gradient_accumulation_steps", plan.accumulation, "--train.log_steps", 1),
        *("--train.save_steps", 4, "--output_dir", results.training),
    )
    begun = (results.training / "checkpoints" / "latest").exists()
    runner.run(f"fine-tune with LoRA for {plan.steps} steps", *training, extra=["--resume"] if begun else [])
    runner.run(
        "summarise the same articles with the adapter",
        *(*judge, "--adapter", results.training, "--output_dir", results.after),
    )
    return write_report(folder, model.stem, runner.steps, results)


class Runner:
    """Runs commands one after another, remembers what they took and skips what is done."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder = folder
        self.total = total
        self.steps: list[Step] = []

    def run(self, title: str, *arguments: str | int | Path, extra: Sequence[str] = ()) -> None:
        """Run ``ms-longctx ARGUMENTS EXTRA`` unless it has finished before with the same arguments.

        Raises:
            MsLongctxError: the command failed.
        """
        command = ["ms-longctx", *map(str, arguments)]
        print(f"\n[{len(self.steps) + 1}/{self.total}] {title}\n  {shlex.join(command)}", flush=True)
        note = self.folder / f".step-{len(self.steps) + 1}.json"
        done = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
        if done.get("command") != command:
            start = time.monotonic()
            code = subprocess.run([str(CLI), *command[1:], *extra], check=False).returncode
            if code:
                raise MsLongctxError(
                    f"step '{title}' ended with exit code {code}; mend what it says above and start the "
                    "quickstart again: it goes on from here"
                )
            done = {"command": command, "seconds": round(time.monotonic() - start, 1)}
            note.write_text(json.dumps(done), encoding="utf-8")
        else:
            print("  done before")
        step = Step(title, shlex.join(command), done["seconds"])
        self.steps.append(step)
        print(f"  {step.seconds:.0f} s", flush=True)


def main() -> int:
    """Run the quickstart; 0 when the report is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="train for hours, not minutes, at 8K tokens")
    parser.add_argument("--output", type=Path, help="folder of the results (default outputs/quickstart)")
    parser.add_argument("--restart", action="store_true", help="forget earlier results in that folder")
    args = parser.parse_args()
    folder = (args.output or ROOT / "outputs" / ("quickstart-full" if args.full else "quickstart")).resolve()
    if args.restart:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = quickstart(folder, FULL if args.full else SHORT)
    except MsLongctxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the step that was cut short", file=sys.stderr)
        return 130
    print(f"\nreport: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
