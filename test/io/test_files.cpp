// test_files.cpp - files that belie their names: pipes, devices, deep JSON, escape sequences
#include <sys/stat.h>
#include "../../llmc/family.h"
#include "../../llmc/io/huggingface.h"
#include "../../llmc/io/logger.h"
#include "../../llmc/io/manifest.h"
#include "../../llmc/io/prepare.h"
#include "../harness/testing.h"

using namespace llmc;
using nlohmann::json;

struct Files : Scratch {};

// ----------------------------------------------------------------------------
// what a message shows

TEST(Text, NoControlCharacterReachesATerminal) {
    EXPECT_EQ(printable("caf\xc3\xa9 and \xf0\x9f\x98\x80"), "caf\xc3\xa9 and \xf0\x9f\x98\x80");
    EXPECT_EQ(printable("a\tb\nc"), "a\\tb\\nc");
    EXPECT_EQ(printable("\x1b[2J\x7f"), "\\x1b[2J\\x7f");
    EXPECT_EQ(printable(std::string_view("\0x", 2)), "\\x00x");
    EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b"); // U+009B begins an escape sequence
    EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");
    EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
    EXPECT_EQ(in_quotes("say \"x\\\""), "\"say \\\"x\\\\\\\"\"");
    EXPECT_EQ(in_quotes(std::string(90, 'a')), "\"" + std::string(80, 'a') + "\"...");
}

TEST(Json, BracketsOutsideOfStringsCount) {
    EXPECT_EQ(json_depth(""), 0u);
    EXPECT_EQ(json_depth("{\"a\": [1, [2]], \"b\": {}}"), 3u);
    EXPECT_EQ(json_depth("{\"[[[[\": \"\\\"[[\"}"), 1u);
    EXPECT_EQ(json_depth("]]]][["), 2u);
}

// Anything but a shallow object is answered with one sentence.
TEST(Json, WhatIsNoShallowObjectIsASentence) {
    json j;
    auto wrong = [&](const std::string& text) { return parse_json(text, "x.json", &j); };
    EXPECT_EQ(wrong("{\"a\": 1}"), "");
    EXPECT_EQ(j["a"], 1);
    for (const char* text : {"", "[]", "3", "null", "{\"a\": ", "\xff\xfe{", "{\"a\": \"\xff\"}"})
        EXPECT_EQ(wrong(text), "x.json: is no JSON object, or cut short: get it again") << text;
    std::string deep = "{\"a\": " + std::string(300000, '[') + std::string(300000, ']') + "}";
    EXPECT_HAS(wrong(deep), "x.json: is nested more than 100 brackets deep");
    EXPECT_TRUE(j.is_null());
    EXPECT_EQ(json_word(json::array()), "[]");
    EXPECT_EQ(json_word("\x1b[2J"), "\"\\x1b[2J\"");
}

// ----------------------------------------------------------------------------
// what is no file

// The alarm ends a reader that waits for a pipe.
TEST_F(Files, PipesAndDevicesAreRefusedAtOnce) {
    alarm(20);
    const std::string pipe = path("pipe");
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    std::string bytes;
    size_t size;
    uint32_t crc;
    SafeTensors s;
    DataFile data;
    data.path = pipe;

    EXPECT_EQ(read_whole_file(pipe, &bytes), pipe + ": is no file but a pipe");
    EXPECT_EQ(file_crc(pipe, &size, &crc), pipe + ": is no file but a pipe");
    EXPECT_EQ(safetensors_open(&s, pipe), pipe + ": is no file but a pipe");
    EXPECT_EQ(map_data_file(&data), pipe + ": is no file but a pipe");
    EXPECT_EQ(read_whole_file("/dev/zero", &bytes), "/dev/zero: is no file but a device");
    EXPECT_EQ(read_whole_file(dir, &bytes), dir + ": is no file but a folder");

    // Folders in which every file is a pipe.
    for (const char* name : {"config.json", "tokenizer.json", "model.safetensors",
                             "model.safetensors.index.json", "manifest.json"})
        ASSERT_EQ(mkfifo(path(name).c_str(), 0600), 0);
    Shape shape;
    Tokenizer tokenizer;
    HfFiles weights;
    json manifest;
    EXPECT_HAS(hf_read_config(&shape, dir), "config.json: is no file but a pipe");
    EXPECT_HAS(tokenizer_open(&tokenizer, dir), "tokenizer.json: is no file but a pipe");
    EXPECT_HAS(hf_open_files(&weights, dir), "model.safetensors: is no file but a pipe");
    EXPECT_HAS(read_manifest(dir, &manifest), "manifest.json: is no file but a pipe");
    fs::remove(path("model.safetensors"));
    EXPECT_HAS(hf_open_files(&weights, dir), "index.json: is no file but a pipe");
    alarm(0);
}

TEST_F(Files, ConfigsOfAbsurdSizesAreRefusedAtOnce) {
    auto wrong = [&](const json& layers) {
        json j = {{"model_type", "gpt2"}, {"n_embd", 12},     {"n_head", 3},
                  {"n_layer", layers},    {"vocab_size", 7}, {"n_positions", 9}};
        put("config.json", j.dump());
        Shape s;
        return hf_read_config(&s, dir);
    };
    EXPECT_EQ(wrong(1024), "");
    EXPECT_HAS(wrong(1025), "1025 layers, up to 48 wide: models of up to 1024 layers");
    put("config.json", "{\"model_type\": \"\\u001b[2J\"}");
    Shape s;
    EXPECT_HAS(hf_read_config(&s, dir), "model_type '\\x1b[2J' is not supported");

    for (const Preset& p : model_presets()) EXPECT_LE(p.shape.L, 1024u) << p.name;
}

// ----------------------------------------------------------------------------
// a file that is cut while it is mapped

static volatile unsigned sum; // uses the bytes that are read, so that the reads happen

// Map a file, cut it, and read it. `unmapped`: as if nobody had, for the signal's handler.
static void read_cut_file(const std::string& path, bool unmapped) {
    void* begin = nullptr;
    size_t bytes = 0;
    struct stat s;
    if (!map_whole_file(path, &begin, &bytes, &s).empty()) _exit(9);
    if (truncate(path.c_str(), 10) != 0) _exit(9);
    if (unmapped)
        for (MappedFile& m : mapped_files) m.begin = nullptr;
    for (size_t i = 0; i < bytes; i++) sum = sum + static_cast<unsigned char*>(begin)[i];
    _exit(0);
}

TEST_F(Files, AFileCutWhileItIsReadIsNamed) {
    std::string name = put("cut\x1b.bin", std::string(100000, 'x'));
    EXPECT_EXIT(read_cut_file(name, false), testing::ExitedWithCode(1),
                ": error: .*cut.x1b.bin: was cut while it was read.*--resume goes on");
    put("cut\x1b.bin", std::string(100000, 'x'));
    EXPECT_EXIT(read_cut_file(name, true), testing::KilledBySignal(SIGBUS), "");
}

TEST_F(Files, MappingsComeAndGo) {
    struct stat s;
    for (int i = 0; i < 5000; i++) { // more often than the table has rows
        void* begin = nullptr;
        size_t bytes = 0;
        ASSERT_EQ(map_whole_file(i ? path("a") : put("a", "abc"), &begin, &bytes, &s), "");
        ASSERT_EQ(bytes, 3u);
        ASSERT_EQ(memcmp(begin, "abc", 3), 0);
        unmap_file(begin, bytes);
    }
    for (const MappedFile& m : mapped_files) EXPECT_EQ(m.begin.load(), nullptr);

    void* begin = nullptr;
    size_t bytes = 0;
    EXPECT_HAS(map_whole_file(put("empty", ""), &begin, &bytes, &s), "empty: is empty");
}

// ----------------------------------------------------------------------------
// locks

TEST_F(Files, ALockHoldsUntilItIsGivenBack) {
    int first = -1, second = -1;
    std::string name = path("x.lock");
    EXPECT_EQ(lock_file(name, &first, "taken"), "");
    EXPECT_EQ(lock_file(name, &second, "taken"), "taken");
    EXPECT_EQ(second, -1);

    unlock_file(name, first);
    EXPECT_FALSE(fs::exists(name));
    put("x.lock", ""); // a killed program leaves its lock file
    EXPECT_EQ(lock_file(name, &second, "taken"), "");
    unlock_file(name, second);
    EXPECT_HAS(lock_file(path("none/x.lock"), &first, "taken"), "x.lock: cannot be made");
}

// ----------------------------------------------------------------------------
// what is no text

// Files are known by their first bytes and by their names. The message offers a command.
TEST(FileKind, NoTextIsToldByItsBytesAndByItsName) {
    using namespace std::string_literals;
    auto says = [](const std::string& path, const std::string& head) {
        return no_text(path, head, "byte");
    };
    for (const char* path : {"a.txt", "README.md", "Makefile", "x.csv", "data"})
        EXPECT_EQ(says(path, "{\"text\": \"as good a text as any\"}"), "") << path;
    EXPECT_EQ(says("a.txt", ""), "");
    EXPECT_EQ(says("a.txt", "\xef\xbb\xbfwith UTF-8's mark"), "");

    EXPECT_HAS(says("a.txt", "\x1f\x8b\x08"), "a.txt: is compressed (gzip)");
    EXPECT_HAS(says("a.txt", "\x1f\x8b\x08"), "give it a name that ends in .txt.gz");
    EXPECT_HAS(says("a.bin", "\x28\xb5\x2f\xfd"), "a.bin: is compressed (zstd)");
    EXPECT_HAS(says("a", "PAR1"), "a: is a parquet file");
    EXPECT_HAS(says("a", "\x7f\x45LF"), "a: is a program (ELF)");
    EXPECT_HAS(says("a", "PK\3\4"), "a: is a zip archive");
    EXPECT_HAS(says("a.txt", "\xff\xfe" "a\0"s), "iconv -f UTF-16 -t UTF-8 a.txt > a.txt.utf8.txt");
    EXPECT_HAS(says("a.txt", "\xfe\xff"), "UTF-16");
    EXPECT_HAS(says("a.txt", "\xff\xfe\0\0"s), "iconv -f UTF-32");
    EXPECT_HAS(says("a.txt", "\0\0\xfe\xff"s), "UTF-32");
    EXPECT_HAS(says("a.json", "[1]"), "a.json: records are JSON objects, one a line: give .jsonl: "
                                      "jq -c '.[]' a.json > LINES.jsonl");
    EXPECT_HAS(says("a.gz", "plain"), "give it a name that ends in .txt.gz");

    // The command that makes shards of the file.
    EXPECT_HAS(says("d/a.jsonl", "{}"), "prepare_gpt d/a.shards.bin --data d/a.jsonl "
                                        "--document-end 10 makes shards of it");
    EXPECT_HAS(no_text("a b.txt.gz", "\x1f\x8b", "data/gpt2"),
               "prepare_gpt 'a b.shards.bin' --data 'a b.txt.gz' --tokenizer data/gpt2");
    EXPECT_HAS(says("a.jsonl.zst", "x"), "prepare_gpt a.shards.bin --data a.jsonl.zst");
    EXPECT_HAS(says("a.parquet", "PAR1"), "prepare_gpt a.shards.bin --data a.parquet");

    EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
    EXPECT_EQ(shell_word(""), "''");
}

// A line that is no record says what it is instead, and what makes lines of it.
TEST(JsonLines, ThatAreNoneSayWhatMakesSome) {
    auto wrong = [](const std::string& line) {
        nlohmann::json j;
        return parse_record(line, &j);
    };
    EXPECT_EQ(wrong("{\"a\": [1]}"), "");
    EXPECT_EQ(wrong("\xef\xbb\xbf{}"), "");
    for (const char* line : {"[{\"a\": 1}, {\"a\": 2}]", " [", "\xef\xbb\xbf[{\"a\": 1},"})
        EXPECT_HAS(wrong(line), "begins an array: jq -c '.[]'");
    EXPECT_HAS(wrong("{"), "or cut short: jq -c . writes each on one line");
    EXPECT_HAS(wrong("{\"a\": \"caf\xe9\"}"), "is no JSON object in UTF-8: iconv");
    EXPECT_EQ(wrong("\"a\""), "is no JSON object");
    EXPECT_HAS(wrong("{\"a\": " + std::string(100000, '[')), "is no JSON object");

    // An object may hold the records. Messages are none, and a line with its keys is one itself.
    auto with = [](const char* text, const char* says) {
        return with_records(says, nlohmann::json::parse(text));
    };
    EXPECT_HAS(with(R"({"version": 1, "data": [{"text": "a"}]})", "has no string"),
               "has no string; its \"data\" holds records: jq -c '.[]|arrays[]'");
    EXPECT_EQ(with(R"({"data": [{"text": "a"}]})", "message 1 is"), "message 1 is");
    EXPECT_EQ(with(R"({"messages": [{"role": "user"}]})", "has no string"), "has no string");
    EXPECT_EQ(with(R"({"data": [1], "more": []})", "has no string"), "has no string");
    EXPECT_EQ(json_word(nlohmann::json::parse("[1, [2]]")), "[1,[2]]");
    EXPECT_EQ(json_word(std::vector<int>(99, 7)).size(), 83u);
}

TEST(FileKind, BinaryTextIsNoted) {
    using namespace std::string_literals;
    EXPECT_EQ(binary_note("a", ""), "");
    EXPECT_EQ(binary_note("a", "plain caf\xc3\xa9"), "");
    EXPECT_EQ(binary_note("a", std::string(100, 'x') + "\xe9"), ""); // a single Latin-1 letter
    EXPECT_EQ(binary_note("a", std::string(10, 'x') + "\xf0\x9f\x98"), ""); // a letter that is cut
    EXPECT_HAS(binary_note("a", std::string(50, 'x') + "\xe9 caf"),
               "a: 0 zero bytes and 1 bytes that are not UTF-8 in the first 55: is it text?");
    EXPECT_HAS(binary_note("a", std::string(500, 'x') + "\0"s),
               "1 zero bytes and 0 bytes that are not UTF-8 in the first 501");
}

// A log may hold lines that other programs wrote.
TEST_F(Files, LinesOfALogThatAreNoStepsAreDropped) {
    Logger log;
    put("log.jsonl",
        "{\"step\": 3}\n{\"step\": \"x\"}\n{\"step\": [1]}\n{\"note\": 1}\n{\"step\": 9}\n");
    EXPECT_EQ(log_open(log, path("log.jsonl"), 5, json::object()), "");
    EXPECT_EQ(read_file(path("log.jsonl")), "{\"step\": 3}\n{\"note\": 1}\n");
}

// ----------------------------------------------------------------------------
// a manifest with a right checksum, made by somebody else

// A manifest with every field that is required.
static json good_manifest() {
    return {{"format", CHECKPOINT_FORMAT},
            {"step", 3},
            {"cursor", 4},
            {"seed", 5},
            {"model", json::object()},
            {"optimizer", "adamw"},
            {"optimizer_step", 3},
            {"precision", "fp32"},
            {"threads", 2},
            {"cpu", "any"},
            {"files",
             {{{"file", "rank_00000.safetensors"},
               {"bytes", 10},
               {"crc32", 7},
               {"tp", 2},
               {"tp_rank", 1},
               {"tensors", {{"param.x", {0, 5}}}}}}}};
}

TEST_F(Files, ManifestsAreBelievedFieldByField) {
    auto wrong = [&](const std::function<void(json&)>& change) {
        json m = good_manifest();
        change(m);
        m["crc32"] = manifest_crc(m);
        put("manifest.json", manifest_text(m));
        json read;
        return read_manifest(dir, &read);
    };
    auto file = [&](const char* key, const json& value) {
        return wrong([&](json& m) { m["files"][0][key] = value; });
    };
    ASSERT_EQ(wrong([](json&) {}), "");

    // Files lie in the folder and have the names of ranks' files.
    for (const char* name :
         {"../rank_00000.safetensors", "/etc/passwd", "..", "", "a/rank_00000.safetensors",
          "rank_00000.safetensors/..", "rank_0.safetensors", "rank_-0001.safetensors",
          "manifest.json"})
        EXPECT_HAS(file("file", name), "which is no name of a rank's file") << name;
    EXPECT_EQ(file("file", "rank_123456.safetensors"), "");

    // Numbers have ranges.
    for (const json& tp : {json(0), json(-1), json(1000001), json(4294967296), json(UINT64_MAX)})
        EXPECT_HAS(file("tp", tp), "tp is " + tp.dump() + ", not a whole number from 1 to 1000000");
    EXPECT_HAS(file("tp_rank", 2), "tp_rank is 2, not a whole number from 0 to 1");
    EXPECT_HAS(file("crc32", 4294967296), "crc32 is 4294967296");
    for (const char* key : {"step", "optimizer_step", "cursor", "seed", "threads"})
        for (const json& bad : {json(-1), json(0.5), json("1"), json()})
            EXPECT_HAS(wrong([&](json& m) { m[key] = bad; }),
                       std::string("manifest.json is broken: ") + key + " is");

    // Fields have types.
    EXPECT_HAS(wrong([](json& m) { m["cpu"] = 3; }), "cpu is missing, or no string");
    EXPECT_HAS(wrong([](json& m) { m["files"] = json::object(); }),
               "files is missing, or no array");
    EXPECT_HAS(wrong([](json& m) { m["files"] = {3}; }), "an entry of files is no object");
    EXPECT_HAS(wrong([](json& m) { m["files"][0]["tensors"]["x"] = {1}; }),
               "the range of tensor x is not two positions");

    // Fields that may be missing.
    EXPECT_EQ(wrong([](json& m) { m["best_step"] = 2, m["best_loss"] = 1.5, m["tokens"] = 9; }),
              "");
    EXPECT_EQ(wrong([](json& m) { m["config"] = {{"lr", 0.1}}; }), "");
    EXPECT_HAS(wrong([](json& m) { m["config"] = 3; }), "config is 3");
    EXPECT_HAS(wrong([](json& m) { m["best_step"] = "x", m["best_loss"] = 1; }), "best_step is");
    EXPECT_HAS(wrong([](json& m) { m["best_step"] = 2; }), "best_loss is missing");
    EXPECT_HAS(wrong([](json& m) { m["best_step"] = 2, m["best_loss"] = "low"; }), "best_loss");
    EXPECT_HAS(wrong([](json& m) { m["tokens"] = -1; }), "tokens is -1");

    // So many brackets would end the stack of a reader that prints them.
    put("manifest.json", "{\"x\": " + std::string(300000, '[') + std::string(300000, ']') + "}");
    json read;
    EXPECT_HAS(read_manifest(dir, &read), "nested more than 100 brackets deep");
}

// More ranks than heads: a program that divides by a rank's heads would divide by zero.
TEST(TensorParallel, RanksShareHeads) {
    Shape s = llama_shape(2, 4, 2, 16, 20, 61, 32, 10000);
    for (size_t tp : {1, 2, 4}) EXPECT_TRUE(tp_divides(s, tp)) << tp;
    for (size_t tp : {3, 8, 1000000}) EXPECT_FALSE(tp_divides(s, tp)) << tp;
    s.F = 18; // 4 ranks cannot share it
    EXPECT_FALSE(tp_divides(s, 4));
}
