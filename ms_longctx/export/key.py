# SPDX-License-Identifier: Apache-2.0
"""The key of encrypted files: read from a file, never shown."""

from __future__ import annotations

import hashlib
import hmac
import os
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


def check_of(key: bytes) -> str:
    """What tells this key from others in a manifest, and helps nobody to find it: a salt and HMAC-SHA256 of it."""
    salt = os.urandom(16)
    return salt.hex() + _hmac(key, salt)


def is_key(key: bytes, check: str) -> bool:
    """Whether ``check`` is of this key."""
    return hmac.compare_digest(_hmac(key, bytes.fromhex(check[:32])), check[32:])


def _hmac(key: bytes, salt: bytes) -> str:
    return hmac.new(key, salt, hashlib.sha256).hexdigest()
