// test_layouts.cpp - every layout is the same computation: losses, norms, gradients and weights of
// data, tensor, sequence and pipeline parallelism and ZeRO against one rank, ranks being threads
//   Bit by bit where llmc says so: pipelines against accumulation, stage 1 against 0, 3 against 2,
//   recomputation, backward's halves apart. The others add in another order: they are compared in
//   double, where a mistake is 1e9 times what is left of rounding.
//   LAYOUTS=FILE: the page of dev/results goes there; LAYOUTS_ALL=FILE: every layout's errors.
#ifdef _OPENMP
#include <omp.h>
#endif
#include <array>
#include <fstream>
#include "../../llmc/comm/comms.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int EVERY = 9; // of a test's layouts one in so many: each takes 20 times as long
#else
constexpr int EVERY = 1;
#endif
bool left_out(int* number) { return (*number)++ % EVERY; }

struct LayoutCase {
    int dp = 1, tp = 1, pp = 1, chunks = 1, zero = 0;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    RecomputeLevels recompute = {};
    bool split = false, sequence_parallel = false;
    int micro_batches = 2; // of each data-parallel rank
    int shards = 0;        // 0: dp
    int prefetch = 1;
    std::string file = {};          // Pipeline::GIVEN: of the schedule
    int document_end = -1;          // a token
    bool poisoned = false;          // before each action all that it does not read
    const char* order = "tp-pp-dp"; // of the grid
    bool whole_matrices = false;    // in each shard
    Masters masters = Masters::FLOAT;
    States states = States::FLOAT;
    size_t T = 8;                   // tokens of a sample
    int cp = 1;
    ContextOrder cp_order = ContextOrder::ZIGZAG;
    ContextMethod cp_method = ContextMethod::GATHER;
    int cp_heads = 1;
    bool narrow_gradients = false;
    int ep = 1;
    bool exchange = false;          // of experts' rows
    bool one_expert = false;        // a router of zeros: all tokens choose the lowest ones
    int ranks() const { return dp * tp * pp * cp; }
    std::string text() const {
        const char* schedules[] = {"gpipe", "1f1b", "interleaved", "zero-bubble", "given"};
        std::string levels;
        for (Recompute r : recompute.given) levels += std::string(" ") + recompute_name(r);
        char line[256];
        snprintf(line, sizeof(line),
                 "dp %d (shards %d) tp %d%s pp %d x %d %s%s, zero %d prefetch %d, recompute%s, "
                 "micro-batches %d cp %d, order %d method %d of %d, ep %d%s%s",
                 dp, shards ? shards : dp * cp, tp, sequence_parallel ? " sp" : "", pp, chunks,
                 schedules[int(pipeline)], split ? " split" : "", zero, prefetch,
                 levels.c_str(), micro_batches, cp, int(cp_order), int(cp_method), cp_heads, ep,
                 exchange ? " exchanged" : "", one_expert ? " one expert" : "");
        return line;
    }
};

// A run's results, by parameter as files have it: whole, in double.
struct Result {
    std::vector<double> losses, norms, balance; // the last: MaxVio and least load of experts
    std::vector<std::vector<double>> first_grads, grads, weights;
    std::vector<std::vector<uint32_t>> scales; // delayed scaling's, after each step
    std::string wrong; // ranks that keep the same thing and differ
    std::mutex mutex;
};

// Copy one rank's part of a parameter, from `kept` on, into the whole; where two ranks have it,
// their bits must be the same.
template <typename V>
void collect(Result& r, std::vector<double>& whole, const V* kept, const Layout& layout,
             const Parameter& p, KeptRange part, const char* what) {
    std::lock_guard<std::mutex> lock(r.mutex);
    if (whole.empty()) whole.assign(p.elements(), NAN);
    for_each_kept(layout, p, part, [&](size_t at, size_t global, size_t count) {
        for (size_t i = 0; i < count; i++) {
            double& to = whole[global + i];
            double x = double(to_acc(kept[part.at + at + i]));
            if (to == to && x != to) r.wrong = p.name + ": ranks have different " + what;
            to = x;
        }
    });
}

// Delayed scaling's words after a step: those of all ranks are the same.
template <typename T> void collect_scales(const Fixture<T>& f, Result& r, size_t step) {
    Fp8History h = fp8_history(f.t);
    size_t words = fp8_history_bytes(h.slots, f.t.model.shape.fp8_rule) / sizeof(uint32_t);
    std::vector<uint32_t> mine(h.amax, h.amax + words);
    std::lock_guard<std::mutex> lock(r.mutex);
    if (r.scales.size() <= step) r.scales.push_back(mine);
    if (r.scales[step] != mine) r.wrong = "ranks have different scales of fp8";
}

constexpr size_t B_SAMPLES = 3;

template <typename T> void collect_grads(Fixture<T>& f, Result& r, bool first) {
    for (size_t i = 0; i < f.t.model.parameters.size(); i++) {
        const Parameter& p = f.t.model.parameters[i];
        bool trained = f.t.model.buckets[p.bucket].trainable;
        if (!trained || !bucket_is_mine(f.t.layout, f.t.model, p.bucket)) continue;
        Range mine = updated_range(f.t.layout, f.t.model, p.bucket);
        size_t from = std::max(p.offset, mine.first),
               end = std::min(p.offset + p.local_elements(), mine.first + mine.count);
        if (from >= end) continue;
        collect(r, (first ? r.first_grads : r.grads)[i],
                updated_part<const acc_t<T>>(f.t, {Kind::GRAD, p.bucket}, mine), f.t.layout, p,
                {from - p.offset, end - from, from - mine.first}, "gradients");
    }
}

Plan plan_of(const Shape& shape, const LayoutCase& l, const Layout& me, bool adamw) {
    Plan p = small_plan(B_SAMPLES, l.T, l.micro_batches, l.recompute, l.split);
    p.optimizer = adamw ? Optimizer::ADAMW : Optimizer::SGD;
    p.masters = l.masters;
    p.states = l.states;
    p.narrow_gradients = l.narrow_gradients;
    p.layout = me;
    p.layout.first_layer = split_layers(std::vector<double>(shape.L + 2, 1.0), me.stages());
    std::ifstream file(l.file);
    EXPECT_EQ(l.file.empty() ? "" : read_schedule(file, p.layout.given), "");
    return p;
}

// A step in which every byte that an action does not read is poisoned before it, and is what it was
// behind it, but for what the action writes: it must change no other byte, and all of what it
// writes anew. An action that depends on other bytes gives other results.
template <typename T> void run_poisoned(Trainer<T, Cpu>& t, std::string& wrong) {
    constexpr unsigned char POISON = 0xff; // NaN
    const Plan& p = t.plans[0];
    Arena& arena = t.arena;
    enter_plan(t); // as run_plan begins
    for (t.plan = t.at = 0; t.at < int(p.actions.size()); t.at++) {
        const Action& a = p.actions[size_t(t.at)];
        Access x = access(p, t.model, a);
        std::vector<char> reads(arena.device().bytes), writes(arena.device().bytes);
        auto mark = [&](std::vector<char>& map, const std::vector<Data>& data) {
            for (Data d : data)
                if (const Place* place = arena_find(arena, 0, t.at, d))
                    std::fill_n(map.begin() + long(place->offset), place->bytes, 1);
        };
        mark(reads, x.reads), mark(writes, x.writes);
        std::vector<unsigned char> before(arena.device().base,
                                          arena.device().base + arena.device().bytes);
        for (size_t i = 0; i < arena.device().bytes; i++)
            if (!reads[i]) arena.device().base[i] = POISON;
        run_action(t, a);
        for (size_t i = 0; i < arena.device().bytes; i++) {
            if (writes[i]) continue;
            if (arena.device().base[i] != (reads[i] ? before[i] : POISON))
                wrong = action_text(a, t.model) + " changes bytes that it does not declare";
            arena.device().base[i] = before[i];
        }
        for (Data d : x.writes) {
            const Place* place = arena_find(arena, 0, t.at, d);
            bool anew = !std::count(x.reads.begin(), x.reads.end(), d) && !persistent(d.kind);
            if (!place || !anew || d.kind == Kind::SCRATCH) continue;
            // rows end on 256 bytes, a bucket's padding has no gradient
            bool sent = d.kind == Kind::SENT;
            size_t bytes = sent || d.kind == Kind::PARTIAL
                               ? t.model.buckets[size_t(d.of)].elements *
                                     (sent ? sizeof(bf16) : sizeof(acc_t<T>))
                               : place->bytes,
                   untouched =
                       size_t(std::count(arena.device().base + place->offset,
                                         arena.device().base + place->offset + bytes, POISON));
            // expert-parallel ranks have room for more rows than they get
            if (p.layout.ep == 1 && untouched > bytes / 20 + 20 * 256)
                wrong = action_text(a, t.model) + " does not write " + data_text(d, t.model);
        }
    }
    t.at = int(p.actions.size()) - 1;
}

Layout layout_of(const LayoutCase& l, int rank) {
    Layout sizes = small_layout(l.dp, l.tp, l.pp, l.cp);
    sizes.cp_order = l.cp_order;
    sizes.cp_method = l.cp_method;
    sizes.cp_heads = l.cp_heads;
    sizes.ep = l.ep;
    sizes.ep_exchange = l.ep > 1 && l.exchange;
    sizes.order = layout_order(l.order);
    sizes.chunks = l.chunks;
    sizes.pipeline = l.pipeline;
    sizes.zero = l.zero;
    sizes.zero_group = l.shards;
    sizes.prefetch = l.prefetch;
    sizes.whole_matrices = l.whole_matrices;
    sizes.sequence_parallel = l.sequence_parallel;
    if (l.states == States::EIGHT_BIT) sizes.tensor_align = STATE_BLOCK;
    return layout_at(sizes, rank);
}

template <typename T>
void run_rank(const Comm& world, const Shape& shape, const LayoutCase& l, bool adamw, int steps,
              Result& result, double nudge) {
#ifdef _OPENMP
    omp_set_num_threads(1); // models this small gain nothing by more
#endif
    Layout me = layout_of(l, world.rank);
    Plan p = plan_of(shape, l, me, adamw);
    Fixture<T> f(shape, {p}, 5, nudge);
    f.t.comms = make_comms(world, me, ranks_of_kv_head(me, f.t.model));
    // of a gradient that is nothing but rounding (a key's bias has none) AdamW makes no step
    f.t.hyper.eps = 1e-3f;
    if (!adamw) f.t.hyper.lr = 0.5f;
    f.t.document_end = l.document_end;
    for (const Parameter& parameter : f.t.model.parameters) {
        bool router = parameter.rows() == shape.E && parameter.cols() == shape.C;
        std::vector<double> zeros(parameter.elements(), 0);
        if (l.one_expert && router) set_weight(f.t, parameter, zeros.data());
    }
    ChoiceBiases biases = read_choice_biases(f.t);
    for (int s = 0; s < steps; s++) {
        std::string wrong;
        l.poisoned ? run_poisoned(f.t, wrong) : run_plan(f.t, 0);
        if (!wrong.empty()) {
            std::lock_guard<std::mutex> lock(result.mutex);
            result.wrong = wrong;
        }
        f.t.cursor += p.B * size_t(p.micro_batches * l.dp);
        double loss = plan_loss(f.t).mean();
        std::vector<int64_t> loads = step_loads(f.t);
        ExpertBalance experts = expert_balance(loads, shape.E);
        if (shape.choice_bias) move_choice_biases(f.t, biases, loads, 0.01f);
        if (s == 0) collect_grads(f, result, true);
        if (shape.fp8 == Fp8::DELAYED) collect_scales(f, result, size_t(s));
        if (world.rank > 0) continue;
        result.losses.push_back(loss);
        result.balance.insert(result.balance.end(), {experts.max_vio, experts.least});
        result.norms.push_back(read_value<StepScale>(f.t, {Kind::SCALE}).norm);
    }
    collect_grads(f, result, false);
    for (size_t i = 0; i < f.t.model.parameters.size(); i++) {
        const Parameter& parameter = f.t.model.parameters[i];
        if (!bucket_is_mine(f.t.layout, f.t.model, parameter.bucket)) continue;
        Data weight = {Kind::WEIGHT, parameter.bucket};
        collect(result, result.weights[i], address<const T>(f.t, weight), f.t.layout, parameter,
                kept_range(f.t, weight, parameter), "weights");
    }
}

template <typename T>
std::unique_ptr<Result> run_layout(const Shape& shape, const LayoutCase& l, bool adamw,
                                   Moment moment = Moment::ANY, double nudge = 0) {
    constexpr int steps = 3;
    auto result = std::make_unique<Result>();
    std::vector<Parameter> parameters = make_model(shape).parameters;
    for (auto* all : {&result->weights, &result->grads, &result->first_grads})
        all->resize(parameters.size());
    LocalSettings settings;
    settings.moment = moment, settings.timeout_s = 60, settings.placements = true;
    EXPECT_EQ(run_local_ranks(l.ranks(), settings,
                              [&](const Comm& world) {
                                  run_rank<T>(world, shape, l, adamw, steps, *result, nudge);
                              }),
              0)
        << l.text();
    EXPECT_EQ(result->wrong, "") << l.text();
    for (auto* all : {&result->weights, &result->grads, &result->first_grads})
        for (size_t i = 0; i < parameters.size(); i++)
            (*all)[i].resize(parameters[i].file_elements(), NAN); // padding depends on tp
    return result;
}

void expect_same(const Result& a, const Result& b, const std::string& text) {
    EXPECT_EQ(a.losses, b.losses) << text;
    EXPECT_EQ(a.norms, b.norms) << text;
    EXPECT_TRUE(a.weights == b.weights) << text << ": other weights";
    EXPECT_TRUE(a.grads == b.grads) << text << ": other gradients";
    EXPECT_TRUE(a.scales == b.scales) << text << ": other scales";
}

// The norm of a difference, of the second.
double relative_error(const std::vector<double>& x, const std::vector<double>& y) {
    double difference = 0, all = 0;
    for (size_t i = 0; i < y.size(); i++)
        difference += (x[i] - y[i]) * (x[i] - y[i]), all += y[i] * y[i];
    if (all == 0 && difference == 0 && x.size() == y.size()) return 0; // of what is never trained
    return x.size() == y.size() ? std::sqrt(difference / all) : INFINITY;
}

// Compared are losses, norms, gradients of the first and the last step, weights; by parameter.
constexpr const char* WHAT[] = {"losses", "norms", "first gradients", "gradients", "weights"};
typedef std::array<std::vector<double>, 5> Errors;
Errors errors_of(const Result& a, const Result& b) {
    Errors e;
    EXPECT_EQ(a.balance, b.balance); // whole numbers, whoever counts them
    e[0] = {relative_error(a.losses, b.losses)}, e[1] = {relative_error(a.norms, b.norms)};
    for (size_t i = 0; i < b.weights.size(); i++) {
        e[4].push_back(relative_error(a.weights[i], b.weights[i]));
        if (std::isnan(b.grads[i][0])) continue; // frozen
        e[2].push_back(relative_error(a.first_grads[i], b.first_grads[i]));
        e[3].push_back(relative_error(a.grads[i], b.grads[i]));
    }
    return e;
}

std::vector<Shape> shapes() { return {small_gpt2(), small_llama(), small_mixtral()}; }

// With heads and channels for tp of 2, 3 and 6, or 2, 4 and 8 (of two key/value heads). Neither
// vocabulary, 301 and 277, is divided by any: ranks have 256 tokens, 128, some, or none.
Shape gpt2_for_tp(bool tied) {
    Shape s = gpt2_shape(4, 6, 24, 301, 32);
    s.tied = tied;
    return s;
}
// Branches side by side, and heads of which a quarter turns.
Shape neox_for_tp() { return neox_shape(4, 6, 48, 301, 32); }
// Tied: a Llama with all biases, and windows from a block on; untied: Qwen3's norms of q and k.
Shape llama_for_tp(bool tied) {
    Shape s = llama_shape(4, 8, 2, 32, 48, 277, 64, 10000);
    s.tied = tied, s.qkv_bias = s.o_bias = s.mlp_bias = tied, s.rope_scaling = {8, 1, 4, 16};
    if (tied) s.sliding_window = 5, s.window_from = 2;
    if (!tied) s.hf_type = "qwen3", s.qk_norm = true, s.HS = 6;
    return s;
}
// Balance terms that bite; each has experts that not all ranks' tokens choose.
Shape mixtral_for_tp(bool tied) {
    Shape s = llama_for_tp(tied);
    s.qkv_bias = s.o_bias = s.mlp_bias = false;
    s.family = Family::MIXTRAL, s.hf_type = tied ? "mixtral" : "qwen3_moe";
    s.F = 24, s.E = tied ? 6 : 5, s.K = 2, s.balance = 0.5, s.z_loss = 0.1;
    s.router = tied ? Router::RENORMALISED : Router::SIGMOID;
    s.qk_norm = true, s.whole_qk_norm = tied;
    return s;
}
// Every second block has experts, but not the first two.
Shape shared_for_tp() {
    Shape s = mixtral_for_tp(false);
    s.hf_type = "qwen2_moe", s.router = Router::SOFTMAX, s.qkv_bias = true;
    s.dense_first = 2, s.sparse_every = 2, s.dense_F = 40, s.shared_F = 48, s.shared_gate = true;
    return s;
}
// Heads for eight ranks, their values narrower; every width a multiple of eight.
Shape mla_for_tp(bool experts) {
    Shape s = llama_shape(4, 8, 8, 32, 0, 277, 64, 10000);
    s = deepseek_shape(experts ? "deepseek_v3" : "deepseek_v2", s,
                       {experts ? size_t(10) : 0, 7, 4, 2, 3}, 48);
    if (!experts) return s;
    s.F = 24, s.E = 6, s.K = 2, s.dense_first = 1, s.shared_F = 48, s.balance = 0.5;
    s.router = Router::SIGMOID, s.gate_scale = 2.5f, s.choice_bias = true;
    s.expert_groups = 3, s.kept_groups = 2;
    return s;
}
bool fits(const Shape& s, const LayoutCase& l) {
    size_t tp = size_t(l.tp);
    return tp_divides(s, tp) && l.pp * l.chunks <= int(s.L) + 2;
}

// All layouts up to 8 ranks and some up to 16, with every stage of ZeRO; what else there is to
// choose goes round.
std::vector<LayoutCase> all_layouts() {
    std::vector<LayoutCase> sizes, all;
    for (int dp = 1; dp <= 8; dp++)
        for (int tp = 1; dp * tp <= 8; tp++)
            for (int pp = 1; dp * tp * pp <= 8; pp++) sizes.push_back({dp, tp, pp});
    for (auto [dp, tp, pp] : {std::array{2, 2, 4}, std::array{4, 4, 1}, std::array{2, 8, 1},
                              std::array{3, 3, 1}, std::array{1, 6, 2}, std::array{8, 1, 2}})
        sizes.push_back({dp, tp, pp});
    for (LayoutCase l : sizes)
        for (l.zero = 0; l.zero <= (l.dp > 1 ? 3 : 0); l.zero++) {
            int i = int(all.size());
            const Pipeline pipelines[] = {Pipeline::ONE_F_ONE_B, Pipeline::GPIPE,
                                          Pipeline::ZERO_BUBBLE, Pipeline::INTERLEAVED};
            l.pipeline = pipelines[i % 4];
            l.chunks = l.pipeline == Pipeline::INTERLEAVED && l.pp > 1 && l.pp < 4 ? 2 : 1;
            l.recompute = three_levels(37 * i % 125), l.split = i % 5 == 0;
            l.sequence_parallel = l.tp > 1 && i % 3 > 0;
            l.micro_batches = 1 + i / 3 % 2, l.prefetch = i % 3;
            l.shards = l.dp == 4 && i % 2 ? 2 : l.dp;
            all.push_back(l);
        }
    return all;
}

} // namespace

// ----------------------------------------------------------------------------

// A pipeline adds what accumulation adds, in the same order.
TEST(Layouts, PipelinesAreAccumulationBitByBit) {
    int number = 0;
    for (const Shape& shape : shapes())
        for (int micro_batches : {1, 3, 4}) {
            LayoutCase one;
            one.micro_batches = micro_batches;
            auto want = run_layout<float>(shape, one, true);
            for (int pp : {2, 3, 5}) // of 5 layers
                for (auto [pipeline, chunks] :
                     {std::pair{Pipeline::GPIPE, 1}, std::pair{Pipeline::ONE_F_ONE_B, 1},
                      std::pair{Pipeline::ZERO_BUBBLE, 1}, std::pair{Pipeline::INTERLEAVED, 2}}) {
                    LayoutCase l = one;
                    l.pp = pp, l.pipeline = pipeline, l.chunks = chunks;
                    if (l.pp * l.chunks > int(shape.L) + 2 || left_out(&number)) continue;
                    l.recompute = three_levels(37 * number % 125);
                    expect_same(*run_layout<float>(shape, l, true), *want, l.text());
                }
        }
}

// So does a schedule from a file: 1F1B written out, and one that nobody names.
TEST(Layouts, SchedulesFromFilesAre1F1BBitByBit) {
    LayoutCase named;
    named.pp = 2, named.micro_batches = 3;
    auto want = run_layout<float>(small_gpt2(), named, true);
    for (const std::string& text :
         {write_schedule(schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 3)),
          std::string("F0.0 F1.0 F2.0 B0.0 I1.0 W1.0 B2.0 # a line a rank\n"
                      "F0.1 I0.1 F1.1 W0.1 B1.1 F2.1 B2.1\n")}) {
        LayoutCase l = named;
        l.pipeline = Pipeline::GIVEN, l.file = scratch("schedule.txt");
        std::ofstream(l.file) << text;
        expect_same(*run_layout<float>(small_gpt2(), l, true), *want, text);
    }
}

// Under any pipeline stage 1 is stage 0, stage 3 is stage 2, and one
// micro-batch makes all the same.
TEST(Layouts, StagesOfZeroAreDataParallelismBitByBit) {
    int number = 0;
    for (const Shape& shape : shapes())
        for (int dp : {2, 3})
            for (int micro_batches : {1, 2}) {
                LayoutCase base;
                base.dp = dp, base.micro_batches = micro_batches;
                auto zero0 = run_layout<float>(shape, base, true);
                base.zero = 2;
                auto zero2 = run_layout<float>(shape, base, true);
                if (micro_batches == 1) expect_same(*zero2, *zero0, "zero 2 against 0");
                for (int zero : {0, 1, 2, 3})
                    for (int pp : {1, 2}) {
                        LayoutCase l = base;
                        l.zero = zero, l.pp = pp;
                        if (left_out(&number)) continue;
                        if (zero == 3) l.prefetch = 1 + pp, l.recompute = Recompute::FULL;
                        if (zero == 1) l.recompute = Recompute::SELECTIVE, l.split = pp == 1;
                        expect_same(*run_layout<float>(shape, l, true), zero < 2 ? *zero0 : *zero2,
                                    l.text());
                    }
            }
}

// access() tells the truth on many ranks too, about messages between them and about their sums.
TEST(Layouts, ActionsOfManyRanksTouchWhatTheySay) {
    int number = 0;
    for (int zero : {0, 1, 2, 3})
        for (auto [replicas, tp, pp] :
             {std::array{1, 1, 2}, std::array{2, 1, 1}, std::array{1, 2, 2}}) {
            LayoutCase l;
            l.dp = 2 * replicas, l.shards = 2, l.pp = pp, l.zero = zero;
            l.tp = tp, l.sequence_parallel = tp > 1 && zero > 0;
            l.chunks = 1 + zero % 2, l.recompute = three_levels(31 * zero % 125);
            l.pipeline = l.chunks > 1 ? Pipeline::INTERLEAVED : Pipeline::ONE_F_ONE_B;
            Shape shape = llama_for_tp(zero % 2);
            if (zero == 3) shape = mixtral_for_tp(tp == 1);
            if (left_out(&number)) continue;
            auto want = run_layout<float>(shape, l, true);
            l.poisoned = true;
            expect_same(*run_layout<float>(shape, l, true), *want, l.text());
        }
}

// Each of d parts p of the gradient s is off by at most 2^-9 |p|, and their sum by 2^-9 |s|. Parts
// of other tokens are as long as s, or independent: sum |p| <= sqrt(d) |s|.
TEST(Layouts, GradientsInSixteenBitsAreWithinTheirBound) {
    auto whole = [](const Result& r) {
        std::vector<double> all;
        for (auto& g : r.first_grads) all.insert(all.end(), g.begin(), g.end());
        return all;
    };
    for (const Shape& shape : {small_gpt2(), small_mixtral()})
        for (auto [dp, shards] : {std::array{2, 0}, std::array{3, 0}, std::array{4, 2}})
            for (int zero : {0, 2}) {
                LayoutCase l;
                l.dp = dp, l.shards = shards, l.zero = zero;
                auto wide = run_layout<float>(shape, l, true);
                l.narrow_gradients = true;
                auto narrow = run_layout<float>(shape, l, true);
                int sums = shards ? 2 : 1; // the replicas' sum is rounded too
                double error = relative_error(whole(*narrow), whole(*wide));
                EXPECT_LT(error, std::ldexp(sums + std::sqrt(dp), -9)) << l.text();
                EXPECT_GT(error, std::ldexp(1.0, -12)) << l.text() << ": 16 bits lose something";

                // Stages that sum as often have the same bits, on time or late, and poisoned too.
                l.zero++;
                expect_same(*run_layout<float>(shape, l, true, Moment::LATEST), *narrow, l.text());
                l.pp = 2, l.poisoned = dp == 2;
                expect_same(*run_layout<float>(shape, l, true), *narrow, l.text());
            }
}

// Ranks hold a copy of one bucket's gradient at a time, whatever the stage of ZeRO.
TEST(Layouts, OneGradientIsSentAtATime) {
    for (int zero : {0, 1, 2, 3}) {
        LayoutCase l;
        l.dp = 2, l.zero = zero, l.narrow_gradients = true;
        Layout layout = layout_of(l, 0);
        Trainer<bf16, Cpu> t;
        trainer_place(t, small_gpt2(), {plan_of(small_gpt2(), l, layout, true)}, layout);
        int actions = int(t.arena.finish[0].size()), most = 0;
        for (int at = 0; at < actions; at++) {
            int now = 0;
            for (auto& [d, lives] : t.arena.passing[0])
                for (const Place& life : lives) {
                    if (d.kind != Kind::SENT || at < life.first || life.last < at) continue;
                    EXPECT_EQ(life.bytes,
                              2 * whole_elements(layout, t.model.buckets[size_t(d.of)]));
                    now++;
                }
            most = std::max(most, now);
        }
        EXPECT_EQ(most, 1) << zero;
    }
}

// bf16 with float masters goes the same ways. Tensor-parallel ranks round other sums, and their
// losses are only near.
TEST(Layouts, StagesOfZeroInBf16) {
    for (const Shape& shape : {gpt2_for_tp(true), llama_for_tp(false)}) {
        LayoutCase one, cut;
        cut.tp = 2;
        auto want = run_layout<bf16>(shape, one, true), half = run_layout<bf16>(shape, cut, true);
        EXPECT_LT(relative_error(half->losses, want->losses), 1.0 / 256);
        cut.dp = 2, one.micro_batches = 4, cut.sequence_parallel = true;
        want = run_layout<bf16>(shape, one, true), half = run_layout<bf16>(shape, cut, true);
        EXPECT_LT(relative_error(half->losses, want->losses), 1.0 / 256);
        cut.zero = 1, cut.pp = 2;
        expect_same(*run_layout<bf16>(shape, cut, true), *half, cut.text());
    }
    LayoutCase base;
    base.dp = 2;
    auto want = run_layout<bf16>(small_gpt2(), base, true);
    for (int pp : {1, 2}) {
        LayoutCase l = base;
        l.pp = pp, l.zero = 1;
        expect_same(*run_layout<bf16>(small_gpt2(), l, true), *want, l.text());
    }
    base.zero = 2;
    want = run_layout<bf16>(small_gpt2(), base, true);
    base.zero = 3, base.pp = 3;
    expect_same(*run_layout<bf16>(small_gpt2(), base, true), *want, base.text());
}

// So does bf16 with small masters and moments: an update depends on nothing but the element.
TEST(Layouts, SmallStatesInBf16) {
    int number = 0;
    for (auto [masters, states] : {std::pair(Masters::REMAINDER, States::FLOAT),
                                   {Masters::NONE, States::BF16}, {Masters::FLOAT, States::BF16},
                                   {Masters::REMAINDER, States::EIGHT_BIT}})
        for (const Shape& shape : {gpt2_shape(3, 2, 64, 61, 32), small_llama()})
            for (int tp : {1, 2}) {
                if (shape.NH % size_t(tp) || left_out(&number)) continue;
                LayoutCase base;
                base.dp = 2, base.tp = tp, base.masters = masters, base.states = states;
                auto zero0 = run_layout<bf16>(shape, base, true);
                base.zero = 2;
                auto zero2 = run_layout<bf16>(shape, base, true);
                for (auto [zero, pp] : {std::pair(1, 1), {1, 2}, {2, 3}, {3, 1}, {3, 2}}) {
                    LayoutCase l = base;
                    l.zero = zero, l.pp = pp;
                    expect_same(*run_layout<bf16>(shape, l, true), zero < 2 ? *zero0 : *zero2,
                                l.text());
                }
            }
}

// fp8 in blocks of 128 tokens, where 128 divides a sequence: no block knows the layout. Pipelines,
// recomputation and halves apart are accumulation bit by bit. Two ranks for two micro-batches add
// the same two gradients in float; blocks of other tokens would change them by a hundredth.
TEST(Layouts, Fp8BlocksDoNotKnowTheLayout) {
    int number = 0;
    for (Shape shape : {small_gpt2(), small_llama()}) {
        shape.P = 128;
        LayoutCase one;
        one.T = 128;
        auto wide = run_layout<bf16>(shape, one, true);
        shape.fp8 = Fp8::BLOCK;
        auto want = run_layout<bf16>(shape, one, true);
        EXPECT_FALSE(want->losses == wide->losses); // fp8 is on
        EXPECT_LT(relative_error(want->losses, wide->losses), 0.02);

        LayoutCase ranks = one;
        ranks.dp = 2, ranks.micro_batches = 1;
        for (int zero : {0, 1, 3}) {
            ranks.zero = zero;
            if (left_out(&number)) continue;
            auto got = run_layout<bf16>(shape, ranks, true);
            EXPECT_EQ(got->losses[0], want->losses[0]) << ranks.text();
            auto errors = errors_of(*got, *want);
            for (double e : errors[2]) EXPECT_LT(e, 1e-5) << ranks.text();
        }
        LayoutCase stages = one;
        stages.pp = 2, stages.recompute = Recompute::FULL, stages.split = true;
        expect_same(*run_layout<bf16>(shape, stages, true), *want, stages.text());
    }
}

// Delayed scaling: a maximum counts all ranks and micro-batches, and nothing twice. After a step
// all layouts have the same scales; later ones have seen sums of gradients in another order.
TEST(Layouts, Fp8DelayedScalesAreThoseOfOneProcess) {
    for (Shape shape : {small_gpt2(), small_llama()}) {
        shape.fp8 = Fp8::DELAYED, shape.fp8_rule = {3, 0, false};
        LayoutCase one;
        auto want = run_layout<bf16>(shape, one, true);
        LayoutCase ranks = one;
        ranks.dp = 2, ranks.micro_batches = 1;
        for (int zero : {0, 3}) {
            ranks.zero = zero;
            auto got = run_layout<bf16>(shape, ranks, true);
            EXPECT_TRUE(got->scales[0] == want->scales[0]) << ranks.text();
            EXPECT_EQ(got->losses[0], want->losses[0]) << ranks.text();
            auto errors = errors_of(*got, *want);
            for (double e : errors[2]) EXPECT_LT(e, 1e-5) << ranks.text();
        }
        LayoutCase stages = one;
        stages.pp = 2, stages.recompute = Recompute::FULL, stages.split = true;
        expect_same(*run_layout<bf16>(shape, stages, true), *want, stages.text());
        stages.poisoned = true, stages.pp = 1;
        expect_same(*run_layout<bf16>(shape, stages, true), *want, stages.text());
    }
    Shape shape = gpt2_for_tp(true);
    shape.fp8 = Fp8::DELAYED;
    LayoutCase one, cut;
    cut.tp = 2;
    auto want = run_layout<bf16>(shape, one, true);
    for (bool rows : {false, true}) {
        cut.sequence_parallel = rows;
        auto got = run_layout<bf16>(shape, cut, true);
        EXPECT_LT(relative_error(got->losses, want->losses), 1.0 / 64) << cut.text();
    }
}

// Tensor parallelism cuts no block where 128 divides its pieces; sequence parallelism quantises the
// same rows. Losses are as near as bf16's.
TEST(Layouts, Fp8OfTensorParallelRanks) {
    Shape shape = gpt2_shape(2, 2, 256, 61, 128);
    LayoutCase one, cut;
    one.T = cut.T = 128, one.micro_batches = cut.micro_batches = 1;
    cut.tp = 2;
    shape.fp8 = Fp8::BLOCK;
    auto want = run_layout<bf16>(shape, one, false);
    for (bool rows : {false, true}) {
        cut.sequence_parallel = rows;
        auto got = run_layout<bf16>(shape, cut, false);
        EXPECT_LT(relative_error(got->losses, want->losses), 1.0 / 64) << cut.text();
    }
}

// Sums of another order. What rounding may do is what the computation does to a small change: one
// rank runs with all weights changed by 1e-8 of themselves; a result may be off by ROUNDINGS eps of
// itself and of its answer to that, in units of 1e-8. A sum of n numbers rounds off like sqrt(n) of
// them; the longest sums here have some hundred.
struct OneRank {
    std::unique_ptr<Result> result;
    Errors answer;
};
constexpr double NUDGE = 1e-8, EPS = 1.1e-16, ROUNDINGS = 32;

OneRank run_one_rank(const Shape& shape, int micro_batches, bool adamw, int document_end = -1,
                     size_t T = 8, bool one_expert = false) {
    LayoutCase one;
    one.T = T, one.one_expert = one_expert;
    one.micro_batches = micro_batches, one.document_end = document_end;
    OneRank r = {run_layout<double>(shape, one, adamw), {}};
    r.answer = errors_of(*run_layout<double>(shape, one, adamw, Moment::ANY, NUDGE), *r.result);
    return r;
}

struct Cell {
    double largest[5] = {}, of_bound = 0;
    std::string wrong;
};
Cell compare(const Errors& errors, const OneRank& one) {
    Cell cell;
    for (int k = 0; k < 5; k++)
        for (size_t i = 0; i < errors[k].size(); i++) {
            double bound = (1 + one.answer[k][i] / NUDGE) * EPS * ROUNDINGS, e = errors[k][i];
            cell.largest[k] = std::max(cell.largest[k], e);
            cell.of_bound = std::max(cell.of_bound, e / bound);
            if (!(e <= bound)) cell.wrong = std::string(WHAT[k]) + " " + std::to_string(i);
        }
    return cell;
}

// "data x pipeline, ZeRO 3": the dimensions in which ranks are more than one.
std::string dimensions_of(const LayoutCase& l) {
    std::string text;
    for (auto [size, name] : {std::pair(l.dp, "data"), {l.tp, "tensor"}, {l.pp, "pipeline"},
                              {l.cp, "context"}, {l.ep, "expert"}})
        if (size > 1) text += (text.empty() ? "" : " x ") + std::string(name);
    return text + (l.dp > 1 ? ", ZeRO " + std::to_string(l.zero) : "");
}

void add_worst(Cell& worst, const Cell& cell) {
    for (int k = 0; k < 5; k++) worst.largest[k] = std::max(worst.largest[k], cell.largest[k]);
    worst.of_bound = std::max(worst.of_bound, cell.of_bound);
}

std::string columns_of(const Cell& cell) {
    const double* e = cell.largest;
    char text[128];
    snprintf(text, sizeof(text), " %.1e | %.1e | %.1e | %.1e | %.1e | %.2f |\n", e[0], e[1], e[2],
             e[3], e[4], cell.of_bound);
    return text;
}

const char* const COLUMNS =
    " losses | norms | first gradients | gradients | weights | of the bound |\n"
    "|---|---|---|---|---|---|---|---|";

TEST(Layouts, AreOneComputation) {
    std::map<std::tuple<bool, bool, bool, int>, OneRank> one_rank;
    std::map<std::string, std::pair<int, Cell>> groups; // by dimensions: how many, the worst
    std::string all;
    Cell worst;
    int cells = 0, number = 0;
    for (bool llama : {false, true})
        for (const LayoutCase& l : all_layouts())
            for (bool adamw : {true, false}) {
                bool tied = (l.dp + l.pp + l.zero / 2) % 2;
                Shape shape = llama ? llama_for_tp(tied) : gpt2_for_tp(tied);
                if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
                OneRank& one = one_rank[{llama, tied, adamw, l.micro_batches * l.dp}];
                if (!one.result) one = run_one_rank(shape, l.micro_batches * l.dp, adamw);
                Cell cell =
                    compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
                ASSERT_EQ(cell.wrong, "") << l.text();

                cells++;
                add_worst(worst, cell);
                auto& [count, worst_of_group] = groups[dimensions_of(l)];
                count++;
                add_worst(worst_of_group, cell);
                all += std::string("| ") + (llama ? "Llama" : "GPT-2") + (tied ? ", tied" : "") +
                       " | " + l.text() + " | " + (adamw ? "AdamW" : "SGD") + " |" +
                       columns_of(cell);
            }

    char summary[512];
    const double* e = worst.largest;
    snprintf(summary, sizeof(summary),
             "%d layouts, the worst at %.2f of its bound; largest relative errors: losses %.1e, "
             "norms %.1e, first gradients %.1e, gradients %.1e, weights %.1e",
             cells, worst.of_bound, e[0], e[1], e[2], e[3], e[4]);
    puts(summary);
    if (const char* path = getenv("LAYOUTS")) {
        std::ofstream page(path);
        page << "# Layouts against one rank, in double\n\n"
             << "Three steps each; of a parameter's gradients and weights the norm of the "
                "difference "
                "over that of one rank's, the largest of all parameters. "
                "`LAYOUTS=FILE build/test_layouts` makes this page, `LAYOUTS_ALL=FILE` a table of "
                "every layout.\n\n"
             << summary << ".\n\n| ranks by | layouts |" << COLUMNS << "\n";
        for (const auto& [name, group] : groups)
            page << "| " << name << " | " << group.first << " |" << columns_of(group.second);
    }
    if (const char* path = getenv("LAYOUTS_ALL"))
        std::ofstream(path) << "| model | layout | optimizer |" << COLUMNS << "---|\n" << all;
}

// Adapters of all matrices, or of attention's, or of the later blocks, take turns at a part of the
// layouts; then those with context parallelism. Of a half that is whole on every tensor-parallel
// rank each has a part of the gradient, with sequence parallelism or without.
TEST(Layouts, AdaptersAreOneComputation) {
    std::map<std::tuple<bool, int, bool, int>, OneRank> one_rank;
    std::vector<LayoutCase> some;
    const std::vector<LayoutCase> all = all_layouts();
    for (size_t i = 0; i < all.size(); i += 7) some.push_back(all[i]);
    for (int zero : {0, 1, 3})
        for (bool rows : {false, true}) {
            LayoutCase l = {2, 2};
            l.cp = 2, l.zero = zero, l.sequence_parallel = rows, l.recompute = three_levels(44);
            some.push_back(l);
        }
    int number = 0;
    for (bool llama : {false, true})
        for (const LayoutCase& l : some) {
            int kind = number / 2 % 3;
            bool adamw = number % 2;
            Shape shape = llama ? llama_for_tp(number % 4 < 2) : gpt2_for_tp(true);
            if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
            bool tied = shape.tied;
            shape = kind == 0   ? with_lora(shape, 3)
                    : kind == 1 ? with_lora(shape, 2, "attention", true)
                                : with_late_lora(shape, 4);
            OneRank& one = one_rank[{llama, 2 * kind + tied, adamw, l.micro_batches * l.dp}];
            if (!one.result) one = run_one_rank(shape, l.micro_batches * l.dp, adamw);
            Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
            EXPECT_EQ(cell.wrong, "") << l.text();
        }
}

// The variants of Llama take turns at the layouts. OLMo-2's norms of q and k lie over
// tensor-parallel ranks, some of which share a key head. GPT-NeoX has turns of its own.
TEST(Layouts, VariantsAreOneComputation) {
    std::map<std::tuple<std::string, bool, int>, OneRank> one_rank;
    int number = 0;
    for (const LayoutCase& l : all_layouts())
        for (const char* type : {VARIANTS[number % 5], number / 2 % 2 ? "olmo2" : "gpt_neox"}) {
            bool adamw = number % 3 > 0;
            Shape shape = llama_for_tp(false);
            shape.HS = 8;
            bool neox = !strcmp(type, "gpt_neox");
            shape = neox ? neox_for_tp() : small_variant(shape, type);
            if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
            OneRank& one = one_rank[{type, adamw, l.micro_batches * l.dp}];
            if (!one.result) one = run_one_rank(shape, l.micro_batches * l.dp, adamw);
            Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
            ASSERT_EQ(cell.wrong, "") << type << ", " << l.text();
        }
}

// So are they with experts: routers, their balance terms, experts that no token of a rank chooses.
TEST(Layouts, ExpertsAreOneComputation) {
    std::map<std::tuple<bool, bool, int>, OneRank> one_rank;
    Cell worst;
    int cells = 0, number = 0;
    for (const LayoutCase& l : all_layouts())
        for (bool adamw : {true, false}) {
            bool tied = (l.dp + l.pp + l.zero / 2) % 2;
            Shape shape = mixtral_for_tp(tied);
            if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
            if (((number + 1) / 2 + adamw) % 2) continue; // each layout with one of the optimizers
            OneRank& one = one_rank[{tied, adamw, l.micro_batches * l.dp}];
            if (!one.result) one = run_one_rank(shape, l.micro_batches * l.dp, adamw);
            Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
            ASSERT_EQ(cell.wrong, "") << l.text();
            cells++;
            add_worst(worst, cell);
        }
    printf("%d layouts, the worst at %.2f of its bound\n", cells, worst.of_bound);
}

// All that data-parallel ranks may share of the experts, with every other axis; also where a rank's
// experts have no row, or those of all tokens.
std::vector<LayoutCase> expert_layouts() {
    std::vector<LayoutCase> all;
    for (auto [dp, tp, pp, ep, cp] :
         {std::array{2, 1, 1, 2, 1}, {3, 1, 1, 3, 1}, {6, 1, 1, 6, 1}, {4, 1, 1, 2, 1},
          {6, 1, 1, 3, 1}, {6, 1, 1, 2, 1}, {2, 2, 1, 2, 1}, {4, 2, 1, 2, 1}, {2, 1, 2, 2, 1},
          {2, 2, 2, 2, 1}, {4, 1, 2, 2, 1}, {3, 2, 1, 3, 1}, {3, 1, 2, 3, 1}, {1, 1, 1, 2, 2},
          {2, 1, 1, 2, 2}, {3, 1, 1, 6, 2}, {2, 2, 1, 2, 2}})
        for (int zero = 0; zero <= 3; zero++) {
            LayoutCase l{dp, tp, pp};
            int i = int(all.size());
            const Pipeline pipelines[] = {Pipeline::ONE_F_ONE_B, Pipeline::GPIPE,
                                          Pipeline::ZERO_BUBBLE, Pipeline::INTERLEAVED};
            l.ep = ep, l.cp = cp, l.zero = zero, l.pipeline = pipelines[i % 4];
            l.chunks = l.pipeline == Pipeline::INTERLEAVED && l.pp == 2 ? 2 : 1;
            l.recompute = three_levels(37 * i % 125), l.split = i % 5 == 0;
            l.sequence_parallel = l.tp > 1 && i % 3 > 0, l.prefetch = i % 3;
            l.micro_batches = 1 + i / 3 % 2, l.one_expert = i % 7 == 3;
            l.order = i % 2 ? "dp-tp-pp" : "tp-pp-dp";
            all.push_back(l);
        }
    return all;
}

// Rows that nobody wants stay at home, and nothing changes by a bit: sums have the same
// terms in the same order. Tokens choose few of many experts, or all the same one, so
// that ranks get nothing.
TEST(Layouts, ExchangedRowsGiveTheBitsOfGatheredOnes) {
    bool adamw = false;
    for (LayoutCase l : expert_layouts()) {
        if (l.zero != 2 && !l.one_expert) continue;
        adamw = !adamw;
        Shape shape = l.ep == 3 ? shared_for_tp() : mixtral_for_tp(false);
        shape.E = 12, l.exchange = false;
        if (l.one_expert) shape.balance = shape.z_loss = 0, shape.router = Router::RENORMALISED;
        auto gathered = run_layout<bf16>(shape, l, adamw);
        l.exchange = true;
        expect_same(*run_layout<bf16>(shape, l, adamw), *gathered, l.text());
    }
}

TEST(Layouts, ExpertParallelRanksAreOneComputation) {
    std::map<std::tuple<bool, bool, bool, int>, OneRank> one_rank;
    Cell worst;
    int cells = 0, number = 0;
    for (const LayoutCase& l : expert_layouts()) {
        bool tied = (l.dp + l.pp + l.zero / 2) % 2, adamw = (number / 2) % 2;
        Shape shape = mixtral_for_tp(tied);
        shape.E = 6;
        if (l.one_expert) shape.balance = shape.z_loss = 0, shape.router = Router::RENORMALISED;
        if (left_out(&number)) continue;
        OneRank& one = one_rank[{tied, adamw, l.one_expert, l.micro_batches * l.dp}];
        if (!one.result)
            one = run_one_rank(shape, l.micro_batches * l.dp, adamw, -1, 8, l.one_expert);
        Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
        ASSERT_EQ(cell.wrong, "") << l.text();
        cells++;
        add_worst(worst, cell);
    }
    printf("%d layouts, the worst at %.2f of its bound\n", cells, worst.of_bound);
}

// And with an ffn in some blocks, and shared experts in others: every third layout.
TEST(Layouts, SharedExpertsAreOneComputation) {
    std::map<std::pair<bool, int>, OneRank> one_rank;
    int number = 0;
    std::vector<LayoutCase> layouts = all_layouts();
    for (const LayoutCase& l : expert_layouts())
        layouts.push_back(l);
    for (LayoutCase& l : layouts) {
        l.one_expert = false;
        bool adamw = number % 2 > 0;
        Shape shape = shared_for_tp();
        shape.E = 6;
        if (!fits(shape, l) || l.ranks() == 1 || left_out(&number) || number % 3) continue;
        OneRank& one = one_rank[{adamw, l.micro_batches * l.dp}];
        if (!one.result) one = run_one_rank(shape, l.micro_batches * l.dp, adamw);
        Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
        ASSERT_EQ(cell.wrong, "") << l.text() << columns_of(cell);
    }
}

// Latent attention, with and without a latent of queries, an ffn or experts behind it: every
// sixth layout of data, tensor and pipeline ranks, some of experts and of sequences cut in
// all three ways.
TEST(Layouts, LatentAttentionIsOneComputation) {
    std::map<std::tuple<bool, bool, int, size_t>, OneRank> one_rank;
    int number = 0, cells = 0;
    std::vector<LayoutCase> layouts = all_layouts(), experts = expert_layouts();
    size_t kept = 0;
    for (size_t i = 0; i < layouts.size(); i += 6) layouts[kept++] = layouts[i];
    layouts.resize(kept);
    for (size_t i = 0; i < experts.size(); i += 7) layouts.push_back(experts[i]);
    for (int method = 0; method < 3; method++)
        for (auto [tp, sp] : {std::pair{1, false}, {2, true}}) {
            LayoutCase l{1, tp};
            l.cp = 2, l.cp_method = ContextMethod(method), l.sequence_parallel = sp, l.T = 16;
            layouts.push_back(l);
        }
    for (LayoutCase& l : layouts) {
        l.one_expert = false;
        bool adamw = number % 2 > 0, routed = l.ep > 1 || number % 4 < 2;
        Shape shape = mla_for_tp(routed);
        if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
        OneRank& one = one_rank[{routed, adamw, l.micro_batches * l.dp, l.T}];
        if (!one.result) one = run_one_rank(shape, l.micro_batches * l.dp, adamw, -1, l.T);
        Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
        ASSERT_EQ(cell.wrong, "") << l.text() << columns_of(cell);
        cells++;
    }
    printf("%d layouts\n", cells);
}

// Stages of ZeRO, pipelines and recomputation change no bit of it, and rows that no token has
// chosen are never read.
TEST(Layouts, ExpertParallelRanksAreExactWhereOthersAre) {
    int number = 0;
    for (auto [dp, ep] : {std::pair{2, 2}, {4, 2}, {3, 3}}) {
        LayoutCase base;
        base.dp = dp, base.ep = ep, base.micro_batches = 1;
        Shape shape = small_mixtral();
        auto want = run_layout<float>(shape, base, true);
        for (int zero : {0, 1, 2, 3}) {
            LayoutCase l = base;
            l.zero = zero, l.pp = 1 + zero % 2, l.recompute = three_levels(31 * zero % 125);
            l.poisoned = zero > 1, l.split = zero == 2;
            if (left_out(&number)) continue;
            expect_same(*run_layout<float>(shape, l, true), *want, l.text());
        }
    }
}

// Shards that cut no matrix are the same computation, and as equal bit by bit as others are.
TEST(Layouts, ShardsOfWholeMatricesChangeNoResult) {
    for (const Shape& shape : {gpt2_for_tp(true), llama_for_tp(false)}) {
        LayoutCase l;
        l.dp = 2, l.whole_matrices = true;
        OneRank one = run_one_rank(shape, l.dp * l.micro_batches, true);
        for (int tp : {1, 4}) {
            if (!fits(shape, {2, tp})) continue;
            l.tp = tp, l.sequence_parallel = tp > 1;
            std::unique_ptr<Result> before;
            for (l.zero = 0; l.zero <= 3; l.zero++) {
                auto result = run_layout<double>(shape, l, true);
                EXPECT_EQ(compare(errors_of(*result, *one.result), one).wrong, "") << l.text();
                if (l.zero % 2) expect_same(*result, *before, l.text());
                before = std::move(result);
            }
        }
    }

    // So are groups of shards, pipelines, and weights narrower than their masters.
    LayoutCase base;
    base.dp = 4, base.shards = 2, base.whole_matrices = true;
    auto want = run_layout<bf16>(gpt2_for_tp(true), base, true);
    for (int pp : {1, 2}) {
        LayoutCase l = base;
        l.pp = pp, l.zero = 1;
        expect_same(*run_layout<bf16>(gpt2_for_tp(true), l, true), *want, l.text());
    }
}

// Sequences cut over ranks, with every other axis; documents, windows, ALiBi, learned positions, and
// heads of which a part turns.
TEST(Layouts, ContextParallelRanksAreOneComputation) {
    std::vector<LayoutCase> all, rings;
    for (auto [dp, tp, pp, cp] :
         {std::array{1, 1, 1, 2}, {1, 1, 1, 3}, {1, 1, 1, 4}, {2, 1, 1, 2}, {1, 2, 1, 2},
          {1, 1, 2, 2}, {2, 1, 1, 3}, {1, 2, 1, 3}, {1, 1, 3, 2}, {2, 2, 1, 2}, {2, 1, 2, 2},
          {1, 2, 2, 2}, {2, 2, 2, 2}})
        for (int zero = 0; zero <= 3; zero++) {
            LayoutCase l{dp, tp, pp};
            int i = int(all.size());
            const Pipeline pipelines[] = {Pipeline::ONE_F_ONE_B, Pipeline::GPIPE,
                                          Pipeline::ZERO_BUBBLE, Pipeline::INTERLEAVED};
            l.pipeline = pipelines[i % 4];
            l.chunks = l.pipeline == Pipeline::INTERLEAVED && l.pp == 2 ? 2 : 1;
            l.cp = cp, l.cp_order = ContextOrder(i % 3), l.zero = zero, l.T = 24;
            l.cp_method = ContextMethod((i + i / 4) % 2);
            l.recompute = three_levels(37 * i % 125), l.split = i % 5 == 0;
            l.sequence_parallel = l.tp > 1 && i % 3 > 0, l.prefetch = i % 3;
            l.shards = i % 4 == 1 ? cp : dp * cp, l.document_end = i % 2 ? 5 : -1;
            l.micro_batches = 1 + i / 3 % 2;
            all.push_back(l);
            l.cp_method = ContextMethod::RING, l.cp_order = ContextOrder((i + i / 4) % 3);
            rings.push_back(l);
            if (dp * cp != 4) continue;
            l.dp = 1, l.cp = 4, l.cp_heads = l.shards = 2; // a hybrid: two exchange heads
            l.cp_method = (i + zero) % 2 ? ContextMethod::RING : ContextMethod::GATHER;
            rings.push_back(l);
        }
    all.insert(all.end(), rings.begin(), rings.end());
    std::map<std::tuple<int, bool, int, int>, OneRank> one_rank;
    Cell worst;
    int number = 0, cells = 0;
    for (LayoutCase l : all)
        for (int family = 0; family < 3; family++) {
            if (left_out(&number)) continue;
            bool tied = (l.dp + l.pp + l.zero / 2) % 2, llama = family > 0;
            bool experts = family == 2, alibi = !llama && l.zero == 1;
            bool neox = !llama && !tied && !alibi;
            if (experts && number / 6 % 2) continue; // half of them: experts follow attention
            Shape shape = experts ? mixtral_for_tp(tied)
                          : llama ? llama_for_tp(tied)
                          : neox  ? neox_for_tp()
                                  : gpt2_for_tp(tied);
            if (alibi) shape.position = Position::ALIBI;
            // experts go over the ranks that share sequences, too
            if (experts) {
                shape.E = 6, l.ep = l.dp * l.cp % 3 ? l.dp * l.cp % 2 ? 1 : 2 : 3;
                l.shards = 0;
            }
            // Ulysses has heads enough; of Llama's key/value heads eight, or two that ranks share
            int exchange = l.cp_method == ContextMethod::ULYSSES ? l.cp : l.cp_heads;
            bool ulysses = exchange > 1;
            bool few = ulysses && llama && l.zero % 2;
            if (ulysses) {
                shape.NH = llama ? 8 : 12, shape.NKV = few ? 2 : shape.NH;
                if (!llama) shape.HS = neox ? 4 : 2;
                if (!cp_divides(shape, size_t(l.tp), size_t(exchange))) continue;
            }
            bool adamw = number % 2;
            OneRank& one = one_rank[{2 * family + tied + 6 * alibi + 12 * (ulysses + few), adamw,
                                     l.micro_batches * l.dp, l.document_end}];
            if (!one.result)
                one = run_one_rank(shape, l.micro_batches * l.dp, adamw, l.document_end, l.T);
            Cell cell = compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
            ASSERT_EQ(cell.wrong, "") << l.text();
            add_worst(worst, cell);
            cells++;
        }
    printf("%d layouts, the worst at %.2f of its bound\n", cells, worst.of_bound);
}

// Actions read and write what they declare, also where keys come from other ranks.
TEST(Layouts, ContextParallelActionsTouchWhatTheyDeclare) {
    LayoutCase l;
    l.cp = 2, l.recompute = three_levels(37), l.document_end = 5, l.micro_batches = 1;
    for (const Shape& shape : {gpt2_shape(2, 2, 16, 61, 32), small_llama()})
        for (int i = 0; i < 4; i++) {
            // The last is a hybrid.
            l.cp = i == 3 ? 4 : 2, l.cp_heads = i == 3 ? 2 : 1;
            l.cp_method = ContextMethod(i % 3), l.zero = (i + (shape.NKV < shape.NH)) % 2 * 3;
            l.poisoned = false;
            auto want = run_layout<float>(shape, l, true);
            l.poisoned = true;
            expect_same(*run_layout<float>(shape, l, true), *want, l.text());
        }
}

// Documents go with their tokens to the ranks, and the targets that count are those of all ranks.
TEST(Layouts, DocumentsAreThoseOfOneRank) {
    for (bool llama : {false, true}) {
        Shape shape = llama ? llama_for_tp(false) : gpt2_for_tp(false);
        LayoutCase l{2, 2, 2};
        l.zero = 2, l.sequence_parallel = !llama, l.document_end = 5;
        OneRank one = run_one_rank(shape, l.dp * l.micro_batches, true, l.document_end),
                whole = run_one_rank(shape, l.dp * l.micro_batches, true);
        EXPECT_EQ(compare(errors_of(*run_layout<double>(shape, l, true), *one.result), one).wrong,
                  "");
        EXPECT_NE(compare(errors_of(*whole.result, *one.result), one).wrong, "");
    }
}

// When a collective happens between its start and its end changes nothing: at its start, or at its
// finish with NaN in what it writes until then and no change allowed in what it reads.
TEST(Layouts, TimingChangesNothing) {
    std::vector<LayoutCase> layouts;
    for (int zero : {0, 1, 2, 3})
        for (auto [tp, pp, chunks, pipeline] :
             {std::tuple{1, 1, 1, Pipeline::ONE_F_ONE_B}, std::tuple{1, 2, 1, Pipeline::GPIPE},
              std::tuple{1, 2, 1, Pipeline::ZERO_BUBBLE},
              std::tuple{1, 2, 2, Pipeline::INTERLEAVED},
              std::tuple{2, 1, 1, Pipeline::ONE_F_ONE_B}}) {
            LayoutCase l;
            l.dp = 4, l.shards = 2, l.zero = zero, l.tp = tp, l.sequence_parallel = tp > 1;
            l.pp = pp, l.chunks = chunks, l.pipeline = pipeline, l.micro_batches = 4;
            l.prefetch = pp * chunks - 1, l.recompute = three_levels(31 * zero % 125);
            layouts.push_back(l);
        }
    LayoutCase ring;
    ring.cp = 4, ring.cp_method = ContextMethod::RING;
    layouts.push_back(ring);
    int number = 0;
    for (const Shape& shape : {gpt2_for_tp(true), llama_for_tp(false)})
        for (const LayoutCase& l : layouts) {
            if (left_out(&number)) continue;
            auto want = run_layout<float>(shape, l, true);
            for (Moment moment : {Moment::EARLIEST, Moment::LATEST})
                expect_same(*run_layout<float>(shape, l, true, moment), *want, l.text());
        }
}

// A rank that does not come: the watchdog names the collective that its peer waits for, not the
// action that the peer has come to meanwhile.
TEST(Layouts, TheWatchdogNamesWhatIsWaitedFor) {
    LayoutCase l;
    l.dp = 2, l.zero = 2;
    std::string failure;
    LocalSettings settings;
    settings.timeout_s = 2, settings.failure = &failure;
    EXPECT_EQ(run_local_ranks(2, settings,
                              [&](const Comm& world) {
                                  Layout me = layout_of(l, world.rank);
                                  Fixture<float> f(small_gpt2(),
                                                   {plan_of(small_gpt2(), l, me, true)});
                                  f.t.comms = make_comms(world, me);
                                  if (me.dp.rank == 0) return run_plan(f.t, 0);
                                  for (f.t.at = 0; f.t.at < 2; f.t.at++) // LOAD and COUNT alone
                                      run_action(f.t, f.t.plans[0].actions[size_t(f.t.at)]);
                                  while (!world.local->world->failed)
                                      std::this_thread::sleep_for(std::chrono::milliseconds(5));
                              }),
              1);
    EXPECT_NE(failure.find("s in reduce-scatter on 'shard' during action WAIT REDUCE(block.2): "
                           "rank 1 has not arrived"),
              std::string::npos)
        << failure;
}

// A sum made twice, and one left out, are found by what the buffers hold.
TEST(Layouts, CollectivesAreGivenWhatTheyMustBe) {
    for (bool twice : {true, false}) {
        LocalSettings settings;
        settings.placements = true, settings.timeout_s = 60;
        testing::internal::CaptureStderr();
        auto body = [&](const Comm& world) {
            LayoutCase l;
            l.dp = 2, l.zero = twice ? 0 : 1;
            Layout me = layout_of(l, world.rank);
            Plan p = plan_of(small_gpt2(), l, me, true);
            Fixture<float> f(small_gpt2(), {p});
            f.t.comms = make_comms(world, me);
            run_plan(f.t, 0);
            Action again = {twice ? Op::REDUCE : Op::PUBLISH, -1, -1, 2}; // a block's bucket
            run_action(f.t, again);
        };
        EXPECT_EQ(run_local_ranks(2, settings, body), 1);
        std::string said = testing::internal::GetCapturedStderr();
        EXPECT_NE(said.find(twice ? "grad(block.0) is replicated, it must be partial"
                                  : "weight(block.0) is replicated, it must be sharded"),
                  std::string::npos)
            << said;
    }
}

// Which ranks are neighbours changes no bit.
TEST(Layouts, TheGridsOrderChangesNothing) {
    LayoutCase l;
    l.dp = 2, l.tp = 2, l.pp = 3, l.zero = 2, l.sequence_parallel = true;
    auto want = run_layout<float>(llama_for_tp(true), l, true);
    for (const char* order : {"tp-dp-pp", "pp-tp-dp", "pp-dp-tp", "dp-tp-pp", "dp-pp-tp"}) {
        l.order = order;
        expect_same(*run_layout<float>(llama_for_tp(true), l, true), *want, order);
    }

    // Shards lie with their owners, in whatever order cp and dp are counted.
    LayoutCase shared;
    shared.dp = 2, shared.cp = 2, shared.tp = 2, shared.zero = 2;
    want = run_layout<float>(llama_for_tp(true), shared, true);
    for (const char* order : {"dp-tp-pp", "pp-dp-tp"}) {
        shared.order = order;
        expect_same(*run_layout<float>(llama_for_tp(true), shared, true), *want, order);
    }

    // The order of the axes is that of the ranks' numbers.
    std::set<std::tuple<int, int, int>> places;
    Layout sizes = small_layout(2, 2, 3);
    sizes.order = layout_order("pp-dp-tp");
    for (int rank = 0; rank < 12; rank++) {
        Layout at = layout_at(sizes, rank);
        EXPECT_EQ(at.pp.rank + 3 * (at.dp.rank + 2 * at.tp.rank), rank);
        places.insert({at.dp.rank, at.pp.rank, at.tp.rank});
    }
    EXPECT_EQ(places.size(), 12u);
}

// No layout changes what --seed means.
TEST(Layouts, InitialWeightsAreThoseOfOneRank) {
    for (const Shape& shape : {gpt2_for_tp(false), llama_for_tp(true)}) {
        std::vector<std::vector<float>> want;
        for (LayoutCase l :
             {LayoutCase{1, 1, 1}, LayoutCase{2, 2, 1}, LayoutCase{1, 2, 2}, LayoutCase{3, 1, 1}}) {
            l.zero = l.dp > 1 ? 3 : 0;
            auto body = [&](const Comm& world) {
                Layout me = layout_of(l, world.rank);
                Plan p = plan_of(shape, l, me, true);
                Fixture<float> f(shape, {p});
                f.t.comms = make_comms(world, me);
                init_weights(f.t, 11);
                for (size_t i = 0; i < f.t.model.parameters.size(); i++) {
                    std::vector<float> values = get_weight(f.t, f.t.model.parameters[i]);
                    values.resize(f.t.model.parameters[i].file_elements());
                    if (l.ranks() == 1) want.push_back(values);
                    if (world.rank == 0) {
                        EXPECT_EQ(values, want[i]) << f.t.model.parameters[i].name << l.text();
                    }
                }
            };
            EXPECT_EQ(run_local_ranks(l.ranks(), {}, body), 0);
        }
    }
}
