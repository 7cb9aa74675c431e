#!/usr/bin/env bash
# A Llama of 4.6M parameters on TinyStories (arXiv:2305.07759), byte by byte, on a CPU.     flags, variables: run_common.sh
# DATA=FILE for another text (without it the 22 MB that the authors keep for validation), STEPS for another length: two cores
# take ten minutes for 600. Expected: words and short sentences; no figure is published for bytes. Measured: not yet.
# EXPLAIN=1 prints (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 4558080 (4.56M): matrices and tables 4554752, vectors 3328; in 8 buckets; padding 0
#   run: 600 steps x 2048 tokens = 1.229e+06 tokens of 2.971e+07 FLOPs = 3.65e+13 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 0.0 hours
#     H100 at 40% of 989 TFLOP/s in bf16: 0.0 hours
#   memory, in bytes
#     weights                           9116160        8.7 MiB  █▉
#     gradients                        18232320       17.4 MiB  ███▊
#     master weights                   18232320       17.4 MiB  ███▊  float
#     optimizer moments                36464640       34.8 MiB  ███████▌  float
#     constants                           40448        0.0 MiB  rotary tables, slopes
#     key/value cache                    970752        0.9 MiB  ▎
#     activations (train)             111690760      106.5 MiB  ███████████████████████
#       live at B(0,6), the fullest moment
#       batch and losses                  32776        0.0 MiB
#       gradients of activations       14155776       13.5 MiB  ██▉
#       kept activations               90144768       86.0 MiB  ██████████████████▌
#       residual stream                 6291456        6.0 MiB  █▎
#       workspace                       1065984        1.0 MiB  ▎
#     activations (evaluate)           18220032       17.4 MiB  ███▊
#       live at F(0,1), the fullest moment
#       batch and losses                  32768        0.0 MiB
#       kept activations               15024128       14.3 MiB  ███▏
#       residual stream                 2097152        2.0 MiB  ▍
#       workspace                       1065984        1.0 MiB  ▎
#     activations (generate)             537840        0.5 MiB  ▏
#       live at F(0,1), the fullest moment
#       batch and losses                   1520        0.0 MiB
#       kept activations                 117760        0.1 MiB
#       residual stream                   16384        0.0 MiB
#       workspace                        402176        0.4 MiB  ▏
#     total                           194747904      185.7 MiB  one allocation; plans share the passing bytes
GPUS=${GPUS:-0}
. "$(dirname "$0")/run_common.sh"
data=${DATA:-data/tinystories/TinyStoriesV2-GPT4-valid.txt}
[ -n "${DATA:-}" ] || fetch "$data" dev/data/tinystories.py --val-only
train --model tiny-llama --layers 6 --heads 8 --kv-heads 4 --channels 256 --precision bf16 --data "$data" \
    --seq 256 --micro-batch 8 --batch-tokens 2048 --steps "${STEPS:-600}" \
    --lr 1e-3 --warmup 100 --weight-decay 0.1 \
    --eval-every 200 --eval-tokens 32768 --sample-every 200 --sample-tokens 300 --save-every 200 --prompt "Once upon a time"
