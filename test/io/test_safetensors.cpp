// test_safetensors.cpp - safetensors files: written and read back, malformed headers refused
//   A write that fails leaves the older file as it was.
#include <signal.h>
#include <sys/resource.h>
#include <chrono>
#include "../../llmc/io/safetensors.h"
#include "../harness/testing.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// safetensors

static std::string bytes_of(uint64_t n) { return {reinterpret_cast<const char*>(&n), 8}; }
static std::string whole(const std::string& header, size_t body) {
    return bytes_of(header.size()) + header + std::string(body, '\1');
}

// Write the bytes and open them. A refused file must leave nothing open.
static std::string open_bytes(const std::string& bytes) {
    put_file(scratch("bytes.safetensors"), bytes);
    SafeTensors s;
    std::string wrong = safetensors_open(&s, scratch("bytes.safetensors"));
    EXPECT_TRUE(wrong.empty() || (s.map == nullptr && s.tensors.empty()));
    safetensors_close(&s);
    return wrong;
}

// One tensor's entry in a header.
static std::string entry(const std::string& name, const std::string& dtype,
                         const std::string& shape, const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
}

TEST(SafeTensors, WhatIsWrittenIsReadBack) {
    std::string path = scratch("written.safetensors");
    std::vector<float> f(15);
    for (size_t i = 0; i < f.size(); i++) f[i] = 1.5f - 0.25f * float(i);
    std::vector<double> doubles = {1e-3, -2e5, 1e300, -INFINITY, 0x1p-149};
    uint16_t half[15], brain[15];
    float_to_type(half, f.data(), 15, Type::F16), float_to_type(brain, f.data(), 15, Type::BF16);
    std::map<std::string, std::string> metadata = {
        {"format", "pt"}, {"a \"quoted\"\nline", "\xc3\xa9 \\ \t"}, {"", ""}};
    std::vector<TensorSpec> specs = {
        {"z.weight", Type::F32, {3, 5}},       {"scalar", Type::F32, {}},
        {"a \"b\"\xc3\xa9", Type::BF16, {15}}, {"empty", Type::F32, {0, 4}},
        {"half", Type::F16, {5, 1, 3}},        {"doubles", Type::F64, {5}}};

    // Write the tensors in pieces of any size. The name appears only when the file is whole.
    FileWriter w;
    ASSERT_EQ(writer_open(&w, path, specs, metadata), "");
    EXPECT_FALSE(fs::exists(path));
    writer_put(w, f.data(), 60), writer_put(w, f.data(), 4);
    writer_put(w, brain, 7),
        writer_put(w, reinterpret_cast<char*>(brain) + 7, 23);
    writer_put(w, nullptr, 0), writer_put(w, half, 30), writer_put(w, doubles.data(), 40);
    ASSERT_EQ(writer_close(&w), "");
    EXPECT_FALSE(fs::exists(path + ".tmp"));

    // The writer's length and checksum are the file's.
    std::string bytes = read_file(path);
    EXPECT_EQ(w.bytes, bytes.size());
    EXPECT_EQ(w.crc,
              uint32_t(crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), uInt(bytes.size()))));
    uint64_t header;
    memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0u); // the data begins at a multiple of 8

    // Read each tensor whole and in parts.
    SafeTensors s;
    ASSERT_EQ(safetensors_open(&s, path), "");
    EXPECT_EQ(s.metadata, metadata);
    EXPECT_EQ(s.tensors.size(), specs.size());
    for (const TensorSpec& t : specs) {
        const SafeTensor* found = safetensors_find(s, t.name);
        ASSERT_NE(found, nullptr) << t.name;
        EXPECT_EQ(found->dtype, type_name(t.type));
        EXPECT_EQ(found->shape, t.shape);
        EXPECT_EQ(found->bytes, t.bytes());
        EXPECT_EQ(found->elements() * type_bytes(t.type), t.bytes());
        std::vector<float> out(found->elements(), -9);
        tensor_to_float(out.data(), *found, 0, out.size());
        for (size_t i = 0; i < out.size(); i++)
            EXPECT_EQ(out[i], t.type == Type::F64 ? float(doubles[i]) : f[i]) << t.name << " " << i;
        for (size_t first : {1, 4}) {
            if (out.size() < 5) continue;
            float part = -9;
            tensor_to_float(&part, *found, first, 1);
            EXPECT_EQ(part, out[first]);
        }
    }

    for (const char* name : {"", "z.weigh", "z.weights", "zz", "__metadata__"})
        EXPECT_EQ(safetensors_find(s, name), nullptr) << name;
    safetensors_close(&s);
    safetensors_close(&s); // a second time is harmless
}

TEST(SafeTensors, AFileOfNothingIsWhole) {
    FileWriter w;
    ASSERT_EQ(writer_open(&w, scratch("nothing.safetensors"), {}, {}), "");
    ASSERT_EQ(writer_close(&w), "");
    SafeTensors s;
    EXPECT_EQ(safetensors_open(&s, scratch("nothing.safetensors")), "");
    EXPECT_TRUE(s.tensors.empty());
    safetensors_close(&s);
}

TEST(SafeTensors, TensorsMayComeInAnyOrderAndBeUnaligned) {
    std::string b = entry("b", "F32", "[1]", "[3,7]"), a = entry("a", "U8", "[3]", "[0,3]");
    EXPECT_EQ(open_bytes(whole("{" + b + "," + a + "}  ", 7)), "");
    EXPECT_EQ(open_bytes(whole("{" + entry("a", "F64", "[0]", "[0,0]") + "}", 0)), "");
    for (const char* dtype :
         {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}) {
        std::string n = std::to_string(3 * dtype_bytes(dtype));
        std::string header = std::string("{") + entry("a", dtype, "[3]", "[0," + n + "]") + "}";
        EXPECT_EQ(open_bytes(whole(header, 3 * dtype_bytes(dtype))), "");
    }
}

// Headers that are wrong in one way each, with part of the message. The message is one line.
TEST(SafeTensors, RefusesEveryMalformedHeader) {
    const std::string good = entry("a", "F32", "[2]", "[0,8]");
    ASSERT_EQ(open_bytes(whole("{" + good + "}", 8)), "");
    struct Case {
        std::string header;
        size_t body;
        const char* wrong;
    };

    // Numbers that overflow, and brackets that would end the stack of a reader that recurses.
    std::string huge = "18446744073709551615", big = "4294967296", deep(300000, '['),
                closed(300000, ']');

    for (const Case& c : std::vector<Case>{
             {"", 0, "no JSON object"},
             {"{", 0, "no JSON object"},
             {"{" + good, 8, "no JSON object"},
             {"{\"\xff\":1}", 0, "no JSON object"}, // not UTF-8
             {"{\"a\":1e999}", 0, "no JSON object"},
             {"[]", 0, "no JSON object"},
             {"7", 0, "no JSON object"},
             {deep, 0, "no JSON object"},
             {deep + closed, 0, "no JSON object"},
             {"{" + good + "," + good + "}", 8, "names something twice"},
             {"{" + good + "," + entry("a", "F32", "[1]", "[8,12]") + "}", 12, "names something twice"},
             {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
              8, "names something twice"},
             {"{\"a\":3}", 0, "tensor a has no dtype, shape and data_offsets"},
             {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "has no dtype, shape"},
             {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "has no dtype, shape"},
             {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has no dtype, shape"},
             {"{\"a\":{\"dtype\":32,\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
              "dtype that is no text"},
             {"{" + entry("a", "F33", "[2]", "[0,8]") + "}", 8, "unknown dtype F33"},
             {"{" + entry("a", "F32", "2", "[0,8]") + "}", 8, "shape that is no list"},
             {"{" + entry("a", "F32", "[2.0]", "[0,8]") + "}", 8, "shape with 2.0"},
             {"{" + entry("a", "F32", "[-2,-1]", "[0,8]") + "}", 8, "shape with -2"},
             {"{" + entry("a", "F32", "[[2]]", "[0,8]") + "}", 8, "which is no size"},
             {"{" + entry("a", "F32", "[" + deep + closed + "]", "[0,8]") + "}", 8,
              "which is no size"},
             {"{" + entry("a", "F32", "[18446744073709551616]", "[0,8]") + "}", 8,
              "which is no size"},
             {"{" + entry("a", "F32", "[" + big + "," + big + "]", "[0,0]") + "}", 0,
              "shape too large"},
             {"{" + entry("a", "F32", "[" + huge + ",2]", "[0,8]") + "}", 8, "shape too large"},
             {"{" + entry("a", "F32", "[4611686018427387904]", "[0,0]") + "}", 0,
              "need more than there are"},
             {"{" + entry("a", "F32", "[4611686018427387906]", "[0,8]") + "}", 8,
              "need more than there are"},
             {"{" + entry("a", "F32", "[3]", "[0,8]") + "}", 8,
              "has 8 bytes, its shape and dtype F32 need 12"},
             {"{" + entry("a", "F32", "[1]", "[0,8]") + "}", 8,
              "has 8 bytes, its shape and dtype F32 need 4"},
             {"{" + entry("a", "F32", "[]", "[0,8]") + "}", 8, "need 4"},
             {"{" + entry("a", "F32", "[0]", "[0,8]") + "}", 8, "need 0"},
             {"{" + entry("a", "F32", "[2]", "8") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[0,8,8]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[-8,0]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[0.0,8.0]") + "}", 8, "are not two positions"},
             {"{" + entry("a", "F32", "[2]", "[8,0]") + "}", 8, "lies at 8 to 0 of 8"},
             {"{" + entry("a", "F32", "[2]", "[0,8]") + "}", 7, "lies at 0 to 8 of 7 bytes"},
             {"{" + entry("a", "F32", "[2]", "[8,16]") + "}", 8, "lies at 8 to 16 of 8"},
             {"{" + entry("a", "F32", "[2]", "[18446744073709551608," + huge + "]") + "}", 8,
              "lies at"},
             {"{" + entry("a", "F32", "[2]", "[0," + huge + "]") + "}", 8, "lies at"},
             {"{" + good + "," + entry("b", "F32", "[2]", "[4,12]") + "}", 12,
              "two tensors overlap at byte 4"},
             {"{" + good + "," + entry("b", "F32", "[2]", "[0,8]") + "}", 8,
              "two tensors overlap at byte 0"},
             {"{" + good + "," + entry("b", "F32", "[2]", "[12,20]") + "}", 20,
              "bytes 8 to 12 of the data belong to no tensor"},
             {"{" + entry("a", "F32", "[2]", "[4,12]") + "}", 12,
              "bytes 0 to 4 of the data belong to no tensor"},
             {"{" + good + "}", 9, "the tensors end at byte 8 of 9"},
             {"{}", 1, "the tensors end at byte 0 of 1"},
         }) {
        std::string wrong = open_bytes(whole(c.header, c.body));
        EXPECT_HAS(wrong, c.wrong) << c.header.substr(0, 200);
        EXPECT_EQ(wrong.find('\n'), std::string::npos);
    }
}

// A header of 100,000 names takes ten times as long as one of 10,000, not a hundred times.
TEST(SafeTensors, TheTimeOfAHeaderIsLinear) {
    auto seconds = [](int names) {
        std::string header = "{";
        for (int i = 0; i < names; i++)
            header += (i ? "," : "") + entry("x" + std::to_string(i), "F32", "[0]", "[0,0]");
        std::string bytes = whole(header + "}", 0);
        auto start = std::chrono::steady_clock::now();
        EXPECT_EQ(open_bytes(bytes), "");
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    double few = std::min({seconds(10000), seconds(10000), seconds(10000)});
    EXPECT_LT(seconds(100000), 40 * few);
}

// Values that a file's type cannot hold: an infinity is refused, and what becomes zero is said.
TEST(SafeTensors, ValuesThatATypeCannotHoldAreCounted) {
    auto write = [](std::vector<float> values, Type type, std::string* said) {
        FileWriter w;
        EXPECT_EQ(writer_open(&w, scratch("narrow.safetensors"), {{"a", type, {values.size()}}},
                              {}), "");
        writer_put(w, values, type);

        // Closing says what is lost.
        testing::internal::CaptureStdout();
        std::string wrong = writer_close(&w);
        *said = testing::internal::GetCapturedStdout();
        return wrong;
    };
    std::string said;
    EXPECT_EQ(write({65519, 1e-7f, 0}, Type::F16, &said), "");
    EXPECT_EQ(said, "");
    EXPECT_EQ(write({1, 1e-8f, -1e-9f, 0}, Type::F16, &said), "");
    EXPECT_EQ(said, "--export: 2 values are too small for this type, and 0 in it\n");
    EXPECT_HAS(write({65520, -1e6f, 1}, Type::F16, &said), "2 values are infinite in this type");
    EXPECT_EQ(write({65520, -1e6f, 1e-8f}, Type::BF16, &said), "");
    EXPECT_EQ(said, "");
    EXPECT_HAS(write({3.4e38f}, Type::BF16, &said), "1 values are infinite in this type");
    for (float bad : {INFINITY, NAN})
        EXPECT_HAS(write({bad, 1}, Type::F32, &said), "or were no numbers before");
}

TEST(SafeTensors, RefusesLengthsThatDoNotFit) {
    std::string good = whole("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 8);
    for (size_t n = 0; n < good.size(); n++)
        EXPECT_NE(open_bytes(good.substr(0, n)), "") << n; // cut at any byte
    EXPECT_NE(open_bytes(good + "x"), "");
    EXPECT_HAS(open_bytes(good.substr(0, 5)), "is 5 bytes long, too short");
    EXPECT_HAS(open_bytes(good.substr(0, 30)), "truncated, or no safetensors file");

    // Lengths of the header that reach beyond the file.
    for (uint64_t length : {good.size() - 7, good.size(), 1ul << 32, 1ul << 63, ~0ul, ~7ul})
        EXPECT_HAS(open_bytes(bytes_of(length) + good.substr(8)),
                   "said to take " + std::to_string(length) + " bytes");

    SafeTensors s;
    EXPECT_HAS(safetensors_open(&s, scratch("absent.safetensors")), "No such file");
    EXPECT_HAS(safetensors_open(&s, testing::TempDir()), "is no file but a folder");
    EXPECT_HAS(open_bytes(""), "is empty");
}

TEST(SafeTensors, MetadataIsText) {
    put_file(scratch("meta.safetensors"),
             whole("{\"__metadata__\":{\"a\":\"b\",\"n\":7,\"l\":[\"c\"]}}", 0));
    SafeTensors s;
    ASSERT_EQ(safetensors_open(&s, scratch("meta.safetensors")), "");
    EXPECT_EQ(s.metadata,
              (std::map<std::string, std::string>{{"a", "b"}})); // anything but text is left out
    safetensors_close(&s);
    for (const char* value : {"null", "7", "[]", "[1,2]", "{}", "true"}) // odd and harmless
        EXPECT_EQ(open_bytes(whole(std::string("{\"__metadata__\":") + value + "}", 0)), "")
            << value;
}

// Write `bytes` of data where the header promises 64 KB. Returns the message.
static std::string write_over(const std::string& path, size_t bytes) {
    FileWriter w;
    std::vector<float> data(16384, 1.0f);
    writer_open(&w, path, {{"a", Type::F32, {16384}}}, {});
    writer_put(w, data.data(), bytes);
    return writer_close(&w);
}

static void expect_untouched(const std::string& path) {
    EXPECT_FALSE(fs::exists(fs::symlink_status(path + ".tmp")));
    EXPECT_EQ(read_file(path), "old");
}

TEST(SafeTensors, AFailedWriteLeavesTheOldFile) {
    std::string path = scratch("old.safetensors");
    put_file(path, "old");

    // Fewer bytes than promised, and more.
    EXPECT_HAS(write_over(path, 65532), "bytes written, the header promises");
    expect_untouched(path);
    FileWriter w;
    writer_open(&w, path, {}, {});
    writer_put(w, "12345678", 8);
    EXPECT_HAS(writer_close(&w), "24 bytes written, the header promises 16");
    expect_untouched(path);

    // A limit on the length of files ends the write in the data, in the header, and
    // in the header's length.
    rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    auto handler = signal(SIGXFSZ, SIG_IGN);
    for (size_t limit : {40000, 12, 4, 0}) {
        small = before, small.rlim_cur = limit;
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
        std::string wrong = write_over(path, 65536);
        setrlimit(RLIMIT_FSIZE, &before); // before anything is printed, which would fail too
        EXPECT_HAS(wrong, path + ": cannot be written: File too large") << limit;
        expect_untouched(path);
    }
    signal(SIGXFSZ, handler);

    // A full disk.
    fs::create_symlink("/dev/full", path + ".tmp");
    EXPECT_HAS(write_over(path, 65536), path + ": cannot be written: No space left");
    expect_untouched(path);

    // Without a fault the write succeeds.
    EXPECT_EQ(write_over(path, 65536), "");
    SafeTensors s;
    EXPECT_EQ(safetensors_open(&s, path), "");
    safetensors_close(&s);
}

TEST(SafeTensors, AFolderThatCannotBeWritten) {
    EXPECT_HAS(write_over(scratch("no/folder/x.safetensors"), 65536),
               "cannot be written: No such file");
    put_file(scratch("file"), "old");
    EXPECT_HAS(write_over(scratch("file/x.safetensors"), 65536),
               "cannot be written: Not a directory");
    EXPECT_EQ(read_file(scratch("file")), "old");
    EXPECT_HAS(write_over("/proc/self/x.safetensors", 65536),
               "cannot be written"); // not even root may write there

    // The final name is a folder.
    fs::create_directories(scratch("taken.safetensors/inside"));
    EXPECT_HAS(write_over(scratch("taken.safetensors"), 65536), "cannot be renamed");
    EXPECT_FALSE(fs::exists(scratch("taken.safetensors.tmp")));
    EXPECT_TRUE(fs::exists(scratch("taken.safetensors/inside")));

    // A folder without permission to write. Root may write there all the same.
    fs::create_directories(scratch("locked"));
    std::string path = scratch("locked/old.safetensors");
    put_file(path, "old");
    fs::permissions(scratch("locked"), fs::perms::owner_read | fs::perms::owner_exec);
    std::string wrong = geteuid() == 0 ? "Permission denied"
                                       : write_over(path, 65536);
    EXPECT_HAS(wrong, "Permission denied");
    fs::permissions(scratch("locked"), fs::perms::owner_all);
    expect_untouched(path);

    EXPECT_EQ(sync_folder(folder_of(path)), "");
    EXPECT_HAS(sync_folder(scratch("absent")), "No such file");
    EXPECT_EQ(folder_of("x.safetensors"), ".");
}

TEST(SafeTensors, TextThatIsNotUtf8IsWrittenWithoutAThrow) {
    std::string path = scratch("latin1.safetensors");
    FileWriter w;
    EXPECT_NO_THROW(writer_open(&w, path, {}, {{"data", "caf\xe9.txt"}}));
    EXPECT_EQ(writer_close(&w), "");
    SafeTensors s;
    EXPECT_EQ(safetensors_open(&s, path), "");
    EXPECT_EQ(s.metadata["data"], "caf\xef\xbf\xbd.txt"); // the replacement character
    safetensors_close(&s);
}
