// ds_config.h - DeepSpeed's and Accelerate's JSON configurations become flags, a printed line a key
//   1. keys      objects in objects become names with dots: zero_optimization.stage. A key that no
//                table has is refused: left out unsaid, it would be another training run.
//   2. rows      in the table's order. The command line wins, and the line says so; "auto" is what
//                the command line or our default says.
//   3. defaults  a key that is left out sets a flag too, where DeepSpeed's default is not ours
//   4. batch     train_batch_size = micro-batch x accumulation x dp, as DeepSpeed checks it
//   Functions that return a text return "" or what is wrong.
#pragma once
#include "ds_keys.h"

namespace llmc {

// ----------------------------------------------------------------------------
// keys

// Objects in objects become names with dots.
inline void ds_flatten(const Json& j, const std::string& name, std::map<std::string, Json>* keys) {
    for (auto& [key, value] : j.items()) {
        std::string whole = name.empty() ? key : name + "." + key;
        if (value.is_object())
            ds_flatten(value, whole, keys);
        else
            (*keys)[whole] = value;
    }
}

// Whether a key changes no result: it is printed, so that nobody looks for its effect.
// Names of blocks and of families of keys end in a dot or an underscore.
inline bool ds_is_left(const std::string& key) {
    for (std::string left : DS_LEFT) {
        bool all = left.back() == '.' || left.back() == '_';
        if (all ? key.starts_with(left) : key == left)
            return true;
    }
    return false;
}

// Say which keys are left out, and refuse those that no table has.
inline std::string ds_check_keys(DsFile& f) {
    std::vector<std::string> names;
    for (const DsRow& row : ds_table())
        names.push_back(row.key);
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

// Whether a block has keys; Accelerate's own file has the outermost one of another program.
inline bool ds_has_block(const DsFile& f, const std::string& key) {
    std::string block = key.substr(0, key.rfind('.') + 1);
    if (block.empty())
        return !f.keys.count("distributed_type");
    // A type stands beside its params.
    if (block.ends_with("params."))
        block.resize(block.size() - strlen("params."));
    auto at = f.keys.lower_bound(block);
    return at != f.keys.end() && at->first.starts_with(block);
}

// Take one key: its value, or DeepSpeed's default.
inline std::string ds_take(DsFile& f, const DsRow& row) {
    std::string key = row.key;
    auto at = f.keys.find(key);
    bool there = at != f.keys.end();
    if (!there && (!row.missing || !ds_has_block(f, key)))
        return "";
    Json value = there ? at->second : Json::parse(row.missing);
    f.says = concat(key, there ? " " : " left out, ", value.is_array() ? value.dump()
                                                                       : json_word(value));
    if (!there && value == "")
        return key + ": is left out, and has to be there";

    // The numbers of a loss scale are for fp16's dynamic one.
    bool scaling = key.starts_with("fp16.") && key != "fp16.enabled";
    bool fixed = key != "fp16.loss_scale" && f.c.loss_scale != "dynamic";
    if (scaling && (f.c.precision != "fp16" || fixed)) {
        if (there)
            f.lines.push_back(f.says + ": for fp16's dynamic loss scale: left out");
        return "";
    }
    bool free = value == "auto" || value.is_null();
    if (!free && !row.use) return ""; // it is the batch's
    std::string wrong = free ? ds_set(f, row, "") : row.use(f, row, value);
    return wrong.empty() ? "" : f.says + ": " + wrong;
}

// ----------------------------------------------------------------------------
// the batch

// A size that the file has; 0: left out, or "auto".
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

// The three sizes of a batch, and how often a part is in the whole: two of them give the third.
struct DsBatch {
    int64_t all = 0, micro = 0, steps = 0, dp = 1;
};

// Derive the sizes that are left out, as DeepSpeed does: a whole batch without a word of the parts
// is one micro-batch on each rank. Only a file that has neither a whole nor a micro-batch, which
// DeepSpeed refuses, takes the default of --micro-batch.
inline std::string ds_complete(DsBatch* b, int64_t default_micro) {
    if (!b->all && !b->micro)
        b->micro = default_micro;
    if (!b->steps && !(b->all && b->micro))
        b->steps = 1;
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

// Sequences become --micro-batch and --batch-tokens. dp is known before other flags are checked: it
// is given, or what tp and pp leave of the ranks.
inline std::string ds_batch(DsFile& f, int ranks) {
    Config& c = f.c;
    DsBatch b;
    b.dp = c.dp ? c.dp : std::max(int64_t(1), ranks / (int64_t(c.tp) * c.pp * c.cp));
    std::string wrong = ds_size(f, "train_batch_size", &b.all);
    for (const char* key : {"gradient_accumulation_steps",
                            "deepspeed_config.gradient_accumulation_steps"})
        if (wrong.empty())
            wrong = ds_size(f, key, &b.steps);
    if (wrong.empty())
        wrong = ds_size(f, "train_micro_batch_size_per_gpu", &b.micro);
    if (!wrong.empty() || !(b.all || b.micro || b.steps))
        return wrong;

    // Another micro-batch of the command line leaves the batch as it is: accumulation follows.
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

    // The file counts sequences and does not know their length. One micro-batch is the default.
    if (!c.seq && b.steps == 1)
        return "";
    if (!c.seq && !f.user.count("batch-tokens"))
        return f.says + ": --batch-tokens counts tokens: give --seq";
    return ds_set(f, {"", nullptr, "batch-tokens"}, std::to_string(b.all * c.seq));
}

// ----------------------------------------------------------------------------

// Read a file into the flags that were not given. processes: of the MPI job, or 1.
inline std::string read_ds_config(Config& c, const std::string& path, int processes,
                                  std::vector<std::string>* lines) {
    Json j;
    std::string wrong = read_json(path, &j);
    if (!wrong.empty())
        return "--ds-config " + wrong;

    // Translate key by key; the batch needs the others' numbers.
    DsFile f{c, {}, c.given, {}, ""};
    ds_flatten(j, "", &f.keys);
    wrong = ds_check_keys(f);
    for (const DsRow& row : ds_table())
        if (wrong.empty()) wrong = ds_take(f, row);
    if (wrong.empty())
        wrong = ds_batch(f, std::max(processes, c.local_ranks));
    *lines = f.lines;
    return wrong.empty() ? "" : "--ds-config " + path + ": " + wrong;
}

} // namespace llmc
