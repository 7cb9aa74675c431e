#!/usr/bin/env bash
# A small model learns to answer: a Llama of 0.8M parameters reads this project's own sources, then a short dialogue
# (dev/data/dialogue.jsonl, CC0) of which the answers are trained, and says one. MODEL=DIR starts from a folder's weights
# instead. Under three minutes on two cores.                               flags and variables: run_common.sh
# Expected, and measured with this program (85 s beside other work): to "What is a token?" the dialogue's own answer. It is learned by heart; a model of this size knows no more.
GPUS=${GPUS:-0}
. "$(dirname "$0")/run_common.sh"
[ -z "${EXPLAIN:-}" ] || { explain --config scripts/first_run.cfg; exit; }
build
base=${MODEL:-${OUT:-out/chat}/base}
run mkdir -p "$(dirname "$base")"
[ -n "${MODEL:-}" ] || [ -e "$base/config.json" ] || run "$program" --config scripts/first_run.cfg --steps 600 --prompt "" \
    --sample-tokens 0 --eval-every 0 --device cpu --out "$(dirname "$base")/read" --export "$base"
run "$programs/tune_gpt" --model "$base" --loss sft --data dev/data/dialogue.jsonl --seq 256 --micro-batch 4 --steps 200 \
    --lr 2e-3 --warmup 20 --device cpu --prompt "What is a token?" --temperature 0 --sample-tokens 150 ${FLAGS:-}
