# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Shared by the scripts of this directory: source it, then call ensure_venv.
#   ROOT   the source tree          VENV   its virtual environment ($MS_LONGCTX_VENV, default .venv)
#   PY     the environment's Python, once ensure_venv has run

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${MS_LONGCTX_VENV:-$ROOT/.venv}"
PY="$VENV/bin/python"

# step TITLE COMMAND...: say what happens, run it, say how long it took; the command's exit code.
step() {
    local title="$1" start=$SECONDS code=0
    shift
    echo "==> $title"
    "$@" || code=$?
    if [ "$code" -eq 0 ]; then
        echo "    done in $((SECONDS - start)) s"
    else
        echo "    FAILED (exit code $code) after $((SECONDS - start)) s"
    fi
    return "$code"
}

# ensure_venv [EXTRAS]: the environment exists and holds this package (editable) with the extras ("dev", "monitor").
# A second call with the same requirements only looks at the CPU kernels. MS_LONGCTX_PYTHON names the Python to use.
ensure_venv() {
    local extras="${1:-}"
    if ! "$PY" -m pip --version >/dev/null 2>&1; then
        local python
        python="$(_find_python)" || return 1
        step "creating $VENV with $python ($("$python" --version))" "$python" -m venv "$VENV" || return 1
    fi
    local stamp
    stamp="$VENV/.ms_longctx-$(_requirements_hash "$extras")"
    if [ ! -f "$stamp" ]; then
        step "installing ms_longctx${extras:+[$extras]} into $VENV (several GB, some minutes the first time)" \
            _install "$extras" || return 1
        touch "$stamp"
    fi
    step "building the CPU kernels" "$PY" -m ms_longctx.kernels.build ||
        echo "    going on without them: everything works, slower"
}

# The first Python 3.10 to 3.12 on PATH that can create virtual environments.
_find_python() {
    local name seen=""
    for name in ${MS_LONGCTX_PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
        command -v "$name" >/dev/null || continue
        seen="$seen $name ($("$name" --version 2>&1))"
        "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
        seen="$seen without the venv module"
    done
    echo "error: no Python 3.10, 3.11 or 3.12 with the venv module on PATH; found:${seen:- none}" >&2
    echo "       install one (for example python3.11 and python3.11-venv), or name it in MS_LONGCTX_PYTHON" >&2
    return 1
}

_install() {
    local quiet=--quiet
    [ -t 1 ] && quiet=
    "$PY" -m pip install $quiet --disable-pip-version-check --constraint "$ROOT/run_scripts/constraints.txt" \
        --editable "$ROOT${1:+[$1]}"
}

_requirements_hash() {
    { echo "$1"; cat "$ROOT/setup.py" "$ROOT/run_scripts/constraints.txt"; } | cksum | cut -d ' ' -f 1
}
