// fp8_matmul.cuh - products on tensor cores that read 8 or 4 bits - arXiv:2209.05433
//   out (M,N) = a (M,K) b (N,K)^T (+ out) (+ bias) (+ residual). An element of a or b is a code
//   times its block's inverse scale. Sums are float. K runs along the rows of both: before
//   Blackwell tensor cores take codes in no other order, so fp8_quantise() writes transposes too.
//     recipe   a                          b                          GPUs
//     block    ROWS, 1 x 128 of K         SQUARES, 128 x 128,        sm_90, cuBLAS 12.9 or later
//                                         or ROWS
//     tensor   WHOLE                      WHOLE                      sm_89 and later
//     mx       MX_ROWS, 1 x 32 of K       MX_ROWS                    sm_100 and later
//     nvfp4    NVFP4_ROWS, 1 x 16 of K    NVFP4_ROWS                 sm_100 and later
//   cuBLASLt checks a description only when it searches for algorithms, so fp8_refuses() knows its
//   rules. A product that they forbid becomes the bf16 product of the codes' values (linear.cuh).
//   In the emulator that bf16 product replaces the tensor cores'. It reads codes, transposes and
//   scales from their own places, so that a wrong place shows.
//   Contract: out = or += (accumulate).  Bitwise repeatable for an equal choice of algorithm.
//   Cost: 2 M N K FLOPs; reads a byte an element, nvfp4 half.
//   Error: float sums of exact products; Hopper's keep some 14 bits between promotions.
//   To copy: this file, element_type.h, elements.h, fp8.cuh, gpu.h, matmul.cuh, nvfp4.cuh,
//            types.h and cuda_common.h.
#pragma once
#include "cuda_common.h"
#include "element_type.h"
#include "fp8.cuh"
#include "gpu.h"
#include "matmul.cuh"
#include "nvfp4.cuh"
#include "types.h"

namespace llmc {

// An operand: codes with K along rows, and the scales that turn them into numbers.
struct Fp8Operand {
    const void* codes = nullptr;    // (M or N, K)
    const void* inverse = nullptr;  // laid out as fp8_scales(M or N, K, blocks)
    Fp8Blocks blocks = Fp8Blocks::WHOLE;
    bool wide = false; // e5m2 if true, else e4m3
    Nvfp4Head* head = nullptr; // of NVFP4
};

// A product without its pointers.
struct Fp8Product {
    size_t M, N, K;
    Fp8Blocks a, b; // ROWS, SQUARES, WHOLE, MX_ROWS, NVFP4_ROWS
    bool a_wide, b_wide;
    Type out; // out and residual have this type and contiguous rows
    bool accumulate = false;
};

// Null, or the reason why cuBLASLt does not multiply this on a GPU of this architecture (90
// for sm_90). The rules are those of its page on narrow precisions, release 13.0. `version`
// is the library's.
inline const char* fp8_refuses(const Fp8Product& p, int architecture, size_t version) {
    if (architecture < 89) return "tensor cores multiply codes of 8 bits from sm_89 on";
    if (p.a_wide && p.b_wide) return "both operands are e5m2";

    // All rows must begin at multiples of 16 bytes.
    if (p.K % 16) return "K is no multiple of 16";
    if (p.N % (p.out == Type::F32 ? 4 : 8))
        return "rows of out are no multiple of 16 bytes";

    // Both operands must have one scale, or both must have scales of blocks.
    bool whole = p.a == Fp8Blocks::WHOLE;
    if (whole != (p.b == Fp8Blocks::WHOLE)) return "one operand has one scale, the other has many";
    if (whole) return nullptr;
    if (is_mx(p.a)) {
        if (architecture < 100) return "scales of 16 and 32 numbers are sm_100's and later ones'";
        if (version < 120800) return "scales of 16 and 32 numbers came with cuBLAS 12.8";
        if (p.M % 16 || p.N % 16 || p.K % MX_BLOCK)
            return "MX and NVFP4 want multiples of 16 rows and of 32 of K";
        return nullptr;
    }
    if (architecture != 90) return "scales of blocks are sm_90's";
    if (version < 120900) return "scales of blocks came with cuBLAS 12.9";
    if (p.a == Fp8Blocks::SQUARES && p.b == Fp8Blocks::SQUARES) return "both operands have squares";
    if (p.M % 8 || p.N % 8) return "blocks want multiples of 8 rows";
    return nullptr;
}

// CPUs do not multiply codes.
inline bool fp8_multiplies(const Fp8Product&, const Blas&, Cpu) { return false; }

// ----------------------------------------------------------------------------
// GPU: cuBLASLt

#if LLMC_KERNELS
#if defined(__CUDACC__)

// The library's number of each way of scaling. Its own enumeration exists only since 12.8.
inline int32_t fp8_scale_mode(Fp8Blocks blocks) {
    constexpr int32_t SCALAR = 0, VECTOR_16_E4M3 = 1, VECTOR_32_E8M0 = 2, VECTOR_128 = 4;
    constexpr int32_t BLOCK_128 = 5;
    return blocks == Fp8Blocks::WHOLE  ? SCALAR
           : is_nvfp4(blocks)          ? VECTOR_16_E4M3
           : is_mx(blocks)             ? VECTOR_32_E8M0
           : blocks == Fp8Blocks::ROWS ? VECTOR_128
                                       : BLOCK_128;
}

// Whether the library multiplies this on the current GPU.
inline bool fp8_multiplies(const Fp8Product& p, const Blas&, cudaStream_t) {
    size_t version = std::min<size_t>(CUBLAS_VERSION, cublasLtGetVersion()); // of headers, library
    return !fp8_refuses(p, gpu_architecture(), version);
}

// The product, by cuBLASLt. Ask fp8_multiplies() first.
template <typename T, typename O>
void fp8_matmul(O* out, const Fp8Operand& a, const Fp8Operand& b, // (M,N) (M,K) (N,K)
                const T* bias, const O* residual,                 // (N) (M,N), or null
                const Fp8Product& p, Blas& blas, cudaStream_t stream) {
    check_workspace(blas);
    LLMC_CHECK(!(residual && p.accumulate), "an fp8 product adds one matrix at most");
    Product shape = {p.M, p.N, p.K, {p.K, 1}, {1, p.K}, p.N, p.accumulate};

    // Find the product, or make it. Formats and scales tell its key from that of wider operands.
    const O* added = residual ? residual : p.accumulate ? out : nullptr;
    const bool nvfp4 = is_nvfp4(p.a);
    size_t align = common_alignment(out, a.codes, b.codes, bias, added);
    ProductKey key = product_key(shape, type_of<T>(), p.out, bias, added, align);
    key[8] |= size_t(1 | p.a_wide << 1 | p.b_wide << 2 | int(p.a) << 3 | int(p.b) << 6) << 12;
    auto describe = [](GpuProduct& g, cublasLtMatmulDescAttributes_t name, auto value) {
        LLMC_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(g.what, name, &value, sizeof(value)));
    };
    // The scales' addresses are part of the description. The search for algorithms wants some too.
    auto describe_scales = [&](GpuProduct& g) {
        describe(g, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b.inverse);
        describe(g, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a.inverse);
    };
    GpuProduct& g = find_gpu_product(blas, key, align, [&] {
        auto format = [&](bool wide) {
            constexpr auto E2M1 = cudaDataType_t(33); // CUDA_R_4F_E2M1, from 12.8 on
            return nvfp4 ? E2M1 : wide ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
        };
        GpuProduct made = make_gpu_product(shape, format(p.a_wide), format(p.b_wide),
                                           cuda_type(p.out), bias);
        // The library's first operand is our second.
#if CUBLAS_VERSION >= 120800
        describe(made, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, fp8_scale_mode(p.b));
        describe(made, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, fp8_scale_mode(p.a));
#endif
        if (bias)
            describe(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(type_of<T>()));
        if (nvfp4)
            describe(made, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
        describe_scales(made);
        return made;
    });
    describe_scales(g);
    if (nvfp4)
        launch(nvfp4_alpha_kernel, 1, 1, stream, a.head, b.head, added != nullptr);
    auto run = [&](const GpuAlgorithm& algorithm) {
        return run_gpu_product(blas, g, algorithm, out, a.codes, b.codes, bias, added, stream,
                               nvfp4 ? &a.head->alpha : nullptr);
    };
    run_chosen(blas, g, key, align, run, stream);
}

#else // the emulator

// The emulated GPU is an sm_86, which multiplies no codes; a test may set another architecture.
inline bool fp8_multiplies(const Fp8Product& p, const Blas& blas, cudaStream_t) {
    return !fp8_refuses(p, blas.emulates, 130000);
}

// The numbers (rows,K) that the codes stand for, times alpha.
template <typename T, typename F>
std::vector<T> fp8_numbers(const Fp8Operand& x, size_t rows, size_t K, float alpha) {
    const F* codes = static_cast<const F*>(x.codes);
    size_t squares = fp8_square_row(ceil_div(K, FP8_BLOCK));
    std::vector<T> numbers(rows * K);

    // Multiply each code by its block's inverse scale. A tile of bytes is 128 rows of four scales.
    bool nvfp4 = is_nvfp4(x.blocks);
    auto inverse = [&](size_t r, size_t k) -> float {
        if (!is_mx(x.blocks)) {
            size_t at = x.blocks == Fp8Blocks::WHOLE  ? 0
                        : x.blocks == Fp8Blocks::ROWS ? k / FP8_BLOCK * rows + r
                                                      : r / FP8_BLOCK * squares + k / FP8_BLOCK;
            return static_cast<const float*>(x.inverse)[at];
        }
        size_t block = nvfp4 ? 16 : 32, tile = r / 128 * ceil_div(K, 4 * block) + k / block / 4;
        size_t at = tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + k / block % 4;
        uint8_t byte = static_cast<const uint8_t*>(x.inverse)[at];
        return nvfp4 ? fp8_value(e4m3{byte}) : std::ldexp(1.0f, byte - 127);
    };
    for (size_t i = 0; i < rows * K; i++) {
        float value = nvfp4 ? e2m1_value(codes[i / 2].bits >> i % 2 * 4) : fp8_value(codes[i]);
        numbers[i] = from_acc<T>(value * inverse(i / K, i % K) * alpha);
    }
    return numbers;
}

// The product in the emulator: a bf16 product of the codes' values.
template <typename T, typename O>
void fp8_matmul(O* out, const Fp8Operand& a, const Fp8Operand& b, // (M,N) (M,K) (N,K)
                const T* bias, const O* residual,                 // (N) (M,N), or null
                const Fp8Product& p, Blas& blas, cudaStream_t stream) {
    check_workspace(blas);
    bool adds = residual || p.accumulate;
    if (is_nvfp4(p.a))
        launch(nvfp4_alpha_kernel, 1, 1, stream, a.head, b.head, adds);
    auto multiply = [=] {
        Nvfp4Head head = is_nvfp4(p.a) ? *a.head : Nvfp4Head{0, 1, 1, float(adds)};
        auto numbers = [&](const Fp8Operand& x, size_t rows, float factor) {
            return x.wide ? fp8_numbers<T, e5m2>(x, rows, p.K, factor)
                          : fp8_numbers<T, e4m3>(x, rows, p.K, factor);
        };

        // Multiply the values that the codes stand for.
        std::vector<T> A = numbers(a, p.M, head.alpha), B = numbers(b, p.N, 1);
        Product shape = {p.M, p.N, p.K, {p.K, 1}, {1, p.K}, p.N, p.accumulate && head.beta};
        emulated_product(out, A.data(), B.data(), bias, head.beta ? residual : nullptr, shape);
    };

    // Queue it as a launch.
    auto* name = &emulated_product<T, O>;
    emulator::note_launch(name);
    emulator::give(reinterpret_cast<const void*>(name), stream, multiply, out, a, b, bias, residual,
                   p);
}
#endif
#endif

} // namespace llmc
