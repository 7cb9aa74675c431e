// test_chat.cpp - conversations: formats as strings and tokens, answers that are trained, refusals
//   Rendered strings are those of the models' published templates, written out here by hand. The
//   tokenizer has a token for each byte and the special tokens of all formats, so that a string
//   tells the tokens. Llama 2's own tokenizer is compared where the fixtures are at hand.
#include "../../llmc/io/dataloader.h"
#include "../../llmc/io/prepare.h"
#include "../../llmc/io/chat_templates.h"
#include "../../llmc/tune/conversations.h"
#include "../../llmc/tune/reward_command.h"
#include "../../llmc/tune/rewards.h"
#include "../../llmc/tune/rollouts.h"
#include "../harness/runs.h"

using namespace llmc;

typedef std::vector<int> Tokens;

// A byte-level tokenizer with one token a byte, and special tokens after them.
static Tokenizer tokenizer_with(const std::vector<std::string>& special) {
    Tokenizer t;
    t.name = "test";
    t.kind = TokenizerKind::BPE;
    t.pieces.resize(256);

    // The bytes, then the special tokens.
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
    "<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|im_sep|>"};

// Tokens as text, with special tokens by their names. The trained part stands in { }.
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

// A format by its name, with a tokenizer that has its tokens. A template of `folder` counts too.
static Chat chat_of(const Tokenizer& t, const std::string& format, const std::string& folder = "") {
    Chat chat;
    EXPECT_EQ(choose_chat(&chat, format, folder, t), "");
    return chat;
}

// A conversation in a format, as shown() shows it.
static std::string written(const Tokenizer& t, const std::string& format,
                           const Conversation& talk) {
    ChatTokens out;
    EXPECT_EQ(chat_tokens(chat_of(t, format), talk, &out), "");
    return shown(t, out);
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
             {"chatml-bos", "<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
                            "<|im_start|>assistant\n{T<|im_end|>}\n<|im_start|>user\nV<|im_end|>\n"
                            "<|im_start|>assistant\n{ W\n<|im_end|>}\n"},
             {"phi-4", "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|> U <|im_end|>"
                       "<|im_start|>assistant<|im_sep|>{T<|im_end|>}<|im_start|>user<|im_sep|>V"
                       "<|im_end|><|im_start|>assistant<|im_sep|>{ W\n<|im_end|>}"},
             {"llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n U [/INST]{ T </s>}"
                        "<s>[INST] V [/INST]{ W </s>}"},
             {"llama3", "<s>" + H + "system" + E + "S<|eot_id|>" + H + "user" + E +
                            "U<|eot_id|>" + H + "assistant" + E + "{T<|eot_id|>}" + H + "user" +
                            E + "V<|eot_id|>" + H + "assistant" + E + "{W<|eot_id|>}"},
             {"mistral", "<s>[INST] S\n\n U  [/INST]{ T</s>}[INST] V [/INST]{ W</s>}"},
             {"mistral-v1", "<s> [INST] S\n\n U  [/INST]{ T</s>} [INST] V [/INST]{  W\n</s>}"},
             {"mistral-v3", "<s>[INST] S\n\n U [/INST]{ T</s>}[INST] V[/INST]{ W</s>}"},
             {"mistral-v3-tekken", "<s>[INST]S\n\n U [/INST]{T</s>}[INST]V[/INST]{W</s>}"},
             {"mistral-v7", "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST]  U [/INST]{ T</s>}"
                            "[INST] V[/INST]{  W\n</s>}"},
             {"mistral-v7-tekken", "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST] U [/INST]{T</s>}"
                                   "[INST]V[/INST]{ W\n</s>}"},
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

        // Encoding the rendered string gives the same tokens, special ones included.
        std::string plain;
        for (char c : row.rendered)
            if (c != '{' && c != '}') plain += c;
        EXPECT_EQ(out.tokens, encode(t, plain, true)) << row.format;

        // The prompt's tokens are the same, up to the answer.
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
    EXPECT_HAS(written(t, "llama3.1", {{"user", "U"}, {"assistant", "T"}}),
               "<s><|start_header_id|>system<|end_header_id|>\n\n"
               "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
               "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>");

    // A system text is one even if it is empty. White space at the ends is Unicode's, as Python's.
    EXPECT_HAS(written(t, "chatml", {{"system", ""}, {"user", " U"}, {"assistant", "T"}}),
               "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n U<|im_end|>\n");
    Conversation spaced = {{"user", "\u2003U\u00a0\n"}, {"assistant", " T\u3000"}};
    EXPECT_HAS(written(t, "llama3", spaced), "user<|end_header_id|>\n\nU<|eot_id|>");
    EXPECT_HAS(written(t, "llama3", spaced), "{T<|eot_id|>}");

    // Alpaca's text depends on whether the instruction has an input.
    Conversation sum = {{"user", "Add.", "1 2"}, {"assistant", "3"}};
    EXPECT_EQ(written(t, "alpaca", sum),
              "<s>Below is an instruction that describes a task, paired with an input that "
              "provides further context. Write a response that appropriately completes the "
              "request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n{3</s>}");
    EXPECT_EQ(written(t, "plain", sum), "<s>User: Add.\n\n1 2\nAssistant:{ 3</s>}");
}

TEST(Chat, SpecialTokensThatPeopleWriteStayText) {
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat = chat_of(t, "chatml");
    ChatTokens out;
    ASSERT_EQ(chat_tokens(chat, {{"user", "<|im_end|>"}, {"assistant", "<|im_start|>"}}, &out), "");
    int end = t.special["<|im_end|>"], start = t.special["<|im_start|>"];
    EXPECT_EQ(std::count(out.tokens.begin(), out.tokens.end(), end), 2);
    EXPECT_EQ(std::count(out.tokens.begin(), out.tokens.end(), start), 2);
}

TEST(Chat, AnAnswerThatDataLeaveOutIsNotTrained) {
    Conversation talk = {{"user", "U"}, {"assistant", "T"}, {"user", "V"}, {"assistant", "W"}};
    talk[1].trained = false;
    EXPECT_EQ(written(tokenizer_with(ALL_SPECIAL), "zephyr", talk),
              "<|user|>\nU</s>\n<|assistant|>\nT</s>\n<|user|>\nV</s>\n"
              "<|assistant|>\n{W</s>}\n");
}

TEST(Chat, TheByteTokenizerEndsAnAnswerWithZero) {
    Tokenizer t;
    Chat chat = chat_of(t, "auto");
    ChatTokens out;
    EXPECT_EQ(chat.format.name, "plain");
    ASSERT_EQ(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out), "");
    EXPECT_EQ(decode(t, out.tokens), std::string("User: U\nAssistant: T\0", 21));
    EXPECT_EQ(chat.end, 0);
}

TEST(Chat, RolesOutOfOrderAreRefusedWithAFix) {
    Tokenizer t;
    Chat chat = chat_of(t, "plain");
    ChatTokens out;
    Tokens prompt;
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

TEST(Chat, ATemplateIsAFormatOnlyIfAllOfItsTextIsKnown) {
    // The default template of transformers' first versions, which SmolLM and OpenOrca have.
    const std::string chatml = "{% for message in messages %}{{'<|im_start|>' + message['role'] + "
                               "'\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
                               "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
                               "{% endif %}";
    ChatFormat format;
    ASSERT_TRUE(recognise_template(chatml, &format));
    EXPECT_EQ(format.name, "chatml");
    EXPECT_EQ(format.default_system, "");
    ASSERT_TRUE(recognise_template("{{ bos_token }}" + chatml, &format)); // Dolphin 2.8's, Hermes 2's
    EXPECT_EQ(format.name, "chatml-bos");

    // Jinja leaves out one newline at the end, and reads line ends of two bytes as one.
    EXPECT_TRUE(recognise_template(chatml + "\n", &format));
    EXPECT_TRUE(recognise_template(replace_all(chatml, "\n", "\r\n"), &format));
    EXPECT_FALSE(recognise_template(chatml + " ", &format));
    EXPECT_FALSE(recognise_template(chatml + "\n\n", &format));

    // A token, a space, a role, another mark: each makes it another template.
    EXPECT_FALSE(recognise_template("{{ eos_token }}" + chatml, &format));
    EXPECT_FALSE(recognise_template(replace_all(chatml, "'\n' +", "' ' +"), &format));
    EXPECT_FALSE(recognise_template(replace_all(chatml, "assistant", "model"), &format));
    EXPECT_FALSE(recognise_template(replace_all(chatml, "'\n' +", "'<|im_sep|>' +"), &format));
    EXPECT_FALSE(recognise_template("", &format));

    // A system text that a template brings counts.
    const std::string qwen = "{% for message in messages %}{% if loop.first and messages[0]['role']"
                             " != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant."
                             "<|im_end|>\n' }}{% endif %}" + chatml.substr(29);
    ASSERT_TRUE(recognise_template(qwen, &format));
    EXPECT_EQ(format.name, "chatml");
    EXPECT_EQ(format.default_system, "You are a helpful assistant.");
    EXPECT_FALSE(recognise_template(replace_all(qwen, "helpful", "kind"), &format));
}

TEST(Chat, TheTemplateThatAFormatIsExportedWithIsThatFormat) {
    ChatFormat found;
    for (ChatFormat row : chat_formats()) {
        ASSERT_TRUE(recognise_template(chat_template_of(row), &found)) << row.name;
        EXPECT_EQ(has(chat_template_of(row), "text | trim ~"), row.trims_answer) << row.name;
        EXPECT_EQ(found.name, row.name);
    }
    for (const PublishedTemplates& each : published_templates()) {
        ASSERT_NE(format_named(each.format), nullptr) << each.format;
        ChatFormat row = *format_named(each.format);
        row.default_system = each.system;
        ASSERT_TRUE(recognise_template(chat_template_of(row), &found));
        EXPECT_EQ(found.name, row.name);
        EXPECT_EQ(found.default_system, row.default_system);
    }

    // Another system text is one that nobody published.
    ChatFormat row = chat_formats()[0];
    row.default_system = "It's {{ x }}.\n";
    EXPECT_FALSE(recognise_template(chat_template_of(row), &found));
}

TEST(Chat, AFoldersTemplateIsReadWhereItLies) {
    // The template is a string in tokenizer_config.json. It brings a system text of its own.
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat;
    ChatTokens out;
    std::string folder = scratch("template");
    ChatFormat kind = chat_formats()[0];
    kind.default_system = "You are a helpful assistant.";
    nlohmann::json config = {{"chat_template", chat_template_of(kind)}};
    put_file(folder + "/tokenizer_config.json", config.dump());
    const std::string turn = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{T<|im_end|>}\n";
    for (std::string name : {"auto", "chatml"}) {
        ASSERT_EQ(choose_chat(&chat, name, folder, t), "");
        ASSERT_EQ(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out), "");
        EXPECT_EQ(shown(t, out),
                  "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + turn);
        EXPECT_EQ(chat.why, "by the chat template, with the system text \"You are a helpful "
                            "assistant.\"");
    }

    // An explicit name of another format is trusted, and takes no text from the template.
    ASSERT_EQ(choose_chat(&chat, "chatml-bos", folder, t), "");
    ASSERT_EQ(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out), "");
    EXPECT_EQ(shown(t, out), "<s>" + turn);
    EXPECT_EQ(chat.why, "by --chat-format");

    // A list of templates, and an object of them; without a default one nothing is guessed.
    const std::string zephyr = chat_template_of(*format_named("zephyr"));
    for (bool list : {true, false}) {
        config = {{"chat_template", {{"tool_use", "x"}, {"default", zephyr}}}};
        if (list)
            config = {{"chat_template", {{{"name", "tool_use"}, {"template", "x"}},
                                         {{"name", "default"}, {"template", zephyr}}}}};
        put_file(folder + "/tokenizer_config.json", config.dump());
        ASSERT_EQ(choose_chat(&chat, "auto", folder, t), "");
        EXPECT_EQ(chat.format.name, "zephyr");
    }
    for (const char* odd : {R"({"chat_template": [{"name": "rag", "template": "x"}]})",
                            R"({"chat_template": {"rag": "x"}})", R"({"chat_template": 3})"}) {
        put_file(folder + "/tokenizer_config.json", odd);
        EXPECT_HAS(choose_chat(&chat, "auto", folder, t), "no list with a \"default\" one") << odd;
    }

    // A processor's file holds the key too. A file of the template alone wins.
    put_file(folder + "/tokenizer_config.json", R"({"chat_template": null})");
    put_file(folder + "/chat_template.json", nlohmann::json{{"chat_template", zephyr}}.dump());
    ASSERT_EQ(choose_chat(&chat, "auto", folder, t), "");
    EXPECT_EQ(chat.format.name, "zephyr");
    config = {{"chat_template", zephyr}};
    put_file(folder + "/tokenizer_config.json", config.dump());
    for (const char* unknown : {"{{ '<start_of_turn>' }}", ""}) {
        put_file(folder + "/chat_template.jinja", unknown);
        EXPECT_EQ(choose_chat(&chat, "auto", folder, t), "");
        EXPECT_HAS(chat_tokens(chat, {{"user", "U"}, {"assistant", "T"}}, &out),
                   folder + ": its chat template equals no format here: name the format that the "
                            "model was trained with, as in --chat-format chatml");
        EXPECT_EQ(choose_chat(&chat, "zephyr", folder, t), "");
        EXPECT_EQ(chat.refused, "");
    }

    // A template beside the tokenizer counts without a model's folder, and before it.
    t.name = put_file(folder + "/tokenizer.json", "{}");
    EXPECT_EQ(choose_chat(&chat, "auto", "", t), "");
    EXPECT_HAS(chat.refused, folder + "/: its chat template equals no format");
    std::string model = scratch("model");
    put_file(model + "/chat_template.jinja", zephyr);
    EXPECT_EQ(choose_chat(&chat, "auto", model, t), "");
    EXPECT_HAS(chat.refused, folder);
    for (const char* file : {"chat_template.jinja", "chat_template.json", "tokenizer_config.json"})
        fs::remove(folder + "/" + file);
    EXPECT_EQ(choose_chat(&chat, "auto", model, t), "");
    EXPECT_EQ(chat.format.name, "zephyr");
}

TEST(Chat, WithoutATemplateTheTokensDecideAndItIsSaid) {
    struct Known {
        std::string token, format;
    };
    for (const Known& known : std::vector<Known>{{"<|im_start|>", "chatml"},
                                                 {"<|im_sep|>", "phi-4"},
                                                 {"<|start_header_id|>", "llama3"},
                                                 {"<|user_start|>", "nanochat"},
                                                 {"[INST]", "mistral-v3"},
                                                 {"<s>", "plain"}})
        EXPECT_EQ(recognise_tokens(tokenizer_with({known.token})), known.format);

    Chat chat;
    Tokenizer all = tokenizer_with(ALL_SPECIAL), few = tokenizer_with({"<s>", "</s>"});
    for (const Tokenizer* t : {&all, &few}) {
        ASSERT_EQ(choose_chat(&chat, "auto", "", *t), "");
        EXPECT_EQ(chat.format.name, t == &all ? "phi-4" : "plain");
        EXPECT_EQ(chat.why, "by the special tokens, for there is no chat template");
        EXPECT_EQ(chat.refused, "");
    }
    EXPECT_EQ(choose_chat(&chat, "gpt", "", all), "--chat-format gpt: there is no such format");
}

TEST(Chat, AFormatWhoseTokensAreMissingIsRefusedByName) {
    Tokenizer few = tokenizer_with({"</s>"}), none = tokenizer_with({});
    none.longest = 2; // it is not --tokenizer byte, of which we say that the byte 0 ends an answer
    Chat chat;
    EXPECT_HAS(choose_chat(&chat, "chatml", "", few),
               "--chat-format chatml: --tokenizer test has no special token <|im_start|>");
    EXPECT_HAS(choose_chat(&chat, "llama2", "", few), "no token that begins a text");
    EXPECT_HAS(choose_chat(&chat, "plain", "", none), "no token that ends a text");
    EXPECT_EQ(choose_chat(&chat, "plain", "", few), "");
}

// chat_templates_test.py renders the same with Jinja. Here every format writes its conversations.
TEST(Chat, WritesEveryFormatForAComparisonWithJinja) {
    const char* path = getenv("CHAT_RENDERED");
    if (!path) GTEST_SKIP() << "skipped: test/io/chat_templates_test.py runs this";
    nlohmann::json in, out;
    ASSERT_EQ(read_json(path, &in), "");
    // Give <s> and </s> other names, as they have in most tokenizers.
    std::vector<std::string> special = ALL_SPECIAL;
    special[0] = "<bos>", special[1] = "<eos>";
    Tokenizer t = tokenizer_with(special);
    t.bos = t.special["<bos>"], t.eot = t.special["<eos>"];
    auto write = [&](const ChatFormat& row, const std::string& text) {
        Chat chat;
        ASSERT_EQ(chat_open(&chat, row, t), "");
        nlohmann::json texts;
        for (const nlohmann::json& each : in["conversations"]) {
            Conversation talk;
            ASSERT_EQ(read_messages(each["messages"], "role", "content", &talk), "");
            ChatTokens written = write_conversation(chat, talk, each["opens"]);
            for (char& trained : written.trained) trained = 0;
            texts.push_back(shown(t, written));
        }
        out.push_back({{"format", row.name}, {"template", text}, {"texts", texts}});
    };

    // Formats with a system text of their own are variants of a row.
    for (ChatFormat row : chat_formats())
        for (const nlohmann::json& system : in["systems"]) {
            row.default_system = system.get<std::string>();
            write(row, chat_template_of(row));
        }
    for (const nlohmann::json& text : in["templates"]) {
        ChatFormat row;
        bool known = recognise_template(text, &row);
        known ? write(row, text) : out.push_back({{"format", nullptr}, {"template", text}});
    }
    put_file(std::string(path) + ".out", out.dump());
}

// Meta's program encodes each turn by itself: begin + "[INST] U [/INST] T " + end.
TEST(Chat, Llama2sTokensAreThoseOfItsOwnProgram) {
    NEEDS_FIXTURES();
    Tokenizer t;
    ASSERT_EQ(tokenizer_open(&t, FIXTURES + "/tokenizers/llama2/tokenizer.model"), "");
    Chat chat = chat_of(t, "llama2");
    ChatTokens out;
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

// ----------------------------------------------------------------------------
// lines and windows

// The conversation of a line's object.
static std::string read_conversation(const nlohmann::json& line, Conversation* c) {
    LineParts parts;
    std::string wrong = read_parts(conversation_forms(), line, &parts);
    *c = parts[ASKED];
    return wrong;
}

// The windows' source of a kind of data.
static LineSource source_of(const Chat& chat, const DataKind& kind = conversations()) {
    return line_source(chat, "", {kind});
}

TEST(Conversations, LinesOfTheUsualShapesSayTheSame) {
    const std::string user = "u", answer = "a";
    for (const char* line : {
             R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]})",
             R"({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]})",
             R"({"instruction": "u", "output": "a"})",
             R"({"prompt": "u", "completion": "a"})",
             R"({"prompt": [{"role": "user", "content": "u"}],
                 "completion": [{"role": "assistant", "content": "a"}]})"}) {
        Conversation c;
        EXPECT_EQ(read_conversation(nlohmann::json::parse(line), &c), "") << line;
        ASSERT_EQ(c.size(), 2u) << line;
        EXPECT_EQ(c[0].role + c[0].text + c[1].role + c[1].text, "useruassistanta") << line;
        EXPECT_TRUE(c[1].trained);
    }

    // An answer's weight, an instruction's input and system text, and lines of no known shape.
    Conversation c;
    auto read = [&](const char* line) { return read_conversation(nlohmann::json::parse(line), &c); };
    EXPECT_EQ(read(R"({"messages": [{"role": "assistant", "content": "a", "weight": 0}]})"), "");
    EXPECT_FALSE(c[0].trained);
    EXPECT_EQ(read(R"({"system": "s", "instruction": "u", "input": "i", "output": "a"})"), "");
    EXPECT_EQ(c[0].role + c[0].text + c[1].text + c[1].input, "systemsui");
    EXPECT_HAS(read(R"({"text": "t"})"), "has none of \"messages\"");
    EXPECT_HAS(read(R"({"prompt": "q", "chosen": "a", "rejected": "b"})"), "give --loss dpo");
    EXPECT_HAS(read(R"({"messages": [{"role": "user", "content": 1}]})"),
               "message 1 has no string \"content\"");
    EXPECT_HAS(read(R"({"prompt": "u", "completion": 3})"), "no string \"completion\"");
    EXPECT_HAS(read(R"({"messages": 3})"), "no list");
    EXPECT_HAS(read(R"({"messages": [{"role": "user", "content": null}]})"),
               "message 1 has no string \"content\"");
}

// Texts may come in parts, and OpenAI's newer word for the system is developer. What cannot be
// written as it is meant is no line: a picture, a call of a tool, its answer.
TEST(Conversations, PartsAreJoinedAndToolsAreRefused) {
    Conversation c;
    auto read = [&](const std::string& message) {
        return read_conversation(nlohmann::json::parse("{\"messages\": [" + message + "]}"), &c);
    };

    // Texts.
    EXPECT_EQ(read(R"({"role": "developer", "content": [{"type": "text", "text": "a "},
                       {"type": "text", "text": "b"}]})"),
              "");
    EXPECT_EQ(c[0].role + c[0].text, "systema b");
    EXPECT_EQ(read(R"({"role": "assistant", "content": "a", "tool_calls": null})"), "");
    EXPECT_EQ(read(R"({"role": "assistant", "content": "a", "tool_calls": []})"), "");

    // No texts.
    for (const char* part : {R"({"type": "image_url", "image_url": {"url": "x"}})",
                             R"({"type": "image", "text": "x"})", R"({"type": "text"})", "\"x\""})
        EXPECT_HAS(read(concat(R"({"role": "user", "content": [)", part, "]}")),
                   "message 1 has a part that is no text");
    for (const char* message :
         {R"({"role": "tool", "content": "21 C"})", R"({"role": "function", "content": "x"})",
          R"({"role": "ipython", "content": {"output": 1}})",
          R"({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]})",
          R"({"role": "assistant", "content": "a", "function_call": {"name": "f"}})"})
        EXPECT_HAS(read(message), "message 1 is of a tool, which no --chat-format writes");
}

// A hundredth of the lines may be bad: of six lines none.
TEST(Conversations, AFileWithMoreThanAHundredthOfBadLinesIsRefused) {
    Tokenizer t;
    Chat chat = chat_of(t, "plain");
    std::string good = R"({"prompt": "q", "completion": "a"})" "\n", tools = good;
    tools.insert(1, R"("tools": [{"name": "f"}], )");
    auto opened = [&](const std::string& text) {
        DataFile f;
        f.path = put_file(scratch("share.jsonl"), text);
        EXPECT_EQ(map_data_file(&f), "");
        return open_lines(&f, source_of(chat), 64);
    };
    std::string many;
    for (int i = 0; i < 99; i++) many += good;
    EXPECT_EQ(opened(many + tools), "");
    EXPECT_HAS(opened(many.substr(good.size()) + tools), "1 of 99 lines are bad");
    EXPECT_HAS(opened(good + tools), "share.jsonl:2: is of a tool");
    EXPECT_HAS(opened(tools), "1 of 1 lines are bad");
    EXPECT_HAS(opened("[\n" + many + "]\n"), "share.jsonl:1: is no JSON object but begins an array");
    good.pop_back();
    EXPECT_HAS(opened("{\"data\": [" + good + "]}"), "; its \"data\" holds records: jq -c");

    // Files of other kinds are refused with the command that makes lines of them.
    for (const DataKind& kind : {conversations(), answer_pairs()}) {
        LineSource source = source_of(chat, kind);
        auto as_data = [&](const std::string& name) {
            DataLoader d;
            std::string path = put_file(scratch(name), "[" + good + "]");
            return data_open(&d, path, Split::TRAIN, true, t, 64, 256, 1, &source);
        };
        EXPECT_HAS(as_data("a.json"), "give .jsonl: jq -c '.[]' ");
        EXPECT_HAS(as_data("a.parquet"), "give .jsonl: dev/data/parquet_text.py --rows --out ");
    }
}

static std::string line_of(const std::string& question, const std::string& answer) {
    return nlohmann::json{{"prompt", question}, {"completion", answer}}.dump() + "\n";
}

// Eight conversations. Each is "User: q\nAssistant: ", the answer and a zero, which is 20 bytes
// more than its answer.
static std::string eight_lines() {
    std::string text;
    for (int n : {3, 20, 11, 1, 7, 30, 2, 15}) text += line_of("q", std::string(n, 'a' + n % 26));
    return text;
}

TEST(Conversations, LinesThatAreTokenizedAlreadyKeepTheirTokensAndLabels) {
    // A folder whose template is not known reads them, and nothing else.
    Tokenizer t = tokenizer_with({"<s>", "</s>", "[X]"}); // 259 tokens
    std::string folder = scratch("tokenized");
    put_file(folder + "/chat_template.jinja", "[X]{{ messages }}");
    Chat chat = chat_of(t, "auto", folder);
    EXPECT_EQ(chat.format.name, "none");
    EXPECT_EQ(chat.end, 257);

    // The first token has nothing before it that could predict it.
    ConversationCounts counts;
    Tokens tokens;
    auto read = [&](const std::string& line, size_t T = 8) {
        tokens.clear();
        return line_tokens(conversations(), chat, nlohmann::json::parse(line), T, &tokens, &counts);
    };
    const int T = TRAINED, B = BEGINS;
    EXPECT_EQ(read(R"({"input_ids": [258, 7, 8, 257], "labels": [-100, -100, 8, 257]})"), "");
    EXPECT_EQ(tokens, Tokens({258 | B, 7, 8 | T, 257 | T}));
    EXPECT_EQ(read(R"({"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 1]})"), "");
    EXPECT_EQ(tokens, Tokens({5 | B, 6 | T}));
    EXPECT_EQ(read(R"({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})", 2), "");
    EXPECT_EQ(tokens, Tokens({5 | B, 6 | T}));
    EXPECT_EQ(counts.lost, 1u);
    EXPECT_EQ(read(R"({"input_ids": [5, 6], "labels": [-100, -100]})"), "");
    EXPECT_TRUE(tokens.empty());
    EXPECT_EQ(counts.dropped, 1u);

    // Lines that contradict themselves or the vocabulary are refused.
    EXPECT_HAS(read(R"({"input_ids": [5, 6], "labels": [-100]})"), "has 2 \"input_ids\" and 1");
    EXPECT_HAS(read(R"({"input_ids": [5, 6]})"), "has no list \"labels\"");
    EXPECT_HAS(read(R"({"input_ids": "5 6", "labels": []})"), "has no list \"input_ids\"");
    for (const char* odd : {"259", "-1", "5.0", "null", "\"5\"", "99999999999999"})
        EXPECT_HAS(read(concat("{\"input_ids\": [5, ", odd, "], \"labels\": [-100, -100]}")),
                   "tokens go from 0 to 258") << odd;
    for (const char* odd : {"6", "-1", "null", "1"})
        EXPECT_HAS(read(concat("{\"input_ids\": [5, 5], \"labels\": [-100, ", odd, "]}")),
                   "for the token 5: give -100, or the token itself") << odd;
    EXPECT_HAS(read(R"({"input_ids": [5, 6], "labels": [-100, 6], "attention_mask": [0, 1]})"),
               "has padding");

    // Conversations and prompts need a format.
    const std::string unknown = folder + ": its chat template equals no format here";
    EXPECT_HAS(read(R"({"prompt": "u", "completion": "a"})"), unknown);
    EXPECT_HAS(chat_prompt(chat, {{"user", "U"}}, &tokens), unknown);
    const std::string path = put_file(
        folder + "/a.jsonl", "{\"input_ids\": [5, 6], \"labels\": [-100, 6]}\n"
                             "{\"input_ids\": [5, 259], \"labels\": [-100, 6]}\n");
    counts = {};
    tokens = pack_lines(conversations(), chat, read_file(path), 1, path, 4, &counts);
    EXPECT_EQ(tokens, Tokens({5 | B, 6 | T, 257 | B, 257}));
    EXPECT_HAS(counts.first_malformed, path + ":2: has the input_id \"259\"");
}

TEST(Conversations, LieWholeInWindowsAndSeeNoOther) {
    const size_t T = 64;
    Tokenizer t;
    DataLoader d;
    Chat chat = chat_of(t, "plain");
    std::string path = put_file(scratch("talks.jsonl"), eight_lines());
    LineSource source = source_of(chat);
    ASSERT_EQ(data_open(&d, path, Split::VAL, true, t, T, 256, 1, &source), "");

    // The answers have 89 bytes. Each also trains the space before it and the zero that ends it.
    // Windows hold whole conversations.
    size_t trained = 0, found = 0, bytes = 0;
    std::vector<int> tokens(T), targets(T), start(T);
    for (size_t w = 0; w < d.windows; w++) {
        ASSERT_EQ(load_window(d, w, tokens.data(), targets.data()), "");
        split_documents(start.data(), targets.data(), tokens.data(), T, -1);
        EXPECT_EQ(targets[T - 1], -1);
        for (size_t i = 0; i < T; i++) {
            EXPECT_LT(tokens[i], 256);
            if (targets[i] >= 0) {
                EXPECT_EQ(targets[i], tokens[i + 1]);
            }
            trained += targets[i] >= 0;

            // A conversation begins with its question, and its answer ends with the zero.
            bool begins = start[i] == int(i);
            if (begins && tokens[i] == 'U') {
                std::string text = decode(t, Tokens(tokens.begin() + long(i), tokens.end()));
                EXPECT_EQ(text.find("User: q\nAssistant: "), 0u);
                size_t end = text.find('\0');
                ASSERT_NE(end, std::string::npos);
                for (size_t k = i; k <= i + end; k++) {
                    EXPECT_EQ(start[k], int(i));
                    bool answer = k >= i + 17 && k < i + end; // the space before it too
                    EXPECT_EQ(targets[k] >= 0, answer) << k - i << " of " << end;
                }
                found++;
                bytes += end + 1;
            }
        }
    }

    EXPECT_EQ(found, 8u);
    EXPECT_EQ(trained, 89u + 2 * 8);
    EXPECT_EQ(bytes, 89u + 20 * 8);
    EXPECT_EQ(d.windows, 5u); // 249 tokens: best fit leaves 71 tokens of padding
    EXPECT_EQ(check_tokens(d, 1 << 20), "");
}

TEST(Conversations, AnswersThatAreCutAreCountedAndThoseWithoutAnyLeftOut) {
    Tokenizer t;
    Chat chat = chat_of(t, "plain");
    ConversationCounts n;
    std::string text = line_of("q", std::string(30, 'a')) + line_of(std::string(40, 'q'), "a") +
                       "{\"messages\": []}\nno JSON\n" + line_of("q", "a");
    std::vector<int> windows = pack_lines(conversations(), chat, text, 7, "talks", 32, &n);
    EXPECT_EQ(windows.size(), 64u);
    EXPECT_EQ(n.conversations, 2u);
    EXPECT_EQ(n.cut, 1u);
    EXPECT_EQ(n.lost, 18u); // 19 tokens come first, so of 30 and a zero 13 fit
    EXPECT_EQ(n.dropped, 1u);
    EXPECT_EQ(n.trained, 14u + 3);
    EXPECT_EQ(n.malformed, 2u);

    EXPECT_HAS(conversations_text(n), "2 conversations, 17 tokens of answers; 1 are longer than a "
                                      "window and lost 18 tokens of answers");
    EXPECT_HAS(conversations_text(n), "the first talks:9: ends without an answer");
}

TEST(Conversations, ShardsHoldTheWindowsThatTheTextHas) {
    // Prepare shards of the conversations, refusing sizes that would cut them.
    Tokenizer t;
    Config c;
    std::string path = put_file(scratch("more.jsonl"), eight_lines());
    c.prepare = scratch("talks.bin");
    c.data = path;
    c.loss = "sft";
    Chat chat = chat_of(t, "plain");
    LineSource source = source_of(chat);
    auto prepared = [&] {
        return prepare_shards(c, t, "./", [&](LineSource* wanted) {
            *wanted = source;
            return std::string();
        });
    };
    EXPECT_HAS(prepared(), "give --seq");
    c.seq = 64;
    c.shard_tokens = 100;
    EXPECT_HAS(prepared(), "--shard-tokens 100 is no multiple of --seq 64: give 128");
    c.shard_tokens = 0;
    ASSERT_EQ(prepared(), "");
    EXPECT_HAS(read_file(scratch("talks.json")), "\"documents\": 8");

    // The shards hold the windows of the text.
    DataLoader text, shards;
    ASSERT_EQ(data_open(&text, path, Split::VAL, true, t, 64, 256, 1, &source), "");
    ASSERT_EQ(data_open(&shards, c.prepare, Split::VAL, true, t, 64, 256, 1, &source), "");
    ASSERT_EQ(shards.windows, text.windows);
    for (size_t w = 0; w < text.windows; w++) {
        std::vector<int> a(128), b(128);
        ASSERT_EQ(load_window(text, w, a.data(), &a[64]), "");
        ASSERT_EQ(load_window(shards, w, b.data(), &b[64]), "");
        EXPECT_EQ(a, b);
    }

    // Refuse to read conversations as anything else, or text as conversations.
    auto open = [&](const std::string& file, size_t T, const LineSource* lines) {
        DataLoader d;
        return data_open(&d, file, Split::VAL, true, t, T, 256, 1, lines);
    };
    EXPECT_HAS(open(c.prepare, 64, nullptr), "give --loss sft");
    EXPECT_HAS(open(c.prepare, 32, &source), "windows of 64 tokens, and --seq is 32: give --seq 64");
    EXPECT_HAS(open(put_file(scratch("a.txt"), "text"), 64, &source), "this marks none");
    EXPECT_HAS(open(path, 64, nullptr), "is JSON lines");
}

TEST(Conversations, BothSplitsAreWholeWindowsAndShareNone) {
    Tokenizer t;
    Chat chat = chat_of(t, "plain");
    DataLoader train, val;
    std::string path = put_file(scratch("split.jsonl"), eight_lines());
    LineSource source = source_of(chat);
    ASSERT_EQ(data_open(&train, path, Split::TRAIN, false, t, 64, 256, 1, &source), "");
    ASSERT_EQ(data_open(&val, path, Split::VAL, false, t, 64, 256, 1, &source), "");

    EXPECT_EQ(train.windows, 4u);
    EXPECT_EQ(val.windows, 1u);
    EXPECT_EQ(val.files[0].first, 4u * 64);
}

// ----------------------------------------------------------------------------
// the program

// The numbers under some keys of each step of a run.
static std::vector<double> step_log(const std::string& out, const std::vector<const char*>& keys) {
    std::vector<double> found;
    for (const nlohmann::json& step : logged(out))
        for (const char* key : keys) found.push_back(step[key]);
    return found;
}

static std::string tune_run(const std::string& flags) {
    return "OMP_NUM_THREADS=1 " + program() + " --sample-tokens 0 --device cpu " + flags;
}

// The numbers under some keys of a run's steps in each layout. Sums in float that are added in
// another order differ by less than a millionth, and a few steps hardly enlarge that. A mean of the
// micro-batches' means would differ by percents: answers have many lengths.
static std::vector<std::vector<double>> in_layouts(const std::string& flags, const std::string& says,
                                                   const std::vector<const char*>& keys,
                                                   const std::vector<std::string>& layouts) {
    std::vector<std::vector<double>> all;
    for (const std::string& layout : layouts) {
        std::string out = scratch(concat("layout", all.size()));
        fs::remove_all(out);
        Ran ran = shell(tune_run(flags + " --out " + out + " " + layout));
        EXPECT_EQ(ran.status, 0) << ran.text;
        EXPECT_HAS(ran.text, says);
        all.push_back(step_log(out, keys));
        EXPECT_EQ(all.back().size(), all.front().size()) << layout;
        if (all.back().size() != all.front().size()) all.back() = all.front();
    }
    return all;
}

// Five steps in one run, and in two runs with a resume between: the exported weights have the same
// bits. Returns what the second run says; `parts` is its folder.
static std::string go_on(const std::string& flags, const std::string& again = "") {
    std::string whole = scratch("whole"), parts = scratch("parts");
    for (const std::string& folder : {whole, parts}) fs::remove_all(folder);
    Ran first = shell(tune_run(flags + again + " --out " + whole + " --steps 5 --export " + whole + "_x"));
    EXPECT_EQ(first.status, 0) << first.text;
    EXPECT_EQ(shell(tune_run(flags + " --out " + parts + " --steps 2")).status, 0);

    Ran ran = shell(tune_run("--resume --steps 5 --out " + parts + again + " --export " + parts + "_x"));
    EXPECT_EQ(ran.status, 0) << ran.text;
    EXPECT_HAS(ran.text, "resumed at step 2");
    std::string weights = read_file(whole + "_x/model.safetensors");
    EXPECT_GT(weights.size(), 10000u);
    EXPECT_TRUE(weights == read_file(parts + "_x/model.safetensors")) << flags;
    return ran.text;
}

TEST(Sft, TheMeanOverAnswersIsTheSameInEveryLayout) {
    std::string path = put_file(scratch("sft.jsonl"), eight_lines());
    auto all = in_layouts("--loss sft --data " + path + " --seq 64 --batch-tokens 256 --steps 3 "
                          "--layers 2 --heads 4 --channels 32 --warmup 1",
                          "8 conversations, 105 tokens of answers", {"loss"},
                          {"--micro-batch 4", "--micro-batch 1", "--micro-batch 2 --local-ranks 2",
                           "--micro-batch 2 --local-ranks 2 --pp 2",
                           "--micro-batch 2 --local-ranks 2 --cp 2",
                           "--micro-batch 2 --local-ranks 2 --tp 2 --sequence-parallel"});
    ASSERT_EQ(all[0].size(), 3u);
    for (const std::vector<double>& got : all)
        for (size_t i = 0; i < 3; i++) EXPECT_NEAR(got[i], all[0][i], 2e-5);
}

TEST(Sft, ARunThatGoesOnHasTheSameBits) {
    go_on("--loss sft --data " + put_file(scratch("bits.jsonl"), eight_lines()) +
          " --seq 64 --micro-batch 2 --layers 1 --channels 32 --heads 2 --schedule constant");
}

// --loss sft takes smaller steps for loaded weights than for new ones, larger ones for adapters.
TEST(Sft, LoadedWeightsTakeSmallerStepsAndAPromptIsAQuestion) {
    std::string path = put_file(scratch("prompt.jsonl"), eight_lines()), model = scratch("tuned");
    std::string common = "OMP_NUM_THREADS=1 " + program() + " --loss sft --data " + path +
                         " --seq 64 --micro-batch 1 --device cpu ";

    // New weights.
    Ran made = shell(common + "--layers 1 --channels 32 --heads 2 --steps 1 --sample-tokens 0 "
                     "--export " + model);
    ASSERT_EQ(made.status, 0) << made.text;
    EXPECT_FALSE(has(made.text, "TRL's defaults"));

    // Loaded weights, with a prompt that is asked as a question.
    Ran tuned = shell(common + "--model " + model + " --steps 1 --prompt Hello --sample-tokens 2");
    EXPECT_EQ(tuned.status, 0) << tuned.text;
    EXPECT_HAS(tuned.text, "--loss sft takes TRL's defaults: --lr 2e-05 --weight-decay 0");
    EXPECT_HAS(tuned.text, "chat format: plain");

    // Adapters.
    Ran adapted = shell(common + "--model " + model + " --steps 1 --lora 2 --sample-tokens 0");
    EXPECT_EQ(adapted.status, 0) << adapted.text;
    EXPECT_HAS(adapted.text, "--loss sft takes TRL's defaults: --lr 2e-04 --weight-decay 0");
}

// ----------------------------------------------------------------------------
// preferences

// Eight pairs, among them every shape of a line.
static std::string eight_pairs() {
    return R"({"prompt": "Say one", "chosen": "one", "rejected": "two and three"}
{"prompt": "Say two", "chosen": "two two", "rejected": "one"}
{"prompt": [{"role": "user", "content": "Plan?"}], "chosen": [{"role": "assistant", "content": "A list."}], "rejected": [{"role": "assistant", "content": "No idea"}]}
{"prompt": "Name a bucket", "chosen": "block", "rejected": "none at all, really"}
{"chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Go"}]}
{"input": {"messages": [{"role": "user", "content": "Count"}]}, "preferred_output": [{"role": "assistant", "content": "1 2 3"}], "non_preferred_output": [{"role": "assistant", "content": "3"}]}
{"prompt": "Sky?", "chosen": "blue", "rejected": "green"}
{"prompt": "Grass?", "chosen": "green", "rejected": "blue, I think"}
)";
}

TEST(Preferences, ALineBecomesTwoConversationsThatAskTheSame) {
    Tokenizer t;
    Chat chat = chat_of(t, "plain");
    auto tokens_of = [&](const std::string& line, std::vector<int>* tokens) {
        ConversationCounts n;
        nlohmann::json j = nlohmann::json::parse(line);
        return line_tokens(answer_pairs(), chat, j, 128, tokens, &n);
    };

    // Both answers begin with the prompt's tokens, which are not trained. The answers' tokens are.
    std::vector<int> tokens;
    ASSERT_EQ(tokens_of(R"({"prompt": "Hm", "chosen": "ab", "rejected": "xyz"})", &tokens), "");
    std::string text, marks;
    size_t second = 0;
    for (size_t i = 0; i < tokens.size(); i++) {
        text += char(tokens[i] & 0xff);
        marks += tokens[i] & TRAINED ? '1' : '.';
        if (tokens[i] & REJECTED) second = i;
    }

    EXPECT_EQ(text.substr(0, second), "User: Hm\nAssistant: ab" + text.substr(second - 1, 1));
    EXPECT_EQ(text.substr(second, 23), "User: Hm\nAssistant: xyz");
    EXPECT_EQ(marks.substr(0, second), std::string(19, '.') + "1111");
    EXPECT_EQ(marks.substr(second), std::string(19, '.') + "11111");
    EXPECT_EQ(tokens[0] & (BEGINS | REJECTED), BEGINS);
    EXPECT_EQ(tokens[second] & (BEGINS | REJECTED), BEGINS | REJECTED);

    // An answer that both conversations share belongs to the question.
    ASSERT_EQ(tokens_of(R"({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "e"}]})",
                        &tokens), "");
    EXPECT_EQ(std::count_if(tokens.begin(), tokens.end(), [](int x) { return x < 0; }), 2 * 3);

    // A bad line's error names the fault.
    EXPECT_HAS(tokens_of(R"({"prompt": "x", "chosen": "a"})", &tokens), "has no \"rejected\"");
    EXPECT_HAS(tokens_of(R"({"chosen": "a", "rejected": "b"})", &tokens), "has no \"prompt\"");
    EXPECT_HAS(tokens_of(R"({"prompt": "x", "chosen": "a", "rejected": "a"})", &tokens),
               "the same text as chosen and as rejected");
    EXPECT_HAS(tokens_of(R"({"prompt": [{"role": "assistant", "content": "x"}], "chosen": "a", "rejected": "b"})",
                         &tokens), "nobody has asked");
    EXPECT_HAS(tokens_of(R"({"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "y"}]})",
                         &tokens), "chosen ends without an answer");
}

static std::string preference_flags() {
    std::string path = put_file(scratch("pairs.jsonl"), eight_pairs());
    return "--data " + path + " --val " + put_file(path + "2.jsonl", eight_pairs()) +
           " --seq 128 --lr 1e-3 --schedule constant ";
}

// Windows hold two pairs or one.
TEST(Preferences, TheMeanOverPairsIsTheSameInEveryLayout) {
    const std::vector<std::string> layouts = {
        "--micro-batch 4", "--micro-batch 1 --local-ranks 4 --pp 2 --zero 1 --verify-every 1",
        "--micro-batch 1", "--micro-batch 2 --local-ranks 2 --zero 3",
        "--micro-batch 2 --local-ranks 2 --tp 2 --sequence-parallel",
        "--micro-batch 1 --local-ranks 4 --cp 2 --zero 2"};
    for (std::string loss : {"dpo", "ipo", "simpo", "orpo"}) {
        auto all = in_layouts(preference_flags() + "--layers 2 --heads 4 --channels 32 "
                              "--batch-tokens 512 --steps 2 --loss " + loss,
                              "8 pairs", {"loss", "margin", "accuracy", "grad_norm"},
                              {layouts.begin(), loss == "dpo" ? layouts.end() : layouts.begin() + 2});
        const std::vector<double>& first = all[0];
        ASSERT_EQ(first.size(), 8u);
        for (const std::vector<double>& got : all)
            for (size_t i = 0; i < 8; i++)
                EXPECT_NEAR(got[i], first[i], 2e-5 * std::max(1.0, first[i])) << loss << i;

        // A policy that equals its reference draws.
        bool dpo = loss == "dpo";
        if (!dpo && loss != "ipo") continue;
        EXPECT_EQ(float(first[0]), dpo ? float(std::log(2.0)) : 25);
        EXPECT_EQ(first[1], 0);
        if (dpo) { EXPECT_GT(first[5], 0); }
    }
}

// The reference is computed again, from the starting weights.
TEST(Preferences, ARunThatGoesOnHasTheSameBits) {
    for (std::string loss : {"dpo", "kto"})
        EXPECT_HAS(go_on(preference_flags() + "--loss " + loss + " --micro-batch 1 --layers 1 "
                         "--channels 32 --heads 2 --lora 4", " --merge"),
                   "reference: the starting weights");
}

// ----------------------------------------------------------------------------
// answers that are sampled

TEST(Rewards, VerifiersTellRightAnswersFromWrongOnes) {
    EXPECT_EQ(reward_of("exact", " four\n", "four"), 1);
    EXPECT_EQ(reward_of("exact", "four.", "four"), 0);
    EXPECT_EQ(reward_of("exact", "", " "), 1);
    EXPECT_EQ(reward_of("number", "so it is $1,234.50.", "#### 1234.5"), 1);
    EXPECT_EQ(reward_of("number", "7, or -7", "-7"), 1);
    EXPECT_EQ(reward_of("number", "7", "-7"), 0);
    EXPECT_EQ(reward_of("number", "10-7", "7"), 1);
    EXPECT_EQ(reward_of("number", "17", "7"), 0);
    EXPECT_EQ(reward_of("number", "it is...42", "42"), 1);
    EXPECT_EQ(reward_of("number", "half is .5", "0.5"), 1);
    for (const char* none : {"", "none", "1.2.3", ",", "-"})
        EXPECT_EQ(reward_of("number", none, "0"), 0) << none;
    EXPECT_EQ(reward_of("regex", "a cat sat", "\\bcat\\b"), 1);
    EXPECT_EQ(reward_of("regex", "concatenate", "\\bcat\\b"), 0);

    // An answer may be long and no UTF-8; a pattern may lose its way, and has not been found then.
    std::string noise = std::string(100000, 'a') + "\xff";
    EXPECT_EQ(reward_of("regex", noise + "x", "(.|\n)x$"), 0);
    EXPECT_EQ(reward_of("regex", noise + "ax", "(a|\n)x$"), 1);
    EXPECT_EQ(reward_of("regex", noise, "(a+)+b"), 0);
}

// Advantages over a group's mean, as Dr. GRPO has them, and divided by the deviation, as GRPO has
// them. A group of equal rewards has none.
TEST(Rewards, AdvantagesAreThoseOfThePapers) {
    const std::vector<double> rewards = {1, 0, 0, 1, 0, 0, 0, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1};
    std::vector<float> mean = group_advantages(rewards, 8, false), deviation = group_advantages(rewards, 8, true);
    for (size_t i = 0; i < 16; i++) {
            bool equal = i >= 8; // their mean is not exactly 0.1
        EXPECT_EQ(mean[i], equal ? 0 : rewards[i] == 1 ? 0.75f : -0.25f) << i;
        EXPECT_NEAR(deviation[i], equal ? 0 : rewards[i] == 1 ? 1.61984 : -0.53995, 1e-5) << i;
    }
    EXPECT_EQ(equal_groups(rewards, 8), 1u);
    EXPECT_EQ(equal_groups(rewards, 4), 3u);
}

TEST(Rollouts, RefuseLinesThatCannotBeAnswered) {
    Tokenizer t = tokenizer_with(ALL_SPECIAL);
    Chat chat;
    ASSERT_EQ(chat_open(&chat, chat_formats().back(), t), ""); // plain
    auto read = [&](const std::string& line, const std::string& verifier = "exact") {
        std::vector<Exercise> exercises;
        std::string path = put_file(scratch("asked.jsonl"), "\n" + line + "\n");
        return read_exercises(path, chat, 40, verifier, &exercises);
    };

    EXPECT_EQ(read(R"({"prompt": "1+1", "answer": 2})", "number"), "");
    EXPECT_EQ(read(R"({"prompt": [{"role": "user", "content": "Hi"}], "answer": "Hello"})"), "");
    EXPECT_HAS(read("{"), "asked.jsonl:2: is no JSON object");
    EXPECT_HAS(read(std::string(100000, '[')), "is no JSON object");
    EXPECT_HAS(read(R"({"answer": "x"})"), "has no \"prompt\"");
    EXPECT_HAS(read(R"({"prompt": "x"})"), "has no \"answer\" that is a text or a number");
    EXPECT_HAS(read(R"({"prompt": "x", "answer": ["y"]})"), "has no \"answer\" that is a text");
    EXPECT_HAS(read(R"({"prompt": "x", "answer": "y"})", "number"), "an \"answer\" without a number");
    EXPECT_HAS(read(R"({"prompt": "x", "answer": "(y"})", "regex"), "that is no pattern");
    EXPECT_HAS(read(R"({"prompt": [{"role": "assistant", "content": "x"}], "answer": "y"})"), ":2: ");
    EXPECT_HAS(read("{\"prompt\": \"" + std::string(60, 'x') + "\", \"answer\": \"y\"}"),
               "give a larger --seq than 40");

    EXPECT_HAS(read(""), "asked.jsonl: holds no prompt");
    std::vector<Exercise> none;
    EXPECT_HAS(read_exercises(scratch("asked.txt"), chat, 40, "exact", &none), "give .jsonl");
    EXPECT_HAS(read_exercises(scratch("a.json"), chat, 40, "exact", &none), "jq -c '.[]' ");
}

// A window trains the answer and its end.
TEST(Rollouts, TrainTheAnswerAndItsEndAndNothingElse) {
    Rollouts r = {5, {{9}, {10, 11, 12, 20, 21, 3}, {10, 20, 21, 22, 23, 24, 25}}, {1, 3, 1}};
    Tokens tokens(6), targets(6);
    rollout_window(r, 6, 6, tokens.data(), targets.data());
    EXPECT_EQ(tokens, Tokens({10, 11, 12, 20, 21, 3}));
    EXPECT_EQ(targets, Tokens({-1, -1, 20, 21, 3, -1}));

    rollout_window(r, 7, 6, tokens.data(), targets.data()); // an answer longer than the window
    EXPECT_EQ(tokens, Tokens({10, 20, 21, 22, 23, 24}));
    EXPECT_EQ(targets, Tokens({20, 21, 22, 23, 24, 25}));

    // Each exercise comes once an epoch, and in another order in the next epoch.
    std::set<size_t> first, second;
    std::vector<size_t> order, next;
    for (uint64_t i = 0; i < 20; i++) {
        first.insert(exercise_of(i, 1, 20));
        second.insert(exercise_of(i + 20, 1, 20));
        order.push_back(exercise_of(i, 1, 20));
        next.push_back(exercise_of(i + 20, 1, 20));
    }
    EXPECT_EQ(first.size() + second.size(), 40u);
    EXPECT_NE(order, next);
}

// Prompts of several lengths, and a pattern that one byte in ten fits at first.
static std::string letters() {
    std::string lines;
    for (const char* prompt : {"a", "bcd", "e", "fgh", "ijklm"})
        lines += concat("{\"prompt\": \"", prompt, "\", \"answer\": \"^[a-z]\"}\n");
    return lines;
}

static std::string rollout_flags(const std::string& lines, const std::string& flags) {
    return "--loss grpo --reward regex --data " + put_file(scratch("asked.jsonl"), lines) +
           " --seq 32 --answer-tokens 4 --schedule constant --weight-decay 0 --warmup 0 " + flags;
}
static std::string rollout_run(const std::string& lines, const std::string& flags) {
    return tune_run(rollout_flags(lines, flags));
}

// The sampled tokens are the same in every layout, so rewards are equal. Two updates of each
// rollout have ratios that some tokens clip, with the starting weights next to them. Two places along
// dp have eight prompts to share; with 32 answers in groups of 4.
TEST(Rollouts, AreTheSameInEveryLayout) {
    auto all = in_layouts(
        rollout_flags(letters(), "--layers 2 --heads 4 --channels 32 --batch-tokens 1024 --group 4 "
                                 "--steps 3 --lr 3e-3 --seed 5 --updates 2 --beta 0.1"),
        "data: 5 prompts, 32 answers a step, 4 to each prompt",
        {"reward", "length", "cut", "equal_groups", "loss", "entropy", "grad_norm", "kl", "clipped"},
        {"--micro-batch 8", "--micro-batch 2 --slots 3", "--micro-batch 2 --local-ranks 2 --zero 3",
         "--micro-batch 4 --local-ranks 4 --pp 2 --zero 1 --verify-every 1",
         "--micro-batch 4 --local-ranks 2 --tp 2 --sequence-parallel",
         "--micro-batch 8 --local-ranks 2 --cp 2"});
    const std::vector<double>& first = all[0];
    ASSERT_EQ(first.size(), 27u);
    for (const std::vector<double>& got : all) {
        // A token at the clip's very edge may fall to either side: one in 128 may.
        for (size_t i = 0; i < got.size(); i++)
            EXPECT_NEAR(got[i], first[i], i % 9 < 4 ? 0 : i % 9 == 8 ? 0.008 : 2e-5) << i;

        // At the first step the policy is its reference, and the one that sampled, to the bit.
        EXPECT_EQ(got[7], 0);
        EXPECT_EQ(got[8], 0);
    }
    EXPECT_GT(std::min(first[9 + 7], first[18 + 7]), 1e-3); // later updates leave the reference,
    EXPECT_GT(first[9 + 8], 0.01); // and some tokens have gone too far;
    EXPECT_EQ(first[0], first[9]); // but its answers are the first update's

    EXPECT_GT(first[0], 0);
    EXPECT_NEAR(first[5], std::log(256), 0.3); // new weights guess
    EXPECT_GT(first[6], 0.1);
}

// At the first update the ratio is 1, so several updates begin with the bits of one. Adapters are
// trained alone, and the reference is then the base: at first the distance is 0, later it is not.
TEST(Rollouts, TheFirstUpdateIsThatOfOneUpdate) {
    std::string common = rollout_run(R"({"prompt": "a", "answer": "^[ -~]"})", "--layers 1 --heads 2 --channels 32 --batch-tokens 512 "
                                           "--micro-batch 16 --lr 1e-2 --export " + scratch("up"));
    ASSERT_EQ(shell(common + "1 --steps 1").status, 0);
    ASSERT_EQ(shell(common + "2 --steps 1 --updates 2").status, 0);
    std::string once = read_file(scratch("up1") + "/model.safetensors");
    EXPECT_GT(once.size(), 10000u);
    EXPECT_TRUE(once == read_file(scratch("up2") + "/model.safetensors"));

    std::string out = scratch("adapted");
    Ran ran = shell(common + "3 --model " + scratch("up1") + " --layers 0 --heads 0 --channels 0 "
                    "--lora 4 --beta 0.5 --updates 2 --steps 3 --out " + out);
    ASSERT_EQ(ran.status, 0) << ran.text;
    std::vector<double> kl = step_log(out, {"kl"});
    ASSERT_EQ(kl.size(), 3u);
    EXPECT_EQ(kl[0], 0);
    EXPECT_GT(kl[1], 0);
    EXPECT_GT(kl[2], 0);
}

TEST(Rollouts, EachStepSamplesAnewAndEndsCount) {
    // One prompt, weights that stay, and answers of at most one token: an answer that ends at
    // once is empty, and right.
    std::string out = scratch("one");
    Ran ran = shell(rollout_run(R"({"prompt": "a", "answer": "^$"})", "--layers 1 --heads 2 --channels 32 --batch-tokens 16384 "
                                      "--micro-batch 64 --slots 64 --steps 3 --lr 0 "
                                      "--answer-tokens 1 --out " + out));
    ASSERT_EQ(ran.status, 0) << ran.text;

    std::vector<double> got = step_log(out, {"reward", "cut", "length", "entropy"});
    ASSERT_EQ(got.size(), 12u);
    for (size_t i = 0; i < 12; i += 4) {
        EXPECT_NEAR(got[i], 1 - got[i + 1], 1e-12);
        EXPECT_EQ(got[i + 2], 1);
    }

    // Empty answers occur: six are expected in 1536. Steps sample differently.
    EXPECT_GT(got[0] + got[4] + got[8], 0);
    EXPECT_NE(got[3], got[7]);
    EXPECT_NE(got[7], got[11]);
}

TEST(Rollouts, RewardsRise) {
    std::string out = scratch("rise");
    Ran ran = shell(rollout_run(letters(), "--layers 1 --heads 2 --channels 32 --batch-tokens 2048 "
                                      "--micro-batch 64 --group 16 --slots 64 --steps 30 --lr 1e-2 "
                                      "--out " + out));
    ASSERT_EQ(ran.status, 0) << ran.text;
    std::vector<double> rewards = step_log(out, {"reward"});
    ASSERT_EQ(rewards.size(), 30u);
    EXPECT_LT(rewards[0], 0.25); // 26 of 256 bytes are letters
    EXPECT_GT(rewards[29], 0.8);
}

// The resume comes between two updates of a rollout, so the answers and what the policy that sampled
// said of them come from the checkpoint.
TEST(Rollouts, ARunThatGoesOnHasTheSameBits) {
    go_on(rollout_flags(R"({"prompt": "a", "answer": "^[ -~]"})",
                        "--layers 1 --heads 2 --channels 32 --batch-tokens 512 --micro-batch 16 "
                        "--lr 1e-2 --updates 3 --beta 0.1"));

    // Other updates, or groups of another size, would ask other prompts: they are refused.
    std::string parts = scratch("parts"), again = tune_run("--resume --steps 9 --out " + parts);
    Ran ran = shell(again + " --updates 2");
    EXPECT_NE(ran.status, 0);
    EXPECT_HAS(ran.text, "--updates 2: this run has 3, by which it counts its prompts");
    EXPECT_HAS(shell(again + " --group 2").text, "--group 2: this run has ");

    // The steps on both sides of the resume learn, from the same rewards.
    std::vector<double> log = step_log(parts, {"reward", "grad_norm", "clipped"});
    ASSERT_EQ(log.size(), 15u);
    EXPECT_EQ(log[3], log[6]);
    EXPECT_GT(log[7], 0.01);
    EXPECT_GT(log[8], 0);
}

// A file whose lines fill one window has none to hold back for validation, and the error says so.
TEST(Labels, OneWindowLeavesNoneForValidation) {
    std::string path = put_file(scratch("one_label.jsonl"),
                                R"({"prompt": "a", "completion": "b", "label": true})");
    Ran ran = shell(program() + " --loss kto --data " + path + " --seq 32 --layers 1 --heads 2 "
                                "--channels 32 --micro-batch 1 --device cpu");
    EXPECT_NE(ran.status, 0);
    EXPECT_HAS(ran.text, path + " fills one window of 32 tokens, and validation needs another: give "
                         "more lines or a smaller --seq, or validation files with --val");
}

// The caches of many slots do not fit: the error says how many do, and so many are accepted. Ranks
// along dp share the answers out, so two of them need slots for half.
TEST(Rollouts, SlotsThatDoNotFitAreFewer) {
    std::string common = rollout_run(letters(), "--layers 2 --heads 4 --channels 64 --batch-tokens 32768 "
                                           "--micro-batch 8 --slots 1024 --explain ");
    Ran ran = shell(common + "--memory 0.02");
    EXPECT_NE(ran.status, 0);
    EXPECT_HAS(ran.text, "--memory 0.02 is less: these flags fit: --slots 256\n");
    EXPECT_EQ(shell(common + "--memory 0.02 --slots 256").status, 0);
    EXPECT_NE(shell(common + "--memory 0.02 --slots 512").status, 0);

    // The bytes of a line of the memory table.
    auto bytes = [&](const std::string& flags, const std::string& line) {
        std::string text = shell(common + flags).text;
        size_t at = text.find(line);
        return at == text.npos ? 0 : atoll(text.c_str() + at + line.size());
    };
    EXPECT_EQ(bytes("", "key/value cache"), 1024 * 32 * 2 * 2 * 64 * 4);
    EXPECT_EQ(bytes("--local-ranks 2", "key/value cache"), 512 * 32 * 2 * 2 * 64 * 4);

    // The starting weights are counted: as many bytes as the weights, or the adapters' alone.
    EXPECT_EQ(bytes("", "starting weights"), 0);
    EXPECT_EQ(bytes("--beta 0.1", "starting weights"), bytes("--beta 0.1", "  weights"));
    EXPECT_LT(bytes("--beta 0.1 --lora 2", "starting weights"), bytes("", "  weights") / 8);
    EXPECT_GT(bytes("--beta 0.1 --lora 2", "starting weights"), 0);
}

// A manifest's answers are believed field by field.
TEST(Rollouts, BrokenAnswersOfAManifestAreRefused) {
    Rollouts r = {0, {{1, 2, 3}, {1, 4}}, {1, 1}, {0.5f, -0.5f}, 0.5, 1.5, 0, 0.25, {-1, -2}, {-3}, 1};
    EXPECT_TRUE(rollouts_json(r, 1).is_null()); // spent
    const nlohmann::json good = nlohmann::json::parse(rollouts_json(r, 2).dump()); // as from a file
    ASSERT_EQ(check_rollouts_json(good), "");
    Rollouts back = rollouts_of(good);
    EXPECT_EQ(rollouts_json(back, 2), good);
    EXPECT_EQ(back.advantages, r.advantages);
    EXPECT_TRUE(rollouts_of({}).tokens.empty());

    for (auto [key, value] : std::map<std::string, nlohmann::json>{
             {"tokens", {1, 2}}, {"prompts", {1}}, {"advantages", {0.5, 1}}, {"old", "x"},
             {"reference", {-1}}, {"means", {1, 2}}, {"updates", 0}}) {
        nlohmann::json bad = good;
        bad[key] = value;
        EXPECT_NE(check_rollouts_json(bad), "") << key;
        bad.erase(key);
        EXPECT_NE(check_rollouts_json(bad), "") << key;
    }
    nlohmann::json bad = good;
    bad["prompts"] = {1, 3}; // longer than its answer
    EXPECT_NE(check_rollouts_json(bad), "");
}

// ----------------------------------------------------------------------------
// rewards by a program

// Let a script reward two answers. Returns "" or what is wrong.
static std::string scripted(const std::string& script, std::vector<double>* rewards,
                            double seconds = 20) {
    std::string path = put_file(scratch("reward.sh"), script);
    std::vector<nlohmann::json> answers = {{{"prompt", "a"}, {"completion", "b\xff; touch x"}},
                                           {{"prompt", "c"}, {"completion", "d"}}};
    rewards->clear();
    return command_rewards("sh " + path, seconds, answers, rewards);
}

TEST(RewardPrograms, ReadLinesAndPrintNumbers) {
    std::vector<double> rewards;
    EXPECT_EQ(scripted("cat > " + scratch("seen") + "; echo 1.5; echo '{\"reward\": -2}'", &rewards), "");
    EXPECT_EQ(rewards, std::vector<double>({1.5, -2}));
    EXPECT_EQ(read_file(scratch("seen")), "{\"completion\":\"b\xef\xbf\xbd; touch x\",\"prompt\":\"a\"}\n"
                                          "{\"completion\":\"d\",\"prompt\":\"c\"}\n");

    // It need not read, and may print without a newline at the end.
    EXPECT_EQ(scripted("printf '0\\n1'", &rewards), "");
    EXPECT_EQ(rewards, std::vector<double>({0, 1}));

    // No shell reads the command: its words are arguments.
    rewards.clear();
    EXPECT_HAS(command_rewards("echo 1; echo 2", 20, {1}, &rewards), "printed \"1; echo 2\" in line 1");
    rewards.clear();
    EXPECT_EQ(command_rewards("  echo   3 ", 20, {1}, &rewards), "");
}

TEST(RewardPrograms, ThatFailSayWhy) {
    std::vector<double> rewards;
    EXPECT_HAS(scripted("echo 1", &rewards), "printed 1 lines for 2 answers: print a number for each");
    EXPECT_HAS(scripted("echo 1; echo 2; echo 3", &rewards), "printed 3 lines for 2 answers");
    for (const char* none : {"NaN", "1e999", "-2e15", "yes", "null", "[1]", "{\"score\": 1}", "", "\"1\""})
        EXPECT_HAS(scripted(concat("echo 1; echo '", none, "'"), &rewards), "in line 2: print a number");
    EXPECT_HAS(scripted("echo 1; echo 2; exit 3", &rewards), "ended with status 3");
    EXPECT_HAS(scripted("kill -9 $$", &rewards), "was ended by signal 9");
    EXPECT_HAS(scripted("yes 1", &rewards), "prints more than a number for each answer");
    EXPECT_HAS(command_rewards("/no/such/program x", 1, {1}, &rewards), "cannot be started (No such file");

    // A program that hangs is killed, and so is what it has started, which holds its output open.
    for (const char* hang : {"sleep 100", "exec >&-; sleep 100", "sleep 100 & echo 1; echo 2"}) {
        double start = clock_seconds();
        EXPECT_HAS(scripted(hang, &rewards, 0.3), "took longer than 0.3 seconds and was killed");
        EXPECT_LT(clock_seconds() - start, 10) << hang;
    }
}

// Whether a process has ended. One that nobody has waited for yet is a zombie.
static bool has_ended(pid_t pid) {
    std::string stat = read_file(concat("/proc/", pid, "/stat"));
    return stat.empty() || has(stat, ") Z ");
}

// A program ends with the run that started it, even if SIGKILL ends the run. This one reads nothing
// and waits for nobody; nor does what it has started stay behind, in a session of its own.
TEST(RewardPrograms, EndWithTheRun) {
    std::string file = scratch("pids"), made = scratch("pids.new");
    std::filesystem::remove(file);
    pid_t run = fork();
    if (run == 0) {
        std::vector<double> rewards;
        scripted("setsid sleep 1000 & echo $$ $! >" + made + "; mv " + made + " " + file +
                     "; while :; do sleep 0.1; done",
                 &rewards, 1000);
        _exit(0);
    }

    // Kill the run when both processes are there.
    for (int i = 0; i < 1000 && !std::filesystem::exists(file); i++)
        usleep(10000);
    std::istringstream pids(read_file(file));
    pid_t program = 0, child = 0;
    pids >> program >> child;
    ASSERT_GT(child, 0);
    EXPECT_FALSE(has_ended(program) || has_ended(child));
    kill(run, SIGKILL);
    waitpid(run, nullptr, 0);

    // Both end soon.
    for (int i = 0; i < 500 && !(has_ended(program) && has_ended(child)); i++)
        usleep(10000);
    EXPECT_TRUE(has_ended(program));
    EXPECT_TRUE(has_ended(child));
    kill(program, SIGKILL);
    kill(child, SIGKILL);
}

// A parent may have had this run ignore SIGCHLD. Then the system would keep no exit status.
TEST(RewardPrograms, LeaveAStatusWhereSigchldIsIgnored) {
    std::vector<double> rewards;
    for (const char* script : {"echo 1; echo 2", "echo 1; echo 2; exit 3"}) {
        signal(SIGCHLD, SIG_IGN);
        std::string wrong = scripted(script, &rewards);
        bool fails = has(script, "exit");
        EXPECT_EQ(wrong.empty(), !fails) << wrong;
        EXPECT_EQ(has(wrong, "ended with status 3"), fails) << wrong;
    }
    signal(SIGCHLD, SIG_DFL);
}

// A program gives the same rewards to all layouts as the verifier that it copies; and if it fails
// in a later step, all ranks end, with one line, and the last checkpoint goes on.
TEST(RewardPrograms, AreRunByOneRank) {
    std::string count = scratch("count");
    std::string script = put_file(scratch("letters.sh"), "echo x >> " + count +
                                  "; sed 's/.*\"completion\":\"[a-z].*/1/; t; s/.*/0/'\n");
    std::string flags = "--layers 1 --heads 2 --channels 32 --batch-tokens 512 --micro-batch 8 --lr 1e-2 "
                        "--group 4 --local-ranks 2 --save-every 1 --steps 2 --out ";
    std::string by = scratch("by"), own = scratch("own");
    std::string ignores = "trap '' CHLD; "; // as some parents do
    Ran ran = shell(ignores + rollout_run(letters(), flags + by + " --reward 'command:sh " + script + "'"));
    ASSERT_EQ(ran.status, 0) << ran.text;
    EXPECT_EQ(read_file(count), "x\nx\n");
    ASSERT_EQ(shell(rollout_run(letters(), flags + own)).status, 0);
    EXPECT_EQ(step_log(by, {"reward", "loss", "grad_norm"}),
              step_log(own, {"reward", "loss", "grad_norm"}));

    // A checkpoint's program is shown, and not run, unless the command line names it; no more is
    // one of a file of flags.
    std::string resumes = "OMP_NUM_THREADS=1 " + program() + " --resume --device cpu --out " + by;
    std::string named = " --reward 'command:sh " + script + "'";
    std::string file = put_file(scratch("flags.cfg"), "reward = command:sh " + script + "\n");
    for (std::string flags : {std::string(), " --config " + file, named + " --config " + file}) {
        ran = shell(resumes + " --steps 2" + flags);
        bool good = has(flags, "--reward");
        EXPECT_EQ(ran.status, good ? 0 : 1) << ran.text;
        EXPECT_EQ(has(ran.text, "--reward 'command:sh " + script + "' comes from a file"), !good);
    }
    EXPECT_EQ(read_file(count), "x\nx\n");

    // One that fails ends the run after a save of the steps before it.
    put_file(script, "[ -e " + scratch("once") + " ] && exit 1; touch " + scratch("once") +
             "; sed 's/.*/1/'\n");
    std::filesystem::remove(scratch("once"));
    ran = shell(resumes + " --steps 5 --save-every 0 --sample-tokens 0" + named);
    EXPECT_NE(ran.status, 0);
    EXPECT_TRUE(std::filesystem::exists(by + "/step_00000003")) << ran.text;

    put_file(script, "echo broken >&2; exit 1\n");
    ran = shell(resumes + " --steps 4" + named);
    EXPECT_NE(ran.status, 0);
    EXPECT_HAS(ran.text, "ended with status 1: what it said is above; --resume goes on from the last checkpoint");
    size_t at = ran.text.find("_gpt: error");
    EXPECT_EQ(ran.text.find("_gpt: error", at + 1), std::string::npos) << ran.text;
    put_file(script, "sed 's/.*/1/'\n");
    ran = shell(resumes + " --steps 4 --sample-tokens 0" + named);
    EXPECT_EQ(ran.status, 0) << ran.text;
    EXPECT_HAS(ran.text, "resumed at step 3");
}
