// checkpoint.h - crash-safe checkpoints: each rank writes what it owns, any layout loads them
//   OUT/step_00000100/rank_00003.safetensors   the elements that rank 3 owns, as flat tensors
//                                              "param.NAME" (the masters, exact, or the weights),
//                                              "m.NAME" and "v.NAME" (AdamW's moments)
//   OUT/step_00000100/manifest.json            step, cursor, seed, model; and for each file
//     {"file", "bytes", "crc32", "tp", "tp_rank", "tensors": {"param.NAME": [first, count], ...}}
//     and "ep", "ep_rank" where ranks shared out experts
//   A tensor holds elements [first, first + count) of the parameter as a rank of this tp_rank has
//   it; for_each_run (buckets.h) says where they lie in the whole. Each element is in one file, its
//   owner's: see owns() (parameters.h). A rank that owns nothing makes no file. Padding of the
//   vocabulary is in none.
//   Save   1. the first rank makes step_N.tmp
//          2. every rank writes and syncs its file
//          3. the ranks tell each other size and CRC-32, or what went wrong
//          4. the first rank writes the manifest, with a sum of each weight (replicas.h) that does
//             not depend on the layout, then renames the folder
//          5. the first rank removes the oldest checkpoints, but never the best one
//   Why a kill loses nothing: a folder is called step_N only after every byte in it is synced, and
//   it loses that name before its first file is removed. Until 4 is over, nothing that was there
//   before has changed. A kill leaves at most a step_N.tmp, which no load reads and the next save
//   removes. One gap: a save of a step that is there already, on a file system that cannot exchange
//   two names (replace_folder() in files.h), leaves that step without a name for a moment.
//   Load   1. each of N ranks verifies every N-th file. Only sizes and checksums are believed, the
//             manifest's own too. A broken checkpoint is skipped for the one before it.
//          2. every rank looks at all it needs before any rank changes anything
//          3. who has verified a file reads it, and sends each tensor to the stages that need it
//             (one_reader.h). Each rank puts one parameter at a time together, and keeps its part
//          4. the weights' sums must be those of the manifest: cut, sent and rounded as saved
//   All ranks call, on one file system, and see the same result: "" or what is wrong, in a line.
#pragma once
#include <sys/stat.h>
#include <filesystem>
#include <fstream>
#include "files.h"
#include "manifest.h"
#include "one_reader.h"
#include "safetensors.h"
#include "../text.h"
#include "../replicas.h"

namespace llmc {

// The numbers that make a run go on where it stopped.
// The seed stands for the random state: every stream is a function of it and of a name.
struct CheckpointInfo {
    int64_t step = 0;    // of the run
    uint64_t cursor = 0; // samples taken
    uint64_t seed = 0;
    nlohmann::json config;
    int64_t tokens = 0;     // trained on so far, whatever the batches were
    int64_t best_step = -1; // of the lowest validation loss; -1: none is kept
    double best_loss = 0;
    std::vector<int64_t> broken = {}; // newer steps that a load has skipped
    size_t bytes_read = 0;            // of tensors, by this rank, in a load
    nlohmann::json base = {}; // what adapters stand beside (base_identity.h); null: no adapters
};

// The processor's name: another one may round a sum differently.
inline std::string cpu_name() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);)
        if (line.rfind("model name", 0) == 0)
            return line.substr(std::min(line.find(':') + 2, line.size()));
    return "unknown";
}

// A checkpoint fits a run when all of this is equal.
// Layout, precision and batch are not part of it: a run may change those and go on.
inline nlohmann::json model_identity(const Shape& s) {
    const char* positions[] = {"learned", "rope", "alibi"};
    const char* kinds[] = {"llama3", "linear", "yarn"};
    const char* routers[] = {"softmax", "renormalised", "sigmoid", "sigmoid-alone"};

    // clang-format off
    return {
        {"family",         s.hf_type},
        {"layers",         s.L},
        {"heads",          s.NH},
        {"kv_heads",       s.NKV},
        {"head_size",      s.HS},
        {"channels",       s.C},
        {"ffn",            s.F},
        {"experts",        s.E},
        {"experts_per_token", s.K},
        {"router",         routers[int(s.router)]},
        {"gate_scale",     s.gate_scale},
        {"dense_first",    s.dense_first},
        {"sparse_every",   s.sparse_every},
        {"dense_ffn",      s.dense_F},
        {"shared_ffn",     s.shared_F},
        {"shared_gate",    s.shared_gate},
        {"kv_latent",      s.kv_latent},
        {"q_latent",       s.q_latent},
        {"value_size",     s.HS_v},
        {"expert_groups",  s.expert_groups},
        {"kept_groups",    s.kept_groups},
        {"choice_bias",    s.choice_bias},
        {"vocab",          s.V},
        {"positions",      s.P},
        {"position",       positions[int(s.position)]},
        {"tied",           s.tied},
        {"qkv_bias",       s.qkv_bias},
        {"o_bias",         s.o_bias},
        {"mlp_bias",       s.mlp_bias},
        {"qk_norm",        s.qk_norm},
        {"whole_qk_norm",  s.whole_qk_norm},
        {"pre_norm",       s.pre_norm},
        {"post_norm",      s.post_norm},
        {"norm_plus",      s.norm_plus},
        {"gate",           s.gate == Gate::GELU ? "gelu" : "silu"},
        {"score_scalar",   s.score_scalar},
        {"score_softcap",  s.score_softcap},
        {"logit_softcap",  s.logit_softcap},
        {"scaled_embedding", s.scaled_embedding},
        {"norm_eps",       s.norm_eps},
        {"sliding_window", s.sliding_window},
        {"window_from",    s.window_from},
        {"full_every",     s.full_every},
        {"window_theta",   s.window_theta},
        {"rotary",         s.rotary},
        {"nope_every",     s.nope_every},
        {"parallel",       s.parallel},
        {"exact_gelu",     s.exact_gelu},
        {"rope_theta",     s.rope_theta},
        {"rope_kind",               kinds[int(s.rope_scaling.kind)]},
        {"rope_factor",             s.rope_scaling.factor},
        {"rope_low_freq_factor",    s.rope_scaling.low_freq_factor},
        {"rope_high_freq_factor",   s.rope_scaling.high_freq_factor},
        {"rope_original_positions", s.rope_scaling.original_positions},
        {"rope_beta_fast",          s.rope_scaling.beta_fast},
        {"rope_beta_slow",          s.rope_scaling.beta_slow},
        {"rope_truncate",           s.rope_scaling.truncate},
        {"rope_attention_factor",   s.rope_scaling.attention_factor},
    };
    // clang-format on
}

// Fields that older checkpoints lack: their models had the default.
inline bool is_newer_field(const std::string& key) {
    for (const char* newer : {"o_bias", "mlp_bias", "qk_norm", "window_from", "rope_kind",
                              "rope_beta_fast", "rope_beta_slow", "rope_truncate",
                              "rope_attention_factor", "whole_qk_norm", "pre_norm", "post_norm",
                              "norm_plus", "gate", "score_scalar", "score_softcap",
                              "logit_softcap", "scaled_embedding", "full_every", "window_theta",
                              "rotary", "nope_every", "parallel", "exact_gelu", "experts",
                              "experts_per_token", "router"})
        if (key == newer) return true;
    return false;
}

// "step_00000100": zeros in front make the alphabet's order the steps', up to 10^8 - 1 steps.
inline std::string step_folder(int64_t step) {
    char name[32];
    snprintf(name, sizeof(name), "step_%08lld", (long long)step);
    return name;
}

// "rank_00003.safetensors"
inline std::string rank_file(int rank) {
    char name[32];
    snprintf(name, sizeof(name), "rank_%05d.safetensors", rank);
    return name;
}

// The steps of the whole checkpoints in `out`, newest first. With the ending ".tmp": of those that
// a crash left unfinished.
inline std::vector<int64_t> checkpoint_steps(const std::string& out, const char* ending = "") {
    std::vector<int64_t> steps;
    if (DIR* d = opendir(out.c_str())) {
        while (dirent* e = readdir(d)) {
            long long step = -1;
            // Write the name back and compare: step_5 or step_00000100.old are somebody else's.
            bool read = sscanf(e->d_name, "step_%lld", &step) == 1 && step >= 0;
            if (read && step_folder(step) + ending == e->d_name)
                steps.push_back(step);
        }
        closedir(d);
    }
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// ----------------------------------------------------------------------------
// the state of a rank as tensors

// A tensor of a rank's file: a parameter, or one of its moments.
// Its data name the place on this rank, its parameter the shape and the cut.
struct StateTensor {
    std::string name;
    Data data;
    const Parameter* p;
};

// List the state of what is trained: the masters where there are any, else the weights; moments.
// Frozen weights are as they were read, so they are read again.
template <typename T, typename S>
std::vector<StateTensor> state_tensors(const Trainer<T, S>& t) {
    // An evaluation keeps no moments, and then loads none.
    // All ranks list the same: a stage of frozen blocks alone keeps none, and may read others'.
    bool stateful = t.plans[0].mode == Mode::TRAIN;
    std::vector<StateTensor> list;
    bool narrow = sizeof(T) < sizeof(acc_t<T>) && t.plans[0].masters != Masters::NONE;
    for (const Parameter& p : t.model.parameters) {
        if (!t.model.buckets[p.bucket].trainable) continue;
        // Masters are exact; weights beside them are what was rounded.
        Kind weights = narrow ? Kind::MASTER : Kind::WEIGHT;
        list.push_back({"param." + p.name, {weights, p.bucket}, &p});
        if (!stateful) continue;
        int number = 0;
        for (std::string state : optimizer_row(t.plans[0].optimizer).states)
            list.push_back({state + "." + p.name, {Kind::STATE, p.bucket, number++}, &p});
    }
    return list;
}

// The elements of a tensor that this rank writes: those it keeps and owns, without the vocabulary's
// padding. Padding ends the whole table, so it ends a rank's range too.
template <typename T, typename S>
KeptRange owned_range(const Trainer<T, S>& t, const StateTensor& s) {
    // Count the real words: a range may begin in words and end in padding.
    KeptRange range = kept_range(t, s.data, *s.p);
    size_t words = s.p->file_elements();
    size_t real = 0;
    for_each_kept(t.layout, *s.p, range, [&](size_t, size_t global, size_t count) {
        real += std::min(count, words - std::min(global, words));
    });
    range.count = owns(t, s.data, *s.p) ? real : 0;
    return range;
}

// ----------------------------------------------------------------------------
// what ranks tell each other

// Gather each rank's text, on every rank.
inline std::vector<std::string> gather_texts(const Comm& c, std::string text) {
    // Tell the lengths first.
    std::vector<int64_t> sizes(c.size);
    int64_t size = int64_t(text.size());
    all_gather(c, sizes.data(), &size, 1, Cpu{});

    // Make all as long as the longest: an all-gather takes equal counts.
    size_t most = *std::max_element(sizes.begin(), sizes.end());
    text.resize(most);
    std::string all(most * sizes.size(), 0);
    all_gather(c, reinterpret_cast<unsigned char*>(all.data()),
               reinterpret_cast<const unsigned char*>(text.data()), most, Cpu{});

    // Cut the padding off again.
    std::vector<std::string> texts;
    for (size_t r = 0; r < sizes.size(); r++)
        texts.push_back(all.substr(r * most, sizes[r]));
    return texts;
}

// The error of the first rank that has one: where one rank fails, all fail.
inline std::string first_error(const Comm& c, const std::string& wrong) {
    for (const std::string& text : gather_texts(c, wrong))
        if (!text.empty()) return text;
    return "";
}

// ----------------------------------------------------------------------------
// save

// Elements that a rank owns, tensor by tensor: its file is to hold them.
struct RankFile {
    // Empty: the rank makes no file.
    std::vector<std::pair<StateTensor, KeptRange>> owned;
    std::vector<TensorSpec> specs;
    nlohmann::json entry; // of the manifest; size and sum come with the file
};

// List what this rank owns.
template <typename T, typename S>
RankFile rank_file_of(const Trainer<T, S>& t) {
    RankFile file;
    nlohmann::json ranges;
    for (const StateTensor& s : state_tensors(t)) {
        KeptRange range = owned_range(t, s);
        if (range.count == 0) continue;
        file.owned.push_back({s, range});
        file.specs.push_back({s.name, type_of<acc_t<T>>(), {range.count}});
        ranges[s.name] = {range.first, range.count};
    }

    // Describe the cut. Say whose experts these are, where ranks share them out.
    file.entry = {{"file", rank_file(t.comms.world.rank)},
                  {"tp", t.layout.tp.size},
                  {"tp_rank", t.layout.tp.rank},
                  {"tensors", ranges}};
    Axis experts = expert_axis(t.layout);
    if (experts.size == 1) return file;
    file.entry.update({{"ep", experts.size}, {"ep_rank", experts.rank}});
    return file;
}

// Write a rank's file; none where the rank owns nothing. numbers(i) gives those of tensor i.
template <typename F>
std::string write_rank_file(RankFile& file, const std::string& folder, F numbers) {
    if (file.owned.empty()) return "";
    FileWriter w;
    writer_open(&w, folder + "/" + file.entry["file"].get<std::string>(), file.specs, {});
    for (size_t i = 0; i < file.owned.size() && w.wrong.empty(); i++) {
        auto values = numbers(i);
        writer_put(w, values.data(), values.size() * sizeof(values[0]));
    }

    // The sum is of the bytes handed to the file, not of what a disk gives back.
    std::string wrong = writer_close(&w);
    file.entry.update({{"bytes", w.bytes}, {"crc32", w.crc}});
    return wrong;
}

// Weights beside a remainder are rounded in a way of their own, so they have other sums.
template <typename T, typename S>
const char* rounding_of(const Trainer<T, S>& t) {
    return t.plans[0].masters == Masters::REMAINDER ? "remainder" : "nearest";
}

// The weights' sums as a manifest has them, by name. All ranks call.
template <typename T, typename S>
nlohmann::json weight_sums_json(const Trainer<T, S>& t) {
    std::vector<uint64_t> sums = weight_sums(t);
    nlohmann::json by_name = nlohmann::json::object();
    for (size_t i = 0; i < sums.size(); i++)
        if (has_sum(t, t.model.parameters[i]))
            by_name[t.model.parameters[i].name] = sums[i];
    return by_name;
}

// Delayed scaling's state on the host, beside the bytes that it lies in. All ranks have the same.
template <typename T, typename S>
Fp8History fp8_on_host(const Trainer<T, S>& t, std::vector<unsigned char>* bytes) {
    // Take all of it in one copy: the words lie one behind the other, amax first.
    const Fp8Rule& rule = t.model.shape.fp8_rule;
    Fp8History home = fp8_history(t);
    bytes->resize(fp8_history_bytes(home.slots, rule));
    if (home.slots) copy_out(bytes->data(), home.amax, bytes->size(), t.ctx.where);
    return fp8_history_at(bytes->data(), home.slots, rule);
}

// Whether a manifest has it for as many matrices as this run. One of another recipe has none, and
// a step or two finds new scales.
template <typename T, typename S>
bool has_fp8_history(const Trainer<T, S>& t, const nlohmann::json& m) {
    return m.contains("fp8") && m["fp8"]["scales"].size() == fp8_slots(t.model);
}

// Describe a checkpoint, but for its files. All ranks call.
template <typename T, typename S>
nlohmann::json manifest_of(const Trainer<T, S>& t, const CheckpointInfo& info) {
    // Save the optimizer's own count of updates too: Adam's bias correction goes on from it.
    bool trained = address<StepScale>(t, {Kind::SCALE});
    int64_t updates = trained ? read_value<StepScale>(t, {Kind::SCALE}).step : 0;
    // Threads and processor only make a note on resume: they may change the last bits of a sum.
    nlohmann::json manifest = {{"format", CHECKPOINT_FORMAT},
                               {"step", info.step},
                               {"cursor", info.cursor},
                               {"seed", info.seed},
                               {"tokens", info.tokens},
                               {"config", info.config},
                               {"model", model_identity(t.model.shape)},
                               {"optimizer", optimizer_row(t.plans[0].optimizer).name},
                               {"optimizer_step", updates},
                               {"precision", type_name(type_of<T>())},
                               {"threads", threads_here(t.ctx.where)},
                               {"cpu", cpu_name()},
                               {"rounding", rounding_of(t)},
                               {"weight_sums", weight_sums_json(t)}};

    if (trained && t.hyper.loss_scaling.on)
        manifest["loss_scale"] = loss_scale_json(read_value<StepScale>(t, {Kind::SCALE}).loss);
    std::vector<unsigned char> bytes;
    // Scales of delayed scaling go on too: all ranks have the same, those of all matrices.
    Fp8History h = fp8_on_host(t, &bytes);
    if (h.slots)
        manifest["fp8"] = fp8_history_json(h, t.model.shape.fp8_rule);
    if (t.plans[0].states != States::FLOAT)
        manifest["states"] = states_name(t.plans[0].states);
    if (!info.base.is_null())
        manifest["base"] = info.base;
    if (info.best_step >= 0) {
        manifest["best_step"] = info.best_step;
        manifest["best_loss"] = info.best_loss;
    }
    return manifest;
}

// Write what describes the files, with a checksum of its own; then sync the folder's names.
inline std::string write_manifest(nlohmann::json manifest, const nlohmann::json& files,
                                  const std::string& folder) {
    // The manifest's checksum covers the files' checksums, so it vouches for the folder.
    manifest["files"] = files;
    manifest["crc32"] = manifest_crc(manifest);
    std::string wrong = write_text_file(folder + "/manifest.json", manifest_text(manifest));
    return wrong.empty() ? sync_folder(folder) : wrong;
}

// Rename a folder before its files go: half a checkpoint never looks like a whole one.
inline void remove_checkpoint(const std::string& folder) {
    std::string going = folder + ".tmp";
    remove_folder(rename(folder.c_str(), going.c_str()) == 0 ? going : folder);
}

// Make step_N.tmp, after removing what crashes left.
inline std::string make_temporary(const std::string& out, const std::string& temporary) {
    for (int64_t stale : checkpoint_steps(out, ".tmp"))
        remove_folder(out + "/" + step_folder(stale) + ".tmp");
    if (mkdir(temporary.c_str(), 0777) == 0)
        return "";
    return temporary + ": cannot be made: " + strerror(errno);
}

// Put a checkpoint out of the way of the next resume, and of --keep: its bytes may still be wanted.
// Returns "" or what is wrong; *name is what the folder is called now: step_N.newer, .newer.2, ...
inline std::string set_aside(const std::string& out, int64_t step, const std::string& ending,
                             std::string* name) {
    std::string folder = out + "/" + step_folder(step);
    *name = folder + ending;
    for (int n = 2; ::access(name->c_str(), F_OK) == 0; n++)
        *name = concat(folder, ending, ".", n);
    if (rename(folder.c_str(), name->c_str()) == 0)
        return "";
    return folder + ": cannot be renamed: " + strerror(errno);
}

// A save on its way, from its folder to its name.
struct Save {
    CheckpointInfo info;
    std::string out;
    int keep; // of the checkpoints before it only so many stay, and the best one
    nlohmann::json manifest = {}; // all but its files
    RankFile file = {};           // this rank's

    std::string folder() const { return out + "/" + step_folder(info.step); }
    std::string temporary() const { return folder() + ".tmp"; }
};

// Begin a save by the header's step 1, and note all that the next step of training would change.
template <typename T, typename S>
std::string save_begin(const Trainer<T, S>& t, Save& save) {
    // Steps end in first_error(): no rank goes on alone, and none waits for one that failed.
    const Comm& world = t.comms.world;
    std::string wrong = world.rank == 0 ? make_temporary(save.out, save.temporary()) : "";
    wrong = first_error(world, wrong);
    if (!wrong.empty()) return wrong;
    save.manifest = manifest_of(t, save.info);
    save.file = rank_file_of(t);
    return "";
}

// The entries of all ranks' files. All ranks call.
inline nlohmann::json files_of_all(const Comm& world, const RankFile& mine) {
    nlohmann::json files;
    // Who owns nothing has no file.
    std::string own = mine.owned.empty() ? "" : mine.entry.dump();
    for (const std::string& text : gather_texts(world, own))
        if (!text.empty())
            files.push_back(nlohmann::json::parse(text));
    return files;
}

// End a save by steps 3 to 5. Step 2 has ended with `wrong` on this rank.
inline std::string save_end(const Comm& world, const Save& save, std::string wrong) {
    // 3. The ranks tell each other what they wrote.
    bool first = world.rank == 0;
    wrong = first_error(world, wrong);
    nlohmann::json files = files_of_all(world, save.file);

    // 4. The manifest, then the name. A folder that has it already is replaced: the same step, of
    // the run that this one repeats.
    if (first && wrong.empty())
        wrong = write_manifest(save.manifest, files, save.temporary());
    if (first && wrong.empty())
        wrong = replace_folder(save.temporary(), save.folder());
    wrong = first_error(world, wrong);
    if (first && !wrong.empty())
        remove_folder(save.temporary());
    if (!wrong.empty())
        return wrong + "; the checkpoints before it are as they were";

    // 5. Remove the oldest. Steps above this one stay: they belong to a run that got further.
    std::vector<int64_t> steps = first ? checkpoint_steps(save.out) : std::vector<int64_t>();
    for (size_t i = save.keep; i < steps.size(); i++)
        if (steps[i] < save.info.step && steps[i] != save.info.best_step)
            remove_checkpoint(save.out + "/" + step_folder(steps[i]));
    return "";
}

// Save a checkpoint in `out`, while training waits.
template <typename T, typename S>
std::string checkpoint_save(const Trainer<T, S>& t, const CheckpointInfo& info,
                            const std::string& out, int keep) {
    Save save = {info, out, keep};
    std::string wrong = save_begin(t, save);
    if (!wrong.empty()) return wrong;

    // Nothing else runs meanwhile, so the state is read where it lies.
    // 2. Write a tensor at a time: a rank never holds a second copy of its state.
    wrong = write_rank_file(save.file, save.temporary(), [&](size_t i) {
        auto& [s, range] = save.file.owned[i];
        return read_numbers(t, s.data, *s.p, range);
    });
    return save_end(t.comms.world, save, wrong);
}

// ----------------------------------------------------------------------------
// load

// Compare a file's size and checksum with the manifest's.
inline std::string verify_file(const std::string& folder, const nlohmann::json& entry) {
    std::string path = folder + "/" + entry["file"].get<std::string>();
    // Reading every byte costs as much as loading; a bit that has turned shows itself only so.
    size_t bytes = 0;
    uint32_t crc = 0;
    std::string wrong = file_crc(path, &bytes, &crc);
    if (!wrong.empty()) return wrong;
    if (entry["bytes"] != bytes)
        return concat(path, ": is ", bytes, " bytes, the manifest says ", entry["bytes"].dump());
    if (entry["crc32"] != crc)
        return concat(path, ": its checksum is ", crc, ", the manifest says ",
                      entry["crc32"].dump());
    return "";
}

// The ranks that verify the files of a checkpoint, and read them.
inline std::vector<int> choose_readers(const nlohmann::json& manifest, int ranks) {
    std::vector<int> readers;
    // A manifest of another format may list none.
    size_t files = manifest.value("files", nlohmann::json()).size();
    for (size_t i = 0; i < files; i++)
        readers.push_back(int(i % size_t(ranks)));
    return readers;
}

// Verify a checkpoint, each rank every N-th file: "" and its manifest, or why it is not whole.
inline std::string verify_checkpoint(const Comm& world, const std::string& folder,
                                     nlohmann::json* manifest) {
    std::string wrong = read_manifest(folder, manifest);
    // Files of a format that this program does not know are not looked at.
    bool ours = wrong.empty() && manifest->value("format", nlohmann::json()) == CHECKPOINT_FORMAT;
    size_t count = ours ? (*manifest)["files"].size() : 0;
    for (size_t i = world.rank; wrong.empty() && i < count; i += world.size)
        wrong = verify_file(folder, (*manifest)["files"][i]);
    return first_error(world, wrong);
}

// Whether a checkpoint's adapters were trained beside this base. Older manifests do not say.
inline std::string check_base(const nlohmann::json& own, const nlohmann::json& manifest,
                              const std::string& folder) {
    if (own.is_null() || !manifest.contains("base")) return "";
    const nlohmann::json& saved = manifest["base"];
    if (saved["bytes"] == own["bytes"] && saved["crc32"] == own["crc32"]) return "";

    // Say both: a user finds the right folder by its size, if not by its name.
    auto text = [](const nlohmann::json& b) {
        return concat(json_word(b["name"]), " of ", b["bytes"].dump(), " bytes, CRC-32 ",
                      b["crc32"].dump());
    };
    return concat(folder, ": its adapters were trained beside ", text(saved), "; this run has ",
                  text(own), ": give the first one");
}

// Whether a whole checkpoint fits this run.
template <typename T, typename S>
std::string check_identity(const Trainer<T, S>& t, const nlohmann::json& manifest,
                           const std::string& folder, bool moments) {
    // Compare from the general to the particular: the first difference explains those behind it.
    nlohmann::json format = manifest.value("format", nlohmann::json());
    if (format != CHECKPOINT_FORMAT)
        return concat(folder, ": is of format ", json_word(format), ", this program reads ",
                      CHECKPOINT_FORMAT);

    nlohmann::json own = model_identity(t.model.shape);
    // Name the first field that differs, with both values.
    const nlohmann::json defaults = model_identity(Shape());
    for (auto& [key, value] : own.items()) {
        nlohmann::json absent = is_newer_field(key) ? defaults[key] : nlohmann::json();
        nlohmann::json saved = manifest["model"].value(key, absent);
        if (saved != value)
            return concat(folder, ": is of another model: its ", key, " is ", json_word(saved),
                          ", this run's ", value.dump());
    }
    // An optimizer without moments goes on from any other's weights.
    std::string saved = printable(manifest["optimizer"].get<std::string>());
    const char* name = optimizer_row(t.plans[0].optimizer).name;
    if (moments && saved != name)
        return concat(folder, ": was trained with ", saved, " and has no moments of ", name,
                      "'s: go on with --optimizer ", saved);
    return "";
}

// The files of a checkpoint. Each is opened by one rank, its reader.
struct SavedFiles {
    const Model& model;
    std::string folder;
    nlohmann::json entries;        // of the manifest
    std::vector<int> readers;      // [entry]: a rank of the world
    std::vector<SafeTensors> open; // [entry]
    // The model as a rank of so many tp and ep ranks has it: its cuts, its padded vocabulary.
    std::map<std::array<int, 3>, Model> cut = {}; // by tp, ep, ep_rank

    std::string path(size_t i) const {
        return folder + "/" + entries[i]["file"].get<std::string>();
    }
};

// Elements that lie side by side, in a file's tensor and in the whole parameter.
struct Piece {
    size_t file, at; // the first element in the tensor
    size_t global, count;
};

// Open file i, and hold its state tensors against the manifest: it and the file's own header must
// say the same.
inline std::string open_saved_file(SavedFiles& files, size_t i,
                                   const std::vector<StateTensor>& tensors, Type type) {
    // Names that the manifest does not list are nobody's.
    std::string path = files.path(i);
    const nlohmann::json& listed = files.entries[i]["tensors"];
    std::string wrong = safetensors_open(&files.open[i], path);
    for (const StateTensor& s : tensors) {
        if (!wrong.empty() || !listed.contains(s.name)) continue;

        // Hold it against the list.
        const SafeTensor* x = safetensors_find(files.open[i], s.name);
        size_t count = listed[s.name][1].get<size_t>();
        if (!x) {
            wrong = path + ": tensor " + s.name + " is missing";
            continue;
        }
        bool same_type = x->dtype == type_name(type);
        bool same_size = x->elements() == count;
        if (!same_type || !same_size)
            wrong = concat(path, ": tensor ", s.name, " is ", x->dtype, shape_text(x->shape),
                           ", not ", type_name(type), shape_text({count}));
    }
    return wrong;
}

// Add the pieces of a state tensor that file i has, by its manifest.
inline std::string file_pieces(SavedFiles& files, size_t i, const StateTensor& s,
                               std::vector<Piece>* pieces) {
    const nlohmann::json& entry = files.entries[i];
    if (!entry["tensors"].contains(s.name))
        return "";

    // The parameter as the ranks that wrote the file cut it.
    int tp = entry["tp"].get<int>();
    int tp_rank = entry["tp_rank"].get<int>();
    int ep = entry.value("ep", 1);
    int ep_rank = entry.value("ep_rank", 0);
    Layout writers;
    writers.tp.size = tp;
    writers.dp = {ep, ep_rank};
    writers.ep = ep;
    Model& cut = files.cut[{tp, ep, ep_rank}];
    if (cut.parameters.empty())
        cut = make_model(files.model.shape, writers);
    const Parameter& saved = cut.parameters[s.p - &files.model.parameters[0]];

    // Cut the file's range [first, first + count) into runs of the whole.
    size_t first = entry["tensors"][s.name][0].get<size_t>();
    size_t count = entry["tensors"][s.name][1].get<size_t>();
    size_t found = 0;
    for_each_run(saved, tp_rank, tp, [&](size_t local, size_t global, size_t n) {
        size_t from = std::max(local, first);
        size_t end = std::min(local + n, first + count);
        if (from >= end) return;
        pieces->push_back({i, from - first, global + from - local, end - from});
        found += end - from;
    });
    if (found == count) return "";
    return files.path(i) + ": tensor " + s.name + " reaches beyond its parameter";
}

// Find a tensor's pieces in all files, in order. Each element must be there once.
inline std::string find_pieces(SavedFiles& files, const StateTensor& s,
                               std::vector<Piece>* pieces) {
    pieces->clear();
    std::string wrong;
    for (size_t i = 0; wrong.empty() && i < files.open.size(); i++)
        wrong = file_pieces(files, i, s, pieces);
    if (!wrong.empty()) return wrong;
    std::sort(pieces->begin(), pieces->end(),
              [](const Piece& a, const Piece& b) { return a.global < b.global; });

    // Walk over the whole: no gap, no overlap, nothing behind its end.
    size_t reached = 0;
    size_t all = s.p->file_elements();
    auto elements = [&](size_t from, size_t end, const char* are) {
        return concat(files.folder, ": tensor ", s.name, ": elements ", from, " to ", end, " of ",
                      all, are);
    };
    for (const Piece& piece : *pieces) {
        size_t end = piece.global + piece.count;
        if (piece.global > reached)
            return elements(reached, piece.global, " are in no file");
        if (piece.global < reached)
            return elements(piece.global, std::min(end, reached), " are there twice");
        reached = end;
    }
    if (reached > all)
        return elements(all, reached, " are vocabulary padding");
    return reached < all ? elements(reached, all, " are in no file") : "";
}

// Put a whole tensor together from what the files' readers send; empty on a rank that does not need
// it. All ranks call: one may read what it does not need.
template <typename T, typename S>
std::vector<acc_t<T>> collect_tensor(const Trainer<T, S>& t, SavedFiles& files, OneReader& reader,
                                     const StateTensor& s) {
    typedef acc_t<T> A;
    auto needs = [&](int stage) {
        Layout there = t.layout;
        there.pp.rank = stage;
        return bucket_is_mine(there, t.model, s.p->bucket);
    };
    // The pieces say where in the whole each element of a file belongs.
    bool mine = needs(t.layout.pp.rank);
    std::vector<Piece> pieces;
    find_pieces(files, s, &pieces);
    std::vector<A> values(mine ? s.p->elements() : 0, A(0)); // padding stays 0
    std::vector<A> part;
    for (size_t i = 0; i < files.open.size(); i++) {
        const nlohmann::json& listed = files.entries[i]["tensors"];
        bool reads = files.readers[i] == t.comms.world.rank;
        bool calls = mine || reads;
        if (!calls || !listed.contains(s.name))
            continue;

        // Bring what file i has, and put it where it belongs.
        part.resize(listed[s.name][1].get<size_t>());
        size_t bytes = part.size() * sizeof(A);
        unsigned char* to = reinterpret_cast<unsigned char*>(part.data());
        if (reads) {
            // The map may hold it at any address.
            const SafeTensor* x = safetensors_find(files.open[i], s.name);
            memcpy(to, x->data, bytes);
        }
        bring(reader, to, bytes, files.readers[i], needs);
        for (const Piece& piece : pieces) {
            bool of_file = piece.file == i;
            if (!mine || !of_file) continue;
            const A* from = part.data() + piece.at;
            std::copy_n(from, piece.count, values.data() + piece.global);
        }
    }
    return values;
}

// Keep this rank's part of a tensor. Each rank builds the whole parameter in turn, so the peak on
// the host is one parameter, and what a file has of it.
template <typename T, typename S>
void take_tensor(Trainer<T, S>& t, const StateTensor& s, const std::vector<acc_t<T>>& values) {
    typedef acc_t<T> A;
    if (s.data.kind != Kind::STATE)
        return set_weight(t, *s.p, values.data());

    // Keep this rank's range of a moment; set_weight() has done the same for a weight.
    KeptRange range = kept_range(t, s.data, *s.p);
    std::vector<A> kept(range.count);
    for_each_kept(t.layout, *s.p, range, [&](size_t at, size_t global, size_t count) {
        std::copy_n(values.data() + global, count, kept.data() + at);
    });
    write_state(t, s.data, *s.p, range, kept.data());
}

// Read all state from a verified checkpoint, each file by its reader. All ranks look at all they
// need first: a checkpoint that does not fit changes nothing. *bytes: what this rank has read.
template <typename T, typename S>
std::string read_files(Trainer<T, S>& t, const std::string& folder, const nlohmann::json& entries,
                       const std::vector<int>& readers, size_t* bytes) {
    std::vector<SafeTensors> closed(entries.size());
    SavedFiles files = {t.model, folder, entries, readers, closed};
    const Comm& world = t.comms.world;
    std::vector<StateTensor> tensors = state_tensors(t);

    // Look. A number of ranks that does not cut this model would leave ranks without a head.
    std::vector<Piece> pieces;
    std::string wrong;
    for (const nlohmann::json& entry : entries)
        if (wrong.empty() && !tp_divides(t.model.shape, entry["tp"].get<size_t>()))
            wrong = concat(folder, ": manifest.json says that ", entry["tp"].dump(),
                           " tensor-parallel ranks wrote it, which cannot share this model's "
                           "heads");
    // A number of ranks that does not cut the experts would leave some of them nowhere.
    for (const nlohmann::json& entry : entries)
        if (wrong.empty() && t.model.shape.E && t.model.shape.E % entry.value("ep", size_t(1)))
            wrong = concat(folder, ": manifest.json says that ", entry["ep"].dump(),
                           " expert-parallel ranks wrote it, which cannot share this model's "
                           "experts");
    Type type = type_of<acc_t<T>>();
    for (size_t i = 0; wrong.empty() && i < entries.size(); i++) {
        bool reads = readers[i] == world.rank;
        if (reads) wrong = open_saved_file(files, i, tensors, type);
    }
    for (size_t i = 0; wrong.empty() && i < tensors.size(); i++)
        wrong = find_pieces(files, tensors[i], &pieces);
    wrong = first_error(world, wrong);
    if (!wrong.empty())
        wrong += "; to go on from the checkpoint before, remove " + folder;

    // Take.
    // One after the other, in the same order on all ranks.
    OneReader reader = make_one_reader(world, t.layout);
    for (size_t i = 0; wrong.empty() && i < tensors.size(); i++) {
        std::vector<acc_t<T>> values = collect_tensor(t, files, reader, tensors[i]);
        if (!values.empty()) take_tensor(t, tensors[i], values);
    }
    for (SafeTensors& file : files.open)
        safetensors_close(&file);
    *bytes = reader.bytes;
    return wrong;
}

// Hold the weights against the sums that were saved with them, where this run has them in the same
// type. Older manifests have none.
template <typename T, typename S>
std::string check_sums(const Trainer<T, S>& t, const std::string& folder,
                       const nlohmann::json& manifest) {
    // All ranks have read the same manifest, so all of them call, or none does.
    bool alike = manifest["precision"] == type_name(type_of<T>()) &&
                 manifest.value("rounding", "") == rounding_of(t);
    if (!manifest.contains("weight_sums") || !alike)
        return "";
    nlohmann::json saved = manifest["weight_sums"], own = weight_sums_json(t);
    for (auto& [name, sum] : own.items())
        if (saved.contains(name) && saved[name] != sum)
            return concat(folder, ": tensor ", name, " is not what was saved: its sum is ",
                          sum.dump(), ", the manifest says ", saved[name].dump(),
                          ": suspect this machine's memory, and try again");
    return "";
}

// The steps of the checkpoints as the first rank sees them, newest first.
inline std::vector<int64_t> first_ranks_steps(const Comm& world, const std::string& out) {
    std::vector<int64_t> steps = world.rank == 0 ? checkpoint_steps(out) : std::vector<int64_t>();
    // A folder on a network may look different to each rank: all must try the same steps.
    int64_t count = int64_t(steps.size());
    broadcast(world, &count, 1, 0, Cpu{});
    steps.resize(count);
    broadcast(world, steps.data(), steps.size(), 0, Cpu{});
    return steps;
}

// Take the counters of the run that goes on: the caller's, and the optimizer's step on the device.
template <typename T, typename S>
void take_counters(Trainer<T, S>& t, CheckpointInfo* info, const nlohmann::json& m) {
    info->step = m["step"].get<int64_t>();
    info->cursor = m["cursor"].get<uint64_t>();
    info->seed = m["seed"].get<uint64_t>();
    info->config = m.value("config", nlohmann::json());
    if (!info->config.is_object())
        info->config = nlohmann::json::object();
    if (m.contains("best_step")) {
        info->best_step = m["best_step"].get<int64_t>();
        info->best_loss = m["best_loss"].get<double>();
    }

    // Manifests of older programs do not count tokens; all their batches were alike.
    nlohmann::json batch = info->config.value("batch-tokens", nlohmann::json(0));
    int64_t alike = batch.is_number_integer() ? info->step * batch.get<int64_t>() : 0;
    info->tokens = m.contains("tokens") ? m["tokens"].get<int64_t>() : alike;

    // An evaluation's products want the scales too.
    std::vector<unsigned char> bytes;
    Fp8History h = fp8_on_host(t, &bytes);
    if (h.slots && has_fp8_history(t, m)) {
        take_fp8_history(h, t.model.shape.fp8_rule, m["fp8"]);
        copy_in(fp8_history(t).amax, bytes.data(), bytes.size(), t.ctx.where);
        wait_for(t.ctx.where);
    }

    StepScale* home = address<StepScale>(t, {Kind::SCALE});
    if (!home) return; // a run that only evaluates has none
    // Adam's bias correction needs the step; the rest of the struct stays as the run began it.
    StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
    scale.step = m["optimizer_step"].get<int64_t>();
    const LossScaling& rule = t.hyper.loss_scaling;
    if (rule.on && m.contains("loss_scale")) {
        scale.loss = loss_scale_of(m["loss_scale"]);
        if (!rule.dynamic) scale.loss.now = rule.start; // the command line's
    }
    copy_in(home, &scale, sizeof(scale), t.ctx.where);
    wait_for(t.ctx.where);
}

// Note what may make this run differ from an uninterrupted one.
template <typename T, typename S>
void note_differences(const Trainer<T, S>& t, const nlohmann::json& m,
                      std::vector<std::string>* notes) {
    // Notes are no errors: the loss curve is the same within rounding.
    int threads = threads_here(t.ctx.where);
    std::string cpu = printable(m["cpu"].get<std::string>());
    if (m["threads"] != threads || cpu != cpu_name())
        notes->push_back(concat("the checkpoint was made by ", m["threads"].dump(), " threads on ",
                                cpu, "; this run has ", threads, " on ", cpu_name(),
                                ": bits may differ from an uninterrupted run"));
    std::string precision = m["precision"].get<std::string>();
    if (precision != type_name(type_of<T>()))
        notes->push_back("the checkpoint was trained in " + printable(precision));

    // Older manifests do not say how moments were stored: they were float.
    nlohmann::json states = m.value("states", nlohmann::json("float"));
    const char* own = states_name(t.plans[0].states);
    if (keeps_any(t, Kind::STATE) && states != own)
        notes->push_back(concat("the checkpoint's moments were ", json_word(states),
                                ", this run's are ", own));
    bool cut = m["files"][0]["tp"] != t.layout.tp.size;
    if (states == "8bit" && states == own && cut && keeps_any(t, Kind::STATE))
        notes->push_back("tensor-parallel ranks cut matrices in other blocks than those that "
                         "saved: 8-bit moments are rounded anew");
    if (t.hyper.loss_scaling.on && !m.contains("loss_scale"))
        notes->push_back(concat("the checkpoint has no loss scale: it begins at ",
                                t.hyper.loss_scaling.start));
    if (fp8_slots(t.model) && !has_fp8_history(t, m))
        notes->push_back("the checkpoint has no scales of --fp8 delayed: they begin at 1");
}

// Load a whole checkpoint, or say why it does not fit.
template <typename T, typename S>
std::string load_verified(Trainer<T, S>& t, CheckpointInfo* info, const std::string& folder,
                          const nlohmann::json& manifest, const std::vector<int>& readers,
                          std::vector<std::string>* notes) {
    // A run that only evaluates wants no moments.
    bool moments = keeps_any(t, Kind::STATE);
    std::string wrong = check_identity(t, manifest, folder, moments);
    if (wrong.empty())
        wrong = check_base(info->base, manifest, folder);
    wrong = first_error(t.comms.world, wrong);
    if (wrong.empty())
        wrong = read_files(t, folder, manifest["files"], readers, &info->bytes_read);
    if (wrong.empty())
        wrong = check_sums(t, folder, manifest);
    if (!wrong.empty()) return wrong;
    take_counters(t, info, manifest);
    note_differences(t, manifest, notes);
    return "";
}

// Load the newest whole checkpoint in `out`, or the one of step `only`. Broken ones are skipped and
// named in `notes`. A whole one that does not fit is an error: going back behind it silently would
// lose a run.
template <typename T, typename S>
std::string checkpoint_load(Trainer<T, S>& t, CheckpointInfo* info, const std::string& out,
                            std::vector<std::string>* notes, int64_t only = -1) {
    // Try the newest first; go back only behind what is broken.
    const Comm& world = t.comms.world;
    for (int64_t step : first_ranks_steps(world, out)) {
        if (only >= 0 && step != only) continue;
        std::string folder = out + "/" + step_folder(step);
        nlohmann::json manifest;
        std::string wrong = verify_checkpoint(world, folder, &manifest);
        if (!wrong.empty()) {
            notes->push_back(wrong + ": skipped");
            info->broken.push_back(step);
            continue;
        }

        std::vector<int> readers = choose_readers(manifest, world.size);
        return load_verified(t, info, folder, manifest, readers, notes);
    }
    return out + ": holds no whole checkpoint" + (only >= 0 ? concat(" of step ", only) : "") +
           (notes->empty() ? "" : " (the broken ones are named above)") +
           ": start without --resume, or give the --out of the run to go on with";
}

} // namespace llmc
