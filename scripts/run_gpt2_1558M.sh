#!/usr/bin/env bash
# GPT-2 1558M on 33.5 billion tokens of FineWeb-Edu, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_1558M.sh and discussion 677. Data: 67 GB of shards.
# Expected: OpenAI's own HellaSwag by step 25000 (a summary of 677), 48.9 by llm.c's count and 50.9 acc_norm by EleutherAI's
# harness (llm.c, dev/data/hellaswag.py), which is our count; the validation loss on FineWeb-Edu is not published where we
# could verify it. llm.c's time on 8 H100: 2.8 s a step, 24 hours, $672. Measured with this program: not yet.
# A GPU of 80 GB holds it; 8 GPUs of 40 GB do with FLAGS="--micro-batch 8".
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 1557611200 (1.6B): matrices and tables 1556609600, vectors 1001600; in 51 buckets; padding 75200
#   run: 32000 steps x 1048576 tokens = 33.6B tokens of 9.8B FLOPs = 3.294e20 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 733.2 hours, on 8 GPUs 91.7, $1283
#     H100 at 40% of 989 TFLOP/s in bf16: 231.3 hours, on 8 GPUs 28.9, $810
#     activations (train)           41044867616     38.2 GiB  ██████████████████████████████▉
#     total                         53104716800     49.5 GiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/finewebedu100B/edu_fineweb_train_000336.bin dev/data/fineweb.py --edu --100B --shards 336
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2-xl --precision bf16 --data 'data/finewebedu100B/edu_fineweb_train_*.bin' \
    --val data/finewebedu100B/edu_fineweb_val_000000.bin \
    --seq 1024 --micro-batch 16 --batch-tokens 1048576 --steps 32000 --zero 1 \
    --lr 6e-4 --min-lr 6e-5 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 300000 --sample-tokens 144 --save-every 2000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) \
    $(with_file data/hellaswag_val.jsonl --eval hellaswag=data/hellaswag_val.jsonl)
