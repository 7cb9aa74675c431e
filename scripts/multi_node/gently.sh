#!/usr/bin/env bash
# Run mpirun so that Ctrl-C and SIGTERM let the ranks finish their step and save.
# usage: scripts/multi_node/gently.sh mpirun ARGUMENTS...
#   mpirun answers both by killing its processes within two seconds. SIGUSR1 it passes on, and every rank stops and
#   saves after the same step: so that is what it gets here. A second Ctrl-C ends the ranks at once.
set -u
[ $# -gt 0 ] || { echo "gently.sh: error: wants a command: see the head of this file" >&2; exit 1; }
setsid "$@" & # in a session of its own: the terminal's Ctrl-C does not reach it
job=$!
trap 'kill -USR1 "$job"' INT TERM HUP USR1 USR2 XCPU
while :; do # a signal ends `wait`, and not the job
    wait "$job"
    status=$?
    kill -0 "$job" 2>/dev/null || exit "$status"
done
