// conversations.h - JSON lines of conversations, packed whole into windows, answers marked
//   Lines    by their keys:
//              {"messages": [{"role": "user", "content": "..."}, ...]}, an answer with "weight": 0
//                is not trained
//              {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
//              {"instruction": "...", "input": "...", "output": "..."}
//              {"prompt": "...", "completion": "..."}, texts or lists of messages
//              {"input_ids": [...], "labels": [...]}, rendered and tokenized already, label i of
//                token i: its id if it is trained, otherwise -100 (transformers' convention)
//   Windows  Conversations lie whole in windows of T tokens. The longest come first, and each goes
//            to the window with the least room that takes it (best fit). Padding fills the rest, as
//            a document of its own. A conversation that is longer than T loses its end; without an
//            answer left it is dropped. Windows depend on the text alone, not on ranks.
//   Marks    Two bits of a 32-bit token: TRAINED, it belongs to an answer; BEGINS, a conversation
//            begins here, which sees none before it (context.h). Every window begins with one, so
//            its last token predicts nothing, and n windows are n T tokens.
//   Shards   llm.c's 32-bit magic with version 8, and T after the count of tokens.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../context.h"
#include "../io/json.h"
#include "../text.h"
#include "chat.h"
#include <map>

namespace llmc {

// ----------------------------------------------------------------------------
// lines

// Read a string of an object. If the key is missing and not needed, `text` stays as it is.
inline std::string take_string(const nlohmann::json& j, const char* key, bool needed,
                               std::string* text) {
    bool none = !j.contains(key) || j[key].is_null();
    if (none && !needed)
        return "";
    if (!j.contains(key) || !j[key].is_string())
        return concat("has no string \"", key, "\"");
    *text = j[key].get<std::string>();
    return "";
}

// Map other collections' names of roles to user and assistant.
inline std::string usual_role(const std::string& name) {
    if (name == "human") return "user";
    if (name == "developer")
        return "system";
    if (name == "gpt" || name == "bot" || name == "model")
        return "assistant";
    return name;
}

// Read a message's text: a string, or a list of parts that are texts.
inline std::string take_content(const nlohmann::json& message, const char* key, std::string* text) {
    if (!message.contains(key) || !message[key].is_array())
        return take_string(message, key, true, text);
    // Join the parts. OpenAI's have a type, which only here may be left out.
    for (const nlohmann::json& part : message[key]) {
        std::string more, type = "text";
        bool good = part.is_object() && take_string(part, "type", false, &type).empty() &&
                    take_string(part, "text", true, &more).empty();
        if (!good || type != "text")
            return "has a part that is no text, and only texts are read";
        *text += more;
    }
    return "";
}

// Refuse what a tool says, is asked or can: formats differ in how they write it, if they do at all.
inline std::string refuse_tool(const nlohmann::json& j, const std::string& role = "") {
    bool tool = role == "tool" || role == "function" || role == "ipython" || role == "observation";
    for (const char* key : {"tool_calls", "function_call", "tools"})
        tool |= j.contains(key) && !j[key].empty() && j[key] != "[]";
    return tool ? "is of a tool, which no --chat-format writes: leave the line out, or give the "
                  "tokens of its own template as \"input_ids\" and \"labels\""
                : "";
}

// Append a list of messages. The keys differ between collections: role and content are OpenAI's,
// from and value are ShareGPT's.
inline std::string read_messages(const nlohmann::json& list, const char* role, const char* text,
                                 Conversation* out) {
    if (!list.is_array()) return "has messages that are no list";
    for (const nlohmann::json& each : list) {
        ChatMessage m;
        if (!each.is_object()) return "has a message that is no object";
        std::string wrong = take_string(each, role, true, &m.role);
        if (wrong.empty())
            wrong = refuse_tool(each, m.role);
        if (wrong.empty())
            wrong = take_content(each, text, &m.text);
        if (!wrong.empty())
            return concat("message ", out->size() + 1, " ", wrong);
        m.role = usual_role(m.role);
        m.trained = each.value("weight", nlohmann::json(1)) != 0;
        out->push_back(m);
    }
    return "";
}

// Read a part of a conversation: a list of messages, or one text of the given role.
inline std::string read_part(const nlohmann::json& j, const char* key, const char* role,
                             Conversation* out) {
    if (j.contains(key) && j[key].is_array())
        return read_messages(j[key], "role", "content", out);
    ChatMessage m = {role, ""};
    std::string wrong = take_string(j, key, true, &m.text);
    if (wrong.empty()) out->push_back(m);
    return wrong;
}

// Read the conversation of a line's object.
inline std::string read_conversation(const nlohmann::json& j, Conversation* out) {
    out->clear();
    if (j.contains("messages"))
        return read_messages(j["messages"], "role", "content", out);
    if (j.contains("conversations"))
        return read_messages(j["conversations"], "from", "value", out);

    // A prompt and its completion, texts or messages.
    if (j.contains("completion")) {
        std::string wrong = read_part(j, "prompt", "user", out);
        return wrong.empty() ? read_part(j, "completion", "assistant", out) : wrong;
    }

    // Two answers of which one is better teach another loss.
    if (j.contains("chosen") || j.contains("preferred_output"))
        return "is a pair of answers: give --loss dpo, or ipo, simpo, orpo, kto";

    // Alpaca's keys: what is to be done, and with what.
    ChatMessage system = {"system", ""}, user = {"user", ""}, answer = {"assistant", ""};
    if (!j.contains("instruction"))
        return "has none of \"messages\", \"conversations\", \"instruction\" with \"output\", "
               "\"prompt\" with \"completion\"";
    std::string wrong = take_string(j, "instruction", true, &user.text);
    if (wrong.empty()) wrong = take_string(j, "input", false, &user.input);
    if (wrong.empty()) wrong = take_string(j, "output", true, &answer.text);
    if (wrong.empty()) wrong = take_string(j, "system", false, &system.text);
    if (!system.text.empty()) out->push_back(system);
    out->insert(out->end(), {user, answer});
    return wrong;
}

// Read a line that is tokenized already.
inline std::string read_tokens(const nlohmann::json& j, int vocab, ChatTokens* out) {
    for (const char* key : {"input_ids", "labels"})
        if (!j.contains(key) || !j[key].is_array())
            return concat("has no list \"", key, "\"");
    const nlohmann::json &ids = j["input_ids"], &labels = j["labels"];
    if (ids.size() != labels.size())
        return concat("has ", ids.size(), " \"input_ids\" and ", labels.size(), " \"labels\"");
    if (j.contains("attention_mask") &&
        j["attention_mask"] != nlohmann::json(ids.size(), 1))
        return "has padding in its \"attention_mask\": leave the padding out";

    // Nothing stands before the first token, so it is never trained.
    for (size_t i = 0; i < ids.size(); i++) {
        if (!ids[i].is_number_integer() ||
            ids[i] < 0 || ids[i] >= vocab)
            return concat("has the input_id ", in_quotes(ids[i].dump()), ": tokens go from 0 to ",
                          vocab - 1);
        if (labels[i] != -100 && labels[i] != ids[i])
            return concat("has the label ", in_quotes(labels[i].dump()), " for the token ",
                          ids[i].dump(), ": give -100, or the token itself (labels not shifted)");
        out->tokens.push_back(ids[i].get<int>());
        out->trained.push_back(i > 0 && labels[i] != -100);
    }
    return "";
}

// ----------------------------------------------------------------------------
// windows

// Counts of what has been read.
struct ConversationCounts {
    size_t lines = 0;
    size_t malformed = 0;
    std::string first_malformed = ""; // with its file and line
    size_t conversations = 0;         // in windows
    size_t cut = 0;                   // conversations that lost their end
    size_t lost = 0;                  // tokens of answers that were cut off
    size_t dropped = 0;               // conversations of which no answer would have been left
    size_t pairs = 0;                 // in windows (conversations.h)
    size_t long_pairs = 0;            // pairs left out: longer than a window
    size_t undesirable = 0;           // undesirable answers in windows (labels.h)
    size_t trained = 0;               // tokens of answers in windows
};

// Turn a conversation into marked tokens, at most T of them; none if no answer is left. It loses
// its end, never its middle: an answer must stand after its question.
inline std::vector<int> marked_tokens(const ChatTokens& c, size_t T, ConversationCounts* counts) {
    // Keep the start. An answer that is cut has no end, and is trained as far as it goes.
    std::vector<int> tokens;
    size_t trained = 0, lost = 0;
    for (size_t i = 0; i < c.tokens.size(); i++) {
        bool fits = i < T;
        trained += fits && c.trained[i];
        lost += !fits && c.trained[i];
        if (fits)
            tokens.push_back(c.tokens[i] | (c.trained[i] ? TRAINED : 0));
    }

    // Count what was kept and what was lost.
    counts->cut += trained > 0 && lost > 0;
    counts->lost += trained > 0 ? lost : 0;
    counts->trained += trained;
    counts->conversations += trained > 0;
    counts->dropped += trained == 0;
    if (trained == 0) return {};
    tokens[0] |= BEGINS;
    return tokens;
}

// Pack conversations into windows of T tokens by best fit decreasing, which wastes little if many
// are short. The rooms that are left are kept in order, so the time is O(n log n). `padding` fills
// the end of a window.
inline std::vector<int> pack_windows(std::vector<std::vector<int>> conversations, size_t T,
                                     int padding) {
    // Sort the longest first; equals keep their order.
    auto longer = [](const auto& a, const auto& b) { return a.size() > b.size(); };
    std::stable_sort(conversations.begin(), conversations.end(), longer);

    // Put each where the least room is left, or into a new window.
    std::vector<std::vector<int>> windows;
    std::multimap<size_t, size_t> room; // room that is left -> window
    for (const std::vector<int>& c : conversations) {
        if (c.empty()) continue;
        auto found = room.lower_bound(c.size());
        size_t window = found == room.end() ? windows.size() : found->second;
        if (found == room.end())
            windows.emplace_back();
        else
            room.erase(found);
        windows[window].insert(windows[window].end(), c.begin(), c.end());
        room.insert({T - windows[window].size(), window});
    }

    // Pad the windows.
    std::vector<int> tokens;
    for (std::vector<int>& w : windows) {
        if (w.size() < T)
            w.push_back(padding | BEGINS);
        w.resize(T, padding);
        tokens.insert(tokens.end(), w.begin(), w.end());
    }
    return tokens;
}

// A function that turns a line's object into at most T marked tokens. Returns "" or what is
// wrong with the line.
typedef std::string (*LineTokens)(const Chat& chat, const nlohmann::json& line, size_t T,
                                  std::vector<int>* tokens, ConversationCounts* counts);
inline std::string conversation_tokens(const Chat& chat, const nlohmann::json& line, size_t T,
                                       std::vector<int>* tokens, ConversationCounts* counts) {
    Conversation messages;
    ChatTokens written;
    bool ready = line.contains("input_ids");
    std::string wrong = ready ? read_tokens(line, chat.tokenizer->vocab_size, &written)
                              : read_conversation(line, &messages);
    if (wrong.empty() && !ready)
        wrong = chat_tokens(chat, messages, &written);
    if (wrong.empty())
        *tokens = marked_tokens(written, T, counts);
    return wrong;
}

// Make the windows of a text of JSON lines. line: the number of its first line. The same text gives
// the same windows on every rank and in every layout.
inline std::vector<int> pack_lines(std::string_view text, size_t line, const std::string& path,
                                   const Chat& chat, size_t T, ConversationCounts* counts,
                                   LineTokens line_tokens = conversation_tokens) {
    std::vector<std::vector<int>> conversations;
    for (size_t at = 0, end; at < text.size(); at = end + 1, line++) {
        // Take a line. Blank lines do not count.
        end = std::min(text.find('\n', at), text.size());
        std::string_view bytes = text.substr(at, end - at);
        if (bytes.find_first_not_of(" \t\r") == std::string::npos)
            continue;
        counts->lines++;

        // Read the line, and make its tokens.
        nlohmann::json j;
        std::vector<int> tokens;
        std::string wrong = parse_record(bytes, &j);
        if (wrong.empty() && !j.contains("input_ids"))
            wrong = refuse_tool(j);
        if (wrong.empty())
            wrong = with_records(line_tokens(chat, j, T, &tokens, counts), j);

        // Count a bad line, and keep the message of the first one.
        if (wrong.empty()) {
            conversations.push_back(tokens);
            continue;
        }
        if (counts->malformed == 0)
            counts->first_malformed = concat(path, ":", line, ": ", wrong);
        counts->malformed++;
    }
    return pack_windows(std::move(conversations), T, chat.end);
}

// Refuse a file of which more than a hundredth of the lines are bad. spare: so many more are
// tolerated, where lines are to follow.
inline std::string too_many_malformed(size_t malformed, size_t lines, const std::string& first,
                                      size_t spare = 0) {
    if (malformed <= spare + lines / 100)
        return "";
    return concat(malformed, " of ", spare ? "the first " : "", lines,
                  " lines are bad, and a hundredth of them may be: ", first);
}

// Describe what the windows hold, and what was left out.
inline std::string conversations_text(const ConversationCounts& n) {
    // Say what was kept.
    std::string text = concat(n.conversations, " conversations");
    if (n.pairs + n.long_pairs > 0)
        text = concat(n.pairs, " pairs");
    if (n.undesirable)
        text += concat(", ", n.undesirable, " of them undesirable");
    if (n.trained)
        text += concat(", ", n.trained, " tokens of answers");

    // Say what was lost, and why.
    if (n.cut)
        text += concat("; ", n.cut, " are longer than a window and lost ", n.lost,
                       " tokens of answers at their ends");
    if (n.dropped)
        text += concat("; ", n.dropped, " are left out: no answer begins within a window");
    if (n.long_pairs)
        text += concat("; ", n.long_pairs, " are left out: both answers together are longer than "
                       "a window: give a larger --seq");
    if (n.malformed)
        text += concat("; ", n.malformed, " bad lines are left out, the first ", n.first_malformed);
    return text;
}

// ----------------------------------------------------------------------------
// JSON lines of a question and two answers, of which the first is the better one
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
