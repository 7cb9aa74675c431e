#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens of FineWeb, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_124M.sh and discussion 481.
# Expected, as others quote that discussion: a validation loss of about 3.29, HellaSwag 29.9 by llm.c's count. OpenAI's own
# model has 3.425 on this text (llm.c, dev/vislog.ipynb), and 29.6 by that count, 31.1 acc_norm by EleutherAI's harness
# (llm.c, dev/data/hellaswag.py), which is our count. llm.c's time on 8 A100: 300 ms a step, 94 minutes. Measured with this
# program: not yet.
# A GPU of 40 GB holds it; of 24 GB with FLAGS="--micro-batch 32".
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 124439808 (124.4M): matrices and tables 124318464, vectors 121344; in 15 buckets; padding 36096
#   run: 18865 steps x 524288 tokens = 9.9B tokens of 803.3M FLOPs = 7.945e18 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 17.7 hours, on 8 GPUs 2.2, $31
#     H100 at 40% of 989 TFLOP/s in bf16: 5.6 hours, on 8 GPUs 0.7, $20
#     activations (train)           20705736736     19.3 GiB  ██████████████████████████████████████
#     total                         21801470464     20.3 GiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/fineweb10B/fineweb_train_000103.bin dev/data/fineweb.py --shards 103
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2 --precision bf16 --data 'data/fineweb10B/fineweb_train_*.bin' \
    --val data/fineweb10B/fineweb_val_000000.bin \
    --seq 1024 --micro-batch 64 --batch-tokens 524288 --steps 18865 --zero 1 \
    --lr 6e-4 --min-lr 0 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 20000 --sample-tokens 144 --save-every 5000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) \
    $(with_file data/hellaswag_val.jsonl --eval hellaswag=data/hellaswag_val.jsonl)
