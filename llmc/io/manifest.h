// manifest.h - a checkpoint's manifest.json: read, and believed only field by field
//   Its checksum detects damage, not malice: anyone can compute one. So every number is checked
//   against a range, a file must have the name of a rank's file and lie in the checkpoint's own
//   folder, and a cut of the model must be one that the model allows.
//   Every function that returns a text returns "" or what is wrong.
#pragma once
#include <climits>
#include "../ops/fp8_delayed.cuh"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "files.h"
#include "json.h"
#include "rollout_state.h"

namespace llmc {

// Raise this when an old program would misread a new folder, or a new program an old folder.
constexpr int CHECKPOINT_FORMAT = 2;

// Whether a name has the form of a rank's file, rank_00003.safetensors. No other file is opened,
// because a path could lead out of the folder.
inline bool is_rank_file(const std::string& name) {
    // Write the name back and compare: rank_3.safetensors is not one of our files.
    int rank = -1;
    if (sscanf(name.c_str(), "rank_%9d", &rank) != 1 || rank < 0)
        return false;
    return name == formatted("rank_%05d.safetensors", rank);
}

// Check a file's entry: its name, its size and checksum, the cut of the model, and its ranges.
inline std::string check_file_entry(const Json& f) {
    typedef Json::value_t Type;
    if (!f.is_object())
        return "an entry of files is no object";
    LLMC_TRY(check_type(f, "file", Type::string));
    LLMC_TRY(check_type(f, "tensors", Type::object));
    if (!is_rank_file(f["file"].get<std::string>()))
        return "file is " + json_word(f["file"]) + ", which is no name of a rank's file";

    // A million ranks is beyond any machine; config.h allows no more either. Entries have ep and
    // ep_rank only if the ranks shared experts out, etp if experts were whole.
    LLMC_TRY(check_integers(f, {{"bytes"},
                                {"crc32", 0, UINT32_MAX},
                                {"tp", 1, 1000000},
                                {"etp", 1, 1, true},
                                {"ep", 1, 1000000, true}}));
    for (std::string axis : {"tp", "ep"})
        if (std::string rank = axis + "_rank"; f.contains(axis))
            LLMC_TRY(check_integer(f, rank.c_str(), 0, f[axis].get<uint64_t>() - 1));
    if (f.contains("ep_rank") && !f.contains("ep"))
        return "ep is missing";

    // Check only the form of each range here; the load checks that it fits its parameter.
    for (const auto& [name, range] : f["tensors"].items()) {
        bool pair = range.is_array() && range.size() == 2;
        pair = pair && range[0].is_number_unsigned();
        pair = pair && range[1].is_number_unsigned();
        if (!pair)
            return "the range of tensor " + printable(name) + " is not two positions";
    }
    return "";
}

// fp16's loss scale, and how far its rule has counted, as JSON.
inline Json loss_scale_json(const LossScale& s) {
    return {{"scale", s.now},
            {"clean", s.clean},
            {"spent", s.spent},
            {"skipped", s.skipped}};
}
// The way back. check_loss_scale() has checked the fields.
inline LossScale loss_scale_of(const Json& j) {
    return {j["scale"].get<float>(),
            j["clean"].get<int>(),
            j["spent"].get<int>(),
            j["skipped"].get<int>()};
}
inline std::string check_loss_scale(const Json& j) {
    if (!j.is_object())
        return "loss_scale is no object";
    LLMC_TRY(check_integers(j, {{"clean", 0, INT_MAX},
                                {"spent", 0, INT_MAX},
                                {"skipped", 0, INT_MAX}}));
    bool scale = j.contains("scale") && j["scale"].is_number() && j["scale"] > 0.0;
    return scale ? "" : "loss_scale has no scale, or one that is not above 0";
}

// The state of delayed scaling, slot by slot: the scale, and the maxima from newest to oldest. All
// are stored as the bits of floats, since some may be inf or NaN. `h` points to host memory.
inline Json fp8_history_json(const Fp8History& h, const Fp8Rule& rule) {
    Json scales = Json::array();
    Json maxima = scales;
    uint32_t past = uint32_t(rule.length - 1);
    for (size_t slot = 0; slot < h.slots; slot++) {
        // Walk back over the ring, no further than steps have filled it.
        std::vector<uint32_t> newest;
        uint32_t rolled = h.rolled[slot];
        const float* ring = h.past + slot * past; // (past)
        for (uint32_t i = 1; i <= std::min(rolled, past); i++) {
            newest.push_back(bits_as<uint32_t>(ring[(rolled - i) % past]));
        }
        scales.push_back(bits_as<uint32_t>(h.scale[slot]));
        maxima.push_back(newest);
    }
    return {{"scales", scales}, {"maxima", maxima}};
}

// Take the state back. If the saved history is longer than this run's, keep the newest maxima.
inline void take_fp8_history(const Fp8History& h, const Fp8Rule& rule, const Json& j) {
    uint32_t past = uint32_t(rule.length - 1);
    for (size_t slot = 0; slot < h.slots; slot++) {
        auto scale = j["scales"][slot].get<uint32_t>();
        auto newest = j["maxima"][slot].get<std::vector<uint32_t>>();
        uint32_t n = std::min(uint32_t(newest.size()), past);

        // A step begins without a maximum of its own.
        h.amax[slot] = 0;
        h.scale[slot] = bits_as<float>(scale);
        h.rolled[slot] = n;

        // Fill the ring from its start, oldest first; the next maximum goes after the newest.
        float* ring = h.past + slot * past; // (past)
        for (uint32_t i = 0; i < n; i++)
            ring[n - 1 - i] = bits_as<float>(newest[i]);
    }
}

// Check the form only. Words may be the bits of any float; the number of slots is
// checked by has_fp8_history() (checkpoint.h).
inline std::string check_fp8_history(const Json& j) {
    // Each slot has one scale, and a list of maxima of any length.
    bool good = j.is_object() && j.contains("scales") && j.contains("maxima");
    good = good && is_list_to(j["scales"], UINT32_MAX) && j["maxima"].is_array();
    good = good && j["maxima"].size() == j["scales"].size();
    if (good)
        for (const Json& maxima : j["maxima"]) good = good && is_list_to(maxima, UINT32_MAX);
    return good ? "" : "fp8 is no list of scales with a list of maxima for each";
}

// Check the fields that not every manifest has: older programs wrote no tokens, and best_step is
// there only if a best checkpoint is kept.
inline std::string check_optional(const Json& m, uint64_t most_steps) {
    LLMC_TRY(check_integers(m, {{"tokens", 0, INT64_MAX / 2, true},
                                {"best_step", 0, most_steps, true}}));
    bool loss = m.contains("best_loss") && m["best_loss"].is_number();
    if (m.contains("best_step") && !loss)
        return "best_loss is missing, or no number";
    if (m.contains("loss_scale"))
        LLMC_TRY(check_loss_scale(m["loss_scale"]));
    if (m.contains("fp8"))
        LLMC_TRY(check_fp8_history(m["fp8"]));

    // The base of adapters, by size and checksum. The load checks whether it is this run's base. A
    // manifest without one comes from a run without adapters, or from an older program.
    const Json base = m.value("base", Json());
    bool named = base.is_null() || (base.is_object() && base.contains("name"));
    if (!named)
        return "base is " + json_word(base) + ", which has no name";
    if (!base.is_null())
        LLMC_TRY(check_integers(base, {{"bytes"}, {"crc32"}}));
    if (m.contains("rollouts"))
        LLMC_TRY(check_rollouts_json(m["rollouts"]));

    // Check the form of the weights' sums; check_sums() (checkpoint_load.h) compares the values.
    bool sums = !m.contains("weight_sums") || m["weight_sums"].is_object();
    if (!sums)
        return "weight_sums is " + json_word(m["weight_sums"]);
    if (m.contains("rounding"))
        LLMC_TRY(check_type(m, "rounding", Json::value_t::string));

    // Check only that flags are an object; each is read later, like one of the command line.
    bool flags = !m.contains("config") || m["config"].is_object();
    return flags ? "" : "config is " + json_word(m["config"]);
}

// Check every field that a load uses.
inline std::string check_manifest(const Json& m) {
    typedef Json::value_t Type;
    const uint64_t most_steps = 1000000000000; // as --steps allows

    // Check the counters.
    LLMC_TRY(check_integers(m, {{"step", 0, most_steps},
                                {"optimizer_step", 0, most_steps},
                                {"cursor"},
                                {"seed"},
                                {"threads", 1, 1000000}}));

    // Check the texts and lists.
    for (const char* key : {"optimizer", "precision", "cpu"})
        LLMC_TRY(check_type(m, key, Type::string));
    LLMC_TRY(check_type(m, "model", Type::object));
    LLMC_TRY(check_type(m, "files", Type::array));
    if (m["files"].empty())
        return "it names no files";
    LLMC_TRY(check_optional(m, most_steps));

    // Check the files, each on its own.
    for (const Json& f : m["files"])
        LLMC_TRY(check_file_entry(f));
    return "";
}

// Read a manifest, and check that it is whole. A manifest of another format comes back unchecked,
// because the caller reports the format.
inline std::string read_manifest(const std::string& folder, Json* manifest) {
    std::string path = folder + "/manifest.json", text;
    if (!file_type(path))
        return folder + ": has no manifest.json";
    const std::string broken = folder + ": manifest.json is broken";

    // Check the checksum before believing any field.
    std::string wrong = read_json(path, manifest);
    if (!wrong.empty())
        return broken + " (" + wrong + ")";
    const Json& m = *manifest;
    if (!m.contains("crc32") || m["crc32"] != manifest_crc(m))
        return broken + ": its checksum is another";
    if (!m.contains("format") || m["format"] != CHECKPOINT_FORMAT)
        return "";
    wrong = check_manifest(m);
    return wrong.empty() ? "" : broken + ": " + wrong;
}

// The folder of the run that saved a checkpoint, as its manifest has it; "": it has none.
inline std::string folder_of_run(const Json& m) {
    Json flags = m.value("config", Json());
    Json out = flags.is_object() ? flags.value("out", Json()) : flags;
    return out.is_string() ? out.get<std::string>() : "";
}

} // namespace llmc
