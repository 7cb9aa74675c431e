// checkpoint.h - crash-safe checkpoints of named tensors, for any layout to load
//   OUT/step_00000100/rank_00000.safetensors   "param.NAME" float masters, "m.NAME", "v.NAME"
//   moments: a rank's share
//   OUT/step_00000100/manifest.json            step, cursor, seed, model, each file's size and
//   CRC-32, and where each
//                                              share lies in its whole parameter
//   All is written into step_N.tmp, each file synced, the manifest last, then the folder is
//   renamed: a folder of the
//   final name is whole, whenever the machine stops. Loading believes sizes and checksums only,
//   the manifest's own too, and falls back to
//   the checkpoint before. Vocabulary padding and rank-local layout never reach a file.
//   Every function returns "" or one line that says what is wrong.
#pragma once
#include "huggingface.h"

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

// Its values, padded, from whoever keeps them; all ranks call it.
template <typename T, typename S>
std::vector<acc_t<T>> fetch_state(const Trainer<T, S>& t, const StateTensor& s) {
    return fetch<acc_t<T>>(t, {s.kind, s.p->bucket}, *s.p, s.second);
}

// ----------------------------------------------------------------------------
// save

template <typename T, typename S>
std::string write_rank_file(const Trainer<T, S>& t, const std::string& path,
                            nlohmann::json* entry) {
    std::vector<TensorSpec> specs;
    std::vector<StateTensor> state = state_tensors(t, t.hyper.adamw);
    nlohmann::json runs;
    for (const StateTensor& s : state) {
        specs.push_back({s.name, type_of<acc_t<T>>(), {s.p->file_rows, s.p->cols()}});
        if (s.p->shape.size() == 1) specs.back().shape = {s.p->file_rows};
        for_each_run(*s.p, t.grid.tp_rank, t.grid.tp, [&](size_t, size_t global, size_t count) {
            size_t real =
                std::min(count, s.p->file_elements() - std::min(global, s.p->file_elements()));
            runs[s.name].push_back({global, real});
        });
    }
    SafeTensorsWriter w;
    writer_open(&w, path, specs, {});
    for (const StateTensor& s : state) {
        std::vector<acc_t<T>> values = fetch_state(t, s);
        writer_put(w, values.data(), s.p->file_elements() * sizeof(values[0]));
    }
    std::string wrong = writer_close(&w);
    *entry = {{"file", path.substr(path.rfind('/') + 1)},
              {"bytes", w.bytes},
              {"crc32", w.crc},
              {"runs", runs}};
    return wrong;
}

// The manifest's checksum is that of its text without the checksum; parsed and printed again a JSON text is the same.
// Text that is no UTF-8 (a path in the configuration) is stored with its bad bytes replaced.
inline std::string manifest_text(const nlohmann::json& manifest) {
    return manifest.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

inline uint32_t manifest_crc(nlohmann::json manifest) {
    manifest.erase("crc32");
    std::string text = manifest_text(manifest);
    return uint32_t(
        crc32(0, reinterpret_cast<const unsigned char*>(text.data()), uInt(text.size())));
}

template <typename T, typename S>
std::string write_checkpoint(const Trainer<T, S>& t, const CheckpointInfo& info,
                             const std::string& folder) {
    nlohmann::json file;
    std::string wrong = write_rank_file(t, folder + "/rank_00000.safetensors", &file);
    if (!wrong.empty()) return wrong;
    bool trained = address<StepScale>(t, {Kind::SCALE});
    nlohmann::json manifest = {
        {"format", 1},
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
        {"files", {file}}};
    manifest["crc32"] = manifest_crc(manifest);
    wrong = write_text_file(folder + "/manifest.json", manifest_text(manifest));
    return wrong.empty() ? sync_folder(folder) : wrong;
}

// A folder that is going away gives up its name first: half of a checkpoint never looks like one.
inline void remove_checkpoint(const std::string& folder) {
    std::string going = folder + ".tmp";
    remove_folder(rename(folder.c_str(), going.c_str()) == 0 ? going : folder);
}

template <typename T, typename S>
std::string checkpoint_save(const Trainer<T, S>& t, const CheckpointInfo& info,
                            const std::string& out, int keep) {
    if (t.comms.world.rank > 0) { // the first rank writes
        for (const StateTensor& s : state_tensors(t, t.hyper.adamw)) fetch_state(t, s);
        return "";
    }
    for (int64_t stale : checkpoint_steps(out, ".tmp"))
        remove_folder(out + "/" + step_folder(stale) + ".tmp");
    std::string folder = out + "/" + step_folder(info.step), temporary = folder + ".tmp";
    if (mkdir(temporary.c_str(), 0777) != 0)
        return temporary + ": cannot be made: " + strerror(errno);
    std::string wrong = write_checkpoint(t, info, temporary);
    if (wrong.empty())
        wrong = replace_folder(
            temporary, folder); // an old one: the same step, of the run that this one repeats
    if (!wrong.empty())
        return remove_folder(temporary), wrong + "; the checkpoints before it are as they were";
    std::vector<int64_t> steps = checkpoint_steps(out);
    for (size_t i = size_t(keep); i < steps.size(); i++)
        if (steps[i] < info.step) remove_checkpoint(out + "/" + step_folder(steps[i]));
    return "";
}

// ----------------------------------------------------------------------------
// load

inline std::string file_crc(const std::string& path, size_t* bytes, uint32_t* crc) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) return path + ": " + strerror(errno);
    std::vector<unsigned char> buffer(size_t(1) << 20);
    *bytes = 0, *crc = 0;
    for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), f)) > 0;)
        *bytes += n, *crc = uint32_t(crc32(*crc, buffer.data(), uInt(n)));
    bool good = !ferror(f);
    fclose(f);
    return good ? "" : path + ": cannot be read";
}

// Is this checkpoint whole? "" and its manifest, or why not.
inline std::string verify_checkpoint(const std::string& folder, nlohmann::json* manifest) {
    std::ifstream in(folder + "/manifest.json");
    if (!in) return folder + ": has no manifest.json";
    *manifest = nlohmann::json::parse(in, nullptr, false);
    const nlohmann::json& m = *manifest;
    bool good = m.is_object() && m.contains("crc32") && m["crc32"] == manifest_crc(m);
    if (!good) return folder + ": manifest.json is broken";
    if (!m.contains("format") || m["format"] != 1)
        return ""; // whole, and of another program: check_identity says so
    for (const char* key : {"step", "cursor", "seed", "optimizer_step", "threads"})
        good = good && m.contains(key) && m[key].is_number_integer();
    for (const char* key : {"optimizer", "precision", "cpu"})
        good = good && m.contains(key) && m[key].is_string();
    good = good && m.contains("files") && m["files"].is_array() && !m["files"].empty() &&
           m.contains("model") && m["model"].is_object();
    if (!good) return folder + ": manifest.json is broken";
    for (const nlohmann::json& f : m["files"]) {
        if (!f.is_object() || !f.contains("file") || !f["file"].is_string() ||
            !f.contains("bytes") || !f.contains("crc32"))
            return folder + ": manifest.json is broken";
        std::string path = folder + "/" + f["file"].get<std::string>();
        size_t bytes = 0;
        uint32_t crc = 0;
        std::string wrong = file_crc(path, &bytes, &crc);
        if (!wrong.empty()) return wrong;
        if (f["bytes"] != bytes)
            return path + ": is " + std::to_string(bytes) + " bytes, the manifest says " +
                   f["bytes"].dump();
        if (f["crc32"] != crc)
            return path + ": its checksum is " + std::to_string(crc) + ", the manifest says " +
                   f["crc32"].dump();
    }
    return "";
}

template <typename T, typename S>
std::string check_identity(const Trainer<T, S>& t, const nlohmann::json& manifest,
                           const std::string& folder, bool moments) {
    if (manifest.value("format", nlohmann::json()) != 1)
        return folder + ": is of format " + manifest.value("format", nlohmann::json()).dump() +
               ", this program reads 1";
    nlohmann::json own = model_identity(t.model.shape);
    for (auto& [key, value] : own.items())
        if (manifest["model"].value(key, nlohmann::json()) != value)
            return folder + ": is of another model: its " + key + " is " +
                   manifest["model"].value(key, nlohmann::json()).dump() + ", this run's " +
                   value.dump();
    if (moments && manifest["optimizer"] != "adamw")
        return folder + ": was trained with sgd and has no moments: go on with --optimizer sgd";
    if (manifest["files"].size() != 1 || manifest["files"][0]["file"] != "rank_00000.safetensors")
        return folder + ": is of " + std::to_string(manifest["files"].size()) +
               " ranks; one rank's can be read";
    return "";
}

// First all is looked at, then all is taken: a file that does not fit changes nothing.
template <typename T, typename S>
std::string read_rank_file(Trainer<T, S>& t, const std::string& path, bool moments) {
    typedef acc_t<T> A;
    SafeTensors file;
    std::string wrong = safetensors_open(&file, path);
    std::vector<StateTensor> state = state_tensors(t, moments);
    for (const StateTensor& s : state) {
        const SafeTensor* x = wrong.empty() ? safetensors_find(file, s.name) : nullptr;
        if (wrong.empty() && !x) wrong = path + ": tensor " + s.name + " is missing";
        if (wrong.empty() &&
            (x->dtype != type_name(type_of<A>()) || x->elements() != s.p->file_elements()))
            wrong = path + ": tensor " + s.name + " is " + x->dtype + shape_text(x->shape) +
                    ", not " + type_name(type_of<A>()) + shape_text(s.p->shape);
    }
    for (size_t i = 0; wrong.empty() && i < state.size(); i++) {
        const StateTensor& s = state[i];
        const SafeTensor* x = safetensors_find(file, s.name);
        std::vector<A> values(s.p->elements(), A(0));
        memcpy(values.data(), x->data, x->bytes);
        if (s.kind != Kind::MOMENTS) {
            set_weight(t, *s.p, values.data());
            continue;
        }
        Data d = {s.kind, s.p->bucket};
        KeptPart part = kept_part(t, d, *s.p);
        A* to = address<A>(t, d) + (s.second ? kept_elements(t.plans[0], t.model, d) : 0);
        if (part.count)
            copy_in(to + part.at, values.data() + part.from, part.count * sizeof(A), t.ctx.where);
        wait_for(t.ctx.where);
    }
    wait_for(t.ctx.where);
    safetensors_close(&file);
    return wrong;
}

// The newest whole checkpoint in `out`. Broken ones are skipped and named in `notes`; a whole one
// that does not fit is
// an error: going back behind it silently would lose a run.
template <typename T, typename S>
std::string checkpoint_load(Trainer<T, S>& t, CheckpointInfo* info, const std::string& out,
                            std::vector<std::string>* notes) {
    bool moments = keeps_any(t, Kind::MOMENTS);
    for (int64_t step : checkpoint_steps(out)) {
        std::string folder = out + "/" + step_folder(step);
        nlohmann::json m;
        std::string wrong = verify_checkpoint(folder, &m);
        if (!wrong.empty()) {
            notes->push_back(wrong + ": skipped");
            continue;
        }
        wrong = check_identity(t, m, folder, moments);
        if (wrong.empty()) wrong = read_rank_file(t, folder + "/rank_00000.safetensors", moments);
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
