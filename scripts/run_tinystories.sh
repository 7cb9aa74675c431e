#!/usr/bin/env bash
# A Llama of 4.6M parameters on TinyStories (arXiv:2305.07759), byte by byte, on a CPU.     flags, variables: run_common.sh
# DATA=FILE for another text (without it the 22 MB that the authors keep for validation), STEPS for another length: two cores
# take ten minutes for 600. Expected: words and short sentences; no figure is published for bytes. Measured: not yet.
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 4558080 (4.6M): matrices and tables 4554752, vectors 3328; in 8 buckets; padding 0
#   run: 600 steps x 2048 tokens = 1.2M tokens of 29.7M FLOPs = 3.650e13 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 0.0 hours
#     H100 at 40% of 989 TFLOP/s in bf16: 0.0 hours
#     activations (train)             111200288    106.0 MiB  ██████████████████████▉
#     total                           194257408    185.3 MiB  one allocation; plans share the passing bytes
GPUS=${GPUS:-0}
. "$(dirname "$0")/run_common.sh"
data=${DATA:-data/tinystories/TinyStoriesV2-GPT4-valid.txt}
[ -n "${DATA:-}" ] || fetch "$data" dev/data/tinystories.py --val-only
train --model tiny-llama --layers 6 --heads 8 --kv-heads 4 --channels 256 --precision bf16 --data "$data" \
    --seq 256 --micro-batch 8 --batch-tokens 2048 --steps "${STEPS:-600}" \
    --lr 1e-3 --warmup 100 --weight-decay 0.1 \
    --eval-every 200 --eval-tokens 32768 --sample-every 200 --sample-tokens 300 --save-every 200 --prompt "Once upon a time"
