// run.h - what a run has beside its trainer: options, shape, text, progress; and how it ends badly
#pragma once
#include "../action.h"
#include "../arena.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../comm/rank_status.h"
#include "../io/chat.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/evaluate.h"
#include "../io/files.h"
#include "../io/huggingface.h"
#include "../io/likelihood.h"
#include "../io/logger.h"
#include "../io/rollout_state.h"
#include "../io/sampler.h"
#include "../io/tensor_source.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_export.h"
#include "../layout.h"
#include "../load.h"
#include "../model.h"
#include "../ops/element_type.h"
#include "../ops/types.h"
#include "../step.h"
#include "../streams.h"
#include "../comm/text.h"
#include "account.h"
#include "async_save.h"
#include <algorithm>
#include <cmath>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <string>

namespace llmc {

struct Buddies; // memory_checkpoint.h

// ----------------------------------------------------------------------------
// losses and norms far above their recent mean are noted; a run that has blown up
//   z = (x - mean) / standard deviation, over the last 100 steps; a spike is z > 6.
//   Spikes are common and often heal by themselves, so the run prints a note and goes on. PaLM
//   (arXiv:2204.02311, 5.1) skipped the spikes that did not heal, by going back a hundred steps.

// The recent values of a number that each step adds one value to.
struct Recent {
    static constexpr size_t WINDOW = 100, LEAST = 20; // steps
    static constexpr double MAX_Z = 6;                // standard deviations
    std::deque<double> values = {};
    bool on = false; // the last value was part of a spike, which has been noted

    // Add a value. If a spike begins with it, return how many standard deviations it lies above the
    // mean; else 0.
    double add(double x) {
        double mean = 0, square = 0;
        for (double v : values)
            mean += v / double(values.size());
        for (double v : values)
            square += (v - mean) * (v - mean) / double(values.size());

        // Compare with a deviation of at least a hundredth of the mean: on a curve that is almost
        // flat, small moves are no spikes.
        double deviation = std::max({std::sqrt(square), 0.01 * std::fabs(mean), 1e-12});
        bool enough = values.size() >= LEAST;
        bool spike = enough && x > mean + MAX_Z * deviation;
        bool begins = spike && !on;
        on = spike;

        // Record a spike as the largest value that is no spike. So a spike hardly widens the range
        // of normal values, but a new level that stays becomes normal in time.
        values.push_back(spike ? mean + MAX_Z * deviation : x);
        if (values.size() > WINDOW) values.pop_front();
        return begins ? (x - mean) / deviation : 0;
    }
};

// The recent losses and gradient norms of a run.
struct Spikes {
    Recent loss = {}, norm = {};

    // Add a step's loss and norm. Returns the note that a spike begins, or "".
    std::string look(int64_t step, double new_loss, double new_norm) {
        double z_loss = loss.add(new_loss);
        double z_norm = norm.add(new_norm);
        if (z_loss == 0 && z_norm == 0) return "";
        bool of_loss = z_loss > 0;
        return formatted(
            "step %lld: the %s of %.4g is %.0f standard deviations above the last %zu steps: "
            "a spike",
            (long long)step, of_loss ? "loss" : "gradient norm", of_loss ? new_loss : new_norm,
            of_loss ? z_loss : z_norm, loss.values.size());
    }
};

// Whether a loss shows that the weights are ruined: it is above twice the loss of guessing, ln V,
// and also above twice the run's first loss, which may be larger. True for NaN.
inline bool blown_up(double loss, size_t V, double first_loss) {
    return !(loss <= 2 * std::max(std::log(double(V)), first_loss));
}

// The curve of --expect: by steps done, the mean and the deviation of published validation losses.
typedef std::map<int64_t, std::pair<double, double>> Curve;

// Read lines of `step mean deviation`, where # begins a comment. Returns "" or what is wrong.
inline std::string read_curve(const std::string& path, Curve* curve) {
    std::string line, text;
    std::string wrong = read_whole_file(path, &text);
    if (!wrong.empty())
        return "--expect " + wrong;
    std::istringstream lines(text);
    for (int number = 1; std::getline(lines, line); number++) {
        line = line.substr(0, line.find('#'));
        long long step = 0;
        double mean = 0, deviation = 0;
        char rest;
        int read = sscanf(line.c_str(), "%lld %lf %lf %c", &step, &mean, &deviation, &rest);
        if (read == EOF)
            continue;
        if (read != 3 || !(deviation > 0))
            return concat("--expect ", path, ":", number, ": wants `step mean deviation`, with a "
                          "deviation above 0, not '", printable(line), "'");
        (*curve)[step] = {mean, deviation};
    }
    return curve->empty() ? "--expect " + path + ": has no line `step mean deviation`" : "";
}

// ----------------------------------------------------------------------------
// a run's parts: what belongs to one subject or technique is one member

// A text that samples continue, and its tokens.
struct Prompt {
    std::string text;
    std::vector<int> tokens;
    OrderedJson fields; // the other fields of its line in --prompts
    int adapter = -1; // the set of adapters that its line names; -1: the base alone
};

// The texts that a run continues, and where they end.
struct SampleTexts {
    std::vector<Prompt> prompts;
    size_t context_length = 0; // positions that a sample may use, its prompt included
    std::set<int> stop_tokens; // tokens that end a sample
    FILE* completions = nullptr; // the real standard output, where completions go to it
};

// The parts of an export besides the weights.
struct Exports {
    ExportTokenizer tokenizer;
    // Writes the format of an extension; null: a folder, or a file of llm.c's.
    std::function<std::string(MergeSums*)> file = nullptr;
};

// A second model, starting weights or sums of weights, in memory next to the plans of a run.
struct Companion {
    std::string name, parts; // what it is, and what its bytes are
    Tier tier = Tier::DEVICE;
    // Its bytes on a rank, given a run and the options of its plans.
    std::function<size_t(const struct Run&, const std::vector<PlanOptions>&, int rank)> bytes;
};

// All companions of a run: a teacher with --loss distill, a draft model with --draft.
struct Companions {
    std::vector<Companion> all;
    Shape teacher, draft;
    Draft* guesses = nullptr; // null: no speculative decoding
    // The shape of --teacher, and its bytes on a rank; null: this program has none.
    std::function<Shape(const struct Run&)> teacher_of = nullptr;
    std::function<size_t(const struct Run&, const std::vector<PlanOptions>&, int rank)>
        teacher_bytes = nullptr;
};

// Training and validation data.
struct RunData {
    DataLoader train, val;
    size_t val_samples = 0;   // windows that an evaluation reads
    size_t val_bytes = 0;     // bytes of text that validation predicts; 0: not known
    int document_end = -1;    // the token that ends a document, with --documents mask
    Json files;               // of --data and --val, which checkpoints name
    Curve expected;           // of --expect
};

// The questions of --eval, and their candidates by length.
struct Questions {
    Evaluation asked;
    std::vector<ScoreGroup> groups;
};

// GRPO's sampled answers.
struct RunRollouts {
    std::vector<Exercise> exercises; // prompts whose answers are sampled
    Rollouts now = {};               // the answers that the current step trains on
    double seconds = 0;              // of this process's steps
    // Adds the numbers of a step, given its loss, to its report; null without rollouts.
    std::function<void(StepReport&, const Loss&)> report = nullptr;
};

// The weights that a run starts from, as the reference of its loss (tune/reference_policy.h).
struct ReferencePolicy {
    std::vector<float> train = {}, val = {};       // log p of the targets, (windows,T)
    std::vector<unsigned char> start_weights = {}; // a copy of them, where answers are sampled
    double point = 0;                              // KTO's, for the batch that is running
    // Calls around a validation (true: it begins); may be empty.
    std::function<void(bool begins)> around_validation = nullptr;
};

// Plans are indices into Trainer::plans; -1: this run does not have that plan.
struct RunPlans {
    int train = -1, evaluate = -1, generate = -1, rollout = -1;
    int prompt = -1;          // makes the keys and values of a prompt
    bool prompt_rows = false; // --adapter has the rows of a prompt, which become a prefix
};

// How far this process and its run have come, besides Run::step.
struct Progress {
    int64_t first_step = 0; // the step that this process started from
    int64_t tokens = 0;     // tokens trained on so far
    double started = 0;     // when the first step began, by clock_seconds()
    double first_loss = 0;  // the loss of this process's first step; 0: it has done none
    double step_loss = NAN; // the loss of the last step; NaN: its update was skipped
};

// How evenly ranks and experts are loaded, summed over this process's steps.
struct Balance {
    ChoiceBiases biases = {}; // of routers, with --router-bias-rate
    double cp = 0;            // pairs_imbalance(); 0 without context parallelism
    double max_vio = 0;       // of experts' loads
    double dropped = 0;       // the dropped share of their slots

    // Add a step's numbers. Their means are printed at the end.
    void add(const StepReport& r) {
        cp += r.number("cp_imbalance");
        max_vio += r.number("max_vio");
        dropped += r.number("dropped_share");
    }
};

// Validation losses, and what --keep N,best keeps.
struct Best {
    double loss = INFINITY; // the lowest, and its step
    int64_t step = 0;
    double last_loss = INFINITY;
    int64_t kept_step = -1; // the step of --keep N,best's checkpoint; -1: none
    double kept_loss = 0;   // the validation loss of that step
};

// Where the time goes.
struct Clock {
    Account account;
    double peak = 0;                // FLOP/s of one matrix product, all ranks together
    std::vector<TimedAction> trace; // the timed actions of the last step, if it was timed
    Profile profile;                // sums over all timed steps but the first
};

// The saves of a run so far. Times are those of a steady clock, which setting the machine's clock
// does not move.
struct Saves {
    int home = -1; // --out as this run took it, open; -1: it writes no folder
    Json base;     // which base weights the saved adapters belong to (base_identity.h)
    int64_t step = -1;             // the step of the last save; -1: none, or the last one failed
    double last = clock_seconds(); // when the last save ended, or training began
    double retry = 0;              // when to try a failed save again; 0: the last one succeeded
    int64_t count = 0;             // saves that have succeeded
    double interval = 0;           // seconds from save to save, --save-every auto; 0: unmeasured
    bool tries_first = false;      // a save was dropped: those after it try their weights first
    std::shared_ptr<AsyncSave> async = nullptr; // --save-async; null: steps wait for saves

    // --buddy; null: all saves go to --out.
    std::shared_ptr<Buddies> buddies;
    bool memory_fails = false; // the last save there failed
    double in_memory = 0;      // seconds spent in saves there
};

// Whether the weights are sound, and who computes wrong where they are not.
struct Health {
    std::string weights; // where the weights come from, in words
    Spikes spikes;
    bool ruined = false; // the weights diverged: never save or export them
    // Repeats the last step on all ranks, from equal weights or each rank's own: who is wrong.
    std::function<std::string(bool equal)> replay = nullptr;
};

// How a run ends.
struct RunEnd {
    int stopped = 0;     // the signal that stopped it; 0: none
    bool failed = false; // something could not be done
};

// The state of a run that is not the trainer's. One per rank.
struct Run {
    Config config;
    Shape shape;
    Layout layout; // with this rank's place in the grid
    Comm world;    // all ranks
    int64_t step = 0; // optimizer steps done

    // Files in and out.
    Dialects dialects; // formats of weights that are read besides plain safetensors
    Tokenizer tokenizer;
    Chat chat; // the format of conversations, where --loss or --chat needs one
    RunData data;
    Questions questions;
    SampleTexts samples;
    Exports exports;

    // The memory, and the plans that run.
    Companions companions;
    RunPlans plans;
    RunRollouts rollouts;
    ReferencePolicy reference;
    // Adds what a shape has besides --model's: adapters. Null: nothing.
    std::function<void(const Config&, Shape&)> complete_shape = nullptr;

    // How it goes.
    Logger log;
    Progress progress;
    Balance balance;
    Best best;
    Clock clock;
    Saves saves;
    Health health;
    RunEnd end;
};

// Whether this is the first rank, which alone prints and writes files.
inline bool is_first_rank(const Run& run) { return run.world.rank == 0; }

// Seconds that this rank has waited for others so far; 0 for a rank that is alone.
inline double waited_for_others(const Run& run) {
    return run.world.info ? seconds_waited(run.world.info->notes) : 0;
}

// End the program with an error that all ranks know. Only the first rank prints it, and ends the
// program; the others wait in a barrier, so that the message appears once.
inline void or_die_on_all_ranks(const Run& run, const std::string& wrong) {
    if (!wrong.empty() && !is_first_rank(run))
        barrier(run.world, Cpu{});
    or_die(wrong);
}

// Print a text on the first rank.
template <typename... Parts> void say(const Run& run, const Parts&... parts) {
    if (is_first_rank(run)) fputs(concat(parts...).c_str(), stdout);
}

// Print a note for the user to standard error, on the first rank; the run goes on.
inline void note(Run& run, const std::string& text) {
    if (!is_first_rank(run) || text.empty())
        return;
    finish_line(run.log);
    fflush(stdout);
    fprintf(stderr, "note: %s\n", one_screen(text).c_str());
}

// Print what could not be done. The run goes on, and the program ends with exit status 1.
inline void report_failure(Run& run, const std::string& wrong) {
    if (wrong.empty()) return;
    run.end.failed = true;
    finish_line(run.log);
    fflush(stdout);
    fprintf(stderr, "%s: error: %s\n", program_invocation_short_name, one_screen(wrong).c_str());
}

// Whether the tokenizer can be the model's, judged by their sizes. A model may have more tokens
// than its tokenizer, as padding; only a byte tokenizer must match exactly.
inline bool vocab_matches(const Run& run) {
    size_t tokens = size_t(run.tokenizer.vocab_size);
    bool bytes = run.tokenizer.kind == TokenizerKind::BYTE;
    return bytes ? tokens == run.shape.V : tokens <= run.shape.V;
}

// The error for a tokenizer that is not the model's: text made with it would be nonsense.
inline std::string foreign_tokenizer(const Run& run) {
    return concat("the model has ", run.shape.V, " tokens, --tokenizer ", run.config.tokenizer,
                  " writes ", run.tokenizer.vocab_size, ": give the model's tokenizer");
}

// The format of an export, by the end of its path: .bin is a file of llm.c's, .gguf one of
// llama.cpp's, and any other a Hugging Face folder.
inline bool is_model_file(const std::string& path) { return path.ends_with(".bin"); }
inline bool is_gguf(const std::string& path) { return path.ends_with(".gguf"); }
inline Type export_type(const Config& c) {
    if (c.export_dtype == "bf16")
        return Type::BF16;
    return c.export_dtype == "fp16" ? Type::F16 : Type::F32;
}

// Call body with the element type that --precision names.
template <typename F> auto with_precision(const Config& c, F body) {
    if (c.precision == "bf16") return body(std::type_identity<bf16>());
    if (c.precision == "fp16") return body(std::type_identity<fp16>());
    return body(std::type_identity<float>());
}

// Bytes that a rank keeps beside its arena, of the memory in which the steps run.
template <typename S>
size_t companion_bytes(const Run& run, const std::vector<PlanOptions>& plans, int rank, S where) {
    size_t bytes = 0;
    for (const Companion& c : run.companions.all)
        if (is_here(c.tier, where)) bytes += c.bytes(run, plans, rank);
    return bytes;
}

} // namespace llmc
