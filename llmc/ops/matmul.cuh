// matmul.cuh - matrix products on raw pointers: out (M,N) = a (M,K) b (K,N), each with any strides
//   On the CPU: oneDNN where the build has it, else blocked loops of our own. The loops also serve
//   fp16, and double as the tests' reference. On the GPU: cuBLASLt; in the emulator the same loops.
//   Blas is a rank's handle: the products made so far, and the scratch that the caller planned.
//   a, b (T) with strides {row, column} in elements, one of them 1 on the GPU
//   out T or acc_t<T>, rows contiguous   bias (N) T   residual as out
//   Contract: out = or += (accumulate) the product, + bias, + residual.  Bitwise repeatable: our
//             own loops for any number of threads, oneDNN for an equal number, the GPU for an
//             equal choice of algorithm, which is measured once (blas_rehearse) and kept in a file.
//   Cost: 2 M N K FLOPs.
//   To copy: this file, element_type.h, gpu.h, types.h and cuda_common.h.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
#include "cuda_common.h"
#include "element_type.h"
#include "gpu.h"
#include "types.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef WITH_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#endif
#if defined(__CUDACC__)
#include <cublasLt.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace llmc {

// The bytes of scratch that cuBLAS asks for on Hopper. The emulator's are few, but not 0, so that a
// plan that forgets them fails in the tests.
#ifdef EMULATE
constexpr size_t PRODUCT_WORKSPACE = 256;
#else
constexpr size_t PRODUCT_WORKSPACE = size_t(32) << 20;
#endif

// Set by a thread that places a plan for a GPU which is not here: products then count cuBLAS's
// workspace, and sizes do not depend on this processor's instructions or threads.
inline thread_local bool sizes_of_gpu = false;

// The number of threads that a parallel region has here: OpenMP's, or one.
inline int threads_here(Cpu) {
#ifdef _OPENMP
    return sizes_of_gpu ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

// The number of the calling thread within its parallel region.
inline int thread_here() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// The strides of a matrix: element (i,j) lies at i * row + j * column.
struct Strides {
    size_t row, column;
};

// A product without its pointers.
struct Product {
    size_t M, N, K;
    Strides a, b;   // (M,K) (K,N)
    size_t out_row; // elements between rows of out
    bool accumulate = false;
    bool pack_b = false; // oneDNN first copies b into scratch, in its preferred layout
};

// The key that finds a product made before: sizes, strides, types, what is added, alignment.
typedef std::array<size_t, 10> ProductKey;
inline ProductKey product_key(const Product& p, Type in, Type out, bool bias, bool residual,
                              size_t align = 0) {
    size_t flags = size_t(bias) | size_t(residual) << 1 | size_t(p.accumulate) << 2 |
                   size_t(p.pack_b) << 3 | size_t(in) << 4 | size_t(out) << 8;
    return {p.M, p.N, p.K, p.a.row, p.a.column, p.b.row, p.b.column, p.out_row, flags, align};
}

#ifdef WITH_ONEDNN
// A product that oneDNN has compiled, and its arguments.
struct MadeProduct {
    dnnl::stream stream;
    dnnl::matmul primitive;
    std::unordered_map<int, dnnl::memory> args; // bound to the operands before each run
    size_t scratch_bytes = 0;                   // for the primitive or for the packing

    // With pack_b: the step that copies b to the end of the scratch.
    dnnl::reorder pack;
    std::unordered_map<int, dnnl::memory> pack_args;
    size_t packed_bytes = 0;
};

// Describe a product to oneDNN 2 (Debian 12) or 3 (Ubuntu 24.04). Empty where it cannot be.
template <typename... Operands>
dnnl::matmul::primitive_desc onednn_product(const dnnl::engine& e, const dnnl::primitive_attr& a,
                                            const Operands&... x) {
#if DNNL_VERSION_MAJOR < 3
    return {dnnl::matmul::desc(x...), a, e, true};
#else
    return {e, x..., a, true};
#endif
}

// Whether oneDNN multiplies bf16 on this processor. Version 2.6 (Debian 12's) wants AVX-512.
inline bool onednn_takes_bf16() {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    static const dnnl::memory::desc x({2, 2}, dnnl::memory::data_type::bf16, {2, 1});
    static const bool takes = bool(onednn_product(engine, {}, x, x, x));
    return takes;
}
#else
inline bool onednn_takes_bf16() { return false; }
#endif

#if defined(__CUDACC__)
// A named wrapper: nvcc 13.0 fails on vectors of the library's unnamed struct.
struct GpuAlgorithm {
    cublasLtMatmulAlgo_t value;
};
// The descriptors and the algorithm of a cuBLASLt product.
struct GpuProduct {
    cublasLtMatmulDesc_t what = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
    GpuAlgorithm algorithm = {};
    bool chosen = false; // measured, in this run or an earlier one
};
#endif

// A rank's handle. Products keep no hidden state outside it.
struct Blas {
    void* scratch = nullptr; // of the running action, from the caller's arena
    size_t scratch_bytes = 0;
    void* wide = nullptr; // room to dequantise the layer's largest frozen matrix
    void* room = nullptr; // (N,r) between the two products of an adapter
#ifdef WITH_ONEDNN
    dnnl::engine engine = dnnl::engine(dnnl::engine::kind::cpu, 0);
    // Products made so far: [0] by all threads of the rank, [1 + t] by thread t in a region.
    typedef std::map<ProductKey, MadeProduct> Products;
    std::vector<Products> made = std::vector<Products>(1 + size_t(threads_here(Cpu{})));
#endif
#if defined(__CUDACC__)
    cublasLtHandle_t cublas = nullptr;
    std::map<ProductKey, GpuProduct> gpu;
    std::map<ProductKey, GpuAlgorithm> known; // choices of earlier runs
    bool rehearsing = false; // contents do not matter now, so products may be timed
#endif
#if LLMC_KERNELS && !defined(__CUDACC__)
    int emulates = 86; // the architecture whose fp8 products the emulator runs
#endif
};

// Lend the handle the scratch of the next action.
inline void blas_scratch(Blas& blas, void* scratch, size_t bytes) {
    blas.scratch = scratch;
    blas.scratch_bytes = bytes;
}

// A line for the log, since the user may not know that a library or instructions are missing.
inline const char* matmul_backend() {
#ifdef WITH_ONEDNN
    return onednn_takes_bf16() ? "matrix products by oneDNN"
                               : "matrix products by oneDNN, of bf16 by plain loops (no AVX-512)";
#else
    return "matrix products by plain loops (oneDNN makes them faster: install libdnnl-dev)";
#endif
}

// ----------------------------------------------------------------------------
// CPU: our own loops. A thread widens a block of a and one of b into contiguous memory, and
// multiplies them in tiles whose sums stay in registers (Goto 2008, doi:10.1145/1356052.1356053).

// The bytes of a register. A tile's sums take 12 of AVX2's 16.
#ifdef __AVX512F__
constexpr size_t REGISTER = 64;
#else
constexpr size_t REGISTER = 32;
#endif
constexpr size_t TILE_ROWS = 6, TILE_REGISTERS = 2;
template <typename A> constexpr size_t TILE_COLS = TILE_REGISTERS * REGISTER / sizeof(A);

// A block of out (BLOCK_M,BLOCK_N) is summed up in parts of BLOCK_K. A thread's scratch has the
// sums, a's part, and b's part of one tile: at most 0.4 MB of floats, for an L2 cache.
constexpr size_t BLOCK_M = 264, BLOCK_N = 128, BLOCK_K = 256;
inline size_t matmul_plain_elements(size_t M) {
    size_t rows = std::min(BLOCK_M, round_up(M, TILE_ROWS));
    return rows * (BLOCK_N + BLOCK_K) + BLOCK_K * TILE_COLS<float>;
}
inline size_t matmul_plain_scratch_bytes(size_t M, size_t acc_bytes, int threads) {
    return size_t(threads) * matmul_plain_elements(M) * acc_bytes;
}

// wide (rows,cols), a row `wide_row` elements after the other, = x (rows,cols) with any strides.
template <typename T>
void widen_block(acc_t<T>* wide, size_t wide_row, const T* x, Strides s, size_t rows, size_t cols) {
    // 16 columns at a time where rows are not contiguous: columns are then.
    size_t step = s.column == 1 ? cols : 16;
    for (size_t j0 = 0; j0 < cols; j0 += step)
        for (size_t i = 0; i < rows; i++) {
            size_t count = std::min(step, cols - j0);
            acc_t<T>* to = wide + i * wide_row + j0;
            const T* from = x + i * s.row + j0 * s.column;
            #pragma omp simd
            for (size_t j = 0; j < count; j++)
                to[j] = to_acc(from[j * s.column]);
        }
}

// sums (rows,TILE_COLS) = or += left (rows,depth) right (depth,TILE_COLS), k in order.
template <typename A>
void matmul_tiles(A* sums, const A* left, const A* right, size_t rows, size_t depth,
                  bool accumulate) {
    // Such a vector of g++ needs no more alignment than an element.
    typedef A Vector __attribute__((vector_size(REGISTER), aligned(alignof(A))));
    for (size_t r0 = 0; r0 < rows; r0 += TILE_ROWS) {
        A* home = sums + r0 * BLOCK_N;
        Vector sum[TILE_ROWS][TILE_REGISTERS] = {};
        for (size_t r = 0; accumulate && r < TILE_ROWS; r++)
            for (size_t v = 0; v < TILE_REGISTERS; v++)
                sum[r][v] = reinterpret_cast<const Vector*>(home + r * BLOCK_N)[v];

        for (size_t k = 0; k < depth; k++) {
            const Vector* row = reinterpret_cast<const Vector*>(right) + k * TILE_REGISTERS;
            for (size_t r = 0; r < TILE_ROWS; r++) {
                A x = left[(r0 + r) * BLOCK_K + k];
                for (size_t v = 0; v < TILE_REGISTERS; v++)
                    sum[r][v] += x * row[v];
            }
        }

        for (size_t r = 0; r < TILE_ROWS; r++)
            for (size_t v = 0; v < TILE_REGISTERS; v++)
                reinterpret_cast<Vector*>(home + r * BLOCK_N)[v] = sum[r][v];
    }
}

// Compute `rows` rows of out and up to BLOCK_N columns, from row i0 and column j0 on.
template <typename T, typename O>
void matmul_block(O* out, const T* a, const T* b,   // (M,N) (M,K) (K,N)
                  const T* bias, const O* residual, // (N) (M,N), or null
                  const Product& p, size_t i0, size_t j0, size_t rows,
                  acc_t<T>* right) { // a part of b; then sums (rows,BLOCK_N), of a (rows,BLOCK_K)
    constexpr size_t COLS = TILE_COLS<acc_t<T>>;
    size_t cols = std::min(BLOCK_N, p.N - j0);
    acc_t<T>* sums = right + BLOCK_K * TILE_COLS<float>;
    acc_t<T>* left = sums + round_up(rows, TILE_ROWS) * BLOCK_N;

    for (size_t k0 = 0; k0 < p.K; k0 += BLOCK_K) {
        // Widen parts of a and b. What lies beyond them in a tile adds to sums that nobody reads.
        size_t depth = std::min(BLOCK_K, p.K - k0);
        const T* ak = a + i0 * p.a.row + k0 * p.a.column;
        const T* bk = b + j0 * p.b.column + k0 * p.b.row;
        widen_block(left, BLOCK_K, ak, p.a, rows, depth);
        for (size_t t = 0; t < cols; t += COLS) {
            widen_block(right, COLS, bk + t * p.b.column, p.b, depth, std::min(COLS, cols - t));
            matmul_tiles(sums + t, left, right, rows, depth, k0 > 0);
        }
    }

    // Write the rows and columns that exist.
    for (size_t r = 0; r < rows; r++) {
        size_t at = (i0 + r) * p.out_row + j0;
        for (size_t j = 0; j < cols; j++) {
            acc_t<T> x = sums[r * BLOCK_N + j];
            if (p.accumulate) x += to_acc(out[at + j]);
            if (bias) x += to_acc(bias[j0 + j]);
            if (residual) x += to_acc(residual[at + j]);
            out[at + j] = from_acc<O>(x);
        }
    }
}

// The whole product. scratch: matmul_plain_scratch_bytes(). Threads share blocks out and never
// split a sum over k, so no sum depends on their number.
template <typename T, typename O>
void matmul_plain(O* out, const T* a, const T* b, const T* bias, const O* residual,
                  const Product& p, void* scratch, int threads = threads_here(Cpu{})) {
    // Blocks are lower where some threads would have none.
    size_t down = ceil_div(size_t(threads), ceil_div(p.N, BLOCK_N));
    size_t rows = std::min(BLOCK_M, round_up(ceil_div(p.M, down), TILE_ROWS));
    size_t each = matmul_plain_elements(p.M);

    #pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (size_t j0 = 0; j0 < p.N; j0 += BLOCK_N)
        for (size_t i0 = 0; i0 < p.M; i0 += rows) {
            acc_t<T>* mine = static_cast<acc_t<T>*>(scratch) + thread_here() * each;
            matmul_block(out, a, b, bias, residual, p, i0, j0, std::min(rows, p.M - i0), mine);
        }
}

// ----------------------------------------------------------------------------
// CPU: oneDNN

#ifdef WITH_ONEDNN
// Whether oneDNN multiplies a type here, in sums of length K; if not, our own loops do. AMX
// multiplies pairs of bf16 along K, and oneDNN 2.6 answers K = 63 with wrong sums or an illegal
// instruction. So odd lengths, which no model's channels have, go to our loops.
inline bool onednn_takes(Type t, size_t K) {
    if (t == Type::BF16) return K % 2 == 0 && onednn_takes_bf16();
    return t == Type::F32;
}

// The library's name of a type.
inline dnnl::memory::data_type dnnl_type(Type t) {
    LLMC_CHECK(t == Type::F32 || t == Type::BF16, "oneDNN is asked for a product of %s",
               type_name(t));
    return t == Type::BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// A matrix (rows, cols) as oneDNN describes it. Strides alone say that it is transposed.
inline dnnl::memory::desc matrix_desc(size_t rows, size_t cols, Type t, Strides s) {
    typedef dnnl::memory::dims dims;
    return dnnl::memory::desc(dims{long(rows), long(cols)}, dnnl_type(t),
                              dims{long(s.row), long(s.column)});
}

// Attributes of a product. The caller provides the scratch, so no run allocates.
inline dnnl::primitive_attr product_attr() {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return attr;
}

// Describe a product: sizes, strides, post-ops, and with them the scratch. Nothing is compiled yet.
inline dnnl::matmul::primitive_desc describe_product(const dnnl::engine& engine, const Product& p,
                                                     Type in, Type out, bool bias, bool residual) {
    // Describe the operands. A packed b may have any layout.
    auto a = matrix_desc(p.M, p.K, in, p.a);
    auto b = matrix_desc(p.K, p.N, in, p.b);
    auto o = matrix_desc(p.M, p.N, out, {p.out_row, 1});
    if (p.pack_b)
        b = dnnl::memory::desc({long(p.K), long(p.N)}, dnnl_type(in),
                               dnnl::memory::format_tag::any);

    // Add what comes after the product. residual_arg() relies on this order.
    dnnl::post_ops post;
    if (p.accumulate) post.append_sum(1.0f);
    if (residual)
        post.append_binary(dnnl::algorithm::binary_add, o);
    dnnl::primitive_attr attr = product_attr();
    attr.set_post_ops(post);

    // Pass the bias as a matrix of one row, which oneDNN broadcasts.
    if (!bias) return onednn_product(engine, attr, a, b, o);
    return onednn_product(engine, attr, a, b, matrix_desc(1, p.N, in, {p.N, 1}), o);
}

// The number of the residual's argument: post-ops are numbered in their order.
inline int residual_arg(const Product& p) {
    return DNNL_ARG_ATTR_MULTIPLE_POST_OP(p.accumulate ? 1 : 0) | DNNL_ARG_SRC_1;
}

// Compile a product. This is expensive, so each key is compiled once.
inline MadeProduct make_product(const dnnl::engine& engine, const Product& p, Type in, Type out,
                                bool bias, bool residual) {
    auto d = describe_product(engine, p, in, out, bias, residual);
    // Arguments have no address yet; run_product() binds them.
    auto unbound = [&](const dnnl::memory::desc& x) {
        return dnnl::memory(x, engine, DNNL_MEMORY_NONE);
    };

    // Make the product and its arguments.
    MadeProduct m;
    m.stream = dnnl::stream(engine);
    m.primitive = dnnl::matmul(d);
    m.args = {{DNNL_ARG_SRC, unbound(d.src_desc())},
              {DNNL_ARG_WEIGHTS, unbound(d.weights_desc())},
              {DNNL_ARG_DST, unbound(d.dst_desc())},
              {DNNL_ARG_SCRATCHPAD, unbound(d.scratchpad_desc())}};
    if (bias) m.args[DNNL_ARG_BIAS] = unbound(d.bias_desc());
    if (residual)
        m.args[residual_arg(p)] = unbound(d.dst_desc());
    m.scratch_bytes = round_up(d.scratchpad_desc().get_size(), 64);
    if (!p.pack_b) return m;

    // Make the packing of b. It runs before the product and uses the same scratch.
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

// Find the product of this key; the first call makes it.
inline const MadeProduct& find_product(Blas& blas, size_t cache, const Product& p, Type in,
                                       Type out, bool bias, bool residual) {
    ProductKey key = product_key(p, in, out, bias, residual);
    // A map's elements never move, so the reference stays valid when later products are added.
    Blas::Products& made = blas.made[cache];
    auto it = made.find(key);
    if (it == made.end())
        it = made.insert({key, make_product(blas.engine, p, in, out, bias, residual)}).first;
    return it->second;
}

// Bind an argument to an operand. oneDNN's handles are not const, but it only reads its sources.
inline void point(const std::unordered_map<int, dnnl::memory>& args, int arg, const void* data) {
    args.at(arg).set_data_handle(const_cast<void*>(data));
}

// Run one product. The packing and then the primitive use the scratch; the packed b follows it.
inline void run_product(const MadeProduct& m, void* out, const void* a, const void* b,
                        const void* bias, const void* residual, const Product& p, void* scratch) {
    // Pack b.
    if (m.packed_bytes) {
        void* packed = static_cast<unsigned char*>(scratch) + m.scratch_bytes;
        point(m.pack_args, DNNL_ARG_FROM, b);
        point(m.pack_args, DNNL_ARG_TO, packed);
        point(m.pack_args, DNNL_ARG_SCRATCHPAD, scratch);
        m.pack.execute(m.stream, m.pack_args);
        b = packed;
    }

    // Multiply.
    point(m.args, DNNL_ARG_SRC, a);
    point(m.args, DNNL_ARG_WEIGHTS, b);
    point(m.args, DNNL_ARG_DST, out);
    if (bias) point(m.args, DNNL_ARG_BIAS, bias);
    if (residual) point(m.args, residual_arg(p), residual);
    point(m.args, DNNL_ARG_SCRATCHPAD, scratch);
    m.primitive.execute(m.stream, m.args);
}

// The scratch that oneDNN needs, by a compiled kernel: keep the answers, which plans ask for in
// every layer. oneDNN counts all of OpenMP's threads, even for a product that one thread runs.
inline size_t onednn_scratch_bytes(const Product& p, Type in, Type out, bool bias, bool residual) {
    static std::mutex mutex;
    static std::map<ProductKey, size_t> answers;
    ProductKey key = product_key(p, in, out, bias, residual, size_t(threads_here(Cpu{})));
    std::lock_guard<std::mutex> lock(mutex);
    auto known = answers.find(key);
    if (known != answers.end()) return known->second;

    dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    MadeProduct m = make_product(engine, p, in, out, bias, residual);
    return answers[key] = m.scratch_bytes + m.packed_bytes;
}
#endif

// ----------------------------------------------------------------------------
// one function for both

// The scratch in bytes that one product needs. Plans ask for it before the run.
inline size_t matmul_scratch_bytes(const Product& p, Type in, Type out, bool bias, bool residual,
                                   int threads) {
    if (sizes_of_gpu) return PRODUCT_WORKSPACE;
#ifdef WITH_ONEDNN
    if (onednn_takes(in, p.K))
        return onednn_scratch_bytes(p, in, out, bias, residual);
#endif
    // Our own loops need the same scratch for every kind of product.
    (void)out, (void)bias, (void)residual;
    size_t acc_bytes = in == Type::F64 ? sizeof(double) : sizeof(float);
    return matmul_plain_scratch_bytes(p.M, acc_bytes, threads);
}

// Every product on a GPU asks for the same scratch.
inline void check_workspace(const Blas& blas) {
    LLMC_CHECK(blas.scratch_bytes >= PRODUCT_WORKSPACE,
               "a product needs %zu bytes of scratch, has %zu", PRODUCT_WORKSPACE,
               blas.scratch_bytes);
}

// The scratch of the largest of these products, which have no bias and no residual. On a GPU
// cuBLASLt's workspace serves products of any size.
typedef std::initializer_list<Product> ProductList;
inline size_t matmul_scratch_bytes(ProductList products, Type in, Type out, Cpu where) {
    size_t most = 0;
    for (Product p : products) {
        size_t bytes = matmul_scratch_bytes(p, in, out, false, false, threads_here(where));
        most = std::max(most, bytes);
    }
    return most;
}
#if LLMC_KERNELS
inline size_t matmul_scratch_bytes(ProductList, Type, Type, cudaStream_t) {
    return PRODUCT_WORKSPACE;
}
#endif

// The product on a CPU. With `cache` 0 all threads of the rank work on it. With 1 + t, thread t of
// a parallel region works on it alone, in a scratch of its own.
template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, size_t cache, void* scratch, size_t scratch_bytes, Cpu) {
#ifdef WITH_ONEDNN
    if (onednn_takes(type_of<T>(), p.K)) {
        const MadeProduct& m =
            find_product(blas, cache, p, type_of<T>(), type_of<O>(), bias, residual);
        size_t needed = m.scratch_bytes + m.packed_bytes;

        // Never write beyond the scratch that the plan has counted.
        LLMC_CHECK(needed <= scratch_bytes,
                   "a product of %zu x %zu x %zu needs %zu bytes of scratch, the plan gave %zu",
                   p.M, p.N, p.K, needed, scratch_bytes);
        run_product(m, out, a, b, bias, residual, p, scratch);
        return;
    }
#endif

    // Without oneDNN, loops multiply.
    (void)blas, (void)cache;
    LLMC_CHECK(matmul_plain_scratch_bytes(p.M, sizeof(acc_t<T>), 1) <= scratch_bytes,
               "a product of %zu rows needs more scratch than %zu bytes", p.M, scratch_bytes);
    matmul_plain(out, a, b, bias, residual, p, scratch, cache ? 1 : threads_here(Cpu{}));
}

// The product by all threads of the rank, in the handle's scratch.
template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, Cpu where) {
    matmul(out, a, b, bias, residual, p, blas, 0, blas.scratch, blas.scratch_bytes, where);
}

inline bool blas_rehearse(Blas&, bool /*begin*/, Cpu) { return false; } // nothing to measure

// ----------------------------------------------------------------------------
// GPU: cuBLASLt; in the emulator a plain product with the same interface

#if LLMC_KERNELS

inline int threads_here(cudaStream_t) { return 1; } // scratch belongs to a launch, not to a thread

// An operand or the output as cuBLASLt takes it: a column-major matrix, whose columns are our rows,
// or our columns if it is transposed. ld: elements between columns, never fewer than rows.
struct GpuLayout {
    bool transposed;
    size_t rows, cols, ld;
};

// Describe a matrix (rows,cols), one of whose strides is 1; with one row or one column both may be.
inline GpuLayout gpu_layout(Strides s, size_t rows, size_t cols) {
    if (s.column == 1)
        return {false, cols, rows, std::max(s.row, cols)};
    return {true, rows, cols, std::max(s.column, rows)};
}

#if defined(__CUDACC__)
#define LLMC_CUBLAS_CHECK(call)                                                   \
    do {                                                                          \
        cublasStatus_t cublas_status_ = (call);                                   \
        LLMC_CHECK(cublas_status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt says: %s",  \
                   cublasLtGetStatusString(cublas_status_));                      \
    } while (0)

// There is no default case: the compiler warns of a missing type, and at run time die() reports it.
inline cudaDataType_t cuda_type(Type t) {
    switch (t) {
    case Type::F32: return CUDA_R_32F;
    case Type::BF16: return CUDA_R_16BF;
    case Type::F16: return CUDA_R_16F;
    case Type::F64: break; // only the CPU's reference has it
    }
    die("cuBLASLt is asked for a product of a type that is not built");
}

// The largest power of two, up to 256 bytes, that divides all the addresses.
template <typename... Ps>
size_t common_alignment(const Ps*... ps) {
    uintptr_t all = (uintptr_t(ps) | ...) | 256;
    return all & -all;
}

// Describe a product to cuBLASLt. The library is column-major, so our rows are its columns: it
// computes out^T = b^T a^T, and b comes first.
inline GpuProduct make_gpu_product(const Product& p, cudaDataType_t a, cudaDataType_t b,
                                   cudaDataType_t out, bool bias) {
    LLMC_CHECK((p.a.row == 1 || p.a.column == 1) && (p.b.row == 1 || p.b.column == 1),
               "a product of %zu x %zu x %zu has an operand without a stride of 1", p.M, p.N, p.K);

    // Describe the computation.
    GpuProduct g;
    LLMC_CUBLAS_CHECK(cublasLtMatmulDescCreate(&g.what, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t name, auto value) {
        LLMC_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(g.what, name, &value, sizeof(value)));
    };
    if (bias)
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);

    // Describe both operands and the output.
    auto describe = [&](cublasLtMatrixLayout_t* made, cudaDataType_t type, const GpuLayout& l) {
        LLMC_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(made, type, l.rows, l.cols, int64_t(l.ld)));
        return l.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, describe(&g.b, b, gpu_layout(p.b, p.K, p.N)));
    set(CUBLASLT_MATMUL_DESC_TRANSB, describe(&g.a, a, gpu_layout(p.a, p.M, p.K)));
    describe(&g.out, out, gpu_layout({p.out_row, 1}, p.M, p.N));
    return g;
}

// The algorithms that the library expects to be fastest, best first, up to eight.
inline std::vector<GpuAlgorithm> gpu_candidates(Blas& blas, const GpuProduct& g, size_t align) {
    // Say what the scratch and the operands' alignment allow.
    cublasLtMatmulPreference_t want;
    LLMC_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&want));
    auto set = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
        LLMC_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(want, name, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, PRODUCT_WORKSPACE);
    // Add the parts of a sum over K in float. By default cuBLASLt may add them in bf16.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    // Give all operands the smallest of their alignments.
    for (auto name :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        set(name, uint32_t(align));

    // Ask for up to eight, and keep those that can run.
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    LLMC_CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(blas.cublas, g.what, g.b, g.a, g.out, g.out,
                                                     want, 8, found, &count));
    cublasLtMatmulPreferenceDestroy(want);
    std::vector<GpuAlgorithm> list;
    for (int i = 0; i < count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS)
            list.push_back({found[i].algo});
    LLMC_CHECK(!list.empty(), "cuBLASLt has no algorithm for this product");
    return list;
}

// Whether an algorithm of an earlier run still does this product in our scratch. The file may be
// damaged, or written by another program.
inline bool algorithm_fits(Blas& blas, const GpuProduct& g, const GpuAlgorithm& algorithm) {
    cublasLtMatmulHeuristicResult_t found;
    cublasStatus_t status = cublasLtMatmulAlgoCheck(blas.cublas, g.what, g.b, g.a, g.out, g.out,
                                                    &algorithm.value, &found);
    return status == CUBLAS_STATUS_SUCCESS && found.workspaceSize <= PRODUCT_WORKSPACE;
}

// Run a product. To cuBLASLt residual and accumulate are the same: a matrix times beta, 0 or 1.
// factors: alpha and beta in device memory, or null.
inline cublasStatus_t run_gpu_product(Blas& blas, const GpuProduct& g,
                                      const GpuAlgorithm& algorithm, void* out, const void* a,
                                      const void* b, const void* bias, const void* added,
                                      cudaStream_t stream, const float* factors = nullptr) {
    // Set the bias's address, which is part of the description.
    float one = 1, zero = 0;
    if (bias)
        LLMC_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(g.what, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                         &bias, sizeof(bias)));
    const float* alpha = factors ? factors : &one;
    const float* beta = factors ? factors + 1 : added ? &one : &zero;
    return cublasLtMatmul(blas.cublas, g.what, alpha, b, g.b, a, g.a, beta, added ? added : out,
                          g.out, out, g.out, &algorithm.value, blas.scratch, PRODUCT_WORKSPACE,
                          stream);
}

// Seconds of one run, the mean of several, by the GPU's clock.
template <typename F>
double gpu_seconds(F f, int runs, cudaStream_t stream) {
    cudaEvent_t from, to;
    LLMC_CUDA_CHECK(cudaEventCreate(&from));
    LLMC_CUDA_CHECK(cudaEventCreate(&to));

    // Queue all runs between two events, and wait once.
    f(); // warm up
    LLMC_CUDA_CHECK(cudaEventRecord(from, stream));
    for (int i = 0; i < runs; i++)
        f();
    LLMC_CUDA_CHECK(cudaEventRecord(to, stream));
    LLMC_CUDA_CHECK(cudaEventSynchronize(to));

    // Take the mean.
    float ms = 0;
    LLMC_CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return ms * 1e-3 / runs;
}

// Find a product's descriptors and its algorithm. The first call makes them.
template <typename Make>
GpuProduct& find_gpu_product(Blas& blas, const ProductKey& key, size_t align, Make make) {
    // The handle belongs to the GPU that is current at the first product.
    if (!blas.cublas)
        LLMC_CUBLAS_CHECK(cublasLtCreate(&blas.cublas));
    GpuProduct& g = blas.gpu[key];
    if (g.what) return g;
    g = make();

    // Take the choice of an earlier measurement, else the library's first guess.
    auto known = blas.known.find(key);
    g.chosen = known != blas.known.end() && algorithm_fits(blas, g, known->second);
    g.algorithm = g.chosen ? known->second : gpu_candidates(blas, g, align)[0];
    return g;
}

// Run a product by its algorithm. `run` takes an algorithm and returns the library's status.
template <typename Run>
void run_chosen(Blas& blas, GpuProduct& g, const ProductKey& key, size_t align, Run run,
                cudaStream_t stream) {
    // If contents do not matter now, choose the algorithm by timing each candidate.
    if (blas.rehearsing && !g.chosen) {
        double best = 1e30;
        for (const GpuAlgorithm& candidate : gpu_candidates(blas, g, align)) {
            if (run(candidate) != CUBLAS_STATUS_SUCCESS) continue;
            double seconds = gpu_seconds([&] { run(candidate); }, 5, stream);
            if (seconds >= best) continue;
            best = seconds;
            g.algorithm = candidate;
        }
        g.chosen = true;
        blas.known[key] = g.algorithm;
    }

    // Candidates have left other results: run the chosen one last.
    LLMC_CUBLAS_CHECK(run(g.algorithm));
}

// The product on a GPU.
template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, cudaStream_t stream) {
    check_workspace(blas);

    // cuBLASLt adds only one matrix, and a bias only of out's own type.
    LLMC_CHECK(!(residual && p.accumulate) && !(bias && type_of<T>() != type_of<O>()),
               "not built: accumulate with a residual, a bias of another type than out");

    // Find the product, or make it.
    const O* added = residual ? residual : p.accumulate ? out : nullptr;
    size_t align = common_alignment(out, a, b, bias, added);
    ProductKey key = product_key(p, type_of<T>(), type_of<O>(), bias, added, align);
    GpuProduct& g = find_gpu_product(blas, key, align, [&] {
        cudaDataType_t in = cuda_type(type_of<T>());
        return make_gpu_product(p, in, in, cuda_type(type_of<O>()), bias);
    });
    auto run = [&](const GpuAlgorithm& algorithm) {
        return run_gpu_product(blas, g, algorithm, out, a, b, bias, added, stream);
    };
    run_chosen(blas, g, key, align, run, stream);
}

// Raise this number when other algorithms become allowed: older choices are then measured again.
constexpr int CHOICES_VERSION = 2;

// The file of choices: one line a product, its key and the algorithm's eight words. Choices hold
// for one GPU and one version of the library; the file's name says which.
inline std::string choices_file() {
    const char* home = getenv("HOME");
    std::string name = device_name(cudaStream_t{});
    // Keep spaces and slashes out of the file's name.
    for (char& c : name)
        if (!isalnum((unsigned char)c))
            c = '-';
    return std::string(home ? home : "/tmp") + "/.cache/train_gpt-products-" + name + "-" +
           std::to_string(cublasLtGetVersion()) + "-" + std::to_string(CHOICES_VERSION) + ".txt";
}

// Read the choices of earlier runs. If the file was cut short, use the lines before the cut.
inline void read_choices(Blas& blas) {
    static_assert(sizeof(cublasLtMatmulAlgo_t) == 64);
    FILE* f = fopen(choices_file().c_str(), "r");
    if (!f) return;
    // Read line after line: a key's numbers, then the algorithm's words in hexadecimal.
    for (;;) {
        ProductKey key;
        GpuAlgorithm algorithm;
        bool whole = true;
        for (size_t& x : key)
            whole = whole && fscanf(f, "%zu", &x) == 1;
        for (uint64_t& x : algorithm.value.data)
            whole = whole && fscanf(f, "%lx", &x) == 1;
        if (!whole) break;
        blas.known[key] = algorithm;
    }
    fclose(f);
}

// Write the file whole or not at all, because several runs may end at the same time.
inline void write_choices(const Blas& blas) {
    // Open a file of this process's own.
    std::string path = choices_file();
    std::string temporary = path + "." + std::to_string(getpid()) + "-" + std::to_string(this_rank);
    mkdir(path.substr(0, path.rfind('/')).c_str(), 0777);
    FILE* f = fopen(temporary.c_str(), "w");
    if (!f) return; // it is only a cache: the next run measures again

    // Write a line for each product.
    for (const auto& [key, algorithm] : blas.known) {
        for (size_t x : key) fprintf(f, "%zu ", x);
        for (uint64_t x : algorithm.value.data)
            fprintf(f, "%lx ", x);
        fprintf(f, "\n");
    }

    // Replace the old file in one step, which no reader can see half done.
    if (fclose(f) == 0)
        rename(temporary.c_str(), path.c_str());
    else
        unlink(temporary.c_str());
}

// Begin or end a rehearsal. Within it contents do not matter, and products time their algorithms.
inline bool blas_rehearse(Blas& blas, bool begin, cudaStream_t) {
    blas.rehearsing = begin;
    begin ? read_choices(blas) : write_choices(blas);
    return true;
}

#else // the emulator

// The product in the emulator. It allocates the blocks itself: a GPU's plan has no room for them.
template <typename T, typename O>
void emulated_product(O* out, const T* a, const T* b, const T* bias, const O* residual,
                      const Product& p) {
    size_t bytes = matmul_plain_scratch_bytes(p.M, sizeof(acc_t<T>), threads_here(Cpu{}));
    auto blocks = std::make_unique_for_overwrite<unsigned char[]>(bytes);
    matmul_plain(out, a, b, bias, residual, p, blocks.get());
}

// The operand's strides as the library reads them from its layout, and what the library refuses.
inline Strides library_strides(Strides s, size_t rows, size_t cols) {
    GpuLayout l = gpu_layout(s, rows, cols);
    LLMC_CHECK(l.ld >= l.rows, "cuBLASLt takes no leading dimension of %zu for %zu rows", l.ld,
               l.rows);
    return l.transposed ? Strides{1, l.ld} : Strides{l.ld, 1};
}

template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, cudaStream_t stream) {
    LLMC_CHECK((p.a.row == 1 || p.a.column == 1) && (p.b.row == 1 || p.b.column == 1),
               "a product of %zu x %zu x %zu has an operand without a stride of 1", p.M, p.N, p.K);
    check_workspace(blas);

    // Queue it as a launch, of the matrices that the library sees.
    Product seen = p;
    seen.a = library_strides(p.a, p.M, p.K);
    seen.b = library_strides(p.b, p.K, p.N);
    seen.out_row = library_strides({p.out_row, 1}, p.M, p.N).row;
    auto* name = &emulated_product<T, O>;
    emulator::note_launch(name);
    emulator::give(reinterpret_cast<const void*>(name), stream,
                   [=] { emulated_product(out, a, b, bias, residual, seen); }, out, a, b, bias,
                   residual, p);
}
inline bool blas_rehearse(Blas&, bool, cudaStream_t) { return true; }
#endif
#endif

} // namespace llmc
