#!/usr/bin/env bash
# The longer checks, about an hour on two cores: the suite and the kernels under AddressSanitizer and UBSan; the
# operators, the kernels and the step under ThreadSanitizer; without oneDNN; with one and three threads; a bounded
# fuzz; every operator file alone; a sample of mutants. Last line: N passed, N failed.
set -u
cd "$(dirname "$0")/.."
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # waiting threads sleep soon: others use the cores too
passed=0 failed=0
step() { # a name, then a command whose exit status is the verdict
    local name=$1 start=$SECONDS log
    shift
    log=$(mktemp)
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1)) verdict=ok
    else
        failed=$((failed + 1)) verdict=FAIL
    fi
    printf '%-4s %-58s (%d s)\n' "$verdict" "$name" $((SECONDS - start))
    [ $verdict = FAIL ] && tail -n 40 "$log"
    grep -h -o 'skipped: .*' "$log" | sort | uniq -c
    rm -f "$log"
}
make_quiet() { make --no-print-directory -j2 "$@"; }

# AddressSanitizer and UBSan. oneDNN's JIT code is not instrumented; leaks of its global caches are not ours.
asan="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0
step "the README's table of files is current" scripts/readme_table.sh --check
step "build with AddressSanitizer and UBSan" make_quiet BUILD=build/asan OPT="-O1 -march=native" EXTRA="$asan" \
    build/asan/test_ops build/asan/test_model build/asan/test_data build/asan/test_prepare build/asan/test_tokenizer build/asan/test_files build/asan/test_evaluate build/asan/test_interchange build/asan/train_gpt build/asan/fuzz_readers \
    build/asan/test_faults build/asan/test_kernels build/asan/test_attention_kernels build/asan/test_attention_sm90 build/asan/test_layouts build/asan/test_comm
step "operators, AddressSanitizer" build/asan/test_ops --seed 11
step "the step, AddressSanitizer" build/asan/test_model
step "layouts, AddressSanitizer" build/asan/test_layouts
step "collectives, AddressSanitizer" build/asan/test_comm
step "data readers, AddressSanitizer" build/asan/test_data
step "data preparation, AddressSanitizer" env TRAIN_GPT=build/asan/train_gpt build/asan/test_prepare
step "tokenizers, AddressSanitizer" build/asan/test_tokenizer
step "files and checkpoints, AddressSanitizer" build/asan/test_files
step "evaluation, AddressSanitizer" build/asan/test_evaluate
step "files of others, AddressSanitizer" env TRAIN_GPT=build/asan/train_gpt build/asan/test_interchange
step "faults of files, AddressSanitizer" env TRAIN_GPT=build/asan/train_gpt build/asan/test_faults
step "kernels, AddressSanitizer" build/asan/test_kernels
step "attention's kernels, AddressSanitizer" build/asan/test_attention_kernels
step "attention's kernels for Hopper, AddressSanitizer" build/asan/test_attention_sm90
step "ladders, AddressSanitizer" make_quiet DEVICE=cpu BUILD=build/asan OPT="-O1 -march=native" EXTRA="$asan" ladders
step "hostile files for 60 s, AddressSanitizer" build/asan/fuzz_readers --seconds 60 --seed 3

# ThreadSanitizer sees neither OpenMP nor oneDNN: without both, one thread a rank, it checks what is left.
step "build with ThreadSanitizer" make_quiet BUILD=build/tsan ONEDNN=0 MPI=0 OPENMP=-Wno-unknown-pragmas OPT="-O1 -march=native" EXTRA="-fsanitize=thread -g" \
    build/tsan/test_model build/tsan/test_layouts build/tsan/test_comm build/tsan/test_prepare build/tsan/test_ops build/tsan/test_kernels build/tsan/test_attention_kernels build/tsan/test_attention_sm90
step "the step, ThreadSanitizer, without oneDNN and OpenMP" build/tsan/test_model
step "layouts, ThreadSanitizer" build/tsan/test_layouts
step "collectives, ThreadSanitizer" build/tsan/test_comm
step "data preparation, ThreadSanitizer" build/tsan/test_prepare
step "operators, ThreadSanitizer, without oneDNN and OpenMP" build/tsan/test_ops --seed 12
step "ladders, ThreadSanitizer" make_quiet DEVICE=cpu BUILD=build/tsan ONEDNN=0 OPENMP=-Wno-unknown-pragmas OPT="-O1 -march=native" \
    EXTRA="-fsanitize=thread -g" ladders
step "planted bugs that sanitizers find" test/emulator_bugs.sh build/emulator
step "kernels, ThreadSanitizer" build/tsan/test_kernels
step "attention's kernels, ThreadSanitizer" build/tsan/test_attention_kernels
step "attention's kernels for Hopper, ThreadSanitizer" build/tsan/test_attention_sm90

# Without oneDNN; with other numbers of threads.
step "build without oneDNN" make_quiet BUILD=build/plain ONEDNN=0 all build/plain/test_ops build/plain/test_model
step "operators without oneDNN" build/plain/test_ops --seed 13
step "the step without oneDNN" build/plain/test_model
for threads in 1 3; do
    step "the step with $threads threads" env OMP_NUM_THREADS=$threads build/test_model
    step "operators with $threads threads" env OMP_NUM_THREADS=$threads build/test_ops --seed $threads
done
for seed in 21 22 23; do
    step "operators, seed $seed" build/test_ops --seed $seed
    step "kernels, seed $seed" build/test_kernels --seed $seed
    step "attention's kernels, seed $seed" build/test_attention_kernels --seed $seed
    step "attention's kernels for Hopper, seed $seed" build/test_attention_sm90 --seed $seed
done

step "ladders, emulated" make_quiet DEVICE=cpu ladders

# Files that are copied into other projects compile with what their headers name.
step "operator files alone" test/copycheck.sh

# The script for machines with a GPU, with stand-ins for the GPU and its programs.
step "scripts/gpu_check.sh" test/gpu_check_test.sh

# The scripts for many machines, on two slots of this one.
step "scripts/multi_node" test/multi_node_test.sh

# The scripts that reproduce published runs: their comments are what --explain says.
step "scripts/run_*.sh" test/scripts_test.sh

# Plots, event files, and the scripts that download data, against a server on this machine.
step "dev/tensorboard.py" test/tensorboard_test.py
step "dev/data" test/data_scripts_test.py
step "dev/plot.py" test/plot_test.py
step "scores against lm-evaluation-harness, where it is" test/lm_eval_check.py

# Exports as transformers reads them, where it is installed.
step "exports in transformers" test/transformers_check.py

# A seeded sample of mutants; `make mutate` runs all.
step "a sample of 8 mutants turns the suite red" test/mutate 8 1

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
