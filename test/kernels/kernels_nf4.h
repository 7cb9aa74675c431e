// kernels_nf4.h - rows of the kernel table: NF4 and int8, each byte as the CPU makes it
#pragma once
#include "kernel_table.h"
#include "ops_nf4.h"

using namespace llmc;

// Sizes: one element; a last block that is not full, of an odd number of elements too; blocks of
// scales that are full, and by one too short or too long, or by many; unaligned results (shift).
// The device only dequantises, so the CPU makes the codes, here and below.
template <typename T> void nf4_kernels(Check& c) {
    struct Case {
        size_t n, shift;
    };
    std::vector<Case> cases = {{1, 0}, {63, 0}, {64, 1}, {200, 0}, {64 * 40 + 16, 0}};
    if (!SMALL)
        for (size_t scales : {255, 256, 257}) cases.push_back({64 * scales, 0});
    if (!SMALL) cases.push_back({64 * 300 + 7, 0});
    for (auto [n, shift] : cases) {
        CASE(c, "nf4 %s n=%zu shift=%zu", type_word(T()), n, shift);

        // Want: the CPU's numbers. One block holds only zeros.
        std::vector<double> x = rounded<T>(normals(c, n));
        if (n > 128) std::fill_n(x.begin() + 64, 64, 0.0);
        Nf4Bytes want(as<T>(x));
        std::vector<double> back = as_double(want.back<T>(n));

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> out(n, shift);
            Array<uint8_t> codes(want.codes), scales(want.scales);
            Array<float> table(std::vector<double>(want.table.begin(), want.table.end()));
            nf4_dequantize(out.data, {codes.data, scales.data, table.data}, n, stream);
            o.add("back", out, back, 0); // exact
        });
    }
}

// int8 with one scale a row. The first of several rows holds only zeros.
template <typename T> void int8_kernels(Check& c) {
    for (auto [rows, cols] : {std::pair<size_t, size_t>(1, 1), {9, 33}, {20, 100}}) {
        CASE(c, "int8 %s rows=%zu cols=%zu", type_word(T()), rows, cols);
        size_t n = rows * cols;
        std::vector<double> x = rounded<T>(normals(c, n));
        if (rows > 1) std::fill_n(x.begin(), cols, 0.0);

        // Want: the CPU's numbers.
        std::vector<int8_t> codes(n);
        std::vector<float> absmax(rows);
        std::vector<T> back(n);
        int8_quantize(codes.data(), absmax.data(), as<T>(x).data(), rows, cols, Cpu{});
        int8_dequantize(back.data(), codes.data(), absmax.data(), rows, cols, Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> out(n);
            Array<int8_t> in(codes);
            Array<float> most(as_double(absmax));
            int8_dequantize(out.data, in.data, most.data, rows, cols, stream);
            o.add("back", out, as_double(back), 0);
        });
    }
}

// int4 back to T. Shapes: one element, an odd row, rows of several groups, rows that vectors fit,
// and the same unaligned.
template <typename T> void int4_kernels(Check& c) {
    struct Case {
        size_t rows, cols, shift;
    };
    for (auto [rows, cols, shift] :
         {Case{1, 1, 0}, {3, 33, 0}, {5, 130, 0}, {4, 272, 0}, {4, 272, 1}}) {
        CASE(c, "int4 %s rows=%zu cols=%zu shift=%zu", type_word(T()), rows, cols, shift);
        size_t n = rows * cols, bytes = ceil_div(n, size_t(2));
        std::vector<double> x = rounded<T>(normals(c, n));
        std::vector<uint8_t> codes(bytes);
        std::vector<float> scales(rows * int4_groups(cols));
        std::vector<T> back(n);
        int4_quantize(codes.data(), scales.data(), as<T>(x).data(), rows, cols, Cpu{});
        int4_dequantize(back.data(), codes.data(), scales.data(), rows, cols, Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> out(n, shift);
            Array<uint8_t> in(codes);
            Array<float> steps(as_double(scales));
            int4_dequantize(out.data, in.data, steps.data, rows, cols, stream);
            o.add("back", out, as_double(back), 0);
        });
    }
}

inline void add_nf4_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("nf4", nf4_kernels),
        TWO_TYPES("int8", int8_kernels),
        TWO_TYPES("int4", int4_kernels)});
}
