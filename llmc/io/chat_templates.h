// chat_templates.h - which chat format a folder's template computes, or a refusal
//   There is no Jinja here, and a template's text tells nothing unless all of it is known: a space,
//   a token or a system text that gets lost is found by nobody. So a template is one of three:
//     ours        the text with which a format is exported, chat_template_of()
//     published   a text whose hash stands in the table below, beside the format that it equals and
//                 the system text that it brings. test/io/chat_templates_test.py rendered each one
//     unknown     refused: --chat-format names the format, or the data are tokenized already
//   Without a template the tokenizer's special tokens decide, and the run says so.
#pragma once
#include "../ops/rand.h"
#include "../comm/text.h"
#include "chat.h"
#include "files.h"
#include "json.h"
#include "tokenizer.h"
#include "tokenizer_files.h"

namespace llmc {

// ----------------------------------------------------------------------------
// published templates

// Templates that equal a format with a system text of its own ("": none): fnv1a() of each text.
struct PublishedTemplates {
    std::string format, system, hashes;
};
inline const std::vector<PublishedTemplates>& published_templates() {
    static const std::vector<PublishedTemplates> table = {
        // Dolphin 2.5, OpenOrca, SmolLM, Qwen3-Instruct-2507, -Coder, -VL; axolotl, TRL, Unsloth
        {"chatml", "",
         "88bf4138d5c826f0 773d13e188afc917 51db54a41944f247 f6904ae94ef66867 81d45424a0beddda "
         "ff53d7337ccbb396 a41d6bae9b9141bc 17fde6ecda9c7c01 3751fe8ea48448ab e8faca59b0472e66 "
         "99ac253185d6f7c1 42d92516b0fdee95 3dbbdd28c4670e85 daec948531d70f8f 8bfd6052757eabbd"},
        {"chatml", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
         "e642ce246d7f2e3d adaa2a0bbac0305f dab0e3c18598a303 dedd22c04194d239"},
        {"chatml", "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
         "45ec583d4d25bc3a"},
        // Qwen1.5
        {"chatml", "You are a helpful assistant", "c867da37c989d41f"},
        // Qwen1.5-Chat, Qwen2-Instruct, Qwen2.5, Qwen2-VL, Qwen2.5-VL
        {"chatml", "You are a helpful assistant.",
         "71242f76359e71e8 16bc91fc7006a16d 8a87094e0e1e24c5 6336937c1429e601 59dd975ef5774b65"},
        // InternLM2-Chat, Nous-Hermes-2-Mixtral, Dolphin 2.8; then Hermes 3
        {"chatml-bos", "", "52642d07ab0602d8 89bcbd75ce6a3d28 6026a4efc1063551"},
        {"chatml-bos", "You are a helpful assistant.", "4312bf7023f3555d"},
        // Llama-2-chat, CodeLlama-Instruct; Llama-3-Instruct; 3.1, with its first revision
        {"llama2", "",
         "f344eecf1bd3a427 2bb17d55e56025e2 5edcf98a0b16ba28 3c3ecf6866d83ca1 54f74c2db3c2b5b9"},
        {"llama3", "",
         "0e60067a5537498e 58f97c63c2f8bd77 f2a9dd138dc335ee 8cd8b2dba5919cff 87211746dfbc9cbf"},
        {"llama3.1", "", "cc0368e1ffb6b958 762a7b60b97bb533"},
        // Mistral-7B-Instruct-v0.1, v0.2, Mixtral-Instruct; v0.3 with the system text in front
        {"mistral-v1", "", "7959c3cbc5cd4fed 46eac0bf5c765c47"},
        {"mistral-v3", "", "d1b216bca15950ad"},
        // Mistral-Large-Instruct-2411; Mistral-Small of 24B, with no system text of its own
        {"mistral-v7", "", "e4a9cc594604808a"},
        {"mistral-v7-tekken", "", "71e04a49fb8f1f9d d5d3d1c537cde2bc"},
        {"phi-4", "", "9acdd6b945e8e7f9"},
        // zephyr-7b, TinyLlama-Chat, stablelm-zephyr, ghost-7b; open-instruct, Unsloth
        {"zephyr", "",
         "60ae72299886317f cd8b49000db02c2c 0af6ea9cf9896e56 3ef9c3bc84dbf4a5 4f538ea416e097dd"},
    };
    return table;
}

// ----------------------------------------------------------------------------
// which format

// The row of a name, or null.
inline const ChatFormat* format_named(const std::string& name) {
    for (const ChatFormat& row : chat_formats())
        if (row.name == name)
            return &row;
    return nullptr;
}

// Find the format that a template computes. Returns false if its text is not known.
inline bool recognise_template(const std::string& written, ChatFormat* format) {
    // Jinja reads "\r\n" as "\n", and leaves out a newline at the end.
    std::string text = replace_all(written, "\r\n", "\n");
    if (text.ends_with('\n')) text.pop_back();
    for (const ChatFormat& row : chat_formats())
        if (chat_template_of(*format = row) == text)
            return true;

    // A published text, or our own with a published system text.
    std::string hash = formatted("%016llx", (unsigned long long)fnv1a(text));
    for (const PublishedTemplates& known : published_templates()) {
        *format = *format_named(known.format);
        format->default_system = known.system;
        if (known.hashes.find(hash) != std::string::npos || chat_template_of(*format) == text)
            return true;
    }
    return false;
}

// Read the chat template of a folder. It stays null if the folder has none.
inline std::string read_chat_template(const std::string& folder, Json* found) {
    for (const char* file : {"chat_template.jinja", "tokenizer_config.json",
                             "chat_template.json"}) {
        // Read a file of its own, which comes first, or a key.
        std::string path = file_in(folder, file);
        std::string text;
        Json j;
        if (::access(path.c_str(), R_OK) != 0)
            continue;
        bool own = path.ends_with(".jinja");
        LLMC_TRY(own ? read_whole_file(path, &text) : read_json(path, &j));
        *found = own ? Json(text) : j.is_object() ? j.value("chat_template", Json()) : nullptr;
        if (found->is_null())
            continue;

        // Take the default one of named templates: it is without tools.
        Json named = found->is_array() ? *found : Json::array();
        if (found->is_object()) *found = found->value("default", Json());
        for (const Json& each : named)
            if (each.is_object() && each.value("name", Json()) == "default")
                *found = each.value("template", Json());
        return found->is_string() ? "" : path + ": \"chat_template\" is no string, and no list "
                                                "with a \"default\" one";
    }
    return "";
}

// Find the row whose special tokens a tokenizer has, or "plain". The marks of Llama 2 and Zephyr
// are text, which no tokenizer shows: such a folder needs its template.
inline std::string recognise_tokens(const Tokenizer& t) {
    for (auto [token, name] : {std::pair("<|im_sep|>", "phi-4"), {"<|im_start|>", "chatml"},
                               {"<|start_header_id|>", "llama3"}, {"<|user_start|>", "nanochat"},
                               {"[INST]", "mistral-v3"}})
        if (find_token(t.special, token) >= 0)
            return name;
    return "plain";
}

// Choose the format of --chat-format. folder: the model's ("": none); a template beside the
// tokenizer comes first. A name is trusted; the template's system text stays if it is of that name.
inline std::string choose_chat(Chat* chat, const std::string& name, const std::string& folder,
                               const Tokenizer& t) {
    // Look for a template.
    std::string at;
    mode_t type = t.kind == TokenizerKind::BYTE ? 0 : file_type(t.name);
    if (type) at = type == S_IFDIR ? t.name : folder_of(t.name);
    Json text;
    std::string wrong = at.empty() ? "" : read_chat_template(at, &text);
    if (text.is_null() && wrong.empty() && !folder.empty())
        wrong = read_chat_template(at = folder, &text);
    if (!wrong.empty())
        return wrong;

    // Take its format, or the name's, or what the special tokens say. With a template that is not
    // known only lines that are tokenized already can be read.
    ChatFormat format;
    bool known = text.is_string() && recognise_template(text.get<std::string>(), &format);
    bool trusted = name != "auto" && !(known && format.name == name);
    std::string chosen = trusted ? name : text.is_null() ? recognise_tokens(t) : "plain";
    if (!format_named(chosen))
        return "--chat-format " + name + ": there is no such format";
    if (trusted || !known)
        format = *format_named(chosen);
    bool refused = !trusted && !known && !text.is_null();
    if (refused)
        format.name = "none";
    wrong = chat_open(chat, format, t);

    // Say why.
    chat->why = trusted   ? "by --chat-format"
                : known   ? "by the chat template"
                : refused ? "for data that are tokenized already"
                          : "by the special tokens, for there is no chat template";
    if (!format.default_system.empty())
        chat->why += ", with the system text " + in_quotes(format.default_system);
    if (chat->end == 0 && only_bytes(t))
        chat->why += ", and the byte 0 ends an answer";
    if (refused)
        chat->refused =
            at + ": its chat template equals no format here: name the format that the model was "
                 "trained with, as in --chat-format chatml (--help lists them), or give data that "
                 "are tokenized already (dev/data/tokenize_chat.py makes them)";
    return wrong;
}

} // namespace llmc
