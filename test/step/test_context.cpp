// test_context.cpp - attention over shared sequences is attention over whole ones
//   Each method in every order, against the definition, with documents that start anywhere.
#include <map>
#include <numeric>
#include <random>
#include "../../llmc/layout.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

namespace {

// Attention over whole sequences, forward and backward: operands and results in double.
struct Whole {
    size_t B = 2, T = 24;
    Shape shape;
    std::vector<double> q, k, v, dout;         // (B,T,NH,HS) (B,T,NKV,HS) (B,T,NKV,HS) (B,T,NH,HS)
    std::vector<double> out, dq, dk, dv;       // the same
    std::vector<int> positions, doc_start;     // (B,T)
    std::vector<float> slopes;                 // (NH), or none
    size_t Q() const { return shape.NH * shape.HS; }
    size_t KV() const { return shape.NKV * shape.HS; }
};

// Numbers rounded to T.
template <typename T> std::vector<T> in_type(const std::vector<double>& x) {
    std::vector<T> y;
    for (double value : x)
        y.push_back(from_acc<T>(acc_t<T>(value)));
    return y;
}

// Random operands, documents that start anywhere, and the results by the definition of attention.
template <typename T> Whole whole_of(Shape shape, size_t T_, bool alibi, unsigned seed) {
    // Draw operands that T can hold, and documents of about seven tokens.
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    Whole w;
    w.shape = shape, w.T = T_;
    size_t N = w.B * w.T;
    for (auto [x, width] :
         {std::pair{&w.q, w.Q()}, {&w.k, w.KV()}, {&w.v, w.KV()}, {&w.dout, w.Q()}})
        for (size_t i = 0; i < N * width; i++)
            x->push_back(double(to_acc(from_acc<T>(acc_t<T>(normal(random))))));
    for (size_t b = 0, start = 0; b < w.B; b++)
        for (size_t i = start = 0; i < w.T; i++) {
            if (random() % 7 == 0) start = i;
            w.positions.push_back(int(i)), w.doc_start.push_back(int(start));
        }
    if (alibi) w.slopes.resize(shape.NH), alibi_slopes(w.slopes.data(), shape.NH);

    // Compute the results.
    int window = shape.attention.window ? int(shape.attention.window) : INT_MAX;
    AttentionOperands<double> x = {
        w.q.data(),
        w.k.data(),
        w.v.data(),
        w.dout.data(),
        w.positions.data(),
        w.positions.data(),
        w.doc_start.data(),
        alibi ? w.slopes.data() : nullptr,
        {w.B, w.T, w.T, shape.NH, shape.NKV, shape.HS, w.Q(), w.KV(), window}};
    std::vector<double> lse(N * shape.NH);
    w.out.resize(N * w.Q()), w.dq.resize(N * w.Q());
    w.dk.resize(N * w.KV()), w.dv.resize(N * w.KV());
    attention_forward_reference(w.out.data(), lse.data(), x);
    attention_backward_reference(w.dq.data(), w.dk.data(), w.dv.data(), w.out.data(), lse.data(),
                                 x);
    return w;
}

Plan plan_of(const Whole& w, const Comm& world, ContextMethod method, ContextOrder order,
             int neighbours = 1) {
    Plan p;
    p.B = w.B, p.T = w.T;
    p.layout.cp = {world.size, world.rank};
    p.layout.context = {method, order, neighbours};
    return p;
}

// The largest difference, relative to the largest number; and below, the norm of the difference,
// relative to the norm.
double largest(const std::vector<double>& x, const std::vector<double>& want) {
    double most = 0, all = 0;
    for (size_t i = 0; i < want.size(); i++)
        most = std::max(most, std::fabs(x[i] - want[i])), all = std::max(all, std::fabs(want[i]));
    return x.size() == want.size() ? most / all : INFINITY;
}
double of_norm(const std::vector<double>& x, const std::vector<double>& want) {
    double error = 0, all = 0;
    for (size_t i = 0; i < want.size(); i++)
        error += (x[i] - want[i]) * (x[i] - want[i]), all += want[i] * want[i];
    return std::sqrt(error / all);
}

// Run attention in T on cp ranks, each with its rows, in which q, k and v lie side by side. Returns
// out, dq, dk and dv of the whole sequences: each row at its place.
template <typename T>
std::map<std::string, std::vector<double>> run_ranks(const Whole& w, int cp, ContextMethod method,
                                                     ContextOrder order, int neighbours = 1) {
    std::map<std::string, std::vector<double>> whole;
    for (auto [name, width] :
         {std::pair{"out", w.Q()}, {"dq", w.Q()}, {"dk", w.KV()}, {"dv", w.KV()}})
        whole[name].assign(w.B * w.T * width, NAN);
    std::mutex mutex;
    LocalSettings settings;
    settings.timeout_s = 60;
    EXPECT_EQ(run_local_ranks(cp, settings, [&](const Comm& world) {
        Plan p = plan_of(w, world, method, order, neighbours);
        size_t t = w.T / size_t(cp), N = w.B * t, Q = w.Q(), KV = w.KV(), row = Q + 2 * KV;
        std::vector<int> ints(p.input_numbers());
        std::vector<T> qkv(N * row), dqkv(N * row), dout(N * Q), out(N * Q);
        std::vector<acc_t<T>> lse(N * w.shape.NH);
        auto place = [&](size_t b, size_t i) {
            return b * w.T + context_row(order, p.layout.cp, w.T, i);
        };

        // Take this rank's rows, as LOAD does.
        for (size_t b = 0; b < w.B; b++) {
            for (size_t i = 0; i < t; i++) {
                size_t at = place(b, i), mine = b * t + i;
                auto q = in_type<T>({w.q.begin() + long(at * Q), w.q.begin() + long((at + 1) * Q)}),
                     k = in_type<T>(
                         {w.k.begin() + long(at * KV), w.k.begin() + long((at + 1) * KV)}),
                     v = in_type<T>(
                         {w.v.begin() + long(at * KV), w.v.begin() + long((at + 1) * KV)}),
                     d = in_type<T>(
                         {w.dout.begin() + long(at * Q), w.dout.begin() + long((at + 1) * Q)});
                std::copy(q.begin(), q.end(), qkv.begin() + long(mine * row));
                std::copy(k.begin(), k.end(), qkv.begin() + long(mine * row + Q));
                std::copy(v.begin(), v.end(), qkv.begin() + long(mine * row + Q + KV));
                std::copy(d.begin(), d.end(), dout.begin() + long(mine * Q));
                ints[2 * N + mine] = w.positions[at], ints[3 * N + mine] = w.doc_start[at];
            }
            int* keys = ints.data() + 4 * N;
            if (cp > 1) fill_keys(p, b, keys, keys + w.B * w.T, w.doc_start.data() + b * w.T);
        }

        // Make a block's context, with scratch that holds garbage.
        Ctx<Cpu> ctx;
        Comms groups = make_comms(world, p.layout);
        ctx.shape = w.shape, ctx.cp = groups.cp, ctx.context.method = method;
        ctx.context.heads = groups.cp_heads, ctx.context.keys = groups.cp_keys;
        const int *keys = ints.data() + 4 * N, *positions = ints.data() + 2 * N;
        ctx.batch = {w.B, t, nullptr, nullptr, positions, positions + N};
        ctx.batch.key_positions = keys, ctx.batch.key_documents = keys + w.B * w.T;
        ctx.slopes = w.slopes.empty() ? nullptr : w.slopes.data();
        AttentionDims d = cp > 1 ? context_attention_shape(w.shape, p.layout, w.B, w.T)
                                 : attention_shape(w.shape, w.B, w.T, w.T);
        std::vector<char> work(attention_scratch_bytes<T>(d, threads_here(Cpu{}), Cpu{}) + 512),
            scratch(
                cp > 1 ? context_scratch_bytes<T>(w.shape, p.layout, w.B, w.T, true) + 512 : 512,
                -1);
        blas_scratch(ctx.blas, work.data() + 256 - uintptr_t(work.data()) % 256, work.size() - 512);
        ctx.context.scratch = scratch.data() + 256 - uintptr_t(scratch.data()) % 256;

        // Run.
        Qkv<T> x = {qkv.data(), qkv.data() + Q, qkv.data() + Q + KV, row, row},
               dx = {dqkv.data(), dqkv.data() + Q, dqkv.data() + Q + KV, row, row};
        T* no_cache = nullptr;
        context_attention_forward(ctx, out.data(), lse.data(), x, no_cache);
        context_attention_backward(ctx, dx, dout.data(), out.data(), lse.data(), x);

        // Put this rank's rows back into their places.
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t mine = 0; mine < N; mine++) {
            size_t at = place(mine / t, mine % t);
            auto bring = [&](const char* name, const T* from, size_t width) {
                for (size_t e = 0; e < width; e++)
                    whole[name][at * width + e] = double(to_acc(from[e]));
            };
            bring("out", out.data() + mine * Q, Q), bring("dq", dx.q + mine * row, Q);
            bring("dk", dx.k + mine * row, KV), bring("dv", dx.v + mine * row, KV);
        }
    }), 0);
    return whole;
}

Shape heads(size_t NH, size_t NKV, size_t HS, size_t window = 0) {
    Shape s;
    s.NH = NH, s.NKV = NKV, s.HS = HS, s.C = NH * HS, s.attention.window = window;
    return s;
}

constexpr ContextMethod METHODS[] = {ContextMethod::GATHER, ContextMethod::ULYSSES,
                                     ContextMethod::RING};
constexpr ContextOrder ORDERS[] = {ContextOrder::ZIGZAG, ContextOrder::CONTIGUOUS,
                                   ContextOrder::STRIPED};

} // namespace

// Attention over shared sequences equals attention over whole ones: in double, only the order
// of sums differs, of 48 terms at most.
TEST(Context, SharedSequencesAreWholeOnes) {
    unsigned seed = 0;
    for (int cp : {2, 3, 4, 6})
        for (ContextMethod method : METHODS)
            for (ContextOrder order : ORDERS)
                for (size_t window : {0, 5}) {
                    // Take as many key/value heads as heads, or two, or one for all.
                    Shape shape = heads(12, std::array{12, 2, 1}[seed % 3], 8, window);
                    if (method == ContextMethod::ULYSSES && !cp_divides(shape, 1, size_t(cp)))
                        shape.NKV = 12;
                    seed++;

                    // Compare with whole sequences.
                    Whole want = whole_of<double>(shape, 48, seed % 2, seed);
                    auto got = run_ranks<double>(want, cp, method, order);
                    std::string text = concat("cp ", cp, " method ", int(method), " order ",
                                              int(order), " window ", window, " key heads ",
                                              shape.NKV);
                    EXPECT_LT(largest(got["out"], want.out), 1e-14) << text;
                    EXPECT_LT(largest(got["dq"], want.dq), 1e-14) << text;
                    EXPECT_LT(largest(got["dk"], want.dk), 1e-14) << text;
                    EXPECT_LT(largest(got["dv"], want.dv), 1e-14) << text;
                }
}

// Hybrids agree too, whichever ranks exchange heads, and however the groups of these
// ranks share keys.
TEST(Context, HybridsAreWholeSequencesToo) {
    unsigned seed = 50;
    for (auto [neighbours, groups] : {std::pair{2, 2}, {2, 3}, {4, 2}, {2, 4}})
        for (ContextMethod method : {ContextMethod::GATHER, ContextMethod::RING})
            for (ContextOrder order : ORDERS) {
                // Take enough key/value heads for each rank, or one that several share.
                size_t window = ++seed % 3 ? 0 : 9, key_heads = seed % 2 ? 4 : 1;
                int cp = neighbours * groups;
                Whole want =
                    whole_of<double>(heads(4, key_heads, 4, window), 48, seed % 4 < 2, seed);
                auto got = run_ranks<double>(want, cp, method, order, neighbours);
                for (auto [name, exact] : {std::pair{"out", &want.out}, {"dq", &want.dq},
                                           {"dk", &want.dk}, {"dv", &want.dv}})
                    EXPECT_LT(largest(got[name], *exact), 1e-14)
                        << name << " " << neighbours << " x " << groups << " method " << int(method)
                        << " order " << int(order) << " window " << window << " key heads "
                        << key_heads;
            }
}

// In bf16 a ring adds the parts of `out` and of the queries' gradient in float, and rounds each sum
// once: a ring of 4 or 8 is as exact as one rank, which rounds once too. Each part has a rounding of
// its own, by as much as the softmax gives it: that of one part in the striped order, where every
// hop brings keys to every query, but of up to two in the others. Sums in bf16 lose a third more.
TEST(Context, ARingRoundsOnce) {
    Whole want = whole_of<bf16>(heads(8, 2, 16), 64, false, 17);
    auto one = run_ranks<bf16>(want, 1, ContextMethod::GATHER, ContextOrder::ZIGZAG);
    for (int cp : {4, 8})
        for (ContextOrder order : ORDERS) {
            auto ring = run_ranks<bf16>(want, cp, ContextMethod::RING, order);
            for (const auto& [name, exact] : {std::pair{"out", &want.out}, {"dq", &want.dq}})
                EXPECT_LT(of_norm(ring[name], *exact),
                          (order == ContextOrder::STRIPED ? 1.1 : 1.25) * of_norm(one[name], *exact))
                    << name << " cp " << cp << " order " << int(order);
        }
}

// In bf16 the gradients of keys lose no precision by the number of ranks. Each of eight ranks has a
// part of every key's gradient. Gathering and the ring add the parts in float and round once, as
// one rank does; but the ring also rounds parts of `out`. Ulysses rounds each rank's part of the
// one key head once, an error of at most 2^-9 of it. Sums in bf16 would lose twice as much.
TEST(Context, GradientsOfKeysLoseNothingByTheRanks) {
    Whole want = whole_of<bf16>(heads(8, 1, 16), 64, false, 7);
    auto one = run_ranks<bf16>(want, 1, ContextMethod::GATHER, ContextOrder::ZIGZAG);
    for (ContextMethod method : METHODS)
        for (ContextOrder order : ORDERS) {
            auto got = run_ranks<bf16>(want, 8, method, order);
            for (const auto& [name, exact] : {std::pair{"dk", &want.dk}, {"dv", &want.dv}}) {
                double alone = of_norm(one[name], *exact);
                double bound = method == ContextMethod::GATHER ? 1.01 * alone
                               : method == ContextMethod::RING ? 1.2 * alone
                                                               : alone + 1.0 / 512;
                EXPECT_LT(of_norm(got[name], *exact), bound)
                    << name << " method " << int(method) << " order " << int(order);
            }
        }
}

// count_pairs() counts the pairs of tokens that a rank's queries see, whatever documents there are.
TEST(Context, PairsAreThoseThatQueriesSee) {
    for (int cp : {1, 2, 3, 4})
        for (ContextOrder order : ORDERS) {
            // Count.
            Whole w = whole_of<double>(heads(1, 1, 2), 48, false, unsigned(cp));
            Comm world;
            world.size = cp;
            Plan p = plan_of(w, world, ContextMethod::GATHER, order);
            std::vector<int64_t> pairs, want(static_cast<size_t>(cp));
            for (size_t b = 0; b < w.B; b++)
                count_pairs(p, pairs, w.doc_start.data() + b * w.T);

            // Count again, one pair after the other.
            AttentionOperands<double> x;
            x.q_positions = x.k_positions = w.positions.data(), x.doc_start = w.doc_start.data();
            x.d = {w.B, w.T, w.T};
            int distance;
            for (size_t b = 0; b < w.B; b++)
                for (int r = 0; r < cp; r++)
                    for (size_t i = 0; i < w.T / size_t(cp); i++)
                        for (size_t j = 0; j < w.T; j++)
                            want[size_t(r)] +=
                                x.visible(b, context_row(order, {cp, r}, w.T, i), j, distance);
            EXPECT_EQ(pairs, want) << cp << " order " << int(order);

            // The imbalance is the largest number over the mean. In a hybrid, ranks that exchange
            // heads share their rows.
            double most = double(*std::max_element(want.begin(), want.end()));
            double mean = double(std::accumulate(want.begin(), want.end(), int64_t(0))) / cp;
            EXPECT_DOUBLE_EQ(pairs_imbalance(p.layout, pairs), most / mean);
            if (cp == 4) {
                Layout hybrid = p.layout;
                hybrid.context.heads = 2;
                most = double(std::max(want[0] + want[1], want[2] + want[3])) / 2;
                EXPECT_DOUBLE_EQ(pairs_imbalance(hybrid, pairs), most / mean);
            }

            // With one document the zigzag order gives all ranks the same work.
            std::vector<int> start(w.T);
            pairs.clear();
            count_pairs(p, pairs, start.data());
            bool equal = order == ContextOrder::ZIGZAG || cp == 1;
            EXPECT_EQ(pairs_imbalance(p.layout, pairs) == 1, equal) << cp << " " << int(order);
        }
}

// --explain's bytes are those that a rank sends to others in a step, for every method, with several
// levels of recomputation and split backward passes.
TEST(Context, AStepSendsTheBytesThatExplainSays) {
    for (const Shape& shape : {gpt2_shape(3, 4, 16, 61, 32), small_llama()})
        for (ContextMethod method : METHODS)
            for (auto [cp, neighbours] : {std::pair{2, 1}, {4, 1}, {4, 2}}) {
                if (neighbours > 1 && method == ContextMethod::ULYSSES) continue;
                int failed = run_local_ranks(
                    cp, {}, [&, cp = cp, neighbours = neighbours](const Comm& world) {
                        Plan p = small_plan(
                            2, 16, 2,
                            {{Recompute::NONE, Recompute::FULL, Recompute::ATTN, Recompute::FFN}},
                            cp == 2);
                        p.layout = layout_at(small_layout(1, 1, 1, cp), world.rank);
                        p.layout.context.method = method, p.layout.context.heads = neighbours;

                        // Count what a step sends.
                        Fixture<bf16> f(shape, {p}, 5);
                        f.t.comms = make_comms(world, p.layout);
                        std::map<std::string, size_t> sent;
                        world.info->sent = &sent;
                        run_plan(f.t, 0);
                        size_t all = sent["cp"] + sent["cp heads"] + sent["cp keys"];
                        EXPECT_GT(all, 0u);
                        EXPECT_EQ(neighbours > 1, sent["cp"] == 0);
                        EXPECT_EQ(all, context_plan_bytes<bf16>(f.t.plans[0], f.t.model))
                            << "cp " << cp << " method " << int(method);
                        world.info->sent = nullptr;
                    });
                EXPECT_EQ(failed, 0);
            }
}

// The results of a step over pairs: loss and other sums, gradients, and an evaluation's loss.
struct OfPairs {
    Loss loss;
    double evaluated = 0;
    std::vector<double> grads;
};

// A step over windows of 24 tokens, each of a chosen and a rejected answer, on the ranks of a layout.
static OfPairs step_of_pairs(Objective objective, const Layout& layout) {
    OfPairs found;
    std::mutex mutex;
    size_t T = 24;
    EXPECT_EQ(run_local_ranks(layout.world(), {}, [&](const Comm& world) {
        Plan train = small_plan(2, T, 2 / layout.dp.size);
        train.objective = objective, train.layout = layout_at(layout, world.rank);
        Plan evaluate = train;
        evaluate.mode = Mode::EVALUATE;
        Shape s = small_llama();
        s.NKV = 4; // Ulysses takes as many ranks
        Fixture<double> f(s, {train, evaluate});
        f.t.comms = make_comms(world, train.layout);
        f.t.hyper.lr = 0, f.t.hyper.clip = 0;

        // The rejected answer begins at another place in each window; the last window has none.
        Window random = random_window(s, T);
        f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
            random(sample, tokens, targets);
            size_t cut = 9 + sample % 5;
            tokens[0] |= BEGINS, tokens[cut] |= BEGINS;
            if (sample != 3) tokens[cut] |= REJECTED;
            targets[cut - 1] = targets[T - 1] = -1;
            return std::string();
        };
        f.t.data.references = [&](uint64_t sample, RowNumbers to) {
            for (size_t i = 0; i < T; i++) to.reference[i] = -0.25f * float((i + sample) % 17);
        };

        // Run both plans. The ranks' parts of a gradient add up to the whole.
        run_plan(f.t, 0);
        Loss loss = plan_loss(f.t);
        std::vector<double> grads;
        for (const Parameter& p : f.t.model.parameters)
            grads.insert(grads.end(), f.grad(p), f.grad(p) + p.elements());
        run_plan(f.t, 1);
        double evaluated = plan_loss(f.t).sum;
        std::lock_guard lock(mutex);
        if (world.rank == 0) found = {loss, evaluated, grads};
    }), 0);
    return found;
}

// Pairs of answers whose rows lie on several ranks: the loss, what is logged beside it, and all
// gradients are those of whole sequences, for every order of rows and every method.
TEST(Context, PairsAreThoseOfWholeSequences) {
    int turn = 0;
    for (LossKind kind : {LossKind::DPO, LossKind::IPO, LossKind::SIMPO, LossKind::ORPO,
                          LossKind::KTO}) {
        Objective o = {kind, 0.3, kind == LossKind::DPO ? 0.1 : 0, 0.5, 2, 0.5};
        OfPairs want = step_of_pairs(o, small_layout(1));
        EXPECT_EQ(want.loss.valid, kind == LossKind::KTO ? 8 : 3);

        for (int cp : {2, 4}) {
            Layout layout = small_layout(cp == 2 ? 2 : 1, 1, 1, cp);
            layout.context = {METHODS[turn / 2 % 3], ORDERS[turn % 3]};
            turn++;
            OfPairs got = step_of_pairs(o, layout);

            SCOPED_TRACE(concat("loss ", int(kind), " cp ", cp, " order ",
                                int(layout.context.order)));
            EXPECT_EQ(got.loss.valid, want.loss.valid);
            EXPECT_EQ(got.loss.correct, want.loss.correct);
            EXPECT_NEAR(got.loss.sum, want.loss.sum, 1e-11);
            EXPECT_NEAR(got.loss.margin, want.loss.margin, 1e-11);
            EXPECT_NEAR(got.evaluated, want.evaluated, 1e-11);
            EXPECT_LT(largest(got.grads, want.grads), 1e-11);
        }
    }
}
