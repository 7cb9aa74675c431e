// matmul.cuh - matrix products on raw pointers: out (M,N) = a (M,K) b (K,N), each with any strides
//   Behind it: oneDNN where the build has it, plain loops otherwise and always for double, the reference.
//   Blas is a rank's handle: cached products and the scratch that the caller planned. No hidden state.
//   Contract: out = or += (accumulate), then + bias (N) + residual (M,N).  a and b are T; out is T or acc_t<T>.
//             Bitwise repeatable for equal threads.
//   Cost: 2 M N K FLOPs.
//   To copy: this file and common.h.
#pragma once
#include <map>
#include <tuple>
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

struct Matrix { // element (i,j) at i * row + j * column
    size_t row, column;
};

struct MatmulKey {
    size_t M, N, K;
    Matrix a, b, out;
    Type in_type, out_type;
    bool accumulate, bias, residual;
    auto tied() const {
        return std::tie(M, N, K, a.row, a.column, b.row, b.column, out.row, out.column, in_type, out_type, accumulate, bias, residual);
    }
    bool operator<(const MatmulKey& o) const { return tied() < o.tied(); }
};

#ifdef WITH_ONEDNN
struct Product {
    dnnl::matmul primitive;
    dnnl::memory::desc a, b, out, bias, residual, scratch;
};
#endif

struct Blas {
    void* scratch = nullptr;
    size_t scratch_bytes = 0;
#ifdef WITH_ONEDNN
    dnnl::engine engine = dnnl::engine(dnnl::engine::kind::cpu, 0);
    std::vector<std::map<MatmulKey, Product>> products = std::vector<std::map<MatmulKey, Product>>(256); // by thread
#endif
};

inline void blas_scratch(Blas& blas, void* scratch, size_t bytes) { blas.scratch = scratch, blas.scratch_bytes = bytes; }

inline const char* matmul_backend() {
#ifdef WITH_ONEDNN
    return "matrix products by oneDNN";
#else
    return "matrix products by plain loops (oneDNN makes them faster: install libdnnl-dev)";
#endif
}

// ----------------------------------------------------------------------------
// CPU: plain loops

template <typename T, typename O>
void matmul_plain(O* out, const T* a, const T* b, const T* bias, const O* residual, const MatmulKey& k) {
    typedef acc_t<T> A;
    #pragma omp parallel for
    for (size_t i = 0; i < k.M; i++)
        for (size_t j = 0; j < k.N; j++) {
            A sum = 0;
            for (size_t p = 0; p < k.K; p++) sum += to_acc(a[i * k.a.row + p * k.a.column]) * to_acc(b[p * k.b.row + j * k.b.column]);
            size_t at = i * k.out.row + j * k.out.column;
            if (bias) sum += to_acc(bias[j]);
            if (residual) sum += to_acc(residual[at]);
            out[at] = from_acc<O>(k.accumulate ? to_acc(out[at]) + sum : sum);
        }
}

// ----------------------------------------------------------------------------
// CPU: oneDNN

#ifdef WITH_ONEDNN
inline dnnl::memory::data_type dnnl_type(Type t) { return t == Type::BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32; }

inline dnnl::matmul::primitive_desc matmul_desc(const dnnl::engine& engine, const MatmulKey& k, Product& p) {
    typedef dnnl::memory::dims dims;
    auto desc = [](size_t rows, size_t cols, Type t, Matrix m) {
        return dnnl::memory::desc(dims{long(rows), long(cols)}, dnnl_type(t), dims{long(m.row), long(m.column)});
    };
    p.a = desc(k.M, k.K, k.in_type, k.a), p.b = desc(k.K, k.N, k.in_type, k.b), p.out = desc(k.M, k.N, k.out_type, k.out);
    p.bias = k.bias ? desc(1, k.N, k.in_type, {k.N, 1}) : dnnl::memory::desc();
    p.residual = p.out;
    dnnl::post_ops post;
    if (k.accumulate) post.append_sum(1.0f);
    if (k.residual) post.append_binary(dnnl::algorithm::binary_add, p.residual);
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    attr.set_post_ops(post);
    dnnl::matmul::desc d = k.bias ? dnnl::matmul::desc(p.a, p.b, p.bias, p.out) : dnnl::matmul::desc(p.a, p.b, p.out);
    dnnl::matmul::primitive_desc pd(d, attr, engine);
    p.scratch = pd.scratchpad_desc();
    return pd;
}
#endif

inline size_t matmul_scratch_bytes(const MatmulKey& k, Cpu) {
#ifdef WITH_ONEDNN
    if (k.in_type == Type::F64) return 0;
    Product p;
    Blas blas;
    return matmul_desc(blas.engine, k, p).scratchpad_desc().get_size() + 256;
#else
    (void)k;
    return 0;
#endif
}

template <typename T, typename O>
void matmul(O* out, const T* a, const T* b, const T* bias, const O* residual, MatmulKey k, Blas& blas, Cpu) {
    k.in_type = type_of<T>(), k.out_type = type_of<O>(), k.bias = bias, k.residual = residual;
#ifdef WITH_ONEDNN
    if constexpr (!std::is_same_v<T, double>) {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_in_parallel() ? 1 + omp_get_thread_num() : 0;
#endif
        auto& cache = blas.products[size_t(thread)];
        auto it = cache.find(k);
        if (it == cache.end()) {
            it = cache.insert({k, Product()}).first;
            it->second.primitive = dnnl::matmul(matmul_desc(blas.engine, k, it->second));
        }
        const Product& p = it->second;
        CHECK(p.scratch.get_size() <= blas.scratch_bytes, "a product of %zu x %zu x %zu needs %zu bytes of scratch, the plan gave %zu",
              k.M, k.N, k.K, p.scratch.get_size(), blas.scratch_bytes);
        dnnl::stream stream(blas.engine);
        auto memory = [&](const dnnl::memory::desc& d, const void* data) { return dnnl::memory(d, blas.engine, const_cast<void*>(data)); };
        std::unordered_map<int, dnnl::memory> args = {{DNNL_ARG_SRC, memory(p.a, a)}, {DNNL_ARG_WEIGHTS, memory(p.b, b)}, {DNNL_ARG_DST, memory(p.out, out)}};
        if (bias) args[DNNL_ARG_BIAS] = memory(p.bias, bias);
        if (residual) args[DNNL_ARG_ATTR_MULTIPLE_POST_OP(k.accumulate ? 1 : 0) | DNNL_ARG_SRC_1] = memory(p.residual, residual);
        if (p.scratch.get_size()) args[DNNL_ARG_SCRATCHPAD] = memory(p.scratch, blas.scratch);
        p.primitive.execute(stream, args);
        return;
    }
#endif
    (void)blas;
    matmul_plain(out, a, b, bias, residual, k);
}
