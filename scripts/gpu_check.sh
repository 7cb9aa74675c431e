#!/usr/bin/env bash
# One command on a machine with a GPU: build, test, train, measure, and write what came out.
# usage: scripts/gpu_check.sh [--prebuilt DIR] [--only PART]...      PART: build kernels large sanitizer agree
#        bench ladders peers step
#   --prebuilt DIR   build nothing: use the programs in DIR (what `make gpu` puts into build/gpu; those of
#                    `make gpu MPI=0` need neither Open MPI nor NCCL)
#   --only PART      run these parts alone; what the others wrote before stays
# Writes dev/results/gpu_<chip>.json (a line a figure) and .md, after each part. Without a GPU every part
# but the build is skipped with its reason. The default run takes less than eight minutes.
set -u
cd "$(dirname "$0")/.."
dir=build/gpu prebuilt=0 parts=()
while [ $# -gt 0 ]; do
    case $1 in
    --prebuilt) dir=${2:?--prebuilt needs a folder} prebuilt=1; shift 2 ;;
    --only) parts+=("${2:?--only needs a part}"); shift 2 ;;
    *) echo "gpu_check.sh: error: $1 is no option: see the head of this file" >&2; exit 2 ;;
    esac
done
all=(build kernels large sanitizer agree bench ladders peers step)
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $part "* ]] || { echo "gpu_check.sh: error: no part is called $part: ${all[*]}" >&2; exit 2; }
done

chip=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
results=${RESULTS:-dev/results} work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=$(echo "${chip:-none}" | tr -c 'A-Za-z0-9\n' '-')
json=$results/gpu_$name.json md=$results/gpu_$name.md
passed=0 failed=0 skipped=0
ok() { passed=$((passed + 1)); echo "ok      $1"; }
bad() { failed=$((failed + 1)); echo "FAIL    $1"; }
skip() { skipped=$((skipped + 1)); echo "skipped $1: $2"; }

# Keep the figures of parts that are not run again; add those of this one; write both files.
record() { # part, file of JSON lines
    [ -n "$chip" ] || return 0
    mkdir -p "$results"
    touch "$json"
    { grep -v "\"from\": \"$1\"" "$json"; grep '^{' "$2" | sed "s/^{/{\"from\": \"$1\", /"; } >"$work/all"
    cp "$work/all" "$json"
    {
        echo "# $chip"
        echo
        echo "\`scripts/gpu_check.sh\`, $(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/CUDA \1/p'), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
        echo "share: of the copy rate or of a product of 8192^3, measured in the same run."
        echo
        echo '| from | part | what | rate | unit | share |'
        echo '|---|---|---|---:|---|---:|'
        sed -nE 's/^\{"from": "([^"]*)", "part": "([^"]*)", "what": "([^"]*)", "rate": ([^,]*), "unit": "([^"]*)"(, "share": ([^}]*))?\}$/| \1 | \2 | \3 | \4 | \5 | \7 |/p' "$json"
    } >"$md"
}

build() {
    if [ $prebuilt = 1 ]; then skip build "the programs are in $dir"; return; fi
    if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then skip build "there is no nvcc"; return; fi
    make --no-print-directory gpu >"$work/build.log" 2>&1 && ok build || { bad build; tail -n 20 "$work/build.log"; }
}
program() { # its path, or nothing and the reason
    [ -x "$dir/$1" ] && return 0
    skip "$2" "$dir/$1 is not there"
    return 1
}
tests() { # part, program
    program "$2" "$1" || return
    "$dir/$2" >"$work/$2.log" 2>&1 && ok "$1: $2: $(tail -n 1 "$work/$2.log")" || { bad "$1: $2"; tail -n 30 "$work/$2.log"; }
}
kernels() { for t in test_kernels test_attention_kernels test_attention_sm90 test_device; do tests kernels $t; done; }
large() { tests large test_large; }
sanitizer() {
    command -v compute-sanitizer >/dev/null || { skip sanitizer "there is no compute-sanitizer"; return; }
    program test_kernels sanitizer || return
    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 "$dir/test_kernels" bf16 >"$work/$tool.log" 2>&1 &&
            ok "sanitizer: $tool" || { bad "sanitizer: $tool"; tail -n 30 "$work/$tool.log"; }
    done
}
# 50 steps on the CPU and on the GPU: equal losses, but for float's roundings, which training makes grow
agree() {
    program train_gpt agree || return
    for device in cpu cuda; do
        "$dir/train_gpt" --device $device --precision fp32 --steps 50 --eval-every 0 --sample-every 0 --out "$work/$device" \
            >"$work/$device.log" 2>&1 || { bad "agree: training on $device"; tail -n 5 "$work/$device.log"; return; }
    done
    paste <(grep -o '"loss":[0-9.e+-]*' "$work/cpu/log.jsonl" | cut -d: -f2) <(grep -o '"loss":[0-9.e+-]*' "$work/cuda/log.jsonl" | cut -d: -f2) |
        awk '{d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > most) most = d; n++} END {printf "%d steps, losses differ by %.1e at most\n", n, most; exit !(n == 50 && most < 1e-3)}' >"$work/agree" &&
        ok "agree: $(cat "$work/agree")" || bad "agree: $(cat "$work/agree")"
}
bench() {
    program bench_kernels bench || return
    "$dir/bench_kernels" >"$work/bench" 2>"$work/bench.err" && ok "bench: $(grep -c '^{' "$work/bench") figures" || { bad bench; cat "$work/bench.err"; }
    record bench "$work/bench"
}
# what the tables in the ladders' heads are filled with
ladders() {
    for l in layernorm_forward attention_forward matmul; do
        program ladder_$l ladders || continue
        "$dir/ladder_$l" >"$work/ladder_$l" 2>&1 && ok "ladders: $l" || bad "ladders: $l"
        cat "$work/ladder_$l"
    done
}
peers() {
    python3 -c 'import torch' 2>/dev/null || { skip peers "PyTorch is not installed"; return; }
    timeout 240 python3 dev/bench/peers.py >"$work/peers" 2>"$work/peers.err" && ok "peers: $(grep -c '^{' "$work/peers") figures" || { bad peers; tail -n 5 "$work/peers.err"; }
    grep '^skipped' "$work/peers"
    record peers "$work/peers"
}
# a whole step of GPT-2 124M and 1.5B: tokens a second, the median of the last steps
step() {
    program train_gpt step || return
    : >"$work/step"
    for run in "gpt2 32" "gpt2-xl 8"; do
        set -- $run
        "$dir/train_gpt" --device cuda --model $1 --precision bf16 --seq 1024 --micro-batch $2 --batch-tokens $(($2 * 1024)) \
            --steps 25 --eval-every 0 --sample-every 0 --out "$work/$1" >"$work/$1.log" 2>&1 || { bad "step: $1"; tail -n 5 "$work/$1.log"; continue; }
        rate=$(grep -o '"tokens_per_second":[0-9.e+]*' "$work/$1/log.jsonl" | cut -d: -f2 | tail -n 15 | sort -g | sed -n 8p)
        ok "step: $1: $rate tokens/s"
        echo "{\"part\": \"step\", \"what\": \"$1 bf16, B=$2 T=1024\", \"rate\": $rate, \"unit\": \"tokens/s\"}" >>"$work/step"
    done
    record step "$work/step"
}

echo "GPU: ${chip:-none answers}"
for part in "${parts[@]}"; do
    if [ -z "$chip" ] && [ $part != build ]; then
        skip $part "no GPU answers"
    else
        start=$SECONDS
        $part
        echo "        ($part: $((SECONDS - start)) s)"
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
