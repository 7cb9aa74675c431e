// tokenizer_export.h - the files from which transformers makes the tokens that a Tokenizer makes
//   A tokenizer.json and a SentencePiece model are copied as they are; GPT-2's pair, tiktoken,
//   llama2.c's, bytes and SentencePiece's BPE become a tokenizer.json that gives the same tokens.
//   What a tokenizer.json cannot say exactly is not written, and why is said.
#pragma once
#include <map>
#include <set>
#include "tokenizer_files.h"

inline std::string piece_text(const Tokenizer& t, std::string_view bytes) {
    if (t.sentencepiece) return replace_all(std::string(bytes), " ", "\xe2\x96\x81");
    static const std::vector<std::string> letter_of = [] {
        std::vector<std::string> of(256);
        for (size_t c = 0; c < byte_letters().size(); c++) { // UTF-8 of at most two bytes
            char two[] = {char(0xc0 | c >> 6), char(0x80 | (c & 0x3f)), 0};
            if (byte_letters()[c] >= 0)
                of[size_t(byte_letters()[c])] = c < 0x80 ? std::string(1, char(c)) : two;
        }
        return of;
    }();
    std::string text;
    for (char b : bytes) text += letter_of[(unsigned char)b];
    return text;
}

// What a file calls a token; "": it is none
inline std::vector<std::string> token_texts(const Tokenizer& t) {
    std::vector<std::string> texts(size_t(t.vocab_size));
    for (size_t i = 0; i < texts.size(); i++)
        texts[i] =
            piece_text(t, t.kind == TokenizerKind::BYTE ? std::string(1, char(i)) : t.pieces[i]);
    for (int b = 0; t.sentencepiece && b < 256; b++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02hhX>", (unsigned char)b);
        if (t.byte_token[size_t(b)] >= 0) texts[size_t(t.byte_token[size_t(b)])] = name;
    }
    if (t.unknown >= 0) texts[size_t(t.unknown)] = "<unk>"; // pieces have what decoding shows
    for (const auto& [text, token] : t.special.ids) texts[size_t(token)] = text;
    return texts;
}

// Pairs of equal rank, which make the same piece, are in the order of their pieces.
inline std::vector<std::string> merge_texts(const Tokenizer& t,
                                            const std::vector<std::string>& texts) {
    std::vector<Merge> merges;
    for (const Merge& m : t.merges)
        if (m.rank != NO_RANK) merges.push_back(m);
    std::sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) {
        return std::pair(a.rank, a.pair) < std::pair(b.rank, b.pair);
    });
    std::vector<std::string> lines;
    for (const Merge& m : merges)
        lines.push_back(texts[size_t(m.pair >> 32)] + " " + texts[size_t(uint32_t(m.pair))]);
    return lines;
}

// Around a model of bytes: GPT-2's letters, and words as the patterns cut them.
inline void add_byte_level(nlohmann::ordered_json* j, const Tokenizer& t) {
    nlohmann::ordered_json steps = nlohmann::json::array();
    for (const std::string& pattern : t.pattern_texts)
        steps.push_back({{"type", "Split"},
                         {"pattern", {{"Regex", pattern}}},
                         {"behavior", "Isolated"},
                         {"invert", false}});
    (*j)["decoder"] = {{"type", "ByteLevel"},
                       {"add_prefix_space", false},
                       {"trim_offsets", true},
                       {"use_regex", false}};
    steps.push_back((*j)["decoder"]);
    (*j)["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Around one of characters: U+2581 for spaces, one of them before the text.
inline void add_meta_spaces(nlohmann::ordered_json* j, const Tokenizer& t) {
    auto normalizer = nlohmann::ordered_json::parse(R"({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]})");
    auto decoder = nlohmann::ordered_json::parse(R"({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
    if (t.prefix == Prefix::NONE) normalizer["normalizers"].erase(0), decoder["decoders"].erase(3);
    (*j)["normalizer"] = normalizer, (*j)["decoder"] = decoder;
}

// A token before each text.
inline void add_template(nlohmann::ordered_json* j, int token, const std::string& text) {
    nlohmann::ordered_json first = {{"SpecialToken", {{"id", text}, {"type_id", 0}}}},
                           a = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                           b = {{"Sequence", {{"id", "B"}, {"type_id", 0}}}};
    (*j)["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", {first, a}},
        {"pair", {first, a, first, b}},
        {"special_tokens", {{text, {{"id", text}, {"ids", {token}}, {"tokens", {text}}}}}}};
}

// A tokenizer.json of bytes and of what other files of BPE hold.
inline nlohmann::ordered_json tokenizer_as_json(const Tokenizer& t) {
    auto j = nlohmann::ordered_json::parse(R"({"version": "1.0", "truncation": null,
        "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null, "model": {"type": "BPE", "dropout": null,
        "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null}})");
    std::vector<std::string> texts = token_texts(t);
    nlohmann::ordered_json::object_t
        vocabulary; // by token; its [] would look at all that are there
    for (size_t i = 0; i < texts.size(); i++) {
        if (!texts[i].empty()) vocabulary.emplace_back(texts[i], i);
        if (find_token(t.special.ids, texts[i]) == int(i))
            j["added_tokens"].push_back({{"id", i},
                                         {"content", texts[i]},
                                         {"single_word", false},
                                         {"lstrip", false},
                                         {"rstrip", false},
                                         {"normalized", false},
                                         {"special", true}});
    }
    nlohmann::ordered_json& model = j["model"];
    if (t.unknown >= 0) model["unk_token"] = texts[size_t(t.unknown)];
    model["fuse_unk"] = model["byte_fallback"] = t.sentencepiece;
    model["ignore_merges"] = t.whole_words;
    model["vocab"] = vocabulary, model["merges"] = merge_texts(t, texts);
    t.sentencepiece ? add_meta_spaces(&j, t) : add_byte_level(&j, t);
    if (t.bos >= 0) add_template(&j, t.bos, texts[size_t(t.bos)]);
    return j;
}

// Why a tokenizer.json cannot say it; "": it can
inline std::string not_json(const Tokenizer& t) {
    std::set<std::string> seen;
    if (t.kind == TokenizerKind::UNIGRAM) return "it is unigram";
    if (!t.extra_spaces || !t.added.ids.empty()) return "it drops extra spaces or adds pieces";
    for (const std::string& text : token_texts(t)) {
        for (size_t at = 0, n; at < text.size(); at += n)
            if ((n = utf8_length(std::string_view(text).substr(at))) == 0)
                return "token " + in_quotes(text) + " is no UTF-8";
        if (!text.empty() && !seen.insert(text).second) return "two tokens are " + in_quotes(text);
    }
    return "";
}

inline std::string tokenizer_config(const Tokenizer& t, size_t positions) {
    std::vector<std::string> texts = token_texts(t);
    nlohmann::ordered_json j = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                {"model_input_names", {"input_ids", "attention_mask"}},
                                {"model_max_length", positions},
                                {"clean_up_tokenization_spaces", false}};
    if (t.eot >= 0) j["bos_token"] = j["eos_token"] = texts[size_t(t.eot)];
    if (t.bos >= 0) j["bos_token"] = texts[size_t(t.bos)];
    if (t.unknown >= 0) j["unk_token"] = texts[size_t(t.unknown)];
    return j.dump(2) + "\n";
}

// Name -> bytes. A tokenizer.json stays as it is, with the tokenizer_config.json beside it. So does
// a SentencePiece model, for its own library: transformers' conversion of one gives other tokens
// where pieces have equal scores, so there is a tokenizer.json too where that can be exact.
inline std::string tokenizer_files(std::map<std::string, std::string>* files, const Tokenizer& t,
                                   size_t positions) {
    struct stat s;
    bool folder = stat(t.name.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
    std::string path = folder ? tokenizer_in(t.name) : t.name, wrong;
    std::string beside = path.substr(0, path.rfind('/') + 1) + "tokenizer_config.json";
    bool json = path.ends_with(".json"), model = t.sentencepiece && path.ends_with(".model");
    if (json || model)
        wrong = read_whole_file(path, &(*files)[json ? "tokenizer.json" : "tokenizer.model"]);
    if (wrong.empty() && json && access(beside.c_str(), F_OK) == 0)
        return read_whole_file(beside, &(*files)["tokenizer_config.json"]);
    if (wrong.empty() && !json && !(wrong = not_json(t)).empty())
        wrong = path + ": transformers has no form for it: " + wrong;
    if (!wrong.empty()) return wrong;
    if (!json) (*files)["tokenizer.json"] = tokenizer_as_json(t).dump(1) + "\n";
    (*files)["tokenizer_config.json"] = tokenizer_config(t, positions);
    return "";
}
