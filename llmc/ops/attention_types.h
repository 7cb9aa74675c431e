// attention_types.h - what versions of attention share: operands, mask, ALiBi - arXiv:2108.12409
//   s_ij = cap(scale q_i.k_j) - slope_h (pos_i - pos_j),   cap(x) = softcap tanh(x / softcap)
//   Query i sees key j when doc_start_i <= pos_j <= pos_i and, with a sliding window,
//   pos_i - pos_j < window. Positions and documents come from the batch, never from an index.
//   MHA, MQA, GQA: head h reads key head h / (NH/NKV).
//   Contract: scale, HS_v, v_stride and the batch strides may be left 0: completed() sets them to
//             their usual values.
//   To copy: this file and types.h.
#pragma once
#include <climits>
#include <type_traits>
#include "types.h"

namespace llmc {

// ----------------------------------------------------------------------------
// sizes

// The sizes and strides of one call of attention. Strides count elements.
struct AttentionDims {
    // Tk exceeds Tq with a key/value cache: the new queries see all keys so far.
    size_t B = 0, Tq = 0, Tk = 0; // sequences, queries and keys of each
    size_t NH = 0, NKV = 0;       // heads of queries, of keys and values
    size_t HS = 0;                // channels of a head of q and k
    // q, k and v may lie side by side in one buffer.
    size_t q_stride = 0;          // elements between rows of q and dq
    size_t k_stride = 0;          // the same for k and dk
    int window = INT_MAX;         // the number of keys that a query sees, itself included
    size_t HS_v = 0;              // channels of a head of v and out; 0: HS
    size_t v_stride = 0;          // for v and dv; 0: k_stride
    // Elements between the sequences of q, of k, of v. 0: the sequences are contiguous.
    size_t q_batch = 0, k_batch = 0, v_batch = 0;
};

// Replace sizes left 0 by their usual values: equal heads, contiguous sequences.
inline AttentionDims completed(AttentionDims d) {
    if (!d.HS_v) d.HS_v = d.HS;
    if (!d.v_stride) d.v_stride = d.k_stride;
    if (!d.q_batch)
        d.q_batch = d.Tq * d.q_stride;
    if (!d.k_batch)
        d.k_batch = d.Tk * d.k_stride;
    if (!d.v_batch)
        d.v_batch = d.Tk * d.v_stride;
    return d;
}

// ----------------------------------------------------------------------------
// the kernels of a GPU

// Three sets, the slowest first: attention.cuh's own, attention_sm80.cuh's, attention_sm90.cuh's.
enum class AttentionKernels { PLAIN, MMA, WGMMA };

// A call's demands on its kernels, beside its sizes.
struct AttentionCall {
    size_t element; // bytes of an element of q, k and v
    bool softcap = false, alibi = false, backward = false;
};
constexpr size_t MOST_HEADS = 64; // in a group, on Hopper: they fit a tile of either size

// Return the fastest kernels that take a call whose operands begin at multiples of 16 bytes.
inline AttentionKernels attention_kernels(const AttentionDims& dims, const AttentionCall& call,
                                          bool hopper) {
    // Tensor cores take 16 bits. Backward has a capped score's tanh only where ALiBi is not on it.
    AttentionDims d = completed(dims);
    if (call.element != 2 || (call.softcap && call.alibi))
        return AttentionKernels::PLAIN;

    // Copies take 16 bytes, so heads, rows and sequences must begin at multiples of 8 elements. v
    // is read at the offsets of k.
    bool rows = d.q_stride % 8 == 0 && d.k_stride % 8 == 0 && d.q_batch % 8 == 0 &&
                d.k_batch % 8 == 0;
    bool alike = d.HS_v == d.HS && d.v_stride == d.k_stride && d.v_batch == d.k_batch;
    if (d.HS % 8 != 0 || d.HS > 256 || !rows || !alike)
        return AttentionKernels::PLAIN;

    // Hopper's backward pass ends at 128 channels, and its soft caps begin above 64.
    bool fits = d.HS <= (call.backward ? 128 : 256) && d.HS > (call.softcap ? 64 : 0) &&
                d.NH / d.NKV <= MOST_HEADS;
    return hopper && fits ? AttentionKernels::WGMMA : AttentionKernels::MMA;
}

// ----------------------------------------------------------------------------
// operands, read by the CPU and by kernels

// The operands of one call. Positions count within the whole sequence, not within this rank's rows,
// because a rank may hold any piece of the context.
template <typename T> struct AttentionOperands {
    const T* q = nullptr;             // (B,Tq,NH,HS)
    const T* k = nullptr;             // (B,Tk,NKV,HS)
    const T* v = nullptr;             // (B,Tk,NKV,HS_v)
    const T* dout = nullptr;          // (B,Tq,NH,HS_v), backward only
    const int* q_positions = nullptr; // (B,Tq)
    const int* k_positions = nullptr; // (B,Tk)
    const int* doc_start = nullptr;   // (B,Tq) first position of the query's document
    const float* slopes = nullptr;    // (NH) ALiBi, or null
    AttentionDims d = {};
    acc_t<T> scale = 0;      // 0: 1 / sqrt(HS)
    acc_t<T> softcap = 0;    // 0: no cap
    bool accumulate = false; // backward: dq, dk, dv += instead of =

    LLMC_HD const T* query(size_t b, size_t h, size_t i) const {
        return q + query_at(b, h, i);
    }
    LLMC_HD const T* gradient(size_t b, size_t h, size_t i) const {
        return dout + out_at(b, h, i);
    }
    // The index of a head's row: in q and dq; in k and dk; in v and dv; in out and dout.
    LLMC_HD size_t query_at(size_t b, size_t h, size_t i) const {
        return b * d.q_batch + i * d.q_stride + h * d.HS;
    }
    LLMC_HD size_t key_at(size_t b, size_t kh, size_t j) const {
        return b * d.k_batch + j * d.k_stride + kh * d.HS;
    }
    LLMC_HD size_t value_at(size_t b, size_t kh, size_t j) const {
        return b * d.v_batch + j * d.v_stride + kh * d.HS_v;
    }
    // out and dout are dense. Only q, k and v have strides.
    LLMC_HD size_t out_at(size_t b, size_t h, size_t i) const {
        return ((b * d.Tq + i) * d.NH + h) * d.HS_v;
    }
    // lse is (B,NH,Tq): the queries of a head are contiguous.
    LLMC_HD size_t lse_at(size_t b, size_t h, size_t i) const { return (b * d.NH + h) * d.Tq + i; }

    // Whether query i sees key j. `distance` receives the distance between their positions.
    LLMC_HD bool visible(size_t b, size_t i, size_t j, int& distance) const {
        // Padding at the end of a tile sees nothing and is not seen.
        if (i >= d.Tq || j >= d.Tk) return false;
        int at = k_positions[b * d.Tk + j];
        distance = q_positions[b * d.Tq + i] - at;
        return distance >= 0 && distance < d.window && at >= doc_start[b * d.Tq + i];
    }
    LLMC_HD float slope(size_t h) const { return slopes ? slopes[h] : 0; }

    // The product q.k after scale and softcap.
    LLMC_HD acc_t<T> capped(acc_t<T> product) const {
        acc_t<T> s = product * scale;
        return softcap == 0 ? s : softcap * std::tanh(s / softcap);
    }
    // The derivative of the cap, at the capped score s: 1 - tanh^2, where tanh is s / softcap.
    LLMC_HD acc_t<T> cap_derivative(acc_t<T> s) const {
        return softcap == 0 ? 1 : 1 - s / softcap * (s / softcap);
    }
};

// The same for operands. The scale 1 / sqrt(HS) keeps q.k near unit variance if q and k have it.
template <typename T>
AttentionOperands<T> completed(AttentionOperands<T> x) {
    x.d = completed(x.d);
    if (x.scale == 0)
        x.scale = 1 / std::sqrt(acc_t<T>(x.d.HS));
    return x;
}

// Return the fastest kernels that take these operands and results.
template <typename T, typename... Rs>
AttentionKernels attention_kernels(const AttentionOperands<T>& x, bool hopper, bool backward,
                                   const Rs*... results) {
    auto aligned = [](auto... p) { return ((uintptr_t(p) % 16 == 0) && ...); };
    if (!aligned(x.q, x.k, x.v, x.dout, results...))
        return AttentionKernels::PLAIN;
    return attention_kernels(x.d, {sizeof(T), x.softcap != 0, x.slopes != nullptr, backward},
                             hopper);
}

// Store x, or add it: *to = or += x.
template <typename O>
LLMC_HD inline void put(O* to, acc_t<O> x, bool accumulate) {
    *to = from_acc<O>(accumulate ? to_acc(*to) + x : x);
}

// ----------------------------------------------------------------------------
// CUDA's own 16-bit types, seen as the types that the kernels know

// Both kinds of types have the same layout, so the casts below change no bit and cost nothing.
template <typename T> struct NativeType { typedef T type; };
#if defined(__CUDA_BF16_H__) && defined(__CUDA_FP16_H__)
template <>
struct NativeType<__nv_bfloat16> { typedef bf16 type; };
template <>
struct NativeType<__half> { typedef fp16 type; };
#endif
template <typename T> using native_t = typename NativeType<T>::type;
template <typename T> constexpr bool IS_NATIVE = std::is_same_v<T, native_t<T>>;

// View a pointer, or all operands, as the native type.
template <typename T>
native_t<T>* as_native(T* p) { return reinterpret_cast<native_t<T>*>(p); }
template <typename T>
const native_t<T>* as_native(const T* p) {
    return reinterpret_cast<const native_t<T>*>(p);
}
template <typename T>
AttentionOperands<native_t<T>> as_native(const AttentionOperands<T>& x) {
    return {as_native(x.q), as_native(x.k), as_native(x.v), as_native(x.dout),
            x.q_positions,  x.k_positions,  x.doc_start,    x.slopes,
            x.d,            x.scale,        x.softcap,      x.accumulate};
}

// A layer's prefix (attention_join.cuh): its rows, and the gradients that training makes of them.
struct PrefixRows {
    const void *k = nullptr, *v = nullptr; // (n,NKV,HS); null: the layer has no prefix
    void *dk = nullptr, *dv = nullptr;     // (n,NKV,HS) acc; null: not training
    size_t n = 0;
    size_t stride = 0;       // elements between rows; 0: NKV HS, all heads of a row
    bool accumulate = false; // dk, dv += instead of =
};

} // namespace llmc
