#!/usr/bin/env bash
# TinyLlama 1.1B on 105 billion tokens of FineWeb-Edu.     flags and variables: run_common.sh; STEPS for another length
# Hyperparameters: arXiv:2401.02385 and github.com/jzhang38/TinyLlama, pretrain/tinyllama.py: 2048 positions, 2M tokens a
# step, 4e-4 falling to 4e-5 by a cosine, 2000 steps of warm-up, decay 0.1, betas 0.9 and 0.95, clipping at 1.
# What differs: their text is SlimPajama and StarCoder, and their cosine goes over 3 trillion tokens (1430512 steps).
# Expected: no published figure is of this text. Theirs after 105 billion tokens: HellaSwag 43.5 acc_norm (the model card of
# TinyLlama-1.1B-intermediate-step-50k-105b). Measured with this program: not yet.
# The text comes as parquet files, some 300 GB, and becomes 200 GB of shards or more; reading them needs pyarrow. GPUs of
# 40 GB hold it, 8 of them.
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 1100048384 (1.1B): matrices and tables 1099956224, vectors 92160; in 24 buckets; padding 0
#   run: 50000 steps x 2097152 tokens = 104.9B tokens of 7.2B FLOPs = 7.501e20 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 1669.7 hours, on 8 GPUs 208.7, $2922
#     H100 at 40% of 989 TFLOP/s in bf16: 526.7 hours, on 8 GPUs 65.8, $1843
#     activations (train)           22321184800     20.8 GiB  █████████████████████████████▎
#     total                         30580300288     28.5 GiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
text=data/finewebedu100B_parquet shards=data/tinyllama
fetch data/llama2/tokenizer.model dev/data/tokenizer.py llama2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
fetch $shards/edu.json dev/data/fineweb.py --edu --100B --parquet --raw --out $text
build
fetch $shards/edu.json mkdir -p $shards
fetch $shards/edu.json "$programs/prepare_gpt" --data "$text/*.parquet" --tokenizer data/llama2 \
    --shard-tokens 100000000 --val-tokens 10485760 $shards/edu.bin
train --model tinyllama-1.1b --precision bf16 --data "$shards/edu_*.bin" --val $shards/edu.val.bin \
    --seq 2048 --micro-batch 8 --batch-tokens 2097152 --steps "${STEPS:-50000}" --zero 1 \
    --lr 4e-4 --min-lr 4e-5 --warmup 2000 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 1000 --eval-tokens 10485760 --sample-every 5000 --sample-tokens 144 --save-every 1000 \
    $(with_file data/llama2 --tokenizer data/llama2) \
    $(with_file data/hellaswag_val.jsonl --eval hellaswag=data/hellaswag_val.jsonl)
