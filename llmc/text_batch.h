// text_batch.h - texts in batches, and their tokens: what --prepare's threads work on
//   A batch is whole lines of JSON, or a block of a text that ends where its tokens do (text_cut).
//   Where it ends follows from the inputs and from where it begins: a run that goes on in the middle
//   has the same batches.
#pragma once
#include <algorithm>
#include <nlohmann/json.hpp>
#include "text_stream.h"
#include "tokenizer.h"

struct BatchLimits {
    size_t batch = size_t(1) << 20, line = size_t(64) << 20; // bytes of text
};

constexpr int DOCUMENT = -1; // among a batch's tokens: a document begins here

struct TextBatch {
    // where it begins: input, byte (decompressed), line
    size_t file = 0, offset = 0, line = 1;
    bool lines = false;
    std::string text = "";
    size_t position = 0; // of the input's bytes as they are on disk, read by its end
    // what becomes of it
    std::vector<int> tokens = {};
    size_t lines_read = 0, malformed = 0;
    std::string first_malformed = "";
    bool done = false;
};

// Where a block of a text ends so that its tokens and the next block's are those of the whole.
//   Before the end of text, which no word crosses; else before a space between two letters: there
//   every pattern in use cuts (GPT-2's, tiktoken's, Llama 3's, Qwen's), and tokenizers without
//   patterns do where no piece has a letter and then a space, as none that ends at spaces has.
//   Where a block has neither (a megabyte without "a b") it ends after a line, or else a character;
//   the text is whole then too, but a word may lie on both sides.
inline size_t text_cut(std::string_view block, const std::string& end_text) {
    auto letter = [](char c) { return (c | 32) >= 'a' && (c | 32) <= 'z'; };
    size_t end = end_text.empty() ? std::string::npos : block.rfind(end_text);
    if (end != std::string::npos && end > 0) return end;
    for (size_t at = block.size() - 1; at-- > 1;)
        if (block[at] == ' ' && letter(block[at - 1]) && letter(block[at + 1])) return at;
    size_t line = block.rfind('\n');
    if (line != std::string::npos) return line + 1;
    // an end of text that begins before this and is not whole yet would begin later
    size_t at = block.size() - std::min(block.size() - 1, std::max(end_text.size(), size_t(1)));
    for (int back = 0; back < 3 && at > 1 && (block[at] & 0xc0) == 0x80; back++) at--;
    return at;
}

struct BatchReader {
    std::vector<TextInput> inputs;
    std::string script, field, end_text; // that reads parquet; of a line; that ends a text
    BatchLimits limits;
    size_t file = 0, offset = 0, line = 1; // of the first byte of `rest`
    bool open = false, ended = false;
    InputStream stream;
    std::string rest, wrong; // read, and not in a batch yet
};

inline void reader_open(BatchReader& r) {
    r.open = true, r.ended = false;
    r.wrong = stream_open(&r.stream, r.inputs[r.file], r.script, r.field);
    if (!r.wrong.empty() || r.offset == 0) return;
    if (r.inputs[r.file].packed.empty()) {
        if (fseeko(r.stream.file, off_t(r.offset), SEEK_SET) != 0) r.wrong = strerror(errno);
        return;
    }
    std::vector<char> skipped(size_t(1) << 20);
    for (size_t left = r.offset, n; left > 0; left -= n)
        if (!(n = stream_read(r.stream, skipped.data(), std::min(left, skipped.size())))) {
            r.wrong = r.inputs[r.file].path + ": has become shorter";
            return;
        }
}

// `rest` grows to `bytes`, or to the end of the input.
inline void reader_fill(BatchReader& r, size_t bytes) {
    while (r.rest.size() < bytes && !r.ended && r.wrong.empty()) {
        size_t have = r.rest.size();
        r.rest.resize(bytes);
        size_t n = stream_read(r.stream, r.rest.data() + have, bytes - have);
        r.rest.resize(have + n);
        r.ended = n == 0, r.wrong = r.stream.wrong;
    }
}

inline void reader_next_file(BatchReader& r) {
    stream_close(r.stream);
    if (r.wrong.empty()) r.wrong = r.stream.wrong;
    r.open = false, r.file++, r.offset = 0, r.line = 1;
}

// The next batch; false after the last one, or where r.wrong says what is wrong. It is a function
// of the inputs and of where it begins alone, so that a run that goes on has the same ones.
inline bool read_batch(BatchReader& r, TextBatch* b) {
    size_t want = r.limits.batch;
    while (r.wrong.empty() && r.file < r.inputs.size()) {
        const TextInput& input = r.inputs[r.file];
        if (!r.open) reader_open(r);
        reader_fill(r, want);
        if (!r.wrong.empty()) break;
        if (r.rest.empty()) {
            reader_next_file(r);
            continue;
        }
        std::string_view block = std::string_view(r.rest).substr(0, want);
        size_t cut = block.size() < want ? block.size()
                     : input.lines       ? block.rfind('\n') + 1
                                         : text_cut(block, r.end_text);
        if (cut == 0 && want >= r.limits.line) {
            r.wrong = input.path + ":" + std::to_string(r.line) + ": a line of more than " +
                      std::to_string(r.limits.line) + " bytes: are these JSON lines?";
            break;
        }
        if (cut == 0) {
            want *= 2;
            continue;
        }
        *b = {};
        b->file = r.file, b->offset = r.offset, b->line = r.line, b->lines = input.lines;
        b->text = r.rest.substr(0, cut), b->position = stream_position(r.stream);
        r.rest.erase(0, cut);
        r.offset += cut, r.line += size_t(std::count(b->text.begin(), b->text.end(), '\n'));
        return true;
    }
    return false;
}

// ----------------------------------------------------------------------------
// a batch's tokens

// JSON is UTF-8. Each byte of a line that is not becomes two characters that no text has (Unicode's
// noncharacters U+FDD0 to U+FDEF, for its two halves), and again a byte in the string.
inline std::string bytes_to_noncharacters(std::string_view line) {
    std::string out;
    for (size_t at = 0, n; at < line.size(); at += std::max<size_t>(n, 1)) {
        n = utf8_length(line.substr(at));
        unsigned char c = (unsigned char)line[at];
        if (n > 0)
            out += line.substr(at, n);
        else
            out += {'\xef', '\xb7', char(0x90 + (c >> 4)), '\xef', '\xb7', char(0xa0 + (c & 15))};
    }
    return out;
}

inline std::string noncharacters_to_bytes(const std::string& text) {
    std::string out;
    for (size_t at = 0; at < text.size(); at++) {
        bool byte = text.compare(at, 2, "\xef\xb7") == 0 && at + 6 <= text.size() &&
                    (text[at + 2] & 0xf0) == 0x90 && (text[at + 5] & 0xf0) == 0xa0;
        out += byte ? char((text[at + 2] & 15) << 4 | (text[at + 5] & 15)) : text[at];
        if (byte) at += 5;
    }
    return out;
}

inline std::string read_json_line(std::string_view line, const std::string& field,
                                  std::string* text) {
    nlohmann::json j = nlohmann::json::parse(line, nullptr, false);
    bool other_bytes = j.is_discarded();
    if (other_bytes) j = nlohmann::json::parse(bytes_to_noncharacters(line), nullptr, false);
    if (!j.is_object()) return "is no JSON object";
    if (!j.contains(field) || !j[field].is_string())
        return "has no string \"" + field + "\": --field says which one is the text";
    *text = j[field].get<std::string>();
    if (other_bytes) *text = noncharacters_to_bytes(*text);
    return "";
}

inline void tokenize_lines(TextBatch& b, const Tokenizer& t, const std::string& field,
                           const std::string& path) {
    size_t line = b.line;
    Encoding e = encoding_open(t, b.text.size());
    std::deque<std::string> texts; // a word that comes again is found in the first that has it
    for (size_t at = 0, end; at < b.text.size(); at = end + 1, line++) {
        end = std::min(b.text.find('\n', at), b.text.size());
        std::string_view bytes = std::string_view(b.text).substr(at, end - at);
        if (bytes.find_first_not_of(" \t\r") == std::string::npos) continue;
        std::string& text = texts.emplace_back();
        std::string wrong = read_json_line(bytes, field, &text);
        b.lines_read++;
        if (!wrong.empty() && b.malformed++ == 0)
            b.first_malformed = path + ":" + std::to_string(line) + ": " + wrong;
        if (!wrong.empty()) continue;
        e.out.push_back(DOCUMENT);
        encode_more(e, text);
    }
    b.tokens = std::move(e.out);
}

inline void tokenize_batch(TextBatch& b, const Tokenizer& t, const std::string& field,
                           const std::string& path) {
    if (b.lines) return tokenize_lines(b, t, field, path);
    b.tokens = encode(t, b.text, true, b.offset > 0);
    if (b.offset == 0) b.tokens.insert(b.tokens.begin(), DOCUMENT);
    // plain text never gives these two
    for (int& token : b.tokens)
        if (token >= 0 && (token == t.eot || token == t.bos)) token = DOCUMENT;
}
