// matmul.cuh - matrix products on raw pointers: out (M,N) = a (M,K) b (K,N), each with any strides
//   Behind it on the CPU: oneDNN where the build has it, blocked loops of our own otherwise, and
//   always for double, the reference. On the GPU cuBLASLt; in the emulator the same blocked loops.
//   Blas is a rank's handle: the products made so far, and the scratch that the caller planned. No
//   hidden state.
//   a, b (T) with strides {row, column} in elements, one of them 1 on the GPU   out T or acc_t<T>,
//   rows contiguous   bias (N) T   residual as out
//   Contract: out = or += (accumulate) the product, + bias, + residual.  Bitwise repeatable for
//             equal threads; our own loops for any number of threads; on the GPU for an equal
//             choice of algorithm, which is measured once (blas_rehearse) and kept in a file.
//   Cost: 2 M N K FLOPs.
//   To copy: this file and common.h.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>
#include "common.h"
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

// What tells one made product from another: sizes, strides, types, what is added, alignment.
typedef std::array<size_t, 10> ProductKey;
inline ProductKey product_key(const Product& p, Type in, Type out, bool bias, bool residual,
                              size_t align = 0) {
    size_t flags = size_t(bias) | size_t(residual) << 1 | size_t(p.accumulate) << 2 |
                   size_t(p.pack_b) << 3 | size_t(in) << 4 | size_t(out) << 8;
    return {p.M, p.N, p.K, p.a.row, p.a.column, p.b.row, p.b.column, p.out_row, flags, align};
}

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
#endif

#if defined(__CUDACC__)
struct
    GpuAlgorithm { // a name of our own: nvcc 13.0 fails on vectors of the library's unnamed struct
    cublasLtMatmulAlgo_t value;
};
struct GpuProduct {
    cublasLtMatmulDesc_t what = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
    GpuAlgorithm algorithm = {};
    bool chosen = false; // by measuring, now or in an earlier run
};
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
#if defined(__CUDACC__)
    cublasLtHandle_t cublas = nullptr;
    std::map<ProductKey, GpuProduct> gpu;
    std::map<ProductKey, GpuAlgorithm> known; // choices of earlier runs
    bool rehearsing = false; // contents do not matter now: measure what is not yet chosen
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

// what oneDNN takes; float16 and double run in our own loops
constexpr bool onednn_takes(Type t) { return t == Type::F32 || t == Type::BF16; }

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
    ProductKey key = product_key(p, in, out, bias, residual);
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
    if (onednn_takes(in)) {
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
    if constexpr (onednn_takes(type_of<T>())) {
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

inline bool blas_rehearse(Blas&, bool /*begin*/, Cpu) { return false; } // nothing to measure

// ----------------------------------------------------------------------------
// GPU: cuBLASLt; in the emulator a plain product behind the same function

#if KERNELS

inline int threads_here(cudaStream_t) { return 1; } // scratch is a launch's, not a thread's

#if defined(__CUDACC__)
#define CUBLAS_CHECK(call)                                                  \
    do {                                                                    \
        cublasStatus_t cublas_status_ = (call);                             \
        CHECK(cublas_status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt says: %s", \
              cublasLtGetStatusString(cublas_status_));                     \
    } while (0)

constexpr size_t PRODUCT_WORKSPACE = size_t(32) << 20; // what cuBLAS asks for on Hopper

inline cudaDataType_t cuda_type(Type t) {
    return t == Type::BF16 ? CUDA_R_16BF : t == Type::F16 ? CUDA_R_16F : CUDA_R_32F;
}

// The largest power of two, up to 256 bytes, that all addresses are multiples of.
template <typename... Ps> size_t common_alignment(const Ps*... ps) {
    uintptr_t all = (uintptr_t(ps) | ...) | 256;
    return all & -all;
}

// cuBLASLt counts columns first: our rows are its columns, so out^T = b^T a^T and b comes first.
inline GpuProduct make_gpu_product(const Product& p, Type in, Type out, bool bias) {
    CHECK((p.a.row == 1 || p.a.column == 1) && (p.b.row == 1 || p.b.column == 1),
          "a product of %zu x %zu x %zu has an operand without a stride of 1", p.M, p.N, p.K);
    GpuProduct g;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&g.what, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t name, auto value) {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(g.what, name, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T);
    if (bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    auto layout = [&](cublasLtMatrixLayout_t* l, Type t, size_t rows, size_t cols, size_t ld) {
        CUBLAS_CHECK(cublasLtMatrixLayoutCreate(l, cuda_type(t), rows, cols, int64_t(ld)));
    };
    p.b.column == 1 ? layout(&g.b, in, p.N, p.K, p.b.row) : layout(&g.b, in, p.K, p.N, p.b.column);
    p.a.column == 1 ? layout(&g.a, in, p.K, p.M, p.a.row) : layout(&g.a, in, p.M, p.K, p.a.column);
    layout(&g.out, out, p.N, p.M, p.out_row);
    return g;
}

// What the library thinks are the fastest, best first.
inline std::vector<GpuAlgorithm> gpu_candidates(Blas& blas, const GpuProduct& g, size_t align) {
    cublasLtMatmulPreference_t want;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&want));
    auto set = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(want, name, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, PRODUCT_WORKSPACE);
    for (auto name :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        set(name, uint32_t(align));
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(blas.cublas, g.what, g.b, g.a, g.out, g.out, want,
                                                8, found, &count));
    cublasLtMatmulPreferenceDestroy(want);
    CHECK(count > 0, "cuBLASLt has no algorithm for this product");
    std::vector<GpuAlgorithm> list;
    for (int i = 0; i < count; i++) list.push_back({found[i].algo});
    return list;
}

inline void run_gpu_product(Blas& blas, const GpuProduct& g, const GpuAlgorithm& algorithm,
                            void* out, const void* a, const void* b, const void* bias,
                            const void* added, cudaStream_t stream) {
    float one = 1, zero = 0;
    if (bias)
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(g.what, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                    &bias, sizeof(bias)));
    CUBLAS_CHECK(cublasLtMatmul(blas.cublas, g.what, &one, b, g.b, a, g.a, added ? &one : &zero,
                                added ? added : out, g.out, out, g.out, &algorithm.value,
                                blas.scratch, PRODUCT_WORKSPACE, stream));
}

// Seconds of one of several runs, by the GPU's clock.
template <typename F> double gpu_seconds(F f, int runs, cudaStream_t stream) {
    cudaEvent_t from, to;
    CUDA_CHECK(cudaEventCreate(&from));
    CUDA_CHECK(cudaEventCreate(&to));
    f(); // warms up
    CUDA_CHECK(cudaEventRecord(from, stream));
    for (int i = 0; i < runs; i++) f();
    CUDA_CHECK(cudaEventRecord(to, stream));
    CUDA_CHECK(cudaEventSynchronize(to));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
    cudaEventDestroy(from), cudaEventDestroy(to);
    return ms * 1e-3 / runs;
}

template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, cudaStream_t stream) {
    CHECK(blas.scratch_bytes >= PRODUCT_WORKSPACE, "a product needs %zu bytes of scratch, has %zu",
          PRODUCT_WORKSPACE, blas.scratch_bytes);
    CHECK(!(residual && p.accumulate) && !(bias && type_of<T>() != type_of<O>()),
          "not built: accumulate with a residual, a bias of another type than out");
    if (!blas.cublas) CUBLAS_CHECK(cublasLtCreate(&blas.cublas));
    const O* added = residual ? residual : p.accumulate ? out : nullptr;
    size_t align = common_alignment(out, a, b, bias, added);
    ProductKey key = product_key(p, type_of<T>(), type_of<O>(), bias, added, align);
    GpuProduct& g = blas.gpu[key];
    if (!g.what) {
        g = make_gpu_product(p, type_of<T>(), type_of<O>(), bias);
        auto known = blas.known.find(key);
        g.chosen = known != blas.known.end();
        g.algorithm = g.chosen ? known->second : gpu_candidates(blas, g, align)[0];
    }
    auto run = [&](const GpuAlgorithm& algorithm) {
        run_gpu_product(blas, g, algorithm, out, a, b, bias, added, stream);
    };
    if (blas.rehearsing && !g.chosen) {
        double best = 1e30;
        for (const GpuAlgorithm& candidate : gpu_candidates(blas, g, align)) {
            double seconds = gpu_seconds([&] { run(candidate); }, 5, stream);
            if (seconds < best) best = seconds, g.algorithm = candidate;
        }
        g.chosen = true, blas.known[key] = g.algorithm;
    }
    run(g.algorithm);
}

// The choices on disk: one line a product, its key and the algorithm's eight words. They hold for
// one GPU and one version of the library, which the file's name says.
inline std::string choices_file() {
    const char* home = getenv("HOME");
    std::string name = device_name(cudaStream_t{});
    for (char& c : name)
        if (!isalnum((unsigned char)c)) c = '-';
    return std::string(home ? home : "/tmp") + "/.cache/train_gpt-products-" + name + "-" +
           std::to_string(cublasLtGetVersion()) + ".txt";
}

inline void read_choices(Blas& blas) {
    static_assert(sizeof(cublasLtMatmulAlgo_t) == 64);
    FILE* f = fopen(choices_file().c_str(), "r");
    if (!f) return;
    for (;;) {
        ProductKey key;
        GpuAlgorithm algorithm;
        bool whole = true;
        for (size_t& x : key) whole = whole && fscanf(f, "%zu", &x) == 1;
        for (uint64_t& x : algorithm.value.data) whole = whole && fscanf(f, "%lx", &x) == 1;
        if (!whole) break;
        blas.known[key] = algorithm;
    }
    fclose(f);
}

// Whole or not at all: several runs may end at the same time.
inline void write_choices(const Blas& blas) {
    std::string path = choices_file(),
                temporary = path + "." + std::to_string(getpid()) + "-" + std::to_string(this_rank);
    mkdir(path.substr(0, path.rfind('/')).c_str(), 0777);
    FILE* f = fopen(temporary.c_str(), "w");
    if (!f) return; // a cache: without it the next run measures again
    for (const auto& [key, algorithm] : blas.known) {
        for (size_t x : key) fprintf(f, "%zu ", x);
        for (uint64_t x : algorithm.value.data) fprintf(f, "%lx ", x);
        fprintf(f, "\n");
    }
    if (fclose(f) == 0)
        rename(temporary.c_str(), path.c_str());
    else
        unlink(temporary.c_str());
}

// Between begin and end contents do not matter: products measure their algorithms.
inline bool blas_rehearse(Blas& blas, bool begin, cudaStream_t) {
    blas.rehearsing = begin;
    begin ? read_choices(blas) : write_choices(blas);
    return true;
}

#else // the emulator

constexpr size_t PRODUCT_WORKSPACE = 256;

template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, const Product& p,
            Blas& blas, cudaStream_t) {
    CHECK((p.a.row == 1 || p.a.column == 1) && (p.b.row == 1 || p.b.column == 1),
          "a product of %zu x %zu x %zu has an operand without a stride of 1", p.M, p.N, p.K);
    CHECK(blas.scratch_bytes >= PRODUCT_WORKSPACE, "a product needs %zu bytes of scratch, has %zu",
          PRODUCT_WORKSPACE, blas.scratch_bytes);
    std::vector<unsigned char> panels(
        matmul_plain_scratch_bytes(p.K, sizeof(acc_t<T>), threads_here(Cpu{})));
    matmul_plain(out, a, b, bias, residual, p, panels.data());
}
inline bool blas_rehearse(Blas&, bool, cudaStream_t) { return true; }
#endif
#endif
