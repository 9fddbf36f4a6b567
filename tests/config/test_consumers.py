# SPDX-License-Identifier: Apache-2.0
"""No key is accepted and ignored: somewhere outside the configuration package each one is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ms_longctx.config.sections import SECTIONS

PACKAGE = Path(__file__).resolve().parents[2] / "ms_longctx"

# Keys with one accepted value (everything else is refused as not built), so that there is nothing to read.
ONE_VALUE = {"optimizer.type"}
# LlamaConfig is taken as a whole by the model and by the Hugging Face files.
KEYS = [
    f"{section}.{field}"
    for section, kind in SECTIONS.items()
    for field in kind.__dataclass_fields__
    if section != "model" and f"{section}.{field}" not in ONE_VALUE
]


@pytest.fixture(scope="module")
def names_read() -> set[str]:
    """Attributes that the package reads outside config/, and names of keys in the verbs' tables."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if "config" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "cli" in path.parts:
                names.add(node.value.rpartition(".")[2])
    return names


@pytest.mark.parametrize("key", [*KEYS, "model.pretrained"])
def test_every_key_is_read(key: str, names_read: set[str]) -> None:
    assert key.split(".")[1] in names_read
