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
silent() { # file, text
    ! grep -qF -- "$2" "$1" || { echo "it says: $2"; cat "$1"; exit 1; }
}
mkdir "$work/bin" "$work/none"

# without a GPU it says so and writes nothing
printf '#!/bin/sh\nexit 1\n' >"$work/none/nvidia-smi"
chmod +x "$work/none/nvidia-smi"
PATH=$work/none:$PATH scripts/gpu_check.sh --prebuilt "$work/bin" >"$work/log"
says "$work/log" "skipped: no GPU answers"
says "$work/log" "next: the same where nvidia-smi names a GPU"
[ ! -e "$RESULTS" ]

# options it does not know
! scripts/gpu_check.sh --fast 2>"$work/log" || exit 1
says "$work/log" "error: --fast is no option"
! scripts/gpu_check.sh --only everything 2>"$work/log" || exit 1
says "$work/log" "error: no part is called everything: machine kernels agree step"
! scripts/gpu_check.sh --lease soon 2>"$work/log" || exit 1
says "$work/log" "error: --lease soon is no whole number"

# A GPU, and programs that print what the real ones print.
program() { printf '#!/bin/bash\n%s\n' "$2" >"$work/bin/$1" && chmod +x "$work/bin/$1"; }
program nvidia-smi 'for a; do case $a in -L) cat "$GPUS_HERE"; exit ;; *=driver_version) echo 580.1; exit ;; esac; done; echo "Stand-in 1"'
export GPUS_HERE=$work/gpus
echo "GPU 0" >"$work/gpus"
program bench_kernels 'echo "{\"part\": \"$1\", \"what\": \"${WHAT:-layernorm forward}\", \"rate\": ${RATE:-12.5}, \"unit\": \"GB/s\", \"share\": 0.5}"; exit ${STATUS:-0}'
# A kernel table of the rows in ROWS, one a line: NAME, or NAME=what goes wrong.
cat >"$work/bin/test_kernels" <<'END'
#!/bin/bash
while [ $# -gt 0 ]; do
    case $1 in --after) after=$2; shift ;; --limit) limit=$2; shift ;; *) filter=$1 ;; esac
    shift
done
echo "seed 1"
while IFS== read -r name wrong; do
    if [ -n "${after:-}" ]; then [ "$name" != "$after" ] || after=; continue; fi
    [[ $name == *"${filter:-}"* ]] || continue
    echo "run $name"
    case $wrong in
    dies) echo "train_gpt: error: CUDA says: $name"; exit 1 ;;
    crashes) kill -SEGV $$ ;;
    hangs) sleep "$limit"; kill -ALRM $$ ;;
    sleeps) sleep 600 ;;
    wrong) for i in $(seq 40); do echo "element $i"; done; echo "FAIL $name: 3 checks, 1 failed (0.1 s)" ;;
    *) echo "ok $name: 3 checks, 0 failed (0.1 s)" ;;
    esac
done <<<"${ROWS:-attention bf16}"
echo "1 passed, 0 failed"
[[ ${ROWS:-} != *=wrong* ]]
END
chmod +x "$work/bin/test_kernels"
for name in test_attention_kernels test_attention_sm90 test_large; do cp "$work/bin/test_kernels" "$work/bin/$name"; done
program test_device 'echo "[  PASSED  ] 3 tests."'
program ladder_matmul 'echo "rung 1: 12 TFLOP/s"'
program train_gpt 'out=/dev/null
while [ $# -gt 0 ]; do [ "$1" = --out ] && mkdir -p $2 && out=$2/log.jsonl; [ "$1" = --data ] && data=$2; shift; done
[ ! -e "$(dirname "$0")/slow" ] || sleep 600
[ -n "$data" ] || { echo "no --data"; exit 1; }
for i in $(seq ${STEPS:-50}); do
    echo "{\"loss\":${LOSS:-2.5}}" >>$out
    echo "step $i/20 | loss 2.5 | norm 7.87 | lr 5.0e-05 | $((200 - i)).5 ms | 284 tok/s | mfu 61.0% | eta 0s"
done'
program python3 'case $1 in -c) ;; *) echo "{\"part\": \"$2\", \"what\": \"of PyTorch\", \"rate\": 3, \"unit\": \"GB/s\"}" ;; esac'
program ncu 'echo "==PROF== Connected"; [ -z "${NCU_FAILS:-}" ] || { echo "==ERROR== no permission"; exit 1; }; [[ "$*" == *"--kill yes"* ]] && echo "  Duration  us  12.3  $*"'
program compute-sanitizer '[ "$2" != racecheck ] || { echo "========= hazard"; exit 9; }; [ "$2" != synccheck ] || sleep 600; shift 4; "$@"'
program mpirun '[ "$1 $2" = "-np 2" ] || exit 1; shift 2; case "$*" in *--pp*) LOSS=2.6 "$@" ;; *) "$@" ;; esac'
export PATH=$work/bin:$PATH
echo "commit abc1234, CUDA 13.0" >"$work/bin/built"
origin="$(date -u +%F), commit abc1234, CUDA 13.0, driver 580.1"
check() { scripts/gpu_check.sh --prebuilt "$work/bin" "$@" >"$work/log"; }
page=$RESULTS/gpu_Stand-in-1.md full=$RESULTS/gpu_Stand-in-1.full.log verdicts=$RESULTS/gpu_Stand-in-1.log

# The sixteen rows within a lease, in their order; figures, verdicts and all that was printed are in RESULTS.
check --lease 480 --only machine --only kernels --only agree --only step --only bench --only peers --only llmc \
    --only profile --only large
says "$work/log" "ok      machine: "
says "$work/log" "ok      table test_kernels: 1 rows"
says "$work/log" "ok      agree: 50 steps, losses differ by 0.0e+00 at most"
says "$work/log" "ok      agree: graphs: 50 steps, losses differ by 0.0e+00 at most"
says "$work/log" "ok      step: gpt2 bf16, B=32 T=1024: 210727 tokens/s"
says "$work/log" "ok      bench fp8: 1 figures"
says "$work/log" "ok      peers gpt2: 1 figures"
says "$work/log" "skipped llmc: $work/bin/peer/train_gpt2cu is not there"
says "$work/log" "ok      passes test_device: [  PASSED  ] 3 tests."
says "$work/log" "ok      table test_large 'attention bf16': 1 rows"
says "$page" "| bench | norms | layernorm forward | 12.5 | GB/s | 0.5 | $origin |"
says "$page" "| peers | gpt2 | of PyTorch | 3 | GB/s |  | $origin |"
says "$page" "| step | step | gpt2-xl bf16, B=8 T=1024 | 52682 | tokens/s |  | $origin |"
says "$page" "| step | step | gpt2 bf16, B=1 T=1024 --graphs | 6585 | tokens/s |  | $origin |"
says "$verdicts" "ok      table test_kernels: 1 rows"
says "$full" "attention_hopper_forward_kernel.*128"
says "$full" "ok attention bf16: 3 checks"
[ "$(find "$RESULTS" -type f | wc -l)" = 4 ]
rows=$(sed -n 's/^=== row \([0-9]*\): .*/\1/p' "$full" | uniq | paste -sd' ')
[ "$rows" = "0 1 2 3 4 5 6 7 9 10 11 12 13 14 15 16 17 19" ] || { echo "rows in another order: $rows"; exit 1; }

# llm.c, where it was built, and our steps on its tokens
mkdir "$work/bin/peer"
touch "$work/bin/peer/tokens_train.bin"
program peer/train_gpt2cu '[ "$1 $2" = "-i $(dirname "$0")/tokens_train.bin" ] || exit 1
for i in $(seq 20); do echo "step $i/20 | loss 9 (+nanz)| norm 1 (+nanz)| lr 3e-04 | $((90 + i)).5 ms | 40% bf16 MFU | 1 tok/s"; done'
program train_gpt "$(sed 1d "$work/bin/train_gpt")
echo \"data \$data\""
check --lease 480 --only llmc --only step
says "$work/log" "ok      step: gpt2 of llm.c bf16, B=32 T=1024: 310597 tokens/s"
says "$full" "data $work/bin/peer/tokens_train.bin"
rm -r "$work/bin/peer"

# Rows of a kernel table that die, crash, hang or are wrong hide none behind them; each is in the verdicts with its whole
# log; what measures one of them is skipped, and nothing else.
rm -r "$RESULTS"
export ROWS=$'layernorm bf16\nlora grouped=wrong\nadamw float=dies\nproduct bf16=crashes\nfp8 linear=wrong\nnf4 bf16=hangs\nexperts bf16\nlast=dies'
! LIMIT=4 check --lease 480 --only kernels --only bench --only agree || exit 1
unset ROWS
says "$work/log" "FAIL    test_kernels: adamw float: status 1: train_gpt: error: CUDA says: adamw float"
says "$work/log" "FAIL    test_kernels: product bf16: status 139"
says "$work/log" "FAIL    test_kernels: fp8 linear: wrong"
says "$work/log" "FAIL    test_kernels: nf4 bf16: more than 2 s"
says "$work/log" "FAIL    test_kernels: last: status 1"
says "$work/log" "ok      table test_kernels: 2 rows"
for i in 1 40; do grep -qx "element $i" "$full" || { echo "a log is not whole"; exit 1; }; done
says "$work/log" "skipped bench optimizer: broken: adamw float"
says "$work/log" "skipped bench products: broken: product bf16"
says "$work/log" "skipped bench nf4: broken: nf4 bf16"
says "$work/log" "skipped bench fp8: broken: fp8 linear"
for part in norms experts attention; do says "$work/log" "ok      bench $part"; done
says "$work/log" "ok      agree: 50 steps"
says "$work/log" "next: mend the first FAIL, then repeat it with --only kernels"

# The real tables keep to that: they print a row's name before it runs, begin behind another, and end a row that is late.
if [ -x build/test_kernels ]; then
    build/test_kernels "column sums" --after "column sums bf16" >"$work/log"
    [ "$(sed -n 2p "$work/log")" = "run column sums fp16" ]
    says "$work/log" "1 passed, 0 failed"
    ! build/test_kernels --after nobody >"$work/log" || exit 1
    says "$work/log" "no row is called nobody"
    { build/test_kernels "fp8 e5m2" --limit 1 >"$work/log" || status=$?; } 2>/dev/null
    [ "$status" = 142 ]
    [ "$(tail -n 1 "$work/log")" = "run fp8 e5m2" ]
else
    echo "skipped: build/test_kernels is not built"
fi

# everything hangs: all of it ends within the lease, and what had no time is no failure
touch "$work/bin/slow"
start=$SECONDS
! ROWS=$'a row\nsleepy=sleeps\nbehind' check --lease 9 || exit 1
[ $((SECONDS - start)) -le 10 ] || { echo "a lease of 9 s took $((SECONDS - start)) s"; exit 1; }
says "$verdicts" "FAIL    test_attention_sm90: sleepy: no time is left, for rows behind it either"
says "$work/log" "skipped agree: the 9 seconds are over"
says "$work/log" "skipped sanitize synccheck test_attention_sm90 gaps: the 9 seconds are over"

# a program that takes too long within a lease that has time; a stuck CPU
! LIMIT=1 check --only agree || exit 1
says "$work/log" "FAIL    agree: training on cuda: more than 1 s"
rm "$work/bin/slow"

# figures that come again replace those of their name and leave the others, with what those are from; a program that
# fails before its end leaves the figures that it printed
rm -r "$RESULTS"
check --only step
echo "commit def5678, CUDA 13.0" >"$work/bin/built"
RATE=25.0 check --only bench
says "$page" "| bench | norms | layernorm forward | 25.0 | GB/s | 0.5 |"
says "$page" "| step | step | gpt2 bf16, B=32 T=1024 | 210727 |"
says "$page" "210727 | tokens/s |  | $origin |"
[ "$(grep -c norms "$RESULTS/gpu_Stand-in-1.json")" = 1 ]
! WHAT="rmsnorm forward" STATUS=1 check --only bench || exit 1
says "$work/log" "FAIL    bench norms: status 1"
says "$page" "| bench | norms | rmsnorm forward | 12.5 | GB/s | 0.5 | ${origin/abc1234/def5678} |"
says "$page" "| bench | norms | layernorm forward | 25.0 | GB/s | 0.5 |"

# a profiler that may not read counters
NCU_FAILS=1 check --only profile
says "$work/log" "skipped profile fp8 fp8_quantise_kernel: no figures: ==ERROR== no permission"

# a program that finds no GPU where nvidia-smi does, for the driver is old
program test_large 'echo "skipped: no GPU answers (the driver is old)"; echo "0 passed, 0 failed, 1 skipped"'
! check --only large || exit 1
says "$work/log" "FAIL    table test_large: no row ran: skipped: no GPU answers (the driver is old)"

# each sanitizer looks at some rows of each table, for a limited time
! LIMIT=1 check --only sanitizer || exit 1
says "$work/log" "ok      sanitize memcheck test_attention_sm90 gaps"
says "$work/log" "FAIL    sanitize racecheck test_kernels bf16"
says "$work/log" "========= hazard"
says "$work/log" "skipped sanitize synccheck test_kernels bf16: its time is over; 0 rows were right"

# two GPUs: what is missing, then layouts that agree with one GPU, and one that does not
check --only multi
says "$work/log" "skipped multi: one GPU answers"
echo "GPU 1" >>"$work/gpus"
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

# a C library that is too old, tools that are not there, a library that this machine has not
program ldd 'printf "libc.so.6: version \140GLIBC_2.99\047 not found (required by %s)\n" "$1" >&2'
check --only large
says "$work/log" "skipped table test_large: $work/bin/test_large misses GLIBC_2.99"
rm "$work/bin/ldd" "$work/bin/ncu"
if ! command -v ncu >/dev/null; then
    check --only profile
    says "$work/log" "skipped profile fp8 fp8_quantise_kernel: there is no ncu"
fi
echo 'int nobody_has() { return 0; }' | g++ -shared -fPIC -x c++ - -o "$work/libnobody.so"
echo 'int nobody_has(); int main() { return nobody_has(); }' | g++ -x c++ - -o "$work/bin/test_device" -L"$work" -lnobody
check --only kernels
says "$work/log" "skipped passes test_device: $work/bin/test_device misses libnobody.so"

# CUDA's libraries are found where PyTorch has brought them
rm "$work/bin/python3"
mkdir -p "$work/nvidia/cu13/lib"
program python3 "PYTHONPATH=$work exec $(command -v python3) \"\$@\""
program test_large 'echo "run a row"; echo "ok a row: 1 checks"; echo "$LD_LIBRARY_PATH"; echo "1 passed, 0 failed"'
check --only large
says "$full" "$work/nvidia/cu13/lib"
silent "$work/log" FAIL
echo "ok: scripts/gpu_check.sh"
