#!/usr/bin/env bash
# A GPT of 11M parameters on 1.1 MB of Shakespeare, byte by byte, on a CPU.     flags and variables: run_common.sh
# DATA=FILE for another text, STEPS for another length: two cores with AVX-512 bf16 take ten minutes for 300 steps.
# Expected, and measured with this program: with STEPS=2400, an hour, a validation loss of 1.557 nats a character at best, at
# step 1800 (dev/LOG.md); then it overfits.
# EXPLAIN=1 prints (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 11139072 (11.14M): matrices and tables 11108352, vectors 30720; in 9 buckets; padding 0
#   run: 300 steps x 4096 tokens = 1.229e+06 tokens of 7.037e+07 FLOPs = 8.647e+13 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 0.0 hours
#     H100 at 40% of 989 TFLOP/s in bf16: 0.0 hours
#   memory, in bytes
#     weights                          22278144       21.2 MiB  █▋
#     gradients                        44556288       42.5 MiB  ███▎
#     gradient of the tied head          393216        0.4 MiB  added to the table's once a step
#     master weights                   44556288       42.5 MiB  ███▎  float
#     optimizer moments                89112576       85.0 MiB  ██████▌  float
#     key/value cache                   2774016        2.6 MiB  ▎
#     activations (train)             345178888      329.2 MiB  █████████████████████████▏
#       live at B(0,6), the fullest moment
#       batch and losses                  65544        0.1 MiB
#       gradients of activations       40894464       39.0 MiB  ███
#       kept activations              284098560      270.9 MiB  ████████████████████▊
#       residual stream                18874368       18.0 MiB  █▍
#       workspace                       1245952        1.2 MiB  ▏
#     activations (evaluate)           54952704       52.4 MiB  ████
#       live at F(0,1), the fullest moment
#       batch and losses                  65536        0.1 MiB
#       kept activations               47349760       45.2 MiB  ███▌
#       residual stream                 6291456        6.0 MiB  ▌
#       workspace                       1245952        1.2 MiB  ▏
#     activations (generate)             560580        0.5 MiB
#       live at F(0,1), the fullest moment
#       batch and losses                   1220        0.0 MiB
#       kept activations                  12800        0.0 MiB
#       residual stream                    1536        0.0 MiB
#       workspace                        545024        0.5 MiB
#     total                           548849920      523.4 MiB  one allocation; plans share the passing bytes
GPUS=${GPUS:-0}
. "$(dirname "$0")/run_common.sh"
data=${DATA:-data/tinyshakespeare.txt}
[ -n "${DATA:-}" ] || fetch "$data" dev/data/tinyshakespeare.py
train --model tiny --layers 6 --heads 6 --channels 384 --precision bf16 --data "$data" \
    --seq 256 --micro-batch 16 --batch-tokens 4096 --steps "${STEPS:-300}" \
    --lr 1e-3 --min-lr 1e-4 --warmup 100 --weight-decay 0.1 --beta2 0.99 \
    --eval-every 200 --eval-tokens 111540 --sample-every 600 --sample-tokens 300 --save-every 200
