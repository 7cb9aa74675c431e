#!/usr/bin/env bash
# The longer checks. Cheap ones run at every commit; of the expensive ones each commit gets every sixteenth, and of
# a program with sanitizers a quarter of its tests: 64 commits in a row run all. Last line: N passed, N failed, N skipped.
#   make check               what this commit gets: with `make test` about an hour on two cores
#   make check ALL=1         everything
#   test/check.sh list       says which they are, and runs none
set -u
cd "$(dirname "$0")/.."
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # waiting threads sleep soon: others use the cores too
mode=${1:-run}
verdicts=$(mktemp) # a line a step: steps run in processes of their own
trap 'rm -f "$verdicts"' EXIT

# ----------------------------------------------------------------------------
# steps

step() { # a name, then a command whose exit status is the verdict
    local name=$1 start=$SECONDS log verdict=FAIL
    shift
    if [ "$mode" = list ]; then
        echo "run  $name"
        return
    fi
    log=$(mktemp)
    "$@" >"$log" 2>&1 && verdict=ok
    # A step that could not run all of itself says so in its last line, and does not count as passed.
    [ $verdict = FAIL ] || ! tail -n 1 "$log" | grep -qE ', [1-9][0-9]* skipped$' || verdict=skip
    echo $verdict >>"$verdicts"
    {
        printf '%-4s %-66s (%d s)\n' "$verdict" "$name" $((SECONDS - start))
        if [ $verdict = FAIL ]; then
            grep -E -A 6 ': Failure$|runtime error:|(ERROR|WARNING): [A-Z][a-z]+Sanitizer' "$log" | head -n 40
            tail -n 40 "$log"
        fi
        grep -h -o 'skipped: .*' "$log" | sort | uniq -c
    } >"$log.said"
    cat "$log.said"
    rm -f "$log" "$log.said"
}
beside() { # as step, beside one other: `wait` ends the pair. In the background bash ignores Ctrl-C: tests do not
    local name=$1
    shift
    [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n
    step "$name" env --default-signal "$@" &
}

# A commit's number is its place in history. A shallow clone has no history: there its hash stands for it.
commit=$(git rev-list --count HEAD 2>/dev/null || echo 0)
if [ "$(git rev-parse --is-shallow-repository 2>/dev/null)" = true ]; then
    commit=$((16#$(git rev-parse HEAD | cut -c1-8)))
fi
turn=0 quarter=(GTEST_TOTAL_SHARDS=4 "GTEST_SHARD_INDEX=$((commit / 16 % 4))")
[ "${ALL:-0}" = 0 ] || quarter=()
dealt() { # is this commit dealt the next expensive check? Says so where it is not
    turn=$((turn + 1))
    [ "${ALL:-0}" = 1 ] || [ $(((commit + turn) % 16)) = 0 ] && return
    echo "skipped: dealt to another commit: $1"
    return 1
}
deal() { # as step, where this commit gets it
    dealt "$1" && step "$@"
}
deal_beside() { # as beside, where this commit gets it
    dealt "$1" && beside "$@"
}

make_quiet() { make --no-print-directory -j2 "$@"; }

deal_runs() { # of a build: what it is called, its folder, the arrays of make's flags and of runs
    local what=$1 folder=$2 run mine=() programs=()
    local -n build_flags=$3 runs=$4
    for run in "${runs[@]}"; do
        dealt "$what: $run" || continue
        mine+=("$run")
        programs+=("$folder/${run%% *}")
        [ "$run" != test_interchange ] || programs+=("$folder"/{train,tune,sample,plan,convert}_gpt) # which it runs
    done
    [ ${#mine[@]} -gt 0 ] || return 0
    step "$what: build" make_quiet "BUILD=$folder" "${build_flags[@]}" "${programs[@]}"
    for run in "${mine[@]}"; do
        # shellcheck disable=SC2086 # a run is a program and its arguments
        beside "$what: $run" env "TRAIN_GPT=$folder/train_gpt" "${quarter[@]}" "$folder"/$run
    done
    wait
}

# ----------------------------------------------------------------------------
# cheap: at every commit

step "the README's table of files is current" scripts/readme_table.sh --check
step "the page and the tree: test/style.sh" test/style.sh
step "every mutant's fragment stands" test/mutate found
step "README's example compiles with the files that it names" test/copycheck.sh README.md
step "no statement begins with module or import: nvcc takes them for keywords" \
    bash -c '! grep -rnE "^ *(module|import)\>" --include=*.h --include=*.cuh --include=*.cu llmc train_gpt.cu dev'
step "no loop over {a, b} has a variable of a template's type: nvcc refuses it" \
    bash -c '! grep -rnE "for \((const )?[A-Z] [a-z_]+ : \{" --include=*.h --include=*.cuh --include=*.cu llmc train_gpt.cu dev'
step "build" make_quiet all tests-built build/bench_ops
step "what only GPUs run compiles: the kernels' test at full size, their benchmark" \
    "${CXX:-g++}" -std=c++20 -fsyntax-only -Wall -Wextra -Wno-unknown-pragmas -fopenmp -DEMULATE -x c++ \
    test/kernels/test_large.cpp dev/bench/kernels.cu
step "the ceiling: test/size.py" test/size.py
step "ladders, emulated" make_quiet DEVICE=cpu ladders
step "operators at -O3, as the program has them" build/bench_ops --seed "$commit"

# The scripts for machines with GPUs and for many machines, with stand-ins; what scripts and pages say.
step "scripts/gpu_check.sh" test/gpu_check_test.sh
step "GPU programs on a bare machine" test/bare_machine_test.sh
step "scripts/multi_node" test/multi_node_test.sh
step "scripts/run_*.sh" test/scripts_test.sh

# Plots, event files, and the scripts that download data, against a server on this machine.
step "chat formats in Jinja" test/io/chat_templates_test.py
step "dev/tensorboard.py" test/io/tensorboard_test.py
step "dev/data" test/io/data_scripts_test.py
step "dev/data/tokenize_chat.py" test/io/tokenize_chat_test.py
step "--train-tokenizer against tokenizers and tiktoken" test/io/bpe_train_test.py
step "dev/plot.py" test/io/plot_test.py
step "dev/compare.py" test/io/compare_test.py
step "dev/ds_config.py" test/io/ds_config_test.py
step "dev/bench/sass.py" test/io/sass_test.py

# Other programs read what this one writes, where they are installed.
step "scores against lm-evaluation-harness" test/io/lm_eval_check.py
step "exports in transformers" test/io/transformers_check.py
step "exports in llama.cpp" test/io/llama_cpp_check.py
step "configurations and tokenizers of Hugging Face" test/io/huggingface_check.py

# Other mutants at each commit; `make mutate` runs all.
step "a sample of 8 mutants turns the suite red" test/mutate 8 "$commit"

# ----------------------------------------------------------------------------
# sanitizers

# oneDNN's JIT code is not instrumented; leaks of its global caches are not ours.
export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0
asan=(OPT="-O1 -march=native" EXTRA="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1")
asan_runs=("test_ops --seed 11" test_model test_layouts test_comm test_types test_fp8 test_data
    test_safetensors test_prepare test_tokenizer test_golden test_huggingface test_dialects test_checkpoint test_evaluate test_interchange
    test_faults "test_offload --gtest_filter=-*Run*"
    test_kernels test_attention_kernels test_attention_sm90 "fuzz_readers --seconds 60 --seed 3")
deal_runs "AddressSanitizer and UBSan" build/asan asan asan_runs
deal "AddressSanitizer and UBSan: ladders" make_quiet DEVICE=cpu BUILD=build/asan "${asan[@]}" ladders

# ThreadSanitizer sees neither OpenMP nor oneDNN: without both, one thread a rank, it checks what is left.
tsan=(ONEDNN=0 MPI=0 OPENMP=-Wno-unknown-pragmas OPT="-O1 -march=native" EXTRA="-fsanitize=thread -g1")
tsan_runs=("test_ops --seed 12" test_model test_layouts test_comm test_prepare "test_offload --gtest_filter=-*Run*"
    test_kernels test_attention_kernels test_attention_sm90)
deal_runs "ThreadSanitizer" build/tsan tsan tsan_runs
deal "ThreadSanitizer: ladders" make_quiet DEVICE=cpu BUILD=build/tsan "${tsan[@]}" ladders
deal "planted bugs that sanitizers find" test/harness/emulator_bugs.sh build/emulator

# ----------------------------------------------------------------------------
# other builds, threads and seeds

plain=(ONEDNN=0)
plain_runs=("test_ops --seed 13" test_model)
deal_runs "without oneDNN" build/plain plain plain_runs
deal "without oneDNN: the program" make_quiet BUILD=build/plain ONEDNN=0 all
for threads in 1 3; do
    deal_beside "the step with $threads threads" env OMP_NUM_THREADS=$threads build/test_model
    deal_beside "operators with $threads threads" env OMP_NUM_THREADS=$threads build/bench_ops --seed $threads
done
for seed in 21 22 23; do
    for program in bench_ops test_kernels test_attention_kernels test_attention_sm90; do
        deal_beside "$program with seed $seed" build/$program --seed $seed
    done
done
deal_beside "300 faults in a life, seed $commit" env SEED="$commit" build/test_faults --gtest_also_run_disabled_tests --gtest_filter=*HundredsOfFaults
deal_beside "every float as fp8" build/test_fp8 --gtest_also_run_disabled_tests --gtest_filter=*EveryFloat*
wait

# Files that are copied into other projects compile with what their headers name.
deal "operator files alone" test/copycheck.sh

# What ptxas makes of attention's overlap, which the emulator cannot see.
deal "limits on machine code" test/sass_guard_test.sh

[ "$mode" = list ] && exit
passed=$(grep -c ok "$verdicts") failed=$(grep -c FAIL "$verdicts") skipped=$(grep -c skip "$verdicts")
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
