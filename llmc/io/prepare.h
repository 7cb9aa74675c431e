// prepare.h - text, JSON lines and parquet files to token shards, by many threads, resumable
//   Inputs     FILE.txt, FILE.jsonl, each also .gz or .zst; FILE.parquet; - ; FILE.bin, nanoGPT's
//              16-bit tokens without a header (text_stream.h)
//   Documents  A JSON line is a document: the string of its --field, in which the texts of special
//              tokens stay text. A .txt file is one, cut wherever it holds the tokenizer's end of
//              text (<|endoftext|>); between cuts its tokens are those of training on the file.
//              Before each document stands the token that begins a text (Llama) or else ends one
//              (GPT-2), as in llm.c's shards, or --document-end. Empty documents leave nothing.
//   --loss sft A JSON line is a conversation. A source that the program passes packs each batch of
//              lines separately into windows of --seq tokens, and shards hold whole windows.
//   Outputs    OUT.val.bin, the first --val-tokens; then OUT.bin, or OUT_000000.bin and so on of
//              --shard-tokens each, the last one shorter. A document may cross into the next.
//              Shards are llm.c's (dataloader.h): 16 bits a token if the vocabulary fits, else 32.
//              OUT.json, written last: tokenizer, inputs, and of each shard its tokens, the number
//              of documents that begin in it, its bytes and its CRC-32.
//   Algorithm  1. the main thread reads the inputs in batches of a mebibyte: whole lines, or a
//                 block of a text that ends where its tokens do (text_cut)
//              2. threads tokenize batches, a batch each
//              3. the main thread writes them in order: the number of threads changes no byte
//   Lock       OUT.lock, while it runs: a second call with the same OUT.bin is refused at once.
//   Resume     OUT.progress, rewritten after each shard, says in which batch the shard ended. The
//              same call continues there, so a kill loses one shard's work and changes no byte. A
//              compressed input and standard input are read again up to that batch.
//   Bad lines  (no JSON, no such field) are counted, and the first one is shown. More than a
//              hundredth of all lines are an error: fewer than 100 lines must all be good. The run
//              ends when they exceed 10 plus a hundredth of the lines so far. Bytes that are not
//              UTF-8 are kept, in lines too.
//   Memory     does not grow with the inputs: a batch a thread. A line has at most 64 MiB.
//   Cost       that of the tokenizer and of JSON (dev/LOG.md has the figures)
//   Errors     "" or one line that says what is wrong
#pragma once
#include <sys/stat.h>
#include <deque>
#include <future>
#include <thread>
#include "../comm/rank_status.h"
#include "../comm/text.h"
#include "config.h"
#include "dataloader.h"
#include "file_kind.h"
#include "files.h"
#include "json.h"
#include "text_batch.h"
#include "text_stream.h"
#include "tokenizer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// shards

constexpr size_t SHARD_HEADER_BYTES = 1024;
constexpr size_t MAX_SHARD_TOKENS = 2147483647; // the header's count is an int32

// The output: its plan, its progress, and the batch and the shard that are being written.
struct ShardOutput {
    std::string stem; // OUT without .bin
    size_t shard_tokens = 0;
    size_t val_tokens = 0;
    int document_token = 0; // stands before each document
    size_t width = 2;       // bytes of a token
    size_t packed = 0;      // tokens of a window of conversations; 0: documents
    LineSource source;      // what packs them
    Json identity = Json::object(); // all that decides the output
    // Progress so far.
    Json shards = Json::array(); // complete shards
    LineCounts counts;
    size_t tokens = 0;
    bool begins = false; // a document begins with the next token
    // The batch that is being written.
    Json batch_at;           // where it begins, and the counts at its beginning
    size_t from_batch = 0;   // tokens of it that have been written
    size_t skip = 0;         // tokens of it that earlier shards have
    // The shard that is being written.
    FileWriter file;
    std::vector<unsigned char> buffer;
    size_t in_shard = 0; // tokens
    size_t documents_in_shard = 0;
};

// The manifest is written at the end, the progress file after each shard. The pattern OUT_*.bin
// matches neither of them.
inline std::string manifest_path(const ShardOutput& o) { return o.stem + ".json"; }
inline std::string progress_path(const ShardOutput& o) { return o.stem + ".progress"; }
inline bool next_is_val(const ShardOutput& o) { return o.val_tokens > 0 && o.shards.empty(); }

// The name of the next shard. Training shards are numbered from 0; the validation
// shard does not count.
inline std::string next_shard(const ShardOutput& o) {
    if (next_is_val(o))
        return o.stem + ".val.bin";
    if (o.shard_tokens == 0)
        return o.stem + ".bin";
    return o.stem + formatted("_%06zu.bin", o.shards.size() - (o.val_tokens > 0));
}

// How many tokens the next shard takes.
inline size_t next_shard_tokens(const ShardOutput& o) {
    return next_is_val(o) ? o.val_tokens : o.shard_tokens ? o.shard_tokens : MAX_SHARD_TOKENS;
}

// Write a JSON text with its own checksum, safe from a power cut.
inline std::string write_json(const std::string& path, Json j) {
    // Sync the folder too: syncing a file does not make its name durable.
    j["crc32"] = manifest_crc(j);
    LLMC_TRY(write_text_file(path, manifest_text(j)));
    return sync_folder(folder_of(path));
}

// Write the progress file: the complete shards, and how much of the current batch they hold.
inline std::string write_progress(const ShardOutput& o) {
    Json j = o.identity;
    j["shards"] = o.shards;
    j["batch"] = o.batch_at;
    j["written"] = o.from_batch;
    return write_json(progress_path(o), j);
}

// Start a shard. The header's place stays empty until the shard is complete.
inline bool open_shard(ShardOutput& o) {
    if (writer_create(&o.file, next_shard(o)).empty() &&
        lseek(o.file.fd, SHARD_HEADER_BYTES, SEEK_SET) < 0)
        o.file.wrong = o.file.path + ": " + strerror(errno);
    return o.file.wrong.empty();
}

// Write the buffered tokens to the file.
inline void flush(ShardOutput& o) {
    writer_put(o.file, o.buffer.data(), o.buffer.size());
    o.buffer.clear();
}

// Finish a shard. Its header is written last, when the tokens are counted, but comes first in the
// file and in the checksum.
inline std::string close_shard(ShardOutput& o) {
    FileWriter& w = o.file;
    flush(o);

    // Write the header in front of the tokens.
    bool narrow = o.width == 2;
    int version = narrow ? 1 : o.packed ? 8 : 7;
    int32_t header[SHARD_HEADER_BYTES / 4] = {narrow ? 20240520 : 20240801, version,
                                              int32_t(o.in_shard), int32_t(o.packed)};
    size_t body = w.bytes;
    uint32_t body_crc = w.crc;
    w.crc = 0;
    if (lseek(w.fd, 0, SEEK_SET) != 0)
        w.wrong = w.path + ": " + strerror(errno);
    writer_put(w, header, sizeof(header));
    w.crc = uint32_t(crc32_combine(w.crc, body_crc, z_off_t(body)));

    // Give the file its name.
    w.expected = sizeof(header) + o.in_shard * o.width;
    LLMC_TRY(writer_close(&w));
    LLMC_TRY(sync_folder(folder_of(w.path)));

    // Note it: from now on a run that was killed continues after this shard.
    o.shards.push_back({{"file", w.path.substr(w.path.rfind('/') + 1)},
                        {"tokens", o.in_shard},
                        {"documents", o.documents_in_shard},
                        {"bytes", w.expected},
                        {"crc32", w.crc}});
    o.in_shard = 0;
    o.documents_in_shard = 0;
    return write_progress(o);
}

// Append n tokens to the current shard.
inline void buffer_tokens(ShardOutput& o, const int* tokens, size_t n) {
    // Write to the file a MiB at a time: one call for each document would be slow.
    size_t at = o.buffer.size();
    o.buffer.resize(at + n * o.width);
    for (size_t i = 0; i < n; i++)
        memcpy(&o.buffer[at + i * o.width], tokens + i, o.width); // little-endian
    for (size_t i = 0; i < n && o.packed; i++) // padding begins with the token that ends an answer
        o.documents_in_shard += (tokens[i] & BEGINS) && tokens[i] != (o.source.padding | BEGINS);
    o.in_shard += n;
    o.from_batch += n;
    o.tokens += n;
    if (o.buffer.size() >= size_t(1) << 20)
        flush(o);
}

// Write tokens of the current batch, to as many shards as they need. begins: this is the token that
// stands before a document.
inline std::string put_tokens(ShardOutput& o, const int* tokens, size_t count, bool begins) {
    // Skip tokens that earlier shards have.
    size_t known = o.skip - std::min(o.skip, o.from_batch);
    size_t skipped = std::min(count, known);
    o.from_batch += skipped;
    tokens += skipped;
    count -= skipped;

    while (count > 0) {
        // Start a shard if none is open. Without --shard-tokens there is only one.
        bool fresh = o.file.fd < 0;
        if (fresh && o.shard_tokens == 0 && o.shards.size() > (o.val_tokens > 0))
            return concat(o.stem, ".bin: is full with ", MAX_SHARD_TOKENS,
                          " tokens, which is all that a shard can hold: give --shard-tokens "
                          "100000000");
        if (fresh && !open_shard(o))
            return o.file.wrong;

        // Fill it up.
        size_t n = std::min(count, next_shard_tokens(o) - o.in_shard);
        o.documents_in_shard += begins;
        buffer_tokens(o, tokens, n);
        tokens += n;
        count -= n;
        LLMC_TRY(o.in_shard == next_shard_tokens(o) ? close_shard(o) : o.file.wrong);
    }
    return "";
}

// Write a batch's documents, each after the token that begins one.
inline std::string write_documents(ShardOutput& o, const TextBatch& b) {
    // The tokens up to the next DOCUMENT are one document. An empty one leaves nothing.
    for (auto from = b.tokens.begin();; from++) {
        auto to = std::find(from, b.tokens.end(), DOCUMENT);
        if (to != from) {
            LLMC_TRY(o.begins ? put_tokens(o, &o.document_token, 1, true) : "");
            LLMC_TRY(put_tokens(o, &*from, to - from, false));
            o.begins = false;
        }

        // The next one begins behind the mark.
        if (to == b.tokens.end()) return "";
        o.begins = true;
        from = to;
    }
}

// The numbers of a batch in a progress file: its place, and the counts at its beginning.
inline std::vector<std::pair<const char*, size_t*>> batch_numbers(TextPlace& at, LineCounts& n) {
    return {{"file", &at.file},
            {"offset", &at.offset},
            {"line", &at.line},
            {"lines", &n.lines},
            {"malformed", &n.malformed},
            {"cut", &n.cut},
            {"dropped", &n.dropped}};
}

// Write a batch, and count its lines.
inline std::string write_batch(ShardOutput& o, TextBatch& b) {
    if (!b.wrong.empty()) return b.wrong;
    if (!b.note.empty())
        fprintf(stderr, "note: %s\n", printable(b.note).c_str());
    o.batch_at = {{"begins", o.begins}};
    for (auto [name, number] : batch_numbers(b, o.counts))
        o.batch_at[name] = *number;
    o.from_batch = 0;

    // Windows of conversations carry their own marks.
    LLMC_TRY(o.packed ? put_tokens(o, b.tokens.data(), b.tokens.size(), false)
                      : write_documents(o, b));
    o.skip = 0;

    // Tolerate ten bad lines more than at the end, while good ones may follow.
    if (o.counts.malformed == 0 && b.counts.malformed > 0)
        fprintf(stderr, "note: %s; such lines are left out\n", b.counts.first_malformed.c_str());
    o.counts.add(b.counts);
    return too_many_malformed(o.counts, 10);
}

// ----------------------------------------------------------------------------
// what earlier runs have left

// A checksum of everything in a tokenizer that decides its tokens; the names of files do not.
inline uint32_t tokenizer_crc(const Tokenizer& t) {
    // Include the zero after each text, so that "ab" "c" and "a" "bc" differ.
    uint32_t crc = 0;
    auto add = [&](const void* data, size_t bytes) {
        crc = uint32_t(crc32(crc, static_cast<const unsigned char*>(data), uInt(bytes)));
    };
    for (const std::string& piece : t.pieces)
        add(piece.c_str(), piece.size() + 1);
    for (const std::string& pattern : t.pattern_texts)
        add(pattern.c_str(), pattern.size() + 1);
    for (const Merge& m : t.merges)
        add(&m, sizeof(m));
    add(t.scores.data(), t.scores.size() * sizeof(float));
    add(&t.unicode_form, sizeof(t.unicode_form));
    return crc;
}

// Everything that decides the bytes of the shards. A run continues another only if all of it is
// equal. The number of threads is not part of it: batches are written in order.
inline Json prepare_identity(const Config& c, const Tokenizer& t, const ShardOutput& o,
                             const std::vector<TextInput>& inputs, size_t batch_bytes) {
    Json files = Json::array();
    for (const TextInput& i : inputs)
        files.push_back({{"file", i.path}, {"bytes", i.bytes}, {"modified", i.modified}});

    // Conversations depend on their format, and on the length of a window.
    Json chat;
    if (o.packed)
        chat = {{"format", o.source.format}, {"end", o.source.padding}, {"seq", o.packed}};
    return {{"format", 1},
            {"chat", chat},
            {"inputs", files},
            {"field", c.field},
            {"tokenizer", {{"vocab", t.vocab_size}, {"crc32", tokenizer_crc(t)}}},
            {"document_token", o.document_token},
            {"shard_tokens", o.shard_tokens},
            {"val_tokens", o.val_tokens},
            {"batch_bytes", batch_bytes}};
}

// The first difference between a manifest or progress file and this call, in words; ""
// if there is none.
inline std::string state_differs(const Json& found, const Json& identity) {
    // List the likeliest changes first: a message names one cause.
    const std::pair<const char*, const char*> parts[] = {
        {"inputs", "other --data, or files that have changed since"},
        {"tokenizer", "another --tokenizer"},
        {"field", "another --field"},
        {"chat", "another --loss, --chat-format or --seq"},
        {"document_token", "another --document-end"},
        {"shard_tokens", "another --shard-tokens"},
        {"val_tokens", "another --val-tokens"},
        {"format", "another version of the program"},
        {"batch_bytes", "another version of the program"}};
    for (auto [part, says] : parts)
        if (found.value(part, Json()) != identity.value(part, Json())) return says;
    return "";
}

// Check that the shards in a manifest or progress file exist, and have the size that it says.
inline std::string check_shards(const Json& shards, const std::string& path) {
    // Compare only sizes: checksums would read everything again at each start.
    struct stat s;
    for (const Json& shard : shards) {
        std::string file = folder_of(path) + "/" + shard["file"].get<std::string>();
        if (stat(file.c_str(), &s) != 0 || size_t(s.st_size) != shard["bytes"])
            return file + ": is gone, or has another size than " + path + " says: remove " + path +
                   " to start again";
    }
    return "";
}

// Check those fields of a manifest or progress file that a run uses.
inline std::string check_state(const Json& found) {
    typedef Json::value_t Type;
    LLMC_TRY(check_type(found, "shards", Type::array));
    for (const Json& shard : found["shards"]) {
        // Refuse a path as the file: it could lead out of the folder.
        if (!shard.is_object())
            return "a shard is no object";
        for (const char* key : {"tokens", "documents", "bytes", "crc32"})
            LLMC_TRY(check_integer(shard, key, 0, INT64_MAX));
        LLMC_TRY(check_type(shard, "file", Type::string));
        if (shard["file"].get<std::string>().find('/') != std::string::npos)
            return "file is " + json_word(shard["file"]) + ", which is no name";
    }

    // Only a progress file says where the last batch began.
    const Json at = found.value("batch", Json());
    if (at.is_null())
        return "";
    if (!at.is_object())
        return "batch is no object";
    TextPlace place;
    LineCounts counts;
    LLMC_TRY(check_integer(found, "written", 0, INT64_MAX));
    for (auto [name, number] : batch_numbers(place, counts))
        if (at.contains(name))
            LLMC_TRY(check_integer(at, name, 0, INT64_MAX));
    return check_type(at, "begins", Type::boolean);
}

// Read a manifest or progress file. *found stays null if there is none, or if another call's
// progress has no complete shard, so that nothing can be lost.
inline std::string read_state(const ShardOutput& o, const std::string& path, Json* found) {
    std::string bytes;
    if (!file_type(path)) return "";
    LLMC_TRY(read_whole_file(path, &bytes));

    // Check that the file is whole, by its own checksum.
    const std::string fix = ": remove it, or choose another name";
    bool whole = parse_json(bytes, path, found).empty() && found->contains("crc32") &&
                 (*found)["crc32"] == manifest_crc(*found) && check_state(*found).empty();
    if (!whole)
        return path + ": is there, and is none of prepare_gpt's files or is damaged" + fix;

    // Check that it belongs to this call.
    const Json& shards = (*found)["shards"];
    std::string other = state_differs(*found, o.identity);
    if (other.empty()) return check_shards(shards, path);
    if (!shards.empty())
        return path + ": was made from " + other + fix;
    *found = nullptr;
    return "";
}

// Refuse to write beside another preparation's shards: the pattern OUT_*.bin would mix both.
inline std::string check_no_shards(const ShardOutput& o) {
    for (const char* ending : {".bin", ".val.bin", "_[0-9]*.bin"}) {
        std::vector<std::string> found;
        if (data_paths(o.stem + ending, &found).empty() && file_type(found[0]))
            return found[0] + ": is there already: remove it, or choose another name";
    }
    return "";
}

// Take over the state of the last run. *done: nothing is left to do.
inline std::string resume(ShardOutput& o, BatchReader& r, bool* done) {
    // With a manifest, everything is done.
    Json manifest;
    LLMC_TRY(read_state(o, manifest_path(o), &manifest));
    *done = !manifest.is_null();
    if (*done) {
        o.shards = manifest["shards"];
        unlink(progress_path(o).c_str());
        return "";
    }

    // Without a progress file this is the first run: write one.
    Json progress;
    LLMC_TRY(read_state(o, progress_path(o), &progress));
    if (progress.is_null()) {
        LLMC_TRY(check_no_shards(o));
        return write_progress(o);
    }

    // Otherwise continue after the complete shards, in the batch in which the last one ended.
    o.shards = progress["shards"];
    for (const Json& shard : o.shards) o.tokens += shard["tokens"].get<size_t>();
    const Json& at = progress["batch"];
    if (at.is_null()) return "";

    // Take over the batch's place and the counts at its beginning.
    o.skip = progress["written"];
    o.begins = at["begins"];
    for (auto [name, number] : batch_numbers(r, o.counts))
        *number = at.value(name, size_t(0));
    fprintf(stderr, "prepare: goes on after %zu whole shards\n", o.shards.size());
    return "";
}

// ----------------------------------------------------------------------------
// the life of a preparation

// The progress line. A terminal shows one line that is rewritten, a file gets a line now and then.
struct PrepareProgress {
    size_t bytes_all;        // of the inputs, on disk
    size_t tokens_before;    // written by earlier runs
    size_t bytes_before = 0; // already read when this run had its first tokens
    double start = clock_seconds();
    double shown = start;
    bool live = isatty(2);
};

// Show the progress, if the last time is long enough ago.
inline void show_progress(PrepareProgress& p, size_t bytes, size_t tokens) {
    double now = clock_seconds();
    if (p.bytes_before == 0)
        p.bytes_before = bytes;
    if (now - p.shown < (p.live ? 0.2 : 5))
        return;
    p.shown = now;

    // Estimate the remaining time: the rest takes as long a byte as what this run has read.
    double rate = double(tokens - p.tokens_before) / (now - p.start);
    double done = double(bytes) - double(p.bytes_before);
    double left = double(p.bytes_all) - double(bytes);
    std::string eta = done > 0 ? duration_text((now - p.start) * left / done) : "?";

    fprintf(stderr, "%sprepare %5.1f%% | %s tokens | %s tok/s | eta %s%s", p.live ? "\r" : "",
            100 * double(bytes) / double(std::max<size_t>(p.bytes_all, 1)),
            rate_text(double(tokens)).c_str(), rate_text(rate).c_str(), eta.c_str(),
            p.live ? "\033[K" : "\n");
}

// Finish the last shard. Remove it if `wrong` reports a failure, or if it has too few tokens.
inline std::string close_last_shard(ShardOutput& o, const BatchReader& r, std::string wrong) {
    // Refuse a validation shard that is too short: nothing would be left to train on.
    if (wrong.empty() && next_is_val(o))
        wrong = concat("--val-tokens ", o.val_tokens, ": the inputs have only ", o.in_shard,
                       " tokens: give fewer, or more --data");
    if (wrong.empty() && o.in_shard > 0)
        wrong = close_shard(o);
    if (o.file.fd >= 0) {
        o.file.wrong = wrong;
        writer_close(&o.file); // removes the incomplete file
    }

    // Refuse validation alone: it is no data to train on.
    if (wrong.empty() && o.shards.size() == size_t(o.val_tokens > 0))
        wrong = o.val_tokens ? concat("--val-tokens ", o.val_tokens,
                                      " takes all tokens: none is left to train on")
                             : r.inputs[0].path + ": holds no document";
    return wrong;
}

// Tokenize a batch: documents, or windows of conversations.
inline void tokens_of_batch(const ShardOutput& o, TextBatch& b, const Tokenizer& t,
                            const BatchReader& r) {
    const std::string& path = r.inputs[b.file].path;

    // Look at the beginning of a file as --data does: note what may be no text, and drop a mark.
    if (b.offset == 0 && !b.holds_tokens) {
        std::string_view text = b.text;
        b.note = binary_note(path, text.substr(0, size_t(1) << 16));
        if (b.text.starts_with(BYTE_ORDER_MARK))
            b.text.erase(0, BYTE_ORDER_MARK.size());
    }

    // Tokenize documents.
    if (!o.packed)
        return tokenize_batch(b, t, r.field, path);
    // Pack each batch separately, so that the windows do not depend on the threads.
    PackedLines packed = o.source.pack(b.text, b.line, path, o.packed);
    b.tokens = std::move(packed.tokens);
    b.counts = packed.counts;
}

// Read, tokenize and write the rest of the inputs, by the algorithm above.
inline std::string write_all(ShardOutput& o, BatchReader& r, const Tokenizer& t, size_t threads) {
    std::vector<size_t> before = {0}; // bytes of the inputs before each one
    for (const TextInput& i : r.inputs)
        before.push_back(before.back() + i.bytes);
    PrepareProgress progress = {before.back(), o.tokens};

    // Batches in order, each with a thread of its own, which only reads the tokenizer.
    std::deque<std::future<TextBatch>> batches;
    std::string wrong;
    for (bool more = true; wrong.empty();) {
        // 1, 2. Keep the threads busy.
        while (more && batches.size() < threads) {
            TextBatch b;
            more = read_batch(r, &b);
            if (!more) break;
            auto work = [&, b = std::move(b)]() mutable {
                tokens_of_batch(o, b, t, r);
                return std::move(b);
            };
            batches.push_back(std::async(std::launch::async, std::move(work)));
        }
        if (batches.empty()) break;

        // 3. Write the oldest batch.
        TextBatch b = batches.front().get();
        batches.pop_front();
        wrong = write_batch(o, b);
        show_progress(progress, before[b.file] + b.position, o.tokens);
    }
    batches.clear(); // waits for threads that still work

    // Clear the progress line, and finish.
    if (progress.live)
        fprintf(stderr, "\r\033[K");
    if (r.open) stream_close(r.stream);
    if (wrong.empty()) wrong = r.wrong;
    if (wrong.empty())
        wrong = too_many_malformed(o.counts);
    return close_last_shard(o, r, wrong);
}

// The sum of one number over all shards.
inline size_t sum_of(const Json& shards, const char* key) {
    size_t sum = 0;
    for (const Json& s : shards) sum += s[key].get<size_t>();
    return sum;
}

// Check the flags, and plan the output.
inline std::string prepare_check(const Config& c, const Tokenizer& t, ShardOutput* o) {
    // Refuse flags that contradict each other.
    if (!c.prepare.ends_with(".bin") || c.prepare.size() == 4)
        return c.prepare + ": wants OUT.bin, the name of what is written";
    if (c.data.empty())
        return "what is prepared? give --data FILES";

    // Refuse a folder that does not exist.
    o->stem = c.prepare.substr(0, c.prepare.size() - 4);
    std::string folder = folder_of(o->stem);
    if (file_type(folder) != S_IFDIR)
        return c.prepare + ": there is no folder " + folder + ": make it first";

    // Choose the token before a document: the one that begins a text, or else the one that ends
    // it. Conversations need none.
    o->shard_tokens = c.shard_tokens;
    o->val_tokens = c.val_tokens;
    if (c.loss != "lm") return "";
    o->document_token = c.document_end >= 0 ? c.document_end : t.bos >= 0 ? t.bos : t.eot;

    if (o->document_token < 0)
        return "--tokenizer " + t.name +
               " has no token that begins or ends a text: say which one goes before each document, "
               "as in --document-end 10 for a newline";
    if (o->document_token >= t.vocab_size)
        return concat("--document-end ", o->document_token, ": --tokenizer ", t.name,
                      " has the tokens 0 to ", t.vocab_size - 1);

    // Two bytes hold a token if the vocabulary is at most 65536.
    o->width = t.vocab_size <= 65536 ? 2 : 4;
    return "";
}

// Plan windows of conversations: their size and format. They are packed now, unlike documents,
// because a part of a window is of no use.
inline std::string prepare_source(const Config& c, const OpenSource& open,
                                  const std::vector<TextInput>& inputs, ShardOutput* o) {
    if (c.loss == "lm") return "";
    if (c.loss != "sft")
        return "--loss " + c.loss + " is not built: give the JSON lines to --data";
    if (c.seq == 0)
        return "--loss sft packs conversations into windows: give --seq, the tokens of "
               "one";
    for (const TextInput& i : inputs)
        if (!i.lines)
            return i.path + ": --loss sft reads conversations, a JSON object a line: give .jsonl";

    // Fill shards with whole windows. Otherwise a conversation would be cut at a border, and the
    // loader would cut the next shard's windows in the wrong places.
    for (auto [flag, tokens] : {std::pair("shard-tokens", c.shard_tokens),
                                std::pair("val-tokens", c.val_tokens)})
        if (tokens % c.seq)
            return concat("--", flag, " ", tokens, " is no multiple of --seq ", c.seq, ": give ",
                          tokens + c.seq - tokens % c.seq);
    o->packed = size_t(c.seq);
    o->width = 4;
    return open(&o->source);
}

// Describe the inputs that --data names.
inline std::string describe_inputs(std::vector<TextInput>* inputs, const std::string& data) {
    std::vector<std::string> paths;
    LLMC_TRY(data_paths(data, &paths));
    for (const std::string& path : paths) {
        inputs->emplace_back();
        LLMC_TRY(input_describe(&inputs->back(), path));
    }
    return "";
}

// The program that prints parquet files. Its folder dev/data is in the program's
// folder or beside it.
inline std::string parquet_script(const std::string& program_folder) {
    std::string script = "dev/data/parquet_text.py";
    return program_folder + (file_type(program_folder + script) ? "" : "../") + script;
}

// Write the manifest, which completes the preparation.
inline std::string write_manifest(const ShardOutput& o, const Tokenizer& t) {
    Json manifest = o.identity;
    manifest["shards"] = o.shards;
    manifest["lines"] = o.counts.lines;
    manifest["malformed_lines"] = o.counts.malformed;
    manifest["tokenizer_name"] = t.name;
    manifest["tokens"] = sum_of(o.shards, "tokens");
    manifest["documents"] = sum_of(o.shards, "documents");
    return write_json(manifest_path(o), manifest);
}

// Print what there is now, and how to train on it.
inline void print_prepared(const ShardOutput& o, const Config& c, bool already) {
    printf("%s%zu documents, %zu tokens in %zu shards: %s\n", already ? "already prepared: " : "",
           sum_of(o.shards, "documents"), sum_of(o.shards, "tokens"), o.shards.size(),
           manifest_path(o).c_str());
    std::string data = o.shard_tokens ? "'" + o.stem + "_*.bin'" : c.prepare;
    std::string val = o.val_tokens ? " --val " + o.stem + ".val.bin" : "";
    if (o.packed)
        printf("train:  tune_gpt --loss sft --seq %zu --data %s%s\n", o.packed, data.c_str(),
               val.c_str());
    else
        printf("train:  train_gpt --data %s%s; with --documents mask also --document-end %d\n",
               data.c_str(), val.c_str(), o.document_token);
}

// Say which parts of the inputs are not in the shards.
inline void print_left_out(const ShardOutput& o) {
    const LineCounts& n = o.counts;
    if (n.malformed > 0)
        fprintf(stderr, "note: %zu of %zu lines are left out\n", n.malformed, n.lines);
    if (n.cut + n.dropped > 0)
        fprintf(stderr,
                "note: %zu conversations are longer than --seq and lost answers at their ends; %zu "
                "are left out: no answer begins within it\n",
                n.cut, n.dropped);
}

// Do what the last run has left to do. The caller holds the lock.
inline std::string prepare_locked(const Config& c, const Tokenizer& t, ShardOutput& o,
                                  BatchReader& r) {
    bool done = false;
    LLMC_TRY(resume(o, r, &done));
    if (!done) {
        size_t threads = c.threads ? size_t(c.threads) : std::thread::hardware_concurrency();
        LLMC_TRY(write_all(o, r, t, std::max(threads, size_t(1))));
        LLMC_TRY(write_manifest(o, t));
        unlink(progress_path(o).c_str());
        print_left_out(o);
    }
    print_prepared(o, c, done);
    return "";
}

// Prepare, from the flags to the manifest. program_folder: where the program lies. open:
// opens the source that packs conversations, for --loss sft.
inline std::string prepare_shards(const Config& c, const Tokenizer& t,
                                  const std::string& program_folder, const OpenSource& open = {},
                                  const BatchLimits& limits = {}) {
    // Check the flags and the inputs.
    ShardOutput o;
    BatchReader r;
    LLMC_TRY(prepare_check(c, t, &o));
    LLMC_TRY(describe_inputs(&r.inputs, c.data));
    LLMC_TRY(prepare_source(c, open, r.inputs, &o));
    o.identity = prepare_identity(c, t, o, r.inputs, limits.batch);
    r.script = parquet_script(program_folder);
    r.field = o.packed ? "" : c.field;
    r.limits = limits;
    for (const auto& [text, token] : t.special)
        if (token == t.eot) r.end_text = text;

    // Take the lock: two processes would write the same files.
    int lock = -1;
    const std::string lock_path = o.stem + ".lock";
    LLMC_TRY(lock_file(lock_path, &lock, c.prepare + ": another process is writing it: wait for "
                                                     "it, or choose another name"));
    std::string wrong = prepare_locked(c, t, o, r);
    unlock_file(lock_path, lock);
    return wrong;
}

} // namespace llmc
