#!/usr/bin/env bash
# The emulator's planted bugs that only a sanitizer sees: its report must name the line that test_emulator.cpp marks
# "LINE name"; the right twins must be clean. Usage: test/harness/emulator_bugs.sh [directory]. Last line: N passed, N failed.
set -u
cd "$(dirname "$0")/../.."
build=${1:-build}
mkdir -p "$build"
passed=0 failed=0
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=exitcode=0
flags="-std=c++20 -O1 -g -march=native -fno-math-errno -Wall -Wextra -Wno-unknown-pragmas -DEMULATE"

verdict() { # what, 0: good
    if [ "$2" = 0 ]; then
        passed=$((passed + 1))
        echo "ok $1"
    else
        failed=$((failed + 1))
        echo "FAIL $1"
        [ -n "${report:-}" ] && echo "$report" | head -n 30
    fi
}
bugs() { # sanitizer, its word, names
    local sanitizer=$1 word=$2 program=$build/test_emulator_$1
    shift 2
    ${CXX:-g++} $flags -fsanitize=$sanitizer test/harness/test_emulator.cpp -o "$program" -lpthread
    verdict "$sanitizer: built" $?
    for name in "$@"; do
        line=$(grep -n "// LINE $name\$" test/harness/test_emulator.cpp | cut -d: -f1)
        report=$("$program" bug "$name" 2>&1)
        echo "$report" | grep -q "$word" && echo "$report" | grep -q "test_emulator.cpp:$line"
        verdict "$sanitizer: $name is reported at line $line" $?
    done
    report=$("$program" right all 2>&1)
    ! echo "$report" | grep -q "$word"
    verdict "$sanitizer: nothing is reported of the right twins" $?
}

bugs thread "ThreadSanitizer: data race" missing_barrier write_after_read named_barriers init_without_barrier \
    load_into_a_slot_in_use operand_without_barrier copy_into_a_tile_in_use
bugs address "AddressSanitizer" beyond_shared beyond_global

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
