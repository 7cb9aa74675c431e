// second_model.h - a model beside the run's own: its flags, its tokens and its weights
//   --draft (draft.h) and --teacher (teach.h) name one as --model does, or by the folder of a run,
//   whose newest checkpoint it is then. It has a trainer and memory of its own.
#pragma once
#include "../io/checkpoint.h"
#include "../io/checkpoint_load.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/huggingface.h"
#include "../io/model_files.h"
#include "../io/one_reader.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_files.h"
#include "../model.h"
#include "../parameters.h"
#include "../run/folder.h"
#include "../run/run.h"
#include "../text.h"
#include "../trainer.h"

namespace llmc {

// The configuration of a run whose model is the second one.
inline Config second_config(const Run& run, const std::string& model) {
    Config d;
    d.model = model;
    if (!file_type(d.model))
        d.vocab = int(run.shape.V); // a preset's new weights take the model's vocabulary
    if (checkpoint_steps(d.model).empty())
        return d;

    // Take the model's flags from the checkpoint of that run.
    d.out = d.model;
    d.model = Config().model;
    nlohmann::json manifest = newest_manifest(d);
    if (!manifest.is_object() || !manifest.contains("config"))
        return d;
    adopt_flags(d, manifest["config"]);
    d.fp8 = "none"; // it computes in the model's type
    return d;
}

// Check that a second model has the model's tokens: "" or what differs. If both have a tokenizer,
// compare the text of each token; else compare the sizes of the tables. `flag` and `name` are the
// flag and its value, `what` is what it names.
inline std::string check_same_tokens(const Run& run, const Config& d, const Shape& shape,
                                     const char* flag, const std::string& name,
                                     const char* what) {
    const Config& c = run.config;
    std::string file = file_type(d.model) == S_IFDIR ? tokenizer_in(d.model) : d.tokenizer;
    bool compares = !file.empty() && vocab_matches(run);
    if (!compares && shape.V != run.shape.V)
        return concat(flag, " ", name, " has ", shape.V, " tokens, and ", c.model, " ",
                      run.shape.V, ": give a ", what, " that has the model's tokenizer");
    if (!compares)
        return "";

    // Each token must stand for the same text, special tokens included.
    Tokenizer own;
    std::string wrong = tokenizer_open(&own, file);
    const Tokenizer& t = run.tokenizer;
    bool same = own.vocab_size == t.vocab_size && own.special == t.special;
    for (int token = 0; same && token < t.vocab_size; token++)
        same = decode(own, token) == decode(t, token);
    if (wrong.empty() && !same)
        wrong = concat(flag, " ", name, ": its tokens are those of ", file,
                       ", and the model's are those of ", c.tokenizer, ": give a ", what,
                       " that has the model's tokenizer");
    return wrong;
}

// Read a second model's weights from a checkpoint or from model files, or draw those of a preset.
// Returns whether they were drawn.
template <typename T, typename S>
bool load_second(Run& run, Trainer<T, S>& t, const Config& d) {
    mode_t type = file_type(d.model);
    CheckpointInfo info;
    std::vector<std::string> notes;
    std::string wrong;
    if (!d.out.empty())
        wrong = checkpoint_load(t, &info, d.out, &notes);
    else if (type)
        wrong = type == S_IFDIR ? hf_load_weights(t, d.model, run.dialects)
                                : model_file_load(t, d.model);
    or_die_on_all_ranks(run, first_error(run.world, wrong));

    // Tell what the load noted, and draw what no file holds.
    for (const std::string& text : notes)
        note(run, text);
    if (d.out.empty())
        init_weights(t, uint64_t(run.config.seed), type != 0);
    return d.out.empty() && !type;
}

} // namespace llmc
