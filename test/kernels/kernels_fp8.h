// kernels_fp8.h - rows of the kernel table: fp8 in blocks, transposed too; products of codes
#pragma once
#include "../../llmc/ops/fp8_delayed.cuh"
#include "../../llmc/ops/fp8_sent.cuh"
#include "../../llmc/ops/linear.cuh"
#include "kernel_table.h"

using namespace llmc;

// A maximum has no order of summation, so the kernel must give the CPU's bytes, element by element.
template <typename A, typename B>
void same_bytes(Check& c, const char* name, const Array<A>& got, const std::vector<B>& want) {
    auto host = got.host();
    size_t bytes = want.size() * sizeof(B);
    expect(c, !bytes || memcmp(host.data(), want.data(), bytes) == 0, name);
}

// Shapes: one element, less than a tile, one tile, and tiles with ragged ends in both directions,
// whose rows or columns are whole packs or not.
inline std::vector<std::pair<size_t, size_t>> fp8_shapes() {
    if (SMALL) return {{3, 5}, {130, 131}, {136, 24}};
    return {{1, 1}, {3, 5}, {128, 128}, {131, 259}, {131, 264}, {136, 264}};
}

// Normal numbers of very different sizes, with a row of zeros and a row of subnormals. If not
// finite, one NaN and one infinity too.
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

// Every kind of block, as codes and as the values that the codes stand for, both also transposed.
template <typename F> void fp8_kernels(Check& c) {
    for (auto [rows, cols] : fp8_shapes())
        for (int kind = 0; kind <= int(Fp8Blocks::MX_COLUMNS); kind++)
            for (bool finite : {true, false}) {
                Fp8Blocks blocks = Fp8Blocks(kind);
                CASE(c, "fp8 %d bits of mantissa, %zux%zu, blocks %d, finite %d", F::MANTISSA, rows,
                     cols, kind, finite);
                auto x = fp8_inputs(c, rows, cols, finite);
                size_t n = x.size(), scales = fp8_scales(rows, cols, blocks);

                // Want: the CPU's bytes. Scales that belong to no block stay -1.
                std::vector<F> codes(n), transposed(n);
                std::vector<bf16> values(n), values_t(n);
                std::vector<float> inverse(scales, -1);
                uint32_t most = 0;
                fp8_quantise<F>(codes.data(), transposed.data(), inverse.data(), x.data(), &most,
                                rows, cols, blocks, Cpu{});
                fp8_quantise<F>(values.data(), values_t.data(), inverse.data(), x.data(), &most,
                                rows, cols, blocks, Cpu{});
                every_order(c, [&](Outputs& o) {
                    cudaStream_t stream = {};
                    Array<bf16> inp(x), y(n), yt(n);
                    Array<F> code(n), code_t(n);
                    Array<float> scale(std::vector<double>(scales, -1));
                    Array<uint32_t> amax(1);

                    // Quantise to codes, then to values.
                    fp8_quantise<F>(code.data, code_t.data, scale.data, inp.data, amax.data, rows,
                                    cols, blocks, stream);
                    fp8_quantise<F>(y.data, yt.data, nullptr, inp.data, amax.data, rows, cols,
                                    blocks, stream);

                    // Hold each output against the CPU's bytes.
                    same_bytes(c, "codes", code, codes);
                    same_bytes(c, "codes of the transpose", code_t, transposed);
                    same_bytes(c, "scales", scale, inverse);
                    same_bytes(c, "values", y, values);
                    same_bytes(c, "values of the transpose", yt, values_t);
                    o.same("codes", code.data, n);
                });
            }
}

// NVFP4 along rows and down columns, in all its ways: values anywhere, codes of whole blocks.
inline void nvfp4_kernels(Check& c) {
    for (auto [rows, cols] : {std::pair<size_t, size_t>{5, 35}, {48, 80}, {131, 272}})
        for (int kind = 0; kind < 32; kind++) {
            if (SMALL && rows == 131) continue;
            bool turned = kind & 1;
            Nvfp4 how = {turned ? cols : rows, turned ? rows : cols, turned ? 1 : cols,
                         turned ? cols : 1, bool(kind & 2), bool(kind & 4), bool(kind & 8)};
            CASE(c, "nvfp4 %zux%zu, kind %d", rows, cols, kind);
            auto x = fp8_inputs(c, rows, cols, kind & 16);
            size_t codes = how.K % NVFP4_BLOCK ? 0 : x.size() / NVFP4_BLOCK;
            Fp8Blocks blocks = turned ? Fp8Blocks::NVFP4_COLUMNS : Fp8Blocks::NVFP4_ROWS;
            size_t bytes = codes ? fp8_scales(rows, cols, blocks) : 0;

            // Want: the CPU's bytes.
            std::vector<bf16> values(x.size());
            std::vector<uint64_t> words(codes);
            std::vector<uint8_t> scales(bytes);
            Nvfp4Head head = {};
            nvfp4_quantise(values.data(), nullptr, &head, x.data(), how, Cpu{});
            if (codes) nvfp4_quantise(words.data(), scales.data(), &head, x.data(), how, Cpu{});
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<bf16> inp(x), y(x.size());
                Array<Nvfp4Head> there(1);
                Array<uint64_t> code(codes);
                Array<uint8_t> scale(bytes);
                nvfp4_quantise(y.data, nullptr, there.data, inp.data, how, stream);
                if (codes)
                    nvfp4_quantise(code.data, scale.data, there.data, inp.data, how, stream);

                // Hold each output against the CPU's bytes.
                same_bytes(c, "values", y, values);
                same_bytes(c, "codes", code, words);
                same_bytes(c, "scales", scale, scales);
                expect(c, memcmp(there.host().data(), &head, 2 * sizeof(float)) == 0, "head");
                o.same("values", y.data, x.size());
            });
        }
}

// Parts of a matrix that begin and end anywhere: maxima, codes and values are the CPU's.
inline void fp8_piece_kernels(Check& c) {
    for (auto [rows, cols] : fp8_shapes())
        for (bool whole : {false, true})
            for (bool finite : {true, false}) {
                CASE(c, "fp8 piece of %zux%zu, whole %d, finite %d", rows, cols, whole, finite);
                auto all = fp8_inputs(c, rows, cols, finite);
                size_t first = c.random() % all.size();
                size_t n = 1 + c.random() % (all.size() - first);
                std::vector<bf16> x(all.begin() + long(first), all.begin() + long(first + n));
                Fp8Piece piece = {rows, cols, first, n, whole};
                size_t blocks = fp8_piece_blocks(rows, cols, whole);

                // Want: the CPU's bytes, with a maximum that another rank has left.
                std::vector<uint32_t> maxima(blocks, 0x3f800000);
                std::vector<e4m3> codes(n);
                std::vector<bf16> values(n);
                fp8_piece_maxima(maxima.data(), x.data(), piece, Cpu{});
                fp8_piece_cast(codes.data(), x.data(), maxima.data(), piece, Cpu{});
                fp8_piece_cast(values.data(), codes.data(), maxima.data(), piece, Cpu{});
                every_order(c, [&](Outputs& o) {
                    cudaStream_t stream = {};
                    Array<bf16> inp(x), y(n);
                    Array<e4m3> code(n);
                    Array<uint32_t> amax(std::vector<uint32_t>(blocks, 0x3f800000));
                    fp8_piece_maxima(amax.data, inp.data, piece, stream);
                    fp8_piece_cast(code.data, inp.data, amax.data, piece, stream);
                    fp8_piece_cast(y.data, code.data, amax.data, piece, stream);

                    // Hold each output against the CPU's bytes.
                    same_bytes(c, "maxima", amax, maxima);
                    same_bytes(c, "codes", code, codes);
                    same_bytes(c, "values", y, values);
                    o.same("codes", code.data, n);
                });
            }
}

// ----------------------------------------------------------------------------
// delayed scaling

// Delayed scaling takes a scale that is known before: none yet, a tiny one, or one so large that
// numbers saturate. A maximum of 5 is there already, or nobody asks for one.
inline void fp8_late_kernels(Check& c) {
    for (auto [rows, cols] : fp8_shapes())
        for (float given : {0.0f, 3e-9f, 1e6f})
            for (bool leaves : {true, false}) {
                CASE(c, "fp8 late %zux%zu scale %g, leaves %d", rows, cols, double(given), leaves);
                auto x = fp8_inputs(c, rows, cols, given != 3e-9f);
                size_t n = x.size();

                // Want: the CPU's bytes.
                std::vector<e4m3> codes(n), transposed(n);
                std::vector<float> inverse(1);
                std::vector<uint32_t> most = {5};
                Fp8Late late = {&given, leaves ? most.data() : nullptr};
                fp8_quantise<e4m3>(codes.data(), transposed.data(), inverse.data(), x.data(),
                                   nullptr, rows, cols, Fp8Blocks::WHOLE, Cpu{}, late);
                every_order(c, [&](Outputs& o) {
                    cudaStream_t stream = {};
                    Array<bf16> inp(x);
                    Array<e4m3> code(n), code_t(n);
                    Array<float> back(1), scale(std::vector<double>{given});
                    Array<uint32_t> amax(std::vector<uint32_t>{5});

                    // Quantise under the given scale, and hold each output against the CPU's bytes.
                    Fp8Late there = {scale.data, leaves ? amax.data : nullptr};
                    fp8_quantise<e4m3>(code.data, code_t.data, back.data, inp.data, nullptr, rows,
                                       cols, Fp8Blocks::WHOLE, stream, there);
                    same_bytes(c, "codes", code, codes);
                    same_bytes(c, "codes of the transpose", code_t, transposed);
                    same_bytes(c, "scale", back, inverse);
                    same_bytes(c, "maximum", amax, most);
                    o.same("codes", code.data, n);
                });
            }
}

// Six steps of a state, with maxima that are normal, zero, infinite and NaN; more slots than a
// block has threads, with histories of several lengths.
inline void fp8_delayed_kernels(Check& c) {
    for (int length : {1, 2, 40})
        for (bool recent : {false, true}) {
            CASE(c, "fp8 delayed, length %d, recent %d", length, recent);
            Fp8Rule rule = {length, length % 3, recent};
            size_t slots = SMALL ? 3 : 9, words = fp8_history_bytes(slots, rule) / 4;
            std::vector<uint32_t> state(words);
            Array<int> there(std::vector<double>(words, 0));
            auto sizes = normals(c, 6 * slots, 9);
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};

                // Begin both states with zeros.
                std::fill(state.begin(), state.end(), 0);
                device_zero(there.data, words * 4, stream);
                Fp8History h = fp8_history_at(state.data(), slots, rule);
                Fp8History d = fp8_history_at(there.data, slots, rule);

                // Give both states the step's maxima, then let each choose its next scales.
                for (size_t step = 0; step < 6; step++) {
                    for (size_t i = 0; i < slots; i++) {
                        float most = std::exp(float(sizes[step * slots + i]));
                        h.amax[i] = (i + step) % 7 == 6 ? FP8_INFINITY + uint32_t(i % 2)
                                    : (i + step) % 5    ? fp8_magnitude(most)
                                                        : 0;
                    }
                    copy_in(d.amax, h.amax, slots * 4, stream);
                    wait_for(stream); // the copy is over before the CPU changes its source
                    fp8_next_scales(h, rule, Cpu{});
                    fp8_next_scales(d, rule, stream);
                }
                same_bytes(c, "state", there, state);
                o.same("state", there.data, words);
            });
        }
}

// ----------------------------------------------------------------------------
// linear layers

// Sizes that tensor cores take, in whole and in ragged blocks, and one that they do not take.
inline std::vector<std::array<size_t, 3>> fp8_linear_shapes() { // N OC IC
    if (SMALL) return {{32, 32, 160}};
    return {{32, 160, 288}, {144, 16, 32}, {9, 7, 5}};
}

// The three products of a layer on a device: from codes on tensor cores, or from the values
// that codes stand for.
struct Fp8Layer {
    Array<bf16> out, dinp;
    Array<float> dw;
    Fp8Layer(const std::vector<double>& x, const std::vector<double>& w,
             const std::vector<double>& dy, const std::vector<double>& b, size_t N, Fp8 fp8,
             [[maybe_unused]] int architecture)
        : out(N * b.size()), dinp(x.size()), dw(std::vector<double>(w.size(), 2)) {
        cudaStream_t stream = {};
        size_t OC = b.size(), IC = w.size() / OC;
        size_t bytes = linear_scratch_bytes<bf16>(N, OC, IC, stream) +
                       linear_fp8_bytes(N, OC, IC, fp8);
        Array<unsigned char> scratch(bytes);
        Array<bf16> inp(x), weight(w), dout(dy), bias(b);

        // Choose the path: an emulated architecture below 89 has no tensor cores for codes.
        Blas blas;
        blas_scratch(blas, scratch.data, bytes);
#if !defined(__CUDACC__)
        blas.emulates = architecture;
#endif

        // Run the three products, forward with a residual.
        Weight W = {weight.data, Type::BF16, OC, IC, dw.data, nullptr, fp8};
        Weight B = {bias.data, Type::BF16, OC, 1};
        linear_forward(out.data, inp.data, W, &B, dout.data, N, blas, stream); // residual: dout
        linear_backward_input(dinp.data, dout.data, W, N, false, blas, stream);
        linear_backward_weight(W, nullptr, dout.data, inp.data, N, true, blas, stream);
        wait_for(stream); // before the scratch is freed
    }
};

// The device multiplies codes. Its products must agree with the CPU's, which multiplies the values
// that codes stand for.
inline void fp8_linear_kernels(Check& c) {
    for (auto [N, OC, IC] : fp8_linear_shapes())
        for (Fp8 fp8 : {Fp8::BLOCK, Fp8::TENSOR, Fp8::MX, Fp8::NVFP4}) {
            CASE(c, "linear fp8 %d N=%zu OC=%zu IC=%zu", int(fp8), N, OC, IC);
            auto x = rounded<bf16>(normals(c, N * IC)), w = rounded<bf16>(normals(c, OC * IC));
            auto dy = rounded<bf16>(normals(c, N * OC)), b = rounded<bf16>(normals(c, OC));

            // Want: the CPU, in bf16 as it trains.
            std::vector<bf16> inp = as<bf16>(x), weight = as<bf16>(w), dout = as<bf16>(dy);
            std::vector<bf16> bias = as<bf16>(b), out(N * OC), dinp(N * IC);
            std::vector<float> dw(OC * IC, 2);
            std::vector<unsigned char> memory(linear_scratch_bytes<bf16>(N, OC, IC, Cpu{}) +
                                              linear_fp8_bytes(N, OC, IC, fp8));
            Blas host;
            blas_scratch(host, memory.data(), memory.size());
            Weight W = {weight.data(), Type::BF16, OC, IC, dw.data(), nullptr, fp8};
            Weight B = {bias.data(), Type::BF16, OC, 1};
            linear_forward(out.data(), inp.data(), W, &B, dout.data(), N, host, Cpu{});
            linear_backward_input(dinp.data(), dout.data(), W, N, false, host, Cpu{});
            linear_backward_weight(W, nullptr, dout.data(), inp.data(), N, true, host, Cpu{});

            // In the emulator the bits of values and codes must agree: products of codes are exact,
            // and sums have one order.
#if !defined(__CUDACC__)
            Fp8Layer values(x, w, dy, b, N, fp8, 86);
#endif

            // Both results are rounded to bf16, the CPU's and the device's: two roundings.
            every_order(c, [&](Outputs& o) {
                Fp8Layer codes(x, w, dy, b, N, fp8, fp8 >= Fp8::MX ? 100 : 90);
                double terms = largest(x) * largest(w);
                o.add("out", codes.out, as_double(out), tolerance<bf16>(IC + 2, 2), terms);
                o.add("dinp", codes.dinp, as_double(dinp), tolerance<bf16>(OC, 2), terms);
                o.add("dw", codes.dw, as_double(dw), tolerance<float>(N + 1), terms);
#if !defined(__CUDACC__)
                same_bytes(c, "out of codes", codes.out, values.out.host());
                same_bytes(c, "dinp of codes", codes.dinp, values.dinp.host());
                same_bytes(c, "dw of codes", codes.dw, values.dw.host());
#endif
            });
        }
}

// Products of one input that share its fp8 form have the bits of products that cast their own. Where
// tensor cores multiply codes they refuse the third matrix, which has seven rows.
inline void fp8_shared_kernels(Check& c) {
    size_t N = 16, IC = 144;
    for (Fp8 fp8 : {Fp8::BLOCK, Fp8::TENSOR, Fp8::MX, Fp8::NVFP4})
        for ([[maybe_unused]] int architecture : {86, 90, 100}) {
            CASE(c, "shared fp8 %d sm_%d", int(fp8), architecture);
            auto x = rounded<bf16>(normals(c, N * IC));
            auto w = rounded<bf16>(normals(c, 144 * IC)), dy = rounded<bf16>(normals(c, N * 144));

            // All outputs, then all gradients of weights.
            auto run = [&](bool shares) {
                cudaStream_t stream = {};
                Array<unsigned char> scratch(linear_scratch_bytes<bf16>(N, 144, IC, stream) +
                                             linear_fp8_bytes(N, 144, IC, fp8));
                Array<bf16> inp(x), weight(w), dout(dy);
                Blas blas;
                blas_scratch(blas, scratch.data, scratch.n);
#if !defined(__CUDACC__)
                blas.emulates = architecture;
#endif
                const bf16* no_residual = nullptr;
                std::vector<double> all;
                for (bool backward : {false, true}) {
                    Fp8Holds holds = {}, *shared = shares ? &holds : nullptr;
                    for (size_t OC : {16, 144, 7, 32}) {
                        Array<bf16> out(N * OC);
                        Array<float> dw(OC * IC);
                        Weight W = {weight.data, Type::BF16, OC, IC, dw.data, nullptr, fp8};
                        if (backward)
                            linear_backward_weight(W, nullptr, dout.data, inp.data, N, false, blas,
                                                   stream, shared);
                        else
                            linear_forward(out.data, inp.data, W, nullptr, no_residual, N, blas,
                                           stream, shared);
                        wait_for(stream);
                        auto made = backward ? as_double(dw.host()) : as_double(out.host());
                        all.insert(all.end(), made.begin(), made.end());
                    }
                }
                return all;
            };
            expect(c, run(true) == run(false), "an input cast once");
        }
}

// Gradients in packets: the CPU's bytes, and the CPU's sums to the bit.
inline void fp8_gradients_kernels(Check& c) {
    for (size_t d : {1, 2, 5})
        for (size_t n : {FP8_PACKET_ALIGN, 3 * FP8_PACKET_ALIGN})
            for (bool finite : {true, false}) {
                if (SMALL && (d == 5) != (n > FP8_PACKET_ALIGN)) continue;
                CASE(c, "fp8 gradients, %zu ranks, %zu elements, finite %d", d, n, finite);
                auto x = rounded<float>(normals(c, d * n)), size = normals(c, d * n, 3);
                for (size_t i = 0; i < d * n; i++)
                    x[i] = i / FP8_BLOCK == 1 ? 0 : x[i] * std::exp(size[i]);
                if (!finite) x[c.random() % (d * n)] = INFINITY;
                std::vector<float> part = as<float>(x), want(n);
                std::vector<uint8_t> packets(d * fp8_packet_bytes(n));
                fp8_pack_gradients(packets.data(), part.data(), d, n, Cpu{});
                fp8_sum_gradients(want.data(), packets.data(), d, n, Cpu{});

                // Pack, and add these packets as if each had come from another rank.
                every_order(c, [&](Outputs&) {
                    cudaStream_t stream = {};
                    Array<float> whole(as_double(part)), mine(n);
                    Array<unsigned char> sent(packets.size());
                    fp8_pack_gradients(sent.data, whole.data, d, n, stream);
                    fp8_sum_gradients(mine.data, sent.data, d, n, stream);
                    same_bytes(c, "packets", sent, packets);
                    same_bytes(c, "sum", mine, want);
                });
            }
}

inline void add_fp8_kernels(std::vector<KernelRow>& rows) {
    rows.push_back({"fp8 e4m3", fp8_kernels<e4m3>});
    rows.push_back({"fp8 e5m2", fp8_kernels<e5m2>});
    rows.push_back({"nvfp4", nvfp4_kernels});
    rows.push_back({"fp8 pieces", fp8_piece_kernels});
    rows.push_back({"fp8 linear", fp8_linear_kernels});
    rows.push_back({"fp8 shared", fp8_shared_kernels});
    rows.push_back({"fp8 gradients", fp8_gradients_kernels});
    rows.push_back({"fp8 late", fp8_late_kernels});
    rows.push_back({"fp8 delayed", fp8_delayed_kernels});
}
