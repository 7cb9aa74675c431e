// lora_grouped.cuh - low-rank adapters beside each of an expert stack's matrices - arXiv:2106.09685
//   Rows [starts[e], starts[e+1]) belong to expert e, which has A_e and B_e of two stacks of E:
//     out += s (inp A_e^T) B_e^T        dB_e = or += s dout_e^T (inp_e A_e^T)
//     dinp += s (dout B_e) A_e          dA_e = or += s (dout_e B_e)^T inp_e
//   inp, dinp (M,IC)   out, dout (M,OC)   A (E,r,IC)   B (E,OC,r)   dA, dB acc   room (M,r)
//   All experts have one rank and one s, so that each of the six products of lora.cuh is one
//   grouped product: a single launch on a GPU.
//   Contract: out, dinp +=   dA, dB = or += (accumulate); those of an expert without rows become 0,
//             or are left unchanged when accumulating. Bitwise repeatable.
//   Cost: 2 M r (IC + OC) FLOPs forward and 8 M r (IC + OC) backward. Tensor cores take ranks that
//         are multiples of 8.
//   To copy: this file, element_type.h, elements.h, elementwise.cuh, gpu.h, grouped_matmul.cuh,
//            grouped_mma.cuh, grouped_sm90.cuh, hopper.cuh, lora.cuh, matmul.cuh, mma.cuh,
//            tensor_cores.h, types.h and cuda_common.h.
#pragma once
#include "grouped_matmul.cuh"
#include "grouped_mma.cuh"
#include "lora.cuh"
#include "types.h"

namespace llmc {

// The stacks A and B beside a stack of E matrices (OC,IC), as grouped products take them.
struct LoraStacks {
    Groups a, b; // (E,r,IC) (E,OC,r)
};
inline LoraStacks lora_stacks(const Groups& g, size_t r) {
    Groups a = g, b = g;
    a.OC = r;
    b.IC = r;
    return {a, b};
}

// The largest scratch that any of the products needs.
template <typename T, typename S>
size_t lora_grouped_scratch_bytes(const Groups& g, size_t r, S where) {
    auto [a, b] = lora_stacks(g, r);
    return std::max(grouped_scratch_bytes<T>(a, where), grouped_scratch_bytes<T>(b, where));
}

// room = s inp A_e^T. Rows that no expert has are scaled too, and never read.
template <typename T, typename S>
void lora_narrow_rows(T* room, const T* inp, const Lora& l, const Groups& a, Blas& blas, S where) {
    const T* stack = static_cast<const T*>(l.a);
    grouped_forward(room, inp, stack, a, false, blas, where);
    lora_scale(room, a.M * l.rank, l.scale, where);
}

// room = s dout B_e.
template <typename T, typename S>
void lora_narrow_gradients(T* room, const T* dout, const Lora& l, const Groups& b, Blas& blas,
                           S where) {
    const T* stack = static_cast<const T*>(l.b);
    grouped_backward_input(room, dout, stack, b, false, blas, where);
    lora_scale(room, b.M * l.rank, l.scale, where);
}

// out += s (inp A_e^T) B_e^T.
template <typename T, typename S>
void lora_grouped_forward(T* out, const T* inp, const Lora& l, T* room, // (M,OC) (M,IC)
                          const Groups& g, Blas& blas, S where) {
    auto [a, b] = lora_stacks(g, l.rank);
    lora_narrow_rows(room, inp, l, a, blas, where);
    const T* stack = static_cast<const T*>(l.b);
    grouped_forward(out, room, stack, b, true, blas, where);
}

// dinp += s (dout B_e) A_e. The base's product comes first: it writes dinp or adds to it.
template <typename T, typename S>
void lora_grouped_backward_input(T* dinp, const T* dout, const Lora& l, T* room, // (M,IC) (M,OC)
                                 const Groups& g, Blas& blas, S where) {
    auto [a, b] = lora_stacks(g, l.rank);
    lora_narrow_gradients(room, dout, l, b, blas, where);
    const T* stack = static_cast<const T*>(l.a);
    grouped_backward_input(dinp, room, stack, a, true, blas, where);
}

// dB_e = or += s dout_e^T (inp_e A_e^T),  dA_e = or += s (dout_e B_e)^T inp_e
template <typename T, typename S>
void lora_grouped_backward_weight(const Lora& l, const T* dout, const T* inp, // (M,OC) (M,IC)
                                  T* room, const Groups& g, bool accumulate, Blas& blas, S where) {
    typedef acc_t<T> A;
    auto [a, b] = lora_stacks(g, l.rank);
    // The room serves both gradients, one after the other.
    lora_narrow_rows(room, inp, l, a, blas, where);
    A* db = static_cast<A*>(l.db);
    grouped_backward_weight(db, dout, room, b, accumulate, blas, where);

    // dA, a sum over the same rows.
    A* da = static_cast<A*>(l.da);
    lora_narrow_gradients(room, dout, l, b, blas, where);
    grouped_backward_weight(da, room, inp, a, accumulate, blas, where);
}

} // namespace llmc
