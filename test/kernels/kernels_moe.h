// kernels_moe.h - rows of the kernel table: mixture of experts, and a product for each expert
#pragma once
#include <thread>
#include "../../llmc/ops/expert_capacity.cuh"
#include "../../llmc/ops/lora_grouped.cuh"
#include "kernel_table.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// the router

// Rows of one warp and of several. Experts: one, fewer than a warp's lanes, as many, and several
// times as many and a rest.
struct RouterCase {
    size_t sequences, T, E, K;
};
inline std::vector<RouterCase> router_cases() {
    if (SMALL) return {{1, 3, 5, 2}, {2, 3, 40, 3}};
    return {{1, 1, 1, 1}, {2, 3, 5, 2}, {3, 7, 32, 4}, {1, 5, 70, 8}, {2, 4, 33, 32}};
}

// Scores that are far apart, shuffled in each row, so that float and double choose alike. Row 1
// has equal scores only.
inline std::vector<double> routed_logits(Check& c, size_t N, size_t E) {
    std::vector<double> logits(N * E), row(E);
    for (size_t n = 0; n < N; n++) {
        for (size_t e = 0; e < E; e++) row[e] = n == 1 ? 0.5 : 0.0625 * double(e) - 1;
        std::shuffle(row.begin(), row.end(), c.random);
        std::copy(row.begin(), row.end(), logits.begin() + long(n * E));
    }
    return logits;
}

// The choice, the gates, the counts and the scores' gradients of every kind of router.
template <typename T> void router_kernels(Check& c) {
    for (Router router :
         {Router::SOFTMAX, Router::RENORMALISED, Router::SIGMOID, Router::SIGMOID_ALONE})
        for (RouterCase s : router_cases()) {
            size_t N = s.sequences * s.T, E = s.E, K = s.K;
            CASE(c, "router %d %s N=%zu E=%zu K=%zu", int(router), type_word(T()), N, E, K);
            auto l = routed_logits(c, N, E), d = normals(c, N * K);

            // The routers by sigmoid have a bias, which changes the choice and no gate.
            bool biased = is_sigmoid(router);
            std::vector<double> b(E);
            for (size_t e = 0; e < E; e++) b[e] = 0.5 * double(e % 3);
            std::vector<float> bias = as<float>(b);

            // Want: the CPU in double.
            Routing r = {router, E, K, 1.5f, biased ? bias.data() : nullptr};
            r.groups = E == 32 ? 8 : E == 70 ? 7 : E == 40 ? 5 : 1; // never of 32, a warp's stride
            r.kept_groups = r.groups > 1 ? 2 : 1;

            // Forward and counts by sequence, the counts of all sequences, and backward.
            std::vector<int> ids(N * K), counts(s.sequences * E);
            std::vector<double> gates(N * K), dlogits(N * E);
            auto df = rounded<float>(d);
            route_forward(ids.data(), gates.data(), l.data(), r, N, Cpu{});
            count_slots(counts.data(), ids.data(), s.sequences, s.T * K, E, false, Cpu{});
            std::vector<int> of_all(E);
            count_slots(of_all.data(), ids.data(), 1, N * K, E, false, Cpu{});
            BalanceTerms terms = {0.5, 0.25, counts.data(), s.T};
            route_backward(dlogits.data(), df.data(), l.data(), ids.data(), r, terms, N, Cpu{});

            // The device: the counts of all sequences are added one sequence at a time.
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<float> logits(l), dgates(df), g(N * K), on_device(b);
                Array<int> chosen(N * K), of_sequences(s.sequences * E), all(E);
                Array<T> dl(N * E);
                Routing here = r;
                if (biased) here.bias = on_device.data;
                BalanceTerms t = terms;
                t.counts = of_sequences.data;
                route_forward(chosen.data, g.data, logits.data, here, N, stream);
                count_slots(of_sequences.data, chosen.data, s.sequences, s.T * K, E, false, stream);
                for (size_t i = 0; i < s.sequences; i++)
                    count_slots(all.data, chosen.data + i * s.T * K, 1, s.T * K, E, i > 0, stream);
                route_backward(dl.data, dgates.data, logits.data, chosen.data, here, t, N, stream);

                auto whole = [](const std::vector<int>& x) {
                    return std::vector<double>(x.begin(), x.end());
                };
                o.add("ids", chosen, whole(ids), 0);
                o.add("counts", of_sequences, whole(counts), 0);
                o.add("counts of all", all, whole(of_all), 0);
                o.add("gates", g, gates, tolerance<float>(E));
                o.add("dlogits", dl, dlogits, tolerance<T>(E + K), 1);
            });
        }
}

// ----------------------------------------------------------------------------
// slots: one, less than a block, several blocks and a bit; experts that nobody chooses

// Sort slots by their experts, and select the slots of a range of experts.
inline void sort_kernels(Check& c) {
    struct Case {
        size_t M, E;
        bool all_one; // every slot has the last expert
    };
    // Fewer slots than experts; more groups of slots than a warp sums at once; larger groups.
    std::vector<Case> cases = {{1, 1, false}, {7, 40, false}, {256, 3, true}, {700, 6, false},
                               {34900, 5, false}, {4000, 1500, false}};
    if (SMALL) cases = {{7, 3, false}, {300, 3, true}};
    for (Case s : cases) {
        CASE(c, "sort M=%zu E=%zu", s.M, s.E);
        std::vector<int> ids = integers(c, s.M, 0, int(s.E) - 1);
        for (int& id : ids) id = s.all_one ? int(s.E) - 1 : id / 2 * 2 % int(s.E);

        // Want: the CPU's integers.
        std::vector<int> counts(s.E), starts(s.E + 1), row_of(s.M), slot_of(s.M);
        Slots want = {counts.data(), starts.data(), row_of.data(), slot_of.data()};
        sort_slots(want, ids.data(), s.M, s.E, Cpu{});
        std::vector<int> own(s.M);
        own_experts(own.data(), ids.data(), s.M, s.E / 3, s.E / 2, Cpu{});

        // Tokens with one choice each: by the rank of the choice, and those of a rank by owner.
        size_t owners = s.M % 7 ? 1 : 7, N = s.M / owners;
        TokenLists by_rank = {2, s.M, 1, s.E / 2 + 1, 0};
        TokenLists by_owner = {owners, N, 1, s.E / 2 + 1, N, 1};
        std::vector<int> lists(2 * s.M), these(s.M), lengths(2), these_lengths(owners);
        list_tokens(lists.data(), lengths.data(), ids.data(), by_rank, Cpu{});
        list_tokens(these.data(), these_lengths.data(), ids.data(), by_owner, Cpu{});

        // The device.
        every_order(c, [&](Outputs& o) {
            Array<int> i(ids), n(s.E), first(s.E + 1), row(s.M), slot(s.M);
            Slots got = {n.data, first.data, row.data, slot.data};
            sort_slots(got, i.data, s.M, s.E, cudaStream_t{});
            Array<int> mine(s.M);
            own_experts(mine.data, i.data, s.M, s.E / 3, s.E / 2, cudaStream_t{});
            auto whole = [](const std::vector<int>& x) {
                return std::vector<double>(x.begin(), x.end());
            };
            o.add("own", mine, whole(own), 0);

            // Places behind a list's end are not written.
            Array<int> l(std::vector<int>(2 * s.M)), t(std::vector<int>(s.M)), nl(2), nt(owners);
            list_tokens(l.data, nl.data, i.data, by_rank, cudaStream_t{});
            list_tokens(t.data, nt.data, i.data, by_owner, cudaStream_t{});
            o.add("tokens by rank", l, whole(lists), 0);
            o.add("lengths by rank", nl, whole(lengths), 0);
            o.add("tokens by owner", t, whole(these), 0);
            o.add("lengths by owner", nt, whole(these_lengths), 0);
            o.add("counts", n, whole(counts), 0);
            o.add("starts", first, whole(starts), 0);
            o.add("row_of", row, whole(row_of), 0);
            o.add("slot_of", slot, whole(slot_of), 0);
        });
    }
}

// Sequences shorter than a block and longer, whose last slots fill no block; experts that overflow
// in the middle of a block, by one slot or many, and some that nobody chooses.
inline void capacity_kernels(Check& c) {
    struct Case {
        size_t sequences, length, E, capacity;
    };
    std::vector<Case> cases = {{1, 1, 1, 1}, {1, 3, 1, 2}, {3, 7, 4, 2}, {2, 256, 3, 100},
                               {2, 700, 6, 90}};
    if (SMALL) cases = {{3, 7, 4, 2}, {2, 300, 3, 90}};
    for (Case s : cases) {
        size_t M = s.sequences * s.length;
        CASE(c, "capacity %zu x %zu, E=%zu: %zu", s.sequences, s.length, s.E, s.capacity);
        std::vector<int> choices = integers(c, M, 0, int(s.E) - 1);
        for (int& id : choices) id = id / 2 * 2;

        // Want: the CPU's integers, added to a count of ones.
        std::vector<int> ids(M), dropped(s.E, 1);
        drop_over_capacity(ids.data(), dropped.data(), choices.data(), M, s.length, s.E, s.capacity,
                           Cpu{});

        // The device, with a count and without.
        every_order(c, [&](Outputs& o) {
            Array<int> i(choices), n(std::vector<int>(s.E, 1)), kept(M), uncounted(M);
            drop_over_capacity(kept.data, n.data, i.data, M, s.length, s.E, s.capacity,
                               cudaStream_t{});
            drop_over_capacity(uncounted.data, (int*)nullptr, i.data, M, s.length, s.E, s.capacity,
                               cudaStream_t{});
            auto whole = [](const std::vector<int>& x) {
                return std::vector<double>(x.begin(), x.end());
            };
            o.add("ids", kept, whole(ids), 0);
            o.add("ids without a count", uncounted, whole(ids), 0);
            o.add("dropped", n, whole(dropped), 0);
        });
    }
}

// Gather, gate and combine. Rows of one element, unaligned rows, rows of several warps; all experts
// here, some of them, none.
template <typename T> void expert_kernels(Check& c) {
    struct Case {
        size_t N, K, C, shift, own = 5;
    };
    std::vector<Case> cases = {{1, 1, 1, 0}, {5, 2, 37, 0}, {9, 3, 256, 0}, {4, 2, 64, 1},
                               {6, 1, 40, 0}, {2, 4, 2056, 0}, {9, 3, 256, 0, 3}, {5, 2, 37, 0, 0}};
    if (SMALL) cases = {{3, 2, 37, 0}, {3, 1, 40, 0}, {2, 2, 64, 1, 2}};
    for (Case s : cases) {
        size_t M = s.N * s.K, C = s.C, E = 5;
        CASE(c, "experts %s N=%zu K=%zu C=%zu shift=%zu", type_word(T()), s.N, s.K, C, s.shift);
        std::vector<int> ids = integers(c, M, 0, int(E) - 1), counts(E), starts(E + 1), rows(M),
                         slots(M);
        Slots sorted = {counts.data(), starts.data(), rows.data(), slots.data()};
        sort_slots(sorted, ids.data(), M, E, Cpu{});
        int end = starts[s.own]; // slots of the experts from s.own on have no row here
        auto x = rounded<T>(normals(c, s.N * C)), u = rounded<T>(normals(c, M * C));
        auto d = rounded<T>(normals(c, M * C)), y = rounded<T>(normals(c, M * C));
        auto w = rounded<float>(normals(c, M));

        // Want: the CPU in double.
        std::vector<double> xs(M * C), h(M * C), out(s.N * C), alone(s.N * C), dgate = d, dup = u;
        std::vector<double> dw(M), untouched(M * C);
        const std::vector<double> begun = rounded<T>(normals(c, s.N * C)); // what rows lie on
        const double* nothing = nullptr;

        gather_slots(xs.data(), x.data(), slots.data(), &end, M, s.K, C, Cpu{});
        combine_slots(out.data(), x.data(), y.data(), rows.data(), &end, s.N, s.K, C, Cpu{});
        combine_slots(alone.data(), nothing, y.data(), rows.data(), &end, s.N, s.K, C, Cpu{});

        // Rows of a list go to their tokens.
        std::vector<int> reversed(s.N);
        for (size_t i = 0; i < s.N; i++) reversed[i] = int(s.N - 1 - i);
        int listed = std::min(end, int(s.N));
        std::vector<double> put = begun;
        scatter_slots(put.data(), x.data(), reversed.data(), &listed, s.N, 1, C, Cpu{});

        // A shared expert has all rows, each in its own place, and needs no list of slots.
        bool shared = s.K == 1 && s.own == E;
        const int* slot = shared ? nullptr : slots.data();
        const int* count = shared ? nullptr : &end;
        gated_swiglu_forward(h.data(), y.data(), u.data(), w.data(), slot, count, M, C, Cpu{});
        gated_swiglu_backward(dgate.data(), dup.data(), dw.data(), d.data(), y.data(), u.data(),
                              w.data(), slot, count, M, C, Cpu{});

        // The device.
        every_order(c, [&](Outputs& o) {
            cudaStream_t stream = {};
            Array<int> row_of(rows), slot_of(slots), last(std::vector<int>{end});
            Array<float> gates(w), dgates(M);
            Array<T> in(x, s.shift), up(u, s.shift), dh(d, s.shift), made(y, s.shift);
            Array<T> gathered(untouched, s.shift), gated(untouched, s.shift);
            Array<T> sum(s.N * C, s.shift), no_residual(s.N * C, s.shift);
            const T* none = nullptr;

            // Gather, and combine with a residual and without.
            gather_slots(gathered.data, in.data, slot_of.data, last.data, M, s.K, C, stream);
            combine_slots(sum.data, in.data, made.data, row_of.data, last.data, s.N, s.K, C, stream);
            combine_slots(no_residual.data, none, made.data, row_of.data, last.data, s.N, s.K, C,
                          stream);

            // Put rows back in reverse order. Other tokens' rows stay.
            Array<int> back(reversed), few(std::vector<int>{listed});
            Array<T> placed(begun, s.shift);
            scatter_slots(placed.data, in.data, back.data, few.data, s.N, 1, C, stream);
            o.add("placed", placed, put, 0);

            // Gate forward and, in place as a block calls it, backward.
            const int* slot_here = shared ? nullptr : slot_of.data;
            const int* count_here = shared ? nullptr : last.data;
            gated_swiglu_forward(gated.data, made.data, up.data, gates.data, slot_here, count_here,
                                 M, C, stream);
            gated_swiglu_backward(dh.data, up.data, dgates.data, dh.data, made.data, up.data,
                                  gates.data, slot_here, count_here, M, C, stream);

            o.add("xs", gathered, xs, 0);
            o.add("out", sum, out, tolerance<T>(s.K + 1), 1);
            o.add("out without residual", no_residual, alone, tolerance<T>(s.K), 1);
            o.add("h", gated, h, tolerance<T>(4), 1);
            o.add("dgate", dh, dgate, tolerance<T>(8), 1);
            o.add("dup", up, dup, tolerance<T>(4), 1);
            o.add("dgates", dgates, dw, tolerance<float>(C), std::sqrt(double(C)));
        });
    }
}

// ----------------------------------------------------------------------------
// a product for each expert: groups without rows, of one row, of a tile and a bit

// The three products of groups, with = and with +=, against the CPU in double.
template <typename T> void grouped_kernels(Check& c) {
    struct Case {
        std::vector<int> starts;
        size_t OC, IC;
    };
    std::vector<Case> cases = {{{0, 1}, 1, 1}, {{0, 0, 3, 3, 4}, 9, 17},
                               {{0, 0, 65, 66, 66, 90}, 70, 20}, {{0, 40, 40}, 24, 130}};

    // Multiples of 8 go to tensor cores: whole tiles and a rest, sums of one to five stages.
    cases.push_back({{0, 0, 1, 130, 130, 147, 147}, 136, 40});
    cases.push_back({{0, 0, 72, 72}, 16, 264});

    // One expert, as many as a warp has lanes, and one more.
    cases.push_back({{0, 9}, 16, 8});
    for (int experts : {32, 33}) {
        std::vector<int> many = {0};
        // Each 16th has rows, the last one too.
        for (int e = 1; e <= experts; e++)
            many.push_back(many.back() + (e % 16 == experts % 16 ? 1 + e % 3 : 0));
        cases.push_back({many, 8, 16});
    }

    // Rows by chance, some experts without; on Hopper two bands of tiles.
    std::vector<int> drawn = {0};
    for (int e = 0; e < 4; e++)
        drawn.push_back(drawn.back() + std::max(0, int(c.random() % 340) - 60));
    cases.push_back({drawn, 72, 264});
    cases.push_back({{0, 8}, 1032, 264});

    if (SMALL) cases = {{{0, 0, 3, 3, 4}, 9, 17}, {{0, 0, 1, 130}, 16, 136}};
    for (const Case& s : cases)
        for (bool accumulate : {false, true}) {
            if (accumulate && s.OC > 1000) continue; // it takes long
            size_t E = s.starts.size() - 1, M = size_t(s.starts.back()), OC = s.OC, IC = s.IC;
            CASE(c, "grouped %s E=%zu M=%zu OC=%zu IC=%zu", type_word(T()), E, M, OC, IC);
            auto x = rounded<T>(normals(c, M * IC)), d = rounded<T>(normals(c, M * OC));
            auto w = rounded<T>(normals(c, E * OC * IC));

            // Behind the last expert there is room for rows, and nothing in it.
            x.resize((M + 3) * IC, NAN);
            d.resize((M + 3) * OC, NAN);

            // Want: the CPU in double.
            Groups g = {s.starts.data(), E, OC, IC, M};
            std::vector<double> out(M * OC, 3), dinp(M * IC, 3), dw(E * OC * IC, 3);
            std::vector<unsigned char> scratch(grouped_scratch_bytes<double>(g, Cpu{}));
            Blas blas;
            blas_scratch(blas, scratch.data(), scratch.size());
            grouped_forward(out.data(), x.data(), w.data(), g, accumulate, blas, Cpu{});
            grouped_backward_input(dinp.data(), d.data(), w.data(), g, accumulate, blas, Cpu{});
            grouped_backward_weight(dw.data(), d.data(), x.data(), g, accumulate, blas, Cpu{});

            // The device; outputs and gradients start as 3.
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<int> starts(s.starts);
                Array<T> inp(x), dout(d), weight(w);
                Array<T> y(std::vector<double>(M * OC, 3)), dx(std::vector<double>(M * IC, 3));
                Array<float> dweight(std::vector<double>(E * OC * IC, 3));
                Groups here = {starts.data, E, OC, IC, M + 3};
                grouped_forward(y.data, inp.data, weight.data, here, accumulate, blas, stream);
                grouped_backward_input(dx.data, dout.data, weight.data, here, accumulate, blas,
                                       stream);
                grouped_backward_weight(dweight.data, dout.data, inp.data, here, accumulate, blas,
                                        stream);

                o.add("out", y, out, tolerance<T>(IC), 1);
                o.add("dinp", dx, dinp, tolerance<T>(OC), 1);
                o.add("dw", dweight, dw, tolerance<float>(M), 1);
            });
        }
}

// Rows of NaN, an expert's own, reach no other expert: every other run has them, with the same bits.
template <typename T> void grouped_nan_kernels(Check& c) {
    const size_t E = 3, M = 140, OC = 16, IC = 24, first = 70, end = 75;
    CASE(c, "grouped NaN %s", type_word(T()));
    auto x = rounded<T>(normals(c, M * IC)), d = rounded<T>(normals(c, M * OC));
    auto w = rounded<T>(normals(c, E * OC * IC)), nan_x = x, nan_d = d;
    std::fill(nan_x.begin() + first * IC, nan_x.begin() + end * IC, NAN);
    std::fill(nan_d.begin() + first * OC, nan_d.begin() + end * OC, NAN);

    int run = 0;
    every_order(c, [&](Outputs& o) {
        bool has_nan = run++ % 2;
        Array<int> starts(std::vector<int>{0, int(first), int(end), int(M)});
        Array<T> inp(has_nan ? nan_x : x), dout(has_nan ? nan_d : d), weight(w);
        Array<T> y(M * OC), dx(M * IC);
        Array<float> dw(E * OC * IC);
        Groups g = {starts.data, E, OC, IC, M};
        Blas blas;

        grouped_forward(y.data, inp.data, weight.data, g, false, blas, cudaStream_t{});
        grouped_backward_input(dx.data, dout.data, weight.data, g, false, blas, cudaStream_t{});
        grouped_backward_weight(dw.data, dout.data, inp.data, g, false, blas, cudaStream_t{});
        o.same("out before", y.data, first * OC);
        o.same("out behind", y.data + end * OC, (M - end) * OC);
        o.same("dinp before", dx.data, first * IC);
        o.same("dinp behind", dx.data + end * IC, (M - end) * IC);
        o.same("dw before", dw.data, OC * IC);
        o.same("dw behind", dw.data + 2 * OC * IC, OC * IC);
    });
}

#if defined(EMULATE)
// The same on a Hopper of three processors. A thread remembers the GPU that it asked first, so the
// rows have one of their own.
template <typename T> void grouped_hopper_kernels(Check& c) {
    emulator::gpu = {9, 0, emulator::HOPPER.block_shared_bytes, 3};
    std::thread([&] {
        grouped_kernels<T>(c);
        grouped_nan_kernels<T>(c);
        expect(c, emulator::launches[(const void*)expert_wgmma_kernel<true, true, T, T>] > 0,
               "Hopper's kernel does not run");
    }).join();
    emulator::gpu = emulator::AMPERE;
}
#endif

// Adapters beside a stack of experts, on tensor cores where the rank is a multiple of 8: experts
// with no row, one row, and more than a tile. Want: the CPU in double.
template <typename T> void lora_grouped_kernels(Check& c) {
    const std::vector<int> rows = SMALL ? std::vector<int>{0, 0, 3, 3, 4}
                                        : std::vector<int>{0, 0, 1, 130, 130, 147, 147};
    for (size_t r : {size_t(5), size_t(8)})
        for (bool accumulate : {false, true}) {
            size_t E = rows.size() - 1, M = size_t(rows.back()), OC = r == 8 ? 24 : 9, IC = 40;
            CASE(c, "lora grouped %s r=%zu accumulate=%d", type_word(T()), r, accumulate);
            auto x = rounded<T>(normals(c, M * IC)), d = rounded<T>(normals(c, M * OC));
            x.resize((M + 3) * IC);
            d.resize((M + 3) * OC);
            auto a = rounded<T>(normals(c, E * r * IC)), b = rounded<T>(normals(c, E * OC * r));

            Groups g = {rows.data(), E, OC, IC, M};
            std::vector<double> out(M * OC, 3), dinp(M * IC, 3), da(a.size(), 3), db(b.size(), 3);
            std::vector<double> room(M * r);
            std::vector<unsigned char> scratch(lora_grouped_scratch_bytes<double>(g, r, Cpu{}));
            Blas blas;
            blas_scratch(blas, scratch.data(), scratch.size());
            Lora l = {a.data(), b.data(), da.data(), db.data(), r, 0.75};
            lora_grouped_forward(out.data(), x.data(), l, room.data(), g, blas, Cpu{});
            lora_grouped_backward_input(dinp.data(), d.data(), l, room.data(), g, blas, Cpu{});
            lora_grouped_backward_weight(l, d.data(), x.data(), room.data(), g, accumulate, blas,
                                         Cpu{});

            // The device. Room for rows is larger than the rows that there are.
            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<int> starts(rows);
                Array<T> inp(x), dout(d), A(a), B(b), mid((M + 3) * r);
                Array<T> y(std::vector<double>(M * OC, 3)), dx(std::vector<double>(M * IC, 3));
                Array<float> dA(std::vector<double>(a.size(), 3));
                Array<float> dB(std::vector<double>(b.size(), 3));
                Groups here = {starts.data, E, OC, IC, M + 3};
                Lora on = {A.data, B.data, dA.data, dB.data, r, 0.75};
                lora_grouped_forward(y.data, inp.data, on, mid.data, here, blas, stream);
                lora_grouped_backward_input(dx.data, dout.data, on, mid.data, here, blas, stream);
                lora_grouped_backward_weight(on, dout.data, inp.data, mid.data, here, accumulate,
                                             blas, stream);

                // Rows of r columns are rounded twice; sums of gradients have M of them.
                double terms = double(r) * std::sqrt(double(IC));
                double sums = std::sqrt(double(M * IC)) + 3;
                o.add("out", y, out, tolerance<T>(IC + r, 3), terms);
                o.add("dinp", dx, dinp, tolerance<T>(OC + r, 3), terms);
                o.add("dA", dA, da, tolerance<T>(M + OC, 2), sums);
                o.add("dB", dB, db, tolerance<T>(M + IC, 2), sums);
            });
        }
}

inline void add_moe_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("router", router_kernels),
        {"sort slots", sort_kernels},
        {"capacity", capacity_kernels},
        THREE_TYPES("experts", expert_kernels),
        THREE_TYPES("grouped matmul", grouped_kernels),
        THREE_TYPES("grouped NaN", grouped_nan_kernels),
#if defined(EMULATE)
        {"grouped on Hopper bf16", grouped_hopper_kernels<bf16>},
        {"grouped on Hopper fp16", grouped_hopper_kernels<fp16>},
#endif
        THREE_TYPES("lora grouped", lora_grouped_kernels)});
}
