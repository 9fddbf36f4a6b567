# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be read, unknown keys and values of the wrong type: place, key, found, expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ms_longctx.config import ConfigError, load_config

Refusal = Callable[[str], tuple[Path, str]]

# What the YAML says, and the message after the file's name (exact up to where it is cut).
CASES: dict[str, tuple[str, str]] = {
    # -- the file
    "empty": ("", ": the file is empty; expected sections such as 'model:' and 'train:'"),
    "comments only": ("# x\n", ": the file is empty; expected sections such as 'model:' and 'train:'"),
    "null document": ("~", ": the file is empty; expected sections such as 'model:' and 'train:'"),
    "list": ("- 1\n", ": expected sections such as 'model:' and 'train:' at the top level, found [1] (a list)"),
    "scalar": ("hello", ": expected sections such as 'model:' and 'train:' at the top level, found 'hello' (text)"),
    "unclosed": (
        "train:\n  betas: [1, 2\n",
        ":3: is not valid YAML: expected ',' or ']', but got '<stream end>' (column 1)",
    ),
    "tab": (
        "train:\n\tdtype: fp32\n",
        ":2: is not valid YAML: found character '\\t' that cannot start any token (column 1)",
    ),
    "two documents": (
        "train: {}\n---\ntrain: {}\n",
        ":2: is not valid YAML: but found another document (column 1)",
    ),
    "control character": ("train: \x01", ": is not valid YAML: special characters are not allowed"),
    "python object": (
        "train: {seed: !!python/object:os.system x}",
        ":1: is not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system' (column 15)",
    ),
    "duplicate section": (
        "train: {}\ndata: {}\ntrain: {}\n",
        ":3: train: stands here and in line 1; keep one",
    ),
    "duplicate key": ("train:\n  seed: 1\n  seed: 1\n", ":3: seed: stands here and in line 2; keep one"),
    "duplicate nested key": (
        "model:\n  rope_scaling:\n    factor: 2\n    factor: 4\n",
        ":4: factor: stands here and in line 3; keep one",
    ),
    "impossible date": ("data: {path: 2024-13-01}", ": is not valid YAML: month must be in 1..12"),
    "list inside itself": ("train: {seed: &a [*a]}", ": is not valid YAML: maximum recursion depth exceeded"),
    "list as key": ("train: {[a, b]: 1}", ":1: a list or mapping cannot be a key; expected 'name: value'"),
    # -- unknown keys
    "typo": (
        "model:\n  num_atention_heads: 4\n",
        ":2: model.num_atention_heads: unknown key; did you mean 'model.num_attention_heads'?",
    ),
    "wrong section": (
        "model:\n  batch_size: 4\n",
        ":2: model.batch_size: unknown key; did you mean 'train.batch_size'?",
    ),
    "no section": (
        "warmup_steps: 4\n",
        ":1: warmup_steps: unknown key; did you mean 'optimizer.warmup_steps'?",
    ),
    "unknown section": ("trian:\n  seed: 4\n", ":2: trian.seed: unknown key; did you mean 'train.seed'?"),
    "unknown empty section": ("trian: {}\n", ":1: trian: unknown key; did you mean 'train'?"),
    "nothing near": (
        "lora:\n  zzz: 4\n",
        ":2: lora.zzz: unknown key; known keys: lora.enabled, lora.r, lora.lora_alpha, "
        "lora.lora_dropout, lora.target_modules, lora.bias, lora.modules_to_save, lora.use_rslora",
    ),
    "number as key": ("train:\n  3: 4\n", ":2: train.3: unknown key; known keys: train.objective, "),
    "section as value": (
        "model: 3\n",
        ":1: model: expected keys below this section, such as 'model.vocab_size'",
    ),
    "rope_scaling key": (
        "model:\n  rope_scaling: {rope_type: linear, factr: 2}\n",
        ":2: model.rope_scaling.factr: unknown key for rope_type 'linear'; did you mean 'factor'?",
    ),
    # -- wrong types
    "text for integer": ("train: {seed: x}", ":1: train.seed: expected an integer, found 'x' (text)"),
    "fraction for integer": (
        "train: {seed: 1.5}",
        ":1: train.seed: expected an integer, found 1.5 (a number)",
    ),
    "bool for integer": (
        "train: {batch_size: true}",
        ":1: train.batch_size: expected an integer, found true (true or false)",
    ),
    "integer for bool": (
        "train: {recompute: 1}",
        ":1: train.recompute: expected true or false or selective, found 1 (an integer)",
    ),
    "text for bool": (
        "data: {shuffle: maybe}",
        ":1: data.shuffle: expected true or false, found 'maybe' (text)",
    ),
    "bool for number": (
        "optimizer: {learning_rate: true}",
        ":1: optimizer.learning_rate: expected a number, found true (true or false)",
    ),
    "huge integer for number": (
        f"optimizer: {{eps: 1{'0' * 400}}}",
        f":1: optimizer.eps: expected a number, found 1{'0' * 56}... (an integer)",
    ),
    "integer for ring": ("use_ring_attention: 1", ":1: use_ring_attention: expected true or false, found 1"),
    "nan": ("optimizer: {eps: .nan}", ":1: optimizer.eps: expected a number, found nan (a number)"),
    "infinity": ("optimizer: {eps: .inf}", ":1: optimizer.eps: expected a number, found inf (a number)"),
    "null for integer": ("train: {seed: }", ":1: train.seed: expected an integer, found null (nothing)"),
    "number for text": (
        "train: {output_dir: 2024}",
        ":1: train.output_dir: expected text, found 2024 (an integer); put it in quotes",
    ),
    "text for list": (
        "generation: {stop: end}",
        ":1: generation.stop: expected a list of texts, found 'end' (text)",
    ),
    "mixed list": (
        "generation: {stop: [a, 1]}",
        ":1: generation.stop: expected a list of texts, found ['a', 1]",
    ),
    "short tuple": (
        "optimizer: {betas: [0.9]}",
        ":1: optimizer.betas: expected a list of 2 numbers, found [0.9] (a list)",
    ),
    "text for mapping": ("data: {fields: a}", ":1: data.fields: expected a mapping, found 'a' (text)"),
    "list for optional": (
        "train: {max_steps: [1]}",
        ":1: train.max_steps: expected an integer or null, found [1] (a list)",
    ),
    "unknown choice": (
        "train: {dtype: fp8}",
        ":1: train.dtype: expected one of fp32, fp16, bf16, found 'fp8' (text)",
    ),
    "unknown device": (
        "train: {device_target: TPU}",
        ":1: train.device_target: expected one of auto, Ascend, GPU, CPU, found 'TPU' (text)",
    ),
    "unknown optimizer": (
        "optimizer: {type: sgd}",
        ":1: optimizer.type: expected adamw, found 'sgd' (text)",
    ),
    "unknown metric": (
        "evaluate: {metrics: [bleu]}",
        ":1: evaluate.metrics: expected a list of perplexity, rouge, found ['bleu'] (a list)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_files_and_types(name: str, refusal: Refusal) -> None:
    text, expected = CASES[name]
    path, message = refusal(text)
    assert message.startswith(f"{path}{expected.replace('{file}', str(path))}")


def message_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_missing_file_names_nearest_preset() -> None:
    assert message_of(Path("llama-7b-32")) == (
        "llama-7b-32: no such file or preset; did you mean the preset 'llama-7b-32k'?"
    )


def test_missing_file_lists_presets() -> None:
    assert message_of(Path("conf/zzz.yaml")).startswith("conf/zzz.yaml: no such file or preset; presets: llama-")


def test_directory(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"{tmp_path}: is a directory; expected a file"


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"train:\n  output_dir: \xe9t\xe9\n")
    assert message_of(path) == f"{path}: is not UTF-8 text (byte 21); save it as UTF-8"


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {}")

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)  # file modes do not stop a test that runs as root
    assert message_of(path) == f"{path}: cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"dp": 4, "sp": 0}', ":1: parallel.sp: expected a value of at least 1, found 0"),
        ('{"dp": 4, "mp": "2"}', ":1: parallel.mp: expected an integer, found '2' (text)"),
        ('{"dp": 1, "ddp": 2}', ":1: parallel.ddp: unknown key; did you mean 'parallel.dp'?"),
        ('{"dpp": 2}', ":1: parallel.dpp: unknown key; did you mean 'parallel.dp'?"),
        ('{"dp": 1,', ":1: is not valid JSON: "),
        ("", ": the file is empty; expected keys such as 'dp' and 'mp'"),
        ("[2]", ": expected keys such as 'dp' and 'mp' at the top level, found [2] (a list)"),
    ],
)
def test_strategy_file(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(None, parallel_config=path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_missing_strategy_file() -> None:
    with pytest.raises(ConfigError, match="^nowhere.json: no such file$"):
        load_config(None, parallel_config="nowhere.json")
