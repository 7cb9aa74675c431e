#!/usr/bin/env bash
# Keep a run on many machines alive: whenever it fails, start it again from its last checkpoint, on the machines left.
# usage: scripts/multi_node/supervise.sh HOSTFILE RANKS_A_HOST build/train_gpt FLAGS... --out DIR
#   Each attempt takes the machines of HOSTFILE that answer, and of those as many as the flags can be shared out over:
#   --dp follows from the rest, and the global batch stays. Where the flags have no place on any number of them,
#   --plan auto, asked on these machines, chooses another layout that fits; once all are back, the flags count again.
#   $HEALTHY HOST says by its status whether a machine is taken (default: ssh; a test of its GPUs would stand here).
#   Ends with 0 once the run is done, with the run's status where a signal has stopped it, and with 1 at once where all
#   machines answer and the flags are refused in any layout, or where three attempts one after the other fail at the same
#   step: that is no machine's fault. A signal to it is passed on: the run saves.
#   If this script is killed the run goes on; started again, it waits for its end.
set -u
fail() { echo "supervise.sh: error: $*" >&2; exit 1; }
say() { echo "supervise.sh: $*" >&2; }
[ $# -ge 3 ] || fail "wants a host file, the ranks of a host and the program: see the head of this file"
hosts=$1 ranks=$2 program=$3
shift 3
[ -r "$hosts" ] || fail "$hosts: no such host file: write a line a machine, like: node1 slots=8"
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "$ranks is no number of ranks"
[ -x "$program" ] || fail "$program is not there: run make"
out=
for ((i = 1; i < $#; i++)); do
    [ "${!i}" != --out ] || { i=$((i + 1)) && out=${!i}; }
done
[ -n "$out" ] || fail "without --out DIR there is nothing to go on from"
wait_s=${RETRY_SECONDS:-5} # between two attempts
here=$(dirname "$0") layout=() batch=()
work=$(mktemp -d)
alive=$work/alive # the machines of an attempt
trap 'rm -rf "$work"' EXIT

healthy() { # a machine
    if [ -n "${HEALTHY:-}" ]; then
        $HEALTHY "$1"
    else
        [ "$1" = localhost ] || ssh -n -o BatchMode=yes -o ConnectTimeout=5 "$1" true
    fi
}
choose_machines() { # those that answer, as many as have a layout, and its flags, in `layout`; false: none
    local line n count missing=
    : >"$alive"
    while read -r line; do
        [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
        if healthy "${line%% *}" </dev/null >/dev/null 2>&1; then echo "$line" >>"$alive"; else missing=1 && say "${line%% *} does not answer: left out"; fi
    done <"$hosts"
    until [ -n "$stopped" ] || [ -s "$alive" ]; do
        say "no machine answers: looking again in $wait_s s"
        sleep "$wait_s"
        choose_machines "$@"
        return
    done

    # The flags as they are, on as many machines as they can have. The first answer says the batch, which stays.
    count=$(wc -l <"$alive")
    layout=()
    for ((n = count; n > 0; n--)); do
        "$program" "$@" "${batch[@]}" --resume --local-ranks $((n * ranks)) --explain >"$work/said" 2>"$work/why" && break
        [ "$n" != "$count" ] || cp "$work/why" "$work/flags"
    done
    line=$(sed -nE 's/^run: .* x ([0-9]+) tokens .*/\1/p' "$work/said")
    [ "$n" = 0 ] || [ -z "$line" ] || batch=(--batch-tokens "$line")

    # Where they have no place: the largest number for which --plan auto finds a layout.
    [ "$n" -gt 0 ] || for ((n = count; n > 0; n--)); do plan_layout "$n" "$@" && break; done
    if [ "$n" = 0 ] && [ -z "$stopped" ]; then
        grep -h 'error: ' "$work/flags" "$work/why" | sort -u >&2
        [ -n "$missing" ] || fail "the run is refused on all machines: its errors are above"
    fi
    sed -i "$((n + 1)),\$d" "$alive"
    [ "$n" -gt 0 ]
}
plan_layout() { # for so many of the machines, then the flags: sets `layout`; false: nothing fits
    local n=$1 any=(--zero-group 0 --hpz 0 --cp-method gather --etp 0) # these count ranks too
    shift
    head -n "$n" "$alive" >"$work/some"
    "$here/mpirun.sh" "$work/some" "$ranks" "$program" "$@" "${batch[@]}" "${any[@]}" --resume --plan auto --explain \
        >"$work/said" 2>"$work/why" </dev/null
    line=$(sed -nE 's/.* (--batch-tokens [0-9]+ --dp .*)/\1/p' "$work/said" | tail -1)
    [ -n "$line" ] || return 1
    # A flag that is wrong in this layout too is no matter of machines.
    # shellcheck disable=SC2206 # words, and the last of two equal flags counts
    any=(--tp 1 --pp 1 --cp 1 --ep 1 --chunks 1 --zero 0 --pipeline 1f1b --recompute none --sequence-parallel false "${any[@]}" $line)
    "$program" "$@" "${any[@]}" --resume --local-ranks $((n * ranks)) --explain >/dev/null 2>"$work/why" || return 1
    say "the flags have no place on $(wc -l <"$alive") machines ($(sed -n 's/.* error: //p' "$work/flags")): --plan auto says $line"
    # shellcheck disable=SC2206
    batch=(${line%% --dp*})
    layout=("${any[@]}")
}
last_step() { grep -o '^{.*' "$out/log.jsonl" 2>/dev/null | grep -oE '"step": *[0-9]+' | tail -1 | grep -oE '[0-9]+' || echo 0; }
is_held() { # the folder, by a run; a file system without locks cannot say
    [ -e "$out/lock" ] || return 1
    flock -n -E 75 "$out/lock" true 2>/dev/null
    case $? in
        75) return 0 ;;
        0) return 1 ;;
    esac
    [ -n "$unlocked" ] || say "$out is on a file system without locks: see that no other run writes there"
    unlocked=1
    return 1
}
wait_for_folder() { # while a run that is not this script's writes there
    ! is_held || say "another run writes to $out: waiting for its end"
    while [ -z "$stopped" ] && is_held; do sleep 1; done
}

stopped= job= failures=0 step=none unlocked=
trap 'stopped=1; [ -z "$job" ] || kill -TERM "$job"' INT TERM HUP USR1 USR2 XCPU
trap '' PIPE # nobody may be reading what it says
while wait_for_folder; [ -z "$stopped" ]; do
    status=1
    if choose_machines "$@"; then
        say "starting $(($(wc -l <"$alive") * ranks)) ranks on $(wc -l <"$alive") machines"
        "$here/mpirun.sh" "$alive" "$ranks" "$program" "$@" "${batch[@]}" "${layout[@]}" --resume &
        job=$!
        while :; do # a signal ends `wait`, and not the job
            wait "$job"
            status=$?
            kill -0 "$job" 2>/dev/null || break
        done
        job=
        [ "$status" != 0 ] || exit 0
        case $status in 129 | 130 | 138 | 140 | 143 | 152) exit "$status" ;; esac # what llmc/run/stop.h lists
    fi

    # Go on, unless it fails where it has failed before.
    before=$step step=$(last_step)
    if [ "$before" = "$step" ]; then failures=$((failures + 1)); else failures=1; fi
    [ $failures -lt 3 ] || fail "three attempts have failed after step $step, the last with status $status: the cause is in the run"
    say "the run has failed with status $status after step $step: again in $wait_s s"
    sleep "$wait_s"
done
exit 143
