#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens of FineWeb, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_124M.sh and discussion 481.
# Expected, as others quote that discussion: a validation loss of about 3.29, HellaSwag 29.9 by llm.c's count. OpenAI's own
# model has 3.425 on this text (llm.c, dev/vislog.ipynb), and 29.6 by that count, 31.1 acc_norm by EleutherAI's harness
# (llm.c, dev/data/hellaswag.py), which is our count. llm.c's time on 8 A100: 300 ms a step, 94 minutes. Measured with this
# program: not yet.
# A GPU of 40 GB holds it; of 24 GB with FLAGS="--micro-batch 32".
# EXPLAIN=1 prints (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 124439808 (124.44M): matrices and tables 124318464, vectors 121344; in 15 buckets; padding 36096
#   run: 18865 steps x 524288 tokens = 9.891e+09 tokens of 8.033e+08 FLOPs = 7.945e+18 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 17.7 hours, on 8 GPUs 2.2, $31
#     H100 at 40% of 989 TFLOP/s in bf16: 5.6 hours, on 8 GPUs 0.7, $20
#   memory of a rank, in MiB, by its place in the pipeline; a line stands for 8; 18 bytes a parameter, 7.5 on each of 8 ranks by ZeRO 1
#   bubble: ranks are idle 0.0% of a step
#     rank   persistent  activations        total  kept at once  layers
#        0       1045.0      19733.6      20778.5             1  0..13
#     the largest                   21787874560    20778.5 MiB  rank 0
#   rank 0 of 8
#   memory, in bytes
#     weights                         249561088      238.0 MiB  ▌
#     gradients                       499122176      476.0 MiB  ▉
#     gradient of the tied head       154533888      147.4 MiB  ▎  added to the table's once a step
#     master weights                   62390272       59.5 MiB  ▏  float
#     optimizer moments               124780544      119.0 MiB  ▎  float
#     key/value cache                   5345280        5.1 MiB
#     activations (train)           20692140808    19733.6 MiB  ██████████████████████████████████████
#       live at B(0,12), the fullest moment
#       batch and losses                1048584        1.0 MiB
#       gradients of activations     1308622848     1248.0 MiB  ██▍
#       kept activations            18169724928    17328.0 MiB  █████████████████████████████████▍
#       residual stream              1207959552     1152.0 MiB  ██▎
#       workspace                       4784896        4.6 MiB
#     activations (evaluate)         1721303808     1641.6 MiB  ███▏
#       live at F(0,1), the fullest moment
#       batch and losses                1048576        1.0 MiB
#       kept activations             1514143744     1444.0 MiB  ██▊
#       residual stream               201326592      192.0 MiB  ▍
#       workspace                       4784896        4.6 MiB
#     activations (generate)             453204        0.4 MiB
#       live at F(0,1), the fullest moment
#       batch and losses                    596        0.0 MiB
#       kept activations                  24320        0.0 MiB
#       residual stream                    3072        0.0 MiB
#       workspace                        425216        0.4 MiB
#     total                         21787874560    20778.5 MiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/fineweb10B/fineweb_train_000103.bin dev/data/fineweb.py --shards 103
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2 --precision bf16 --data 'data/fineweb10B/fineweb_train_*.bin' --val data/fineweb10B/fineweb_val_000000.bin \
    --seq 1024 --micro-batch 64 --batch-tokens 524288 --steps 18865 --zero 1 \
    --lr 6e-4 --min-lr 0 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 20000 --sample-tokens 144 --save-every 5000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) $(with_file data/hellaswag_val.jsonl --evaluate hellaswag=data/hellaswag_val.jsonl)
