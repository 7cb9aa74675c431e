// companion.h - a frozen model next to the run's own: its flags, tokens and weights
//   --draft (extra/draft.h) and --teacher (teacher.h) name one as --model does, or by the folder of
//   a run, whose newest checkpoint it is then. It has a trainer and memory of its own. The weights
//   that a run starts from are another reference, and need no second trainer (reference_policy.h).
#pragma once
#include "../io/checkpoint.h"
#include "../io/checkpoint_load.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/huggingface.h"
#include "../io/model_files.h"
#include "../io/model_shape.h"
#include "../io/one_reader.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_files.h"
#include "../model.h"
#include "../parameters.h"
#include "../run/account.h"
#include "../run/folder.h"
#include "../run/run.h"
#include "../comm/text.h"
#include "../trainer.h"

namespace llmc {

// The configuration of a run whose model is the companion.
inline Config companion_config(const Run& run, const std::string& name) {
    Config d;
    d.model = name;
    if (!file_type(d.model))
        d.vocab = int(run.shape.V); // a preset's new weights take the model's vocabulary
    if (checkpoint_steps(d.model).empty())
        return d;

    // Take the model's flags from the checkpoint of that run.
    d.out = d.model;
    d.model = Config().model;
    Json manifest = newest_manifest(d);
    if (!manifest.is_object() || !manifest.contains("config"))
        return d;
    adopt_flags(d, manifest["config"]);
    d.fp8 = "none"; // it computes in the model's type
    return d;
}

// Choose the shape of the companion that a flag names.
inline Shape choose_companion(const Run& run, const char* flag, const std::string& name) {
    Config d = companion_config(run, name);
    LLMC_USER_CHECK(!has_adapters(d) && d.add_tokens.empty(),
                    "%s %s: its checkpoint has adapters alone or added tokens, and stands on "
                    "another model: --export it, with --merge, and give the folder",
                    flag, printable(name).c_str());
    return choose_shape(d, flag);
}

// Check that a companion has the model's tokens: "" or what differs. If both have a tokenizer,
// compare the text of each token; else compare the sizes of the tables, which may differ by padding
// rows although tokens are the same. flag: the one that names it, as "--draft".
inline std::string check_same_tokens(const Run& run, const Shape& shape, const char* flag,
                                     const std::string& name) {
    const Config& c = run.config;
    const Config d = companion_config(run, name);
    const std::string fix = concat(": give a ", flag + 2, " that has the model's tokenizer");
    std::string file = file_type(d.model) == S_IFDIR ? tokenizer_in(d.model) : d.tokenizer;
    bool compares = !file.empty() && vocab_matches(run);
    if (!compares && shape.V == run.shape.V) return "";
    if (!compares)
        return concat(flag, " ", name, " has ", shape.V, " tokens, and ", c.model, " ",
                      run.shape.V, fix);

    // Each token must stand for the same text, special tokens included.
    Tokenizer own;
    std::string wrong = tokenizer_open(&own, file);
    const Tokenizer& t = run.tokenizer;
    bool same = own.vocab_size == t.vocab_size && own.special == t.special;
    for (int token = 0; same && token < t.vocab_size; token++)
        same = decode(own, token) == decode(t, token);
    if (wrong.empty() && !same)
        wrong = concat(flag, " ", name, ": its tokens are those of ", file,
                       ", and the model's are those of ", c.tokenizer, fix);
    return wrong;
}

// Read a companion's weights from a checkpoint or from model files, or draw those of a preset.
// Returns whether they were drawn. All ranks call.
template <typename T, typename S>
bool load_companion(Run& run, Trainer<T, S>& t, const std::string& name) {
    Spend spend(run.clock.account, Work::LOAD);
    Config d = companion_config(run, name);
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
