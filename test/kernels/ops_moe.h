// ops_moe.h - rows of the op table: mixture of experts, and a product for each expert
#pragma once
#include <numeric>
#include "../../llmc/ops/expert_capacity.cuh"
#include "../../llmc/ops/lora_grouped.cuh"
#include "ops_products.h"
#include "ops_simple.h"

using namespace llmc;

constexpr Router ALL_ROUTERS[] = {Router::SOFTMAX, Router::RENORMALISED, Router::SIGMOID,
                                  Router::SIGMOID_ALONE};

// ----------------------------------------------------------------------------
// the router

// Scores that are far apart, in a random order, so that float and double choose the same experts.
inline Doubles apart(Check& c, size_t N, size_t E) {
    Doubles logits(N * E), row(E);
    for (size_t n = 0; n < N; n++) {
        for (size_t e = 0; e < E; e++) row[e] = 0.25 * double(e) - 1;
        std::shuffle(row.begin(), row.end(), c.random);
        std::copy(row.begin(), row.end(), logits.begin() + long(n * E));
    }
    return logits;
}

// Gates by their definition, from the scores of all experts.
inline Doubles gates_by_definition(const Doubles& l, const std::vector<int>& ids, const Routing& r,
                                   size_t N) {
    Doubles gates;
    for (size_t n = 0; n < N; n++) {
        // Score every expert.
        Doubles s(r.E);
        double all = 0, chosen = 0;
        for (size_t e = 0; e < r.E; e++) {
            double x = l[n * r.E + e];
            s[e] = is_sigmoid(r.router) ? 1 / (1 + std::exp(-x)) : std::exp(x);
            all += s[e];
        }

        // Divide the chosen scores by the sum of all scores, of the chosen ones, or by 1.
        for (size_t j = 0; j < r.K; j++) chosen += s[size_t(ids[n * r.K + j])];
        for (size_t j = 0; j < r.K; j++) {
            double sum = r.router == Router::SOFTMAX ? all : chosen;
            if (r.router == Router::SIGMOID_ALONE) sum = 1;
            gates.push_back(r.scale * s[size_t(ids[n * r.K + j])] / sum);
        }
    }
    return gates;
}

// The K best experts of each row by a stable sort, which puts the lower of two equal experts first.
inline std::vector<int> best_of(const Doubles& values, size_t N, size_t E, size_t K) {
    std::vector<int> ids;
    for (size_t n = 0; n < N; n++) {
        std::vector<int> order(E);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
            return values[n * E + size_t(a)] > values[n * E + size_t(b)];
        });
        std::sort(order.begin(), order.begin() + long(K));
        ids.insert(ids.end(), order.begin(), order.begin() + long(K));
    }
    return ids;
}

// The choice of experts and their gates, for every kind of router.
inline void router_test(Check& c) {
    for (Router router : ALL_ROUTERS) {
        size_t N = odd(c, 1, 30), E = odd(c, 2, 40), K = odd(c, 1, std::min(E, size_t(8)));
        Doubles l = apart(c, N, E), bias = rounded<float>(normals(c, E, 3));
        std::vector<float> lf = as<float>(l), bf = as<float>(bias);
        bool biased = is_sigmoid(router);
        Routing r = {router, E, K, 1.5f, biased ? bf.data() : nullptr};

        // The choice is that of a stable sort. A bias changes the choice and no gate.
        Doubles values = l;
        for (size_t i = 0; i < N * E && biased; i++)
            values[i] = 1 / (1 + std::exp(-l[i])) + bias[i % E];
        std::vector<int> want = best_of(values, N, E, K), ids(N * K), idf(N * K);
        Doubles gates(N * K);
        std::vector<float> gf(N * K);

        // Float and double must choose the same.
        route_forward(ids.data(), gates.data(), l.data(), r, N, CPU);
        route_forward(idf.data(), gf.data(), lf.data(), r, N, CPU);
        expect(c, ids == want, "the choice is another one than a stable sort's");
        expect(c, idf == want, "float chooses otherwise");
        close(c, "gates", gates, gates_by_definition(l, want, r, N), 1e-13);
        close(c, "gates float", gf, gates, tolerance<float>(E));

        // Groups: only experts of the best groups may be chosen. A group is as good as its best
        // expert or, with sigmoids, as the sum of its two best.
        size_t groups = odd(c, 2, 5), each = odd(c, 2, 6), all = groups * each;
        size_t kept = odd(c, 1, groups - 1), some_K = odd(c, 1, kept * each);
        Doubles x = apart(c, N, all), of_groups(N * groups), left(N * all, -INFINITY);
        Routing limited = {router, all, some_K, 1, nullptr, groups, kept};
        for (size_t i = 0; i < N * groups; i++) {
            Doubles row(x.begin() + long(i * each), x.begin() + long((i + 1) * each));
            for (double& v : row) v = biased ? 1 / (1 + std::exp(-v)) : v;
            std::sort(row.rbegin(), row.rend());
            of_groups[i] = biased ? row[0] + row[1] : row[0];
        }
        std::vector<int> best = best_of(of_groups, N, groups, kept);
        for (size_t i = 0; i < N * kept; i++)
            for (size_t e = 0; e < each; e++) {
                size_t at = i / kept * all + size_t(best[i]) * each + e;
                left[at] = x[at];
            }

        std::vector<int> limited_ids(N * some_K);
        Doubles limited_gates(N * some_K);
        route_forward(limited_ids.data(), limited_gates.data(), x.data(), limited, N, CPU);
        expect(c, limited_ids == best_of(left, N, all, some_K),
               "groups are other ones than a sort's");

        // Equal scores go to the lower expert, and NaN comes last: ids are valid even
        // if all scores are NaN.
        Doubles ties(2 * E, 0.5);
        ties[0] = NAN;
        std::fill(ties.begin() + long(E), ties.end(), NAN);
        Routing some = {router, E, E / 2};
        std::vector<int> tied(2 * some.K);
        gates.resize(tied.size());
        route_forward(tied.data(), gates.data(), ties.data(), some, 2, CPU);
        for (size_t j = 0; j < some.K; j++) {
            expect(c, tied[j] == int(j + 1), "of equals another one");
            expect(c, tied[some.K + j] == int(j), "a row of NaN has no experts");
        }
    }
}

// The loss of gates, plus the two balance terms by their definitions (arXiv:2412.19437 eq. 17 to
// 20; arXiv:2202.08906 eq. 5) for a global batch of `sequences`.
struct RouterLoss {
    Routing r;
    size_t N, T, sequences;
    double alpha, beta;
    Doubles G; // (N,K)

    double operator()(const Doubles& l) const {
        std::vector<int> ids(N * r.K);
        Doubles gates(N * r.K);
        route_forward(ids.data(), gates.data(), l.data(), r, N, CPU);
        double loss = dot(gates, G);

        // A sequence: f counts the choices of each expert, P is its mean share of the scores.
        for (size_t first = 0; first < N; first += T) {
            Doubles f(r.E), P(r.E);
            for (size_t n = first; n < first + T; n++) {
                Doubles s(r.E);
                double all = 0, exps = 0;
                for (size_t e = 0; e < r.E; e++) {
                    double x = l[n * r.E + e];
                    s[e] = is_sigmoid(r.router) ? 1 / (1 + std::exp(-x)) : std::exp(x);
                    all += s[e];
                    exps += std::exp(x);
                }

                for (size_t e = 0; e < r.E; e++) P[e] += s[e] / all / double(T);
                for (size_t j = 0; j < r.K; j++)
                    f[size_t(ids[n * r.K + j])] += double(r.E) / double(r.K * T);
                loss += beta / double(sequences * T) * std::log(exps) * std::log(exps);
            }
            loss += alpha / double(sequences) * dot(f, P);
        }
        return loss;
    }
};

// Gradients of the gates alone, with either balance term, and with both.
inline void router_grad(Check& c) {
    for (Router router : ALL_ROUTERS)
        for (auto [alpha, beta] : {std::pair(0., 0.), {3., 0.}, {0., 2.}, {1., 1.}}) {
            size_t T = 3, N = 2 * T, E = 7, K = 3, sequences = 5;
            Doubles l = apart(c, N, E), d(N * E), gates(N * K);
            Routing r = {router, E, K, 1.5f};
            RouterLoss loss = {r, N, T, sequences, alpha, beta, normals(c, N * K)};
            std::vector<int> ids(N * K), counts(2 * E);

            // Route, count, and go back; compare with finite differences of the loss.
            route_forward(ids.data(), gates.data(), l.data(), r, N, CPU);
            count_slots(counts.data(), ids.data(), 2, T * K, E, false, CPU);
            double tokens = double(sequences * T);
            BalanceTerms b = {alpha / tokens, 2 * beta / tokens, counts.data(), T};
            route_backward(d.data(), loss.G.data(), l.data(), ids.data(), r, b, N, CPU);
            gradient(c, "logits", [&] { return loss(l); }, l, d);

            // The loss scale multiplies the balance terms. The gates' gradients carry it already.
            float scale = 4;
            b.loss_scale = &scale;
            Doubles scaled(N * E), G = loss.G;
            for (double& g : G) g *= scale;
            route_backward(scaled.data(), G.data(), l.data(), ids.data(), r, b, N, CPU);
            for (double& x : scaled) x /= scale;
            close(c, "scaled", scaled, d, 1e-14);
        }
}

// ----------------------------------------------------------------------------
// slots

// The experts that slots choose. kind 0: all choose the last. 1: nobody chooses an odd one. 2: any.
inline std::vector<int> slots_of_case(Check& c, size_t M, size_t E, int kind) {
    if (kind == 0) return std::vector<int>(M, int(E) - 1);
    std::vector<int> ids = integers(c, M, 0, int(E) - 1);
    for (int& id : ids)
        if (kind == 1) id = id / 2 * 2 % int(E);
    return ids;
}

// Slots sorted by their experts, in outputs that start as -1.
struct SortedSlots {
    std::vector<int> counts, starts, row_of, slot_of;
    Slots s;
    SortedSlots(const std::vector<int>& ids, size_t E)
        : counts(E, -1), starts(E + 1, -1), row_of(ids.size(), -1), slot_of(ids.size(), -1) {
        s = {counts.data(), starts.data(), row_of.data(), slot_of.data()};
        sort_slots(s, ids.data(), ids.size(), E, CPU);
    }
};

inline void slots_test(Check& c) {
    for (int kind : {0, 1, 2})
        for (size_t M : {size_t(1), odd(c, 2, 700)}) {
            size_t E = odd(c, 1, 50);
            std::vector<int> ids = slots_of_case(c, M, E, kind), order(M);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
                return ids[size_t(a)] < ids[size_t(b)];
            });

            // The sort is stable, row_of is its inverse, and counts and starts agree with the ids.
            SortedSlots s(ids, E);
            expect(c, s.slot_of == order, "another order than a stable sort's");
            for (size_t i = 0; i < M; i++)
                expect(c, s.slot_of[size_t(s.row_of[i])] == int(i), "row_of is no inverse");
            for (size_t e = 0; e < E; e++) {
                int count = int(std::count(ids.begin(), ids.end(), int(e)));
                bool good = s.counts[e] == count && s.starts[e + 1] - s.starts[e] == count;
                expect(c, good && s.starts[0] == 0, "an expert has another number of rows");
            }
        }
}

// ----------------------------------------------------------------------------
// capacity

// K different experts for each token, in ascending order: any K of E, or always the first.
inline std::vector<int> token_choices(Check& c, size_t tokens, size_t E, size_t K, bool first) {
    std::vector<int> ids, order(E);
    std::iota(order.begin(), order.end(), 0);
    for (size_t n = 0; n < tokens; n++) {
        if (!first) std::shuffle(order.begin(), order.end(), c.random);
        std::sort(order.begin(), order.begin() + long(K));
        ids.insert(ids.end(), order.begin(), order.begin() + long(K));
    }
    return ids;
}

// Which slots are dropped, against a count of earlier slots for each slot; and how large a capacity
// is, against whole numbers.
inline void capacity_test(Check& c) {
    for (bool first : {false, true}) {
        size_t sequences = odd(c, 1, 4), T = odd(c, 1, 40), E = odd(c, 1, 12);
        size_t K = odd(c, 1, E), room = odd(c, 1, T), M = sequences * T * K;
        std::vector<int> choices = token_choices(c, sequences * T, E, K, first), ids(M, -1);

        // A slot is dropped if earlier slots of its sequence have filled its expert.
        std::vector<int> want = choices, lost(E, 5), dropped(E, 5);
        for (size_t i = 0; i < M; i++) {
            auto start = choices.begin() + long(i / (T * K) * (T * K));
            auto earlier = std::count(start, choices.begin() + long(i), choices[i]);
            if (size_t(earlier) < room) continue;
            want[i] = int(E);
            lost[size_t(choices[i])]++;
        }
        drop_over_capacity(ids.data(), dropped.data(), choices.data(), M, T * K, E, room, CPU);
        expect(c, ids == want, "other slots are dropped");
        expect(c, dropped == lost, "another number of slots is dropped");

        // Where all choose the same experts, each of these drops all but its capacity.
        for (size_t e = 0; first && e < E; e++)
            expect(c, dropped[e] == 5 + (e < K ? int(sequences * (T - room)) : 0),
                   "an expert for all drops another number");

        // The capacity is the smallest whole number that is no less than p/q K T / E.
        for (size_t q : {1, 3, 10, 100}) {
            size_t p = odd(c, 1, 2 * q), slots = 1;
            while (slots < T && slots * E * q < p * K * T) slots++;
            ExpertCapacity x = expert_capacity(double(p) / double(q), T, E, K);
            expect(c, x.slots == slots, "another capacity than that of whole numbers");
        }
    }
    // In double 1.1 * 50 is more than 55.
    expect(c, expert_capacity(1.1, 100, 2, 1).slots == 55, "a decimal factor rounds up");
}

// ----------------------------------------------------------------------------
// the experts' own part: gather, gate, combine

// The experts' part of a layer in T: gather, gate, combine, and the gate's backward.
template <typename T> struct ExpertRun {
    std::vector<T> xs, h, out, dgate, dup;
    std::vector<acc_t<T>> dgates;
    ExpertRun(const std::vector<int>& slot_of, const std::vector<int>& row_of, size_t K, size_t C,
              const Doubles& x, const Doubles& gates, const Doubles& up, const Doubles& dh,
              bool residual) {
        size_t M = slot_of.size(), N = M / K;
        int rows = int(M);
        std::vector<T> in = as<T>(x), u = as<T>(up), d = as<T>(dh);
        std::vector<acc_t<T>> g = as<acc_t<T>>(gates);
        xs.resize(M * C), h.resize(M * C), out.resize(N * C), dgate.resize(M * C);
        dgates.resize(M);

        // Forward.
        gather_slots(xs.data(), in.data(), slot_of.data(), &rows, M, K, C, CPU);
        gated_swiglu_forward(h.data(), xs.data(), u.data(), g.data(), slot_of.data(), &rows, M, C,
                             CPU);
        combine_slots(out.data(), residual ? in.data() : nullptr, h.data(), row_of.data(), &rows,
                      N, K, C, CPU);

        // Backward in place, as the block calls it: dgate in dh, dup in up.
        gated_swiglu_backward(d.data(), u.data(), dgates.data(), d.data(), xs.data(), u.data(),
                              g.data(), slot_of.data(), &rows, M, C, CPU);
        dgate = d, dup = u;
    }
};

// Float and bf16 against double, and sums by their definition in double.
inline void experts_test(Check& c) {
    size_t N = odd(c, 1, 40), K = odd(c, 1, 4), E = 6, C = odd(c, 1, 200), M = N * K;
    SortedSlots s(slots_of_case(c, M, E, 1), E);
    Doubles x = rounded<bf16>(normals(c, N * C)), gates = rounded<bf16>(normals(c, M));
    Doubles up = rounded<bf16>(normals(c, M * C)), dh = rounded<bf16>(normals(c, M * C));
    for (bool residual : {false, true}) {
        ExpertRun<double> d(s.slot_of, s.row_of, K, C, x, gates, up, dh, residual);
        ExpertRun<float> f(s.slot_of, s.row_of, K, C, x, gates, up, dh, residual);
        ExpertRun<bf16> b(s.slot_of, s.row_of, K, C, x, gates, up, dh, residual);
        close(c, "h float", f.h, d.h, tolerance<float>(4), 1);
        close(c, "h bf16", b.h, d.h, tolerance<bf16>(4));
        close(c, "out float", f.out, d.out, tolerance<float>(K + 1), 1);
        close(c, "out bf16", b.out, d.out, tolerance<bf16>(K, 2), 1);
        close(c, "dgate bf16", b.dgate, d.dgate, tolerance<bf16>(4), 1);
        close(c, "dup bf16", b.dup, d.dup, tolerance<bf16>(4), 1);
        close(c, "dgates float", f.dgates, d.dgates, tolerance<float>(C), std::sqrt(double(C)));
        close(c, "dgates bf16", b.dgates, d.dgates, tolerance<float>(C), std::sqrt(double(C)));

        // Known: a slot's row is its token's row, and a token's output is the
        // sum of its slots' rows.
        Doubles want = residual ? x : Doubles(N * C);
        for (size_t i = 0; i < M * C; i++) {
            size_t slot = i / C, row = size_t(s.row_of[slot]) * C + i % C;
            expect(c, d.xs[row] == x[slot / K * C + i % C], "a row of another token");
            want[slot / K * C + i % C] += d.h[row];
        }
        close(c, "out", d.out, want, 1e-14, 1);
    }
}

// Lists of tokens against a walk over all choices, and rows that go by a list and come back.
inline void token_lists_test(Check& c) {
    size_t ranks = odd(c, 1, 5), own = odd(c, 1, 4), N = odd(c, 1, 40), K = odd(c, 1, 4), C = 3;
    std::vector<int> ids = integers(c, ranks * N * K, 0, int(ranks * own)); // the last: dropped
    Doubles x = normals(c, N * C);
    for (size_t me = 0; me < ranks; me++) {
        std::vector<int> by_rank(ranks * N, -1), by_owner(ranks * N, -1), n(ranks), m(ranks);
        TokenLists of = {ranks, N, K, own, 0};
        list_tokens(by_rank.data(), n.data(), &ids[me * N * K], of, CPU);
        of.stride = N * K, of.only = int(me);
        list_tokens(by_owner.data(), m.data(), ids.data(), of, CPU);
        auto wants = [&](size_t owner, size_t token, size_t rank) {
            bool found = false;
            for (size_t j = 0; j < K; j++)
                found |= size_t(ids[(owner * N + token) * K + j]) / own == rank;
            return found;
        };
        for (size_t r = 0; r < ranks; r++) {
            std::vector<int> leave(N, -1), arrive(N, -1);
            int left = 0, arrived = 0;
            for (size_t i = 0; i < N; i++) {
                if (wants(me, i, r)) leave[size_t(left++)] = int(i);
                if (wants(r, i, me)) arrive[size_t(arrived++)] = int(i);
            }
            expect(c, left == n[r] && arrived == m[r], "the number of tokens");
            expect(c, std::equal(leave.begin(), leave.end(), &by_rank[r * N]), "tokens by rank");
            expect(c, std::equal(arrive.begin(), arrive.end(), &by_owner[r * N]), "by owner");

            // Listed rows come back as they were; the others are not touched.
            Doubles packed(N * C, NAN), back(N * C, 7);
            gather_slots(packed.data(), x.data(), &by_rank[r * N], &n[r], N, 1, C, CPU);
            scatter_slots(back.data(), packed.data(), &by_rank[r * N], &n[r], N, 1, C, CPU);
            for (size_t i = 0; i < N * C; i++)
                expect(c, back[i] == (wants(me, i / C, r) ? x[i] : 7), "rows there and back");
        }
    }
}

// Ranks that hold some of the experts each. Their outputs for all tokens add up to one rank's
// outputs, and nobody touches the rows after a rank's own.
inline void own_experts_test(Check& c) {
    size_t N = odd(c, 1, 40), K = 2, E = 6, C = odd(c, 1, 50), M = N * K;
    std::vector<int> ids = slots_of_case(c, M, E, 2), own(M);
    Doubles x = normals(c, N * C), gates = normals(c, M), out(N * C), dgates(M);
    const double* no_residual = nullptr;
    for (size_t ranks : {size_t(1), size_t(2), size_t(6)}) {
        Doubles sum(N * C), dsum(M);
        for (size_t rank = 0; rank < ranks; rank++) {
            // Sort the slots of this rank's experts to the front. All other rows are NaN.
            size_t mine = E / ranks;
            own_experts(own.data(), ids.data(), M, rank * mine, mine, CPU);
            SortedSlots s(own, mine + 1);
            const int* rows = &s.starts[mine];
            Doubles xs(M * C, NAN), h(M * C, NAN), d(M * C, NAN), up(M * C, NAN), part(N * C);
            Doubles dpart(M, NAN);

            // Run the rank's part of a layer, forward and backward.
            gather_slots(xs.data(), x.data(), s.slot_of.data(), rows, M, K, C, CPU);
            std::copy_n(xs.data(), size_t(*rows) * C, up.data());
            gated_swiglu_forward(h.data(), xs.data(), up.data(), gates.data(), s.slot_of.data(),
                                 rows, M, C, CPU);
            combine_slots(part.data(), no_residual, h.data(), s.row_of.data(), rows, N, K, C,
                          CPU);
            gated_swiglu_backward(d.data(), up.data(), dpart.data(), xs.data(), xs.data(),
                                  up.data(), gates.data(), s.slot_of.data(), rows, M, C, CPU);

            // Add the parts up, and look at the rows that are not this rank's.
            for (size_t i = 0; i < N * C; i++) sum[i] += part[i];
            for (size_t i = 0; i < M; i++) dsum[i] += dpart[i];
            for (size_t i = size_t(*rows) * C; i < M * C; i++)
                expect(c, std::isnan(h[i]) && std::isnan(d[i]), "a row of another rank is written");
        }

        if (ranks == 1) out = sum, dgates = dsum;
        close(c, "sum of ranks", sum, out, 1e-14, 1);
        close(c, "dgates of ranks", dsum, dgates, 1e-14, 1);
    }
}

// Gradients of the rows, the gates and the tokens.
inline void experts_grad(Check& c) {
    size_t N = 4, K = 2, E = 3, C = 5, M = N * K;
    SortedSlots s(slots_of_case(c, M, E, 2), E);
    Doubles x = normals(c, N * C), gates = normals(c, M), up = normals(c, M * C);
    Doubles dh = normals(c, M * C), dx(N * C);
    auto run = [&] {
        return ExpertRun<double>(s.slot_of, s.row_of, K, C, x, gates, up, dh, false);
    };
    auto loss = [&] { return dot(run().h, dh); };
    auto r = run();
    gradient(c, "up", loss, up, r.dup);
    gradient(c, "gates", loss, gates, r.dgates);

    // The backward pass of a gather is the sum of a token's rows.
    const double* no_residual = nullptr;
    combine_slots(dx.data(), no_residual, r.dgate.data(), s.row_of.data(), &s.starts[E], N, K, C,
                  CPU);
    gradient(c, "x", loss, x, dx);
}

// ----------------------------------------------------------------------------
// a product for each expert

// The first row of each expert, for experts with no row, with one, with fewer than a block, and
// with several blocks and a rest.
inline std::vector<int> starts_of_case(Check& c, int kind) {
    std::vector<int> rows = {0, 1, 70, 0, int(odd(c, 1, 200)), 0};
    if (kind == 1) rows = {0, 0, 9};
    if (kind == 2) rows = {1300};
    std::vector<int> starts = {0};
    for (int n : rows) starts.push_back(starts.back() + n);
    return starts;
}

// The three products in T, on outputs that start as 3 or, where they are overwritten, as NaN.
template <typename T> struct GroupedRun {
    std::vector<T> out, dinp;
    std::vector<acc_t<T>> dw;
    GroupedRun(const std::vector<int>& starts, size_t OC, size_t IC, const Doubles& inp,
               const Doubles& w, const Doubles& dout, bool accumulate) {
        size_t E = starts.size() - 1, M = size_t(starts.back());
        Groups g = {starts.data(), E, OC, IC, M};
        std::vector<T> x = as<T>(inp), weight = as<T>(w), d = as<T>(dout);
        out.assign(M * OC, from_acc<T>(accumulate ? 3 : NAN));
        dinp.assign(M * IC, from_acc<T>(3));
        dw.assign(E * OC * IC, accumulate ? 3 : NAN);

        Workspace work(grouped_scratch_bytes<T>(g, CPU));
        grouped_forward(out.data(), x.data(), weight.data(), g, accumulate, work.blas, CPU);
        grouped_backward_input(dinp.data(), d.data(), weight.data(), g, accumulate, work.blas, CPU);
        grouped_backward_weight(dw.data(), d.data(), x.data(), g, accumulate, work.blas, CPU);
    }
};

// The three products by their definitions.
struct WantedGroups {
    Doubles out, dinp, dw;
    WantedGroups(const std::vector<int>& starts, size_t OC, size_t IC, const Doubles& inp,
                 const Doubles& w, const Doubles& dout, bool accumulate) {
        size_t E = starts.size() - 1, M = size_t(starts.back());
        double before = accumulate ? 3 : 0;
        out.assign(M * OC, before), dinp.assign(M * IC, before), dw.assign(E * OC * IC, before);
        for (size_t e = 0; e < E; e++)
            for (size_t m = size_t(starts[e]); m < size_t(starts[e + 1]); m++)
                for (size_t i = 0; i < OC; i++)
                    for (size_t k = 0; k < IC; k++) {
                        size_t at = (e * OC + i) * IC + k;
                        out[m * OC + i] += inp[m * IC + k] * w[at];
                        dinp[m * IC + k] += dout[m * OC + i] * w[at];
                        dw[at] += dout[m * OC + i] * inp[m * IC + k];
                    }
    }
};

// The three products in all types against the definition.
inline void grouped_test(Check& c) {
    for (int kind : {0, 1, 2})
        for (bool accumulate : {false, true}) {
            std::vector<int> starts = starts_of_case(c, kind);
            size_t OC = odd(c, 1, 40), IC = odd(c, 1, 70), M = size_t(starts.back());
            size_t E = starts.size() - 1;
            Doubles x = rounded<bf16>(normals(c, M * IC)), d = rounded<bf16>(normals(c, M * OC));
            Doubles w = rounded<bf16>(normals(c, E * OC * IC));

            WantedGroups want(starts, OC, IC, x, w, d, accumulate);
            GroupedRun<double> f64(starts, OC, IC, x, w, d, accumulate);
            GroupedRun<float> f32(starts, OC, IC, x, w, d, accumulate);
            GroupedRun<bf16> b16(starts, OC, IC, x, w, d, accumulate);

            close(c, "out", f64.out, want.out, 1e-13, 1);
            close(c, "dinp", f64.dinp, want.dinp, 1e-13, 1);
            close(c, "dw", f64.dw, want.dw, 1e-13, 1);
            close(c, "out float", f32.out, want.out, tolerance<float>(IC), 1);
            close(c, "dinp float", f32.dinp, want.dinp, tolerance<float>(OC), 1);
            close(c, "dw float", f32.dw, want.dw, tolerance<float>(M), 1);
            close(c, "out bf16", b16.out, want.out, tolerance<bf16>(IC), 1);
            close(c, "dinp bf16", b16.dinp, want.dinp, tolerance<bf16>(OC), 1);
            close(c, "dw bf16", b16.dw, want.dw, tolerance<float>(M), 1);
        }
}

// Adapters of rank r beside a stack, in T: outputs and the input's gradient start as 3, and the
// adapters' gradients as 3 or, where they are overwritten, as NaN.
template <typename T> struct LoraGroupedRun {
    std::vector<T> out, dinp;
    std::vector<acc_t<T>> da, db;
    LoraGroupedRun(const Groups& g, size_t r, double scale, const Doubles& inp, const Doubles& a,
                   const Doubles& b, const Doubles& dout, bool accumulate)
        : out(g.M * g.OC, from_acc<T>(3)), dinp(g.M * g.IC, from_acc<T>(3)),
          da(a.size(), accumulate ? 3 : NAN), db(b.size(), accumulate ? 3 : NAN) {
        std::vector<T> x = as<T>(inp), A = as<T>(a), B = as<T>(b), d = as<T>(dout), room(g.M * r);
        Workspace work(lora_grouped_scratch_bytes<T>(g, r, CPU));
        Lora l = {A.data(), B.data(), da.data(), db.data(), r, scale};
        lora_grouped_forward(out.data(), x.data(), l, room.data(), g, work.blas, CPU);
        lora_grouped_backward_input(dinp.data(), d.data(), l, room.data(), g, work.blas, CPU);
        lora_grouped_backward_weight(l, d.data(), x.data(), room.data(), g, accumulate, work.blas,
                                     CPU);
    }
};

// The same by the matrices D_e = s B_e A_e for which adapters stand, in all types.
inline void lora_grouped_test(Check& c) {
    for (int kind : {0, 1, 2})
        for (bool accumulate : {false, true}) {
            std::vector<int> starts = starts_of_case(c, kind);
            size_t OC = odd(c, 1, 40), IC = odd(c, 1, 70), r = odd(c, 1, 9);
            size_t M = size_t(starts.back()), E = starts.size() - 1;
            double scale = accumulate ? 1 : 0.75, before = accumulate ? 3 : 0;
            Groups g = {starts.data(), E, OC, IC, M};
            Doubles x = rounded<bf16>(normals(c, M * IC)), d = rounded<bf16>(normals(c, M * OC));
            Doubles a = rounded<bf16>(normals(c, E * r * IC));
            Doubles b = rounded<bf16>(normals(c, E * OC * r));

            // D_e, then what its gradient gives to A_e and B_e.
            Doubles whole(E * OC * IC), da(a.size(), before), db(b.size(), before);
            auto each = [&](auto f) { // the places of D_e (i,k), A_e (j,k) and B_e (i,j)
                for (size_t row = 0; row < E * OC; row++)
                    for (size_t k = 0; k < IC; k++)
                        for (size_t j = 0; j < r; j++)
                            f(row * IC + k, (row / OC * r + j) * IC + k, row * r + j);
            };
            each([&](size_t at, size_t j, size_t i) { whole[at] += scale * b[i] * a[j]; });
            WantedGroups want(starts, OC, IC, x, whole, d, false);
            each([&](size_t at, size_t j, size_t i) {
                da[j] += scale * b[i] * want.dw[at];
                db[i] += scale * a[j] * want.dw[at];
            });
            for (auto* added : {&want.out, &want.dinp})
                for (double& v : *added) v += 3;

            // Sums have r terms of the size sqrt(IC) or sqrt(OC); those of gradients M rows.
            double terms = double(r) * std::sqrt(double(std::max(IC, OC)));
            double rows = std::sqrt(double(M * std::max(IC, OC))) + 3;
            auto compare = [&](auto type, int roundings) {
                typedef decltype(type) T;
                LoraGroupedRun<T> run(g, r, scale, x, a, b, d, accumulate);
                size_t n = std::max(IC, OC) + r;
                close(c, "out", run.out, want.out, tolerance<T>(n, roundings), terms);
                close(c, "dinp", run.dinp, want.dinp, tolerance<T>(n, roundings), terms);
                close(c, "dA", run.da, da, tolerance<T>(n + M, roundings), rows);
                close(c, "dB", run.db, db, tolerance<T>(n + M, roundings), rows);
            };
            compare(double(), 1);
            compare(float(), 1);
            compare(bf16(), 3);
        }
}

// The shortest time of each function. They take turns, so that other load on the machine
// meets all of them alike.
inline std::vector<double> least_seconds(const std::vector<std::function<void()>>& all) {
    std::vector<double> least(all.size(), 1e30);
    for (int round = 0; round < 15; round++)
        for (size_t i = 0; i < all.size(); i++)
            least[i] = std::min(least[i], seconds_of(all[i], 1));
    return least;
}

// Eight experts with equally many rows, relative to one product with the same FLOPs.
template <typename T> void grouped_rates(const char* type) {
    size_t E = 8, OC = 1024, IC = 512, M = 8 * 512;
    std::vector<int> starts;
    for (size_t e = 0; e <= E; e++) starts.push_back(int(e * M / E));
    Groups g = {starts.data(), E, OC, IC, M};
    std::vector<T> x(M * IC, from_acc<T>(0.1f)), w(E * OC * IC, from_acc<T>(0.1f)), y(M * OC);
    Workspace work(std::max(grouped_scratch_bytes<T>(g, CPU),

                            linear_scratch_bytes<T>(M, OC, IC, CPU)));
    std::vector<acc_t<T>> dw(E * OC * IC);
    Weight one = {w.data(), type_of<T>(), OC, IC, dw.data(), nullptr};
    Blas& blas = work.blas;
    const T* none = nullptr;

    // Each product of one matrix, followed by the same FLOPs of eight.
    std::vector<double> t = least_seconds({
        [&] { linear_forward(y.data(), x.data(), one, nullptr, none, M, blas, CPU); },
        [&] { grouped_forward(y.data(), x.data(), w.data(), g, false, blas, CPU); },
        [&] { linear_backward_input(x.data(), y.data(), one, M, false, blas, CPU); },
        [&] { grouped_backward_input(x.data(), y.data(), w.data(), g, false, blas, CPU); },
        [&] { linear_backward_weight(one, nullptr, y.data(), x.data(), M, false, blas, CPU); },
        [&] { grouped_backward_weight(dw.data(), y.data(), x.data(), g, false, blas, CPU); },
    });

    const char* products[] = {"forward", "backward_input", "backward_weight"};
    for (size_t i = 0; i < 3; i++)
        printf("  %-58s %8.1f GFLOP/s  %5.1f%% of one product of its FLOPs\n",
               (std::string(products[i]) + " " + type + " 8 experts").c_str(),
               2e-9 * double(M * OC * IC) / t[2 * i + 1], 100 * t[2 * i] / t[2 * i + 1]);
}
inline void grouped_perf(Perf&) {
    grouped_rates<float>("f32");
    grouped_rates<bf16>("bf16");
}

// The cost of experts beyond their products and activations, relative to those: a layer of tiny-moe
// at 512 channels, forward and backward, with 1024 tokens. The share of a whole step is smaller.
template <typename T> void experts_rates(const char* type) {
    size_t N = 1024, E = 8, K = 2, C = 512, F = 704, M = N * K;
    typedef acc_t<T> A;

    // Route random scores, and sort the slots.
    std::mt19937 random(1);
    std::vector<A> logits(N * E), gates(M), dgates(M, A(0.1));
    for (A& x : logits) x = A(std::normal_distribution<float>()(random));
    std::vector<int> ids(M);
    Routing routing = {Router::RENORMALISED, E, K};
    route_forward(ids.data(), gates.data(), logits.data(), routing, N, CPU);
    SortedSlots s(ids, E);
    int* rows = &s.starts[E];
    Groups wide = {s.starts.data(), E, F, C, M}, narrow = {s.starts.data(), E, C, F, M};

    std::vector<T> x(N * C, from_acc<T>(0.1f)), xs(M * C), dlogits(N * E), w(E * F * C);
    std::vector<T> gate(M * F), up(M * F), h(M * F);
    std::vector<A> dw(E * F * C);
    Workspace work(std::max(grouped_scratch_bytes<T>(wide, CPU),
                            grouped_scratch_bytes<T>(narrow, CPU)));
    Blas& blas = work.blas;
    const T* none = nullptr;

    auto gather = [&] {
        gather_slots(xs.data(), x.data(), s.slot_of.data(), rows, M, K, C, CPU);
    };
    auto combine = [&](const T* residual) {
        combine_slots(x.data(), residual, xs.data(), s.row_of.data(), rows, N, K, C, CPU);
    };

    // Time routing and sorting, permuting rows, and the experts' products.
    std::vector<double> t = least_seconds({
        [&] {
            route_forward(ids.data(), gates.data(), logits.data(), routing, N, CPU);
            sort_slots(s.s, ids.data(), M, E, CPU);
            route_backward(dlogits.data(), dgates.data(), logits.data(), ids.data(), routing,
                           BalanceTerms{}, N, CPU);
        },
        [&] {
            // Forward gathers and combines once. Backward gathers once for the input and twice for
            // the weights, and combines once for the sum.
            for (int i = 0; i < 4; i++) gather();
            combine(x.data());
            combine(none);
        },
        [&] {
            for (T* to : {gate.data(), up.data()})
                grouped_forward(to, xs.data(), w.data(), wide, false, blas, CPU);
            grouped_forward(xs.data(), h.data(), w.data(), narrow, false, blas, CPU);
            grouped_backward_input(h.data(), xs.data(), w.data(), narrow, false, blas, CPU);
            for (bool second : {false, true})
                grouped_backward_input(xs.data(), gate.data(), w.data(), wide, second, blas, CPU);
            grouped_backward_weight(dw.data(), xs.data(), h.data(), narrow, false, blas, CPU);
            for (T* from : {gate.data(), up.data()})
                grouped_backward_weight(dw.data(), from, xs.data(), wide, false, blas, CPU);
        },
    });
    printf("  %-58s %8.3f ms       %5.1f%% of the experts' products\n",
           (std::string(type) + " routing and sorting").c_str(), 1e3 * t[0], 100 * t[0] / t[2]);
    printf("  %-58s %8.3f ms       %5.1f%% of the experts' products\n",
           (std::string(type) + " permuting rows").c_str(), 1e3 * t[1], 100 * t[1] / t[2]);
}
inline void experts_perf(Perf&) {
    experts_rates<float>("f32");
    experts_rates<bf16>("bf16");
}

inline void add_moe_rows(std::vector<Row>& rows) {
    rows.push_back({"router", router_test, router_grad, nullptr});
    rows.push_back({"slots", slots_test, nullptr, nullptr});
    rows.push_back({"capacity", capacity_test, nullptr, nullptr});
    rows.push_back({"experts", experts_test, experts_grad, experts_perf});
    rows.push_back({"experts of ranks", own_experts_test, nullptr, nullptr});
    rows.push_back({"experts, lists of tokens", token_lists_test, nullptr, nullptr});
    rows.push_back({"grouped matmul", grouped_test, nullptr, grouped_perf});
    rows.push_back({"lora grouped", lora_grouped_test, nullptr, nullptr});
}
