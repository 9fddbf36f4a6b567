# SPDX-License-Identifier: Apache-2.0
"""What a benchmark says about the machine it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Model name and number of the processors."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()} x {os.cpu_count()}"
    return platform.processor()
