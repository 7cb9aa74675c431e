#!/usr/bin/env bash
# scripts/gpu_check.sh with stand-ins: no GPU at all, then a GPU whose programs are small scripts.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export RESULTS=$work/results
says() { # file, text
    grep -qF -- "$2" "$1" || { echo "it does not say: $2"; cat "$1"; exit 1; }
}
mkdir "$work/bin" "$work/none"

# without a GPU it runs to its end and says why nothing was done
printf '#!/bin/sh\nexit 1\n' >"$work/none/nvidia-smi"
chmod +x "$work/none/nvidia-smi"
PATH=$work/none:$PATH scripts/gpu_check.sh --prebuilt "$work/bin" >"$work/log"
says "$work/log" "skipped bench: no GPU answers"
says "$work/log" "0 passed, 0 failed, 9 skipped"
[ ! -e "$RESULTS" ]

# options it does not know
! scripts/gpu_check.sh --fast 2>"$work/log" || exit 1
says "$work/log" "error: --fast is no option"
! scripts/gpu_check.sh --only everything 2>"$work/log" || exit 1
says "$work/log" "error: no part is called everything"

# a GPU, and programs that print what the real ones print
program() { printf '#!/bin/sh\n%s\n' "$2" >"$work/bin/$1" && chmod +x "$work/bin/$1"; }
program nvidia-smi 'echo "Stand-in 1"'
program bench_kernels 'echo "{\"part\": \"norms\", \"what\": \"layernorm forward\", \"rate\": 12.5, \"unit\": \"GB/s\", \"share\": 0.5}"'
program test_kernels 'echo "3 passed, 0 failed"'
program ladder_matmul 'echo "rung 1: 12 TFLOP/s"'
program test_large 'echo "1 passed, 2 failed"; exit 1'
program train_gpt 'while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done; mkdir -p $out
for i in $(seq 50); do echo "{\"loss\":2.5,\"tokens_per_second\":$((1000 + i))}"; done >$out/log.jsonl'
export PATH=$work/bin:$PATH
check() { scripts/gpu_check.sh --prebuilt "$work/bin" "$@" >"$work/log"; }
check --only bench --only step --only agree --only kernels --only ladders
says "$work/log" "rung 1: 12 TFLOP/s"
says "$work/log" "ok      kernels: test_kernels: 3 passed, 0 failed"
says "$work/log" "skipped kernels: $work/bin/test_attention_kernels is not there"
says "$work/log" "ok      agree: 50 steps, losses differ by 0.0e+00 at most"
says "$work/log" "ok      bench: 1 figures"
says "$work/log" "ok      step: gpt2: 1043 tokens/s"
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | layernorm forward | 12.5 | GB/s | 0.5 |"
says "$RESULTS/gpu_Stand-in-1.md" "| step | step | gpt2-xl bf16, B=8 T=1024 | 1043 | tokens/s |  |"

# a part that runs again replaces its own figures and leaves the others
program bench_kernels 'echo "{\"part\": \"norms\", \"what\": \"layernorm forward\", \"rate\": 25.0, \"unit\": \"GB/s\", \"share\": 1.0}"'
check --only bench
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | layernorm forward | 25.0 | GB/s | 1.0 |"
says "$RESULTS/gpu_Stand-in-1.md" "| step | step | gpt2 bf16, B=32 T=1024 | 1043 |"
[ "$(grep -c layernorm "$RESULTS/gpu_Stand-in-1.json")" = 1 ]

# a test that fails is the script's failure
! check --only large || exit 1
says "$work/log" "FAIL    large: test_large"
echo "ok: scripts/gpu_check.sh"
