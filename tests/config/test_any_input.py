# SPDX-License-Identifier: Apache-2.0
"""Whatever a file or an override holds, it loads or is refused in one line; nothing else escapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_longctx.config import ConfigError, load_config
from ms_longctx.config.sections import SECTIONS

KEYS = [(name, field) for name, kind in SECTIONS.items() for field in kind.__dataclass_fields__]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 200),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.sampled_from(["sft", "lm", "fp16", "adamw", "none", "linear", "yarn", "longrope"]),
)
NAMES = st.one_of(st.text(max_size=5), st.integers(), st.sampled_from(["rope_type", "factor", "type"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=4,
)
YAML_SOUP = st.text(alphabet="abtrin:{}[]&*!|>-?#\"' \n\t0123456789.e<,~", max_size=40)


def loads_or_is_refused(path: Path | None, overrides: list[str]) -> None:
    try:
        load_config(path, overrides)
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "run.yaml"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=3))
def test_any_value_of_any_key(path: Path, items: list[tuple[tuple[str, str], Any]]) -> None:
    sections: dict[str, dict[str, Any]] = {}
    for (section, field), value in items:
        sections.setdefault(section, {})[field] = value
    path.write_text(yaml.safe_dump(sections))
    loads_or_is_refused(path, [])


@settings(max_examples=300, deadline=None)
@given(YAML_SOUP)
def test_any_text(path: Path, text: str) -> None:
    path.write_text(text)
    loads_or_is_refused(path, [])
    loads_or_is_refused(None, [f"--train.seed={text}"])
