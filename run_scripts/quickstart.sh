#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets everything up and runs the main job on real articles:  run_scripts/quickstart.sh [--full] [--output DIR]
# Prepare, LoRA fine-tuning, summaries of held-out articles before and after, ROUGE, and a report with pictures.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ensure_venv monitor || exit 1
exec "$PY" "$ROOT/run_scripts/quickstart.py" "$@"
