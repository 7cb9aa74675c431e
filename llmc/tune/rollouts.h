// rollouts.h - prompts with a verifiable answer, and the windows of answers that a step samples
//   Lines    {"prompt": "...", "answer": "..."}. The prompt is the user's text, written by the chat
//            format, or a list of messages that ends with the user's. The answer is a text or a
//            number. With --reward command: a line needs no answer, and its program sees the line.
//   Order    Exercise i of a run follows a permutation keyed by seed and epoch, as windows do.
//   Window   T tokens: a prompt, the model's answer, and padding. Targets are the answer's tokens
//            with the token that ends it, which the model chose like all others.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../io/chat.h"
#include "../io/config_check.h"
#include "../io/dataloader.h"
#include "../io/file_kind.h"
#include "../io/files.h"
#include "../io/json.h"
#include "../io/rollout_state.h"
#include "../comm/text.h"
#include "conversations.h"
#include "rewards.h"

namespace llmc {

// ----------------------------------------------------------------------------
// exercises

// Read a line's exercise.
inline std::string read_exercise(const Json& line, const Chat& chat, size_t T,
                                 const std::string& verifier, Exercise* q) {
    // Read the prompt, and the answer, a text; a number is taken as JSON writes it.
    const LineForm form = {"", {{"prompt", "user"}}};
    LineParts parts;
    LLMC_TRY(read_parts({&form, 1}, line, &parts));
    const Json answer = line.value("answer", Json());
    bool text = answer.is_string();
    bool number = answer.is_number();
    if (text) q->answer = answer.get<std::string>();
    if (number) q->answer = answer.dump();

    // A program of the user's reads what it likes.
    bool built_in = is_verifier(verifier);
    if (!built_in) q->line = line;
    if (built_in && !text && !number)
        return "has no \"answer\" that is a text or a number";

    // Write the prompt, which must leave at least one row of the window to the answer.
    LLMC_TRY(chat_prompt(chat, parts[ASKED], &q->prompt));
    if (q->prompt.size() > T)
        return concat("has a prompt of ", q->prompt.size(), " tokens: give a larger --seq than ",
                      T);
    return check_wanted(verifier, q->answer);
}

// Read the exercises of all files, in the order given. A bad line ends the run, since a skipped one
// would never be learned.
inline std::string read_exercises(const std::string& files, const Chat& chat, size_t T,
                                  const std::string& verifier, std::vector<Exercise>* exercises) {
    std::vector<std::string> paths;
    LLMC_TRY(data_paths(files, &paths));
    for (const std::string& path : paths) {
        if (!path.ends_with(".jsonl"))
            return no_json_lines(path);

        // Report the first bad line of the first bad file.
        std::string bytes;
        LineCounts counts;
        LLMC_TRY(read_whole_file(path, &bytes));
        read_records(bytes, 1, path, &counts, [&](const Json& line) {
            return read_exercise(line, chat, T, verifier, &exercises->emplace_back());
        });
        LLMC_TRY(counts.first_malformed);
    }
    return exercises->empty() ? paths[0] + ": holds no prompt" : "";
}

// The exercise that is number i of a run.
inline size_t exercise_of(uint64_t i, uint64_t seed, size_t exercises) {
    return size_t(permutation(seed, i / exercises, i % exercises, exercises));
}

// ----------------------------------------------------------------------------
// windows

// Fill tokens and targets, both (T), of a sample.
inline void rollout_window(const Rollouts& r, uint64_t sample, size_t T, int* tokens,
                           int* targets) {
    const std::vector<int>& all = r.tokens.at(sample - r.first);
    size_t prompt = r.prompts[sample - r.first];
    for (size_t i = 0; i < T; i++) {
        // Pad after the answer, whose rows do not see the padding.
        tokens[i] = i < all.size() ? all[i] : 0;
        bool answer = i + 1 >= prompt && i + 1 < all.size();
        targets[i] = answer ? all[i + 1] : -1;
    }
}

} // namespace llmc
