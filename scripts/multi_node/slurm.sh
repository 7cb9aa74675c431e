#!/usr/bin/env bash
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
# Start ranks on many machines with Slurm, whose Open MPI has PMIx (srun --mpi=list says so).
# usage: sbatch [--nodes N --ntasks-per-node R] scripts/multi_node/slurm.sh build/train_gpt FLAGS...
#   The same command starts it again: with --out and --resume in FLAGS it goes on from the last whole checkpoint.
#   Slurm sends SIGTERM two minutes before the time is over: the ranks finish their step and save.
set -eu
[ -n "${SLURM_JOB_ID:-}" ] || { echo "slurm.sh: error: start it with sbatch" >&2; exit 1; }
[ -x "${1:-}" ] || { echo "slurm.sh: error: ${1:-the program} is not there: run make" >&2; exit 1; }
cores=${SLURM_CPUS_ON_NODE:-$(nproc)} ranks=${SLURM_NTASKS_PER_NODE:-1}
export OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1))
exec srun --mpi=pmix --kill-on-bad-exit=1 "$@"
