// chat_export.h - an export says how the model was taught to converse, and how an answer ends
//   template   chat_template.jinja, unless the files of the model's folder hold it already
//   end        in eos_token_id of generation_config.json, where generate() reads it, and of
//              config.json; as eos_token, which templates write and llama.cpp's converter reads
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "huggingface.h"
#include "tokenizer_export.h"

namespace llmc {

// Make answers end with `end`, in both configs. Tokens that ended a text before still end one.
inline std::string export_end(ExportTokenizer* e, const Tokenizer& t, int end) {
    std::vector<int> before = {e->eos};
    auto put_first = [&](nlohmann::ordered_json& j) {
        std::vector<int> ends = named_tokens(t, j, "eos_token");
        if (ends.empty())
            ends = before;
        before = ends; // without a generation_config.json it was config.json's
        if (std::count(ends.begin(), ends.end(), end) == 0)
            ends.insert(ends.begin(), end);
        std::erase(ends, -1);
        j["eos_token_id"] = end;
        if (ends.size() > 1) j["eos_token_id"] = ends;
    };
    put_first(e->kept);
    e->eos = end;
    return change_json(e, "generation_config.json", put_first);
}

// Give an export a template in the place of all that it has. The template writes bos_token and
// eos_token, so these must be what the model was trained with.
inline std::string export_template(ExportTokenizer* e, const std::string& text, const Tokenizer& t,
                                   int end) {
    std::vector<std::string> texts = token_texts(t);
    auto name_tokens = [&](nlohmann::ordered_json& j) {
        j.erase("chat_template");
        j["bos_token"] = nullptr;
        if (t.bos_token >= 0) j["bos_token"] = texts[t.bos_token];
        j["eos_token"] = texts[end];
    };
    std::string wrong = change_json(e, "tokenizer_config.json", name_tokens);
    if (wrong.empty() && e->files.count("special_tokens_map.json"))
        wrong = change_json(e, "special_tokens_map.json", name_tokens);

    // Leave out what would stand beside it.
    std::erase_if(e->files, [](const auto& file) {
        return file.first == "chat_template.json" || file.first.starts_with(CHAT_TEMPLATES);
    });
    e->files["chat_template.jinja"] = text;
    return wrong;
}

} // namespace llmc
