// chat_templates.h - which chat format a folder's template computes, or a refusal
//   There is no Jinja here, and a template's text tells nothing unless all of it is known: a space,
//   a token or a system text that gets lost is found by nobody. So a template is one of three:
//     ours        the text with which a format is exported, chat_template_of()
//     published   a text whose hash stands in the table below, beside the format that it equals and
//                 the system text that it brings. test/io/chat_templates_test.py rendered each one
//     unknown     refused: --chat-format names the format, or the data are tokenized already
//   Without a template the tokenizer's special tokens decide, and the run says so.
#pragma once
#include "../rand.h"
#include "chat.h"
#include "files.h"

namespace llmc {

// ----------------------------------------------------------------------------
// published templates

// Templates that equal a format with a system text of its own ("": none), by fnv1a() of their text.
struct PublishedTemplates {
    std::string format, system;
    std::vector<uint64_t> hashes;
};
inline const std::vector<PublishedTemplates>& published_templates() {
    static const std::vector<PublishedTemplates> table = {
        // Dolphin 2.5, OpenOrca, SmolLM, Qwen3-Instruct-2507, -Coder and -VL; axolotl, TRL, Unsloth
        {"chatml", "",
         {0x88bf4138d5c826f0, 0x773d13e188afc917, 0x51db54a41944f247, 0xf6904ae94ef66867,
          0x81d45424a0beddda, 0xff53d7337ccbb396, 0xa41d6bae9b9141bc, 0x17fde6ecda9c7c01,
          0x3751fe8ea48448ab, 0xe8faca59b0472e66, 0x99ac253185d6f7c1, 0x42d92516b0fdee95,
          0x3dbbdd28c4670e85, 0xdaec948531d70f8f, 0x8bfd6052757eabbd}},
        // Qwen2.5-Instruct and -Coder
        {"chatml", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
         {0xe642ce246d7f2e3d, 0xadaa2a0bbac0305f, 0xdab0e3c18598a303, 0xdedd22c04194d239}},
        // SmolLM2-Instruct
        {"chatml", "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
         {0x45ec583d4d25bc3a}},
        // Qwen1.5
        {"chatml", "You are a helpful assistant", {0xc867da37c989d41f}},
        // Qwen1.5-Chat, Qwen2-Instruct, Qwen2.5, Qwen2-VL, Qwen2.5-VL
        {"chatml", "You are a helpful assistant.",
         {0x71242f76359e71e8, 0x16bc91fc7006a16d, 0x8a87094e0e1e24c5, 0x6336937c1429e601,
          0x59dd975ef5774b65}},
        // InternLM2-Chat, Nous-Hermes-2-Mixtral, Dolphin 2.8
        {"chatml-bos", "", {0x52642d07ab0602d8, 0x89bcbd75ce6a3d28, 0x6026a4efc1063551}},
        // Hermes 3
        {"chatml-bos", "You are a helpful assistant.", {0x4312bf7023f3555d}},
        // Llama-2-chat, CodeLlama-Instruct
        {"llama2", "",
         {0xf344eecf1bd3a427, 0x2bb17d55e56025e2, 0x5edcf98a0b16ba28, 0x3c3ecf6866d83ca1,
          0x54f74c2db3c2b5b9}},
        // Meta-Llama-3-Instruct; axolotl, TRL, Unsloth
        {"llama3", "",
         {0x0e60067a5537498e, 0x58f97c63c2f8bd77, 0xf2a9dd138dc335ee, 0x8cd8b2dba5919cff,
          0x87211746dfbc9cbf}},
        // Llama-3.1-Instruct, and its first revision
        {"llama3.1", "", {0xcc0368e1ffb6b958, 0x762a7b60b97bb533}},
        // Mistral-7B-Instruct-v0.1 and v0.2, Mixtral-Instruct: their last revisions
        {"mistral-v1", "", {0x7959c3cbc5cd4fed, 0x46eac0bf5c765c47}},
        // Mistral-7B-Instruct-v0.3 with the system text in the first turn
        {"mistral-v3", "", {0xd1b216bca15950ad}},
        // Mistral-Large-Instruct-2411
        {"mistral-v7", "", {0xe4a9cc594604808a}},
        // Mistral-Small-Instruct of 24B, with no system text of its own
        {"mistral-v7-tekken", "", {0x71e04a49fb8f1f9d, 0xd5d3d1c537cde2bc}},
        // phi-4
        {"phi-4", "", {0x9acdd6b945e8e7f9}},
        // zephyr-7b, TinyLlama-Chat, stablelm-zephyr, ghost-7b; open-instruct, Unsloth
        {"zephyr", "",
         {0x60ae72299886317f, 0xcd8b49000db02c2c, 0x0af6ea9cf9896e56, 0x3ef9c3bc84dbf4a5,
          0x4f538ea416e097dd}},
    };
    return table;
}

// ----------------------------------------------------------------------------
// which format

// The row of a name, or null.
inline const ChatFormat* format_named(const std::string& name) {
    for (const ChatFormat& row : chat_formats())
        if (row.name == name) return &row;
    return nullptr;
}

// Find the format that a template computes. Returns false if its text is not known.
inline bool recognise_template(const std::string& written, ChatFormat* format) {
    // Jinja reads "\r\n" as "\n", and leaves out a newline at the end.
    std::string text = replace_all(written, "\r\n", "\n");
    if (text.ends_with('\n')) text.pop_back();
    for (const ChatFormat& row : chat_formats())
        if (chat_template_of(*format = row) == text) return true;

    // A published text, or our own with a published system text.
    for (const PublishedTemplates& known : published_templates()) {
        *format = *format_named(known.format);
        format->default_system = known.system;
        bool listed = std::ranges::count(known.hashes, fnv1a(text)) > 0;
        if (listed || chat_template_of(*format) == text) return true;
    }
    return false;
}

// Read the chat template of a folder. It stays null if the folder has none.
inline std::string read_chat_template(const std::string& folder, nlohmann::json* found) {
    // A file of its own comes before the key.
    std::string path = folder + "/chat_template.jinja", text;
    if (::access(path.c_str(), R_OK) == 0) {
        std::string wrong = read_whole_file(path, &text);
        *found = text;
        return wrong;
    }

    // The key holds a string, or named templates; take the default one, without tools.
    for (const char* name : {"/tokenizer_config.json", "/chat_template.json"}) {
        nlohmann::json j;
        path = folder + name;
        std::string wrong = ::access(path.c_str(), R_OK) == 0 ? read_json(path, &j) : "";
        if (!wrong.empty()) return wrong;
        if (!j.is_object() || !j.contains("chat_template") || j["chat_template"].is_null())
            continue;
        *found = j["chat_template"];
        nlohmann::json named = *found;
        for (const nlohmann::json& each : named.is_array() ? named : nlohmann::json::array())
            if (each.is_object() && each.value("name", nlohmann::json()) == "default")
                *found = each.value("template", nlohmann::json());
        if (named.is_object()) *found = named.value("default", nlohmann::json());
        if (!found->is_string())
            return path + ": \"chat_template\" is no string, and no list with a \"default\" one";
        return "";
    }
    return "";
}

// Find the row whose special tokens a tokenizer has, or "plain". The marks of Llama 2 and Zephyr
// are text, which no tokenizer shows: such a folder needs its template. mark: what decided.
inline std::string recognise_tokens(const Tokenizer& t, std::string* mark) {
    for (auto [token, name] : {std::pair("<|im_sep|>", "phi-4"), std::pair("<|im_start|>", "chatml"),
                               std::pair("<|start_header_id|>", "llama3"),
                               std::pair("<|user_start|>", "nanochat"),
                               std::pair("[INST]", "mistral-v3")})
        if (find_token(t.special, *mark = token) >= 0) return name;
    *mark = "";
    return "plain";
}

// Choose the format of --chat-format. folder: the model's ("": none); a template beside the
// tokenizer comes first. A name is trusted; the template's system text stays if it is of that name.
inline std::string choose_chat(Chat* chat, const std::string& name, const std::string& folder,
                               const Tokenizer& t) {
    // Look for a template.
    struct stat s;
    bool file = t.kind != TokenizerKind::BYTE && stat(t.name.c_str(), &s) == 0;
    std::string beside = !file ? "" : S_ISDIR(s.st_mode) ? t.name : folder_of(t.name);
    nlohmann::json text;
    std::string at = beside, wrong = beside.empty() ? "" : read_chat_template(beside, &text);
    if (text.is_null() && wrong.empty() && !folder.empty())
        wrong = read_chat_template(at = folder, &text);
    if (!wrong.empty()) return wrong;
    ChatFormat format;
    bool known = text.is_string() && recognise_template(text.get<std::string>(), &format);

    // Take the template's format, or the name's, or what the special tokens say. With a template
    // that is not known only lines that are tokenized already can be read.
    std::string mark, refused, why = "by the chat template";
    if (name == "auto" && text.is_string() && !known) {
        refused = at + ": its chat template equals no format here: name the format that the model "
                       "was trained with, as in --chat-format chatml (--help lists them), or give "
                       "data that are tokenized already (dev/data/tokenize_chat.py makes them)";
        format = *format_named("plain");
        format.name = "none";
        why = "for data that are tokenized already";
    } else if (name != "auto" && !(known && format.name == name)) {
        if (!format_named(name)) return "--chat-format " + name + ": there is no such format";
        format = *format_named(name);
        why = text.is_null() ? "by --chat-format" : "by --chat-format, not the chat template";
    } else if (!known) {
        format = *format_named(recognise_tokens(t, &mark));
        why = mark.empty() ? "for there is no chat template; --chat-format names another"
                           : "by its token " + mark + ", for there is no chat template; "
                             "--chat-format names another";
    }
    if (!format.default_system.empty())
        why += ", with the system text " + in_quotes(format.default_system);
    wrong = chat_open(chat, format, t);
    chat->why = why;
    chat->refused = refused;
    return wrong;
}

} // namespace llmc
