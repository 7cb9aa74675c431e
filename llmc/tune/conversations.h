// conversations.h - JSON lines of conversations and pairs, whole in windows, answers marked
//   Lines    A kind of data is a row: the losses that read it, the keys of its lines, and the
//            function that makes a line's tokens. All kinds have one reader (io/json.h).
//   Windows  Conversations lie whole in windows of T tokens. The longest come first, and each goes
//            to the window with the least room that takes it (best fit). Padding fills the rest, as
//            a document of its own. A conversation that is longer than T loses its end; without an
//            answer left it is dropped. Windows depend on the text alone, not on ranks.
//   Pairs    lie whole in one window: first the chosen conversation, then the rejected one, each a
//            document. So no micro-batch, rank or stage has half a pair. A pair that is longer than
//            a window is left out: an answer without its end says nothing about it.
//   Marks    Bits of a 32-bit token: TRAINED, it belongs to an answer; BEGINS, a conversation
//            begins here, which sees none before it (context.h); REJECTED, the worse of a pair.
//            Every window begins with one, so its last token predicts nothing, and n windows are
//            n T tokens.
//   Shards   llm.c's 32-bit magic with version 8, and T after the count of tokens. They have no
//            pairs.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../context.h"
#include "../io/chat.h"
#include "../io/dataloader.h"
#include "../io/json.h"
#include "../comm/text.h"
#include <map>
#include <span>

namespace llmc {

// ----------------------------------------------------------------------------
// lines

// Read a string of an object. If the key is missing and not needed, `text` stays as it is.
inline std::string take_string(const Json& j, const char* key, bool needed, std::string* text) {
    if (!needed && !json_has(j, key)) return "";
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
inline std::string take_content(const Json& message, const char* key, std::string* text) {
    if (!message.contains(key) || !message[key].is_array())
        return take_string(message, key, true, text);
    // Join the parts. OpenAI's have a type, which only here may be left out.
    for (const Json& part : message[key]) {
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
inline std::string refuse_tool(const Json& j, const std::string& role = "") {
    bool tool = role == "tool" || role == "function" || role == "ipython" || role == "observation";
    for (const char* key : {"tool_calls", "function_call", "tools"})
        tool |= j.contains(key) && !j[key].empty() && j[key] != "[]";
    return tool ? "is of a tool, which no --chat-format writes: leave the line out, or give the "
                  "tokens of its own template as \"input_ids\" and \"labels\""
                : "";
}

// Append a list of messages. The keys differ between collections: role and content are OpenAI's,
// from and value are ShareGPT's.
inline std::string read_messages(const Json& list, const char* role, const char* text,
                                 Conversation* out) {
    if (!list.is_array()) return "has messages that are no list";
    for (const Json& each : list) {
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
        m.trained = each.value("weight", Json(1)) != 0;
        out->push_back(m);
    }
    return "";
}

// The parts of a line: the question and an answer to it, or a whole conversation; a worse answer.
enum LinePart { ASKED, ANSWER, WORSE };
typedef std::array<Conversation, 3> LineParts;

// A key of a line: a list of messages, or a text of one role. Without a role only a list will do.
// An "input" joins the message before it.
struct LineKey {
    const char* key;
    const char* role = "";
    LinePart part = ASKED;
    bool needed = true;
    const char *speaker = "role", *words = "content"; // keys of a message in a list
};

// A form of lines: the key that shows it (""; every line), and its keys in order.
struct LineForm {
    const char* sign;
    std::vector<LineKey> keys = {};
    const char* hint = ""; // ends the message about a key that is missing; without keys it is all
};

constexpr const char* PAIR_HINT = ": a pair has \"prompt\", \"chosen\" and \"rejected\"; "
                                  "conversations are for --loss sft";
constexpr const char* IS_A_PAIR =
    "is a pair of answers: give --loss dpo, or ipo, simpo, orpo, kto";

// The forms of conversations: OpenAI's, ShareGPT's, a prompt and its completion, Alpaca's; and
// lines that are tokenized already.
inline std::vector<LineForm> conversation_forms() {
    return {{"input_ids"},
            {"messages", {{"messages"}}},
            {"conversations", {{"conversations", "", ASKED, true, "from", "value"}}},
            {"completion", {{"prompt", "user"}, {"completion", "assistant"}}},
            {"chosen", {}, IS_A_PAIR},
            {"preferred_output", {}, IS_A_PAIR},
            {"instruction",
             {{"system", "system", ASKED, false},
              {"instruction", "user"},
              {"input", "input", ASKED, false},
              {"output", "assistant"}}},
            {"", {}, "has none of \"messages\", \"conversations\", \"instruction\" with "
                     "\"output\", \"prompt\" with \"completion\""}};
}

// The forms of a question and two answers: OpenAI's; a question with texts or lists of messages, or
// two whole conversations that begin alike.
inline std::vector<LineForm> pair_forms() {
    return {{"preferred_output",
             {{"input"},
              {"preferred_output", "assistant", ANSWER},
              {"non_preferred_output", "assistant", WORSE}},
             PAIR_HINT},
            {"",
             {{"prompt", "user", ASKED, false},
              {"chosen", "assistant", ANSWER},
              {"rejected", "assistant", WORSE}},
             PAIR_HINT}};
}

// Append what stands under a key: messages, or one text.
inline std::string read_key(const Json& line, const LineKey& k, Conversation* out) {
    // Take a list, which may lie in an object.
    const Json& value = line[k.key];
    bool holds = value.is_object() && value.contains("messages");
    if (holds || value.is_array() || !*k.role)
        return read_messages(holds ? value["messages"] : value, k.speaker, k.words, out);

    // Take a text. One that may be missing may be empty too.
    std::string text;
    std::string wrong = take_string(line, k.key, k.needed, &text);
    if (!wrong.empty() || (text.empty() && !k.needed))
        return wrong;
    if (std::string(k.role) == "input")
        out->back().input = text;
    else
        out->push_back({k.role, text});
    return "";
}

// Read the parts of a line's object, in the first of the forms that it has.
inline std::string read_parts(std::span<const LineForm> forms, const Json& line, LineParts* parts) {
    *parts = {};
    for (const LineForm& form : forms) {
        if (*form.sign && !line.contains(form.sign))
            continue;
        if (form.keys.empty())
            return form.hint;

        // All its keys must be there.
        std::string wrong;
        for (const LineKey& k : form.keys) {
            bool there = line.contains(k.key);
            if (k.needed && !there)
                return concat("has no ", in_quotes(k.key), form.hint);
            if (there && wrong.empty())
                wrong = read_key(line, k, &(*parts)[k.part]);
        }
        return wrong;
    }
    return "";
}

// Read a line that is tokenized already.
inline std::string read_tokens(const Json& j, int vocab, ChatTokens* out) {
    for (const char* key : {"input_ids", "labels"})
        if (!j.contains(key) || !j[key].is_array())
            return concat("has no list \"", key, "\"");
    const Json& ids = j["input_ids"];
    const Json& labels = j["labels"];
    if (ids.size() != labels.size())
        return concat("has ", ids.size(), " \"input_ids\" and ", labels.size(), " \"labels\"");
    if (j.contains("attention_mask") && j["attention_mask"] != Json(ids.size(), 1))
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

// Counts of what has been read. `cut` are conversations that lost their end, `dropped` those of
// which no answer would have been left.
struct ConversationCounts : LineCounts {
    size_t conversations = 0; // in windows
    size_t lost = 0;          // tokens of answers that were cut off
    size_t pairs = 0;         // in windows
    size_t long_pairs = 0;    // pairs left out: longer than a window
    size_t undesirable = 0;   // undesirable answers in windows
    size_t trained = 0;       // tokens of answers in windows
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
    std::ranges::stable_sort(conversations, std::greater<>(), std::ranges::size);

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

// A function that turns a line's parts into at most T marked tokens. Returns "" or what is wrong
// with the line.
typedef std::string (*PartTokens)(const Chat& chat, const Json& line, LineParts& parts, size_t T,
                                  std::vector<int>* tokens, ConversationCounts* counts);

// Mark a conversation's tokens, or those that a line holds.
inline std::string conversation_tokens(const Chat& chat, const Json& line, LineParts& parts,
                                       size_t T, std::vector<int>* tokens,
                                       ConversationCounts* counts) {
    ChatTokens written;
    bool ready = line.contains("input_ids");
    LLMC_TRY(ready ? read_tokens(line, chat.tokenizer->vocab_size, &written)
                   : chat_tokens(chat, parts[ASKED], &written));
    *tokens = marked_tokens(written, T, counts);
    return "";
}

// Leave the messages untrained with which both conversations begin: they are the question. Weights
// and inputs do not matter.
inline void leave_common_start(Conversation& chosen, Conversation& rejected) {
    size_t shortest = std::min(chosen.size(), rejected.size());
    for (size_t i = 0; i < shortest; i++) {
        if (chosen[i].role != rejected[i].role ||
            chosen[i].text != rejected[i].text)
            break;
        chosen[i].trained = rejected[i].trained = false;
    }
}

// Turn a line's pair into marked tokens, one conversation after the other. *tokens stays empty if
// a window has no room for both.
inline std::string pair_tokens(const Chat& chat, const Json& line, LineParts& parts, size_t T,
                               std::vector<int>* tokens, ConversationCounts* counts) {
    // Put the question before each answer.
    if (parts[ASKED].empty() && line.contains("chosen") && !line["chosen"].is_array())
        return "has no \"prompt\": answers that are texts need it";
    for (Conversation* answer : {&parts[ANSWER], &parts[WORSE]})
        answer->insert(answer->begin(), parts[ASKED].begin(), parts[ASKED].end());
    leave_common_start(parts[ANSWER], parts[WORSE]);

    // Write both. Texts with the same tokens cannot be told apart.
    ChatTokens chosen, rejected;
    std::string wrong = chat_tokens(chat, parts[ANSWER], &chosen);
    if (!wrong.empty()) return "chosen " + wrong;
    wrong = chat_tokens(chat, parts[WORSE], &rejected);
    if (!wrong.empty()) return "rejected " + wrong;
    if (chosen.tokens == rejected.tokens)
        return "has the same text as chosen and as rejected: leave it out";

    // Refuse an answer that has nothing of its own: if both end alike, nothing is left to train.
    // Leave out a pair that does not fit.
    tokens->clear();
    for (const ChatTokens* c : {&chosen, &rejected})
        if (std::ranges::count(c->trained, true) == 0)
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

// ----------------------------------------------------------------------------
// kinds of data

// A kind of data.
struct DataKind {
    std::string losses;          // that read it, between spaces
    std::vector<LineForm> forms; // of its lines; the last one takes every line
    PartTokens tokens;
    bool shards = false; // whether shards can hold it
};

inline DataKind conversations() {
    return {" sft ", conversation_forms(), conversation_tokens, true};
}
inline DataKind answer_pairs() { return {" dpo ipo simpo orpo ", pair_forms(), pair_tokens}; }

// Turn a line's object into marked tokens.
inline std::string line_tokens(const DataKind& kind, const Chat& chat, const Json& line, size_t T,
                               std::vector<int>* tokens, ConversationCounts* counts) {
    LineParts parts;
    LLMC_TRY(line.contains("input_ids") ? "" : refuse_tool(line));
    LLMC_TRY(read_parts(kind.forms, line, &parts));
    return kind.tokens(chat, line, parts, T, tokens, counts);
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

// Pack a text of JSON lines into windows. line: the number of its first line.
inline std::vector<int> pack_lines(const DataKind& kind, const Chat& chat, std::string_view text,
                                   size_t line, const std::string& path, size_t T,
                                   ConversationCounts* counts) {
    std::vector<std::vector<int>> records;
    read_records(text, line, path, counts, [&](const Json& j) {
        std::vector<int> tokens;
        LLMC_TRY(line_tokens(kind, chat, j, T, &tokens, counts));
        records.push_back(std::move(tokens));
        return std::string();
    });
    return pack_windows(std::move(records), T, chat.end);
}

// Make a source of the kind of data that a loss reads, or else of the first kind. `chat` must
// outlive the source.
inline LineSource line_source(const Chat& chat, const std::string& loss,
                              const std::vector<DataKind>& kinds) {
    auto reads = [&](const DataKind& kind) {
        return kind.losses.find(" " + loss + " ") != kind.losses.npos;
    };
    auto found = std::ranges::find_if(kinds, reads);
    const DataKind& kind = found == kinds.end() ? kinds.front() : *found;
    auto pack = [&chat, kind](std::string_view text, size_t line, const std::string& path,
                              size_t T) {
        ConversationCounts counts;
        std::vector<int> tokens = pack_lines(kind, chat, text, line, path, T, &counts);
        return PackedLines{tokens, counts, conversations_text(counts)};
    };
    return {pack, kind.shards, chat.format.name, chat.end};
}

} // namespace llmc
