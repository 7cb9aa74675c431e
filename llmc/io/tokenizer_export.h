// tokenizer_export.h - the files from which transformers makes the tokens that a Tokenizer makes
//   copied      a tokenizer.json, a SentencePiece model
//   converted   GPT-2's pair of files, tiktoken's, llama2.c's, bytes, and SentencePiece's BPE: each
//               to a tokenizer.json that gives the same tokens
//   A tokenizer that tokenizer.json cannot describe exactly is not written; not_json() says why.
#pragma once
#include <map>
#include <set>
#include "../comm/text.h"
#include "files.h"
#include "tokenizer.h"
#include "tokenizer_files.h"

namespace llmc {

// The files of an export beside its weights, and the ids of the tokens around a text.
struct ExportTokenizer {
    int bos = -1, eos = -1; // tokens; -1: not known
    TextFiles files = {};
    std::string chat_template = ""; // for llama.cpp's file
    // keys of the config.json that the model came with
    OrderedJson kept = OrderedJson::object();
};

// The text of a piece in a file: with U+2581 for spaces, or with its bytes as GPT-2's letters.
inline std::string piece_text(const Tokenizer& t, std::string_view bytes) {
    if (t.sentencepiece)
        return replace_all(std::string(bytes), " ", META_SPACE);

    // Make the letter of each byte once, in UTF-8 of at most two bytes.
    static const std::vector<std::string> letter_of = [] {
        std::vector<std::string> of(256);
        const std::vector<int>& byte_of = byte_letters();
        for (size_t c = 0; c < byte_of.size(); c++) {
            if (byte_of[c] < 0) continue;
            char two[] = {char(0xc0 | c >> 6), char(0x80 | (c & 0x3f)), 0};
            of[byte_of[c]] = c < 0x80 ? std::string(1, char(c)) : two;
        }
        return of;
    }();

    std::string text;
    for (char b : bytes)
        text += letter_of[(unsigned char)b];
    return text;
}

// The text of each token in a file, or "" for a token without text.
inline std::vector<std::string> token_texts(const Tokenizer& t) {
    // Write the pieces as a file does.
    bool bytes = t.kind == TokenizerKind::BYTE;
    std::vector<std::string> texts(t.vocab_size);
    for (size_t i = 0; i < texts.size(); i++)
        texts[i] = piece_text(t, bytes ? std::string(1, char(i)) : t.pieces[i]);

    // Replace the texts of byte, unknown and special tokens: their pieces hold what decoding shows.
    for (int b = 0; t.sentencepiece && b < 256; b++)
        if (t.byte_token[b] >= 0)
            texts[t.byte_token[b]] = formatted("<0x%02X>", b);
    if (t.unknown >= 0)
        texts[t.unknown] = "<unk>";
    for (const auto& [text, token] : t.special)
        texts[token] = text;
    return texts;
}

// The merges by rank, each as "left right". Merges of equal rank make the same piece, and are in
// the order of their pairs.
inline std::vector<std::string> merge_texts(const Tokenizer& t,
                                            const std::vector<std::string>& texts) {
    // Take the merges out of the hash table, which has empty slots.
    std::vector<Merge> merges;
    for (const Merge& m : t.merges)
        if (m.rank != NO_RANK) merges.push_back(m);
    std::ranges::sort(merges, {}, [](const Merge& m) { return std::pair(m.rank, m.pair); });

    // Write them in order: a line's number is its rank.
    std::vector<std::string> lines;
    for (const Merge& m : merges)
        lines.push_back(texts[m.pair >> 32] + " " + texts[uint32_t(m.pair)]);
    return lines;
}

// Add the steps around a model of bytes: cut words by the patterns, and write
// bytes as GPT-2's letters.
inline void add_byte_level(OrderedJson* j, const Tokenizer& t) {
    // A pattern only cuts: "Isolated" keeps the text of each match.
    OrderedJson steps = Json::array();
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

// Add the steps around a model of characters: U+2581 for spaces, one of them before the text.
inline void add_meta_spaces(OrderedJson* j, const Tokenizer& t) {
    // Prepend puts the space before the text, Strip takes it away again.
    auto normalizer = OrderedJson::parse(R"({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]})");
    auto decoder = OrderedJson::parse(R"({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");

    // A tokenizer without that space needs neither.
    if (t.prefix == Prefix::NONE) {
        normalizer["normalizers"].erase(0);
        decoder["decoders"].erase(3);
    }
    (*j)["normalizer"] = normalizer;
    (*j)["decoder"] = decoder;
}

// Add the step that puts a token before each text.
inline void add_template(OrderedJson* j, int token, const std::string& text) {
    // In a pair, each of the two texts has the token, though this program never writes pairs.
    OrderedJson first = {{"SpecialToken", {{"id", text}, {"type_id", 0}}}};
    OrderedJson a = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    OrderedJson b = {{"Sequence", {{"id", "B"}, {"type_id", 0}}}};
    (*j)["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", {first, a}},
        {"pair", {first, a, first, b}},
        {"special_tokens", {{text, {{"id", text}, {"ids", {token}}, {"tokens", {text}}}}}}};
}

// A special token as tokenizer.json lists it.
inline OrderedJson special_token_json(int token, const std::string& text) {
    OrderedJson j = {{"id", token}, {"content", text}};
    for (const char* rule : {"single_word", "lstrip", "rstrip", "normalized"})
        j[rule] = false;
    j["special"] = true;
    return j;
}

// Make a tokenizer.json of bytes, or of a BPE that came in another format.
inline OrderedJson tokenizer_as_json(const Tokenizer& t) {
    auto j = OrderedJson::parse(R"({"version": "1.0", "truncation": null,
        "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null, "model": {"type": "BPE", "dropout": null,
        "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null}})");

    // List the vocabulary in the order of its tokens. ordered_json's [] would search it each time.
    std::vector<std::string> texts = token_texts(t);
    OrderedJson::object_t vocabulary;
    for (size_t i = 0; i < texts.size(); i++) {
        if (!texts[i].empty())
            vocabulary.emplace_back(texts[i], i);
        if (find_token(t.special, texts[i]) == int(i))
            j["added_tokens"].push_back(special_token_json(int(i), texts[i]));
    }

    // Describe the model, then the steps around it.
    OrderedJson& model = j["model"];
    if (t.unknown >= 0)
        model["unk_token"] = texts[t.unknown];
    model["byte_fallback"] = t.sentencepiece;
    model["fuse_unk"] = t.sentencepiece;
    model["ignore_merges"] = t.whole_words;
    model["vocab"] = vocabulary;
    model["merges"] = merge_texts(t, texts);
    t.sentencepiece ? add_meta_spaces(&j, t) : add_byte_level(&j, t);
    if (t.bos >= 0)
        add_template(&j, t.bos, texts[t.bos]);
    return j;
}

// Why a tokenizer.json cannot describe a tokenizer, or "" if it can.
inline std::string not_json(const Tokenizer& t) {
    if (t.kind == TokenizerKind::UNIGRAM)
        return "it is unigram";
    if (!t.extra_spaces || !t.added.ids.empty())
        return "it drops extra spaces or adds pieces";

    // The file names tokens by their texts, which must be valid UTF-8 and all different.
    std::set<std::string> seen;
    for (const std::string& text : token_texts(t)) {
        for (size_t at = 0, n; at < text.size(); at += n) {
            n = utf8_length(std::string_view(text).substr(at));
            if (n == 0)
                return "token " + in_quotes(text) + " is no UTF-8";
        }
        if (!text.empty() && !seen.insert(text).second)
            return "two tokens are " + in_quotes(text);
    }
    return "";
}

// Make a tokenizer_config.json. positions: the longest sequence of the model.
inline std::string tokenizer_config(const Tokenizer& t, size_t positions) {
    std::vector<std::string> texts = token_texts(t);
    OrderedJson j = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                     {"model_input_names", {"input_ids", "attention_mask"}},
                     {"model_max_length", positions},
                     {"clean_up_tokenization_spaces", false}};

    // Use the token that ends texts also as the one that begins them, unless there is one.
    if (t.eot >= 0)
        j["bos_token"] = j["eos_token"] = texts[t.eot];
    if (begin_token(t) >= 0)
        j["bos_token"] = texts[begin_token(t)];
    if (t.unknown >= 0)
        j["unk_token"] = texts[t.unknown];
    return j.dump(2) + "\n";
}

// Collect an export's tokenizer files, name -> bytes.
//   tokenizer.json        copied, with the tokenizer_config.json beside it
//   a SentencePiece model copied for its own library, and converted if that can be exact:
//                         transformers' own conversion gives other tokens where scores are equal
//   any other             converted
// The tokenizer_config.json beside any of them is copied too.
inline std::string tokenizer_files(std::map<std::string, std::string>* files, const Tokenizer& t,
                                   size_t positions) {
    std::string path = file_type(t.name) == S_IFDIR ? tokenizer_in(t.name) : t.name;
    std::string beside = path.substr(0, path.rfind('/') + 1) + "tokenizer_config.json";

    // Copy. The tokenizer_config.json stays as it is: it may hold a chat template.
    bool json = path.ends_with(".json");
    bool model = t.sentencepiece && path.ends_with(".model");
    if (json || model)
        LLMC_TRY(read_whole_file(path, &(*files)[json ? "tokenizer.json" : "tokenizer.model"]));
    bool whole = file_type(beside);
    std::string wrong;
    if (whole)
        wrong = read_whole_file(beside, &(*files)["tokenizer_config.json"]);
    if (json && whole) return wrong;

    // Convert.
    std::string why = json ? "" : not_json(t);
    if (!why.empty())
        return path + ": transformers has no form for it: " + why;
    if (!json)
        (*files)["tokenizer.json"] = tokenizer_as_json(t).dump(1) + "\n";
    if (!whole)
        (*files)["tokenizer_config.json"] = tokenizer_config(t, positions);
    return wrong;
}

} // namespace llmc
