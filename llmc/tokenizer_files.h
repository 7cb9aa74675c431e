// tokenizer_files.h - the files that tokenizers come in
//   byte             no file: a token is a byte, the vocabulary 256
//   FOLDER           the first of these that it has: tokenizer.json; vocab.bpe or merges.txt with
//                    encoder.json or vocab.json (GPT-2); tokenizer.model; tokenizer.bin
//   tokenizer.json   Hugging Face's, model BPE, byte-level (GPT-2, Llama 3, Qwen2, SmolLM) or with
//                    byte fallback (Llama 2, Mistral)
//   *.tiktoken       a line a token, "base64 rank"; Llama 3's tokenizer.model too. Pattern and
//                    special tokens are not in the file: they go by its name or by how many ranks
//                    it has (r50k_base, cl100k_base, o200k_base, llama3)
//   tokenizer.model  SentencePiece, BPE or unigram
//   tokenizer.bin    llama2.c's
//   All become one Tokenizer (tokenizer.h). Every function returns "" or one line that says what
//   is wrong. Writing them: tokenizer_export.h
#pragma once
#include <sys/stat.h>
#include <unistd.h>
#include <fstream>
#include <sstream>
#include <nlohmann/json.hpp>
#include "tokenizer.h"

// ----------------------------------------------------------------------------
// what all kinds share

constexpr size_t MAX_TOKENS = size_t(1) << 22; // larger ids come from broken files

inline std::string read_whole_file(const std::string& path, std::string* bytes) {
    struct stat s;
    if (stat(path.c_str(), &s) != 0) return path + ": " + strerror(errno);
    if (!S_ISREG(s.st_mode)) return path + ": is no file";
    std::ifstream in(path, std::ios::binary);
    bytes->assign(std::istreambuf_iterator<char>(in), {});
    return in.good() || in.eof() ? "" : path + ": " + strerror(errno);
}

// Text of a file in a message: one line, whatever it holds.
inline std::string in_quotes(const std::string& text) {
    nlohmann::json j = text.substr(0, 80);
    return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

inline bool set_piece(Tokenizer* t, int64_t token, const std::string& bytes) {
    if (token < 0 || size_t(token) >= MAX_TOKENS) return false;
    if (t->pieces.size() <= size_t(token)) t->pieces.resize(size_t(token) + 1);
    t->pieces[size_t(token)] = bytes;
    return true;
}

// a piece that words are made of: of equal ones the first
inline void set_word_piece(Tokenizer* t, int token) {
    const std::string& piece = t->pieces[size_t(token)];
    if (piece.empty()) return;
    t->ids.insert({piece, token});
    t->longest = std::max(t->longest, piece.size());
}

// Its text is never made of words.
inline void add_special(Tokenizer* t, const std::string& text, int token) {
    t->ids.erase(text);
    fixed_add(&t->special, text, token);
}

inline Merge merge_of(int left, int right, uint32_t rank, int token) {
    return {uint64_t(left) << 32 | uint32_t(right), rank, uint32_t(token)};
}

// Each way to cut a piece into two pieces is a merge; the higher a piece's score the lower its
// rank, equal scores have equal ranks and merge from the left.
inline void set_merges_from_scores(Tokenizer* t, const std::vector<float>& scores) {
    std::vector<int> order;
    for (const auto& [piece, token] : t->ids) order.push_back(token);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return std::pair(-scores[size_t(a)], a) < std::pair(-scores[size_t(b)], b);
    });
    std::vector<Merge> merges;
    uint32_t rank = 0;
    for (size_t i = 0; i < order.size(); i++) {
        if (i > 0 && scores[size_t(order[i])] != scores[size_t(order[i - 1])]) rank++;
        std::string_view piece = t->pieces[size_t(order[i])];
        for (size_t cut = 1; cut < piece.size(); cut++) {
            int left = find_token(t->ids, piece.substr(0, cut));
            int right = left < 0 ? -1 : find_token(t->ids, piece.substr(cut));
            if (right >= 0) merges.push_back(merge_of(left, right, rank, order[i]));
        }
    }
    set_merges(t, merges);
}

// The tokens of single bytes, which byte-level BPE starts from.
inline std::string set_bytes(Tokenizer* t) {
    for (int b = 0; b < 256; b++) {
        t->byte_token[size_t(b)] = find_token(t->ids, std::string(1, char(b)));
        if (t->byte_token[size_t(b)] < 0)
            return "the vocabulary has no token for byte " + std::to_string(b) +
                   ": it is not whole, or not a byte-level one";
    }
    return "";
}

// "<0x0A>": the byte, or -1
inline int fallback_byte(const std::string& piece) {
    unsigned b = 0;
    char end = 0;
    bool is = piece.size() == 6 && sscanf(piece.c_str(), "<0x%2X%c", &b, &end) == 2 && end == '>';
    return is ? int(b) : -1;
}

// All bytes have a token; or none has one, and there is one for what is unknown.
inline bool writes_any_text(const Tokenizer& t) {
    auto missing = std::count(t.byte_token.begin(), t.byte_token.end(), -1);
    return missing == 0 || (missing == 256 && t.unknown >= 0);
}

inline std::string replace_all(std::string text, const std::string& from, const std::string& to) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
    return text;
}

// Where no piece has a space after another character, words that begin at spaces are exact: no
// merge spans them, and a word that comes again is looked up.
inline std::string split_at_spaces(Tokenizer* t) {
    for (const auto& [piece, token] : t->ids)
        if (piece.find(' ', piece.find_first_not_of(' ')) != std::string::npos) return "";
    return add_pattern(t, " *[^ ]+| +");
}

// ----------------------------------------------------------------------------
// patterns that files do not carry

constexpr const char* GPT2_PATTERN =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* CL100K_PATTERN =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* O200K_PATTERN =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// ----------------------------------------------------------------------------
// GPT-2: vocab.bpe and encoder.json

// GPT-2 writes the bytes that are no printable Latin-1 character as the characters from U+0100 on:
// the byte of a character, -1: of none.
inline const std::vector<int>& byte_letters() {
    auto printable = [](int b) { return (b > 32 && b < 127) || (b > 160 && b != 173); };
    static const std::vector<int> byte_of = [&] {
        std::vector<int> of(256, -1);
        for (int b = 0; b < 256; b++) printable(b) ? void(of[size_t(b)] = b) : of.push_back(b);
        return of;
    }();
    return byte_of;
}

// The bytes that text stands for; false: it has other characters.
inline bool byte_level(std::string_view text, std::string* bytes) {
    const std::vector<int>& byte_of = byte_letters();
    bytes->clear();
    for (size_t i = 0; i < text.size(); i++) {
        size_t c = (unsigned char)text[i];
        if (c >= 0x80 && i + 1 < text.size())
            c = (c & 0x1f) << 6 | ((unsigned char)text[++i] & 0x3f);
        if ((unsigned char)text[i] >= 0xe0 || c >= byte_of.size() || byte_of[c] < 0) return false;
        bytes->push_back(char(byte_of[c]));
    }
    return true;
}

// How a file writes pieces: as bytes in GPT-2's letters, or as characters with U+2581 for spaces.
inline std::string piece_bytes(const Tokenizer& t, const std::string& text) {
    std::string bytes;
    if (t.sentencepiece) {
        int b = fallback_byte(text);
        return b >= 0 ? std::string(1, char(b)) : replace_all(text, "\xe2\x96\x81", " ");
    }
    return byte_level(text, &bytes) ? bytes : text;
}

inline std::string read_vocabulary(Tokenizer* t, const nlohmann::json& vocabulary) {
    for (const auto& [text, id] : vocabulary.items()) {
        int64_t token = id.is_number_integer() ? id.get<int64_t>() : -1;
        if (!set_piece(t, token, piece_bytes(*t, text)))
            return "the token of " + in_quotes(text) + " is " +
                   (id.is_structured() ? "a list" : id.dump()) + ", which is no token";
        int b = t->sentencepiece ? fallback_byte(text) : -1;
        if (b >= 0)
            t->byte_token[size_t(b)] = int(token);
        else
            set_word_piece(t, int(token));
    }
    return t->sentencepiece ? "" : set_bytes(t);
}

// The next merge: their order is their rank.
inline std::string add_merge(const Tokenizer& t, std::vector<Merge>* merges, const std::string& l,
                             const std::string& r) {
    std::string left = piece_bytes(t, l), right = piece_bytes(t, r);
    int a = find_token(t.ids, left), b = find_token(t.ids, right);
    int both = find_token(t.ids, left + right);
    if (a < 0 || b < 0 || both < 0)
        return "merge " + std::to_string(merges->size() + 1) + ", " + in_quotes(l) + " and " +
               in_quotes(r) +
               ", is not of the vocabulary's pieces: the vocabulary is another tokenizer's, or "
               "the "
               "file is broken";
    merges->push_back(merge_of(a, b, uint32_t(merges->size()), both));
    return "";
}

// "left right"
inline std::string add_merge_line(const Tokenizer& t, std::vector<Merge>* merges,
                                  const std::string& line) {
    size_t space = line.find(' ');
    if (space == std::string::npos || space == 0 || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string::npos)
        return "merge " + std::to_string(merges->size() + 1) + ", " + in_quotes(line) +
               ", is not two pieces with a space between them";
    return add_merge(t, merges, line.substr(0, space), line.substr(space + 1));
}

inline std::string read_json(const std::string& path, nlohmann::json* j) {
    std::string bytes, wrong = read_whole_file(path, &bytes);
    if (!wrong.empty()) return wrong;
    *j = nlohmann::json::parse(bytes, nullptr, false);
    return j->is_object() ? "" : path + ": is no JSON object, or cut short: get it again";
}

inline std::string read_gpt2(Tokenizer* t, const std::string& merges_path,
                             const std::string& vocabulary_path) {
    std::string text, line;
    nlohmann::json vocabulary;
    std::string wrong = read_json(vocabulary_path, &vocabulary);
    if (wrong.empty()) wrong = read_whole_file(merges_path, &text);
    if (!wrong.empty()) return wrong;
    t->kind = TokenizerKind::BPE;
    if (!(wrong = read_vocabulary(t, vocabulary)).empty()) return vocabulary_path + ": " + wrong;
    std::vector<Merge> merges;
    std::istringstream in(text);
    for (bool first = true; wrong.empty() && std::getline(in, line); first = false) {
        if (line.ends_with('\r')) line.pop_back();
        if (!line.empty() && !(first && line.starts_with("#version")))
            wrong = add_merge_line(*t, &merges, line);
    }
    if (!wrong.empty()) return merges_path + ": " + wrong;
    set_merges(t, merges);
    int end = find_token(t->ids, "<|endoftext|>");
    if (end >= 0) add_special(t, "<|endoftext|>", end);
    return add_pattern(t, GPT2_PATTERN);
}

// ----------------------------------------------------------------------------
// Hugging Face's tokenizer.json

inline std::string not_built(const std::string& what, const nlohmann::json& j) {
    return what + " " + (j.is_string() ? j.get<std::string>() : std::string(j.type_name())) +
           " is not built; make token shards (.bin) with its own library";
}

// A part of the file as the list of its steps: none, one, or a sequence.
inline nlohmann::json json_steps(const nlohmann::json& j, const char* part, const char* sequence) {
    if (!j.contains(part) || j[part].is_null()) return nlohmann::json::array();
    return j[part].at("type") == "Sequence" ? j[part].at(sequence)
                                            : nlohmann::json::array({j[part]});
}

inline std::string read_normalizer(Tokenizer* t, const nlohmann::json& j) {
    const std::string type = j.at("type");
    const std::pair<const char*, int> forms[] = {
        {"NFC", UTF8PROC_COMPOSE},
        {"NFD", UTF8PROC_DECOMPOSE},
        {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
        {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
    };
    for (auto [name, options] : forms)
        if (type == name) return t->unicode_form = options | UTF8PROC_STABLE, "";
    if (type == "Prepend" && t->sentencepiece) return t->prefix = Prefix::SPACE, "";
    if (type == "Replace" && t->sentencepiece && j.at("pattern").value("String", "") == " ")
        return "";
    return not_built("normalizer", j["type"]);
}

inline std::string read_pre_tokenizer(Tokenizer* t, const nlohmann::json& j) {
    const std::string type = j.at("type");
    if (type == "ByteLevel") {
        if (j.value("add_prefix_space", false)) return not_built("add_prefix_space of", j["type"]);
        return j.value("use_regex", true) ? add_pattern(t, GPT2_PATTERN) : "";
    }
    if (type == "Digits")
        return add_pattern(t, j.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
    if (type == "Metaspace" && t->sentencepiece) {
        const std::string scheme =
            j.value("prepend_scheme", j.value("add_prefix_space", true) ? "always" : "never");
        if (scheme != "never") t->prefix = Prefix::SPACE_UNLESS_THERE;
        t->prefix_once = scheme == "first";
        return j.value("split", true) ? add_pattern(t, " [^ ]*") : "";
    }
    if (type != "Split") return not_built("pre_tokenizer", j["type"]);
    // what a pattern leaves between its matches is a word in any case, so that no text is lost
    const std::string behavior = j.at("behavior");
    if (behavior != "Isolated" && !(behavior == "Removed" && j.value("invert", false)))
        return not_built("pre_tokenizer Split, behavior", j["behavior"]);
    bool literal = j.at("pattern").contains("String");
    return add_pattern(t, j["pattern"].at(literal ? "String" : "Regex"), literal);
}

// The token that a template puts before a text, if it does.
inline void read_post_processor(Tokenizer* t, const nlohmann::json& j) {
    if (j.at("type") != "TemplateProcessing" || j.at("single").empty()) return;
    const auto& first = j["single"].at(0);
    if (first.contains("SpecialToken"))
        t->bos = find_token(t->special.ids, std::string(first["SpecialToken"].at("id")));
}

inline std::string read_added_tokens(Tokenizer* t, const nlohmann::json& j) {
    for (const auto& each : j) {
        const std::string text = each.at("content");
        int64_t token = each.at("id");
        if (!set_piece(t, token, text))
            return "the token of " + in_quotes(text) + " is " + std::to_string(token) +
                   ", which is no token";
        each.value("special", false) ? add_special(t, text, int(token))
                                     : fixed_add(&t->added, text, int(token));
    }
    return "";
}

inline std::string read_tokenizer_json_object(Tokenizer* t, const nlohmann::json& j) {
    const auto& model = j.at("model");
    if (model.value("type", "BPE") != "BPE") return not_built("model", model["type"]);
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
        if (model.contains(key) && !model[key].is_null() && model[key] != "")
            return not_built(key, model[key]);
    t->kind = TokenizerKind::BPE;
    t->sentencepiece = model.value("byte_fallback", false);
    t->whole_words = model.value("ignore_merges", false);
    std::string wrong = read_vocabulary(t, model.at("vocab"));
    if (model.contains("unk_token") && model["unk_token"].is_string())
        t->unknown = find_token(t->ids, std::string(model["unk_token"]));
    std::vector<Merge> merges;
    for (const auto& each : model.at("merges"))
        if (wrong.empty())
            wrong = each.is_array() ? add_merge(*t, &merges, each.at(0), each.at(1))
                                    : add_merge_line(*t, &merges, each);
    set_merges(t, merges);
    if (wrong.empty() && j.contains("added_tokens"))
        wrong = read_added_tokens(t, j["added_tokens"]);
    for (const auto& each : json_steps(j, "normalizer", "normalizers"))
        if (wrong.empty()) wrong = read_normalizer(t, each);
    for (const auto& each : json_steps(j, "pre_tokenizer", "pretokenizers"))
        if (wrong.empty()) wrong = read_pre_tokenizer(t, each);
    if (wrong.empty() && t->sentencepiece && t->patterns.empty()) wrong = split_at_spaces(t);
    for (const auto& each : json_steps(j, "post_processor", "processors"))
        read_post_processor(t, each);
    return wrong;
}

inline std::string read_tokenizer_json(Tokenizer* t, const std::string& path) {
    nlohmann::json j;
    std::string wrong = read_json(path, &j);
    if (!wrong.empty()) return wrong;
    try { // the library throws where a key is missing or of another type: here it ends
        wrong = read_tokenizer_json_object(t, j);
    } catch (const nlohmann::json::exception& e) {
        wrong = std::string("is not a tokenizer.json as Hugging Face writes it: ") + e.what();
    }
    return wrong.empty() ? "" : path + ": " + wrong;
}

// ----------------------------------------------------------------------------
// tiktoken: "base64 rank" lines

// What the file does not say; a special token is the rank after the last one, plus its place.
struct KnownRanks {
    const char* name;
    size_t ranks;
    const char* pattern;
    std::vector<std::pair<std::string, int>> special;
};
inline std::vector<KnownRanks> known_ranks() {
    const char *end = "<|endoftext|>", *prompt = "<|endofprompt|>";
    std::vector<KnownRanks> known = {
        {"r50k_base", 50256, GPT2_PATTERN, {{end, 0}}},
        {"cl100k_base", 100256, CL100K_PATTERN, {{end, 1}, {prompt, 20}}},
        {"o200k_base", 199998, O200K_PATTERN, {{end, 1}, {prompt, 20}}},
        {"llama3", 128000, CL100K_PATTERN, {}}};
    std::vector<std::string> llama(256);
    llama[0] = "<|begin_of_text|>", llama[1] = "<|end_of_text|>", llama[9] = "<|eot_id|>";
    llama[6] = "<|start_header_id|>", llama[7] = "<|end_header_id|>";
    for (int place = 0, reserved = 0; place < 256; place++) {
        std::string& name = llama[size_t(place)];
        if (name.empty()) name = "<|reserved_special_token_" + std::to_string(reserved++) + "|>";
        known.back().special.push_back({name, place});
    }
    return known;
}

inline bool base64_decode(std::string_view text, std::string* bytes) {
    static const std::string_view DIGITS =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes->clear();
    if (text.empty() || text.size() % 4 != 0) return false;
    while (text.ends_with('=')) text.remove_suffix(1);
    uint32_t bits = 0;
    for (size_t i = 0; i < text.size(); i++) {
        size_t digit = DIGITS.find(text[i]);
        if (digit == std::string_view::npos) return false;
        bits = bits << 6 | uint32_t(digit);
        if (i % 4 > 0) bytes->push_back(char(bits >> (6 - 2 * (i % 4))));
    }
    return true;
}

inline std::string read_tiktoken(Tokenizer* t, const std::string& path, const std::string& text) {
    std::istringstream in(text);
    std::string line, bytes;
    size_t lines = 0;
    while (std::getline(in, line)) {
        size_t space = line.find(' ');
        char* end = nullptr;
        long rank = space == std::string::npos ? -1 : strtol(line.c_str() + space, &end, 10);
        bool good = rank >= 0 && end != line.c_str() + space && (*end == 0 || *end == '\r') &&
                    base64_decode(std::string_view(line).substr(0, space), &bytes);
        lines++;
        if (!good || !set_piece(t, rank, bytes))
            return path + ": line " + std::to_string(lines) + ", " + in_quotes(line) +
                   ", is not base64, a space and a rank: the file is broken or no tiktoken file";
        set_word_piece(t, int(rank));
    }
    std::vector<KnownRanks> known = known_ranks();
    auto row = std::find_if(known.begin(), known.end(), [&](const KnownRanks& k) {
        return path.find(k.name, path.rfind('/') + 1) != std::string::npos;
    });
    if (row == known.end())
        row = std::find_if(known.begin(), known.end(),
                           [&](const KnownRanks& k) { return k.ranks == lines; });
    if (row == known.end())
        return path + ": its " + std::to_string(lines) +
               " ranks are of no encoding known here, so its pattern is not known: it may be cut "
               "short; a name with r50k_base, cl100k_base, o200k_base or llama3 says "
               "which, or give a tokenizer.json";
    t->kind = TokenizerKind::BPE, t->whole_words = true;
    std::vector<float> scores(t->pieces.size());
    for (size_t i = 0; i < scores.size(); i++) scores[i] = -float(i);
    std::string wrong = set_bytes(t);
    if (!wrong.empty()) return path + ": " + wrong;
    set_merges_from_scores(t, scores);
    int after = int(t->pieces.size());
    for (const auto& [name, place] : row->special) {
        set_piece(t, after + place, name);
        add_special(t, name, after + place);
    }
    t->bos = find_token(t->special.ids, "<|begin_of_text|>");
    return add_pattern(t, row->pattern);
}

// ----------------------------------------------------------------------------
// SentencePiece's tokenizer.model: a protobuf message, of which a few fields matter

struct ProtoReader {
    const char *at, *end;
    bool good = true;
    int field = 0;
    uint64_t number = 0;         // of a varint or a fixed field
    std::string_view bytes = {}; // of one with a length
};

inline uint64_t read_varint(ProtoReader* p) {
    uint64_t x = 0;
    for (int shift = 0; shift < 64 && p->at < p->end; shift += 7) {
        unsigned char c = (unsigned char)*p->at++;
        x |= uint64_t(c & 0x7f) << shift;
        if (c < 0x80) return x;
    }
    p->good = false;
    return 0;
}

// false at the end, and at what is no field
inline bool next_field(ProtoReader* p) {
    if (!p->good || p->at == p->end) return false;
    uint64_t key = read_varint(p);
    p->field = int(key >> 3), p->number = 0, p->bytes = {};
    size_t left = size_t(p->end - p->at), size = (key & 7) == 1 ? 8 : 4;
    switch (key & 7) {
    case 0: p->number = read_varint(p); break;
    case 2:
        size = read_varint(p), left = size_t(p->end - p->at);
        if ((p->good = p->good && size <= left)) p->bytes = {p->at, size}, p->at += size;
        break;
    case 1:
    case 5:
        if ((p->good = size <= left)) memcpy(&p->number, p->at, size), p->at += size;
        break;
    default: p->good = false;
    }
    return p->good;
}

inline ProtoReader proto_reader(std::string_view bytes) {
    return {bytes.data(), bytes.data() + bytes.size()};
}

enum PieceType { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_PIECE };

// what both forms of SentencePiece files have: the next piece as it is shown, its score and type
inline void add_sentencepiece(Tokenizer* t, const std::string& text, float score, int type) {
    int token = int(t->pieces.size()), b = type == BYTE_PIECE ? fallback_byte(text) : -1;
    bool hidden = type == CONTROL || type == UNUSED;
    t->scores.push_back(score);
    t->pieces.push_back(b >= 0 ? std::string(1, char(b)) : hidden ? "" : text);
    if (type == NORMAL) set_word_piece(t, token);
    if (type == USER_DEFINED) fixed_add(&t->added, text, token);
    if (type == CONTROL) add_special(t, text, token);
    if (type == UNKNOWN) t->unknown = token, t->pieces.back() = " \xe2\x81\x87 ";
    if (b >= 0) t->byte_token[size_t(b)] = token;
}

inline bool read_sentencepiece_piece(Tokenizer* t, std::string_view bytes) {
    std::string text;
    float score = 0;
    int type = NORMAL;
    ProtoReader p = proto_reader(bytes);
    while (next_field(&p)) {
        if (p.field == 1) text = p.bytes;
        if (p.field == 2) score = bits_as<float>(uint32_t(p.number));
        if (p.field == 3) type = int(p.number);
    }
    add_sentencepiece(t, replace_all(text, "\xe2\x96\x81", " "), score, type);
    return p.good && std::isfinite(score) && t->pieces.size() <= MAX_TOKENS;
}

inline std::string read_sentencepiece(Tokenizer* t, const std::string& path,
                                      const std::string& file) {
    uint64_t model = 1, bos = 1, prefix = 1, extra = 0, escaped = 1, suffix = 0;
    size_t character_map = 0;
    bool good = true;
    ProtoReader p = proto_reader(file);
    while (next_field(&p)) {
        ProtoReader q = proto_reader(p.bytes);
        if (p.field == 1) good &= read_sentencepiece_piece(t, p.bytes);
        if (p.field == 2) // how it was trained
            while (next_field(&q)) {
                if (q.field == 3) model = q.number;
                if (q.field == 24) suffix = q.number;
                if (q.field == 41) bos = q.number;
            }
        if (p.field == 3) // how text is normalised
            for (extra = 1; next_field(&q);) {
                if (q.field == 2) character_map = q.bytes.size();
                if (q.field == 3) prefix = q.number;
                if (q.field == 4) extra = q.number;
                if (q.field == 5) escaped = q.number;
            }
        good &= p.field == 1 || q.good;
    }
    if (!good || !p.good || !writes_any_text(*t))
        return path + ": is cut short, or no SentencePiece model: get it again";
    std::string what = model > 2            ? "its model is neither BPE nor unigram"
                       : character_map > 0  ? "it maps characters (NFKC) before it splits"
                       : suffix || !escaped ? "it does not write spaces before words"
                                            : "";
    if (!what.empty())
        return path + ": " + what +
               ", which is not built; make token shards (.bin) with its own library";
    t->kind = model == 1 ? TokenizerKind::UNIGRAM : TokenizerKind::BPE;
    t->sentencepiece = true;
    t->prefix = prefix ? Prefix::SPACE : Prefix::NONE, t->extra_spaces = !extra;
    t->bos = bos < t->pieces.size() ? int(bos) : -1;
    if (t->kind == TokenizerKind::BPE) set_merges_from_scores(t, t->scores);
    return split_at_spaces(t);
}

// ----------------------------------------------------------------------------
// llama2.c's tokenizer.bin: the longest piece, then score, length and bytes of each; the first
// three are unknown, begin and end

inline std::string read_llama2c(Tokenizer* t, const std::string& path, const std::string& file) {
    static const char* const FIRST[] = {"<unk>", "<s>", "</s>"};
    int32_t promised = 0, longest = 0, length = 0;
    float score = 0;
    if (file.size() >= 4) memcpy(&promised, file.data(), 4);
    size_t at = 4;
    for (; at + 8 <= file.size(); at += 8 + size_t(length)) {
        memcpy(&score, &file[at], 4), memcpy(&length, &file[at + 4], 4);
        if (!std::isfinite(score) || length < 0 || file.size() - at - 8 < size_t(length)) break;
        size_t token = t->pieces.size();
        std::string text = token < 3 ? FIRST[token] : file.substr(at + 8, size_t(length));
        int type = token == 0 ? UNKNOWN : token < 3 ? CONTROL : NORMAL;
        add_sentencepiece(t, text, score, fallback_byte(text) >= 0 ? int(BYTE_PIECE) : type);
        longest = std::max(longest, length);
    }
    if (at != file.size() || longest != promised || t->byte_token[255] < 0)
        return path + ": is cut short, or not llama2.c's tokenizer.bin: make it again";
    t->kind = TokenizerKind::BPE, t->sentencepiece = true, t->prefix = Prefix::SPACE, t->bos = 1;
    set_merges_from_scores(t, t->scores);
    return split_at_spaces(t);
}

// ----------------------------------------------------------------------------
// which kind a path is

// What stands beside a file of merges: encoder.json or vocab.json; "": neither
inline std::string vocabulary_of(const std::string& merges) {
    std::string folder = merges.substr(0, merges.rfind('/') + 1);
    for (const char* name : {"encoder.json", "vocab.json"})
        if (access((folder + name).c_str(), F_OK) == 0) return folder + name;
    return "";
}

// The first of these files that a folder has; "": it has none
inline std::string tokenizer_in(const std::string& folder) {
    for (const char* name :
         {"tokenizer.json", "vocab.bpe", "merges.txt", "tokenizer.model", "tokenizer.bin"}) {
        std::string path = folder + "/" + name;
        bool merges = name[0] == 'v' || name[0] == 'm';
        if (access(path.c_str(), F_OK) == 0 && !(merges && vocabulary_of(path).empty()))
            return path;
    }
    return "";
}

inline std::string read_tokenizer(Tokenizer* t, const std::string& path) {
    struct stat s;
    if (stat(path.c_str(), &s) != 0)
        return path + ": " + strerror(errno) +
               "; give a tokenizer.json, tokenizer.model, tokenizer.bin, a .tiktoken file or the "
               "folder of one, or --tokenizer byte";
    if (S_ISDIR(s.st_mode)) {
        std::string one = tokenizer_in(path);
        if (!one.empty()) return read_tokenizer(t, one);
        return path +
               ": has no tokenizer.json, no vocab.bpe with encoder.json, no tokenizer.model "
               "and no tokenizer.bin: give the tokenizer's file itself";
    }
    std::string file, wrong, name = path.substr(path.rfind('/') + 1);
    if (name == "vocab.bpe" || name == "merges.txt") {
        std::string vocabulary = vocabulary_of(path);
        return vocabulary.empty() ? path + ": has no encoder.json or vocab.json beside it"
                                  : read_gpt2(t, path, vocabulary);
    }
    if (name.ends_with(".json")) return read_tokenizer_json(t, path);
    if (!(wrong = read_whole_file(path, &file)).empty()) return wrong;
    if (name.ends_with(".bin")) return read_llama2c(t, path, file);
    // a SentencePiece model begins with the key of its first field, which no text begins with
    if (name.ends_with(".model") && file.starts_with('\n'))
        return read_sentencepiece(t, path, file);
    if (name.ends_with(".model") || name.ends_with(".tiktoken"))
        return read_tiktoken(t, path, file);
    return path +
           ": is no tokenizer by its name: tokenizer.json, .model, .bin and .tiktoken are, "
           "and GPT-2's vocab.bpe with encoder.json beside it";
}

inline std::string tokenizer_open(Tokenizer* t, const std::string& name) {
    *t = {};
    if (name.empty() || name == "byte") return "";
    t->name = name;
    std::string wrong = read_tokenizer(t, name);
    if (wrong.empty() && !writes_any_text(*t))
        wrong = name + ": has neither a token for each byte nor one for what is unknown";
    if (!wrong.empty()) return "--tokenizer " + wrong;
    t->vocab_size = int(t->pieces.size());
    for (const char* end : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"}) // the usual names
        if (t->eot < 0) t->eot = find_token(t->special.ids, end);
    return "";
}
