// folder.h - the folder of --out: one run's, its checkpoints and its log, and how a run goes on
//   OUT/lock           held while a run writes there: a second run prints who holds it, and ends
//   OUT/log.jsonl      a line a step; see logger.h
//   OUT/step_00000100  a checkpoint; see checkpoint.h
//   1. take_folder     before anything else: make it, lock it, refuse one that holds another run
//   2. adopt_flags     --resume: flags that are not given take the checkpoint's values
//   3. resume          load weights, moments and counters; without a checkpoint begin a new run
//   4. save            when it is time, and at the end. A save that fails never ends the run
#pragma once
#include "../comm/comm.h"
#include "../comm/rank_status.h"
#include "../io/checkpoint.h"
#include "../io/checkpoint_load.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/json.h"
#include "../io/logger.h"
#include "../io/manifest.h"
#include "../io/mfu.h"
#include "../io/one_reader.h"
#include "../io/rollout_state.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "account.h"
#include "async_save.h"
#include "health.h"
#include "memory_checkpoint.h"
#include "run.h"
#include "stop.h"
#include <algorithm>
#include <cmath>
#include <string>
#include <sys/file.h>

namespace llmc {

// ----------------------------------------------------------------------------
// how often a run that may fail saves: --save-every auto - Young 1974
//   A save costs C seconds of steps, and the job fails once in M seconds on average. With a save
//   every t seconds, each interval loses C to its save, and each failure loses half an interval of
//   work: the lost share is C/t + t/(2M), and t = sqrt(2 M C) makes it least.
//   M = hours between two failures of a rank x 3600 / ranks. Llama 3's 16,384 GPUs had 419 failures
//   in 54 days, one in 50,700 hours of a GPU (arXiv:2407.21783): the HOURS of --save-every auto.
//   C is measured: the time that saves have taken from the run, divided by their number. The first
//   save comes right after the first step, so that C is known from then on.

// The mean time from one failure of the job to the next, in seconds: any rank's failure ends it.
inline double job_failure_seconds(double hours_of_a_rank, int ranks) {
    return hours_of_a_rank * 3600 / ranks;
}

// The seconds from save to save that lose least time. The formula holds only while saves are short
// against M; where C > 2M it would give less than a save takes, so half of the time goes to steps.
inline double young_interval(double failure_seconds, double save_seconds) {
    return std::max(std::sqrt(2 * failure_seconds * save_seconds), save_seconds);
}

// The share of time that saves and lost work cost at an interval. Restarting is not included.
inline double lost_share(double interval, double failure_seconds, double save_seconds) {
    return save_seconds / interval + interval / (2 * failure_seconds);
}

// The note for the user: "a checkpoint every 5m34s: ..."
inline std::string interval_text(double hours_of_a_rank, int ranks, double save_seconds) {
    double failure = job_failure_seconds(hours_of_a_rank, ranks);
    double interval = young_interval(failure, save_seconds);
    double percent = 100 * lost_share(interval, failure, save_seconds);
    return concat("a checkpoint every ", duration_text(interval), ": a save takes ", save_seconds,
                  " s, and ", ranks, ranks == 1 ? " rank fails" : " ranks fail", " every ",
                  duration_text(failure), "; both cost ", formatted("%.2g", percent),
                  "% of the time");
}

// ----------------------------------------------------------------------------
// the folder is this run's

// Describe the run that a folder holds; "": there is none that a new run could destroy.
inline std::string run_in(const std::string& out) {
    std::vector<int64_t> steps = checkpoint_steps(out);
    if (!steps.empty())
        return concat("a run at step ", steps[0]);

    // A log's first line holds the configuration; its steps follow.
    std::ifstream log(out + "/log.jsonl");
    std::string line;
    return std::getline(log, line) && std::getline(log, line) ? "a run's log" : "";
}

// Lock the folder: "" or why not. The system releases the lock when the process ends,
// however it ends. Some network file systems have no locks: there the run goes on without one,
// and *unlocked says why.
inline std::string lock_folder(const std::string& out, std::string* unlocked) {
    std::string path = out + "/lock";
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return "--out " + out + ": cannot be written: " + strerror(errno);

    // Leave the number of this process, for the message of another run.
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        std::string pid = concat(getpid(), "\n");
        bool told = ftruncate(fd, 0) == 0 && write(fd, pid.data(), pid.size()) > 0;
        (void)told; // on a full disk the lock holds without the process number
        return "";
    }

    // Refuse only if somebody holds the lock.
    bool held = errno == EWOULDBLOCK;
    if (!held) *unlocked = strerror(errno);
    char pid[16] = {};
    bool known = read(fd, pid, sizeof(pid) - 1) > 0;
    close(fd);
    if (!held) return "";
    return concat("--out ", out, ": another run is writing there",
                  known ? concat(" (process ", atoll(pid), ")") : "",
                  ": wait for its end, or choose another --out");
}

// Make the folder and its parents, and lock it for this run: "" or why not.
inline std::string make_folder(Run& run) {
    const Config& c = run.config;
    std::error_code error;
    std::filesystem::create_directories(c.out, error);
    if (error)
        return "--out " + c.out + ": cannot be made: " + error.message();
    std::string unlocked;
    LLMC_TRY(lock_folder(c.out, &unlocked));
    if (!unlocked.empty())
        note(run, concat("--out ", c.out, " cannot be locked (", unlocked,
                         "): see that no second run writes there"));

    // Without --resume this run would replace the checkpoints and the log of the run before. What
    // stands where a folder was moved away during the run is always another's.
    std::string holds = run_in(c.out);
    bool moved = run.saves.home >= 0;
    if (!holds.empty() && (moved || !c.resume))
        return concat("--out ", c.out, " holds ", holds,
                      ": --resume goes on with it, or choose another --out");
    run.saves.home = open(c.out.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    return "";
}

// Before a save, make the folder again if somebody has moved or removed it: "" or why not.
inline std::string keep_folder(Run& run) {
    const std::string& out = run.config.out;
    struct stat mine = {}, there = {};
    bool known = is_first_rank(run) && run.saves.home >= 0;
    known = known && fstat(run.saves.home, &mine) == 0;
    bool same = stat(out.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
                mine.st_dev == there.st_dev;
    if (!known || same)
        return "";
    LLMC_TRY(make_folder(run));

    // Begin another log there.
    note(run, "--out " + out + " was moved or removed: it is made again");
    run.log.pending.insert(0, run.log.first);
    return "";
}

// Whether this run writes to --out. Only a run that trains does; every other run only reads there.
inline bool writes_folder(const Config& c) { return !c.out.empty() && has_training(c); }

// Name the reason why --buddy cannot save: there is no second machine.
inline std::string one_machine(const Config& c) {
    return "--buddy " + c.buddy + ": all ranks are on one machine";
}

// Refuse --buddy on one machine: "" or why. A run that resumes may be left with one. All ranks
// call; the folders in memory that this makes to tell machines apart are removed again.
inline std::string check_buddies(const Run& run) {
    const Config& c = run.config;
    if (c.buddy.empty() || !writes_folder(c) || c.resume)
        return "";
    std::string refusal = one_machine(c) + ": start the run on two or more";

    // Ranks as threads start later, and share a machine. A folder of its own for each is a test's.
    bool apart = c.buddy.find("%r") != std::string::npos;
    if (c.local_ranks > 1) return apart ? "" : refusal;

    // Look which ranks share a folder.
    Buddies b;
    std::string wrong = make_buddies(run.world, c.buddy, &b);
    unmake_buddies(b);
    if (!wrong.empty() || !b.buddy_of.empty())
        return wrong;
    return refusal;
}

// Take the folder, before anything takes time. The first rank does this for all. What needs no
// folder is refused first, so that a refused run leaves none behind.
inline void take_folder(Run& run) {
    const Config& c = run.config;
    std::string wrong = check_buddies(run);
    if (wrong.empty() && is_first_rank(run) && writes_folder(c))
        wrong = make_folder(run);

    // A run that only reads must ask for the checkpoint's weights by --resume. Without it the
    // weights would be new ones, although --out names a trained model.
    bool named = !c.out.empty() && !writes_folder(c);
    bool looks = is_first_rank(run) && named && !c.explain && !c.resume;
    if (looks && !checkpoint_steps(c.out).empty())
        wrong = concat("--out ", c.out, " holds ", run_in(c.out),
                       ": --resume takes its weights; without --out they are new ones");
    or_die_on_all_ranks(run, first_error(run.world, wrong));
}

// ----------------------------------------------------------------------------
// flags of the checkpoint

// Whether a group's list of programs has a word: "kept" marks flags that describe what is trained,
// and not where or for how long; "shape" those that describe the model.
inline bool marks(const std::string& list, const std::string& word) {
    return (" " + list + " ").find(" " + word + " ") != std::string::npos;
}

// A value of the manifest's configuration, as text that set_field() reads.
inline std::string json_value_text(const Json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
}

// Whether a flag that is not given follows another flag that is given, and so must not take the
// saved value. Only one does: --min-lr defaults to a tenth of --lr, so to a tenth of the new one.
inline bool follows_given(const Config& c, const Json& saved, const std::string& name) {
    if (name != "min-lr" || !was_given(c, "lr") || !saved.contains("lr"))
        return false;
    bool numbers = saved["lr"].is_number() && saved[name].is_number();
    return numbers && saved[name].get<double>() == saved["lr"].get<double>() / 10;
}

// Whether a saved flag does not apply to this run, because it describes numbers that this run does
// not keep. A run that only reads weights has no masters or moments; with another precision,
// optimizer or loss, the settings of the old one mean nothing.
inline bool is_of_other_numbers(const Config& c, const Json& saved, const std::string& name) {
    auto differs = [&](const char* flag, const std::string& now) {
        return was_given(c, flag) && saved.contains(flag) && saved[flag] != now;
    };
    bool reads = c.eval || c.steps == 0;
    bool other = differs("precision", c.precision) || differs("optimizer", c.optimizer);
    if (name == "masters" || name == "states")
        return reads || other;

    // New adapters, a new prefix and a folder's exclude one another.
    const char* kinds[] = {"lora", "prefix", "adapter"};
    if (std::ranges::find(kinds, name) != std::end(kinds))
        return std::ranges::any_of(kinds, [&](std::string other) {
            return other != name && was_given(c, other);
        });
    bool preference = name == "beta" || name == "gamma" || name == "label-smoothing" ||
                      name == "desirable-weight" || name == "undesirable-weight";
    if (preference && differs("loss", c.loss))
        return true;
    return name == "fp8" && (other || was_given(c, "weights"));
}

// Set each flag that the command line leaves out to the checkpoint's value. Returns a list of the
// given flags whose values differ from the checkpoint's. A flag that this program does not know,
// or a value that it refuses, is ignored.
inline std::string adopt_flags(Config& c, const Json& saved) {
    std::string group, differences;
    for (const Flag& f : config_table()) {
        if (!*f.name) {
            group = f.accepts;
            continue;
        }
        if (!marks(group, "kept") || !saved.contains(f.name))
            continue;
        if (is_of_other_numbers(c, saved, f.name))
            continue;
        std::string was = json_value_text(saved[f.name]);
        std::string now = field_text(c, f.field);

        // Compare the values, numbers as numbers: 1e-3 is 0.001.
        Config as_saved = c;
        if (!set_field(as_saved, f, was).empty())
            continue;
        was = field_text(as_saved, f.field);
        if (was == now) continue;

        // Adopt the saved value, or report that the given one differs.
        if (!was_given(c, f.name) && !follows_given(c, saved, f.name)) {
            c = as_saved;
            c.adopted.insert(f.name);
        } else if (was_given(c, f.name)) {
            differences += concat(differences.empty() ? "" : ", ", "--", f.name, " was ",
                                  was.empty() ? "not given" : printable(was));
        }
    }
    return differences;
}

// The manifest of the newest checkpoint, or of the one that --resume STEP chooses; null if none can
// be read. A broken checkpoint is skipped here, and reported when the weights are loaded.
inline Json newest_manifest(const Config& c) {
    for (int64_t step : checkpoint_steps(c.out)) {
        if (c.resume_step >= 0 && step != c.resume_step)
            continue;
        Json manifest;
        if (read_manifest(c.out + "/" + step_folder(step), &manifest).empty())
            return manifest;
    }
    return {};
}

// Let --model name a run, or one of its checkpoints: "" or what is wrong. The model's flags, its
// tokenizer and its chat format are then that run's where the command line has none, and its newest
// checkpoint has the weights.
inline std::string take_run_model(Config& c) {
    std::vector<int64_t> steps = checkpoint_steps(c.model);
    std::string folder = c.model;
    if (!steps.empty())
        folder += "/" + step_folder(steps[0]);
    if (steps.empty() && !file_type(folder + "/manifest.json"))
        return "";
    Json manifest;
    std::string wrong = read_manifest(folder, &manifest);
    if (!wrong.empty())
        return "--model " + wrong;
    c.start = folder;

    // Adapters stand on another model, which their checkpoint does not hold.
    Config of_run;
    adopt_flags(of_run, manifest.value("config", Json()));
    if (has_adapters(of_run) || !of_run.add_tokens.empty())
        return "--model " + c.start + ": has adapters or added tokens, and stands on another "
               "model: --export it (tune_gpt --resume --out RUN --steps 0 --merge --export DIR), "
               "and give the folder";

    // Take what describes the model.
    std::string group;
    for (const Flag& f : config_table()) {
        if (!*f.name)
            group = f.accepts;
        std::string name = f.name;
        bool text = name == "tokenizer" || name == "chat-format";
        bool describes = text || (marks(group, "shape") && name != "add-tokens");
        bool takes = name == "model" || (describes && !was_given(c, name));
        if (takes && *f.name)
            set_field(c, f, field_text(of_run, f.field));
    }
    return "";
}

// Add to the refusal of a flag that nobody gave on this command line whose it is.
inline std::string whose_flag(const Config& c, const std::string& wrong) {
    std::string name = wrong.substr(0, wrong.find(' '));
    bool adopted = name.starts_with("--") && c.adopted.count(name.substr(2));
    return adopted ? concat(wrong, " (", name, " is the checkpoint's)") : wrong;
}

// Refuse to go on with groups of another size, or other updates: a run's place among its prompts is
// its number of answers, divided by both.
inline std::string check_place_among_prompts(const Config& c, const Json& saved) {
    bool both = has_rollouts(c) && saved.contains("loss") && saved["loss"] == c.loss;
    for (const char* name : {"group", "updates"}) {
        int now = strcmp(name, "group") == 0 ? c.group : c.updates;
        if (both && writes_folder(c) &&
            saved.contains(name) && saved[name] != now)
            return concat("--", name, " ", now, ": this run has ", json_word(saved[name]),
                          ", by which it counts its prompts: leave --", name,
                          " out, or start a new run from its weights");
    }
    return "";
}

// Refuse a checkpoint whose run used a flag that is gone.
inline std::string check_gone_flags(const Json& saved) {
    for (const GoneFlag& f : GONE_FLAGS) {
        if (!f.harmless || !saved.contains(f.name)) continue;
        std::string was = json_value_text(saved[f.name]);
        if (was != f.harmless)
            return concat("--resume: this checkpoint's run had --", f.name, " ", was,
                          ", which is gone: start a new run from its weights; ", f.instead);
    }
    return "";
}

// Refuse a checkpoint that another program made: its flags would be left out.
inline std::string check_program(const Config& c) {
    for (const std::string& name : c.adopted)
        if (!takes_flag(c.program, name))
            return concat("--resume ", c.out, ": ", unknown_flag(c, name),
                          ", which goes on with this run");
    return "";
}

// With --resume, take the flags that the command line leaves out from the checkpoint.
inline void adopt_checkpoint(Run& run) {
    Config& c = run.config;
    if (!c.resume || c.out.empty())
        return;
    Json manifest = newest_manifest(c);
    if (!manifest.is_object())
        return;
    const Json saved = manifest.value("config", Json());
    if (!saved.is_object())
        return;
    if (writes_folder(c)) or_die(check_gone_flags(saved));
    std::string differences = adopt_flags(c, saved);
    or_die(check_place_among_prompts(c, saved));
    or_die(check_program(c));
    if (!was_given(c, "model") && saved.contains("start"))
        c.start = json_value_text(saved["start"]);

    // An export writes what the training run's would: its masters. They are float, and in a run
    // without an optimizer the weights hold them.
    if (c.steps == 0 && !c.eval && !c.export_dir.empty()) {
        c.precision = "fp32";
        c.masters = "float";
        c.fp8 = "none";
    }
    if (!differences.empty() && writes_folder(c))
        note(run, "this run differs from its checkpoint: " + differences);
}

// ----------------------------------------------------------------------------
// going on

// Say how the files of a flag differ from those that the checkpoint names; "": they are the same,
// wherever they lie, or it names none.
inline std::string other_files(const Json& now, const Json& saved) {
    auto described = [](const Json& list, size_t i) {
        const Json none = {{"file", "none"}, {"bytes", 0}, {"crc32", 0}};
        return i < list.size() && list[i].is_object() ? list[i] : none;
    };

    // Compare file by file, in their order: it numbers the windows.
    size_t files = saved.is_array() ? std::max(now.size(), saved.size()) : 0;
    for (size_t i = 0; i < files; i++) {
        Json is = described(now, i), was = described(saved, i);
        if (is["bytes"] != was["bytes"] || is["crc32"] != was["crc32"])
            return concat("file ", i + 1, " is ", json_word(is["file"]), ", ",
                          json_word(is["bytes"]), " bytes, and was ", json_word(was["file"]), ", ",
                          json_word(was["bytes"]), " bytes of another content");
    }
    return "";
}

// Rename the checkpoints that are newer than the one this run resumed from. The next resume must
// not load them, and --keep must not count them; nothing is deleted.
inline void set_newer_aside(Run& run, const std::vector<int64_t>& broken) {
    const std::string& out = run.config.out;
    std::string wrong;
    for (int64_t step : is_first_rank(run) ? checkpoint_steps(out) : std::vector<int64_t>()) {
        if (step <= run.step || !wrong.empty())
            continue;
        bool is_broken = std::ranges::count(broken, step) > 0;
        std::string name;
        wrong = set_aside(out, step, is_broken ? ".broken" : ".newer", &name);
        if (wrong.empty())
            note(run, concat(out, "/", step_folder(step), " is now ", name,
                             ": this run goes on from before it"));
    }
    or_die_on_all_ranks(run, first_error(run.world, wrong));
}

// The run of --out as its saves in memory name it: two runs may call their folders alike.
inline std::string run_of(const Config& c) {
    std::error_code none;
    return std::filesystem::weakly_canonical(c.out, none).string();
}

// Refuse a folder in memory that holds another run's save: "" or why. own: the run that this one
// goes on with; "": it is a new one.
inline std::string check_memory(const std::string& folder, const std::string& own) {
    for (int64_t step : checkpoint_steps(folder)) {
        Json m;
        bool whole = read_manifest(folder + "/" + step_folder(step), &m).empty();
        std::string of = whole ? folder_of_run(m) : "";
        if (own.empty() || (whole && of != own))
            return concat("--buddy ", folder, ": holds step ", step, " of another run, ",
                          printable(of), ": choose another folder, or remove that");
    }
    return "";
}

// Find the machines of --buddy. Only a run that trains saves there.
inline void open_buddies(Run& run) {
    const Config& c = run.config;
    if (c.buddy.empty() || !writes_folder(c))
        return;
    run.saves.buddies = std::make_shared<Buddies>();
    or_die_on_all_ranks(run, make_buddies(run.world, c.buddy, run.saves.buddies.get()));

    // A run that is left with one machine can still load from its memory, but has no other machine
    // to save to.
    if (run.saves.buddies->buddy_of.empty())
        note(run, one_machine(c) + ": nothing is saved in memory");

    // If --out holds no run to resume, whatever lies in memory belongs to another run.
    int64_t ours = c.resume && is_first_rank(run) && !run_in(c.out).empty();
    all_reduce_max(run.world, &ours, 1, Cpu{});
    std::string wrong = check_memory(run.saves.buddies->folder, ours ? run_of(c) : "");
    or_die_on_all_ranks(run, first_error(run.world, wrong));
}

// Continue from a checkpoint of --out, whatever layout it was written with. Returns false if
// there is none and a new run begins. Newer checkpoints are renamed only after these weights
// have been checked.
template <typename T, typename S>
bool resume(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    std::vector<int64_t> steps = first_ranks_steps(run.world, c.out);
    bool saved = !steps.empty();
    if (run.saves.buddies)
        saved |= !buddy_steps(run.world, *run.saves.buddies, -1).empty();
    if (!saved && c.resume_step < 0 && writes_folder(c)) {
        note(run, c.out + " holds no checkpoint: a new run begins");
        return false;
    }

    // Load the checkpoint. If memory holds the same step, take that: it is read faster, and the
    // files on disk have not been checked yet.
    CheckpointInfo info;
    info.base = run.saves.base;
    std::vector<std::string> notes;
    std::string wrong;
    int64_t newest = steps.empty() ? -1 : steps[0];
    bool looks = run.saves.buddies && c.resume_step < 0;
    bool in_memory = looks && buddy_load(t, *run.saves.buddies, &info, run_of(c), newest - 1,
                                         &notes, &wrong);
    if (!in_memory)
        wrong = checkpoint_load(t, &info, c.out, &notes, c.resume_step);
    for (const std::string& text : notes)
        note(run, text);
    or_die_on_all_ranks(run, wrong);
    run.health.weights = (in_memory ? c.buddy : c.out) + "/" + step_folder(info.step);
    if (c.use_ema) run.health.weights += ", the mean of --ema";
    run.step = info.step;
    if (run.plans.train < 0) return true;

    // Continue the data. The order of samples depends on the seed, so with another seed the run
    // would repeat some samples and miss others.
    LLMC_USER_CHECK(
        info.seed == uint64_t(c.seed),
        "the checkpoint was made with --seed %llu, not %lld: the data order would change: leave "
        "--seed out",
        (unsigned long long)info.seed, (long long)c.seed);

    // Say if the data are others: the cursor is a place among the samples of the old ones.
    for (const char* flag : {"data", "val"}) {
        std::string other = other_files(run.data.files[flag], info.data[flag]);
        if (!other.empty())
            note(run, concat("--", flag, " is not the checkpoint's: ", other,
                             ": text may come again, and what was held back may be trained on"));
    }
    t.data.cursor = info.cursor;
    run.progress.tokens = info.tokens;
    if (has_rollouts(c))
        run.rollouts.now = rollouts_of(info.rollouts);

    // Restore the best checkpoint's record, then check the weights before any file moves.
    run.best.kept_step = info.best_step;
    run.best.kept_loss = info.best_loss;
    if (run.best.kept_step >= 0) {
        run.best.step = run.best.kept_step;
        run.best.loss = run.best.kept_loss;
    }
    check_weights(run, t);
    set_newer_aside(run, info.broken);
    if (run.saves.buddies && !in_memory)
        remove_buddies(run.world, *run.saves.buddies);

    // Print where the run goes on, or that its last step is already done.
    if (run.step < c.steps)
        say(run, "resumed at step ", run.step, in_memory ? ", from memory\n" : "\n");
    else
        say(run, "nothing to train: --steps ", c.steps, ", the checkpoint has ", run.step, "\n");
    return true;
}

// Open the log. It begins with the configuration, so that a plot can say what it shows. Only a run
// that trains opens it: another process may be writing the same log.
template <typename T, typename S>
void open_log(Run& run, const Trainer<T, S>& t) {
    const Config& c = run.config;
    if (run.plans.train < 0 || c.out.empty() || !is_first_rank(run))
        return;
    Json first = {{"config", config_json(c)},
                  {"flops_per_token", flops_per_token(t.model, size_t(c.seq))}};
    or_die(log_open(run.log, c.out + "/log.jsonl", run.step, first));
}

// ----------------------------------------------------------------------------
// saving

// Seconds from a failed save to the next try: during the run, and at its end.
constexpr double RETRY_SECONDS = 60, RETRY_AT_THE_END = 5;

// Whether it is time for a checkpoint by the clock. Only the first rank's clock counts; the
// others return false.
inline bool clock_wants_save(const Run& run) {
    const Config& c = run.config;
    if (c.out.empty() || !is_first_rank(run) || is_on_its_way(run.saves.async.get()))
        return false;
    double now = clock_seconds();
    if (run.saves.retry)
        return now >= run.saves.retry;
    // With --save-every auto the interval starts at 0: the first save comes after the first step,
    // and its cost sets the interval.
    SaveRule rule = save_rule(c);
    if (rule.failure_hours)
        return now - run.saves.last >= run.saves.interval;
    return rule.seconds > 0 && now - run.saves.last >= rule.seconds;
}

// The facts about this step that a checkpoint's manifest records.
template <typename T, typename S>
CheckpointInfo checkpoint_info(const Run& run, const Trainer<T, S>& t) {
    CheckpointInfo info;
    info.step = run.step;
    info.cursor = t.data.cursor;
    info.seed = uint64_t(run.config.seed);
    info.config = config_json(run.config);
    info.tokens = run.progress.tokens;
    info.best_step = run.best.kept_step;
    info.best_loss = run.best.kept_loss;
    info.base = run.saves.base;
    info.data = run.data.files;
    info.rollouts = rollouts_json(run.rollouts.now, run.config.updates);
    return info;
}

// Save to the memory of two machines (--buddy). If the save fails the run goes on; a row of
// failures is noted once.
template <typename T, typename S>
void save_in_memory(Run& run, Trainer<T, S>& t) {
    if (run.saves.buddies->buddy_of.empty()) return; // one machine is left
    double before = run.clock.account.spent_on(Work::SAVE);
    Spend spend(run.clock.account, Work::SAVE);

    // Check the weights as before a save to disk, because a resume prefers this one.
    check_replicas(run, t);
    std::string wrong = first_error(run.world, first_bad_weight(t));
    CheckpointInfo info = checkpoint_info(run, t);
    info.config["out"] = run_of(run.config);
    if (wrong.empty())
        wrong = buddy_save(t, *run.saves.buddies, info);
    run.saves.in_memory += run.clock.account.spent_on(Work::SAVE) - before;
    bool failed_before = std::exchange(run.saves.memory_fails, !wrong.empty());
    if (!wrong.empty() && !failed_before)
        note(run, concat("step ", run.step, " is not saved in memory: ", wrong));
}

// Try to save a checkpoint of this step: "" or why there is none. It holds the data's cursor too,
// so that a resumed run reads on where this one stopped.
template <typename T, typename S>
std::string try_to_save(Run& run, Trainer<T, S>& t) {
    // Refuse ruined weights: each new checkpoint removes the oldest of --keep, so these would push
    // out good ones.
    check_replicas(run, t);
    AsyncSave* async = run.saves.async.get();
    bool later = async && !run.saves.tries_first;
    LLMC_TRY(ruined_weights(run, t, later));
    LLMC_TRY(first_error(run.world, keep_folder(run)));

    // Save. The next step waits until the save is done, or with --save-async until the state
    // has been copied.
    CheckpointInfo info = checkpoint_info(run, t);
    Save save = {info, run.config.out, newest_kept(run.config)};
    if (!async)
        return checkpoint_save(t, info, save.out, save.keep);
    async->untried = later && loss_proves(run);
    return async_begin(t, *async, save);
}

// With --save-every auto, set the interval from the mean cost of the saves so far. The first time
// it is printed.
inline void set_save_interval(Run& run) {
    double hours = save_rule(run.config).failure_hours;
    if (!hours || !is_first_rank(run))
        return;
    // Count the time of failed saves too; leave out saves to memory.
    double all = run.clock.account.spent_on(Work::SAVE) - run.saves.in_memory;
    double cost = all / double(run.saves.count);
    double failure = job_failure_seconds(hours, run.world.size);
    run.saves.interval = young_interval(failure, cost);
    if (run.saves.count == 1)
        note(run, interval_text(hours, run.world.size, cost));
}

// Record how the save of a step ended, and note when saves begin to fail and when they work again.
inline void note_save(Run& run, int64_t step, const std::string& wrong) {
    Saves& saves = run.saves;
    // After a failure no step counts as saved, so that the end of the run tries again.
    bool fails = !wrong.empty(), failed_before = saves.retry > 0;
    saves.retry = fails ? clock_seconds() + RETRY_SECONDS : 0;
    saves.step = fails ? -1 : step;
    saves.count += !fails;
    if (!fails) set_save_interval(run);
    if (fails == failed_before) return;
    note(run, fails ? concat("step ", step, " is not saved: ", wrong,
                             ": the run goes on, and tries again")
                    : concat("step ", step, " is saved"));
}

// Finish the asynchronous save, if one is in flight. All ranks call.
template <typename T, typename S>
void end_save(Run& run, Trainer<T, S>& t) {
    AsyncSave* async = run.saves.async.get();
    if (!is_on_its_way(async)) return;
    Spend spend(run.clock.account, Work::SAVE);

    // No step has tried these weights yet, so they are still here to be tried.
    std::string wrong;
    if (std::exchange(async->untried, false))
        wrong = ruined_weights(run, t);
    if (!wrong.empty())
        async_drop(run.world, *async);
    else
        wrong = async_end(run.world, *async);
    note_save(run, async->save.info.step, wrong);
}

// Save this step, unless it is saved. A failure is noted, and the save tried again later: a full
// disk may have room in a minute.
template <typename T, typename S>
void save(Run& run, Trainer<T, S>& t) {
    Saves& saves = run.saves;
    if (run.config.out.empty() || saves.step == run.step)
        return;
    end_save(run, t); // one at a time is on its way
    Spend spend(run.clock.account, Work::SAVE);
    std::string wrong = try_to_save(run, t);
    if (wrong.empty()) saves.last = clock_seconds();

    // An asynchronous save counts as saved for now; end_save() learns how it ended.
    if (is_on_its_way(saves.async.get()))
        saves.step = run.step;
    else
        note_save(run, run.step, wrong);
}

// Whether the last step's loss says that the save in flight has ruined weights: the step began with
// them. A good loss settles the matter; a step that was skipped says nothing.
inline bool doubts_save(Run& run) {
    AsyncSave* async = run.saves.async.get();
    bool asked = is_on_its_way(async) && async->untried;
    if (!asked || std::isnan(run.progress.step_loss))
        return false;
    async->untried = blown_up(run.progress.step_loss, run.shape.V, run.progress.first_loss);
    return async->untried;
}

// Let the asynchronous save go on, when all ranks' threads are done.
template <typename T, typename S>
void advance_save(Run& run, Trainer<T, S>& t) {
    AsyncSave* async = run.saves.async.get();
    if (!is_on_its_way(async) || async->untried) return;
    if (async->naming) return end_save(run, t);
    Spend spend(run.clock.account, Work::SAVE);
    async_name(run.world, *async);
}

// Take back the save in flight, because the next step's loss was bad. That may be the text's fault,
// so this step is saved in its place, after a trial on the text that it has learned from.
template <typename T, typename S>
void replace_save(Run& run, Trainer<T, S>& t) {
    AsyncSave& async = *run.saves.async;
    note(run, concat("step ", run.step, " began with a loss far above guessing: the save of step ",
                     async.save.info.step, " is dropped, and from here on a save tries its weights "
                     "on their own text first"));
    async_drop(run.world, async);
    run.saves.tries_first = true;
    run.saves.step = -1;
    save(run, t);
}

// Save at the end of the run. Since no later save will follow, keep trying until the disk has room:
// for the minutes of --save-every, with steps or auto for ten. A signal ends the wait.
template <typename T, typename S>
void save_at_the_end(Run& run, Trainer<T, S>& t) {
    end_save(run, t);
    run.saves.async = nullptr;
    if (run.config.out.empty() || run.saves.step == run.step)
        return;

    // Most saves succeed at once.
    Spend spend(run.clock.account, Work::SAVE);
    SaveRule rule = save_rule(run.config);
    bool other = rule.steps || rule.failure_hours;
    double patience = other ? 600 : rule.seconds, end = clock_seconds() + patience;
    std::string wrong = try_to_save(run, t);

    // Try again while the first rank's clock permits it. Waiting does not mend ruined weights.
    bool said = false;
    while (!wrong.empty() && !run.health.ruined) {
        Wishes all = agree(run.world, {stop_signal, is_first_rank(run) && clock_seconds() < end});
        if (all.stop || !all.save) break;
        if (!std::exchange(said, true))
            note(run, concat(wrong, ": waiting for room, up to ", patience / 60, " minutes"));
        std::this_thread::sleep_for(std::chrono::duration<double>(RETRY_AT_THE_END));
        wrong = try_to_save(run, t);
    }

    // Say what is lost.
    if (wrong.empty())
        run.saves.step = run.step;
    if (is_first_rank(run) && !wrong.empty())
        report_failure(run, concat("step ", run.step, " is not saved: ", wrong));
}

// With --keep N,best, after an evaluation: if its loss is the lowest so far, save a checkpoint that
// stays beside the N newest.
template <typename T, typename S>
void keep_best_checkpoint(Run& run, Trainer<T, S>& t) {
    bool better = run.best.kept_step < 0 || run.best.last_loss < run.best.kept_loss;
    if (!keeps_best(run.config) || !better) return;
    int64_t step_before = std::exchange(run.best.kept_step, run.step);
    double loss_before = std::exchange(run.best.kept_loss, run.best.last_loss);
    save(run, t);
    end_save(run, t);
    if (run.saves.step == run.step) return;

    // The save failed: the best checkpoint is still the one before.
    run.best.kept_step = step_before;
    run.best.kept_loss = loss_before;
}

} // namespace llmc
