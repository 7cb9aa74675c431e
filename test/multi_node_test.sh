#!/usr/bin/env bash
# scripts/multi_node: ranks by a host file, here two slots of this machine; mistakes; srun by a stand-in.
set -eu
cd "$(dirname "$0")/.."
program=${TRAIN_GPT:-build/train_gpt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="--layers 2 --heads 2 --channels 32 --seq 32 --micro-batch 4 --steps 3 --sample-tokens 0 --eval-tokens 64"
refuses() { # the text that it must say, then the command
    local text=$1
    shift
    ! "$@" >"$work/log" 2>&1 || { echo "it did not refuse: $*"; exit 1; }
    grep -qF -- "$text" "$work/log" || { echo "it does not say: $text"; cat "$work/log"; exit 1; }
}
refuses "no such host file" scripts/multi_node/mpirun.sh "$work/none" 2 "$program"
echo "# nobody" >"$work/empty"
refuses "names no machine" scripts/multi_node/mpirun.sh "$work/empty" 2 "$program"
refuses "is no number of ranks" scripts/multi_node/mpirun.sh "$work/empty" two "$program"
refuses "start it with sbatch" scripts/multi_node/slurm.sh "$program"

mkdir "$work/bin"
printf '#!/bin/sh\necho "srun $* with $OMP_NUM_THREADS threads"\n' >"$work/bin/srun"
chmod +x "$work/bin/srun"
PATH=$work/bin:$PATH SLURM_JOB_ID=1 SLURM_CPUS_ON_NODE=64 SLURM_NTASKS_PER_NODE=8 scripts/multi_node/slurm.sh "$program" --pp 2 >"$work/log"
grep -q "srun --mpi=pmix --kill-on-bad-exit=1 $program --pp 2 with 8 threads" "$work/log"

# A job that fails queues again, as often as it may.
printf '#!/bin/sh\nexit 7\n' >"$work/bin/srun"
printf '#!/bin/sh\necho "scontrol $*"\n' >"$work/bin/scontrol"
chmod +x "$work/bin/scontrol"
queues() { ! PATH=$work/bin:$PATH SLURM_JOB_ID=5 SLURM_RESTART_COUNT=$1 scripts/multi_node/slurm.sh "$program" >"$work/log"; }
REQUEUES=2 queues 1
grep -q "scontrol requeue 5" "$work/log"
REQUEUES=2 queues 2
[ ! -s "$work/log" ]
queues 0
[ ! -s "$work/log" ]

if ! command -v mpirun >/dev/null || [ "$(mpirun --allow-run-as-root -np 1 "$program" --help 2>&1 | grep -c 'built without MPI')" != 0 ]; then
    echo "skipped: no mpirun, or a program built without MPI"
    exit 0
fi
echo "localhost slots=2" >"$work/hosts"
losses() { grep -oE 'step +[0-9]+/[0-9]+ . loss [0-9.]+' "$1"; }
scripts/multi_node/mpirun.sh "$work/hosts" 2 "$program" $flags --pp 2 >"$work/processes" 2>&1 || { cat "$work/processes"; exit 1; }
OMP_NUM_THREADS=1 "$program" $flags --local-ranks 2 --pp 2 >"$work/threads"
diff <(losses "$work/processes") <(losses "$work/threads")
[ "$(losses "$work/threads" | wc -l)" = 3 ]

# Ctrl-C saves, in every rank after the same step.
scripts/multi_node/mpirun.sh "$work/hosts" 2 "$program" $flags --steps 1000000 --pp 2 --out "$work/out" >"$work/stopped" 2>&1 &
job=$!
for _ in $(seq 300); do grep -q "step .*10/1000000" "$work/stopped" && break || sleep 0.1; done
kill -TERM "$job"
status=0
wait "$job" || status=$?
[ "$status" = 138 ] || { echo "it ended with $status, not 128 + SIGUSR1"; cat "$work/stopped"; exit 1; }
grep -q "stopped by SIGUSR1 at step" "$work/stopped"
ls -d "$work"/out/step_*[0-9] >/dev/null

# The supervisor, over four machines that are slots of this one: a stand-in for mpirun leaves the host file out, and
# gives each rank one thread, as ranks in a process have: without AVX-512 oneDNN's sums depend on their number.
real=$(command -v mpirun)
cat >"$work/bin/mpirun" <<END
#!/usr/bin/env bash
while [ \$1 != -np ]; do shift; done
[ \$(id -u) = 0 ] && root=--allow-run-as-root || root=
OMP_NUM_THREADS=1 exec $real \$root --oversubscribe "\${@/#OMP_NUM_THREADS=*/OMP_NUM_THREADS=1}"
END
printf '#!/bin/sh\n[ ! -e "%s/dead.$1" ]\n' "$work" >"$work/bin/healthy"
chmod +x "$work/bin/mpirun" "$work/bin/healthy"
export HEALTHY=$work/bin/healthy RETRY_SECONDS=0.1
printf 'm1 slots=1\nm2 slots=1\n# spare\nm3 slots=1\nm4 slots=1\n' >"$work/machines"
supervise_as_is() { OMP_NUM_THREADS=1 PATH=$work/bin:$PATH scripts/multi_node/supervise.sh "$work/machines" 1 "$program" $flags "$@"; }
supervise() { supervise_as_is --batch-tokens 1536 "$@"; }
wait_for() { # a text in a file
    for _ in $(seq 300); do grep -q -- "$1" "$2" 2>/dev/null && return || sleep 0.1; done
    echo "no '$1' in $2"
    cat "$2"
    exit 1
}
refuses "without --out DIR" supervise

# A flag that is wrong in any layout is refused at once, and blamed by name.
refuses "the run is refused on all machines" supervise --export "$work/no/such" --out "$work/wrong"
grep -q -- "error: --export $work/no/such: cannot be " "$work/log"
! grep -qE 'starting|have no place' "$work/log"

kill_a_rank() { # of the run that writes to a folder
    kill -KILL "$(pgrep -f -- "--out $1" | xargs -r ps -o pid=,comm= -p | awk '$2 == "train_gpt" { print $1; exit }')"
}
cat >"$work/same_run.py" <<'END'
# The folder's run took the tokens of the undisturbed one in each step, and its losses but for the order of sums.
import json, sys
def losses(name):
    lines = [json.loads(line) for line in open(f"{name}/log.jsonl")]
    return [(x["step"], x["tokens"], x["loss"]) for x in lines if "loss" in x]
kept, undisturbed, batch, steps = losses(sys.argv[1]), losses(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
assert [x[:2] for x in kept] == [x[:2] for x in undisturbed] == [(n, batch * n) for n in range(1, steps + 1)]
assert kept[:10] == undisturbed[:10]
worst = max(abs(a[2] - b[2]) for a, b in zip(kept, undisturbed))
assert 0 < worst < 2e-3, worst # other ranks add in another order
END

# A rank dies and its machine is gone: three go on from the last checkpoint, with the same batch and data.
supervise --steps 120 --save-every 10 --out "$work/kept" >"$work/supervised" 2>&1 &
job=$!
wait_for '"step":1[2-9]' "$work/kept/log.jsonl"
touch "$work/dead.m4"
kill_a_rank "$work/kept"
wait_for "resumed at step" "$work/supervised" # which waits half a minute at most
wait "$job" || { cat "$work/supervised"; exit 1; }
grep -q "starting 4 ranks on 4 machines" "$work/supervised"
grep -q "m4 does not answer: left out" "$work/supervised"
grep -q "starting 3 ranks on 3 machines" "$work/supervised"
grep -qE "resumed at step [1-9][0-9]*0" "$work/supervised"
OMP_NUM_THREADS=1 "$program" $flags --batch-tokens 1536 --steps 120 --local-ranks 4 --out "$work/undisturbed" >"$work/log" 2>&1
python3 "$work/same_run.py" "$work/kept" "$work/undisturbed" 1536 120

# Stages and shards of four ranks have no place on three, nor has dp 3 a part of this batch, which no flag names: another
# layout is planned. When the machine is back, the flags count again.
rm "$work/dead.m4"
of_four="--tp 2 --pp 2 --micro-batch 16 --steps 300 --lr 1e-4"
supervise_as_is $of_four --save-every 20 --out "$work/planned" >"$work/supervised" 2>&1 &
job=$!
wait_for '"step":2[2-9]' "$work/planned/log.jsonl"
touch "$work/dead.m4"
kill_a_rank "$work/planned"
wait_for "resumed at step" "$work/supervised"
newest() { ls -d "$work"/planned/step_*[0-9] | tail -1; }
saved=$(newest)
for _ in $(seq 300); do [ "$(newest)" = "$saved" ] || break; sleep 0.1; done
rm "$work/dead.m4"
kill_a_rank "$work/planned"
wait "$job" || { cat "$work/supervised"; exit 1; }
says="the flags have no place on 3 machines (--dp 1 x --tp 2 x --pp 2 are 4 ranks, and there are 3: "
grep -F "$says" "$work/supervised" | grep -q -- "--plan auto says --batch-tokens 512 --dp 1 "
[ "$(grep -oE 'starting . ranks' "$work/supervised" | tr -d '\n')" = "starting 4 ranksstarting 3 ranksstarting 4 ranks" ]
OMP_NUM_THREADS=1 "$program" $flags $of_four --local-ranks 4 --out "$work/four" >"$work/log" 2>&1
python3 "$work/same_run.py" "$work/planned" "$work/four" 512 300

# Half of the ranks are one whole replica: the flags stay, on two machines of three. Memory is a reason too.
touch "$work/dead.m4"
supervise --tp 2 --steps 2 --out "$work/half" >"$work/supervised" 2>&1
grep -q "starting 2 ranks on 2 machines" "$work/supervised"
supervise --memory 0.002 --steps 2 --out "$work/small" >"$work/supervised" 2>&1
grep "no place on 3 machines (.*--memory 0.002 is less" "$work/supervised" | grep -q -- "--plan auto says"

# A folder on a file system without locks is said, and not waited for.
printf '#!/bin/sh\nexit 71\n' >"$work/bin/flock"
chmod +x "$work/bin/flock"
mkdir "$work/unlocked"
touch "$work/unlocked/lock"
supervise --steps 2 --out "$work/unlocked" >"$work/supervised" 2>&1
grep -q "unlocked is on a file system without locks: see that no other run writes there" "$work/supervised"
rm "$work/bin/flock"

# What fails at one step three times is no machine's fault.
touch "$work/dead.m2" "$work/dead.m3"
refuses "three attempts have failed after step 0, the last with status 1: the cause is in the run" supervise --lr 1e30 --warmup 0 --min-lr 0 --clip 0 --out "$work/nan"

# If the supervisor is killed the run goes on; the next one waits for its end, then goes on.
supervise --steps 1000000 --out "$work/orphan" >"$work/first" 2>&1 &
job=$!
wait_for '"step":10' "$work/orphan/log.jsonl"
kill -KILL "$(pgrep -f "supervise.sh $work/machines" | head -1)" "$job" 2>/dev/null || true
supervise --steps 20 --out "$work/orphan" >"$work/second" 2>&1 &
second=$!
wait_for "another run writes to $work/orphan" "$work/second"
kill -USR1 "$(pgrep -f -- "-np 1 .*--out $work/orphan" | head -1)"
wait "$second" || { cat "$work/second"; exit 1; }
ls -d "$work"/orphan/step_*[0-9] >/dev/null
echo "ok: scripts/multi_node"
