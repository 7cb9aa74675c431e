#!/usr/bin/env bash
# One command on a machine with a GPU: test, train and measure, what tells most first, and write what came out.
# usage: scripts/gpu_check.sh [--prebuilt DIR] [--lease SECONDS] [--only PART]...
#        PART: machine kernels agree step bench peers llmc profile sanitizer large ladders multi
#   --prebuilt DIR     build nothing: use the programs in DIR, what `make gpu` puts into build/gpu or `make lease` packs
#   --lease SECONDS    end within so many (3000, which begin behind the build). In 480 rows 0 to 8 below come to their
#                      turn whatever hangs, and where nothing does rows 0 to 15; longer leases stretch the limits by half
#                      as much and have time for the rows behind them
#   --only PART        run the rows of these parts alone; what the others wrote before stays
# Writes into RESULTS (dev/results), each command's before the next begins: gpu_<chip>.json and .md, a line a figure,
# with the commit, CUDA and driver that it is from; gpu_<chip>.log, the verdicts; gpu_<chip>.full.log, what every
# command printed. Without a GPU it says so. LIMIT=SECONDS replaces the limit of every command. The last line says what
# to do next. CUDA_LAUNCH_BLOCKING=1 lets an error name the kernel it is from.
set -u
cd "$(dirname "$0")/.." || exit

# The rows, best first. Lines of one row share its seconds. The fourth column is a regular expression: a line is skipped
# where the name of a kernel test's row that failed begins with it. The first runs (rows 4 and 5) are never skipped.
hopper='attention.on.Hopper'
attention="$hopper|attention.bf16"
gpt2="$attention|(embedding|layernorm|linear|product|gelu|crossentropy|column.sums).*bf16|adamw|grad_norm"
plan="
0  machine    10 -                    machine
1  kernels    40 -                    table test_attention_sm90
2  kernels    80 -                    table test_kernels
3  kernels    30 -                    table test_attention_kernels
4  agree      40 -                    agree
5  step       40 -                    step gpt2 32
6  bench      45 $attention           bench attention
6  bench      45 product|linear       bench products
7  peers      60 -                    peers attention
8  llmc       40 -                    llmc
9  peers     110 -                    peers gpt2
10 bench      50 layernorm|rmsnorm    bench norms
10 bench      50 gelu|swiglu|rope     bench elementwise
10 bench      50 crossentropy         bench head
10 bench      50 adamw                bench optimizer
10 bench      50 fp8                  bench fp8
10 bench      50 experts|grouped|sort bench experts
10 bench      50 nf4                  bench nf4
10 bench      50 decoding|$attention  bench decode
11 step       60 $gpt2                step gpt2 1
11 step       60 $gpt2                step gpt2 1 --graphs
11 step       60 fp8|$gpt2            step gpt2 32 --fp8 block
12 profile    50 $hopper              profile attention 'attention_hopper_forward_kernel.*64'
12 profile    50 $hopper              profile attention 'attention_hopper_forward_kernel.*128'
12 profile    50 $hopper              profile attention 'attention_hopper_backward_kernel.*64'
12 profile    50 $hopper              profile attention 'attention_hopper_backward_kernel.*128'
12 profile    50 fp8                  profile fp8 fp8_quantise_kernel
12 profile    50 experts|grouped      profile experts expert_rows_kernel
13 step       60 $gpt2                step gpt2-xl 8
14 kernels    80 -                    passes test_device
14 sanitizer  80 -                    sanitize memcheck test_attention_sm90 gaps
15 large      45 $attention           table test_large 'attention bf16'

16 peers      90 -                    peers ops
16 peers      90 -                    peers decode
16 peers      90 -                    peers fp8
16 peers      90 -                    peers experts
17 peers     120 -                    peers gpt2-xl
18 ladders    30 -                    passes ladder_layernorm_forward
18 ladders    30 -                    passes ladder_attention_forward
18 ladders    30 -                    passes ladder_matmul
18 ladders    30 -                    passes ladder_fp8_cast
18 ladders    30 -                    passes ladder_cross_entropy
19 large      60 -                    table test_large
20 multi      60 -                    multi
"
for tool in memcheck racecheck initcheck synccheck; do
    for rows in "test_kernels bf16" "test_attention_kernels 'bf16, unusual'" "test_attention_sm90 gaps"; do
        plan+="21 sanitizer 180 -                    sanitize $tool $rows"$'\n'
    done
done
all=" $(echo "$plan" | awk 'NF && !seen[$2]++ {printf "%s ", $2}')"

# ----------------------------------------------------------------------------
# options, the machine, where results go

wrong() { echo "gpu_check.sh: error: $1" >&2; exit 2; }
dir=build/gpu prebuilt=0 lease=3000 parts=
while [ $# -gt 0 ]; do
    case $1 in
    --prebuilt) dir=${2:?--prebuilt needs a folder} prebuilt=1 ;;
    --lease) lease=${2:?--lease needs seconds} ;;
    --only) parts="$parts ${2:?--only needs a part}" ;;
    *) wrong "$1 is no option: see the head of this file" ;;
    esac
    shift 2
done
[ -z "${lease//[0-9]/}" ] || wrong "--lease $lease is no whole number of seconds"
for part in $parts; do
    [[ $all == *" $part "* ]] || wrong "no part is called $part:${all% }"
done
parts=" ${parts:-$all} "

# CUDA's libraries are the toolkit's, or those that PyTorch brought.
given=${LD_LIBRARY_PATH:-}
for folder in /usr/local/cuda/lib64 $(python3 -c 'import glob, nvidia
print(*(f for p in nvidia.__path__ for f in glob.glob(p + "/*/lib")))' 2>/dev/null); do
    [ -d "$folder" ] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
# Open MPI refuses root, which is who one is in a container, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# A machine without the trainer's libraries still builds the kernels' tests and benchmarks.
if [ $prebuilt = 0 ]; then
    make -k --no-print-directory gpu || echo "the build failed: rows without a program are skipped"
    SECONDS=0
fi
query() { timeout 20 nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
chip=$(query name) driver=$(query driver_version)
[ -n "$chip" ] || { echo "skipped: no GPU answers"; echo "next: the same where nvidia-smi names a GPU"; exit 0; }

# What figures are from. Programs built elsewhere bring a note; others are this checkout's.
built=$(cat "$dir/built" 2>/dev/null)
if [ $prebuilt = 0 ] || [ -z "$built" ]; then
    cuda=$(PATH=$PATH:/usr/local/cuda/bin nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    built="commit $(git describe --always --dirty 2>/dev/null || echo unknown), CUDA ${cuda:-unknown}"
fi
origin="$(date -u +%F), $built, driver ${driver:-unknown}"

name=gpu_$(echo "$chip" | tr -c 'A-Za-z0-9\n' '-')
results=${RESULTS:-dev/results} work=$(mktemp -d) cpu=
json=$results/$name.json md=$results/$name.md verdicts=$results/$name.log full=$results/$name.full.log
log=$work/log       # what the last command printed
broken=$work/broken # names of kernel tests' rows that failed
mkdir -p "$results"
touch "$broken" "$json"
trap '[ -z "$cpu" ] || kill $cpu 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# ----------------------------------------------------------------------------
# verdicts, logs, figures

passed=0 failed=0 skipped=0 first_bad=
say() { printf '%-7s %s  (at %d s)\n' "$1" "$2" $SECONDS | tee -a "$verdicts"; }
ok() { passed=$((passed + 1)); say ok "$1"; }
bad() { failed=$((failed + 1)); first_bad=${first_bad:-$part}; say FAIL "$1"; }
skip() { skipped=$((skipped + 1)); say skipped "$1: $2"; }
last=$((lease - 2)) # two seconds are for what is written then
over() { [ $SECONDS -ge $last ]; }
left() { echo $((end > SECONDS ? end - SECONDS : 1)); }

# Keep what a command printed: whole, or of a program that never stops both ends.
archive() { # what it is, file
    echo "=== row $number: $1 (until $SECONDS s)"
    if [ "$(wc -c <"$2")" -le 600000 ]; then cat "$2"; else head -c 300000 "$2"; echo; echo ...; tail -c 300000 "$2"; fi
} >>"$full"
# Run a command until this line's end; its status is in $status.
run() { # what it is, command
    { timeout -k 1 "$(left)" "${@:2}" >"$log" 2>&1 </dev/null; } 2>/dev/null # a signal's name would be this shell's
    status=$?
    archive "$1" "$log"
}
# Whether the last command was ended with its time. 137 is also what a program gets that takes too much memory.
stopped() { [ $status -eq 124 ] || { [ $status -eq 137 ] && [ $SECONDS -ge "$end" ]; }; }
# Run a command that must succeed.
try() { # what it is, command
    local seconds
    seconds=$(left)
    run "$@"
    [ $status -ne 0 ] || return 0
    if stopped && over; then skip "$1" "the $lease seconds are over"; return 1; fi
    if stopped; then bad "$1: more than $seconds s"; else bad "$1: status $status"; fi
    tail -n 15 "$log"
    return 1
}

# Put new figures in the place of older ones of the same name; keep all others. Write both files.
record() { # part, file of JSON lines
    grep '^{' "$2" | sed "s/^{/{\"from\": \"$1\", \"of\": \"$origin\", /" >"$work/new"
    awk '
        function key(line) { sub(/"of": "[^"]*", /, "", line); sub(/, "rate".*/, "", line); return line }
        NR == FNR {new[key($0)]; lines[++n] = $0; next}
        !(key($0) in new)
        END {for (i = 1; i <= n; i++) print lines[i]}' "$work/new" "$json" >"$work/all"
    [ -s "$work/new" ] && cp "$work/all" "$json"
    {
        printf '%s\n' "# $chip" "" "\`scripts/gpu_check.sh\`. A row's last column says which run it is from." \
            "share: of the copy rate or of a product of 8192^3, measured in the same run." "" \
            '| from | part | what | rate | unit | share | of |' '|---|---|---|---:|---|---:|---|'
        local text='"([^"]*)"'
        sed -nE "s/^\{\"from\": $text, \"of\": $text, \"part\": $text, \"what\": $text, \"rate\": ([^,]*), \"unit\": $text(, \"share\": ([^}]*))?\}$/| \1 | \3 | \4 | \5 | \6 | \8 | \2 |/p" "$json"
    } >"$md"
}
figures() { grep -c '^{' "$log"; }
why_skipped() { sed -n 's/^skipped: //p' "$log" | head -n 1; }
# Whether a program is there with all its libraries; else why its line is skipped.
program() {
    [ -x "$dir/$1" ] || { skip "$command" "$dir/$1 is not there"; return 1; }
    local missing # libraries, or versions of the C library that this one is too old for
    missing=$(ldd "$dir/$1" 2>&1 | sort -u |
        sed -n "s/[[:space:]]*\(.*\) => not found.*/\1/p; s/.*version .\(.*\)' not found.*/\1/p" | paste -sd' ')
    [ -z "$missing" ] || skip "$command" "$dir/$1 misses $missing"
    [ -z "$missing" ]
}
tool() { command -v "$1" >/dev/null || { skip "$command" "there is no $1"; return 1; }; }

# ----------------------------------------------------------------------------
# what the rows run

machine() {
    run "the machine" sh -c "date -u; nvidia-smi; nproc; free -g; df -h /tmp; command -v nvcc ncu python3
        for f in '$dir'/* '$dir'/peer/*; do [ ! -x \$f ] || [ -d \$f ] || { echo \$f; ldd \$f; }; done"
    ok "machine: $(nproc) cores, $(query compute_cap,driver_version,memory.total)"
}

# A kernel table. A CUDA error ends its program, and a row that hangs is ended after a quarter of the line's seconds, the
# next after half of that: each is that row's failure, and the program begins again behind it.
table() { # program [rows' name]
    local row='' behind=() seconds=$(($(left) / 4 + 1)) good=0 before
    program "$1" || return
    while true; do
        run "$command${row:+, behind $row}" "$dir/$1" ${2:+"$2"} --limit $seconds "${behind[@]}"
        good=$((good + $(grep -c '^ok ' "$log")))
        while read -r before; do broken_row "$1" "$before" "wrong"; done \
            < <(sed -n 's/^FAIL \(.*\): [0-9]* checks.*/\1/p' "$log")
        ! grep -q '^[0-9]* passed, ' "$log" || break

        # The row that ended the program, the last that was begun.
        before=$row row=$(sed -n 's/^run //p' "$log" | tail -n 1)
        behind=(--after "$row")
        if [ -z "$row" ] || [ "$row" = "$before" ]; then bad "$command: status $status"; tail -n 15 "$log"; break; fi
        if stopped; then broken_row "$1" "$row" "no time is left, for rows behind it either"; break; fi
        case $status in
        142) broken_row "$1" "$row" "more than $seconds s"; seconds=$((seconds / 2 + 2)) ;;
        *) broken_row "$1" "$row" "status $status: $(grep -m 1 'error' "$log")" ;;
        esac
    done
    [ $good -eq 0 ] || ok "$command: $good rows"
    # No row runs where a driver is older than the program's CUDA.
    [ -n "$row" ] || grep -q '^run ' "$log" || bad "$command: no row ran: $(grep '^skipped' "$log")"
}
broken_row() { echo "$2" >>"$broken"; bad "$1: $2: $3"; } # program, row, why

passes() {
    program "$1" && try "$command" "$dir/$1" || return
    if grep -q '^skipped: ' "$log"; then skip "$command" "$(why_skipped)"; else ok "$command: $(tail -n 1 "$log")"; fi
}

data=$(echo README.md llmc/*.h | tr ' ' ',') # the program does not lie beside its sources
small=(--data "$data" --precision fp32 --model tiny-llama --seq 256 --micro-batch 1 --batch-tokens 512
    --eval-every 0 --eval-tokens 512 --sample-every 0 --sample-tokens 1)
losses() { grep -o '"loss":[0-9.e+-]*' "$1" | cut -d: -f2; }
same_losses() { # what it is, steps, most, two runs: equal but for float's roundings, which training makes grow
    paste <(losses "$4/log.jsonl") <(losses "$5/log.jsonl") | awk -v steps="$2" -v allowed="$3" '
        {d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > most) most = d; n++}
        END {printf "%d steps, losses differ by %.1e at most\n", n, most; exit !(n == steps && most < allowed)
        }' >"$work/same" && ok "$1: $(cat "$work/same")" || bad "$1: $(cat "$work/same"), $3 allowed"
}
# The same training on the CPU and on the GPU, there as CUDA graphs too: a replay has the bits of the launches. The CPU's
# half runs beside the kernels' tests, on half of the cores.
start_cpu() {
    OMP_NUM_THREADS=$((($(nproc) + 1) / 2)) timeout "$lease" "$dir/train_gpt" "${small[@]}" --device cpu --steps 50 \
        --out "$work/cpu" >"$work/cpu.log" 2>&1 </dev/null &
    cpu=$!
}
agree() {
    program train_gpt || return
    local good=0
    for flag in "" --graphs; do
        try "agree: training on cuda${flag:+ $flag}" "$dir/train_gpt" "${small[@]}" --device cuda --steps 50 \
            --out "$work/cuda$flag" $flag && good=$((good + 1))
    done
    while [ $good -gt 0 ] && kill -0 "$cpu" 2>/dev/null && [ $SECONDS -lt "$end" ]; do sleep 0.2; done
    local late=0
    kill "$cpu" 2>/dev/null && late=1
    cpu=
    archive "agree: training on cpu" "$work/cpu.log"

    [ $good -lt 2 ] || same_losses "agree: graphs" 50 1e-12 "$work/cuda" "$work/cuda--graphs"
    if [ $good -gt 0 ] && [ $late = 1 ]; then bad "agree: training on cpu: not at its end after $SECONDS s"; fi
    if [ $good -gt 0 ] && [ $late = 0 ]; then same_losses agree 50 1e-3 "$work/cpu" "$work/cuda"; fi
}

# Steps of GPT-2 in bf16, by this trainer, which saves nothing without --out, and by llm.c, which was built elsewhere: on
# the same tokens, where llm.c's are there. -e d12 is 124M with random weights, -r 0 recomputes nothing.
step() { # model, micro-batch, flags
    local model=$1 B=$2 text=$data
    shift 2
    program train_gpt || return
    [ ! -e "$dir/peer/tokens_train.bin" ] || text=$dir/peer/tokens_train.bin
    try "$command" "$dir/train_gpt" --data "$text" --device cuda --model "$model" --precision bf16 --seq 1024 \
        --micro-batch "$B" --batch-tokens $((B * 1024)) --steps 20 --log-every 1 --eval-every 0 --sample-every 0 \
        --sample-tokens 0 "$@" && speed "$model bf16, B=$B T=1024${1:+ $*}" "$B"
}
llmc() {
    program peer/train_gpt2cu || return
    try "$command" "$dir/peer/train_gpt2cu" -i "$dir/peer/tokens_train.bin" -j "$dir/peer/tokens_val.bin" -e d12 -b 32 \
        -t 1024 -x 20 -c 0 -r 0 -v 1000000 -m 1 -s 0 -h 0 && speed "gpt2 of llm.c bf16, B=32 T=1024" 32
}
speed() { # what, micro-batch: the median of a run's last eleven steps
    local rate
    rate=$(sed -n 's/^step .* \([0-9.]*\) ms .*/\1/p' "$log" | tail -n 11 | sort -g | sed -n 6p |
        awk -v tokens=$(($2 * 1024)) '{printf "%.0f", 1000 * tokens / $1}')
    [ -n "$rate" ] || { bad "step: $1: no step was timed"; return; }
    ok "step: $1: $rate tokens/s"
    echo "{\"part\": \"step\", \"what\": \"$1\", \"rate\": $rate, \"unit\": \"tokens/s\"}" >"$work/step"
    record step "$work/step"
}

bench() { # part
    program bench_kernels || return
    try "$command" "$dir/bench_kernels" "$1" && measured
    record bench "$log"
}
measured() { if [ "$(figures)" -gt 0 ]; then ok "$command: $(figures) figures"; else skip "$command" "$(why_skipped)"; fi; }
peers() { # part
    tool python3 || return
    try "$command" env LD_LIBRARY_PATH="$given" python3 dev/bench/peers.py "$1" && measured
    record peers "$log"
}
# Nsight Compute on one launch, the fourth, of a kernel in a part of the benchmark. Clocks are left as they are.
profile() { # part, regular expression of the kernel with its template's arguments
    tool ncu && program bench_kernels || return
    run "$command" ncu --clock-control none --kernel-name-base demangled -k "regex:$2" --launch-skip 3 \
        --launch-count 1 --kill yes --section SpeedOfLight --section ComputeWorkloadAnalysis --section WarpStateStats \
        --section MemoryWorkloadAnalysis --section SchedulerStats --section LaunchStats "$dir/bench_kernels" "$1"
    if grep -q Duration "$log"; then ok "$command"; else skip "$command" "no figures: $(grep -m 1 '^==[EW]' "$log")"; fi
}
# A tool slows a kernel down by 10 to 100, so that time may end it; some virtual machines refuse it. It is not known
# whether racecheck follows TMA and mbarriers: its silence about Hopper's kernels says little.
sanitize() { # tool, program, rows' name
    tool compute-sanitizer && program "$2" || return
    run "$command" compute-sanitizer --tool "$1" --error-exitcode 9 "$dir/$2" "$3"
    if grep -q 'Device not supported' "$log"; then skip "$command" "it says: Device not supported"; return; fi
    case $status in
    0) ok "$command" ;;
    124 | 137) skip "$command" "its time is over; $(grep -c '^ok ' "$log") rows were right" ;;
    *) bad "$command: status $status"; grep -v '^ok \|^run \|^  case' "$log" | head -n 15 ;;
    esac
}

# Two ranks, each on a GPU of its own, train as one GPU does.
multi() {
    program train_gpt || return
    [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 ] || { skip multi "one GPU answers"; return; }
    tool mpirun || return
    ldd "$dir/train_gpt" 2>&1 | grep -q libnccl || { skip multi "$dir/train_gpt is built without NCCL"; return; }
    program test_comm && try "multi: test_comm" mpirun -np 2 "$dir/test_comm" --nccl &&
        ok "multi: test_comm: $(tail -n 1 "$log")"
    local train=("$dir/train_gpt" "${small[@]}" --device cuda --steps 20)
    try "multi: one GPU" "${train[@]}" --out "$work/one" || return
    for layout in "--dp 2" "--tp 2 --sequence-parallel" "--pp 2" "--dp 2 --zero 3"; do
        rm -rf "$work/two"
        # shellcheck disable=SC2086 # a layout is several words
        try "multi: $layout" mpirun -np 2 "${train[@]}" $layout --out "$work/two" &&
            same_losses "multi: $layout" 20 1e-4 "$work/one" "$work/two"
    done
}

# ----------------------------------------------------------------------------
# run the rows

echo "$chip: $origin, $lease seconds" | tee -a "$verdicts" "$full"
echo "$plan" | awk -v parts="$parts" 'NF && index(parts, " " $2 " ")' >"$work/plan"
! grep -q 'agree$' "$work/plan" || [ ! -x "$dir/train_gpt" ] || start_cpu
row=
while read -r -u 3 number part limit breaks command; do
    # A row's seconds, longer in a longer lease, end no later than the lease does.
    if [ "$number" != "$row" ]; then
        row=$number lines=$(grep -c "^$number " "$work/plan")
        [ "$lease" -le 960 ] || limit=$((limit * lease / 960))
        row_end=$((SECONDS + limit < last ? SECONDS + limit : last))
    fi
    # A line may take one and a half times its share of what is left, the last line all of it.
    share=$(((row_end - SECONDS) * 3 / (2 * lines)))
    end=$((SECONDS + share < row_end ? SECONDS + share : row_end)) lines=$((lines - 1))
    [ -z "${LIMIT:-}" ] || end=$((SECONDS + LIMIT))

    why=$(grep -m 1 -E -- "^($breaks)" "$broken")
    if over; then
        skip "$command" "the $lease seconds are over"
    elif [ "$breaks" != - ] && [ -n "$why" ]; then
        skip "$command" "broken: $why"
    else
        eval "$command"
    fi
done 3<"$work/plan"

echo "$passed passed, $failed failed, $skipped skipped, $SECONDS s" | tee -a "$verdicts"
[ $failed -gt 0 ] || { echo "next: look at $md; git add $md $json $verdicts"; exit 0; }
echo "next: mend the first FAIL, then repeat it with --only $first_bad"
exit 1
