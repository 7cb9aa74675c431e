// kernels_attention.h - rows of the kernel table: attention
#pragma once
#include "../../llmc/ops/elementwise.cuh"
#include "attention_inputs.h"
#include "kernel_table.h"

using namespace llmc;

// A layer's shape, and what is unusual about it.
struct AttentionCase {
    size_t B, Tq, Tk, NH, NKV, HS;
    int kind; // of the mask, as in attention_inputs()
    bool alibi = false;
    int window = INT_MAX;
    size_t gap = 0;   // elements between rows of q, k and v, as where q, k, v are fused
    size_t shift = 0; // elements by which operands start after a 16-byte boundary
    size_t HS_v = 0;  // 0: as HS
    float softcap = 0, scale = 0;
    size_t between = 0; // rows between sequences, as in a cache that is not full
};

// The cases of plain kernels: one query and key; the head size of each kernel and sizes between;
// several blocks of queries and keys; groups of heads; every kind of mask; one channel more than
// a kernel for smaller heads takes.
inline std::vector<AttentionCase> attention_cases() {
    if (SMALL)
        return {{1, 3, 3, 2, 1, 8, 0}, {1, 33, 40, 2, 1, 40, 1, true}, {1, 20, 36, 1, 1, 72, 3}};
    return {{1, 1, 1, 1, 1, 64, 0},         {2, 37, 37, 4, 2, 32, 0, false, INT_MAX, 64},
            {1, 70, 70, 3, 1, 64, 1, true}, {2, 40, 40, 6, 2, 16, 0, false, 9},
            {1, 1, 75, 4, 2, 64, 2},        {1, 19, 83, 4, 1, 40, 2, true, 33, 8},
            {2, 21, 50, 2, 2, 24, 3},       {1, 33, 33, 2, 1, 72, 1, false, 20},
            {1, 40, 40, 1, 1, 96, 0},       {1, 35, 67, 2, 1, 128, 2, false, INT_MAX, 256},
            {1, 20, 20, 1, 1, 256, 0},      {1, 45, 45, 3, 1, 64, 4},
            {1, 9, 9, 1, 1, 65, 0},         {1, 5, 5, 1, 1, 129, 0},
            {1, 1, 45, 3, 1, 64, 4}};
}

// The cases of tensor cores. They add blocks of 128 rows; tiles of 64 keys, some of them wholly
// visible, and more of them than a warp examines at once; batches that see different tiles; and
// shapes that fall back to plain kernels.
inline std::vector<AttentionCase> attention_mma_cases() {
    if (SMALL) return {{1, 20, 200, 2, 1, 32, 2}, {1, 5, 5, 1, 1, 12, 0}};
    return {{1, 150, 150, 1, 1, 32, 0},              // two blocks of rows
            {1, 3, 2100, 2, 1, 8, 2},                // 33 tiles of keys, 66 backward
            {1, 130, 130, 8, 1, 8, 0},               // 33 tiles of rows backward
            {1, 200, 200, 1, 1, 64, 0, false, 70},   // tiles left of the window are skipped
            {1, 256, 256, 1, 1, 8, 0, false, 255},   // the last row does not see the first key
            {3, 90, 90, 2, 1, 32, 1},                // documents of each sequence
            {2, 70, 150, 4, 2, 64, 3, true},         // keys in any order, rows that see nothing
            {1, 150, 60, 2, 2, 48, 2},               // queries before the first key
            {1, 20, 90, 4, 1, 80, 2, false, 40, 16}, // each head size's tiles of channels
            {1, 70, 70, 1, 1, 128, 0, true},
            {1, 12, 80, 2, 2, 160, 2},
            {1, 70, 70, 2, 1, 256, 1},
            {1, 1, 63, 2, 1, 64, 2},                 // all keys are seen, one of a tile is missing
            {1, 1, 64, 2, 1, 64, 2},
            {1, 1, 95, 1, 1, 128, 2},
            {1, 20, 30, 2, 1, 12, 2},
            {1, 20, 30, 2, 2, 64, 2, false, INT_MAX, 4},
            {1, 20, 30, 2, 1, 64, 2, false, INT_MAX, 8, 1}};
}

// Unusual layers: soft caps, scales, values of another width than keys, gaps between sequences. The
// last two run on tensor cores.
inline std::vector<AttentionCase> unusual_cases() {
    const int all = INT_MAX;
    if (SMALL) return {{1, 5, 9, 2, 1, 8, 3, true, 4, 0, 0, 12, 2.5f, 0.4f}};
    return {{1, 20, 40, 2, 1, 24, 2, false, all, 0, 0, 0, 3, 0},
            {2, 19, 37, 4, 2, 32, 3, true, 20, 8, 0, 16, 2.5f, 0.4f},
            {1, 33, 33, 2, 2, 16, 1, false, 9, 0, 0, 80, 0, 0.3f},
            {2, 33, 40, 2, 1, 32, 3, false, all, 16, 0, 0, 0, 0.3f, 2},
            {3, 40, 70, 2, 2, 64, 2, false, all, 0, 0, 0, 0, 0.2f, 1}};
}

// Soft caps on tensor cores: heads of both kernels of mma.sync; groups, windows, documents, keys in
// any order and rows that see nothing.
inline std::vector<AttentionCase> cap_cases() {
    const int all = INT_MAX;
    if (SMALL) return {{1, 20, 140, 2, 1, 72, 3, false, all, 0, 0, 0, 2}};
    return {{1, 150, 150, 1, 1, 72, 0, false, 40, 0, 0, 0, 3},
            {2, 45, 140, 4, 2, 128, 3, false, all, 0, 0, 0, 2, 0.3f},
            {1, 70, 70, 3, 1, 104, 1, false, all, 8, 0, 0, 1.5f},
            {1, 40, 70, 2, 1, 256, 2, false, 50, 0, 0, 0, 2.5f},
            {2, 33, 40, 2, 1, 160, 3, false, all, 0, 0, 0, 2}};
}

// Put rows (B, n, width) into memory with strides. Gaps hold NaN: nobody may read or write them.
inline std::vector<double> spread(const std::vector<double>& from, size_t B, size_t n, size_t width,
                                  size_t stride, size_t batch) {
    std::vector<double> to(B * batch, NAN);
    for (size_t row = 0; row < B * n; row++)
        std::copy_n(from.begin() + long(row * width), width,
                    to.begin() + long(row / n * batch + row % n * stride));
    return to;
}

// The kernels to run: the launcher's choice, or Hopper's.
enum class Path { CHOSEN, HOPPER };

// A case's operands in double, as every version reads them, and the definition's results.
struct AttentionWanted {
    AttentionDims d;             // the kernels' operands: 16-byte loads can take these strides
    AttentionInputs in;          // the definition's operands: strides may be odd
    AttentionRun<double> result; // with in's strides
    std::vector<double> q, k, v; // with d's strides
};
inline AttentionWanted attention_wanted(Check& c, const AttentionCase& s) {
    AttentionInputs x =
        attention_inputs(c, s.B, s.Tq, s.Tk, s.NH, s.NKV, s.HS, s.kind, s.alibi, s.HS_v);
    x.d.window = s.window;
    x.scale = s.scale;
    x.softcap = s.softcap;

    // Choose the kernels' strides, and lay the same numbers out with them.
    AttentionDims d = {s.B, s.Tq, x.d.Tk, s.NH, s.NKV, s.HS};
    d.q_stride = d.NH * d.HS + s.gap;
    d.k_stride = d.NKV * d.HS + s.gap;
    d.window = s.window;
    d.HS_v = x.d.HS_v;
    d.v_stride = d.NKV * d.HS_v + s.gap;
    d.q_batch = (d.Tq + s.between) * d.q_stride;
    d.k_batch = (d.Tk + s.between) * d.k_stride;
    d.v_batch = (d.Tk + s.between) * d.v_stride;
    return {d, x, attention_reference<double>(x),
            spread(query_heads(x.q, x.d), d.B, d.Tq, d.NH * d.HS, d.q_stride, d.q_batch),
            spread(key_heads(x.k, x.d), d.B, d.Tk, d.NKV * d.HS, d.k_stride, d.k_batch),
            spread(value_heads(x.v, x.d), d.B, d.Tk, d.NKV * d.HS_v, d.v_stride, d.v_batch)};
}

// Check the gradients inside the heads, and that nobody wrote between rows or sequences.
template <typename G>
void add_heads(Outputs& o, const char* name, const Array<G>& got, const std::vector<double>& want,
               size_t B, size_t n, size_t batch, size_t stride, size_t width, double tolerance,
               double terms) {
    std::vector<G> all = got.host();
    Array<G> inside(heads_of(all, B, n, batch, stride, width));
    o.add(name, inside, want, tolerance, terms);
    for (size_t i = 0; i < all.size(); i++) {
        bool gap = i % batch / stride >= n || i % batch % stride >= width;
        if (gap && !std::isnan(double(to_acc(all[i]))))
            return expect(o.c, false, std::string(name) + " is written between rows");
    }
}

// Run a case forward and backward, and hold every output against the definition.
template <typename T, Path path> void attention_case(Check& c, const AttentionCase& s) {
    AttentionWanted want = attention_wanted(c, s);
    const AttentionRun<double>& result = want.result;
    AttentionDims d = want.d;
    every_order(c, [&](Outputs& o) {
        cudaStream_t stream = {};

        // Copy the operands; outputs start as NaN.
        Array<T> q(want.q, s.shift), k(want.k, s.shift), v(want.v, s.shift);
        Array<T> out(result.out.size(), s.shift), dout(want.in.dout, s.shift);
        Array<T> dq(want.q.size(), s.shift), dk(want.k.size(), s.shift), dv(want.v.size(), s.shift);
        Array<int> qp(want.in.q_positions), kp(want.in.k_positions), start(want.in.doc_start);
        Array<float> lse(d.B * d.NH * d.Tq), slopes(as_double(want.in.slopes));
        Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, stream));
        AttentionOperands<T> x = {q.data,     k.data,  v.data, dout.data, qp.data, kp.data,
                                  start.data, nullptr, d,      s.scale,   s.softcap};
        if (!want.in.slopes.empty()) x.slopes = slopes.data;

        // Run the launcher's choice, or Hopper's kernels.
        if constexpr (path == Path::CHOSEN) {
            attention_forward(out.data, lse.data, x, scratch.data, stream);
            attention_backward(dq.data, dk.data, dv.data, out.data, lse.data, x, scratch.data,
                               stream);
        } else {
            expect(c, attention_kernels(x, true, true) == AttentionKernels::WGMMA, "not Hopper's");
            attention_hopper_forward(out.data, lse.data, x, scratch.data, stream);
            attention_hopper_backward(dq.data, dk.data, dv.data, out.data, lse.data, x,
                                      scratch.data, stream);
            HopperOperands<T> y = {};
            hopper_operands(y, x, scratch.data, true);
            size_t sums = d.B * d.NKV * y.tiles * PARTS * 64 * 64;
            o.same("sums of dq", y.dq, sums); // in float, before rounding to T
        }

        // An output is two sums, one after the other. Their operands p and ds are rounded to T,
        // which adds two roundings. A score near zero is the sum of terms that cancel.
        size_t length = std::max(d.HS, d.HS_v) + d.Tk;
        double terms = s.kind == 4 ? 6 : 1; // size of a sum's terms; in kind 4, of queries and keys
        // The hardware's tanh is within 2^-11, so a score is within a cap times that. p has twice
        // that error, by its sum: so has out, and D. The cap's derivative is within 2 * 2^-11.
        double tanh_error = sizeof(T) < 4 ? 0x1p-11 : 0;
        double score_error = s.softcap * tanh_error;
        o.add("out", out, result.out,
              tolerance<T>(length, sizeof(T) < 4 ? 2 : 0) + 2 * score_error);
        o.add("lse", lse, result.lse, tolerance<float>(length) + score_error, terms);

        // dS = P (dP - D) cancels where a query sees one key: roundings of its terms remain.
        double loose = sizeof(T) < 4 ? tolerance<T>(length, 6) : 8 * tolerance<T>(length);
        if (s.softcap != 0) loose += 4 * score_error + 2 * tanh_error;
        add_heads(o, "dq", dq, query_heads(result.dq, want.in.d), d.B, d.Tq, d.q_batch, d.q_stride,
                  d.NH * d.HS, loose, terms);
        add_heads(o, "dk", dk, key_heads(result.dk, want.in.d), d.B, d.Tk, d.k_batch, d.k_stride,
                  d.NKV * d.HS, loose, terms);
        add_heads(o, "dv", dv, value_heads(result.dv, want.in.d), d.B, d.Tk, d.v_batch, d.v_stride,
                  d.NKV * d.HS_v, loose, terms);
    });
}

#if defined(EMULATE)
// A query's range of keys says the same as the definition, for all positions, documents and windows
// up to 6. A key that only fills up a tile is never seen.
inline void attention_ranges(Check& c) {
    CASE(c, "attention visibility of ranges");
    const int n = 6;
    size_t wrong = 0;
    for (int position = 0; position < n; position++)
        for (int start = 0; start < n; start++)
            for (int window : {1, 2, 3, 4, 5, 6, 7, INT_MAX})
                for (int key = 0; key < n; key++) {
                    // One query at `position`, of a document that starts at `start`, and one key.
                    AttentionOperands<float> x;
                    x.d.B = x.d.Tq = x.d.Tk = 1;
                    x.d.window = window;
                    x.q_positions = &position;
                    x.k_positions = &key;
                    x.doc_start = &start;

                    int distance;
                    KeyRange row = range_of(x, 0, 0);
                    wrong += sees(row, key) != x.visible(0, 0, 0, distance);
                    wrong += sees(row, NO_KEY) || row.last != position;
                }
    expect(c, wrong == 0, std::to_string(wrong) + " pairs are taken for what they are not");
}

// A tile's visibility is computed from the extremes of two rows' ranges and of the keys.
// Hold it against every pair of row and key, for all ranges of up to four positions, rows
// that see nothing included.
inline void attention_visibility(Check& c) {
    attention_ranges(c);
    const int n = 4;
    std::vector<KeyRange> ranges;
    for (int first = 0; first < n; first++)
        for (int last = 0; last < n; last++)
            ranges.push_back({first, last});

    // Ask every pair of rows and keys, by the definition.
    CASE(c, "attention visibility of tiles");
    size_t wrong = 0;
    for (KeyRange a : ranges)
        for (KeyRange b : ranges)
            for (int low = 0; low < n; low++)
                for (int high = low; high < n; high++) {
                    bool any = false, all = true;
                    for (int key = low; key <= high; key++) {
                        any |= sees(a, key) || sees(b, key);
                        all &= sees(a, key) && sees(b, key);
                    }

                    // Then ask the extremes. For one range they are exact; for two the keys may lie
                    // in the gap between the ranges, and the tile is taken for visible.
                    Span first = join(Span{a.first, a.first}, Span{b.first, b.first});
                    Span last = join(Span{a.last, a.last}, Span{b.last, b.last});
                    Visibility v = visibility({first, last}, {low, high});
                    wrong += (v == ALL) != all;
                    wrong += v == NOTHING && any;
                    bool one = a.first == b.first && a.last == b.last && a.first <= a.last;
                    wrong += one && v != NOTHING && !any;
                }
    expect(c, wrong == 0, std::to_string(wrong) + " tiles are taken for what they are not");
}
#endif

// Results in float from a layer in T, and gradients in G that are added to.
template <typename T, typename G> void attention_sums_case(Check& c, const AttentionCase& s) {
    CASE(c, "attention %s, out in float, sums in %s, Tq=%zu", type_word(T()), type_word(G()), s.Tq);
    AttentionWanted want = attention_wanted(c, s);
    const AttentionRun<double>& result = want.result;
    const AttentionDims& d = want.d;
    every_order(c, [&](Outputs& o) {
        cudaStream_t stream = {};
        Array<T> q(want.q), k(want.k), v(want.v), out(result.out), dout(want.in.dout);

        // Gradients start as 0, 1, 2, 3, 0, ..
        auto plus = [](std::vector<double> gradient) {
            for (size_t i = 0; i < gradient.size(); i++) gradient[i] += double(i % 4);
            return gradient;
        };
        auto begun = [&](const auto& x) { return plus(std::vector<double>(x.size(), 0)); };
        Array<float> wide(result.out.size()), lse(d.B * d.NH * d.Tq);
        Array<G> dq(begun(want.q)), dk(begun(want.k)), dv(begun(want.v));
        Array<int> qp(want.in.q_positions), kp(want.in.k_positions), start(want.in.doc_start);
        Array<float> slopes(as_double(want.in.slopes));
        Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, stream));
        AttentionOperands<T> x = {q.data,  k.data,     v.data,      dout.data, qp.data,
                                  kp.data, start.data, slopes.data, d};
        attention_forward(wide.data, lse.data, x, scratch.data, stream);

        // Run forward into float, and backward on top of these.
        x.accumulate = true;
        attention_backward(dq.data, dk.data, dv.data, out.data, lse.data, x, scratch.data, stream);

        // Gradients have the size of their terms, so the tolerance is that of attention_case().
        size_t length = d.HS + d.Tk;
        double loose = sizeof(T) < 4 ? tolerance<T>(length, 6) : 8 * tolerance<T>(length);
        o.add("out in float", wide, result.out, tolerance<float>(length));
        o.add("dq +=", dq, plus(query_heads(result.dq, want.in.d)), loose);
        o.add("dk +=", dk, plus(key_heads(result.dk, want.in.d)), loose);
        o.add("dv +=", dv, plus(value_heads(result.dv, want.in.d)), loose);
    });
}
// Some rows see nothing; then all rows of a tile see nothing, whose gradients stay as they are.
template <typename T, typename G = float> void attention_sums_kernels(Check& c) {
    attention_sums_case<T, G>(c, {2, 20, 40, 2, 1, 32, 3, true});
    attention_sums_case<T, G>(c, {1, 150, 6, 1, 1, 8, 2, true});
}

// Merge partial results, with rows that both blocks saw, that one of them saw, and that none saw.
template <typename T> void attention_merge_kernels(Check& c) {
    CASE(c, "attention merge, part in %s", type_word(T()));
    const size_t B = 2, Tq = 9, NH = 3, HS = 40, rows = B * Tq * NH;
    auto out = rounded<float>(normals(c, rows * HS)), part = rounded<T>(normals(c, rows * HS));
    auto lse = rounded<float>(normals(c, rows)), part_lse = rounded<float>(normals(c, rows));

    // Want: the CPU's merge of both parts.
    for (size_t i = 0; i < rows; i++) {
        if (i % 3 == 1) lse[i] = -INFINITY;
        if (i % 4 == 1) part_lse[i] = -INFINITY;
    }
    auto want = out, want_lse = lse;
    attention_merge(want.data(), want_lse.data(), part.data(), part_lse.data(), B, Tq, NH, HS,
                    Cpu{});

    // Run the kernel.
    every_order(c, [&](Outputs& o) {
        Array<float> got(out), got_lse(lse), theirs_lse(part_lse);
        Array<T> theirs(part);
        attention_merge(got.data, got_lse.data, theirs.data, theirs_lse.data, B, Tq, NH, HS,
                        cudaStream_t{});
        o.add("out", got, want, tolerance<float>(2));
        o.add("lse", got_lse, want_lse, tolerance<float>(2));
    });
}

// Copy rows of F that lie in wider rows into wider rows of T. The elements between them stay.
template <typename T, typename F = float> void round_rows_kernels(Check& c) {
    CASE(c, "round rows of %s to %s", type_word(F()), type_word(T()));
    const size_t N = 37, C = 45, to = 50, from = 47;
    auto inp = rounded<F>(normals(c, N * from));
    std::vector<double> before(N * to, 7), want = before;
    for (size_t i = 0; i < N; i++)
        for (size_t e = 0; e < C; e++)
            want[i * to + e] = double(to_acc(from_acc<T>(float(inp[i * from + e]))));

    // The numbers are rounded once, so the result is exact.
    every_order(c, [&](Outputs& o) {
        Array<F> in(inp);
        Array<T> out(before);
        round_rows(out.data, to, in.data, from, N, C, cudaStream_t{});
        o.add("out", out, want, 0);
    });
}

// A row of the table: every case of a list.
template <typename T, std::vector<AttentionCase> cases(), Path path = Path::CHOSEN>
void attention_kernels(Check& c) {
    for (const AttentionCase& s : cases()) {
        CASE(c, "attention %s B=%zu Tq=%zu Tk=%zu NH=%zu NKV=%zu HS=%zu kind %d alibi %d window %d",
             type_word(T()), s.B, s.Tq, s.Tk, s.NH, s.NKV, s.HS, s.kind, s.alibi, s.window);
        attention_case<T, path>(c, s);
    }
}

// Check which rows of out and lse are NaN, given that q or k holds a NaN.
template <typename T, Path path>
void attention_nan_rows(Check& c, const char* where, const std::vector<double>& q,
                        const std::vector<double>& k, const std::vector<double>& want) {
    AttentionInputs x = attention_inputs(c, 1, 40, 40, 1, 1, 32, 0, false);
    AttentionDims d = {1, 40, 40, 1, 1, 32, 32, 32};
    std::vector<double> values = normals(c, 40 * 32);
    every_order(c, [&](Outputs& o) {
        Array<T> a(q), b(k), v(values), out(40 * 32);
        Array<int> positions(x.q_positions), keys(x.k_positions), start(x.doc_start);
        Array<float> lse(40);
        Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, cudaStream_t{}));
        AttentionOperands<T> operands = {a.data,    b.data,     v.data,  nullptr, positions.data,
                                         keys.data, start.data, nullptr, d};
        // Run forward.
        if constexpr (path == Path::CHOSEN)
            attention_forward(out.data, lse.data, operands, scratch.data, cudaStream_t{});
        else
            attention_hopper_forward(out.data, lse.data, operands, scratch.data, cudaStream_t{});

        // Find the rows with NaN: `want` has 1 for each of them, and 0 elsewhere.
        std::vector<double> lost(40), unseen(40);
        auto rows = out.host();
        auto sums = lse.host();
        for (size_t i = 0; i < 40; i++) {
            lost[i] = std::isnan(double(to_acc(rows[i * 32])));
            unseen[i] = std::isnan(sums[i]);
        }
        Array<double> found(lost), found_lse(unseen);
        o.add((std::string("rows with NaN in ") + where).c_str(), found, want, 0);
        o.add("lse with NaN", found_lse, want, 0);
    });
}
// A NaN in an operand reaches the output. In a query it reaches that row, in a key every
// row that sees the key.
template <typename T, Path path = Path::CHOSEN> void attention_nan_kernels(Check& c) {
    // Query 33 is not a number.
    const std::vector<double> q = normals(c, 40 * 32), k = normals(c, 40 * 32);
    std::vector<double> one(40), later(40), bad_q = q, bad_k = k;
    bad_q[33 * 32 + 5] = NAN;
    one[33] = 1;
    attention_nan_rows<T, path>(c, "a query", bad_q, k, one);

    // Key 21 is not a number: rows from 21 on see it.
    bad_k[21 * 32 + 5] = NAN;
    std::fill(later.begin() + 21, later.end(), 1);
    attention_nan_rows<T, path>(c, "a key", q, bad_k, later);
}

#if defined(EMULATE)
// The sets of kernels that this thread has launched since emulator::launches was cleared.
template <typename T, typename G>
std::vector<AttentionKernels> launched_kernels(const AttentionDims& d, bool capped, bool backward) {
    std::vector<AttentionKernels> sets;
    auto look = [&](AttentionKernels set, auto* kernel) {
        if (emulator::launches.count(reinterpret_cast<const void*>(kernel))) sets.push_back(set);
    };

    // Each set has a kernel of its own for each size of heads.
    pick_plain_kernel(d, [&](auto D) {
        if (backward) look(AttentionKernels::PLAIN, attention_backward_q_kernel<T, G, D>);
        else look(AttentionKernels::PLAIN, attention_forward_kernel<T, T, D>);
    });
    if constexpr (IS_BF16_OR_FP16<T>) {
        pick_mma_kernel(d.HS, capped, [&](auto D, auto MT, auto N, auto CAPPED) {
            auto back = attention_mma_backward_q_kernel<T, D, mma_backward_keys(D), CAPPED>;
            if (backward) look(AttentionKernels::MMA, back);
            else look(AttentionKernels::MMA, attention_mma_forward_kernel<T, D, MT, N, CAPPED>);
        });
        pick_hopper_kernel(d.HS, capped, [&](auto D, auto CAPPED) {
            auto forward = attention_hopper_forward_kernel<T, D, CAPPED>;
            if (!backward) return look(AttentionKernels::WGMMA, forward);
            if constexpr (D <= 128)
                look(AttentionKernels::WGMMA, attention_hopper_backward_kernel<T, D, CAPPED>);
        });
    }
    return sets;
}

// Run both passes of a small layer, and hold what is launched against what the log would name.
template <typename T, typename G>
void expect_named_kernels(Check& c, size_t HS, float softcap, bool alibi, bool accumulate) {
    CASE(c, "attention's name: sm_%d, %s into %zu bytes, %zu channels, cap %g, ALiBi: %d, +=: %d",
         emulator::gpu.major, type_word(T()), sizeof(G), HS, double(softcap), alibi, accumulate);
    AttentionDims d = {1, 4, 4, 2, 1, HS, 2 * HS, HS};
    Array<T> q(8 * HS), k(4 * HS), v(4 * HS), out(8 * HS), dout(8 * HS);
    Array<G> dq(8 * HS), dk(4 * HS), dv(4 * HS);
    Array<float> lse(8), slopes(2);
    Array<int> at(std::vector<int>{0, 1, 2, 3}), start(std::vector<int>(4, 0));
    Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, cudaStream_t{}));
    AttentionOperands<T> x = {q.data,  k.data,     v.data,  dout.data, at.data,
                              at.data, start.data, nullptr, d,         0, softcap};
    if (alibi) x.slopes = slopes.data;
    for (bool backward : {false, true}) {
        AttentionCall call = {sizeof(T), softcap != 0, alibi, backward};
        x.accumulate = backward && accumulate;
        emulator::launches.clear();
        if (backward)
            attention_backward(dq.data, dk.data, dv.data, out.data, lse.data, x, scratch.data,
                               cudaStream_t{});
        else
            attention_forward(out.data, lse.data, x, scratch.data, cudaStream_t{});

        // One set alone runs, and it is the one that is named.
        const char* words[] = {"plain kernels", "by mma.sync", "by wgmma"};
        bool hopper = emulator::gpu.major == 9;
        AttentionKernels named = attention_kernels(d, call, hopper);
        auto launched = launched_kernels<T, G>(d, softcap != 0, backward);
        expect(c, launched == std::vector{named}, "other kernels run");
        std::string text = attention_backend(d, call, cudaStream_t{});
        expect(c, text.find(words[int(named)]) != std::string::npos, text);
    }
}
inline void attention_names(Check& c) {
    for (emulator::Gpu gpu : {emulator::AMPERE, emulator::HOPPER}) {
        emulator::gpu = gpu;
        for (size_t HS : {12, 64, 128, 192, 256})
            for (auto [softcap, alibi] : {std::pair(0, false), {0, true}, {30, false}, {30, true}})
                for (bool accumulate : {false, true}) {
                    expect_named_kernels<float, float>(c, HS, softcap, alibi, accumulate);
                    expect_named_kernels<bf16, bf16>(c, HS, softcap, alibi, accumulate);
                    expect_named_kernels<fp16, fp16>(c, HS, softcap, alibi, accumulate);
                    expect_named_kernels<bf16, float>(c, HS, softcap, alibi, accumulate);
                }
    }
    emulator::gpu = emulator::AMPERE;

    // By hand: one of each that falls back.
    CASE(c, "attention's names by hand");
    AttentionDims d = {1, 4, 4, 2, 1, 128, 256, 128}, small = {1, 4, 4, 2, 1, 64, 128, 64};
    typedef AttentionKernels K;
    expect(c, attention_kernels(d, {2}, false) == K::MMA, "128 channels on Ampere");
    expect(c, attention_kernels(d, {4}, true) == K::PLAIN, "floats");
    expect(c, attention_kernels(small, {2, true}, true) == K::MMA, "a soft cap of 64 channels");
    expect(c, attention_kernels(d, {2, true, true}, true) == K::PLAIN, "a soft cap with ALiBi");
}
#endif

inline void add_attention_kernels(std::vector<KernelRow>& rows) {
#if defined(EMULATE)
    rows.push_back({"attention visibility", attention_visibility});
    rows.push_back({"attention, the names of kernels", attention_names});
#endif

    // The layers of training, on plain kernels and on tensor cores.
    rows.push_back({"attention float", attention_kernels<float, attention_cases>});
    rows.push_back({"attention bf16", attention_kernels<bf16, attention_cases>});
    rows.push_back({"attention bf16, more tiles", attention_kernels<bf16, attention_mma_cases>});
    rows.push_back({"attention fp16", attention_kernels<fp16, attention_cases>});
    rows.push_back({"attention fp16, more tiles", attention_kernels<fp16, attention_mma_cases>});

    // Unusual layers.
    rows.push_back({"attention float, unusual layers", attention_kernels<float, unusual_cases>});
    rows.push_back({"attention bf16, unusual layers", attention_kernels<bf16, unusual_cases>});
    rows.push_back({"attention bf16, soft caps", attention_kernels<bf16, cap_cases>});
    rows.push_back({"attention fp16, soft caps", attention_kernels<fp16, cap_cases>});

    // Partial results, and NaN.
    rows.insert(rows.end(), {
        {"attention float, into float", attention_sums_kernels<float>},
        {"attention bf16, into float", attention_sums_kernels<bf16>},
        {"attention bf16, onto bf16", attention_sums_kernels<bf16, bf16>},
        TWO_TYPES("attention merge,", attention_merge_kernels),
        TWO_TYPES("attention merge, rounding to", round_rows_kernels),
        {"attention merge, widening bf16", round_rows_kernels<float, bf16>},
        TWO_TYPES("attention of NaN,", attention_nan_kernels)});
}
