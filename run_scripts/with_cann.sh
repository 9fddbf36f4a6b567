#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command with the environment of CANN and of the driver (entry point of Dockerfile.ascend):
#   with_cann.sh COMMAND...    what is no command, such as 'train' or '--help', is for ms-longctx
for script in /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh; do
    if [ -f "$script" ]; then
        # shellcheck source=/dev/null
        source "$script"
        break
    fi
done
# NNAL (ATB), as the entry point of CANN's images does. MindSpore is built with the old ABI of C++'s strings.
nnal=/usr/local/Ascend/nnal/atb/set_env.sh
if [ -f "$nnal" ]; then
    # shellcheck source=/dev/null
    source "$nnal" --cxx_abi=0
fi
driver=/usr/local/Ascend/driver/lib64
[ ! -d "$driver" ] || export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver:${LD_LIBRARY_PATH:-}"
command -v -- "${1:---help}" >/dev/null || set -- ms-longctx "$@"
exec "$@"
