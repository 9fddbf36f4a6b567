# SPDX-License-Identifier: Apache-2.0
"""The key of encrypted files: read from a file, never shown."""

from __future__ import annotations

from pathlib import Path

from ms_longctx.errors import MsLongctxError

ENCRYPTION = "AES-GCM"
LENGTHS = (16, 24, 32)


def read_key(path: str | Path) -> bytes:
    """The AES key in ``path``: 16, 24 or 32 bytes as they are, or as many pairs of hexadecimal digits.

    Raises:
        MsLongctxError: unreadable, or of another length. The message tells the length, not the content.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise MsLongctxError(f"--key_file {path}: cannot be read: {error.strerror}") from error
    if len(content) in LENGTHS:
        return content
    text = content.strip()
    if len(text) in LENGTHS:
        return text
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) not in LENGTHS:
        raise MsLongctxError(
            f"--key_file {path}: holds {len(text)} bytes; expected an AES key of 16, 24 or 32 bytes, raw or hexadecimal"
        )
    return key
