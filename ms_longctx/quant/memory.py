# SPDX-License-Identifier: Apache-2.0
"""Memory of the process."""

from __future__ import annotations

import ctypes
import gc


def release_memory() -> None:
    """Give freed memory back to the system; glibc would keep the holes that large arrays leave."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
