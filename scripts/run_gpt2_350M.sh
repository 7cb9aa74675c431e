#!/usr/bin/env bash
# GPT-2 350M on 31.5 billion tokens of FineWeb, as llm.c trains it.     flags and variables: run_common.sh
# Hyperparameters: github.com/karpathy/llm.c, scripts/run_gpt2_350M.sh. llm.c's micro-batch is 64; 32 adds up to the same
# batch, and fits 40 GB.
# Expected: what llm.c reached is not published where we could verify it; OpenAI's own model has a validation loss of
# 3.083 on this text and HellaSwag 37.5 by llm.c's count (llm.c, dev/vislog.ipynb). llm.c's time on 8 A100: 820 ms a step,
# 13.7 hours. Measured with this program: not yet.
# EXPLAIN=1 prints (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 354823168 (354.82M): matrices and tables 354501632, vectors 321536; in 27 buckets; padding 48128
#   run: 60000 steps x 524288 tokens = 3.146e+10 tokens of 2.28e+09 FLOPs = 7.172e+19 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 159.6 hours, on 8 GPUs 20.0, $279
#     H100 at 40% of 989 TFLOP/s in bf16: 50.4 hours, on 8 GPUs 6.3, $176
#   memory of a rank, in MiB, by its place in the pipeline; a line stands for 8; 18 bytes a parameter, 7.5 on each of 8 ranks by ZeRO 1
#   bubble: ranks are idle 0.0% of a step
#     rank   persistent  activations        total  kept at once  layers
#        0       2751.9      25478.5      28230.4             1  0..25
#     the largest                   29601728000    28230.4 MiB  rank 0
#   rank 0 of 8
#   memory, in bytes
#     weights                         710737920      677.8 MiB  █
#     gradients                      1421475840     1355.6 MiB  █▉
#     gradient of the tied head       206045184      196.5 MiB  ▎  added to the table's once a step
#     master weights                  177684480      169.5 MiB  ▎  float
#     optimizer moments               355368960      338.9 MiB  ▌  float
#     key/value cache                  14254080       13.6 MiB
#     activations (train)           26716161032    25478.5 MiB  ████████████████████████████████████▏
#       live at B(0,24), the fullest moment
#       batch and losses                1048584        1.0 MiB
#       gradients of activations      872415232      832.0 MiB  █▏
#       kept activations            24222105600    23100.0 MiB  ████████████████████████████████▊
#       residual stream              1610612736     1536.0 MiB  ██▏
#       workspace                       9978880        9.5 MiB
#     activations (evaluate)         1153975296     1100.5 MiB  █▌
#       live at F(0,1), the fullest moment
#       batch and losses                 524288        0.5 MiB
#       kept activations             1009254400      962.5 MiB  █▍
#       residual stream               134217728      128.0 MiB  ▏
#       workspace                       9978880        9.5 MiB
#     activations (generate)             461908        0.4 MiB
#       live at F(0,1), the fullest moment
#       batch and losses                    596        0.0 MiB
#       kept activations                  32000        0.0 MiB
#       residual stream                    4096        0.0 MiB
#       workspace                        425216        0.4 MiB
#     total                         29601728000    28230.4 MiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
fetch data/fineweb100B/fineweb_train_000315.bin dev/data/fineweb.py --100B --shards 315
fetch data/gpt2/encoder.json dev/data/tokenizer.py gpt2
fetch data/hellaswag_val.jsonl dev/data/hellaswag.py || echo "$name: going on without HellaSwag"
train --model gpt2-medium --precision bf16 --data 'data/fineweb100B/fineweb_train_*.bin' --val data/fineweb100B/fineweb_val_000000.bin \
    --seq 1024 --micro-batch 32 --batch-tokens 524288 --steps 60000 --zero 1 \
    --lr 3e-4 --min-lr 0 --warmup 700 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --eval-every 250 --eval-tokens 10485760 --sample-every 100000 --sample-tokens 144 --save-every 2000 \
    $(with_file data/gpt2 --tokenizer data/gpt2) $(with_file data/hellaswag_val.jsonl --evaluate hellaswag=data/hellaswag_val.jsonl)
