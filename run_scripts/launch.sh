# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What msrun.sh and mpirun.sh share: source it after common.sh. Checks the settings, starts a launcher, shows the log
# of the first local rank, passes Ctrl-C on, and ends with the exit code of the rank that failed first.

# The settings as they were given, and the script: with the arguments behind it, the line that starts this run again.
repeated() {
    local name
    for name in WORKERS NODES NODE_RANK MASTER_ADDR MASTER_PORT HOSTFILE LOG_DIR ASCEND_RT_VISIBLE_DEVICES PROGRAM; do
        [ -z "${!name:-}" ] || printf '%s=%q ' "$name" "${!name}"
    done
    [[ "$0" == */* ]] && printf '%q' "$0" || printf './%q' "$0"
}
MS_LONGCTX_STARTED_BY="$(repeated)" # ms_longctx/cli/train.py shows it
export MS_LONGCTX_STARTED_BY

: "${MASTER_ADDR:=}" "${MASTER_PORT:=}" "${NODE_RANK:=}" "${WORKERS:=}" "${NODES:=}" "${HOSTFILE:=}"
LOG_DIR="${LOG_DIR:-$PWD/logs}"
PROGRAM="${PROGRAM:-$ROOT/run_scripts/run_train.py}"

# refuse MESSAGE...: a setting that cannot work.
refuse() {
    echo "error: $*" >&2
    exit 2
}

# help_wanted ARGUMENTS...: with --help among them, print the head of the script and end.
help_wanted() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            -h | --help)
                sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"
                echo "The arguments: python run_scripts/run_train.py --help"
                exit 0
                ;;
        esac
    done
}

# The Python of the source tree's environment, else the one on PATH (a container); its directory comes first on PATH,
# because msrun starts 'python' from there.
use_python() {
    if [ ! -x "$PY" ]; then
        PY="$(command -v python3 || command -v python)" ||
            refuse "no Python: expected $VENV/bin/python (run_scripts/test.sh makes it) or python3 on PATH"
    fi
    PATH="$(dirname "$PY"):$PATH"
    export PATH
}

# number NAME LEAST MOST: the variable, if set, must be a whole number between these.
number() {
    local name="$1" value="${!1}"
    [ -z "$value" ] && return
    # Bash takes 08 for a wrong octal number.
    [[ "$value" =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "$name=$value: expected a whole number, without zeros before it"
    [ "$value" -ge "$2" ] && [ "$value" -le "$3" ] || refuse "$name=$value: expected $2 to $3"
}

# The number of devices this node may use: those of ASCEND_RT_VISIBLE_DEVICES, else all that the driver shows.
visible_devices() {
    if [ -n "${ASCEND_RT_VISIBLE_DEVICES+set}" ]; then
        [[ "$ASCEND_RT_VISIBLE_DEVICES" =~ ^(0|[1-9][0-9]*)(,(0|[1-9][0-9]*))*$ ]] ||
            refuse "ASCEND_RT_VISIBLE_DEVICES=$ASCEND_RT_VISIBLE_DEVICES: expected device numbers such as 0,1,2,3"
        local twice
        twice="$(tr ',' '\n' <<<"$ASCEND_RT_VISIBLE_DEVICES" | sort | uniq -d | head -n 1)"
        [ -z "$twice" ] || refuse "ASCEND_RT_VISIBLE_DEVICES=$ASCEND_RT_VISIBLE_DEVICES names device $twice twice"
        tr -cd ',' <<<"$ASCEND_RT_VISIBLE_DEVICES" | wc -c | awk '{ print $1 + 1 }'
    else
        find /dev -maxdepth 1 -name 'davinci[0-9]*' 2>/dev/null | wc -l
    fi
}

# Sets WORKERS and LOCAL (workers of this node) from WORKERS, NODES and the visible devices.
count_workers() {
    number WORKERS 1 100000
    number NODES 1 10000
    NODES="${NODES:-1}"
    local devices
    devices="$(visible_devices)" || exit
    if [ -z "$WORKERS" ]; then
        [ "$devices" -gt 0 ] || refuse "WORKERS is not set and this node has no Ascend device; set WORKERS=number"
        WORKERS=$((devices * NODES))
    fi
    [ $((WORKERS % NODES)) -eq 0 ] || refuse "WORKERS=$WORKERS does not divide by NODES=$NODES"
    LOCAL=$((WORKERS / NODES))
    if [ "$devices" -gt 0 ] && [ "$LOCAL" -gt "$devices" ]; then
        refuse "$LOCAL workers on this node, but only $devices devices are visible (ASCEND_RT_VISIBLE_DEVICES or the" \
            "driver); lower WORKERS=$WORKERS"
    fi
}

# The hosts of HOSTFILE (first word of each line; # starts a comment), one a line.
hosts_of_file() {
    [ -r "$HOSTFILE" ] || refuse "HOSTFILE=$HOSTFILE cannot be read"
    local hosts
    hosts="$(sed -e 's/#.*//' "$HOSTFILE" | awk 'NF { print $1 }')"
    [ -n "$hosts" ] || refuse "HOSTFILE=$HOSTFILE names no host; expected a host name or address a line"
    echo "$hosts"
}

is_this_host() {
    case " localhost 127.0.0.1 $(hostname) $(hostname -s) $(hostname -f 2>/dev/null) $(hostname -I 2>/dev/null) " in
        *" $1 "*) return 0 ;;
        *) return 1 ;;
    esac
}

# A directory for the logs of this run; those of the run before go.
prepare_logs() {
    mkdir -p "$LOG_DIR" 2>/dev/null && [ -w "$LOG_DIR" ] || refuse "LOG_DIR=$LOG_DIR cannot be written"
    LOG_DIR="$(cd "$LOG_DIR" && pwd)"
    rm -f "$LOG_DIR"/worker_*.{log,pid,exit} "$LOG_DIR"/{scheduler,launcher}.log
}

# launch FIRST_RANK SIGNAL COMMAND...: run a launcher to its end. On Ctrl-C (or SIGTERM) its workers get SIGINT, so
# that they save and end; a second one kills them. SIGNAL: what the launcher passes on to workers of other nodes, or -.
launch() {
    local first="$1" signal="$2" code=0
    shift 2
    if [ -n "${DRY:-}" ]; then
        printf '%q ' "$@"
        echo
        exit 0
    fi
    prepare_logs
    echo "$WORKERS workers, $LOCAL on this node; logs in $LOG_DIR, here that of rank $first"
    touch "$LOG_DIR/worker_$first.log"
    set -m # a process group of its own: Ctrl-C reaches this script only
    "$@" >"$LOG_DIR/launcher.log" 2>&1 &
    LAUNCHER=$!
    tail -n +1 -s 0.2 -f --pid="$LAUNCHER" "$LOG_DIR/worker_$first.log" 2>/dev/null &
    local shown=$!
    set +m
    STOPPED=0
    trap 'pass_on "$signal"' INT TERM
    while kill -0 "$LAUNCHER" 2>/dev/null; do
        wait "$LAUNCHER" && code=0 || code=$?
    done
    trap - INT TERM
    wait "$shown" 2>/dev/null
    report "$code"
}

# pass_on SIGNAL: the first time ask all workers to stop, the second time kill them.
pass_on() {
    STOPPED=$((STOPPED + 1))
    if [ "$STOPPED" -gt 1 ]; then
        echo "killing the workers" >&2
        signal_workers KILL
        kill -KILL -- "-$LAUNCHER" 2>/dev/null
        return
    fi
    echo "stopping the workers (once more to kill them)" >&2
    if [ "$1" = - ]; then
        signal_workers INT
    else
        kill -s "$1" "$LAUNCHER" 2>/dev/null
    fi
}

signal_workers() {
    local file pid host
    for file in "$LOG_DIR"/worker_*.pid; do
        [ -f "$file" ] || continue
        read -r host pid <"$file"
        [ "$host" = "$(hostname)" ] || continue
        # Launchers give each worker a group: the one of run_rank.py, which cannot pass SIGKILL on.
        [ "$1" = KILL ] && kill -KILL -- "-$pid" 2>/dev/null && continue
        kill -s "$1" "$pid" 2>/dev/null
    done
}

# blamed RANK: the rank that the log of this one names as the one that failed, if it does.
blamed() {
    sed -nE -e 's/.*rank ([0-9]+) could not .*; its own message says why.*/\1/p;t' \
        -e 's/.*rank ([0-9]+) \(process [0-9]+\) (failed:|was killed|has ended|ended before).*/\1/p' \
        "$LOG_DIR/worker_$1.log" 2>/dev/null | head -n 1
}

# "time code rank" of the rank of this node that failed first, if one did. A rank that hears of the failure of another
# one may end before it does: the first one counts whose log blames no other, or the one that is blamed.
first_failure() {
    local failures time code rank named
    failures="$(cat "$LOG_DIR"/worker_*.exit 2>/dev/null | awk '$2 != 0' | sort -n)"
    [ -n "$failures" ] || return
    while read -r time code rank; do
        named="$(blamed "$rank")"
        if [ -n "$named" ] && [ "$named" != "$rank" ]; then
            grep -E "^[0-9.]+ [0-9]+ $named\$" <<<"$failures" && return
        elif [ "$code" != 143 ]; then # that is what launchers do to the others
            echo "$time $code $rank"
            return
        fi
    done <<<"$failures"
    head -n 1 <<<"$failures"
}

# report CODE: the end of the log of the rank that failed first, and its exit code; else that of the launcher.
report() {
    local failure rank code
    failure="$(first_failure)"
    if [ -z "$failure" ]; then
        if [ "$STOPPED" -gt 0 ]; then
            echo "stopped; logs in $LOG_DIR" >&2
        elif [ "$1" -ne 0 ]; then
            echo "the launcher failed (exit code $1); the end of $LOG_DIR/launcher.log:" >&2
            tail -n 20 "$LOG_DIR/launcher.log" >&2
        fi
        exit "$1"
    fi
    read -r _ code rank <<<"$failure"
    if [ "$STOPPED" -gt 0 ]; then
        echo "stopped; logs in $LOG_DIR" >&2
    else
        echo "rank $rank failed first (exit code $code); the end of $LOG_DIR/worker_$rank.log:" >&2
        tail -n 20 "$LOG_DIR/worker_$rank.log" >&2
        echo "for causes: ms-longctx doctor --log $LOG_DIR" >&2
    fi
    exit "$code"
}
