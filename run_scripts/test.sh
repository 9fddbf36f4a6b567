#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets everything up and passes the checks and tests:  run_scripts/test.sh [--fast] [pytest arguments]
#   --fast   skip the tests marked slow
#   --all    also those marked long, which take minutes each
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT" || exit 1

selection=(-m "not long")
case "${1:-}" in
    --fast) selection=(-m "not slow and not long"); shift ;;
    --all) selection=(); shift ;;
esac

ensure_venv dev || exit 1
step "fetching the real models that tests use" "$PY" -c "
from ms_longctx import assets
for asset in (assets.SMOLLM2_135M, assets.MISTRAL_SENTENCEPIECE):
    print('   ', assets.fetch(asset))" || exit 1

failed=()
step "ruff" "$VENV/bin/ruff" check . || failed+=(ruff)
step "ruff format" "$VENV/bin/ruff" format --check . || failed+=(format)
step "mypy" "$VENV/bin/mypy" ms_longctx mindrecord_tools || failed+=(mypy)
step "shellcheck" "$VENV/bin/shellcheck" run_scripts/*.sh .ci/run || failed+=(shellcheck)
step "hadolint" "$VENV/bin/hadolint" --config .hadolint.yaml Dockerfile.ascend || failed+=(hadolint)
step "pytest" "$PY" -m pytest "${selection[@]}" "$@" || failed+=(pytest)

if [ "${#failed[@]}" -gt 0 ]; then
    echo "FAILED: ${failed[*]} (in $SECONDS s)"
    exit 1
fi
echo "all passed in $SECONDS s"
