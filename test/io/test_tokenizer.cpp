// test_tokenizer.cpp - tokenizers of every kind of file: known answers, round trips, bad files
//   The files are written here, with answers worked out by hand, by a second implementation of BPE
//   on strings, or by trying all cuts of a word. Where the fixtures are at hand, so are the texts
//   and tokens that llama.cpp publishes for GPT-2, Llama 2 and Llama 3.
#include <ctime>
#include <map>
#include <random>
#include <thread>
#include "../../llmc/io/dataloader.h"
#include "../../llmc/io/tokenizer_files.h"
#include "../harness/testing.h"

using namespace llmc;

using nlohmann::json;
typedef std::vector<int> Tokens;
typedef std::vector<std::string> Texts;

static std::string put(const std::string& name, const std::string& bytes) {
    return put_file(scratch(name), bytes);
}

static Tokenizer opened(const std::string& path) {
    Tokenizer t;
    EXPECT_EQ(tokenizer_open(&t, path), "");
    return t;
}

// The text of each token.
static Texts pieces(const Tokenizer& t, const std::string& text, bool special = false) {
    Texts out;
    for (int token : encode(t, text, special)) out.push_back(decode(t, token));
    return out;
}

static std::string random_text(std::mt19937& random, const Texts& parts, size_t count) {
    std::string text;
    for (size_t i = 0; i < count; i++) text += parts[random() % parts.size()];
    return text;
}

// ----------------------------------------------------------------------------
// writing files

// GPT-2's letter for a byte, by the rule and not by the reader's table.
static std::string letter(int b) {
    static const Texts letters = [] {
        Texts of(256);
        int next = 256;
        for (int i = 0; i < 256; i++) {
            bool itself = (i >= '!' && i <= '~') || (i >= 0xa1 && i <= 0xac) || i >= 0xae;
            int c = itself ? i : next++;
            of[size_t(i)] = c < 0x80 ? std::string(1, char(c))
                                     : std::string{char(0xc0 | c >> 6), char(0x80 | (c & 0x3f))};
        }
        return of;
    }();
    return letters[size_t(b)];
}

static std::string letters(const std::string& bytes) {
    std::string text;
    for (unsigned char c : bytes) text += letter(c);
    return text;
}

// A byte-level tokenizer: the tokens 0 to 255 are bytes, and each merge has the next token.
struct ByteLevel {
    std::vector<std::pair<std::string, std::string>> merges;
    Texts pieces() const {
        Texts out;
        for (int b = 0; b < 256; b++) out.push_back(std::string(1, char(b)));
        for (const auto& [a, b] : merges) out.push_back(a + b);
        return out;
    }
    json vocabulary() const {
        json v;
        for (const std::string& piece : pieces()) v[letters(piece)] = v.size();
        return v;
    }
};

// GPT-2's pair of files. Returns their folder.
static std::string put_gpt2(const std::string& folder, const ByteLevel& b) {
    std::string lines = "#version: 0.2\n";
    for (const auto& [l, r] : b.merges) lines += letters(l) + " " + letters(r) + "\n";
    json vocabulary = b.vocabulary();
    vocabulary["<|endoftext|>"] = vocabulary.size();
    put(folder + "/encoder.json", vocabulary.dump());
    return fs::path(put(folder + "/vocab.bpe", lines)).parent_path();
}

// A tokenizer.json. pairs: merges as lists of two, the newer form.
static json tokenizer_json(const ByteLevel& b, bool pairs = false) {
    json merges = json::array();
    for (const auto& [l, r] : b.merges)
        pairs ? merges.push_back({letters(l), letters(r)})
              : merges.push_back(letters(l) + " " + letters(r));
    return {{"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
            {"post_processor", nullptr},
            {"added_tokens",
             {{{"id", 256 + b.merges.size()}, {"content", "<|endoftext|>"}, {"special", true}}}},
            {"model", {{"type", "BPE"}, {"vocab", b.vocabulary()}, {"merges", merges}}}};
}

static std::string put_json(const json& j, const std::string& name = "tokenizer.json") {
    return put(name, j.dump());
}

static std::string put_tiktoken(const std::string& name, const ByteLevel& b) {
    std::string lines;
    size_t rank = 0;
    for (const std::string& piece : b.pieces())
        lines += base64(piece) + " " + std::to_string(rank++) + "\n";
    return put(name, lines);
}

// protobuf: a varint, and a field of each kind.
static std::string varint(uint64_t x) {
    std::string out;
    for (; x >= 0x80; x >>= 7) out += char(x | 0x80);
    return out + char(x);
}
static std::string field(int number, uint64_t value) {
    return varint(uint64_t(number) << 3) + varint(value);
}
static std::string field(int number, const std::string& bytes) {
    return varint(uint64_t(number) << 3 | 2) + varint(bytes.size()) + bytes;
}
static std::string field(int number, float value) {
    return varint(uint64_t(number) << 3 | 5) + std::string((const char*)&value, 4);
}

struct Piece {
    std::string text; // "_" stands for U+2581
    float score = 0;
    int type = NORMAL;
};
// A SentencePiece model: its pieces, and what it does with spaces.
struct SentencePiece {
    std::vector<Piece> pieces;
    int model = 2; // 1 unigram, 2 BPE
    bool prefix = true, remove_extra = false, defaults = false;
};
static const std::string META = "\xe2\x96\x81";

static std::string model_bytes(const SentencePiece& s) {
    std::string file;
    for (const Piece& p : s.pieces)
        file += field(1, field(1, replace_all(p.text, "_", META)) + field(2, p.score) +
                             field(3, uint64_t(p.type)));
    file += field(2, field(3, uint64_t(s.model)) + field(41, uint64_t(1)));
    std::string spaces = field(3, uint64_t(s.prefix)) + field(4, uint64_t(s.remove_extra));
    return file + field(3, field(1, std::string("identity")) + (s.defaults ? "" : spaces));
}

// The unknown piece, the two controls, the bytes if asked for, and then the rest.
static std::vector<Piece> with_controls(std::vector<Piece> rest, bool bytes) {
    std::vector<Piece> all = {{"<unk>", 0, UNKNOWN}, {"<s>", 0, CONTROL}, {"</s>", 0, CONTROL}};
    char name[8];
    for (int b = 0; bytes && b < 256; b++)
        snprintf(name, sizeof(name), "<0x%02X>", b), all.push_back({name, 0, BYTE_PIECE});
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
}

// The same pieces in llama2.c's form.
static std::string bin_bytes(const std::vector<Piece>& pieces) {
    auto number = [](auto x) { return std::string((const char*)&x, 4); };
    std::string file;
    size_t longest = 0;
    for (const Piece& p : pieces) {
        std::string text = replace_all(p.text, "_", " ");
        if (p.type == CONTROL) text = "\n" + text + "\n";
        file += number(p.score) + number(int(text.size())) + text;
        longest = std::max(longest, text.size());
    }
    return number(int(longest)) + file;
}

// ----------------------------------------------------------------------------
// bytes

TEST(Tokenizer, BytesThereAndBack) {
    Tokenizer t = opened("byte");
    EXPECT_EQ(t.vocab_size, 256);
    std::string all, back;
    for (int i = 0; i < 256; i++) all += char(i);
    Tokens tokens = encode(t, all);
    for (int i = 0; i < 256; i++) EXPECT_EQ(tokens[size_t(i)], i);
    for (int token : tokens) back += decode(t, token);
    EXPECT_EQ(back, all);
    EXPECT_EQ(decode(t, tokens), all);
}

TEST(Tokenizer, Utf8Length) {
    struct Case {
        const char* text;
        size_t length;
    };

    // The bounds of each length. 0: the bytes begin no character.
    for (const Case& c : std::vector<Case>{{"a", 1},
                                           {"\x7f", 1},
                                           {"\x80", 0},
                                           {"\xc1\xbf", 0}, // longer than it need be
                                           {"\xc2\x80", 2},
                                           {"\xdf\xbf", 2},
                                           {"\xdf", 0}, // cut short
                                           {"\xe0\x9f\xbf", 0},
                                           {"\xe0\xa0\x80", 3},
                                           {"\xed\x9f\xbf", 3},
                                           {"\xed\xa0\x80", 0}, // a surrogate
                                           {"\xef\xbf\xbf", 3},
                                           {"\xe1\x80\x7f", 0},
                                           {"\xe1\x80\xc0", 0},
                                           {"\xf0\x8f\xbf\xbf", 0},
                                           {"\xf0\x90\x80\x80", 4},
                                           {"\xf4\x8f\xbf\xbf", 4},
                                           {"\xf4\x90\x80\x80", 0}, // above U+10FFFF
                                           {"\xf5\x80\x80\x80", 0},
                                           {"\xf0\x90\x80", 0}})
        EXPECT_EQ(utf8_length(c.text), c.length) << c.text;
    EXPECT_EQ(utf8_length(std::string_view("\xc3\xa9", 1)), 0u); // the view ends after one byte
}

// ----------------------------------------------------------------------------
// byte-level BPE

static const ByteLevel HELLO = {{{"l", "l"},     // 256
                                 {"h", "e"},     // 257
                                 {"he", "ll"},   // 258
                                 {"hell", "o"},  // 259
                                 {" ", "w"},     // 260
                                 {"o", "r"},     // 261
                                 {" w", "or"},   // 262
                                 {"a", "a"},     // 263
                                 {"aa", "aa"}}}; // 264

TEST(Bpe, TheLowestRankMergesFirstAndOfEqualsTheLeftmost) {
    Tokenizer t = opened(put_gpt2("hello", HELLO));
    EXPECT_EQ(t.vocab_size, 266);
    EXPECT_EQ(t.eot, 265);
    EXPECT_EQ(t.bos, -1);

    EXPECT_EQ(encode(t, "hello world"), (Tokens{259, 262, 'l', 'd'}));
    EXPECT_EQ(encode(t, "hellll"), (Tokens{258, 256}));
    EXPECT_EQ(encode(t, "lll"), (Tokens{256, 'l'})); // the two on the left
    EXPECT_EQ(encode(t, "aaaaaaa"), (Tokens{264, 263, 'a'}));
    EXPECT_EQ(encode(t, "o r"), (Tokens{'o', ' ', 'r'})); // two words: no merge crosses the cut

    EXPECT_EQ(encode(t, ""), Tokens());
    EXPECT_EQ(decode(t, encode(t, "hello world")), "hello world");
    EXPECT_EQ(decode(t, 262), " wor");
    EXPECT_EQ(decode(t, -1) + decode(t, 266), "");
}

// A pair that a neighbouring merge has changed takes its new rank: bc, then (bc)d before a(bc).
TEST(Bpe, AMergeOfANeighbourChangesTheRank) {
    ByteLevel b = {{{"b", "c"}, {"a", "b"}, {"bc", "d"}, {"a", "bc"}}};
    Tokenizer t = opened(put_gpt2("ranks", b));
    EXPECT_EQ(encode(t, "abcd"), (Tokens{'a', 258}));
    EXPECT_EQ(encode(t, "abc"), Tokens{259});
}

// BPE on strings, by definition: among all neighbours merge the first pair of the lowest
// rank, and start again.
static Tokens slow_bpe(const ByteLevel& b, const std::string& word) {
    std::map<std::pair<std::string, std::string>, size_t> rank;
    for (size_t i = 0; i < b.merges.size(); i++) rank.insert({b.merges[i], i});

    Texts parts;
    for (char c : word) parts.push_back(std::string(1, c));
    for (;;) {
        size_t best = b.merges.size(), at = 0;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            auto found = rank.find({parts[i], parts[i + 1]});
            if (found != rank.end() && found->second < best) best = found->second, at = i;
        }
        if (best == b.merges.size()) break;
        parts[at] += parts[at + 1];
        parts.erase(parts.begin() + long(at) + 1);
    }

    // Find the tokens of the parts.
    Texts all = b.pieces();
    Tokens tokens;
    for (const std::string& part : parts)
        tokens.push_back(int(std::find(all.begin(), all.end(), part) - all.begin()));
    return tokens;
}

// Merges of pieces drawn at random, each result once.
static ByteLevel random_merges(std::mt19937& random, const std::string& alphabet, size_t count) {
    ByteLevel b;
    Texts known;
    for (char c : alphabet) known.push_back(std::string(1, c));
    while (b.merges.size() < count) {
        std::string l = known[random() % known.size()], r = known[random() % known.size()];
        if (l.size() + r.size() > 12 || std::count(known.begin(), known.end(), l + r)) continue;
        b.merges.push_back({l, r});
        known.push_back(l + r);
    }
    return b;
}

TEST(Bpe, AgreesWithBpeOnStrings) {
    std::mt19937 random(1);
    for (int trial = 0; trial < 20; trial++) {
        ByteLevel b = random_merges(random, "abc", 40);
        Tokenizer t = opened(put_gpt2("random", b));
        for (size_t length : {1, 2, 3, 5, 17, 60, 300}) {
            std::string word = random_text(random, {"a", "b", "c"}, length);
            EXPECT_EQ(encode(t, word), slow_bpe(b, word)) << word;
        }
    }
}

TEST(Bpe, AMergeMayBeginLikeAComment) {
    Tokenizer t = opened(put_gpt2("hash", {{{"#", "#"}, {"##", "#"}}}));
    EXPECT_EQ(encode(t, "###"), Tokens{257});
}

// tiktoken's files have ranks and no merges. Two neighbours merge if together they are a piece,
// whatever pieces they are themselves.
TEST(Bpe, RanksMergeWhateverTogetherIsAPiece) {
    ByteLevel b = {{{"a", "b"}, {"b", "c"}, {"ab", "c"}}}; // 256, 257, 258
    Tokenizer t = opened(put_tiktoken("small.r50k_base.tiktoken", b));
    EXPECT_EQ(encode(t, "xabc"), (Tokens{'x', 258}));

    b = {{{"b", "c"}, {"a", "b"}, {"ab", "c"}}};
    t = opened(put_tiktoken("small.r50k_base.tiktoken", b));
    EXPECT_EQ(encode(t, "xabc"), (Tokens{'x', 258})); // bc first, then a and bc
    EXPECT_EQ(encode(opened(put_gpt2("pairs", b)), "xabc"),
              (Tokens{'x', 'a', 256})); // the pair a and bc is no merge here

    t = opened(put_tiktoken("small.r50k_base.tiktoken", {{{"ab", "c"}}}));
    EXPECT_EQ(encode(t, "abc"), Tokens{256}); // a whole word is a piece, and no merges lead to it
    EXPECT_EQ(encode(t, "abcd"), (Tokens{'a', 'b', 'c', 'd'}));
}

TEST(Bpe, OneTokenizerInEveryFormOfFile) {
    std::mt19937 random(2);
    ByteLevel b = random_merges(random, "ab c", 60);
    // A space only begins a word: drop merges with a space inside, and then the merges whose
    // parts have gone.
    for (auto& [l, r] : b.merges)
        if ((l + r).find(' ', 1) != std::string::npos) l = l + r, r = "";
    std::erase_if(b.merges, [](const auto& m) { return m.second.empty(); });
    auto whole = [&](const std::pair<std::string, std::string>& m) {
        Texts all = b.pieces();
        return std::count(all.begin(), all.end(), m.first) &&
               std::count(all.begin(), all.end(), m.second);
    };
    for (size_t before = 0; before != b.merges.size();)
        before = b.merges.size(), std::erase_if(b.merges, [&](const auto& m) { return !whole(m); });
    ASSERT_GT(b.merges.size(), 20u);

    // The same tokenizer as GPT-2's pair, in both forms of tokenizer.json, and as a folder.
    std::vector<Tokenizer> all = {
        opened(put_gpt2("forms", b)),
        opened(put_json(tokenizer_json(b))),
        opened(put_json(tokenizer_json(b, true), "pairs/tokenizer.json")),
        opened(fs::path(scratch("pairs/x")).parent_path()),
    };

    for (int i = 0; i < 50; i++) {
        std::string text =
            random_text(random, {"a", "b", "c", " ", "  ", "\n", "7", "!", "\xc3\xa9"}, 200);
        Tokens expected = encode(all[0], text);
        for (const Tokenizer& t : all) {
            EXPECT_EQ(encode(t, text), expected);
            EXPECT_EQ(decode(t, expected), text);
            EXPECT_EQ(t.vocab_size, all[0].vocab_size);
            EXPECT_EQ(find_token(t.special, "<|endoftext|>"), all[0].eot);
        }
    }
}

// Pair by pair a megabyte would take an hour.
TEST(Bpe, AMegabyteOfOneLetterIsMergedToo) {
    Tokenizer t = opened(put_gpt2("hello", HELLO));
    EXPECT_EQ(encode(t, std::string(1 << 20, 'a')), Tokens(1 << 18, 264));
    std::mt19937 random(3);
    std::string letters = random_text(random, {"a", "h", "e", "l", "o"}, 1 << 20);
    EXPECT_EQ(decode(t, encode(t, letters)), letters);
}

// ----------------------------------------------------------------------------
// words: how a text is cut before its pieces merge

// Check how a pre-tokenizer cuts a text. With ignore_merges a word that is a piece is one token.
// All expected words are pieces, so each of them is one token exactly if the cuts are right.

static void splits(json pre_tokenizer, const Texts& words) {
    json j = tokenizer_json({});
    std::string text;
    for (const std::string& word : words) {
        text += word;
        json& vocabulary = j["model"]["vocab"];
        size_t next = vocabulary.size() + 1;
        if (!vocabulary.contains(letters(word))) vocabulary[letters(word)] = next;
    }

    j["model"]["ignore_merges"] = true;
    j["pre_tokenizer"] = pre_tokenizer;
    EXPECT_EQ(pieces(opened(put_json(j)), text), words) << text;
}

static json split_regex(const std::string& pattern) {
    return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
}

TEST(Words, Gpt2) {
    json gpt2 = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
    splits(gpt2, {"I", "'ll", " go", " there", "'s", " 12", "\xc3\xa9", "?!", "\n \t", " x", "  "});
    splits(gpt2, {"a", "   ", " b", "\n\n", "\n", "c"}); // the last space belongs to the word
    splits(gpt2, {"caf\xc3\xa9", " \xe4\xb8\xad\xe6\x96\x87", "\xc2\xbd", "\xe2\x82\xac"});
    splits(gpt2, {"I", "'", "LL"}); // in capitals it is no contraction

    // U+2003 is white space. U+180E has not been white space since Unicode 6.3.
    splits(gpt2, {"a", "\xe2\x80\x83", "b"});
    splits(gpt2, {"a", "\xe1\xa0\x8e!", "b"});
    splits(gpt2, {"a", " ", " \xe1\xa0\x8e", "b"});
}

TEST(Words, Cl100kAndO200k) {
    splits(split_regex(CL100K_PATTERN),
           {"I", "'LL", " go", "123", "45", "(x", "()\n\n", "b", "  \n", " ", " c"});
    splits(split_regex(O200K_PATTERN), {"Hello", "World's", " XMLHttp", "123", "4", " //\n", "x",
                                        "A\xc3\x89"
                                        "b"});
}

TEST(Words, DigitsSequenceAndLiterals) {
    json gpt2 = {{"type", "ByteLevel"}}, digits = {{"type", "Digits"}, {"individual_digits", true}};
    json together = {{"type", "Digits"}, {"individual_digits", false}};
    json plain = {{"type", "ByteLevel"}, {"use_regex", false}};
    auto sequence = [](json a, json b) {
        return json{{"type", "Sequence"}, {"pretokenizers", {a, b}}};
    };

    splits(sequence(digits, gpt2), {"in", " ", "1", "9", "9", "x", " y"});
    splits(sequence(together, gpt2), {"in", " ", "199", "x"});
    splits(sequence(split_regex(R"(\p{N}{1,3})"), plain), {"in ", "199", "5", "x y"});
    splits(plain, {"nothing is cut, 1 word"});
    splits(nullptr, {"nothing is cut, 1 word"});

    json literal = {{"type", "Split"}, {"pattern", {{"String", "a."}}}, {"behavior", "Isolated"}};
    splits(literal, {"xabx", "a.", "b"});
    splits(split_regex(R"(\w+)"), {"caf\xc3\xa9", ", ", "\xc3\xa9t\xc3\xa9"});

    // Marks and circled letters belong to words; joiners do not.
    splits(split_regex(R"(\w+)"), {"e\xcc\x81_\xe2\x92\xb6\xc2\xbd", "\xe2\x80\x8d", "b"});
    splits(split_regex(R"(\W|[\w']+)"), {"e\xcc\x81's", "-", "-", "b"});
    splits(split_regex(R"(\b.+?\b)"), {"e\xcc\x81", " ", "b"});

    // Digits are those of every script.
    splits(split_regex(R"(\d+)"), {"a", "4\xd9\xa3", "b"});

    // Removed and inverted: the matches stay, and what lies between them goes.
    json removed = split_regex("[a-z]+| ");
    removed["behavior"] = "Removed", removed["invert"] = true;
    splits(removed, {"some", " ", "words"});
}

// Repeated words come from a cache, and have the tokens of the first time.
TEST(Words, ThatComeAgainAreTheSame) {
    std::mt19937 random(4);
    ByteLevel b = random_merges(random, "abc", 40);
    Tokenizer t = opened(put_gpt2("again", b));
    Texts words;
    for (int i = 0; i < 3000; i++)
        words.push_back("\n" + random_text(random, {"a", "b", "c"}, 1 + random() % 9));

    std::string text;
    Tokens expected;
    for (int i = 0; i < 20000; i++) {
        const std::string& word = words[random() % words.size()];
        text += word;
        expected.push_back('\n');
        for (int token : slow_bpe(b, word.substr(1))) expected.push_back(token);
    }
    EXPECT_EQ(encode(t, text), expected);
}

// ----------------------------------------------------------------------------
// special and added tokens

TEST(Special, OnlyWhereAskedForAndTheLongest) {
    json j = tokenizer_json(HELLO);
    j["added_tokens"].push_back({{"id", 266}, {"content", "<|end|>"}, {"special", true}});
    j["added_tokens"].push_back({{"id", 267}, {"content", "<|end|>!"}, {"special", true}});
    j["added_tokens"].push_back({{"id", 268}, {"content", "\t\t"}, {"special", false}});
    Tokenizer t = opened(put_json(j));
    EXPECT_EQ(t.vocab_size, 269);

    std::string text = "hello<|end|>!x<|end|><|endoftext|>\t\t\t";
    EXPECT_EQ(encode(t, text, true), (Tokens{259, 267, 'x', 266, 265, 268, '\t'}));
    Tokens plain = encode(t, text);

    for (int token : {265, 266, 267}) EXPECT_EQ(std::count(plain.begin(), plain.end(), token), 0);
    EXPECT_EQ(std::count(plain.begin(), plain.end(), 268), 1); // an added token is always found

    EXPECT_EQ(decode(t, plain), text);
    EXPECT_EQ(decode(t, encode(t, text, true)), text);
    EXPECT_EQ(encode(t, "<|end", true), encode(t, "<|end"));
}

// Thousands of tokens that begin alike cost what the text that they match costs: without a trie
// this took a minute.
TEST(Special, TokensThatBeginAlikeAreFoundInTime) {
    json j = tokenizer_json(HELLO);
    for (int i = 0; i < 3000; i++)
        j["added_tokens"].push_back({{"id", 300 + i}, {"content", std::string(i + 2, 'a')}});
    Tokenizer t = opened(put_json(j));

    std::string text;
    for (int i = 0; i < 100000; i++) text += "a ab";
    clock_t start = clock();
    Tokens tokens = encode(t, text + std::string(6001, 'a'));
    EXPECT_LT(clock() - start, 5 * CLOCKS_PER_SEC);
    EXPECT_EQ(std::vector<int>(tokens.end() - 2, tokens.end()), (Tokens{3299, 3298}));
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), int('a')), 200000);
}

// A pattern that tries too many ways to match is the tokenizer's fault, and is named.
TEST(Words, APatternThatPcreGivesUpOnIsNamed) {
    json j = tokenizer_json(HELLO);
    json split = {{"type", "Split"}, {"behavior", "Isolated"}, {"invert", false}};
    split["pattern"]["Regex"] = "(a+)+$|(\\w+\\s?)*$|.";
    json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
    Tokenizer t = opened(put_json(j));
    EXPECT_EQ(decode(t, encode(t, "a b")), "a b");
    EXPECT_EXIT(encode(t, std::string(60, 'a') + "!" + std::string(200, 'b') + "!"),
                testing::ExitedWithCode(1),
                ": error: --tokenizer .*: its pattern .* takes too many steps");
}

// A special token's text is no piece of words, even if the vocabulary has it.
TEST(Special, NeverMadeOfWords) {
    json j = tokenizer_json(HELLO);
    j["pre_tokenizer"] = nullptr;
    j["model"]["ignore_merges"] = true;
    j["model"]["vocab"]["<|endoftext|>"] = 265;
    Tokenizer t = opened(put_json(j));
    EXPECT_EQ(encode(t, "<|endoftext|>").size(), 13u);
    EXPECT_EQ(encode(t, "<|endoftext|>", true), Tokens{265});
}

// A rule of an added token, a text, and the answer of the library tokenizers.
struct AddedCase {
    json rule;
    std::string text;
    Texts pieces; // white space that the token takes in is in none of them
};
TEST(Special, AddedTokensTakeInWhatTheirRulesSay) {
    for (bool special : {false, true})
        for (const AddedCase& c : std::vector<AddedCase>{
                 {{{"lstrip", true}}, "a \t<x> b", {"a", "<x>", " ", "b"}},
                 {{{"rstrip", true}}, "a <x> \n b", {"a", " ", "<x>", "b"}},
                 {{{"lstrip", true}, {"rstrip", true}}, " <x>  <x> ", {"<x>", "<x>"}},
                 {{{"lstrip", true}}, "a\xe2\x80\x83\xc2\x85<x>", {"a", "<x>"}},
                 {{{"lstrip", true}}, "a\xe1\xa0\x8e<x>", {"a", "\xe1", "\xa0", "\x8e", "<x>"}},
                 {{{"single_word", true}},
                  "a<x> <x>b <x>",
                  {"a", "<", "x", ">", " ", "<", "x", ">", "b", " ", "<x>"}},
                 {{{"single_word", true}}, "_<x>", {"_", "<", "x", ">"}},
                 {{{"single_word", true}}, "-<x>-", {"-", "<x>", "-"}},
                 {{{"single_word", true}}, "\xcc\x81<x>", {"\xcc", "\x81", "<", "x", ">"}},
                 {{{"single_word", true}},
                  "\xe2\x92\xb6<x>",
                  {"\xe2", "\x92", "\xb6", "<", "x", ">"}},
                 {{{"single_word", true}}, "\xff<x>", {"\xff", "<x>"}}}) {
            json j = tokenizer_json(HELLO);
            json token = {{"id", 300}, {"content", "<x>"}, {"special", special}};

            // Without words, so that only the added token cuts the text.
            token.update(c.rule);
            j["pre_tokenizer"]["use_regex"] = false;
            j["added_tokens"].push_back(token);
            EXPECT_EQ(pieces(opened(put_json(j)), c.text, true), c.pieces) << c.rule << c.text;
        }
}

// A token that belongs to the normalised text is normalised itself. A token of the text
// as it is comes first.
TEST(Special, AddedTokensOfTheNormalisedText) {
    json j = tokenizer_json(HELLO);
    j["normalizer"] = {{"type", "NFC"}};
    json token = {{"id", 300}, {"content", "e\xcc\x81"}, {"normalized", true}};
    j["added_tokens"].push_back(token);

    for (const char* text : {"e\xcc\x81", "\xc3\xa9"})
        EXPECT_EQ(encode(opened(put_json(j)), text), Tokens{300}) << text;

    j["added_tokens"][1]["normalized"] = false;
    EXPECT_EQ(encode(opened(put_json(j)), "e\xcc\x81"), Tokens{300});
    EXPECT_EQ(encode(opened(put_json(j)), "\xc3\xa9").size(), 2u);

    // <ab is found in the text as it is, so the longer <ab>> of the normalised text is not.
    j["added_tokens"] = {{{"id", 300}, {"content", "<ab"}, {"normalized", false}},
                         {{"id", 301}, {"content", "<ab>>"}, {"normalized", true}}};
    EXPECT_EQ(encode(opened(put_json(j)), "<ab>>"), (Tokens{300, '>', '>'}));

    // A special token that is not asked for is plain text, and the tokens inside it are not found.
    j["added_tokens"] = {{{"id", 300}, {"content", "<ab>"}, {"special", true}},
                         {{"id", 301}, {"content", "b>"}, {"normalized", false}}};
    EXPECT_EQ(encode(opened(put_json(j)), "<ab>b>"), (Tokens{'<', 'a', 'b', '>', 301}));
    EXPECT_EQ(encode(opened(put_json(j)), "<ab>b>", true), (Tokens{300, 301}));
}

// A file's name tells its special tokens, which follow the ranks.
TEST(Special, TiktokenFilesHaveThemByName) {
    struct Case {
        const char *name, *token;
        int place, bos;
    };

    // place: of the token after the ranks. bos: of the token that begins a text, or -1.
    for (const Case& c : std::vector<Case>{{"r50k_base", "<|endoftext|>", 0, -1},
                                           {"cl100k_base", "<|endoftext|>", 1, -1},
                                           {"cl100k_base", "<|endofprompt|>", 20, -1},
                                           {"o200k_base", "<|endofprompt|>", 20, -1},
                                           {"llama3", "<|end_of_text|>", 1, 0},
                                           {"llama3", "<|reserved_special_token_0|>", 2, 0},
                                           {"llama3", "<|reserved_special_token_4|>", 8, 0},
                                           {"llama3", "<|eot_id|>", 9, 0},
                                           {"llama3", "<|reserved_special_token_250|>", 255, 0}}) {
        Tokenizer t = opened(put_tiktoken(std::string(c.name) + ".tiktoken", HELLO));
        int ranks = 256 + int(HELLO.merges.size());
        EXPECT_EQ(encode(t, c.token, true), Tokens{ranks + c.place}) << c.name;
        EXPECT_EQ(t.bos, c.bos < 0 ? -1 : ranks + c.bos) << c.name;
        int end = c.name[0] == 'r' ? 0 : 1; // <|endoftext|>, <|end_of_text|>
        EXPECT_EQ(t.eot, ranks + end) << c.name;
        EXPECT_EQ(encode(t, "hello wor"), (Tokens{259, 262}));
    }
}

// The token before the text in the template begins a text.
TEST(Special, TheTemplateSaysWhatBeginsAText) {
    json j = tokenizer_json(HELLO);
    json single = {{{"SpecialToken", {{"id", "<|endoftext|>"}, {"type_id", 0}}}},
                   {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}};
    json processor = {{"type", "TemplateProcessing"}, {"single", single}};
    j["post_processor"] = processor;

    EXPECT_EQ(opened(put_json(j)).bos, 265);
    j["post_processor"] = {{"type", "Sequence"},
                           {"processors", {{{"type", "ByteLevel"}}, processor}}};
    EXPECT_EQ(opened(put_json(j)).bos, 265);

    EXPECT_EQ(opened(put_json(j)).eot, -1);
    std::swap(j["post_processor"]["processors"][1]["single"][0],
              j["post_processor"]["processors"][1]["single"][1]);
    EXPECT_EQ(opened(put_json(j)).bos, -1); // now it comes after the text
    EXPECT_EQ(opened(put_json(j)).eot, 265);
}

// The order is transformers': eos_token is what templates write, eos_token_id where generate()
// stops. No usual name counts: <|endoftext|> is a token here, and ends nothing unless a file says so.
TEST(Special, TheFilesBesideATokenizerSayWhatBeginsAndEndsAText) {
    json j = tokenizer_json(HELLO);
    for (int i = 0; i < 3; i++)
        j["added_tokens"].push_back(
            {{"id", 266 + i}, {"content", concat("<", i, ">")}, {"special", true}});
    std::string folder = scratch("says");
    put_json(j, "says/tokenizer.json");
    auto add = [&](const char* name, const json& file) {
        put(std::string("says/") + name, file.dump());
        return opened(folder);
    };

    // Alone, the file says nothing.
    EXPECT_EQ(opened(folder).eot, -1);
    EXPECT_TRUE(opened(folder).notes.empty());

    // Each file that comes before another one wins, and what the other says is noted once.
    EXPECT_EQ(add("config.json", {{"eos_token_id", 265}, {"bos_token_id", nullptr}}).eot, 265);
    EXPECT_EQ(opened(folder + "/tokenizer.json").eot, 265);
    Tokenizer t = add("generation_config.json", {{"eos_token_id", {266, 265}}});
    EXPECT_EQ(t.eot, 266);
    EXPECT_EQ(t.notes.size(), 1u);
    t = add("tokenizer_config.json", {{"eos_token", "<1>"}, {"bos_token", {{"content", "<0>"}}}});
    EXPECT_EQ(t.eot, 267);
    EXPECT_EQ(t.bos, -1); // it is put before no text, but templates write it
    EXPECT_EQ(begin_token(t), 266);
    EXPECT_EQ(t.ends, (std::set<int>{265, 266, 267}));
    ASSERT_EQ(t.notes.size(), 1u);
    EXPECT_EQ(t.notes[0], "eos_token is token 267, as tokenizer_config.json says; " + folder +
                              "/generation_config.json says 266");

    // special_tokens_map.json is older: it counts unless the config lists its tokens.
    EXPECT_EQ(add("special_tokens_map.json", {{"eos_token", {{"content", "<2>"}}}}).eot, 268);
    t = add("tokenizer_config.json", {{"eos_token", "<1>"}, {"added_tokens_decoder", {}}});
    EXPECT_EQ(t.eot, 267);
    EXPECT_EQ(add("tokenizer_config.json", {{"eos_token", letters(" ")},
                                            {"added_tokens_decoder", {}}}).eot, ' ');

    // A list that has the token agrees.
    t = add("tokenizer_config.json", {{"eos_token", "<|endoftext|>"}, {"added_tokens_decoder", {}}});
    EXPECT_EQ(t.eot, 265);
    EXPECT_TRUE(t.notes.empty());

    // Texts and numbers that are no token are noted, and count for nothing.
    add("config.json", {{"eos_token_id", int64_t(1) << 32}});
    add("generation_config.json", {{"eos_token_id", {269, -1, "xx"}}});
    t = add("tokenizer_config.json", {{"eos_token", "</s>"}, {"added_tokens_decoder", {}}});
    EXPECT_EQ(t.eot, -1);
    ASSERT_EQ(t.notes.size(), 3u);
    for (const std::string& note : t.notes)
        EXPECT_HAS(note, "config.json: its eos_token is no token of " + folder);
    put("says/config.json", "[]");
    EXPECT_HAS(tokenizer_open(&t, folder), "says/config.json: is no JSON object");
}

// ----------------------------------------------------------------------------
// SentencePiece and llama2.c

static const std::vector<Piece> LETTERS = {
    {"_", -20}, {"h", -21},   {"e", -22},     {"l", -23},    {"o", -24},    {"ll", -1},
    {"he", -2}, {"hell", -3}, {"_hello", -5}, {"_hell", -4}, {"lo", -0.5f}, {"__", -6}};

TEST(SentencePieceBpe, KnownAnswers) {
    Tokenizer t = opened(put("bpe.model", model_bytes({with_controls(LETTERS, true)})));
    EXPECT_EQ(t.bos, 1);
    EXPECT_EQ(t.eot, 2);

    // lo has the best score, and ll is gone when its turn comes.
    EXPECT_EQ(pieces(t, "hello"), (Texts{" ", "he", "l", "lo"}));
    EXPECT_EQ(pieces(t, "hell"), (Texts{" hell"}));
    EXPECT_EQ(pieces(t, "  hell"), (Texts{"  ", " hell"}));
    EXPECT_EQ(pieces(t, "x\xc3\xa9"), (Texts{" ", "x", "\xc3", "\xa9"})); // unknown: its bytes
    EXPECT_EQ(encode(t, "x"), (Tokens{3 + 256, 3 + 'x'}));
    EXPECT_EQ(encode(t, ""), Tokens());
    EXPECT_EQ(encode(t, "a" + META + "a"), encode(t, "a a"));
    EXPECT_EQ(decode(t, encode(t, " hello x\xff ")), " hello x\xff ");

    EXPECT_EQ(encode(t, "<s>", true), Tokens{1});
    EXPECT_EQ(pieces(t, "hell<s>hell", true), (Texts{" hell", "", " hell"}));
    EXPECT_EQ(decode(t, Tokens{1, 3 + 'x', 2}), "x");
}

TEST(SentencePieceBpe, SpacesAsTheModelSays) {
    SentencePiece s = {with_controls(LETTERS, true)};
    s.prefix = false;
    EXPECT_EQ(pieces(opened(put("bpe.model", model_bytes(s))), "hell hell"),
              (Texts{"hell", " hell"}));
    EXPECT_EQ(decode(opened(scratch("bpe.model")), Tokens{3 + 256}), " "); // no space was added

    // Extra spaces removed, without a space in front and with one.
    s.remove_extra = true;
    EXPECT_EQ(pieces(opened(put("bpe.model", model_bytes(s))), "  hell   hell "),
              (Texts{"hell", " hell"}));
    s.prefix = true;
    EXPECT_EQ(pieces(opened(put("bpe.model", model_bytes(s))), "  hell   hell "),
              (Texts{" hell", " hell"}));
    EXPECT_EQ(pieces(opened(scratch("bpe.model")), "   "), Texts());

    // U+2581 in a text counts as a space, and at the end as an extra one only.
    EXPECT_EQ(pieces(opened(scratch("bpe.model")), META + " hell " + META), (Texts{"  ", " hell"}));
}

// A field that is not written has its default: a space in front, and extra spaces removed.
TEST(SentencePieceBpe, DefaultsOfTheFormat) {
    SentencePiece s = {with_controls(LETTERS, true)};
    s.defaults = true;
    Tokenizer t = opened(put("defaults.model", model_bytes(s)));
    EXPECT_EQ(pieces(t, "  hell  "), (Texts{" hell"}));
}

TEST(SentencePieceBpe, EqualScoresMergeFromTheLeft) {
    std::vector<Piece> all =
        with_controls({{"_", -9}, {"a", -9}, {"b", -9}, {"c", -9}, {"bc", -1}, {"ab", -1}}, true);
    EXPECT_EQ(pieces(opened(put("equal.model", model_bytes({all}))), "abc"),
              (Texts{" ", "ab", "c"}));
}

TEST(SentencePieceBpe, UserDefinedPiecesAreWhole) {
    std::vector<Piece> more = LETTERS;
    more.push_back({"<ll>", 0, USER_DEFINED});
    Tokenizer t = opened(put("user.model", model_bytes({with_controls(more, true)})));
    EXPECT_EQ(pieces(t, "he<ll>lo"), (Texts{" ", "he", "<ll>", "lo"}));
}

TEST(SentencePieceBpe, WithoutBytesNeighbouringUnknownsAreOne) {
    Tokenizer t = opened(put("plain.model", model_bytes({with_controls(LETTERS, false)})));
    EXPECT_EQ(encode(t, "xyhellx"), (Tokens{3, 0, 10, 0}));
}

// A piece has a space inside, so words must not be cut there.
TEST(SentencePieceBpe, MergesOverSpacesWhereThePiecesHaveThem) {
    std::vector<Piece> more = LETTERS;
    more.push_back({"o_", -7});
    more.push_back({"o_h", -8});
    Tokenizer t = opened(put("over.model", model_bytes({with_controls(more, true)})));
    EXPECT_EQ(pieces(t, "o h"), (Texts{" ", "o h"}));
}

TEST(SentencePieceBpe, Llama2cHasTheSameTokens) {
    std::vector<Piece> all = with_controls(LETTERS, true);
    Tokenizer model = opened(put("bpe.model", model_bytes({all})));
    Tokenizer bin = opened(put("tokenizer.bin", bin_bytes(all)));
    EXPECT_EQ(bin.vocab_size, model.vocab_size);
    EXPECT_EQ(bin.bos, 1);
    std::mt19937 random(5);
    for (int i = 0; i < 100; i++) {
        std::string text = random_text(
            random, {"h", "e", "l", "l", "o", " ", "x", "\n", "\xf0\x9f\x98\x80", "\xff"}, 60);
        EXPECT_EQ(encode(bin, text), encode(model, text));
        EXPECT_EQ(decode(bin, encode(bin, text)), text);
    }
}

// Normal forms of texts of random characters must be those of Python's unicodedata.
TEST(TokenizerJson, UnicodeNormalForms) {
    const std::string script = R"(
import random, unicodedata
random.seed(5)
letters = [chr(c) for c in range(1, 0x30000) if unicodedata.category(chr(c)) not in ('Cn', 'Cs')]
marks = [c for c in letters if unicodedata.combining(c)]
joins = [c for c in letters if unicodedata.normalize('NFKD', c) != c]
pools = [letters, marks, joins, 'aeiounAEIOU ', ''.join(map(chr, range(0x1100, 0x1200)))]
for i in range(3000):
    text = ''.join(random.choice(random.choice(pools)) for _ in range(random.randrange(1, 12)))
    forms = [unicodedata.normalize(f, text) for f in ('NFC', 'NFD', 'NFKC', 'NFKD')]
    print(*(t.encode().hex() for t in [text] + forms))
)";
    std::string program = put("forms.py", script), table = scratch("forms.txt");
    ASSERT_EQ(system(("python3 " + program + " >" + table).c_str()), 0);

    // A tokenizer for each form, without merges.
    std::vector<Tokenizer> with;
    for (const char* form : {"NFC", "NFD", "NFKC", "NFKD"}) {
        json j = tokenizer_json({});
        j["normalizer"] = {{"type", form}};
        with.push_back(opened(put_json(j)));
    }

    auto bytes = [](const std::string& hex) {
        std::string out;
        for (size_t i = 0; i < hex.size(); i += 2) out += char(stoi(hex.substr(i, 2), nullptr, 16));
        return out;
    };

    std::ifstream in(table);
    int texts = 0;
    for (std::string text, normal; in >> text; texts++) {
        for (const Tokenizer& t : with) {
            ASSERT_TRUE(in >> normal);

            // Around the text stands what cannot join it, invalid bytes among it.
            std::string around = "\xff\xfe " + bytes(text) + "\xc3(";
            EXPECT_EQ(decode(t, encode(t, around)), "\xff\xfe " + bytes(normal) + "\xc3(") << text;
        }
    }
    EXPECT_EQ(texts, 3000);

    // A special token's text is not normalised, and nothing joins across it.
    EXPECT_EQ(pieces(with[0], "e<|endoftext|>\xcc\x81", true),
              (Texts{"e", "<|endoftext|>", "\xcc", "\x81"}));
}

// Hugging Face's form: merges in a list, and the handling of spaces by a normalizer
// or by a pre-tokenizer.
TEST(SentencePieceBpe, TokenizerJsonWithByteFallback) {
    std::vector<Piece> all = with_controls(LETTERS, true);
    json vocabulary, merges = {"l o", "l l", "h e", "he ll", META + " hell", META + " " + META};
    for (const Piece& p : all) vocabulary[replace_all(p.text, "_", META)] = vocabulary.size();
    json added = {{{"id", 1}, {"content", "<s>"}, {"special", true}}};
    json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", META}};
    json prepend = {{"type", "Prepend"}, {"prepend", META}};

    json j = {{"added_tokens", added},
              {"normalizer", {{"type", "Sequence"}, {"normalizers", {prepend, replace}}}},
              {"model",
               {{"type", "BPE"},
                {"byte_fallback", true},
                {"unk_token", "<unk>"},
                {"vocab", vocabulary},
                {"merges", merges}}}};

    // The same tokens as the model's.
    Tokenizer t = opened(put_json(j)), model = opened(put("bpe.model", model_bytes({all})));
    for (const char* text : {"hell", " hell", "hello", "x hell", "a\xc3\xa9"})
        EXPECT_EQ(encode(t, text), encode(model, text)) << text;

    // Metaspace as a pre-tokenizer.
    j.erase("normalizer");
    j["pre_tokenizer"] = {
        {"type", "Metaspace"}, {"replacement", META}, {"prepend_scheme", "first"}};
    t = opened(put_json(j));
    EXPECT_EQ(pieces(t, "hell  hell"), (Texts{" hell", " ", " hell"}));
    EXPECT_EQ(pieces(t, " hell"), (Texts{" hell"})); // a space is there already
    EXPECT_EQ(pieces(t, META + "hell"), (Texts{" hell"}));
    EXPECT_EQ(pieces(t, "hell<s>hell", true), (Texts{" hell", "<s>", "hell"}));

    j["pre_tokenizer"]["prepend_scheme"] = "always";
    EXPECT_EQ(pieces(opened(put_json(j)), "hell<s>hell", true), (Texts{" hell", "<s>", " hell"}));

    // Added tokens are cut out before a pre-tokenizer writes its spaces, and after a
    // normalizer that writes them.
    j["added_tokens"].push_back({{"id", 9}, {"content", "(x)"}, {"special", false}});
    EXPECT_EQ(pieces(opened(put_json(j)), "hell(x)hell"), (Texts{" hell", "(x)", " hell"}));

    j["pre_tokenizer"]["prepend_scheme"] = "never";
    EXPECT_EQ(pieces(opened(put_json(j)), "hell"), (Texts{"hell"}));
    j.erase("pre_tokenizer");
    j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {prepend, replace}}};
    EXPECT_EQ(pieces(opened(put_json(j)), "hell (x)hell"), (Texts{" hell", "(x)", "hell"}));
    EXPECT_NE(pieces(opened(put_json(j)), "hell(x)hell")[1], "(x)");
}

// The best of all cuts of a word into pieces, and its score. An unknown character scores 10 less
// than the worst piece.
static float best_cut(const std::vector<Piece>& all, const std::string& word, Texts* best) {
    if (word.empty()) return 0;
    float worst = 0, top = -INFINITY;
    for (const Piece& p : all) worst = std::min(worst, p.score);
    auto take = [&](const std::string& text, float score) {
        Texts rest;
        float sum = score + best_cut(all, word.substr(text.size()), &rest);
        if (sum <= top) return;
        top = sum, *best = rest;
        best->insert(best->begin(), text);
    };

    bool one = false;
    for (const Piece& p : all)
        if (p.type == NORMAL && word.starts_with(p.text))
            take(p.text, p.score), one |= p.text.size() == 1;
    if (!one) take(word.substr(0, 1), worst - 10);
    return top;
}

TEST(Unigram, TheBestSumOfScores) {
    std::vector<Piece> all = with_controls({{" ", -3.5f},
                                            {"a", -2.25f},
                                            {"b", -4.5f},
                                            {"ab", -5.f},
                                            {"ba", -3.75f},
                                            {"aba", -6.25f},
                                            {" a", -3.f},
                                            {"bb", -9.5f}},
                                           true);
    SentencePiece s = {all, 1};
    Tokenizer t = opened(put("unigram.model", model_bytes(s)));
    EXPECT_EQ(pieces(t, "abab"), (Texts{" a", "ba", "b"}));

    std::mt19937 random(6);
    for (int i = 0; i < 200; i++) {
        std::string text = random_text(random, {"a", "b", "a", "b", " ", "x"}, 1 + random() % 9);
        Texts best;
        best_cut(all, " " + text, &best);
        EXPECT_EQ(pieces(t, text), best) << text;
    }

    // An unknown character costs 10 more than the worst piece: a, bx wins over ab, x.
    std::vector<Piece> few = with_controls(
        {{" ", -1}, {"a", -9}, {"b", -9}, {"ab", -5}, {"bx", -15}, {"ba", -18}, {"abab", -3}},
        true);
    t = opened(put("few.model", model_bytes({few, 1})));
    EXPECT_EQ(pieces(t, "abx"), (Texts{" ", "a", "bx"}));
    EXPECT_EQ(pieces(t, "ba"), (Texts{" ", "ba"})); // of equal sums the longer piece wins
    EXPECT_EQ(pieces(t, "xb"), (Texts{" ", "x", "b"}));
    EXPECT_EQ(pieces(t, "abab"), (Texts{" ", "abab"}));
}

// ----------------------------------------------------------------------------
// any bytes, any thread

// A tokenizer of each kind of file.
static std::vector<Tokenizer> one_of_each() {
    json prefixed = tokenizer_json(HELLO);
    std::vector<Tokenizer> all = {
        opened("byte"),
        opened(put_gpt2("hello", HELLO)),
        opened(put_json(tokenizer_json(HELLO))),
        opened(put_tiktoken("cl100k_base.tiktoken", HELLO)),
        opened(put_tiktoken("o200k_base.tiktoken", HELLO)),
        opened(put("bpe.model", model_bytes({with_controls(LETTERS, true)}))),
        opened(put("unigram.model", model_bytes({with_controls(LETTERS, true), 1}))),
        opened(put("tokenizer.bin", bin_bytes(with_controls(LETTERS, true))))};
    return all;
}

TEST(RoundTrip, AnyBytes) {
    std::mt19937 random(7);
    std::vector<Tokenizer> all = one_of_each();
    for (int i = 0; i < 300; i++) {
        std::string text;
        for (size_t n = random() % 200; n > 0; n--)
            text += random() % 3 ? char(random()) : "hello wor\xe2\x82\xac"[random() % 12];
        for (const Tokenizer& t : all) {
            if (t.sentencepiece && text.find(META) != std::string::npos) continue;
            EXPECT_EQ(decode(t, encode(t, text)), text) << t.name;
            EXPECT_EQ(decode(t, encode(t, text, true)), text) << t.name;
        }
    }
}

TEST(RoundTrip, ManyThreadsEncodeAtOnce) {
    std::vector<Tokenizer> all = one_of_each();
    std::mt19937 random(8);
    std::string text =
        random_text(random, {"hello", " world", "\n", " 12", "\xe2\x82\xac", "\xff"}, 5000);
    for (const Tokenizer& t : all) {
        Tokens expected = encode(t, text);
        std::vector<Tokens> found(4);
        std::vector<std::thread> threads;
        for (Tokens& f : found) threads.emplace_back([&] { f = encode(t, text); });
        for (std::thread& thread : threads) thread.join();
        for (const Tokens& f : found) EXPECT_EQ(f, expected) << t.name;
    }
}

// ----------------------------------------------------------------------------
// text as training data

TEST(Text, IsReadAsItsTokens) {
    Tokenizer t = opened(put_gpt2("hello", HELLO));
    std::string path = put("data.txt", "hello wor<|endoftext|>hello hello");
    DataLoader d;
    ASSERT_EQ(data_open(&d, path, Split::VAL, true, t, 5, 266, 1), "");
    EXPECT_EQ(d.windows, 1u);
    EXPECT_EQ(d.tokens, 6u);

    Tokens tokens(5), targets(5);
    ASSERT_EQ(load_window(d, 0, tokens.data(), targets.data()), "");
    EXPECT_EQ(tokens, (Tokens{259, 262, 265, 259, ' '}));
    EXPECT_EQ(targets, (Tokens{262, 265, 259, ' ', 259}));

    // A byte order mark before the text is none of its tokens.
    put("data.txt", "\xef\xbb\xbfhello wor<|endoftext|>hello hello");
    ASSERT_EQ(data_open(&d, path, Split::VAL, true, t, 5, 266, 1), "");
    EXPECT_EQ(d.tokens, 6u);
    EXPECT_EQ(token_at(d.files[0], 0), 259);

    EXPECT_HAS(data_open(&d, path, Split::VAL, true, t, 5, 265, 1),
               "writes 266 tokens, the model has 265: give the model's tokenizer");
}

// ----------------------------------------------------------------------------
// bad files: one line says what is wrong

// The refusal of a file, which must be one line that begins with the flag and the path.

static std::string refused(const std::string& path) {
    Tokenizer t;
    std::string wrong = tokenizer_open(&t, path);
    EXPECT_TRUE(wrong.starts_with("--tokenizer " + path)) << wrong;
    EXPECT_EQ(wrong.find('\n'), std::string::npos);
    return wrong;
}

TEST(Bad, Paths) {
    EXPECT_HAS(refused("gpt2"), "or --tokenizer byte");
    EXPECT_HAS(refused(scratch("no/such/tokenizer.json")), "No such file");
    fs::create_directories(scratch("empty"));
    EXPECT_HAS(refused(scratch("empty")), "has no tokenizer.json");
    EXPECT_HAS(refused(put("some.txt", "x")), "is no tokenizer by its name");
    for (const char* name : {"tokenizer.json", "a.model", "a.bin", "a.tiktoken"})
        EXPECT_NE(refused(put(name, "")), "");
    fs::create_directories(scratch("folder/tokenizer.model"));
    EXPECT_HAS(refused(scratch("folder")), "folder/tokenizer.model");
}

TEST(Bad, Gpt2Files) {
    std::string folder = put_gpt2("bad", HELLO), merges = read_file(folder + "/vocab.bpe");
    for (auto& [line, what] : std::vector<std::pair<std::string, std::string>>{
             {"justone", R"(merge 10, "justone", is not two pieces)"},
             {"a b c", "is not two pieces"},
             {"a ", "is not two pieces"},
             {"\xff\t", "\"\\xff\\t\", is not two pieces"},
             {" a", "is not two pieces"},
             {"a b", R"(merge 10, "a" and "b", is not of the vocabulary's pieces)"}}) {
        put("bad/vocab.bpe", merges + line + "\n");
        EXPECT_HAS(refused(folder), what);
    }

    put("bad/vocab.bpe", replace_all(merges, "\n", "\r\n")); // Windows' line ends are harmless
    EXPECT_EQ(encode(opened(folder), "hello"), Tokens{259});

    // Vocabularies.
    for (auto& [text, what] : std::vector<std::pair<std::string, std::string>>{
             {"[]", "is no JSON object"},
             {"{\"a\": 1", "is no JSON object, or cut short"},
             {"{\"a\": -1}", "is -1, which is no token"},
             {"{\"a\": 1e3}", "which is no token"},
             {"{\"a\": \"b\"}", "which is no token"},
             {"{\"a\": [[]]}", "which is no token"},
             {"{\"a\": 99999999999}", "is 99999999999, which is no token"},
             {"{\"a\": 18446744073709551615}", "which is no token"},
             {"{\"a\": 1}", "has no token for byte 0"}}) {
        put("bad/encoder.json", text);
        EXPECT_HAS(refused(folder), what);
    }
}

// A tokenizer.json with one value replaced, and part of the refusal.
TEST(Bad, TokenizerJson) {
    auto with = [](const std::string& pointer, json value) {
        json j = tokenizer_json(HELLO);
        j[json::json_pointer(pointer)] = value;
        return refused(put_json(j));
    };

    // The model.
    EXPECT_HAS(with("/model/type", "WordPiece"), "model WordPiece is not built");
    EXPECT_HAS(with("/model/type", 1), "as Hugging Face writes it: type must be string");
    EXPECT_EQ(with("/model/type", 1).find("json.exception"), std::string::npos);
    EXPECT_HAS(with("/model", 300),
               "has no \"model\", so it is no tokenizer.json; of GPT-2's pair");

    // A preset's name says how to get the files.
    Tokenizer published;
    EXPECT_HAS(tokenizer_open(&published, "gpt2"),
               "gpt2: No such file or directory; dev/data/tokenizer.py gpt2 gets it, then "
               "--tokenizer data/gpt2");
    EXPECT_EQ(tokenizer_open(&published, "x/gpt2").find("gets it"), std::string::npos);

    EXPECT_HAS(with("/model/end_of_word_suffix", "</w>"), "end_of_word_suffix </w> is not built");
    EXPECT_HAS(with("/model/vocab", 1), "no token for byte");
    EXPECT_HAS(with("/model/merges", json::array({"a"})), "is not two pieces");
    EXPECT_HAS(with("/model/merges", {{"a"}}), "as Hugging Face writes it");
    EXPECT_HAS(with("/model/merges", json::array({1})), "as Hugging Face writes it");

    // The normalizer and the pre-tokenizer.
    EXPECT_HAS(with("/normalizer", {{"type", "Lowercase"}}), "normalizer Lowercase is not built");
    EXPECT_HAS(with("/normalizer", {1, 2}), "as Hugging Face writes it");
    EXPECT_HAS(with("/pre_tokenizer", {{"type", "Punctuation"}}), "pre_tokenizer Punctuation");
    EXPECT_HAS(with("/pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", true}}),
               "add_prefix_space of ByteLevel is not built");
    EXPECT_HAS(with("/pre_tokenizer", split_regex("(")), "pattern (: missing closing parenthesis");

    json merged = split_regex("a");
    merged["behavior"] = "MergedWithNext";
    EXPECT_HAS(with("/pre_tokenizer", merged), "behavior MergedWithNext is not built");
    merged["behavior"] = "Removed"; // the matches would be lost, and the text not come back
    EXPECT_HAS(with("/pre_tokenizer", merged), "behavior Removed is not built");

    EXPECT_HAS(with("/added_tokens/0/id", -1), "is -1, which is no token");
    EXPECT_HAS(with("/added_tokens/0/content", nullptr), "as Hugging Face writes it");

    json nested = {{"type", "ByteLevel"}};
    for (int i = 0; i < 3; i++) nested = {{"type", "Sequence"}, {"pretokenizers", {nested}}};
    EXPECT_HAS(with("/pre_tokenizer", nested), "pre_tokenizer Sequence is not built");
    json none = tokenizer_json(HELLO);
    none.erase("model");
    EXPECT_HAS(refused(put_json(none)), "has no \"model\"");
}

TEST(Bad, TiktokenFiles) {
    std::string good = read_file(put_tiktoken("a.tiktoken", HELLO));
    EXPECT_HAS(refused(put("a.tiktoken", good)), "its 265 ranks are of no encoding known here");
    for (const char* line :
         {"YQ==", "YQ== x", "YQ== -1", "YQ= 9", "Y*== 9", " 9", "YQ== 9x", "YQ== 99999999999"})
        EXPECT_HAS(refused(put("cl100k_base.tiktoken", good + line + "\n")),
                   "line 266, \"" + std::string(line));
    EXPECT_HAS(refused(put("llama3.model", good.substr(0, 400))), "llama3.model: ");
}

// Cut anywhere, or with any byte changed, a file is refused or read. What was read works.
static void survives(const std::string& name, const std::string& good, bool cut_is_refused) {
    Tokenizer t;
    for (size_t n = 0; n < good.size(); n += 1 + good.size() / 300) {
        std::string path = put(name, good.substr(0, n));
        std::string wrong = tokenizer_open(&t, path);
        bool whole = wrong.empty() && t.byte_token[0] >= 0; // else unknown bytes are lost
        EXPECT_TRUE(!whole || decode(t, encode(t, "hel")) == "hel") << n;
        EXPECT_TRUE(!cut_is_refused || !wrong.empty()) << n;
    }

    std::mt19937 random(9);
    for (int i = 0; i < 400; i++) {
        std::string bytes = good;
        bytes[random() % bytes.size()] = char(random());
        if (tokenizer_open(&t, put(name, bytes)).empty())
            decode(t, encode(t, "hello\xff <s>", true));
    }
}
TEST(Bad, AnyCutAndAnyByte) {
    std::vector<Piece> all = with_controls(LETTERS, true);
    survives("tokenizer.bin", bin_bytes(all), false); // a cut between two pieces cannot be seen
    survives("tokenizer.model", model_bytes({all}), false);
    survives("unigram.model", model_bytes({all, 1}), false);
    survives("tokenizer.json", tokenizer_json(HELLO).dump(), true);

    EXPECT_HAS(refused(put("tokenizer.bin", bin_bytes(all).substr(0, 100))), "is cut short");
    all.push_back({"hellohello", -1}); // the header knows the longest piece: a cut before it shows
    size_t last = 8 + std::string("hellohello").size(), bytes = bin_bytes(all).size();
    EXPECT_HAS(refused(put("tokenizer.bin", bin_bytes(all).substr(0, bytes - last))),
               "is cut short");
    EXPECT_HAS(refused(put("tokenizer.model", model_bytes({all}).substr(0, 101))), "is cut short");
}

TEST(Bad, SentencePieceModelsThatAreNotBuilt) {
    std::string good = model_bytes({with_controls(LETTERS, true)});
    EXPECT_HAS(refused(put("a.model", good + field(2, field(3, uint64_t(3))))),
               "neither BPE nor unigram");
    EXPECT_HAS(refused(put("a.model", good + field(3, field(2, std::string("x"))))),
               "maps characters");
    EXPECT_HAS(refused(put("a.model", good + field(3, field(5, uint64_t(0))))),
               "spaces before words");
    EXPECT_HAS(refused(put("a.model", good + field(2, field(24, uint64_t(1))))),
               "spaces before words");
}

// ----------------------------------------------------------------------------
// llama.cpp's tokens for the same texts

static void known_answers(const std::string& path, const std::string& name) {
    NEEDS_FIXTURES();
    Tokenizer t = opened(FIXTURES + "/tokenizers/" + path);
    std::string base = FIXTURES + "/tokenizer_vectors/llama.cpp/ggml-vocab-" + name + ".gguf";
    std::string texts = read_file(base + ".inp"), line, cut = "\n__ggml_vocab_test__\n";
    std::istringstream answers(read_file(base + ".out"));

    size_t n = 0;
    for (size_t at = 0, end; at <= texts.size(); at = end + cut.size(), n++) {
        end = std::min(texts.find(cut, at), texts.size());
        std::string text = texts.substr(at, end - at);
        if (!std::getline(answers, line)) line = ""; // the last text is empty and has no line
        std::istringstream numbers(line);
        Tokens expected = {std::istream_iterator<int>(numbers), {}};
        EXPECT_EQ(encode(t, text), expected) << text;
        EXPECT_EQ(decode(t, expected), text);
    }
    EXPECT_EQ(n, 47u);
}
TEST(KnownAnswers, Gpt2) { known_answers("gpt2", "gpt-2"); }
TEST(KnownAnswers, Llama3) { known_answers("llama3/tokenizer.model", "llama-bpe"); }
TEST(KnownAnswers, Llama2) { known_answers("llama2/tokenizer.model", "llama-spm"); }
TEST(KnownAnswers, Llama2c) { known_answers("llama2/tokenizer.bin", "llama-spm"); }
