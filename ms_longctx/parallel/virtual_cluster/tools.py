# SPDX-License-Identifier: Apache-2.0
"""The programs of binutils and gcc that read MindSpore's libraries and build the stand-in."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence

from ms_longctx.errors import MsLongctxError

PROGRAMS = ("gcc", "g++", "nm", "readelf", "strings", "c++filt")


class VirtualClusterError(MsLongctxError):
    """The stand-in for CANN cannot be built, or does not do what it is for."""


def missing_reason() -> str | None:
    """Why the stand-in cannot be built on this machine, or ``None`` when it can."""
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        return f"the stand-in for CANN exists for x86-64 only, this machine is {machine}; install CANN"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; install gcc, g++ and binutils (apt install g++), or CANN"
    return None


def run(command: Sequence[str], text: str | None = None) -> str:
    """Output of a program.

    Args:
        command: program and arguments.
        text: what it reads from standard input.

    Raises:
        VirtualClusterError: it fails; the message has its first complaint.
    """
    result = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        complaint = next((line for line in result.stderr.splitlines() if line.strip()), "no message")
        raise VirtualClusterError(f"{command[0]} failed with exit code {result.returncode}: {complaint}")
    return result.stdout
