// test_model.cpp - the whole step against things independent of it: finite differences in double,
//   train_gpt_min, golden files from PyTorch, trained checkpoints; and settings that must not
//   change a bit: recomputation, backward passes in two halves, threads
#define main train_gpt_min_main
#include "../../train_gpt_min.cpp"
#undef main
#include <numeric>
#include <random>
#include "../../llmc/io/dataloader.h"
#include "../../llmc/io/generate.h"
#include "../../llmc/tune/rollouts.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// finite differences through the whole model, in double

// Shapes with adapters: beside all matrices, beside attention's alone, and in the later blocks.
static std::vector<Shape> lora_shapes() {
    return {with_lora(small_gpt2(), 3), with_lora(small_llama(true, true), 2, "attention", true),
            with_late_lora(small_variant(small_llama(), "gemma2"), 4),
            with_lora(small_shared(), 2), with_lora(small_mla(true), 3),
            with_lora(small_shared(), 3, "experts,shared_expert.down_proj"),
            with_lora(small_mixtral(), 2, "w3,q_proj"), with_lora(small_oss(), 2),
            with_lora(small_variant(small_llama(), "track3"), 2)};
}

// Shapes behind a prefix: learned positions, RoPE with shared key heads, soft caps and windows.
static std::vector<Shape> prefix_shapes() {
    std::vector<Shape> shapes = {small_gpt2(), small_llama(true, true),
                                 small_variant(small_llama(), "gemma2"), small_oss()};
    for (Shape& s : shapes) s.tuned.prefix = 3;
    return shapes;
}

// Compare the gradient of a random element, which plan 0 has left, with the central difference of
// plan 1's loss. The latter's error is h^2 * third derivative + eps * loss / h, from rounding.
static void expect_central_difference(Fixture<double>& f, const Parameter& p, uint64_t number) {
    size_t i = random_block(11, fnv1a(p.name), number)[0] % p.file_elements();
    f.t.plan = 0, f.t.at = 0;
    double expected = f.grad(p)[i], h = 1e-5, w = f.weight(p)[i], side[2];
    for (int sign : {0, 1}) {
        f.weight(p)[i] = w + (sign ? h : -h);
        run_plan(f.t, 1);
        side[sign] = plan_loss(f.t).mean();
    }
    f.weight(p)[i] = w;
    EXPECT_NEAR((side[1] - side[0]) / (2 * h), expected, 2e-7 * std::max(1.0, std::abs(expected)))
        << p.name << "[" << i << "]";
}

// Three random elements of every parameter: the gradient of two micro-batches equals the central
// difference of the loss, which an evaluation of all four samples gives.
TEST(Gradients, WholeModelAgainstFiniteDifferences) {
    std::vector<Shape> shapes = all_shapes();
    for (const Shape& s : lora_shapes()) shapes.push_back(s);
    for (const Shape& s : {small_mixtral(), small_shared(), small_mla(true), small_oss()})
        shapes.push_back(with_capacity(s));
    for (const Shape& s : prefix_shapes()) shapes.push_back(s);
    for (Shape s : shapes) {
        // Plan training and evaluation of the same samples. The loss that is reported leaves out
        // the experts' balance terms, so their gradients are switched off.
        s.experts.balance = s.experts.z_loss = 0;
        Plan evaluate = small_plan(2, 9, 1), train = small_plan(2, 9, 2);
        evaluate.mode = Mode::EVALUATE;
        evaluate.B = 4; // both micro-batches at once

        // Run a step that changes no weight.
        Fixture<double> f(s, {train, evaluate});
        f.t.hyper.lr = 0, f.t.hyper.clip = 0;
        run_plan(f.t, 0);
        double loss = plan_loss(f.t).mean();
        std::vector<unsigned char> saved = f.state();

        for (const Parameter& p : f.t.model.parameters)
            for (int k = 0; k < 3 && f.t.model.buckets[p.bucket].trainable; k++)
                expect_central_difference(f, p, uint64_t(k));
        EXPECT_GT(loss, 1);
    }
}

// The same for losses over pairs of answers, with arbitrary numbers as the reference's losses. The
// head takes five rows a chunk, so that chunks begin inside answers.
TEST(Gradients, PreferencesAgainstFiniteDifferences) {
    for (LossKind kind : {LossKind::DPO, LossKind::ORPO, LossKind::KTO, LossKind::GRPO}) {
        Plan train = small_plan(2, 9, 2);
        train.objective = {kind, 0.5, kind == LossKind::DPO ? 0.1 : 0, 0.5, 2, 0.5};
        train.objective.old_policy = kind == LossKind::GRPO;
        Plan evaluate = train;
        evaluate.mode = Mode::EVALUATE;
        evaluate.B = 4, evaluate.micro_batches = 1;

        // Make windows of two answers each, the second one rejected.
        Shape s = small_gpt2();
        s.loss.logits_bytes = 1;
        s.loss.logits_rows = 5;
        Fixture<double> f(s, {train, evaluate});
        Window random = random_window(s, 9);
        f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
            random(sample, tokens, targets);
            size_t cut = 4 + sample % 2; // where the rejected answer begins
            tokens[0] |= BEGINS;
            tokens[cut] |= BEGINS | REJECTED;
            targets[cut - 1] = targets[8] = -1;
            return std::string();
        };
        f.t.data.references = [&](uint64_t sample, RowNumbers to) {
            for (size_t i = 0; i < 9; i++) to.reference[i] = -float(i + sample % 3);
            if (kind != LossKind::GRPO) return;
            std::fill_n(to.feedback, 9, float(sample) - 0.25f);
            // The small model gives each token log p of about -4: ratios are on both sides of 1.
            for (size_t i = 0; i < 9; i++) to.old[i] = -3.5f - 0.3f * float(i);
        };

        // Run a step that changes no weight.
        f.t.hyper.lr = 0, f.t.hyper.clip = 0;
        run_plan(f.t, 0);
        Loss loss = plan_loss(f.t);
        // Four windows count their pairs, their answers, or their answers' targets: seven each, of
        // which the random windows leave two out.
        EXPECT_EQ(loss.valid, kind == LossKind::GRPO ? 26 : kind == LossKind::KTO ? 8 : 4);

        if (kind == LossKind::GRPO) {
            EXPECT_GT(loss.clipped, 7); // more than there are with a negative advantage
            EXPECT_LT(loss.clipped, 26);
        }

        SCOPED_TRACE(int(kind));
        for (const Parameter& p : f.t.model.parameters)
            expect_central_difference(f, p, 0);
    }
}

// All answers of up to three tokens from a vocabulary of four, in which token 0 ends an answer.
static Rollouts all_answers() {
    Rollouts r;
    std::vector<std::vector<int>> open = {{1}}; // the prompt
    for (int length = 1; length <= 3; length++) {
        std::vector<std::vector<int>> longer;
        for (const std::vector<int>& begin : open)
            for (int token = 0; token < 4; token++) {
                std::vector<int> all = begin;
                all.push_back(token);
                (token == 0 || length == 3 ? r.tokens : longer).push_back(all);
            }
        open = longer;
    }
    r.prompts.assign(r.tokens.size(), 1);
    return r;
}

// GRPO's step has the policy gradient as its mean. Take the mean over all groups of two answers (y,
// z), each weighted by its probability p(y) p(z), which the advantages contain here: it must be the
// gradient of the expected reward J = sum p(y) R(y). Since the baseline is the group's own mean,
// the sum over a group has a factor of group - 1, which is 1 here.
TEST(Gradients, SampledGroupsHaveTheGradientOfTheExpectedReward) {
    Plan train = small_plan(8, 3, 5), evaluate = small_plan(40, 3, 1);
    train.objective = evaluate.objective = {LossKind::GRPO, 0};
    evaluate.mode = Mode::EVALUATE;
    Fixture<double> f(gpt2_shape(2, 2, 8, 4, 8), {train, evaluate});
    Rollouts r = all_answers();
    ASSERT_EQ(r.tokens.size(), 40u);
    f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        rollout_window(r, sample, 3, tokens, targets);
        return std::string();
    };
    std::vector<double> reward;
    for (const std::vector<int>& all : r.tokens)
        reward.push_back(2.0 * std::count(all.begin(), all.end(), 2) + (all.back() == 0) +
                         3.0 * (all[1] == 3));

    // Compute how likely each answer is, and from that the weight of its gradient.
    std::vector<float> weight(40);
    f.t.data.references = [&](uint64_t sample, RowNumbers to) {
        std::fill_n(to.feedback, 3, weight[sample]);
    };
    auto likely = [&] {
        run_plan(f.t, 1);
        const double* losses = row_losses(f.t, 0).losses;
        std::vector<double> p(40);
        for (size_t y = 0; y < 40; y++) {
            for (size_t i = 0; i + 1 < r.tokens[y].size(); i++) p[y] += losses[3 * y + i];
            p[y] = std::exp(-p[y]);
        }
        return p;
    };
    std::vector<double> p = likely();
    EXPECT_NEAR(std::accumulate(p.begin(), p.end(), 0.0), 1, 1e-12);
    for (size_t y = 0; y < 40; y++)
        for (size_t z = 0; z < 40; z++) {
            std::vector<float> a = group_advantages({reward[y], reward[z]}, 2, false);
            weight[y] += float(p[y] * p[z] * a[0]);
            weight[z] += float(p[y] * p[z] * a[1]);
        }

    // Compare with central differences of J. The step's gradient is a mean over tokens, and its
    // loss is minus the reward.
    f.t.hyper.lr = 0, f.t.hyper.clip = 0;
    run_plan(f.t, 0);
    double tokens = double(plan_loss(f.t).valid), largest = 0;
    for (const Parameter& parameter : f.t.model.parameters)
        for (uint64_t k = 0; k < 4; k++) {
            size_t i = random_block(13, fnv1a(parameter.name), k)[0] % parameter.file_elements();
            f.t.plan = 0, f.t.at = 0;
            double expected = -f.grad(parameter)[i] * tokens, h = 1e-5, side[2];
            double w = f.weight(parameter)[i];
            for (int sign : {0, 1}) {
                f.weight(parameter)[i] = w + (sign ? h : -h);
                std::vector<double> now = likely();
                side[sign] = std::inner_product(now.begin(), now.end(), reward.begin(), 0.0);
            }
            f.weight(parameter)[i] = w;

            // The tolerance: rounding of 40 weights to float, and of central differences as above.
            EXPECT_NEAR((side[1] - side[0]) / (2 * h), expected, 2e-6)
                << parameter.name << "[" << i << "]";
            largest = std::max(largest, std::abs(expected));
        }
    EXPECT_GT(largest, 0.05);
}

// The KL term's gradient has the mean that its estimate promises. Sum it over all 40 answers, each
// weighted by its probability. At a token, given those before it, k2 must have the gradient of
// KL(policy, reference), and k3 that of KL(reference, policy).
TEST(Gradients, EstimatesOfKlHaveTheGradientsOfTheDivergences) {
    for (KlEstimate kl : {KlEstimate::K2, KlEstimate::K3}) {
        Plan train = small_plan(1, 3, 1), evaluate = small_plan(40, 3, 1);
        train.objective = evaluate.objective = {LossKind::GRPO, 1};
        train.objective.kl = kl;
        evaluate.mode = Mode::EVALUATE;
        Fixture<double> f(gpt2_shape(2, 2, 8, 4, 8), {train, evaluate});
        Rollouts r = all_answers();
        f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
            rollout_window(r, sample, 3, tokens, targets);
            return std::string();
        };

        // The reference's log p depends on the token and on its place.
        auto reference = [&](size_t y, size_t i) {
            return i + 1 < r.tokens[y].size() ? -0.5f - 0.25f * float(r.tokens[y][i + 1] + int(i)) : 0;
        };
        f.t.data.references = [&](uint64_t y, RowNumbers to) {
            for (size_t i = 0; i < 3; i++) to.reference[i] = reference(y, i);
        };
        auto logp = [&] {
            f.t.data.cursor = 0;
            run_plan(f.t, 1);
            const double* losses = row_losses(f.t, 0).losses;
            std::vector<double> rows(120);
            for (size_t k = 0; k < 120; k++) rows[k] = -losses[k];
            return rows;
        };

        // Sum the steps' gradients, which are means over an answer's tokens.
        f.t.hyper.lr = 0, f.t.hyper.clip = 0;
        const std::vector<double> policy = logp();
        std::map<std::string, double> sum;
        auto place = [](const Parameter& p) {
            return random_block(17, fnv1a(p.name), 0)[0] % p.file_elements();
        };
        for (size_t y = 0; y < 40; y++) {
            f.t.data.cursor = y;
            run_plan(f.t, 0);
            double p_y = std::exp(policy[3 * y] + policy[3 * y + 1] + policy[3 * y + 2]);
            double tokens = double(plan_loss(f.t).valid);
            f.t.plan = 0, f.t.at = 0;
            for (const Parameter& p : f.t.model.parameters)
                sum[p.name] += p_y * tokens * f.grad(p)[place(p)];
        }

        // The divergence at each token. The tokens around it follow the policy as it was: those
        // behind it have probabilities that add up to 1.
        auto divergence = [&](const std::vector<double>& now) {
            double total = 0;
            for (size_t y = 0; y < 40; y++)
                for (size_t i = 0; i + 1 < r.tokens[y].size(); i++) {
                    double a = now[3 * y + i], b = reference(y, i), around = -policy[3 * y + i];
                    for (size_t k = 0; k < 3; k++) around += policy[3 * y + k];
                    bool k2 = kl == KlEstimate::K2;
                    total += std::exp(around) * (k2 ? std::exp(a) * (a - b) : std::exp(b) * (b - a));
                }
            return total;
        };
        double largest = 0;
        for (const Parameter& p : f.t.model.parameters) {
            double h = 1e-5, side[2];
            f.t.plan = 0, f.t.at = 0;
            double& w = f.weight(p)[place(p)], before = w;
            for (int sign : {0, 1}) {
                w = before + (sign ? h : -h);
                side[sign] = divergence(logp());
            }
            w = before;
            EXPECT_NEAR((side[1] - side[0]) / (2 * h), sum[p.name], 2e-7) << int(kl) << p.name;
            largest = std::max(largest, std::abs(sum[p.name]));
        }
        EXPECT_GT(largest, 0.01);
    }
}

// The losses of each row of some windows of T tokens, in which token 60 ends a document.
static std::vector<double> losses_of(const Shape& s, const std::vector<std::vector<int>>& windows) {
    size_t T = windows[0].size();
    Plan evaluate = small_plan(windows.size(), T, 1);
    evaluate.mode = Mode::EVALUATE;
    Fixture<double> f(s, {evaluate});
    f.t.data.document_end = 60;
    f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        const std::vector<int>& w = windows[sample];
        for (size_t i = 0; i < T; i++) tokens[i] = w[i], targets[i] = w[(i + 1) % T];
        return std::string();
    };
    run_plan(f.t, 0);
    const double* losses = row_losses(f.t, 0).losses;
    return std::vector<double>(losses, losses + windows.size() * T);
}

// A prefix lies before each document: two documents in one window have the losses that each has
// alone, also in layers with a window. The losses differ from those without a prefix.
TEST(Prefix, LiesBeforeEachDocument) {
    for (Shape s : prefix_shapes()) {
        std::vector<int> one = {7, 3, 9, 12, 60}, two = {5, 5, 21, 2, 60}, both = one;
        both.insert(both.end(), two.begin(), two.end());
        std::vector<double> apart = losses_of(s, {one, two}), packed = losses_of(s, {both});
        for (size_t i = 0; i < both.size(); i++) EXPECT_NEAR(apart[i], packed[i], 1e-12) << i;
        s.tuned.prefix = 0;
        EXPECT_GT(std::abs(losses_of(s, {both})[0] - packed[0]), 1e-3);
    }
}

// Only the prefix is trained: no other parameter has a gradient or moments.
TEST(Prefix, IsAllThatIsTrained) {
    for (const Shape& s : prefix_shapes()) {
        Fixture<float> f(s, {small_plan(2, 9, 2)});
        f.step();
        size_t trained = 0;
        for (const Parameter& p : f.t.model.parameters) {
            bool prefix = p.name.starts_with("prefix.");
            for (Data d : {Data{Kind::GRAD, p.bucket}, Data{Kind::STATE, p.bucket, 0}})
                EXPECT_EQ(bool(address<char>(f.t, d)), prefix) << p.name;
            trained += prefix ? p.elements() : 0;
        }
        EXPECT_EQ(trained, s.L * 2 * s.tuned.prefix * s.NKV * s.HS);
    }
}

// Adapters whose B is zero add nothing: the loss is the base's, B has a gradient at once, and A's
// gradient is zero. The base is frozen: no byte of it changes, and it has no gradient, master,
// moment or UPDATE.
template <typename T> static void expect_base_at_first(const Shape& base) {
    // Run the first step with B = 0.
    auto set = [](auto& f) {
        for (const Parameter& p : f.t.model.parameters)
            if (p.name.ends_with("lora_B.weight"))
                set_weight(f.t, p, std::vector<double>(p.elements(), 0).data());
    };
    Plan train = small_plan(2, 9, 2);
    Fixture<T> plain(base, {train}), adapted(with_lora(base, 2), {train});
    set(adapted);
    EXPECT_EQ(plain.step(), adapted.step());

    // Look at what each parameter has.
    size_t trained = 0;
    for (const Parameter& p : adapted.t.model.parameters) {
        Data d = {Kind::GRAD, p.bucket};
        bool adapter = p.name.find(".lora_") != std::string::npos;
        EXPECT_EQ(bool(address<char>(adapted.t, d)), adapter) << p.name;
        for (Kind kind : {Kind::MASTER, Kind::STATE})
            if (!adapter) {
                EXPECT_FALSE(address<char>(adapted.t, {kind, p.bucket, 0})) << p.name;
            }
        if (!adapter) continue;
        const acc_t<T>* grad = adapted.grad(p);
        bool zero = std::all_of(grad, grad + p.elements(), [](acc_t<T> x) { return x == 0; });
        EXPECT_EQ(zero, p.name.ends_with("lora_A.weight")) << p.name;
        trained += p.elements();
    }
    EXPECT_GT(trained, 0u);

    // The step has changed B, but not the base.
    for (const Parameter& p : plain.t.model.parameters) {
        Fixture<T> fresh(base, {train});
        const Parameter* same = nullptr;
        for (const Parameter& q : adapted.t.model.parameters)
            if (q.name == p.name) same = &q;
        ASSERT_TRUE(same);
        EXPECT_EQ(memcmp(fresh.weight(p), adapted.weight(*same), p.elements() * sizeof(T)), 0);
        break; // one bucket stands for all: none has an UPDATE
    }
    for (const Action& a : adapted.t.plans[0].actions)
        if (a.op == Op::UPDATE) {
            EXPECT_EQ(adapted.t.model.buckets[a.bucket].role, Role::ADAPTER);
        }
}
TEST(Lora, TheFirstStepIsTheBases) {
    expect_base_at_first<float>(small_gpt2());
    expect_base_at_first<bf16>(small_llama());
}

// Below the lowest adapter nothing runs backward and nothing is kept. The reference runs backward
// to the first block, through adapters that change nothing: losses and weights have its bits.
template <typename T> static void expect_backward_ends(const Shape& base, int first) {
    for (Recompute level : {Recompute::NONE, Recompute::SELECTIVE, Recompute::FULL})
        for (bool split : {false, true}) {
            Plan p = small_plan(2, 16, 2, level, split);
            Fixture<T> whole(upper_lora(base, 4, first, false), {p});
            Fixture<T> ends(upper_lora(base, 4, first, true), {p});
            for (int step = 0; step < 3; step++) {
                double loss = whole.step();
                EXPECT_EQ(ends.step(), loss) << "step " << step;
            }

            // Compare the adapters that both have.
            size_t compared = 0;
            for (const Parameter& q : ends.t.model.parameters)
                for (const Parameter& r : whole.t.model.parameters) {
                    if (!is_adapter(ends.t.model, q) || q.name != r.name) continue;
                    size_t bytes = q.elements() * sizeof(T);
                    EXPECT_EQ(memcmp(ends.weight(q), whole.weight(r), bytes), 0) << q.name;
                    compared++;
                }
            EXPECT_GT(compared, 0u);

            // Look at the plans, and at what their activations take.
            auto lowest = [](const Fixture<T>& f) {
                int least = 99;
                for (const Action& a : f.t.plans[0].actions)
                    if (reaches_weights(a.op)) least = std::min(least, a.layer);
                return least;
            };
            auto passing = [](const Fixture<T>& f) {
                return f.t.arena.device().bytes - f.t.arena.device().persistent_bytes;
            };
            EXPECT_EQ(lowest(whole), 1);
            EXPECT_EQ(lowest(ends), first + 1);
            if (level == Recompute::NONE) {
                EXPECT_LT(passing(ends), passing(whole));
            }
        }
}
TEST(Lora, BackwardEndsAtTheLowestAdapter) {
    for (int first : {1, 2}) {
        expect_backward_ends<float>(small_gpt2(), first);
        expect_backward_ends<bf16>(small_variant(small_llama(), "gemma2"), first);
    }
}

// An adapter of full rank learns as its matrix would. With A the identity, B = 0 and scale s = 1,
// the first SGD step changes W + s B A by -lr s^2 dB A = -lr dW, as a step of W itself does. LoRA+
// gives B a rate of its own, here four times the learning rate, which is a quarter in return.
TEST(Lora, OfFullRankTheFirstStepIsThatOfTheWeights) {
    Shape base = small_gpt2();
    base.F = base.C; // square, so that a rank of C is allowed
    Adapters square;
    square["h.1.mlp.c_fc"] = {base.C, 1.0, 4};
    Shape s = base;
    s.tuned.adapters = std::make_shared<const Adapters>(square);

    // Make both models, with plain SGD.
    Plan train = small_plan(2, 9, 1);
    train.optimizer = Optimizer::SGD;
    Fixture<double> plain(base, {train}), adapted(s, {train});
    for (auto* f : {&plain, &adapted})
        f->t.hyper.lr = 0.5f, f->t.hyper.clip = 0, f->t.hyper.weight_decay = 0;
    adapted.t.hyper.lr /= 4; // B learns four times as fast, A does not
    const Parameter *w = nullptr, *a = nullptr, *b = nullptr;
    for (const Parameter& p : adapted.t.model.parameters) {
        if (p.name.ends_with("h.1.mlp.c_fc.weight")) w = &p;
        if (p.name.ends_with("lora_A.weight")) a = &p;
        if (p.name.ends_with("lora_B.weight")) b = &p;
    }
    ASSERT_TRUE(w && a && b);

    // Set A to the identity and B to zero, and run one step of each.
    EXPECT_EQ(learning_rate_of(adapted.t.model, *a), 1);
    size_t C = base.C;
    std::vector<double> one(C * C, 0), none(C * C, 0);
    for (size_t i = 0; i < C; i++) one[i * C + i] = 1;
    set_weight(adapted.t, *a, one.data()), set_weight(adapted.t, *b, none.data());
    EXPECT_NEAR(plain.step(), adapted.step(), 1e-14);

    // The base's matrix and the frozen one with B added are now the same, to a float's rounding.
    for (const Parameter& p : plain.t.model.parameters) {
        if (p.name != w->name) continue;
        const double *full = plain.weight(p), *was = adapted.weight(*w),
                     *change = adapted.weight(*b);
        double moved = 0;
        for (size_t i = 0; i < C * C; i++) {
            EXPECT_NEAR(full[i], was[i] + change[i], 1e-9); // the learning rate is a float
            moved = std::max(moved, std::abs(change[i]));
        }
        EXPECT_GT(moved, 1e-3);
    }
}

// A rank that is too large, or a name that no matrix has, is refused in one line.
TEST(Lora, RefusesRanksAndNamesThatNoMatrixHas) {
    Model m = make_model(small_gpt2());
    Adapters none;
    EXPECT_EQ(
        choose_adapters(m, {25, 50, false, "all"}, &none),
        "--lora 25 is beyond h.0.attn.c_attn.weight, which is 72 x 24: use --lora 24 or less");
    EXPECT_EQ(choose_adapters(m, {2, 4, false, "c_attn,q_proj"}, &none),
              "--lora-targets q_proj: no matrix of a block has this name: try all, attention, or "
              "some of c_attn, c_proj, c_fc");
    Adapters some;
    EXPECT_EQ(choose_adapters(m, {4, 8, true, "attn.c_proj,c_fc"}, &some), "");
    EXPECT_EQ(some.size(), 6u);
    EXPECT_EQ(some["h.2.mlp.c_fc"].scale, 4);
    EXPECT_FALSE(some.count("h.0.mlp.c_proj"));

    // Routers choose as the base does and have no adapters. Experts have them where they are named.
    Adapters beside, experts, up;
    EXPECT_EQ(choose_adapters(make_model(small_shared()), {2, 4, false, "all"}, &beside), "");
    EXPECT_EQ(beside.size(), 3u * (4 + 3)); // q, k, v, o; the dense or the shared ffn
    EXPECT_TRUE(beside.count("model.layers.2.mlp.shared_expert.down_proj"));
    EXPECT_HAS(choose_adapters(make_model(small_mixtral()), {2, 4, false, "gate"}, &beside),
               "try all, attention, experts, or some of q_proj, k_proj, v_proj, o_proj, w1, w3, w2");
    EXPECT_EQ(choose_adapters(make_model(small_shared()), {2, 4, false, "experts"}, &experts), "");
    EXPECT_EQ(experts.size(), 2u * 3); // the first block has none
    EXPECT_TRUE(experts.count("model.layers.2.mlp.experts.{}.down_proj"));
    EXPECT_EQ(choose_adapters(make_model(small_shared()), {2, 4, false, "up_proj"}, &up), "");
    EXPECT_EQ(up.size(), 3u + 2);

    // The first block has no experts: a target that finds nothing in the blocks of --lora-layers
    // is refused, alone or beside others.
    EXPECT_HAS(choose_adapters(m, {2, 4, false, ""}, &none), "--lora-targets : no matrix of a");
    for (const char* targets : {"experts", "all,experts"})
        EXPECT_HAS(choose_adapters(make_model(small_shared()), {2, 4, false, targets, "0"}, &none),
                   "--lora-targets experts: no matrix of a block of --lora-layers has this name");
}

// The input of a frozen product is gone when the forward pass is over: its gradient alone would
// read it. An adapter beside the product, in any block, keeps it.
TEST(Lora, NothingIsKeptForFrozenProducts) {
    auto kept = [](const Shape& s) {
        Plan p = small_plan(2, 16, 1);
        return data_bytes<float>(p, make_model(s), {Kind::KEPT_W, 2}, Cpu{});
    };
    // Rows of the Llama: norm_1, norm_2 (32), swiglu (44), attention (32) and the middle's, which
    // its norm reads; each ends at a multiple of 256 bytes.
    Shape s = small_llama(), prefixed = s;
    prefixed.tuned.prefix = 3;
    size_t N = 32, C = N * 32 * sizeof(float), F = N * 44 * sizeof(float);
    EXPECT_EQ(kept(with_lora(s, 2)), kept(s));
    EXPECT_EQ(kept(with_lora(s, 2, "attention")), kept(s) - C - F);
    EXPECT_EQ(kept(with_lora(s, 2, "down_proj")), kept(s) - 2 * C);
    EXPECT_EQ(kept(with_lora(s, 2, "k_proj,up_proj")), kept(s) - F);
    EXPECT_EQ(kept(prefixed), kept(s) - 2 * C - F);

    Shape g = small_gpt2();
    size_t G = N * 24 * sizeof(float);
    EXPECT_EQ(kept(with_lora(g, 2, "c_attn")), kept(g) - G - 4 * G);
    EXPECT_EQ(kept(with_lora(g, 2, "c_proj")), kept(g) - 2 * G);
}

// --lora-layers names blocks and ranges of them; what names no block is refused.
TEST(Lora, StandsInTheBlocksThatAreNamed) {
    Model m = make_model(small_gpt2());
    auto choose = [&](const std::string& layers) {
        Adapters chosen;
        std::string wrong = choose_adapters(m, {2, 4, false, "c_fc", layers}, &chosen);
        std::string found;
        for (const auto& [module, adapter] : chosen) found += module.substr(2, 1);
        return wrong + found;
    };
    EXPECT_EQ(choose("all"), "012");
    EXPECT_EQ(choose("0-2"), "012");
    EXPECT_EQ(choose("1"), "1");
    EXPECT_EQ(choose("2,0"), "02");
    EXPECT_EQ(choose("0,1-2"), "012");
    EXPECT_EQ(choose("1-3"), "--lora-layers 1-3: the last block is 2: use that or less");
    EXPECT_EQ(choose("2-1"), "--lora-layers 2-1: 2-1 runs down: write 1-2");
    for (std::string none : {"", "-1", "1-", "1,", "x", "1 -2", "0-1-2", "12345678"})
        EXPECT_HAS(choose(none), "is no block and no range: write 3 or 8-11") << none;
}

// Adapters of rank 16 beside all matrices have as many parameters as was published, and so has the
// base. What both take is in test_run: ExplainSaysTheMemoryOfAdapters.
TEST(Lora, HasTheParametersOfTheTable) {
    for (auto [name, base, count] : {std::tuple("gpt2", 124439808l, 2359296l),
                                     {"llama2-7b", 6738415616, 39976960},
                                     {"llama3-8b", 8030261248, 41943040},
                                     {"llama3-70b", 70553706496, 207093760}}) {
        Shape s;
        for (const Preset& p : model_presets())
            if (p.name == std::string(name)) s = p.shape;
        Model m = make_model(with_lora(s, 16));
        size_t adapters = 0;
        for (const Parameter& p : m.parameters) adapters += is_adapter(m, p) ? p.elements() : 0;
        EXPECT_EQ(adapters, size_t(count)) << name;
        EXPECT_EQ(parameter_count(m) - adapters, size_t(base)) << name;
    }
}

// Routers of zeros send every token to the first K experts.
static void zero_routers(Fixture<double>& f) {
    for (const Parameter& p : f.t.model.parameters)
        if (p.name.ends_with("block_sparse_moe.gate.weight"))
            set_weight(f.t, p, std::vector<double>(p.elements()).data());
}

// Where all tokens choose the first K experts, the others get gradients of zero, which the first
// micro-batch of each step must write, and the run goes on.
TEST(Experts, AllTokensMayChooseTheSame) {
    Shape s = small_mixtral();
    Fixture<double> f(s, {small_plan(2, 9, 2, Recompute::FULL)});
    zero_routers(f);
    f.t.hyper.lr = 0;

    // Run two steps, so that old gradients would show.
    for (int step = 0; step < 2; step++) {
        EXPECT_TRUE(std::isfinite(f.step()));
        ExpertBalance balance = expert_balance(step_loads(f.t), s.experts.E);
        EXPECT_DOUBLE_EQ(balance.max_vio, double(s.experts.E) / double(s.experts.K) - 1);
        EXPECT_EQ(balance.least, 0);
        EXPECT_EQ(expert_loads(f.t, int(s.L))[0], 2 * 9 * 2); // tokens of this step alone

        // Only the first K experts have gradients.
        for (const Parameter& p : f.t.model.parameters) {
            if (p.stack == 1) continue;
            size_t one = p.elements() / p.stack;
            f.t.plan = 0;
            for (size_t e = 0; e < p.stack; e++) {
                double most = 0;
                for (size_t i = 0; i < one; i++)
                    most = std::max(most, std::fabs(f.grad(p)[e * one + i]));
                EXPECT_EQ(most > 0, e < s.experts.K) << p.name << " " << e;
            }
        }
    }
}

// All tokens choose the first K experts, and these have room for some tokens of each sequence. The
// rest is dropped and counted; the loads say what was chosen. A segment's blocks route again in
// backward and count no token twice.
void expect_dropped(const Plan& plan) {
    Shape s = with_capacity(small_mixtral());
    Fixture<double> f(s, {plan});
    zero_routers(f);
    f.t.hyper.lr = 0;

    // A capacity of ceil(0.75 * 2 * 9 / 6) = 3 leaves three of nine tokens, in each step alone.
    for (int step = 0; step < 2; step++) {
        EXPECT_TRUE(std::isfinite(f.step()));
        std::vector<int64_t> loads = step_loads(f.t);
        EXPECT_EQ(loads.size(), s.L * s.experts.E);
        EXPECT_EQ(loads[0], 2 * 9 * 2);
        EXPECT_DOUBLE_EQ(dropped_share(f.t, loads), 6.0 / 9);
    }
}
TEST(Experts, CapacityDropsWhatIsOver) {
    Plan alone = small_plan(2, 9, 2, Recompute::FULL), segment = alone;
    segment.recompute.segments = {3};
    expect_dropped(alone), expect_dropped(segment);
}

// Experts with room for all tokens change no bit. The counts of drops are there, and zero.
TEST(Experts, CapacityForAllIsNoCapacity) {
    for (const Shape& s : {small_mixtral(), small_shared(), small_mla(true)}) {
        Fixture<float> f(s, {small_plan(2, 9, 2)});
        Fixture<float> wide(with_capacity(s, double(s.experts.E) / double(s.experts.K)), {small_plan(2, 9, 2)});
        for (int step = 0; step < 2; step++) EXPECT_EQ(f.step(), wide.step());
        EXPECT_EQ(f.state(), wide.state());
        EXPECT_EQ(dropped_share(f.t, step_loads(f.t)), -1);
        EXPECT_EQ(dropped_share(wide.t, step_loads(wide.t)), 0);
    }
}

// Drops are causal: with the same capacity, the losses of a sequence's beginning are those of the
// beginning alone, whatever follows it and whatever other sequences there are.
TEST(Experts, LaterTokensDropNoEarlierOnes) {
    // Twelve tokens with half an even share have the capacity of eight tokens with 3/4 of one.
    auto losses = [](size_t B, size_t T, double factor) {
        Plan p = small_plan(B, T, 1);
        p.mode = Mode::EVALUATE;
        Fixture<double> f(with_capacity(small_mixtral(), factor), {p});
        Window longest = random_window(f.t.model.shape, 12);
        f.t.data.window = [&, T](uint64_t sample, int* tokens, int* targets) {
            int all[12], next[12];
            longest(sample, all, next);
            std::copy_n(all, T, tokens);
            std::copy_n(next, T, targets);
            return std::string();
        };
        run_plan(f.t, 0);
        const double* rows = row_losses(f.t, 0).losses;
        return std::vector<double>(rows, rows + T);
    };
    std::vector<double> whole = losses(3, 12, 0.5), part = losses(1, 8, 0.75);
    std::vector<double> dropless = losses(1, 8, 0);

    // Products may add up in another order, so allow for the rounding of sums of about 50 numbers.
    double most = 0;
    for (size_t i = 0; i < part.size(); i++) {
        EXPECT_NEAR(whole[i], part[i], 1e-12);
        most = std::max(most, std::fabs(part[i] - dropless[i]));
    }
    EXPECT_GT(most, 1e-3);
}

// With a capacity the rows of experts have less room: a rank of three that share out experts gets
// at most an even share of the choices of all three. Generation has room for every choice. The sort
// has a group for dropped slots, also where all experts are here.
TEST(Experts, CapacityBoundsTheRowsOfARank) {
    Model model = make_model(with_capacity(small_mixtral(), 1));
    Plan p = small_plan(2, 9, 1);
    p.layout.ep = 3;
    EXPECT_EQ(expert_counts(rank_shape(p, model), p.rows()).rows, p.rows() * model.shape.experts.K);
    p.layout.ep = 1;
    EXPECT_EQ(expert_counts(rank_shape(p, model), p.rows()).groups, model.shape.experts.E + 1);
    p.layout.ep = 3, p.mode = Mode::GENERATE;
    EXPECT_EQ(expert_counts(rank_shape(p, model), p.rows()).rows, 3 * p.rows() * model.shape.experts.K);
}

// Whole experts take rows of tp ranks, whose groups may begin and end within a sequence: a rank has
// room for what each sequence that such a group meets may give it.
TEST(Experts, AGroupOfRowsMeetsSequences) {
    Shape s = small_mixtral();
    for (size_t T : {4, 6, 8, 9})
        for (size_t tokens = 1; tokens <= 30; tokens++) {
            size_t most = 0;
            for (size_t first = 0; first < T * tokens; first += tokens)
                most = std::max(most, (first + tokens - 1) / T - first / T + 1);
            s.experts.capacity.T = T;
            EXPECT_EQ(sequences_met(s, tokens), most) << T << " " << tokens;
        }

    // Four ranks of two sequences of nine tokens, cut in two: a rank routes nine rows.
    Layout l = small_layout(2, 2);
    l.ep = 3, l.experts.whole = l.sequence_parallel = true;
    Model model = make_model(small_mixtral(), l);
    Plan p = small_plan(2, 9, 1);
    p.layout = l;
    ExpertCounts n = expert_counts(rank_shape(p, model), p.rows());
    EXPECT_EQ((std::vector<size_t>{n.tokens, n.slots, n.rows}), (std::vector<size_t>{27, 54, 54}));
    EXPECT_EQ(rank_shape(p, model).F, small_mixtral().F);
}

// The balance of a model is that of its worst block. Blocks without loads are dense, and left out.
TEST(Experts, BalanceIsThatOfTheWorstBlock) {
    ExpertBalance b = expert_balance({2, 2, 2, 2, 0, 0, 0, 0, 4, 1, 1, 2}, 4);
    EXPECT_DOUBLE_EQ(b.max_vio, 1);
    EXPECT_DOUBLE_EQ(b.least, 0.5);
    b = expert_balance({4, 1, 1, 2, 0, 0, 0, 0, 2, 2, 2, 2}, 4); // in any order
    EXPECT_DOUBLE_EQ(b.max_vio, 1);
    EXPECT_DOUBLE_EQ(b.least, 0.5);
    EXPECT_EQ(expert_balance({0, 0, 0}, 3).max_vio, -1);
    EXPECT_EQ(expert_balance({0, 0, 0}, 3).least, 0);
    EXPECT_EQ(expert_balance({}, 0).max_vio, -1);
}

// The bias of an expert with less than an even share of tokens grows by the rate, with more it
// shrinks, and with an even share it stays. Tokens that chose a few experts spread over all.
TEST(Experts, BiasesFollowTheLoads) {
    Shape s = small_mla(true);
    s.experts.groups = s.experts.kept_groups = 1;
    Fixture<double> f(s, {small_plan(4, 16, 1)});
    f.t.hyper.lr = 0;
    ChoiceBiases biases = read_choice_biases(f.t);
    ASSERT_EQ(biases.size(), s.L);
    EXPECT_TRUE(biases[0].empty()); // the first block is dense
    EXPECT_EQ(expert_loads(f.t, 1), address<int>(f.t, {Kind::LOADS}));
    biases[1].assign(s.experts.E, 0), biases[2] = biases[1];
    move_choice_biases(f.t, biases, {0, 0, 0, 0, 0, 0, 3, 2, 1, 2, 2, 2, 0, 0, 0, 0, 0, 6}, 0.5f);
    EXPECT_EQ(biases[1], (std::vector<float>{-0.5, 0, 0.5, 0, 0, 0}));
    EXPECT_EQ(biases[2], (std::vector<float>{0.5, 0.5, 0.5, 0.5, 0.5, -0.5}));
    EXPECT_EQ(read_choice_biases(f.t), biases);

    // After some steps the loads go up and down around an even share: average the last ten.
    f.step();
    double before = expert_balance(step_loads(f.t), s.experts.E).max_vio, after = 0;
    for (int step = 0; step < 25; step++) {
        move_choice_biases(f.t, biases, step_loads(f.t), 0.04f);
        f.step();
        if (step >= 15) after += expert_balance(step_loads(f.t), s.experts.E).max_vio / 10;
    }
    EXPECT_GT(before, 1);
    EXPECT_LT(after, before / 2);
}

// Balance terms are computed over the whole step: their part of the router's gradient is the same
// from one micro-batch of four samples as from four micro-batches of one.
TEST(Experts, BalanceKnowsNoMicroBatch) {
    // The gradients of all routers after a step with these weights of the terms.
    auto router_gradient = [](double balance, double z, size_t B, int micro_batches) {
        Shape s = small_mixtral();
        s.experts.balance = balance, s.experts.z_loss = z;
        Fixture<double> f(s, {small_plan(B, 9, micro_batches)});
        f.t.hyper.lr = 0, f.t.hyper.clip = 0;
        f.step();
        std::vector<double> all;
        f.t.plan = 0;
        for (const Parameter& p : f.t.model.parameters)
            if (p.name.ends_with("block_sparse_moe.gate.weight"))
                all.insert(all.end(), f.grad(p), f.grad(p) + p.elements());
        return all;
    };

    // Compare, one term at a time. The term must have a part in the gradient at all.
    for (auto [balance, z] : {std::pair(1., 0.), {0., 1.}}) {
        auto none = router_gradient(0, 0, 4, 1), one = router_gradient(balance, z, 4, 1);
        auto four = router_gradient(balance, z, 1, 4);
        double share = 0;
        for (size_t i = 0; i < one.size(); i++) {
            share = std::max(share, std::fabs(one[i] - none[i]));
            EXPECT_NEAR(one[i], four[i], 1e-12);
        }
        EXPECT_GT(share, 1e-4);
    }
}

// Weights and gradients of the vocabulary's padding are zero after two steps.
TEST(Gradients, PaddingStaysZero) {
    for (const Shape& s : all_shapes()) {
        Fixture<float> f(s, {small_plan(2, 16, 2)});
        f.step();
        f.step();
        for (const Parameter& p : f.t.model.parameters)
            for (size_t i = p.file_elements(); i < p.elements(); i++) {
                ASSERT_EQ(f.weight(p)[i], 0) << p.name;
                ASSERT_EQ(f.grad(p)[i], 0) << p.name;
            }
    }
}

// Initial weights are drawn from the parameter's own name, and are zero in
// the vocabulary's padding.
TEST(Init, WeightsComeFromNamesAndPaddingIsZero) {
    Small<float> small(small_gpt2(false), {small_plan(1, 8, 1)});
    Trainer<float, Cpu>& t = small.t;
    init_weights(t, 9);
    for (const Parameter& p : t.model.parameters) {
        const float* w = address<const float>(t, {Kind::WEIGHT, p.bucket}) + p.offset;
        for (size_t i = 0; i < p.elements(); i++) {
            float drawn = float(double(p.init.std) * normal(9, fnv1a(p.name), i));
            ASSERT_EQ(w[i], i >= p.file_elements() ? 0
                            : p.init.std > 0       ? drawn
                                                   : p.init.value)
                << p.name << "[" << i << "]";
        }
    }
}

// The mean and the deviation of a parameter's first values by the published rule, and whether they
// are published as normal numbers: GPT-2 (openai/gpt-2: 0.02; its paper: residual layers are scaled
// by 1 / sqrt(2L)), which Megatron-LM takes for Llama's blocks and experts; biases zero, norms one
// (Gemma stores its norms less one); PEFT's A as wide as kaiming_uniform(sqrt 5), B zero.
struct FirstValues {
    double mean;
    double deviation;
};
FirstValues published_values(const Shape& s, const Parameter& p) {
    auto ends = [&](std::initializer_list<const char*> words) {
        return std::any_of(words.begin(), words.end(),
                           [&](const char* word) { return p.name.ends_with(word); });
    };

    // Adapters: kaiming_uniform's bound is 1 / sqrt(in), and a uniform number deviates by it / sqrt 3.
    if (ends({"lora_A.weight"})) return {0, std::sqrt(1.0 / 3 / double(p.shape[1]))};
    if (ends({"lora_B.weight", "bias"})) return {0, 0};

    // modded-nanogpt: what adds to the stream and the head start at zero, the table at N(0, 1), the
    // others at N(0, 0.33 / C). nanochat: the same but for numbers, and a narrow head.
    bool nanochat = s.hf_type.starts_with("nanochat"), relu2 = nanochat || s.hf_type == "track3";
    double block = nanochat ? double(p.layer - 1) / double(s.L - 1) : 0;
    if (ends({"resid_lambda"})) return {1.15 - 0.1 * block, 0};
    if (ends({"x0_lambda"})) return {0.2 - 0.15 * block, 0};
    if (ends({"ve_gate.weight"})) return {0.01, 0.02 / std::sqrt(12)}; // uniform from 0 to 0.02
    if (relu2 && ends({"o_proj.weight", "fc2.weight"}))
        return {0, 0};
    if (relu2 && ends({"lm_head.weight"})) return {0, nanochat ? 0.001 : 0};
    if (nanochat && has(p.name, "embed_tokens")) return {0, 0.8};
    if (nanochat) return {0, (has(p.name, "fc1") ? 0.4 : 1) / std::sqrt(double(s.C))};
    if (s.hf_type == "track3" && !has(p.name, "norm"))
        return {0, has(p.name, "embed_tokens") ? 1 : std::sqrt(0.33 / double(s.C))};

    // Norms.
    bool gemma = s.hf_type.starts_with("gemma");
    bool norm = has(p.name, "norm") || has(p.name, "ln_") || has(p.name, "layer_norm");
    if (norm) return {gemma ? 0.0 : 1.0, 0};

    // Products that write to the residual stream: two in each of the three blocks.
    bool residual = ends({"c_proj.weight", "o_proj.weight", "down_proj.weight", "w2.weight",
                          "attention.dense.weight", "dense_4h_to_h.weight", "fc2.weight"});
    return {0, residual ? 0.02 / 2.449489742783178 : 0.02};
}

// The weights that a run begins with have the published mean and deviation, in every family and
// beside adapters. Tensors are small: a deviation over n numbers deviates by 1 / sqrt(2n) of itself,
// a mean by 1 / sqrt(n) of the deviation; five of these are allowed, and no number beyond 5.5.
TEST(Init, EachWeightHasItsPublishedMeanAndDeviation) {
    Shape prefixed = small_llama();
    prefixed.tuned.prefix = 40;
    std::vector<Shape> shapes = all_shapes();
    for (const Shape& s : {with_lora(small_gpt2(), 4), with_lora(small_llama(), 4),
                           with_lora(small_mixtral(), 4, "all,experts"), prefixed})
        shapes.push_back(s);

    std::set<std::string> kinds;
    for (const Shape& s : shapes) {
        ASSERT_EQ(s.L, 3u);
        Small<float> small(s, {small_plan(1, 8, 1)});
        init_weights(small.t, 11);
        for (const Parameter& p : small.t.model.parameters) {
            // Measure, without the padding.
            std::vector<float> w = get_weight(small.t, p);
            double n = double(p.file_elements()), sum = 0, squares = 0, most = 0;
            for (size_t i = 0; i < p.file_elements(); i++) sum += w[i];
            for (size_t i = 0; i < p.file_elements(); i++) {
                double off = w[i] - sum / n;
                squares += off * off;
                most = std::max(most, std::fabs(off));
            }

            // Compare.
            FirstValues wanted = published_values(s, p);
            double deviation = std::sqrt(squares / n);
            double rounding = 1.2e-7 * std::fabs(wanted.mean); // of floats
            EXPECT_NEAR(sum / n, wanted.mean, 5 * wanted.deviation / std::sqrt(n) + rounding)
                << s.hf_type << " " << p.name;
            EXPECT_NEAR(deviation, wanted.deviation, 5 * wanted.deviation / std::sqrt(2 * n))
                << s.hf_type << " " << p.name;
            EXPECT_EQ(deviation > 0, wanted.deviation > 0) << s.hf_type << " " << p.name;
            EXPECT_LE(most, 5.5 * wanted.deviation) << s.hf_type << " " << p.name;
            kinds.insert(p.name.substr(p.name.rfind('.', p.name.rfind('.') - 1) + 1));
        }
    }
    for (const char* kind : {"lora_A.weight", "0.k", "wpe.weight", "w2.weight", "router.weight",
                             "self_attn.sinks", "kv_b_proj.weight", "shared_expert_gate.weight",
                             "gate.e_score_correction_bias", "embed_in.weight"})
        EXPECT_TRUE(kinds.count(kind)) << kind << " was not looked at";
}

// Track 3's first loss is the logarithm of the vocabulary, ln 50304 = 10.82584 in its published
// logs, for all logits are zero. Then the model learns.
TEST(Init, Track3BeginsWithAllTokensEquallyLikely) {
    Shape s = small_variant(small_llama(), "track3");
    Small<double> small(s, {small_plan(2, 16, 2)});
    init_weights(small.t, 11);
    small.t.hyper.lr = 1e-2f;
    small.t.data.window = random_window(s, 16);
    for (int step = 0; step < 5; step++) {
        run_plan(small.t, 0);
        double loss = plan_loss(small.t).mean();
        if (step == 0) {
            EXPECT_NEAR(loss, std::log(53.0), 1e-14);
        } else {
            EXPECT_LT(loss, std::log(53.0) - 0.01);
        }
    }
}

// The head in chunks of 64, 64 and 22 rows makes the same loss and gradients as in one chunk, to
// the rounding of float: the sums have another order.
TEST(Gradients, HeadInChunks) {
    for (Shape s : {small_gpt2(), small_llama(), small_variant(small_llama(), "track3")}) {
        s.P = 80;
        Fixture<float> whole(s, {small_plan(2, 75, 2)});
        s.loss.logits_bytes = 1;
        Fixture<float> chunks(s, {small_plan(2, 75, 2)});
        EXPECT_NEAR(whole.step(), chunks.step(), 1e-6);

        // Compare gradients by the norm of their difference.
        for (const Parameter& p : whole.t.model.parameters) {
            double off = 0, size = 0;
            for (size_t i = 0; i < p.elements(); i++) {
                off += std::pow(whole.grad(p)[i] - chunks.grad(p)[i], 2);
                size += std::pow(whole.grad(p)[i], 2);
            }
            EXPECT_LE(std::sqrt(off), 1e-5 * std::sqrt(size) + 1e-9) << p.name;
        }
    }
}

// ----------------------------------------------------------------------------
// what must not change a bit

template <typename T>
static std::vector<unsigned char> state_after(const Shape& s, Plan p, int steps,
                                              bool adamw = true) {
    p.optimizer = adamw ? Optimizer::ADAMW : Optimizer::SGD;
    Fixture<T> f(s, {p});
    for (int i = 0; i < steps; i++) f.step();
    return f.state();
}

template <typename T> static void expect_same_bits() {
    for (const Shape& s : {small_gpt2(), small_llama(), small_llama(true, true), small_qwen3(),
                           small_variant(small_llama(), "olmo2"),
                           small_variant(small_llama(), "gemma3_text")}) {
        std::vector<unsigned char> reference = state_after<T>(s, small_plan(2, 16, 3), 3);
        for (Recompute level : ALL_LEVELS)
            for (bool split : {false, true})
                EXPECT_EQ(reference, state_after<T>(s, small_plan(2, 16, 3, level, split), 3))
                    << "recompute " << int(level) << ", halves " << (split ? "apart" : "together");
    }
}

// Each block may have a recomputation level of its own: all 125 combinations of three blocks for
// GPT-2, every seventh of them for Llama's family, whose norms of q and k are recomputed too.
TEST(Bits, LevelsOfBlocksChangeNothing) {
    for (const Shape& s : {small_gpt2(), small_qwen3(), small_variant(small_llama(), "olmo2"),
                           small_variant(small_llama(), "gemma2")}) {
        std::vector<unsigned char> reference = state_after<float>(s, small_plan(2, 8, 1), 1);
        for (int number = 0; number < 125; number += s.family == Family::LLAMA ? 7 : 1) {
            Plan p = small_plan(2, 8, 1, three_levels(number), number % 2);
            EXPECT_EQ(reference, state_after<float>(s, p, 1)) << "levels " << number;
        }
    }
}

// Every level of recomputation, with backward passes whole or in two halves, changes no bit.
TEST(Bits, RecomputationAndHalvesApartChangeNothingInFloat) { expect_same_bits<float>(); }
TEST(Bits, RecomputationAndHalvesApartChangeNothingInBf16) { expect_same_bits<bf16>(); }

// ----------------------------------------------------------------------------
// accumulation

// Accumulated gradients differ only by rounding: ||g - g'|| / ||g|| <= 4 * 1.03^layers * eps
// (arXiv:2506.09280), times 8 for a sum of up to 8 micro-batches in another order.
TEST(Accumulation, MicroBatchesAgreeWithinTheBound) {
    for (const Shape& s : all_shapes()) {
        auto gradients = [&](size_t B, int micro_batches) {
            auto f = std::make_unique<Fixture<float>>(
                s, std::vector<Plan>{small_plan(B, 16, micro_batches)});
            f->step();
            return f;
        };

        // Compare one micro-batch with 2, 4 and 8, parameter by parameter.
        auto reference = gradients(8, 1);
        for (int m : {2, 4, 8}) {
            auto other = gradients(size_t(8 / m), m);
            for (const Parameter& p : reference->t.model.parameters) {
                double difference = 0, norm = 0;
                for (size_t i = 0; i < p.elements(); i++) {
                    double a = reference->grad(p)[i], b = other->grad(p)[i];
                    difference += (a - b) * (a - b), norm += a * a;
                }
                double bound = 8 * 4 * std::pow(1.03, double(s.L)) * 5.96e-8;
                EXPECT_LE(std::sqrt(difference), bound * std::sqrt(norm))
                    << p.name << ", " << m << " micro-batches";
            }
        }
    }
}

// ----------------------------------------------------------------------------
// documents

struct Sequence {
    std::vector<int> tokens, targets;
};

// The loss and the gradients of some sequences, as sums over their valid targets.
struct Sums {
    double loss = 0;
    std::vector<double> grads = {}; // of all parameters, one after the other
};
static Sums sums_of(const Shape& s, const std::vector<Sequence>& sequences, int document_end) {
    size_t T = sequences[0].tokens.size();
    Fixture<double> f(s, {small_plan(sequences.size(), T, 1)});
    f.t.hyper.lr = 0, f.t.data.document_end = document_end;
    f.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        std::copy_n(sequences[sample].tokens.begin(), T, tokens);
        std::copy_n(sequences[sample].targets.begin(), T, targets);
        return std::string();
    };
    run_plan(f.t, 0);
    Sums sums = {plan_loss(f.t).sum};
    for (const Parameter& p : f.t.model.parameters)
        for (size_t i = 0; i < p.elements(); i++)
            sums.grads.push_back(f.grad(p)[i] * double(f.t.data.valid));
    return sums;
}

// Documents packed into shared sequences give the same loss and gradients as each document in a
// sequence of its own. The second sequence begins inside a document, and ends inside one. 1e-12 is
// some thousand roundings.
TEST(Documents, PackedAreThoseAlone) {
    // Draw documents of these lengths, and build the sequences both ways.
    const int END = 7;
    uint64_t drawn = 0;
    std::vector<Sequence> packed, alone;
    for (const std::vector<size_t>& lengths :
         std::vector<std::vector<size_t>>{{5, 1, 7, 3}, {2, 14}}) {
        Sequence all;
        for (size_t length : lengths) {
            Sequence one;
            for (size_t i = 0; i <= length; i++)
                one.tokens.push_back(8 + int(random_block(3, fnv1a("documents"), drawn++)[0] % 40));
            bool ends = length < 14;
            if (ends) one.tokens[length - 1] = END;
            one.targets.assign(one.tokens.begin() + 1, one.tokens.end());
            one.tokens.pop_back();
            all.tokens.insert(all.tokens.end(), one.tokens.begin(), one.tokens.end());
            all.targets.insert(all.targets.end(), one.targets.begin(), one.targets.end());
            if (ends) one.targets.back() = -1;
            alone.push_back(one);
        }
        packed.push_back(all);
    }

    // Add up the documents one by one.
    std::vector<Shape> shapes = all_shapes();
    shapes.push_back(small_llama()), shapes.back().attention.window = 4;
    for (Shape s : shapes) {
        s.experts.balance = s.experts.z_loss = 0; // the balance terms mix the documents of a sequence
        Sums got = sums_of(s, packed, END), want = {0, std::vector<double>(got.grads.size())};
        for (const Sequence& document : alone) {
            Sums one = sums_of(s, {document}, -1);
            want.loss += one.loss;
            for (size_t i = 0; i < one.grads.size(); i++) want.grads[i] += one.grads[i];
        }

        // Compare. Without the mask the loss must differ. Gradients are compared all together,
        // because that of a key's bias is zero up to rounding.
        EXPECT_NEAR(got.loss, want.loss, 1e-12 * want.loss);
        EXPECT_GT(std::abs(sums_of(s, packed, -1).loss - want.loss), 1e-2);
        double size = 0, off = 0;
        for (size_t i = 0; i < want.grads.size(); i++) {
            size = std::hypot(size, want.grads[i]);
            off = std::hypot(off, got.grads[i] - want.grads[i]);
        }
        EXPECT_LE(off, 1e-12 * size);
    }
}

// ----------------------------------------------------------------------------
// access() tells the truth: an action changes no byte it does not declare, and depends on none it
// does not declare

template <typename T> static void expect_honest_access(const Shape& s, Plan options) {
    // Run a step first, so that persistent state is in use.
    Fixture<T> f(s, {options});
    f.step();
    const Plan& p = f.t.plans[0];
    Arena& arena = f.t.arena;
    std::vector<unsigned char> memory(arena.device().bytes);
    for (f.t.at = 0; f.t.at < int(p.actions.size()); f.t.at++) {
        Action a = p.actions[size_t(f.t.at)];
        Access x = access(p, f.t.model, a);

        // Mark the bytes that the action declares. The contents of scratch are not compared: they
        // depend on which thread took which task.
        std::vector<char> reads(arena.device().bytes), writes(arena.device().bytes),
            scratch(arena.device().bytes);
        auto mark = [&](std::vector<char>& map, const std::vector<Data>& data) {
            for (Data d : data)
                if (const Place* place = arena_find(arena, 0, f.t.at, d))
                    std::fill_n(map.begin() + long(place->offset), place->bytes, 1);
        };
        mark(reads, x.reads);
        mark(writes, x.writes);
        mark(scratch,
             {{Kind::SCRATCH, a.layer}});

        // Run it once as it is, and twice with every byte that it does not read poisoned: once with
        // NaN, and once with a number, because a sum that starts from NaN stays that NaN.
        memory.assign(arena.device().base, arena.device().base + arena.device().bytes);
        run_action(f.t, a);
        std::vector<unsigned char> after(arena.device().base,
                                         arena.device().base + arena.device().bytes);
        size_t undeclared = 0, dependent = 0;
        for (unsigned char poison : {0xff, 0x3f}) {
            for (size_t i = 0; i < arena.device().bytes; i++)
                arena.device().base[i] = reads[i] ? memory[i] : poison;
            run_action(f.t, a);
            for (size_t i = 0; i < arena.device().bytes; i++) {
                undeclared += !writes[i] && after[i] != memory[i];
                undeclared +=
                    !writes[i] && arena.device().base[i] != (reads[i] ? memory[i] : poison);
                bool result = writes[i] && !scratch[i] && arena.device().base[i] != poison &&
                              after[i] != memory[i];
                dependent += result && arena.device().base[i] != after[i];
            }
        }
        EXPECT_EQ(undeclared, 0u) << action_text(a, f.t.model)
                                  << " writes bytes that it does not declare";
        EXPECT_EQ(dependent, 0u) << action_text(a, f.t.model)
                                 << " depends on bytes that it does not declare";
        memcpy(arena.device().base, after.data(), after.size());
    }
}
TEST(Access, IsTheTruthForGpt2) {
    for (Recompute level : ALL_LEVELS)
        expect_honest_access<float>(small_gpt2(), small_plan(2, 8, 2, level, true));
}
TEST(Access, IsTheTruthForLlama) {
    for (Recompute level : ALL_LEVELS)
        expect_honest_access<bf16>(small_llama(), small_plan(2, 8, 2, level));
}
TEST(Access, IsTheTruthForTrack3AndOtherVariants) {
    Shape llama = small_llama();
    for (const Shape& s : {small_mixtral(), small_qwen3(), small_variant(llama, "track3"),
                           small_variant(llama, "nanochat_values")})
        for (int number : {0, 1 + 5 * 2 + 25 * 3, 4 + 5 * 0 + 25 * 2})
            expect_honest_access<bf16>(s, small_plan(2, 8, 2, three_levels(number), true));

    // Together the halves of the backward pass are other actions.
    for (int number : {0, 1 + 5 * 2 + 25 * 3, 4 + 5 * 0 + 25 * 2})
        expect_honest_access<bf16>(small_qwen3(), small_plan(2, 8, 2, three_levels(number)));
}

// Beside adapters frozen products' inputs are gone behind F, and the lowest trained block makes no
// gradient of its input.
TEST(Access, IsTheTruthBesideAdapters) {
    Shape prefixed = small_llama();
    prefixed.tuned.prefix = 3;
    for (Recompute level : {Recompute::NONE, Recompute::SELECTIVE})
        for (const Shape& s : {with_lora(small_gpt2(), 2, "c_attn"), prefixed,
                               upper_lora(small_llama(), 2, 1, true), with_lora(small_shared(), 2)}) {
            bool split = level == Recompute::NONE && !s.tuned.prefix;
            expect_honest_access<float>(s, small_plan(2, 8, 1, level, split));
        }
}

// Every planned buffer is written in a step, so none is planned in vain.
TEST(Access, EveryPlannedBufferIsWritten) {
    for (const Shape& s : all_shapes()) {
        Fixture<float> f(s, {small_plan(2, 16, 2)});
        const Plan& p = f.t.plans[0];
        f.t.plan = 0;
        for (f.t.at = 0; f.t.at < int(p.actions.size()); f.t.at++) {
            Action a = p.actions[size_t(f.t.at)];
            Access x = access(p, f.t.model, a);

            // Fill with a pattern what the action only writes, and run it.
            auto read_too = [&](Data d) {
                return std::count(x.reads.begin(), x.reads.end(), d) > 0;
            };
            for (Data d : x.writes)
                if (const Place* place = arena_find(f.t.arena, 0, f.t.at, d);
                    place && !read_too(d) && !persistent(d.kind))
                    memset(f.t.arena.device().base + place->offset, 0xa5, place->bytes);
            run_action(f.t, a);

            // Count the bytes that keep the pattern. Rows end at multiples of 256 bytes, so up to
            // 255 bytes a row may.
            for (Data d : x.writes) {
                const Place* place = arena_find(f.t.arena, 0, f.t.at, d);
                if (!place || read_too(d) || persistent(d.kind) || d.kind == Kind::SCRATCH)
                    continue;
                size_t untouched = 0;
                for (size_t i = 0; i < place->bytes; i++)
                    untouched += f.t.arena.device().base[place->offset + i] == 0xa5;
                EXPECT_LT(untouched, place->bytes / 20 + 20 * 256)
                    << action_text(a, f.t.model) << " leaves " << data_text(d, f.t.model);
            }
        }
    }
}

// ----------------------------------------------------------------------------
// learning

// bf16 has 8 significant bits. Its loss follows float's, within 2% of the first loss, at each of
// 100 steps of the same run.
TEST(Learning, Bf16FollowsFloat) {
    // Make a model of either type, with sequences that can be learned.
    Shape s = gpt2_shape(2, 2, 32, 61, 32);
    auto curve = [&](auto zero) {
        typedef decltype(zero) T;
        Small<T> small(s, {small_plan(4, 32, 1)});
        Trainer<T, Cpu>& t = small.t;
        init_weights(t, 3);
        t.hyper = {3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        t.data.window = [&](uint64_t sample, int* tokens,
                       int* targets) {
            for (int i = 0; i < 32; i++)
                tokens[i] = int((sample * 7 + uint64_t(i) * (1 + sample % 3)) % 61);
            for (int i = 0; i < 31; i++) targets[i] = tokens[i + 1];
            targets[31] = -1;
            return std::string();
        };

        // Train it.
        std::vector<double> losses;
        for (int i = 0; i < 100; i++, t.data.cursor += 4)
            run_plan(t, 0), losses.push_back(plan_loss(t).mean());
        return losses;
    };

    // Both curves stay together, and both models learn.
    std::vector<double> a = curve(float()), b = curve(bf16());
    for (size_t i = 0; i < 100; i++) EXPECT_NEAR(b[i], a[i], 0.02 * a[0]) << "step " << i;
    EXPECT_LT(a[99], 0.5 * a[0]);
    EXPECT_LT(b[99], 0.5 * b[0]);
}

// A gradient that is not finite changes no weight, and the optimizer does not count its step.
TEST(Learning, NonFiniteGradientsUpdateNothing) {
    Fixture<float> f(small_gpt2(), {small_plan(2, 16, 1)});
    f.step();
    const Parameter& p = f.t.model.parameters[5];
    float before = f.weight(f.t.model.parameters[0])[1];
    f.weight(p)[0] = NAN;
    f.step();
    const StepScale* scale = address<const StepScale>(f.t, {Kind::SCALE});
    EXPECT_EQ(scale->finite, 0);
    EXPECT_EQ(scale->step, 1);
    EXPECT_EQ(f.weight(f.t.model.parameters[0])[1], before);
}

// ----------------------------------------------------------------------------
// train_gpt_min.cpp: written separately, shares no code

// The trainer and the textbook train the same model on the same text: losses agree within 1e-5 and
// gradient norms within 1e-4 of themselves, which float's rounding explains.
TEST(Parity, SameLossesAsTrainGptMinForTwentySteps) {
    // Make the textbook's model.
    std::string text = read_file(ROOT + "/llmc/plan.h");
    const int B = 4, T = 32, STEPS = 20;
    min_gpt::Model m = {};
    m.V = 256, m.T = T, m.L = 2, m.NH = 4, m.C = 32;
    min_gpt::model_init(m, 1337);

    // Make the trainer's.
    std::string copy = put_file(scratch("parity.txt"), text);
    Tokenizer tokenizer;
    DataLoader loader;
    ASSERT_EQ(data_open(&loader, copy, Split::TRAIN, false, tokenizer, T, 256, 1337), "");
    Small<float> small(gpt2_shape(2, 4, 32, 256, T), {small_plan(B, T, 1)});
    Trainer<float, Cpu>& t = small.t;
    init_weights(t, 1337);
    t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(loader, sample, tokens, targets);
    };

    // Run both, step by step. The textbook draws its windows by its own code.
    size_t trained = text.size() - text.size() / 10;
    for (int step = 0; step < STEPS; step++) {
        std::vector<int> tokens(B * T), targets(B * T);
        for (int b = 0; b < B; b++) {
            size_t start =
                min_gpt::shuffled_window(uint64_t(step * B + b), (trained - 1) / T, 1337) * T;
            for (int i = 0; i < T; i++) {
                tokens[size_t(b * T + i)] = (unsigned char)text[start + size_t(i)];
                targets[size_t(b * T + i)] = (unsigned char)text[start + size_t(i) + 1];
            }
        }

        // A step of the textbook.
        float lr = min_gpt::learning_rate(step);
        float expected = min_gpt::model_forward(m, tokens.data(), targets.data(), B, T);
        min_gpt::model_backward(m);
        double norm = min_gpt::clip_gradients(m, 1.0);
        min_gpt::adamw_step(m, step, lr);

        // A step of the trainer.
        t.hyper = {lr, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        run_plan(t, 0);
        t.data.cursor += B;
        EXPECT_NEAR(plan_loss(t).mean(), expected, 1e-5) << "step " << step;
        EXPECT_NEAR(address<const StepScale>(t, {Kind::SCALE})->norm, norm, 1e-4 * norm)
            << "step " << step;
    }
}

// ----------------------------------------------------------------------------
// frozen weights

// Quantise a parameter to a narrow format and back, by calling the operators directly.
static std::vector<float> quantised(Stored stored, const Parameter& p,
                                    const std::vector<float>& x) {
    std::vector<float> back(x.size()), absmax(x.size());
    std::vector<uint8_t> codes(x.size()), scales(x.size());
    std::vector<int8_t> rows(x.size());
    if (stored == Stored::INT4) {
        int4_quantize(codes.data(), absmax.data(), x.data(), p.rows(), p.cols(), Cpu{});
        int4_dequantize(back.data(), codes.data(), absmax.data(), p.rows(), p.cols(), Cpu{});
        return back;
    }
    if (stored == Stored::INT8) {
        int8_quantize(rows.data(), absmax.data(), x.data(), p.rows(), p.cols(), Cpu{});
        int8_dequantize(back.data(), rows.data(), absmax.data(), p.rows(), p.cols(), Cpu{});
        return back;
    }

    // NF4 has scales of its scales, in a table.
    std::vector<float> table(nf4_table_floats(x.size()));
    nf4_quantize(codes.data(), absmax.data(), x.data(), x.size(), Cpu{});
    nf4_begin_table(table.data(), absmax.data(), nf4_blocks(x.size()));
    nf4_quantize_scales(scales.data(), table.data(), absmax.data(), nf4_blocks(x.size()), Cpu{});
    nf4_dequantize(back.data(), {codes.data(), scales.data(), table.data()}, x.size(), Cpu{});
    return back;
}

// The loss of an evaluation, losses and norms of three steps if there are adapters, then tokens
// that the model generates. wide: the weights are quantised to `stored` and back, and kept as T.
template <typename T>
static std::vector<double> frozen_losses(const Shape& s, Stored stored, bool wide, int tp,
                                         int dp = 1, int zero = 0) {
    std::vector<double> losses;
    auto body = [&](const Comm& world) {
        // Plan an evaluation, a generation, and training.
        Plan evaluate = small_plan(2, 9, 1), write = small_plan(1, 5, 1);
        evaluate.layout = layout_at(small_layout(dp, tp), world.rank);
        evaluate.layout.zero = zero;
        evaluate.mode = Mode::EVALUATE, write.mode = Mode::GENERATE, write.cache = 8;
        evaluate.stored = write.stored = wide ? Stored::WIDE : stored;
        write.layout = evaluate.layout;
        std::vector<Plan> plans = {evaluate, write};
        Plan train = evaluate;
        train.mode = Mode::TRAIN, train.micro_batches = 2, train.recompute = three_levels(44);
        if (s.tuned.adapters) plans.push_back(train);

        // Make the trainer, and set its weights.
        Small<T> f(s, plans);
        f.t.comms = make_comms(world, evaluate.layout);
        f.t.data.window = random_window(s, 9);
        EXPECT_EQ(check_pieces(stored, f.t.model, evaluate.layout), "");
        for (const Parameter& p : f.t.model.parameters) {
            std::vector<float> x(p.elements());
            const std::vector<double>& z = normals(5, p);
            for (size_t i = 0; i < p.file_elements(); i++) x[i] = p.init.value + 0.2f * float(z[i]);
            if (wide && is_narrow(stored, f.t.model, p)) x = quantised(stored, p, x);
            set_weight(f.t, p, x.data());
        }

        // Run the plans.
        run_plan(f.t, 0);
        double loss = plan_loss(f.t).mean();
        Sampling greedy = {};
        greedy.temperature = 0;
        std::vector<double> mine = {loss};
        for (int step = 0; step < 3 && s.tuned.adapters; step++) {
            f.t.hyper.lr = 1e-2f;
            run_plan(f.t, 2);
            mine.push_back(plan_loss(f.t).mean());
            mine.push_back(read_value<StepScale>(f.t, {Kind::SCALE}).norm);
        }
        generate(f.t, 1, {1, 7, 3, 9, 2}, 3, greedy, [&](int token) { mine.push_back(token); });
        if (world.rank == 0) losses = mine;
    };
    EXPECT_EQ(run_local_ranks(tp * dp, {}, body), 0);
    return losses;
}

static std::vector<Shape> frozen_shapes() {
    Shape qwen = llama_shape(2, 4, 2, 128, 256, 53, 64, 10000);
    qwen.attention.qkv_bias = true;
    return {gpt2_shape(2, 2, 128, 61, 32), qwen};
}

// A model with narrow weights computes, bit by bit, what a model computes that holds their values
// in full width; on one rank, and cut over two.
TEST(Frozen, NarrowWeightsAreTheValuesTheyStandFor) {
    for (const Shape& s : frozen_shapes())
        for (Stored stored : {Stored::NF4, Stored::INT8, Stored::INT4})
            for (int tp : {1, 2}) {
                std::vector<double> narrow = frozen_losses<float>(s, stored, false, tp);
                EXPECT_EQ(narrow, frozen_losses<float>(s, stored, true, tp)) << tp;
                EXPECT_EQ(narrow.size(), 4u);
                EXPECT_NE(narrow, frozen_losses<float>(s, Stored::WIDE, true, tp));
            }

    // Train adapters beside them: losses and norms are the same both ways.
    for (Stored stored : {Stored::NF4, Stored::INT8, Stored::INT4})
        for (int tp : {1, 2}) {
            Shape s = with_lora(frozen_shapes()[tp - 1], 4);
            std::vector<double> narrow = frozen_losses<float>(s, stored, false, tp);
            EXPECT_EQ(narrow, frozen_losses<float>(s, stored, true, tp)) << tp;
            EXPECT_EQ(narrow.size(), 10u);
            EXPECT_LT(narrow[5], narrow[1]) << "trained on the same samples";
        }
    EXPECT_EQ(frozen_losses<bf16>(frozen_shapes()[1], Stored::NF4, false, 2),
              frozen_losses<bf16>(frozen_shapes()[1], Stored::NF4, true, 2));
}

// Shards of narrow weights, brought together for each use, give the bits of whole ones: adapters
// beside them, on two and three data-parallel ranks, alone and cut by tensor parallelism too.
TEST(Frozen, ShardsOfNarrowWeightsAreTheWholeOnes) {
    for (Stored stored : {Stored::NF4, Stored::INT8, Stored::INT4})
        for (auto [tp, dp] : {std::pair{1, 2}, {1, 3}, {2, 2}}) {
            Shape s = with_lora(frozen_shapes()[size_t(tp - 1)], 4);
            std::vector<double> whole = frozen_losses<float>(s, stored, false, tp, dp, 2);
            EXPECT_EQ(whole.size(), 10u);
            EXPECT_EQ(frozen_losses<float>(s, stored, false, tp, dp, 3), whole) << tp << dp;
        }
    Shape s = with_lora(frozen_shapes()[1], 4);
    EXPECT_EQ(frozen_losses<bf16>(s, Stored::NF4, false, 1, 2, 3),
              frozen_losses<bf16>(s, Stored::NF4, true, 1, 2, 3));
}

// A block's matrices take 4 or 8 bits an element, and their scales; each part begins at a multiple
// of 256 bytes.
TEST(Frozen, BytesAreThoseOfTheFormat) {
    Shape s = llama_shape(1, 4, 4, 128, 256, 53, 64, 10000);
    for (Stored stored : {Stored::NF4, Stored::INT8, Stored::INT4}) {
        Plan p = small_plan(1, 4, 1);
        p.mode = Mode::EVALUATE, p.stored = stored;
        Small<bf16> f(s, {p});
        int block = find_bucket(f.t.model, Role::BLOCK, 1),
            head = find_bucket(f.t.model, Role::HEAD, 2);

        // Add up the bytes of a block.
        size_t want = 2 * 256; // two norms
        for (size_t n :
             {128 * 128, 128 * 128, 128 * 128, 128 * 128, 256 * 128, 256 * 128, 256 * 128}) {
            size_t rows = n == 128 * 128 ? 128 : 256;
            want += stored == Stored::NF4 ? n / 2 + round_up(n / 64, size_t(256)) +
                                                round_up(4 * (257 + n / 16384), size_t(256))
                    : stored == Stored::INT8 ? n + 4 * rows
                                             : n / 2 + 4 * n / 128;
        }

        // The last matrix, down, has rows of 256, so half as many of them.
        if (stored == Stored::INT8) want -= 4 * 128;
        auto bytes = [&](int bucket) {
            return data_bytes<bf16>(f.t.plans[0], f.t.model, {Kind::WEIGHT, bucket}, Cpu{});
        };
        EXPECT_EQ(bytes(block), want);
        EXPECT_EQ(bytes(head), 2 * f.t.model.buckets[head].elements);
        EXPECT_EQ(arena_find(f.t.arena, 0, 0, {Kind::WEIGHT, block})->bytes, want);

        // ZeRO-3 keeps a third, and has all three together while a layer runs.
        Plan cut = p;
        cut.layout = small_layout(3, 1);
        cut.layout.zero = 3;
        size_t third = round_up(ceil_div(want, size_t(3)), size_t(256));
        auto of = [&](Kind kind) { return data_bytes<bf16>(cut, f.t.model, {kind, block}, Cpu{}); };
        EXPECT_EQ(of(Kind::WEIGHT), third);
        EXPECT_EQ(of(Kind::GATHERED), 3 * third);

        // Codes cannot express NaN: the first float beside them is NaN if a value was.
        const Parameter* q = &f.t.model.parameters[f.t.model.buckets[block].first + 1];
        std::vector<float> x(q->elements(), 1);
        for (bool bad : {false, true}) {
            if (bad) x[77] = NAN;
            set_weight(f.t, *q, x.data());
            const Narrow& narrow = f.t.stored.narrow[q - f.t.model.parameters.data()];
            const float* mark = narrow.nf4.codes ? narrow.nf4.table : narrow.absmax;
            EXPECT_EQ(std::isnan(*mark), bad) << q->name;
        }
    }
}

// Tensor parallelism may not cut an NF4 block in two: it is refused, with a format that can be cut.
TEST(Frozen, PiecesAreWholeBlocks) {
    Model m = make_model(llama_shape(1, 4, 4, 96, 256, 53, 64, 10000), small_layout(1, 2));
    Layout two = small_layout(1, 2);
    EXPECT_EQ(
        check_pieces(Stored::NF4, m, two),
        "--weights nf4: --tp 2 cuts model.layers.0.self_attn.o_proj.weight every 48 elements, "
        "and its blocks have 64: use a smaller --tp, or --weights int8");
    EXPECT_EQ(check_pieces(Stored::INT8, m, two), "");
    EXPECT_EQ(check_pieces(Stored::WIDE, m, two), "");
}

// A rank's tokens travel while it computes: the second rank sends its own only once the first one
// has gone on, by either method.
TEST(Experts, TokensTravelBesideCompute) {
    for (bool exchange : {false, true}) {
        std::atomic<bool> goes_on = false;
        LocalSettings settings;
        settings.timeout_s = 20;
        EXPECT_EQ(run_local_ranks(2, settings, [&](const Comm& world) {
            // Each rank has three tokens, of which one stays at home.
            const size_t N = 3, C = 4, part = N * C;
            const int ids[] = {0, 1, 1, 0, 1, 0};
            Ctx<Cpu> ctx;
            ctx.shape.C = C, ctx.shape.experts.K = 1, ctx.shape.experts.E = ctx.shape.experts.ranks = 2;
            ctx.batch.B = 1, ctx.batch.T = N, ctx.ep = world;
            std::vector<double> rows(part, world.rank + 1), all(2 * part), scratch(4 * part);
            std::vector<char> lists(travel_bytes(2, N));
            ctx.experts.token_rows = all.data();
            if (exchange) ctx.experts.exchange_rows = scratch.data();
            blas_scratch(ctx.blas, lists.data(), lists.size());

            // Send, go on, and only then wait.
            while (world.rank == 1 && !goes_on && !world.local->world->failed)
                std::this_thread::yield();
            auto coming = start_tokens(ctx, rows.data(), ids);
            goes_on = true;
            const double* there = finish_tokens(ctx, coming);
            for (size_t row = 0; row < 2 * N; row++) {
                bool arrives = !exchange || ids[row] == world.rank;
                double mine = double(row / N + 1);
                EXPECT_EQ(arrives ? there[row * C] : mine, mine);
            }
        }), 0);
    }
}

// The exchange of tokens between expert ranks: a rank receives each row that its experts want once,
// and no other; the results that come home are summed. The cases include ranks that get no token
// and tokens that stay at home; an enumeration of all choices says what must arrive.
TEST(Experts, ExchangedRowsAreThoseThatAreWanted) {
    for (auto [ranks, experts, K, few] : {std::array{2, 2, 1, 0}, {3, 6, 2, 0}, {4, 12, 3, 0},
                                          {4, 8, 2, 1}, {3, 9, 9, 0}}) {
        const size_t N = 21, C = 5, R = size_t(ranks), E = size_t(experts), k = size_t(K);

        // Draw each row's K choices, ascending and different, from the first few experts
        // or from all.
        std::vector<int> ids;
        std::mt19937 random(unsigned(ranks * 100 + experts));
        for (size_t n = 0; n < R * N; n++) {
            std::vector<int> order(few ? k : E);
            std::iota(order.begin(), order.end(), 0);
            std::shuffle(order.begin(), order.end(), random);
            std::sort(order.begin(), order.begin() + K);
            ids.insert(ids.end(), order.begin(), order.begin() + K);
        }
        auto wants = [&](size_t row, size_t rank) {
            for (size_t j = 0; j < k; j++)
                if (size_t(ids[row * k + j]) / (E / R) == rank) return true;
            return false;
        };
        EXPECT_EQ(run_local_ranks(ranks, {}, [&, K = K](const Comm& world) {
            size_t me = size_t(world.rank), part = N * C;
            Ctx<Cpu> ctx;
            ctx.shape.C = C, ctx.shape.experts.K = k, ctx.shape.experts.E = E, ctx.shape.experts.ranks = R;
            ctx.batch.B = 1, ctx.batch.T = N, ctx.ep = world;
            std::vector<double> rows(part), all(R * part, NAN), scratch(2 * R * part, NAN),
                out(part, NAN);
            ctx.experts.exchange_rows = scratch.data();
            std::vector<char> lists(travel_bytes(R, N));
            blas_scratch(ctx.blas, lists.data(), lists.size());

            // Send the rows, and check which have arrived and how many bytes have left.
            for (size_t i = 0; i < part; i++) rows[i] = double(me * part + i);
            std::map<std::string, size_t> sent;
            world.info->sent = &sent;
            auto coming = send_tokens(ctx, all.data(), rows.data(), ids.data());
            finish_tokens(ctx, coming);
            size_t there = 0, back = 0;
            for (size_t row = 0; row < R * N; row++) {
                for (size_t c = 0; c < C && wants(row, me); c++)
                    EXPECT_EQ(all[row * C + c], double(row * C + c));
                there += row / N != me && wants(row, me);
                for (size_t r = 0; r < R; r++)
                    back += row / N == me && r != me && wants(row, r);
            }
            EXPECT_EQ(sent["world"], back * C * sizeof(double));

            // Return results: each rank multiplies its rows by its number. Rows that it was not
            // sent are NaN, because they must not be read.
            std::fill(all.begin(), all.end(), NAN);
            for (size_t row = 0; row < R * N; row++)
                for (size_t c = 0; c < C && (wants(row, me) || row / N == me); c++)
                    all[row * C + c] = wants(row, me) ? double((me + 1) * (row + c)) : 0;
            return_tokens(ctx, out.data(), all.data(), ids.data());
            for (size_t n = 0; n < N; n++)
                for (size_t c = 0; c < C; c++) {
                    double want = 0;
                    for (size_t r = 0; r < R; r++)
                        want += wants(me * N + n, r) ? double((r + 1) * (me * N + n + c)) : 0;
                    EXPECT_EQ(out[n * C + c], want);
                }
            EXPECT_EQ(sent["world"], (there + back) * C * sizeof(double));
            world.info->sent = nullptr;
        }), 0);

        // The planner's share: the probability that a draw of K from E experts meets a given rank.
        Shape s;
        s.experts.E = E, s.experts.K = k;
        double none = 1;
        for (size_t j = 0; j < k; j++)
            none *= double(E - E / R > j ? E - E / R - j : 0) / double(E - j);
        EXPECT_DOUBLE_EQ(exchanged_share(s, R), 1 - none);
    }
}
