# SPDX-License-Identifier: Apache-2.0
"""The files of a tokenizer beside the weights of a model."""

from __future__ import annotations

import shutil
from pathlib import Path

from ms_longctx.data.tokenizer import load_tokenizer

# Files beside the weights that belong to a model and are copied as they are.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_NAMES = {".model": "tokenizer.model", ".json": "tokenizer.json"}


def write_tokenizer(source: Path, directory: Path) -> None:
    """Put a tokenizer into a model directory in Hugging Face's layout.

    Args:
        source: a model directory, whose files are copied; a ``.model`` or ``.json`` file; or a ``.gguf`` file.
        directory: it exists; files of the same names are replaced.

    Raises:
        MsLongctxError: the GGUF file holds no tokenizer this package can read.
    """
    if source.is_dir():
        files = {name: source / name for name in COMPANIONS}
    elif source.suffix in _NAMES:
        files = {_NAMES[source.suffix]: source}
    else:
        load_tokenizer(source).save_pretrained(directory)
        return
    for name, file in files.items():
        if file.is_file():
            shutil.copyfile(file, directory / name)
