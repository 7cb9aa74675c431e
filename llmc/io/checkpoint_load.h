// checkpoint_load.h - any layout loads what another has saved, the newest checkpoint that is whole
//   1. each of N ranks verifies every N-th file. Only sizes and checksums are believed, the
//      manifest's own too. A broken checkpoint is skipped for the one before it.
//   2. every rank looks at all it needs before any rank changes anything
//   3. who has verified a file reads it, and sends each tensor to the stages that need it
//      (one_reader.h). Each rank puts one parameter at a time together, and keeps its part
//   4. the weights' sums must be those of the manifest: cut, sent and rounded as saved
//   All ranks call, on one file system, and see the same result: "" or what is wrong, in a line.
#pragma once
#include "checkpoint.h"
#include "one_reader.h"

namespace llmc {

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
