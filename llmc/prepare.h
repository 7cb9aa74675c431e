// prepare.h - text, JSON lines and parquet files to token shards, by many threads, resumable
//   Inputs     FILE.txt, FILE.jsonl, each also .gz or .zst; FILE.parquet; - (text_stream.h)
//   Documents  A JSON line is one: the string of its --field; the texts of special tokens in it are
//              text. A .txt file is one, cut where it holds the tokenizer's end of text
//              (<|endoftext|>); between cuts its tokens are those of training on the file itself.
//              Before each document stands the token that begins a text (Llama) or else ends one
//              (GPT-2), as in llm.c's shards, or --document-end. Empty documents leave nothing.
//   Outputs    OUT.val.bin, the first --val-tokens; then OUT.bin, or OUT_000000.bin and so on of
//              --shard-tokens each, the last one shorter: documents go over the border. Shards are
//              llm.c's (dataloader.h): 16 bits a token where the vocabulary fits, else 32.
//              OUT.json, written last: tokenizer, inputs, and of each shard tokens, documents
//              that begin in it, bytes and CRC-32.
//   Algorithm  1. the main thread reads the inputs in batches of a mebibyte: whole lines, or a
//                 block of a text that ends where its tokens do (text_cut)
//              2. threads make tokens of batches; a few for each thread are in memory
//              3. the main thread writes them in order: the number of threads changes no byte
//   Resume     OUT.progress tells after each shard in which batch it ended. The same call goes on
//              there, so that a kill loses one shard's work and changes no byte; a compressed input
//              and standard input are read again up to there.
//   Bad lines  (no JSON, no such field) are counted, and the first one is shown; where they are
//              more than 10 and a hundredth of all lines so far the run ends. Bytes that are no
//              UTF-8 are kept, in lines too.
//   Memory     does not grow with the inputs: (2 threads + 2) batches. A line has at most 64 MiB.
//   Cost: the tokenizer's, and JSON's (dev/LOG.md has the figures).
//   What can fail returns "" or one line that says what is wrong.
#pragma once
#include <sys/stat.h>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include "config.h"
#include "dataloader.h"
#include "files.h"
#include "logger.h"
#include "mfu.h"
#include "text_batch.h"
#include "tokenizer_files.h"

// ----------------------------------------------------------------------------
// shards

constexpr size_t SHARD_HEADER_BYTES = 1024;
constexpr size_t MAX_SHARD_TOKENS = 2147483647; // the header's count is an int32

struct ShardOutput {
    std::string stem; // OUT without .bin
    size_t shard_tokens = 0, val_tokens = 0;
    int document_token = 0;
    size_t width = 2;
    nlohmann::json identity; // what the output is made from
    // so far
    nlohmann::json shards = nlohmann::json::array(); // that are whole
    size_t lines = 0, malformed = 0, tokens = 0;
    bool begins = false; // a document begins with the next token
    // of the batch at hand: where it begins, as it was then, and the tokens written
    nlohmann::json batch_at;
    size_t from_batch = 0;
    size_t skip = 0; // tokens of it that are in earlier shards
    // the shard at hand
    FileWriter file;
    std::vector<unsigned char> buffer;
    size_t in_shard = 0, documents_in_shard = 0;
};

inline std::string manifest_path(const ShardOutput& o) { return o.stem + ".json"; }
inline std::string progress_path(const ShardOutput& o) { return o.stem + ".progress"; }
inline bool next_is_val(const ShardOutput& o) { return o.val_tokens > 0 && o.shards.empty(); }

inline std::string next_shard(const ShardOutput& o) {
    if (next_is_val(o)) return o.stem + ".val.bin";
    if (o.shard_tokens == 0) return o.stem + ".bin";
    char number[32];
    snprintf(number, sizeof(number), "_%06zu.bin", o.shards.size() - (o.val_tokens > 0));
    return o.stem + number;
}

inline size_t next_shard_tokens(const ShardOutput& o) {
    return next_is_val(o) ? o.val_tokens : o.shard_tokens ? o.shard_tokens : MAX_SHARD_TOKENS;
}

inline std::string write_json(const std::string& path, nlohmann::json j) {
    j["crc32"] = manifest_crc(j);
    std::string wrong = write_text_file(path, manifest_text(j));
    return wrong.empty() ? sync_folder(folder_of(path)) : wrong;
}

inline std::string write_progress(const ShardOutput& o) {
    nlohmann::json j = o.identity;
    j["shards"] = o.shards, j["batch"] = o.batch_at, j["written"] = o.from_batch;
    return write_json(progress_path(o), j);
}

// The header's place stays empty until the shard is whole.
inline bool open_shard(ShardOutput& o) {
    if (writer_create(&o.file, next_shard(o)).empty() &&
        lseek(o.file.fd, SHARD_HEADER_BYTES, SEEK_SET) < 0)
        o.file.wrong = o.file.path + ": " + strerror(errno);
    return o.file.wrong.empty();
}

inline void flush(ShardOutput& o) {
    writer_put(o.file, o.buffer.data(), o.buffer.size());
    o.buffer.clear();
}

// The header comes last, when the tokens are counted, and first in the checksum.
inline std::string close_shard(ShardOutput& o) {
    FileWriter& w = o.file;
    flush(o);
    int32_t header[SHARD_HEADER_BYTES / 4] = {o.width == 2 ? 20240520 : 20240801,
                                              o.width == 2 ? 1 : 7, int32_t(o.in_shard)};
    size_t body = w.bytes;
    uint32_t body_crc = w.crc;
    w.crc = 0;
    if (lseek(w.fd, 0, SEEK_SET) != 0) w.wrong = w.path + ": " + strerror(errno);
    writer_put(w, header, sizeof(header));
    w.crc = uint32_t(crc32_combine(w.crc, body_crc, z_off_t(body)));
    w.expected = sizeof(header) + o.in_shard * o.width;
    std::string wrong = writer_close(&w);
    if (wrong.empty()) wrong = sync_folder(folder_of(w.path));
    if (!wrong.empty()) return wrong;
    o.shards.push_back({{"file", w.path.substr(w.path.rfind('/') + 1)},
                        {"tokens", o.in_shard},
                        {"documents", o.documents_in_shard},
                        {"bytes", w.expected},
                        {"crc32", w.crc}});
    o.in_shard = o.documents_in_shard = 0;
    return write_progress(o);
}

// Tokens of the batch at hand, to as many shards as they take; `begins`: one, before a document.
inline std::string put_tokens(ShardOutput& o, const int* tokens, size_t count, bool begins) {
    size_t known = o.skip - std::min(o.skip, o.from_batch), skipped = std::min(count, known);
    o.from_batch += skipped, tokens += skipped, count -= skipped;
    while (count > 0) {
        if (o.file.fd < 0 && o.shard_tokens == 0 && o.shards.size() > (o.val_tokens > 0))
            return o.stem + ".bin: is full with " + std::to_string(MAX_SHARD_TOKENS) +
                   " tokens, which is all that a shard can hold: give --shard-tokens 100000000";
        if (o.file.fd < 0 && !open_shard(o)) return o.file.wrong;
        size_t n = std::min(count, next_shard_tokens(o) - o.in_shard), at = o.buffer.size();
        o.buffer.resize(at + n * o.width);
        for (size_t i = 0; i < n; i++) // little-endian
            memcpy(&o.buffer[at + i * o.width], tokens + i, o.width);
        o.in_shard += n, o.from_batch += n, o.tokens += n, o.documents_in_shard += begins;
        tokens += n, count -= n;
        if (o.buffer.size() >= size_t(1) << 20) flush(o);
        std::string wrong = o.in_shard == next_shard_tokens(o) ? close_shard(o) : o.file.wrong;
        if (!wrong.empty()) return wrong;
    }
    return "";
}

inline std::string write_batch(ShardOutput& o, const TextBatch& b) {
    o.batch_at = {{"file", b.file},   {"offset", b.offset},       {"line", b.line},
                  {"lines", o.lines}, {"malformed", o.malformed}, {"begins", o.begins}};
    o.from_batch = 0;
    for (auto from = b.tokens.begin(), to = from; from != b.tokens.end(); from = to) {
        if (*from == DOCUMENT) {
            o.begins = true, to = from + 1;
            continue;
        }
        to = std::find(from, b.tokens.end(), DOCUMENT);
        std::string wrong = o.begins ? put_tokens(o, &o.document_token, 1, true) : "";
        if (wrong.empty()) wrong = put_tokens(o, &*from, size_t(to - from), false);
        if (!wrong.empty()) return wrong;
        o.begins = false;
    }
    o.skip = 0;
    if (o.malformed == 0 && b.malformed > 0)
        fprintf(stderr, "note: %s; such lines are left out\n", b.first_malformed.c_str());
    o.lines += b.lines_read, o.malformed += b.malformed;
    if (o.malformed > 10 + o.lines / 100)
        return std::to_string(o.malformed) + " of the first " + std::to_string(o.lines) +
               " lines are bad, which is more than 10 and a hundredth of them: " +
               b.first_malformed;
    return "";
}

// ----------------------------------------------------------------------------
// what is there already

// Equal for tokenizers that have the same pieces, merges and patterns, whatever their files are
// called.
inline uint32_t tokenizer_crc(const Tokenizer& t) {
    uint32_t crc = 0;
    auto add = [&](const void* data, size_t bytes) {
        crc = uint32_t(crc32(crc, static_cast<const unsigned char*>(data), uInt(bytes)));
    };
    for (const std::string& piece : t.pieces) add(piece.c_str(), piece.size() + 1);
    for (const std::string& pattern : t.pattern_texts) add(pattern.c_str(), pattern.size() + 1);
    for (const Merge& m : t.merges) add(&m, sizeof(m));
    add(t.scores.data(), t.scores.size() * sizeof(float));
    add(&t.unicode_form, sizeof(t.unicode_form));
    return crc;
}

inline nlohmann::json prepare_identity(const Config& c, const Tokenizer& t, const ShardOutput& o,
                                       const std::vector<TextInput>& inputs, size_t batch_bytes) {
    nlohmann::json files = nlohmann::json::array();
    for (const TextInput& i : inputs)
        files.push_back({{"file", i.path}, {"bytes", i.bytes}, {"modified", i.modified}});
    return {{"format", 1},
            {"inputs", files},
            {"field", c.field},
            {"tokenizer", {{"vocab", t.vocab_size}, {"crc32", tokenizer_crc(t)}}},
            {"document_token", o.document_token},
            {"shard_tokens", o.shard_tokens},
            {"val_tokens", o.val_tokens},
            {"batch_bytes", batch_bytes}};
}

// The first thing in which a manifest or progress file differs from this call, in words.
inline std::string state_differs(const nlohmann::json& found, const nlohmann::json& identity) {
    const std::pair<const char*, const char*> parts[] = {
        {"inputs", "other --data, or files that have changed since"},
        {"tokenizer", "another --tokenizer"},
        {"field", "another --field"},
        {"document_token", "another --document-end"},
        {"shard_tokens", "another --shard-tokens"},
        {"val_tokens", "another --val-tokens"},
        {"format", "another version of the program"},
        {"batch_bytes", "another version of the program"}};
    for (auto [part, says] : parts)
        if (!found.contains(part) || found[part] != identity[part]) return says;
    return "";
}

// Of a manifest or progress file; nothing where it is not there.
inline std::string read_state(const ShardOutput& o, const std::string& path,
                              nlohmann::json* found) {
    std::string bytes;
    struct stat s;
    if (stat(path.c_str(), &s) != 0) return "";
    std::string wrong = read_whole_file(path, &bytes), fix = ": remove it, or choose another name";
    if (!wrong.empty()) return wrong;
    *found = nlohmann::json::parse(bytes, nullptr, false);
    bool whole = found->is_object() && found->contains("shards") && found->contains("crc32") &&
                 (*found)["crc32"] == manifest_crc(*found);
    if (!whole) return path + ": is there, and is none of --prepare's files or is damaged" + fix;
    std::string other = state_differs(*found, o.identity);
    if (!other.empty() && (*found)["shards"].empty())
        return *found = nullptr, ""; // nothing is lost
    if (!other.empty()) return path + ": was made from " + other + fix;
    for (const nlohmann::json& shard : (*found)["shards"]) {
        std::string file = folder_of(path) + "/" + shard["file"].get<std::string>();
        if (stat(file.c_str(), &s) != 0 || size_t(s.st_size) != shard["bytes"])
            return file + ": is gone, or has another size than " + path + " says: remove " + path +
                   " to start again";
    }
    return "";
}

// Shards of another preparation would be trained on with ours: the pattern OUT_*.bin has them too.
inline std::string no_shard_is_there(const ShardOutput& o) {
    for (const char* ending : {".bin", ".val.bin", "_[0-9]*.bin"}) {
        std::vector<std::string> found;
        struct stat s;
        if (data_paths(o.stem + ending, &found).empty() && stat(found[0].c_str(), &s) == 0)
            return found[0] + ": is there already: remove it, or choose another name";
    }
    return "";
}

// done: all is there. Else what the last run has left is taken up, in `o` and `r`.
inline std::string take_up(ShardOutput& o, BatchReader& r, bool* done) {
    nlohmann::json manifest, progress;
    std::string wrong = read_state(o, manifest_path(o), &manifest);
    if (!wrong.empty()) return wrong;
    *done = !manifest.is_null();
    if (*done) return o.shards = manifest["shards"], unlink(progress_path(o).c_str()), "";
    wrong = read_state(o, progress_path(o), &progress);
    if (!wrong.empty()) return wrong;
    if (progress.is_null()) {
        wrong = no_shard_is_there(o);
        return wrong.empty() ? write_progress(o) : wrong;
    }
    o.shards = progress["shards"];
    for (const nlohmann::json& shard : o.shards) o.tokens += shard["tokens"].get<size_t>();
    const nlohmann::json& at = progress["batch"];
    if (at.is_null()) return "";
    o.skip = progress["written"], o.lines = at["lines"], o.malformed = at["malformed"];
    o.begins = at["begins"];
    r.file = at["file"], r.offset = at["offset"], r.line = at["line"];
    fprintf(stderr, "prepare: goes on after %zu whole shards\n", o.shards.size());
    return "";
}

// ----------------------------------------------------------------------------
// the life of a preparation

// One line that is rewritten on a terminal, and a line now and then in a file.
struct PrepareProgress {
    size_t bytes_all, tokens_before; // of the inputs on disk, and written by earlier runs
    size_t bytes_before = 0;         // of the inputs, done when this run had its first tokens
    double start = seconds_now(), shown = seconds_now();
    bool live = isatty(2);
};

inline void show_progress(PrepareProgress& p, size_t bytes, size_t tokens) {
    double now = seconds_now();
    if (p.bytes_before == 0) p.bytes_before = bytes;
    if (now - p.shown < (p.live ? 0.2 : 5)) return;
    p.shown = now;
    double rate = double(tokens - p.tokens_before) / (now - p.start);
    double done = double(bytes) - double(p.bytes_before),
           left = double(p.bytes_all) - double(bytes);
    std::string eta = done > 0 ? duration_text((now - p.start) * left / done) : "?";
    fprintf(stderr, "%sprepare %5.1f%% | %s tokens | %s tok/s | eta %s%s", p.live ? "\r" : "",
            100 * double(bytes) / double(std::max<size_t>(p.bytes_all, 1)),
            rate_text(double(tokens)).c_str(), rate_text(rate).c_str(), eta.c_str(),
            p.live ? "\033[K" : "\n");
}

// Batches that threads make tokens of, each as soon as one is free.
struct Workers {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<TextBatch*> waiting;
    bool over = false;
    std::vector<std::thread> threads;
};

template <typename F> void workers_start(Workers& w, int count, F work) {
    for (int i = 0; i < count; i++)
        w.threads.emplace_back([&w, work] {
            for (std::unique_lock<std::mutex> lock(w.mutex);;) {
                w.changed.wait(lock, [&] { return w.over || !w.waiting.empty(); });
                if (w.waiting.empty()) return;
                TextBatch* b = w.waiting.front();
                w.waiting.pop_front();
                lock.unlock();
                work(*b);
                lock.lock();
                b->done = true;
                w.changed.notify_all();
            }
        });
}

inline void workers_end(Workers& w) {
    {
        std::lock_guard<std::mutex> lock(w.mutex);
        w.over = true, w.waiting.clear();
    }
    w.changed.notify_all();
    for (std::thread& t : w.threads) t.join();
}

inline std::string write_all(ShardOutput& o, BatchReader& r, const Tokenizer& t, int threads) {
    std::vector<size_t> before = {0}; // bytes of the inputs before each one
    for (const TextInput& i : r.inputs) before.push_back(before.back() + i.bytes);
    PrepareProgress progress = {before.back(), o.tokens};
    Workers workers;
    workers_start(workers, threads,
                  [&](TextBatch& b) { tokenize_batch(b, t, r.field, r.inputs[b.file].path); });
    std::deque<std::unique_ptr<TextBatch>> batches; // in order
    std::string wrong;
    for (bool more = true; wrong.empty();) {
        while (more && batches.size() < size_t(2 * threads + 2)) {
            auto b = std::make_unique<TextBatch>();
            if (!(more = read_batch(r, b.get()))) break;
            std::lock_guard<std::mutex> lock(workers.mutex);
            workers.waiting.push_back(b.get());
            batches.push_back(std::move(b));
            workers.changed.notify_all();
        }
        if (batches.empty()) break;
        std::unique_ptr<TextBatch> b = std::move(batches.front());
        batches.pop_front();
        {
            std::unique_lock<std::mutex> lock(workers.mutex);
            workers.changed.wait(lock, [&] { return b->done; });
        }
        wrong = write_batch(o, *b);
        show_progress(progress, before[b->file] + b->position, o.tokens);
    }
    workers_end(workers);
    if (progress.live) fprintf(stderr, "\r\033[K");
    if (r.open) stream_close(r.stream);
    if (wrong.empty()) wrong = r.wrong;
    if (wrong.empty() && next_is_val(o))
        wrong = "--val-tokens " + std::to_string(o.val_tokens) + ": the inputs have only " +
                std::to_string(o.in_shard) + " tokens: give fewer, or more --data";
    if (wrong.empty() && o.in_shard > 0) wrong = close_shard(o);
    if (o.file.fd >= 0) {
        o.file.wrong = wrong;
        writer_close(&o.file); // which removes what is not whole
    }
    if (wrong.empty() && o.shards.size() == size_t(o.val_tokens > 0))
        wrong = o.val_tokens ? "--val-tokens " + std::to_string(o.val_tokens) +
                                   " takes all tokens: none is left to train on"
                             : r.inputs[0].path + ": holds no document";
    return wrong;
}

inline size_t sum_of(const nlohmann::json& shards, const char* key) {
    size_t sum = 0;
    for (const nlohmann::json& s : shards) sum += s[key].get<size_t>();
    return sum;
}

inline std::string prepare_check(const Config& c, const Tokenizer& t, ShardOutput* o) {
    if (!c.prepare.ends_with(".bin") || c.prepare.size() == 4)
        return "--prepare " + c.prepare + ": OUT.bin, the name of what is written";
    if (c.data.empty()) return "--prepare makes shards of --data: give --data FILES";
    if (!c.val.empty())
        return "--prepare: validation is the first --val-tokens of --data: leave --val out";
    o->stem = c.prepare.substr(0, c.prepare.size() - 4);
    struct stat s;
    std::string folder = folder_of(o->stem);
    if (stat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode))
        return "--prepare " + c.prepare + ": there is no folder " + folder + ": make it first";
    o->document_token = c.document_end >= 0 ? c.document_end : t.bos >= 0 ? t.bos : t.eot;
    if (o->document_token < 0)
        return "--prepare: --tokenizer " + t.name +
               " has no token that begins or ends a text: say which one goes before each document, "
               "as in --document-end 10 for a newline";
    if (o->document_token >= t.vocab_size)
        return "--document-end " + std::to_string(o->document_token) + ": --tokenizer " + t.name +
               " has the tokens 0 to " + std::to_string(t.vocab_size - 1);
    o->shard_tokens = size_t(c.shard_tokens), o->val_tokens = size_t(c.val_tokens);
    o->width = t.vocab_size <= 65536 ? 2 : 4;
    return "";
}

// program_folder: dev/data is in it, or beside it
inline std::string prepare(const Config& c, const Tokenizer& t, const std::string& program_folder,
                           const BatchLimits& limits = {}) {
    ShardOutput o;
    std::string wrong = prepare_check(c, t, &o);
    std::vector<std::string> paths;
    if (wrong.empty()) wrong = data_paths(c.data, &paths);
    if (!wrong.empty()) return wrong;
    std::vector<TextInput> inputs(paths.size());
    for (size_t i = 0; i < paths.size() && wrong.empty(); i++)
        wrong = input_describe(&inputs[i], paths[i]);
    if (!wrong.empty()) return wrong;
    o.identity = prepare_identity(c, t, o, inputs, limits.batch);
    std::string script = "dev/data/parquet_text.py", end_text;
    struct stat s;
    bool inside = stat((program_folder + script).c_str(), &s) == 0;
    for (const auto& [text, token] : t.special.ids)
        if (token == t.eot) end_text = text;
    BatchReader r;
    r.inputs = inputs;
    r.script = program_folder + (inside ? "" : "../") + script;
    r.field = c.field, r.end_text = end_text, r.limits = limits;
    bool done = false;
    wrong = take_up(o, r, &done);
    if (!wrong.empty()) return wrong;
    if (!done) {
        int threads = c.threads ? c.threads : int(std::thread::hardware_concurrency());
        wrong = write_all(o, r, t, std::max(threads, 1));
        if (!wrong.empty()) return wrong;
        nlohmann::json manifest = o.identity;
        manifest["shards"] = o.shards;
        manifest["lines"] = o.lines, manifest["malformed_lines"] = o.malformed;
        manifest["tokenizer_name"] = t.name;
        manifest["tokens"] = sum_of(o.shards, "tokens");
        manifest["documents"] = sum_of(o.shards, "documents");
        if (!(wrong = write_json(manifest_path(o), manifest)).empty()) return wrong;
        unlink(progress_path(o).c_str());
        if (o.malformed > 0)
            fprintf(stderr, "note: %zu of %zu lines are left out\n", o.malformed, o.lines);
    }
    printf("%s%zu documents, %zu tokens in %zu shards: %s\n", done ? "already prepared: " : "",
           sum_of(o.shards, "documents"), sum_of(o.shards, "tokens"), o.shards.size(),
           manifest_path(o).c_str());
    std::string data = o.shard_tokens ? "'" + o.stem + "_*.bin'" : c.prepare,
                val = o.val_tokens ? " --val " + o.stem + ".val.bin" : "";
    printf("train:  train_gpt --data %s%s; with --document-mask also --document-end %d\n",
           data.c_str(), val.c_str(), o.document_token);
    return "";
}
