#!/usr/bin/env bash
# Write the tables that are made of files' first lines and lengths: README's reading path and techniques,
# and the whole of llmc/README.md. With --check it only says whether they are current, and
# whether every file and test that a page names is there.
#   A table stands between <!-- NAME --> and <!-- end of NAME -->. No list here has to be complete: a file that an
#   order does not name comes behind those it names, and a name without a file is passed over.
set -eu
cd "$(dirname "$0")/.."
fail() { echo "readme_table.sh: error: $*" >&2; exit 1; }

# The first line of each file, "// name - what it is - arXiv:1234.56789", without its name; papers become links.
what_it_is() { # file
    local line
    line=$(head -n 1 "$1")
    [[ $line == "// $(basename "$1") - "* ]] || fail "$1: its first line is not '// $(basename "$1") - what it is'"
    sed -E 's|^// [^ ]+ - ||; s|arXiv:([0-9.]+)|[arXiv:\1](https://arxiv.org/abs/\1)|g' <<<"$line"
}
lines() { cat "$@" | wc -l; }
row() { # file, as the table's own folder sees it
    printf '| [%s](%s) | %d | %s |\n' "$(basename "$1")" "$2" "$(lines "$1")" "$(what_it_is "$1")"
}

# Files of a folder in an order of names without endings, then the rest by the alphabet.
ordered() { # files, one a line, on standard input; then names
    local files name file
    files=$(sort)
    for name in "$@"; do
        grep -E "(^|/)$name\.[a-z]+$" <<<"$files" || true
    done
    for file in $files; do
        name=$(basename "$file")
        [[ " $* " == *" ${name%.*} "* ]] || echo "$file"
    done
}

# ----------------------------------------------------------------------------
# rooms: the folder says which

wing() { ls llmc/"$1"/* | ordered "${@:2}"; }
syllabus() { ls llmc/*.h | ordered "$@"; }

group() { # heading, one sentence; files on standard input
    printf '## %s\n\n%s\n\n| file | lines | what it is |\n|---|---:|---|\n' "$1" "$2"
    while read -r file; do row "$file" "${file#llmc/}"; done
    echo
}
contents() {
    cat <<'END'
# llmc: the files

`scripts/readme_table.sh` writes this page from the files' first lines. The syllabus is flat: the step and its
techniques. A file includes what it uses, directly, and no file includes a later room. The order of rooms is
`ops`, `comm`, this folder, `io`, `planner`, `run`, `tune`, `extra`; programs include all.

END
    syllabus action sharding access plan plan_check streams arena sizes model parameters context trainer transfers load layers step \
        family gpt2 llama mixtral gpt_oss mla head layout zero tensor_parallel pipeline context_parallel expert_parallel \
        recompute offload fp8 quantised optimizer adapters text | group "The syllabus" \
        "A training step as a printed, checked list of actions, and the loop that runs it; models; how ranks share the work; what saves memory."
    wing ops types cuda_common memory rand embedding layernorm rmsnorm rope gelu swiglu moe matmul grouped_matmul fp8 linear \
        attention_types attention_rows attention_cpu attention_tiled attention_join attention \
        attention_sm80 attention_sm90 mma hopper crossentropy adamw grad_norm | group "ops: operators" \
        "An operator is maths, a CPU version, CUDA kernels and launchers; the headers are what operators share. Copy one with what its line *To copy* names."
    wing comm comm group local mpi nccl placement | group "comm: messages between ranks" \
        "One interface; ranks are threads, MPI processes, or processes with a GPU each."
    wing io config config_check config_notes plan_flags help tokenizer tokenizer_files tokenizer_export dataloader prepare \
        checkpoint safetensors huggingface hf_config model_files files logger \
        explain timeline generate sampler evaluate likelihood | group "io: formats" \
        "What goes into a run and what comes out of it."
    wing planner simulator cost layer_cost links evaluate plan_search fit calibrate | group "planner: what fits, what is fastest" \
        "A step's time and memory on any machine, before it runs."
    wing run run choose folder report sample | group "run: the life of a run" \
        "What programs call before, during and after the steps."
    wing tune conversations rewards rollouts reference_policy on_policy teacher | group "tune: fine-tuning" \
        "Conversations, preferences, rewards, distillation, adapters' files."
    wing extra gguf gptq | group "extra: extensions" \
        "Formats and techniques that nobody needs to understand the rest; only programs include them."
}

# ----------------------------------------------------------------------------
# README's tables: short, without the spaces that other tables have

# The files that explain the step of one rank, in reading order; a reader takes 50 lines a minute.
minutes() { echo $((($1 + 49) / 50)); }
path() {
    local all=() file why n spent=0
    echo '|minutes|lines|file|read it for|'
    echo '|---:|---:|---|---|'
    while IFS='|' read -r file why; do
        [ -e "$file" ] || continue
        n=$(lines "$file")
        if [ "$file" != train_gpt_min.cpp ]; then
            all+=("$file")
            spent=$((spent + $(minutes "$n")))
        fi
        echo "|$(minutes "$n")|$n|[$(basename "$file")]($file)|$why|"
    done <<'END'
train_gpt_min.cpp|GPT-2 on one core, no options; the trainer must give its losses
llmc/action.h|the words of a plan
llmc/access.h|what each action reads and writes
llmc/plan.h|how a plan is made
llmc/model.h|tables of parameters, buckets, activations
llmc/context.h|what a block receives besides its pointers
llmc/gpt2.h|the blocks as straight text
llmc/trainer.h|one rank's state
llmc/layers.h|how an action runs a layer
llmc/step.h|what each action does, and the one loop that runs them
END
    n=$(lines "${all[@]}")
    echo "|$spent|$n|**the step**|all but the first row|"
    [ "$n" -le 3300 ] || echo "readme_table.sh: the step takes $n lines; at most 3300 are promised to a reader" >&2
}

# What a file is, up to what its first line says of the details; its papers as links of their own.
in_short() { # file
    local line papers
    line=$(head -n 1 "$1" | sed -E 's|^// [^ ]+ - ||')
    papers=$(grep -oE '[0-9]{4}\.[0-9]{5}' <<<"$line" | sed -E 's|(.*)|[\1](https://arxiv.org/abs/\1)|' | paste -sd' ' -)
    line=${line%% - *}
    case $line in
    *[:\;]*) line=${line%%[:;]*} ;;
    *,*) line=${line%, *} ;;
    esac
    echo "$line|$papers"
}
techniques() {
    local name file
    some() { # heading, names
        echo "|**$1**||||"
        for name in "${@:2}"; do
            for file in llmc/ops/"$name".cuh llmc/"$name".h llmc/comm/"$name".h llmc/planner/"$name".h; do
                [ ! -e "$file" ] || echo "|[$(basename "$file")]($file)|$(lines "$file")|$(in_short "$file")|"
            done
        done
    }
    echo '|file|lines|what it is|arXiv|'
    echo '|---|---:|---|---|'
    some operators embedding layernorm rmsnorm rope swiglu matmul lora attention attention_sm80 attention_sm90 moe fp8_matmul crossentropy objective adamw
    some "the step" action plan arena step gpt2 llama mixtral mla simulator
    some "parallelism and memory" pipeline zero tensor_parallel context_parallel expert_parallel offload small_states comm
}

# The program's lines, and those that a reader of train_gpt.cu may come to: what it includes, directly or not.
size_of_program() {
    local all trainer
    all=$(find . -maxdepth 1 -name '*_gpt*.c*' | cat - <(find llmc -name '*.h' -o -name '*.cuh') | xargs cat | wc -l)
    trainer=$("${CXX:-g++}" -std=c++20 -MM -x c++ train_gpt.cu | tr ' \\' '\n\n' | grep -E '^(llmc/.*h|train_gpt.cu)$' |
        xargs realpath | sort -u | grep -v '/test/' | xargs cat | wc -l)
    echo "$all lines, of which the trainer is $trainer, in six programs over one library. \`make check\` holds each room to [a ceiling](CONTRIBUTING.md#restraint)."
}
between() { # name, text: README.md on standard input with the table put in
    awk -v name="$1" -v text="$2" '
        $0 == "<!-- " name " -->" {print; print text; skip = 1; found++; next}
        $0 == "<!-- end of " name " -->" {skip = 0}
        !skip
        END {if (found != 1 || skip) exit 1}' || fail "README.md: no table stands between <!-- $1 --> and <!-- end of $1 -->"
}
readme=$(between lines "$(size_of_program)" <README.md)
readme=$(between path "$(path)" <<<"$readme")
readme=$(between techniques "$(techniques)" <<<"$readme")
list=$(contents)

# Every file and every test program that a page names is there.
names_exist() {
    local page name wrong=0
    for page in README.md CONTRIBUTING.md docs/*.md llmc/README.md scripts/README.md test/README.md dev/golden/README.md; do
        while read -r name; do # links, seen from the page's folder
            [ -e "$(dirname "$page")/$name" ] ||
                { echo "$page: links to $name, which is not there" >&2; wrong=1; }
        done < <(grep -oE '\]\([^)#]+' "$page" | cut -c3- | grep -v '^http')
        while read -r name; do # `llmc/plan.h`, seen from the root; patterns too
            compgen -G "$name" >/dev/null ||
                { echo "$page: names $name, which is not there" >&2; wrong=1; }
        done < <(grep -oE '`(llmc|test|scripts|docs|dev)/[A-Za-z0-9_./*]+' "$page" | cut -c2- | grep -v '/$' | grep -v NAME)
        while read -r name; do # programs
            compgen -G "test/*/$name.cpp" >/dev/null ||
                { echo "$page: names $name, and no test is called that" >&2; wrong=1; }
        done < <(grep -oE '\btest_[a-z0-9_]+\b' "$page" | sort -u)
    done
    return $wrong
}

if [ "${1:-}" = --check ]; then
    [ "$readme" = "$(cat README.md)" ] || fail "README.md: its tables are not current: run scripts/readme_table.sh"
    [ "$list" = "$(cat llmc/README.md)" ] || fail "llmc/README.md is not current: run scripts/readme_table.sh"
    names_exist || fail "a page names what is not there"
else
    printf '%s\n' "$readme" >README.md
    printf '%s\n' "$list" >llmc/README.md
fi
