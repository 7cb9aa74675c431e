#!/usr/bin/env bash
# Two builds of the program compute the same bytes: losses, logs and exports over many layouts.
# usage: test/same_bytes.sh OLD NEW [NAME]      programs; NAME: only the layouts whose flags have it
#   Before a change that must keep behaviour: git worktree add ../before; make -C ../before; then
#   test/same_bytes.sh ../before/build/train_gpt build/train_gpt. Last line: N passed, N failed.
set -u
cd "$(dirname "$0")/.."
old=$(realpath "$1") new=$(realpath "$2") only=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1
passed=0 failed=0

# What a run leaves, without times and paths.
trace() { # program, folder, flags
    local program=$1 folder=$2
    shift 2
    mkdir -p "$folder"
    "$program" --data dev/LOG.md --seq 32 --micro-batch 2 --steps 6 --seed 3 --device cpu --clip 0.5 \
        --layers 4 --eval-every 3 --eval-tokens 256 --out "$folder/run" --export "$folder/export" \
        --sample-tokens 8 --temperature 0 --prompt "The " "$@" >"$folder/said" 2>&1 || echo "exit $?" >>"$folder/said"
    grep -oE '^step +[0-9/]+ \| loss [0-9.]+ \| norm [0-9.]+|^.*val loss.*|^exit .*' "$folder/said" |
        sed -E 's/ \| [0-9.]+ m?s.*//; s/ in [0-9.]+m?s//; s/\([0-9.]+ m?s\)//' >"$folder/losses"
    sed -E 's/"(ms|tokens_per_second|mfu|time|seconds)": ?[0-9.e+-]+,? ?//g; /"config"/d; /"flags"/d; /"wall"/d' \
        "$folder/run/log.jsonl" >"$folder/log" 2>/dev/null
}

compare() { # flags
    [[ -z $only || "$*" == *"$only"* ]] || return
    rm -rf "$work"/*
    trace "$old" "$work/old" "$@"
    trace "$new" "$work/new" "$@"
    local wrong=""
    [ -s "$work/old/losses" ] && ! grep -q '^exit' "$work/old/losses" || wrong="the old program does not run"
    cmp -s "$work"/{old,new}/losses || wrong="losses differ"
    cmp -s "$work"/{old,new}/log || wrong="logs differ"
    cmp -s "$work"/{old,new}/export/model.safetensors || wrong="exports differ"
    if [ -z "$wrong" ]; then
        passed=$((passed + 1))
        echo "ok   $*"
    else
        failed=$((failed + 1))
        echo "FAIL $*: $wrong"
        tail -n 3 "$work"/{old,new}/said
    fi
}

llama="--model tiny-llama"
compare --model tiny
compare --model tiny --precision bf16 --recompute selective
compare $llama --precision bf16 --recompute full
compare $llama --optimizer sgd --lr 0.1
compare --model tiny --batch-tokens 256 --schedule wsd --warmup 2
compare $llama --documents mask --document-end 10
compare --model tiny --local-ranks 2 --dp 2
compare --model tiny --local-ranks 2 --dp 2 --zero 1
compare $llama --local-ranks 2 --dp 2 --zero 2 --batch-tokens 256
compare --model tiny --local-ranks 3 --dp 3 --zero 3
compare $llama --local-ranks 4 --dp 4 --zero 3 --zero-group 2 --precision bf16
compare --model tiny --local-ranks 2 --tp 2
compare $llama --local-ranks 4 --tp 4 --sequence-parallel
compare --model tiny --local-ranks 2 --tp 2 --sequence-parallel --recompute selective --precision bf16
compare --model tiny --local-ranks 2 --pp 2 --batch-tokens 512
compare $llama --local-ranks 2 --pp 2 --pipeline interleaved --chunks 2 --batch-tokens 512
compare --model tiny --local-ranks 4 --pp 4 --pipeline zero-bubble --batch-tokens 512 --zero 1
compare $llama --local-ranks 4 --pp 2 --tp 2 --batch-tokens 256 --sequence-parallel
compare --model tiny --local-ranks 8 --pp 2 --tp 2 --dp 2 --zero 2 --batch-tokens 256 --recompute full
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
