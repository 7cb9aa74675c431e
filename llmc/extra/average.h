// average.h - the mean of several models' weights, as convert_gpt writes it - arXiv:2203.05482
//   w = (w_1 + ... + w_n) / n      summed in double, rounded to float once
//   1. list      each name is a Hugging Face folder, a checkpoint, or a run: all its checkpoints
//   2. choose    the first model gives shape and tokenizer, as --model or --resume would
//   3. load      one model after the other; each rank sums the elements that it keeps
//   4. store     the mean, which the run evaluates, samples from or exports; it trains nothing
//   Contract: all models have one shape. Every layout has the same bits: the sum of an element
//             knows only the order of the names.
//   Cost: each model is read once. 8 bytes of the host's memory for each element that a rank keeps.
#pragma once
#include "../action.h"
#include "../comm/comm.h"
#include "../io/checkpoint.h"
#include "../io/checkpoint_load.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/hf_config.h"
#include "../io/huggingface.h"
#include "../io/manifest.h"
#include "../io/one_reader.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../run/folder.h"
#include "../run/run.h"
#include "../comm/text.h"
#include "../trainer.h"

namespace llmc {

// Bytes of the sums: a double for each weight that this rank keeps.
template <typename T, typename S> size_t average_bytes(const Trainer<T, S>& t) {
    size_t elements = 0;
    for (const Parameter& p : t.model.parameters)
        elements += kept_range(t, {Kind::WEIGHT, p.bucket}, p).count;
    return elements * sizeof(double);
}

// Keep such sums in the host's memory.
template <typename T, typename S> void keep_sums(Run& run, S where) {
    auto bytes = [where](const Run& r, const std::vector<PlanOptions>& plans, int rank) {
        Trainer<T, S> t;
        t.ctx.where = where;
        trainer_place(t, r.shape, plans, layout_at(r.layout, rank));
        return average_bytes(t);
    };
    run.companions.all.push_back({"sums of the mean", "in the host's memory", Tier::HOST, bytes});
}

// A model that is averaged: a Hugging Face folder, or the checkpoint of one step in `path`.
struct AveragedModel {
    std::string path;
    int64_t step = -1; // -1: a Hugging Face folder
    std::string folder() const { return step < 0 ? path : path + "/" + step_folder(step); }
};

// List what one name stands for: "" or what is wrong.
inline std::string list_models(std::string name, std::vector<AveragedModel>* models) {
    while (name.size() > 1 && name.ends_with("/"))
        name.pop_back();

    // A run stands for all of its checkpoints, the oldest first.
    std::vector<int64_t> steps = checkpoint_steps(name);
    std::ranges::sort(steps);
    for (int64_t step : steps)
        models->push_back({name, step});
    if (!steps.empty()) return "";

    // A checkpoint is a folder step_N within its run.
    std::filesystem::path path = name;
    std::string run = path.has_parent_path() ? path.parent_path().string() : ".";
    for (int64_t step : checkpoint_steps(run))
        if (step_folder(step) == path.filename()) {
            models->push_back({run, step});
            return "";
        }

    // Anything else must be a folder of Hugging Face's.
    if (file_type(name + "/config.json") != S_IFREG)
        return concat(printable(name), " is neither a Hugging Face folder, nor a "
                      "checkpoint RUN/step_N, nor a run with checkpoints");
    models->push_back({name});
    return "";
}

// List the models of a mean in the order of the names.
inline std::vector<AveragedModel> averaged_models(const Config& c) {
    std::vector<AveragedModel> models;
    for (const std::string& name : texts_between_commas(c.average))
        or_die(list_models(name, &models));

    // A model named twice would count twice, and a run stands for all of its checkpoints.
    std::set<std::filesystem::path> seen;
    for (const AveragedModel& model : models) {
        bool first = seen.insert(std::filesystem::weakly_canonical(model.folder())).second;
        LLMC_USER_CHECK(first, "%s is named twice: name each model once",
                        model.folder().c_str());
    }
    return models;
}

// Check that the flags fit a mean, before the first model's flags join them.
inline std::string check_average(const Config& c) {
    for (const char* name : {"upcycle", "add-tokens", "adapter"})
        if (was_given(c, name))
            return concat("a mean of models takes them as they are: leave --", name, " out");
    return "";
}

// Refuse a checkpoint of adapters: products of means are not the mean of products.
inline std::string check_whole_model(const std::string& checkpoint) {
    Json manifest;
    LLMC_TRY(read_manifest(checkpoint, &manifest));
    Config of_run;
    adopt_flags(of_run, manifest.value("config", Json()));
    if (!has_adapters(of_run)) return "";
    return concat(checkpoint, " has adapters alone, whose mean is no mean of "
                  "models: --merge and --export each with tune_gpt, and give the folders");
}

// Let the first model of a mean choose the flags that describe a model.
inline void choose_average(Run& run) {
    Config& c = run.config;
    if (c.average.empty()) return;
    or_die(check_average(c));
    AveragedModel first = averaged_models(c)[0];
    c.given.insert("precision"); // the checkpoint's own would round each model before the sum

    // A checkpoint's manifest has its run's flags. A folder is the model itself.
    if (first.step < 0) {
        c.model = first.path;
    } else {
        Json manifest;
        or_die(check_whole_model(first.folder()));
        or_die(read_manifest(first.folder(), &manifest));
        adopt_flags(c, manifest.value("config", Json()));
    }
    c.weights = "float";
}

// Compare the shape that a folder describes with the run's: "" or the first field that differs.
inline std::string check_same_model(const Run& run, const std::string& folder) {
    Shape shape;
    LLMC_TRY(hf_read_config(&shape, folder));
    Json own = model_identity(run.shape);
    Json other = model_identity(shape);

    // All models must agree in every field, although some fields change no weight's size.
    for (auto& [key, value] : own.items())
        if (other[key] != value)
            return concat(folder, " is of another model: its ", key, " is ",
                          other[key].dump(), ", the first folder's ", value.dump());
    return "";
}

// Load one of the models, as --model or --resume would. All ranks call.
template <typename T, typename S>
void load_averaged(Run& run, Trainer<T, S>& t, const AveragedModel& model) {
    CheckpointInfo info;
    std::vector<std::string> notes;
    std::string wrong;
    if (model.step >= 0) {
        wrong = first_error(run.world, check_whole_model(model.folder()));
        if (wrong.empty())
            wrong = checkpoint_load(t, &info, model.path, &notes, model.step);
    } else {
        wrong = first_error(run.world, check_same_model(run, model.path));
        if (wrong.empty())
            wrong = hf_load_weights(t, model.path, run.dialects);
    }
    for (const std::string& text : notes)
        note(run, text);
    or_die_on_all_ranks(run, first_error(run.world, wrong));
}

// Make the mean of all models the trainer's weights. All ranks call.
template <typename T, typename S>
void average_weights(Run& run, Trainer<T, S>& t) {
    // A network's folder may look different to each rank, and each load is all ranks' together.
    std::vector<AveragedModel> models = averaged_models(run.config);
    std::string folders;
    for (const AveragedModel& model : models)
        folders += model.folder() + "\n";
    check_same(run.world, "the models of the mean", folders);
    const std::vector<Parameter>& parameters = t.model.parameters;
    std::vector<std::vector<double>> sums(parameters.size()); // [parameter]: (kept elements)
    auto range_of = [&](size_t i) {
        return kept_range(t, {Kind::WEIGHT, parameters[i].bucket}, parameters[i]);
    };

    // Sum, model after model.
    for (const AveragedModel& model : models) {
        load_averaged(run, t, model);
        for (size_t i = 0; i < sums.size(); i++) {
            Data weight = {Kind::WEIGHT, parameters[i].bucket};
            auto values = read_numbers(t, weight, parameters[i], range_of(i));
            sums[i].resize(values.size());
            for (size_t k = 0; k < values.size(); k++)
                sums[i][k] += double(values[k]);
        }
    }

    // Divide, round once, and store.
    for (size_t i = 0; i < sums.size(); i++) {
        KeptRange range = range_of(i);
        auto mean = [&](size_t k) {
            return from_acc<T>(acc_t<T>(sums[i][k] / double(models.size())));
        };
        if (range.count)
            fill_kept<T>(t, {Kind::WEIGHT, parameters[i].bucket}, range.at, range.count, mean);
    }
    run.health.weights = concat("the mean of ", models.size(), " models, from ", models[0].folder(),
                         " to ", models.back().folder());
}

} // namespace llmc
