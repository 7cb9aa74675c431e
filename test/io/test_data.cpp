// test_data.cpp - windows of tokens from files, and samplers of tokens from logits
//   The tokens of a file are their own positions, so a window tells where it was read.
#include <omp.h>
#include <numeric>
#include <set>
#include "../../llmc/io/dataloader.h"
#include "../../llmc/io/sampler.h"
#include "../harness/testing.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// data

TEST(Permutation, IsABijectionAndEpochsDiffer) {
    // Small sizes: a permutation hits each number once, and other epochs and
    // seeds have other orders.
    for (uint64_t n = 1; n <= 300; n++)
        for (uint64_t seed : {0ull, 1337ull, ~0ull}) {
            std::vector<uint64_t> a(n), b(n), c(n);
            std::vector<char> hit(n);
            for (uint64_t i = 0; i < n; i++) {
                a[i] = permutation(seed, 0, i, n), b[i] = permutation(seed, 1, i, n);
                c[i] = permutation(seed + 1, 0, i, n);
                ASSERT_LT(a[i], n);
                hit[a[i]]++;
            }
            EXPECT_EQ(std::count(hit.begin(), hit.end(), 1), std::ptrdiff_t(n)) << n;
            EXPECT_TRUE(n < 20 || (a != b && a != c && b != c))
                << n; // orders so long do not agree by chance
        }

    // Large sizes, at powers of two and beside them: one number in n stays by chance.
    for (uint64_t n : {65535u, 65536u, 65537u, 1000003u, 1u << 20, (1u << 20) + 1}) {
        std::vector<char> hit(n);
        uint64_t same = 0, in_place = 0;
        for (uint64_t i = 0; i < n; i++) {
            uint64_t x = permutation(5, 2, i, n);
            ASSERT_LT(x, n);
            hit[x]++;
            same += x == permutation(5, 3, i, n), in_place += x == i;
        }
        EXPECT_EQ(std::count(hit.begin(), hit.end(), 1), std::ptrdiff_t(n)) << n;
        EXPECT_LT(same, 20u) << n;
        EXPECT_LT(in_place, 20u) << n;
    }

    // A size beyond 32 bits.
    for (uint64_t i = 0; i < 1000; i++)
        EXPECT_LT(permutation(5, 2, i, (1ull << 40) + 1), (1ull << 40) + 1);
}

static const Tokenizer bytes_tokenizer = {"byte", 256};

// A shard of llm.c. `header` replaces the first words of its header.
static std::string shard(const std::string& name, const std::vector<uint32_t>& tokens, size_t width,
                         std::vector<uint32_t> header = {}) {
    std::string bytes(1024, '\0');
    uint32_t words[3] = {width == 2 ? 20240520u : 20240801u, width == 2 ? 1u : 7u,
                         uint32_t(tokens.size())};
    std::copy(header.begin(), header.end(), words);
    memcpy(bytes.data(), words, sizeof(words));
    for (uint32_t t : tokens) bytes.append(reinterpret_cast<const char*>(&t), width);
    return put_file(scratch(name), bytes);
}

// Tokens that are their own positions, counted from `first`.
static std::vector<uint32_t> positions(uint32_t first, size_t count) {
    std::vector<uint32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

// A text whose bytes are their own positions.
static std::string text_file(const std::string& name, uint32_t first, size_t count) {
    std::string bytes;
    for (uint32_t t : positions(first, count)) bytes += char(t);
    return put_file(scratch(name), bytes);
}

// Open a data set. Returns its refusal, or "".
static std::string open_data(DataLoader* d, const std::string& value, size_t T = 4,
                             size_t V = 1 << 20, Split split = Split::TRAIN, bool own = true) {
    return data_open(d, value, split, own, bytes_tokenizer, T, V, 1);
}
static std::string open_error(const std::string& value, size_t T = 4, size_t V = 1 << 20,
                              Split split = Split::TRAIN, bool own = true) {
    DataLoader d;
    return open_data(&d, value, T, V, split, own);
}

// The first token of each of `count` windows from `first` on, which must hold tokens in order.
static std::vector<int> starts(const DataLoader& d, uint64_t first, size_t count) {
    std::vector<int> out, tokens(d.T), targets(d.T);
    for (uint64_t s = first; s < first + count; s++) {
        EXPECT_EQ(load_window(d, s, tokens.data(), targets.data()), "");
        for (size_t i = 0; i < d.T; i++)
            EXPECT_TRUE(tokens[i] == tokens[0] + int(i) && targets[i] == tokens[i] + 1) << s;
        out.push_back(tokens[0]);
    }
    return out;
}

TEST(Data, EveryWindowOnceAnEpochOverAllKindsOfFiles) {
    // With windows of 4 + 1, 41 tokens make 10 windows, 17 make 4, 4 make none, and 16 make 3.
    std::string value =
        shard("u16.bin", positions(1000, 41), 2) + "," + shard("short.bin", positions(900, 4), 2) +
        "," + text_file("text.txt", 200, 30) + "," + shard("u32.bin", positions(100000, 17), 4) +
        "," + shard("none.bin", {}, 4) + "," + shard("last.bin", positions(5000, 16), 2);
    std::multiset<int> want;
    for (int i = 0; i < 10; i++) want.insert(1000 + 4 * i);
    for (int i = 0; i < 7; i++) want.insert(200 + 4 * i);
    for (int i = 0; i < 4; i++) want.insert(100000 + 4 * i);
    for (int i = 0; i < 3; i++) want.insert(5000 + 4 * i);

    DataLoader d, other, val;
    ASSERT_EQ(data_open(&d, value, Split::TRAIN, true, bytes_tokenizer, 4, 1 << 20, 7), "");
    ASSERT_EQ(data_open(&other, value, Split::TRAIN, true, bytes_tokenizer, 4, 1 << 20, 8), "");
    ASSERT_EQ(data_open(&val, value, Split::VAL, true, bytes_tokenizer, 4, 1 << 20, 7), "");
    ASSERT_EQ(d.windows, 24u);
    EXPECT_EQ(d.tokens, 41u + 4 + 30 + 17 + 0 + 16);
    EXPECT_EQ(data_text(d), "6 files, 108 tokens, 24 windows of 4");

    // Each epoch holds every window once. Ten epochs of two seeds are ten orders.
    std::set<std::vector<int>> orders;
    for (uint64_t epoch : {0ull, 1ull, 2ull, 3ull, 1000000007ull})
        for (const DataLoader* x : {&d, &other}) {
            std::vector<int> order = starts(*x, epoch * 24, 24);
            EXPECT_EQ(std::multiset<int>(order.begin(), order.end()), want) << epoch;
            orders.insert(order);
        }
    EXPECT_EQ(orders.size(), 10u);

    // Validation reads every window in the files' order, each time.
    std::vector<int> first = starts(val, 0, 24);
    EXPECT_EQ(first, starts(val, 24, 24));
    EXPECT_EQ((std::vector<int>(first.begin(), first.begin() + 2)), (std::vector<int>{1000, 1004}));
    EXPECT_EQ((std::vector<int>(first.end() - 2, first.end())), (std::vector<int>{5004, 5008}));
}

// in-order: files by name, windows as they come, and no window that makes no whole step.
TEST(Data, InOrderDropsTheRestOfEachFile) {
    std::string all = "in-order:" + scratch("order_*.bin");
    shard("order_b.bin", positions(500, 41), 2), shard("order_a.bin", positions(100, 30), 2);
    shard("order_c.bin", positions(900, 12), 2);
    DataLoader d;
    auto open = [&](const std::string& files, size_t step) {
        return data_open(&d, files, Split::TRAIN, true, bytes_tokenizer, 4, 1 << 20, 7, nullptr, step);
    };

    // Steps of three windows: two from the first file, three from the second, none from the third.
    ASSERT_EQ(open(all, 3), "");
    std::vector<int> want;
    for (int i = 0; i < 6; i++) want.push_back(100 + 4 * i);
    for (int i = 0; i < 9; i++) want.push_back(500 + 4 * i);
    EXPECT_EQ(starts(d, 0, 15), want);
    EXPECT_EQ(starts(d, 15, 15), want) << "the second epoch";
    EXPECT_HAS(open(all, 11), "the training text has 83 tokens in ");
    EXPECT_HAS(open(all, 11), ": a step takes 45; give more text");
    ASSERT_EQ(open(all.substr(9), 11), "");
    EXPECT_EQ(d.windows, 7u + 10 + 2) << "shuffled, no window is dropped";
}

TEST(Data, TrainingAndValidationShareNoToken) {
    for (size_t n = 20; n <= 260; n += n < 80 ? 1 : 9)
        for (size_t T : {1, 2, 3, 7}) {
            if (n / 10 < T + 1) continue;
            std::string a = shard("a.bin", positions(1000, n), 2),
                        b = shard("b.bin", positions(90000, n + 3), 4);
            std::string value = a + "," + b;

            // Read every window of both parts.
            DataLoader parts[2];
            std::set<int> seen[2];
            for (int p : {0, 1}) {
                Split split = p ? Split::VAL : Split::TRAIN;
                ASSERT_EQ(open_data(&parts[p], value, T, 1 << 20, split, false), "");
                std::vector<int> tokens(T), targets(T);
                for (size_t s = 0; s < parts[p].windows; s++) {
                    ASSERT_EQ(load_window(parts[p], s, tokens.data(), targets.data()), "");
                    seen[p].insert(tokens.begin(), tokens.end()),
                        seen[p].insert(targets.begin(), targets.end());
                }
            }
            for (int t : seen[0])
                ASSERT_FALSE(seen[1].count(t)) << "n " << n << " T " << T << " token " << t;

            // Validation has the last tenth, rounded down, and each part has all windows that fit.
            EXPECT_EQ(*seen[1].begin(), int(1000 + n - n / 10));
            EXPECT_EQ(parts[0].windows, (n - n / 10 - 1) / T + (n + 3 - (n + 3) / 10 - 1) / T);
            EXPECT_EQ(parts[1].windows, (n / 10 - 1) / T + ((n + 3) / 10 - 1) / T);
            EXPECT_EQ(parts[0].tokens + parts[1].tokens, 2 * n + 3);
            for (DataLoader& d : parts)
                for (DataFile& f : d.files)
                    munmap(const_cast<unsigned char*>(f.tokens) - 1024, 1024 + n); // too many files
        }
}

TEST(Data, OwnValidationFilesAreUsedWholeAndMayNotBeTrainedOn) {
    std::string a = text_file("own_a.txt", 0, 50), b = text_file("own_b.txt", 100, 50),
                link = scratch("own_link.txt");
    fs::create_hard_link(a, link);
    DataLoader train, val, same;
    ASSERT_EQ(open_data(&train, a, 7, 256), "");
    ASSERT_EQ(open_data(&val, b, 7, 256, Split::VAL), "");
    ASSERT_EQ(open_data(&same, b + "," + link, 7, 256, Split::VAL), "");

    EXPECT_EQ(train.tokens, 50u);
    EXPECT_EQ(val.tokens, 50u);
    EXPECT_EQ(data_disjoint(train, val), "");
    EXPECT_HAS(data_disjoint(train, same),
               link + " is in --data and in --val"); // although it has another name there
    fs::remove(link);
}

TEST(Data, PatternsAndCommas) {
    // Files in the order of the commas. A pattern's files are in alphabetical order.
    for (int i : {3, 1, 2}) text_file("pattern" + std::to_string(i) + ".txt", uint32_t(10 * i), 9);
    std::string one = text_file("single.txt", 100, 9);
    std::string p1 = scratch("pattern1.txt"), p2 = scratch("pattern2.txt"),
                p3 = scratch("pattern3.txt");
    std::vector<std::string> paths;
    EXPECT_EQ(data_paths(one + "," + scratch("pattern[12].txt") + "," + p3, &paths), "");
    EXPECT_EQ(paths, (std::vector<std::string>{one, p1, p2, p3}));

    DataLoader d;
    ASSERT_EQ(open_data(&d, scratch("pattern*.txt"), 4, 256, Split::VAL), "");
    EXPECT_EQ(starts(d, 0, d.windows), (std::vector<int>{10, 14, 20, 24, 30, 34}));
    EXPECT_HAS(open_error(one + "," + scratch("nothing*.txt")), "nothing*.txt: no file matches");

    // Commas in names are escaped with a backslash.
    EXPECT_EQ(split_paths("a\\,b,c,\\d\\"), (std::vector<std::string>{"a,b", "c", "\\d\\"}));
    EXPECT_EQ(split_paths(escape_commas("a,,b")), (std::vector<std::string>{"a,,b"}));
    std::string comma = text_file("com,ma?.txt", 0, 9); // alone, and among other files
    EXPECT_EQ(open_error(comma), "");
    EXPECT_EQ(open_error(one + "," + escape_commas(comma)), "");
    EXPECT_HAS(open_error(one + "," + comma), "ma?.txt: no file matches");

    // A name that is empty is a shell's variable that is not set.
    for (std::string value : {std::string(), std::string(",,"), one + ",", "," + one})
        EXPECT_HAS(open_error(value), "'" + value + "' has an empty name");
}

// A file that is there twice, by whatever names, would be trained on twice as often as others.
TEST(Data, AFileThatIsNamedTwiceIsRefused) {
    std::string a = text_file("twice_a.txt", 0, 9), b = text_file("twice_b.txt", 20, 9);
    std::string link = scratch("twice_link.txt"), pattern = scratch("twice_*.txt");
    EXPECT_EQ(open_error(a + "," + b), "");
    EXPECT_HAS(open_error(a + "," + b + "," + a), "names " + a + " twice");
    EXPECT_HAS(open_error(pattern + "," + b), "names " + b + " twice");
    fs::create_symlink(a, link);
    EXPECT_HAS(open_error(a + "," + link), "names " + link + " twice");
    fs::remove(link);
}

// Data are known by the sizes of their files and a sample of each.
TEST(Data, FilesThatChangeHaveAnotherIdentity) {
    std::string small = std::string(20000, 'x'), large = std::string(3 << 20, 'y');
    std::string name = scratch("identified");
    auto identity = [&](const std::string& bytes) {
        nlohmann::json list;
        EXPECT_EQ(identify_files(put_file(name, bytes), &list), "");
        EXPECT_EQ(list[0]["file"], name);
        EXPECT_EQ(list[0]["bytes"], bytes.size());
        return list[0]["crc32"].get<uint32_t>();
    };

    // All of a small file counts, of a large one its blocks.
    EXPECT_EQ(identity(small), uint32_t(crc32(0, (const Bytef*)small.data(), 20000)));
    EXPECT_EQ(identity(""), 0u);
    uint32_t before = identity(large);
    for (size_t at : {size_t(0), large.size() / 8 + 5, large.size() / 8 * 7 + 16383}) {
        std::string other = large;
        other[at] = 'z';
        EXPECT_NE(identity(other), before) << at;
    }
    nlohmann::json list;
    EXPECT_HAS(identify_files(scratch("none"), &list), "No such file");
}

// Some editors write a mark before a text in UTF-8.
TEST(Data, AByteOrderMarkIsNoText) {
    std::string name = put_file(scratch("marked.txt"), "\xef\xbb\xbf" "0123456789");
    DataLoader d;
    ASSERT_EQ(open_data(&d, name), "");
    EXPECT_EQ(d.tokens, 10u);
    EXPECT_EQ(token_at(d.files[0], 0), '0');

    // Without its own files, validation is the last tenth of what is left.
    put_file(name, "\xef\xbb\xbf" + std::string(60, 'x') + "0123456789");
    ASSERT_EQ(open_data(&d, name, 4, 256, Split::VAL, false), "");
    EXPECT_EQ(d.tokens, 7u);
    EXPECT_EQ(token_at(d.files[0], 0), '3');
}

// A window of 4 needs 5 tokens.
TEST(Data, FilesShorterThanAWindow) {
    std::string four = text_file("four.txt", 0, 4), five = text_file("five.txt", 10, 5);
    EXPECT_EQ(open_error(four), "the training text has 4 tokens in " + four +
                                    ": a sequence takes 5; give more text or a smaller --seq");
    EXPECT_HAS(open_error(four + "," + text_file("more.txt", 0, 4)),
               "has 8 tokens in " + four + " and others: a sequence takes 5");
    EXPECT_EQ(open_error(four + "," + five), "");
    EXPECT_EQ(open_error(five), "");

    // A tenth of 40 tokens is 4, so a file may be long enough for training and not for validation.
    std::string forty = text_file("forty.txt", 0, 40);
    EXPECT_EQ(open_error(forty, 4, 256, Split::TRAIN, false), "");
    std::string wrong = open_error(forty, 4, 256, Split::VAL, false);
    EXPECT_HAS(wrong, "the validation text has 4 tokens");
    EXPECT_HAS(wrong, "or validation files with --val");
    EXPECT_EQ(open_error(forty, 4, 256, Split::VAL, true), "");

    EXPECT_EQ(open_error(text_file("fifty.txt", 0, 50), 4, 256, Split::VAL, false), "");
    EXPECT_HAS(open_error(shard("no_token.bin", {}, 2)), "has 0 tokens");
}

TEST(Data, RefusesFilesThatAreNotWhatTheySay) {
    EXPECT_HAS(open_error(scratch("absent.txt")), "absent.txt: No such file");
    EXPECT_HAS(open_error(testing::TempDir()), "is no file");
    put_file(scratch("empty.txt"), ""), put_file(scratch("empty.bin"), "");
    EXPECT_HAS(open_error(scratch("empty.txt")), "is empty");
    EXPECT_HAS(open_error(scratch("empty.bin")), "is empty");

    put_file(scratch("small.bin"), std::string(1023, 'x'));
    EXPECT_HAS(open_error(scratch("small.bin")),
               "1023 bytes are no token shard: its header alone has 1024");

    // Headers that contradict themselves or the file's length.
    std::vector<uint32_t> t = positions(0, 20);
    EXPECT_HAS(
        open_error(shard("bad.bin", t, 2, {7})),
        "magic number 7 is not a token shard's (20240520 or 20240801); text files end in .txt");
    EXPECT_HAS(open_error(shard("bad.bin", t, 2, {20240520, 7})),
               "version 7 of magic 20240520 is unknown, only 1 is");
    EXPECT_HAS(open_error(shard("bad.bin", t, 4, {20240801, 1})),
               "version 1 of magic 20240801 is unknown, only 7 is");

    for (uint32_t promised : {0u, 19u, 21u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        std::string says = "promises " + std::to_string(promised) + " tokens of ";
        EXPECT_HAS(open_error(shard("bad.bin", t, 2, {20240520, 1, promised})),
                   says + "2 bytes, the file holds 40");
        EXPECT_HAS(open_error(shard("bad.bin", t, 4, {20240801, 7, promised})),
                   says + "4 bytes, the file holds 80");
    }
    EXPECT_HAS(open_error(shard("bad.bin", t, 2, {20240801, 7})),
               "cut short"); // the header of four-byte tokens

    std::string odd = read_file(shard("odd.bin", t, 2));
    put_file(scratch("odd.bin"), odd + "x");
    EXPECT_HAS(open_error(scratch("odd.bin")), "the file holds 41 bytes");
}

TEST(Data, RefusesTokensBeyondTheVocabulary) {
    std::string text = text_file("vocab.txt", 0, 50);
    EXPECT_HAS(open_error(text, 4, 255), "--tokenizer byte writes 256 tokens, the model has 255");
    EXPECT_EQ(open_error(text, 4, 256), "");

    int tokens[4], targets[4];
    for (size_t width : {2, 4}) {
        // Token 12 ends window 2 as a target, and begins window 3 as an input.
        std::vector<uint32_t> t = positions(0, 29);
        t[12] = width == 2 ? 65535 : 0xffffffff;
        std::string path = shard("beyond.bin", t, width);
        DataLoader d;
        ASSERT_EQ(open_data(&d, path, 4, 100, Split::VAL), ""); // a shard asks for no tokenizer
        for (uint64_t s = 0; s < 7; s++) {
            std::string wrong = load_window(d, s, tokens, targets);
            std::string says = path + ": token " + std::to_string(t[12]) +
                               " at position 12 is beyond the model's vocabulary of 100";
            EXPECT_EQ(wrong.substr(0, says.size()), s == 2 || s == 3 ? says : "");
        }

        EXPECT_HAS(check_tokens(d, 1 << 20), path + ": token " + std::to_string(t[12]) +
                                                 " at position 12 is beyond the model's");
        EXPECT_EQ(check_tokens(d, 12 * width), ""); // looks at the tokens before it only
        EXPECT_NE(check_tokens(d, 13 * width), "");

        // In a held-back part, the position in the message is the file's.
        t = positions(0, 100), t[93] = 300;
        path = shard("beyond2.bin", t, width);
        ASSERT_EQ(open_data(&d, path, 4, 300, Split::VAL, false), "");
        EXPECT_HAS(load_window(d, 0, tokens, targets), "token 300 at position 93");
        EXPECT_HAS(check_tokens(d, 1 << 20), "token 300 at position 93");

        ASSERT_EQ(open_data(&d, path, 4, 301, Split::VAL, false), "");
        EXPECT_EQ(load_window(d, 0, tokens, targets), "");
        EXPECT_EQ(check_tokens(d, 1 << 20), "");
    }
}

// Files of more tokens than a block, with a bad token at either edge of a block.
TEST(Data, TokensAreCheckedToTheLast) {
    for (size_t width : {2, 4})
        for (size_t at : {0, 16383, 16384, 39999}) {
            std::vector<uint32_t> t(40000, 7);
            t[at] = 50;
            DataLoader d;
            ASSERT_EQ(open_data(&d, shard("many.bin", t, width), 4, 50), "");
            EXPECT_HAS(check_tokens(d, 1 << 20),
                       "token 50 at position " + std::to_string(at) + " is beyond");
            d.V = 51;
            EXPECT_EQ(check_tokens(d, 1 << 20), "");
        }
}

// Files that are no text are refused, and text with binary parts is noted.
TEST(Data, NoTextIsRefusedAndBinaryTextNoted) {
    EXPECT_HAS(open_error(put_file(scratch("a.txt"), "\x1f\x8b and so on")),
               "is compressed (gzip)");
    EXPECT_HAS(open_error(put_file(scratch("a.jsonl"), "{\"text\": \"a\"}\n")), "is JSON lines");
    EXPECT_HAS(
        open_error(put_file(scratch("zip.bin"), std::string("PK\3\4") + std::string(2000, 'x'))),
        "is a zip archive");
    EXPECT_HAS(
        open_error(put_file(scratch("nano.bin"), std::string(4000, 'x'))),
        "dev/data/tokenizer.py gpt2, then prepare_gpt " + scratch("nano.shards.bin"));

    DataLoader d;
    std::string name = put_file(scratch("binary.txt"), std::string(100, '\0'));
    ASSERT_EQ(open_data(&d, name), "");
    EXPECT_EQ(data_notes(d), std::vector<std::string>{
                                 name + ": 100 zero bytes and 0 bytes that are not UTF-8 in the "
                                        "first 100: is it text?"});

    ASSERT_EQ(open_data(&d, text_file("plain.txt", 32, 90)), "");
    EXPECT_EQ(data_notes(d).size(), 0u);
}

// doc_start is the position of each token's document, and the last target of a document is ignored.
TEST(Data, DocumentsAreSplitBehindTheirEnds) {
    struct Case {
        std::vector<int> tokens, doc_start, ignored;
    };
    const int END = 9;
    for (Case c : std::vector<Case>{
             {{1, 2, 3, 4}, {0, 0, 0, 0}, {}},              // the middle of a document
             {{1, 2, 9, 4}, {0, 0, 0, 3}, {2}},             // one ends, another begins
             {{9, 1, 2, 9}, {0, 1, 1, 1}, {0, 3}},          // documents end at both ends
             {{9, 9, 9, 1, 1}, {0, 1, 2, 3, 3}, {0, 1, 2}}, // documents without text
             {{9}, {0}, {0}}}) {
        size_t T = c.tokens.size();

        // Without an end token the window is one document.
        std::vector<int> doc_start(T, -7), targets(T, 5), want(T, 5);
        targets[0] = want[0] = -1; // ignored before, and ignored afterwards
        split_documents(doc_start.data(), targets.data(), c.tokens.data(), T, -1);
        EXPECT_EQ(doc_start, std::vector<int>(T, 0));
        EXPECT_EQ(targets, want);

        // With it, each document is by itself.
        split_documents(doc_start.data(), targets.data(), c.tokens.data(), T, END);
        for (int i : c.ignored) want[size_t(i)] = -1;
        EXPECT_EQ(doc_start, c.doc_start);
        EXPECT_EQ(targets, want);
    }
}

// Rows that begin with documents, against a list that is searched from end to end in Python. A
// token is its own position, counted from 1; that which ends a document, but the last, is 0.
TEST(Data, DocumentsArePackedByBestFit) {
    auto packed = [](const std::vector<size_t>& lengths, size_t T, DataLoader* d) {
        std::vector<uint32_t> tokens;
        for (size_t n : lengths) {
            for (size_t i = 1; i < n; i++)
                tokens.push_back(uint32_t(tokens.size() + 1));
            tokens.push_back(0);
        }
        tokens.back() = uint32_t(tokens.size());
        std::string file = shard("packed.bin", tokens, 4);
        EXPECT_EQ(open_data(d, file, T, 1 << 20, Split::VAL), "");
        pack_documents(d, 0);
    };

    // The longest that fits, of two the first, and the shortest when none fits. A row that is not
    // full is dropped.
    DataLoader d;
    packed({4, 7, 3, 12, 5, 2, 6, 3, 1}, 9, &d);
    std::vector<std::vector<int>> rows = {{5, 6, 7, 8, 9, 10, 0, 12, 13, 0},
                                          {34, 35, 36, 37, 38, 0, 1, 2, 3, 0},
                                          {27, 28, 29, 30, 0, 40, 41, 0, 32, 0},
                                          {43, 15, 16, 17, 18, 19, 20, 21, 22, 23}};
    ASSERT_EQ(d.windows, rows.size());
    std::vector<int> tokens(64), targets(64);
    for (size_t i = 0; i < rows.size(); i++) {
        ASSERT_EQ(load_window(d, i, tokens.data(), targets.data()), "");
        for (size_t j = 0; j < 9; j++)
            EXPECT_TRUE(tokens[j] == rows[i][j] && targets[j] == rows[i][j + 1]) << i << " " << j;
    }
    EXPECT_HAS(data_text(d), "which begin with a document; 7% of the tokens are dropped");

    // More documents than are held at a time, some longer than a row.
    std::vector<size_t> lengths;
    for (uint32_t i = 0, x = 1; i < 3000; i++) {
        x = (x * 1103515245 + 12345) & 0x7fffffff;
        lengths.push_back(1 + (x >> 16) % ((x >> 8) % 5 ? 37 : 150));
    }
    packed(lengths, 64, &d);
    EXPECT_EQ(d.windows, 1141u);
    uint64_t sum = 0;
    for (size_t i = 0; i < d.windows; i++) {
        ASSERT_EQ(load_window(d, i, tokens.data(), targets.data()), "");
        for (int t : tokens)
            sum = sum * 31 + uint64_t(t);
        sum = sum * 31 + uint64_t(targets[63]);
    }
    EXPECT_EQ(sum, 15227355237048915404u);
}

TEST(Data, TheTokenThatEndsDocumentsIsKnownOrGiven) {
    std::string gpt2 = shard("gpt2.bin", positions(0, 20), 2),
                llama3 = shard("llama3.bin", positions(0, 20), 4),
                text = text_file("lines.txt", 0, 20);
    auto end_of = [](const DataLoader& d, int given, int eot) {
        Tokenizer tokenizer;
        tokenizer.eot = eot;
        int end = -7;
        std::string wrong = data_document_end(d, tokenizer, given, &end);
        return wrong.empty() ? std::to_string(end) : wrong;
    };
    auto ask = [&](const std::string& files, int given, size_t V, int eot = -1) {
        DataLoader d;
        EXPECT_EQ(open_data(&d, files, 4, V), "");
        return end_of(d, given, eot);
    };

    // Shards have their tokenizer's token, texts the one of the run's tokenizer.
    EXPECT_EQ(ask(gpt2, -1, 50257), "50256");
    EXPECT_EQ(ask(llama3, -1, 128256), "128000");
    EXPECT_EQ(ask(text, -1, 256, 255), "255");
    EXPECT_EQ(ask(text, 10, 256, 255), "10");

    DataLoader tokenized; // a text's tokens are as wide as those of Llama 3's shards
    tokenized.V = 256, tokenized.files.resize(1), tokenized.files[0].width = 4;
    tokenized.files[0].encoded = std::make_shared<std::vector<int>>();
    EXPECT_EQ(end_of(tokenized, -1, 2), "2");
    EXPECT_EQ(ask(gpt2 + "," + llama3, 0, 50257), "0");

    // No token is known, two are, or the model has no such token.
    EXPECT_HAS(ask(text, -1, 256), "--document-end 10");
    EXPECT_HAS(ask(gpt2 + "," + llama3, -1, 128256), "llama3.bin: give files of one kind");
    EXPECT_HAS(ask(gpt2, -1, 50256), "beyond the model's vocabulary of 50256");
    EXPECT_HAS(ask(text, 256, 256), "token 256");
}

TEST(Data, ProjectSourcesAreFoundFromTheProgramsFolder) {
    for (const char* folder : {"/", "/scripts/"}) { // the root, and a folder in it like build/
        std::vector<std::string> found = project_sources(std::string(REPO_ROOT) + folder);
        for (std::string file : {"llmc/ops/memory.h", "test/io/test_data.cpp", "train_gpt.cu"})
            EXPECT_TRUE(std::any_of(found.begin(), found.end(),
                                    [&](const std::string& f) { return f.ends_with("/" + file); }))
                << file << " from " << folder;
    }
    EXPECT_TRUE(project_sources("/no/such/folder/").empty());
}

// ----------------------------------------------------------------------------
// samplers

static std::vector<std::pair<float, int>> order;

static int sample(const std::vector<float>& logits, float temperature, int top_k, float top_p,
                  double u) {
    return sample_token(logits.data(), logits.size(), temperature, top_k, top_p, u, order);
}

// All tokens that some number in [0,1) leads to.
static std::set<int> reachable(const std::vector<float>& logits, float temperature, int top_k,
                               float top_p) {
    std::set<int> out;
    for (int i = 0; i < 20000; i++)
        out.insert(sample(logits, temperature, top_k, top_p, i / 20000.0));
    out.insert(sample(logits, temperature, top_k, top_p, 1 - 0x1p-32));
    return out;
}

typedef std::set<int> Ints;

TEST(Sampler, GreedyTakesTheLowestOfEquals) {
    for (double u : {0.0, 0.5, 1 - 0x1p-32}) {
        EXPECT_EQ(sample({1, 3, 2, 3, 3}, 0, 0, 1, u), 1);
        EXPECT_EQ(sample({1, 3, 2, 3, 3}, 2, 1, 1, u), 1); // top-k 1 is greedy at any temperature
        EXPECT_EQ(sample({1, 3, 2, 3, 3}, 1, 0, 0, u), 1); // and so is top-p 0
        EXPECT_EQ(sample({-5, -5}, 0, 0, 1, u), 0);
        EXPECT_EQ(sample({7}, 1, 0, 1, u), 0);
        EXPECT_EQ(sample({0, -INFINITY, 5}, 0, 3, 0.5, u), 2);
    }
}

TEST(Sampler, TopKKeepsTheLikeliest) {
    std::vector<float> logits = {0.1f, 0.5f, 0.3f, 0.5f, 0.2f, 0.4f};
    EXPECT_EQ(reachable(logits, 1, 2, 1), (Ints{1, 3}));
    EXPECT_EQ(reachable(logits, 1, 3, 1), (Ints{1, 3, 5}));
    EXPECT_EQ(reachable(logits, 1, 4, 1), (Ints{1, 2, 3, 5}));
    for (int k : {0, 6, 7, 1000000})
        EXPECT_EQ(reachable(logits, 1, k, 1), (Ints{0, 1, 2, 3, 4, 5})) << k;
    EXPECT_EQ(reachable({2, 2, 2, 2}, 1, 2, 1), (Ints{0, 1})); // lower tokens first among equals
}

TEST(Sampler, TopPKeepsTheFewestThatReachTheShare) {
    std::vector<float> logits; // 0.0625, 0.5, 0.125, 0.25, 0.0625
    for (float p : {0.0625f, 0.5f, 0.125f, 0.25f, 0.0625f}) logits.push_back(std::log(p));
    EXPECT_EQ(reachable(logits, 1, 0, 0.3f), (Ints{1}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.49f), (Ints{1}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.51f), (Ints{1, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.74f), (Ints{1, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.8f), (Ints{1, 2, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.9f), (Ints{0, 1, 2, 3}));
    EXPECT_EQ(reachable(logits, 1, 0, 0.95f), (Ints{0, 1, 2, 3, 4}));
    EXPECT_EQ(reachable(logits, 1, 0, 1), (Ints{0, 1, 2, 3, 4}));

    // The share counts among the tokens that top-k left: of {0.5, 0.25} the first has two thirds.
    EXPECT_EQ(reachable(logits, 1, 2, 0.6f), (Ints{1}));
    EXPECT_EQ(reachable(logits, 1, 2, 0.7f), (Ints{1, 3}));

    // Temperature comes first. At 2 the probabilities go with their square roots, and the
    // first has 0.34 of all.
    EXPECT_EQ(reachable(logits, 2, 0, 0.4f), (Ints{1, 3}));
}

// A share that is met exactly is reached: of four equal tokens two hold a half, and no third one
// is kept. Equal logits give shares that floats hold exactly.
TEST(Sampler, TopPAtTiesKeepsNoneTooMany) {
    const std::vector<float> four = {2, 2, 2, 2}, eight(8, -1);
    EXPECT_EQ(reachable(four, 1, 0, 0.25f), (Ints{0}));
    EXPECT_EQ(reachable(four, 1, 0, 0.5f), (Ints{0, 1}));
    EXPECT_EQ(reachable(four, 1, 0, 0.75f), (Ints{0, 1, 2}));
    EXPECT_EQ(reachable(four, 3, 0, 0.5f), (Ints{0, 1})); // at any temperature
    EXPECT_EQ(reachable(four, 1, 0, 0), (Ints{0}));
    EXPECT_EQ(reachable(eight, 1, 0, 0.375f), (Ints{0, 1, 2}));
    EXPECT_EQ(reachable(eight, 1, 4, 0.5f), (Ints{0, 1})); // of the four that top-k keeps

    // The likeliest holds exactly half of all: it alone is kept. Then the half is passed.
    const float third = std::log(3.0f);
    EXPECT_EQ(reachable({0, third, 0, 0}, 1, 0, 0.45f), (Ints{1}));
    EXPECT_EQ(reachable({0, third, 0, 0}, 1, 0, 0.55f), (Ints{0, 1}));

    // The distribution that judges guesses keeps the same tokens.
    EXPECT_EQ(token_shares(four.data(), 4, 1, 0, 0.5f, order), (std::vector<double>{0.5, 0.5, 0, 0}));
}

TEST(Sampler, LargeAndImpossibleLogits) {
    EXPECT_EQ(reachable({1e30f, 1e30f, -1e30f}, 1, 0, 1), (Ints{0, 1}));
    EXPECT_EQ(reachable({-1e4f, -1e4f}, 1, 0, 1), (Ints{0, 1})); // less the largest: no 0/0
    EXPECT_EQ(reachable({-INFINITY, 0, -INFINITY}, 1, 0, 1), (Ints{1}));
    EXPECT_EQ(reachable({-INFINITY, 0, -INFINITY}, 1, 2, 0.9f), (Ints{1}));
    EXPECT_EQ(reachable({0, 1}, 1e-6f, 0, 1), (Ints{1}));

    // The logits of a model that has diverged lead to some token of the vocabulary.
    std::vector<float> logits(1000);
    for (size_t i = 0; i < logits.size(); i++)
        logits[i] = i % 7 == 3 ? NAN : i % 11 == 5 ? INFINITY : float(i * 37 % 101);
    for (int k : {0, 40})
        for (float p : {0.9f, 1.0f}) {
            int token = sample(logits, 1, k, p, 0.5);
            EXPECT_TRUE(token >= 0 && token < 1000);
        }
}

TEST(Sampler, FrequenciesFollowTheProbabilities) {
    const int N = 200000;
    std::vector<float> logits = {0.3f, -1.0f, 2.0f, 1.1f, 0.0f, 1.9f, -0.4f, 0.7f};
    struct Case {
        float temperature;
        int top_k;
        float top_p;
        size_t kept;
    };
    std::vector<Case> cases = {{1, 0, 1, 8}, {0.5f, 0, 1, 8}, {3, 0, 1, 8},
                               {1, 4, 1, 4}, {1, 0, 0.7f, 3}, {2, 6, 0.8f, 5}};
    for (Case c : cases) {
        // Want: the probabilities of the tokens that are kept.
        std::vector<std::pair<double, int>> p; // the likeliest first
        for (size_t v = 0; v < 8; v++)
            p.push_back({-std::exp(double(logits[v]) / c.temperature), int(v)});
        std::sort(p.begin(), p.end());
        std::map<int, double> expected;
        double sum = 0;
        for (size_t i = 0; i < c.kept; i++) expected[p[i].second] = -p[i].first, sum -= p[i].first;

        // Draw, and compare by chi-square. 7 degrees of freedom exceed 24.3 once in 1000 seeds.
        std::map<int, int> hits;
        for (int i = 0; i < N; i++) {
            double u = uniform(11, fnv1a("draws"), uint64_t(i));
            hits[sample(logits, c.temperature, c.top_k, c.top_p, u)]++;
        }

        double chi2 = 0;
        for (auto [token, weight] : expected) {
            double want = N * weight / sum;
            chi2 += (hits[token] - want) * (hits[token] - want) / want;
        }
        EXPECT_EQ(hits.size(), c.kept) << c.temperature << " " << c.top_k << " " << c.top_p;
        EXPECT_LT(chi2, 24.3) << c.temperature << " " << c.top_k << " "
                              << c.top_p;
    }
}
