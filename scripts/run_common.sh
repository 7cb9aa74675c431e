# run_common.sh - what the run_*.sh scripts share: data, build, launch; they source it
#   GPUS=N      ranks, a GPU each (as many as nvidia-smi lists); 0: the CPU
#   OUT=DIR     checkpoints and log.jsonl (out/NAME); called again, a run goes on from the newest checkpoint
#   FLAGS=...   more flags of train_gpt; of two the later counts
#   DRY=1       print the commands and run none
#   EXPLAIN=1   print parameters, FLOPs, hours, dollars and a rank's memory, and run nothing
#   TRAIN_GPT=PROGRAM   build nothing: use this one
# DRY and EXPLAIN take GPUS=8 where none is given.
# Dollars: what llm.c's scripts say of 2024, a GPU and hour: 1.75 for an A100, 3.50 for an H100 (github.com/karpathy/llm.c,
# scripts/run_gpt2_124M.sh and run_gpt2_1558M.sh: 14 and 28 for a machine of 8). An assumption: prices change.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$(basename "$0" .sh)
name=${name#run_}
program=${TRAIN_GPT:-build/train_gpt}
programs=$(dirname "$program") # the others are beside it
fail() { echo "$(basename "$0"): error: $*" >&2; exit 1; }

if [ -z "${GPUS:-}" ]; then
    GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    [ -z "${DRY:-}${EXPLAIN:-}" ] || GPUS=8
    [ "$GPUS" != 0 ] || fail "nvidia-smi lists no GPU: GPUS=0 trains on the CPU, EXPLAIN=1 says what it takes"
fi
[[ $GPUS =~ ^[0-9]+$ ]] || fail "GPUS=$GPUS is no number of GPUs"
export -n GPUS # make's GPUS are architectures

run() { # a command, printed so that a shell can take it
    printf '%q ' "$@" && echo
    [ -n "${DRY:-}" ] || "$@"
}
fetch() { # the file that is there when all is there, then the command that makes it
    [ -n "${EXPLAIN:-}" ] || [ -e "$1" ] || run "${@:2}"
}
build() {
    [ -n "${TRAIN_GPT:-}${EXPLAIN:-}" ] && return
    run scripts/setup.sh
    run make "DEVICE=$([ "$GPUS" = 0 ] && echo cpu || echo cuda)" all
}
explain() { # flags; one thread, since the CPU's workspace grows with them
    [ -x "$program" ] || fail "$program is not there: run make"
    OMP_NUM_THREADS=1 "$program" "$@" --local-ranks $((GPUS > 1 ? GPUS : 1)) --explain | awk -v gpus="$GPUS" '
        /^parameters/ { shown = 1 }
        /^actions/ { shown = 0 }
        /^  (A100|H100) at/ && gpus { $0 = $0 sprintf(", $%.0f", $9 * ($1 == "A100" ? 1.75 : 3.5)) }
        shown'
}
train() { # flags
    local out=${OUT:-out/$name} launch=("$program")
    set -- "$@" --out "$out"
    [ -z "${EXPLAIN:-}" ] || { explain "$@" ${FLAGS:-}; return; }
    build
    case $GPUS in
    0) set -- "$@" --device cpu ;;
    1) set -- "$@" --device cuda ;;
    *)
        launch=(mpirun -np "$GPUS" --bind-to none "$program")
        [ "$(id -u)" != 0 ] || launch=(mpirun --allow-run-as-root "${launch[@]:1}")
        launch=(scripts/multi_node/gently.sh "${launch[@]}")
        set -- "$@" --device cuda
        ;;
    esac
    set -- "$@" --resume # a new run where there is no checkpoint
    run "${launch[@]}" "$@" ${FLAGS:-}
}
with_file() { # a file, then the flags that are given where it is there; what they take is not in EXPLAIN's table
    [ -n "${EXPLAIN:-}" ] || { [ -z "${DRY:-}" ] && [ ! -e "$1" ]; } || echo "${@:2}"
}
