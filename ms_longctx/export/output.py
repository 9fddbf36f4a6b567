# SPDX-License-Identifier: Apache-2.0
"""The directory an export goes to: it appears when it is complete, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ms_longctx.errors import MsLongctxError


def check_output(folder: Path) -> None:
    """Raise a MsLongctxError unless ``folder`` can be made: before a large model is loaded."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MsLongctxError(f"--output {folder} exists already; choose another or remove it")
    home = folder.absolute().parent
    while not home.exists():
        home = home.parent
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        reason = "may not be written to" if home.is_dir() else "is not a directory"
        raise MsLongctxError(f"--output {folder}: {home} {reason}; choose another place")


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """A directory that becomes ``folder`` when the block ends well, and disappears otherwise.

    Raises:
        MsLongctxError: ``folder`` exists and is not empty, or cannot be written, as on a full disk.
    """
    check_output(folder)
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise MsLongctxError(f"--output {folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
