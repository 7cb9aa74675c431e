#!/usr/bin/env bash
# GPT-2 350M on 31.5 billion tokens of FineWeb, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_350M.sh. llm.c's micro-batch is 64; 32 adds up to the same
# batch, and fits 40 GB.
# Expected: what llm.c reached is not published where we could verify it; OpenAI's own model has a validation loss of
# 3.083 on this text and HellaSwag 37.5 by llm.c's count (llm.c, dev/vislog.ipynb). llm.c's time on 8 A100: 820 ms a step,
# 13.7 hours. Measured with this program: not yet.
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 354823168 (354.8M): matrices and tables 354501632, vectors 321536; in 27 buckets; padding 48128
#   run: 60000 steps x 524288 tokens = 31.5B tokens of 2.3B FLOPs = 7.172e19 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 159.6 hours, on 8 GPUs 20.0, $279
#     H100 at 40% of 989 TFLOP/s in bf16: 50.4 hours, on 8 GPUs 6.3, $176
#     activations (train)           26715398176     24.9 GiB  ████████████████████████████████████▏
#     total                         29600965120     27.6 GiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/fineweb100B/fineweb_train_000315.bin dev/data/fineweb.py --100B --shards 315
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2-medium --precision bf16 --data 'data/fineweb100B/fineweb_train_*.bin' \
    --val data/fineweb100B/fineweb_val_000000.bin \
    --seq 1024 --micro-batch 32 --batch-tokens 524288 --steps 60000 --zero 1 \
    --lr 3e-4 --min-lr 0 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 100000 --sample-tokens 144 --save-every 2000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) \
    $(with_file data/hellaswag_val.jsonl --eval hellaswag=data/hellaswag_val.jsonl)
