// dataloader.h - windows of tokens from text and token shards: memory-mapped, many files, larger than memory
//   .txt   any text, tokenized when it is opened; where a byte is a token nothing is copied. The
//          texts of special tokens (<|endoftext|>) are these tokens.
//   .bin   llm.c's shards: 256 int32 of header {magic, version, tokens}, then the tokens:
//          magic 20240520 version 1 uint16 (GPT-2), magic 20240801 version 7 uint32 (Llama 3);
//          prepare.h writes them
//   A file of n tokens has (n-1)/T windows; window i holds the tokens iT .. iT+T: T inputs, and as
//   targets the same shifted by one. Sample s of a run is window permutation(s mod W) of epoch
//   floor(s/W): every window once an epoch, in an order keyed by seed and epoch, with no memory. The
//   cursor of a run is one number: the samples taken so far.
//   With --document-mask the documents of a window do not see each other: see split_documents.
//   Without validation files the last tenth of each file is for validation; the parts share no
//   token.
#pragma once
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <vector>
#include "rand.h"
#include "tokenizer.h"

struct DataFile {
    std::string path;
    const unsigned char* tokens = nullptr; // the first token, mapped
    size_t width = 1;                      // bytes a token
    size_t first = 0, count = 0;           // the part of the file that is ours
    size_t windows = 0;
    size_t windows_before = 0; // of the files before it
    uint64_t device = 0, inode = 0;
    std::shared_ptr<const std::vector<int>> encoded = nullptr; // owns the tokens of a text
};

enum class Part { TRAIN, VAL };

struct DataLoader {
    std::vector<DataFile> files;
    size_t T = 0, V = 0, windows = 0, tokens = 0;
    uint64_t seed = 0;
    bool shuffle = true;
};

inline size_t data_windows(const DataLoader& d) { return d.windows; }

// ----------------------------------------------------------------------------
// files

// "a.bin,b/*.txt" -> the files, each pattern's in order
inline std::string data_paths(const std::string& value, std::vector<std::string>* paths) {
    std::string item;
    for (std::istringstream in(value); std::getline(in, item, ',');) {
        glob_t found;
        bool pattern = item.find_first_of("*?[") != std::string::npos;
        if (pattern && glob(item.c_str(), 0, nullptr, &found) == 0) {
            paths->insert(paths->end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
            globfree(&found);
        } else if (pattern)
            return item + ": no file matches";
        else if (!item.empty())
            paths->push_back(item);
    }
    return paths->empty() ? "no data file in '" + value + "'" : "";
}

inline std::string read_shard_header(DataFile* f, size_t bytes) {
    int32_t header[256];
    if (bytes < sizeof(header))
        return f->path + ": " + std::to_string(bytes) +
               " bytes are no token shard: its header alone has 1024";
    memcpy(header, f->tokens, sizeof(header));
    if (header[0] != 20240520 && header[0] != 20240801)
        return f->path + ": magic number " + std::to_string(header[0]) +
               " is not a token shard's (20240520 or 20240801); text files end in .txt";
    int version = header[0] == 20240520 ? 1 : 7;
    if (header[1] != version)
        return f->path + ": version " + std::to_string(header[1]) + " of magic " +
               std::to_string(header[0]) + " is unknown, only " + std::to_string(version) + " is";
    f->width = version == 1 ? 2 : 4;
    size_t body = bytes - sizeof(header), promised = size_t(uint32_t(header[2]));
    if (body != promised * f->width)
        return f->path + ": the header promises " + std::to_string(promised) + " tokens of " +
               std::to_string(f->width) + " bytes, the file holds " + std::to_string(body) +
               " bytes of them: it is cut short or not whole; make it again";
    f->tokens += sizeof(header);
    f->count = promised;
    return "";
}

inline std::string open_data_file(DataFile* f) {
    int fd = open(f->path.c_str(), O_RDONLY);
    if (fd < 0) return f->path + ": " + strerror(errno);
    struct stat s;
    fstat(fd, &s);
    std::string wrong;
    if (!S_ISREG(s.st_mode))
        wrong = f->path + ": is no file";
    else if (s.st_size == 0)
        wrong = f->path + ": is empty";
    if (!wrong.empty()) return close(fd), wrong;
    void* p = mmap(nullptr, size_t(s.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return f->path + ": cannot be mapped: " + strerror(errno);
    f->tokens = static_cast<const unsigned char*>(p);
    f->device = s.st_dev, f->inode = s.st_ino, f->count = size_t(s.st_size);
    bool shard = f->path.size() > 4 && f->path.compare(f->path.size() - 4, 4, ".bin") == 0;
    return shard ? read_shard_header(f, size_t(s.st_size)) : "";
}

// A mapped text becomes its tokens; a byte's token is the byte itself.
inline void tokenize_text(DataFile* f, const Tokenizer& tokenizer) {
    if (tokenizer.kind == TokenizerKind::BYTE) return;
    std::string_view text((const char*)f->tokens, f->count);
    f->encoded = std::make_shared<std::vector<int>>(encode(tokenizer, text, true));
    munmap((void*)f->tokens, f->count);
    f->tokens = (const unsigned char*)f->encoded->data();
    f->width = sizeof(int), f->count = f->encoded->size();
}

// Validation has its own files, or the last tenth of each: tokens from split + 1 on, so that not
// even a target is shared with the training part, [0, split].
inline std::string data_open(DataLoader* d, const std::string& value, Part part,
                             bool own_validation, const Tokenizer& tokenizer, size_t T, size_t V,
                             uint64_t seed) {
    std::vector<std::string> paths;
    std::string wrong = data_paths(value, &paths);
    if (!wrong.empty()) return wrong;
    *d = {{}, T, V, 0, 0, seed, part == Part::TRAIN};
    for (const std::string& path : paths) {
        DataFile f;
        f.path = path;
        wrong = open_data_file(&f);
        if (!wrong.empty()) return wrong;
        bool text = f.width == 1;
        if (text && size_t(tokenizer.vocab_size) > V)
            return path + ": --tokenizer " + tokenizer.name + " writes " +
                   std::to_string(tokenizer.vocab_size) + " tokens, the model has " +
                   std::to_string(V) + ": give the model's tokenizer, or --vocab with new weights";
        if (text) tokenize_text(&f, tokenizer);
        size_t split = f.count - f.count / 10;
        if (!own_validation && part == Part::TRAIN) f.count = split;
        if (!own_validation && part == Part::VAL) f.first = split, f.count -= split;
        f.windows = f.count > 0 ? (f.count - 1) / T : 0;
        f.windows_before = d->windows;
        d->windows += f.windows, d->tokens += f.count;
        d->files.push_back(f);
    }
    if (d->windows == 0)
        return std::string(part == Part::TRAIN ? "the training" : "the validation") + " text has " +
               std::to_string(d->tokens) + " tokens in " + paths[0] +
               (paths.size() > 1 ? " and others" : "") + ": a sequence takes " +
               std::to_string(T + 1) + "; give more text or a smaller --seq" +
               (!own_validation && part == Part::VAL ? ", or validation files with --val" : "");
    return "";
}

// Files given for training must not be given for validation.
inline std::string data_disjoint(const DataLoader& train, const DataLoader& val) {
    for (const DataFile& a : train.files)
        for (const DataFile& b : val.files)
            if (a.device == b.device && a.inode == b.inode)
                return b.path +
                       " is in --data and in --val: validation text must not be trained on; leave "
                       "--val out to hold back a tenth of each file";
    return "";
}

inline std::string data_text(const DataLoader& d) {
    return std::to_string(d.files.size()) + (d.files.size() == 1 ? " file, " : " files, ") +
           std::to_string(d.tokens) + " tokens, " + std::to_string(d.windows) + " windows of " +
           std::to_string(d.T);
}

// The project's own text, for a first run without a download.
inline std::vector<std::string> project_sources(const std::string& folder) {
    std::vector<std::string> found;
    for (std::string root : {folder, folder + "../"}) {
        for (const char* pattern : {"*.md", "*.cu", "*.cpp", "Makefile", "llmc/*", "test/*.h",
                                    "test/*.cpp", "scripts/*.sh", "dev/*/*.h", "dev/*/*.cpp"}) {
            glob_t g;
            if (glob((root + pattern).c_str(), 0, nullptr, &g)) continue;
            found.insert(found.end(), g.gl_pathv, g.gl_pathv + g.gl_pathc);
            globfree(&g);
        }
        if (!found.empty()) break;
    }
    return found;
}

// ----------------------------------------------------------------------------
// documents

// The token that ends the documents of all files: `given`, or -1 for what their format and the
// tokenizer say. llm.c's shards have GPT-2's <|endoftext|> or Llama 3's <|begin_of_text|> before
// each document, which ends the one before it as well.
inline std::string data_document_end(const DataLoader& d, const Tokenizer& tokenizer, int given,
                                     int* end) {
    const DataFile& first = d.files.front();
    auto usual = [&](const DataFile& f) {
        bool text = f.width == 1 || f.encoded;
        return text ? tokenizer.eot : f.width == 2 ? 50256 : 128000;
    };
    *end = given >= 0 ? given : usual(first);
    if (*end < 0)
        return "--document-mask: --tokenizer " + tokenizer.name +
               " has no token that ends a text: say which one ends the documents of " + first.path +
               ", as in --document-end 10 for lines";
    for (const DataFile& f : d.files)
        if (given < 0 && usual(f) != *end)
            return "--document-mask: token " + std::to_string(*end) + " ends the documents of " +
                   first.path + ", not those of " + f.path +
                   ": give files of one kind, or --document-end";
    if (size_t(*end) >= d.V)
        return "--document-mask: token " + std::to_string(*end) + ", which ends the documents of " +
               first.path + ", is beyond the model's vocabulary of " + std::to_string(d.V) +
               ": say which token does with --document-end";
    return "";
}

// doc_start, targets (T) of a window whose documents end with the token `end`; -1: it is one. The
// end belongs to the document before it: that a text ends is learned. What follows the end is the
// next document's and cannot be told from this one: the target there is ignored. A window that
// begins inside a document has of it what lies in the window.
inline void split_documents(int* doc_start, int* targets, const int* tokens, size_t T, int end) {
    int start = 0;
    for (size_t i = 0; i < T; i++) {
        doc_start[i] = start;
        if (tokens[i] == end) start = int(i) + 1, targets[i] = -1;
    }
}

// ----------------------------------------------------------------------------
// windows

// A permutation of [0, n) keyed by seed and epoch: a Feistel network over the next power of four,
// walked until it lands inside.
inline uint64_t permutation(uint64_t seed, uint64_t epoch, uint64_t place, uint64_t n) {
    int half = 0;
    while ((uint64_t(1) << (2 * half)) < n) half++;
    uint64_t mask = (uint64_t(1) << half) - 1, stream = fnv1a("windows." + std::to_string(epoch)),
             x = place;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t r = 0; r < 4; r++) {
            uint64_t mixed = left ^ (random_block(seed, stream, right + (r << 32))[0] & mask);
            left = right, right = mixed;
        }
        x = left << half | right;
    } while (x >= n);
    return x;
}

inline int64_t token_at(const DataFile& f, size_t i) {
    const unsigned char* p = f.tokens + (f.first + i) * f.width;
    if (f.width == 1) return *p;
    uint32_t t = 0;
    memcpy(&t, p, f.width); // little-endian, as the shards are
    return t;
}

// tokens, targets (T) of a sample; "" or what is wrong with them
inline std::string load_window(const DataLoader& d, uint64_t sample, int* tokens, int* targets) {
    uint64_t window = sample % d.windows;
    if (d.shuffle) window = permutation(d.seed, sample / d.windows, window, d.windows);
    auto after = std::upper_bound(
        d.files.begin(), d.files.end(), window,
        [](uint64_t w, const DataFile& f) { return w < f.windows_before + f.windows; });
    const DataFile& f = *after;
    size_t start = (window - f.windows_before) * d.T;
    for (size_t i = 0; i <= d.T; i++) {
        int64_t token = token_at(f, start + i);
        if (size_t(token) >= d.V)
            return f.path + ": token " + std::to_string(token) + " at position " +
                   std::to_string(f.first + start + i) + " is beyond the model's vocabulary of " +
                   std::to_string(d.V) + ": the text was tokenized for another model";
        if (i < d.T) tokens[i] = int(token);
        if (i > 0) targets[i - 1] = int(token);
    }
    return "";
}
