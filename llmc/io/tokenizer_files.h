// tokenizer_files.h - the files that tokenizers come in
//   byte             no file: each byte is a token, the vocabulary is 256
//   FOLDER           the first of these that it has: tokenizer.json; vocab.bpe or merges.txt with
//                    encoder.json or vocab.json (GPT-2); tokenizer.model; tokenizer.bin
//   tokenizer.json   Hugging Face's, model BPE, byte-level (GPT-2, Llama 3, Qwen2, SmolLM) or with
//                    byte fallback (Llama 2, Mistral)
//   *.tiktoken       one token a line, "base64 rank"; Llama 3's tokenizer.model too. The file has
//                    no pattern and no special tokens: they follow from its name, or from its
//                    number of ranks (r50k_base, cl100k_base, o200k_base, llama3)
//   tokenizer.model  SentencePiece, BPE or unigram
//   tokenizer.bin    llama2.c's
//   All become one Tokenizer (tokenizer.h). Every function that returns a text returns "" or one
//   line that says what is wrong. tokenizer_export.h writes such files.
#pragma once
#include <sstream>
#include "../ops/types.h"
#include "../comm/text.h"
#include "files.h"
#include "json.h"
#include "tokenizer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what all formats share

constexpr size_t MAX_TOKENS = size_t(1) << 22; // larger ids come from broken files

// Set the bytes of a token. Returns false if the id is no token. Ids may come in any order and
// leave gaps, which have no text.
inline bool set_piece(Tokenizer* t, int64_t token, const std::string& bytes) {
    if (token < 0 || size_t(token) >= MAX_TOKENS)
        return false;
    if (t->pieces.size() <= size_t(token))
        t->pieces.resize(token + 1);
    t->pieces[token] = bytes;
    return true;
}

// Let words be made of a token's piece. Of equal pieces the first one counts.
inline void set_word_piece(Tokenizer* t, int token) {
    const std::string& piece = t->pieces[token];
    if (piece.empty()) return;
    t->ids.insert({piece, token});
    t->longest = std::max(t->longest, piece.size());
}

// Add a special token. Its text is found if special tokens are asked for, before any other token.
inline void add_special(Tokenizer* t, const std::string& text, int token) {
    t->special[text] = token;
    fixed_add(&t->raw, text, token, {true});
}

// The merge of two tokens into a third.
inline Merge merge_of(int left, int right, uint32_t rank, int token) {
    return {uint64_t(left) << 32 | uint32_t(right), rank, uint32_t(token)};
}

// Make merges for a file that has only scores: each way to cut a piece into two pieces is a
// merge. A higher score gives a lower rank. Equal scores give equal ranks, so that the
// leftmost pair merges first.
inline void set_merges_from_scores(Tokenizer* t, const std::vector<float>& scores) {
    // Sort the pieces, the best score first.
    std::vector<int> order;
    for (const auto& [piece, token] : t->ids)
        order.push_back(token);
    std::ranges::sort(order, {}, [&](int token) { return std::pair(-scores[token], token); });

    // Cut each piece everywhere.
    std::vector<Merge> merges;
    uint32_t rank = 0;
    for (size_t i = 0; i < order.size(); i++) {
        if (i > 0 && scores[order[i]] != scores[order[i - 1]])
            rank++;
        std::string_view piece = t->pieces[order[i]];
        for (size_t cut = 1; cut < piece.size(); cut++) {
            int left = find_token(t->ids, piece.substr(0, cut));
            int right = left < 0 ? -1 : find_token(t->ids, piece.substr(cut));
            if (right >= 0)
                merges.push_back(merge_of(left, right, rank, order[i]));
        }
    }
    set_merges(t, merges);
}

// Find the tokens of single bytes, from which byte-level BPE starts.
inline std::string set_bytes(Tokenizer* t) {
    for (int b = 0; b < 256; b++) {
        t->byte_token[b] = find_token(t->ids, std::string(1, char(b)));
        if (t->byte_token[b] < 0)
            return concat("the vocabulary has no token for byte ", b,
                          ": it is not whole, or not a byte-level one");
    }
    return "";
}

// The byte of a fallback piece, "<0x0A>" -> 10, or -1 for any other piece.
inline int fallback_byte(const std::string& piece) {
    unsigned b = 0;
    char end = 0;
    bool is = piece.size() == 6 && sscanf(piece.c_str(), "<0x%2X%c", &b, &end) == 2 && end == '>';
    return is ? int(b) : -1;
}

// Whether the tokenizer can write any text: either every byte has a token, or no byte has one and
// there is an unknown token.
inline bool writes_any_text(const Tokenizer& t) {
    auto missing = std::ranges::count(t.byte_token, -1);
    return missing == 0 || (missing == 256 && t.unknown >= 0);
}

// Replace each `from` (not empty) by `to`. What is inserted is not searched again.
inline std::string replace_all(const std::string& text, std::string_view from,
                               std::string_view to) {
    std::string replaced;
    size_t at = 0;
    for (size_t next; (next = text.find(from, at)) != std::string::npos; at = next + from.size()) {
        replaced.append(text, at, next - at);
        replaced += to;
    }
    return replaced.append(text, at);
}

// Cut text into words that begin at spaces, so that repeated words are found. This is exact if no
// piece has a space after another character: then no merge spans two such words.
inline std::string split_at_spaces(Tokenizer* t) {
    for (const auto& [piece, token] : t->ids)
        if (piece.find(' ', piece.find_first_not_of(' ')) != std::string::npos)
            return "";
    return add_pattern(t, " *[^ ]+| +");
}

// ----------------------------------------------------------------------------
// patterns that the files do not contain

// Words are English's short endings, letters, digits or other signs, with a space before them.
constexpr const char* GPT2_PATTERN =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// The same, but any sign may precede letters, numbers have at most three digits,
// and newlines end words.
constexpr const char* CL100K_PATTERN =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// The same, but a word changes from capital to small letters only once.
constexpr const char* O200K_PATTERN =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// ----------------------------------------------------------------------------
// GPT-2: vocab.bpe and encoder.json

// The byte for which a character stands, or -1 if for none. GPT-2 writes a byte that is no
// printable Latin-1 character as one of the characters from U+0100 on.
inline const std::vector<int>& byte_letters() {
    // Spaces, control characters and the soft hyphen (173) count as unprintable.
    auto printable = [](int b) { return (b > 32 && b < 127) || (b > 160 && b != 173); };
    static const std::vector<int> byte_of = [&] {
        std::vector<int> of(256, -1);
        for (int b = 0; b < 256; b++) {
            if (printable(b))
                of[b] = b;
            else
                of.push_back(b);
        }
        return of;
    }();
    return byte_of;
}

// Read the bytes for which a text stands. Returns false if it has other characters.
inline bool byte_level(std::string_view text, std::string* bytes) {
    const std::vector<int>& byte_of = byte_letters();
    bytes->clear();
    for (size_t i = 0; i < text.size(); i++) {
        // All these characters have one or two bytes.
        size_t c = (unsigned char)text[i];
        if (c >= 0x80 && i + 1 < text.size())
            c = (c & 0x1f) << 6 | ((unsigned char)text[++i] & 0x3f);
        if ((unsigned char)text[i] >= 0xe0 || c >= byte_of.size() || byte_of[c] < 0)
            return false;
        bytes->push_back(char(byte_of[c]));
    }
    return true;
}

// The bytes of a piece, which a file writes in GPT-2's letters, or in characters with
// U+2581 for a space.
inline std::string piece_bytes(const Tokenizer& t, const std::string& text) {
    std::string bytes;
    if (t.sentencepiece) {
        int b = fallback_byte(text);
        return b >= 0 ? std::string(1, char(b)) : replace_all(text, META_SPACE, " ");
    }
    return byte_level(text, &bytes) ? bytes : text;
}

// Read a vocabulary: {"piece": token, ...}
inline std::string read_vocabulary(Tokenizer* t, const Json& vocabulary) {
    // Do not make words of byte-fallback tokens, which only write what no piece covers.
    for (const auto& [text, id] : vocabulary.items()) {
        int64_t token = id.is_number_integer() ? id.get<int64_t>() : -1;
        if (!set_piece(t, token, piece_bytes(*t, text)))
            return "the token of " + in_quotes(text) + " is " +
                   (id.is_structured() ? "a list" : id.dump()) + ", which is no token";
        int b = t->sentencepiece ? fallback_byte(text) : -1;
        if (b >= 0)
            t->byte_token[b] = int(token);
        else
            set_word_piece(t, int(token));
    }
    return t->sentencepiece ? "" : set_bytes(t);
}

// Add the next merge. Its place in the list is its rank.
inline std::string add_merge(const Tokenizer& t, std::vector<Merge>* merges, const std::string& l,
                             const std::string& r) {
    std::string left = piece_bytes(t, l);
    std::string right = piece_bytes(t, r);
    int a = find_token(t.ids, left);
    int b = find_token(t.ids, right);
    int both = find_token(t.ids, left + right);
    if (a < 0 || b < 0 || both < 0)
        return concat("merge ", merges->size() + 1, ", ", in_quotes(l), " and ", in_quotes(r),
                      ", is not of the vocabulary's pieces: the vocabulary is another "
                      "tokenizer's, or the file is broken");
    merges->push_back(merge_of(a, b, uint32_t(merges->size()), both));
    return "";
}

// Add a merge from a line "left right".
inline std::string add_merge_line(const Tokenizer& t, std::vector<Merge>* merges,
                                  const std::string& line) {
    // Require exactly one space, with a piece on either side.
    size_t space = line.find(' ');
    if (space == std::string::npos || space == 0 || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string::npos)
        return concat("merge ", merges->size() + 1, ", ", in_quotes(line),
                      ", is not two pieces with a space between them");
    return add_merge(t, merges, line.substr(0, space), line.substr(space + 1));
}

// Open GPT-2's pair of files, vocab.bpe (or merges.txt) and encoder.json (or vocab.json).
inline std::string read_gpt2(Tokenizer* t, const std::string& merges_path,
                             const std::string& vocabulary_path) {
    // Read both files.
    std::string text;
    Json vocabulary;
    LLMC_TRY(read_json(vocabulary_path, &vocabulary));
    LLMC_TRY(read_whole_file(merges_path, &text));

    // Take the pieces.
    t->kind = TokenizerKind::BPE;
    std::string wrong = read_vocabulary(t, vocabulary);
    if (!wrong.empty())
        return vocabulary_path + ": " + wrong;

    // Take the merges, one a line, after a line with the version.
    std::vector<Merge> merges;
    std::vector<std::string> lines = lines_of(text);
    for (size_t i = 0; i < lines.size() && wrong.empty(); i++)
        if (!lines[i].empty() && !(i == 0 && lines[i].starts_with("#version")))
            wrong = add_merge_line(*t, &merges, lines[i]);
    if (!wrong.empty())
        return merges_path + ": " + wrong;
    set_merges(t, merges);

    // Add what the files do not say: the special token, and the pattern that cuts text.
    t->eot = find_token(t->ids, "<|endoftext|>");
    if (t->eot >= 0)
        add_special(t, "<|endoftext|>", t->eot);
    return add_pattern(t, GPT2_PATTERN);
}

// ----------------------------------------------------------------------------
// Hugging Face's tokenizer.json

// Refuse a part that this program does not have.
inline std::string not_built(const std::string& what, const Json& j) {
    return what + " " + (j.is_string() ? j.get<std::string>() : json_word(j)) +
           " is not built; make token shards (.bin) with its own library";
}

// The steps of a part of the file as a list: none, one, or a sequence.
inline Json json_steps(const Json& j, const char* part, const char* sequence) {
    if (!json_has(j, part)) return Json::array();
    // at() throws if the key is missing; read_tokenizer_json() turns that into a message.
    bool many = j[part].at("type") == "Sequence";
    return many ? j[part].at(sequence) : Json::array({j[part]});
}

// Take one step of the normaliser, which changes text before it is cut.
inline std::string read_normalizer(Tokenizer* t, const Json& j) {
    // Unicode's normal forms.
    const std::string type = j.at("type");
    const std::pair<const char*, int> forms[] = {
        {"NFC", UTF8PROC_COMPOSE},
        {"NFD", UTF8PROC_DECOMPOSE},
        {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
        {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
    };
    for (auto [name, options] : forms)
        if (type == name) {
            t->unicode_form = options | UTF8PROC_STABLE;
            return "";
        }

    // SentencePiece's steps: a space in front, and U+2581 for spaces, in all its tokenizers.
    bool spaces = type == "Replace" && j.at("pattern").value("String", "") == " ";
    if (t->sentencepiece && (type == "Prepend" || spaces)) {
        if (type == "Prepend")
            t->prefix = Prefix::SPACE;
        t->late_spaces = false;
        return "";
    }
    return not_built("normalizer", j["type"]);
}

// Take one step of the pre-tokenizer, which cuts text into words.
inline std::string read_pre_tokenizer(Tokenizer* t, const Json& j) {
    const std::string type = j.at("type");

    // GPT-2's pattern; or no pattern, if another step has cut the text already.
    if (type == "ByteLevel") {
        if (j.value("add_prefix_space", false))
            return not_built("add_prefix_space of", j["type"]);
        return j.value("use_regex", true) ? add_pattern(t, GPT2_PATTERN) : "";
    }

    // Digits: each digit, or each run of digits, is a word.
    if (type == "Digits")
        return add_pattern(t, j.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");

    // SentencePiece's: a space in front of the text, and words that begin at spaces.
    if (type == "Metaspace" && t->sentencepiece) {
        const std::string scheme =
            j.value("prepend_scheme", j.value("add_prefix_space", true) ? "always" : "never");
        if (scheme != "never")
            t->prefix = Prefix::SPACE_UNLESS_THERE;
        t->prefix_once = scheme == "first";
        return j.value("split", true) ? add_pattern(t, " [^ ]*") : "";
    }

    // A pattern. Text between its matches becomes words too, so no text is lost.
    if (type != "Split")
        return not_built("pre_tokenizer", j["type"]);
    const std::string behavior = j.at("behavior");
    if (behavior != "Isolated" && !(behavior == "Removed" && j.value("invert", false)))
        return not_built("pre_tokenizer Split, behavior", j["behavior"]);
    bool literal = j.at("pattern").contains("String");
    return add_pattern(t, j["pattern"].at(literal ? "String" : "Regex"), literal);
}

// Take the tokens that the template puts before and behind a text, if it has them.
inline void read_post_processor(Tokenizer* t, const Json& j) {
    // Read only the template for single texts: this program never writes pairs.
    if (j.at("type") != "TemplateProcessing" || j.at("single").empty())
        return;
    const auto& first = j["single"].front();
    const auto& last = j["single"].back();
    if (first.contains("SpecialToken"))
        t->bos = find_token(t->special, std::string(first["SpecialToken"].at("id")));
    if (last.contains("SpecialToken"))
        t->eot = find_token(t->special, std::string(last["SpecialToken"].at("id")));
}

// The text of an added token after normalisation.
inline std::string normalised_token(const Tokenizer& t, std::string text) {
    if (t.unicode_form)
        text = unicode_normalise(text, t.unicode_form);
    bool early = t.sentencepiece && !t.late_spaces && !text.empty();
    return early ? normalise_spaces(t, text, true, true) : text;
}

// Take the added tokens: special ones, and others that are found in any text. The normalizers and
// pre-tokenizers must have been read.
inline std::string read_added_tokens(Tokenizer* t, const Json& j) {
    for (const auto& each : j) {
        const std::string text = each.at("content");
        int64_t token = each.at("id");
        if (!set_piece(t, token, text))
            return concat("the token of ", in_quotes(text), " is ", token, ", which is no token");

        // Never make words of a special token's text.
        FixedRule rule;
        rule.special = each.value("special", false);
        rule.single_word = each.value("single_word", false);
        rule.lstrip = each.value("lstrip", false);
        rule.rstrip = each.value("rstrip", false);
        if (rule.special) {
            t->ids.erase(text);
            t->special[text] = int(token);
        }

        // Without "normalized", special tokens are found verbatim, others in normalised text.
        bool normalised = each.value("normalized", !rule.special);
        std::string found = normalised ? normalised_token(*t, text) : text;
        fixed_add(normalised ? &t->added : &t->raw, found, int(token), rule);
    }
    return "";
}

// Take the model: its vocabulary and merges.
inline std::string read_bpe(Tokenizer* t, const Json& model) {
    // Refuse other models, and marks inside words.
    if (model.value("type", "BPE") != "BPE")
        return not_built("model", model["type"]);
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
        if (json_has(model, key) && model[key] != "")
            return not_built(key, model[key]);
    t->kind = TokenizerKind::BPE;
    t->sentencepiece = model.value("byte_fallback", false);
    t->whole_words = model.value("ignore_merges", false);

    // Take the pieces.
    LLMC_TRY(read_vocabulary(t, model.at("vocab")));
    if (model.contains("unk_token") && model["unk_token"].is_string())
        t->unknown = find_token(t->ids, std::string(model["unk_token"]));

    // Take the merges: each is ["left", "right"], or "left right" in older files.
    std::vector<Merge> merges;
    for (const auto& each : model.at("merges"))
        LLMC_TRY(each.is_array() ? add_merge(*t, &merges, each.at(0), each.at(1))
                                 : add_merge_line(*t, &merges, each));
    set_merges(t, merges);
    return "";
}

// Take all parts of a tokenizer.json.
inline std::string read_tokenizer_json_object(Tokenizer* t, const Json& j) {
    // Take its tokens.
    LLMC_TRY(read_bpe(t, j.at("model")));

    // The steps that text goes through. A normalizer or else a pre-tokenizer writes the spaces.
    t->late_spaces = true;
    for (const auto& each : json_steps(j, "normalizer", "normalizers"))
        LLMC_TRY(read_normalizer(t, each));
    for (const auto& each : json_steps(j, "pre_tokenizer", "pretokenizers"))
        LLMC_TRY(read_pre_tokenizer(t, each));

    // Take the other tokens, and the template.
    if (j.contains("added_tokens"))
        LLMC_TRY(read_added_tokens(t, j["added_tokens"]));
    if (t->sentencepiece && t->patterns.empty())
        LLMC_TRY(split_at_spaces(t));
    for (const auto& each : json_steps(j, "post_processor", "processors"))
        read_post_processor(t, each);
    return "";
}

// Open a tokenizer.json.
inline std::string read_tokenizer_json(Tokenizer* t, const std::string& path) {
    Json j;
    std::string wrong = read_json(path, &j);
    if (!wrong.empty()) return wrong;
    if (!j.contains("model") || !j["model"].is_object())
        return path + ": has no \"model\", so it is no tokenizer.json; of GPT-2's pair of files "
                      "give vocab.bpe or merges.txt, or their folder";

    // The JSON library throws if a key is missing or has another type. Its message comes after its
    // own name and a number: "[json.exception.type_error.302] type must be ...".
    try {
        wrong = read_tokenizer_json_object(t, j);
    } catch (const Json::exception& e) {
        std::string_view what = e.what();
        what = what.substr(what.find("] ") + 2);
        wrong = "is not a tokenizer.json as Hugging Face writes it: " + printable(what);
    }
    return wrong.empty() ? "" : path + ": " + wrong;
}

// ----------------------------------------------------------------------------
// tiktoken: lines of "base64 rank"

// An encoding that is known by its name or its number of ranks, with what the file does not say.
struct KnownRanks {
    const char* name;
    size_t ranks;
    const char* pattern;
    std::vector<std::pair<std::string, int>> special; // text, and its number after the last rank
    const char* end = "<|endoftext|>";                // the one that ends a text
};

// The encodings of tiktoken and of Llama 3.
inline std::vector<KnownRanks> known_ranks() {
    // Special tokens are numbered from the count of ranks on, with gaps.
    const char* end = "<|endoftext|>";
    const char* prompt = "<|endofprompt|>";
    std::vector<KnownRanks> known = {
        {"r50k_base", 50256, GPT2_PATTERN, {{end, 0}}},
        {"cl100k_base", 100256, CL100K_PATTERN, {{end, 1}, {prompt, 20}}},
        {"o200k_base", 199998, O200K_PATTERN, {{end, 1}, {prompt, 20}}},
        {"llama3", 128000, CL100K_PATTERN, {}, "<|end_of_text|>"},
    };

    // Llama 3 has 256 special tokens; unused ones have numbered names.
    std::vector<std::string> llama(256);
    llama[0] = "<|begin_of_text|>";
    llama[1] = "<|end_of_text|>";
    llama[6] = "<|start_header_id|>";
    llama[7] = "<|end_header_id|>";
    llama[9] = "<|eot_id|>";
    int reserved = 0;
    for (int place = 0; place < 256; place++) {
        std::string& name = llama[place];
        if (name.empty())
            name = concat("<|reserved_special_token_", reserved++, "|>");
        known.back().special.push_back({name, place});
    }
    return known;
}

constexpr std::string_view BASE64_DIGITS =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// Decode base64. Returns false if the text is not base64.
inline bool base64_decode(std::string_view text, std::string* bytes) {
    bytes->clear();
    if (text.empty() || text.size() % 4 != 0)
        return false;
    while (text.ends_with('='))
        text.remove_suffix(1);

    // A digit has six bits, so each digit but the first of four completes a byte.
    uint32_t bits = 0;
    for (size_t i = 0; i < text.size(); i++) {
        size_t digit = BASE64_DIGITS.find(text[i]);
        if (digit == std::string_view::npos)
            return false;
        bits = bits << 6 | uint32_t(digit);
        if (i % 4 > 0)
            bytes->push_back(char(bits >> (6 - 2 * (i % 4))));
    }
    return true;
}

// Read lines of "base64 rank". *lines receives their number.
inline std::string read_ranks(Tokenizer* t, const std::string& path, const std::string& text,
                              size_t* lines) {
    // Refuse any other line, even a blank one.
    std::istringstream in(text);
    std::string line, bytes;
    for (*lines = 0; std::getline(in, line);) {
        size_t space = line.find(' ');
        char* end = nullptr;
        long rank = space == std::string::npos ? -1 : strtol(line.c_str() + space, &end, 10);
        bool good = rank >= 0 && end != line.c_str() + space && (*end == 0 || *end == '\r') &&
                    base64_decode(std::string_view(line).substr(0, space), &bytes);

        // Set the bytes of the rank.
        ++*lines;
        if (!good || !set_piece(t, rank, bytes))
            return concat(path, ": line ", *lines, ", ", in_quotes(line),
                          ", is not base64, a space and a rank: the file is broken or no tiktoken "
                          "file");
        set_word_piece(t, int(rank));
    }
    return "";
}

// Open a *.tiktoken file, or Llama 3's tokenizer.model.
inline std::string read_tiktoken(Tokenizer* t, const std::string& path, const std::string& text) {
    size_t lines;
    LLMC_TRY(read_ranks(t, path, text, &lines));

    // Find the encoding by the file's name, or else by its number of ranks.
    std::vector<KnownRanks> known = known_ranks();
    auto row = std::ranges::find_if(known, [&](const KnownRanks& k) {
        return path.find(k.name, path.rfind('/') + 1) != std::string::npos;
    });
    if (row == known.end())
        row = std::ranges::find(known, lines, &KnownRanks::ranks);
    if (row == known.end())
        return concat(path, ": its ", lines,
                      " ranks are of no encoding known here, so its pattern is not known: it may "
                      "be cut short; a name with r50k_base, cl100k_base, o200k_base or llama3 says "
                      "which, or give a tokenizer.json");

    // A rank is a token. The lower it is, the earlier its pieces merge.
    t->kind = TokenizerKind::BPE;
    t->whole_words = true;
    std::vector<float> scores(t->pieces.size());
    for (size_t i = 0; i < scores.size(); i++)
        scores[i] = -float(i);
    std::string wrong = set_bytes(t);
    if (!wrong.empty())
        return path + ": " + wrong;
    set_merges_from_scores(t, scores);

    // Number the special tokens after the last rank.
    int after = int(t->pieces.size());
    for (const auto& [name, place] : row->special) {
        set_piece(t, after + place, name);
        add_special(t, name, after + place);
    }
    t->bos = find_token(t->special, "<|begin_of_text|>");
    t->eot = find_token(t->special, row->end);
    return add_pattern(t, row->pattern);
}

// ----------------------------------------------------------------------------
// SentencePiece's tokenizer.model: a protobuf message, of which a few fields matter

// A protobuf message that is read field by field.
struct ProtoReader {
    const char* at;
    const char* end;
    bool good = true;
    int field = 0;
    uint64_t number = 0;         // of a varint or fixed field
    std::string_view bytes = {}; // of a field with a length
};

// Read a varint: seven bits a byte, the lowest first; a set highest bit means that more follow.
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

// Take `size` bytes, if there are that many.
inline void take_bytes(ProtoReader* p, size_t size) {
    p->good = p->good && size <= size_t(p->end - p->at);
    if (!p->good) return;
    p->bytes = {p->at, size};
    p->at += size;
}

// Read the next field. Returns false at the end, or on broken data.
inline bool next_field(ProtoReader* p) {
    if (!p->good || p->at == p->end)
        return false;
    uint64_t key = read_varint(p);
    p->field = int(key >> 3);
    p->number = 0;
    p->bytes = {};

    // The lowest three bits of the key say how long the field is.
    switch (key & 7) {
    case 0: p->number = read_varint(p); break;
    case 1: take_bytes(p, 8); break;
    case 2: take_bytes(p, read_varint(p)); break;
    case 5: take_bytes(p, 4); break;
    default: p->good = false;
    }

    // A field of fixed length is a number, too.
    bool fixed = (key & 7) == 1 || (key & 7) == 5;
    if (fixed && p->good) {
        memcpy(&p->number, p->bytes.data(), p->bytes.size());
        p->bytes = {};
    }
    return p->good;
}

// Begin to read a message, or a field that holds one.
inline ProtoReader proto_reader(std::string_view bytes) {
    return {bytes.data(), bytes.data() + bytes.size()};
}

// The types of pieces, with the numbers of the file.
enum PieceType { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_PIECE };

// Add the next piece of a SentencePiece model, or of llama2.c's form of one. `text` is the piece
// as it is shown.
inline void add_sentencepiece(Tokenizer* t, const std::string& text, float score, int type) {
    int token = int(t->pieces.size());
    int b = type == BYTE_PIECE ? fallback_byte(text) : -1;
    bool hidden = type == CONTROL || type == UNUSED;
    t->scores.push_back(score);
    t->pieces.push_back(b >= 0 ? std::string(1, char(b)) : hidden ? "" : text);

    // Enter it by its type.
    if (type == NORMAL) set_word_piece(t, token);
    if (type == USER_DEFINED)
        fixed_add(&t->added, text, token);
    if (type == CONTROL)
        add_special(t, text, token);
    if (type == UNKNOWN) {
        t->unknown = token;
        t->pieces.back() = " \xe2\x81\x87 "; // U+2047, a double question mark
    }
    if (b >= 0)
        t->byte_token[b] = token;
}

// Read a piece. Returns false if it is broken.
inline bool read_sentencepiece_piece(Tokenizer* t, std::string_view bytes) {
    std::string text;
    float score = 0;
    int type = NORMAL;
    ProtoReader p = proto_reader(bytes);
    while (next_field(&p)) {
        if (p.field == 1) text = p.bytes;
        if (p.field == 2)
            score = bits_as<float>(uint32_t(p.number));
        if (p.field == 3)
            type = int(p.number);
    }
    add_sentencepiece(t, replace_all(text, META_SPACE, " "), score, type);
    return p.good && std::isfinite(score) && t->pieces.size() <= MAX_TOKENS;
}

// The fields that matter: how a model was trained, and how it normalises text. A missing field has
// the value given here.
struct SentencePieceFields {
    uint64_t model = 1;       // 1: unigram, 2: BPE
    uint64_t suffix = 0;      // spaces are written after words, not before
    uint64_t bos = 1;         // the token that begins a sequence
    uint64_t eos = 2;         // the token that ends it
    size_t character_map = 0; // bytes of a table that maps characters (NFKC)
    uint64_t prefix = 1;      // a space is put before the text
    uint64_t extra = 0;       // extra spaces are dropped; 1 if the normaliser is described
    uint64_t escaped = 1;     // spaces are written as U+2581
};

// Read the whole message. Returns false if it is cut short, or no such message.
inline bool read_sentencepiece_fields(Tokenizer* t, SentencePieceFields* f,
                                      const std::string& file) {
    // Message 2 says how the model was trained, 3 how text is normalised.
    struct Row {
        int message, field;
        uint64_t* to;
    };
    const Row rows[] = {
        {2, 3, &f->model},
        {2, 24, &f->suffix},
        {2, 41, &f->bos},
        {2, 42, &f->eos},
        {3, 3, &f->prefix},
        {3, 4, &f->extra},
        {3, 5, &f->escaped},
    };
    bool good = true;
    ProtoReader p = proto_reader(file);
    while (next_field(&p)) {
        if (p.field == 1)
            good &= read_sentencepiece_piece(t, p.bytes);
        if (p.field == 3) f->extra = 1;

        // Read the fields of a message.
        bool message = p.field == 2 || p.field == 3;
        ProtoReader q = proto_reader(message ? p.bytes : "");
        while (next_field(&q)) {
            for (const Row& row : rows)
                if (row.message == p.field && row.field == q.field)
                    *row.to = q.number;
            if (p.field == 3 && q.field == 2)
                f->character_map = q.bytes.size();
        }
        good &= q.good;
    }
    return good && p.good;
}

// Open SentencePiece's tokenizer.model.
inline std::string read_sentencepiece(Tokenizer* t, const std::string& path,
                                      const std::string& file) {
    SentencePieceFields f;
    if (!read_sentencepiece_fields(t, &f, file) || !writes_any_text(*t))
        return path + ": is cut short, or no SentencePiece model: get it again";

    // Refuse models whose tokens would come out differently here.
    std::string what = f.model > 2              ? "its model is neither BPE nor unigram"
                       : f.character_map > 0    ? "it maps characters (NFKC) before it splits"
                       : f.suffix || !f.escaped ? "it does not write spaces before words"
                                                : "";
    if (!what.empty())
        return path + ": " + what +
               ", which is not built; make token shards (.bin) with its own library";

    t->kind = f.model == 1 ? TokenizerKind::UNIGRAM : TokenizerKind::BPE;
    t->sentencepiece = true;
    t->prefix = f.prefix ? Prefix::SPACE : Prefix::NONE;
    t->extra_spaces = !f.extra;
    t->bos = f.bos < t->pieces.size() ? int(f.bos) : -1;
    t->eot = f.eos < t->pieces.size() ? int(f.eos) : -1;
    if (t->kind == TokenizerKind::BPE)
        set_merges_from_scores(t, t->scores);
    return split_at_spaces(t);
}

// ----------------------------------------------------------------------------
// llama2.c's tokenizer.bin: the length of the longest piece; then score, length and bytes of each
// piece. The first three pieces are: unknown, begin, end.

// Open llama2.c's tokenizer.bin.
inline std::string read_llama2c(Tokenizer* t, const std::string& path, const std::string& file) {
    static const char* const FIRST[] = {"<unk>", "<s>", "</s>"};
    int32_t promised = 0; // length of the longest piece
    if (file.size() >= 4)
        memcpy(&promised, file.data(), 4);

    // Read piece after piece. A broken one ends the loop before the file's end.
    int32_t longest = 0;
    int32_t length = 0;
    size_t at = 4;
    for (; at + 8 <= file.size(); at += 8 + size_t(length)) {
        float score = 0;
        memcpy(&score, &file[at], 4);
        memcpy(&length, &file[at + 4], 4);
        if (!std::isfinite(score) || length < 0 || file.size() - at - 8 < size_t(length))
            break;

        // Name the first three pieces as SentencePiece does, whatever the file calls them.
        size_t token = t->pieces.size();
        std::string text = token < 3 ? FIRST[token] : file.substr(at + 8, length);
        int type = token == 0 ? UNKNOWN : token < 3 ? CONTROL : NORMAL;
        add_sentencepiece(t, text, score, fallback_byte(text) >= 0 ? int(BYTE_PIECE) : type);
        longest = std::max(longest, length);
    }
    if (at != file.size() || longest != promised || t->byte_token[255] < 0)
        return path + ": is cut short, or not llama2.c's tokenizer.bin: make it again";

    t->kind = TokenizerKind::BPE;
    t->sentencepiece = true;
    t->prefix = Prefix::SPACE;
    t->bos = 1;
    t->eot = 2;
    set_merges_from_scores(t, t->scores);
    return split_at_spaces(t);
}

// ----------------------------------------------------------------------------
// special tokens: what begins and ends a text, in the order that transformers has
//   1. bos_token and eos_token of tokenizer_config.json, or, if that has no added_tokens_decoder,
//      of special_tokens_map.json: texts, which chat templates write
//   2. bos_token_id and eos_token_id of generation_config.json, then config.json, for generate()
//   3. what the tokenizer's own file or format says

// The tokens that a file names by a key, "eos_token": by their text, a number or a list of numbers.
// A text or number that is no token is -1.
template <typename J>
std::vector<int> named_tokens(const Tokenizer& t, const J& j, const std::string& key) {
    std::vector<int> tokens;
    J named = j.value(key + "_id", j.value(key, J()));
    if (!named.is_array())
        named = J::array({named});
    for (J each : named) {
        if (each.is_object())
            each = J(each.value("content", J()));
        int64_t id = each.is_number_integer() ? each.template get<int64_t>() : -1;

        // Look up a text: as a word of the vocabulary, and then among those found verbatim.
        std::string text = each.is_string() ? each.template get<std::string>() : "";
        if (!text.empty())
            id = find_token(t.ids, piece_bytes(t, text));
        for (const TokenOf* ids : {&t.added.ids, &t.raw.ids, &t.special})
            if (int found = find_token(*ids, text); found >= 0)
                id = found;
        if (!each.is_null())
            tokens.push_back(id >= 0 && id < t.vocab_size ? int(id) : -1);
    }
    return tokens;
}

// Special tokens that the files of a folder have named so far.
struct SpecialTokens {
    std::map<std::string, std::string> taken = {}; // [key]: the file that names the token
    std::set<std::string> noted = {};              // keys of which files disagree
};

// Take the tokens that a file names by a key. The first file counts, but for a map, which comes
// before the one ahead of it. Note what others name instead; a list agrees if it has the token.
inline void take_special_token(Tokenizer* t, SpecialTokens* s, const std::string& path,
                               const Json& j, const std::string& key, int* token) {
    // Leave out names that are no tokens.
    std::vector<int> tokens = named_tokens(*t, j, key);
    if (std::erase(tokens, -1))
        t->notes.push_back(path + ": its " + key + " is no token of " + t->name);
    if (key == "eos_token")
        t->ends.insert(tokens.begin(), tokens.end());
    if (tokens.empty())
        return;

    // Take the first token, or compare it with the one that was taken.
    std::string file = path.substr(path.rfind('/') + 1);
    bool agrees = std::ranges::count(tokens, *token) > 0;
    if (s->taken[key].empty() || file == "special_tokens_map.json") {
        s->taken[key] = file;
        *token = tokens[0];
    } else if (!agrees && s->noted.insert(key).second) {
        t->notes.push_back(concat(key, " is token ", *token, ", as ", s->taken[key], " says; ",
                                  path, " says ", tokens[0]));
    }
}

// Read what the files of a folder say begins and ends a text.
inline std::string read_special_tokens(Tokenizer* t, const std::string& folder) {
    SpecialTokens found;
    bool decoder = false;
    for (std::string file : {"tokenizer_config.json", "special_tokens_map.json",
                             "generation_config.json", "config.json"}) {
        // Read the file, if it is there.
        Json j = Json::object();
        std::string path = file_in(folder, file);
        if (file_type(path))
            LLMC_TRY(read_json(path, &j));

        // transformers reads no map beside a config that describes its added tokens.
        decoder |= j.contains("added_tokens_decoder");
        if (decoder && file == "special_tokens_map.json")
            continue;
        take_special_token(t, &found, path, j, "bos_token", &t->bos_token);
        take_special_token(t, &found, path, j, "eos_token", &t->eot);
    }
    return "";
}

// ----------------------------------------------------------------------------
// which format a path has

// The vocabulary beside a file of merges, encoder.json or vocab.json; "" if there is neither.
inline std::string vocabulary_of(const std::string& merges) {
    std::string folder = merges.substr(0, merges.rfind('/') + 1);
    for (const char* name : {"encoder.json", "vocab.json"})
        if (file_type(folder + name))
            return folder + name;
    return "";
}

// The first of these files that a folder has, or "".
inline std::string tokenizer_in(const std::string& folder) {
    for (const char* name :
         {"tokenizer.json", "vocab.bpe", "merges.txt", "tokenizer.model", "tokenizer.bin"}) {
        std::string path = folder + "/" + name;
        bool merges = name[0] == 'v' || name[0] == 'm';
        if (file_type(path) && !(merges && vocabulary_of(path).empty()))
            return path;
    }
    return "";
}

// How to get a tokenizer that was named without a file; "" if it is not one of these.
inline std::string published_tokenizer(const std::string& path) {
    for (const char* name : {"gpt2", "llama2"})
        if (path == name || path == std::string("data/") + name)
            return concat("; dev/data/tokenizer.py ", name, " gets it, then --tokenizer data/",
                          name);
    return "";
}

// Open a file, by its name, or the tokenizer's file in a folder.
inline std::string read_tokenizer(Tokenizer* t, const std::string& path) {
    mode_t type = file_type(path);
    if (!type)
        return path + ": " + strerror(errno) + published_tokenizer(path) +
               "; give a tokenizer.json, tokenizer.model, tokenizer.bin, a .tiktoken file or the "
               "folder of one, or --tokenizer byte";

    // Look into a folder.
    if (type == S_IFDIR) {
        std::string one = tokenizer_in(path);
        if (!one.empty())
            return read_tokenizer(t, one);
        return path +
               ": has no tokenizer.json, no vocab.bpe with encoder.json, no tokenizer.model "
               "and no tokenizer.bin: give the tokenizer's file itself";
    }

    // Open GPT-2's pair, or Hugging Face's file.
    std::string name = path.substr(path.rfind('/') + 1);
    if (name == "vocab.bpe" || name == "merges.txt") {
        std::string vocabulary = vocabulary_of(path);
        return vocabulary.empty() ? path + ": has no encoder.json or vocab.json beside it"
                                  : read_gpt2(t, path, vocabulary);
    }
    if (name.ends_with(".json"))
        return read_tokenizer_json(t, path);

    // Read the other formats whole. Two of them are called .model; SentencePiece's begins with its
    // first field's key, with which no text begins.
    std::string file;
    LLMC_TRY(read_whole_file(path, &file));
    if (name.ends_with(".bin"))
        return read_llama2c(t, path, file);
    if (name.ends_with(".model") && file.starts_with('\n'))
        return read_sentencepiece(t, path, file);
    if (name.ends_with(".model") || name.ends_with(".tiktoken"))
        return read_tiktoken(t, path, file);
    return path +
           ": is no tokenizer by its name: tokenizer.json, .model, .bin and .tiktoken are, "
           "and GPT-2's vocab.bpe with encoder.json beside it";
}

// Open the tokenizer that --tokenizer names.
inline std::string tokenizer_open(Tokenizer* t, const std::string& name) {
    *t = {};
    if (name.empty() || name == "byte")
        return "";
    t->name = name;
    std::string wrong = read_tokenizer(t, name);
    if (wrong.empty() && !writes_any_text(*t))
        wrong = name + ": has neither a token for each byte nor one for what is unknown";
    if (!wrong.empty())
        return "--tokenizer " + wrong;
    t->vocab_size = int(t->pieces.size());

    // Let the files beside it say what begins and ends a text.
    return read_special_tokens(t, file_type(name) == S_IFDIR ? name : folder_of(name));
}

} // namespace llmc
