#!/usr/bin/env bash
# One command on a machine with a GPU: build, test, train, measure, and write what came out.
# usage: scripts/gpu_check.sh [--prebuilt DIR] [--only PART]... [--minutes N]
#        PART: build kernels agree step bench ladders peers large sanitizer multi
#   --prebuilt DIR   build nothing: use the programs in DIR (what `make gpu` puts into build/gpu; those of
#                    `make gpu MPI=0` need neither Open MPI nor NCCL)
#   --only PART      run these parts alone; what the others wrote before stays
#   --minutes N      start nothing after N minutes, and end then what still runs
# Writes dev/results/gpu_<chip>.json (a line a figure, with the commit, CUDA and driver that it is from), .md, and .log
# (verdicts and ladders) as soon as it knows something. Without a GPU every part but the build is skipped with its
# reason. Every command has a time limit, which LIMIT=SECONDS replaces. The last line says what to do next.
#
# The first hour on a rented GPU:
#   before   elsewhere, without a GPU: make gpu MPI=0; copy build/gpu, scripts, llmc, dev/bench and README.md there
#   1.       scripts/gpu_check.sh --prebuilt build/gpu --minutes 30      all parts, the one that tells most first
#   or       .. --only kernels                                           each kernel against the CPU
#            .. --only agree                                             a run against the CPU
#            .. --only step --only bench --only ladders --only peers     the figures, and PyTorch's
#            .. --only large --only sanitizer                            long tensors; what the tools find
#   2.       two GPUs: make gpu there, with Open MPI and NCCL; then --only multi
#   3.       copy dev/results back before the machine goes
#   After a FAIL nothing that follows is worth its time. CUDA_LAUNCH_BLOCKING=1 lets an error name the kernel it is from.
set -u
cd "$(dirname "$0")/.."
dir=build/gpu prebuilt=0 parts=() minutes=
while [ $# -gt 0 ]; do
    case $1 in
    --prebuilt) dir=${2:?--prebuilt needs a folder} prebuilt=1; shift 2 ;;
    --only) parts+=("${2:?--only needs a part}"); shift 2 ;;
    --minutes) minutes=${2:?--minutes needs a number}; shift 2 ;;
    *) echo "gpu_check.sh: error: $1 is no option: see the head of this file" >&2; exit 2 ;;
    esac
done
[ -z "${minutes//[0-9]/}" ] || { echo "gpu_check.sh: error: --minutes $minutes is no whole number" >&2; exit 2; }
all=(build kernels agree step bench ladders peers large sanitizer multi)
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $part "* ]] || { echo "gpu_check.sh: error: no part is called $part: ${all[*]}" >&2; exit 2; }
done

# CUDA's libraries are the toolkit's, or those that PyTorch brought.
given=${LD_LIBRARY_PATH:-}
for folder in /usr/local/cuda/lib64 $(python3 -c 'import glob, nvidia
print(*(f for p in nvidia.__path__ for f in glob.glob(p + "/*/lib")))' 2>/dev/null); do
    [ -d "$folder" ] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
# Open MPI refuses root, which is who one is in a container, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

chip=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) && chip=${chip%%$'\n'*} || chip=
results=${RESULTS:-dev/results} work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=$(echo "${chip:-none}" | tr -c 'A-Za-z0-9\n' '-')
json=$results/gpu_$name.json md=$results/gpu_$name.md verdicts=$results/gpu_$name.log
passed=0 failed=0 skipped=0 broken=() # parts with a FAIL
ok() { passed=$((passed + 1)); echo "ok      $1" | keep; }
bad() { failed=$((failed + 1)); broken+=("$part"); echo "FAIL    $1" | keep; }
skip() { skipped=$((skipped + 1)); echo "skipped $1: $2" | keep; }

# Print, and keep what was printed on a machine that soon goes.
keep() {
    if [ -n "$chip" ]; then mkdir -p "$results" && tee -a "$verdicts"; else cat; fi
}

# What figures are from. Programs built elsewhere bring a note; others are this checkout's.
built=$(cat "$dir/built" 2>/dev/null)
if [ $prebuilt = 0 ] || [ -z "$built" ]; then
    cuda=$(PATH=$PATH:/usr/local/cuda/bin nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    built="commit $(git describe --always --dirty 2>/dev/null || echo unknown), CUDA ${cuda:-unknown}"
fi
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
origin="$(date -u +%F), $built, driver ${driver:-unknown}"

# The seconds that a command may take: its own limit, or what is left of --minutes.
limit() { # seconds
    local left=$((${minutes:-0} * 60 - SECONDS)) seconds=${LIMIT:-$1}
    [ -z "$minutes" ] || [ $left -gt $seconds ] || seconds=$((left > 1 ? left : 1))
    echo $seconds
}

# Run a command for at most so many seconds; what it prints goes to the log.
try() { # seconds, what it is, log, command
    local seconds what=$2 log=$3 status
    seconds=$(limit "$1")
    shift 3
    timeout -k 10 "$seconds" "$@" >"$log" 2>&1
    status=$?
    [ $status -ne 0 ] || return 0
    # The end of the hour is nobody's fault.
    if [ $status -eq 124 ] && over; then skip "$what" "the $minutes minutes are over"; return 1; fi
    [ $status -ne 124 ] || what="$what: more than $seconds s"
    bad "$what"
    tail -n 30 "$log" | keep
    return 1
}
over() { [ -n "$minutes" ] && [ $SECONDS -ge $((minutes * 60)) ]; }

# Put new figures in the place of older ones of the same name; keep all others. Write both files.
record() { # part, file of JSON lines
    [ -n "$chip" ] || return 0
    mkdir -p "$results"
    touch "$json"
    grep '^{' "$2" | sed "s/^{/{\"from\": \"$1\", \"of\": \"$origin\", /" >"$work/new"
    awk '
        function key(line) { sub(/"of": "[^"]*", /, "", line); sub(/, "rate".*/, "", line); return line }
        NR == FNR {new[key($0)]; lines[++n] = $0; next}
        !(key($0) in new)
        END {for (i = 1; i <= n; i++) print lines[i]}' "$work/new" "$json" >"$work/all"
    [ -s "$work/new" ] && cp "$work/all" "$json"
    {
        echo "# $chip"
        echo
        echo "\`scripts/gpu_check.sh\`. A row's last column says which run it is from."
        echo "share: of the copy rate or of a product of 8192^3, measured in the same run."
        echo
        echo '| from | part | what | rate | unit | share | of |'
        echo '|---|---|---|---:|---|---:|---|'
        local text='"([^"]*)"'
        sed -nE "s/^\{\"from\": $text, \"of\": $text, \"part\": $text, \"what\": $text, \"rate\": ([^,]*), \"unit\": $text(, \"share\": ([^}]*))?\}$/| \1 | \3 | \4 | \5 | \6 | \8 | \2 |/p" "$json"
    } >"$md"
}

build() {
    if [ $prebuilt = 1 ]; then skip build "the programs are in $dir"; return; fi
    if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then skip build "there is no nvcc"; return; fi
    # A machine without the trainer's libraries still builds the kernels' tests and benchmarks.
    try 3600 build "$work/build.log" make -k --no-print-directory gpu && ok build
}
program() { # whether it is there with all its libraries; else why it is skipped
    [ -x "$dir/$1" ] || { skip "$2" "$dir/$1 is not there"; return 1; }
    local missing # libraries, or versions of the C library that this one is too old for
    missing=$(ldd "$dir/$1" 2>&1 | sed -n "s/[[:space:]]*\(.*\) => not found.*/\1/p; s/.*version .\(.*\)' not found.*/\1/p" |
        sort -u | paste -sd' ')
    [ -n "$missing" ] || return 0
    skip "$2" "$dir/$1 misses $missing"
    return 1
}
# A program that finds no GPU where nvidia-smi does has met a driver older than its CUDA.
tests() { # part, program, seconds
    program "$2" "$1" || return
    try "$3" "$1: $2" "$work/$2.log" "$dir/$2" || return
    if grep -q '^0 passed' "$work/$2.log"; then bad "$1: $2: $(grep '^skipped' "$work/$2.log")"; return; fi
    ok "$1: $2: $(tail -n 1 "$work/$2.log")"
}
kernels() { for t in test_kernels test_attention_kernels test_attention_sm90 test_device; do tests kernels $t 240; done; }
large() { tests large test_large 300; }

# Some rows of each table; a tool slows a kernel down by 10 to 100. It is not known whether racecheck follows TMA and
# mbarriers: its silence about Hopper's kernels says little.
sanitizer() {
    command -v compute-sanitizer >/dev/null || { skip sanitizer "there is no compute-sanitizer"; return; }
    local run tool log status seconds
    for run in "test_kernels bf16" "test_attention_kernels bf16, unusual" "test_attention_sm90 gaps"; do
        set -- "${run%% *}" "${run#* }"
        program "$1" sanitizer || continue
        for tool in memcheck racecheck initcheck synccheck; do
            log=$work/$tool.$1.log seconds=$(limit 90)
            timeout -k 10 "$seconds" compute-sanitizer --tool $tool --error-exitcode 9 "$dir/$1" "$2" >"$log" 2>&1
            status=$?
            case $status in
            0) ok "sanitizer: $tool: $1 '$2'" ;;
            124) skip "sanitizer: $tool: $1 '$2'" "more than $seconds s; $(grep -c '^ok ' "$log") rows were right" ;;
            *) bad "sanitizer: $tool: $1 '$2'"; grep -v '^ok ' "$log" | head -n 30 | keep ;;
            esac
        done
    done
}

data=$(echo README.md llmc/*.h | tr ' ' ',') # the program does not lie beside its sources
small=(--data "$data" --precision fp32 --model tiny-llama --seq 256 --micro-batch 1 --batch-tokens 512
    --eval-every 0 --eval-tokens 512 --sample-every 0 --sample-tokens 1) # a CPU takes a minute for 50 steps
losses() { grep -o '"loss":[0-9.e+-]*' "$1" | cut -d: -f2; }
same_losses() { # what it is, steps, most, two runs' folders: equal but for float's roundings, which training makes grow
    paste <(losses "$4/log.jsonl") <(losses "$5/log.jsonl") | awk -v steps="$2" -v allowed="$3" '
        {d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > most) most = d; n++}
        END {printf "%d steps, losses differ by %.1e at most\n", n, most; exit !(n == steps && most < allowed)}' >"$work/same" &&
        ok "$1: $(cat "$work/same")" || bad "$1: $(cat "$work/same"), $3 allowed"
}
# the same training on the CPU and on the GPU, there as CUDA graphs too: a replay has the bits of the launches
agree() {
    program train_gpt agree || return
    for run in cpu cuda "cuda --graphs"; do
        try 240 "agree: training on $run" "$work/run.log" "$dir/train_gpt" "${small[@]}" --device $run \
            --steps 50 --out "$work/${run// /}" || return
    done
    same_losses agree 50 1e-3 "$work/cpu" "$work/cuda"
    same_losses "agree: graphs" 50 1e-12 "$work/cuda" "$work/cuda--graphs"
}
bench() {
    program bench_kernels bench || return
    try 300 bench "$work/bench" "$dir/bench_kernels" && ok "bench: $(grep -c '^{' "$work/bench") figures"
    record bench "$work/bench"
}
# what the tables in the ladders' heads are filled with
ladders() {
    for l in layernorm_forward attention_forward matmul; do
        program ladder_$l ladders || continue
        try 120 "ladders: $l" "$work/ladder_$l" "$dir/ladder_$l" && ok "ladders: $l"
        keep <"$work/ladder_$l"
    done
}
peers() {
    timeout 120 python3 -c 'import torch' 2>/dev/null || { skip peers "PyTorch is not installed"; return; }
    : >"$work/peers"
    local part_of
    for part_of in attention ops gpt2 gpt2-xl; do # the last two are compiled first, which takes minutes
        try 400 "peers: $part_of" "$work/peer" env LD_LIBRARY_PATH="$given" python3 dev/bench/peers.py $part_of &&
            ok "peers: $part_of: $(grep -c '^{' "$work/peer") figures"
        grep '^skipped' "$work/peer"
        cat "$work/peer" >>"$work/peers"
        record peers "$work/peers"
    done
}
# a whole step of GPT-2 124M and 1.5B: tokens a second, the median of the last steps
step() {
    program train_gpt step || return
    : >"$work/step"
    # Launches cost most where a micro-batch is small: there with graphs and without.
    for run in "gpt2 32" "gpt2-xl 8" "gpt2 1" "gpt2 1 --graphs"; do
        set -- $run
        rm -rf "$work/$1"
        try 300 "step: $run" "$work/$1.log" "$dir/train_gpt" --data "$data" --device cuda --model $1 --precision bf16 \
            --seq 1024 --micro-batch $2 --batch-tokens $(($2 * 1024)) --steps 25 --eval-every 0 --sample-every 0 \
            --out "$work/$1" ${3:-} || continue
        rate=$(grep -o '"tokens_per_second":[0-9.e+]*' "$work/$1/log.jsonl" | cut -d: -f2 | tail -n 15 | sort -g | sed -n 8p)
        ok "step: $1: $rate tokens/s"
        echo "{\"part\": \"step\", \"what\": \"$1 bf16, B=$2 T=1024${3:+ $3}\", \"rate\": $rate, \"unit\": \"tokens/s\"}" >>"$work/step"
        record step "$work/step"
    done
}

# Two ranks, each on a GPU of its own, train as one GPU does.
multi() {
    program train_gpt multi || return
    [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 ] || { skip multi "one GPU answers"; return; }
    command -v mpirun >/dev/null || { skip multi "there is no mpirun"; return; }
    ldd "$dir/train_gpt" 2>&1 | grep -q libnccl || { skip multi "$dir/train_gpt is built without NCCL"; return; }
    if program test_comm multi; then
        try 180 "multi: test_comm" "$work/comm.log" mpirun -np 2 "$dir/test_comm" --nccl &&
            ok "multi: test_comm: $(tail -n 1 "$work/comm.log")"
    fi
    local run=("$dir/train_gpt" "${small[@]}" --device cuda --steps 20)
    try 120 "multi: one GPU" "$work/one.log" "${run[@]}" --out "$work/one" || return
    for layout in "--dp 2" "--tp 2 --sequence-parallel" "--pp 2" "--dp 2 --zero 3"; do
        rm -rf "$work/two"
        # shellcheck disable=SC2086 # a layout is several words
        try 180 "multi: $layout" "$work/two.log" mpirun -np 2 "${run[@]}" $layout --out "$work/two" &&
            same_losses "multi: $layout" 20 1e-4 "$work/one" "$work/two"
    done
}

echo "GPU: ${chip:-none answers}"
[ -z "$chip" ] || echo "$origin" | keep
[ -z "$chip" ] || nvidia-smi --query-gpu=compute_cap,driver_version,memory.total --format=csv,noheader
for part in "${parts[@]}"; do
    if [ -z "$chip" ] && [ $part != build ]; then
        skip $part "no GPU answers"
    elif over; then
        skip $part "the $minutes minutes are over"
    else
        start=$SECONDS
        $part
        echo "        ($part: $((SECONDS - start)) s)"
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
if [ -z "$chip" ]; then
    echo "next: the same where nvidia-smi names a GPU; the head of scripts/gpu_check.sh says how"
elif [ $failed -gt 0 ]; then
    echo "next: mend the first FAIL, then repeat it with --only ${broken[0]}"
elif [ ! -e "$md" ]; then
    echo "next: --only bench --only step, whose figures go to $md"
else
    echo "next: look at $md; git add $md $json $verdicts"
fi
[ $failed -eq 0 ]
