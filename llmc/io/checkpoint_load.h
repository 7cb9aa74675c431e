// checkpoint_load.h - any layout loads what another has saved, the newest checkpoint that is whole
//   1. verify: each of N ranks takes every N-th file and compares size and checksum, after the
//      manifest's own. Nothing unverified is believed. A broken checkpoint is skipped, and the one
//      before it is tried.
//   2. look: every rank checks all that it needs before any rank changes anything
//   3. read: the rank that verified a file reads it, and sends each tensor to the pipeline stages
//      that need it (one_reader.h). A rank assembles one parameter at a time and keeps its part
//   4. compare: the weights' sums must be those of the manifest. This proves that weights were cut,
//      sent and rounded as they were saved
//   All ranks call, on one file system, and see the same result: "" or what is wrong, in a line.
#pragma once
#include "../action.h"
#include "../optimizer.h"
#include "../adapters.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../family.h"
#include "../fp8.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/element_type.h"
#include "../ops/fp8_delayed.cuh"
#include "../ops/loss_scale.cuh"
#include "../ops/matmul.cuh"
#include "../ops/memory.h"
#include "../ops/small_states.cuh"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../sharding.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "checkpoint.h"
#include "files.h"
#include "json.h"
#include "manifest.h"
#include "one_reader.h"
#include "replicas.h"
#include "safetensors.h"

namespace llmc {

// Compare a file's size and checksum with the manifest's.
inline std::string verify_file(const std::string& folder, const Json& entry) {
    // This reads every byte, and costs as much as loading. Nothing else reveals a flipped bit.
    std::string path = folder + "/" + entry["file"].get<std::string>();
    size_t bytes = 0;
    uint32_t crc = 0;
    LLMC_TRY(file_crc(path, &bytes, &crc));

    // Compare sizes first: a file that was cut has another checksum too.
    const Json& saved_bytes = entry["bytes"];
    const Json& saved_crc = entry["crc32"];
    if (saved_bytes != bytes)
        return concat(path, ": is ", bytes, " bytes, the manifest says ", saved_bytes.dump());
    if (saved_crc != crc)
        return concat(path, ": its checksum is ", crc, ", the manifest says ", saved_crc.dump());
    return "";
}

// The rank that verifies and reads each file of a checkpoint. Returns [file].
inline std::vector<int> choose_readers(const Json& manifest, int ranks) {
    std::vector<int> readers;
    // A manifest of another format may list none.
    size_t files = manifest.value("files", Json()).size();
    for (size_t i = 0; i < files; i++)
        readers.push_back(int(i % size_t(ranks)));
    return readers;
}

// Verify a checkpoint; each rank takes every N-th file. Returns "" and fills *manifest, or returns
// why the checkpoint is not whole.
inline std::string verify_checkpoint(const Comm& world, const std::string& folder, Json* manifest) {
    std::string wrong = read_manifest(folder, manifest);

    // Do not look at files of a format that this program does not know.
    size_t count = 0;
    if (wrong.empty() && manifest->value("format", Json()) == CHECKPOINT_FORMAT)
        count = (*manifest)["files"].size();
    for (size_t i = world.rank; wrong.empty() && i < count; i += world.size)
        wrong = verify_file(folder, (*manifest)["files"][i]);
    return first_error(world, wrong);
}

// Check that a checkpoint's adapters were trained beside this base. Older manifests do not say.
inline std::string check_base(const Json& own, const Json& manifest, const std::string& folder) {
    if (own.is_null() || !manifest.contains("base"))
        return "";
    const Json& saved = manifest["base"];
    if (saved["bytes"] == own["bytes"] && saved["crc32"] == own["crc32"])
        return "";

    // Name both bases: a user finds the right folder by its size, if not by its name.
    auto text = [](const Json& b) {
        return concat(json_word(b["name"]), " of ", b["bytes"].dump(), " bytes, CRC-32 ",
                      b["crc32"].dump());
    };
    return concat(folder, ": its adapters were trained beside ", text(saved), "; this run has ",
                  text(own), ": give the first one");
}

// Check that a checkpoint's adapters are this run's: one that this run lacks would be lost, and one
// that the checkpoint lacks would start untrained.
inline std::string check_adapters(const Model& model, const Json& manifest,
                                  const std::string& folder) {
    std::set<std::string> saved;
    const std::string prefix = "param.";
    for (const Json& file : manifest["files"])
        for (auto& [name, range] : file["tensors"].items()) {
            bool adapter = name.find(".lora_") != std::string::npos;
            if (adapter && name.starts_with(prefix))
                saved.insert(name.substr(prefix.size()));
        }

    // List those of this run.
    std::set<std::string> own;
    for (const Parameter& p : model.parameters)
        if (is_adapter(model, p))
            own.insert(p.name);

    // Find those that only one of them has. Leave a checkpoint or a run without any to the checks
    // of their tensors.
    std::vector<std::string> either;
    std::ranges::set_symmetric_difference(saved, own, std::back_inserter(either));
    if (saved.empty() || own.empty() || either.empty()) return "";

    // Name the first one.
    std::string name = either[0];
    bool lost = saved.count(name);
    const char* where = lost ? " is in it, and not in this run" : " is in this run, and not in it";
    return concat(folder, ": ", name, where,
                  ": give the --lora-layers and --lora-targets that it was trained with");
}

// The model of a manifest. Older programs named its layers without a window by the last of the
// first ones, or by a period.
inline Json saved_model(const Json& manifest, size_t L) {
    Json model = manifest["model"];
    auto number = [&](const char* key) {
        return check_integer(model, key, 0, L).empty() ? model[key].get<size_t>() : 0;
    };
    size_t last = number("window_from"), every = number("full_every");
    for (size_t layer = 1; layer <= L; layer++)
        if (layer <= last || (every && layer % every == 0))
            model["full_layers"].push_back(layer);
    return model;
}

// Check that a whole checkpoint fits this run: format, model, optimizer.
template <typename T, typename S>
std::string check_identity(const Trainer<T, S>& t, const Json& manifest, const std::string& folder,
                           bool moments) {
    // Compare the general before the particular: the first difference explains the later ones.
    Json format = manifest.value("format", Json());
    if (format != CHECKPOINT_FORMAT)
        return concat(folder, ": is of format ", json_word(format), ", this program reads ",
                      CHECKPOINT_FORMAT);

    // Name the first field that differs, with both values.
    Json own = model_identity(t.model.shape);
    const Json defaults = model_identity(Shape());
    Json of = saved_model(manifest, t.model.shape.L);
    for (auto& [key, value] : own.items()) {
        Json absent = is_newer_field(key) ? defaults[key] : Json();
        Json saved = of.value(key, absent);
        if (saved != value)
            return concat(folder, ": is of another model: its ", key, " is ", json_word(saved),
                          ", this run's ", value.dump(),
                          ": leave the model's flags out, or give its own --out");
    }

    // A run without moments may continue from the weights of any optimizer.
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
    Json entries;                  // of the manifest
    std::vector<int> readers;      // [entry]: the rank of the world that reads it
    std::vector<SafeTensors> open; // [entry]
    // The model as each rank of the saving run had it: its cuts, its padded vocabulary.
    std::map<std::array<int, 3>, Model> cut = {}; // [{tp, ep, ep_rank}]

    std::string path(size_t i) const {
        return folder + "/" + entries[i]["file"].get<std::string>();
    }
};

// A run of elements that are contiguous both in a file's tensor and in the whole parameter.
struct Piece {
    size_t file, at; // `at`: index of its first element in the tensor
    size_t global, count;
};

// Open file i and check its state tensors: the manifest and the file's own header must agree on
// their types and sizes.
inline std::string open_saved_file(SavedFiles& files, size_t i,
                                   const std::vector<StateTensor>& tensors, Type type) {
    // Ignore tensors that the manifest does not list.
    std::string path = files.path(i);
    const Json& listed = files.entries[i]["tensors"];
    std::string wrong = safetensors_open(&files.open[i], path);
    for (const StateTensor& s : tensors) {
        if (!wrong.empty() || !listed.contains(s.name))
            continue;

        // Compare the tensor with the manifest's list.
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

// Append to `pieces` what file i holds of a state tensor, by its manifest.
inline std::string file_pieces(SavedFiles& files, size_t i, const StateTensor& s,
                               std::vector<Piece>* pieces) {
    const Json& entry = files.entries[i];
    if (!entry["tensors"].contains(s.name))
        return "";

    // Rebuild the parameter with the cut of the ranks that wrote the file. Whole experts lie in it
    // as without tensor parallelism.
    bool whole = entry.contains("etp") && s.p->stack > 1;
    int tp = whole ? 1 : entry["tp"].get<int>();
    int tp_rank = whole ? 0 : entry["tp_rank"].get<int>();
    int ep = entry.value("ep", 1);
    int ep_rank = entry.value("ep_rank", 0);
    Layout writers;
    writers.tp.size = tp;
    writers.dp = {ep, ep_rank};
    writers.ep = ep;
    writers.muon = files.model.muon;
    Model& cut = files.cut[{tp, ep, ep_rank}];
    if (cut.parameters.empty())
        cut = make_model(files.model.shape, writers);
    size_t number = s.own ? size_t(s.data.micro) : size_t(s.p - &files.model.parameters[0]);
    Parameter saved = cut.parameters[number];
    if (s.own) saved = neurons_as_parameter(saved);

    // Cut the file's range [first, first + count) into runs of the whole.
    const Json& range = entry["tensors"][s.name];
    size_t first = range[0].get<size_t>();
    size_t count = range[1].get<size_t>();
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

// Find a tensor's pieces in all files, in the order of the whole. Each element must occur once.
inline std::string find_pieces(SavedFiles& files, const StateTensor& s,
                               std::vector<Piece>* pieces) {
    pieces->clear();
    for (size_t i = 0; i < files.open.size(); i++)
        LLMC_TRY(file_pieces(files, i, s, pieces));
    std::ranges::sort(*pieces, {}, &Piece::global);

    // Walk over the whole parameter: no gap, no overlap, nothing beyond its end.
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
        size_t twice = std::min(end, reached);
        if (piece.global < reached)
            return elements(piece.global, twice, " are there twice");
        reached = end;
    }
    if (reached > all)
        return elements(all, reached, " are vocabulary padding");
    return reached < all ? elements(reached, all, " are in no file") : "";
}

// Assemble a whole tensor from what the files' readers send. Returns its values, or nothing on a
// rank whose stage does not need it. All ranks call: a rank may read what it does not need itself.
template <typename T, typename S>
std::vector<acc_t<T>> collect_tensor(const Trainer<T, S>& t, SavedFiles& files, OneReader& reader,
                                     const StateTensor& s) {
    typedef acc_t<T> A;
    auto needs = stages_with(t.layout, t.model, s.p->bucket);

    // Look up where each piece of a file belongs in the whole.
    bool mine = needs(t.layout.pp.rank);
    std::vector<Piece> pieces;
    find_pieces(files, s, &pieces);
    std::vector<A> values(mine ? s.p->elements() : 0, A(0)); // padding stays 0
    std::vector<A> part;
    for (size_t i = 0; i < files.open.size(); i++) {
        const Json& listed = files.entries[i]["tensors"];
        bool reads = files.readers[i] == t.comms.world.rank;
        bool calls = mine || reads;
        if (!calls || !listed.contains(s.name))
            continue;

        // Receive what file i holds of the tensor, or read it as the file's reader.
        part.resize(listed[s.name][1].get<size_t>());
        size_t bytes = part.size() * sizeof(A);
        unsigned char* to = reinterpret_cast<unsigned char*>(part.data());
        if (reads) {
            // Copy by bytes: in the mapped file the tensor may lie at any address.
            const SafeTensor* x = safetensors_find(files.open[i], s.name);
            memcpy(to, x->data, bytes);
        }
        bring(reader, to, bytes, files.readers[i], needs);

        // Put each piece where it belongs in the whole.
        for (const Piece& piece : pieces) {
            if (!mine || piece.file != i) continue;
            const A* from = part.data() + piece.at;
            std::copy_n(from, piece.count, values.data() + piece.global);
        }
    }
    return values;
}

// Keep this rank's part of a whole tensor. Ranks assemble one parameter at a time, so the host's
// peak is one parameter and what one file holds of it.
template <typename T, typename S>
void take_tensor(Trainer<T, S>& t, const StateTensor& s, const std::vector<acc_t<T>>& values) {
    typedef acc_t<T> A;
    if (!is_in_acc(s.data.kind))
        return set_weight(t, *s.p, values.data());

    // Keep this rank's range of a moment; set_weight() does the same for a weight.
    KeptRange range = kept_range(t, s.data, *s.p);
    std::vector<A> kept(range.count);
    for_each_kept(t.layout, *s.p, range, [&](size_t at, size_t global, size_t count) {
        std::copy_n(values.data() + global, count, kept.data() + at);
    });
    write_state(t, s.data, *s.p, range, kept.data());
}

// Whether a checkpoint holds means of weights.
inline bool saves_average(const Json& entries) {
    for (const Json& entry : entries)
        for (auto& [name, range] : entry["tensors"].items())
            if (name.starts_with("ema.")) return true;
    return false;
}

// Start the mean of weights at the weights. All ranks call.
template <typename T, typename S>
void start_average(Trainer<T, S>& t) {
    const Plan& plan = t.plans[0];
    if (plan.mode != Mode::TRAIN || !plan.ema) return;

    // A master says more of a weight than the weight itself.
    bool narrow = sizeof(T) < sizeof(acc_t<T>);
    bool masters = narrow && plan.masters != Masters::NONE;
    Kind kind = masters ? Kind::MASTER : Kind::WEIGHT;

    // ZeRO-1 and 2 keep whole weights, and a shard of their mean.
    for (const Parameter& p : t.model.parameters) {
        Data mean = {Kind::EMA, p.bucket};
        KeptRange range = kept_range(t, mean, p);
        if (!t.model.buckets[p.bucket].trainable || !range.count)
            continue;
        Data weight = {kind, p.bucket};
        KeptRange from = kept_range(t, weight, p);
        size_t at = from.at + (range.first - from.first);
        auto values = read_numbers(t, weight, p, {range.first, range.count, at});
        write_state(t, mean, p, range, values.data());
    }
}

// Read all state from a verified checkpoint, each file by its reader. All ranks first check all
// that they need: a checkpoint that does not fit changes nothing. *bytes: what this rank read.
template <typename T, typename S>
std::string read_files(Trainer<T, S>& t, const std::string& folder, const Json& entries,
                       const std::vector<int>& readers, std::vector<StateTensor> tensors,
                       size_t* bytes) {
    std::vector<SafeTensors> closed(entries.size());
    SavedFiles files = {t.model, folder, entries, readers, closed};
    const Comm& world = t.comms.world;

    // Leave out what the saving run did not have.
    bool averaged = saves_average(entries);
    if (!averaged) // a run that had none: load_verified() starts it
        std::erase_if(tensors, [](const StateTensor& s) { return s.data.kind == Kind::EMA; });

    // Check the cut. A tp size that does not divide this model would leave ranks without a head.
    std::string wrong;
    bool lacks = t.takes_average && !averaged;
    if (lacks)
        wrong = concat(folder, ": holds no mean of weights: its run had no --ema");
    Shape shape = t.model.shape;
    for (const Json& entry : entries) {
        shape.experts.whole = entry.contains("etp");
        if (wrong.empty() && !tp_divides(shape, entry["tp"].get<size_t>()))
            wrong = concat(folder, ": manifest.json says that ", entry["tp"].dump(),
                           " tensor-parallel ranks wrote it, which cannot share this model's "
                           "heads");
    }

    // An ep size that does not divide the experts would leave some of them on no rank.
    size_t experts = t.model.shape.experts.E;
    for (const Json& entry : entries)
        if (wrong.empty() && experts && experts % entry.value("ep", size_t(1)))
            wrong = concat(folder, ": manifest.json says that ", entry["ep"].dump(),
                           " expert-parallel ranks wrote it, which cannot share this model's "
                           "experts");

    // Open this rank's files, and look for every element.
    Type type = type_of<acc_t<T>>();
    for (size_t i = 0; wrong.empty() && i < entries.size(); i++)
        if (readers[i] == world.rank)
            wrong = open_saved_file(files, i, tensors, type);
    std::vector<Piece> pieces;
    for (size_t i = 0; wrong.empty() && i < tensors.size(); i++)
        wrong = find_pieces(files, tensors[i], &pieces);
    wrong = first_error(world, wrong);

    // Say what to do about it.
    if (lacks)
        wrong += "; leave --use-ema out";
    else if (!wrong.empty())
        wrong += "; to go on from the checkpoint before, remove " + folder;

    // Load one tensor after the other, in the same order on all ranks.
    OneReader reader = make_one_reader(world, t.layout);
    for (size_t i = 0; wrong.empty() && i < tensors.size(); i++) {
        std::vector<acc_t<T>> values = collect_tensor(t, files, reader, tensors[i]);
        if (!values.empty())
            take_tensor(t, tensors[i], values);
    }
    for (SafeTensors& file : files.open)
        safetensors_close(&file);
    *bytes = reader.bytes;
    return wrong;
}

// Compare the weights with the sums that were saved beside them, if this run stores weights in the
// same type. Older manifests have no sums.
template <typename T, typename S>
std::string check_sums(const Trainer<T, S>& t, const std::string& folder, const Json& manifest) {
    // All ranks have read the same manifest, so either all of them call weight_sums_json or none.
    bool alike = manifest["precision"] == type_name(type_of<T>()) &&
                 manifest.value("rounding", "") == rounding_of(t);
    if (!manifest.contains("weight_sums") || !alike || t.takes_average)
        return "";

    // Name the first tensor that differs.
    Json saved = manifest["weight_sums"];
    Json own = weight_sums_json(t);
    for (auto& [name, sum] : own.items())
        if (saved.contains(name) && saved[name] != sum)
            return concat(folder, ": tensor ", name, " is not what was saved: its sum is ",
                          sum.dump(), ", the manifest says ", saved[name].dump(),
                          ": suspect this machine's memory, and try again");
    return "";
}

// The steps of the checkpoints as the first rank sees them, newest first. All ranks call.
inline std::vector<int64_t> first_ranks_steps(const Comm& world, const std::string& out) {
    std::vector<int64_t> steps;
    if (world.rank == 0) steps = checkpoint_steps(out);

    // A network's folder may look different to each rank: all must try the same steps.
    int64_t count = int64_t(steps.size());
    broadcast(world, &count, 1, 0, Cpu{});
    steps.resize(count);
    broadcast(world, steps.data(), steps.size(), 0, Cpu{});
    return steps;
}

// Take over the counters of the run that continues: into *info, and the optimizer's on the device.
template <typename T, typename S>
void take_counters(Trainer<T, S>& t, CheckpointInfo* info, const Json& m) {
    info->step = m["step"].get<int64_t>();
    info->cursor = m["cursor"].get<uint64_t>();
    info->seed = m["seed"].get<uint64_t>();
    info->config = m.value("config", Json::object());
    info->rollouts = m.value("rollouts", Json());
    info->data = m.value("data", Json());
    if (!info->data.is_object()) info->data = Json::object();

    // Take the best step, if a best checkpoint is kept.
    if (m.contains("best_step")) {
        info->best_step = m["best_step"].get<int64_t>();
        info->best_loss = m["best_loss"].get<double>();
    }

    // Older manifests do not count tokens. All batches of those runs had the same size.
    Json batch = info->config.value("batch-tokens", Json(0));
    int64_t alike = batch.is_number_integer() ? info->step * batch.get<int64_t>() : 0;
    info->tokens = m.contains("tokens") ? m["tokens"].get<int64_t>() : alike;

    // Load the FP8 scales in an evaluation too: its matrix products need them.
    std::vector<unsigned char> bytes;
    Fp8History h = fp8_on_host(t, &bytes);
    if (h.slots && has_fp8_history(t, m)) {
        take_fp8_history(h, t.model.shape.fp8.rule, m["fp8"]);
        copy_in(fp8_history(t).amax, bytes.data(), bytes.size(), t.ctx.where);
        wait_for(t.ctx.where);
    }

    // Load the optimizer's step, and the loss scale.
    StepScale* home = address<StepScale>(t, {Kind::SCALE});
    if (!home) return; // a run that only evaluates has none

    // Adam's bias correction needs the step; the rest of the struct keeps what this run gave it.
    StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
    scale.step = m["optimizer_step"].get<int64_t>();

    // The loss scale goes on where it was, unless the command line fixes it.
    const LossScaling& rule = t.hyper.loss_scaling;
    if (rule.on && m.contains("loss_scale")) {
        scale.loss = loss_scale_of(m["loss_scale"]);
        if (!rule.dynamic) scale.loss.now = rule.start;
    }
    copy_in(home, &scale, sizeof(scale), t.ctx.where);
    wait_for(t.ctx.where);
}

// Note what may make this run differ from an uninterrupted one. Notes are no errors: the loss curve
// is the same within rounding.
template <typename T, typename S>
void note_differences(const Trainer<T, S>& t, const Json& m, std::vector<std::string>* notes) {
    int threads = threads_here(t.ctx.where);
    std::string cpu = printable(m["cpu"].get<std::string>());
    if (m["threads"] != threads || cpu != cpu_name())
        notes->push_back(concat("the checkpoint was made by ", m["threads"].dump(), " threads on ",
                                cpu, "; this run has ", threads, " on ", cpu_name(),
                                ": bits may differ from an uninterrupted run"));

    // Name another type: weights are rounded to this run's.
    std::string precision = m["precision"].get<std::string>();
    if (precision != type_name(type_of<T>()))
        notes->push_back("the checkpoint was trained in " + printable(precision));

    // Older manifests do not say how moments were stored: they were floats.
    Json states = m.value("states", Json("float"));
    const char* own = states_name(t.plans[0].states);
    if (keeps_any(t, Kind::STATE) && states != own)
        notes->push_back(concat("the checkpoint's moments were ", json_word(states),
                                ", this run's are ", own));
    bool cut = m["files"][0]["tp"] != t.layout.tp.size;
    if (states == "8bit" && states == own && cut && keeps_any(t, Kind::STATE))
        notes->push_back("tensor-parallel ranks cut matrices in other blocks than those that "
                         "saved: 8-bit moments are rounded anew");

    // Note scales that start again.
    if (t.hyper.loss_scaling.on && !m.contains("loss_scale"))
        notes->push_back(concat("the checkpoint has no loss scale: it begins at ",
                                t.hyper.loss_scaling.start));
    if (fp8_slots(t.model) && !has_fp8_history(t, m))
        notes->push_back("the checkpoint has no scales of --fp8 delayed: they begin at 1");
}

// Load a whole checkpoint, or say why it does not fit.
template <typename T, typename S>
std::string load_verified(Trainer<T, S>& t, CheckpointInfo* info, const std::string& folder,
                          const Json& manifest, const std::vector<int>& readers,
                          std::vector<std::string>* notes) {
    // Compare identities; a run that only evaluates needs no moments.
    std::string wrong = check_identity(t, manifest, folder, keeps_any(t, Kind::STATE));
    if (wrong.empty())
        wrong = check_base(info->base, manifest, folder);
    if (wrong.empty())
        wrong = check_adapters(t.model, manifest, folder);
    LLMC_TRY(first_error(t.comms.world, wrong));

    // Read the tensors, and compare their sums with the manifest's.
    LLMC_TRY(read_files(t, folder, manifest["files"], readers, state_tensors(t),
                        &info->bytes_read));
    LLMC_TRY(check_sums(t, folder, manifest));

    // Go on where the run stood.
    if (!saves_average(manifest["files"])) start_average(t);
    take_counters(t, info, manifest);
    note_differences(t, manifest, notes);
    return "";
}

// Load the weights alone of a checkpoint, frozen ones too, as those of a model's folder. Adapters
// beside them keep their values.
template <typename T, typename S>
std::string checkpoint_load_weights(Trainer<T, S>& t, const std::string& folder) {
    const Comm& world = t.comms.world;
    Json manifest;
    LLMC_TRY(verify_checkpoint(world, folder, &manifest));
    LLMC_TRY(first_error(world, check_identity(t, manifest, folder, false)));

    const char* read = t.takes_average ? "ema." : "param.";
    std::vector<StateTensor> tensors;
    for (const Parameter& p : t.model.parameters)
        if (!is_adapter(t.model, p))
            tensors.push_back({read + p.name, {Kind::WEIGHT, p.bucket}, &p});
    size_t bytes = 0;
    std::vector<int> readers = choose_readers(manifest, world.size);
    return read_files(t, folder, manifest["files"], readers, tensors, &bytes);
}

// Load the newest whole checkpoint in `out`, or the one of step `only`. Broken checkpoints are
// skipped and named in `notes`. A whole one that does not fit is an error: silently falling back to
// an older one would lose a run.
template <typename T, typename S>
std::string checkpoint_load(Trainer<T, S>& t, CheckpointInfo* info, const std::string& out,
                            std::vector<std::string>* notes, int64_t only = -1) {
    // Try the newest first; fall back only past broken ones.
    const Comm& world = t.comms.world;
    for (int64_t step : first_ranks_steps(world, out)) {
        if (only >= 0 && step != only) continue;
        std::string folder = out + "/" + step_folder(step);
        Json manifest;
        std::string wrong = verify_checkpoint(world, folder, &manifest);
        if (!wrong.empty()) {
            notes->push_back(wrong + ": skipped");
            info->broken.push_back(step);
            continue;
        }

        std::vector<int> readers = choose_readers(manifest, world.size);
        return load_verified(t, info, folder, manifest, readers, notes);
    }

    // A folder with broken checkpoints is still a run's: without --resume it would be refused.
    std::string none = out + ": holds no whole checkpoint";
    if (only >= 0) none += concat(" of step ", only);
    if (notes->empty())
        return none + ": start without --resume, or give the --out of the run to go on with";
    return none + ": the broken ones are named above: put back a copy of one, or begin anew in "
                  "another --out";
}

} // namespace llmc
