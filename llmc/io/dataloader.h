// dataloader.h - windows of tokens from text and token shards, mapped, larger than memory
//   .txt   any text, tokenized when it is opened; the byte tokenizer copies nothing. The text of a
//          special token (<|endoftext|>) becomes that token. Files that are clearly not text are
//          refused (file_kind.h).
//   .bin   llm.c's shards: a header of 256 int32 {magic, version, tokens}, then the tokens.
//          Magic 20240520 version 1: uint16 (GPT-2). Magic 20240801 version 7: uint32 (Llama 3).
//          prepare.h writes them. With --loss sft: version 8, windows of whole conversations.
//   .jsonl with --loss sft and other losses of answers: packed when they are opened, by a function
//          that the program passes (LineSource). The loader knows the marks of its tokens alone.
//   windows    A file of n tokens has (n-1)/T windows. Window i holds the tokens iT .. iT+T:
//              T inputs, and the same shifted by one as targets.
//   order      Sample s of a run is window permutation(s mod W) of epoch floor(s/W). Each epoch
//              visits every window once, in an order that is a function of seed and epoch and needs
//              no memory. The cursor of a run is one number: the samples taken so far.
//              in-order:FILES takes windows as they come, and of each file whole steps alone.
//   documents  With --documents mask those of a window do not see each other (context.h). With
//              best-fit a window of T + 1 tokens begins with one: see pack_rows().
//   validation Without its own files, validation gets the last tenth of each training file. The two
//              splits share no token.
//   A function that returns a text returns "", or one line that says what is wrong.
#pragma once
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>
#include "../context.h"
#include "../ops/rand.h"
#include "../comm/text.h"
#include "file_kind.h"
#include "files.h"
#include "json.h"
#include "tokenizer.h"

namespace llmc {

// Rows of documents, each of which ends with the token `end` or with the file.
struct PackedRows {
    std::vector<size_t> documents = {}; // [row after row]: a document's first token
    std::vector<size_t> first = {};     // [row]: its first document, counted in `documents`
    int end = -1;
};

// An open file, and the range of its tokens that belongs to this split. Ranges count tokens, from
// the first token after the header.
struct DataFile {
    std::string path;
    const unsigned char* tokens = nullptr; // the first token, mapped
    size_t width = 1;                      // bytes of a token
    size_t first = 0;                      // the range: `count` tokens from here
    size_t count = 0;
    size_t windows = 0;
    size_t windows_before = 0; // in the files before this one
    // Identify the file whatever its name: see data_disjoint().
    uint64_t device = 0;
    uint64_t inode = 0;
    std::shared_ptr<const std::vector<int>> encoded = nullptr; // owns the tokens of a text
    std::string note = ""; // a remark: the file may be no text, or lines were left out
    size_t packed = 0;     // tokens of a window of conversations; 0: plain text
    std::shared_ptr<const PackedRows> rows = nullptr; // with --documents best-fit
};

// A training loader shuffles its windows; a validation loader reads them from the start, in order.
enum class Split { TRAIN, VAL };

// All files of one split. The loader has no state that changes: the number of a sample determines
// its window, so a run can resume.
struct DataLoader {
    std::vector<DataFile> files;
    size_t T = 0;       // tokens of a window
    size_t V = 0;       // the model's vocabulary
    size_t windows = 0; // in all files
    size_t tokens = 0;
    uint64_t seed = 0;
    bool shuffle = true;
};

// Windows that a source has packed: their tokens, marked (context.h), and what they hold.
struct PackedLines {
    std::vector<int> tokens = {};
    LineCounts counts = {};
    std::string text = ""; // the counts in words
};

// A source of windows of T tokens that hold whole records of JSON lines. The same text must give
// the same windows on every rank. line: the number of the text's first line.
struct LineSource {
    std::function<PackedLines(std::string_view text, size_t line, const std::string& path,
                              size_t T)> pack = nullptr;
    bool shards = true;      // shards can hold its windows too: the marks fit
    std::string format = ""; // how the records are written, by name
    int padding = 0;         // the token that fills a window's end
};

// Opens the source of a preparation. Returns "" or what is wrong.
typedef std::function<std::string(LineSource*)> OpenSource;

// Whether any file is text, which this run has tokenized itself.
inline bool has_text(const DataLoader& d) {
    auto text = [](const DataFile& f) { return f.encoded || f.width == 1; };
    return std::ranges::any_of(d.files, text);
}

// ----------------------------------------------------------------------------
// files

// Split a value at its commas. A backslash keeps a comma: "a.bin,b\\,c.txt" -> "a.bin", "b,c.txt".
inline std::vector<std::string> split_paths(const std::string& value) {
    std::vector<std::string> items = {""};
    for (size_t at = 0; at < value.size(); at++) {
        bool escaped = value[at] == '\\' && at + 1 < value.size() && value[at + 1] == ',';
        if (value[at] == ',')
            items.push_back("");
        else
            items.back() += value[at += escaped];
    }
    return items;
}

// Escape the commas of a path, so that --data takes it as one path.
inline std::string escape_commas(const std::string& path) {
    std::string escaped;
    for (char c : path)
        escaped += c == ',' ? "\\," : std::string(1, c);
    return escaped;
}

constexpr std::string_view IN_ORDER = "in-order:"; // before files that are not shuffled

// List the files of a value: "a.bin,b/*.txt". The files of a pattern come in alphabetical order.
inline std::string data_paths(const std::string& value, std::vector<std::string>* paths) {
    if (value.starts_with(IN_ORDER))
        return data_paths(value.substr(IN_ORDER.size()), paths);
    // First try the value as the name of one file, whatever characters it has.
    if (file_type(value)) {
        paths->push_back(value);
        return "";
    }

    // Otherwise each item is a file or a pattern.
    for (const std::string& item : split_paths(value)) {
        // glob() sorts, so all ranks number the windows in the same way.
        glob_t found;
        bool pattern = item.find_first_of("*?[") != std::string::npos && !file_type(item);
        if (pattern && glob(item.c_str(), 0, nullptr, &found) == 0) {
            paths->insert(paths->end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
            globfree(&found);
        } else if (pattern) {
            return item + ": no file matches";
        } else if (item.empty()) {
            return "'" + value + "' has an empty name: is a shell's variable not set?";
        } else {
            paths->push_back(item);
        }
    }

    // Refuse a file that is there twice, by whatever names: it would be trained on twice as often
    // as the others, which is mostly a pattern that matches more than it should.
    std::set<std::pair<dev_t, ino_t>> seen;
    for (const std::string& path : *paths) {
        struct stat s;
        if (stat(path.c_str(), &s) == 0 &&
            !seen.insert({s.st_dev, s.st_ino}).second)
            return "'" + value + "' names " + path + " twice: name each file once";
    }
    return "";
}

// Identify the files of a value by name, size, and the CRC-32 of a sample: eight blocks of 16 KiB,
// spread evenly; all of a file of less than a MiB.
inline std::string identify_files(const std::string& value, Json* list) {
    *list = Json::array();
    std::vector<std::string> paths;
    LLMC_TRY(data_paths(value, &paths));
    std::vector<unsigned char> block(size_t(1) << 14);
    for (const std::string& path : paths) {
        int fd = -1;
        struct stat s = {};
        LLMC_TRY(open_regular(path, &fd, &s));

        // Read block by block. A block that cannot be read has no part in the checksum.
        uint32_t crc = 0;
        size_t bytes = size_t(s.st_size);
        size_t stride = bytes >> 20 ? bytes / 8 : block.size();
        for (size_t at = 0; at < bytes; at += stride) {
            ssize_t n = pread(fd, block.data(), block.size(), off_t(at));
            uInt length = uInt(std::max<ssize_t>(n, 0));
            crc = uint32_t(crc32(crc, block.data(), length));
        }
        close(fd);
        list->push_back({{"file", path}, {"bytes", bytes}, {"crc32", crc}});
    }
    return "";
}

// The command that makes shards of nanoGPT's tokens without a header, which are mostly GPT-2's.
inline std::string prepare_tokens_command(const std::string& path, const std::string& tokenizer) {
    if (tokenizer != "byte")
        return prepare_command(path, tokenizer);
    return "dev/data/tokenizer.py gpt2, then " + prepare_command(path, "data/gpt2");
}

// Check the header of a mapped shard, and step over it.
inline std::string read_shard_header(DataFile* f, size_t bytes, const std::string& tokenizer) {
    // The header is 256 words: magic number, version, count of tokens; the rest is 0.
    int32_t header[256];
    if (bytes < sizeof(header))
        return concat(f->path, ": ", bytes,
                      " bytes are no token shard: its header alone has 1024");
    memcpy(header, f->tokens, sizeof(header));

    // The magic number determines the version, which determines the width of a token.
    if (header[0] != 20240520 && header[0] != 20240801)
        return concat(f->path, ": magic number ", header[0],
                      " is not a token shard's (20240520 or 20240801); text files end in .txt. Are "
                      "these 16-bit tokens without a header, as nanoGPT's train.bin has them, this "
                      "makes shards of them: ",
                      prepare_tokens_command(f->path, tokenizer));
    int version = header[0] == 20240520 ? 1 : 7;
    bool packed = header[0] == 20240801 && header[1] == 8 && header[3] > 0;
    if (header[1] != version && !packed)
        return concat(f->path, ": version ", header[1], " of magic ", header[0],
                      " is unknown, only ", version, " is");
    f->width = version == 1 ? 2 : 4;
    f->packed = packed ? size_t(header[3]) : 0;

    // The file must hold exactly as many tokens as the header promises.
    size_t body = bytes - sizeof(header);
    size_t promised = uint32_t(header[2]);
    if (body != promised * f->width)
        return concat(f->path, ": the header promises ", promised, " tokens of ", f->width,
                      " bytes, the file holds ", body,
                      " bytes of them: it is cut short or not whole; make it again");
    f->tokens += sizeof(header);
    f->count = promised;
    return "";
}

// Check that a file's windows suit the run: under --loss sft, conversations packed into windows of
// T tokens; otherwise plain text.
inline std::string check_packed(const DataFile& f, bool wanted, size_t T) {
    if (f.packed && !wanted)
        return f.path + ": holds conversations, of which answers are marked: give --loss sft";
    if (!f.packed && wanted)
        return f.path + ": --loss sft trains the answers of conversations, and this marks none: "
                        "give JSON lines (.jsonl), or shards that prepare_gpt --loss sft makes";
    if (f.packed && f.packed != T)
        return concat(f.path, ": conversations are packed into windows of ", f.packed,
                      " tokens, and --seq is ", T, ": give --seq ", f.packed);
    return "";
}

// Map a file, which stays mapped as long as the program runs, and note which one it is.
inline std::string map_data_file(DataFile* f) {
    void* begin = nullptr;
    struct stat s = {};
    std::string wrong = map_whole_file(f->path, &begin, &f->count, &s);
    f->tokens = static_cast<const unsigned char*>(begin);
    f->device = s.st_dev;
    f->inode = s.st_ino;
    return wrong;
}

// Replace a mapped text by its tokens, and unmap it. `encoded` keeps the tokens alive in every copy
// of the DataFile.
inline void replace_text(DataFile* f, std::vector<int> tokens) {
    unmap_file((void*)f->tokens, f->count);
    f->encoded = std::make_shared<std::vector<int>>(std::move(tokens));
    f->tokens = (const unsigned char*)f->encoded->data();
    f->width = sizeof(int);
    f->count = f->encoded->size();
}

// Let a source pack mapped JSON lines into windows. data_notes() reports the lines left out.
inline std::string open_lines(DataFile* f, const LineSource& source, size_t T) {
    std::string_view text((const char*)f->tokens, f->count);
    PackedLines packed = source.pack(text, 1, f->path, T);
    replace_text(f, std::move(packed.tokens));
    f->packed = T;
    f->note = f->path + ": " + packed.text;
    std::string wrong = too_many_malformed(packed.counts);
    return wrong.empty() && f->count == 0 ? f->note + ": nothing to train on" : wrong;
}

// Open a mapped file of text or tokens. `tokenizer` is the value of --tokenizer, for the commands
// that messages suggest.
inline std::string open_text(DataFile* f, const std::string& tokenizer) {
    // Refuse a file that is neither text nor tokens. If it only looks doubtful, note that.
    std::string_view head((const char*)f->tokens, std::min(f->count, size_t(1) << 16));
    LLMC_TRY(no_text(f->path, head, tokenizer));
    if (f->path.size() > 4 && f->path.ends_with(".bin"))
        return read_shard_header(f, f->count, tokenizer);
    f->note = binary_note(f->path, head);
    return "";
}

// Replace a mapped text by its tokens. With the byte tokenizer the text is its own tokens.
inline void tokenize_text(DataFile* f, const Tokenizer& tokenizer) {
    std::string_view text((const char*)f->tokens, f->count);
    // The mark before a text in UTF-8 is no text.
    size_t mark = text.starts_with(BYTE_ORDER_MARK) ? BYTE_ORDER_MARK.size() : 0;
    if (tokenizer.kind == TokenizerKind::BYTE) {
        f->tokens += mark;
        f->count -= mark;
        return;
    }
    text.remove_prefix(mark);
    replace_text(f, encode(tokenizer, text, true));
}

// Keep one split of a file's tokens: training gets [0, n - n/10), validation the rest. They do not
// share a token, not even a target.
inline void keep_split(DataFile* f, Split split) {
    // Hold back the end, not windows from everywhere: neighbouring windows share a text. Hold back
    // whole windows of conversations, at least one if there are two.
    size_t held_back = f->count / 10;
    if (f->packed)
        held_back = std::max(f->count / f->packed / 10, size_t(f->count > f->packed)) * f->packed;
    if (split == Split::VAL)
        f->first = f->count - held_back;
    f->count = split == Split::VAL ? held_back : f->count - held_back;
}

// Say why a split has no window.
inline std::string no_window(const DataLoader& d, Split split, bool own_validation, size_t step) {
    const DataFile& first = d.files[0];
    bool tenth = !own_validation && split == Split::VAL;
    std::string in = first.path + (d.files.size() > 1 ? " and others" : "");
    std::string more = tenth ? ", or validation files with --val" : "";

    // Conversations are packed into whole windows, and one window cannot serve both splits.
    if (tenth && first.packed)
        return concat(in, " fills one window of ", d.T, " tokens, and validation needs another: "
                      "give more lines or a smaller --seq", more);
    return concat(split == Split::TRAIN ? "the training" : "the validation", " text has ", d.tokens,
                  " tokens in ", in, ": a ", step > 1 ? "step" : "sequence", " takes ",
                  step * d.T + 1, "; give more text or a smaller --seq", more);
}

// Open the files of one split. own_validation: validation has files of its own, so all tokens of
// these files belong to this split. source: packs JSON lines into windows; null: plain text. step:
// windows that files in order keep together.
inline std::string data_open(DataLoader* d, const std::string& value, Split split,
                             bool own_validation, const Tokenizer& tokenizer, size_t T, size_t V,
                             uint64_t seed, const LineSource* source = nullptr, size_t step = 1) {
    // Find the files before opening any.
    std::vector<std::string> paths;
    LLMC_TRY(data_paths(value, &paths));
    *d = {};
    d->T = T;
    d->V = V;
    d->seed = seed;
    d->shuffle = split == Split::TRAIN && !value.starts_with(IN_ORDER);
    if (d->shuffle) step = 1;

    // Open each in the order given, which determines the numbers of the windows.
    for (const std::string& path : paths) {
        DataFile f;
        f.path = path;
        bool lines = source && path.ends_with(".jsonl");
        // Refuse shards for preferences: they cannot mark the worse answer.
        bool records = path.ends_with(".json") || path.ends_with(".parquet");
        if (source && !lines && (!source->shards || records))
            return no_json_lines(path);
        LLMC_TRY(map_data_file(&f));
        LLMC_TRY(lines ? open_lines(&f, *source, T) : open_text(&f, tokenizer.name));
        LLMC_TRY(check_packed(f, source != nullptr, T));

        // Turn text into tokens; the model must know all of the tokenizer's.
        bool text = f.width == 1 || lines;
        if (text && size_t(tokenizer.vocab_size) > V)
            return concat(path, ": --tokenizer ", tokenizer.name, " writes ", tokenizer.vocab_size,
                          " tokens, the model has ", V,
                          ": give the model's tokenizer, or --vocab with new weights");
        if (f.width == 1)
            tokenize_text(&f, tokenizer);

        // Cut the range into windows. The last target is one token after the last input.
        if (!own_validation) keep_split(&f, split);
        f.windows = f.packed ? f.count / T : f.count > 0 ? (f.count - 1) / T : 0;
        f.windows -= f.windows % step;
        f.windows_before = d->windows;
        d->windows += f.windows;
        d->tokens += f.count;
        d->files.push_back(f);
    }

    return d->windows ? "" : no_window(*d, split, own_validation, step);
}

// Refuse a validation file that is also a training file, even under another name.
inline std::string data_disjoint(const DataLoader& train, const DataLoader& val) {
    // Device and inode identify a file whatever its name: links and ./ lead to the same one.
    for (const DataFile& a : train.files)
        for (const DataFile& b : val.files)
            if (a.device == b.device && a.inode == b.inode)
                return b.path +
                       " is in --data and in --val: validation text must not be trained on; leave "
                       "--val out to hold back a tenth of each file";
    return "";
}

// List the notes on all files.
inline std::vector<std::string> data_notes(const DataLoader& d) {
    std::vector<std::string> notes;
    for (const DataFile& f : d.files)
        if (!f.note.empty())
            notes.push_back(f.note);
    return notes;
}

// Describe the files in one line for the log.
inline std::string data_text(const DataLoader& d) {
    std::string text = concat(d.files.size(), d.files.size() == 1 ? " file, " : " files, ",
                              d.tokens, " tokens, ", d.windows, " windows of ", d.T);
    if (!d.files[0].rows) return text;
    double dropped = double(d.tokens - d.windows * (d.T + 1)) / double(d.tokens);
    return concat(text, ", which begin with a document; ", std::round(1000 * dropped) / 10,
                  "% of the tokens are dropped");
}

// The project's own text, for a first run without a download. The program lies in the root of the
// repository, or in a folder of it.
inline std::vector<std::string> project_sources(const std::string& folder) {
    std::vector<std::string> found;
    for (std::string root : {folder, folder + "../"}) {
        // Find the root by the program's source: other folders may have Markdown pages too.
        if (!file_type(root + "train_gpt.cu")) continue;

        // List the root's texts and sources.
        for (const char* pattern :
             {"*.md", "*.cu", "*.cpp", "Makefile", "llmc/*.h", "llmc/*.cuh", "llmc/*/*.h",
              "test/*/*.h", "test/*/*.cpp", "scripts/*.sh", "dev/*/*.h", "dev/*/*.cpp"}) {
            glob_t g;
            if (glob((root + pattern).c_str(), 0, nullptr, &g))
                continue;
            found.insert(found.end(), g.gl_pathv, g.gl_pathv + g.gl_pathc);
            globfree(&g);
        }
        if (!found.empty()) break;
    }
    return found;
}

// ----------------------------------------------------------------------------
// documents

// The token that usually ends the documents of a file. A text has the tokenizer's. llm.c's shards
// have GPT-2's <|endoftext|>, or Llama 3's <|begin_of_text|>, which stands before each document and
// so ends the one before it.
inline int usual_document_end(const DataFile& f, const Tokenizer& tokenizer) {
    bool text = f.width == 1 || f.encoded;
    return text ? tokenizer.eot : f.width == 2 ? 50256 : 128000;
}

// Choose the token that ends the documents of all files: `given`, or with -1 the usual one.
inline std::string data_document_end(const DataLoader& d, const Tokenizer& tokenizer, int given,
                                     int* end) {
    // Take the first file's token, then compare the others.
    const DataFile& first = d.files.front();
    *end = given >= 0 ? given : usual_document_end(first, tokenizer);
    if (*end < 0)
        return "--documents: --tokenizer " + tokenizer.name +
               " has no token that ends a text: say which one ends the documents of " + first.path +
               ", as in --document-end 10 for lines";

    // One token must serve all files, and the model must know it.
    for (const DataFile& f : d.files)
        if (given < 0 && usual_document_end(f, tokenizer) != *end)
            return concat("--documents: token ", *end, " ends the documents of ", first.path,
                          ", not those of ", f.path, ": give files of one kind, or --document-end");
    if (size_t(*end) >= d.V)
        return concat("--documents: token ", *end, ", which ends the documents of ", first.path,
                      ", is beyond the model's vocabulary of ", d.V,
                      ": say which token does with --document-end");
    return "";
}

// ----------------------------------------------------------------------------
// packing, as nanochat packs documents

// The upper bits of a token in packed shards are marks (context.h).
constexpr uint32_t TOKEN_BITS = uint32_t(REJECTED) - 1; // mask of the token itself

// Token i of a file's range, with its marks.
inline int64_t token_at(const DataFile& f, size_t i) {
    // Tokens have one, two or four bytes; memcpy leaves the upper bytes 0.
    const unsigned char* p = f.tokens + (f.first + i) * f.width;
    if (f.width == 1) return *p;
    uint32_t t = 0;
    memcpy(&t, p, f.width); // little-endian, as the shards are
    return t;
}

// Pack a file's documents into rows of `tokens` tokens. A row takes the longest of the next 1000
// documents that fits, again and again; where none fits, it ends with a part of the shortest. The
// rest of that one is dropped, and so is a last row that is not full. Cost: all tokens are read
// once, and each document takes 8 bytes.
inline PackedRows pack_rows(const DataFile& f, int end, size_t tokens) {
    PackedRows rows;
    rows.end = end;
    std::set<std::pair<size_t, size_t>> next; // a document's length, and where it begins
    size_t at = 0;
    while (true) {
        size_t begin = rows.documents.size(), room = tokens;
        while (room > 0) {
            // Read on.
            while (next.size() < 1000 && at < f.count) {
                size_t start = at;
                while (at < f.count && token_at(f, at++) != end)
                    ;
                next.insert({at - start, start});
            }
            if (next.empty()) return rows;

            // Take the longest that fits, of equals the first in the file, or cut the shortest.
            auto taken = next.upper_bound({room, SIZE_MAX});
            if (taken != next.begin())
                taken = next.lower_bound({std::prev(taken)->first, 0});
            rows.documents.push_back(taken->second);
            room -= std::min(room, taken->first);
            next.erase(taken);
        }
        rows.first.push_back(begin);
    }
}

// Pack the documents of all files anew, which have been cut into windows: each still has one.
inline void pack_documents(DataLoader* d, int end) {
    d->windows = 0;
    for (DataFile& f : d->files) {
        f.rows = std::make_shared<const PackedRows>(pack_rows(f, end, d->T + 1));
        f.windows = f.rows->first.size();
        f.windows_before = d->windows;
        d->windows += f.windows;
    }
}

// ----------------------------------------------------------------------------
// windows

// A pseudorandom permutation of [0, n), keyed by seed and epoch. It is a Feistel network of four
// rounds over the next power of four, applied again until the result lies below n.
inline uint64_t permutation(uint64_t seed, uint64_t epoch, uint64_t place, uint64_t n) {
    // The power of four is less than 4 n, so this takes less than four tries on average.
    int half = 0; // bits of each half
    while ((uint64_t(1) << (2 * half)) < n)
        half++;
    uint64_t mask = (uint64_t(1) << half) - 1;
    // Each epoch has its own random stream, and so its own order.
    uint64_t stream = fnv1a("windows." + std::to_string(epoch));
    uint64_t x = place;

    // Each round mixes one half with a keyed hash of the other. A round can be undone, so two
    // places never become one.
    do {
        uint64_t left = x >> half;
        uint64_t right = x & mask;
        for (uint64_t r = 0; r < 4; r++) {
            uint64_t mixed = left ^ (random_block(seed, stream, right + (r << 32))[0] & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= n);
    return x;
}

// Report a token of a file that the model does not have. `position` counts from the
// file's first token.
inline std::string beyond_vocabulary(const DataFile& f, size_t position, size_t V) {
    int64_t token = token_at(f, position - f.first) & (f.packed ? TOKEN_BITS : ~0u);
    return concat(f.path, ": token ", token, " at position ", position,
                  " is beyond the model's vocabulary of ", V,
                  ": the text was tokenized for another model, or the file is damaged: make it "
                  "again");
}

// The index of the first of `count` tokens that is V or more, or `count` if there is none. W is the
// type of a token; `bits` masks the token without its marks.
template <typename W>
size_t first_beyond(const unsigned char* bytes, size_t count, size_t V, W bits) {
    // Take the maximum of a block, which vectorises; search token by token only in a bad block.
    const W* tokens = reinterpret_cast<const W*>(bytes);
    const size_t block = 1 << 14;
    for (size_t from = 0; from < count; from += block) {
        size_t end = std::min(from + block, count);
        W most = 0;
        for (size_t i = from; i < end; i++)
            most = std::max(most, W(tokens[i] & bits));
        if (most < V) continue;
        auto beyond = [&](W t) { return (t & bits) >= V; };
        return size_t(std::find_if(tokens + from, tokens + end, beyond) - tokens);
    }
    return count;
}

// Look for tokens that the model does not have, so that a run of days does not end at one. This
// reads at most `bytes` bytes of the shards; load_window() checks every token it takes.
inline std::string check_tokens(const DataLoader& d, size_t bytes) {
    for (const DataFile& f : d.files) {
        // Skip a text, which has just been tokenized, and shards in which every number is a token.
        bool shard = f.width > 1 && !f.encoded;
        if (!shard || d.V > (uint64_t(1) << (8 * f.width)) - 1)
            continue;

        // Search the tokens of this split.
        size_t count = std::min(f.count, bytes / f.width);
        const unsigned char* begin = f.tokens + f.first * f.width;
        uint32_t bits = f.packed ? TOKEN_BITS : ~0u;
        size_t found = f.width == 2 ? first_beyond<uint16_t>(begin, count, d.V, 0xffff)
                                    : first_beyond<uint32_t>(begin, count, d.V, bits);
        if (found < count)
            return beyond_vocabulary(f, f.first + found, d.V);
        bytes -= count * f.width;
    }
    return "";
}

// The window of a sample: shuffled by epoch when training.
inline uint64_t window_of(const DataLoader& d, uint64_t sample) {
    uint64_t window = sample % d.windows;
    if (!d.shuffle) return window;
    return permutation(d.seed, sample / d.windows, window, d.windows);
}

// Fill tokens and targets, both (T), of a window.
inline std::string read_window(const DataLoader& d, uint64_t window, int* tokens, int* targets) {
    // Find the file that holds the window.
    auto end_of = [](const DataFile& f) { return f.windows_before + f.windows; };
    const DataFile& f = *std::ranges::upper_bound(d.files, window, {}, end_of);
    size_t row = window - f.windows_before, at = row * d.T;
    const size_t* document = f.rows ? &f.rows->documents[f.rows->first[row]] : nullptr;

    // All tokens but the last of T + 1 are inputs, all but the first are targets. Of conversations
    // answers alone are targets, and the last token predicts nothing: another one begins after it.
    const int64_t bits = f.packed ? TOKEN_BITS : ~0u;
    targets[d.T - 1] = -1;
    bool ended = true; // the next document of a row begins
    for (size_t i = 0; i < d.T + !f.packed; i++) {
        if (document && ended) at = *document++;
        int64_t marked = token_at(f, at++);
        ended = f.rows && (marked == f.rows->end || at == f.count);
        int token = int(marked & bits);
        if (size_t(token) >= d.V)
            return beyond_vocabulary(f, f.first + at - 1, d.V);
        int mark = f.packed ? int(marked) & (BEGINS | REJECTED) : 0;
        bool trained = !f.packed || int(marked) & TRAINED;
        if (i < d.T)
            tokens[i] = token | mark;
        if (i > 0)
            targets[i - 1] = trained ? token : -1;
    }
    return "";
}

// Fill tokens and targets, both (T), of a sample.
inline std::string load_window(const DataLoader& d, uint64_t sample, int* tokens, int* targets) {
    return read_window(d, window_of(d, sample), tokens, targets);
}

} // namespace llmc
