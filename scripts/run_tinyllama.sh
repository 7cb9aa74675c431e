#!/usr/bin/env bash
# TinyLlama 1.1B on 105 billion tokens of FineWeb-Edu.     flags and variables: run_common.sh; STEPS for another length
# Hyperparameters: arXiv:2401.02385 and github.com/jzhang38/TinyLlama, pretrain/tinyllama.py: 2048 positions, 2M tokens a
# step, 4e-4 falling to 4e-5 by a cosine, 2000 steps of warm-up, decay 0.1, betas 0.9 and 0.95, clipping at 1.
# What differs: their text is SlimPajama and StarCoder, and their cosine goes over 3 trillion tokens (1430512 steps).
# Expected: no published figure is of this text. Theirs after 105 billion tokens: HellaSwag 43.5 acc_norm (the model card of
# TinyLlama-1.1B-intermediate-step-50k-105b). Measured with this program: not yet.
# The text comes as parquet files, some 300 GB, and becomes 200 GB of shards or more; reading them needs pyarrow. GPUs of
# 40 GB hold it, 8 of them.
# EXPLAIN=1 prints (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 1100048384 (1100.05M): matrices and tables 1099956224, vectors 92160; in 24 buckets; padding 0
#   run: 50000 steps x 2097152 tokens = 1.049e+11 tokens of 7.154e+09 FLOPs = 7.501e+20 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 1669.7 hours, on 8 GPUs 208.7, $2922
#     H100 at 40% of 989 TFLOP/s in bf16: 526.7 hours, on 8 GPUs 65.8, $1843
#   memory of a rank, in MiB, by its place in the pipeline; a line stands for 8; 18 bytes a parameter, 7.5 on each of 8 ranks by ZeRO 1
#   bubble: ranks are idle 0.0% of a step
#     rank   persistent  activations        total  kept at once  layers
#        0       7876.5      21304.8      29181.3             1  0..23
#     the largest                   30598831360    29181.3 MiB  rank 0
#   rank 0 of 8
#   memory, in bytes
#     weights                        2201419776     2099.4 MiB  ██▉
#     gradients                      4402839552     4198.9 MiB  █████▊
#     master weights                  550354944      524.9 MiB  ▊  float
#     optimizer moments              1100709888     1049.7 MiB  █▌  float
#     constants                          524288        0.5 MiB  rotary tables, slopes
#     key/value cache                   3266560        3.1 MiB
#     activations (train)           22339715848    21304.8 MiB  █████████████████████████████▎
#       live at B(0,22), the fullest moment
#       batch and losses                4194312        4.0 MiB
#       gradients of activations      855638016      816.0 MiB  █▏
#       kept activations            19980353536    19054.8 MiB  ██████████████████████████▏
#       residual stream              1476395008     1408.0 MiB  █▉
#       workspace                      23134976       22.1 MiB
#     activations (evaluate)         1065812736     1016.4 MiB  █▍
#       live at F(0,1), the fullest moment
#       batch and losses                 262144        0.2 MiB
#       kept activations              908197888      866.1 MiB  █▏
#       residual stream               134217728      128.0 MiB  ▏
#       workspace                      23134976       22.1 MiB
#     activations (generate)             490068        0.5 MiB
#       live at F(0,1), the fullest moment
#       batch and losses                    596        0.0 MiB
#       kept activations                  56064        0.1 MiB
#       residual stream                    8192        0.0 MiB
#       workspace                        425216        0.4 MiB
#     total                         30598831360    29181.3 MiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
text=data/finewebedu100B_parquet shards=data/tinyllama
fetch data/llama2/tokenizer.model dev/data/tokenizer.py llama2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
fetch $shards/edu.json dev/data/fineweb.py --edu --100B --parquet --raw --out $text
build
fetch $shards/edu.json mkdir -p $shards
fetch $shards/edu.json "$program" --prepare $shards/edu.bin --data "$text/*.parquet" --tokenizer data/llama2 \
    --shard-tokens 100000000 --val-tokens 10485760
train --model tinyllama-1.1b --precision bf16 --data "$shards/edu_*.bin" --val $shards/edu.val.bin \
    --seq 2048 --micro-batch 8 --batch-tokens 2097152 --steps "${STEPS:-50000}" --zero 1 \
    --lr 4e-4 --min-lr 4e-5 --warmup 2000 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 1000 --eval-tokens 10485760 --sample-every 5000 --sample-tokens 144 --save-every 1000 \
    $(with_file data/llama2 --tokenizer data/llama2) $(with_file data/hellaswag_val.jsonl --evaluate hellaswag=data/hellaswag_val.jsonl)
