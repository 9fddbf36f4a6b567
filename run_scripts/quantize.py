#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""``ms-longctx quantize`` from a source tree: works from any directory, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ms_longctx.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(script=("quantize.py", "quantize")))
