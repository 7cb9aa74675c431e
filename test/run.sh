#!/usr/bin/env bash
# Run the test programs of a build folder and count: one line a program, failures in full, `N passed, N failed` last.
# usage: test/run.sh BUILD test_name ...
set -u
build=$1
shift
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # waiting threads sleep soon: others use the cores too
export TRAIN_GPT=$build/train_gpt

# What GoogleTest's failed tests and the table's failed rows printed; of a program that crashed, its end.
failures() {
    awk '/^\[ RUN / { block = "" }
         { block = block $0 "\n" }
         /^FAIL / { print; seen = 1 }
         /^\[  FAILED  \].*ms\)/ { printf "%s", block; seen = 1 }
         END { if (!seen) printf "%s", block }' "$1" | tail -n 300
}

passed=0 failed=0 skipped=0
for name in "$@"; do
    log=$build/$name.log
    start=$SECONDS
    "$build/$name" >"$log" 2>&1
    status=$?
    # GoogleTest's words, or the op table's
    p=$(grep -c -E '^\[       OK \]|^ok ' "$log")
    s=$(grep -c -E '^\[  SKIPPED \].*ms\)' "$log")
    f=$(grep -c -E '^\[  FAILED  \].*ms\)|^FAIL ' "$log")
    [ $status -ne 0 ] && [ "$f" -eq 0 ] && f=1 # it crashed
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    printf '%-12s %4d passed, %d failed, %d skipped  (%d s)\n' "$name" "$p" "$f" "$s" $((SECONDS - start))
    grep -h -o 'skipped: .*' "$log" | sort | uniq -c | sed 's/^/    /'
    [ $status -ne 0 ] && failures "$log"
done
[ $failed -eq 0 ] && [ $passed -gt 0 ]
verdict=$?
echo "$passed passed, $failed failed"
exit $verdict
