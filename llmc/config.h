// config.h - one plain struct and one table: the flags, --help, --config files, and the copy in log and checkpoint
//   A row of the table is a flag: its name, its field, what it accepts, a line of help. What is not
//   built yet is a row too, and is refused by name. Checks that need more than one field are in
//   config_check(), each with both numbers and a fix; they run once, before anything is allocated.
#pragma once
#include <algorithm>
#include <climits>
#include <fstream>
#include <sstream>
#include <string>
#include <variant>
#include <vector>
#include <nlohmann/json.hpp>
#include "model.h"

struct Config {
    // model
    std::string model = "tiny", position;
    bool scratch = false;
    int layers = 0, heads = 0, kv_heads = 0, channels = 0, ffn = 0,
        vocab = 0; // 0: as the model has it
    // data
    std::string data, val, tokenizer;
    int seq = 0, micro_batch = 8;
    int64_t batch_tokens = 0;
    bool document_mask = false;
    int document_end = -1;
    std::string prepare, field = "text";
    int64_t shard_tokens = 0, val_tokens = 0;
    int threads = 0;
    // optimizer
    int64_t steps = 600;
    std::string optimizer = "adamw", schedule = "cosine";
    double lr = 1e-3, min_lr = -1;
    int64_t warmup = 20;
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, clip = 1.0;
    int64_t seed = 1337;
    // numbers
    std::string precision = "fp32";
    bool fp8 = false;
    // layout
    int dp = 0, tp = 1, pp = 1, cp = 1, ep = 1, zero = 0, zero_group = 0, chunks = 1, prefetch = 1,
        local_ranks = 1;
    bool sequence_parallel = false, fixed_order = false;
    std::string pipeline = "1f1b", grid_order = "tp-pp-dp", comm = "auto";
    // memory
    std::string recompute = "none", offload = "none";
    // files
    std::string out, export_dir, export_dtype = "fp32";
    int64_t save_every = 0;
    int keep = 2;
    bool resume = false;
    // looking
    int64_t eval_every = 0, eval_tokens = 16384, sample_every = 0;
    bool eval = false;
    std::string evaluate, prompt;
    int sample_tokens = 200;
    double temperature = 1.0, top_p = 1.0;
    int top_k = 0;
    std::string device = "auto", timeline;
    bool explain = false, help = false;
    int layer = -1;
};

typedef std::variant<int Config::*, int64_t Config::*, double Config::*, bool Config::*,
                     std::string Config::*>
    Field;

struct Flag {
    const char* name;
    Field field;
    const char*
        accepts; // "a|b|c": one of them; "low..high": a number; "= x (why)": only x yet; "": anything
    const char* help; // a row whose name is empty begins a group
};

inline const std::vector<Flag>& config_table() {
    typedef Config C;
    static const std::vector<Flag> table = {
        {"", &C::help, "", "Model"},
        {"model", &C::model, "",
         "a preset (listed below), or whose weights are loaded: a Hugging Face folder, a .bin of "
         "llm.c or llama2.c"},
        {"scratch", &C::scratch, "", "with a folder or a file: take its shape, not its weights"},
        {"layers", &C::layers, "0..10000", "change the preset's number of blocks"},
        {"heads", &C::heads, "0..100000", "change the number of attention heads"},
        {"kv-heads", &C::kv_heads, "0..100000", "change the number of key/value heads"},
        {"channels", &C::channels, "0..1000000", "change the width of the residual stream"},
        {"ffn", &C::ffn, "0..10000000", "change the width of the feed-forward layer"},
        {"vocab", &C::vocab, "0..100000000", "change the vocabulary"},
        {"position", &C::position, "learned|rope|alibi", "change how positions enter"},
        {"", &C::help, "", "Data"},
        {"data", &C::data, "",
         "training text (.txt) or token shards (.bin), commas or a pattern between files;"
         " without it: this project's own sources"},
        {"val", &C::val, "", "validation files; without it: the last tenth of each training file"},
        {"tokenizer", &C::tokenizer, "",
         "how text becomes tokens: byte, or PATH: tokenizer.json, .model, .bin, "
         ".tiktoken, or a folder with one (GPT-2: vocab.bpe, encoder.json); without it: the "
         "--model folder's own, else byte"},
        {"seq", &C::seq, "0..16777216", "tokens a sequence, T (0: 256, or what the model allows)"},
        {"micro-batch", &C::micro_batch, "1..1000000", "sequences a micro-batch, B"},
        {"batch-tokens", &C::batch_tokens, "0..1000000000000",
         "tokens an optimizer step, over all ranks; accumulation follows (0: one"
         " micro-batch)"},
        {"document-mask", &C::document_mask, "",
         "train on documents apart: none sees or predicts another, positions restart"},
        {"document-end", &C::document_end, "-1..100000000",
         "the token that ends a document (-1: the shards' or the tokenizer's end of text)"},
        {"", &C::help, "",
         "Data preparation: --prepare OUT.bin --data FILES --tokenizer PATH, then --data OUT.bin"},
        {"prepare", &C::prepare, "",
         "OUT.bin: write token shards of --data (.txt, .jsonl, each also .gz or .zst; .parquet; - "
         "for "
         "JSON lines on standard input) and leave; the same call goes on after a kill"},
        {"field", &C::field, "", "the text of a JSON line, or the parquet column"},
        {"shard-tokens", &C::shard_tokens, "0..2147483647",
         "tokens a shard, written as OUT_000000.bin, ... (0: one shard, OUT.bin)"},
        {"val-tokens", &C::val_tokens, "0..2147483647",
         "the first N tokens go to OUT.val.bin, which the pattern OUT_*.bin does not match"},
        {"threads", &C::threads, "0..1024", "that tokenize (0: one a core)"},
        {"", &C::help, "", "Optimizer"},
        {"steps", &C::steps, "0..1000000000000", "optimizer steps; 0: only generate"},
        {"optimizer", &C::optimizer, "adamw|sgd", "sgd has no momentum"},
        {"lr", &C::lr, "0..1000", "peak learning rate"},
        {"min-lr", &C::min_lr, "-1..1000", "learning rate at the end (-1: a tenth of the peak)"},
        {"warmup", &C::warmup, "0..1000000000000", "steps of linear warm-up"},
        {"schedule", &C::schedule, "cosine|linear|wsd|constant", "how the learning rate falls"},
        {"weight-decay", &C::weight_decay, "0..1000", "decoupled decay of matrices and tables"},
        {"beta1", &C::beta1, "0..1", "AdamW"},
        {"beta2", &C::beta2, "0..1", "AdamW"},
        {"eps", &C::eps, "0..1", "AdamW"},
        {"clip", &C::clip, "0..1000000", "largest global gradient norm (0: no clipping)"},
        {"seed", &C::seed, "0..9007199254740991", "of initial weights, data order and sampling"},
        {"", &C::help, "", "Numbers and memory"},
        {"precision", &C::precision, "fp32|bf16|fp16",
         "weights and activations; sums, gradients of weights, moments and masters"
         " stay float"},
        {"fp8", &C::fp8, "= false (fp8 products)", "fp8 matrix products"},
        {"recompute", &C::recompute, "none|selective|full",
         "selective: norms and activation functions; full: keep a block's input"
         " only"},
        {"offload", &C::offload, "= none (offload)", "keep optimizer state on the host"},
        {"", &C::help, "", "Layout"},
        {"dp", &C::dp, "0..1000000", "data-parallel ranks; 0: what the other axes leave"},
        {"tp", &C::tp, "1..1000000",
         "tensor-parallel ranks, which share heads, ffn and vocabulary"},
        {"pp", &C::pp, "1..1000000", "pipeline-parallel ranks"},
        {"cp", &C::cp, "= 1 (context parallelism)", "context-parallel ranks"},
        {"ep", &C::ep, "= 1 (expert parallelism)", "expert-parallel ranks"},
        {"sequence-parallel", &C::sequence_parallel, "",
         "they share the rows of norms and residuals too"},
        {"zero", &C::zero, "0..3",
         "what data-parallel ranks shard: 1 moments, 2 gradients, 3 weights"},
        {"grid-order", &C::grid_order, "tp-pp-dp|tp-dp-pp|pp-tp-dp|pp-dp-tp|dp-tp-pp|dp-pp-tp",
         "which axis has its ranks side by side, which comes next"},
        {"zero-group", &C::zero_group, "0..1000000",
         "data-parallel ranks that share a shard's buckets, such groups replicate; 0: all"},
        {"pipeline", &C::pipeline, "",
         "gpipe, 1f1b, interleaved, zero-bubble, or a file with a line of slots (F0.1) a rank"},
        {"chunks", &C::chunks, "1..1000", "stages of each pipeline rank"},
        {"prefetch", &C::prefetch, "0..1000",
         "ZeRO-3: layers gathered ahead; 0: no collective that costs memory overlaps"},
        {"local-ranks", &C::local_ranks, "1..1024", "ranks, as threads of this process"},
        {"comm", &C::comm, "= auto (NCCL)",
         "what carries messages; auto: MPI under mpirun, else memory"},
        {"fixed-order", &C::fixed_order, "",
         "add ranks in rank order, on GPUs by our own code and not by NCCL's; always so on CPUs"},
        {"", &C::help, "", "Files"},
        {"out", &C::out, "", "folder of checkpoints and log.jsonl"},
        {"save-every", &C::save_every, "0..1000000000000",
         "steps between checkpoints (0: only at the end, where --out is given)"},
        {"keep", &C::keep, "1..1000000", "newest checkpoints kept"},
        {"resume", &C::resume, "", "go on from the newest whole checkpoint in --out"},
        {"export", &C::export_dir, "",
         "at the end write a Hugging Face folder, with the tokenizer; FILE.bin: llm.c's GPT-2"},
        {"export-dtype", &C::export_dtype, "fp32|bf16|fp16", "its element type"},
        {"", &C::help, "", "Looking"},
        {"eval-every", &C::eval_every, "0..1000000000000",
         "steps between validation losses (0: at the end only)"},
        {"eval-tokens", &C::eval_tokens, "1..1000000000000", "validation tokens at most"},
        {"eval", &C::eval, "", "only evaluate, print `val loss`, and leave"},
        {"evaluate", &C::evaluate, "",
         "TASK=FILE,...: score completions at each evaluation: hellaswag, arc-easy, arc-challenge, "
         "piqa, winogrande, lambada"},
        {"sample-every", &C::sample_every, "0..1000000000000",
         "steps between samples (0: at the end only)"},
        {"prompt", &C::prompt, "", "text that a sample continues"},
        {"sample-tokens", &C::sample_tokens, "0..16777216", "tokens a sample"},
        {"temperature", &C::temperature, "0..1000", "0 is greedy"},
        {"top-k", &C::top_k, "0..100000000", "sample from the k likeliest (0: all)"},
        {"top-p", &C::top_p, "0..1", "sample from the likeliest that hold this share"},
        {"device", &C::device, "auto|cpu|cuda", "where it runs"},
        {"explain", &C::explain, "", "print parameters, memory and actions, and run nothing"},
        {"layer", &C::layer, "-1..10000",
         "with --explain: one layer's actions, with what they read and write"},
        {"timeline", &C::timeline, "",
         "FILE.svg: draw the last step, or with --explain the schedule; FILE.json: a trace for "
         "Chrome"},
        {"help", &C::help, "", "this text"},
    };
    return table;
}

// ----------------------------------------------------------------------------
// values

inline std::string field_text(const Config& c, const Field& f) {
    return std::visit(
        [&](auto member) {
            const auto& v = c.*member;
            if constexpr (std::is_same_v<decltype(v), const std::string&>)
                return v;
            else if constexpr (std::is_same_v<decltype(v), const bool&>)
                return std::string(v ? "true" : "false");
            else {
                std::ostringstream s;
                s << v;
                return s.str();
            }
        },
        f);
}

inline std::string parse_number(const std::string& text, double low, double high, bool whole,
                                double* value) {
    char* end = nullptr;
    double v = strtod(text.c_str(), &end);
    std::ostringstream range;
    range << (whole ? "a whole number" : "a number") << " from " << low << " to " << high;
    bool good = !text.empty() && !*end && v >= low && v <= high && (!whole || v == std::floor(v));
    *value = v;
    return good ? "" : "wants " + range.str() + ", not '" + text + "'";
}

inline std::string set_field(Config& c, const Flag& f, const std::string& text) {
    if (auto b = std::get_if<bool Config::*>(&f.field)) {
        if (text != "true" && text != "false") return "wants true or false, not '" + text + "'";
        c.** b = text == "true";
        return "";
    }
    if (auto s = std::get_if<std::string Config::*>(&f.field)) {
        std::string accepts = f.accepts, choice;
        c.** s = text;
        if (accepts.empty() || accepts[0] == '=') return "";
        for (std::istringstream in(accepts); std::getline(in, choice, '|');)
            if (choice == text) return "";
        return "wants one of " + accepts + ", not '" + text + "'";
    }
    double low = -1e15, high = 1e15, v = 0;
    const char* dots = strstr(f.accepts, "..");
    if (f.accepts[0] != '=' && dots) low = atof(f.accepts), high = atof(dots + 2);
    std::string wrong =
        parse_number(text, low, high, !std::holds_alternative<double Config::*>(f.field), &v);
    if (!wrong.empty()) return wrong;
    if (auto i = std::get_if<int Config::*>(&f.field)) {
        if (v < INT_MIN || v > INT_MAX) return "is too large: " + text;
        c.** i = int(v);
    }
    if (auto i = std::get_if<int64_t Config::*>(&f.field)) c.** i = int64_t(v);
    if (auto d = std::get_if<double Config::*>(&f.field)) c.** d = v;
    return "";
}

// ----------------------------------------------------------------------------
// names

inline size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

inline std::string nearest(const std::string& name, const std::vector<std::string>& names) {
    std::string best;
    size_t least = 4; // further away it is no misspelling
    for (const std::string& n : names)
        if (edit_distance(name, n) < least) least = edit_distance(name, n), best = n;
    return best;
}

inline const Flag* find_flag(const std::string& name) {
    for (const Flag& f : config_table())
        if (*f.name && name == f.name) return &f;
    return nullptr;
}

inline std::string unknown_flag(const std::string& name) {
    std::vector<std::string> names;
    for (const Flag& f : config_table())
        if (*f.name) names.push_back(f.name);
    std::string close = nearest(name, names);
    return "unknown flag --" + name + (close.empty() ? "" : ": did you mean --" + close + "?") +
           " (--help lists them all)";
}

// ----------------------------------------------------------------------------
// reading: the command line, and files of `name = value` lines

inline std::string set_flag(Config& c, const std::string& name, const std::string& value) {
    const Flag* f = find_flag(name);
    if (!f) return unknown_flag(name);
    std::string wrong = set_field(c, *f, value);
    return wrong.empty() ? "" : "--" + name + " " + wrong;
}

inline std::string read_config_file(Config& c, const std::string& path) {
    std::ifstream in(path);
    if (!in) return "--config " + path + ": no such file";
    auto trim = [](std::string s) {
        size_t a = s.find_first_not_of(" \t\r"), b = s.find_last_not_of(" \t\r");
        return a == std::string::npos ? "" : s.substr(a, b - a + 1);
    };
    std::string line;
    for (int number = 1; std::getline(in, line); number++) {
        line = trim(line.substr(0, line.find('#')));
        if (line.empty()) continue;
        size_t equals = line.find('=');
        std::string at = path + ":" + std::to_string(number) + ": ";
        if (equals == std::string::npos) return at + "wants `name = value`, not '" + line + "'";
        std::string wrong =
            set_flag(c, trim(line.substr(0, equals)), trim(line.substr(equals + 1)));
        if (!wrong.empty()) return at + wrong;
    }
    return "";
}

// --name value; a switch may stand alone; --config FILE counts where it stands, later flags win.
inline std::string parse_arguments(Config& c, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        if (word == "-h") word = "--help";
        if (word.rfind("--", 0) != 0)
            return "'" + word + "' is no flag: flags look like --steps 100 (--help lists them all)";
        std::string name = word.substr(2), wrong;
        bool more = i + 1 < argc;
        const Flag* f = find_flag(name);
        if (!f && name != "config") return unknown_flag(name);
        bool is_switch = f && std::holds_alternative<bool Config::*>(f->field);
        if (is_switch &&
            !(more && (!strcmp(argv[i + 1], "true") || !strcmp(argv[i + 1], "false")))) {
            wrong = set_flag(c, name, "true");
        } else {
            if (!more) return "--" + name + " wants a value";
            std::string value = argv[++i];
            wrong = name == "config" ? read_config_file(c, value) : set_flag(c, name, value);
        }
        if (!wrong.empty()) return wrong;
    }
    return "";
}

// ----------------------------------------------------------------------------
// writing: help and the copy in log and checkpoint

inline std::string help_text() {
    std::string text =
        "train_gpt [--flag value ...]     --config FILE holds the same names as `name = value` "
        "lines\n";
    Config defaults;
    for (const Flag& f : config_table()) {
        if (!*f.name) {
            text += "\n" + std::string(f.help) + "\n";
            continue;
        }
        std::string left = "  --" + std::string(f.name), value = field_text(defaults, f.field),
                    accepts = f.accepts;
        if (accepts.find('|') != std::string::npos) left += " " + accepts;
        left.resize(std::max(left.size() + 1, size_t(34)), ' ');
        text += left + f.help;
        bool is_switch = std::holds_alternative<bool Config::*>(f.field);
        if (!value.empty() && !is_switch) text += " (" + value + ")";
        if (accepts[0] == '=') text += " - not built yet";
        text += "\n";
    }
    text += "\nPresets\n";
    for (const Preset& p : model_presets()) {
        std::string left = "  " + std::string(p.name);
        left.resize(34, ' ');
        text += left + p.help + "\n";
    }
    return text;
}

inline nlohmann::json config_json(const Config& c) {
    nlohmann::json j;
    for (const Flag& f : config_table())
        if (*f.name) std::visit([&](auto member) { j[f.name] = c.*member; }, f.field);
    return j;
}

// ----------------------------------------------------------------------------
// the shape, and what only several fields together can get wrong

inline std::string preset_names() {
    std::string names;
    for (const Preset& p : model_presets())
        names += std::string(names.empty() ? "" : ", ") + p.name;
    return names;
}

// Change a preset's or folder's shape as the flags say.
inline std::string override_shape(const Config& c, Shape& s) {
    bool own_heads = c.heads && !c.kv_heads;
    if (own_heads) s.NKV = s.NKV == s.NH ? size_t(c.heads) : s.NKV;
    if (c.layers) s.L = size_t(c.layers);
    if (c.heads) s.NH = size_t(c.heads);
    if (c.kv_heads) s.NKV = size_t(c.kv_heads);
    if (c.channels) {
        if (!c.ffn) s.F = s.F * size_t(c.channels) / s.C;
        s.C = size_t(c.channels);
    }
    if (c.ffn) s.F = size_t(c.ffn);
    if (c.vocab) s.V = size_t(c.vocab);
    if (!c.position.empty())
        s.position = c.position == "rope"    ? Position::ROPE
                     : c.position == "alibi" ? Position::ALIBI
                                             : Position::LEARNED;
    if (!c.heads && !c.channels) return "";
    if (s.C % s.NH) {
        std::string fix;
        for (size_t d = 1; d <= s.C; d++)
            if (s.C % d == 0 && d + 8 > s.NH && d < s.NH + 8) fix += " " + std::to_string(d);
        return "--heads " + std::to_string(s.NH) + " does not divide --channels " +
               std::to_string(s.C) + (fix.empty() ? "" : ": heads that do, near it:" + fix);
    }
    s.HS = s.C / s.NH;
    return "";
}

inline std::string check_built(const Config& c) {
    Config defaults;
    for (const Flag& f : config_table())
        if (f.accepts[0] == '=' && field_text(c, f.field) != field_text(defaults, f.field)) {
            const char* what = strchr(f.accepts, '(');
            return "--" + std::string(f.name) + " " + field_text(c, f.field) + ": not built yet " +
                   what;
        }
    if (c.precision == "fp16") return "--precision fp16 is not built yet: use bf16 or fp32";
    if (c.device == "cuda" && !KERNELS)
        return "--device cuda: this program is built without kernels: make DEVICE=cuda, or use "
               "--device cpu";
    return "";
}

inline std::string check_shape(const Shape& s) {
    auto number = [](size_t n) { return std::to_string(n); };
    if (s.NH % s.NKV)
        return "--kv-heads " + number(s.NKV) + " does not divide --heads " + number(s.NH);
    if (s.position == Position::ROPE && s.HS % 2)
        return "RoPE turns pairs, and a head size of " + number(s.HS) +
               " is odd: change --heads or --channels";
    if (s.family == Family::GPT2 && s.NKV != s.NH)
        return "GPT-2 has one key/value head per head: leave --kv-heads out, or use a Llama";
    if (s.family == Family::LLAMA && s.position == Position::LEARNED)
        return "Llama has no table of positions: use --position rope or alibi";
    return "";
}

inline int rank_count(const Config& c) { return c.dp * c.tp * c.pp; }

// What tensor-parallel ranks share they share equally.
inline std::string check_tensor_parallel(const Config& c, const Shape& s) {
    auto text = [](auto n) { return std::to_string(n); };
    auto divides = [&](size_t tp) {
        return s.NH % tp == 0 && s.F % tp == 0 && (s.NKV % tp == 0 || tp % s.NKV == 0);
    };
    size_t tp = size_t(c.tp);
    std::string fix, tp_text = "--tp " + text(tp);
    for (size_t d = 1; d <= s.NH; d++)
        if (divides(d)) fix += (fix.empty() ? ": try --tp " : ", ") + text(d);
    if (s.NH % tp) return tp_text + " does not divide " + text(s.NH) + " heads" + fix;
    if (s.F % tp) return tp_text + " does not divide the ffn's " + text(s.F) + " channels" + fix;
    if (!divides(tp))
        return tp_text + " and " + text(s.NKV) + " key/value heads do not divide each other" + fix;
    if (!c.sequence_parallel) return "";
    if (tp == 1) return "--sequence-parallel shares rows among tensor-parallel ranks: give --tp";
    size_t rows = size_t(c.micro_batch) * size_t(c.seq);
    if (rows % tp)
        return "--sequence-parallel: " + tp_text +
               " does not divide micro-batch x seq = " + text(rows) + " rows: try --seq " +
               text(round_up(size_t(c.seq), tp));
    return "";
}

// The axes must make the ranks that there are; --explain needs none.
inline std::string check_layout(Config& c, const Shape& s, int processes) {
    auto text = [](auto n) { return std::to_string(n); };
    int layers = int(s.L) + 2, stages = c.pp * c.chunks;
    if (processes > 1 && c.local_ranks > 1)
        return "--local-ranks " + text(c.local_ranks) + " in each of " + text(processes) +
               " processes: use one of the two";
    int ranks = std::max(processes, c.local_ranks), others = c.tp * c.pp;
    if (c.dp == 0) c.dp = std::max(1, ranks / others);
    std::string wanted = text(rank_count(c));
    if (rank_count(c) != ranks && !c.explain)
        return "--dp " + text(c.dp) + " x --tp " + text(c.tp) + " x --pp " + text(c.pp) + " are " +
               wanted + " ranks, and there are " + text(ranks) + ": use --local-ranks " + wanted +
               " or mpirun -np " + wanted;
    std::string wrong = check_tensor_parallel(c, s);
    if (!wrong.empty()) return wrong;
    if (stages > layers)
        return "--pp " + text(c.pp) + " x --chunks " + text(c.chunks) + " are " + text(stages) +
               " stages, and the model has " + text(layers) +
               " layers (blocks, embedding and head): use fewer";
    if (c.zero_group && c.dp % c.zero_group)
        return "--zero-group " + text(c.zero_group) + " does not divide --dp " + text(c.dp);
    if (c.chunks > 1 && c.pipeline == "1f1b")
        return "--chunks " + text(c.chunks) + " needs --pipeline interleaved, gpipe or zero-bubble";
#if KERNELS && !defined(WITH_NCCL)
    if (processes > 1 && c.device == "cuda")
        return text(processes) +
               " processes with --device cuda: this program is built without "
               "NCCL: install libnccl-dev and make again, or use --device cpu";
#endif
    return "";
}

// processes: of the MPI job, 1 without one
inline std::string config_check(Config& c, const Shape& s, int processes = 1) {
    std::string wrong = check_built(c);
    if (wrong.empty()) wrong = check_shape(s);
    if (!wrong.empty()) return wrong;
    if (c.seq == 0) c.seq = int(std::min(s.P, size_t(256)));
    if (c.min_lr < 0) c.min_lr = c.lr / 10;
    auto ends = [&](const char* e) {
        return c.timeline.size() > 5 && c.timeline.rfind(e) == c.timeline.size() - strlen(e);
    };
    if (!c.timeline.empty() && !ends(".svg") && !ends(".json"))
        return "--timeline " + c.timeline + ": FILE.svg or FILE.json";
    wrong = check_layout(c, s, processes);
    if (!wrong.empty()) return wrong;
    int64_t step_tokens = int64_t(c.micro_batch) * c.seq * c.dp;
    if (c.batch_tokens == 0) c.batch_tokens = step_tokens;
    if (size_t(c.seq) > s.P)
        return "--seq " + std::to_string(c.seq) + " is beyond the model's " + std::to_string(s.P) +
               " positions: use --seq " + std::to_string(s.P) + " or less";
    if (c.batch_tokens % step_tokens) {
        int64_t down = c.batch_tokens / step_tokens * step_tokens, up = down + step_tokens;
        return "--batch-tokens " + std::to_string(c.batch_tokens) +
               " is no multiple of micro-batch x seq x dp = " + std::to_string(c.micro_batch) +
               " x " + std::to_string(c.seq) + " x " + std::to_string(c.dp) + " = " +
               std::to_string(step_tokens) + ": try " +
               (down ? std::to_string(down) + " or " : "") + std::to_string(up);
    }
    if (c.min_lr > c.lr)
        return "--min-lr " + field_text(c, &Config::min_lr) + " is above --lr " +
               field_text(c, &Config::lr);
    if (c.document_end >= 0 && !c.document_mask)
        return "--document-end " + std::to_string(c.document_end) +
               " says where --document-mask cuts: give --document-mask too";
    if (!c.evaluate.empty() && c.steps == 0 && !c.eval)
        return "--evaluate: with --steps 0 nothing is evaluated: give --eval";
    if (c.resume && c.out.empty())
        return "--resume goes on from the newest checkpoint in --out: give --out DIR";
    if (c.save_every && c.out.empty()) return "--save-every wants a folder: give --out DIR";
    return "";
}
