#!/usr/bin/env bash
# GPT-2 774M on 150 billion tokens of FineWeb, 1.5 epochs, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_774M.sh and discussion 580. Data: 206 GB of shards.
# Expected: what llm.c reached is in discussion 580, which we could not read; OpenAI's own model has a validation loss of
# 3.001 on this text and HellaSwag 43.2 by llm.c's count (llm.c, dev/vislog.ipynb). llm.c's time on 8 A100: 1.7 s a step,
# 135 hours. Measured with this program: not yet. A GPU of 80 GB holds it; of 40 GB with FLAGS="--micro-batch 16".
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 774030080 (774.0M): matrices and tables 773428480, vectors 601600; in 39 buckets; padding 60160
#   run: 286102 steps x 524288 tokens = 150.0B tokens of 4.9B FLOPs = 7.391e20 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 1645.1 hours, on 8 GPUs 205.6, $2879
#     H100 at 40% of 989 TFLOP/s in bf16: 519.0 hours, on 8 GPUs 64.9, $1816
#     activations (train)           49532422176     46.1 GiB  ███████████████████████████████████▋
#     total                         55626963456     51.8 GiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/fineweb100B/fineweb_train_001030.bin dev/data/fineweb.py --100B --shards 1030
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2-large --precision bf16 --data 'data/fineweb100B/fineweb_train_*.bin' \
    --val data/fineweb100B/fineweb_val_000000.bin \
    --seq 1024 --micro-batch 32 --batch-tokens 524288 --steps 286102 --zero 1 \
    --lr 2.5e-4 --min-lr 0 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 300000 --sample-tokens 144 --save-every 4000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) \
    $(with_file data/hellaswag_val.jsonl --eval hellaswag=data/hellaswag_val.jsonl)
