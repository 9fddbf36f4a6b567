# SPDX-License-Identifier: Apache-2.0
"""The result of a check, and the host that checks look at."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Result(Enum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    ABSENT = "not here"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        result: what came of it; ``ABSENT`` where there is nothing to check, such as a driver without devices.
        value: what was found.
        expected: what is needed, where that is more than the value being there.
        advice: what to do.
    """

    name: str
    result: Result
    value: str
    expected: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Host:
    """Files, environment and programs of a machine; tests give another root and environment.

    Attributes:
        root: directory that stands for ``/``.
        environment: variables, also for programs that are started.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, absolute: str | Path) -> Path:
        """An absolute path of the machine."""
        return self.root / str(absolute).lstrip("/")

    def read(self, absolute: str | Path) -> str | None:
        """The text of a file; ``None`` where it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def run(self, *command: str, timeout: float = 10.0) -> str | None:
        """What a program prints; ``None`` where it does not exist, fails or takes too long."""
        program = shutil.which(command[0], path=self.environment.get("PATH", ""))
        if program is None:
            return None
        try:
            finished = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                env=dict(self.environment),
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return finished.stdout if finished.returncode == 0 else None

    @property
    def has_devices(self) -> bool:
        """Whether the driver of Ascend devices made its files."""
        return self.path("/dev/davinci_manager").exists()
