// text_batch.h - texts in batches, and their tokens: what prepare_gpt's threads work on
//   A batch is whole JSON lines, or a block of a text that ends where its tokens do (text_cut). The
//   end of a batch depends only on the inputs and on where the batch begins, so a run that resumes
//   in the middle has the same batches. A file that holds tokens passes through.
#pragma once
#include <algorithm>
#include "../comm/text.h"
#include "json.h"
#include "text_stream.h"
#include "tokenizer.h"

namespace llmc {

struct BatchLimits { // bytes of text
    size_t batch = size_t(1) << 20;
    size_t line = size_t(64) << 20;
};

constexpr int DOCUMENT = -1; // in a batch's tokens: a document begins here

// A place in the inputs: the number of one, its byte (decompressed), its line.
struct TextPlace {
    size_t file = 0;
    size_t offset = 0;
    size_t line = 1;
};

// One unit of work: the place where it begins, text, and the tokens that a thread makes of it.
struct TextBatch : TextPlace {
    bool lines = false;         // JSON lines; otherwise a block of a text
    bool holds_tokens = false;  // 16-bit tokens instead of text
    std::string text = "";
    size_t position = 0; // bytes of the input on disk that are read at its end
    // Results of the thread.
    std::vector<int> tokens = {};
    LineCounts counts = {};
    std::string wrong = ""; // an error that ends the run
    std::string note = "";  // a remark on the file, of its first batch
};

// Choose where to end a block of a text, so that its tokens and those of the next block are the
// tokens of the whole text:
//   1. before the text of the end-of-text token, which no word crosses
//   2. before a space between two letters. Every pattern in use cuts there (GPT-2's, tiktoken's,
//      Llama 3's, Qwen's). So do tokenizers without patterns, unless a piece has a letter and then
//      a space; no tokenizer that splits at spaces has such a piece.
//   3. in a block with neither (a megabyte without "a b"): after a line, or else after a character.
//      The text stays whole, but a word may be cut in two.
inline size_t text_cut(std::string_view block, const std::string& end_text) {
    auto letter = [](char c) {
        return (c | 32) >= 'a' && (c | 32) <= 'z';
    };

    // 1 and 2. Look for a place that no token crosses.
    size_t end = end_text.empty() ? std::string::npos : block.rfind(end_text);
    if (end != std::string::npos && end > 0)
        return end;
    for (size_t at = block.size() - 1; at-- > 1;)
        if (block[at] == ' ' && letter(block[at - 1]) && letter(block[at + 1]))
            return at;

    // 3. Cut after a line, or else before the first byte of a character, far enough from the end
    // that no end-of-text is cut in two.
    size_t line = block.rfind('\n');
    if (line != std::string::npos)
        return line + 1;
    size_t back_by = std::max(end_text.size(), size_t(1));
    size_t at = block.size() - std::min(block.size() - 1, back_by);
    for (int back = 0; back < 3 && at > 1 && (block[at] & 0xc0) == 0x80; back++)
        at--;
    return at;
}

// ----------------------------------------------------------------------------
// reading

// The inputs, which are read one after the other, and the place of the first byte of `rest`.
struct BatchReader : TextPlace {
    std::vector<TextInput> inputs;
    std::string script;   // the program that reads parquet
    std::string field;    // key of a JSON line's text
    std::string end_text; // text of the end-of-text token
    BatchLimits limits;
    bool open = false;
    bool ended = false;
    InputStream stream;
    std::string rest;  // bytes that are read, but in no batch yet
    std::string wrong; // the first thing that failed
};

// Open the current input at its current offset.
inline void reader_open(BatchReader& r) {
    r.open = true;
    r.ended = false;
    r.wrong = stream_open(&r.stream, r.inputs[r.file], r.script, r.field);
    if (!r.wrong.empty() || r.offset == 0)
        return;

    // A plain file can seek to the offset.
    if (r.inputs[r.file].packed.empty()) {
        if (fseeko(r.stream.file, off_t(r.offset), SEEK_SET) != 0)
            r.wrong = strerror(errno);
        return;
    }

    // A compressed input cannot seek: read it again up to the offset.
    std::vector<char> skipped(size_t(1) << 20);
    for (size_t left = r.offset, n; left > 0; left -= n) {
        n = stream_read(r.stream, skipped.data(), std::min(left, skipped.size()));
        if (n == 0) {
            r.wrong = r.inputs[r.file].path + ": has become shorter";
            return;
        }
    }
}

// Read until `rest` has `bytes` bytes, or to the end of the input.
inline void reader_fill(BatchReader& r, size_t bytes) {
    while (r.rest.size() < bytes && !r.ended && r.wrong.empty()) {
        size_t have = r.rest.size();
        r.rest.resize(bytes);
        size_t n = stream_read(r.stream, r.rest.data() + have, bytes - have);
        r.rest.resize(have + n);
        r.ended = n == 0;
        r.wrong = r.stream.wrong;
    }
}

// Close an input that is read to its end, and go to the next one.
inline void reader_next_file(BatchReader& r) {
    stream_close(r.stream);
    if (r.wrong.empty())
        r.wrong = r.stream.wrong;
    if (!r.stream.note.empty())
        fprintf(stderr, "note: %s\n", r.stream.note.c_str());
    r.open = false;
    static_cast<TextPlace&>(r) = {r.file + 1};
}

// Move the first `cut` bytes of `rest` into a batch.
inline void take_batch(BatchReader& r, TextBatch* b, size_t cut) {
    *b = {r};
    b->lines = r.inputs[r.file].lines;
    b->holds_tokens = r.inputs[r.file].tokens;
    b->text = r.rest.substr(0, cut);
    b->position = stream_position(r.stream);
    r.rest.erase(0, cut);
    r.offset += cut;
    r.line += std::ranges::count(b->text, '\n');
}

// Read the next batch. Returns false after the last one, or with an error in r.wrong.
inline bool read_batch(BatchReader& r, TextBatch* b) {
    size_t want = r.limits.batch;
    while (r.wrong.empty() && r.file < r.inputs.size()) {
        // Get `want` bytes of the input, or all that it has left.
        const TextInput& input = r.inputs[r.file];
        if (!r.open) reader_open(r);
        reader_fill(r, want);
        if (!r.wrong.empty()) break;
        if (r.rest.empty()) {
            reader_next_file(r);
            continue;
        }

        // Find the end of the batch: that of the input, of a line, or of a block of text.
        std::string_view block = std::string_view(r.rest).substr(0, want);
        size_t cut = block.size() < want ? block.size()
                     : input.lines       ? block.rfind('\n') + 1
                     : input.tokens      ? block.size() / 2 * 2
                                         : text_cut(block, r.end_text);
        if (cut > 0) {
            take_batch(r, b, cut);
            return true;
        }

        // The line is longer than the block: read twice as much.
        if (want >= r.limits.line)
            r.wrong = concat(input.path, ":", r.line, ": a line of more than ", r.limits.line,
                             " bytes: are these JSON lines?");
        want *= 2;
    }
    return false;
}

// ----------------------------------------------------------------------------
// the tokens of a batch

// Replace bytes that are not UTF-8, so that a JSON parser accepts the line. Such a byte becomes two
// characters that no text has, Unicode's noncharacters: U+FDD0 to U+FDDF for its upper four bits,
// U+FDE0 to U+FDEF for its lower four. noncharacters_to_bytes() undoes this in the parsed string.
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

// Undo bytes_to_noncharacters(): each pair of these characters becomes one byte again.
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

// Read the text of a JSON line: the string under `field`.
inline std::string read_json_line(std::string_view line, const std::string& field,
                                  std::string* text) {
    // Most lines parse as they are. Only one that does not may hold bytes that are not UTF-8.
    Json j = Json::parse(line, nullptr, false);
    bool other_bytes = j.is_discarded();
    if (other_bytes) j = Json::parse(bytes_to_noncharacters(line), nullptr, false);
    if (!j.is_object())
        return no_record(line);
    if (!j.contains(field) || !j[field].is_string())
        return with_records("has no string \"" + field + "\": --field says which one is the text",
                            j);
    *text = j[field].get<std::string>();
    if (other_bytes)
        *text = noncharacters_to_bytes(*text);
    return "";
}

// Tokenize JSON lines, each a document.
inline void tokenize_lines(TextBatch& b, const Tokenizer& t, const std::string& field,
                           const std::string& path) {
    Encoding e = encoding_open(t, b.text.size());
    std::deque<std::string> texts; // a deque never moves its texts: repeated words point into them
    each_line(b.text, b.line, path, &b.counts, [&](std::string_view line) {
        std::string& text = texts.emplace_back();
        LLMC_TRY(read_json_line(line, field, &text));
        e.out.push_back(DOCUMENT);
        encode_more(e, text);
        return std::string();
    });
    b.tokens = std::move(e.out);
}

// Take the tokens of a file that holds tokens. Each document ends with the tokenizer's end token.
inline void take_tokens(TextBatch& b, const Tokenizer& t, const std::string& path) {
    if (b.offset == 0)
        b.tokens.push_back(DOCUMENT);
    for (size_t at = 0; at + 2 <= b.text.size(); at += 2) {
        uint16_t token = 0;
        memcpy(&token, &b.text[at], 2); // little-endian
        if (token >= t.vocab_size) {
            b.wrong = concat(path, ": token ", token, " at position ", (b.offset + at) / 2,
                             " is none of the ", t.vocab_size, " of --tokenizer ", t.name,
                             ": give the one that made the file");
            return;
        }
        b.tokens.push_back(token == t.eot || token == t.bos ? DOCUMENT : int(token));
    }
}

// Make a batch's tokens, with DOCUMENT before each document.
inline void tokenize_batch(TextBatch& b, const Tokenizer& t, const std::string& field,
                           const std::string& path) {
    if (b.lines)
        return tokenize_lines(b, t, field, path);
    if (b.holds_tokens)
        return take_tokens(b, t, path);

    // Encode a block of text.
    b.tokens = encode(t, b.text, true, b.offset > 0);
    if (b.offset == 0)
        b.tokens.insert(b.tokens.begin(), DOCUMENT);

    // Turn the tokens between documents into DOCUMENT. Only the text of a special token gives
    // one of these two.
    for (int& token : b.tokens)
        if (token >= 0 && (token == t.eot || token == t.bos))
            token = DOCUMENT;
}

} // namespace llmc
