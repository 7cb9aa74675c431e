#!/usr/bin/env bash
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Start ranks on many machines with Slurm, whose Open MPI has PMIx (srun --mpi=list says so).
# usage: sbatch [--nodes N --ntasks-per-node R] scripts/multi_node/slurm.sh build/train_gpt FLAGS...
#   The same command starts it again: with --out and --resume in FLAGS it goes on from the last whole checkpoint.
#   Slurm sends SIGTERM two minutes before the time is over: the ranks finish their step and save.
#   With REQUEUES=N in the environment a job that fails, or whose time is over, queues again, up to N times.
set -eu
[ -n "${SLURM_JOB_ID:-}" ] || { echo "slurm.sh: error: start it with sbatch" >&2; exit 1; }
[ -x "${1:-}" ] || { echo "slurm.sh: error: ${1:-the program} is not there: run make" >&2; exit 1; }
cores=${SLURM_CPUS_ON_NODE:-$(nproc)} ranks=${SLURM_NTASKS_PER_NODE:-1}
export OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1))
status=0
srun --mpi=pmix --kill-on-bad-exit=1 "$@" || status=$?
if [ $status != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${REQUEUES:-0}" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
