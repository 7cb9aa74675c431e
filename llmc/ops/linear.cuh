// linear.cuh - the linear layer, forward and the two halves of backward; how weights are stored
//   out = inp W^T + bias (+ residual)
//   dinp = dout W,   dW = dout^T inp,   dbias = sum over rows of dout
//   inp, dinp (N,IC)   out, dout, residual (N,OC)   W (OC,IC)   bias (OC)   dW, dbias acc
//   Contract: out =   dinp, dW, dbias = or += (accumulate).  A Weight whose grad is null is frozen:
//             its gradient is skipped.  Bitwise repeatable for equal threads.
//   Cost: 2 N OC IC FLOPs each; the bias gradient reads dout once more.
//
//   fp8 (arXiv:2209.05433, 2412.19437): with Weight::fp8 set, its products read operands of 8 bits
//   (fp8.cuh). Sums, outputs, biases, residual and dW keep their own width.
//     product   operands     block: E4M3, a scale for        tensor: a scale for each operand
//     out       inp, W       1 x 128 of K, 128 x 128         E4M3, E4M3
//     dinp      dout, W      1 x 128 of K, 128 x 128         E5M2, E4M3
//     dW        dout, inp    128 rows of a column, both      E5M2, E4M3
//   Each product quantises its operands from bf16; codes are never quantised again. A W with an
//   Fp8Cast is quantised once a step, and an input of neighbouring products (q, k, v) once for all
//   but under `delayed`, to the same codes.
//   Recipe `block`: where 128 divides T, no block spans two micro-batches' rows, and where 128
//   divides a tensor-parallel rank's pieces, no block is cut. The same bf16 numbers then have the
//   same codes in every layout. (Tensor-parallel ranks round other sums to bf16 before.)
//   Recipe `mx`: MXFP8, E4M3 with a scale for 32 of K in all operands; as `block`, with 32 for 128.
//   Recipe `nvfp4`: 4 bits; as `mx`, with 16 for 32, and W in squares of 16 x 16 (nvfp4.cuh).
//   Recipe `tensor`: a scale covers the rows of one product, so they decide what underflows.
//   Recipe `delayed`: as `tensor`, with all ranks' scale of the steps before (fp8_delayed.cuh).
//   Tensor cores read the codes where cuBLASLt has the product (fp8_matmul.cuh). Elsewhere a bf16
//   product multiplies the codes' values, which are bf16 numbers: slower, the same sums. Either
//   way fp8 costs a pass over each operand; the scratch has room for two bytes an element.
//   To copy: this file, column_sums.cuh, element_type.h, elements.h, elementwise.cuh, fp8.cuh,
//            fp8_matmul.cuh, gpu.h, lora.cuh, matmul.cuh, nf4.cuh, nvfp4.cuh, partial_sums.cuh,
//            types.h and cuda_common.h.
#pragma once
#include <utility>
#include "column_sums.cuh"
#include "element_type.h"
#include "fp8.cuh"
#include "fp8_matmul.cuh"
#include "lora.cuh"
#include "matmul.cuh"
#include "nf4.cuh"
#include "nvfp4.cuh"
#include "types.h"

namespace llmc {

// The codes of a frozen weight: NF4; int8 with the absmax of each row; or int4 with a scale for
// each group of 128.
struct Narrow {
    Nf4 nf4 = {};
    const int8_t* int8 = nullptr;  // (OC,IC)
    const uint8_t* int4 = nullptr; // (OC,IC/2)
    const float* absmax = nullptr; // int8: (OC); int4: scales (OC,IC/128)
    void* values = nullptr;        // of a vector, which is not quantised

    bool is_matrix() const { return int8 || int4 || nf4.codes; }
};

// A weight's fp8 form, kept from the first product that reads it for the products that follow.
// `home` holds codes and then the codes of the transpose; or values, which serve both uses, but
// under `mx` W's alone.
struct Fp8Cast {
    unsigned char* home = nullptr; // (fp8_cast_bytes)
    mutable bool values = false, codes = false, turned = false; // what `home` holds now
};

// The fp8 form that an input's room holds, for products that share the input one after another.
enum class Fp8Holds : uint8_t { NOTHING, VALUES, CODES, TURNED };

// A parameter as the layers see it. Only this file knows how it is stored: type, codes, adapters.
struct Weight {
    void* data = nullptr; // (rows, cols) of `type`
    Type type = Type::F32;
    size_t rows = 0, cols = 0;    // OC, IC
    void* grad = nullptr;         // (rows, cols) acc; null: frozen
    const Narrow* narrow = nullptr; // codes that replace data
    Fp8 fp8 = Fp8::NONE;          // how its products quantise their operands
    const Lora* lora = nullptr;   // an adapter beside it, or null
    const LoraRuns* runs = nullptr; // several adapters at `lora`: which rows use which
    Fp8Late late = {};            // DELAYED: scales and amaxes of inp, W, dout, in this order
    const Fp8Cast* cast = nullptr; // where W's fp8 form is kept; null: nowhere
    template <typename T>
    T* as() const { return static_cast<T*>(data); }
};

// Whether a weight, or the adapter beside it, has a gradient that wants the product's input.
inline bool learns(const Weight& w) { return w.grad || (w.lora && w.lora->da); }

// ----------------------------------------------------------------------------
// the three products of a weight (OC, IC) with N rows

// Whether oneDNN copies W into its own layout before a product. The copy seldom pays: plain strides
// come within 8% of that layout. Two products repay it at every call (GPT-2's layers, AVX-512, one
// thread, copy included): dx in float, 270 GFLOP/s against 225; out and dx with thousands of rows,
// 2 to 5%. dW is never packed: += costs 1 to 4% more than = (15% where OC is a vocabulary, because
// there memory is the limit).
constexpr size_t LINEAR_PACK_ROWS = 2048;
constexpr size_t LINEAR_PACK_BYTES = size_t(32) << 20;

// Whether to pack W for a product; `input` says that the product is dinp.
inline bool linear_packs(size_t N, size_t OC, size_t IC, Type t, bool input) {
    if (OC * IC * type_bytes(t) > LINEAR_PACK_BYTES) return false;
    return N >= LINEAR_PACK_ROWS || (input && t == Type::F32 && N >= 128);
}

// out = inp W^T. The transpose of W is W with its strides exchanged.
inline Product linear_forward_product(size_t N, size_t OC, size_t IC, Type t) {
    return {N, OC, IC, {IC, 1}, {1, IC}, OC, false, linear_packs(N, OC, IC, t, false)};
}

// dinp = dout W.
inline Product linear_input_product(size_t N, size_t OC, size_t IC, Type t, bool accumulate) {
    return {N, IC, OC, {OC, 1}, {IC, 1}, IC, accumulate, linear_packs(N, OC, IC, t, true)};
}

// dW = dout^T inp. Its sum runs over the N rows.
inline Product linear_weight_product(size_t N, size_t OC, size_t IC, bool accumulate) {
    return {OC, IC, N, {1, OC}, {IC, 1}, IC, accumulate};
}

// The largest scratch that any of the three products needs.
template <typename T>
size_t linear_scratch_bytes(size_t N, size_t OC, size_t IC, Cpu where) {
    Type t = type_of<T>();        // of W and activations
    Type a = type_of<acc_t<T>>(); // of gradients
    int threads = threads_here(where);
    size_t most = 0;
    auto need = [&](const Product& p, Type out, bool bias, bool residual) {
        most = std::max(most, matmul_scratch_bytes(p, t, out, bias, residual, threads));
    };

    // Ask for every form: with and without bias and residual, = and +=.
    for (int extra = 0; extra < 4; extra++)
        need(linear_forward_product(N, OC, IC, t), t, extra & 1, extra & 2);
    for (bool accumulate : {false, true}) {
        need(linear_input_product(N, OC, IC, t, accumulate), t, false, false);
        need(linear_weight_product(N, OC, IC, accumulate), a, false, false);
    }
    return most;
}

// The scratch of a forward product whose output is in acc, such as a router's.
template <typename T, typename S>
size_t wide_product_scratch_bytes(size_t N, size_t OC, size_t IC, S where) {
    Product p = linear_forward_product(N, OC, IC, type_of<T>());
    p.pack_b = false;

    // A router with a bias adds to rows that hold it already.
    Product added = p;
    added.accumulate = true;
    return matmul_scratch_bytes({p, added}, type_of<T>(), type_of<acc_t<T>>(), where);
}

// ----------------------------------------------------------------------------
// CUDA: the scratch of the launchers below

#if LLMC_KERNELS
// cuBLASLt's workspace and the partial sums of the bias gradient use the scratch in turn.
template <typename T>
size_t linear_scratch_bytes(size_t N, size_t OC, size_t, cudaStream_t stream) {
    return std::max(PRODUCT_WORKSPACE, column_sums_scratch_bytes(N, OC, stream));
}
#endif

// ----------------------------------------------------------------------------
// fp8: what products read instead of their operands

// Bytes of one operand: a word for its largest magnitude, padded to FP8_ALIGN, then its values.
inline size_t linear_operand_bytes(size_t rows, size_t cols) {
    return FP8_ALIGN + round_up(rows * cols * sizeof(bf16), FP8_ALIGN);
}

// Bytes of the codes of a weight or of its transpose: the same word, then codes, then scales.
inline size_t fp8_codes_bytes(size_t rows, size_t cols, Fp8 fp8) {
    auto bytes = [&](Fp8Blocks blocks) { return fp8_scale_bytes(rows, cols, blocks); };
    size_t squares = std::max(bytes(Fp8Blocks::SQUARES), bytes(Fp8Blocks::SQUARES_T));
    size_t mx = bytes(Fp8Blocks::MX_ROWS); // NVFP4 has at most twice as many
    size_t most = fp8 == Fp8::MX ? mx : fp8 == Fp8::NVFP4 ? 2 * mx : squares;
    return FP8_ALIGN + round_up(round_up(rows * cols, 16) + most, FP8_ALIGN);
}

// Bytes of an Fp8Cast: the codes of a weight, and of its transpose.
inline size_t fp8_cast_bytes(size_t rows, size_t cols, Fp8 fp8) {
    return 2 * fp8_codes_bytes(rows, cols, fp8);
}

// The scratch for the operands of any of the three products. It follows the product's own.
inline size_t linear_fp8_bytes(size_t N, size_t OC, size_t IC, Fp8 fp8) {
    if (fp8 == Fp8::NONE) return 0;
    // The scratch may end anywhere between multiples of FP8_ALIGN; the first term allows for that.
    size_t inp = linear_operand_bytes(N, IC);
    size_t dout = linear_operand_bytes(N, OC);
    size_t w = linear_operand_bytes(OC, IC);
    return FP8_ALIGN + std::max({inp + w, dout + w, dout + inp});
}

// The values of W (OC,IC): its own, or dequantised into blas.wide by each call. Beside a product of
// many rows this is little work (2% at 8192 rows of bf16); beside a product of one row it is most
// of the work.
template <typename T, typename S>
const T* values_of(const Weight& w, Blas& blas, S where) {
    if (!w.narrow) return w.as<const T>();
    T* wide = static_cast<T*>(blas.wide);
    const Narrow& codes = *w.narrow;
    if (codes.int8) {
        int8_dequantize(wide, codes.int8, codes.absmax, w.rows, w.cols, where);
    } else if (codes.int4) {
        int4_dequantize(wide, codes.int4, codes.absmax, w.rows, w.cols, where);
    } else {
        nf4_dequantize(wide, codes.nf4, w.rows * w.cols, where);
    }
    return wide;
}

// An operand of a product, and how fp8 cuts it into blocks under recipe `block`.
template <typename T> struct LinearOperand {
    const T* x; // (rows,cols)
    size_t rows, cols;
    Fp8Blocks blocks;
    bool turned;   // the product sums over rows: use the codes of the transpose
    bool gradient; // magnitudes vary widely: under one scale it wants E5M2
    Fp8Late late;  // for recipe `delayed`
    const Fp8Cast* cast = nullptr; // of a weight whose fp8 form is kept
    Fp8Holds* shared = nullptr;    // of an input that the product before may have cast
};

// Takes room for a product's operands from the end of the scratch, and gives it back when it is
// destroyed, after the product has been issued.
template <typename T, typename S> struct Fp8Operands {
    using enum Fp8Blocks;
    Fp8 fp8;
    Blas& blas;
    S where;
    size_t whole = blas.scratch_bytes;

    ~Fp8Operands() { blas.scratch_bytes = whole; }

    // Whether operands have one scale; whether an operand's codes are e5m2; how it is
    // cut into blocks.
    bool tensor() const { return fp8 == Fp8::TENSOR || fp8 == Fp8::DELAYED; }
    bool wide(const LinearOperand<T>& o) const { return tensor() && o.gradient; }
    Fp8Blocks blocks(const LinearOperand<T>& o) const {
        Fp8Blocks mx = o.turned ? MX_COLUMNS : MX_ROWS;
        if (fp8 == Fp8::NVFP4) return o.turned ? NVFP4_COLUMNS : NVFP4_ROWS;
        return tensor() ? WHOLE : fp8 == Fp8::MX ? mx : o.blocks;
    }

    // W has squares, both operands of dW are transformed, and gradients are rounded at random.
    Nvfp4 nvfp4(const LinearOperand<T>& o) const {
        bool squares = o.blocks == SQUARES || o.blocks == SQUARES_T;
        Nvfp4 how = {o.rows, o.cols, o.cols, 1, squares, o.blocks == COLUMNS, o.gradient};
        if (o.turned)
            how.outer = o.cols, how.K = o.rows, how.row = 1, how.column = o.cols;
        return how;
    }

    // Take room from the end: a word for the maximum, then values, or codes and scales.
    unsigned char* room(const LinearOperand<T>& o) {
        size_t bytes = linear_operand_bytes(o.rows, o.cols);
        LLMC_CHECK(bytes <= blas.scratch_bytes, "fp8 wants %zu bytes of scratch, has %zu", bytes,
                   blas.scratch_bytes);
        blas.scratch_bytes = (blas.scratch_bytes - bytes) / FP8_ALIGN * FP8_ALIGN;
        return static_cast<unsigned char*>(blas.scratch) + blas.scratch_bytes;
    }

    // Whether the room of a shared input holds this already; from now on it does. Under delayed
    // scaling each matrix has a scale and a maximum of its own.
    bool holds(const LinearOperand<T>& o, Fp8Holds what) const {
        return o.shared && fp8 != Fp8::DELAYED && std::exchange(*o.shared, what) == what;
    }

    // The values (rows,cols) that the codes of o.x stand for.
    const T* values(const LinearOperand<T>& o) {
        // Use the weight's kept values if they are there.
        // The transpose of MX has other values, for which there is no room.
        bool kept = o.cast && !o.cast->codes && !o.cast->turned && !(fp8 == Fp8::MX && o.turned);
        unsigned char* word = kept ? o.cast->home : room(o);
        T* values = reinterpret_cast<T*>(word + FP8_ALIGN);
        if (kept && std::exchange(o.cast->values, true)) return values;
        if (holds(o, Fp8Holds::VALUES)) return values;

        // Quantise, and write values in the place of codes.
        auto quantise = [&](auto format) {
            fp8_quantise<decltype(format), T>(values, nullptr, nullptr, o.x,
                                              reinterpret_cast<uint32_t*>(word), o.rows, o.cols,
                                              blocks(o), where, o.late);
        };
        if (fp8 == Fp8::NVFP4)
            nvfp4_quantise(values, nullptr, reinterpret_cast<Nvfp4Head*>(word), o.x, nvfp4(o),
                           where);
        else
            wide(o) ? quantise(e5m2()) : quantise(e4m3());
        return values;
    }

    // The codes, laid out so that the product's sum runs along rows, then their scales.
    Fp8Operand codes(const LinearOperand<T>& o) {
        // Use the weight's kept codes if they are there.
        bool kept = o.cast && !o.cast->values;
        unsigned char* word = kept ? o.cast->home : room(o);
        if (kept && o.turned)
            word += fp8_codes_bytes(o.rows, o.cols, fp8);
        unsigned char* codes = word + FP8_ALIGN;
        unsigned char* inverse = codes + round_up(o.rows * o.cols, 16);
        auto* head = reinterpret_cast<Nvfp4Head*>(word);
        Fp8Operand operand = {codes, inverse, blocks_read(o), wide(o), head};
        if (kept && std::exchange(o.turned ? o.cast->turned : o.cast->codes, true))
            return operand;
        if (holds(o, o.turned ? Fp8Holds::TURNED : Fp8Holds::CODES)) return operand;

        // Check that codes and scales fit where values would.
        size_t scales = fp8_scale_bytes(o.rows, o.cols, blocks(o));
        size_t end = FP8_ALIGN + round_up(o.rows * o.cols, 16) + scales;
        LLMC_CHECK(end <= linear_operand_bytes(o.rows, o.cols),
                   "codes and scales of %zu x %zu do not fit where values would", o.rows, o.cols);

        // Quantise the operand, or its transpose.
        auto quantise = [&](auto* rows) {
            typedef std::remove_pointer_t<decltype(rows)> F;
            fp8_quantise<F>(o.turned ? nullptr : rows, o.turned ? rows : nullptr, inverse, o.x,
                            reinterpret_cast<uint32_t*>(word), o.rows, o.cols, blocks(o), where,
                            o.late);
        };
        if (fp8 == Fp8::NVFP4)
            nvfp4_quantise(reinterpret_cast<uint64_t*>(codes), inverse, head, o.x, nvfp4(o), where);
        else
            wide(o) ? quantise(reinterpret_cast<e5m2*>(codes))
                    : quantise(reinterpret_cast<e4m3*>(codes));
        return operand;
    }

    // Take both operands. A shared input is the first: its room is where the last product left it.
    template <typename F> auto both(const LinearOperand<T>& a, const LinearOperand<T>& b, F take) {
        if (!b.shared) {
            auto first = take(a);
            return std::pair(first, take(b));
        }
        auto second = take(b);
        return std::pair(take(a), second);
    }

    // The blocks as the product sees them: columns of x are rows of its transpose.
    Fp8Blocks blocks_read(const LinearOperand<T>& o) const {
        switch (blocks(o)) {
        case COLUMNS: return ROWS;
        case SQUARES_T: return SQUARES;
        case MX_COLUMNS: return MX_ROWS;
        case NVFP4_COLUMNS: return NVFP4_ROWS;
        default: return blocks(o);
        }
    }
};

// One of the three products: of operands as they are, of their fp8 codes, or of the codes' values.
template <typename T, typename O, typename S>
void linear_product(O* out, const LinearOperand<T>& a, const LinearOperand<T>& b, const T* bias,
                    const O* residual, const Product& p, Fp8 fp8, Blas& blas, S where) {
    if (fp8 == Fp8::NONE)
        return matmul(out, a.x, b.x, bias, residual, p, blas, where);
    LLMC_CHECK(type_of<T>() == Type::BF16, "fp8 quantises bf16, not %s", type_name(type_of<T>()));
    if constexpr (type_of<T>() == Type::BF16) {
        // Multiply codes where tensor cores have the product.
        Fp8Operands<T, S> operands = {fp8, blas, where};
        Fp8Product q = {p.M, p.N, p.K, operands.blocks_read(a), operands.blocks_read(b),
                        operands.wide(a), operands.wide(b), type_of<O>(), p.accumulate};
        if constexpr (!std::is_same_v<S, Cpu>)
            if (fp8_multiplies(q, blas, where)) {
                auto codes = [&](const LinearOperand<T>& o) { return operands.codes(o); };
                auto [first, second] = operands.both(a, b, codes);
                return fp8_matmul(out, first, second, bias, residual, q, blas, where);
            }

        // Otherwise multiply the values of the codes.
        auto values = [&](const LinearOperand<T>& o) { return operands.values(o); };
        auto [first, second] = operands.both(a, b, values);
        matmul(out, first, second, bias, residual, p, blas, where);
    }
}

// ----------------------------------------------------------------------------
// anywhere

// The room (N,r) between an adapter's two products.
template <typename T> T* lora_room(Blas& blas) { return static_cast<T*>(blas.room); }

// out = inp W^T + bias + residual in one product. An adapter then adds its part. Products of one
// inp that follow each other may pass one `shared`: under fp8 the first casts inp for all.
template <typename T, typename S>
void linear_forward(T* out, const T* inp,                  // (N,OC) (N,IC)
                    const Weight& w, const Weight* bias,   // (OC,IC) (OC) or null
                    const T* residual,                     // (N,OC) or null
                    size_t N, Blas& blas, S where, Fp8Holds* shared = nullptr) {
    const T* b = bias ? bias->as<const T>() : nullptr;
    Product p = linear_forward_product(N, w.rows, w.cols, type_of<T>());
    // The sum runs along the rows of both operands.
    LinearOperand<T> x = {inp, N, w.cols, Fp8Blocks::ROWS, false, false, w.late.at(0), nullptr,
                          shared};
    LinearOperand<T> weight = {values_of<T>(w, blas, where), w.rows, w.cols, Fp8Blocks::SQUARES,
                               false, false, w.late.at(1), w.cast};
    linear_product(out, x, weight, b, residual, p, w.fp8, blas, where);
    if (w.runs)
        lora_batch_forward(out, inp, w.lora, *w.runs, lora_room<T>(blas), w.rows, w.cols, blas,
                           where);
    else if (w.lora)
        lora_forward(out, inp, *w.lora, lora_room<T>(blas), N, w.rows, w.cols, blas, where);
}

// dinp = or += dout W. An adapter then adds its part.
template <typename T, typename S>
void linear_backward_input(T* dinp, const T* dout, const Weight& w, // (N,IC) (N,OC) (OC,IC)
                           size_t N, bool accumulate, Blas& blas, S where) {
    const T* nothing = nullptr;
    Product p = linear_input_product(N, w.rows, w.cols, type_of<T>(), accumulate);
    // This sum runs along the columns of W. Square blocks serve it as well.
    LinearOperand<T> dy = {dout, N, w.rows, Fp8Blocks::ROWS, false, true, w.late.at(2)};
    LinearOperand<T> weight = {values_of<T>(w, blas, where), w.rows, w.cols, Fp8Blocks::SQUARES_T,
                               true, false, w.late.at(1), w.cast};
    linear_product(dinp, dy, weight, nothing, nothing, p, w.fp8, blas, where);
    if (w.lora)
        lora_backward_input(dinp, dout, *w.lora, lora_room<T>(blas), N, w.rows, w.cols, blas,
                            where);
}

// dW = or += dout^T inp, dbias = or += the sum of dout's rows. A frozen gradient is skipped.
// shared: as in linear_forward
template <typename T, typename S>
void linear_backward_weight(const Weight& w, const Weight* bias, // their grads: (OC,IC) (OC)
                            const T* dout, const T* inp,         // (N,OC) (N,IC)
                            size_t N, bool accumulate, Blas& blas, S where,
                            Fp8Holds* shared = nullptr) {
    typedef acc_t<T> A;
    const T* no_bias = nullptr;
    const A* no_residual = nullptr;
    Product p = linear_weight_product(N, w.rows, w.cols, accumulate);
    // The sum runs over rows, so a block of either operand is 128 rows of one column.
    LinearOperand<T> dy = {dout, N, w.rows, Fp8Blocks::COLUMNS, true, true, w.late.at(2)};
    LinearOperand<T> x = {inp, N, w.cols, Fp8Blocks::COLUMNS, true, false, w.late.at(0), nullptr,
                          shared};
    if (w.grad)
        linear_product(static_cast<A*>(w.grad), dy, x, no_bias, no_residual, p, w.fp8, blas, where);
    if (w.lora)
        lora_backward_weight(*w.lora, dout, inp, lora_room<T>(blas), N, w.rows, w.cols, accumulate,
                             blas, where);
    // The bias gradient comes after the product because both use the one scratch.
    if (bias && bias->grad)
        column_sums(static_cast<A*>(bias->grad), dout, blas.scratch, N, w.rows, accumulate, where);
}

} // namespace llmc
