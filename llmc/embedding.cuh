// embedding.cuh - token and position embedding, forward and backward
//   out = wte[token] + wpe[position - doc_start]           (wpe null: tokens only)
//   out, dout (N,C)   wte, dwte (Vp,C)   wpe, dwpe (P,C)   tokens, positions, doc_start (N)
//   Contract: out =    dwte, dwpe = (tables zeroed first) or += (accumulate); null: frozen.
//             Deterministic: a thread owns columns and adds rows in order.
//   Cost: memory-bound. forward reads a row of each table, writes out; backward reads dout, adds
//   into the tables,
//         and writes them whole when it does not accumulate.
//   To copy: this file and common.h.
#pragma once
#include "common.h"

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void embedding_forward(T* out, const int* tokens, const int* positions, const int* doc_start,
                       const T* wte, const T* wpe, size_t N, size_t C, Cpu) {
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        T* y = out + n * C;
        const T* token = wte + size_t(tokens[n]) * C;
        if (!wpe) {
            memcpy(y, token, C * sizeof(T));
            continue;
        }
        const T* position = wpe + size_t(positions[n] - doc_start[n]) * C;
        #pragma omp simd
        for (size_t c = 0; c < C; c++) y[c] = from_acc<T>(to_acc(token[c]) + to_acc(position[c]));
    }
}

template <typename T>
void embedding_backward_weight(acc_t<T>* dwte, acc_t<T>* dwpe, const T* dout, const int* tokens,
                               const int* positions, const int* doc_start, size_t N, size_t Vp,
                               size_t P, size_t C, bool accumulate, Cpu) {
    typedef acc_t<T> A;
    auto zero = [](A* table, size_t rows, size_t C) {
        #pragma omp parallel for
        for (size_t r = 0; r < rows; r++) memset(table + r * C, 0, C * sizeof(A));
    };
    if (!accumulate && dwte) zero(dwte, Vp, C);
    if (!accumulate && dwpe) zero(dwpe, P, C);
    constexpr size_t COLUMNS = 128;
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += COLUMNS) {
        size_t end = C - c0 < COLUMNS ? C : c0 + COLUMNS;
        for (size_t n = 0; n < N; n++) {
            const T* d = dout + n * C;
            A* token = dwte ? dwte + size_t(tokens[n]) * C : nullptr;
            A* position = dwpe ? dwpe + size_t(positions[n] - doc_start[n]) * C : nullptr;
            for (size_t c = c0; token && c < end; c++) token[c] += to_acc(d[c]);
            for (size_t c = c0; position && c < end; c++) position[c] += to_acc(d[c]);
        }
    }
}
