# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the configuration tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ms_longctx.config import ConfigError, load_config


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[str], tuple[Path, str]]:
    """Gives the path of a file with the text, and the one-line message it is refused with."""

    def refuse(text: str) -> tuple[Path, str]:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)
        return path, str(caught.value)

    return refuse
