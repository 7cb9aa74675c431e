#!/usr/bin/env bash
# GPT-2 1558M on 33.5 billion tokens of FineWeb-Edu, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_1558M.sh and discussion 677. Data: 67 GB of shards.
# Expected: OpenAI's own HellaSwag by step 25000 (a summary of 677), 48.9 by llm.c's count and 50.9 acc_norm by EleutherAI's
# harness (llm.c, dev/data/hellaswag.py), which is our count; the validation loss on FineWeb-Edu is not published where we
# could verify it. llm.c's time on 8 H100: 2.8 s a step, 24 hours, $672. Measured with this program: not yet.
# A GPU of 80 GB holds it; 8 GPUs of 40 GB do with FLAGS="--micro-batch 8".
# EXPLAIN=1 prints (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 1557611200 (1557.61M): matrices and tables 1556609600, vectors 1001600; in 51 buckets; padding 75200
#   run: 32000 steps x 1048576 tokens = 3.355e+10 tokens of 9.818e+09 FLOPs = 3.294e+20 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 733.2 hours, on 8 GPUs 91.7, $1283
#     H100 at 40% of 989 TFLOP/s in bf16: 231.3 hours, on 8 GPUs 28.9, $810
#   memory of a rank, in MiB, by its place in the pipeline; a line stands for 8; 18 bytes a parameter, 7.5 on each of 8 ranks by ZeRO 1
#   bubble: ranks are idle 0.0% of a step
#     rank   persistent  activations        total  kept at once  layers
#        0      11501.2      39158.6      50659.8             1  0..49
#     the largest                   53120611584    50659.8 MiB  rank 0
#   rank 0 of 8
#   memory, in bytes
#     weights                        3118202880     2973.8 MiB  ██▍
#     gradients                      6236405760     5947.5 MiB  ████▊
#     gradient of the tied head       322043904      307.1 MiB  ▎  added to the table's once a step
#     master weights                  779550720      743.4 MiB  ▋  float
#     optimizer moments              1559101440     1486.9 MiB  █▏  float
#     key/value cache                  44544000       42.5 MiB
#     activations (train)           41060762376    39158.6 MiB  ██████████████████████████████▉
#       live at B(0,48), the fullest moment
#       batch and losses                2097160        2.0 MiB
#       gradients of activations      681574400      650.0 MiB  ▌
#       kept activations            37839962112    36087.0 MiB  ████████████████████████████▌
#       residual stream              2516582400     2400.0 MiB  █▉
#       workspace                      20546304       19.6 MiB
#     activations (evaluate)          913998592      871.7 MiB  ▊
#       live at F(0,1), the fullest moment
#       batch and losses                 262144        0.2 MiB
#       kept activations              788332544      751.8 MiB  ▋
#       residual stream               104857600      100.0 MiB  ▏
#       workspace                      20546304       19.6 MiB
#     activations (generate)             482132        0.5 MiB
#       live at F(0,1), the fullest moment
#       batch and losses                    596        0.0 MiB
#       kept activations                  49920        0.0 MiB
#       residual stream                    6400        0.0 MiB
#       workspace                        425216        0.4 MiB
#     total                         53120611584    50659.8 MiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/finewebedu100B/edu_fineweb_train_000336.bin dev/data/fineweb.py --edu --100B --shards 336
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2-xl --precision bf16 --data 'data/finewebedu100B/edu_fineweb_train_*.bin' --val data/finewebedu100B/edu_fineweb_val_000000.bin \
    --seq 1024 --micro-batch 16 --batch-tokens 1048576 --steps 32000 --zero 1 \
    --lr 6e-4 --min-lr 6e-5 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 300000 --sample-tokens 144 --save-every 2000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) $(with_file data/hellaswag_val.jsonl --evaluate hellaswag=data/hellaswag_val.jsonl)
