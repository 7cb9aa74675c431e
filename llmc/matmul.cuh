// matmul.cuh - matrix products on raw pointers: out (M,N) = a (M,K) b (K,N), each with any strides
//   Behind it: oneDNN where the build has it, blocked loops of our own otherwise, and always for
//   double, the reference.
//   Blas is a rank's handle: the products made so far, and the scratch that the caller planned. No
//   hidden state.
//   a, b (T) with strides {row, column} in elements   out T or acc_t<T>, rows contiguous   bias
//   (N) T   residual as out
//   Contract: out = or += (accumulate) the product, + bias, + residual.  Bitwise repeatable for
//   equal threads; our
//             own loops for any number of threads.
//   Cost: 2 M N K FLOPs.
//   To copy: this file and common.h.
#pragma once
#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>
#include "common.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef WITH_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#endif

inline int threads_here(Cpu) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

inline int thread_here() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

struct Strides { // element (i,j) lies at i * row + j * column
    size_t row, column;
};

struct Product { // what a product is, but for its pointers
    size_t M, N, K;
    Strides a, b;
    size_t out_row; // elements between rows of out
    bool accumulate = false;
    bool pack_b = false; // oneDNN first copies b to the scratch in the layout it likes best
};

#ifdef WITH_ONEDNN
struct MadeProduct {
    dnnl::stream stream;
    dnnl::matmul primitive;
    std::unordered_map<int, dnnl::memory> args; // pointed at the operands before each run
    size_t scratch_bytes = 0;                   // the primitive's own, or the packing's
    dnnl::reorder pack;                         // with pack_b alone, as what follows
    std::unordered_map<int, dnnl::memory> pack_args;
    size_t packed_bytes = 0; // of b, at the end of the scratch
};
typedef std::tuple<size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, int> ProductKey;
#endif

struct Blas {
    void* scratch = nullptr; // of the action that runs, from the caller's arena
    size_t scratch_bytes = 0;
#ifdef WITH_ONEDNN
    dnnl::engine engine = dnnl::engine(dnnl::engine::kind::cpu, 0);
    // Products made so far: [0] by the whole rank, [1 + t] by thread t alone, inside a parallel
    // region.
    typedef std::map<ProductKey, MadeProduct> Products;
    std::vector<Products> made = std::vector<Products>(1 + size_t(threads_here(Cpu{})));
#endif
};

inline void blas_scratch(Blas& blas, void* scratch, size_t bytes) {
    blas.scratch = scratch, blas.scratch_bytes = bytes;
}

inline const char* matmul_backend() {
#ifdef WITH_ONEDNN
    return "matrix products by oneDNN";
#else
    return "matrix products by plain loops (oneDNN makes them faster: install libdnnl-dev)";
#endif
}

// ----------------------------------------------------------------------------
// CPU: our own loops. A thread packs a panel of b, columns side by side, and runs tiles of 4 rows
// over it.

constexpr size_t PANEL = 64; // columns

inline size_t matmul_plain_scratch_bytes(size_t K, size_t acc_bytes, int threads) {
    return size_t(threads) * K * PANEL * acc_bytes;
}

template <typename T, typename O>
void store_tile_row(O* out, const acc_t<T>* sum, size_t count, bool accumulate, const T* bias,
                    const O* residual) {
    for (size_t j = 0; j < count; j++) {
        acc_t<T> x = accumulate ? to_acc(out[j]) + sum[j] : sum[j];
        if (bias) x += to_acc(bias[j]);
        if (residual) x += to_acc(residual[j]);
        out[j] = from_acc<O>(x);
    }
}

// Columns [j0, j0 + count) of out, all rows.
template <typename T, typename O>
void matmul_panel(O* out, const T* a, const T* b, const T* bias, const O* residual,
                  const Product& p, size_t j0, size_t count, acc_t<T>* panel) {
    typedef acc_t<T> A;
    typedef A Vector __attribute__((vector_size(64), aligned(alignof(A))));
    constexpr size_t LANES = 64 / sizeof(A), VECTORS = PANEL / LANES;
    for (size_t k = 0; k < p.K; k++)
        for (size_t j = 0; j < PANEL; j++)
            panel[k * PANEL + j] =
                j < count ? to_acc(b[k * p.b.row + (j0 + j) * p.b.column]) : A(0);
    for (size_t i0 = 0; i0 < p.M; i0 += 4) {
        size_t rows = std::min(p.M - i0, size_t(4));
        Vector sum[4][VECTORS] = {};
        for (size_t k = 0; k < p.K; k++) {
            const Vector* bk = reinterpret_cast<const Vector*>(panel + k * PANEL);
            for (size_t r = 0; r < 4; r++) {
                A x = r < rows ? to_acc(a[(i0 + r) * p.a.row + k * p.a.column]) : A(0);
                for (size_t v = 0; v < VECTORS; v++) sum[r][v] += x * bk[v];
            }
        }
        for (size_t r = 0; r < rows; r++) {
            size_t at = (i0 + r) * p.out_row + j0;
            store_tile_row<T, O>(out + at, reinterpret_cast<const A*>(sum[r]), count, p.accumulate,
                                 bias ? bias + j0 : nullptr, residual ? residual + at : nullptr);
        }
    }
}

template <typename T, typename O>
void matmul_plain(O* out, const T* a, const T* b, const T* bias, const O* residual,
                  const Product& p, void* scratch) {
    #pragma omp parallel for
    for (size_t j0 = 0; j0 < p.N; j0 += PANEL)
        matmul_panel(out, a, b, bias, residual, p, j0, std::min(PANEL, p.N - j0),
                     static_cast<acc_t<T>*>(scratch) + size_t(thread_here()) * p.K * PANEL);
}

// ----------------------------------------------------------------------------
// CPU: oneDNN

#ifdef WITH_ONEDNN
inline dnnl::memory::data_type dnnl_type(Type t) {
    return t == Type::BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// bit 0 bias, bit 1 residual, bit 2 accumulate, bit 3 bf16 in, bit 4 bf16 out, bit 5 b packed
inline int product_flags(const Product& p, Type in, Type out, bool bias, bool residual) {
    return int(bias) | int(residual) << 1 | int(p.accumulate) << 2 | int(in == Type::BF16) << 3 |
           int(out == Type::BF16) << 4 | int(p.pack_b) << 5;
}

inline dnnl::memory::desc matrix_desc(size_t rows, size_t cols, Type t, Strides s) {
    typedef dnnl::memory::dims dims;
    return dnnl::memory::desc(dims{long(rows), long(cols)}, dnnl_type(t),
                              dims{long(s.row), long(s.column)});
}

inline dnnl::primitive_attr product_attr() {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return attr;
}

inline dnnl::matmul::primitive_desc describe_product(const dnnl::engine& engine, const Product& p,
                                                     Type in, Type out, bool bias, bool residual) {
    auto a = matrix_desc(p.M, p.K, in, p.a), b = matrix_desc(p.K, p.N, in, p.b);
    auto o = matrix_desc(p.M, p.N, out, {p.out_row, 1});
    if (p.pack_b)
        b = dnnl::memory::desc({long(p.K), long(p.N)}, dnnl_type(in),
                               dnnl::memory::format_tag::any);
    dnnl::post_ops post;
    if (p.accumulate) post.append_sum(1.0f);
    if (residual) post.append_binary(dnnl::algorithm::binary_add, o);
    dnnl::primitive_attr attr = product_attr();
    attr.set_post_ops(post);
    if (!bias) return {dnnl::matmul::desc(a, b, o), attr, engine};
    return {dnnl::matmul::desc(a, b, matrix_desc(1, p.N, in, {p.N, 1}), o), attr, engine};
}

// The argument of the residual, a post-op, which is numbered in their order.
inline int residual_arg(const Product& p) {
    return DNNL_ARG_ATTR_MULTIPLE_POST_OP(p.accumulate ? 1 : 0) | DNNL_ARG_SRC_1;
}

inline MadeProduct make_product(const dnnl::engine& engine, const Product& p, Type in, Type out,
                                bool bias, bool residual) {
    auto d = describe_product(engine, p, in, out, bias, residual);
    auto unbound = [&](const dnnl::memory::desc& x) {
        return dnnl::memory(x, engine, DNNL_MEMORY_NONE);
    };
    MadeProduct m;
    m.stream = dnnl::stream(engine), m.primitive = dnnl::matmul(d);
    m.args = {{DNNL_ARG_SRC, unbound(d.src_desc())},
              {DNNL_ARG_WEIGHTS, unbound(d.weights_desc())},
              {DNNL_ARG_DST, unbound(d.dst_desc())},
              {DNNL_ARG_SCRATCHPAD, unbound(d.scratchpad_desc())}};
    if (bias) m.args[DNNL_ARG_BIAS] = unbound(d.bias_desc());
    if (residual) m.args[residual_arg(p)] = unbound(d.dst_desc());
    m.scratch_bytes = round_up(d.scratchpad_desc().get_size(), 64);
    if (!p.pack_b) return m;

    auto b = matrix_desc(p.K, p.N, in, p.b);
    dnnl::reorder::primitive_desc pack(engine, b, engine, d.weights_desc(), product_attr());
    m.pack = dnnl::reorder(pack);
    m.pack_args = {{DNNL_ARG_FROM, unbound(b)},
                   {DNNL_ARG_TO, m.args[DNNL_ARG_WEIGHTS]},
                   {DNNL_ARG_SCRATCHPAD, unbound(pack.scratchpad_desc())}};
    m.scratch_bytes = std::max(m.scratch_bytes, round_up(pack.scratchpad_desc().get_size(), 64));
    m.packed_bytes = d.weights_desc().get_size();
    return m;
}

inline const MadeProduct& find_product(Blas& blas, size_t cache, const Product& p, Type in,
                                       Type out, bool bias, bool residual) {
    int flags = product_flags(p, in, out, bias, residual);
    ProductKey key = {p.M, p.N, p.K, p.a.row, p.a.column, p.b.row, p.b.column, p.out_row, flags};
    Blas::Products& made = blas.made[cache];
    auto it = made.find(key);
    if (it == made.end())
        it = made.insert({key, make_product(blas.engine, p, in, out, bias, residual)}).first;
    return it->second;
}

inline void point(const std::unordered_map<int, dnnl::memory>& args, int arg, const void* data) {
    args.at(arg).set_data_handle(const_cast<void*>(data));
}

inline void run_product(const MadeProduct& m, void* out, const void* a, const void* b,
                        const void* bias, const void* residual, const Product& p, void* scratch) {
    if (m.packed_bytes) {
        void* packed = static_cast<unsigned char*>(scratch) + m.scratch_bytes;
        point(m.pack_args, DNNL_ARG_FROM, b), point(m.pack_args, DNNL_ARG_TO, packed);
        point(m.pack_args, DNNL_ARG_SCRATCHPAD, scratch);
        m.pack.execute(m.stream, m.pack_args);
        b = packed;
    }
    point(m.args, DNNL_ARG_SRC, a), point(m.args, DNNL_ARG_WEIGHTS, b),
        point(m.args, DNNL_ARG_DST, out);
    if (bias) point(m.args, DNNL_ARG_BIAS, bias);
    if (residual) point(m.args, residual_arg(p), residual);
    point(m.args, DNNL_ARG_SCRATCHPAD, scratch);
    m.primitive.execute(m.stream, m.args);
}
#endif

// ----------------------------------------------------------------------------
// one function for both

inline size_t matmul_scratch_bytes(const Product& p, Type in, Type out, bool bias, bool residual,
                                   int threads) {
#ifdef WITH_ONEDNN
    if (in != Type::F64) {
        MadeProduct m =
            make_product(dnnl::engine(dnnl::engine::kind::cpu, 0), p, in, out, bias, residual);
        return m.scratch_bytes + m.packed_bytes;
    }
#endif
    (void)out, (void)bias, (void)residual;
    return matmul_plain_scratch_bytes(p.K, in == Type::F64 ? 8 : 4, threads);
}

// `cache` 0: all threads of the rank work; 1 + t: thread t of a parallel region works alone.
// `scratch` is the caller's.
template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, size_t cache, void* scratch, size_t scratch_bytes, Cpu) {
#ifdef WITH_ONEDNN
    if constexpr (!std::is_same_v<T, double>) {
        const MadeProduct& m =
            find_product(blas, cache, p, type_of<T>(), type_of<O>(), bias, residual);
        CHECK(m.scratch_bytes + m.packed_bytes <= scratch_bytes,
              "a product of %zu x %zu x %zu needs %zu bytes of scratch, the plan gave %zu", p.M,
              p.N, p.K, m.scratch_bytes + m.packed_bytes, scratch_bytes);
        run_product(m, out, a, b, bias, residual, p, scratch);
        return;
    }
#endif
    (void)blas, (void)cache;
    CHECK(matmul_plain_scratch_bytes(p.K, sizeof(acc_t<T>), 1) <= scratch_bytes,
          "a product over %zu needs more scratch than %zu bytes", p.K, scratch_bytes);
    matmul_plain(out, a, b, bias, residual, p, scratch);
}

template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, Cpu where) {
    matmul(out, a, b, bias, residual, p, blas, 0, blas.scratch, blas.scratch_bytes, where);
}
