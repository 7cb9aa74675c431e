// kernels_fp8.h - rows of the kernel table: fp8 in blocks, codes and values, transposed too
#pragma once
#include "../../llmc/fp8.cuh"
#include "kernel_table.h"

using namespace llmc;

// A kernel's bytes are the CPU's, element by element: there is no order in a maximum.
template <typename A, typename B>
void same_bytes(Check& c, const char* name, const Array<A>& got, const std::vector<B>& want) {
    static_assert(sizeof(A) == sizeof(B));
    auto host = got.host();
    expect(c, memcmp(host.data(), want.data(), want.size() * sizeof(B)) == 0, name);
}

// One element, less than a tile, a tile, tiles with ragged ends both ways.
inline std::vector<std::pair<size_t, size_t>> fp8_shapes() {
    if (SMALL) return {{3, 5}, {130, 131}};
    return {{1, 1}, {3, 5}, {128, 128}, {131, 259}};
}

// Normals of very different sizes, with a row of zeros and one of subnormals; or NaN and infinity.
inline std::vector<bf16> fp8_inputs(Check& c, size_t rows, size_t cols, bool finite) {
    auto x = as<bf16>(normals(c, rows * cols));
    auto size = normals(c, rows * cols, 3);
    for (size_t i = 0; i < x.size(); i++)
        x[i] = from_acc<bf16>(to_float(x[i]) * float(std::exp(size[i])));
    for (size_t i = 0; rows > 2 && i < cols; i++) {
        x[cols + i] = {uint16_t(i % 2 * 0x8000)};
        x[2 * cols + i] = {uint16_t(c.random() % 0x80)};
    }
    if (!finite) x[c.random() % x.size()] = from_acc<bf16>(-NAN);
    if (!finite) x[c.random() % x.size()] = from_acc<bf16>(INFINITY);
    return x;
}

template <typename F> void fp8_kernels(Check& c) {
    for (auto [rows, cols] : fp8_shapes())
        for (int kind = 0; kind < 4; kind++)
            for (bool finite : {true, false}) {
                Fp8Blocks blocks = Fp8Blocks(kind);
                CASE(c, "fp8 %d bits of mantissa, %zux%zu, blocks %d, finite %d", F::MANTISSA, rows,
                     cols, kind, finite);
                auto x = fp8_inputs(c, rows, cols, finite);
                size_t n = x.size(), scales = fp8_scales(rows, cols, blocks);

                // Want: the CPU's bytes.
                std::vector<F> codes(n), transposed(n);
                std::vector<bf16> values(n), values_t(n);
                std::vector<float> inverse(scales);
                uint32_t most = 0;
                fp8_quantise<F>(codes.data(), transposed.data(), inverse.data(), x.data(), &most,
                                rows, cols, blocks, Cpu{});
                fp8_quantise<F>(values.data(), values_t.data(), inverse.data(), x.data(), &most,
                                rows, cols, blocks, Cpu{});
                every_order(c, [&](Outputs& o) {
                    cudaStream_t stream = {};
                    Array<bf16> inp(as_double(x)), y(n), yt(n);
                    copy_in(inp.data, x.data(), n * sizeof(bf16), stream); // NaNs as they are
                    Array<unsigned char> code(n), code_t(n);
                    Array<float> scale(scales);
                    Array<int> amax(1);
                    uint32_t* word = reinterpret_cast<uint32_t*>(amax.data);
                    F* code_rows = reinterpret_cast<F*>(code.data);
                    F* code_columns = reinterpret_cast<F*>(code_t.data);
                    fp8_quantise<F>(code_rows, code_columns, scale.data, inp.data, word, rows, cols,
                                    blocks, stream);
                    float* no_scales = nullptr;
                    fp8_quantise<F>(y.data, yt.data, no_scales, inp.data, word, rows, cols, blocks,
                                    stream);
                    same_bytes(c, "codes", code, codes);
                    same_bytes(c, "codes of the transpose", code_t, transposed);
                    same_bytes(c, "scales", scale, inverse);
                    same_bytes(c, "values", y, values);
                    same_bytes(c, "values of the transpose", yt, values_t);
                    o.same("codes", code.data, n);
                });
            }
}

inline void add_fp8_kernels(std::vector<KernelRow>& rows) {
    rows.push_back({"fp8 e4m3", fp8_kernels<e4m3>});
    rows.push_back({"fp8 e5m2", fp8_kernels<e5m2>});
}
