// kernels_training.h - rows of the kernel table: embedding, cross-entropy, optimizer, gradient norm
#pragma once
#include "../../llmc/ops/adamw_formats.cuh"
#include "../../llmc/ops/muon.cuh"
#include "../../llmc/ops/crossentropy.cuh"
#include "../../llmc/ops/ema.cuh"
#include "../../llmc/ops/embedding.cuh"
#include "../../llmc/ops/grad_norm.cuh"
#include "../../llmc/ops/objective.cuh"
#include "kernel_table.h"

using namespace llmc;

inline std::vector<double> numbers_of(const std::vector<int>& x) { return {x.begin(), x.end()}; }

// ----------------------------------------------------------------------------
// embedding

// One row; rows of more than one tile, of one tile, of one tile and a row. Tokens: one key for all
// rows; keys that take two and three digits of the sort, and a digit's largest value. One, four and
// sixteen warps a row; not 16-byte aligned (shift).
struct EmbeddingCase {
    size_t N, V, C, shift;
    int tokens; // how many different ones
};
inline std::vector<EmbeddingCase> embedding_cases() {
    if (SMALL) return {{3, 5, 33, 0, 5}, {70, 600, 8, 0, 3}, {1030, 2, 1, 0, 2}};
    return {{1, 1, 1, 0, 1},       {9, 5, 33, 0, 5},       {200, 700, 96, 0, 700},
            {150, 700, 768, 0, 4}, {40, 30, 768, 1, 9},    {2500, 1100, 8, 0, 1100},
            {2100, 3, 8, 0, 1},    {50, 270000, 1, 0, 40}, {6, 7, 4160, 0, 3},
            {1024, 512, 8, 0, 40},  {1025, 1100, 8, 0, 1025}};
}

template <typename T> void embedding_kernels(Check& c) {
    for (EmbeddingCase s : embedding_cases())
        for (bool accumulate : {false, true}) {
            size_t N = s.N, V = s.V, C = s.C, cells = V * C;
            size_t P = 7 + (N > 1000 ? 600 : 0);
            size_t start = accumulate ? V / 4 : 0; // the table is a part: some tokens are others'
            CASE(c, "embedding %s N=%zu V=%zu C=%zu shift=%zu start=%zu accumulate=%d",
                 type_word(T()), N, V, C, s.shift, start, accumulate);

            // Draw tokens from a few names. The table's last row is one of them; of a part, also
            // its first row, and the tokens before and after the part.
            std::vector<int> names = integers(c, s.tokens, 0, int(V + 2 * start) - 1);
            std::vector<int> which = integers(c, N, 0, s.tokens - 1), tokens(N);
            std::vector<int> positions = integers(c, N, 3, int(P) - 1);
            std::vector<int> starts = integers(c, N, 0, 3);
            const int ends[] = {int(V + start) - 1, int(V + start), int(start), int(start) - 1};
            std::copy_n(ends, start ? std::min(4, s.tokens) : 1, names.begin());
            for (size_t n = 0; n < N; n++) tokens[n] = names[which[n]];
            auto wte = rounded<T>(normals(c, cells)), wpe = rounded<T>(normals(c, P * C));
            auto dout = rounded<T>(normals(c, N * C));
            auto wte_before = rounded<float>(normals(c, cells));
            auto wpe_before = rounded<float>(normals(c, P * C));

            // Want: the CPU in double.
            std::vector<double> out(N * C), alone(N * C), dwte = wte_before, dwpe = wpe_before;
            embedding_forward(out.data(), tokens.data(), positions.data(), starts.data(),
                              wte.data(), wpe.data(), N, start, V, C, Cpu{});
            embedding_forward(alone.data(), tokens.data(), positions.data(), starts.data(),
                              wte.data(), (double*)nullptr, N, start, V, C, Cpu{});
            embedding_backward_weight(dwte.data(), dwpe.data(), dout.data(), tokens.data(),
                                      positions.data(), starts.data(), nullptr, N, start, V, P, C,
                                      accumulate, Cpu{});

            // The kernel adds rows in the CPU's order, so the CPU's version in T has the same bits.
            std::vector<T> dout_t = as<T>(dout);
            std::vector<float> dwte_f = as<float>(wte_before), dwpe_f = as<float>(wpe_before);
            embedding_backward_weight(dwte_f.data(), dwpe_f.data(), dout_t.data(), tokens.data(),
                                      positions.data(), starts.data(), nullptr, N, start, V, P, C,
                                      accumulate, Cpu{});

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<int> t(tokens), p(positions), d0(starts);
                Array<T> a(wte, s.shift), b(wpe, s.shift), d(dout, s.shift);
                Array<T> y(N * C, s.shift), y0(N * C, s.shift);
                Array<float> da(wte_before), db(wpe_before), frozen(wpe_before);
                Array<unsigned char> scratch(embedding_scratch_bytes(N, stream));

                // Forward with positions and without; backward, then backward with
                // the token table frozen.
                embedding_forward(y.data, t.data, p.data, d0.data, a.data, b.data, N, start, V, C,
                                  stream);
                embedding_forward(y0.data, t.data, p.data, d0.data, a.data, (T*)nullptr, N, start,
                                  V, C, stream);
                embedding_backward_weight(da.data, db.data, d.data, t.data, p.data, d0.data,
                                          scratch.data, N, start, V, P, C, accumulate, stream);
                embedding_backward_weight((float*)nullptr, frozen.data, d.data, t.data, p.data,
                                          d0.data, scratch.data, N, start, V, P, C, accumulate,
                                          stream);

                o.add("out", y, out, tolerance<T>(1));
                o.add("tokens alone", y0, alone, 0);
                o.add("dwte", da, dwte, tolerance<float>(N));
                o.add("dwpe", db, dwpe, tolerance<float>(N));
                o.add("dwte, bits", da, as_double(dwte_f), 0);
                o.add("dwpe, bits", db, as_double(dwpe_f), 0);
                o.add("dwpe, tokens frozen", frozen, as_double(dwpe_f), 0);
            });
        }
}

// ----------------------------------------------------------------------------
// cross-entropy

// Vocabularies of one column and of thousands, with and without padding, unaligned too (shift).
struct CrossentropyCase {
    size_t N, V, Vp, shift;
};
inline std::vector<CrossentropyCase> crossentropy_cases() {
    if (SMALL) return {{2, 5, 8, 0}, {3, 4100, 4104, 0}};
    return {{1, 1, 1, 0},       {5, 3, 8, 0},     {4, 1000, 1024, 0},  {3, 4097, 4160, 0},
            {3, 4099, 4104, 1}, {2, 700, 701, 0}, {2, 10000, 10112, 0}};
}

// One rank's columns [start, start + V) of the vocabulary, and what the CPU computes from them in
// double. Neither the padding after them nor another rank's columns may be read.
struct WantedShard {
    size_t start, V, Vp;
    std::vector<double> logits, max, sum, target, d; // (N,Vp), then (N), then (N,Vp)
};
inline WantedShard wanted_shard(const std::vector<double>& logits, size_t N, size_t row,
                                size_t start, size_t end, const std::vector<int>& targets,
                                const std::vector<double>& m, const std::vector<double>& sum,
                                float scale) {
    WantedShard w = {start, end - start, round_up(end - start, size_t(8)), {}, {}, {}, {}, {}};
    for (size_t n = 0; n < N; n++) {
        auto from = logits.begin() + ptrdiff_t(n * row);
        w.logits.insert(w.logits.end(), from + ptrdiff_t(start), from + ptrdiff_t(end));
        w.logits.resize((n + 1) * w.Vp, 1000);
    }

    // Sums subtract the whole row's maximum, not the shard's.
    w.max.resize(N);
    w.sum.resize(N);
    w.target.resize(N);
    w.d = w.logits;
    crossentropy_max(w.max.data(), w.logits.data(), N, w.V, w.Vp, Cpu{});
    crossentropy_sum(w.sum.data(), w.target.data(), w.logits.data(), targets.data(), m.data(), N,
                     w.V, w.Vp, start, Cpu{});
    crossentropy_backward(w.d.data(), targets.data(), m.data(), sum.data(), double(scale), N, w.V,
                          w.Vp, start, Cpu{});
    return w;
}

// The whole vocabulary, and two shards of it as two ranks hold them.
template <typename T> void crossentropy_kernels(Check& c) {
    for (CrossentropyCase s : crossentropy_cases())
        for (bool impossible : {false, true}) {
            size_t N = s.N, V = s.V, Vp = s.Vp;
            size_t H = N == 5 ? V : V / 2; // the second shard's first column; V: it is empty
            const float scale = 0.1f;
            CASE(c, "crossentropy %s N=%zu V=%zu Vp=%zu shift=%zu -inf=%d", type_word(T()), N, V,
                 Vp, s.shift, impossible);

            // Targets: ignored ones, the vocabulary's last token, and both sides of the cut.
            std::vector<int> targets = integers(c, N, -1, int(V) - 1);
            if (N > 2) {
                targets[1] = -1;
                targets[2] = int(V) - 1;
            }
            if (N > 3) targets[3] = int(std::min(H, V - 1)); // the first of the next shard
            if (H > 0) targets[0] = int(H) - 1;              // the last of the first shard

            // Padding holds large numbers and must not be read. -inf for most tokens: whole
            // threads see nothing else.
            auto logits = rounded<T>(normals(c, N * Vp, 4));
            for (size_t n = 0; n < N; n++) {
                for (size_t v = V; v < Vp; v++) logits[n * Vp + v] = 1000;
                for (size_t v = 0; impossible && v < V; v++)
                    if (v % 64 != 63 && int(v) != targets[n] && v + 1 < V)
                        logits[n * Vp + v] = -INFINITY;
            }

            // Want: the CPU in double. A loss is the difference of a logit and the maximum, so its
            // error is relative to the maximum (terms).
            std::vector<double> m(N), sum(N), target(N), losses(N), d = logits;
            crossentropy_max_sum(m.data(), sum.data(), target.data(), logits.data(), targets.data(),
                                 N, V, Vp, Cpu{});
            crossentropy_loss(losses.data(), m.data(), sum.data(), target.data(), targets.data(), N,
                              Cpu{});
            crossentropy_backward(d.data(), targets.data(), m.data(), sum.data(), double(scale), N,
                                  V, Vp, 0, Cpu{});
            double terms = 0;
            for (double x : m) terms = std::max(terms, std::fabs(x));

            // Two ranks' shards. Each meets targets that the other one holds.
            std::vector<WantedShard> shards;
            for (auto [start, end] : {std::pair(size_t(0), H), std::pair(H, V)})
                shards.push_back(wanted_shard(logits, N, Vp, start, end, targets, m, sum, scale));
            auto sum_f = rounded<float>(sum);

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> l(logits, s.shift);
                Array<int> t(targets);
                Array<float> gm(N), gs(N), gt(N), loss(N), m_in(m), s_in(sum_f);
                Array<float> half(std::vector<double>{0.5}); // a factor that lies on the device

                // The whole vocabulary.
                crossentropy_max_sum(gm.data, gs.data, gt.data, l.data, t.data, N, V, Vp, stream);
                crossentropy_loss(loss.data, gm.data, gs.data, gt.data, t.data, N, stream);
                crossentropy_backward(l.data, t.data, gm.data, gs.data, scale, N, V, Vp, 0, stream);
                o.add("max", gm, m, 0);
                o.add("sum", gs, sum, tolerance<float>(V));
                o.add("target", gt, target, 0);
                o.add("loss", loss, losses, tolerance<float>(V), terms);
                o.add("dlogits", l, d, tolerance<T>(V), scale);

                // Each shard. Its scale is the same, half of it in a factor on the device.
                for (const WantedShard& w : shards) {
                    if (w.Vp == 0) continue;
                    Array<T> r(w.logits);
                    Array<float> rm(N), rs(N), rt(N);
                    crossentropy_max(rm.data, r.data, N, w.V, w.Vp, stream);
                    crossentropy_sum(rs.data, rt.data, r.data, t.data, m_in.data, N, w.V, w.Vp,
                                     w.start, stream);
                    crossentropy_backward(r.data, t.data, m_in.data, s_in.data,
                                          {2 * scale, half.data}, N, w.V, w.Vp, w.start, stream);
                    o.add("a shard's max", rm, w.max, 0);
                    o.add("a shard's sum", rs, w.sum, tolerance<float>(V), 1);
                    o.add("a shard's target", rt, w.target, 0);
                    o.add("a shard's dlogits", r, w.d, tolerance<T>(V), scale);
                }
            });
        }
}

// In one call, with a coefficient for each row: the CPU's answer in double, and the bits of the
// separate kernels that the call replaces.
template <typename T> void crossentropy_one_call_kernels(Check& c) {
    for (CrossentropyCase s : crossentropy_cases()) {
        size_t N = s.N, V = s.V, Vp = s.Vp;
        const double scale = 0.1f;
        CASE(c, "crossentropy in one call %s N=%zu V=%zu Vp=%zu shift=%zu", type_word(T()), N, V,
             Vp, s.shift);
        auto logits = rounded<T>(normals(c, N * Vp, 4));
        std::vector<int> targets = integers(c, N, -1, int(V) - 1);
        targets[N - 1] = -1;
        targets[0] = int(V) - 1;

        // Want: the CPU in double.
        std::vector<double> losses(N), d = logits, rows = rounded<float>(normals(c, N));
        GradientScale by_row = {scale, nullptr, 0, nullptr, rows.data()};
        crossentropy_forward_backward(losses.data(), d.data(), targets.data(), by_row, N, V, Vp,
                                      Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> l(logits, s.shift), steps(logits, s.shift);
            Array<int> t(targets);
            Array<float> loss(N), m(N), sum(N), target(N), steps_loss(N), r(rows);
            GradientScale on_device = {scale, nullptr, 0, nullptr, r.data};
            crossentropy_forward_backward(loss.data, l.data, t.data, on_device, N, V, Vp, stream);

            crossentropy_max_sum(m.data, sum.data, target.data, steps.data, t.data, N, V, Vp,
                                 stream);
            crossentropy_loss(steps_loss.data, m.data, sum.data, target.data, t.data, N, stream);
            crossentropy_backward(steps.data, t.data, m.data, sum.data, on_device, N, V, Vp, 0,
                                  stream);

            // The call gives the CPU's numbers, and the bits of the steps.
            o.add("loss", loss, losses, tolerance<float>(V), 16);
            o.add("dlogits", l, d, tolerance<T>(V), 4 * scale);
            o.add("loss, bits", loss, as_double(steps_loss.host()), 0);
            o.add("dlogits, bits", l, as_double(steps.host()), 0);
        });
    }
#if defined(EMULATE)
    auto* short_rows = crossentropy_forward_backward_kernel<T, VECTOR<T>, 1>;
    auto* long_rows = crossentropy_forward_backward_kernel<T, VECTOR<T>, LONG_ROW_LOADS>;
    expect(c, emulator::launches[(void*)short_rows] && emulator::launches[(void*)long_rows],
           "both forms ran");
#endif
}

// Pairs over three windows, the last of which has no rejected answer. The kernel must give
// the CPU's bits.
inline void objective_kernels(Check& c) {
    for (size_t T : {size_t(4), size_t(9), size_t(150)})
        for (LossKind kind : {LossKind::DPO, LossKind::IPO, LossKind::SIMPO, LossKind::ORPO,
                              LossKind::KTO, LossKind::GRPO}) {
            size_t N = 3 * T;
            CASE(c, "objective %d T=%zu", int(kind), T);
            std::vector<int> targets = integers(c, N, -1, 5), starts(N);
            std::vector<double> losses = rounded<float>(normals(c, N)), feedback(N);
            std::vector<double> reference = rounded<float>(normals(c, N));

            // The second half of a window is the rejected answer, except in the last window.
            for (size_t n = 0; n < N; n++) {
                starts[n] = n % T < T / 2 ? 0 : int(T / 2);
                feedback[n] = n < 2 * T && starts[n] > 0;
                losses[n] = std::fabs(losses[n]);
            }

            // Want: the CPU's rows. An old policy, which only GRPO has, is the reference here.
            Objective o = {kind, 0.5, 0.1, 0.5, 2, 0.5};
            o.old_policy = kind == LossKind::GRPO;
            std::vector<float> out(o.outputs() * N), l = as<float>(losses), x = as<float>(feedback),
                               ref = as<float>(reference);
            objective<float>({&out[0], &out[N], &out[2 * N], &out[3 * N], l.data(), targets.data(),
                              starts.data(), x.data(), ref.data(), T, ref.data(),
                              out.data() + 4 * N},
                             o, N, Cpu{});

            every_order(c, [&](Outputs& outputs) {
                Array<float> got(out.size()), dl(losses), dx(feedback), dref(reference);
                Array<int> t(targets), d(starts);
                float* to = got.data;
                objective({to, to + N, to + 2 * N, to + 3 * N, dl.data, t.data, d.data, dx.data,
                           dref.data, T, dref.data, to + 4 * N}, o, N, cudaStream_t{});
                outputs.add("rows, bits", got, as_double(out), 0);
            });
        }
}

// Rows of one rank of three, to their places in whole sequences and back.
inline void places_kernels(Check& c) {
    for (size_t t : {size_t(1), size_t(5), size_t(70)}) {
        size_t B = 2, T = 3 * t;
        CASE(c, "places t=%zu", t);
        std::vector<double> rows = rounded<float>(normals(c, B * t)), want(B * T, 7);
        std::vector<int> positions;
        for (size_t n = 0; n < B * t; n++) {
            positions.push_back(int(T - 1 - 3 * (n % t)));
            want[n / t * T + size_t(positions[n])] = rows[n];
        }

        // Expect back what was put, and other ranks' places untouched.
        every_order(c, [&](Outputs& outputs) {
            Array<float> from(rows), whole(std::vector<double>(B * T, 7)), back(B * t);
            Array<int> p(positions);
            place_rows<true>(whole.data, from.data, p.data, B, t, T, cudaStream_t{});
            place_rows<false>(back.data, whole.data, p.data, B, t, T, cudaStream_t{});
            outputs.add("whole", whole, want, 0);
            outputs.add("back", back, rows, 0);
        });
    }
}

// The sum of losses has one order: the CPU's bits.
inline void crossentropy_total_kernels(Check& c) {
    for (size_t N : {1, 33, 4096, 4097, 9000, 32 * 4096 + 5}) {
        CASE(c, "crossentropy_total N=%zu", N);
        std::vector<float> losses = as<float>(normals(c, N));
        double total = 0;
        crossentropy_total(&total, losses.data(), N, Cpu{});
        every_order(c, [&](Outputs& o) {
            Array<float> l(as_double(losses));
            Array<double> sum(1);
            crossentropy_total(sum.data, l.data, N, cudaStream_t{});
            o.add("total, bits", sum, {total}, 0);
        });
    }
}

// ----------------------------------------------------------------------------
// the gradient norm, AdamW and SGD over a bucket of tensors: gaps between them, some of them empty,
// one of several chunks, more of them than one launch takes

// A bucket's tensors, and in *elements its length. aligned: each tensor starts at a multiple of 8.
inline std::vector<TensorRow> bucket_rows(Check& c, bool aligned, size_t tensors,
                                          size_t* elements) {
    std::vector<TensorRow> rows;
    size_t at = aligned ? 8 : 3;
    for (size_t r = 0; r < tensors; r++) {
        size_t n = r == 1   ? GRAD_NORM_CHUNK * 2 + 5
                   : r == 2 ? 0
                            : odd(c, 1, tensors > 9 ? 20 : 300);
        rows.push_back({at, n, r % 2 == 0, fnv1a(std::to_string(r)), r * 1001});
        at += aligned ? round_up(n + 1, 8) : n + 1;
    }
    // Where tensors are not aligned, the bucket ends one element behind whole packs.
    *elements = aligned ? at : round_up(at, size_t(8)) + 1;
    return rows;
}

// The sums of a bucket that is cut in two at a multiple of the chunk, one part after the other.
inline std::vector<double> sums_in_two(const std::vector<TensorRow>& rows,
                                       const std::vector<double>& grad) {
    std::vector<double> sums(rows.size() + grad.size() / GRAD_NORM_CHUNK + 3);
    size_t done = 0, cut = round_up(grad.size() / 2, GRAD_NORM_CHUNK);
    for (size_t part = 0; part < 2; part++) {
        std::vector<TensorRow> mine;
        size_t first = part ? cut : 0, last = part ? ~size_t(0) : cut;
        for (const TensorRow& r : rows) {
            size_t from = std::max(r.offset, first), to = std::min(r.offset + r.n, last);
            if (from < to) mine.push_back({from - first, to - from});
        }
        done +=
            grad_squares(sums.data() + done, grad.data() + first, mine.data(), mine.size(), Cpu{});
    }
    sums.resize(done);
    return sums;
}

inline void grad_norm_kernels(Check& c) {
    for (size_t tensors : {1, 5, 70})
        for (int kind : {0, 1, 2, 3}) { // clipped, not clipped, NaN, infinity
            if (SMALL && (tensors == 70) != (kind == 2)) continue;
            size_t n, chunks = 0;
            auto rows = bucket_rows(c, kind != 1, tensors, &n);
            CASE(c, "grad_norm %zu tensors, kind %d", tensors, kind);

            // Gaps between tensors are not part of the norm: fill them with large numbers.
            auto grad = rounded<float>(normals(c, n));
            for (size_t i = 0; i < n; i++) {
                bool inside = false;
                for (const TensorRow& r : rows) inside |= i >= r.offset && i < r.offset + r.n;
                if (!inside) grad[i] = 1e6;
            }
            for (const TensorRow& r : rows) chunks += chunks_of(r);
            if (kind > 1) grad[rows[0].offset] = kind == 2 ? NAN : -INFINITY;

            // Want: the CPU's sums, which a bucket cut in two must give as well. In two of three
            // buckets gradients carry a loss scale, which the step then raises or lowers.
            std::vector<double> sums(chunks);
            float clip = kind == 1 ? 1e9f : 0.5f;
            LossScaling rule = {.on = tensors != 5, .window = 3, .hysteresis = 1};
            const StepScale before = {0, 0, 0, 4, {1024, 2, 0, 5}};
            StepScale scale = before;
            size_t count = grad_squares(sums.data(), grad.data(), rows.data(), tensors, Cpu{});
            Betas betas = {0.9f, 0.95f};
            grad_norm_finish(&scale, sums.data(), chunks, clip, Cpu{}, rule, betas);
            float next = !rule.on ? 1024 : kind < 2 ? 2048 : 512;
            expect(c, scale.loss.now == next, "the next loss scale");
            expect(c, count == chunks && scale.finite == (kind < 2), "the CPU's version");
            if (kind < 2) expect(c, sums_in_two(rows, grad) == sums, "a bucket in two parts");

            // Want: a second gradient added, and its numbers rounded to 16 bits.
            std::vector<double> other = rounded<float>(normals(c, n)), added = plus(grad, other);
            auto want_narrow = rounded<bf16>(other);

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<float> g(grad), b(other), wide(n);
                Array<bf16> narrow(n);
                Array<double> s(chunks);
                const auto* bytes = reinterpret_cast<const unsigned char*>(&before);
                Array<unsigned char> out(std::vector<double>(bytes, bytes + sizeof(before)));
                StepScale* result = reinterpret_cast<StepScale*>(out.data);

                size_t done = grad_squares(s.data, g.data, rows.data(), tensors, stream);
                expect(c, done == chunks, "another number of chunks");

                // A bucket of empty tensors has no sums, and launches nothing.
                const std::vector<TensorRow> empty(3);
                done = grad_squares(s.data, g.data, empty.data(), empty.size(), stream);
                expect(c, done == 0, "sums of empty tensors");
                grad_norm_finish(result, s.data, chunks, clip, stream, rule, betas);

                // Counts and the loss scale are exact; the norm and the scale are floats.
                StepScale got;
                memcpy(&got, out.host().data(), sizeof(got));
                auto counts = [](const StepScale& s) {
                    return std::vector<double>{double(s.finite), double(s.step), s.loss.now,
                                               double(s.loss.clean), double(s.loss.spent),
                                               double(s.loss.skipped)};
                };
                Array<double> exact(counts(got)), near(std::vector<double>{got.norm, got.scale});
                o.add("finite, step, loss scale", exact, counts(scale), 0);

                if (kind < 2) {
                    o.add("sums", s, sums, 1e-12);
                    o.add("norm, scale", near, {scale.norm, scale.scale}, 1e-7);
                    Array<double> corrections(std::vector<double>{got.correct1, got.correct2});
                    auto correction = [&](float beta) {
                        return 1 / (1 - std::pow(double(beta), double(scale.step)));
                    };
                    o.add("corrections", corrections,
                          {correction(betas.first), correction(betas.second)}, 1e-14);

                    // The kernels that move gradients.
                    add_gradients(g.data, b.data, n, stream);
                    o.add("sum of two gradients", g, added, 1e-7);
                    narrow_gradients(narrow.data, b.data, n, stream);
                    widen_gradients(wide.data, narrow.data, n, stream);
                    o.add("gradients in 16 bits", narrow, want_narrow, 0);
                    o.add("and back", wide, want_narrow, 0);
                }
            });
        }
}

// More sums than one block adds: whole runs of them, and a run that is not whole.
inline void grad_norm_runs_kernels(Check& c) {
    for (size_t count : {NORM_RUN, NORM_RUN + 1, 3 * NORM_RUN - 7}) {
        CASE(c, "grad_norm of %zu sums", count);
        auto sums = normals(c, count);
        for (double& x : sums) x *= x;
        double norm = std::sqrt(std::accumulate(sums.begin(), sums.end(), 0.0));

        every_order(c, [&](Outputs& o) {
            Array<double> s(sums);
            Array<unsigned char> out(std::vector<double>(sizeof(StepScale), 0.0));
            grad_norm_finish(reinterpret_cast<StepScale*>(out.data), s.data, count, 1e9f,
                             cudaStream_t{});
            StepScale got;
            memcpy(&got, out.host().data(), sizeof(got));
            Array<double> found(std::vector<double>{got.norm});
            o.add("norm", found, {norm}, 1e-12);
        });
    }
}

// AdamW and SGD: the CPU's numbers in double, and the CPU's bits in T.
template <typename T> void update_kernels(Check& c) {
    for (size_t tensors : {1, 5, 70})
        for (int kind : {0, 1, 2, 3}) { // masters; none; none and stochastic; not finite
            if (SMALL && (tensors == 70) != (kind == 2)) continue;
            size_t n;
            auto rows = bucket_rows(c, kind != 1 && tensors > 1, tensors, &n);
            CASE(c, "update %s %zu tensors, kind %d", type_word(T()), tensors, kind);
            rows[0].rate = 4; // a tensor that learns faster
            auto w = rounded<T>(normals(c, n)), g = rounded<float>(normals(c, n));
            auto m0 = rounded<float>(normals(c, n)), v0 = rounded<float>(normals(c, n));
            for (double& x : v0) x = std::fabs(x);
            AdamW h = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, kind == 2, 7};
            StepScale scale = {0, 0.5f, kind != 3, 1000}, corrected = scale;
            correct_bias(&corrected, {h.beta1, h.beta2}); // once, or by each thread: same bits
            bool master = kind == 0;

            // Want: the CPU in double.
            std::vector<double> wd = w, md = m0, vd = v0, sd = w;
            AdamWMemory<double> in_double = {wd.data(), nullptr, g.data(), md.data(), vd.data()};
            adamw_update(in_double, rows.data(), tensors, h, &scale, Cpu{});
            sgd_update(sd.data(), nullptr, g.data(), rows.data(), tensors, 0.1f, 0.2f, &scale,
                       Cpu{});

            // Want: the CPU in T. Every operation is spelled out, so the kernels have its bits.
            std::vector<float> masters = as<float>(w), sgd_masters = masters, gf = as<float>(g);
            std::vector<float> mf = as<float>(m0), vf = as<float>(v0);
            std::vector<T> wt = as<T>(w), st = wt;
            AdamWMemory<T> in_type = {wt.data(), master ? masters.data() : nullptr, gf.data(),
                                      mf.data(), vf.data()};
            adamw_update(in_type, rows.data(), tensors, h, &scale, Cpu{});
            sgd_update(st.data(), master ? sgd_masters.data() : nullptr, gf.data(), rows.data(),
                       tensors, 0.1f, 0.2f, &scale, Cpu{});

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> weight(w), sgd(w);
                Array<float> gm(w), gm_sgd(w), grad(g), m(m0), v(v0);
                Array<unsigned char> on_device([&] {
                    std::vector<int> bytes(sizeof(scale));
                    for (size_t i = 0; i < bytes.size(); i++)
                        bytes[i] = reinterpret_cast<const unsigned char*>(&corrected)[i];
                    return numbers_of(bytes);
                }());
                const StepScale* where = reinterpret_cast<const StepScale*>(on_device.data);
                AdamWMemory<T> memory = {weight.data, master ? gm.data : nullptr, grad.data, m.data,
                                         v.data};
                adamw_update(memory, rows.data(), tensors, h, where, stream);
                sgd_update(sgd.data, master ? gm_sgd.data : nullptr, grad.data, rows.data(),
                           tensors, 0.1f, 0.2f, where, stream);

                // Stochastic rounding errs by up to one unit in the last place, which is twice
                // the error of the nearest.
                o.add("weight", weight, wd, tolerance<T>(9, kind == 2 ? 2 : 1));
                o.add("first moments", m, md, tolerance<float>(9));
                o.add("second moments", v, vd, tolerance<float>(9));
                o.add("sgd", sgd, sd, tolerance<T>(4));
                o.add("weight, bits", weight, as_double(wt), 0);
                o.add("master, bits", gm, as_double(masters), 0);
                o.add("first moments, bits", m, as_double(mf), 0);
                o.add("second moments, bits", v, as_double(vf), 0);
                o.add("sgd, bits", sgd, as_double(st), 0);
                o.add("sgd's master, bits", gm_sgd, as_double(sgd_masters), 0);
            });
        }
}

// A StepScale in the device's memory.
inline std::vector<double> bytes_of_scale(const StepScale& scale) {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(&scale);
    return {bytes, bytes + sizeof(scale)};
}

// The mean of weights: the CPU's bits, with masters of every kind, and nothing after an overflow.
template <typename T> void ema_kernels(Check& c) {
    for (Masters masters : {Masters::NONE, Masters::FLOAT, Masters::REMAINDER})
        for (int finite : {1, 0}) {
            if (masters == Masters::REMAINDER && type_of<T>() != Type::BF16) continue;
            size_t n = odd(c, 1, 700);
            CASE(c, "ema %s masters %d finite %d, %zu", type_word(T()), int(masters), finite, n);
            auto w = rounded<T>(normals(c, n)), more = rounded<float>(normals(c, n));
            auto mean = rounded<float>(normals(c, n));
            std::vector<int> rest = integers(c, n, 0, 65535);
            StepScale scale = {0, 1, finite, 40};

            // Want: the CPU's bits.
            std::vector<uint16_t> remainders(rest.begin(), rest.end());
            std::vector<float> want = as<float>(mean), floats = as<float>(more);
            std::vector<T> weights = as<T>(w);
            WeightMemory<T> x = {weights.data(), nullptr, masters};
            if (masters == Masters::FLOAT) x.master = floats.data();
            if (masters == Masters::REMAINDER) x.master = remainders.data();
            ema_update(want.data(), x, n, 0.99, &scale, Cpu{});

            every_order(c, [&](Outputs& o) {
                Array<T> weight(w);
                size_t shift = masters == Masters::FLOAT; // out of 16-byte alignment
                Array<float> master(more), moved(mean, shift);
                Array<uint16_t> remainder(numbers_of(rest));
                Array<unsigned char> on_device(bytes_of_scale(scale));
                WeightMemory<T> y = {weight.data, nullptr, masters};
                if (masters == Masters::FLOAT) y.master = master.data;
                if (masters == Masters::REMAINDER) y.master = remainder.data;
                const StepScale* where = reinterpret_cast<const StepScale*>(on_device.data);
                ema_update(moved.data, y, n, 0.99, where, cudaStream_t{});
                o.add("mean, bits", moved, as_double(want), 0);
            });
        }
}

// The bytes of an array, so that arrays of every type are compared in the same way.
template <typename V> std::vector<unsigned char> bytes_of(const std::vector<V>& x) {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(x.data());
    return {bytes, bytes + x.size() * sizeof(V)};
}
inline std::vector<double> numbers_of(const std::vector<unsigned char>& x) {
    return {x.begin(), x.end()};
}

// Masters and moments in fewer bytes: the kernels must give the CPU's bits. Rows are parts of
// pieces of tensors, cut into runs.
template <typename T> void small_update_kernels(Check& c) {
    for (size_t tensors : {1, 5, 70})
        for (auto [masters, states] :
             {std::pair(Masters::REMAINDER, States::FLOAT), {Masters::NONE, States::FLOAT},
              {Masters::FLOAT, States::BF16}, {Masters::REMAINDER, States::BF16},
              {Masters::FLOAT, States::EIGHT_BIT}, {Masters::REMAINDER, States::EIGHT_BIT}}) {
            if (masters == Masters::REMAINDER && type_of<T>() != Type::BF16) continue;
            if (SMALL && (tensors == 5) != (masters == Masters::FLOAT)) continue;
            size_t n;
            auto rows = bucket_rows(c, tensors > 1, tensors, &n);
            for (size_t r = 0; r < rows.size(); r++)
                rows[r].start = 13 * r, rows[r].run = 30 + r, rows[r].gap = r % 3 * 60;

            // With states in 8 bits a tensor starts at a multiple of a block, and every third
            // tensor keeps float states.
            bool eight = states == States::EIGHT_BIT;
            size_t state = 0;
            for (size_t r = 0, at = 0; eight && r < rows.size(); r++) {
                rows[r].offset = at, rows[r].small = r % 3 != 2, rows[r].state = state;
                state += state_bytes(rows[r].n, rows[r].small);
                at += round_up(rows[r].n, STATE_BLOCK);
                n = at;
            }

            CASE(c, "small update %s %zu tensors, masters %d states %d", type_word(T()), tensors,
                 int(masters), int(states));
            auto g = as<float>(normals(c, n)), exact = as<float>(normals(c, n));
            auto mf = as<float>(normals(c, n)), vf = as<float>(normals(c, n));
            for (float& x : vf) x = std::fabs(x);
            bool narrow = states == States::BF16;
            auto m = narrow ? bytes_of(as<bf16>(as_double(mf))) : bytes_of(mf);
            auto v = narrow ? bytes_of(as<bf16>(as_double(vf))) : bytes_of(vf);

            // Moments in 8 bits come from a step before, one of whose blocks is zero.
            if (eight) {
                m.assign(state, 0);
                v.assign(state, 0);
                AdamW before = {0, 0.9f, 0.95f, 1e-8f, 0};
                std::vector<float> w0(n), g0 = as<float>(normals(c, n));
                std::fill_n(g0.begin(), std::min(n, STATE_BLOCK), 0.0f);
                AdamWMemory<float> x = {w0.data(), nullptr,  g0.data(), m.data(),
                                        v.data(),  masters, states};
                adamw_update(x, rows.data(), tensors, before, nullptr, Cpu{});
            }

            // Masters, and the weights that belong to them.
            std::vector<T> w = as<T>(as_double(exact));
            std::vector<unsigned char> master = bytes_of(exact);
            std::vector<uint16_t> remainders(n);
            if constexpr (type_of<T>() == Type::BF16)
                for (size_t i = 0; masters == Masters::REMAINDER && i < n; i++) {
                    SplitFloat x = split_float(exact[i]);
                    w[i] = bits_as<T>(x.weight);
                    remainders[i] = x.remainder;
                }
            if (masters == Masters::REMAINDER) master = bytes_of(remainders);
            if (masters == Masters::NONE) master.clear();

            // Want: the CPU's bytes. Keep those from before the step for the kernel.
            AdamW h = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, true, 7, 1000};
            std::vector<unsigned char> old_weight = bytes_of(w), old_master = master;
            std::vector<unsigned char> old_m = m, old_v = v;
            void* at = master.empty() ? nullptr : master.data();
            AdamWMemory<T> x = {w.data(), at, g.data(), m.data(), v.data(), masters, states};
            adamw_update(x, rows.data(), tensors, h, nullptr, Cpu{});

            every_order(c, [&](Outputs&) {
                Array<unsigned char> weight(numbers_of(old_weight)), kept(numbers_of(old_master));
                Array<unsigned char> gm(numbers_of(old_m)), gv(numbers_of(old_v));
                Array<float> grad(as_double(g));
                AdamWMemory<T> y = {(T*)weight.data, at ? kept.data : nullptr, grad.data,
                                    gm.data, gv.data, masters, states};
                adamw_update(y, rows.data(), tensors, h, nullptr, cudaStream_t{});
                expect(c, weight.host() == bytes_of(w), "weights");
                expect(c, kept.host() == master, "masters");
                expect(c, gm.host() == m, "first moments");
                expect(c, gv.host() == v, "second moments");
            });
        }
}

// Muon's momentum and update: the CPU's bits, for each format of moments.
template <typename T> void muon_kernels(Check& c) {
    for (States states : {States::FLOAT, States::BF16}) {
        size_t n;
        auto rows = bucket_rows(c, true, 5, &n);
        CASE(c, "muon %s, states %d", type_word(T()), int(states));
        auto w = rounded<T>(normals(c, n)), g = rounded<float>(normals(c, n));
        auto m0 = rounded<bf16>(normals(c, n));
        Muon h;
        h.decay = 0.1f, h.cautious = true, h.stochastic = true, h.seed = 7;
        StepScale scale = {0, 0.5f, 1, 3};
        scale.given.lr = 0.1f;

        // Want: the CPU's bits.
        std::vector<T> wt = as<T>(w);
        std::vector<float> masters = as<float>(w), gf = as<float>(g), mf = as<float>(m0);
        std::vector<bf16> mb = as<bf16>(m0);
        void* m = states == States::BF16 ? static_cast<void*>(mb.data()) : mf.data();
        muon_momentum<T>(gf.data(), m, states, rows.data(), rows.size(), h, &scale, Cpu{});
        AdamWMemory<T> x = {wt.data(), masters.data(), gf.data(), nullptr, nullptr};
        muon_update(x, rows.data(), rows.size(), h, &scale, Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> weight(w);
            Array<float> master(w), grad(g), wide(m0);
            Array<bf16> narrow(m0);
            Array<unsigned char> on_device(bytes_of_scale(scale));
            const StepScale* where = reinterpret_cast<const StepScale*>(on_device.data);
            void* gm = states == States::BF16 ? static_cast<void*>(narrow.data) : wide.data;
            muon_momentum<T>(grad.data, gm, states, rows.data(), rows.size(), h, where, stream);
            AdamWMemory<T> y = {weight.data, master.data, grad.data, nullptr, nullptr};
            muon_update(y, rows.data(), rows.size(), h, where, stream);
            o.add("u", grad, as_double(gf), 0);
            o.add("momentum", wide, as_double(mf), 0);
            o.add("momentum in bf16", narrow, as_double(mb), 0);
            o.add("weight", weight, as_double(wt), 0);
            o.add("master", master, as_double(masters), 0);
        });
    }
}

// NorMuon's lines of a matrix: the CPU's bits, as columns and rows. A whole matrix in bf16: as near
// as bf16's roundings leave it after five iterations.
inline void muon_matrix_kernels(Check& c) {
    for (auto [r, n] : {std::pair<size_t, size_t>{40, 24}, {7, 70}, {33, 33}})
        for (bool finite : {true, false}) {
            CASE(c, "muon's lines %zu x %zu, finite %d", r, n, finite);
            auto x = rounded<float>(normals(c, r * n)), v0 = magnitudes(normals(c, std::max(r, n)));
            StepScale scale = {0, 1, finite, 3};
            Muon h;
            h.beta2 = 0.75f, h.muoneq = h.plus = r < n;

            // Want: the CPU's.
            std::vector<float> u = as<float>(x), v = as<float>(v0), whole = u, kept = v;
            MuonLines<float> lines = {u.data(), v.data(), r, n, n, 1, h.beta2, &scale};
            if (r < n) lines = {u.data(), v.data(), n, r, 1, n, h.beta2, &scale};
            divide_lines(lines, Cpu{});
            MuonRoom<bf16> room;
            std::vector<unsigned char> memory(room.bind(nullptr, r, n) + 256);
            std::vector<unsigned char> products(muon_scratch_bytes<bf16>(r, n, Cpu{}) + 64);
            room.bind(memory.data() + 256 - uintptr_t(memory.data()) % 256, r, n);
            Blas host;
            blas_scratch(host, products.data(), products.size());
            muon_orthogonalise(whole.data(), r, n, h, room, host, Cpu{}, kept.data(), &scale);

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<float> gu(x), gv(v0), gwhole(x), gkept(v0);
                Array<unsigned char> on_device(bytes_of_scale(scale));
                const StepScale* now = reinterpret_cast<const StepScale*>(on_device.data);
                MuonLines<float> theirs = lines;
                theirs.u = gu.data, theirs.v = gv.data, theirs.scale = now;
                divide_lines(theirs, stream);

                // Give it memory for the whole.
                MuonRoom<bf16> there;
                Array<unsigned char> bytes(there.bind(nullptr, r, n) + 256);
                Array<unsigned char> scratch(muon_scratch_bytes<bf16>(r, n, stream));
                there.bind(bytes.data, r, n);
                Blas blas;
                blas_scratch(blas, scratch.data, scratch.n);
                muon_orthogonalise(gwhole.data, r, n, h, there, blas, stream, gkept.data, now);
                o.add("lines over their second moments", gu, as_double(u), 0);
                o.add("second moments", gv, as_double(v), 0);
                o.add("a whole matrix", gwhole, as_double(whole), 0.1);
                o.add("its second moments", gkept, as_double(kept), finite ? 0.02 : 0);
            });
        }
}

// An update without a StepScale has the bits of an update with {scale 1, finite, step}.
template <typename T> void update_without_scale_kernels(Check& c) {
    CASE(c, "update without a scale %s", type_word(T()));
    size_t n = 333;
    auto w = rounded<T>(normals(c, n)), g = rounded<float>(normals(c, n));
    AdamW h = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, true, 7, 5};
    StepScale scale = {0, 1, 1, h.step};

    // Want: the CPU's bits with a scale.
    std::vector<T> wt = as<T>(w), st = wt;
    std::vector<float> gf = as<float>(g), mf(n), vf(n);
    TensorRow row = {0, n};
    AdamWMemory<T> on_cpu = {wt.data(), nullptr, gf.data(), mf.data(), vf.data()};
    adamw_update(on_cpu, &row, 1, h, &scale, Cpu{});
    sgd_update(st.data(), nullptr, gf.data(), &row, 1, 0.1f, 0.2f, &scale, Cpu{});

    every_order(c, [&](Outputs& o) {
        cudaStream_t stream = {};
        const StepScale* none = nullptr;
        Array<T> weight(w), sgd(w);
        Array<float> grad(g), m(std::vector<double>(n, 0)), v(std::vector<double>(n, 0));
        AdamWMemory<T> memory = {weight.data, nullptr, grad.data, m.data, v.data};
        adamw_update(memory, &row, 1, h, none, stream);
        sgd_update(sgd.data, nullptr, grad.data, &row, 1, 0.1f, 0.2f, none, stream);
        o.add("weight, bits", weight, as_double(wt), 0);
        o.add("first moments, bits", m, as_double(mf), 0);
        o.add("sgd, bits", sgd, as_double(st), 0);
    });
}

// ----------------------------------------------------------------------------

inline void add_training_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("embedding", embedding_kernels),
        THREE_TYPES("crossentropy", crossentropy_kernels),
        THREE_TYPES("crossentropy in one call", crossentropy_one_call_kernels),
        {"crossentropy total", crossentropy_total_kernels},
        {"objective", objective_kernels},
        {"places of rows", places_kernels},
        {"grad_norm", grad_norm_kernels},
        {"grad_norm runs", grad_norm_runs_kernels}});

    // The optimizer.
    rows.insert(rows.end(), {
        THREE_TYPES("adamw, sgd", update_kernels),
        THREE_TYPES("ema", ema_kernels),
        TWO_TYPES("adamw small", small_update_kernels),
        TWO_TYPES("muon", muon_kernels),
        {"muon's matrices", muon_matrix_kernels},
        THREE_TYPES("adamw, sgd without a scale", update_without_scale_kernels)});
}
