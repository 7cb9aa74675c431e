// tokenizer.cpp - megabytes of text that a tokenizer encodes in a second, on one core
//   A text of the user's, and a megabyte each of what is hard: one word, one letter, spaces, bytes
//   at random.
//   usage: bench_tokenizer TOKENIZER TEXT
#include <random>
#include "../../llmc/io/mfu.h"
#include "../../llmc/io/tokenizer_files.h"

using namespace llmc;

static void measure(const Tokenizer& t, const char* what, const std::string& text) {
    double best = 1e30;
    std::vector<int> tokens;
    for (int i = 0; i < 4; i++) {
        double start = clock_seconds();
        tokens = encode(t, text);
        best = std::min(best, clock_seconds() - start);
    }
    printf("%-24s %6.2f MB %8zu tokens %8.1f MB/s%s\n", what, double(text.size()) / 1e6,
           tokens.size(), double(text.size()) / best / 1e6,
           decode(t, tokens) == text ? "" : "  (does not come back)");
}

int main(int argc, char** argv) {
    LLMC_USER_CHECK(argc == 3, "usage: bench_tokenizer TOKENIZER TEXT");
    Tokenizer t;
    std::string text, letters, bytes, wrong = tokenizer_open(&t, argv[1]);
    if (wrong.empty()) wrong = read_whole_file(argv[2], &text);
    LLMC_USER_CHECK(wrong.empty(), "%s", wrong.c_str());
    std::mt19937 random(1);
    for (int i = 0; i < 1 << 20; i++) letters += char('a' + random() % 26), bytes += char(random());
    measure(t, argv[2], text);
    measure(t, "one word", letters);
    measure(t, "one letter", std::string(1 << 20, 'a'));
    measure(t, "spaces", std::string(1 << 20, ' '));
    measure(t, "bytes at random", bytes);
}
