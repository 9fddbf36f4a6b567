# SPDX-License-Identifier: Apache-2.0
"""What benchmarks ask the machine they run on."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path


def cpu_name() -> str:
    """Model name and number of the processors."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()} x {os.cpu_count()}"
    return platform.processor()


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
