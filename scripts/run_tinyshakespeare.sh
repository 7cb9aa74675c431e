#!/usr/bin/env bash
# A GPT of 11M parameters on 1.1 MB of Shakespeare, byte by byte, on a CPU.     flags and variables: run_common.sh
# DATA=FILE for another text, STEPS for another length: two cores with AVX-512 bf16 take ten minutes for 300 steps.
# Expected, and measured with this program: with STEPS=2400, an hour, a validation loss of 1.557 nats a character at best, at
# step 1800 (dev/LOG.md); then it overfits.
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 11139072 (11.1M): matrices and tables 11108352, vectors 30720; in 9 buckets; padding 0
#   run: 300 steps x 4096 tokens = 1.2M tokens of 70.4M FLOPs = 8.647e13 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 0.0 hours
#     H100 at 40% of 989 TFLOP/s in bf16: 0.0 hours
#     activations (train)             345095200    329.1 MiB  █████████████████████████▏
#     total                           548351488    522.9 MiB  one allocation; plans share the passing bytes
GPUS=${GPUS:-0}
. "$(dirname "$0")/run_common.sh"
data=${DATA:-data/tinyshakespeare.txt}
[ -n "${DATA:-}" ] || fetch "$data" dev/data/tinyshakespeare.py
train --model tiny --layers 6 --heads 6 --channels 384 --precision bf16 --data "$data" \
    --seq 256 --micro-batch 16 --batch-tokens 4096 --steps "${STEPS:-300}" \
    --lr 1e-3 --min-lr 1e-4 --warmup 100 --weight-decay 0.1 --beta2 0.99 \
    --eval-every 200 --eval-tokens 111540 --sample-every 600 --sample-tokens 300 --save-every 200
