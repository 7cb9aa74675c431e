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
says "$work/log" "0 passed, 0 failed, 10 skipped"
says "$work/log" "next: the same where nvidia-smi names a GPU"
[ ! -e "$RESULTS" ]

# options it does not know
! scripts/gpu_check.sh --fast 2>"$work/log" || exit 1
says "$work/log" "error: --fast is no option"
! scripts/gpu_check.sh --only everything 2>"$work/log" || exit 1
says "$work/log" "error: no part is called everything"

# a GPU, and programs that print what the real ones print
program() { printf '#!/bin/sh\n%s\n' "$2" >"$work/bin/$1" && chmod +x "$work/bin/$1"; }
program nvidia-smi 'for a; do case $a in -L) cat "$GPUS_HERE"; exit ;; *=driver_version) echo 580.1; exit ;; esac; done; echo "Stand-in 1"'
export GPUS_HERE=$work/gpus
echo "GPU 0" >"$work/gpus"
program bench_kernels 'echo "{\"part\": \"norms\", \"what\": \"layernorm forward\", \"rate\": 12.5, \"unit\": \"GB/s\", \"share\": 0.5}"'
program test_kernels 'echo "3 passed, 0 failed"'
program ladder_matmul 'echo "rung 1: 12 TFLOP/s"'
program test_large 'echo "1 passed, 2 failed"; exit 1'
program train_gpt 'while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; [ "$1" = --data ] && data=$2; shift; done
[ ! -e "$(dirname "$0")/slow" ] || sleep 5
[ -n "$data" ] || { echo "no --data"; exit 1; }
mkdir -p $out
for i in $(seq ${STEPS:-50}); do echo "{\"loss\":${LOSS:-2.5},\"tokens_per_second\":$((1000 + i))}"; done >$out/log.jsonl'
export PATH=$work/bin:$PATH
echo "commit abc1234, CUDA 13.0" >"$work/bin/built"
origin="$(date -u +%F), commit abc1234, CUDA 13.0, driver 580.1"
check() { scripts/gpu_check.sh --prebuilt "$work/bin" "$@" >"$work/log"; }
check --only bench --only step --only agree --only kernels --only ladders
says "$work/log" "rung 1: 12 TFLOP/s"
says "$work/log" "ok      kernels: test_kernels: 3 passed, 0 failed"
says "$work/log" "skipped kernels: $work/bin/test_attention_kernels is not there"
says "$work/log" "ok      agree: 50 steps, losses differ by 0.0e+00 at most"
says "$work/log" "ok      agree: graphs: 50 steps, losses differ by 0.0e+00 at most"
says "$work/log" "ok      bench: 1 figures"
says "$work/log" "ok      step: gpt2: 1043 tokens/s"
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | layernorm forward | 12.5 | GB/s | 0.5 | $origin |"
says "$RESULTS/gpu_Stand-in-1.md" "| step | step | gpt2-xl bf16, B=8 T=1024 | 1043 | tokens/s |  | $origin |"
says "$RESULTS/gpu_Stand-in-1.md" "| step | step | gpt2 bf16, B=1 T=1024 --graphs | 1043 | tokens/s |  | $origin |"
# the machine goes: verdicts and ladders stay beside the figures
says "$RESULTS/gpu_Stand-in-1.log" "ok      kernels: test_kernels: 3 passed, 0 failed"
says "$RESULTS/gpu_Stand-in-1.log" "rung 1: 12 TFLOP/s"

# figures that come again replace those of their name and leave the others, with what those are from; one program
# of another commit fails before its end
echo "commit def5678, CUDA 13.0" >"$work/bin/built"
program bench_kernels 'echo "{\"part\": \"norms\", \"what\": \"layernorm forward\", \"rate\": 25.0, \"unit\": \"GB/s\", \"share\": 1.0}"'
check --only bench
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | layernorm forward | 25.0 | GB/s | 1.0 |"
says "$RESULTS/gpu_Stand-in-1.md" "| step | step | gpt2 bf16, B=32 T=1024 | 1043 |"
says "$RESULTS/gpu_Stand-in-1.md" "1043 | tokens/s |  | $origin |"
[ "$(grep -c layernorm "$RESULTS/gpu_Stand-in-1.json")" = 1 ]
program bench_kernels 'echo "{\"part\": \"norms\", \"what\": \"rmsnorm forward\", \"rate\": 7.0, \"unit\": \"GB/s\"}"; exit 1'
! check --only bench || exit 1
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | rmsnorm forward | 7.0 | GB/s |  | ${origin/abc1234/def5678} |"
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | layernorm forward | 25.0 | GB/s | 1.0 |"
program bench_kernels 'exit 1'
! check --only bench || exit 1
says "$RESULTS/gpu_Stand-in-1.md" "| bench | norms | rmsnorm forward | 7.0 |"

# minutes that are over: what runs is ended, what follows is not begun, and neither is a failure
! check --minutes soon 2>"$work/err" || exit 1
says "$work/err" "error: --minutes soon is no whole number"
check --minutes 0 --only bench
says "$work/log" "skipped bench: the 0 minutes are over"

# a test that fails is the script's failure
! check --only large || exit 1
says "$work/log" "FAIL    large: test_large"

says "$work/log" "next: mend the first FAIL, then repeat it with --only large"

# a program that takes too long, and one that finds no GPU
touch "$work/bin/slow"
! LIMIT=1 check --only agree || exit 1
says "$work/log" "FAIL    agree: training on cpu: more than 1 s"
rm "$work/bin/slow"
program test_attention_sm90 'echo "skipped: no GPU answers (the driver is old)"; echo "0 passed, 0 failed, 1 skipped"'
! check --only kernels || exit 1
says "$work/log" "FAIL    kernels: test_attention_sm90: skipped: no GPU answers (the driver is old)"
rm "$work/bin/test_attention_sm90"

# each sanitizer looks at each table that is there, for a limited time
program compute-sanitizer '[ "$2" != racecheck ] || { echo "========= hazard"; exit 9; }; [ "$2" != synccheck ] || sleep 5; shift 4; "$@"'
! LIMIT=1 check --only sanitizer || exit 1
says "$work/log" "ok      sanitizer: memcheck: test_kernels 'bf16'"
says "$work/log" "FAIL    sanitizer: racecheck: test_kernels 'bf16'"
says "$work/log" "========= hazard"
says "$work/log" "skipped sanitizer: synccheck: test_kernels 'bf16': more than 1 s; 0 rows were right"
says "$work/log" "skipped sanitizer: $work/bin/test_attention_kernels is not there"

# two GPUs: what is missing, then layouts that agree with one GPU, and one that does not
check --only multi
says "$work/log" "skipped multi: one GPU answers"
echo "GPU 1" >>"$work/gpus"
program mpirun '[ "$1 $2" = "-np 2" ] || exit 1; shift 2; case "$*" in *--pp*) LOSS=2.6 "$@" ;; *) "$@" ;; esac'
check --only multi
says "$work/log" "skipped multi: $work/bin/train_gpt is built without NCCL"
program ldd 'echo "    libnccl.so.2 => /lib/libnccl.so.2"'
program test_comm 'echo "passed with 2 ranks"'
! STEPS=20 check --only multi || exit 1
says "$work/log" "ok      multi: test_comm: passed with 2 ranks"
says "$work/log" "ok      multi: --dp 2: 20 steps, losses differ by 0.0e+00 at most"
says "$work/log" "ok      multi: --tp 2 --sequence-parallel: 20 steps"
says "$work/log" "ok      multi: --dp 2 --zero 3: 20 steps"
says "$work/log" "FAIL    multi: --pp 2: 20 steps, losses differ by 4.0e-02 at most, 1e-4 allowed"
rm "$work/bin/ldd"

# a C library that is too old
program ldd 'printf "libc.so.6: version \140GLIBC_2.99\047 not found (required by %s)\n" "$1" >&2'
check --only large
says "$work/log" "skipped large: $work/bin/test_large misses GLIBC_2.99"
rm "$work/bin/ldd"

# CUDA's libraries are found where PyTorch has brought them
mkdir -p "$work/nvidia/cu13/lib"
program python3 "PYTHONPATH=$work exec $(command -v python3) \"\$@\""
program test_large 'echo "$LD_LIBRARY_PATH"'
check --only large
says "$work/log" "$work/nvidia/cu13/lib"
rm "$work/bin/python3"

# a library that this machine has not
echo 'int nobody_has() { return 0; }' | g++ -shared -fPIC -x c++ - -o "$work/libnobody.so"
echo 'int nobody_has(); int main() { return nobody_has(); }' | g++ -x c++ - -o "$work/bin/test_device" -L"$work" -lnobody
check --only kernels
says "$work/log" "skipped kernels: $work/bin/test_device misses libnobody.so"
echo "ok: scripts/gpu_check.sh"
