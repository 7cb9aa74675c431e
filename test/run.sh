#!/usr/bin/env bash
# Run the test programs of a build folder and count: one line a program, failures in full, `N passed, N failed` last.
# usage: test/run.sh BUILD test_name ...
set -u
build=$1
shift
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # waiting threads sleep soon: others use the cores too
export TRAIN_GPT=$build/train_gpt

# What GoogleTest's failed tests printed, and a table's failed rows, with the seed that repeats them; of a program that
# crashed, its end.
failures() {
    awk '/^\[ RUN / { block = "" }
         /^seed / { print }
         { block = block $0 "\n" }
         /^FAIL / { printf "%s", block; seen = 1 }
         /^(ok|FAIL|seed) / { block = "" }
         /^\[  FAILED  \].*ms\)/ { printf "%s", block; seen = 1 }
         END { if (!seen) printf "%s", block }' "$1" | tail -n 300
}

run_one() { # a test: its line, with what its log says was skipped and what failed, in one piece
    local name=$1 log=$build/$1.log start=$SECONDS status p s f
    env --default-signal "$build/$name" >"$log" 2>&1 </dev/null # in the background bash ignores Ctrl-C: tests do not
    status=$?

    # GoogleTest's words, or the op table's
    p=$(grep -c -E '^\[       OK \]|^ok ' "$log")
    s=$(grep -c -E '^\[  SKIPPED \].*ms\)' "$log")
    f=$(grep -c -E '^\[  FAILED  \].*ms\)|^FAIL ' "$log")
    [ $status -ne 0 ] && [ "$f" -eq 0 ] && f=1 # it crashed

    {
        printf '%-12s %4d passed, %d failed, %d skipped  (%d s)\n' "$name" "$p" "$f" "$s" $((SECONDS - start))
        grep -h -o 'skipped: .*' "$log" | sort | uniq -c | sed 's/^/    /'
        [ $status -ne 0 ] && failures "$log"
    } >"$log.said"
    echo "$(<"$log.said")" # cat copies file to file at an offset of its own, over what another one writes
    echo "$p $f" >"$log.counts"
}

# Two programs at a time: many wait for a disk, a timer or one thread. Slow ones come first in the list.
for name in "$@"; do
    rm -f "$build/$name.log.counts"
    [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n
    run_one "$name" &
done
wait

passed=0 failed=0
for name in "$@"; do
    read -r p f <"$build/$name.log.counts" || p=0 f=1
    passed=$((passed + p)) failed=$((failed + f))
done
[ $failed -eq 0 ] && [ $passed -gt 0 ]
verdict=$?
echo "$passed passed, $failed failed"
exit $verdict
