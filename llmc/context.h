// context.h - what a block receives besides its pointers: the batch, the shape, where it runs
//   Ctx is the first argument of every function that a block calls; there is no global state.
//   A block computes rows, one for each token. It never asks how long a sequence is: `positions`
//   says where a row stands, and only keys_seen() (context_parallel.h) knows where its keys lie.
#pragma once
#include "comm/group.h"
#include "layout.h"
#include "model.h"
#include "ops/attention_types.h"
#include "ops/matmul.cuh"
#include "ops/types.h"
#include <cstdint>
#include <functional>
#include <string>

namespace llmc {

// ----------------------------------------------------------------------------
// where the documents of a window of tokens begin, so that each sees itself alone
//   split_documents   tokens (T), targets (T), `end` -> doc_start (T), targets (T)
//   doc_start[i] is the position where the document of position i begins; attention looks no
//   further back. `end` is the token that ends a document; with -1 the window is one document.
//   The end belongs to the document before it, so the model learns that a text ends. The token that
//   follows an end cannot be told from it, so the target there is ignored (-1).
//   Of a document that began before the window, only the part inside the window is seen.
//   Windows of whole conversations need no `end`: a bit of a token says that one begins.

// Reads tokens (T) and targets (T) of sample number `sample`; returns "" or what is wrong.
typedef std::function<std::string(uint64_t sample, int* tokens, int* targets)> Window;

// The objective's numbers of a window's rows, (T) each (objective.cuh). `old` is null unless the
// objective compares with the policy that sampled.
struct RowNumbers {
    float *feedback, *reference, *old;
};

// Fills in what the tokens of a sample do not say of its rows: log p, and advantages.
typedef std::function<void(uint64_t sample, RowNumbers to)> References;

// Bits of a token in such windows (tune/conversations.h): an answer's; the first of a conversation.
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

// split_documents() works on the host's arrays: it changes targets, and clears BEGINS in tokens.
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

// Evaluation keeps these numbers for each row. The target is the most likely token if
// target_logit = row_max.
template <typename T> struct RowLosses {
    acc_t<T> *losses, *row_max, *target_logit;    // (N) each
};

// This rank's rows of one micro-batch.
struct Batch {
    size_t B = 0, T = 0;            // sequences, and tokens of each on this rank
    const int* tokens = nullptr;    // (B,T)
    const int* targets = nullptr;   // (B,T) negative: ignored
    const int* positions = nullptr; // (B,T) places in the whole sequence
    // (B,T) the position where the token's document starts. The token sees no key before it, and
    // its learned position counts from there.
    const int* doc_start = nullptr;
    const float *feedback = nullptr, *reference = nullptr, *old = nullptr; // (B,T) objective.cuh

    // Generation only. Sequence b uses slot first_slot + b of the cache. A slot has room for
    // `capacity` positions; queries look at the first `seen`. A token is stored at its position.
    size_t first_slot = 0, capacity = 0, seen = 0;
    const int* places = nullptr; // (B,T) the same positions, in the host's memory
    const size_t* lengths = nullptr; // (B) tokens of sequences that are padded to T; null: T each
    const int* adapters = nullptr; // (B) each sequence's set, -1: the base; in the host's memory
    // The positions of keys that are not from these rows: (B,seen) from a cache; with context
    // parallelism (B, T of all ranks), in a ring (ranks,B,T).
    const int* key_positions = nullptr;
    const int* key_documents = nullptr; // (B, T of all ranks) where those keys' documents start

    size_t rows() const { return B * T; } // N
};

// Context parallelism as attention needs it (context_parallel.h).
struct ContextRanks {
    Comm heads, keys; // ranks of cp that exchange heads; that share keys
    ContextMethod method = ContextMethod::GATHER; // how ranks of cp share attention
    void* scratch = nullptr;
};

// Rows of tokens as a router and its experts need them (mixtral.h, expert_parallel.h).
struct ExpertRows {
    void* slot_rows = nullptr;     // rows sorted by expert
    void* token_rows = nullptr;    // (ep,N,C) rows of all tokens that experts may see
    void* exchange_rows = nullptr; // (2,ep,N,C) rows on their way to experts
    int* loads = nullptr;          // (E) slots given to this layer's experts so far
};

// The context of a block. Pointers are null where the running layer has no use for them.
template <typename S> struct Ctx {
    S where;     // the CPU, or a CUDA stream
    Shape rank_shape; // this rank's part of the model's: its heads, channels and vocabulary
    Shape shape;      // the same, as the running layer has it
    Batch batch;
    Blas blas;   // handles and scratch of products
    Comm tp;                           // the ranks that share the shape
    Comm cp;                           // the ranks that share each sequence
    ContextRanks context;
    S beside = {};                     // the stream of messages that run beside a layer's work
    Comm ep;                           // the ranks that share out the experts
    ExpertRows experts;
    void* all_rows = nullptr;          // (N,C) rows of all ranks, for sequence parallelism
    void* heads = nullptr;             // (rooms,N,NH,HS) expanded heads of latent attention
    size_t sequences = 0;              // in the global batch
    const void* rope = nullptr;        // (P,rotary/2,2) acc: cos and sin of this layer's RoPE
    const float* slopes = nullptr;     // (NH) ALiBi
    PrefixRows prefix;                 // this layer's trained keys and values before the text
    const float* loss_scale = nullptr; // fp16: the head multiplies its gradient by it
    const struct TeacherHead* teacher = nullptr; // distillation (head.h)
    int micro = 0;                     // the number of the micro-batch
};

} // namespace llmc
