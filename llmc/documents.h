// documents.h - where the documents of a window of tokens begin, so that each sees itself alone
//   split_documents   tokens (T), targets (T), `end` -> doc_start (T), targets (T)
//   doc_start[i] is the position where the document of position i begins; attention looks no
//   further back. `end` is the token that ends a document; with -1 the window is one document.
//   The end belongs to the document before it, so the model learns that a text ends. The token that
//   follows an end cannot be told from it, so the target there is ignored (-1).
//   Of a document that began before the window, only the part inside the window is seen.
//   Windows of whole conversations need no `end`: a bit of a token says that one begins.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace llmc {

// Reads tokens (T) and targets (T) of sample number `sample`; returns "" or what is wrong.
typedef std::function<std::string(uint64_t sample, int* tokens, int* targets)> Window;

// The objective's numbers of a window's rows, (T) each (objective.cuh). `old` is null unless the
// objective compares with the policy that sampled.
struct RowNumbers {
    float *feedback, *reference, *old;
};

// Fills in what the tokens of a sample do not say of its rows: log p, and advantages.
typedef std::function<void(uint64_t sample, RowNumbers to)> References;

// Bits of a token in such windows (io/conversations.h): an answer's; the first of a conversation.
constexpr int TRAINED = int(1u << 31);
constexpr int BEGINS = 1 << 30;
constexpr int REJECTED = 1 << 29; // beside BEGINS: the worse answer, after the better one

// Which rows (T) are of a rejected answer's conversation; REJECTED leaves the tokens.
inline void split_pairs(float* feedback, int* tokens, size_t T) {
    // A conversation's first token says whose it is.
    float now = 0;
    for (size_t i = 0; i < T; i++) {
        if (tokens[i] & BEGINS)
            now = tokens[i] & REJECTED ? 1 : 0;
        tokens[i] &= ~REJECTED;
        feedback[i] = now;
    }
}

// All arrays are the host's; `targets` is changed in place, and BEGINS leaves the tokens.
inline void split_documents(int* doc_start, int* targets, int* tokens, size_t T, int end) {
    int start = 0;
    for (size_t i = 0; i < T; i++) {
        if (tokens[i] & BEGINS) start = int(i);
        tokens[i] &= ~BEGINS;
        doc_start[i] = start;
        // The next position begins another document.
        if (tokens[i] != end) continue;
        start = int(i) + 1;
        targets[i] = -1;
    }
}

} // namespace llmc
