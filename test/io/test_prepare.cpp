// test_prepare.cpp - token shards from text, JSON lines and parquet: any threads, kills, bad input
//   The tokens expected are those of encode() on whole documents, or bytes written out by hand.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <map>
#include <random>
#include "../../llmc/extra/bpe_train.h"
#include "../../llmc/io/chat_templates.h"
#include "../../llmc/io/prepare.h"
#include "../../llmc/tune/conversations.h"
#include "../harness/testing.h"

using namespace llmc;

typedef std::vector<int> Tokens;
static const std::string PROGRAM_FOLDER = ROOT + "/build/";

struct Prepare : Scratch {
    Config c;
    Tokenizer t;
    BatchLimits limits;
    Chat chat;
    void SetUp() override {
        Scratch::SetUp();
        fs::create_directories(dir + "/out");
        c.prepare = dir + "/out/x.bin", c.document_end = 10, c.threads = 2;
    }
    std::string out(const std::string& name) { return dir + "/out/" + name; }
    // prepare_shards() of c.data. What it prints to stdout and stderr goes to `says`.
    std::string says;
    std::string run() {
        testing::internal::CaptureStdout(), testing::internal::CaptureStderr();
        auto open = [this](LineSource* source) {
            std::string refused = choose_chat(&chat, c.chat_format, "", t);
            *source = line_source(chat, c.loss, {conversations(), answer_pairs()});
            return refused;
        };
        std::string wrong = prepare_shards(c, t, PROGRAM_FOLDER, open, limits);
        says = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
        return wrong;
    }
    std::string again() { // with an empty folder
        fs::remove_all(dir + "/out"), fs::create_directories(dir + "/out");
        return run();
    }
    nlohmann::json manifest() { return nlohmann::json::parse(read_file(out("x.json"))); }
    std::map<std::string, std::string> files() { return folder_bytes(dir + "/out"); }
};

// The tokens of a shard, read without the loader and with every word of its header checked.
static Tokens shard(const std::string& path) {
    std::string bytes = read_file(path);
    int32_t header[256] = {};
    memcpy(header, bytes.data(), std::min(bytes.size(), sizeof(header)));
    size_t width = header[0] == 20240520 && header[1] == 1   ? 2
                   : header[0] == 20240801 && header[1] == 7 ? 4
                                                             : 0;
    EXPECT_TRUE(width) << path << ": " << header[0] << " " << header[1];
    for (int i = 3; i < 256; i++) EXPECT_EQ(header[i], 0);
    EXPECT_EQ(bytes.size(), 1024 + size_t(header[2]) * width) << path;

    Tokens tokens;
    for (size_t at = 1024; width && at < bytes.size(); at += width) {
        uint32_t token = 0;
        memcpy(&token, &bytes[at], width);
        tokens.push_back(int(token));
    }
    return tokens;
}

static Tokens tokens_of(const std::string& bytes) { return Tokens(bytes.begin(), bytes.end()); }

static Tokens joined(std::vector<Tokens> parts) {
    Tokens all;
    for (const Tokens& p : parts) all.insert(all.end(), p.begin(), p.end());
    return all;
}

// A tokenizer of bytes and a few merges that cross word borders where they can, with GPT-2's
// pattern and an end of text.
static Tokenizer small_bpe() {
    Tokenizer t;
    t.name = "small", t.kind = TokenizerKind::BPE;
    for (int b = 0; b < 256; b++) set_piece(&t, b, std::string(1, char(b)));

    std::vector<Merge> merges;
    for (auto [left, right] :
         {std::pair(' ', 'a'), {'a', 'b'}, {'\n', '\n'}, {' ', ' '}, {256, 'b'}}) {
        int token = int(t.pieces.size());
        set_piece(&t, token, t.pieces[size_t(left)] + t.pieces[size_t(right)]);
        merges.push_back(merge_of(left, right, uint32_t(token), token));
    }

    for (int i = 0; i < int(t.pieces.size()); i++) set_word_piece(&t, i);
    EXPECT_EQ(set_bytes(&t), "");
    set_merges(&t, merges);
    EXPECT_EQ(add_pattern(&t, R"('s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"), "");

    t.eot = int(t.pieces.size());
    set_piece(&t, t.eot, "");
    add_special(&t, "<|endoftext|>", t.eot);
    t.vocab_size = int(t.pieces.size());
    return t;
}

static std::string random_text(std::mt19937& random, size_t count) {
    const std::string parts[] = {
        "a",        "b",    "ab", " ",  "  ", "\n",  "\n\n",          ".",     "'s",
        "\xc3\xa9", "\xff", "12", " a", " b", "x y", "<|endoftext|>", "<|end", "\xe4\xb8\xad"};
    std::string text;
    for (size_t i = 0; i < count; i++) text += parts[random() % std::size(parts)];
    return text;
}

static std::string gzipped(const std::string& bytes, const std::string& path) {
    gzFile f = gzopen(path.c_str(), "wb");
    gzwrite(f, bytes.data(), unsigned(bytes.size()));
    gzclose(f);
    return read_file(path);
}

// Packed as the program zstd does it.
static std::string zstd_of(const std::string& bytes, int checksum = 1) {
#ifdef WITH_ZSTD
    std::string packed(ZSTD_compressBound(bytes.size()), 0);
    ZSTD_CCtx* z = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(z, ZSTD_c_checksumFlag, checksum);
    packed.resize(ZSTD_compress2(z, packed.data(), packed.size(), bytes.data(), bytes.size()));
    ZSTD_freeCCtx(z);
    return packed;
#else
    return (void)checksum, bytes;
#endif
}
#ifdef WITH_ZSTD
static const std::vector<std::string> PACKED = {"", ".gz", ".zst"};
#else
static const std::vector<std::string> PACKED = {"", ".gz"};
#endif

// ----------------------------------------------------------------------------
// known answers

TEST_F(Prepare, ATextIsADocument) {
    c.data = put("a.txt", "one\ntwo") + "," + put("b.txt", "three\n");
    ASSERT_EQ(run(), "");
    EXPECT_EQ(shard(out("x.bin")), tokens_of("\none\ntwo\nthree\n"));
    EXPECT_HAS(says, "2 documents, 15 tokens in 1 shards");
    EXPECT_EQ(manifest()["documents"], 2);
    EXPECT_EQ(files().size(), 2u); // the shard and the manifest
}

TEST_F(Prepare, ATextIsCutAtItsEndOfText) {
    t = small_bpe(), c.document_end = -1;
    c.data = put("a.txt", "<|endoftext|>ab<|endoftext|><|endoftext|>\nc<|endoftext|>") + "," +
             put("e.txt", "") + "," + put("b.txt", "d");
    ASSERT_EQ(run(), "");
    EXPECT_EQ(shard(out("x.bin")), (Tokens{t.eot, 257, t.eot, '\n', 'c', t.eot, 'd'}));
    EXPECT_EQ(manifest()["documents"], 3);

    // If the tokenizer has a token that begins a text, as Llama's have, it separates documents.
    t.bos = 7;
    c.prepare = dir + "/out/bos.bin";
    ASSERT_EQ(run(), "");
    EXPECT_EQ(shard(out("bos.bin")), (Tokens{7, 257, 7, '\n', 'c', 7, 'd'}));

    c.document_end = 9, c.prepare = dir + "/out/given.bin";
    ASSERT_EQ(run(), "");
    EXPECT_EQ(shard(out("given.bin")), (Tokens{9, 257, 9, '\n', 'c', 9, 'd'}));
}

TEST_F(Prepare, AJsonLineIsADocument) {
    t = small_bpe(), c.document_end = -1, c.field = "body";
    c.data = put("a.jsonl",
                 "{\"body\": \"ab\", \"text\": \"no\"}\n\n \t\r\n"
                 "{\"x\": {\"body\": \"no\"}, \"body\": \"\\u00e9\\n\\\"\"}\r\n"
                 "{\"body\": \"\"}\n"
                 "{\"body\": \"<|endoftext|>\"}\n"
                 "{\"body\": \"\xff\xc3\xa9\\u00e9\"}"); // no newline at the end

    // Only the field's text counts, escapes are undone, and special tokens stay text.
    ASSERT_EQ(run(), "");
    Tokens end = {t.eot};
    EXPECT_EQ(shard(out("x.bin")), joined({end,
                                           {257},
                                           end,
                                           encode(t, "\xc3\xa9\n\""),
                                           end,
                                           tokens_of("<|endoftext|>"),
                                           end,
                                           {255, 0xc3, 0xa9, 0xc3, 0xa9}}));
    EXPECT_EQ(manifest()["lines"], 5);
    EXPECT_EQ(manifest()["malformed_lines"], 0);
    EXPECT_EQ(manifest()["documents"], 4);
}

TEST_F(Prepare, EveryByteOfALineComesBack) {
    std::string bytes = "\xef\xb7\x90 \xef\xbf\xbd "; // a noncharacter and U+FFFD as well
    for (int b = 0x80; b < 256; b++) bytes += char(b);
    c.data = put("a.jsonl", "{\"text\": \"" + bytes + "\"}");
    ASSERT_EQ(run(), "");
    Tokens expected = {10};
    for (unsigned char b : bytes) expected.push_back(b);
    EXPECT_EQ(shard(out("x.bin")), expected);
}

TEST_F(Prepare, PackedFilesAreTheirContents) {
    std::string text, lines;
    for (int i = 0; i < 3000; i++) {
        text += "line " + std::to_string(i * 7919 % 1000) + "\n";
        lines += "{\"text\": \"" + std::to_string(i) + "\"}\n";
    }
    for (const std::string name : {"a.txt", "a.jsonl"}) {
        const std::string& bytes = name == "a.txt" ? text : lines;
        size_t half = bytes.size() / 2;
        put(name, bytes);

        // Two gzip members, or two zstd frames.
        put(name + ".gz",
            gzipped(bytes.substr(0, half), dir + "/1") + gzipped(bytes.substr(half), dir + "/1"));
        put(name + ".zst", zstd_of(bytes.substr(0, half), 0) + zstd_of(bytes.substr(half), 0));

        Tokens expected;
        for (const std::string& packed : PACKED)
            for (size_t batch : {1 << 20, 100}) {
                c.data = dir + "/" + name + packed, limits.batch = batch;
                ASSERT_EQ(again(), "");
                Tokens got = shard(out("x.bin"));
                if (expected.empty()) expected = got;
                EXPECT_EQ(got, expected) << packed;
                EXPECT_EQ(manifest()["documents"], name == "a.txt" ? 1 : 3000);
            }
    }
}

TEST_F(Prepare, AWideVocabularyTakes32Bits) {
    t = small_bpe(), c.document_end = -1;
    t.vocab_size = 65536;
    c.data = put("a.txt", "ab");
    ASSERT_EQ(run(), "");
    EXPECT_EQ(read_file(out("x.bin")).size(), 1024 + 2 * 2u);
    t.vocab_size = 65537, c.document_end = 65536;
    ASSERT_EQ(again(), "");
    EXPECT_EQ(read_file(out("x.bin")).size(), 1024 + 2 * 4u);
    EXPECT_EQ(shard(out("x.bin")), (Tokens{65536, 257}));
}

// ----------------------------------------------------------------------------
// shards

TEST_F(Prepare, ShardsHoldWhatTheyShould) {
    c.data = put("a.jsonl", "{\"text\": \"abcd\"}\n{\"text\": \"ef\"}\n{\"text\": \"ghij\"}\n");
    Tokens all = tokens_of("\nabcd\nef\nghij"); // 13 tokens
    for (int64_t val : {0, 1, 5, 12})
        for (int64_t size : {0, 1, 4, 6, 13, 100}) {
            c.val_tokens = val, c.shard_tokens = size;
            ASSERT_EQ(again(), "");

            // The names: x.val.bin first, then x_000000.bin and so on, or x.bin alone.
            Tokens got;
            std::vector<std::string> names;
            if (val) names.push_back("x.val.bin");
            for (size_t i = 0; size && i < ceil_div(size_t(13 - val), size_t(size)); i++)
                names.push_back("x_00000" + std::to_string(i % 10) + ".bin");
            if (size == 1) // more than ten shards
                for (size_t i = 10 + (val > 0); i < names.size(); i++)
                    names[i] = "x_00001" + std::to_string(i % 10 - (val > 0)) + ".bin";
            if (!size) names.push_back("x.bin");

            ASSERT_EQ(files().size(), names.size() + 1);
            nlohmann::json m = manifest();

            // Each shard has its number of tokens, and its entry in the manifest is right.
            for (size_t i = 0; i < names.size(); i++) {
                Tokens part = shard(out(names[i]));
                size_t expected = i == 0 && val ? size_t(val) : size ? size_t(size) : 13;
                EXPECT_TRUE(part.size() == expected || i + 1 == names.size()) << names[i];
                got.insert(got.end(), part.begin(), part.end());
                const nlohmann::json& entry = m["shards"][i];
                size_t bytes = 0;
                uint32_t crc = 0;
                EXPECT_EQ(file_crc(out(names[i]), &bytes, &crc), "");
                EXPECT_EQ(entry["file"], names[i]);
                EXPECT_EQ(entry["bytes"], bytes);
                EXPECT_EQ(entry["crc32"], crc);
                EXPECT_EQ(entry["tokens"], part.size());
                EXPECT_EQ(entry["documents"], std::count(part.begin(), part.end(), 10));
            }

            EXPECT_EQ(got, all) << val << " " << size;
            EXPECT_EQ(m["crc32"], manifest_crc(m));
        }
}

// The pattern that the program prints finds the training shards. The loader opens them and
// knows where documents end.
TEST_F(Prepare, TheLoaderReadsThem) {
    std::string lines;
    for (int i = 0; i < 50; i++) lines += "{\"text\": \"document " + std::to_string(i) + "\"}\n";
    c.data = put("a.jsonl", lines), c.val_tokens = 100, c.shard_tokens = 200;
    ASSERT_EQ(run(), "");
    EXPECT_HAS(says, "--data '" + dir + "/out/x_*.bin' --val " + dir + "/out/x.val.bin");

    DataLoader train, val;
    ASSERT_EQ(data_open(&train, dir + "/out/x_*.bin", Split::TRAIN, true, t, 16, 256, 1), "");
    ASSERT_EQ(data_open(&val, out("x.val.bin"), Split::VAL, true, t, 16, 256, 1), "");
    EXPECT_EQ(data_disjoint(train, val), "");
    EXPECT_EQ(val.tokens, 100u);
    EXPECT_EQ(train.tokens + val.tokens, manifest()["tokens"].get<size_t>());

    // The first window is the first shard's, cut into its documents.
    int end = 0;
    ASSERT_EQ(data_document_end(train, t, 10, &end), "");
    train.shuffle = false;
    Tokens tokens(16), targets(16), doc_start(16), expected(shard(out("x_000000.bin")));
    ASSERT_EQ(load_window(train, 0, tokens.data(), targets.data()), "");
    EXPECT_EQ(tokens, Tokens(expected.begin(), expected.begin() + 16));
    split_documents(doc_start.data(), targets.data(), tokens.data(), 16, end);
    EXPECT_EQ(std::count(targets.begin(), targets.end(), -1),
              std::count(tokens.begin(), tokens.end(), 10));
}

// ----------------------------------------------------------------------------
// threads, batches, kills

TEST_F(Prepare, ThreadsAndBatchesChangeNoByte) {
    t = small_bpe(), c.document_end = -1, c.shard_tokens = 4000, c.val_tokens = 300;
    std::mt19937 random(5);
    std::string lines;
    for (int i = 0; i < 300; i++)
        lines += nlohmann::json({{"text", random_text(random, random() % 60)}})
                     .dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore) +
                 "\n";
    c.data = put("a.jsonl", lines) + "," + put("b.txt", random_text(random, 5000)) + "," +
             put("c.jsonl", lines);

    std::map<std::string, std::string> one;
    limits.batch = 1000;
    for (int threads : {1, 2, 3, 8}) {
        c.threads = threads;
        ASSERT_EQ(again(), "");
        if (threads == 1) one = files();
        EXPECT_TRUE(files() == one) << threads;
    }

    // The batches of lines may have any size: only the manifest shows it.
    one.erase("x.json");
    c.data = dir + "/a.jsonl";
    ASSERT_EQ(again(), "");
    one = files(), one.erase("x.json");
    for (size_t batch : {1, 10, 333, 100000}) {
        limits.batch = batch;
        ASSERT_EQ(again(), "");
        auto all = files();
        all.erase("x.json");
        EXPECT_TRUE(all == one) << batch;
    }
}

// Read in blocks, a text has the same tokens as in one piece.
static void blocks_are_the_whole(const Tokenizer& t, const std::string& text, size_t batch) {
    std::string path = scratch("blocks.txt");
    std::ofstream(path, std::ios::binary) << text;
    std::vector<TextInput> inputs(1);
    ASSERT_EQ(input_describe(&inputs[0], path), "");

    std::string end_text;
    for (const auto& [special, token] : t.special)
        if (token == t.eot) end_text = special;
    BatchReader r;
    r.inputs = inputs;
    r.end_text = end_text, r.limits.batch = batch;

    // Read blocks and tokenize each.
    Tokens got, whole = encode(t, text, true);
    std::string back;
    size_t blocks = 0;
    for (TextBatch b; read_batch(r, &b); blocks++) {
        EXPECT_EQ(b.offset, back.size());
        EXPECT_LE(b.text.size(), batch);
        back += b.text;
        tokenize_batch(b, t, "", path);
        if (b.offset == 0) b.tokens.erase(b.tokens.begin()); // the token that begins the document
        got.insert(got.end(), b.tokens.begin(), b.tokens.end());
    }

    fs::remove(path);
    EXPECT_EQ(r.wrong, "");
    EXPECT_TRUE(back == text);
    EXPECT_GE(blocks, text.size() / batch);

    // Where encode() finds an end of text, prepare_shards() begins a document.
    for (int& token : whole)
        if (token == t.eot || token == t.bos) token = DOCUMENT;
    auto [a, b] = std::mismatch(got.begin(), got.end(), whole.begin(), whole.end());
    EXPECT_TRUE(a == got.end() && b == whole.end())
        << t.name << ", batch " << batch << ": differs at token " << a - got.begin();
}

// A text in which words, spaces and ends of text are close together, so that a block always
// finds a place to end.
static std::string english_text(std::mt19937& random, size_t count) {
    const std::string parts[] = {"a ab",          " b",         "'s ",  ".\n\nA", "  x\n",  "12 3",
                                 "<|endoftext|>", "\xc3\xa9 e", "\xff", "\n",     "it's b", "(x y)",
                                 "   ",           "I am",       " \n z"};
    std::string text;
    for (size_t i = 0; i < count; i++) text += parts[random() % std::size(parts)] + " the end";
    return text;
}

TEST_F(Prepare, BlocksOfATextHaveTheTokensOfTheWhole) {
    std::mt19937 random(8);
    for (size_t batch : {40, 64, 100, 1000})
        blocks_are_the_whole(small_bpe(), english_text(random, 600), batch);
}

// A space is put before a text, not before a block. Of several one stays, if the model says so.
TEST_F(Prepare, BlocksOfATextHaveNoSpaceInFront) {
    std::mt19937 random(8);
    for (bool extra : {true, false})
        for (bool once : {true, false}) {
            t = small_bpe();
            t.sentencepiece = true, t.patterns.clear();
            t.prefix = Prefix::SPACE, t.prefix_once = once, t.extra_spaces = extra;
            for (size_t batch : {40, 100, 1000})
                blocks_are_the_whole(t, english_text(random, 600), batch);
        }
}

TEST_F(Prepare, BlocksOfATextHaveTheTokensOfTheWholeWithKnownTokenizers) {
    NEEDS_FIXTURES();
    std::mt19937 random(9);
    std::string stories = read_file(FIXTURES + "/text/tinystories_v2_gpt4_sample_2MiB.txt")
                              .substr(0, 300000),
                plays = read_file(FIXTURES + "/text/tinyshakespeare.txt").substr(0, 300000);
    for (const char* name : {"gpt2", "llama2/tokenizer.model", "llama2/tokenizer.bin",
                             "llama3/tokenizer.model", "tinystories512/tok512.bin"}) {
        Tokenizer known;
        ASSERT_EQ(tokenizer_open(&known, FIXTURES + "/tokenizers/" + name), "");
        for (size_t batch : {300, 1000, 65536})
            for (const std::string& text : {stories, plays, english_text(random, 500)})
                blocks_are_the_whole(known, text, batch);
    }
}

// Without a place to end a block, the text is still whole.
TEST_F(Prepare, ATextWithoutSpacesComesBack) {
    t = small_bpe(), c.document_end = -1;
    std::mt19937 random(2);
    for (int i = 0; i < 20; i++) {
        std::string text = random_text(random, 400), back;
        std::erase(text, i % 2 ? ' ' : '<');
        if (i % 4 > 1) std::erase(text, '\n');

        c.data = put("a.txt", text);
        limits.batch = 32 + random() % 40; // twice an end of text, or more
        ASSERT_EQ(again(), "");
        for (int token : shard(out("x.bin"))) back += decode(t, token);
        for (size_t at; (at = text.find("<|endoftext|>")) != std::string::npos;) text.erase(at, 13);
        EXPECT_TRUE(back == text) << i;
    }
}

// Begin to prepare in a child that prints nothing.
static pid_t prepare_apart(const Prepare& p) {
    pid_t child = fork();
    if (child > 0) return child;
    (void)!freopen("/dev/null", "w", stdout), (void)!freopen("/dev/null", "w", stderr);
    _exit(prepare_shards(p.c, p.t, PROGRAM_FOLDER, {}, p.limits).empty() ? 0 : 1);
}

// Prepare in a child, and kill it after a while. Returns whether the child finished first.
static bool finished_before(const Prepare& p, int microseconds) {
    pid_t child = prepare_apart(p);
    usleep(useconds_t(microseconds));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return !WIFSIGNALED(status);
}

TEST_F(Prepare, AKillAtAnyMomentChangesNoByte) {
    t = small_bpe(), c.document_end = -1, c.shard_tokens = 3000, c.val_tokens = 1000,
    limits.batch = 2000;
    std::mt19937 random(6);
    std::string lines, text = random_text(random, 20000);
    for (int i = 0; i < 1500; i++)
        lines += i % 300 == 7 ? "{bad}\n" : "{\"text\": \"ab " + std::to_string(random()) + "\"}\n";
    std::string packed = gzipped(text, dir + "/1");
    put("c.txt.gz", packed), put("c.txt.zst", zstd_of(text));
    c.data = put("a.jsonl", lines) + "," + put("b.txt.gz", packed) + "," + dir + "/" +
             (PACKED.size() == 3 ? "c.txt.zst" : "c.txt.gz") + "," + put("d.jsonl", lines);

    // One run without a kill takes `whole` microseconds.
    double start = clock_seconds();
    ASSERT_EQ(run(), "");
    int whole = int((clock_seconds() - start) * 1e6), kills = 0, resumed = 0;
    auto expected = files();
    ASSERT_GT(expected.size(), 20u);

    // Kill children at random moments until one finishes: its files are those without a kill.
    for (int round = 0; round < 6 || resumed < 6; round++) {
        ASSERT_LT(round, 50) << kills << " kills";
        fs::remove_all(dir + "/out"), fs::create_directories(dir + "/out");
        int before = kills;
        for (bool done = false; !done;) {
            c.threads = 1 + int(random() % 3);
            bool goes_on = fs::exists(out("x_000000.bin"));
            done = finished_before(*this, int(random() % unsigned(whole)));
            kills += !done, resumed += goes_on;
            whole += done ? 0 : whole / 20; // the machine may be slower than it was
            ASSERT_LT(kills, before + 200);
        }
        if (kills == before) whole -= whole / 4; // or faster

        ASSERT_EQ(run(), "");
        EXPECT_HAS(says, "already prepared");
        auto got = files();
        for (auto& [name, bytes] : expected) EXPECT_TRUE(got[name] == bytes) << name;
        EXPECT_EQ(got.size(), expected.size());
    }
}

TEST_F(Prepare, AFinishedOneSaysSoAndDoesNothing) {
    c.data = put("a.txt", "some text"), c.shard_tokens = 4;
    ASSERT_EQ(run(), "");
    auto before = files();
    auto time = fs::last_write_time(out("x.json"));
    ASSERT_EQ(run(), "");
    EXPECT_HAS(says, "already prepared: 1 documents, 10 tokens in 3 shards");
    EXPECT_TRUE(files() == before);
    EXPECT_EQ(fs::last_write_time(out("x.json")), time);
}

// ----------------------------------------------------------------------------
// what is refused

// The files of one preparation are in the way of another, whether the first has finished or not.
TEST_F(Prepare, OtherInputsAreRefused) {
    c.data = put("a.txt", "some text"), c.shard_tokens = 4;
    auto written = fs::last_write_time(c.data);
    Config first = c;
    for (bool finished : {true, false}) {
        c = first, t = {};
        ASSERT_EQ(again(), "");
        std::string state = out("x.json");
        if (!finished) { // as if it had been killed before the last shard
            nlohmann::json j = manifest();
            state = out("x.progress");
            j["shards"].erase(2);
            j["batch"] = {{"file", 0},  {"offset", 0},    {"line", 1},
                          {"lines", 0}, {"malformed", 0}, {"begins", false}};

            j["written"] = 8;
            ASSERT_EQ(write_json(state, j), "");
            std::string last = read_file(out("x_000002.bin"));
            fs::remove(out("x.json")), fs::remove(out("x_000002.bin"));
            ASSERT_EQ(run(), "");
            EXPECT_EQ(read_file(out("x_000002.bin")), last);
            ASSERT_EQ(write_json(state, j), "");
            fs::remove(out("x.json"));
        }

        auto before = files();
        auto refused = [&](const std::string& why) {
            std::string wrong = run();
            EXPECT_HAS(wrong, state + ": was made from " + why);
            EXPECT_HAS(wrong, "remove it, or choose another name");
            EXPECT_TRUE(files() == before);
            c = first, t = {};
        };

        // Each flag that differs, and inputs that have changed.
        c.data = put("b.txt", "some text"), refused("other --data");
        c.data += "," + dir + "/b.txt", refused("other --data");
        c.shard_tokens = 5, refused("another --shard-tokens");
        c.val_tokens = 1, refused("another --val-tokens");
        c.document_end = 11, refused("another --document-end");
        c.field = "body", refused("another --field");
        t = small_bpe(), refused("another --tokenizer");
        ASSERT_EQ(add_pattern(&t, "."), ""), refused("another --tokenizer");

        put("a.txt", "some texts"), refused("other --data, or files that have changed since");
        put("a.txt", "some text");
        fs::last_write_time(c.data, written);

        // Files of the preparation that have changed.
        fs::resize_file(out("x_000001.bin"), 1025);
        EXPECT_HAS(run(), "x_000001.bin: is gone, or has another size");
        std::ofstream(state) << "{}";
        EXPECT_HAS(run(), state + ": is there, and is none of prepare_gpt's files");
    }

    // Files of somebody else.
    for (const char* name : {"x_000000.bin", "x_000123.bin", "x.bin", "x.val.bin"}) {
        fs::remove_all(dir + "/out"), fs::create_directories(dir + "/out");
        std::ofstream(out(name)) << "mine";
        EXPECT_HAS(run(), std::string(name) + ": is there already");
        EXPECT_EQ(read_file(out(name)), "mine");
    }
}

TEST_F(Prepare, BadFlagsAreRefused) {
    std::string text = put("a.txt", "some text");
    Config first = c;
    auto refused = [&](const std::string& part) {
        EXPECT_HAS(run(), part);
        EXPECT_EQ(files().size(), 0u) << part;
        c = first, c.data = text;
    };

    refused("give --data");
    c.prepare = "out", refused("out: wants OUT.bin");
    c.prepare = ".bin", refused("OUT.bin");
    c.prepare = dir + "/absent/x.bin", refused("there is no folder " + dir + "/absent/");
    c.document_end = -1, refused("has no token that begins or ends a text");

    c.document_end = 256, refused("has the tokens 0 to 255");
    c.data = dir + "/absent.txt", refused("absent.txt: No such file");
    c.data = dir + "/*.json", refused("no file matches");

    c.data = put("a.csv", "1"), refused("wants a name that ends in .txt or .jsonl");
    fs::create_directories(dir + "/d.txt");
    c.data = dir + "/d.txt", refused("is no file");

    c.val_tokens = 11;
    EXPECT_HAS(run(), "--val-tokens 11: the inputs have only 10 tokens");
    c.val_tokens = 10; // the refusal before wrote no state that would be in the way
    EXPECT_HAS(run(), "--val-tokens 10 takes all tokens");
    c.val_tokens = 0, c.data = put("e.txt", "");
    EXPECT_HAS(again(), "e.txt: holds no document");
    for (const auto& [name, bytes] : files()) EXPECT_FALSE(name.ends_with(".tmp")) << name;
}

TEST_F(Prepare, BadLinesAreCountedUpToALimit) {
    // Good lines, and bad ones among them: each kind of fault once.
    std::string good = "{\"text\": \"a\"}\n";
    std::string bad[] = {"{\"text\": \"a\"\n",        "[1]\n",      "{\"txt\": \"a\"}\n",
                         "{\"text\": 5}\n",           "\"text\"\n", "{\"text\": null}\n",
                         "{\"text\": \"\\ud800\"}\n", "nonsense\n"};
    std::string lines = good + good;
    for (const std::string& b : bad) lines += b + good;
    for (int i = 0; i < 800; i++) lines += good;
    c.data = put("a.jsonl", good) + "," + put("b.jsonl", lines);
    limits.batch = 64;

    ASSERT_EQ(run(), "");
    EXPECT_EQ(shard(out("x.bin")).size(), 2 * 811u);
    EXPECT_HAS(says, "note: " + dir + "/b.jsonl:3: is no JSON object");
    EXPECT_EQ(says.find("b.jsonl:5"), std::string::npos);
    EXPECT_EQ(manifest()["malformed_lines"], 8);
    EXPECT_EQ(manifest()["lines"], 819);

    // A hundredth of the lines may be bad, of less than a hundred none.
    auto with_bad = [&](int lines, int last) {
        std::string text;
        for (int i = 0; i < lines - last; i++) text += good;
        for (int i = 0; i < last; i++) text += bad[2];
        c.data = put("c.jsonl", text);
        limits.batch = 1 << 20; // one batch: the count is looked at once
        return again();
    };
    EXPECT_EQ(with_bad(1000, 10), "");
    EXPECT_EQ(with_bad(100, 1), "");
    EXPECT_HAS(with_bad(999, 10), "10 of 999 lines are bad, and a hundredth of them may be");
    EXPECT_HAS(with_bad(99, 1), "c.jsonl:99: has no string \"text\": --field says which");
    EXPECT_EQ(files().count("x.bin"), 0u);

    // Good lines may follow ten bad ones; a file of bad lines is not read to its end.
    std::string start, rest;
    for (int i = 0; i < 10; i++) start += bad[2];
    for (int i = 0; i < 990; i++) rest += good;
    limits.batch = 64;
    c.data = put("c.jsonl", start + rest);
    EXPECT_EQ(again(), "");
    c.data = put("c.jsonl", start + bad[2] + rest);
    EXPECT_HAS(again(), "of the first 1");

    // Lines that are too long.
    limits = {64, 100};
    c.data = put("d.jsonl", good + "{\"text\": \"" + std::string(90, 'x') + "\"}\n");
    EXPECT_EQ(again(), "");
    c.data = put("d.jsonl", good + "{\"text\": \"" + std::string(190, 'x') + "\"}\n");
    EXPECT_HAS(again(), "d.jsonl:2: a line of more than 100 bytes");
}

// Texts are read as --data reads them: a byte order mark is no text, and what may be no text in
// UTF-8 is said.
TEST_F(Prepare, MarksAndForeignBytesAreTreatedAsByData) {
    std::string mark = "\xef\xbb\xbf", line = "{\"text\": \"one\"}\n";
    for (auto [name, text] : {std::pair<std::string, std::string>("a.txt", "one two"),
                              {"a.jsonl", line + line}}) {
        c.data = put(name, text);
        ASSERT_EQ(again(), "") << name;
        EXPECT_EQ(says.find("note"), std::string::npos) << says;
        Tokens plain = shard(out("x.bin"));
        put(name, mark + text);
        ASSERT_EQ(again(), "") << name;
        EXPECT_EQ(shard(out("x.bin")), plain) << name;
    }
    std::string packed = gzipped(mark + "one two", dir + "/2");
    c.data = put("b.txt.gz", packed);
    ASSERT_EQ(again(), "");
    EXPECT_EQ(shard(out("x.bin")), tokens_of("\none two"));

    // The same words as --data has, once a file.
    std::string latin, zeros;
    for (int i = 0; i < 200; i++) {
        latin += "caf\xe9 \xe0 la carte\n";
        zeros += std::string("one\0two\n", 8);
    }
    limits.batch = 512;
    for (auto [name, text] : {std::pair<std::string, std::string>("l.txt", latin),
                              {"z.txt", zeros},
                              {"l.jsonl", "{\"text\": \"" + latin.substr(0, 17) + "\"}\n"}}) {
        c.data = put(name, text);
        again();
        size_t note = says.find("note: " + dir + "/" + name + ": ");
        ASSERT_NE(note, std::string::npos) << says;
        EXPECT_HAS(says, "is it text?");
        EXPECT_EQ(says.find("is it text?", note + 200), std::string::npos) << says;
    }
}

// JSON that is no lines is refused with what makes lines of it.
TEST_F(Prepare, JsonThatIsNotLinesIsRefusedWithTheCommand) {
    c.data = put("a.json", "[{\"text\": \"one\"}]");
    EXPECT_HAS(again(), "a.json: records are JSON objects, one a line: give .jsonl: jq -c '.[]' ");
    c.data = put("b.jsonl", "{\"data\": [{\"text\": \"one\"}]}");
    EXPECT_HAS(again(), "b.jsonl:1: has no string \"text\": --field says which one is the text; its "
                        "\"data\" holds records");
    c.data = put("c.jsonl", "{\n  \"text\": \"one\"\n}\n");
    EXPECT_HAS(again(), "c.jsonl:1: is no JSON object, or cut short: jq -c .");
}

TEST_F(Prepare, FilesCutShortAreNamed) {
    std::string text;
    std::mt19937 random(3);
    for (int i = 0; i < 50000; i++) text += char('a' + random() % 26);
    for (const std::string& packed : PACKED) {
        if (packed.empty()) continue;
        std::string whole = packed == ".gz" ? gzipped(text, dir + "/1") : zstd_of(text),
                    name = "a.txt" + packed;
        for (size_t size : {size_t(0), size_t(1), size_t(12), whole.size() / 2, whole.size() - 1}) {
            c.data = put(name, whole.substr(0, size));
            std::string wrong = again();
            EXPECT_HAS(wrong, name + ": is ");
            EXPECT_EQ(files().count("x.bin"), 0u) << size;
            if (size > 12) {
                EXPECT_HAS(wrong, "cut short");
            }
        }

        // Bytes after the end: zeros are harmless, others are noted for gzip and refused for zstd.
        c.data = put(name, whole + std::string(512, '\0')); // padded to a tape's block
        if (packed == ".gz") {
            EXPECT_EQ(again(), "");
            EXPECT_EQ(says.find("note"), std::string::npos) << says;
            c.data = put(name, whole + "and something else");
            EXPECT_EQ(again(), "");
            EXPECT_HAS(says, "bytes behind its last gzip member are left out");
            EXPECT_EQ(shard(out("x.bin")).size(), text.size() + 1);
            c.data = put(name, whole + "\x1f and something else");
            EXPECT_EQ(again(), "");
            EXPECT_HAS(says, "bytes behind its last gzip member are left out");
        } else {
            EXPECT_HAS(again(), "is no zstd file, or other bytes follow its frames");
        }

        // Damage inside, and a plain text under a packed name.
        std::string broken = whole;
        broken[whole.size() / 2] ^= 64, broken[whole.size() / 2 + 1] ^= 64;
        c.data = put(name, broken);
        EXPECT_HAS(again(), name + ": is damaged in or before byte ");
        c.data = put(name, text);
        EXPECT_HAS(again(), name + ": is no ");
    }
}

TEST_F(Prepare, OneProcessWritesAName) {
    c.data = put("a.txt", "one");
    int lock = -1;
    ASSERT_EQ(lock_file(out("x.lock"), &lock, "?"), "");
    EXPECT_HAS(run(), "x.bin: another process is writing it");
    EXPECT_EQ(files().size(), 1u);
    unlock_file(out("x.lock"), lock);
    put("out/x.lock", ""); // a killed program leaves it
    EXPECT_EQ(run(), "");
    EXPECT_EQ(files().size(), 2u);
}

// nanoGPT's files have no header, and each document in them ends with the token that ends a text.
TEST_F(Prepare, TokensWithoutAHeaderBecomeAShard) {
    t = small_bpe(), c.document_end = -1;
    Tokens expected;
    std::string bytes;
    auto add = [&](int token) { bytes += {char(token & 255), char(token >> 8)}; };
    for (int document = 0; document < 50; document++) {
        expected.push_back(t.eot);
        for (int i = 0; i <= document; i++) add(i * 5), expected.push_back(i * 5);
        add(t.eot);
    }

    c.data = put("train.bin", bytes);
    for (size_t batch : {7, 64, 1 << 20}) {
        limits.batch = batch;
        ASSERT_EQ(again(), "");
        EXPECT_EQ(shard(out("x.bin")), expected);
        EXPECT_EQ(manifest()["documents"], 50);
    }

    c.data = put("train.bin", bytes + "\xff\x7f");
    EXPECT_HAS(again(), "train.bin: token 32767 at position " + std::to_string(bytes.size() / 2) +
                            " is none of the 262 of --tokenizer small");
    c.data = put("odd.bin", "abc");
    EXPECT_HAS(again(), "3 bytes are no tokens of 16 bits");

    c.data = put("train.bin", bytes);
    ASSERT_EQ(again(), "");
    fs::copy(out("x.bin"), path("shard.bin"));
    c.data = path("shard.bin");
    EXPECT_HAS(again(), "is a token shard already: train_gpt --data ");
}

TEST_F(Prepare, NamesThatHideAKindAreRefused) {
    c.data = put("a.txt", gzipped("text", dir + "/1"));
    EXPECT_HAS(run(), "a.txt: is compressed (gzip), which its name does not say");
    c.data = put("a.jsonl", "\xff\xfe{");
    EXPECT_HAS(again(), "a.jsonl: is text in UTF-16");
}

TEST_F(Prepare, WhereAllLinesAreBadTheFirstIsNamed) {
    c.data = put("a.jsonl", "{\"text\": 1}\n{\"text\": 2}\n");
    EXPECT_HAS(run(), "2 of 2 lines are bad");
    EXPECT_HAS(again(), ": " + dir + "/a.jsonl:1: has no string \"text\"");
    c.data = put("b.jsonl", "\n");
    EXPECT_HAS(again(), "b.jsonl: holds no document");
}

// A manifest with a right checksum whose fields say anything.
TEST_F(Prepare, ProgressIsBelievedFieldByField) {
    c.data = put("a.txt", "one and two"), c.shard_tokens = 4;
    ASSERT_EQ(run(), "");
    nlohmann::json good = manifest();
    auto with = [&](const std::function<void(nlohmann::json&)>& change) {
        nlohmann::json j = good;
        change(j);
        j["crc32"] = manifest_crc(j);
        put("out/x.json", manifest_text(j));
        return run();
    };

    EXPECT_EQ(with([](auto&) {}), "");
    const std::string damaged = "is none of prepare_gpt's files or is damaged";
    EXPECT_HAS(with([](auto& j) { j["shards"][0]["file"] = "../x"; }), damaged);
    EXPECT_HAS(with([](auto& j) { j["shards"][0]["file"] = 3; }), damaged);
    EXPECT_HAS(with([](auto& j) { j["shards"][0]["tokens"] = "4"; }), damaged);
    EXPECT_HAS(with([](auto& j) { j["shards"][0] = 4; }), damaged);
    EXPECT_HAS(with([](auto& j) { j["shards"] = 4; }), damaged);
    EXPECT_HAS(with([](auto& j) { j["batch"] = 4; }), damaged);
    EXPECT_HAS(with([](auto& j) { j["batch"] = {{"file", -1}}; }), damaged);
}

// Python imports nothing from the folder in which the program is started.
TEST_F(Prepare, PythonRunsNothingOfTheDatasFolder) {
    std::string evil = "open('" + path("ran") + "', 'w')\n";
    for (const char* name : {"pyarrow.py", "json.py", "download.py", "sitecustomize.py"})
        put(name, evil);

    // Prepare in that folder, with Python's own variables pointing at it.
    fs::path before = fs::current_path();
    fs::current_path(dir);
    for (const char* name : {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"})
        setenv(name, dir.c_str(), 1);
    c.data = put("a.parquet", "PAR1");
    std::string wrong = run();
    for (const char* name : {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"}) unsetenv(name);
    fs::current_path(before);

    EXPECT_NE(wrong, ""); // with pyarrow or without it: the file is no parquet file
    EXPECT_FALSE(fs::exists(path("ran")));
}

TEST_F(Prepare, AFullDiskLeavesNoShardThatLooksWhole) {
    c.data = put("a.txt", std::string(100000, 'x')), c.shard_tokens = 20000;
    pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        rlimit limit = {30000, 30000};
        setrlimit(RLIMIT_FSIZE, &limit);
        std::string wrong = prepare_shards(c, t, PROGRAM_FOLDER);
        bool named =
            wrong.find("x_000000.bin: cannot be written: File too large") != std::string::npos;
        _exit(named ? 0 : 1);
    }

    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);

    // The progress file is left, and goes on when there is room again.
    EXPECT_EQ(files().size(), 1u);
    EXPECT_EQ(files().count("x.progress"), 1u);
    EXPECT_EQ(run(), "");
    EXPECT_EQ(manifest()["tokens"], 100001);
}

// ----------------------------------------------------------------------------
// memory, progress, parquet

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

// The peak of memory is the same for a file that is ten times as large, give or take 32 MiB: two
// batches may be in flight at one peak and one at the other, each with 1 MiB of text and up to as
// many tokens of 4 bytes, and allocators keep some.
TEST_F(Prepare, MemoryDoesNotGrowWithTheInput) {
    if (SANITIZED) GTEST_SKIP() << "skipped: sanitizers keep memory of their own";
    auto peak = [&](const std::string& name, size_t megabytes) { // kB
        std::string piece =
            name == "a.jsonl" ? "{\"text\": \"many words of one document\"}\n" : "words and words ";
        std::string block;
        while (block.size() < 1 << 20) block += piece;
        {
            std::ofstream file(dir + "/" + name, std::ios::binary);
            for (size_t i = 0; i < megabytes; i++) file << block;
        }

        // Prepare it in a child, and ask for the child's peak.
        c.data = dir + "/" + name;
        fs::remove_all(dir + "/out"), fs::create_directories(dir + "/out");
        int status = 0;
        rusage used;
        wait4(prepare_apart(*this), &status, 0, &used);
        EXPECT_EQ(status, 0);
        return used.ru_maxrss;
    };

    // The smaller text, too, has more batches of 1 MiB than are ever in flight.
    long small = peak("a.txt", 20), large = peak("a.txt", 200);
    EXPECT_LT(large, small + 32 * 1024) << small; // although the text is 180 MB longer
    small = peak("a.jsonl", 20), large = peak("a.jsonl", 80);
    EXPECT_LT(large, small + 32 * 1024) << small;
}

TEST_F(Prepare, ProgressIsALineNowAndThen) {
    for (bool live : {false, true}) {
        PrepareProgress p = {1000, 0};
        p.live = live, p.bytes_before = 100, p.start = clock_seconds() - 10;
        p.shown = clock_seconds() - 6;
        testing::internal::CaptureStderr();
        for (int i = 0; i < 100; i++) show_progress(p, 600, 5000000);
        std::string text = testing::internal::GetCapturedStderr();
        EXPECT_EQ(text, std::string(live ? "\r" : "") +
                            "prepare  60.0% | 5.00M tokens | 500.0k tok/s | eta 8s" +
                            (live ? "\033[K" : "\n"));
    }
}

// The script runs on a stand-in for pyarrow, which takes a file's lines for its rows.
TEST_F(Prepare, ParquetComesThroughAChild) {
    fs::create_directories(dir + "/pyarrow");
    put("pyarrow/__init__.py", "class ArrowException(Exception): pass\n");
    put("pyarrow/parquet.py", R"(import json, pyarrow
class ParquetFile:
    def __init__(self, path): self.path, self.schema_arrow = path, self
    names = ["text", "body"]
    def __enter__(self): return self
    def __exit__(self, *e): pass
    def iter_batches(self, batch_size, columns=None):
        self.rows = columns is None
        yield self
    def column(self, i): return self
    def to_pylist(self):
        lines = open(self.path).read().split("|")
        if "broken" in lines: raise pyarrow.ArrowException("broken")
        if self.rows: return [json.loads(l) for l in lines]
        return [None if l == "none" else l for l in lines]
pyarrow.parquet = __import__("sys").modules[__name__]
)");

    // A python3 that finds the stand-in, and that insists on being called with -I.
    fs::create_directories(dir + "/bin");
    put("bin/python3", "#!/bin/sh\n[ \"$1\" = -I ] || exit 9\nshift\nPATH=${PATH#*:}\n"
                       "PYTHONPATH='" + dir + "' exec python3 \"$@\"\n");
    fs::permissions(dir + "/bin/python3", fs::perms::owner_all);
    std::string path = getenv("PATH");
    setenv("PATH", (dir + "/bin:" + path).c_str(), 1);

    std::string name = "it's a \"file\".parquet";
    c.data = put(name, "one|two\nlines|none|\xc3\xa9"), c.field = "body";
    ASSERT_EQ(run(), "");
    Tokens expected = tokens_of("\none\ntwo\nlines\n");
    expected.insert(expected.end(), {0xc3, 0xa9});
    EXPECT_EQ(shard(out("x.bin")), expected);
    EXPECT_EQ(manifest()["documents"], 3);

    // Files and columns that cannot be read, and a machine without pyarrow or Python.
    put(name, "one|broken");
    EXPECT_HAS(again(), name + ": cannot be read; the lines above say why");
    EXPECT_HAS(says, "cannot be read as parquet: broken");
    c.field = "absent";
    EXPECT_HAS(again(), name + ": cannot be read");
    EXPECT_HAS(says, "has no column absent; --field takes: text, body");

    // Conversations are whole rows, without the columns that are missing there.
    c.loss = "sft", c.seq = 64, c.chat_format = "plain";
    std::string row = R"({"prompt": "q", "completion": "a", "messages": null})";
    put(name, row + "|" + row);
    ASSERT_EQ(again(), "") << says;
    EXPECT_HAS(says, "2 documents, 64 tokens in 1 shards");
    c.loss = "lm";
    put("pyarrow/__init__.py", "raise ImportError\n");
    EXPECT_HAS(again(), name + ": parquet files need pyarrow: pip install pyarrow");
    setenv("PATH", dir.c_str(), 1);
    EXPECT_HAS(again(), name + ": parquet files need Python: install python3");
    setenv("PATH", path.c_str(), 1);

    testing::internal::CaptureStdout();
    EXPECT_HAS(prepare_shards(c, t, dir + "/"), "which is not there");
    testing::internal::GetCapturedStdout();
}

// ----------------------------------------------------------------------------
// a tokenizer of one's own

static Tokenizer bytes_alone(const std::string& pattern = "gpt2") {
    Config c;
    Tokenizer t;
    c.train_tokenizer = 257, c.pattern = pattern;
    EXPECT_EQ(begin_tokenizer(&t, c), "");
    return t;
}

// The pieces that are learned from words, in their order.
static std::vector<std::string> learned(const WordCounts& words, size_t merges) {
    Tokenizer t = bytes_alone();
    learn_merges(&t, words, 257 + merges);
    return {t.pieces.begin() + 257, t.pieces.end()};
}
typedef std::vector<std::string> Pieces;

// The answers are worked out by hand: the counts are in the comments.
TEST(Train, TheMostFrequentPairMerges) {
    // aa 4, ab 2; then ab 2 and [aa]a 2, of which ab is smaller; then [aa][ab] 2; then all are 1,
    // and ac, d[aaab], [aaab]d, [aaab][ac] in this order: a < d < the newest
    EXPECT_EQ(learned({{"aaabdaaabac", 1}}, 5), (Pieces{"aa", "ab", "aaab", "ac", "daaab"}));
    // aa 4: "aaa" has two, which overlap; then bc 3; then [aa]a 2
    EXPECT_EQ(learned({{"aaa", 2}, {"bc", 3}}, 3), (Pieces{"aa", "bc", "aaa"}));
    // aa 18; then [aa][aa] 5 and [aa]a 3, whose place [aaaa]a 3 takes
    EXPECT_EQ(learned({{"aaaa", 2}, {"aaaaa", 3}}, 3), (Pieces{"aa", "aaaa", "aaaaa"}));
    // xy 12 leaves yz 2 of its 11; then [xy]z 9, zz 3, yz 2
    EXPECT_EQ(learned({{"xyz", 9}, {"xy", 3}, {"yz", 2}, {"zz", 3}}, 4),
              (Pieces{"xy", "xyz", "zz", "yz"}));
    // no pair is left: [aa]a came and went
    EXPECT_EQ(learned({{"aaaa", 1}, {"c", 7}}, 9), (Pieces{"aa", "aaaa"}));
}

TEST(Train, TiesAreThoseOfHuggingFacesIds) {
    EXPECT_EQ(learned({{"bb", 1}, {"ac", 1}, {"ab", 1}}, 3), (Pieces{"ab", "ac", "bb"}));
    // letters before bytes that have none of their own, which are in the bytes' order; byte 0xad is
    // the last of these and 0xae has itself
    Pieces in_order = {"!x", "~x", "\xa1x", "\xaex", "\xffx", "\nx", " x", "\x7fx", "\xadx"};
    WordCounts words;
    for (const std::string& word : in_order) words[word] = 7;
    EXPECT_EQ(learned(words, in_order.size()), in_order);
    // a merge comes after all bytes, and an earlier merge before a later one
    EXPECT_EQ(learned({{"ab", 9}, {"abx", 1}, {"\xadx", 1}, {"cd", 8}, {"cdx", 1}}, 5),
              (Pieces{"ab", "cd", "\xadx", "abx", "cdx"}));
}

TEST(Train, CountsHave64Bits) {
    // th 4e9, he 3e9, xy 5e8: in 32 bits th and he would be negative, or less than xy
    const int64_t e9 = 1'000'000'000;
    EXPECT_EQ(learned({{"the", 3 * e9}, {"th", e9}, {"xy", e9 / 2}}, 3),
              (Pieces{"th", "the", "xy"}));
    Tokenizer t = bytes_alone();
    EXPECT_EQ(learn_merges(&t, {{"abab", 5 * e9}}, 258), 10 * e9);
}

// A second implementation, which counts all pairs anew for each merge, and stops when none is left.
static Pieces counted_anew(std::vector<std::pair<Tokens, int64_t>>* words, Pieces pieces) {
    while (pieces.size() < 257 + 60) {
        std::map<std::pair<int, int>, int64_t> pairs;
        for (const auto& [w, count] : *words)
            for (size_t i = 0; i + 1 < w.size(); i++) pairs[{w[i], w[i + 1]}] += count;
        if (pairs.empty()) break;
        auto less = [](const auto& a, const auto& b) { return a.second < b.second; };
        auto best = std::max_element(pairs.begin(), pairs.end(), less)->first;

        for (auto& [w, count] : *words)
            for (size_t i = 0; i + 1 < w.size(); i++)
                if (std::pair(w[i], w[i + 1]) == best) {
                    w[i] = int(pieces.size());
                    w.erase(w.begin() + long(i) + 1);
                }
        pieces.push_back(pieces[size_t(best.first)] + pieces[size_t(best.second)]);
    }
    return pieces;
}

TEST(Train, AsCountedAnewEachTime) {
    std::mt19937 random(7);
    for (int round = 0; round < 30; round++) {
        Tokenizer t = bytes_alone();
        WordCounts words;
        for (int i = 0; i < 40; i++) {
            std::string word;
            for (size_t n = 1 + random() % 12; n > 0; n--) word += "aab \n\xc3"[random() % 6];
            words[word] += 1 + int64_t(random() % 3);
        }

        std::vector<std::pair<Tokens, int64_t>> split;
        for (const auto& [word, count] : words) {
            split.push_back({{}, count});
            for (unsigned char b : word) split.back().first.push_back(t.byte_token[b]);
        }
        Pieces pieces = counted_anew(&split, t.pieces);
        int64_t left = 0;
        for (const auto& [w, count] : split) left += count * int64_t(w.size());
        EXPECT_EQ(learn_merges(&t, words, 257 + 60), left) << round;
        EXPECT_EQ(t.pieces, pieces) << round;
    }
}

struct TrainFiles : Prepare {
    void SetUp() override {
        Prepare::SetUp();
        c.prepare = out("own"), c.train_tokenizer = 300, c.pattern = "gpt2";
        limits.batch = 1 << 10;
    }
    std::string train() {
        testing::internal::CaptureStdout(), testing::internal::CaptureStderr();
        std::string wrong = train_tokenizer(c, PROGRAM_FOLDER, limits);
        says = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
        return wrong;
    }
};

// The folder opens as a tokenizer that gives the tokens of the merges and any text back. Threads
// and compression change no byte.
TEST_F(TrainFiles, OpenAndGiveTheTextBack) {
    std::mt19937 random(3);
    std::string text = "low low lower lowest<|endoftext|>new newer\n" + random_text(random, 4000);
    c.data = put("a.txt", text);
    ASSERT_EQ(train(), "");
    EXPECT_HAS(says, "300 tokens from ");
    auto files = folder_bytes(c.prepare);
    EXPECT_EQ(files.size(), 3u);

    Tokenizer own;
    ASSERT_EQ(tokenizer_open(&own, c.prepare), "");
    EXPECT_EQ(own.vocab_size, 300);
    EXPECT_EQ(decode(own, own.eot), "<|endoftext|>");
    EXPECT_EQ(decode(own, encode(own, text, true)), text);
    EXPECT_EQ(encode(own, "<|endoftext|>", true), (Tokens{0}));

    // The merges, applied in their order to a word, give the tokens that encode() finds.
    auto model = nlohmann::json::parse(files["tokenizer.json"])["model"];
    ASSERT_EQ(model["merges"].size(), 300u - 257);
    EXPECT_EQ(model["vocab"]["!"], 1);
    EXPECT_EQ(model["vocab"]["\xc4\xa0"], 1 + 188 + 32); // a space, after 188 letters and 0 to 31
    for (std::string word : {" lowest", " ababab", "newer", "\n\n\n", "\xc3\xa9\xc3\xa9"}) {
        Pieces w;
        for (char b : word) w.push_back(std::string(1, b));
        for (int i = 257; i < 300; i++)
            for (size_t k = 0; k + 1 < w.size(); k++)
                if (w[k] + w[k + 1] == own.pieces[size_t(i)]) {
                    w[k] += w[k + 1];
                    w.erase(w.begin() + long(k) + 1);
                }
        Tokens expected;
        for (const std::string& piece : w) expected.push_back(find_token(own.ids, piece));
        EXPECT_EQ(encode(own, word), expected) << word;
    }

    // tiktoken's file has the same ids.
    std::string ranks;
    for (size_t i = 1; i < 300; i++) ranks += base64(own.pieces[i]) + concat(" ", i, "\n");
    EXPECT_EQ(files["tokenizer.tiktoken"], ranks);

    c.prepare = out("again"), c.threads = 1;
    c.data = put("b.txt.gz", gzipped(text, dir + "/z.gz"));
    ASSERT_EQ(train(), "");
    EXPECT_EQ(folder_bytes(c.prepare), files);
}

// Numbers, newlines after a sign, and the text of a special token, which in JSON lines stays text.
TEST_F(TrainFiles, PatternsCutText) {
    c.data = put("a.jsonl", R"({"text": "12345 12345.\n .\n <|endoftext|>"})" "\n");
    for (auto [pattern, has, lacks] : {std::tuple("gpt2", " 12345", ".\n"),
                                       {"gpt4", ".\n", "1234"}, {"nanochat", "12", "123"}}) {
        c.pattern = pattern, c.prepare = out(pattern);
        ASSERT_EQ(train(), "");
        EXPECT_HAS(says, "no pair is left");
        Tokenizer own;
        ASSERT_EQ(tokenizer_open(&own, c.prepare), "");
        EXPECT_GE(find_token(own.ids, has), 0) << pattern;
        EXPECT_LT(find_token(own.ids, lacks), 0) << pattern;
        EXPECT_GE(find_token(own.ids, "endoftext"), 0) << pattern;
    }
}

TEST_F(TrainFiles, BadCallsAreRefusedBeforeAnyWork) {
    c.data = put("a.txt", "some text");
    c.train_tokenizer = 256;
    EXPECT_HAS(train(), "--train-tokenizer 256: 256 bytes and 1 special tokens are more: give at "
                        "least 257");
    c.train_tokenizer = 300;
    for (auto [list, wrong] :
         {std::pair("word", "may be a word of a text"), {"<a>,<a>", "is there twice"},
          {"<a>,", "may be a word"}, {"<a>,<\xff>", "is no UTF-8"}}) {
        c.add_tokens = list;
        EXPECT_HAS(train(), wrong);
    }
    c.add_tokens = "";
    c.prepare = out("no/where/own");
    EXPECT_HAS(train(), "cannot be made");
    c.prepare = dir;
    EXPECT_HAS(train(), "is there already: choose another name");
    c.prepare = out("own");
    for (auto [name, bytes] :
         {std::pair("empty.txt", ""), {"a.bin", "abcd"}, {"x.jsonl", "{}\n"}}) {
        c.data = put(name, bytes);
        EXPECT_HAS(train(), c.data) << name;
    }
    EXPECT_FALSE(fs::exists(out("own")) || fs::exists(out("own.tmp")));

    // Flags of the other command.
    auto check = [this](std::set<std::string> given) {
        c.given = given;
        return check_training_flags(c);
    };
    EXPECT_EQ(check({"data", "train-tokenizer", "pattern", "add-tokens", "threads"}), "");
    EXPECT_HAS(check({"train-tokenizer", "tokenizer"}), "--tokenizer is for shards");
    c.train_tokenizer = 0;
    EXPECT_EQ(check({"data", "tokenizer", "seq"}), "");
    EXPECT_HAS(check({"data", "pattern"}), "--pattern is for --train-tokenizer SIZE");
}
