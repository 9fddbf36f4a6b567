#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the server of this folder; options as of server.py. PYTHON37 names an interpreter with mindspore-lite 2.0.0 and
# mindspore-serving 2.0.2, by default the one that ms_longctx made.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${MS_LONGCTX_CACHE:-$HOME/.cache/ms_longctx}
python=${PYTHON37:-$cache/lite-2.0.0-serving-2.0.2-py37/bin/python}
if [ ! -x "$python" ]; then
    echo "error: $python does not exist; set PYTHON37 to a Python 3.7 with mindspore-lite 2.0.0 and mindspore-serving 2.0.2" >&2
    exit 2
fi
cd "$here"  # Serving keeps its sockets and logs in the working directory
exec "$python" server.py "$@"
