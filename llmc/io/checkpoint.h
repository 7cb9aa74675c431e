// checkpoint.h - crash-safe checkpoints: each rank writes what it owns; checkpoint_load.h loads it
//   OUT/step_00000100/rank_00003.safetensors   the elements that rank 3 owns, as flat tensors
//                                              "param.NAME" (the masters, exact, or the weights),
//                                              "m.NAME" and "v.NAME" (the optimizer's moments),
//                                              "ema.NAME" (the mean of weights, --ema)
//   OUT/step_00000100/manifest.json            step, cursor, seed, model; and for each file
//     {"file", "bytes", "crc32", "tp", "tp_rank", "tensors": {"param.NAME": [first, count], ...}}
//     and "ep", "ep_rank" if ranks shared out experts; "etp" 1 if tensor-parallel ranks cut none
//   A tensor holds elements [first, first + count) of the parameter as a rank of this tp_rank keeps
//   it; for_each_run (model.h) says where they lie in the whole parameter. Each element is in one
//   file, that of its owner: see owns() (parameters.h). A rank that owns nothing makes no file. No
//   file holds the vocabulary's padding.
//   Save   1. the first rank makes step_N.tmp
//          2. every rank writes and syncs its file
//          3. all ranks exchange the size and CRC-32 of their files, or what went wrong
//          4. the first rank writes the manifest, with a sum of each weight (replicas.h) that does
//             not depend on the layout, then renames the folder
//          5. the first rank removes the oldest checkpoints, but never the best one
//   Why a kill loses nothing: a folder is called step_N only after every byte in it is synced,
//   and it loses that name before its first file is removed. Until step 4 is done, nothing that
//   was there before has changed. A kill leaves at most a step_N.tmp: no load reads it, and the
//   next save removes it. One gap: if step_N exists already, and the file system cannot
//   exchange two names, a save of step N leaves that step without a name for a moment
//   (replace_folder() in files.h).
#pragma once
#include <sys/stat.h>
#include <fstream>
#include "../action.h"
#include "../optimizer.h"
#include "../comm/group.h"
#include "../fp8.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/element_type.h"
#include "../ops/fp8_delayed.cuh"
#include "../ops/matmul.cuh"
#include "../ops/memory.h"
#include "../ops/small_states.cuh"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "files.h"
#include "manifest.h"
#include "one_reader.h"
#include "replicas.h"
#include "safetensors.h"

namespace llmc {

// The counters with which a run continues where it stopped.
// The seed stands for the random state: every random stream is a function of the seed and a name.
struct CheckpointInfo {
    int64_t step = 0;    // steps that the run has done
    uint64_t cursor = 0; // samples taken from the data so far
    uint64_t seed = 0;
    Json config;
    int64_t tokens = 0;     // trained on so far, over all batch sizes
    int64_t best_step = -1; // step with the lowest validation loss; -1: none is kept
    double best_loss = 0;
    std::vector<int64_t> broken = {}; // newer steps that a load skipped
    size_t bytes_read = 0;            // tensor bytes that this rank read in a load
    Json base = {};     // the base that adapters stand beside (base_identity.h); null: none
    Json data = {};     // the files of --data and --val (identify_files); null: unknown
    Json rollouts = {}; // answers with updates left (rollout_state.h); null: none
};

// The processor's name. Another processor may round a sum differently, so a resume compares them.
inline const std::string& cpu_name() {
    // Ask once: with many cores Linux takes milliseconds to write this file.
    static const std::string name = [] {
        std::ifstream in("/proc/cpuinfo");
        for (std::string line; std::getline(in, line);)
            if (line.starts_with("model name"))
                return line.substr(std::min(line.find(':') + 2, line.size()));
        return std::string("unknown");
    }();
    return name;
}

// Everything that must be equal for a checkpoint to fit a run.
// Layout, precision and batch are not part of it: a run may change those and continue.
inline Json model_identity(const Shape& s) {
    const ExpertShape& e = s.experts;
    const RopeShape& rope = s.rope;
    const AttentionShape& attention = s.attention;
    const BlockShape& block = s.block;
    const char* positions[] = {"learned", "rope", "alibi"};
    const char* kinds[] = {"llama3", "linear", "yarn", "half"};
    const char* gates[] = {"silu", "gelu", "relu2"};
    const char* routers[] = {"softmax", "renormalised", "sigmoid", "sigmoid-alone"};
    Json full = Json::array(); // layers
    for (size_t layer = 1; attention.window && layer <= s.L; layer++)
        if (attention.full_layers[layer]) full.push_back(layer);

    // clang-format off
    return {
        {"family",         s.hf_type},
        {"layers",         s.L},
        {"heads",          s.NH},
        {"kv_heads",       s.NKV},
        {"head_size",      s.HS},
        {"channels",       s.C},
        {"ffn",            s.F},
        {"experts",        e.E},
        {"experts_per_token", e.K},
        {"router",         routers[int(e.router)]},
        {"gate_scale",     e.gate_scale},
        {"dense_first",    e.dense_first},
        {"sparse_every",   e.sparse_every},
        {"dense_ffn",      e.dense_F},
        {"shared_ffn",     e.shared_F},
        {"shared_gate",    e.shared_gate},
        {"kv_latent",      s.latent.kv},
        {"q_latent",       s.latent.q},
        {"value_size",     s.latent.HS_v},
        {"expert_groups",  e.groups},
        {"kept_groups",    e.kept_groups},
        {"choice_bias",    e.choice_bias},
        {"vocab",          s.V},
        {"positions",      s.P},
        {"position",       positions[int(s.embedding.position)]},
        {"tied",           s.embedding.tied},
        {"qkv_bias",       attention.qkv_bias},
        {"o_bias",         attention.o_bias},
        {"mlp_bias",       block.mlp_bias},
        {"qk_norm",        block.qk_norm},
        {"whole_qk_norm",  block.whole_qk_norm},
        {"pre_norm",       block.pre_norm},
        {"post_norm",      block.post_norm},
        {"norm_plus",      block.norm_plus},
        {"gate",           gates[int(block.gate)]},
        {"qk_gains",       block.qk_gains},
        {"gains",          block.gains},
        {"sinks",          attention.sinks},
        {"residual_scalars", block.scalars},
        {"value_embeddings", attention.values},
        {"expert_bias",    e.bias},
        {"gate_alpha",     e.gate_alpha},
        {"gate_limit",     e.gate_limit},
        {"score_scalar",   attention.score_scalar},
        {"score_softcap",  attention.softcap},
        {"logit_softcap",  s.loss.softcap},
        {"root_softcap",   s.loss.root_softcap},
        {"scaled_embedding", s.embedding.scaled},
        {"normed_embedding", s.embedding.normed},
        {"head_bias",      s.embedding.head_bias},
        {"norm_eps",       block.norm_eps},
        {"sliding_window", attention.window},
        {"full_layers",    full},
        {"window_theta",   rope.window_theta},
        {"rotary",         rope.rotary},
        {"nope_every",     rope.nope_every},
        {"parallel",       block.parallel},
        {"exact_gelu",     block.exact_gelu},
        {"rope_theta",     rope.theta},
        {"rope_kind",               kinds[int(rope.scaling.kind)]},
        {"rope_factor",             rope.scaling.factor},
        {"rope_low_freq_factor",    rope.scaling.low_freq_factor},
        {"rope_high_freq_factor",   rope.scaling.high_freq_factor},
        {"rope_original_positions", rope.scaling.original_positions},
        {"rope_beta_fast",          rope.scaling.beta_fast},
        {"rope_beta_slow",          rope.scaling.beta_slow},
        {"rope_truncate",           rope.scaling.truncate},
        {"rope_attention_factor",   rope.scaling.attention_factor},
        {"rope_transposed",         rope.scaling.transposed},
    };
    // clang-format on
}

// Fields that older checkpoints lack. Their models had the default value.
inline bool is_newer_field(const std::string& key) {
    for (const char* newer : {"o_bias", "mlp_bias", "qk_norm", "rope_kind", "rope_beta_fast",
                              "rope_beta_slow", "rope_truncate", "rope_attention_factor",
                              "whole_qk_norm", "pre_norm", "post_norm", "norm_plus", "gate",
                              "score_scalar", "score_softcap", "logit_softcap", "scaled_embedding",
                              "window_theta", "rotary", "nope_every", "parallel", "exact_gelu",
                              "experts", "experts_per_token", "router", "sinks", "expert_bias",
                              "gate_alpha", "gate_limit", "full_layers", "qk_gains", "gains",
                              "root_softcap", "normed_embedding", "head_bias", "rope_transposed",
                              "residual_scalars", "value_embeddings"})
        if (key == newer) return true;
    return false;
}

// "step_00000100". Leading zeros make alphabetical order the order of steps, up to 10^8 - 1 steps.
inline std::string step_folder(int64_t step) {
    return formatted("step_%08lld", (long long)step);
}

// "rank_00003.safetensors"
inline std::string rank_file(int rank) {
    return formatted("rank_%05d.safetensors", rank);
}

// Steps of the complete checkpoints in `out`, newest first. With the ending ".tmp": steps of the
// unfinished ones that a crash left.
inline std::vector<int64_t> checkpoint_steps(const std::string& out, const char* ending = "") {
    std::vector<int64_t> steps;
    for (const std::string& name : names_in(out)) {
        long long step = -1;
        // Write the name back and compare: step_5 or step_00000100.old is no such folder.
        bool read = sscanf(name.c_str(), "step_%lld", &step) == 1 && step >= 0;
        if (read && step_folder(step) + ending == name)
            steps.push_back(step);
    }
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// ----------------------------------------------------------------------------
// the state of a rank as tensors

// List the state of every trained parameter: its masters if there are any, else its weights; then
// its moments. Frozen weights are left out: a resume reads them from the model's folder again.
template <typename T, typename S>
std::vector<StateTensor> state_tensors(const Trainer<T, S>& t) {
    // An evaluation keeps no moments, so it loads none. The mode decides, not what this rank keeps,
    // because all ranks must list the same tensors: a stage with only frozen blocks keeps no state,
    // yet may read a file for other ranks.
    bool stateful = t.plans[0].mode == Mode::TRAIN;
    std::vector<StateTensor> list;
    bool narrow = sizeof(T) < sizeof(acc_t<T>) && t.plans[0].masters != Masters::NONE;

    for (const Parameter& p : t.model.parameters) {
        if (!t.model.buckets[p.bucket].trainable)
            continue;
        // Save the masters, which are exact: the weights beside them are rounded copies.
        Kind weights = narrow ? Kind::MASTER : Kind::WEIGHT;
        // A run that only reads may take the mean of weights in their place (--use-ema).
        const char* read = t.takes_average ? "ema." : "param.";
        list.push_back({read + p.name, {weights, p.bucket}, &p});
        if (!stateful) continue;
        add_moments(t, p, ".", list);
        if (t.plans[0].ema)
            list.push_back({"ema." + p.name, {Kind::EMA, p.bucket}, &p});
    }
    return list;
}

// The elements of a tensor that this rank keeps, owns and so writes, without the vocabulary's
// padding. Padding ends the whole table, so it also ends a rank's range.
template <typename T, typename S>
KeptRange owned_range(const Trainer<T, S>& t, const StateTensor& s) {
    // Count the real words: a range may begin with words and end with padding.
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
// save

// The elements that this rank owns, tensor by tensor: the contents of its file.
struct RankFile {
    // If empty, the rank makes no file.
    std::vector<std::pair<StateTensor, KeptRange>> owned;
    std::vector<TensorSpec> specs;
    Json entry; // for the manifest; write_rank_file() adds size and checksum
};

// List what this rank owns, and describe it for the manifest.
template <typename T, typename S>
RankFile rank_file_of(const Trainer<T, S>& t) {
    RankFile file;
    Json ranges;

    // Each element of the model is in one file: its owner writes it.
    for (const StateTensor& s : state_tensors(t)) {
        KeptRange range = owned_range(t, s);
        if (range.count == 0) continue;
        file.owned.push_back({s, range});
        file.specs.push_back({s.name, type_of<acc_t<T>>(), {range.count}});
        ranges[s.name] = {range.first, range.count};
    }

    // Describe which part of the model this is. Add the share of experts, if ranks share them.
    file.entry = {{"file", rank_file(t.comms.world.rank)},
                  {"tp", t.layout.tp.size},
                  {"tp_rank", t.layout.tp.rank},
                  {"tensors", ranges}};
    if (t.layout.experts.whole) file.entry["etp"] = 1;
    Axis experts = expert_axis(t.layout);
    if (experts.size == 1) return file;
    file.entry.update({{"ep", experts.size}, {"ep_rank", experts.rank}});
    return file;
}

// Write this rank's file, or nothing if the rank owns nothing. numbers(i) returns the
// values of tensor i.
template <typename F>
std::string write_rank_file(RankFile& file, const std::string& folder, F numbers) {
    if (file.owned.empty()) return "";
    FileWriter w;
    writer_open(&w, folder + "/" + file.entry["file"].get<std::string>(), file.specs, {});
    for (size_t i = 0; i < file.owned.size() && w.wrong.empty(); i++) {
        auto values = numbers(i);
        writer_put(w, values.data(), values.size() * sizeof(values[0]));
    }

    // The checksum covers the bytes handed to the file, not those that a disk gives back.
    std::string wrong = writer_close(&w);
    file.entry.update({{"bytes", w.bytes}, {"crc32", w.crc}});
    return wrong;
}

// How weights are rounded from masters. Weights that keep a remainder are rounded in their own way,
// so their sums differ from those of nearest rounding.
template <typename T, typename S>
const char* rounding_of(const Trainer<T, S>& t) {
    return t.plans[0].masters == Masters::REMAINDER ? "remainder" : "nearest";
}

// The weights' sums by parameter name, as the manifest stores them. All ranks call.
template <typename T, typename S>
Json weight_sums_json(const Trainer<T, S>& t) {
    std::vector<uint64_t> sums = weight_sums(t);
    Json by_name = Json::object();
    for (size_t i = 0; i < sums.size(); i++)
        if (has_sum(t, t.model.parameters[i]))
            by_name[t.model.parameters[i].name] = sums[i];
    return by_name;
}

// Copy the state of delayed scaling to the host, into `bytes`; the result points there. All ranks
// have the same state.
template <typename T, typename S>
Fp8History fp8_on_host(const Trainer<T, S>& t, std::vector<unsigned char>* bytes) {
    // Copy all of it at once: the arrays are adjacent, amax first.
    const Fp8Rule& rule = t.model.shape.fp8.rule;
    Fp8History home = fp8_history(t);
    bytes->resize(fp8_history_bytes(home.slots, rule));
    if (home.slots)
        copy_out(bytes->data(), home.amax, bytes->size(), t.ctx.where);
    return fp8_history_at(bytes->data(), home.slots, rule);
}

// Whether a manifest has scales for as many matrices as this run. A checkpoint trained with another
// FP8 recipe has none; then a step or two finds new scales.
template <typename T, typename S>
bool has_fp8_history(const Trainer<T, S>& t, const Json& m) {
    return m.contains("fp8") && m["fp8"]["scales"].size() == fp8_slots(t.model);
}

// The whole manifest except its list of files. All ranks call.
template <typename T, typename S>
Json manifest_of(const Trainer<T, S>& t, const CheckpointInfo& info) {
    // Save the optimizer's own count of updates too: Adam's bias correction continues from it.
    bool trained = address<StepScale>(t, {Kind::SCALE});
    int64_t updates = trained ? read_value<StepScale>(t, {Kind::SCALE}).step : 0;
    // A resume only notes a change of threads or processor: it may change the last bits of a sum.
    Json manifest = {{"format", CHECKPOINT_FORMAT},
                     {"step", info.step},
                     {"cursor", info.cursor},
                     {"seed", info.seed},
                     {"tokens", info.tokens},
                     {"config", info.config.is_null() ? Json::object() : info.config},
                     {"model", model_identity(t.model.shape)},
                     {"optimizer", optimizer_row(t.plans[0].optimizer).name},
                     {"optimizer_step", updates},
                     {"precision", type_name(type_of<T>())},
                     {"threads", threads_here(t.ctx.where)},
                     {"cpu", cpu_name()},
                     {"rounding", rounding_of(t)},
                     {"weight_sums", weight_sums_json(t)}};

    // Add the fields that only some runs have.
    if (trained && t.hyper.loss_scaling.on)
        manifest["loss_scale"] = loss_scale_json(read_value<StepScale>(t, {Kind::SCALE}).loss);
    // Save the scales of delayed scaling too. Every rank has the scales of all matrices.
    std::vector<unsigned char> bytes;
    Fp8History h = fp8_on_host(t, &bytes);
    if (h.slots)
        manifest["fp8"] = fp8_history_json(h, t.model.shape.fp8.rule);

    if (t.plans[0].states != States::FLOAT)
        manifest["states"] = states_name(t.plans[0].states);
    if (!info.base.is_null())
        manifest["base"] = info.base;
    if (!info.data.is_null())
        manifest["data"] = info.data;
    if (!info.rollouts.is_null())
        manifest["rollouts"] = info.rollouts;
    if (info.best_step >= 0) {
        manifest["best_step"] = info.best_step;
        manifest["best_loss"] = info.best_loss;
    }
    return manifest;
}

// Write manifest.json, with a checksum of its own; then sync the folder, which makes names durable.
// Read it back as a load will: what no load would take is no checkpoint.
inline std::string write_manifest(Json manifest, const Json& files, const std::string& folder) {
    // The manifest's checksum covers the files' checksums, so it vouches for the whole folder.
    manifest["files"] = files;
    manifest["crc32"] = manifest_crc(manifest);
    LLMC_TRY(write_text_file(folder + "/manifest.json", manifest_text(manifest)));
    LLMC_TRY(read_manifest(folder, &manifest));
    return sync_folder(folder);
}

// Rename a folder before removing its files: half a checkpoint never looks like a whole one.
inline void remove_checkpoint(const std::string& folder) {
    std::string going = folder + ".tmp";
    remove_folder(rename(folder.c_str(), going.c_str()) == 0 ? going : folder);
}

// Make the folder step_N.tmp, after removing what crashes left.
inline std::string make_temporary(const std::string& out, const std::string& temporary) {
    for (int64_t stale : checkpoint_steps(out, ".tmp"))
        remove_folder(out + "/" + step_folder(stale) + ".tmp");
    if (mkdir(temporary.c_str(), 0777) == 0)
        return "";
    return temporary + ": cannot be made: " + strerror(errno);
}

// Rename a checkpoint so that neither a resume nor --keep counts it; its bytes may still be wanted.
// Returns "" or what is wrong. *name receives the new name: step_N.newer, step_N.newer.2, ...
inline std::string set_aside(const std::string& out, int64_t step, const std::string& ending,
                             std::string* name) {
    std::string folder = out + "/" + step_folder(step);
    *name = folder + ending;
    for (int n = 2; file_type(*name); n++)
        *name = concat(folder, ending, ".", n);
    if (rename(folder.c_str(), name->c_str()) == 0)
        return "";
    return folder + ": cannot be renamed: " + strerror(errno);
}

// A save in flight, from making its folder to giving the folder its name.
struct Save {
    CheckpointInfo info;
    std::string out;
    int keep; // how many checkpoints stay; the best one is never removed
    Json manifest = {};           // all but the list of files
    RankFile file = {};           // this rank's

    std::string folder() const { return out + "/" + step_folder(info.step); }
    std::string temporary() const { return folder() + ".tmp"; }
};

// Begin a save: step 1 of the header. Then record what the next training step will change. makes:
// whether this rank makes the folder, as the first one does where all share it.
template <typename T, typename S>
std::string save_begin(const Trainer<T, S>& t, Save& save, bool makes) {
    // Each step ends in first_error(): no rank continues alone, and none waits for one that failed.
    LLMC_TRY(first_error(t.comms.world, makes ? make_temporary(save.out, save.temporary()) : ""));
    save.manifest = manifest_of(t, save.info);
    save.file = rank_file_of(t);
    return "";
}

// Step 2 while nothing else runs: write this rank's file from where its state lies, one tensor at a
// time, so that a rank never holds a second copy.
template <typename T, typename S>
std::string save_in_place(const Trainer<T, S>& t, Save& save) {
    return write_rank_file(save.file, save.temporary(), [&](size_t i) {
        auto& [s, range] = save.file.owned[i];
        return read_numbers(t, s.data, *s.p, range);
    });
}

// The result of step 3 of a save, the same on all ranks.
struct Written {
    std::string wrong;    // the error of the first rank that has one
    Json files = {};      // the manifest's entries
};
inline Written exchange_written(const Comm& world, const Save& save, const std::string& wrong) {
    Written all = {first_error(world, wrong)};
    // A rank that owns nothing has no file, and sends an empty text.
    std::string own = save.file.owned.empty() ? "" : save.file.entry.dump();
    for (const std::string& text : gather_texts(world, own))
        if (!text.empty()) all.files.push_back(Json::parse(text));
    return all;
}

// Steps 4 and 5 of a save, by the first rank alone. It sends no message, so a thread may run it.
inline std::string name_checkpoint(const Save& save, const Written& written) {
    // 4. Write the manifest, then give the folder its name. A folder that already has the name is
    // replaced: it is the same step of an earlier run, which this run repeats.
    std::string wrong = written.wrong;
    if (wrong.empty())
        wrong = write_manifest(save.manifest, written.files, save.temporary());
    if (wrong.empty())
        wrong = replace_folder(save.temporary(), save.folder());
    if (!wrong.empty()) {
        remove_folder(save.temporary());
        return wrong;
    }

    // 5. Remove the oldest. Newer steps than this one stay: they belong to a run that got further.
    std::vector<int64_t> steps = checkpoint_steps(save.out);
    for (size_t i = save.keep; i < steps.size(); i++)
        if (steps[i] < save.info.step && steps[i] != save.info.best_step)
            remove_checkpoint(save.out + "/" + step_folder(steps[i]));
    return "";
}

// Tell all ranks how a save ended. `wrong` is the first rank's result.
inline std::string agree_on_save(const Comm& world, std::string wrong) {
    wrong = first_error(world, wrong);
    return wrong.empty() ? "" : wrong + "; the checkpoints before it are as they were";
}

// Save a checkpoint in `out`. Training waits until it is written.
template <typename T, typename S>
std::string checkpoint_save(const Trainer<T, S>& t, const CheckpointInfo& info,
                            const std::string& out, int keep) {
    const Comm& world = t.comms.world;
    Save save = {info, out, keep};
    LLMC_TRY(save_begin(t, save, world.rank == 0));

    // 2. to 5. Write, exchange, and let the first rank finish.
    Written written = exchange_written(world, save, save_in_place(t, save));
    return agree_on_save(world, world.rank == 0 ? name_checkpoint(save, written) : "");
}

} // namespace llmc
