// labels.h - JSON lines of a question, one answer and whether it is desirable - arXiv:2402.01306
//   Lines    {"prompt": "...", "completion": "...", "label": true}, texts or lists of messages.
//            A line of conversations.h counts as two of these, the rejected answer undesirable.
//   Marks    The completion is trained. REJECTED, beside BEGINS, marks it as undesirable.
//   Mismatch mismatched_window() puts after each question of a window the answer to another
//            question, the nearest before it: a pair's two lines ask the same. How much likelier
//            such text is to the policy than to the reference shows how far the policy has
//            drifted: KTO's reference point.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <algorithm>
#include <utility>
#include "../comm/comm.h"
#include "../text.h"
#include "chat.h"
#include "conversations.h"

namespace llmc {

// Turn a pair into two labelled answers.
inline std::string answers_of_pair(const Chat& chat, const nlohmann::json& line, size_t T,
                                   std::vector<int>* tokens, ConversationCounts* counts) {
    size_t pairs = std::exchange(counts->pairs, 0);
    std::string wrong = pair_tokens(chat, line, T, tokens, counts);
    // Count each of its answers as a conversation, the worse one as undesirable.
    counts->conversations += 2 * counts->pairs;
    counts->undesirable += counts->pairs;
    counts->pairs = pairs;
    return wrong;
}

// Turn a line's answer into marked tokens.
inline std::string labelled_tokens(const Chat& chat, const nlohmann::json& line, size_t T,
                                   std::vector<int>* tokens, ConversationCounts* counts) {
    if (line.contains("chosen") || line.contains("preferred_output"))
        return answers_of_pair(chat, line, T, tokens, counts);
    // Name the key that is missing.
    for (const char* key : {"prompt", "completion"})
        if (!line.contains(key))
            return concat("has no ", in_quotes(key),
                          ": a line has \"prompt\", \"completion\" and \"label\"");
    if (!line.contains("label") || !line["label"].is_boolean())
        return "has no \"label\" that is true or false";

    // Leave the question untrained, whoever wrote it.
    Conversation messages;
    std::string wrong = read_part(line, "prompt", "user", &messages);
    for (ChatMessage& asked : messages)
        asked.trained = false;
    if (wrong.empty())
        wrong = read_part(line, "completion", "assistant", &messages);
    ChatTokens written;
    if (wrong.empty())
        wrong = chat_tokens(chat, messages, &written);
    if (!wrong.empty()) return wrong;

    // Mark the label on the first token.
    *tokens = marked_tokens(written, T, counts);
    bool undesirable = !tokens->empty() && !line["label"];
    if (undesirable) (*tokens)[0] |= REJECTED;
    counts->undesirable += undesirable;
    return "";
}

// A question, and its answer from the first trained token on. Tokens carry TRAINED and BEGINS.
struct AnsweredQuestion {
    std::vector<int> question;
    std::vector<int> answer;
};

// Split a window of load_conversations() into its questions and answers, without padding.
inline std::vector<AnsweredQuestion> questions_of(const int* tokens, const int* targets, // (T)
                                                  size_t T) {
    std::vector<AnsweredQuestion> all;
    for (size_t i = 0; i < T; i++) {
        if (i == 0 || tokens[i] & BEGINS)
            all.emplace_back();
        AnsweredQuestion& now = all.back();
        // A row's target is the next token, so a token is trained if the row before
        // it has a target.
        bool trained = i > 0 && targets[i - 1] >= 0;
        int marked = tokens[i];
        if (trained) marked |= TRAINED;

        // Everything from the first trained token on is the answer.
        if (trained || !now.answer.empty())
            now.answer.push_back(marked);
        else
            now.question.push_back(marked);
    }

    // Drop padding, which has no answer.
    std::erase_if(all, [](const AnsweredQuestion& q) { return q.answer.empty(); });
    return all;
}

// Whether two questions have the same text, whatever their answers are worth.
inline bool asks_the_same(const AnsweredQuestion& a, const AnsweredQuestion& b) {
    auto unmarked = [](int token) { return token & ~(TRAINED | BEGINS | REJECTED); };
    return std::ranges::equal(a.question, b.question, {}, unmarked, unmarked);
}

// The nearest answer before question i that belongs to another question; null: there is none.
inline const std::vector<int>* answer_to_another(const std::vector<AnsweredQuestion>& before,
                                                 const std::vector<AnsweredQuestion>& own,
                                                 size_t i) {
    for (size_t k = i; k-- > 0;)
        if (!asks_the_same(own[k], own[i]))
            return &own[k].answer;
    for (size_t k = before.size(); k-- > 0;)
        if (!asks_the_same(before[k], own[i]))
            return &before[k].answer;
    return nullptr;
}

// Make a window's tokens and targets (T) mismatched. `before` holds the questions of the window
// before. A question is left out where no other question came before it, and answers that do not
// fit lose their end. Returns how many questions have an answer.
inline size_t mismatched_window(const std::vector<AnsweredQuestion>& before, int* tokens,
                                int* targets, size_t T, int padding) {
    // Give each question the answer to another one.
    std::vector<AnsweredQuestion> own = questions_of(tokens, targets, T);
    std::vector<int> marked;
    for (size_t i = 0; i < own.size(); i++) {
        const std::vector<int>* other = answer_to_another(before, own, i);
        if (!other) continue;
        for (int token : own[i].question)
            marked.push_back(token);
        for (int token : *other)
            marked.push_back(token);
    }
    if (marked.size() < T)
        marked.push_back(padding | BEGINS);
    marked.resize(T, padding);

    // Separate marks and tokens, and count the questions whose answer has begun.
    size_t answered = 0;
    bool counted = true;
    for (size_t i = 0; i < T; i++) {
        int token = marked[i] & ~(TRAINED | BEGINS | REJECTED);
        bool trained = marked[i] & TRAINED;
        // A new question's answer has not begun yet.
        if (marked[i] & BEGINS) counted = false;
        answered += trained && !counted;
        counted |= trained;
        tokens[i] = token | (marked[i] & BEGINS);
        if (i > 0)
            targets[i - 1] = trained ? token : -1;
    }
    targets[T - 1] = -1;
    return answered;
}

} // namespace llmc
