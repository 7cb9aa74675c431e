// run.h - what a run has beside its trainer: options, shape, text, progress; and how it ends badly
#pragma once
#include <sys/stat.h>
#include <filesystem>
#include "../choice_bias.h"
#include "../io/async_save.h"
#include "../io/buddy.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/huggingface.h"
#include "../io/likelihood.h"
#include "../io/logger.h"
#include "../io/profile.h"
#include "../io/rollouts.h"
#include "../io/speculate.h"
#include "../io/timeline.h"
#include "account.h"
#include "spikes.h"

namespace llmc {

// When a run has saved: by a steady clock, so that setting the time changes nothing.
struct Saves {
    int64_t step = -1;             // of the last one
    double last = clock_seconds(); // when it was, or the run began
    double retry = 0;              // when to try again after one that failed; 0: none has
    int64_t count = 0;             // that have ended well
    double interval = 0;           // seconds, by --save-minutes auto; 0: none has been measured
    bool memory_fails = false;     // the last save in --buddy has failed
    double in_memory = 0;          // seconds of those saves
    std::shared_ptr<AsyncSave> async = nullptr; // --save-async; null: steps wait for saves
};

// A text that samples continue, and its tokens.
struct Prompt {
    std::string text;
    std::vector<int> tokens;
    nlohmann::ordered_json fields; // of its line in --prompts
};

// All that a run has beside its trainer. Number -1 stands for a plan that this run does not have.
struct Run {
    Config config;
    Shape shape;
    Layout layout; // as this rank stands in it
    Comm world;

    // Text.
    Tokenizer tokenizer;
    Chat chat; // how conversations are written, where they are
    ExportTokenizer exported; // with --export
    nlohmann::json base;      // of adapters that are saved (base_identity.h)
    std::vector<Prompt> prompts;
    size_t context_length = 0; // of a sample, with its prompt
    std::set<int> stop_tokens; // tokens that end a sample
    Shape draft_shape;           // with --draft
    Draft* draft = nullptr;      // null: nobody guesses
    size_t draft_bytes = 0;      // beside the plans
    FILE* completions = nullptr; // what standard output was, where they go to it
    DataLoader train, val;
    size_t val_samples = 0;
    size_t val_bytes = 0;  // bytes that validation predicts; 0: not known
    Evaluation tasks;      // the questions of --evaluate
    std::vector<ScoreGroup> score_groups;
    int document_end = -1; // the token, with --document-mask
    std::vector<Exercise> exercises; // of answers that are sampled
    Rollouts rollouts = {};          // the last step's

    // Progress.
    int train_plan = -1, evaluate_plan = -1, generate_plan = -1;
    int rollout_plan = -1;
    int64_t step = 0;            // optimizer steps done
    int64_t first_step = 0;      // what this process started from
    int64_t tokens = 0;          // trained on so far
    double started = 0;          // seconds, by clock_seconds()
    double first_loss = 0;       // of this process's first step; 0: it has done none
    double cp_imbalance = 0;     // added up over this process's steps; 0: sequences are whole
    std::vector<float> references = {}, val_references = {}; // (windows,T) of preferences
    std::vector<double> mismatched = {}, val_mismatched = {}; // (windows) of KTO's reference point
    double reference_point = 0;                               // of the batch that runs
    ChoiceBiases choice_biases = {}; // with --router-bias-rate
    double max_vio = 0;          // likewise: of experts' loads
    double best_loss = INFINITY; // of validation
    int64_t best_step = 0;
    double val_loss = INFINITY; // of the last evaluation
    int64_t kept_step = -1;     // the checkpoint of --keep-best; -1: none
    double kept_loss = 0;
    double peak = 0;        // FLOP/s of one product, on all ranks
    Logger log;
    Spikes spikes;
    LossScaling loss_scaling; // fp16
    Saves saves;
    std::shared_ptr<Buddies> buddies; // --buddy; null: all saves go to --out
    Account account; // of time

    // The end: the signal that stopped it, and whether something was left undone.
    int stopped = 0;
    bool failed = false;
    bool ruined = false;            // the weights diverged: never save or export them
    std::string weights;            // where they are from, in words
    std::vector<TimedAction> trace; // of the last step, for --timeline
    Profile profile;                // of the steps behind the first
};

// The first rank prints, and writes files.
inline bool is_first(const Run& run) { return run.world.rank == 0; }

// Seconds that this rank has waited for others.
inline double waited_for_others(const Run& run) {
    return run.world.info ? seconds_waited(run.world.info->notes) : 0;
}

// Functions that may fail return "" or a sentence for the user; this one ends the program with it.
inline void or_die(const std::string& wrong) {
    LLMC_USER_CHECK(wrong.empty(), "%s", wrong.c_str());
}

// An error that all ranks know, the same on each: the first one says so, and ends the others' wait.
inline void or_die_on_all_ranks(const Run& run, const std::string& wrong) {
    if (!wrong.empty() && !is_first(run))
        barrier(run.world, Cpu{});
    or_die(wrong);
}

// Say something that the user should know; the run goes on.
inline void note(Run& run, const std::string& text) {
    if (!is_first(run) || text.empty()) return;
    finish_line(run.log);
    fflush(stdout);
    fprintf(stderr, "note: %s\n", text.c_str());
}

// Say what could not be done. The run goes on, and the program's status says so at its end.
inline void report_failure(Run& run, const std::string& wrong) {
    if (wrong.empty()) return;
    run.failed = true;
    finish_line(run.log);
    fflush(stdout);
    fprintf(stderr, "train_gpt: error: %s\n", wrong.c_str());
}

// The type of what a path leads to: S_IFDIR, S_IFREG, ...; 0: nothing is there.
inline mode_t file_type(const std::string& path) {
    struct stat s;
    return stat(path.c_str(), &s) == 0 ? s.st_mode & S_IFMT : 0;
}

// The program itself: its path to start it again, its folder to find sources beside it, and its
// bytes to see that all ranks run the same one.
inline std::string program_path() {
    // Linux says where a program lies; an empty text means that it does not.
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    return std::string(path, n > 0 ? size_t(n) : 0);
}
inline std::string program_folder() {
    std::string program = program_path();
    return program.substr(0, program.rfind('/') + 1);
}
inline std::string program_bytes() {
    std::ifstream program("/proc/self/exe", std::ios::binary);
    return {std::istreambuf_iterator<char>(program), {}};
}

// Whether the tokenizer is the model's, as far as their sizes tell. A model may have more tokens
// than its tokenizer, as padding.
inline bool vocab_matches(const Run& run) {
    size_t tokens = size_t(run.tokenizer.vocab_size);
    bool bytes = run.tokenizer.kind == TokenizerKind::BYTE;
    return bytes ? tokens == run.shape.V : tokens <= run.shape.V;
}

// One text for all places where a foreign tokenizer would make nonsense.
inline std::string foreign_tokenizer(const Run& run) {
    return concat("the model has ", run.shape.V, " tokens, --tokenizer ", run.config.tokenizer,
                  " writes ", run.tokenizer.vocab_size, ": give the model's tokenizer");
}

// Whether a file that is written at the end of a run can be made where it is to be; "" or why not.
// Nothing that was there is changed.
inline std::string try_file(const char* flag, const std::string& path) {
    bool there = file_type(path) != 0;
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    std::string why = strerror(errno);
    if (fd < 0)
        return concat("--", flag, " ", path, ": cannot be written: ", why);
    close(fd);
    if (!there) unlink(path.c_str());
    return "";
}

// The same of a folder: one beside it is made, and removed.
inline std::string try_folder(const char* flag, std::string path) {
    while (path.size() > 1 && path.ends_with("/"))
        path.pop_back();
    std::string beside = path + ".try";
    bool good = mkdir(beside.c_str(), 0777) == 0 || errno == EEXIST;
    std::string why = strerror(errno);
    rmdir(beside.c_str());
    return good ? "" : concat("--", flag, " ", path, ": cannot be made: ", why);
}

// A path that ends in .bin is one file of llm.c's format, in .gguf one of llama.cpp's; any other is
// a Hugging Face folder.
inline bool is_model_file(const std::string& path) { return path.ends_with(".bin"); }
inline bool is_gguf(const std::string& path) { return path.ends_with(".gguf"); }
inline Type export_type(const Config& c) {
    if (c.export_dtype == "bf16")
        return Type::BF16;
    return c.export_dtype == "fp16" ? Type::F16 : Type::F32;
}

} // namespace llmc
