# SPDX-License-Identifier: Apache-2.0
"""Finding a configuration file by path or by the name of a preset, from any working directory."""

from __future__ import annotations

import difflib
from pathlib import Path

from ms_longctx.config.source import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = {".yaml", ".yml", ".json"}


def preset_dir() -> Path:
    """Directory of the presets: package data of an installation, ``yaml_configs/`` of a source tree."""
    installed = _PACKAGE / "presets"
    return installed if installed.is_dir() else _PACKAGE.parent / "yaml_configs"


def preset_names() -> list[str]:
    """Names that :func:`find_config` takes besides paths."""
    return sorted(path.stem for path in preset_dir().glob("*.yaml"))


def find_config(name_or_path: str | Path) -> Path:
    """The file behind ``llama-7b-32k``, ``llama-7b-32k.yaml``, ``yaml_configs/llama-7b-32k.yaml`` or a path.

    A file or directory at that path wins over a preset of the same name.

    Raises:
        ConfigError: neither a file nor a preset; the message names the nearest preset.
    """
    path = Path(name_or_path)
    if path.exists():
        return path
    is_plain = path.name == str(name_or_path) or path.parent.name == "yaml_configs"
    preset = preset_dir() / f"{path.stem if path.suffix in _SUFFIXES else path.name}.yaml"
    if is_plain and preset.is_file():
        return preset
    names = preset_names()
    close = difflib.get_close_matches(preset.stem, names, n=1)
    hint = f"did you mean the preset '{close[0]}'?" if close else f"presets: {', '.join(names)}"
    raise ConfigError(f"{name_or_path}: no such file or preset; {hint}")
