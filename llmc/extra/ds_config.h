// ds_config.h - DeepSpeed's and Accelerate's JSON configurations become flags, a printed line a key
//   1. keys      nested objects become names with dots: zero_optimization.stage. An unknown key is
//                refused: ignored silently, it would make another training run.
//   2. rows      in the table's order. The command line wins, and the printed line says so; "auto"
//                takes the command line's value or our default.
//   3. defaults  a missing key sets a flag too, if DeepSpeed's default differs from ours
//   4. batch     train_batch_size = micro-batch x accumulation x dp, as DeepSpeed checks it
//   Every function that returns a text returns "" or what is wrong.
#pragma once
#include "../io/config.h"
#include "../io/files.h"
#include "../io/json.h"
#include "../run/run.h"
#include "../text.h"
#include "ds_keys.h"

namespace llmc {

// ----------------------------------------------------------------------------
// keys

// Flatten nested objects into names with dots.
inline void ds_flatten(const Json& j, const std::string& name, std::map<std::string, Json>* keys) {
    for (auto& [key, value] : j.items()) {
        std::string whole = name.empty() ? key : name + "." + key;
        if (value.is_object())
            ds_flatten(value, whole, keys);
        else
            (*keys)[whole] = value;
    }
}

// Whether a key changes no result. Such a key is printed, so that nobody looks for its effect. In
// DS_LEFT, a name that ends in a dot or an underscore stands for all keys that begin with it.
inline bool ds_is_left(const std::string& key) {
    for (std::string left : DS_LEFT) {
        bool all = left.back() == '.' || left.back() == '_';
        if (all ? key.starts_with(left) : key == left)
            return true;
    }
    return false;
}

// Print which keys have no counterpart, and refuse unknown ones.
inline std::string ds_check_keys(DsFile& f) {
    std::vector<std::string> names;
    for (const DsRow& row : ds_table())
        names.push_back(row.key);

    // Look at each key that no row has.
    for (auto& [key, value] : f.keys) {
        if (std::count(names.begin(), names.end(), key))
            continue;
        std::string close = nearest(key, names);
        if (!close.empty())
            close = ", did you mean " + close;
        if (!ds_is_left(key))
            return concat(printable(key), ": is not known here", close,
                          ": where it changes no result take it out of the file");
        f.says = key + " " + json_word(value);
        f.lines.push_back(f.says + ": no counterpart here, changes no result: left out");
    }
    return "";
}

// Whether a file has the block of a key. The outermost block of Accelerate's file
// belongs to another program.
inline bool ds_has_block(const DsFile& f, const std::string& key) {
    std::string block = key.substr(0, key.rfind('.') + 1);
    if (block.empty())
        return !f.keys.count("distributed_type");
    // The type of an optimizer or scheduler stands beside its params.
    if (block.ends_with("params."))
        block.resize(block.size() - strlen("params."));
    auto at = f.keys.lower_bound(block);
    return at != f.keys.end() && at->first.starts_with(block);
}

// Apply one row: the key's value, or DeepSpeed's default.
inline std::string ds_take(DsFile& f, const DsRow& row) {
    std::string key = row.key;
    auto at = f.keys.find(key);
    bool there = at != f.keys.end();
    if (!there && (!row.missing || !ds_has_block(f, key)))
        return "";

    // Take the file's value, or the default.
    Json value = there ? at->second : Json::parse(row.missing);
    f.says = concat(key, there ? " " : " left out, ", value.is_array() ? value.dump()
                                                                       : json_word(value));
    if (!there && value == "")
        return key + ": is left out, and has to be there";

    // Ignore numbers of a loss scale, unless they are for fp16's dynamic one.
    bool scaling = key.starts_with("fp16.") && key != "fp16.enabled";
    bool fixed = key != "fp16.loss_scale" && f.c.loss_scale != "dynamic";
    if (scaling && (f.c.precision != "fp16" || fixed)) {
        if (there)
            f.lines.push_back(f.says + ": for fp16's dynamic loss scale: left out");
        return "";
    }

    // Set the flag, or leave it if the value is free.
    bool free = value == "auto" || value.is_null();
    if (!free && !row.use) return ""; // ds_batch() reads it
    std::string wrong = free ? ds_set(f, row, "") : row.use(f, row, value);
    return wrong.empty() ? "" : f.says + ": " + wrong;
}

// ----------------------------------------------------------------------------
// the batch

// Read a size of the file. *size stays as it is if the size is missing or "auto".
inline std::string ds_size(const DsFile& f, const char* key, int64_t* size) {
    auto at = f.keys.find(key);
    if (at == f.keys.end() || at->second == "auto" || at->second.is_null())
        return "";
    bool good = at->second.is_number_unsigned() && at->second >= 1 && at->second <= 1000000;
    if (!good)
        return concat(key, " ", json_word(at->second), ": wants a whole number from 1");
    *size = at->second.get<int64_t>();
    return "";
}

// The sizes of a batch, and the number of data-parallel ranks. Two sizes determine the third.
struct DsBatch {
    int64_t all = 0, micro = 0, steps = 0, dp = 1;
};

// Derive the missing sizes, as DeepSpeed does: a whole batch without its parts is one micro-batch
// on each rank. A file with neither a whole batch nor a micro-batch, which DeepSpeed refuses, takes
// the default of --micro-batch.
inline std::string ds_complete(DsBatch* b, int64_t default_micro) {
    // Fill in defaults where the given sizes do not determine the others.
    if (!b->all && !b->micro)
        b->micro = default_micro;
    if (!b->steps && !(b->all && b->micro))
        b->steps = 1;

    // Compute the third size from the two others, then check their product.
    if (!b->all)
        b->all = b->micro * b->steps * b->dp;
    if (!b->micro)
        b->micro = b->all / (b->steps * b->dp);
    if (!b->steps)
        b->steps = b->all / (b->micro * b->dp);
    if (b->all == b->micro * b->steps * b->dp)
        return "";
    return concat("train_batch_size ", b->all, " is not train_micro_batch_size_per_gpu ", b->micro,
                  " x gradient_accumulation_steps ", b->steps, " x dp ", b->dp, " = ",
                  b->micro * b->steps * b->dp, ": change one, or leave one out");
}

// Translate sequences to --micro-batch and --batch-tokens. dp is needed before flags are checked:
// it is given, or it is what tp, pp and cp leave of the ranks.
inline std::string ds_batch(DsFile& f, int ranks) {
    Config& c = f.c;
    DsBatch b;
    int64_t of_a_replica = int64_t(c.tp) * c.pp * c.cp;
    b.dp = c.dp ? c.dp : std::max(int64_t(1), ranks / of_a_replica);

    // Read the three sizes.
    std::string wrong = ds_size(f, "train_batch_size", &b.all);
    for (const char* key : {"gradient_accumulation_steps",
                            "deepspeed_config.gradient_accumulation_steps"})
        if (wrong.empty())
            wrong = ds_size(f, key, &b.steps);
    if (wrong.empty())
        wrong = ds_size(f, "train_micro_batch_size_per_gpu", &b.micro);
    if (!wrong.empty() || !(b.all || b.micro || b.steps))
        return wrong;

    // If the command line sets another micro-batch, keep the batch and change the accumulation.
    if (f.user.count("micro-batch")) {
        if (b.all) b.steps = 0;
        b.micro = c.micro_batch;
    }
    wrong = ds_complete(&b, c.micro_batch);
    if (!wrong.empty())
        return wrong;
    f.says = concat("train_batch_size ", b.all, " = ", b.micro, " a micro-batch x ", b.steps,
                    " accumulated x dp ", b.dp);
    wrong = ds_set(f, {"", nullptr, "micro-batch"}, std::to_string(b.micro));
    if (!wrong.empty())
        return wrong;

    // The file counts sequences, but does not know their length. A batch of one
    // micro-batch is the default.
    if (!c.seq && b.steps == 1)
        return "";
    if (!c.seq && !f.user.count("batch-tokens"))
        return f.says + ": --batch-tokens counts tokens: give --seq";
    return ds_set(f, {"", nullptr, "batch-tokens"}, std::to_string(b.all * c.seq));
}

// ----------------------------------------------------------------------------

// Read a file into those flags that were not given. processes: of the MPI job, or 1. *lines
// receives what to print.
inline std::string read_ds_config(Config& c, const std::string& path, int processes,
                                  std::vector<std::string>* lines) {
    Json j;
    std::string wrong = read_json(path, &j);
    if (!wrong.empty())
        return "--ds-config " + wrong;

    // Translate key by key; the batch comes last, as it needs the other numbers.
    DsFile f{c, {}, c.given, {}, ""};
    ds_flatten(j, "", &f.keys);
    wrong = ds_check_keys(f);
    for (const DsRow& row : ds_table())
        if (wrong.empty())
            wrong = ds_take(f, row);
    if (wrong.empty())
        wrong = ds_batch(f, std::max(processes, c.local_ranks));
    *lines = f.lines;
    return wrong.empty() ? "" : "--ds-config " + path + ": " + wrong;
}

// With --ds-config, turn another trainer's file into flags, and print a line for each key.
inline void take_ds_config(Run& run) {
    const std::string& path = run.config.ds_config;
    if (path.empty()) return;
    std::vector<std::string> lines;
    std::string wrong = read_ds_config(run.config, path, run.world.size, &lines);
    for (const std::string& line : lines)
        if (is_first_rank(run))
            printf("%s: %s\n", printable(path).c_str(), printable(line).c_str());
    or_die(wrong);
}

} // namespace llmc
