// pairs.h - JSON lines of a question and two answers, of which the first is the better one
//   Lines    by their keys:
//              {"prompt": "...", "chosen": "...", "rejected": "..."}, texts or lists of messages
//              {"chosen": [...], "rejected": [...]}, whole conversations that begin alike
//              {"input": {"messages": [...]}, "preferred_output": [...],
//               "non_preferred_output": [...]}, OpenAI's
//   Marks    Answers that both conversations share belong to the question: they are not trained.
//   Windows  A pair lies whole in one window: first the chosen conversation, then the rejected one,
//            each a document. So no micro-batch, rank or stage has half a pair. A pair that is
//            longer than a window is left out: an answer without its end says nothing about it.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "conversations.h"

namespace llmc {

// Two conversations that begin alike, of which the first ends better.
struct AnswerPair {
    Conversation chosen, rejected;
};

// The keys of a line's two answers.
struct PairKeys {
    const char *chosen, *rejected;
};

// Whether two messages are the same text of the same role. Weights and inputs do not matter.
inline bool same_message(const ChatMessage& a, const ChatMessage& b) {
    return a.role == b.role && a.text == b.text;
}

// Leave the messages untrained with which both conversations begin: they are the question.
inline void leave_common_start(AnswerPair* pair) {
    Conversation &w = pair->chosen, &l = pair->rejected;
    size_t shortest = std::min(w.size(), l.size());
    for (size_t i = 0; i < shortest; i++) {
        if (!same_message(w[i], l[i]))
            break;
        w[i].trained = l[i].trained = false;
    }
}

// Read the pair of a line's object.
inline std::string read_pair(const nlohmann::json& line, AnswerPair* pair) {
    // Find the two answers: both must be there.
    *pair = {};
    bool openai = line.contains("preferred_output");
    PairKeys keys = openai ? PairKeys{"preferred_output", "non_preferred_output"}
                           : PairKeys{"chosen", "rejected"};
    for (const char* key : {keys.chosen, keys.rejected})
        if (!line.contains(key))
            return concat("has no ", in_quotes(key), ": a pair has \"prompt\", \"chosen\" and "
                          "\"rejected\"; conversations are for --loss sft");

    // Read the question, if it stands apart.
    std::string wrong;
    Conversation asked;
    bool apart = openai ? line.contains("input") : line.contains("prompt");
    if (openai && apart && line["input"].is_object() && line["input"].contains("messages"))
        wrong = read_messages(line["input"]["messages"], "role", "content", &asked);
    else if (openai)
        return "has no \"input\" with \"messages\"";
    else if (apart)
        wrong = read_part(line, "prompt", "user", &asked);
    else if (!line["chosen"].is_array())
        return "has no \"prompt\": answers that are texts need it";

    // Append each answer to the question.
    pair->chosen = pair->rejected = asked;
    if (wrong.empty())
        wrong = read_part(line, keys.chosen, "assistant", &pair->chosen);
    if (wrong.empty())
        wrong = read_part(line, keys.rejected, "assistant", &pair->rejected);
    leave_common_start(pair);
    return wrong;
}

// Turn a line's pair into marked tokens, one conversation after the other. *tokens stays empty if
// a window has no room for both.
inline std::string pair_tokens(const Chat& chat, const nlohmann::json& line, size_t T,
                               std::vector<int>* tokens, ConversationCounts* counts) {
    // Write both. Texts with the same tokens cannot be told apart.
    AnswerPair pair;
    ChatTokens chosen, rejected;
    std::string wrong = read_pair(line, &pair);
    if (!wrong.empty()) return wrong;
    wrong = chat_tokens(chat, pair.chosen, &chosen);
    if (!wrong.empty()) return "chosen " + wrong;
    wrong = chat_tokens(chat, pair.rejected, &rejected);
    if (!wrong.empty()) return "rejected " + wrong;
    if (chosen.tokens == rejected.tokens)
        return "has the same text as chosen and as rejected: leave it out";

    // Refuse an answer that has nothing of its own: if both end alike, nothing is left to train.
    // Leave out a pair that does not fit.
    tokens->clear();
    for (const ChatTokens* c : {&chosen, &rejected})
        if (std::count(c->trained.begin(), c->trained.end(), true) == 0)
            return concat(c == &chosen ? "chosen" : "rejected", " has no answer that the other "
                          "has not: end both with an answer of the assistant");
    if (chosen.tokens.size() + rejected.tokens.size() > T) {
        counts->long_pairs++;
        return "";
    }

    // Put one after the other, and mark the worse one.
    ConversationCounts half; // for counts that are not reported; nothing is cut
    *tokens = marked_tokens(chosen, T, &half);
    std::vector<int> worse = marked_tokens(rejected, T, &half);
    worse[0] |= REJECTED;
    tokens->insert(tokens->end(), worse.begin(), worse.end());
    counts->trained += half.trained;
    counts->pairs++;
    return "";
}

} // namespace llmc
