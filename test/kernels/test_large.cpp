// test_large.cpp - the kernels at the sizes of real models, on a GPU: test_large [name] [--seed N]
//   Outputs that depend on one row are checked on rows drawn at random, by the CPU version in
//   double. Sums over rows are checked whole. The emulator is too slow for these sizes: its
//   table is that of test_kernels.
#include "../../llmc/ops/crossentropy.cuh"
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#include "kernels_attention.h"

using namespace llmc;

static const cudaStream_t STREAM = nullptr;

// Numbers made by a hash: quick to make on either side, and the same on both.
static double number_of(uint64_t seed, uint64_t i) {
    uint64_t x = (i + seed) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9ull;
    return double(int64_t(x ^ x >> 29) >> 11) * 0x1p-52 * 1.7; // uniform, variance about 1
}
template <typename T> T value_of(uint64_t seed, uint64_t i) {
    return from_acc<T>(acc_t<T>(number_of(seed, i)));
}
// Fill an array on the device.
template <typename T> void fill(Array<T>& a, uint64_t seed) {
    auto value = [&](size_t i) { return value_of<T>(seed, i); };
    fill_memory(a.data, a.n, value, STREAM);
}
// One row of the numbers, as T holds them.
template <typename T> std::vector<double> row_of(uint64_t seed, size_t row, size_t C) {
    std::vector<double> x(C);
    for (size_t c = 0; c < C; c++) x[c] = double(to_acc(value_of<T>(seed, row * C + c)));
    return x;
}
// One row of a device's array.
template <typename T> std::vector<T> read_row(const Array<T>& a, size_t row, size_t C) {
    std::vector<T> x(C);
    copy_out(x.data(), a.data + row * C, C * sizeof(T), STREAM);
    return x;
}
// The first row, the last, and thirty at random.
static std::vector<size_t> some_rows(Check& c, size_t N) {
    std::vector<size_t> rows = {0, N - 1};
    for (int i = 0; i < 30; i++) rows.push_back(c.random() % N);
    return rows;
}

// LayerNorm and RMSNorm at 32M elements, half as many at the widest rows.
template <typename T> void large_norms(Check& c) {
    for (size_t C : {size_t(768), size_t(4096), size_t(16384)}) {
        size_t N = (size_t(1) << 25 >> (C > 4096 ? 1 : 0)) / C, one = 1;
        CASE(c, "norms %s N=%zu C=%zu", type_word(T()), N, C);
        Array<T> x(N * C), w(C), b(C), dout(N * C), out(N * C), dx(N * C);
        Array<float> mean(N), rstd(N), dw(C), db(C);
        Array<float> sums(layernorm_sums(N, C, STREAM));
        fill(x, 1);
        fill(w, 2);
        fill(b, 3);
        fill(dout, 4);
        std::vector<double> wd = row_of<T>(2, 0, C), bd = row_of<T>(3, 0, C);
        double* frozen = nullptr;

        // LayerNorm: some rows, then the sums over all rows.
        layernorm_forward(out.data, mean.data, rstd.data, x.data, w.data, b.data, N, C, 1e-5f,
                          STREAM);
        layernorm_backward(dx.data, sums.data, x.data, dout.data, x.data, w.data, mean.data,
                           rstd.data, N, C, STREAM);
        auto parts = layernorm_parts<float>(dw.data, db.data, nullptr, sums.data, N, C, STREAM);
        add_parts(parts, false, STREAM);
        std::vector<double> y(C), d(C), m(1), r(1);
        for (size_t n : some_rows(c, N)) {
            auto xr = row_of<T>(1, n, C), dr = row_of<T>(4, n, C);
            layernorm_forward(y.data(), m.data(), r.data(), xr.data(), wd.data(), bd.data(), one, C,
                              1e-5f, Cpu{});
            layernorm_backward(d.data(), frozen, xr.data(), dr.data(), xr.data(), wd.data(),
                               m.data(), r.data(), one, C, Cpu{});
            close(c, "layernorm out", read_row(out, n, C), y, tolerance<T>(C));
            close(c, "layernorm dinp", read_row(dx, n, C), d, tolerance<T>(C));
        }

        // Sum the weights' gradients by their definition, with the kernel's own statistics.
        std::vector<double> sum_w(C), sum_b(C);
        auto means = mean.host(), rstds = rstd.host();
        #pragma omp parallel for
        for (size_t col = 0; col < C; col++)
            for (size_t n = 0; n < N; n++) {
                double dv = to_acc(value_of<T>(4, n * C + col));
                double xv = to_acc(value_of<T>(1, n * C + col));
                sum_w[col] += dv * (xv - double(means[n])) * double(rstds[n]);
                sum_b[col] += dv;
            }
        close(c, "layernorm dweight", dw.host(), sum_w, tolerance<float>(N));
        close(c, "layernorm dbias", db.host(), sum_b, tolerance<float>(N));

        // RMSNorm: some rows.
        rmsnorm_forward(out.data, rstd.data, x.data, w.data, N, C, 1e-5f, STREAM);
        rmsnorm_backward(dx.data, sums.data, x.data, dout.data, x.data, w.data, rstd.data, N, C,
                         STREAM);
        for (size_t n : some_rows(c, N)) {
            auto xr = row_of<T>(1, n, C), dr = row_of<T>(4, n, C);
            rmsnorm_forward(y.data(), r.data(), xr.data(), wd.data(), one, C, 1e-5f, Cpu{});
            rmsnorm_backward(d.data(), frozen, xr.data(), dr.data(), xr.data(), wd.data(), r.data(),
                             one, C, Cpu{});
            close(c, "rmsnorm out", read_row(out, n, C), y, tolerance<T>(C));
            close(c, "rmsnorm dinp", read_row(dx, n, C), d, tolerance<T>(C));
        }
    }
}

// 1024 rows of GPT-2's and of Llama 3's vocabulary.
template <typename T> void large_crossentropy(Check& c) {
    for (size_t V : {size_t(50257), size_t(128256)}) {
        size_t N = 1024, Vp = round_up(V, 128), one = 1;
        CASE(c, "crossentropy %s N=%zu V=%zu", type_word(T()), N, V);
        Array<T> logits(N * Vp);
        fill(logits, 5);
        std::vector<int> targets(N);
        for (size_t n = 0; n < N; n++) targets[n] = n % 7 ? int(c.random() % V) : -1;
        Array<int> t(targets);

        // Run the steps. Every seventh target is ignored.
        Array<float> most(N), sum(N), logit(N), loss(N);
        crossentropy_max_sum(most.data, sum.data, logit.data, logits.data, t.data, N, V, Vp,
                             STREAM);
        crossentropy_loss(loss.data, most.data, sum.data, logit.data, t.data, N, STREAM);
        crossentropy_backward(logits.data, t.data, most.data, sum.data, 0.5f, N, V, Vp, 0, STREAM);
        auto losses = loss.host();

        // Hold some rows against the CPU in double.
        for (size_t n : some_rows(c, N)) {
            auto x = row_of<T>(5, n, Vp);
            std::vector<double> m(1), s(1), own(1), want(1);
            crossentropy_max_sum(m.data(), s.data(), own.data(), x.data(), &targets[n], one, V, Vp,
                                 Cpu{});
            crossentropy_loss(want.data(), m.data(), s.data(), own.data(), &targets[n], one, Cpu{});
            crossentropy_backward(x.data(), &targets[n], m.data(), s.data(), 0.5, one, V, Vp, 0,
                                  Cpu{});
            close(c, "loss", std::vector<float>{losses[n]}, want, tolerance<float>(V), 12);
            close(c, "dlogits", read_row(logits, n, Vp), x, tolerance<T>(V));
        }
    }
}

// Check rows of attention against its definition in double.
template <typename T> void large_attention(Check& c) {
    struct Case {
        size_t B, seq, NH, NKV, HS;
    };
    for (Case s : {Case{1, 4096, 8, 8, 128}, Case{2, 2048, 12, 12, 64}, Case{1, 2048, 8, 2, 128},
                   Case{1, 1024, 4, 4, 256}, Case{1, 1000, 4, 2, 96}}) {
        CASE(c, "attention %s B=%zu T=%zu NH=%zu NKV=%zu HS=%zu", type_word(T()), s.B, s.seq, s.NH,
             s.NKV, s.HS);

        // Random operands of one causal sequence after the other.
        size_t N = s.B * s.seq, Q = s.NH * s.HS, K = s.NKV * s.HS;
        AttentionDims d = {s.B, s.seq, s.seq, s.NH, s.NKV, s.HS, Q, K};
        Array<T> q(N * Q), k(N * K), v(N * K), out(N * Q), dout(N * Q), dq(N * Q), dk(N * K),
            dv(N * K);
        Array<float> lse(s.B * s.NH * s.seq);
        fill(q, 11), fill(k, 12), fill(v, 13), fill(dout, 14);
        std::vector<int> at(N), zero(N, 0);
        for (size_t i = 0; i < N; i++) at[i] = int(i % s.seq);
        Array<int> positions(at), start(zero);
        Array<unsigned char> scratch(attention_scratch_bytes<T>(d, 1, STREAM));

        AttentionOperands<T> x = {q.data,         k.data,     v.data,  dout.data, positions.data,
                                  positions.data, start.data, nullptr, d};
        attention_forward(out.data, lse.data, x, scratch.data, STREAM);
        attention_backward(dq.data, dk.data, dv.data, out.data, lse.data, x, scratch.data, STREAM);

        // Check some rows of out and of dq whole. dk is known through dq's rows; dv is checked
        // below by its sum over keys, which equals the sum of dout over queries.
        auto head = [&](uint64_t seed, size_t row, size_t width, size_t h) {
            std::vector<double> x(s.HS);
            for (size_t e = 0; e < s.HS; e++)
                x[e] = double(to_acc(value_of<T>(seed, row * width + h * s.HS + e)));
            return x;
        };
        for (int sample = 0; sample < 12; sample++) {
            size_t b = c.random() % s.B, h = c.random() % s.NH,
                   i = sample ? c.random() % s.seq : s.seq - 1;
            size_t kh = h / (s.NH / s.NKV), row = b * s.seq + i;
            std::vector<double> qi = head(11, row, Q, h), di = head(14, row, Q, h), p(i + 1),
                                want(s.HS), want_dq(s.HS);

            // P's row of this query, then out, then dS and dq.
            double most = -INFINITY, total = 0, D = 0;
            for (size_t j = 0; j <= i; j++) {
                p[j] = dot(qi, head(12, b * s.seq + j, K, kh)) / std::sqrt(double(s.HS));
                most = std::max(most, p[j]);
            }
            for (double& x : p) x = std::exp(x - most), total += x;
            for (size_t j = 0; j <= i; j++) {
                auto vj = head(13, b * s.seq + j, K, kh);
                for (size_t e = 0; e < s.HS; e++) want[e] += p[j] / total * vj[e];
            }
            D = dot(want, di);
            for (size_t j = 0; j <= i; j++) {
                auto kj = head(12, b * s.seq + j, K, kh);
                double ds = p[j] / total * (dot(di, head(13, b * s.seq + j, K, kh)) - D) /
                            std::sqrt(double(s.HS));
                for (size_t e = 0; e < s.HS; e++) want_dq[e] += ds * kj[e];
            }

            // Compare with the kernel's row.
            auto part = [&](const Array<T>& a) {
                std::vector<T> x(s.HS);
                copy_out(x.data(), a.data + row * Q + h * s.HS, s.HS * sizeof(T), STREAM);
                return x;
            };
            int roundings = sizeof(T) < 4 ? 2 : 0;
            close(c, "out", part(out), want, tolerance<T>(s.HS + i, roundings), 0.1);
            close(c, "dq", part(dq), want_dq, sizeof(T) < 4 ? tolerance<T>(s.HS + i, 6) : 1e-4,
                  0.1);
        }

        // The sum of dv over keys is the sum of dout over queries, since each
        // row of P adds up to 1.
        auto gv = dv.host();
        for (size_t kh = 0; kh < s.NKV; kh++) {
            std::vector<double> got(s.HS), want(s.HS);
            double size = 0;
            for (size_t n = 0; n < N; n++) {
                for (size_t e = 0; e < s.HS; e++)
                    got[e] += double(to_acc(gv[n * K + kh * s.HS + e]));
                for (size_t h = kh * (s.NH / s.NKV); h < (kh + 1) * (s.NH / s.NKV); h++) {
                    auto dr = head(14, n, Q, h);
                    for (size_t e = 0; e < s.HS; e++) want[e] += dr[e], size += dr[e] * dr[e];
                }
            }
            double spread = std::sqrt(size / double(s.HS));
            close(c, "sum of dv over keys", got, want,
                  sizeof(T) < 4 ? tolerance<T>(s.seq, 2) : 1e-4, 4 * spread);
        }
    }
}

int main(int argc, char** argv) {
    return kernel_main(argc, argv,
                       {{"norms float", large_norms<float>},
                        {"norms bf16", large_norms<bf16>},
                        {"norms fp16", large_norms<fp16>},
                        {"crossentropy float", large_crossentropy<float>},
                        {"crossentropy bf16", large_crossentropy<bf16>},
                        {"crossentropy fp16", large_crossentropy<fp16>},
                        {"attention float", large_attention<float>},
                        {"attention bf16", large_attention<bf16>},
                        {"attention fp16", large_attention<fp16>}});
}
