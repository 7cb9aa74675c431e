// chat.h - chat formats as a table: a conversation to tokens, and which of them are an answer's
//   A row says what stands before and after each text. In it <s> and </s> stand for the tokens
//   that begin and end a text, whatever the tokenizer calls them. Other special tokens have their
//   own names, and become tokens if the tokenizer has them.
//   Tokens  1. cut a conversation into runs of text between special tokens
//           2. cut a run where an answer begins, so that a prompt's tokens are the beginning of the
//              tokens of prompt and answer, whatever the answer is
//           3. encode each run: if people write the text of a special token, it stays text
//   Mask    An answer's own tokens and the one that ends it are trained; what stands before and
//           after is not. The mask is made with the tokens, not searched in a rendered text.
//   Jinja   chat_template_of() is the template that computes a row. Llama 3.1's date is its
//           template's default. Which row a folder's template is: chat_templates.h
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <climits>
#include <string>
#include <vector>
#include "../comm/text.h"
#include "tokenizer.h"
#include "tokenizer_files.h"

namespace llmc {

// ----------------------------------------------------------------------------
// conversations

// A message. Alpaca's instructions may have an input; other formats append it to the text.
struct ChatMessage {
    std::string role; // system, user or assistant
    std::string text;
    std::string input = "";
    bool trained = true; // data may exclude an answer from training
};
typedef std::vector<ChatMessage> Conversation;

// Check that roles come in order: a system text, then user and assistant in turn. answered: the
// last message must be an answer, as training needs it; otherwise the user's, as a prompt needs it.
inline std::string check_conversation(const Conversation& messages, bool answered) {
    std::string before = "assistant";
    // Check the role of each message against the one before.
    for (size_t i = 0; i < messages.size(); i++) {
        const std::string& role = messages[i].role;
        bool first_system = i == 0 && role == "system";
        if (role != "system" && role != "user" && role != "assistant")
            return concat("message ", i + 1, " is of role ", in_quotes(role),
                          ": roles are system, user and assistant");
        if (role == "system" && !first_system)
            return concat("message ", i + 1,
                          " is a system text, which comes first or not at all: "
                          "move it to the front, or into the user's text");
        if (role == before)
            return concat("message ", i + 1, " is the ", role, "'s",
                          i == 0 ? ", and nobody has asked: begin with the user's"
                                 : " again: user and assistant take turns: join the two");
        if (!first_system) before = role;
    }

    // Check who speaks last.
    std::string last = messages.empty() ? "" : messages.back().role;
    if (answered && last != "assistant")
        return "ends without an answer: add a message of role assistant, or leave it out";
    return answered || last == "user" ? "" : "has no question: the last message must be the user's";
}

// ----------------------------------------------------------------------------
// formats

// A format: what stands before and after each text of a conversation.
struct ChatFormat {
    std::string name;
    std::string begin = "";                   // once, before all
    std::string system = "", system_end = ""; // around the system text
    std::string user = "", user_end = "";     // around a user's text
    std::string answer = "";                  // before an answer
    // an answer's own first and last part, which are trained
    std::string lead = "", answer_end = "";
    std::string behind = "";                  // after an answer, not trained
    std::string input = "\n\n";               // before an instruction's input
    std::vector<std::string> needs = {};      // special tokens that the tokenizer must have
    bool system_inside = false;               // the first user turn holds the system text
    bool always_system = false;               // there is a system turn even without a text
    bool trims = false;                       // questions lose the white space at their ends
    bool trims_answer = false;                // and so do answers
    std::string default_system = "";
};

// ChatML's format. Its versions differ in the beginning, and behind a role and an answer.
inline ChatFormat chatml_format(const std::string& name, const std::string& begin,
                                const std::string& sep, const std::string& behind) {
    std::vector<std::string> needs = {"<|im_start|>", "<|im_end|>"};
    if (sep != "\n") needs.push_back(sep);
    if (!begin.empty()) needs.push_back(begin);
    return {.name = name,
            .begin = begin,
            .system = "<|im_start|>system" + sep,
            .system_end = "<|im_end|>" + behind,
            .user = "<|im_start|>user" + sep,
            .user_end = "<|im_end|>" + behind,
            .answer = "<|im_start|>assistant" + sep,
            .answer_end = "<|im_end|>",
            .behind = behind,
            .needs = needs};
}

// Llama 3's format; 3.1 adds dates to the system turn.
inline ChatFormat llama3_format(const std::string& name, const std::string& dates) {
    const std::string end = "<|end_header_id|>\n\n";
    return {
        .name = name,
        .begin = "<s>",
        .system = "<|start_header_id|>system" + end + dates,
        .system_end = "<|eot_id|>",
        .user = "<|start_header_id|>user" + end,
        .user_end = "<|eot_id|>",
        .answer = "<|start_header_id|>assistant" + end,
        .answer_end = "<|eot_id|>",
        .needs = {"<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
        .always_system = !dates.empty(),
        .trims = true,
        .trims_answer = true};
}

// Mistral's format. Its versions differ in spaces, in which marks are tokens, and in where the
// system text stands: in the first turn, or between marks of its own.
inline ChatFormat mistral_format(const std::string& name, const std::string& user,
                                 const std::string& user_end, const std::string& lead,
                                 const std::string& system = "",
                                 const std::string& system_end = "\n\n") {
    std::vector<std::string> needs = {"<s>"};
    if (name != "mistral" && name != "mistral-v1")
        needs.insert(needs.end(), {"[INST]", "[/INST]"});
    if (!system.empty())
        needs.insert(needs.end(), {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"});
    return {.name = name,
            .begin = "<s>",
            .system = system,
            .system_end = system_end,
            .user = user,
            .user_end = user_end,
            .lead = lead,
            .answer_end = "</s>",
            .needs = needs,
            .system_inside = system.empty(),
            .trims_answer = system.empty() && name != "mistral-v1"};
}

// All formats, each with a comment that shows a turn.
inline const std::vector<ChatFormat>& chat_formats() {
    static const std::vector<ChatFormat> table = {
        // <|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nT<|im_end|>\n
        chatml_format("chatml", "", "\n", "\n"),
        chatml_format("chatml-bos", "<s>", "\n", "\n"),
        chatml_format("phi-4", "", "<|im_sep|>", ""),

        // <s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] T </s>
        {.name = "llama2",
         .system = "<<SYS>>\n",
         .system_end = "\n<</SYS>>\n\n",
         .user = "<s>[INST] ",
         .user_end = " [/INST]",
         .lead = " ",
         .answer_end = " </s>",
         .needs = {"<s>"},
         .system_inside = true,
         .trims = true,
         .trims_answer = true},

        // <|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|> and so on
        llama3_format("llama3", ""),
        llama3_format("llama3.1",
                      "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"),

        // <s>[INST] S\n\nU [/INST] T</s>; [INST] U[/INST] T</s>; [INST]U[/INST]T</s>
        mistral_format("mistral", "[INST] ", " [/INST]", " "),
        mistral_format("mistral-v1", " [INST] ", " [/INST]", " "),
        mistral_format("mistral-v3", "[INST] ", "[/INST]", " "),
        mistral_format("mistral-v3-tekken", "[INST]", "[/INST]", ""),

        // <s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST] T</s>
        mistral_format("mistral-v7", "[INST] ", "[/INST]", " ", "[SYSTEM_PROMPT] ",
                       "[/SYSTEM_PROMPT]"),
        mistral_format("mistral-v7-tekken", "[INST]", "[/INST]", "", "[SYSTEM_PROMPT]",
                       "[/SYSTEM_PROMPT]"),

        // <|user|>\nU</s>\n<|assistant|>\nT</s>\n
        {.name = "zephyr",
         .system = "<|system|>\n",
         .system_end = "</s>\n",
         .user = "<|user|>\n",
         .user_end = "</s>\n",
         .answer = "<|assistant|>\n",
         .answer_end = "</s>",
         .behind = "\n"},

        // <|bos|><|user_start|>U<|user_end|><|assistant_start|>T<|assistant_end|>
        {.name = "nanochat",
         .begin = "<|bos|>",
         .system_end = "\n\n",
         .user = "<|user_start|>",
         .user_end = "<|user_end|>",
         .answer = "<|assistant_start|>",
         .answer_end = "<|assistant_end|>",
         .needs = {"<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>",
                   "<|assistant_end|>"},
         .system_inside = true},

        // ### Instruction:\nU\n\n### Response:\nT</s>, after a sentence that says what this is
        {.name = "alpaca",
         .begin = "<s>",
         .system_end = "\n\n",
         .user = "### Instruction:\n",
         .user_end = "\n\n",
         .answer = "### Response:\n",
         .answer_end = "</s>",
         .input = "\n\n### Input:\n"},

        // User: U\nAssistant: T</s>, for models without special tokens
        {.name = "plain",
         .begin = "<s>",
         .system = "System: ",
         .system_end = "\n",
         .user = "User: ",
         .user_end = "\n",
         .answer = "Assistant:",
         .lead = " ",
         .answer_end = "</s>"},
    };
    return table;
}

// The sentence with which Alpaca's format begins if the data have no system text.
inline std::string alpaca_preamble(bool with_input) {
    return std::string("Below is an instruction that describes a task") +
           (with_input ? ", paired with an input that provides further context" : "") +
           ". Write a response that appropriately completes the request.";
}

// A Jinja expression of text: a string, and bos_token and eos_token for <s> and </s>.
inline std::string jinja_text(std::string text) {
    for (auto [from, to] : {std::pair("\\", "\\\\"), std::pair("'", "\\'"),
                            std::pair("\n", "\\n"), std::pair("<s>", "' ~ bos_token ~ '"),
                            std::pair("</s>", "' ~ eos_token ~ '")})
        text = replace_all(text, from, to);
    return "'" + text + "'";
}

// The chat template of a format, in Jinja: it renders a conversation as write_conversation() does.
// It stands on one line, so white space between its parts cannot be rendered. An instruction's
// input is no part of a message there.
inline std::string chat_template_of(const ChatFormat& f) {
    // Names between $ stand for the format's texts.
    std::string own = f.name == "alpaca" ? alpaca_preamble(false) : f.default_system;
    std::string text =
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = $own$ %}"
        "{% set turns = messages %}{% endif %}{{ $begin$ }}{% if system is not none and not "
        "$inside$ %}{{ $system$ ~ system$trim$ ~ $system_end$ }}{% endif %}"
        "{% for message in turns %}{% set text = message['content'] %}"
        "{% if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception("
        "'after a system text, user and assistant take turns') }}{% endif %}"
        "{% if loop.first and system is not none and $inside$ %}"
        "{% set text = $system$ ~ system ~ $system_end$ ~ text %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ $user$ ~ text$trim$ ~ $user_end$ }}{% else %}"
        "{{ $answer$ ~ $lead$ ~ text$trim_answer$ ~ $answer_end$ ~ $behind$ }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ $answer$ }}{% endif %}";

    // Put them in, the system text last: it may hold such names.
    text = replace_all(text, "$inside$", f.system_inside ? "true" : "false");
    text = replace_all(text, "$trim$", f.trims ? " | trim" : "");
    text = replace_all(text, "$trim_answer$", f.trims_answer ? " | trim" : "");
    for (auto [name, value] : {std::pair("$begin$", f.begin), {"$system$", f.system},
                               {"$system_end$", f.system_end}, {"$user$", f.user},
                               {"$user_end$", f.user_end}, {"$answer$", f.answer},
                               {"$lead$", f.lead}, {"$answer_end$", f.answer_end},
                               {"$behind$", f.behind}})
        text = replace_all(text, name, jinja_text(value));
    return replace_all(text, "$own$", own.empty() && !f.always_system ? "none" : jinja_text(own));
}

constexpr int NO_TOKEN = INT_MAX; // <s> of a tokenizer without such a token: nothing is written

// A format, and the tokenizer that writes it.
struct Chat {
    ChatFormat format;
    const Tokenizer* tokenizer = nullptr;
    Fixed markers = {}; // special tokens by the names that formats use
    std::string why = "";     // who chose the format
    std::string refused = ""; // why no conversation can be written, only tokens read
    int bos = -1;         // the token of <s>
    int end = -1;         // the token that ends an answer, and a sample
};

// The token of a mark, or -1 if the tokenizer has none.
inline int marker_token(const Chat& chat, std::string_view mark) {
    int token = find_token(chat.markers.ids, mark);
    return token == NO_TOKEN ? -1 : token;
}

// Join a format to a tokenizer, which must have the tokens that the format needs.
inline std::string chat_open(Chat* chat, const ChatFormat& format, const Tokenizer& t) {
    // Find the token that ends texts. --tokenizer byte is ours, and has 0, which occurs in no text.
    *chat = {format, &t};
    int eot = t.eot < 0 && only_bytes(t) && t.vocab_size == 256 ? 0 : t.eot;
    for (const auto& [text, token] : t.special) fixed_add(&chat->markers, text, token);
    chat->bos = begin_token(t);
    fixed_add(&chat->markers, "<s>", chat->bos < 0 ? NO_TOKEN : chat->bos);
    fixed_add(&chat->markers, "</s>", eot < 0 ? NO_TOKEN : eot);

    // Name the first token that is missing. A model that never saw the marks as tokens would have
    // to learn them from these conversations alone.
    const std::string refused =
        "--chat-format " + format.name + ": --tokenizer " + t.name + " has ";
    for (const std::string& need : format.needs)
        if (marker_token(*chat, need) < 0)
            return refused +
                   (need == "<s>" ? "no token that begins a text" : "no special token " + need) +
                   ": give the format that its model was trained with; plain needs none";
    size_t last = format.answer_end.rfind('<');
    chat->end = marker_token(*chat, format.answer_end.substr(last));
    if (chat->end >= 0) return "";
    return refused + "no token that ends a text, which an answer needs: name it as eos_token in "
                     "the tokenizer_config.json beside it, or make one with --add-tokens "
                     "'<|im_start|>,<|im_end|>' --chat-format chatml";
}

// ----------------------------------------------------------------------------
// tokens

// The tokens of a conversation. trained[i]: the model is to learn to say token i. Target i of
// training is token i + 1, so that target counts if trained[i + 1].
struct ChatTokens {
    std::vector<int> tokens = {};
    std::vector<char> trained = {};
};

// A writer of tokens. It holds back a run of text, and knows what stands before the run.
struct ChatWriter {
    const Chat& chat;
    ChatTokens out = {};
    std::string run = "";
    bool trained = false; // whether the run is trained
    enum { START, TOKEN, TEXT } before = START;
};

// Append tokens that are all trained, or all not.
inline void push_tokens(ChatWriter& w, const std::vector<int>& tokens, bool trained) {
    w.out.tokens.insert(w.out.tokens.end(), tokens.begin(), tokens.end());
    w.out.trained.resize(w.out.tokens.size(), trained);
}

// Encode the run. It counts as a text's beginning if it comes first, or after the token
// that begins texts. After other special tokens the tokenizer's file decides. After
// text it never does.
inline void end_run(ChatWriter& w) {
    if (w.run.empty()) return;
    const Tokenizer& t = *w.chat.tokenizer;
    bool goes_on = w.before == ChatWriter::TEXT || (w.before == ChatWriter::TOKEN && t.prefix_once);
    push_tokens(w, encode(t, w.run, false, goes_on), w.trained);
    w.run.clear();
    w.before = ChatWriter::TEXT;
}

// Add text that somebody wrote. It joins the run, so that words may span a mark and what follows
// it, as they do when a rendered template is encoded whole.
inline void put_text(ChatWriter& w, std::string_view text, bool trained) {
    if (w.trained != trained) end_run(w);
    w.trained = trained;
    w.run += text;
}

// Add a part of the format, which holds text and special tokens.
inline void put_markers(ChatWriter& w, std::string_view text, bool trained) {
    for (size_t at = 0; at < text.size();) {
        FixedMatch match = match_fixed(w.chat.markers, text, at);
        if (match.length == 0) {
            put_text(w, text.substr(at++, 1), trained);
            continue;
        }

        // Add the special token. <s> is left out if the tokenizer has none; chat_open() has refused
        // formats that need it.
        end_run(w);
        at += match.length;
        if (match.token == NO_TOKEN) continue;
        push_tokens(w, {match.token}, trained);
        w.before = match.token == w.chat.bos ? ChatWriter::START : ChatWriter::TOKEN;
    }
}

// A text without white space at its ends, if the format trims.
inline std::string chat_trim(const std::string& text, bool trims) {
    size_t from = trims ? space_at_start(text) : 0;
    size_t end = trims ? space_at_end(text.substr(from)) : 0;
    return text.substr(from, text.size() - from - end);
}

// The system text of a conversation: its own, even if it is empty, or the format's. Returns false
// if there is none.
inline bool system_text(const ChatFormat& f, const Conversation& messages, std::string* text) {
    bool own = messages[0].role == "system";
    bool alpaca = f.name == "alpaca";
    *text = own      ? messages[0].text
            : alpaca ? alpaca_preamble(!messages[0].input.empty())
                     : f.default_system;
    return own || f.always_system || !text->empty();
}

// Write a user's turn. The user's words are put as text, so special tokens that they name stay
// text. system: the system text in its marks, if this turn takes it.
inline void put_user(ChatWriter& w, const ChatMessage& m, const std::string& system) {
    const ChatFormat& f = w.chat.format;
    std::string text = system + m.text;
    if (!m.input.empty())
        text += f.input + m.input;
    put_markers(w, f.user, false);
    put_text(w, chat_trim(text, f.trims), false);
    put_markers(w, f.user_end, false);
}

// Write an answer between the format's marks.
inline void put_answer(ChatWriter& w, const ChatMessage& m) {
    const ChatFormat& f = w.chat.format;
    put_markers(w, f.answer, false);
    put_text(w, f.lead + chat_trim(m.text, f.trims_answer), m.trained);
    put_markers(w, f.answer_end, m.trained);
    put_markers(w, f.behind, false);
}

// Write all messages. opens: also write the marks that stand before the next answer.
inline ChatTokens write_conversation(const Chat& chat, const Conversation& messages, bool opens) {
    ChatWriter w = {chat};
    const ChatFormat& f = chat.format;
    std::string system;
    bool has_system = system_text(f, messages, &system);
    put_markers(w, f.begin, false);

    // Write a system turn, if the format has one; otherwise the first question's turn takes it.
    if (has_system && f.system_inside)
        system = f.system + system + f.system_end;
    if (has_system && !f.system_inside) {
        put_markers(w, f.system, false);
        put_text(w, chat_trim(system, f.trims), false);
        put_markers(w, f.system_end, false);
    }

    // Write the turns. A prompt ends where the answer begins, so the model continues with what it
    // learned to say there.
    for (size_t i = 0; i < messages.size(); i++) {
        bool first_user = i == size_t(messages[0].role == "system");
        if (messages[i].role == "user")
            put_user(w, messages[i], first_user && f.system_inside ? system : "");
        if (messages[i].role == "assistant")
            put_answer(w, messages[i]);
    }
    if (opens) put_markers(w, f.answer, false);
    end_run(w);
    return w.out;
}

// Write a whole conversation for training.
inline std::string chat_tokens(const Chat& chat, const Conversation& messages, ChatTokens* out) {
    LLMC_TRY(chat.refused);
    LLMC_TRY(check_conversation(messages, true));
    *out = write_conversation(chat, messages, false);
    return "";
}

// Write a conversation that ends with a question, for the model to answer. Its tokens are the
// beginning of the same conversation with the answer.
inline std::string chat_prompt(const Chat& chat, const Conversation& messages,
                               std::vector<int>* tokens) {
    LLMC_TRY(chat.refused);
    LLMC_TRY(check_conversation(messages, false));
    *tokens = write_conversation(chat, messages, true).tokens;
    return "";
}

} // namespace llmc
