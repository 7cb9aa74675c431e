// kernels_attention.h - rows of the kernel table: attention
#pragma once
#include "attention_inputs.h"
#include "kernel_table.h"

struct AttentionCase {
    size_t B, Tq, Tk, NH, NKV, HS;
    int kind; // as attention_inputs() has it
    bool alibi = false;
    int window = INT_MAX;
    size_t gap = 0;   // between rows of q, and of k and v, as in a fused q, k, v
    size_t shift = 0; // elements that operands start behind a 16-byte boundary
};

// one query and key, one head size of each kernel and what falls between, several blocks of
// queries and keys, groups of heads, every kind of mask
inline std::vector<AttentionCase> attention_cases() {
    if (SMALL)
        return {{1, 3, 3, 2, 1, 8, 0}, {1, 33, 40, 2, 1, 40, 1, true}, {1, 20, 36, 1, 1, 72, 3}};
    return {{1, 1, 1, 1, 1, 64, 0},         {2, 37, 37, 4, 2, 32, 0, false, INT_MAX, 64},
            {1, 70, 70, 3, 1, 64, 1, true}, {2, 40, 40, 6, 2, 16, 0, false, 9},
            {1, 1, 75, 4, 2, 64, 2},        {1, 19, 83, 4, 1, 40, 2, true, 33, 8},
            {2, 21, 50, 2, 2, 24, 3},       {1, 33, 33, 2, 1, 72, 1, false, 20},
            {1, 40, 40, 1, 1, 96, 0},       {1, 35, 67, 2, 1, 128, 2, false, INT_MAX, 256},
            {1, 20, 20, 1, 1, 256, 0},      {1, 45, 45, 3, 1, 64, 4},
            {1, 1, 45, 3, 1, 64, 4}};
}

// What tensor cores add: blocks of 128 rows, tiles of 64 keys of which some are seen whole, more of
// them than a warp looks at once; batches that see different tiles; what falls back to plain kernels.
inline std::vector<AttentionCase> attention_mma_cases() {
    if (SMALL) return {{1, 20, 200, 2, 1, 32, 2}, {1, 5, 5, 1, 1, 12, 0}};
    return {{1, 150, 150, 1, 1, 32, 0},              // two blocks of rows
            {1, 3, 2100, 2, 1, 8, 2},                // 33 tiles of keys, 66 backward
            {1, 130, 130, 8, 1, 8, 0},               // 33 tiles of rows backward
            {1, 200, 200, 1, 1, 64, 0, false, 70},   // tiles left of the window are skipped
            {3, 90, 90, 2, 1, 32, 1},                // documents of each sequence
            {2, 70, 150, 4, 2, 64, 3, true},         // keys in any order, rows that see nothing
            {1, 150, 60, 2, 2, 48, 2},               // queries before the first key
            {1, 20, 90, 4, 1, 80, 2, false, 40, 16}, // each head size's tiles of channels
            {1, 70, 70, 1, 1, 128, 0, true},
            {1, 12, 80, 2, 2, 160, 2},
            {1, 70, 70, 2, 1, 256, 1},
            {1, 20, 30, 2, 1, 12, 2},
            {1, 20, 30, 2, 2, 64, 2, false, INT_MAX, 4},
            {1, 20, 30, 2, 1, 64, 2, false, INT_MAX, 8, 1}};
}

// What belongs to heads, and in the gaps between rows the poison that nobody may write.
template <typename T>
std::vector<double> rows_of(const std::vector<T>& x, size_t rows, size_t stride, size_t width) {
    std::vector<double> y;
    for (size_t r = 0; r < rows; r++)
        for (size_t e = 0; e < width; e++) y.push_back(double(to_acc(x[r * stride + e])));
    return y;
}

// Whose kernels run: those that the launcher chooses, or Hopper's.
enum class Path { CHOSEN, HOPPER, HOPPER_ANY_ORDER };

template <typename T, Path path> void attention_case(Check& c, const AttentionCase& s) {
    AttentionInputs x = attention_inputs(c, s.B, s.Tq, s.Tk, s.NH, s.NKV, s.HS, s.kind, s.alibi);
    AttentionDims d = x.d;
    x.d.window = d.window = s.window;
    d.any_order = path == Path::HOPPER_ANY_ORDER;
    // the strides that attention_inputs() chose may be odd; here 16-byte loads are wanted
    d.q_stride = d.NH * d.HS + s.gap, d.kv_stride = d.NKV * d.HS + s.gap;
    auto spread = [](const std::vector<double>& from, size_t rows, size_t old, size_t stride,
                     size_t width) {
        std::vector<double> to(rows * stride, NAN);
        for (size_t r = 0; r < rows; r++)
            std::copy_n(from.begin() + long(r * old), width, to.begin() + long(r * stride));
        return to;
    };
    size_t NQ = d.B * d.Tq, NK = d.B * d.Tk, QW = d.NH * d.HS, KW = d.NKV * d.HS;
    auto q = spread(x.q, NQ, x.d.q_stride, d.q_stride, QW),
         k = spread(x.k, NK, x.d.kv_stride, d.kv_stride, KW),
         v = spread(x.v, NK, x.d.kv_stride, d.kv_stride, KW);
    AttentionRun<double> want(x);
    auto dq = rows_of(want.dq, NQ, x.d.q_stride, QW), dk = rows_of(want.dk, NK, x.d.kv_stride, KW),
         dv = rows_of(want.dv, NK, x.d.kv_stride, KW);
    every_order(c, [&](Outputs& o) {
        cudaStream_t stream = {};
        Array<T> aq(q, s.shift), ak(k, s.shift), av(v, s.shift), out(NQ * QW, s.shift),
            dout(x.dout, s.shift), gq(NQ * d.q_stride, s.shift), gk(NK * d.kv_stride, s.shift),
            gv(NK * d.kv_stride, s.shift);
        Array<int> qp(x.q_positions), kp(x.k_positions), start(x.doc_start);
        Array<float> lse(d.B * d.NH * d.Tq), slopes(as_double(x.slopes));
        Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, stream));
        Blas blas;
        blas_scratch(blas, scratch.data, scratch.bytes());
        const float* slope = x.slopes.empty() ? nullptr : slopes.data;
        if constexpr (path == Path::CHOSEN) {
            attention_forward(out.data, lse.data, aq.data, ak.data, av.data, qp.data, kp.data,
                              start.data, slope, d, blas, stream);
            attention_backward(gq.data, gk.data, gv.data, dout.data, out.data, lse.data, aq.data,
                               ak.data, av.data, qp.data, kp.data, start.data, slope, d, blas,
                               stream);
        } else {
            AttentionOperands<T> operands = {
                aq.data, ak.data,    av.data, dout.data, qp.data,
                kp.data, start.data, slope,   d,         1 / std::sqrt(float(d.HS))};
            expect(c, hopper_takes<T>(d, out.data, aq.data, ak.data, av.data), "not Hopper's");
            attention_hopper_forward(out.data, lse.data, operands, scratch.data, stream);
            attention_hopper_backward(gq.data, gk.data, gv.data, operands, out.data, lse.data,
                                      scratch.data, stream);
            HopperOperands<T> y = hopper_operands(operands, BACKWARD_ROWS, scratch.data);
            size_t sums = d.B * d.NKV * y.tiles * BACKWARD_ROWS * round_up(d.HS, 64);
            if (!d.any_order) o.same("sums of dq", y.dq, sums); // before rounding
        }
        // two sums after each other; p and ds are operands in T: two more roundings
        size_t length = d.HS + d.Tk;
        int roundings = sizeof(T) < 4 ? 2 : 0;
        o.add("out", out, want.out, tolerance<T>(length, roundings));
        o.add("lse", lse, want.lse, tolerance<float>(length));
        // dS = P (dP - D) cancels where one key is seen: roundings of terms of size 1 stay, or of
        // as much as queries and keys have
        double terms = s.kind == 4 ? 6 : 1;
        double loose = sizeof(T) < 4 ? tolerance<T>(length, 6) : 8 * tolerance<T>(length);
        auto heads = [&](const char* name, const Array<T>& got, const std::vector<double>& wanted,
                         size_t rows, size_t stride, size_t width) {
            std::vector<T> all = got.host();
            Array<T> inside(rows_of(all, rows, stride, width));
            o.add(name, inside, wanted, loose, terms, !d.any_order);
            for (size_t i = 0; i < all.size(); i++)
                if (i % stride >= width && !std::isnan(double(to_acc(all[i]))))
                    return expect(c, false, std::string(name) + " is written between rows");
        };
        heads("dq", gq, dq, NQ, d.q_stride, QW);
        heads("dk", gk, dk, NK, d.kv_stride, KW);
        heads("dv", gv, dv, NK, d.kv_stride, KW);
    });
}

template <typename T, std::vector<AttentionCase> cases(), Path path = Path::CHOSEN>
void attention_kernels(Check& c) {
    for (const AttentionCase& s : cases()) {
        CASE(c, "attention %s B=%zu Tq=%zu Tk=%zu NH=%zu NKV=%zu HS=%zu kind %d alibi %d window %d",
             type_word(T()), s.B, s.Tq, s.Tk, s.NH, s.NKV, s.HS, s.kind, s.alibi, s.window);
        attention_case<T, path>(c, s);
    }
}

// A NaN among the operands reaches the output: its row, and no other.
template <typename T> void attention_nan_kernels(Check& c) {
    AttentionInputs x = attention_inputs(c, 1, 40, 40, 1, 1, 32, 0, false);
    AttentionDims d = x.d;
    d.q_stride = d.kv_stride = 32;
    std::vector<double> q = normals(c, 40 * 32), want(40);
    q[33 * 32 + 5] = NAN;
    for (size_t i = 0; i < 40; i++) want[i] = i == 33;
    every_order(c, [&](Outputs& o) {
        Array<T> a(q), k(normals(c, 40 * 32)), v(normals(c, 40 * 32)), out(40 * 32);
        Array<int> positions(x.q_positions), keys(x.k_positions), start(x.doc_start);
        Array<float> lse(40);
        Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, cudaStream_t{}));
        Blas blas;
        blas_scratch(blas, scratch.data, scratch.bytes());
        attention_forward(out.data, lse.data, a.data, k.data, v.data, positions.data, keys.data,
                          start.data, (const float*)nullptr, d, blas, cudaStream_t{});
        std::vector<double> lost(40), unseen(40);
        auto rows = out.host();
        auto sums = lse.host();
        for (size_t i = 0; i < 40; i++)
            lost[i] = std::isnan(double(to_acc(rows[i * 32]))), unseen[i] = std::isnan(sums[i]);
        Array<double> found(lost), found_lse(unseen);
        o.add("rows with NaN", found, want, 0);
        o.add("lse with NaN", found_lse, want, 0);
    });
}

inline void add_attention_kernels(std::vector<KernelRow>& rows) {
    rows.push_back({"attention float", attention_kernels<float, attention_cases>});
    rows.push_back({"attention bf16", attention_kernels<bf16, attention_cases>});
    rows.push_back({"attention bf16, more tiles", attention_kernels<bf16, attention_mma_cases>});
    rows.push_back({"attention fp16", attention_kernels<fp16, attention_cases>});
    rows.push_back({"attention fp16, more tiles", attention_kernels<fp16, attention_mma_cases>});
    rows.push_back({"attention of NaN, float", attention_nan_kernels<float>});
    rows.push_back({"attention of NaN, bf16", attention_nan_kernels<bf16>});
}
