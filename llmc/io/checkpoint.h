// checkpoint.h - crash-safe checkpoints: each rank writes what it owns; checkpoint_load.h loads it
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
//   All ranks call, on one file system, and see the same result: "" or what is wrong, in a line.
#pragma once
#include <sys/stat.h>
#include <filesystem>
#include <fstream>
#include "files.h"
#include "manifest.h"
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

// Hand a rank's text to all. Unlike gather_texts(), no rank takes more than the one.
inline std::string broadcast_text(const Comm& c, std::string text, int sender) {
    int64_t size = int64_t(text.size());
    broadcast(c, &size, 1, sender, Cpu{});
    // The others make room.
    text.resize(size_t(size));
    broadcast(c, reinterpret_cast<unsigned char*>(text.data()), text.size(), sender, Cpu{});
    return text;
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

} // namespace llmc
