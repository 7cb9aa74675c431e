#!/usr/bin/env bash
# Start ranks on many machines with Open MPI.
# usage: scripts/multi_node/mpirun.sh HOSTFILE RANKS_A_HOST build/train_gpt FLAGS...
#   HOSTFILE: a line a machine: "node1 slots=8". The program, the data and --out lie at the same path everywhere;
#   ssh works without a password. Each rank gets its share of a machine's cores.
# Example, two machines of 8: scripts/multi_node/mpirun.sh hosts.txt 8 build/train_gpt --pp 2 --zero 1
set -eu
fail() { echo "mpirun.sh: error: $*" >&2; exit 1; }
[ $# -ge 3 ] || fail "wants a host file, the ranks of a host and the program: see the head of this file"
hosts=$1 ranks=$2 program=$3
shift 3
[ -r "$hosts" ] || fail "$hosts: no such host file: write a line a machine, like: node1 slots=8"
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "$ranks is no number of ranks"
[ -x "$program" ] || fail "$program is not there: run make"
command -v mpirun >/dev/null || fail "there is no mpirun: install openmpi-bin and libopenmpi-dev, and make again"
machines=$(grep -cvE '^[[:space:]]*(#|$)' "$hosts") || fail "$hosts names no machine"
cores=$(nproc)
threads=$((cores > ranks ? cores / ranks : 1))
[ "$(id -u)" = 0 ] && root=--allow-run-as-root || root=
exec "$(dirname "$0")/gently.sh" mpirun $root --hostfile "$hosts" --map-by "ppr:$ranks:node" --bind-to none -np $((machines * ranks)) \
    -x OMP_NUM_THREADS=$threads -x PATH -x LD_LIBRARY_PATH "$program" "$@"
