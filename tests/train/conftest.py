# SPDX-License-Identifier: Apache-2.0
"""A small prepared set on disk and a run configuration that trains on it in about a second a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ms_longctx.data.labels import supervised_tokens
from ms_longctx.data.manifest import Manifest, Shard, write_manifest
from ms_longctx.data.mindrecord_file import file_sizes, write_mindrecord

VOCAB = 131
LENGTH = 31


@pytest.fixture(scope="session")
def make_set() -> Callable[..., Path]:
    """``make_set(path, samples=23, layout="lm", seed=0, masked=())`` writes random texts that can be learned.

    Each text is a walk ``next = (3 * token + noise) % VOCAB``; lengths are odd and uneven. In the ``sft``
    layout the first third is the prompt. ``masked`` samples have no supervised token.
    """

    def make(path: Path, samples: int = 23, layout: str = "lm", seed: int = 0, masked: tuple[int, ...] = ()) -> Path:
        rng = np.random.default_rng(seed)
        rows = [_sample(rng, layout, index in masked) for index in range(samples)]
        path.parent.mkdir(parents=True, exist_ok=True)
        integers = [len(tokens) + len(runs) for tokens, runs in rows]
        write_mindrecord(path, rows, file_sizes(max(integers), sum(integers), samples))
        index = path.with_name(path.name + ".db")
        shard = Shard(
            name=path.name,
            size=path.stat().st_size,
            index_size=index.stat().st_size,
            samples=samples,
            tokens=sum(len(tokens) for tokens, _ in rows),
            supervised_tokens=sum(supervised_tokens(runs) for _, runs in rows),
            longest=max(len(tokens) for tokens, _ in rows),
        )
        write_manifest(
            path,
            Manifest(
                seq_length=LENGTH,
                layout=layout,
                format="text",
                tokenizer="0" * 64,
                vocab_size=VOCAB,
                pad_id=0,
                source=f"seed {seed}",
                shards=(shard,),
            ),
        )
        return path

    return make


def _sample(rng: np.random.Generator, layout: str, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    length = int(rng.integers(LENGTH // 2, LENGTH + 1))
    tokens = [int(rng.integers(VOCAB))]
    while len(tokens) < length:
        tokens.append((3 * tokens[-1] + int(rng.integers(2))) % VOCAB)
    prompt = length if masked else length // 3 if layout == "sft" else 0
    return np.array(tokens, np.int32), np.array([prompt, length - prompt], np.int32)


@pytest.fixture(scope="session")
def arguments() -> Callable[..., list[str]]:
    """Overrides of a tiny run: 2 layers, 5 heads, 1 key/value head; changes are ``section__key=value``."""

    def make(data: Path, output: Path, **changes: object) -> list[str]:
        values: dict[str, object] = {
            "model.vocab_size": VOCAB,
            "model.hidden_size": 40,
            "model.intermediate_size": 56,
            "model.num_hidden_layers": 2,
            "model.num_attention_heads": 5,
            "model.num_key_value_heads": 1,
            "model.max_position_embeddings": 64,
            "model.tie_word_embeddings": "true",
            "data.path": data,
            "data.seq_length": LENGTH,
            "train.output_dir": output,
            "train.device_target": "CPU",
            "train.batch_size": 3,
            "train.max_steps": 10,
            "train.log_steps": 1,
            "optimizer.learning_rate": 0.01,
        }
        values.update({name.replace("__", ".", 1): value for name, value in changes.items()})
        return [f"--{key}={value}" for key, value in values.items()]

    return make
