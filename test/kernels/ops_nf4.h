// ops_nf4.h - rows of the op table: NF4 with double quantisation, int8 rows
#pragma once
#include "../../llmc/ops/nf4.cuh"
#include "../../llmc/ops/rand.h"
#include "../harness/op_table.h"

using namespace llmc;

// A parameter in NF4, quantised by the CPU.
struct Nf4Bytes {
    std::vector<uint8_t> codes, scales;
    std::vector<float> absmax, table;
    template <typename T> explicit Nf4Bytes(const std::vector<T>& x) {
        size_t n = x.size(), blocks = nf4_blocks(n);
        codes.resize(ceil_div(n, size_t(2)));
        scales.resize(blocks);
        absmax.resize(blocks);
        table.resize(nf4_table_floats(n));
        nf4_quantize(codes.data(), absmax.data(), x.data(), n, Cpu{});
        nf4_begin_table(table.data(), absmax.data(), blocks);
        nf4_quantize_scales(scales.data(), table.data(), absmax.data(), blocks, Cpu{});
    }
    Nf4 view() const { return {codes.data(), scales.data(), table.data()}; }
    template <typename T> std::vector<T> back(size_t n) const {
        std::vector<T> x(n);
        nf4_dequantize(x.data(), view(), n, Cpu{});
        return x;
    }
};

// The root mean square of the errors, relative to that of the numbers.
template <typename T>
double relative_error(const std::vector<T>& got, const std::vector<double>& want) {
    double error = 0, all = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double e = double(to_acc(got[i])) - want[i];
        error += e * e;
        all += want[i] * want[i];
    }
    return std::sqrt(error / all);
}

// A hash of an array's bytes.
template <typename T> uint64_t hash_of(const std::vector<T>& x) {
    return fnv1a(std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(T)));
}

// The hashes that dev/golden/nf4_golden.py prints. That program was written
// independently of this one.
inline void nf4_golden(Check& c) {
    std::vector<float> x(64 * 300 + 11);
    for (size_t i = 0; i < x.size(); i++)
        x[i] = float((double(uint32_t(i * 2654435761u) >> 8) / 16777216 - 0.5) *
                     std::pow(2.0, int(i / 64 * 7 % 11) - 5));
    Nf4Bytes w(x);

    expect(c, hash_of(w.codes) == 0xe0e52568af201a82, "other codes");
    expect(c, hash_of(w.scales) == 0x4437a2526b7ca3c1, "other codes of absmax");
    std::vector<float> map(w.table.begin() + 1, w.table.begin() + NF4_TABLE);
    expect(c, hash_of(map) == 0x619efdf6517c4850, "another map");
    uint32_t numbers[] = {0x4039d9fc, 0x415167b9, 0x415121a9}; // offset, absmax2
    for (int k = 0; k < 3; k++) {
        float got = k ? w.table[NF4_TABLE + k - 1] : w.table[0];
        expect(c, bits_as<uint32_t>(got) == numbers[k], "offset or absmax2 " + std::to_string(k));
    }
    expect(c, hash_of(w.back<float>(x.size())) == 0xf0a6128cdc2ab5b1, "other values");
}

// The golden bytes, the size of the errors, and what must come back unchanged.
inline void nf4_test(Check& c) {
    nf4_golden(c);

    // The errors of normal numbers, within 2% of a separate measurement on 2^20 of them:
    // 9.20% for blocks of 64, and 0.70% for int8 rows of 256. The second quantisation adds
    // less than 1% of the first.
    size_t n = size_t(1) << 18;
    std::vector<double> x = rounded<float>(normals(c, n));
    Nf4Bytes w(as<float>(x));
    double error = relative_error(w.back<float>(n), x);
    expect(c, std::fabs(error / 0.0920 - 1) < 0.02, "error of NF4: " + std::to_string(error));

    std::vector<int8_t> codes(n);
    std::vector<float> absmax(n / 256), rows(n);
    int8_quantize(codes.data(), absmax.data(), as<float>(x).data(), n / 256, 256, Cpu{});
    int8_dequantize(rows.data(), codes.data(), absmax.data(), n / 256, 256, Cpu{});
    error = relative_error(rows, x);
    expect(c, std::fabs(error / 0.0070 - 1) < 0.02, "error of int8: " + std::to_string(error));

    // A value that comes back is rounded to T once. Quantised again it has the same code, since a
    // block's largest value has the code of 1 again.
    std::vector<bf16> narrow = w.back<bf16>(n);
    close(c, "bf16", narrow, rounded<bf16>(as_double(w.back<float>(n))), 0);
    expect(c, Nf4Bytes(w.back<float>(n)).codes == w.codes, "other codes the second time");

    // A piece made of whole blocks equals that part of the whole: the second of each row's 3
    // blocks, or the middle third, all of it one run.
    std::vector<float> all = w.back<float>(64 * 3 * 1000), piece(64 * 1000);
    for (size_t run : {size_t(1), size_t(1000)}) {
        std::vector<uint8_t> part, part_scales;
        auto whole = [&](size_t b) { return b / run * 3 * run + run + b % run; };
        for (size_t b = 0; b < 1000; b++) {
            part.insert(part.end(), &w.codes[whole(b) * 32], &w.codes[whole(b) * 32] + 32);
            part_scales.push_back(w.scales[whole(b)]);
        }

        // Dequantise the piece alone, with the whole's table.
        Nf4 x = {part.data(), part_scales.data(), w.table.data(), run, 3 * run, run};
        nf4_dequantize(piece.data(), x, piece.size(), Cpu{});
        bool same = true;
        for (size_t i = 0; i < piece.size(); i++)
            same &= piece[i] == all[whole(i / 64) * 64 + i % 64];
        expect(c, same, "a piece differs from its part of the whole");
    }
}

// Zeros come back as zeros, beside other blocks and alone. A single number is its own absmax.
inline void nf4_edges(Check& c) {
    for (size_t n : {size_t(1), size_t(63), size_t(64), size_t(65), size_t(64 * 256 + 1)}) {
        std::vector<float> x(n, 0.0f);
        close(c, "zeros", Nf4Bytes(x).back<float>(n), std::vector<double>(n, 0), 0);
        x[n - 1] = -3;
        Nf4Bytes w(x);
        double least = n > 1 ? w.back<float>(n)[0] : 0;
        expect(c, least == 0, "a zero becomes another number");
        expect(c, nibble_of(w.codes[(n - 1) / 2], n - 1) == 0, "-absmax is not code 0");
        expect(c, n % 2 == 0 || (w.codes.back() & 15) == 0, "bits behind the last element");
    }

    // A number on a threshold has the code below it. A block that is too small
    // to scale becomes zero.
    expect(c, nf4_code(0.8614784181118011f) == 14 && nf4_code(0.861479f) == 15, "a threshold");
    std::vector<float> tiny(64, 1e-39f);
    close(c, "tiny", Nf4Bytes(tiny).back<float>(64), std::vector<double>(64, 0), 0);

    // int8 rows: zeros, an absmax of either sign, and a number between.
    std::vector<float> row = {0, 0, -2, 2, 1, 0.5f}, back(6), absmax(3);
    std::vector<int8_t> codes(6);
    int8_quantize(codes.data(), absmax.data(), row.data(), 3, 2, Cpu{});
    expect(c, codes == std::vector<int8_t>({0, 0, -127, 127, 127, 64}), "codes of int8");
    int8_dequantize(back.data(), codes.data(), absmax.data(), 3, 2, Cpu{});
    close(c, "int8", back, {0, 0, -2, 2, 1, 64.0 / 127}, tolerance<float>(1));
}

// GPTQ's grid: the hashes that dev/golden/int4_golden.py prints. That program was written
// independently of this one.
inline void int4_test(Check& c) {
    size_t rows = 5, cols = 300, n = rows * cols;
    std::vector<float> x(n), scales(rows * 3), back(n);
    for (size_t i = 0; i < n; i++)
        x[i] = float((double(uint32_t(i * 2654435761u) >> 8) / 16777216 - 0.5) *
                     std::pow(2.0, int(i / 64 * 7 % 11) - 5));
    std::vector<uint8_t> codes(n / 2);
    int4_quantize(codes.data(), scales.data(), x.data(), rows, cols, Cpu{});
    int4_dequantize(back.data(), codes.data(), scales.data(), rows, cols, Cpu{});
    expect(c, hash_of(codes) == 0x62129de5a8ee7c54, "other codes");
    expect(c, hash_of(scales) == 0x9c12b96035f4c159, "other scales");
    expect(c, hash_of(back) == 0xddfe6107381aedae, "other values");

    // No number is off by more than half a step; only the largest positive number
    // is off by exactly that.
    for (size_t i = 0; i < n; i++) {
        double step = scales[i / cols * 3 + i % cols / INT4_GROUP], off = x[i] - back[i];
        expect(c, std::fabs(off) <= 0.5 * step * (1 + 1e-6), "off by more than half a step");
    }

    // Zeros come back as zeros, and so do numbers that are too small to scale.
    std::vector<float> small = {0, 1e-40f, -1e-41f};
    int4_quantize(codes.data(), scales.data(), small.data(), 1, 3, Cpu{});
    int4_dequantize(back.data(), codes.data(), scales.data(), 1, 3, Cpu{});
    close(c, "zeros", std::vector<float>(back.begin(), back.begin() + 3), {0, 0, 0}, 0);
    expect(c, (codes[1] & 15) == 0, "bits behind the last element");
}

inline void add_nf4_rows(std::vector<Row>& rows) {
    rows.push_back({"nf4, int8", nf4_test, nullptr, nullptr});
    rows.push_back({"nf4, int8: edges", nf4_edges, nullptr, nullptr});
    rows.push_back({"int4", int4_test, nullptr, nullptr});
}
