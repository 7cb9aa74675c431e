// kernels_variants.h - rows of the kernel table: variants of Llama in norms, gates, RoPE, ends
//   The kernels are those of the rows of their plain forms. These rows test what RmsnormMore,
//   Gate, RopeHeads, a scale and softcaps change. Sizes take both paths,
//   of vectors and of single elements.
#pragma once
#include "../../llmc/ops/crossentropy.cuh"
#include "../../llmc/ops/elementwise.cuh"
#include "../../llmc/ops/embedding.cuh"
#include "../../llmc/ops/latent.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../llmc/ops/rope.cuh"
#include "../../llmc/ops/swiglu.cuh"
#include "kernel_table.h"

// RMSNorm with a residual, with weights that count from 1, and with sums of rows
// that another rank continues.
template <typename T> void rmsnorm_more_kernels(Check& c) {
    const float eps = 1e-5f;
    for (auto [N, C, shift] :
         {std::array<size_t, 3>{5, 7, 0}, {3, 64, 0}, {3, 64, 1}, {2, 1032, 0}}) {
        CASE(c, "rmsnorm with more %s N=%zu C=%zu shift=%zu", type_word(T()), N, C, shift);
        auto x = rounded<T>(normals(c, N * C)), w = rounded<T>(normals(c, C));
        auto res = rounded<T>(normals(c, N * C)), dout = rounded<T>(normals(c, N * C));

        // Want: the CPU in double. Each row is as if twice as long: the other half repeats this
        // half, so the sums over the whole row are twice the sums here.
        std::vector<double> out(N * C), rstd(N), dinp(N * C), squares(N), dots(N);
        rmsnorm_row_sums(squares.data(), x.data(), (const double*)nullptr, w.data(), N, C, 1,
                         Cpu{});
        rmsnorm_row_sums(dots.data(), x.data(), dout.data(), w.data(), N, C, 1, Cpu{});
        auto doubled = [](std::vector<double> v) {
            for (double& s : v) s *= 2;
            return rounded<float>(v);
        };
        auto squares_f = doubled(squares), dots_f = doubled(dots);
        rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), N, C, eps, Cpu{},
                        {res.data(), 1, squares_f.data(), 2 * C});
        auto rstd_f = rounded<float>(rstd);
        double* frozen = nullptr;
        const double* no_residual = nullptr;
        rmsnorm_backward(dinp.data(), frozen, no_residual, dout.data(), x.data(), w.data(),
                         rstd_f.data(), N, C, Cpu{}, {nullptr, 1, dots_f.data(), 2 * C});

        // Without gains: what gains of one give, from the CPU too.
        std::vector<double> ones(C, 1), bare(N * C), dbare(N * C), on_cpu(N * C), bare_rstd(N);
        const double* no_weight = nullptr;
        rmsnorm_forward(bare.data(), bare_rstd.data(), x.data(), ones.data(), N, C, eps, Cpu{});
        rmsnorm_backward(dbare.data(), frozen, no_residual, dout.data(), x.data(), ones.data(),
                         rstd_f.data(), N, C, Cpu{});
        double bare_terms = 0;
        for (size_t i = 0; i < N * C; i++)
            bare_terms = std::max(bare_terms, std::fabs(rstd_f[i / C] * dout[i]));
        rmsnorm_backward(on_cpu.data(), frozen, no_residual, dout.data(), x.data(), no_weight,
                         rstd_f.data(), N, C, Cpu{}, {nullptr, 1});

        // The size of the input gradient's terms.
        double terms = 0;
        for (size_t i = 0; i < N * C; i++)
            terms = std::max(terms, std::fabs(rstd[i / C] * dout[i] * (1 + w[i % C])));

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> inp(x, shift), weight(w, shift), d(dout, shift), r(res, shift);
            Array<T> y(N * C, shift), dx(N * C, shift);
            Array<float> rs(N), alone(N), r_in(rstd_f), sq(squares_f), dt(dots_f), got_sq(N),
                got_dt(N);
            Array<float> sums(rmsnorm_sums(N, C, stream));

            // The sums of rows alone, then the norm that continues them, with or without an output.
            const T* none = nullptr;
            rmsnorm_row_sums(got_sq.data, inp.data, none, weight.data, N, C, 1, stream);
            rmsnorm_row_sums(got_dt.data, inp.data, d.data, weight.data, N, C, 1, stream);
            rmsnorm_forward(y.data, rs.data, inp.data, weight.data, N, C, eps, stream,
                            {r.data, 1, sq.data, 2 * C});
            rmsnorm_forward((T*)nullptr, alone.data, inp.data, weight.data, N, C, eps, stream,
                            {none, 1, sq.data, 2 * C});
            rmsnorm_backward(dx.data, sums.data, none, d.data, inp.data, weight.data, r_in.data, N,
                             C, stream, {nullptr, 1, dt.data, 2 * C});

            Array<T> z(N * C, shift), dz(N * C, shift);
            Array<float> z_rstd(N);
            Array<double> cpu(on_cpu);
            rmsnorm_forward(z.data, z_rstd.data, inp.data, none, N, C, eps, stream, {none, 1});
            rmsnorm_backward(dz.data, (float*)nullptr, none, d.data, inp.data, none, r_in.data, N,
                             C, stream, {nullptr, 1});
            o.add("without gains", z, bare, tolerance<T>(C), 1);
            o.add("dinp without gains", dz, dbare, tolerance<T>(C), bare_terms);
            o.add("the CPU's", cpu, dbare, 1e-14, bare_terms);

            o.add("out", y, out, tolerance<T>(C), 1);
            o.add("rstd", rs, rstd, tolerance<float>(C));
            o.add("rstd alone", alone, rstd, tolerance<float>(C));
            o.add("dinp", dx, dinp, tolerance<T>(C), terms);
            o.add("squares", got_sq, squares, tolerance<float>(C), double(C));
            o.add("dots", got_dt, dots, tolerance<float>(C), double(C));
        });
    }
}

// Scalars in memory, gates of rows of five by their logits, sums of rows that lie in wider ones, and
// sums of rows without weights.
template <typename T> void scalar_and_gate_kernels(Check& c) {
    for (auto [rows, shift] : {std::array<size_t, 2>{1, 0}, {200, 0}, {201, 1}}) {
        const size_t C = 5, n = rows * C;
        CASE(c, "scalars, gates %s rows=%zu shift=%zu", type_word(T()), rows, shift);
        auto x = rounded<T>(normals(c, n)), d = rounded<T>(normals(c, n)),
             g = rounded<T>(normals(c, n, 2));
        std::vector<double> two = {1.25, -0.75}, mixed(n), scaled(n), raised(n), slopes(n),
            gated(n), added = d, sums = d, dots(rows);

        // Want: the formulas.
        for (size_t i = 0; i < n; i++) {
            double s = 1 / (1 + std::exp(-g[i])), gate = 3 / (1 + std::exp(-g[i / C]));
            mixed[i] = two[0] * x[i] + two[1] * d[i];
            scaled[i] = two[0] * x[i], raised[i] = two[0] * x[i] + d[i];
            slopes[i] = 3 * s * (1 - s) * x[i];
            gated[i] = gate * x[i], added[i] += gate * x[i];
            if (i % C < 3) sums[i] += x[i / C * 4 + i % C];
            dots[i / C] += x[i] * d[i];
        }

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> inp(x, shift), dout(d, shift), logits(g, shift), ab(two), mix(n, shift);
            Array<T> scale(n, shift), raise(n, shift), slope(n, shift), by(n, shift);
            Array<T> more(d, shift), wide(d, shift);
            Array<float> rest(rows);
            const T *a = ab.data, *b = a + 1, *none = nullptr, *in = inp.data, *other = dout.data;
            const T* gates = logits.data;
            map_elements(mix.data, n, ScalarMix<T>{a, b}, stream, in, other);
            map_elements(scale.data, n, ScalarMix<T>{a, none}, stream, in);
            map_elements(raise.data, n, ScalarMix<T>{a, none}, stream, in, other);
            RowGate<T, false> down = {gates, 3, Gated::SLOPE};
            round_rows(slope.data, 1, in, 1, n, 1, stream, down);
            round_rows(by.data, C, in, C, rows, C, stream, RowGate<T, false>{gates, 3});
            round_rows(more.data, C, in, C, rows, C, stream, RowGate<T, true>{gates, 3});
            round_rows(wide.data, C, in, 4, rows, 3, stream, RowGate<T, true>());
            rmsnorm_row_sums(rest.data, in, other, none, rows, C, 1, stream);
            o.add("mixed", mix, mixed, tolerance<T>(4), 2);
            o.add("scaled", scale, scaled, tolerance<T>(2), 1);
            o.add("raised", raise, raised, tolerance<T>(4), 2);
            o.add("slopes", slope, slopes, tolerance<T>(8), 1);
            o.add("gated", by, gated, tolerance<T>(8), 3);
            o.add("added", more, added, tolerance<T>(8), 4);
            o.add("sums", wide, sums, tolerance<T>(2), 2);
            o.add("dots", rest, dots, tolerance<float>(C), double(C));
        });
    }
}

// GELU's gate; the sum of two tensors; softcaps, with scores far beyond the cap too.
template <typename T> void gate_and_cap_kernels(Check& c) {
    for (auto [n, shift] : {std::array<size_t, 2>{1, 0}, {1000, 0}, {1003, 0}, {1000, 1}}) {
        CASE(c, "geglu, sum, softcap %s n=%zu shift=%zu", type_word(T()), n, shift);
        auto g = rounded<T>(normals(c, n, 3)), u = rounded<T>(normals(c, n)),
             d = rounded<T>(normals(c, n));

        // Want: the CPU in double.
        std::vector<double> out(n), dgate(n), dup(n), sum(n), squares(n), dsquares(n);
        std::vector<double> capped = g, rooted = g;
        swiglu_forward(out.data(), g.data(), u.data(), n, Cpu{}, Gate::GELU);
        swiglu_backward(dgate.data(), dup.data(), d.data(), g.data(), u.data(), n, Cpu{},
                        Gate::GELU);
        add_forward(sum.data(), g.data(), u.data(), n, Cpu{});
        softcap_forward(capped.data(), n, 2, Cpu{});
        softcap_forward(rooted.data(), n, 2, Cpu{}, true);
        relu2_forward(squares.data(), g.data(), n, Cpu{});
        relu2_backward(dsquares.data(), d.data(), g.data(), n, Cpu{});

        // The size of dgate's terms d u gelu'(g). Those of gelu' cancel where g is far below zero.
        double terms = 1;
        for (size_t i = 0; i < n; i++) terms = std::max(terms, std::fabs(d[i] * u[i]));

        // The device: forward, a cap of 0 that caps nothing, and backward in place.
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> gate(g, shift), up(u, shift), dout(d, shift), y(n, shift), cap(g, shift);
            Array<T> both(n, shift), same(g, shift);
            swiglu_forward(y.data, gate.data, up.data, n, stream, Gate::GELU);
            add_forward(both.data, gate.data, up.data, n, stream);
            softcap_forward(cap.data, n, 2, stream);
            softcap_forward(same.data, n, 0, stream);
            Array<T> root(g, shift), square(n, shift), dsquare(d, shift);
            softcap_forward(root.data, n, 2, stream, true);
            relu2_forward(square.data, gate.data, n, stream);
            relu2_backward(dsquare.data, dsquare.data, gate.data, n, stream);
            swiglu_backward(dout.data, up.data, dout.data, gate.data, up.data, n, stream,
                            Gate::GELU);

            o.add("out", y, out, tolerance<T>(8), 1);
            o.add("dgate in place", dout, dgate, tolerance<T>(16), terms);
            o.add("dup in place", up, dup, tolerance<T>(8), 1);
            o.add("sum", both, sum, tolerance<T>(2), 1);
            o.add("capped", cap, capped, tolerance<T>(8), 1);
            o.add("no cap", same, g, 0);
            o.add("capped by the root", root, rooted, tolerance<T>(8), 1);
            o.add("relu2", square, squares, tolerance<T>(2), 1);
            o.add("relu2 backward in place", dsquare, dsquares, tolerance<T>(2), 1);
        });
    }
}

// RoPE of a part of each head, RoPE of neighbouring pairs, and the embedding and logits of a model
// that scales the first and caps the second.
template <typename T> void part_and_scale_kernels(Check& c) {
    // A part of each head: the rest stays.
    for (auto [HS, turned, shift] : {std::array<size_t, 3>{10, 4, 0}, {64, 16, 0}, {64, 32, 1}}) {
        size_t N = 5, NH = 3, P = 20;
        CASE(c, "rope of a part %s HS=%zu of %zu shift=%zu", type_word(T()), turned, HS, shift);
        std::vector<double> table(P * turned);
        rope_table(table.data(), P, turned, 100, {});
        table = rounded<float>(table);
        std::vector<int> at = integers(c, N, 0, int(P) - 1);
        auto x = rounded<T>(normals(c, N * NH * HS));
        std::vector<double> want = x;
        rope_forward(RopeHeads<double>{want.data(), NH, NH * HS, HS}, RopeHeads<double>{},
                     at.data(), table.data(), N, turned, Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<int> positions(at);
            Array<float> turn(table);
            Array<T> y(x, shift);
            rope_forward(RopeHeads<T>{y.data, NH, NH * HS, HS}, RopeHeads<T>{}, positions.data,
                         turn.data, N, turned, stream);
            o.add("turned", y, want, tolerance<T>(2), 1);
        });
    }

    // Neighbouring pairs, at the end of each head.
    for (auto [HS, turned] : {std::array<size_t, 2>{10, 4}, {48, 32}}) {
        size_t N = 5, NH = 3, P = 20, first = HS - turned;
        CASE(c, "rope of neighbours %s HS=%zu of %zu", type_word(T()), turned, HS);
        std::vector<double> table(P * turned);
        rope_table(table.data(), P, turned, 100, {});
        table = rounded<float>(table);
        std::vector<int> at = integers(c, N, 0, int(P) - 1);
        auto x = rounded<T>(normals(c, N * NH * HS));

        // Want: each pair's two numbers moved into two halves, turned as
        // halves are, and moved back.
        std::vector<double> halves = x, want = x;
        auto each = [&](auto f) {
            for (size_t head = 0; head < N * NH; head++)
                for (size_t i = 0; i < turned; i++)
                    f(head * HS + first + i / 2 + (i % 2) * turned / 2, head * HS + first + i);
        };
        each([&](size_t half, size_t pair) { halves[half] = x[pair]; });
        rope_forward(RopeHeads<double>{halves.data() + first, NH, NH * HS, HS}, RopeHeads<double>{},
                     at.data(), table.data(), N, turned, Cpu{});
        each([&](size_t half, size_t pair) { want[pair] = halves[half]; });

        // The CPU's own turn of neighbours, which must agree with it.
        std::vector<double> cpu = x;
        rope_forward(RopeHeads<double>{cpu.data() + first, NH, NH * HS, HS, true},
                     RopeHeads<double>{}, at.data(), table.data(), N, turned, Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<int> positions(at);
            Array<float> turn(table);
            Array<T> y(x);
            Array<double> on_cpu(cpu);
            rope_forward(RopeHeads<T>{y.data + first, NH, NH * HS, HS, true}, RopeHeads<T>{},
                         positions.data, turn.data, N, turned, stream);
            o.add("turned", y, want, tolerance<T>(2), 1);
            o.add("on the CPU", on_cpu, want, 1e-15);
        });
    }

    // A model's ends: an embedding that is scaled, and logits with a softcap.
    for (auto [N, V, C] : {std::array<size_t, 3>{40, 11, 6}, {33, 5, 64}}) {
        CASE(c, "scaled embedding, capped logits %s N=%zu V=%zu C=%zu", type_word(T()), N, V, C);
        std::vector<int> tokens = integers(c, N, 0, int(V) - 1), zeros(N);
        auto wte = rounded<T>(normals(c, V * C)), dout = rounded<T>(normals(c, N * C));
        std::vector<double> out(N * C), dwte(V * C), losses(N),
            logits = rounded<T>(normals(c, N * C, 2));
        std::vector<int> targets = integers(c, N, -1, int(C) - 1);
        auto given = logits;

        // Want: the CPU in double.
        embedding_forward(out.data(), tokens.data(), zeros.data(), zeros.data(), wte.data(),
                          (double*)nullptr, N, 0, V, C, Cpu{}, 1.75);
        embedding_backward_weight(dwte.data(), (double*)nullptr, dout.data(), tokens.data(),
                                  zeros.data(), zeros.data(), nullptr, N, 0, V, 1, C, false, Cpu{},
                                  1.75);
        GradientScale scale = {0.25, nullptr, 12, nullptr, nullptr, N == 33}; // both forms
        crossentropy_forward_backward(losses.data(), logits.data(), targets.data(), scale, N, C - 1,
                                      C, Cpu{});

        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<int> t(tokens), z(zeros), goal(targets);
            Array<T> a(wte), d(dout), y(N * C), l(given);
            Array<float> da(V * C), loss(N);
            Array<unsigned char> scratch(embedding_scratch_bytes(N, stream));

            // The device. Errors of dlogits are relative to the gradient's scale.
            embedding_forward(y.data, t.data, z.data, z.data, a.data, (T*)nullptr, N, 0, V, C,
                              stream, 1.75f);
            embedding_backward_weight(da.data, (float*)nullptr, d.data, t.data, z.data, z.data,
                                      scratch.data, N, 0, V, 1, C, false, stream, 1.75f);
            crossentropy_forward_backward(loss.data, l.data, goal.data, scale, N, C - 1, C, stream);
            o.add("out", y, out, tolerance<T>(2), 1);
            o.add("dwte", da, dwte, tolerance<float>(N), double(N));
            o.add("dlogits", l, logits, tolerance<T>(C), 0.25);
        });
    }
}

// Latent attention's heads: wider than a block and narrower; values as wide as keys and narrower.
// The rotary part lies in longer rows.
template <typename T> void latent_heads_kernels(Check& c) {
    for (LatentHeads d : {LatentHeads{3, 12, 6, 4}, {5, 96, 96, 32}, {1, 5, 4, 2}}) {
        size_t N = 4, wide = N * d.NH * d.HS, narrow = N * d.NH * d.kv(), stride = d.rotary + 3;
        CASE(c, "heads of latents %s NH=%zu HS=%zu of %zu", type_word(T()), d.NH, d.HS_v, d.HS);
        auto kv = rounded<T>(normals(c, narrow)), rope = rounded<T>(normals(c, N * stride));
        auto dk = rounded<T>(normals(c, wide)), dv = rounded<T>(normals(c, wide));

        // Want: element by element, by the definition. A key is its plain part and then the token's
        // rotary part, which all heads share; a value is filled up with zeros.
        std::vector<double> k(wide), v(wide), dkv(narrow), drope = rope;
        for (size_t n = 0; n < N; n++)
            for (size_t c = 0; c < d.rotary; c++) drope[n * stride + c] = 0;
        for (size_t head = 0; head < N * d.NH; head++)
            for (size_t c = 0; c < d.HS; c++) {
                size_t n = head / d.NH, at = head * d.HS + c, plain = d.HS - d.rotary;
                const double* from = kv.data() + head * (plain + d.HS_v);
                double* to = dkv.data() + head * (plain + d.HS_v);
                k[at] = c < plain ? from[c] : rope[n * stride + c - plain];
                v[at] = c < d.HS_v ? from[plain + c] : 0;
                (c < plain ? to[c] : drope[n * stride + c - plain]) += dk[at];
                if (c < d.HS_v) to[plain + c] = dv[at];
            }

        // The CPU's version, into buffers of 7s.
        std::vector<double> on_cpu[4] = {k, v, dkv, drope};
        for (auto& x : on_cpu) std::fill(x.begin(), x.end(), 7);
        on_cpu[3] = rope;
        latent_heads_forward(on_cpu[0].data(), on_cpu[1].data(), kv.data(), rope.data(), stride, d,
                             N, Cpu{});
        latent_heads_backward(on_cpu[2].data(), on_cpu[3].data(), stride, dk.data(), dv.data(), d,
                              N, Cpu{});

        // The device, and the CPU's results beside it.
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> a(kv), b(rope), da(dk), db(dv), key(wide), value(wide), both(narrow),
                turned(rope);
            latent_heads_forward(key.data, value.data, a.data, b.data, stride, d, N, stream);
            latent_heads_backward(both.data, turned.data, stride, da.data, db.data, d, N, stream);
            o.add("k", key, k, 0), o.add("v", value, v, 0), o.add("dkv", both, dkv, 0);
            o.add("dk_rope", turned, drope, tolerance<T>(d.NH), double(d.NH));
            const std::vector<double>* want[] = {&k, &v, &dkv, &drope};
            for (int i = 0; i < 4; i++)
                o.add("on the CPU", Array<double>(on_cpu[i]), *want[i], 1e-14, 1);
        });
    }
}

// Attention over a cache of latents: two sequences whose queries stand at different positions. Some
// rows see fewer keys than a block has warps, one query sees none.
struct DecodeCase {
    LatentHeads heads;
    size_t DC, B = 2, Tq, Tk, capacity = Tk + 2;
    std::vector<double> w = {}, q = {}, cache = {}; // (NH kv,DC) (B,Tq,NH,HS) (B,capacity,DC+DR)
    std::vector<int> q_positions = {}, k_positions = {}, doc_start = {};
    size_t width() const { return DC + heads.rotary; }
    size_t rows() const { return B * Tq * heads.NH; }

    // The operands over latents, whose queries have absorbed W_k.
    template <typename T> AttentionOperands<T> operands(const T* qa, const T* keys) const {
        AttentionOperands<T> x = {qa, keys, keys};
        x.q_positions = q_positions.data(), x.k_positions = k_positions.data();
        x.doc_start = doc_start.data();
        x.d = {B, Tq, Tk, heads.NH, 1, width(), heads.NH * width(), width()};
        x.d.HS_v = DC, x.d.k_batch = capacity * width();
        x.scale = acc_t<T>(1 / std::sqrt(double(heads.HS)));
        return x;
    }
    template <typename T> HeadMatrix<T> keys(const T* w) const {
        return {w, heads.NH, heads.kv(), 0, heads.plain(), DC, heads.HS, width()};
    }
    template <typename T> HeadMatrix<T> values(const T* w) const {
        return {w, heads.NH, heads.kv(), heads.plain(), heads.HS_v, DC, heads.HS_v, DC};
    }
};

template <typename T>
DecodeCase decode_case(Check& c, LatentHeads d, size_t DC, size_t Tq, size_t Tk) {
    DecodeCase x = {d, DC, 2, Tq, Tk};
    x.w = rounded<T>(normals(c, d.NH * d.kv() * DC, 0.3));
    x.q = rounded<T>(normals(c, x.rows() * d.HS));
    x.cache = rounded<T>(normals(c, x.B * x.capacity * x.width()));

    // The first sequence's queries are its last tokens; the second has fewer tokens. The last
    // query's document begins behind it.
    for (size_t b = 0; b < x.B; b++)
        for (size_t i = 0; i < Tq; i++) x.q_positions.push_back(int((Tk - Tq) / (b + 1) + i));
    for (size_t k = 0; k < x.B * Tk; k++) x.k_positions.push_back(int(k % Tk));
    x.doc_start.assign(x.B * Tq, 0), x.doc_start.back() = int(Tk);
    return x;
}

// Its outputs (B,Tq,NH,HS_v) by the definition: keys and values by heads, from every latent.
inline std::vector<double> decoded_by_heads(const DecodeCase& x) {
    const LatentHeads& d = x.heads;
    std::vector<double> k(x.B * x.Tk * d.NH * d.HS), v(x.B * x.Tk * d.NH * d.HS_v);
    for (size_t at = 0; at < x.B * x.Tk * d.NH; at++) {
        size_t h = at % d.NH, row = at / d.NH / x.Tk * x.capacity + at / d.NH % x.Tk;
        const double* c = x.cache.data() + row * x.width();
        for (size_t e = 0; e < d.kv(); e++) {
            const double* w = x.w.data() + (h * d.kv() + e) * x.DC;
            double y = std::inner_product(w, w + x.DC, c, 0.0);
            (e < d.plain() ? k[at * d.HS + e] : v[at * d.HS_v + e - d.plain()]) = y;
        }
        std::copy_n(c + x.DC, d.rotary, &k[at * d.HS + d.plain()]);
    }

    AttentionOperands<double> o = x.operands(x.q.data(), k.data());
    o.v = v.data();
    o.d = {x.B, x.Tq, x.Tk, d.NH, d.NH, d.HS, d.NH * d.HS, d.NH * d.HS};
    o.d.HS_v = d.HS_v, o.d.v_stride = d.NH * d.HS_v;
    std::vector<double> out(x.rows() * d.HS_v), lse(x.rows());
    attention_forward_reference(out.data(), lse.data(), o);
    return out;
}

template <typename T> void latent_decode_kernels(Check& c) {
    struct { LatentHeads d; size_t DC, Tq, Tk; } cases[] = {
        {{3, 12, 6, 4}, 10, 1, 21}, {{2, 40, 33, 8}, 129, 3, 5}, {{1, 6, 5, 2}, 513, 2, 40},
        {{1, 6, 5, 2}, 1024, 1, 3}}; // one more than a kernel takes, and the most
    for (auto& [d, DC, Tq, Tk] : cases) {
        CASE(c, "decoding of latents %s NH=%zu DC=%zu Tq=%zu Tk=%zu", type_word(T()), d.NH, DC, Tq,
             Tk);
        DecodeCase x = decode_case<T>(c, d, DC, Tq, Tk);
        size_t N = x.B * Tq, n = x.rows();

        // The CPU's version, all three steps, against the definition.
        std::vector<double> qa(n * x.width()), mean(n * DC), out(n * d.HS_v);
        heads_to_latents(qa.data(), x.q.data(), x.keys(x.w.data()), N, Cpu{});
        for (size_t at = 0; at < n; at++)
            std::copy_n(&x.q[at * d.HS + d.plain()], d.rotary, &qa[at * x.width() + DC]);
        latent_attention_forward(mean.data(), x.operands(qa.data(), x.cache.data()), Cpu{});
        latents_to_heads(out.data(), mean.data(), x.values(x.w.data()), N, Cpu{});
        close(c, "out on the CPU", out, decoded_by_heads(x), 1e-12);

        // Each kernel from inputs that T holds, against the CPU's version of it in double. The
        // products add to their outputs.
        std::vector<double> qt = rounded<T>(qa), mt = rounded<T>(mean);
        std::vector<double> qa_twice = qt, out_twice(n * d.HS_v, 1), mean_t(n * DC);
        HeadMatrix<double> keys = x.keys(x.w.data()), values = x.values(x.w.data());
        keys.accumulate = values.accumulate = true;
        heads_to_latents(qa_twice.data(), x.q.data(), keys, N, Cpu{});
        latents_to_heads(out_twice.data(), mt.data(), values, N, Cpu{});
        latent_attention_forward(mean_t.data(), x.operands(qt.data(), x.cache.data()), Cpu{});
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<T> w(x.w), q(x.q), cache(x.cache), query(qt), to(qt), means(mt), got(n * DC),
                heads(std::vector<double>(n * d.HS_v, 1));
            Array<int> qp(x.q_positions), kp(x.k_positions), start(x.doc_start);
            HeadMatrix<T> k = x.keys<T>(w.data), v = x.values<T>(w.data);
            k.accumulate = v.accumulate = true;

            // Positions lie in the device's memory too.
            AttentionOperands<T> operands = x.operands<T>(query.data, cache.data);
            operands.q_positions = qp.data, operands.k_positions = kp.data;
            operands.doc_start = start.data;
            heads_to_latents(to.data, q.data, k, N, stream);
            latent_attention_forward(got.data, operands, stream);
            latents_to_heads(heads.data, means.data, v, N, stream);
            o.add("queries", to, qa_twice, tolerance<T>(d.plain()), 1);
            o.add("mean", got, mean_t, tolerance<T>(x.width()), 1);
            o.add("out", heads, out_twice, tolerance<T>(DC), 1);
        });
    }
}

inline void add_variant_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        TWO_TYPES("rmsnorm with more", rmsnorm_more_kernels),
        TWO_TYPES("geglu, sum, softcap", gate_and_cap_kernels),
        TWO_TYPES("scalars and gates", scalar_and_gate_kernels),
        TWO_TYPES("heads of latents", latent_heads_kernels),
        TWO_TYPES("decoding of latents", latent_decode_kernels),
        TWO_TYPES("parts and scales", part_and_scale_kernels)});
}
