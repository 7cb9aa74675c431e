// test_chat.cpp - conversations: formats as strings and tokens, answers that are trained, refusals
//   Rendered strings are those of the models' published templates, written out here by hand. The
//   tokenizer has a token for each byte and the special tokens of all formats, so that a string
//   says the tokens; Llama 2's own tokenizer is compared where the fixtures are at hand.
#include "../../llmc/io/chat.h"
#include "../harness/testing.h"

using namespace llmc;

typedef std::vector<int> Tokens;

// A byte-level tokenizer, a token a byte, with special tokens behind them.
static Tokenizer tokenizer_with(const std::vector<std::string>& special) {
    Tokenizer t;
    t.name = "test";
    t.kind = TokenizerKind::BPE;
    t.pieces.resize(256);
    for (int b = 0; b < 256; b++) {
        t.pieces[b] = std::string(1, char(b));
        t.ids[t.pieces[b]] = t.byte_token[b] = b;
    }
    for (const std::string& text : special) {
        int token = int(t.pieces.size());
        t.pieces.push_back("");
        t.special[text] = token;
        fixed_add(&t.raw, text, token, {.special = true});
        if (text == "<s>") t.bos = token;
        if (text == "</s>") t.eot = token;
    }
    t.vocab_size = int(t.pieces.size());
    return t;
}

static const std::vector<std::string> ALL_SPECIAL = {
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"};

// Tokens as text, special ones by their names; what is trained stands in { }.
static std::string shown(const Tokenizer& t, const ChatTokens& c) {
    std::string text;
    bool in = false;
    for (size_t i = 0; i <= c.tokens.size(); i++) {
        bool trained = i < c.tokens.size() && c.trained[i];
        if (trained != in) text += trained ? "{" : "}";
        in = trained;
        if (i == c.tokens.size()) break;
        std::string piece = decode(t, c.tokens[i]);
        for (const auto& [name, token] : t.special)
            if (token == c.tokens[i]) piece = name;
        text += piece;
    }
    return text;
}

static const Conversation TALK = {{"system", "S"}, {"user", " U "}, {"assistant", "T"},
                                  {"user", "V"}, {"assistant", " W\n"}};

struct Row {
    std::string format, rendered;
};

TEST(Chat, EachFormatIsItsTemplatesStringAndTrainsItsAnswers) {
    const std::string H = "<|start_header_id|>", E = "<|end_header_id|>\n\n";
    const std::string preamble = "Below is an instruction that describes a task. Write a response "
                                 "that appropriately completes the request.\n\n";
    for (const Row& row : std::vector<Row>{
             {"chatml", "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
                        "<|im_start|>assistant\n{T<|im_end|>}\n<|im_start|>user\nV<|im_end|>\n"
                        "<|im_start|>assistant\n{ W\n<|im_end|>}\n"},
             {"llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n U [/INST]{ T </s>}"
                        "<s>[INST] V [/INST]{ W </s>}"},
             {"llama3", "<|begin_of_text|>" + H + "system" + E + "S<|eot_id|>" + H + "user" + E +
                            "U<|eot_id|>" + H + "assistant" + E + "{T<|eot_id|>}" + H + "user" +
                            E + "V<|eot_id|>" + H + "assistant" + E + "{W<|eot_id|>}"},
             {"mistral", "<s>[INST] S\n\n U  [/INST]{ T</s>}[INST] V [/INST]{ W</s>}"},
             {"mistral-v3", "<s>[INST] S\n\n U [/INST]{ T</s>}[INST] V[/INST]{ W</s>}"},
             {"mistral-v3-tekken", "<s>[INST]S\n\n U [/INST]{T</s>}[INST]V[/INST]{W</s>}"},
             {"mistral-v7", "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST]  U [/INST]{ T</s>}"
                            "[INST] V[/INST]{ W</s>}"},
             {"zephyr", "<|system|>\nS</s>\n<|user|>\n U </s>\n<|assistant|>\n{T</s>}\n"
                        "<|user|>\nV</s>\n<|assistant|>\n{ W\n</s>}\n"},
             {"nanochat", "<|bos|><|user_start|>S\n\n U <|user_end|><|assistant_start|>"
                          "{T<|assistant_end|>}<|user_start|>V<|user_end|><|assistant_start|>"
                          "{ W\n<|assistant_end|>}"},
             {"plain", "<s>System: S\nUser:  U \nAssistant:{ T</s>}User: V\nAssistant:{  W\n</s>}"},
             {"alpaca", "<s>S\n\n### Instruction:\n U \n\n### Response:\n{T</s>}"
                        "### Instruction:\nV\n\n### Response:\n{ W\n</s>}"}}) {
        Tokenizer t = tokenizer_with(ALL_SPECIAL);
        Chat chat;
        ChatTokens out;
        ASSERT_EQ(choose_chat(&chat, row.format, "", t), "");
        ASSERT_EQ(chat_tokens(chat, TALK, &out), "");
        EXPECT_EQ(shown(t, out), row.rendered) << row.format;

        // Its special tokens are the text's own, and its bytes too.
        std::string plain;
        for (char c : row.rendered)
            if (c != '{' && c != '}') plain += c;
        EXPECT_EQ(out.tokens, encode(t, plain, true)) << row.format;

        // What the model is to continue: the same tokens, up to the answer.
        Tokens prompt;
        Conversation asked(TALK.begin(), TALK.end() - 1);
        ASSERT_EQ(chat_prompt(chat, asked, &prompt), "");
        size_t answer = size_t(std::find(out.trained.rbegin(), out.trained.rend(), 1) -
                               out.trained.rbegin());
        size_t end = out.tokens.size() - answer;
        ASSERT_LT(prompt.size(), end);
        EXPECT_EQ(prompt, Tokens(out.tokens.begin(), out.tokens.begin() + long(prompt.size())));
        for (size_t i = prompt.size(); i < end; i++) EXPECT_TRUE(out.trained[i]) << row.format;
        EXPECT_FALSE(out.trained[prompt.size() - 1]);
        EXPECT_EQ(out.tokens[end - 1], chat.end);
    }
}

TEST(Chat, SystemTextsThatFormatsBring) {
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat;
    ChatTokens out;
    ASSERT_EQ(choose_chat(&chat, "llama3.1", "", t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out), "");
    EXPECT_HAS(shown(t, out), "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
                              "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
                              "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>");
    ASSERT_EQ(choose_chat(&chat, "alpaca", "", t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "Add.", "1 2"}, {"assistant", "3"}}, &out), "");
    EXPECT_EQ(shown(t, out),
              "<s>Below is an instruction that describes a task, paired with an input that "
              "provides further context. Write a response that appropriately completes the "
              "request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n{3</s>}");
    ASSERT_EQ(choose_chat(&chat, "plain", "", t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "Add.", "1 2"}, {"assistant", "3"}}, &out), "");
    EXPECT_EQ(shown(t, out), "<s>User: Add.\n\n1 2\nAssistant:{ 3</s>}");
}

TEST(Chat, SpecialTokensThatPeopleWriteStayText) {
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat;
    ChatTokens out;
    ASSERT_EQ(choose_chat(&chat, "chatml", "", t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "<|im_end|>"}, {"assistant", "<|im_start|>"}}, &out), "");
    int end = t.special["<|im_end|>"], start = t.special["<|im_start|>"];
    EXPECT_EQ(std::count(out.tokens.begin(), out.tokens.end(), end), 2);
    EXPECT_EQ(std::count(out.tokens.begin(), out.tokens.end(), start), 2);
}

TEST(Chat, AnAnswerThatDataLeaveOutIsNotTrained) {
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat;
    ChatTokens out;
    Conversation talk = {{"user", "U"}, {"assistant", "T"}, {"user", "V"}, {"assistant", "W"}};
    talk[1].trained = false;
    ASSERT_EQ(choose_chat(&chat, "zephyr", "", t), "");
    ASSERT_EQ(chat_tokens(chat, talk, &out), "");
    EXPECT_EQ(shown(t, out), "<|user|>\nU</s>\n<|assistant|>\nT</s>\n<|user|>\nV</s>\n"
                             "<|assistant|>\n{W</s>}\n");
}

TEST(Chat, TheByteTokenizerEndsAnAnswerWithZero) {
    Tokenizer t;
    Chat chat;
    ChatTokens out;
    ASSERT_EQ(choose_chat(&chat, "auto", "", t), "");
    EXPECT_EQ(chat.format.name, "plain");
    ASSERT_EQ(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out), "");
    EXPECT_EQ(decode(t, out.tokens), std::string("User: U\nAssistant: T\0", 21));
    EXPECT_EQ(chat.end, 0);
}

TEST(Chat, RolesOutOfOrderAreRefusedWithAFix) {
    Tokenizer t;
    Chat chat;
    ChatTokens out;
    Tokens prompt;
    ASSERT_EQ(choose_chat(&chat, "plain", "", t), "");
    EXPECT_HAS(chat_tokens(chat, {}, &out), "ends without an answer: add a message");
    EXPECT_HAS(chat_tokens(chat, {{"user", "U"}}, &out), "ends without an answer");
    EXPECT_HAS(chat_tokens(chat, {{"assistant", "T"}}, &out), "begin with the user's");
    EXPECT_HAS(chat_tokens(chat, {{"user", "U"}, {"user", "V"}, {"assistant", "T"}}, &out),
               "message 2 is the user's again: user and assistant take turns");
    EXPECT_HAS(chat_tokens(chat, {{"user", "U"}, {"system", "S"}, {"assistant", "T"}}, &out),
               "message 2 is a system text, which comes first");
    EXPECT_HAS(chat_tokens(chat, {{"tool", "U"}}, &out), "message 1 is of role \"tool\"");
    EXPECT_HAS(chat_prompt(chat, {{"user", "U"}, {"assistant", "T"}}, &prompt), "has no question");
    EXPECT_HAS(chat_prompt(chat, {{"system", "S"}}, &prompt), "has no question");
}

TEST(Chat, AutoKnowsATemplateByItsTextAndATokenizerByItsTokens) {
    struct Known {
        std::string text, format;
    };
    Tokenizer all = tokenizer_with(ALL_SPECIAL), few = tokenizer_with({"<s>", "</s>"});
    for (const Known& known : std::vector<Known>{
             {"{{'<|im_start|>' + message['role']", "chatml"},
             {"{{ '<|start_header_id|>' + message['role']", "llama3"},
             {"<|start_header_id|> Cutting Knowledge Date: ", "llama3.1"},
             {"bos_token + '[INST] ' ... '<<SYS>>", "llama2"},
             {"'[INST] ' + message['content'] + '[/INST]'", "mistral-v3"},
             {"'[INST]' + message['content'] + '[/INST]'", "mistral-v3-tekken"},
             {"[SYSTEM_PROMPT] [INST] ", "mistral-v7"},
             {"<|user|>\n' + message['content'] + eos_token", "zephyr"},
             {"<|user|>\n' + message['content'] + '<|end|>' eos_token", ""},
             {"<|im_start|> <think>", ""},
             {"<start_of_turn>", ""}})
        EXPECT_EQ(recognise_template(known.text, all), known.format) << known.text;
    EXPECT_EQ(recognise_template("'[INST] ' + message['content'] + ' [/INST]'", few), "mistral");
    EXPECT_EQ(recognise_tokens(tokenizer_with({"<|im_start|>"})), "chatml");
    EXPECT_EQ(recognise_tokens(few), "plain");
}

TEST(Chat, AFoldersTemplateIsReadWhereItLies) {
    // A string in tokenizer_config.json, with the system text that ChatML's brings.
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat;
    ChatTokens out;
    std::string folder = scratch("template");
    nlohmann::json config = {
        {"chat_template", "{{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}"}};
    put_file(folder + "/tokenizer_config.json", config.dump());
    ASSERT_EQ(choose_chat(&chat, "auto", folder, t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out), "");
    EXPECT_EQ(shown(t, out), "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nU"
                             "<|im_end|>\n<|im_start|>assistant\n{T<|im_end|>}\n");

    // A list; then a file of its own, which wins, and which no row renders.
    config = {{"chat_template", {{{"name", "tools"}, {"template", "<<SYS>>"}},
                                 {{"name", "default"}, {"template", "<|start_header_id|>"}}}}};
    put_file(folder + "/tokenizer_config.json", config.dump());
    ASSERT_EQ(choose_chat(&chat, "auto", folder, t), "");
    EXPECT_EQ(chat.format.name, "llama3");
    put_file(folder + "/chat_template.jinja", "{{ '<start_of_turn>' }}");
    EXPECT_HAS(choose_chat(&chat, "auto", folder, t), "is of a kind that is not built");
    EXPECT_EQ(choose_chat(&chat, "zephyr", folder, t), "");
}

TEST(Chat, AFormatWhoseTokensAreMissingIsRefusedByName) {
    Tokenizer few = tokenizer_with({"</s>"}), none = tokenizer_with({});
    Chat chat;
    EXPECT_HAS(choose_chat(&chat, "chatml", "", few),
               "--chat-format chatml: --tokenizer test has no special token <|im_start|>");
    EXPECT_HAS(choose_chat(&chat, "llama2", "", few), "no token that begins a text");
    EXPECT_HAS(choose_chat(&chat, "plain", "", none), "no token that ends a text");
    EXPECT_EQ(choose_chat(&chat, "plain", "", few), "");
}

// Meta's program encodes each turn by itself: begin + "[INST] U [/INST] T " + end.
TEST(Chat, Llama2sTokensAreThoseOfItsOwnProgram) {
    NEEDS_FIXTURES();
    Tokenizer t;
    ASSERT_EQ(tokenizer_open(&t, FIXTURES + "/tokenizers/llama2/tokenizer.model"), "");
    Chat chat;
    ChatTokens out;
    ASSERT_EQ(choose_chat(&chat, "llama2", "", t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "What is 2+2?"}, {"assistant", "It is four."},
                                 {"user", "Thanks!"}, {"assistant", "Any time."}}, &out), "");
    Tokens expected;
    for (std::string turn : {"[INST] What is 2+2? [/INST] It is four. ",
                             "[INST] Thanks! [/INST] Any time. "}) {
        Tokens tokens = encode_from_start(t, turn);
        tokens.push_back(2);
        expected.insert(expected.end(), tokens.begin(), tokens.end());
    }
    EXPECT_EQ(out.tokens, expected);
    EXPECT_EQ(out.tokens[0], 1);
}
