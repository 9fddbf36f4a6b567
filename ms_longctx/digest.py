# SPDX-License-Identifier: Apache-2.0
"""Digests of files, read in pieces."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
