#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains with several workers under MindSpore's msrun:  [SETTING=VALUE...] run_scripts/msrun.sh --config NAME ...
# Run it on every node. The arguments are those of run_train.py; the settings are variables of the environment:
#   WORKERS      workers of all nodes together; default: one for each visible device
#   NODES        number of nodes, default 1; each has WORKERS / NODES of the workers
#   NODE_RANK    which of them this one is, from 0; needed if NODES > 1
#   MASTER_ADDR  address of node 0; needed if NODES > 1. MASTER_PORT: of its scheduler, default 8118, or a free one
#   HOSTFILE     instead of NODES, NODE_RANK and MASTER_ADDR: a host a line, node 0 first
#   LOG_DIR      gets worker_RANK.log of this node's ranks, scheduler.log and launcher.log; default ./logs
#   ASCEND_RT_VISIBLE_DEVICES   devices of this node that may be used, e.g. 0,1,2,3
#   PROGRAM      script to run in place of run_train.py;  DRY=1 only prints the command
# Exit code: 0, 2 for a wrong setting, else that of the rank that failed first. Ctrl-C lets the workers save and end.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$ROOT/run_scripts/launch.sh"

# Sets NODES, NODE_RANK and MASTER_ADDR from HOSTFILE.
read_hostfile() {
    [ -z "$NODES$NODE_RANK$MASTER_ADDR" ] ||
        refuse "HOSTFILE says what NODES, NODE_RANK and MASTER_ADDR are; unset them, or HOSTFILE"
    local hosts host index=0
    hosts="$(hosts_of_file)" || exit
    for host in $hosts; do
        [ -z "$NODE_RANK" ] && is_this_host "$host" && NODE_RANK=$index
        index=$((index + 1))
    done
    NODES=$index
    MASTER_ADDR="${hosts%%$'\n'*}"
    [ -n "$NODE_RANK" ] ||
        refuse "HOSTFILE=$HOSTFILE does not name this host; expected one of: $(hostname) $(hostname -I 2>/dev/null)"
}

free_port() {
    "$PY" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

is_free_port() {
    "$PY" -c 'import socket, sys; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(("", int(sys.argv[1])))' "$1" 2>/dev/null
}

help_wanted "$@"
use_python
command -v msrun >/dev/null || refuse "msrun is not on PATH; it comes with MindSpore (pip install mindspore)"
[ -z "$HOSTFILE" ] || read_hostfile
count_workers
number MASTER_PORT 1024 65535
number NODE_RANK 0 $((NODES - 1))
if [ "$NODES" -gt 1 ]; then
    [ -n "$NODE_RANK" ] || refuse "NODES=$NODES needs NODE_RANK: 0 on the node of MASTER_ADDR, 1 on the next one, ..."
    [ -n "$MASTER_ADDR" ] || refuse "NODES=$NODES needs MASTER_ADDR: the address of the node with NODE_RANK=0"
fi
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
if [ -z "$MASTER_PORT" ]; then
    MASTER_PORT=8118
    [ "$NODES" -gt 1 ] || MASTER_PORT="$(free_port)"
elif [ "${NODE_RANK:-0}" = 0 ] && ! is_free_port "$MASTER_PORT"; then
    refuse "MASTER_PORT $MASTER_PORT is used by another program; see 'ss -ltnp', or choose another on all nodes"
fi
FIRST=$((${NODE_RANK:-0} * LOCAL))

# --tail_worker_log names a rank that no node has: launch.sh shows the first one itself.
launch "$FIRST" - msrun --worker_num="$WORKERS" --local_worker_num="$LOCAL" --node_rank="${NODE_RANK:-0}" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --log_dir="$LOG_DIR" --join=True \
    --tail_worker_log="$WORKERS" "$(basename "$PY")" "$ROOT/run_scripts/run_rank.py" "$LOG_DIR" "$PROGRAM" "$@"
