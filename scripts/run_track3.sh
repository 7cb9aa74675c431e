#!/usr/bin/env bash
# Track 3 of modded-nanogpt: 162M parameters to a validation loss of 3.28.     flags and variables: run_common.sh
# usage: scripts/run_track3.sh [muon|normuon|adamw]
# Hyperparameters: github.com/KellerJordan/modded-nanogpt, records/track_3_optimization, results 36, 10 and 2. Expected:
# 3.2787 in 3250 steps by Muon, 3.2789 by NorMuon (of 3300), 3.2790 in 5625 by AdamW. dev/curves has each curve with its
# spread, and --expect says at each validation whether the run is inside. Measured with this program: not yet.
# The same there: the shards' order, windows, batch, schedule, groups of rates, validation, precision of products.
# Losses are summed there, means here: gradients are 524288 times smaller. Muon divides by their norm and AdamW by their
# root mean square, so both take the same steps if AdamW's eps is as much smaller: 1e-10 / 524288.
# Not the same: masters and moments of the table are float, there bf16; AdamW there began with random biases, and drew
# matrices evenly from an interval of the same variance.
# EXPLAIN=1 prints, among other lines (with a CPU's workspace; a GPU's takes 0.1 to 0.2 GiB more):
#   parameters 162354816 (162.4M): matrices and tables 162201600, vectors 153216; in 14 buckets; padding 0
#   run: 3250 steps x 524288 tokens = 1.7B tokens of 1.0B FLOPs = 1.756e18 FLOPs
#     A100 at 40% of 312 TFLOP/s in bf16: 3.9 hours, on 8 GPUs 0.5, $7
#     H100 at 40% of 989 TFLOP/s in bf16: 1.2 hours, on 8 GPUs 0.2, $4
#     activations (train)           23436466208     21.8 GiB  ██████████████████████████████████████▏
#     total                         24614430208     22.9 GiB  one allocation; plans share the passing bytes
. "$(dirname "$0")/run_common.sh"
optimizer=${1:-muon}
name=track3_$optimizer
case $optimizer in
muon)
    rules="--steps 3250 --warmup 0 --lr 0.025 --weight-decay 0.05 --beta1 0.8 --optimizer muon,ns=convergent"
    rules+=",scale=shape,momentum=0.95,table=0.7,head=0.004,vectors=0.015,decay=0.001,decay-vectors"
    ;;
normuon)
    rules="--steps 3300 --warmup 0 --lr 0.035 --weight-decay 0.025 --beta1 0.8 --optimizer muon,ns=convergent"
    rules+=",scale=shape,momentum=0.95,normuon=0.95,table=0.3,head=0.003125,vectors=0.01,decay=0"
    ;;
adamw)
    rules="--steps 5625 --warmup 250 --lr 0.0015 --weight-decay 0.1 --beta1 0.9"
    rules+=" --optimizer adamw,table=0.3,head=0.003125,vectors=0.01,decay=0,beta1=0.8"
    ;;
*) fail "$optimizer is none of muon, normuon, adamw" ;;
esac
fetch data/fineweb10B/fineweb_train_000030.bin dev/data/fineweb.py --shards 30
train --model track3 --precision bf16 --data 'in-order:data/fineweb10B/fineweb_train_*.bin' \
    --val data/fineweb10B/fineweb_val_000000.bin \
    --seq 1024 --micro-batch 64 --batch-tokens 524288 --zero 1 \
    $rules --min-lr 0 --schedule wsd:0.7 --beta2 0.95 --eps 1.9073486328125e-16 --clip 0 \
    --eval-every 125 --eval-tokens 10485760 --expect "dev/curves/track3_$optimizer.txt" \
    --sample-tokens 0 --save-every 1000
