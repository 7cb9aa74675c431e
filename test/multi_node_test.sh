#!/usr/bin/env bash
# scripts/multi_node: ranks by a host file, here two slots of this machine; mistakes; srun by a stand-in.
set -eu
cd "$(dirname "$0")/.."
program=${TRAIN_GPT:-build/train_gpt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="--layers 2 --heads 2 --channels 32 --seq 32 --micro-batch 4 --steps 3 --sample-tokens 0 --eval-tokens 64"
refuses() { # the text that it must say, then the command
    local text=$1
    shift
    ! "$@" >"$work/log" 2>&1 || { echo "it did not refuse: $*"; exit 1; }
    grep -qF -- "$text" "$work/log" || { echo "it does not say: $text"; cat "$work/log"; exit 1; }
}
refuses "no such host file" scripts/multi_node/mpirun.sh "$work/none" 2 "$program"
echo "# nobody" >"$work/empty"
refuses "names no machine" scripts/multi_node/mpirun.sh "$work/empty" 2 "$program"
refuses "is no number of ranks" scripts/multi_node/mpirun.sh "$work/empty" two "$program"
refuses "start it with sbatch" scripts/multi_node/slurm.sh "$program"

mkdir "$work/bin"
printf '#!/bin/sh\necho "srun $* with $OMP_NUM_THREADS threads"\n' >"$work/bin/srun"
chmod +x "$work/bin/srun"
PATH=$work/bin:$PATH SLURM_JOB_ID=1 SLURM_CPUS_ON_NODE=64 SLURM_NTASKS_PER_NODE=8 scripts/multi_node/slurm.sh "$program" --pp 2 >"$work/log"
grep -q "srun --mpi=pmix --kill-on-bad-exit=1 $program --pp 2 with 8 threads" "$work/log"

if ! command -v mpirun >/dev/null || [ "$(mpirun --allow-run-as-root -np 1 "$program" --help 2>&1 | grep -c 'built without MPI')" != 0 ]; then
    echo "skipped: no mpirun, or a program built without MPI"
    exit 0
fi
echo "localhost slots=2" >"$work/hosts"
losses() { grep -oE 'step +[0-9]+/[0-9]+ . loss [0-9.]+' "$1"; }
scripts/multi_node/mpirun.sh "$work/hosts" 2 "$program" $flags --pp 2 >"$work/processes" 2>&1 || { cat "$work/processes"; exit 1; }
OMP_NUM_THREADS=1 "$program" $flags --local-ranks 2 --pp 2 >"$work/threads"
diff <(losses "$work/processes") <(losses "$work/threads")
[ "$(losses "$work/threads" | wc -l)" = 3 ]

# Ctrl-C saves, in every rank after the same step.
scripts/multi_node/mpirun.sh "$work/hosts" 2 "$program" $flags --steps 1000000 --pp 2 --out "$work/out" >"$work/stopped" 2>&1 &
job=$!
for _ in $(seq 300); do grep -q "step .*10/1000000" "$work/stopped" && break || sleep 0.1; done
kill -TERM "$job"
status=0
wait "$job" || status=$?
[ "$status" = 138 ] || { echo "it ended with $status, not 128 + SIGUSR1"; cat "$work/stopped"; exit 1; }
grep -q "stopped by SIGUSR1 at step" "$work/stopped"
ls -d "$work"/out/step_*[0-9] >/dev/null
echo "ok: scripts/multi_node"
