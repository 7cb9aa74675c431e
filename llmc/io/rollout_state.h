// rollout_state.h - a step's sampled answers, and as JSON while they have updates left
//   With --updates N the same answers are trained on in N steps. The weights that sampled them are
//   gone after the first of these, so a checkpoint between two of them holds the answers, with
//   log p under the policy that sampled and under the reference. A resumed run then goes on to the
//   same bits. After the last update the answers are spent, and a checkpoint has none.
//   Floats are stored as their bits, as in fp8_history_json(). A manifest is believed only field by
//   field (manifest.h); whether the answers fit the run is checked when a step wants them.
//   Cost: some 10 bytes a number, mostly 2 S T numbers for S sequences of T tokens.
#pragma once
#include <string>
#include <vector>
#include "../ops/types.h"
#include "json.h"

namespace llmc {

// A prompt with an answer that can be verified.
struct Exercise {
    std::vector<int> prompt; // its tokens
    std::string answer;      // the right answer, or a pattern of it
    Json line;               // the whole line, where a program gives the reward; else null
};

// The answers sampled for a step, with their prompts and advantages; the same on all ranks.
struct Rollouts {
    uint64_t first = 0;                        // number of the first sample
    std::vector<std::vector<int>> tokens = {}; // of each window; only its first T + 1 are used
    std::vector<size_t> prompts = {};          // length of each prompt
    std::vector<float> advantages = {};
    // Statistics for the log.
    double reward = 0, length = 0; // means
    double cut = 0, equal = 0;     // shares: answers that did not end, groups of equal rewards
    // Log p of the answers' tokens (answers,T): of the policy that sampled, with several updates,
    // and of the starting weights, with --beta.
    std::vector<float> old = {}, reference = {};
    int updates = 0; // steps that have trained on these answers, the current one included
};

// The bits of floats, and the way back.
inline Json float_bits(const std::vector<float>& values) {
    Json bits = Json::array();
    for (float value : values)
        bits.push_back(bits_as<uint32_t>(value));
    return bits;
}
inline std::vector<float> floats_of(const Json& bits) {
    std::vector<float> values;
    for (const Json& word : bits) values.push_back(bits_as<float>(word.get<uint32_t>()));
    return values;
}

// The answers as JSON, if they have updates left of `updates`; else null.
inline Json rollouts_json(const Rollouts& r, int updates) {
    if (r.updates == 0 || r.updates >= updates)
        return {};
    return {{"tokens", r.tokens},
            {"prompts", r.prompts},
            {"advantages", float_bits(r.advantages)},
            {"old", float_bits(r.old)},
            {"reference", float_bits(r.reference)},
            {"means", {r.reward, r.length, r.cut, r.equal}},
            {"updates", r.updates}};
}

// Whether a JSON value is a list of whole numbers from 0 to `most`.
inline bool is_list_to(const Json& list, uint64_t most) {
    if (!list.is_array()) return false;
    for (const Json& number : list)
        if (!number.is_number_unsigned() || number > most)
            return false;
    return true;
}

// Check the form of such JSON. Returns "" or what is wrong.
inline std::string check_rollouts_json(const Json& j) {
    const std::string wrong = "rollouts is no list of answers with their numbers";
    typedef Json::value_t Type;
    if (!j.is_object()) return wrong;
    for (const char* key : {"tokens", "prompts", "advantages", "old", "reference", "means"})
        if (!check_type(j, key, Type::array).empty())
            return wrong;

    // Each list of numbers, and as many prompts and advantages as answers.
    for (const char* key : {"prompts", "advantages", "old", "reference"})
        if (!is_list_to(j[key], UINT32_MAX)) return wrong;
    size_t answers = j["tokens"].size();
    for (const char* key : {"prompts", "advantages"})
        if (j[key].size() != answers)
            return wrong;

    // A prompt has a token at least, and lies within its window.
    for (size_t i = 0; i < answers; i++) {
        size_t prompt = j["prompts"][i].get<size_t>();
        const Json& tokens = j["tokens"][i];
        if (!is_list_to(tokens, INT32_MAX) || prompt == 0 || prompt > tokens.size())
            return wrong;
    }

    // The means of the log's line, and the count of updates.
    bool means = j["means"].size() == 4;
    for (const Json& mean : j["means"]) means = means && mean.is_number();
    return means ? check_integer(j, "updates", 1, 10000) : wrong;
}

// The answers of JSON whose form has been checked; none of null.
inline Rollouts rollouts_of(const Json& j) {
    Rollouts r;
    if (j.is_null()) return r;
    r.tokens = j["tokens"].get<std::vector<std::vector<int>>>();
    r.prompts = j["prompts"].get<std::vector<size_t>>();
    r.advantages = floats_of(j["advantages"]);
    r.old = floats_of(j["old"]);
    r.reference = floats_of(j["reference"]);

    // The means stand in the order in which they were written.
    auto means = j["means"].get<std::vector<double>>();
    r.reward = means[0];
    r.length = means[1];
    r.cut = means[2];
    r.equal = means[3];
    r.updates = j["updates"].get<int>();
    return r;
}

} // namespace llmc
