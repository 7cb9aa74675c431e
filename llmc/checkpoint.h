// checkpoint.h - crash-safe checkpoints: each rank writes what it keeps, any layout loads them
//   OUT/step_00000100/rank_00003.safetensors   what rank 3 writes: flat tensors "param.NAME" (the
//                                              masters, or the weights), "m.NAME", "v.NAME"
//   OUT/step_00000100/manifest.json            step, cursor, seed, model; and of each file
//     {"file", "bytes", "crc32", "tp", "tp_rank", "tensors": {"param.NAME": [first, count], ...}}
//   A tensor holds elements [first, first + count) of the parameter as a rank of this tp_rank has
//   it; for_each_run (model.h) says where they lie in the whole. Each element is in one file: of
//   the ranks that keep it, gives_kept() (trainer.h) names the one that writes it; a rank that
//   writes nothing makes no file. Vocabulary padding reaches none.
//   Save   1. the first rank makes step_N.tmp   2. every rank writes and syncs its file
//          3. ranks tell size and CRC-32, or what went wrong
//          4. the first rank writes the manifest, and renames the folder: a folder of the final
//             name is whole, whenever the machine stops
//   Load   1. each of N ranks verifies every N-th file: sizes and checksums are believed, the
//             manifest's own too, nothing else; a broken checkpoint is skipped for the one before
//          2. each rank puts one parameter at a time together, and keeps its part of it
//   All ranks call, on one file system, and see the same result: "" or one line that says what is
//   wrong.
#pragma once
#include "huggingface.h"

constexpr int CHECKPOINT_FORMAT = 2;

struct CheckpointInfo {
    int64_t step = 0;    // of the run
    uint64_t cursor = 0; // samples taken
    uint64_t seed = 0;
    nlohmann::json config;
};

inline std::string cpu_name() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);)
        if (line.rfind("model name", 0) == 0)
            return line.substr(std::min(line.find(':') + 2, line.size()));
    return "unknown";
}

// What must be equal for a checkpoint to fit.
inline nlohmann::json model_identity(const Shape& s) {
    const char* positions[] = {"learned", "rope", "alibi"};
    return {{"family", s.hf_type},
            {"layers", s.L},
            {"heads", s.NH},
            {"kv_heads", s.NKV},
            {"head_size", s.HS},
            {"channels", s.C},
            {"ffn", s.F},
            {"vocab", s.V},
            {"positions", s.P},
            {"position", positions[int(s.position)]},
            {"tied", s.tied},
            {"qkv_bias", s.qkv_bias},
            {"norm_eps", s.norm_eps},
            {"sliding_window", s.sliding_window},
            {"rope_theta", s.rope_theta},
            {"rope_factor", s.rope_scaling.factor},
            {"rope_low_freq_factor", s.rope_scaling.low_freq_factor},
            {"rope_high_freq_factor", s.rope_scaling.high_freq_factor},
            {"rope_original_positions", s.rope_scaling.original_positions}};
}

inline std::string step_folder(int64_t step) {
    char name[32];
    snprintf(name, sizeof(name), "step_%08lld", (long long)step);
    return name;
}

inline std::string rank_file(int rank) {
    char name[32];
    snprintf(name, sizeof(name), "rank_%05d.safetensors", rank);
    return name;
}

// The steps of the whole checkpoints' folders, newest first; with ".tmp": what a crash left.
inline std::vector<int64_t> checkpoint_steps(const std::string& out, const char* ending = "") {
    std::vector<int64_t> steps;
    if (DIR* d = opendir(out.c_str())) {
        while (dirent* e = readdir(d)) {
            long long step = -1;
            if (sscanf(e->d_name, "step_%lld", &step) == 1 && step >= 0 &&
                step_folder(step) + ending == e->d_name)
                steps.push_back(step);
        }
        closedir(d);
    }
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// ----------------------------------------------------------------------------
// the state of a rank as tensors

struct StateTensor {
    std::string name;
    Kind kind;
    bool second; // of the moments, the second ones
    const Parameter* p;
    Data data() const { return {kind, p->bucket}; }
};

template <typename T, typename S>
std::vector<StateTensor> state_tensors(const Trainer<T, S>& t, bool moments) {
    std::vector<StateTensor> list;
    Kind weights = sizeof(T) < sizeof(acc_t<T>) ? Kind::MASTER : Kind::WEIGHT;
    for (const Parameter& p : t.model.parameters) {
        list.push_back({"param." + p.name, weights, false, &p});
        if (!moments || !t.model.buckets[size_t(p.bucket)].trainable) continue;
        list.push_back({"m." + p.name, Kind::MOMENTS, false, &p});
        list.push_back({"v." + p.name, Kind::MOMENTS, true, &p});
    }
    return list;
}

// What this rank writes of a tensor: what it keeps, if it is the one that gives it, without the
// vocabulary's padding, which ends a piece as it ends the whole.
template <typename T, typename S> KeptPart own_part(const Trainer<T, S>& t, const StateTensor& s) {
    KeptPart part = kept_part(t, s.data(), *s.p);
    size_t words = s.p->file_elements(), real = 0;
    for_each_kept(t.plans[0], *s.p, part, [&](size_t, size_t global, size_t count) {
        real += std::min(count, words - std::min(global, words));
    });
    part.count = gives_kept(t, s.data(), *s.p) ? real : 0;
    return part;
}
// Where a rank keeps a tensor: of the moments the second ones lie behind the first.
template <typename T, typename S>
acc_t<T>* kept_address(const Trainer<T, S>& t, const StateTensor& s) {
    return address<acc_t<T>>(t, s.data()) +
           (s.second ? kept_elements(t.plans[0], t.model, s.data()) : 0);
}

// ----------------------------------------------------------------------------
// what ranks tell each other

// Each rank's text, on every rank.
inline std::vector<std::string> gather_texts(const Comm& c, std::string text) {
    std::vector<int64_t> sizes(size_t(c.size));
    int64_t size = int64_t(text.size());
    all_gather(c, sizes.data(), &size, 1, Cpu{});
    size_t most = size_t(*std::max_element(sizes.begin(), sizes.end()));
    text.resize(most);
    std::string all(most * sizes.size(), 0);
    all_gather(c, reinterpret_cast<unsigned char*>(all.data()),
               reinterpret_cast<const unsigned char*>(text.data()), most, Cpu{});
    std::vector<std::string> texts;
    for (size_t r = 0; r < sizes.size(); r++)
        texts.push_back(all.substr(r * most, size_t(sizes[r])));
    return texts;
}

// What went wrong on the first rank where something did: one rank that fails, fails all.
inline std::string first_error(const Comm& c, const std::string& wrong) {
    for (const std::string& text : gather_texts(c, wrong))
        if (!text.empty()) return text;
    return "";
}

// ----------------------------------------------------------------------------
// save

// This rank's file and its entry in the manifest; no entry where it has nothing to give.
template <typename T, typename S>
std::string write_rank_file(const Trainer<T, S>& t, const std::string& folder,
                            nlohmann::json* entry) {
    typedef acc_t<T> A;
    std::vector<TensorSpec> specs;
    nlohmann::json ranges;
    std::vector<StateTensor> state = state_tensors(t, t.hyper.adamw);
    for (const StateTensor& s : state) {
        KeptPart part = own_part(t, s);
        if (part.count == 0) continue;
        specs.push_back({s.name, type_of<A>(), {part.count}});
        ranges[s.name] = {part.from, part.count};
    }
    if (specs.empty()) return "";
    std::string name = rank_file(t.comms.world.rank);
    FileWriter w;
    writer_open(&w, folder + "/" + name, specs, {});
    for (const StateTensor& s : state) {
        KeptPart part = own_part(t, s);
        if (part.count == 0 || !w.wrong.empty()) continue;
        std::vector<A> values(part.count);
        copy_out(values.data(), kept_address(t, s) + part.at, values.size() * sizeof(A),
                 t.ctx.where);
        writer_put(w, values.data(), values.size() * sizeof(A));
    }
    std::string wrong = writer_close(&w);
    *entry = {{"file", name},
              {"bytes", w.bytes},
              {"crc32", w.crc},
              {"tp", t.plans[0].tp},
              {"tp_rank", t.plans[0].tp_rank},
              {"tensors", ranges}};
    return wrong;
}

template <typename T, typename S>
std::string write_manifest(const Trainer<T, S>& t, const CheckpointInfo& info,
                           const std::string& folder, const nlohmann::json& files) {
    bool trained = address<StepScale>(t, {Kind::SCALE});
    nlohmann::json manifest = {
        {"format", CHECKPOINT_FORMAT},
        {"step", info.step},
        {"cursor", info.cursor},
        {"seed", info.seed},
        {"config", info.config},
        {"model", model_identity(t.model.shape)},
        {"optimizer", t.hyper.adamw ? "adamw" : "sgd"},
        {"optimizer_step", trained ? read_value<StepScale>(t, {Kind::SCALE}).step : 0},
        {"precision", type_name(type_of<T>())},
        {"threads", threads_here(t.ctx.where)},
        {"cpu", cpu_name()},
        {"files", files}};
    manifest["crc32"] = manifest_crc(manifest);
    std::string wrong = write_text_file(folder + "/manifest.json", manifest_text(manifest));
    return wrong.empty() ? sync_folder(folder) : wrong;
}

// A folder that is going away gives up its name first: half of a checkpoint never looks like one.
inline void remove_checkpoint(const std::string& folder) {
    std::string going = folder + ".tmp";
    remove_folder(rename(folder.c_str(), going.c_str()) == 0 ? going : folder);
}

inline std::string make_temporary(const std::string& out, const std::string& temporary) {
    for (int64_t stale : checkpoint_steps(out, ".tmp"))
        remove_folder(out + "/" + step_folder(stale) + ".tmp");
    if (mkdir(temporary.c_str(), 0777) == 0) return "";
    return temporary + ": cannot be made: " + strerror(errno);
}

template <typename T, typename S>
std::string checkpoint_save(const Trainer<T, S>& t, const CheckpointInfo& info,
                            const std::string& out, int keep) {
    const Comm& world = t.comms.world;
    bool first = world.rank == 0;
    std::string folder = out + "/" + step_folder(info.step), temporary = folder + ".tmp";
    std::string wrong = first_error(world, first ? make_temporary(out, temporary) : "");
    if (!wrong.empty()) return wrong;
    nlohmann::json entry, files;
    wrong = first_error(world, write_rank_file(t, temporary, &entry));
    for (const std::string& text : gather_texts(world, entry.is_null() ? "" : entry.dump()))
        if (!text.empty()) files.push_back(nlohmann::json::parse(text));
    if (first && wrong.empty()) wrong = write_manifest(t, info, temporary, files);
    if (first && wrong.empty())
        wrong = replace_folder(
            temporary, folder); // an old one: the same step, of the run that this one repeats
    wrong = first_error(world, wrong);
    if (first && !wrong.empty()) remove_folder(temporary);
    if (!wrong.empty()) return wrong + "; the checkpoints before it are as they were";
    std::vector<int64_t> steps = first ? checkpoint_steps(out) : std::vector<int64_t>();
    for (size_t i = size_t(keep); i < steps.size(); i++)
        if (steps[i] < info.step) remove_checkpoint(out + "/" + step_folder(steps[i]));
    return "";
}

// ----------------------------------------------------------------------------
// load

inline bool is_file_entry(const nlohmann::json& f) {
    bool good = f.is_object() && f.contains("file") && f["file"].is_string() &&
                f.contains("tensors") && f["tensors"].is_object();
    for (const char* key : {"bytes", "crc32", "tp", "tp_rank"})
        good = good && f.contains(key) && f[key].is_number_unsigned();
    if (!good || f["tp_rank"] >= f["tp"]) return false;
    for (const nlohmann::json& range : f["tensors"])
        good = good && range.is_array() && range.size() == 2 && range[0].is_number_unsigned() &&
               range[1].is_number_unsigned();
    return good;
}

inline std::string read_manifest(const std::string& folder, nlohmann::json* manifest) {
    std::ifstream in(folder + "/manifest.json");
    if (!in) return folder + ": has no manifest.json";
    *manifest = nlohmann::json::parse(in, nullptr, false);
    const nlohmann::json& m = *manifest;
    bool good = m.is_object() && m.contains("crc32") && m["crc32"] == manifest_crc(m);
    if (!good) return folder + ": manifest.json is broken";
    if (!m.contains("format") || m["format"] != CHECKPOINT_FORMAT)
        return ""; // whole, and of another program: check_identity says so
    for (const char* key : {"step", "cursor", "seed", "optimizer_step", "threads"})
        good = good && m.contains(key) && m[key].is_number_integer();
    for (const char* key : {"optimizer", "precision", "cpu"})
        good = good && m.contains(key) && m[key].is_string();
    good = good && m.contains("files") && m["files"].is_array() && !m["files"].empty() &&
           std::all_of(m["files"].begin(), m["files"].end(), is_file_entry) &&
           m.contains("model") && m["model"].is_object();
    return good ? "" : folder + ": manifest.json is broken";
}

inline std::string verify_file(const std::string& folder, const nlohmann::json& entry) {
    std::string path = folder + "/" + entry["file"].get<std::string>();
    size_t bytes = 0;
    uint32_t crc = 0;
    std::string wrong = file_crc(path, &bytes, &crc);
    if (!wrong.empty()) return wrong;
    if (entry["bytes"] != bytes)
        return path + ": is " + std::to_string(bytes) + " bytes, the manifest says " +
               entry["bytes"].dump();
    if (entry["crc32"] != crc)
        return path + ": its checksum is " + std::to_string(crc) + ", the manifest says " +
               entry["crc32"].dump();
    return "";
}

// Is this checkpoint whole? "" and its manifest, or why not; each rank looks at every N-th file.
inline std::string verify_checkpoint(const Comm& world, const std::string& folder,
                                     nlohmann::json* manifest) {
    std::string wrong = read_manifest(folder, manifest);
    bool ours = wrong.empty() && manifest->value("format", nlohmann::json()) == CHECKPOINT_FORMAT;
    size_t count = ours ? (*manifest)["files"].size() : 0;
    for (size_t i = size_t(world.rank); wrong.empty() && i < count; i += size_t(world.size))
        wrong = verify_file(folder, (*manifest)["files"][i]);
    return first_error(world, wrong);
}

template <typename T, typename S>
std::string check_identity(const Trainer<T, S>& t, const nlohmann::json& manifest,
                           const std::string& folder, bool moments) {
    nlohmann::json format = manifest.value("format", nlohmann::json());
    if (format != CHECKPOINT_FORMAT)
        return folder + ": is of format " + format.dump() + ", this program reads " +
               std::to_string(CHECKPOINT_FORMAT);
    nlohmann::json own = model_identity(t.model.shape);
    for (auto& [key, value] : own.items())
        if (manifest["model"].value(key, nlohmann::json()) != value)
            return folder + ": is of another model: its " + key + " is " +
                   manifest["model"].value(key, nlohmann::json()).dump() + ", this run's " +
                   value.dump();
    if (moments && manifest["optimizer"] != "adamw")
        return folder + ": was trained with sgd and has no moments: go on with --optimizer sgd";
    return "";
}

// The files of a checkpoint, each opened when it is first needed.
struct SavedFiles {
    const Model& model;
    std::string folder;
    nlohmann::json entries; // of the manifest
    std::vector<SafeTensors> open;
    std::map<int, Model> cut; // the model as ranks of this tp cut it, and pad its vocabulary
};

// Elements of a tensor that lie one behind the other, in a file and in the whole.
struct Piece {
    const unsigned char* data;
    size_t global, count;
};

// The pieces of one file's tensor.
inline std::string file_pieces(SavedFiles& files, size_t i, const StateTensor& s, Type type,
                               std::vector<Piece>* pieces) {
    const nlohmann::json& entry = files.entries[i];
    if (!entry["tensors"].contains(s.name)) return "";
    const nlohmann::json& range = entry["tensors"][s.name];
    size_t first = range[0].get<size_t>(), count = range[1].get<size_t>(), found = 0;
    SafeTensors& file = files.open[i];
    std::string path = files.folder + "/" + entry["file"].get<std::string>(),
                wrong = file.map ? "" : safetensors_open(&file, path);
    if (!wrong.empty()) return wrong;
    const SafeTensor* x = safetensors_find(file, s.name);
    if (!x) return path + ": tensor " + s.name + " is missing";
    if (x->dtype != type_name(type) || x->elements() != count)
        return path + ": tensor " + s.name + " is " + x->dtype + shape_text(x->shape) + ", not " +
               type_name(type) + shape_text({count});
    int tp = entry["tp"].get<int>();
    if (!files.cut.count(tp)) files.cut[tp] = make_model(files.model.shape, tp);
    const Parameter& saved = files.cut[tp].parameters[size_t(s.p - &files.model.parameters[0])];
    for_each_run(
        saved, entry["tp_rank"].get<int>(), tp, [&](size_t local, size_t global, size_t n) {
            size_t from = std::max(local, first), end = std::min(local + n, first + count);
            if (from >= end) return;
            pieces->push_back(
                {x->data + (from - first) * type_bytes(type), global + from - local, end - from});
            found += end - from;
        });
    return found == count ? "" : path + ": tensor " + s.name + " reaches beyond its parameter";
}

// A tensor's pieces from all files, in order: each element once.
inline std::string find_pieces(SavedFiles& files, const StateTensor& s, Type type,
                               std::vector<Piece>* pieces) {
    pieces->clear();
    std::string wrong;
    for (size_t i = 0; wrong.empty() && i < files.open.size(); i++)
        wrong = file_pieces(files, i, s, type, pieces);
    if (!wrong.empty()) return wrong;
    std::sort(pieces->begin(), pieces->end(),
              [](const Piece& a, const Piece& b) { return a.global < b.global; });
    size_t reached = 0, all = s.p->file_elements();
    auto elements = [&](size_t from, size_t end, const char* are) {
        return files.folder + ": tensor " + s.name + ": elements " + std::to_string(from) + " to " +
               std::to_string(end) + " of " + std::to_string(all) + are;
    };
    for (const Piece& piece : *pieces) {
        size_t end = piece.global + piece.count;
        if (piece.global > reached) return elements(reached, piece.global, " are in no file");
        if (piece.global < reached)
            return elements(piece.global, std::min(end, reached), " are there twice");
        reached = end;
    }
    if (reached > all) return elements(all, reached, " are vocabulary padding");
    return reached < all ? elements(reached, all, " are in no file") : "";
}

template <typename T, typename S>
void take_tensor(Trainer<T, S>& t, const StateTensor& s, const std::vector<Piece>& pieces) {
    typedef acc_t<T> A;
    std::vector<A> values(s.p->elements(), A(0)); // padding stays 0
    for (const Piece& piece : pieces)
        memcpy(values.data() + piece.global, piece.data, piece.count * sizeof(A));
    if (s.kind != Kind::MOMENTS) {
        set_weight(t, *s.p, values.data());
    } else {
        KeptPart part = kept_part(t, s.data(), *s.p);
        std::vector<A> kept(part.count);
        for_each_kept(t.plans[0], *s.p, part, [&](size_t at, size_t global, size_t count) {
            std::copy_n(values.data() + global, count, kept.data() + at);
        });
        if (part.count)
            copy_in(kept_address(t, s) + part.at, kept.data(), kept.size() * sizeof(A),
                    t.ctx.where);
        wait_for(t.ctx.where); // before kept goes
    }
}

// First all is looked at, by all ranks, then all is taken: a checkpoint that does not fit changes
// nothing.
template <typename T, typename S>
std::string read_files(Trainer<T, S>& t, const std::string& folder, const nlohmann::json& entries,
                       bool moments) {
    SavedFiles files = {t.model, folder, entries, std::vector<SafeTensors>(entries.size()), {}};
    std::vector<Piece> pieces;
    std::string wrong;
    std::vector<StateTensor> mine;
    for (const StateTensor& s : state_tensors(t, moments))
        if (bucket_is_mine(t.plans[0], t.model, s.p->bucket)) mine.push_back(s);
    Type type = type_of<acc_t<T>>();
    for (size_t i = 0; wrong.empty() && i < mine.size(); i++)
        wrong = find_pieces(files, mine[i], type, &pieces);
    wrong = first_error(t.comms.world, wrong);
    if (!wrong.empty()) wrong += "; to go on from the checkpoint before, remove " + folder;
    for (size_t i = 0; wrong.empty() && i < mine.size(); i++) {
        find_pieces(files, mine[i], type, &pieces);
        take_tensor(t, mine[i], pieces);
    }
    for (SafeTensors& file : files.open) safetensors_close(&file);
    return wrong;
}

// The checkpoints' steps as the first rank sees them, newest first.
inline std::vector<int64_t> first_ranks_steps(const Comm& world, const std::string& out) {
    std::vector<int64_t> steps = world.rank == 0 ? checkpoint_steps(out) : std::vector<int64_t>();
    int64_t count = int64_t(steps.size());
    broadcast(world, &count, 1, 0, Cpu{});
    steps.resize(size_t(count));
    broadcast(world, steps.data(), steps.size(), 0, Cpu{});
    return steps;
}

// The newest whole checkpoint in `out`. Broken ones are skipped and named in `notes`; a whole one
// that does not fit is an error: going back behind it silently would lose a run.
template <typename T, typename S>
std::string checkpoint_load(Trainer<T, S>& t, CheckpointInfo* info, const std::string& out,
                            std::vector<std::string>* notes) {
    bool moments = keeps_any(t, Kind::MOMENTS);
    const Comm& world = t.comms.world;
    for (int64_t step : first_ranks_steps(world, out)) {
        std::string folder = out + "/" + step_folder(step);
        nlohmann::json m;
        std::string wrong = verify_checkpoint(world, folder, &m);
        if (!wrong.empty()) {
            notes->push_back(wrong + ": skipped");
            continue;
        }
        wrong = first_error(world, check_identity(t, m, folder, moments));
        if (wrong.empty()) wrong = read_files(t, folder, m["files"], moments);
        if (!wrong.empty()) return wrong;
        *info = {m["step"].get<int64_t>(), m["cursor"].get<uint64_t>(), m["seed"].get<uint64_t>(),
                 m.value("config", nlohmann::json())};
        if (StepScale* home = address<StepScale>(t, {Kind::SCALE})) {
            StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
            scale.step = m["optimizer_step"].get<int64_t>();
            copy_in(home, &scale, sizeof(scale), t.ctx.where);
            wait_for(t.ctx.where);
        }
        if (m["threads"] != threads_here(t.ctx.where) || m["cpu"] != cpu_name())
            notes->push_back("the checkpoint was made by " + m["threads"].dump() + " threads on " +
                             m["cpu"].get<std::string>() + "; this run has " +
                             std::to_string(threads_here(t.ctx.where)) + " on " + cpu_name() +
                             ": bits may differ from an uninterrupted run");
        if (m["precision"] != type_name(type_of<T>()))
            notes->push_back("the checkpoint was trained in " + m["precision"].get<std::string>());
        return "";
    }
    return out + ": holds no whole checkpoint" +
           (notes->empty() ? "" : " (the broken ones are named above)") +
           ": start without --resume, or give the --out of the run to go on with";
}
