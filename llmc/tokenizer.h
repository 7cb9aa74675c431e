// tokenizer.h - text to tokens and back
//   byte: a token is a byte, the vocabulary 256.
#pragma once
#include <string>
#include <string_view>
#include <vector>

struct Tokenizer {
    std::string kind;
    int vocab_size = 0;
};

// "" or what is wrong
inline std::string tokenizer_open(Tokenizer* t, const std::string& name) {
    if (name != "byte")
        return "--tokenizer " + name +
               ": tokenizer files are not built yet; use --tokenizer byte, or give token shards "
               "(.bin) as --data";
    *t = {name, 256};
    return "";
}

inline std::vector<int> encode(const Tokenizer&, std::string_view text) {
    std::vector<int> tokens;
    for (unsigned char c : text) tokens.push_back(c);
    return tokens;
}

inline std::string decode(const Tokenizer&, int token) { return std::string(1, char(token)); }
