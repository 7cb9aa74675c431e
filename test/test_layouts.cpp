// test_layouts.cpp - every layout is the same computation: losses, norms, gradients and weights of
// data parallelism, ZeRO and pipelines against one rank, ranks being threads
//   Bit by bit where llmc says so: pipelines against accumulation, stage 1 against 0, 3 against 2,
//   recomputation, backward's halves apart. Data parallelism adds in another order than
//   accumulation does: it is compared in double, where every difference but a mistake is 1e-12.
#include <gtest/gtest.h>
#include "../llmc/layout.h"
#include "small_models.h"

namespace {

struct Layout {
    int dp = 1, pp = 1, chunks = 1, zero = 0;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    Recompute recompute = Recompute::NONE;
    bool split = false;
    int micro_batches = 2; // of each data-parallel rank
    int shards = 0;        // 0: dp
    int prefetch = 1;
    int ranks() const { return dp * pp; }
    std::string text() const {
        const char* names[] = {"gpipe", "1f1b", "interleaved", "zero-bubble", "given"};
        return "dp " + std::to_string(dp) + " (shards " + std::to_string(shards ? shards : dp) +
               ") pp " + std::to_string(pp) + " x " + std::to_string(chunks) + " " +
               names[int(pipeline)] + " zero " + std::to_string(zero) + " recompute " +
               std::to_string(int(recompute)) + (split ? " split" : "") + " micro-batches " +
               std::to_string(micro_batches) + " prefetch " + std::to_string(prefetch);
    }
};

// What a run leaves: by bucket, padding as not written.
template <typename T> struct Result {
    std::vector<double> losses, norms;
    std::vector<std::vector<T>> weights;
    std::vector<std::vector<acc_t<T>>> grads;
    std::string wrong; // ranks that keep the same thing and differ
    std::mutex mutex;
};

// What one rank keeps of a bucket, into the whole; twice the same thing must be the same bits.
template <typename T, typename V>
void collect(Result<T>& r, std::vector<V>& whole, const V* kept, size_t first, size_t count,
             const Model& model, int bucket, const char* what) {
    std::lock_guard<std::mutex> lock(r.mutex);
    V unset = from_acc<V>(acc_t<V>(NAN));
    if (whole.empty()) whole.assign(model.buckets[size_t(bucket)].elements, unset);
    for (const TensorRow& row : tensor_rows(model, bucket, first, first + count))
        for (size_t i = row.offset; i < row.offset + row.n; i++) {
            V& to = whole[first + i];
            bool written = double(to_acc(to)) == double(to_acc(to));
            if (written && memcmp(&to, &kept[i], sizeof(V)))
                r.wrong = model.buckets[size_t(bucket)].name + ": ranks have different " + what;
            to = kept[i];
        }
}

constexpr size_t T_LENGTH = 8, B_SAMPLES = 2;

template <typename T>
void run_rank(const Comm& world, const Shape& shape, const Layout& l, bool adamw, int steps,
              Result<T>& result) {
    Plan p = small_plan(B_SAMPLES, T_LENGTH, l.micro_batches, l.recompute, l.split);
    Grid sizes;
    sizes.dp = l.dp, sizes.pp = l.pp;
    Grid me = grid_at(sizes, world.rank);
    p.pp = l.pp, p.pp_rank = me.pp_rank, p.chunks = l.chunks, p.pipeline = l.pipeline;
    p.shards = l.shards ? l.shards : l.dp, p.replicas = l.dp / p.shards;
    p.shard = me.dp_rank % p.shards, p.zero = l.zero, p.prefetch = l.prefetch, p.adamw = adamw;
    p.first_layer = split_layers(std::vector<double>(shape.L + 2, 1.0), p.stages());
    Fixture<T> f(shape, {p});
    f.t.grid = me, f.t.comms = make_comms(world, me, p.shards);
    f.t.hyper.adamw = adamw;
    if (!adamw) f.t.hyper.lr = 0.5f;
    for (int s = 0; s < steps; s++) {
        run_plan(f.t, 0);
        f.t.cursor += p.B * size_t(p.micro_batches * l.dp);
        double loss = plan_loss(f.t).mean();
        if (world.rank > 0) continue;
        result.losses.push_back(loss);
        result.norms.push_back(read_value<StepScale>(f.t, {Kind::SCALE}).norm);
    }
    for (int b = 0; b < int(f.t.model.buckets.size()); b++) {
        if (!bucket_is_mine(p, f.t.model, b)) continue;
        Data weight = {Kind::WEIGHT, b};
        const Plan& plan = f.t.plans[0];
        collect(result, result.weights[size_t(b)], address<const T>(f.t, weight),
                kept_first(plan, f.t.model, weight), kept_elements(plan, f.t.model, weight),
                f.t.model, b, "weights");
        Portion part = my_part(f.t, b);
        collect(result, result.grads[size_t(b)],
                part_of<const acc_t<T>>(f.t, {Kind::GRAD, b}, part), part.first, part.count,
                f.t.model, b, "gradients");
    }
}

template <typename T>
std::unique_ptr<Result<T>> run_layout(const Shape& shape, const Layout& l, bool adamw,
                                      int steps = 3, Moment moment = Moment::ANY) {
    auto result = std::make_unique<Result<T>>();
    size_t buckets = make_model(shape).buckets.size();
    result->weights.resize(buckets), result->grads.resize(buckets);
    LocalSettings settings;
    settings.moment = moment, settings.timeout_s = 60;
    EXPECT_EQ(run_local_ranks(
                  l.ranks(), settings,
                  [&](const Comm& world) { run_rank(world, shape, l, adamw, steps, *result); }),
              0)
        << l.text();
    EXPECT_EQ(result->wrong, "") << l.text();
    return result;
}

template <typename T>
void expect_same(const Result<T>& a, const Result<T>& b, const std::string& text) {
    EXPECT_EQ(a.losses, b.losses) << text;
    EXPECT_EQ(a.norms, b.norms) << text;
    for (size_t k = 0; k < a.weights.size(); k++) {
        auto bits = [&](const auto& x, const auto& y, const char* what) {
            ASSERT_EQ(x.size(), y.size()) << text << ": " << what << " of bucket " << k;
            EXPECT_EQ(memcmp(x.data(), y.data(), x.size() * sizeof(x[0])), 0)
                << text << ": " << what << " of bucket " << k;
        };
        bits(a.weights[k], b.weights[k], "weights"), bits(a.grads[k], b.grads[k], "gradients");
    }
}

double largest_error(const Result<double>& a, const Result<double>& b) {
    double worst = 0;
    auto compare = [&](const std::vector<double>& x, const std::vector<double>& y) {
        double most = 0, error = 0;
        if (x.size() != y.size()) error = INFINITY;
        for (size_t i = 0; i < std::min(x.size(), y.size()); i++) {
            if (y[i] != y[i]) continue; // padding
            most = std::max(most, std::abs(y[i]));
            double e = std::abs(x[i] - y[i]);
            error = e == e ? std::max(error, e) : INFINITY;
        }
        worst = std::max(worst, most > 0 ? error / most : error);
    };
    compare(a.losses, b.losses), compare(a.norms, b.norms);
    for (size_t k = 0; k < a.weights.size(); k++)
        compare(a.weights[k], b.weights[k]), compare(a.grads[k], b.grads[k]);
    return worst;
}

std::vector<Shape> shapes() { return {small_gpt2(), small_llama()}; }

} // namespace

// ----------------------------------------------------------------------------

// A pipeline adds what accumulation adds, in the same order.
TEST(Layouts, PipelinesAreAccumulationBitByBit) {
    for (const Shape& shape : shapes())
        for (int micro_batches : {1, 3, 4}) {
            Layout one;
            one.micro_batches = micro_batches;
            auto want = run_layout<float>(shape, one, true);
            for (int pp : {2, 3, 5}) // of 5 layers
                for (auto [pipeline, chunks] :
                     {std::pair{Pipeline::GPIPE, 1}, std::pair{Pipeline::ONE_F_ONE_B, 1},
                      std::pair{Pipeline::ZERO_BUBBLE, 1}, std::pair{Pipeline::INTERLEAVED, 2}}) {
                    Layout l = one;
                    l.pp = pp, l.pipeline = pipeline, l.chunks = chunks;
                    if (l.pp * l.chunks > int(shape.L) + 2) continue;
                    l.recompute = Recompute((pp + micro_batches) % 3);
                    expect_same(*run_layout<float>(shape, l, true), *want, l.text());
                }
        }
}

// Stage 1 is stage 0, stage 3 is stage 2, all of them are one with a single micro-batch; whatever
// the pipeline.
TEST(Layouts, StagesOfZeroAreDataParallelismBitByBit) {
    for (const Shape& shape : shapes())
        for (int dp : {2, 3})
            for (int micro_batches : {1, 2}) {
                Layout base;
                base.dp = dp, base.micro_batches = micro_batches;
                auto zero0 = run_layout<float>(shape, base, true);
                base.zero = 2;
                auto zero2 = run_layout<float>(shape, base, true);
                if (micro_batches == 1) expect_same(*zero2, *zero0, "zero 2 against 0");
                for (int zero : {0, 1, 2, 3})
                    for (int pp : {1, 2}) {
                        Layout l = base;
                        l.zero = zero, l.pp = pp;
                        if (zero == 3) l.prefetch = 1 + pp, l.recompute = Recompute::FULL;
                        if (zero == 1) l.recompute = Recompute::SELECTIVE, l.split = pp == 1;
                        expect_same(*run_layout<float>(shape, l, true), zero < 2 ? *zero0 : *zero2,
                                    l.text());
                    }
            }
}

// bf16 with float masters goes the same ways.
TEST(Layouts, StagesOfZeroInBf16) {
    Layout base;
    base.dp = 2;
    auto want = run_layout<bf16>(small_gpt2(), base, true);
    for (int pp : {1, 2}) {
        Layout l = base;
        l.pp = pp, l.zero = 1;
        expect_same(*run_layout<bf16>(small_gpt2(), l, true), *want, l.text());
    }
    base.zero = 2;
    want = run_layout<bf16>(small_gpt2(), base, true);
    base.zero = 3, base.pp = 3;
    expect_same(*run_layout<bf16>(small_gpt2(), base, true), *want, base.text());
}

// Data parallelism, sharded in groups or not, is one rank that accumulates.
TEST(Layouts, DataParallelismIsAccumulation) {
    double worst = 0;
    for (const Shape& shape : shapes())
        for (bool adamw : {false, true})
            for (int dp : {2, 3, 4}) {
                Layout one;
                one.micro_batches = 2 * dp;
                auto want = run_layout<double>(shape, one, adamw);
                for (int zero : {0, 1, 2, 3})
                    for (int pp : {1, 2})
                        for (int shards : {dp, dp == 4 ? 2 : 1}) {
                            Layout l;
                            l.dp = dp, l.zero = zero, l.pp = pp, l.shards = shards;
                            double error =
                                largest_error(*run_layout<double>(shape, l, adamw), *want);
                            EXPECT_LT(error, 1e-11) << l.text();
                            worst = std::max(worst, error);
                        }
            }
    printf("largest error, relative to the largest number of its tensor: %.1e\n", worst);
}

// When a collective happens between its start and its end changes nothing.
TEST(Layouts, TimingChangesNothing) {
    Layout l;
    l.dp = 2, l.pp = 2, l.zero = 3;
    auto want = run_layout<float>(small_llama(), l, true);
    for (Moment moment : {Moment::EARLIEST, Moment::LATEST})
        expect_same(*run_layout<float>(small_llama(), l, true, 3, moment), *want, l.text());
}
