// test_layouts.cpp - every layout is the same computation: losses, norms, gradients and weights of
// data, tensor, sequence and pipeline parallelism and ZeRO against one rank, ranks being threads
//   Bit by bit where llmc promises it: pipelines against accumulation, ZeRO stage 1 against 0 and 3
//   against 2, recomputation, backward passes in two halves. Other layouts add in another order,
//   and are compared in double, where a mistake is 1e9 times larger than rounding.
//   LAYOUTS=FILE writes the page of dev/results; LAYOUTS_ALL=FILE writes every layout's errors.
#ifdef _OPENMP
#include <omp.h>
#endif
#include <array>
#include <fstream>
#include "../../llmc/layout.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int EVERY = 9; // one layout in so many is tested: each takes 20 times as long here
#else
constexpr int EVERY = 1;
#endif

// Whether to skip the next layout of a test, which counts them in `number`.
bool left_out(int* number) { return (*number)++ % EVERY; }

// A layout to test, with everything that may vary beside it.
struct LayoutCase {
    int dp = 1, tp = 1, pp = 1, chunks = 1, zero = 0;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    RecomputeLevels recompute = {};
    bool split = false, sequence_parallel = false;
    int micro_batches = 2; // of each data-parallel rank
    int shards = 0;        // ranks of a sharding group; 0: all of dp
    bool near = false;     // the group shares out weights alone, and all ranks the rest
    int prefetch = 1;
    std::string file = {};          // the file of the schedule, with Pipeline::GIVEN
    int document_end = -1;          // the token that ends a document; -1: none does
    bool poisoned = false;          // poison what an action does not read (run_poisoned)
    const char* order = "tp-pp-dp"; // in which the grid's ranks are numbered
    bool muon = false;              // the optimizer
    bool normuon = false;           // and it is NorMuon, MuonEq and Muon+
    Masters masters = Masters::FLOAT;
    States states = States::FLOAT;
    size_t T = 8;                   // tokens of a sample
    int cp = 1;
    ContextOrder cp_order = ContextOrder::ZIGZAG;
    ContextMethod cp_method = ContextMethod::GATHER;
    int cp_heads = 1;
    Gradients gradients = Gradients::FLOAT;
    int ep = 1;
    bool exchange = false;          // exchange experts' rows instead of gathering all
    bool whole_experts = false;     // tensor-parallel ranks cut no expert
    bool one_expert = false;        // a router of zeros: all tokens choose the first experts
    int ranks() const { return dp * tp * pp * cp; }
    std::string text() const {
        const char* schedules[] = {"gpipe", "1f1b", "interleaved", "zero-bubble", "given"};
        std::string levels;
        for (Recompute r : recompute.given) levels += std::string(" ") + recompute_name(r);
        char line[256];
        snprintf(line, sizeof(line),
                 "dp %d (shards %d%s) tp %d%s pp %d x %d %s%s, zero %d prefetch %d, recompute%s, "
                 "micro-batches %d cp %d, order %d method %d of %d, ep %d%s%s%s",
                 dp, shards ? shards : dp * cp, near ? " of weights" : "", tp,
                 sequence_parallel ? " sp" : "", pp, chunks,
                 schedules[int(pipeline)], split ? " split" : "", zero, prefetch,
                 levels.c_str(), micro_batches, cp, int(cp_order), int(cp_method), cp_heads, ep,
                 whole_experts ? " of whole experts" : "", exchange ? " exchanged" : "",
                 one_expert ? " one expert" : "");
        return line;
    }
};

// The results of a run. Gradients and weights are by parameter, whole as in files, in double.
struct Result {
    std::vector<double> losses, norms;
    std::vector<double> balance; // of experts: MaxVio, least load, dropped share
    std::vector<std::vector<double>> first_grads, grads, weights;
    std::vector<std::vector<uint32_t>> scales; // of fp8 with delayed scaling, after each step
    std::string wrong;                         // what two ranks keep that should be the same
    std::mutex mutex;
};

// Copy one rank's part of a parameter, which begins at `kept`, into the whole. Elements that two
// ranks hold must have the same bits on both.
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

// Collect the history of delayed scaling after a step. It must be the same on all ranks.
template <typename T> void collect_scales(const Fixture<T>& f, Result& r, size_t step) {
    Fp8History h = fp8_history(f.t);
    size_t words = fp8_history_bytes(h.slots, f.t.model.shape.fp8.rule) / sizeof(uint32_t);
    std::vector<uint32_t> mine(h.amax, h.amax + words);
    std::lock_guard<std::mutex> lock(r.mutex);
    if (r.scales.size() <= step) r.scales.push_back(mine);
    if (r.scales[step] != mine) r.wrong = "ranks have different scales of fp8";
}

constexpr size_t B_SAMPLES = 3;

// Collect the part of the gradients that this rank updates.
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
    p.optimizer = l.muon ? Optimizer::MUON : adamw ? Optimizer::ADAMW : Optimizer::SGD;
    if (l.normuon) p.optimizer = Optimizer::NORMUON;
    p.masters = l.masters;
    p.states = l.states;
    p.gradients = l.gradients;
    p.layout = me;
    p.layout.first_layer = split_layers(std::vector<double>(shape.L + 2, 1.0), me.stages());
    std::ifstream file(l.file);
    EXPECT_EQ(l.file.empty() ? "" : read_schedule(file, p.layout.given), "");
    return p;
}

// Run a step in which every byte that an action does not declare to read holds poison while it
// runs. The action must change only the bytes that it declares to write, and must write all of
// those that it writes anew. If it depends on other bytes, the step's results differ.
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

        // Poison, run, and put back the bytes that it does not write.
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

        // Count the poison that is left in what it writes anew. Rows end at multiples of 256 bytes,
        // a bucket's padding has no gradient, and expert-parallel ranks have room for more rows
        // than they get.
        for (Data d : x.writes) {
            const Place* place = arena_find(arena, 0, t.at, d);
            bool anew = !std::count(x.reads.begin(), x.reads.end(), d) && !persistent(d.kind);
            if (!place || !anew || d.kind == Kind::SCRATCH) continue;
            size_t elements = of_bucket(d.kind) ? t.model.buckets[size_t(d.of)].elements : 0;
            bool narrow = d.kind == Kind::SENT && p.gradients == Gradients::BF16;
            size_t bytes = narrow                    ? elements * sizeof(bf16)
                           : d.kind == Kind::PARTIAL ? elements * sizeof(acc_t<T>)
                                                     : place->bytes,
                   untouched =
                       size_t(std::count(arena.device().base + place->offset,
                                         arena.device().base + place->offset + bytes, POISON));
            if (p.layout.ep == 1 && untouched > bytes / 20 + 20 * 256)
                wrong = action_text(a, t.model) + " does not write " + data_text(d, t.model);
        }
    }
    t.at = int(p.actions.size()) - 1;
}

Layout layout_of(const LayoutCase& l, int rank) {
    // The axes, and what differs along each.
    Layout sizes = small_layout(l.dp, l.tp, l.pp, l.cp);
    sizes.order = layout_order(l.order);
    sizes.sequence_parallel = l.sequence_parallel;
    sizes.context.order = l.cp_order;
    sizes.context.method = l.cp_method;
    sizes.context.heads = l.cp_heads;
    sizes.ep = l.ep;
    sizes.experts.exchange = l.ep > 1 && l.exchange;
    sizes.experts.whole = l.whole_experts;
    sizes.chunks = l.chunks;
    sizes.pipeline = l.pipeline;

    // ZeRO, and where its shards may cut.
    sizes.zero = l.zero;
    sizes.zero_group = l.shards;
    sizes.weights_near = l.near;
    sizes.prefetch = l.prefetch;
    sizes.muon = l.muon;
    if (l.states == States::EIGHT_BIT) sizes.tensor_align = STATE_BLOCK;
    return layout_at(sizes, rank);
}

// Train on one rank of a layout, and collect its results.
template <typename T>
void run_rank(const Comm& world, const Shape& shape, const LayoutCase& l, bool adamw, int steps,
              Result& result, double nudge) {
#ifdef _OPENMP
    omp_set_num_threads(1); // models this small gain nothing by more
#endif
    // Make the rank's trainer.
    Layout me = layout_of(l, world.rank);
    Plan p = plan_of(shape, l, me, adamw);
    Fixture<T> f(shape, {p}, 5, nudge);
    f.t.comms = make_comms(world, me, ranks_of_kv_head(me, f.t.model));

    // Set the optimizer. A key's bias has a gradient of mere rounding, from which AdamW would make
    // whole steps: a large eps prevents that.
    f.t.hyper.eps = 1e-3f;
    if (!adamw) f.t.hyper.lr = 0.5f;
    f.t.hyper.muon.muoneq = f.t.hyper.muon.plus = l.normuon;
    f.t.data.document_end = l.document_end;
    for (const Parameter& parameter : f.t.model.parameters) {
        bool router = parameter.rows() == shape.experts.E && parameter.cols() == shape.C;
        std::vector<double> zeros(parameter.elements(), 0);
        if (l.one_expert && router) set_weight(f.t, parameter, zeros.data());
    }

    // Train, and collect what each step gives.
    ChoiceBiases biases = read_choice_biases(f.t);
    for (int s = 0; s < steps; s++) {
        std::string wrong;
        l.poisoned ? run_poisoned(f.t, wrong) : run_plan(f.t, 0);
        if (!wrong.empty()) {
            std::lock_guard<std::mutex> lock(result.mutex);
            result.wrong = wrong;
        }
        f.t.data.cursor += p.B * size_t(p.micro_batches * l.dp);
        double loss = plan_loss(f.t).mean();
        std::vector<int64_t> loads = step_loads(f.t);
        ExpertBalance experts = expert_balance(loads, shape.experts.E);
        double dropped = dropped_share(f.t, loads);
        if (shape.experts.choice_bias) move_choice_biases(f.t, biases, loads, 0.01f);
        if (s == 0) collect_grads(f, result, true);
        if (shape.fp8.kind == Fp8::DELAYED) collect_scales(f, result, size_t(s));
        if (world.rank > 0) continue;
        result.losses.push_back(loss);
        result.balance.insert(result.balance.end(), {experts.max_vio, experts.least, dropped});
        result.norms.push_back(read_value<StepScale>(f.t, {Kind::SCALE}).norm);
    }

    // Collect the last gradients, and the weights.
    collect_grads(f, result, false);
    for (size_t i = 0; i < f.t.model.parameters.size(); i++) {
        const Parameter& parameter = f.t.model.parameters[i];
        if (!bucket_is_mine(f.t.layout, f.t.model, parameter.bucket)) continue;
        Data weight = {Kind::WEIGHT, parameter.bucket};
        collect(result, result.weights[i], address<const T>(f.t, weight), f.t.layout, parameter,
                kept_range(f.t, weight, parameter), "weights");
    }
}

// Train three steps in a layout, a thread for each rank. moment: when collectives take place
// between their start and their end. nudge: a relative change of all initial weights.
template <typename T>
std::unique_ptr<Result> run_layout(Shape shape, const LayoutCase& l, bool adamw,
                                   Moment moment = Moment::ANY, double nudge = 0) {
    constexpr int steps = 3;
    shape.V = 157; // more than the first tensor-parallel rank has
    auto result = std::make_unique<Result>();
    std::vector<Parameter> parameters = make_model(shape).parameters;
    for (auto* all : {&result->weights, &result->grads, &result->first_grads})
        all->resize(parameters.size());

    // Run the ranks.
    LocalSettings settings;
    settings.moment = moment, settings.timeout_s = 60, settings.placements = true;
    EXPECT_EQ(run_local_ranks(l.ranks(), settings,
                              [&](const Comm& world) {
                                  run_rank<T>(world, shape, l, adamw, steps, *result, nudge);
                              }),
              0)
        << l.text();
    EXPECT_EQ(result->wrong, "") << l.text();

    // Cut off the vocabulary's padding, which depends on tp.
    for (auto* all : {&result->weights, &result->grads, &result->first_grads})
        for (size_t i = 0; i < parameters.size(); i++)
            (*all)[i].resize(parameters[i].file_elements(), NAN);
    return result;
}

// Expect the same bits in all results.
void expect_same(const Result& a, const Result& b, const std::string& text) {
    EXPECT_EQ(a.losses, b.losses) << text;
    EXPECT_EQ(a.norms, b.norms) << text;
    EXPECT_TRUE(a.weights == b.weights) << text << ": other weights";
    EXPECT_TRUE(a.grads == b.grads) << text << ": other gradients";
    EXPECT_TRUE(a.scales == b.scales) << text << ": other scales";
}

// ||x - y|| / ||y||; infinity if their lengths differ.
double relative_error(const std::vector<double>& x, const std::vector<double>& y) {
    double difference = 0, all = 0;
    for (size_t i = 0; i < y.size(); i++)
        difference += (x[i] - y[i]) * (x[i] - y[i]), all += y[i] * y[i];
    if (all == 0 && difference == 0 && x.size() == y.size()) return 0; // never trained
    return x.size() == y.size() ? std::sqrt(difference / all) : INFINITY;
}

// The relative errors of a run: losses, norms, then by parameter gradients of the first and the
// last step, and weights.
constexpr const char* WHAT[] = {"losses", "norms", "first gradients", "gradients", "weights"};
typedef std::array<std::vector<double>, 5> Errors;
Errors errors_of(const Result& a, const Result& b) {
    Errors e;
    EXPECT_EQ(a.balance, b.balance); // counts of tokens do not round
    e[0] = {relative_error(a.losses, b.losses)}, e[1] = {relative_error(a.norms, b.norms)};

    // Join numbers that are parameters by themselves: one nudge says little of a single number.
    std::vector<double> mine[3], other[3];
    for (size_t i = 0; i < b.weights.size(); i++) {
        if (b.weights[i].size() > 1) continue;
        for (auto [to, r] : {std::pair(mine, &a), {other, &b}}) {
            to[0].push_back(r->first_grads[i][0]);
            to[1].push_back(r->grads[i][0]);
            to[2].push_back(r->weights[i][0]);
        }
    }
    for (int k = 0; k < 3 && mine[0].size(); k++)
        e[size_t(k) + 2].push_back(relative_error(mine[k], other[k]));

    for (size_t i = 0; i < b.weights.size(); i++) {
        if (b.weights[i].size() == 1) continue;
        e[4].push_back(relative_error(a.weights[i], b.weights[i]));
        if (std::isnan(b.grads[i][0])) continue; // frozen
        e[2].push_back(relative_error(a.first_grads[i], b.first_grads[i]));
        e[3].push_back(relative_error(a.grads[i], b.grads[i]));
    }
    return e;
}

std::vector<Shape> shapes() { return {small_gpt2(), small_llama(), small_mixtral()}; }

// Models that tensor parallelism can cut: GPT-2's heads and channels by 2, 3 and 6, Llama's by 2, 4
// and 8, which has two key/value heads. Their vocabularies, 301 and 277 tokens, divide by none of
// these: a rank has 256 tokens, 128, fewer, or none.
Shape gpt2_for_tp(bool tied) {
    Shape s = gpt2_shape(4, 6, 24, 301, 32);
    s.embedding.tied = tied;
    return s;
}

// Attention and ffn side by side, and heads of which a quarter rotates.
Shape neox_for_tp() { return neox_shape(4, 6, 48, 301, 32); }

// Tied: a Llama with all biases, and sliding windows in the first block and the last. Untied: Qwen3's norms
// of q and k.
Shape llama_for_tp(bool tied) {
    Shape s = llama_shape(4, 8, 2, 32, 48, 277, 64, 10000);
    s.embedding.tied = tied, s.attention.qkv_bias = s.attention.o_bias = s.block.mlp_bias = tied, s.rope.scaling = {8, 1, 4, 16};
    if (tied) s.attention.window = 5, s.attention.full_layers[2] = s.attention.full_layers[3] = true;
    if (!tied) s.hf_type = "qwen3", s.block.qk_norm = true, s.HS = 6;
    return s;
}

// Experts with large balance terms. Some experts are chosen by no token of some rank.
Shape mixtral_for_tp(bool tied) {
    Shape s = llama_for_tp(tied);
    s.attention.qkv_bias = s.attention.o_bias = s.block.mlp_bias = false;
    s.family = Family::MIXTRAL, s.hf_type = tied ? "mixtral" : "qwen3_moe";
    s.F = 24, s.experts.E = tied ? 6 : 5, s.experts.K = 2, s.experts.balance = 0.5, s.experts.z_loss = 0.1;
    s.experts.router = tied ? Router::RENORMALISED : Router::SIGMOID;
    s.block.qk_norm = true, s.block.whole_qk_norm = tied;
    return s;
}

// Every second block has experts, except the first two.
Shape shared_for_tp() {
    Shape s = mixtral_for_tp(false);
    s.hf_type = "qwen2_moe", s.experts.router = Router::SOFTMAX, s.attention.qkv_bias = true;
    s.experts.dense_first = 2, s.experts.sparse_every = 2, s.experts.dense_F = 40, s.experts.shared_F = 48, s.experts.shared_gate = true;
    return s;
}

// gpt-oss, whose clamp some numbers meet.
Shape oss_for_tp() {
    Shape s = mixtral_for_tp(true);
    set_variant(s, "gpt_oss");
    s.family = Family::GPT_OSS;
    s.hf_type = "gpt_oss", s.embedding.tied = false, s.attention.qkv_bias = s.attention.o_bias = true, s.experts.gate_limit = 0.05;
    s.attention.full_layers.reset(), see_all_every(s, 2);
    return s;
}

// Latent attention with heads for eight ranks, whose values are narrower; every width that is cut
// is a multiple of eight.
Shape mla_for_tp(bool experts) {
    Shape s = llama_shape(4, 8, 8, 32, 0, 277, 64, 10000);
    s = deepseek_shape(experts ? "deepseek_v3" : "deepseek_v2", s,
                       {experts ? size_t(10) : 0, 7, 4, 2, 3}, 48);
    if (!experts) return s;
    s.F = 24, s.experts.E = 6, s.experts.K = 2, s.experts.dense_first = 1, s.experts.shared_F = 48, s.experts.balance = 0.5;
    s.experts.router = Router::SIGMOID, s.experts.gate_scale = 2.5f, s.experts.choice_bias = true;
    s.experts.groups = 3, s.experts.kept_groups = 2;
    return s;
}

// Whether a model can run in a layout.
bool fits(const Shape& s, const LayoutCase& l) {
    size_t tp = size_t(l.tp);
    bool scalars = s.block.scalars && l.pp > 1; // refused: every block reads the embedding
    return tp_divides(s, tp) && l.pp * l.chunks <= int(s.L) + 2 && !scalars;
}

// Choose by a layout's number what the sizes of its axes leave open.
void take_turns(LayoutCase& l, int i) {
    const Pipeline pipelines[] = {Pipeline::ONE_F_ONE_B, Pipeline::GPIPE, Pipeline::ZERO_BUBBLE,
                                  Pipeline::INTERLEAVED};
    l.pipeline = pipelines[i % 4];
    l.chunks = l.pipeline == Pipeline::INTERLEAVED && l.pp > 1 && l.pp < 4 ? 2 : 1;
    l.recompute = three_levels(37 * i % 125), l.split = i % 5 == 0;
    l.sequence_parallel = l.tp > 1 && i % 3 > 0;
    l.micro_batches = 1 + i / 3 % 2, l.prefetch = i % 3;
}

// All layouts of up to 8 ranks and some of up to 16, with every stage of ZeRO. Other settings, such
// as schedules and levels of recomputation, take turns.
std::vector<LayoutCase> all_layouts() {
    // List the sizes of the axes.
    std::vector<LayoutCase> sizes, all;
    for (int dp = 1; dp <= 8; dp++)
        for (int tp = 1; dp * tp <= 8; tp++)
            for (int pp = 1; dp * tp * pp <= 8; pp++) sizes.push_back({dp, tp, pp});
    for (auto [dp, tp, pp] : {std::array{2, 2, 4}, std::array{4, 4, 1}, std::array{2, 8, 1},
                              std::array{3, 3, 1}, std::array{1, 6, 2}, std::array{8, 1, 2}})
        sizes.push_back({dp, tp, pp});

    // Choose the rest by the layout's number.
    for (LayoutCase l : sizes)
        for (l.zero = 0; l.zero <= (l.dp > 1 ? 3 : 0); l.zero++) {
            int i = int(all.size());
            take_turns(l, i);
            l.shards = l.dp == 4 && i % 2 ? 2 : l.dp == 8 && l.zero == 3 ? 4 : l.dp;
            l.near = l.zero == 3 && l.shards < l.dp && (l.dp == 8 || l.tp > 1);
            all.push_back(l);
        }
    return all;
}

} // namespace

// ----------------------------------------------------------------------------

// A pipeline adds the same gradients as accumulation on one rank, in the same order.
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

// A schedule from a file does so too: 1F1B written to a file, and one that has no name.
TEST(Layouts, SchedulesFromFilesAre1F1BBitByBit) {
    LayoutCase named;
    named.pp = 2, named.micro_batches = 3;
    auto want = run_layout<float>(small_gpt2(), named, true);
    for (const std::string& text :
         {std::string("F0.0 F1.0 B0.0 F2.0 B1.0 B2.0\nF0.1 B0.1 F1.1 B1.1 F2.1 B2.1\n"),
          std::string("F0.0 F1.0 F2.0 B0.0 I1.0 W1.0 B2.0 # a line a rank\n"
                      "F0.1 I0.1 F1.1 W0.1 B1.1 F2.1 B2.1\n")}) {
        LayoutCase l = named;
        l.pipeline = Pipeline::GIVEN, l.file = scratch("schedule.txt");
        std::ofstream(l.file) << text;
        expect_same(*run_layout<float>(small_gpt2(), l, true), *want, text);
    }
}

// With or without a pipeline, ZeRO stage 1 has the bits of stage 0, and stage 3 those of stage 2.
// With one micro-batch all stages have the same bits.
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

                // Vary what must not matter: pipeline, prefetch, recomputation, split halves.
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

// Weights that stay near, in groups of which the replicas share out gradients, masters and moments,
// have the bits of groups that hold everything: sums over replicas are the same, in parts.
TEST(Layouts, NearWeightsAreHybridShardingBitByBit) {
    int number = 0;
    auto compare = [&]<typename T>(T, const Shape& shape, LayoutCase l) {
        if (left_out(&number)) return;
        l.zero = 3, l.shards = 2;
        auto want = run_layout<T>(shape, l, true);
        l.near = true;
        for (Moment moment : {Moment::EARLIEST, Moment::LATEST})
            expect_same(*run_layout<T>(shape, l, true, moment), *want, l.text());
    };
    for (const Shape& shape : {small_gpt2(), small_mixtral()})
        for (auto [dp, tp, pp] : {std::array{4, 1, 1}, {6, 1, 1}, {4, 1, 2}, {4, 2, 1}})
            for (Gradients format : {Gradients::FLOAT, Gradients::BF16, Gradients::FP8}) {
                LayoutCase l;
                l.dp = dp, l.tp = tp, l.pp = pp, l.gradients = format, l.prefetch = tp;
                compare(float(), tp > 1 ? gpt2_for_tp(true) : shape, l);
            }

    // The same for every format of masters and moments, and for Muon.
    for (auto [masters, states] : {std::pair{Masters::FLOAT, States::FLOAT},
                                   {Masters::REMAINDER, States::EIGHT_BIT},
                                   {Masters::NONE, States::BF16}}) {
        LayoutCase l;
        l.dp = 4, l.masters = masters, l.states = states;
        compare(bf16(), small_gpt2(), l);
        l.muon = states != States::EIGHT_BIT;
        compare(bf16(), small_gpt2(), l);
    }
}

// access() tells the truth on many ranks too, where actions send messages and sum over ranks.
TEST(Layouts, ActionsOfManyRanksTouchWhatTheySay) {
    int number = 0;
    for (int zero : {0, 1, 2, 3})
        for (auto [replicas, tp, pp] :
             {std::array{1, 1, 2}, std::array{2, 1, 1}, std::array{1, 2, 2}}) {
            LayoutCase l;
            l.dp = 2 * replicas, l.shards = 2, l.pp = pp, l.zero = zero;
            l.tp = tp, l.sequence_parallel = tp > 1 && zero > 0, l.near = zero == 3;
            l.chunks = 1 + zero % 2, l.recompute = three_levels(31 * zero % 125);
            l.muon = zero % 2 == tp % 2, l.normuon = l.muon && zero < 3;
            l.pipeline = l.chunks > 1 ? Pipeline::INTERLEAVED : Pipeline::ONE_F_ONE_B;
            Shape shape = llama_for_tp(zero % 2);
            if (zero == 3) shape = mixtral_for_tp(tp == 1);
            if (left_out(&number)) continue;
            auto want = run_layout<float>(shape, l, true);
            l.poisoned = true;
            expect_same(*run_layout<float>(shape, l, true), *want, l.text());
        }
}

// Gradients that are sent in fewer bits stay within the bound of their rounding. A gradient s is the
// sum of d ranks' parts p. In bf16 rounding a part errs by at most 2^-9 |p|, and rounding the sum by
// 2^-9 |s|. In fp8 a part errs by 2^-4 |p|, and sums are not rounded; elements below 2^-14 of their
// block's largest lose more, which the length of the whole does not show. The parts come from
// different tokens, so sum |p| <= sqrt(d) |s|: they are about as long as s, or independent.
void expect_gradients_within_bound(Gradients format) {
    auto whole = [](const Result& r) {
        std::vector<double> all;
        for (auto& g : r.first_grads) all.insert(all.end(), g.begin(), g.end());
        return all;
    };
    int number = 0;
    for (const Shape& shape : {small_gpt2(), small_mixtral()})
        for (auto [dp, shards] : {std::array{2, 0}, std::array{3, 0}, std::array{4, 2}})
            for (int zero : {0, 2}) {
                if (left_out(&number)) continue;
                LayoutCase l;
                l.dp = dp, l.shards = shards, l.zero = zero;
                auto wide = run_layout<float>(shape, l, true);
                l.gradients = format;
                auto narrow = run_layout<float>(shape, l, true);

                // Compare with float's gradients. The error must not be zero either.
                bool codes = format == Gradients::FP8;
                int sums = codes ? 0 : shards ? 2 : 1; // in bf16 the replicas' sum is rounded too
                int bits = codes ? 4 : 9;
                double error = relative_error(whole(*narrow), whole(*wide));
                EXPECT_LT(error, std::ldexp(sums + std::sqrt(dp), -bits)) << l.text();
                EXPECT_GT(error, std::ldexp(1.0, -bits - 3)) << l.text() << ": nothing is lost";

                // Stage 1 and 3 round as often as 0 and 2, so they have the same bits: with late
                // collectives, in a pipeline, and with poison too.
                l.zero++;
                expect_same(*run_layout<float>(shape, l, true, Moment::LATEST), *narrow, l.text());
                l.pp = 2, l.poisoned = dp == 2;
                expect_same(*run_layout<float>(shape, l, true), *narrow, l.text());
            }
}
TEST(Layouts, GradientsInSixteenBitsAreWithinTheirBound) {
    expect_gradients_within_bound(Gradients::BF16);
}
TEST(Layouts, GradientsInEightBitsAreWithinTheirBound) {
    expect_gradients_within_bound(Gradients::FP8);
}

// A rank holds the narrow copy of one bucket's gradient at a time, whatever the stage of ZeRO: 2
// bytes an element, or two sets of packets of 129 bytes for 128 elements.
TEST(Layouts, OneGradientIsSentAtATime) {
    for (auto [zero, format] : {std::pair{0, Gradients::BF16}, {1, Gradients::BF16},
                                {2, Gradients::BF16}, {3, Gradients::BF16}, {0, Gradients::FP8},
                                {2, Gradients::FP8}}) {
        LayoutCase l;
        l.dp = 2, l.zero = zero, l.gradients = format;
        double each = format == Gradients::FP8 ? 2 * 129.0 / 128 : 2;
        Layout layout = layout_of(l, 0);
        Trainer<bf16, Cpu> t;
        trainer_place(t, small_gpt2(), {plan_of(small_gpt2(), l, layout, true)}, layout);

        // Count the copies that live at each action.
        int actions = int(t.arena.finish[0].size()), most = 0;
        for (int at = 0; at < actions; at++) {
            int now = 0;
            for (auto& [d, lives] : t.arena.passing[0])
                for (const Place& life : lives) {
                    if (d.kind != Kind::SENT || at < life.first || life.last < at) continue;
                    EXPECT_EQ(life.bytes,
                              each * whole_elements(layout, t.model.buckets[size_t(d.of)]));
                    now++;
                }
            most = std::max(most, now);
        }
        EXPECT_EQ(most, 1) << zero;
    }
}

// Tensor-parallel ranks round other sums: in bf16 losses agree only within its precision, 2^-8.
TEST(Layouts, StagesOfZeroInBf16) {
    // Tensor parallelism, then with data and sequence parallelism, then with ZeRO and a pipeline.
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
}

// The stages of ZeRO are equal in bf16, also with small masters and moments, because an update depends on no
// element but its own (with 8-bit moments: on no block but its own).
TEST(Layouts, SmallStatesInBf16) {
    int number = 0;
    for (auto [masters, states] : {std::pair(Masters::FLOAT, States::FLOAT),
                                   {Masters::REMAINDER, States::FLOAT},
                                   {Masters::NONE, States::BF16}, {Masters::FLOAT, States::BF16},
                                   {Masters::REMAINDER, States::EIGHT_BIT}})
        for (const Shape& shape : {gpt2_shape(3, 2, 64, 61, 32), small_llama()})
            for (int tp : {1, 2}) {
                if (shape.NH % size_t(tp) || left_out(&number)) continue;

                // Stage 1 has the bits of stage 0, stage 3 those of stage 2.
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

// fp8 in blocks of 128 tokens, or fewer, does not depend on the layout if they divide a sequence.
// Pipelines, recomputation and split backward passes equal accumulation bit by bit. Two ranks
// instead of two micro-batches add the same two gradients in float; blocks of other tokens would
// change them by a hundredth.
TEST(Layouts, Fp8BlocksDoNotKnowTheLayout) {
    int number = 0;
    for (auto [shape, fp8] : {std::pair(small_gpt2(), Fp8::BLOCK), {small_llama(), Fp8::BLOCK},
                              {small_gpt2(), Fp8::MX}, {small_llama(), Fp8::NVFP4}}) {
        // Train with and without fp8 on one rank.
        shape.P = 128;
        LayoutCase one;
        one.T = 128;
        auto wide = run_layout<bf16>(shape, one, true);
        shape.fp8.kind = fp8;
        auto want = run_layout<bf16>(shape, one, true);
        EXPECT_FALSE(want->losses == wide->losses); // fp8 is on
        EXPECT_LT(relative_error(want->losses, wide->losses), 0.02);

        // Data parallelism: the first losses are the same, gradients to the rounding of a sum.
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

        // A pipeline, with recomputation and split backward passes.
        LayoutCase stages = one;
        stages.pp = 2, stages.recompute = Recompute::FULL, stages.split = true;
        expect_same(*run_layout<bf16>(shape, stages, true), *want, stages.text());
    }
}

// ZeRO-3 gathers weights of fp8 products as codes, with scales of whole blocks though shards cut
// them anywhere: to the bit what ranks compute that hold the weights whole. An evaluation too.
TEST(Layouts, Fp8WeightsComeAsCodesToTheBit) {
    for (Shape shape : {gpt2_shape(2, 4, 96, 61, 32), small_llama()})
        for (Fp8 fp8 : {Fp8::BLOCK, Fp8::TENSOR})
            for (int dp : {2, 4}) {
                shape.fp8.kind = fp8;
                LayoutCase whole;
                whole.dp = dp, whole.micro_batches = 1, whole.T = 8;
                LayoutCase cut = whole;
                cut.zero = 3;
                expect_same(*run_layout<bf16>(shape, cut, true),
                            *run_layout<bf16>(shape, whole, true), cut.text());
            }
}

// A gather of codes sends and receives half the bytes of a wide one, and the vectors.
TEST(Layouts, CodesAreHalfTheBytes) {
    Shape shape = gpt2_shape(2, 12, 768, 50257, 1024);
    shape.fp8.kind = Fp8::TENSOR;
    LayoutCase l;
    l.dp = 8, l.zero = 3;
    Layout layout = layout_of(l, 3);
    Trainer<bf16, Cpu> t;
    trainer_place(t, shape, {plan_of(shape, l, layout, true)}, layout);
    int gathers = 0;
    for (auto& [d, lives] : t.arena.passing[0])
        for (const Place& life : lives) {
            if (d.kind != Kind::CODES) continue;
            double elements = double(whole_elements(layout, t.model.buckets[size_t(d.of)]));
            EXPECT_GT(double(life.bytes), elements);
            EXPECT_LT(double(life.bytes), 1.03 * elements); // in bf16 twice as many
            gathers++;
        }
    EXPECT_GE(gathers, 2);
}

// Expect that a step has taken the maximum of every operand of every matrix, and made a scale of it.
static void expect_all_scaled(const Shape& shape, std::vector<uint32_t> words) {
    size_t slots = fp8_slots(make_model(shape));
    Fp8History h = fp8_history_at(words.data(), slots, shape.fp8.rule);
    ASSERT_GT(slots, 0u);
    for (size_t slot = 0; slot < slots; slot++) {
        EXPECT_EQ(h.amax[slot], 0u) << slot;
        EXPECT_GT(h.scale[slot], 0) << slot;
    }
}

// fp8 with delayed scaling takes maxima over all ranks and micro-batches. After the first step all
// layouts have the same scales; later scales depend on sums of gradients in another order.
TEST(Layouts, Fp8DelayedScalesAreThoseOfOneProcess) {
    for (Shape shape : {small_gpt2(), small_llama()}) {
        // Data parallelism.
        shape.fp8.kind = Fp8::DELAYED, shape.fp8.rule = {3, 0, false};
        LayoutCase one;
        auto want = run_layout<bf16>(shape, one, true);
        expect_all_scaled(shape, want->scales[0]);
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

        // A pipeline, and poison.
        LayoutCase stages = one;
        stages.pp = 2, stages.recompute = Recompute::FULL, stages.split = true;
        expect_same(*run_layout<bf16>(shape, stages, true), *want, stages.text());
        stages.poisoned = true, stages.pp = 1;
        expect_same(*run_layout<bf16>(shape, stages, true), *want, stages.text());
    }

    // Tensor parallelism rounds other sums: losses are near.
    Shape shape = gpt2_for_tp(true);
    shape.fp8.kind = Fp8::DELAYED;
    LayoutCase one, cut;
    cut.tp = 2;
    auto want = run_layout<bf16>(shape, one, true);
    for (bool rows : {false, true}) {
        cut.sequence_parallel = rows;
        auto got = run_layout<bf16>(shape, cut, true);
        EXPECT_LT(relative_error(got->losses, want->losses), 1.0 / 64) << cut.text();
    }
}

// Tensor parallelism cuts no fp8 block if 128 divides its pieces, and sequence parallelism
// quantises the same rows. Losses are about as near as bf16's.
TEST(Layouts, Fp8OfTensorParallelRanks) {
    Shape shape = gpt2_shape(2, 2, 256, 61, 128);
    LayoutCase one, cut;
    one.T = cut.T = 128, one.micro_batches = cut.micro_batches = 1;
    cut.tp = 2;
    for (Fp8 fp8 : {Fp8::BLOCK, Fp8::MX, Fp8::NVFP4}) {
        shape.fp8.kind = fp8;
        auto want = run_layout<bf16>(shape, one, false);
        for (bool rows : {false, true}) {
            cut.sequence_parallel = rows;
            auto got = run_layout<bf16>(shape, cut, false);
            EXPECT_LT(relative_error(got->losses, want->losses), 1.0 / 64) << cut.text();
        }
    }
}

// The bound for sums in another order. Rounding acts like a small change of the weights, and the
// test measures what such a change does: one rank runs with all weights changed by NUDGE of
// themselves, and each result answers with a relative change. A layout's result may be off by
// ROUNDINGS * eps of itself, and by as much of its answer per unit of nudge. A sum of n numbers
// errs by about sqrt(n) roundings; the longest sums here have some hundred terms.
struct OneRank {
    std::unique_ptr<Result> result;
    Errors answer; // the relative change of each result after the nudge
};
constexpr double NUDGE = 1e-8, EPS = 1.1e-16, ROUNDINGS = 32;

// The same step on one rank: the micro-batches of all data-parallel ranks, one after another.
OneRank run_one_rank(const Shape& shape, const LayoutCase& l, bool adamw) {
    LayoutCase one;
    one.T = l.T, one.one_expert = l.one_expert, one.muon = l.muon, one.normuon = l.normuon;
    one.micro_batches = l.micro_batches * l.dp, one.document_end = l.document_end;
    OneRank r = {run_layout<double>(shape, one, adamw), {}};
    r.answer = errors_of(*run_layout<double>(shape, one, adamw, Moment::ANY, NUDGE), *r.result);
    return r;
}

// The largest relative errors of layouts, the largest as a share of its bound, and what exceeds it.
struct Cell {
    double largest[5] = {}, of_bound = 0;
    std::string wrong;
    int layouts = 0;
};
Cell compare(const Errors& errors, const OneRank& one) {
    Cell cell;
    cell.layouts = 1;
    for (int k = 0; k < 5; k++)
        for (size_t i = 0; i < errors[k].size(); i++) {
            double bound = (1 + one.answer[k][i] / NUDGE) * EPS * ROUNDINGS, e = errors[k][i];
            cell.largest[k] = std::max(cell.largest[k], e);
            cell.of_bound = std::max(cell.of_bound, e / bound);
            if (!(e <= bound)) cell.wrong = std::string(WHAT[k]) + " " + std::to_string(i);
        }
    return cell;
}

// Compare a layout with one rank, whose results are computed where `one` has none yet.
Cell compare(OneRank& one, const Shape& shape, const LayoutCase& l, bool adamw) {
    if (!one.result) one = run_one_rank(shape, l, adamw);
    return compare(errors_of(*run_layout<double>(shape, l, adamw), *one.result), one);
}

// "data x pipeline, ZeRO 3": the axes along which there is more than one rank.
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
    worst.layouts += cell.layouts;
}

void print_worst(const Cell& worst) {
    printf("%d layouts, the worst at %.2f of its bound\n", worst.layouts, worst.of_bound);
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

// Every layout, with both models and both optimizers, agrees with one rank within the bound.
TEST(Layouts, AreOneComputation) {
    std::map<std::tuple<bool, bool, bool, int>, OneRank> one_rank;
    std::map<std::string, Cell> groups; // by axes
    std::string all;
    Cell worst;
    int number = 0;

    // Compare each. One rank's results are computed once for each number of micro-batches.
    for (bool llama : {false, true})
        for (const LayoutCase& l : all_layouts())
            for (bool adamw : {true, false}) {
                bool tied = (l.dp + l.pp + l.zero / 2) % 2;
                Shape shape = llama ? llama_for_tp(tied) : gpt2_for_tp(tied);
                if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
                OneRank& one = one_rank[{llama, tied, adamw, l.micro_batches * l.dp}];
                Cell cell = compare(one, shape, l, adamw);
                ASSERT_EQ(cell.wrong, "") << l.text();

                // Collect the worst of all, and of each group.
                add_worst(worst, cell);
                add_worst(groups[dimensions_of(l)], cell);
                all += std::string("| ") + (llama ? "Llama" : "GPT-2") + (tied ? ", tied" : "") +
                       " | " + l.text() + " | " + (adamw ? "AdamW" : "SGD") + " |" +
                       columns_of(cell);
            }

    // Print a summary, and write the pages that are asked for.
    char summary[512];
    const double* e = worst.largest;
    snprintf(summary, sizeof(summary),
             "%d layouts, the worst at %.2f of its bound; largest relative errors: losses %.1e, "
             "norms %.1e, first gradients %.1e, gradients %.1e, weights %.1e",
             worst.layouts, worst.of_bound, e[0], e[1], e[2], e[3], e[4]);
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
            page << "| " << name << " | " << group.layouts << " |" << columns_of(group);
    }
    if (const char* path = getenv("LAYOUTS_ALL"))
        std::ofstream(path) << "| model | layout | optimizer |" << COLUMNS << "---|\n" << all;
}

// Adapters agree too, on every seventh layout and some with context parallelism. Adapters beside
// all matrices, beside attention's, and in the later blocks take turns. The half of an adapter that
// is replicated over tensor-parallel ranks has a partial gradient on each of them, with sequence
// parallelism or without.
TEST(Layouts, AdaptersAreOneComputation) {
    // Choose layouts.
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

    // Compare each with one rank.
    int number = 0;
    for (bool llama : {false, true})
        for (const LayoutCase& l : some) {
            int kind = number / 2 % 3;
            bool adamw = number % 2;
            Shape shape = llama ? llama_for_tp(number % 4 < 2) : gpt2_for_tp(true);
            if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
            bool tied = shape.embedding.tied;
            shape = kind == 0   ? with_lora(shape, 3)
                    : kind == 1 ? with_lora(shape, 2, "attention", true)
                                : with_late_lora(shape, 4);
            OneRank& one = one_rank[{llama, 2 * kind + tied, adamw, l.micro_batches * l.dp}];
            Cell cell = compare(one, shape, l, adamw);
            EXPECT_EQ(cell.wrong, "") << l.text();
        }
}

// Where adapters stand in upper blocks alone, backward passes end there, and stages of a pipeline
// below run forward alone. The reference has the same layout, and adapters below that change
// nothing: its passes go all the way. Losses, norms, gradients and weights have the same bits.
TEST(Layouts, BackwardEndsAtTheLowestAdapterBitByBit) {
    // Choose layouts, some with segments of blocks that keep one input, some with cp.
    std::vector<LayoutCase> some;
    const std::vector<LayoutCase> all = all_layouts();
    for (size_t i = 0; i < all.size(); i += 5) some.push_back(all[i]);
    for (int zero : {0, 1, 3})
        for (int pp : {1, 2}) {
            LayoutCase l = {2, 1, pp};
            l.zero = zero, l.cp = 2 - zero % 2, l.recompute = Recompute::FULL;
            l.recompute.segments = {2};
            some.push_back(l);
        }

    int number = 0, cut_messages = 0;
    for (const LayoutCase& l : some) {
        // Take turns: the model, its lowest adapter, and the optimizer.
        bool llama = number % 2, adamw = number % 3;
        Shape base = llama ? llama_for_tp(number % 4 < 2) : gpt2_for_tp(true);
        int first = 1 + number++ / 2 % int(base.L - 1);
        if (!fits(base, l)) continue;
        SCOPED_TRACE(concat("adapters from block ", first, ", ", l.text()));

        // Run both.
        Shape whole = upper_lora(base, 3, first, false), ends = upper_lora(base, 3, first, true);
        auto want = run_layout<float>(whole, l, adamw), have = run_layout<float>(ends, l, adamw);
        EXPECT_EQ(have->losses, want->losses);
        EXPECT_EQ(have->norms, want->norms);

        // Compare the adapters that both have, and the frozen weights.
        Model every = make_model(whole), upper = make_model(ends);
        for (size_t i = 0, k = 0; i < upper.parameters.size(); i++, k++) {
            const Parameter& p = upper.parameters[i];
            while (every.parameters[k].name != p.name) k++;
            EXPECT_EQ(have->weights[i], want->weights[k]) << p.name;
            if (!is_adapter(upper, p)) continue;
            EXPECT_EQ(have->first_grads[i], want->first_grads[k]) << p.name;
            EXPECT_EQ(have->grads[i], want->grads[k]) << p.name;
        }

        // Count the layouts in which a stage hears of no gradient.
        Layout me = layout_of(l, 0);
        Plan p = plan_of(ends, l, me, adamw);
        cut_messages += l.pp > 1 && first_layer_of(p.layout, upper, 1) <= lowest_trained(upper);
    }
    EXPECT_GT(cut_messages, EVERY > 1 ? 0 : 5);
}

// A prefix agrees too. Its rows are cut by key/value heads, which several tensor-parallel ranks may
// share. Llama's windows hold documents, each behind its own prefix.
TEST(Layouts, PrefixesAreOneComputation) {
    std::vector<LayoutCase> some;
    for (int zero : {0, 1, 2, 3}) {
        LayoutCase l = {2, 1 + zero % 2, 1 + zero / 2};
        l.zero = zero, l.sequence_parallel = zero == 3, l.recompute = three_levels(37 * zero);
        some.push_back(l);
    }
    some.push_back({1, 2, 2, 2, 0, Pipeline::INTERLEAVED});
    some.push_back({1, 1, 3, 1, 0, Pipeline::GPIPE});

    // Ranks that share sequences: a method each, and a hybrid. Ulysses' ranks have some heads of the
    // prefix each; where key/value heads are fewer than ranks, two ranks have the same one.
    for (int cp : {2, 4})
        for (ContextMethod method :
             {ContextMethod::GATHER, ContextMethod::RING, ContextMethod::ULYSSES}) {
            LayoutCase l = {cp == 2 ? 2 : 1, 1 + (method == ContextMethod::RING && cp == 2)};
            l.cp = cp, l.cp_method = method, l.zero = int(method), l.cp_order = ContextOrder(l.zero);
            l.cp_heads = cp == 4 && method == ContextMethod::RING ? 2 : 1;
            l.recompute = three_levels(30 * cp);
            some.push_back(l);
        }

    // Compare each with one rank; a step has four micro-batches.
    for (bool llama : {false, true}) {
        Shape shape = llama ? llama_for_tp(false) : gpt2_for_tp(true);
        shape.tuned.prefix = 3;
        int document_end = llama ? 105 : -1;
        OneRank one;
        some.push_back({1, llama ? 4 : 3, 1}); // Llama's ranks share key heads
        for (LayoutCase l : some) {
            size_t exchange = size_t(l.cp_method == ContextMethod::ULYSSES ? l.cp : l.cp_heads);
            if (!fits(shape, l) || !cp_divides(shape, size_t(l.tp), exchange)) continue;
            l.micro_batches = 4 / l.dp, l.document_end = document_end;
            EXPECT_EQ(compare(one, shape, l, llama).wrong, "") << l.text();
        }
    }
}

// Pipelines, ZeRO-1 and recomputation of a model behind a prefix change no bit, and actions touch
// only what they say.
TEST(Layouts, PrefixesKeepEveryBit) {
    for (Shape shape : {small_gpt2(), small_llama()}) {
        shape.tuned.prefix = 3;
        LayoutCase one, redone, stages, poisoned;
        auto trained = [&](const LayoutCase& l) { // frozen weights have no gradient: NaN
            auto result = run_layout<float>(shape, l, true);
            std::erase_if(result->grads, [](const auto& g) { return std::isnan(g[0]); });
            EXPECT_EQ(result->grads.size(), 2 * shape.L);
            return result;
        };
        auto want = trained(one);
        redone.recompute = Recompute::FULL;
        stages.pp = 2, stages.recompute = three_levels(44);
        poisoned.poisoned = true;
        for (const LayoutCase& l : {redone, stages, poisoned})
            expect_same(*trained(l), *want, l.text());
    }
}

// The variants of Llama and GPT-NeoX agree; they take turns at the layouts. OLMo-2 has more
// turns: its norms of q and k extend over all heads, so over tensor-parallel ranks, some of which
// share a key head.
TEST(Layouts, VariantsAreOneComputation) {
    std::map<std::tuple<std::string, bool, int>, OneRank> one_rank;
    int number = 0;
    for (const LayoutCase& l : all_layouts())
        for (const char* type : {VARIANTS[size_t(number) % std::size(VARIANTS)],
                                 number / 2 % 2 ? "olmo2" : "gpt_neox"}) {
            bool adamw = number % 3 > 0;
            Shape shape = llama_for_tp(false);
            shape.HS = 8;
            bool neox = !strcmp(type, "gpt_neox");
            shape = neox ? neox_for_tp() : small_variant(shape, type);

            // Compare with one rank.
            if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
            OneRank& one = one_rank[{type, adamw, l.micro_batches * l.dp}];
            Cell cell = compare(one, shape, l, adamw);
            ASSERT_EQ(cell.wrong, "") << type << ", " << l.text();
        }
}

// Residual scalars and value embeddings agree, alone and together, beside context parallelism too:
// two key/value heads, of which up to eight tensor-parallel ranks share columns of the tables.
TEST(Layouts, ScalarsAndValueEmbeddingsAreOneComputation) {
    Shape both = llama_for_tp(false);
    both.HS = 8;
    both = small_variant(both, "nanochat_values");
    Shape scalars = both, values = both;
    scalars.attention.values = false, values.block.scalars = false;
    std::map<std::tuple<bool, bool, bool, int>, OneRank> one_rank;
    int number = 0;
    for (LayoutCase l : all_layouts())
        for (const Shape& shape : {both, number % 2 ? scalars : values}) {
            bool adamw = number % 3 > 0;
            if (l.pp > 1 || !fits(shape, l) || left_out(&number)) continue;
            if (l.dp * l.tp <= 4 && number % 4 == 0) l.cp = 2;
            if (l.ranks() == 1) continue;
            auto [s, v] = std::pair(shape.block.scalars, shape.attention.values);
            OneRank& one = one_rank[{s, v, adamw, l.micro_batches * l.dp}];
            Cell cell = compare(one, shape, l, adamw);
            ASSERT_EQ(cell.wrong, "") << l.text() << ": " << cell.of_bound << " of the bound";
        }
}

// Levels and segments of recomputation, halves of backward passes and ZeRO-1 change no bit of them.
TEST(Layouts, ScalarsAndValueEmbeddingsKeepEveryBit) {
    Shape shape = small_variant(small_llama(), "nanochat_values");
    auto want = run_layout<float>(shape, {}, true);
    for (int level = 0; level < 10; level++) {
        LayoutCase l;
        l.recompute = ALL_LEVELS[level / 2], l.split = level % 2;
        if (level == 9) l.recompute.segments = {1, 3, 3, 3, 1};
        expect_same(*run_layout<float>(shape, l, true), *want, l.text());
    }
}

// Models with experts agree: routers, their balance terms, experts that no token of a rank chooses.
TEST(Layouts, ExpertsAreOneComputation) {
    std::map<std::tuple<bool, bool, int>, OneRank> one_rank;
    Cell worst;
    int number = 0;
    for (const LayoutCase& l : all_layouts())
        for (bool adamw : {true, false}) {
            bool tied = (l.dp + l.pp + l.zero / 2) % 2;
            Shape shape = mixtral_for_tp(tied);
            if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
            if (((number + 1) / 2 + adamw) % 2) continue; // each layout with one of the optimizers

            // Compare with one rank.
            OneRank& one = one_rank[{tied, adamw, l.micro_batches * l.dp}];
            Cell cell = compare(one, shape, l, adamw);
            ASSERT_EQ(cell.wrong, "") << l.text();
            add_worst(worst, cell);
        }
    print_worst(worst);
}

// Layouts in which dp and cp ranks share the experts, together with every other axis. Or tp ranks
// do too, and hold whole experts: groups lie within tp, are all of it, or end in the middle of it.
// In some, all tokens choose the same experts: some ranks then have no row, others those of all
// tokens of a group.
std::vector<LayoutCase> expert_layouts() {
    std::vector<LayoutCase> all;
    const bool cut = false, whole = true;
    for (auto [dp, tp, pp, ep, cp, experts] :
         {std::tuple{2, 1, 1, 2, 1, cut}, {3, 1, 1, 3, 1, cut}, {6, 1, 1, 6, 1, cut},
          {4, 1, 1, 2, 1, cut}, {6, 1, 1, 3, 1, cut}, {6, 1, 1, 2, 1, cut}, {2, 2, 1, 2, 1, cut},
          {4, 2, 1, 2, 1, cut}, {2, 1, 2, 2, 1, cut}, {2, 2, 2, 2, 1, cut}, {4, 1, 2, 2, 1, cut},
          {3, 2, 1, 3, 1, cut}, {3, 1, 2, 3, 1, cut}, {1, 1, 1, 2, 2, cut}, {2, 1, 1, 2, 2, cut},
          {3, 1, 1, 6, 2, cut}, {2, 2, 1, 2, 2, cut},
          {1, 2, 1, 2, 1, whole}, {1, 2, 1, 1, 1, whole}, {2, 2, 1, 2, 1, whole},
          {2, 2, 1, 1, 1, whole}, {3, 2, 1, 3, 1, whole}, {3, 2, 1, 2, 1, whole},
          {3, 2, 1, 6, 1, whole}, {2, 2, 2, 2, 1, whole}, {1, 4, 1, 2, 1, whole},
          {3, 4, 1, 3, 1, whole}, {3, 4, 1, 6, 1, whole}, {1, 2, 2, 2, 1, whole},
          {1, 2, 1, 2, 2, whole}, {3, 2, 1, 6, 2, whole}, {1, 2, 2, 1, 2, whole},
          {3, 2, 1, 3, 2, whole}, {1, 8, 1, 2, 1, whole}})
        for (int zero = 0; zero <= 3; zero++) {
            LayoutCase l{dp, tp, pp};
            int i = int(all.size());
            take_turns(l, i);
            l.ep = ep, l.cp = cp, l.zero = zero, l.one_expert = i % 7 == 3;
            l.whole_experts = experts == whole, l.sequence_parallel |= l.whole_experts;
            l.order = i % 2 ? "dp-tp-pp" : "tp-pp-dp";
            all.push_back(l);
        }
    return all;
}

// Adapters beside experts, attention's matrices and a shared expert's agree too, where ranks share
// out the experts; so do those beside latent attention's matrices, and a prefix.
TEST(Layouts, AdaptersBesideExpertsAreOneComputation) {
    // Choose layouts: ranks of every axis.
    std::map<std::tuple<int, int>, OneRank> one_rank;
    std::vector<LayoutCase> some;
    const std::vector<LayoutCase> all = expert_layouts();
    for (size_t i = 0; i < all.size(); i += 6) some.push_back(all[i]);
    LayoutCase rows = {2, 2, 2}, shared = {1, 2};
    rows.zero = 3, rows.sequence_parallel = true, rows.recompute = three_levels(44);
    shared.cp = 2, shared.sequence_parallel = true, shared.cp_method = ContextMethod::RING;
    some.push_back(rows), some.push_back(shared);

    // Compare each with one rank. Shapes take turns.
    int number = 0;
    for (LayoutCase& l : some) {
        int kind = number % 3;
        if (left_out(&number)) continue;
        Shape shape = kind == 0   ? shared_for_tp()
                      : kind == 1 ? mla_for_tp(true)
                                  : mixtral_for_tp(false);
        shape.experts.E = 6, l.one_expert = false;
        if (kind < 2) shape = with_lora(shape, kind ? 2 : 3, kind ? "all" : "all,experts");
        if (kind == 2) shape.tuned.prefix = 3;
        bool halves = l.pipeline == Pipeline::ZERO_BUBBLE || l.split;
        if (kind == 2 && halves) l.pipeline = Pipeline::ONE_F_ONE_B, l.split = false;
        OneRank& one = one_rank[{kind, l.micro_batches * l.dp}];
        Cell cell = compare(one, shape, l, true);
        EXPECT_EQ(cell.wrong, "") << l.text();
    }
}

// Exchanging only the rows that a rank's experts want changes no bit against gathering all rows:
// the sums have the same terms in the same order. Tokens choose few of many experts, or all the
// same ones, so that some ranks get no row.
TEST(Layouts, ExchangedRowsGiveTheBitsOfGatheredOnes) {
    bool adamw = false;
    for (LayoutCase l : expert_layouts()) {
        if (l.zero != 2 && !l.one_expert) continue;
        adamw = !adamw;
        Shape shape = l.ep == 3 ? shared_for_tp() : mixtral_for_tp(false);
        shape.experts.E = 12, l.exchange = false;
        shape.experts.capacity.factor = l.cp == 1 && adamw ? 0.75 : 0;
        if (l.one_expert) shape.experts.balance = shape.experts.z_loss = 0, shape.experts.router = Router::RENORMALISED;
        auto gathered = run_layout<bf16>(shape, l, adamw);
        l.exchange = true;
        expect_same(*run_layout<bf16>(shape, l, adamw), *gathered, l.text());
    }
}

// Expert-parallel layouts agree with one rank. Whole experts may have a width that no rank could cut.
TEST(Layouts, ExpertParallelRanksAreOneComputation) {
    std::map<std::tuple<bool, bool, bool, bool, int>, OneRank> one_rank;
    Cell worst;
    int number = 0;
    for (const LayoutCase& l : expert_layouts()) {
        bool tied = (l.dp + l.pp + l.zero / 2) % 2, adamw = (number / 2) % 2;
        Shape shape = mixtral_for_tp(tied);
        shape.experts.E = 6;
        if (l.whole_experts) shape.F = 23;
        if (l.one_expert) shape.experts.balance = shape.experts.z_loss = 0, shape.experts.router = Router::RENORMALISED;

        // Compare with one rank.
        if (left_out(&number)) continue;
        OneRank& one =
            one_rank[{tied, adamw, l.whole_experts, l.one_expert, l.micro_batches * l.dp}];
        Cell cell = compare(one, shape, l, adamw);
        ASSERT_EQ(cell.wrong, "") << l.text();
        add_worst(worst, cell);
    }
    print_worst(worst);
}

// Experts with a capacity drop the same tokens in every layout, and count as many: on some layouts,
// and on some with expert parallelism that leaves sequences whole.
TEST(Layouts, CapacityIsOneComputation) {
    std::map<std::tuple<bool, bool, int>, OneRank> one_rank;
    std::vector<LayoutCase> layouts, all = all_layouts(), shared = expert_layouts();
    for (size_t i = 1; i < all.size(); i += 17) layouts.push_back(all[i]);
    for (size_t i = 0; i < shared.size(); i += 7)
        if (shared[i].cp == 1) layouts.push_back(shared[i]);
    int number = 0;
    size_t dropping = 0;

    for (LayoutCase& l : layouts) {
        l.one_expert = false;
        bool tied = (l.dp + l.pp + l.zero / 2) % 2, adamw = number % 2 > 0;
        Shape shape = with_capacity(mixtral_for_tp(tied));
        shape.experts.E = 6;
        if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;

        // Compare with one rank, also what it drops.
        OneRank& one = one_rank[{tied, adamw, l.micro_batches * l.dp}];
        Cell cell = compare(one, shape, l, adamw);
        ASSERT_EQ(cell.wrong, "") << l.text() << columns_of(cell);
        dropping += one.result->balance[2] > 0;
    }
    EXPECT_GT(dropping * EVERY, 10u);
    printf("%zu layouts\n", dropping);
}

// Models agree that have dense blocks and blocks with shared experts: every third pair of layouts,
// for every third single one would leave out tensor parallelism without that of sequences.
TEST(Layouts, SharedExpertsAreOneComputation) {
    // Take layouts with and without expert parallelism.
    std::map<std::pair<bool, int>, OneRank> one_rank;
    int number = 0;
    std::vector<LayoutCase> layouts = all_layouts();
    for (const LayoutCase& l : expert_layouts())
        layouts.push_back(l);

    // Compare each with one rank.
    for (LayoutCase& l : layouts) {
        l.one_expert = false;
        bool adamw = number % 2 > 0;
        Shape shape = shared_for_tp();
        shape.experts.E = 6;
        if (!fits(shape, l) || l.ranks() == 1 || left_out(&number) || number / 2 % 3) continue;
        OneRank& one = one_rank[{adamw, l.micro_batches * l.dp}];
        Cell cell = compare(one, shape, l, adamw);
        ASSERT_EQ(cell.wrong, "") << l.text() << columns_of(cell);
    }
}

// gpt-oss agrees: sinks that are cut with their heads, biases of experts that one rank adds, and
// sequences cut by all three methods and a hybrid.
TEST(Layouts, SinksAndBiasesOfExpertsAreOneComputation) {
    // Choose layouts.
    std::map<std::tuple<bool, int, size_t>, OneRank> one_rank;
    std::vector<LayoutCase> layouts, all = all_layouts(), experts = expert_layouts();
    for (size_t i = 0; i < all.size(); i += 6) layouts.push_back(all[i]);
    for (size_t i = 0; i < experts.size(); i += 3) layouts.push_back(experts[i]);
    for (int method = 0; method < 4; method++)
        for (auto [tp, sp] : {std::pair{1, false}, {2, true}}) {
            LayoutCase l{1, tp};
            l.cp = method == 3 ? 4 : 2, l.cp_method = ContextMethod(method % 3);
            l.sequence_parallel = sp, l.T = 16;
            if (method == 3) l.cp_heads = 2, l.cp_method = ContextMethod::RING;
            layouts.push_back(l);
        }

    // Compare each with one rank.
    Cell worst;
    int number = 0;
    for (LayoutCase& l : layouts) {
        l.one_expert = false;
        bool adamw = number % 2 > 0;
        Shape shape = oss_for_tp();
        if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
        OneRank& one = one_rank[{adamw, l.micro_batches * l.dp, l.T}];
        Cell cell = compare(one, shape, l, adamw);
        ASSERT_EQ(cell.wrong, "") << l.text() << columns_of(cell);
        add_worst(worst, cell);
    }
    print_worst(worst);
}

// Latent attention agrees, with and without a latent of queries, before a dense ffn and before
// experts: on every sixth layout of data, tensor and pipeline ranks, some with expert parallelism,
// and sequences cut by all three methods.
TEST(Layouts, LatentAttentionIsOneComputation) {
    // Choose layouts.
    std::map<std::tuple<bool, bool, int, size_t>, OneRank> one_rank;
    Cell worst;
    int number = 0;
    std::vector<LayoutCase> layouts, all = all_layouts(), experts = expert_layouts();
    for (size_t i = 0; i < all.size(); i += 6) layouts.push_back(all[i]);
    for (size_t i = 0; i < experts.size(); i += 7) layouts.push_back(experts[i]);
    for (int method = 0; method < 3; method++)
        for (auto [tp, sp] : {std::pair{1, false}, {2, true}}) {
            LayoutCase l{1, tp};
            l.cp = 2, l.cp_method = ContextMethod(method), l.sequence_parallel = sp, l.T = 16;
            layouts.push_back(l);
        }

    // Compare each with one rank.
    for (LayoutCase& l : layouts) {
        l.one_expert = false;
        bool adamw = number % 2 > 0, routed = l.ep > 1 || number % 4 < 2;
        Shape shape = mla_for_tp(routed);
        if (!fits(shape, l) || l.ranks() == 1 || left_out(&number)) continue;
        OneRank& one = one_rank[{routed, adamw, l.micro_batches * l.dp, l.T}];
        Cell cell = compare(one, shape, l, adamw);
        ASSERT_EQ(cell.wrong, "") << l.text() << columns_of(cell);
        add_worst(worst, cell);
    }
    print_worst(worst);
}

// With expert parallelism too, ZeRO, pipelines and recomputation change no bit. Poison shows that
// rows which no token has chosen are never read.
TEST(Layouts, ExpertParallelRanksAreExactWhereOthersAre) {
    int number = 0;
    for (auto [dp, tp, ep] : {std::tuple{2, 1, 2}, {4, 1, 2}, {3, 1, 3}, {1, 2, 2}, {4, 2, 2}}) {
        LayoutCase base;
        base.dp = dp, base.tp = tp, base.ep = ep, base.micro_batches = 1;
        base.whole_experts = base.sequence_parallel = tp > 1;
        Shape shape = dp == 4 ? with_capacity(small_mixtral()) : small_mixtral();
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

// Muon agrees with one rank in every layout, and stage 1 and 3 have the bits of 0 and 2: a matrix's
// parts come together from wherever they are.
TEST(Layouts, MuonIsOneComputation) {
    // Data, tensor and context parallelism, pipelines.
    int number = 0;
    for (const Shape& shape : {gpt2_for_tp(true), llama_for_tp(false)})
        for (auto [dp, tp, pp, cp] : {std::array{2, 1, 1, 1}, {3, 1, 2, 1}, {1, 4, 1, 1},
                                      {8, 2, 1, 1}, {2, 2, 2, 1}, {1, 2, 1, 2}}) {
            if (!fits(shape, {dp, tp})) continue;
            LayoutCase l;
            l.dp = dp, l.tp = tp, l.pp = pp, l.cp = cp;
            l.muon = true, l.sequence_parallel = tp > 1 && dp > 1;
            l.normuon = dp + cp != 4; // without them once
            if (left_out(&number)) continue;
            OneRank one = run_one_rank(shape, l, true);
            std::unique_ptr<Result> before;
            for (l.zero = 0; l.zero <= 3; l.zero++) {
                auto result = run_layout<double>(shape, l, true);
                EXPECT_EQ(compare(errors_of(*result, *one.result), one).wrong, "") << l.text();
                if (l.zero % 2) expect_same(*result, *before, l.text());
                before = std::move(result);
            }
        }

    // Experts: each matrix of a stack goes its own way, cut or whole.
    for (auto [dp, tp, ep, whole] : {std::array{2, 1, 1, 0}, {4, 1, 2, 0}, {2, 2, 2, 0},
                                     {2, 2, 2, 1}}) {
        LayoutCase l;
        l.dp = dp, l.tp = tp, l.ep = ep, l.whole_experts = whole, l.sequence_parallel = whole;
        l.muon = true, l.normuon = dp != 4;
        OneRank one;
        for (l.zero = 0; l.zero <= 3; l.zero++)
            EXPECT_EQ(compare(one, mixtral_for_tp(true), l, true).wrong, "") << l.text();
    }

    // Groups of shards, weights that are near, pipelines, and weights narrower than their masters.
    LayoutCase base;
    base.dp = 4, base.shards = 2, base.muon = base.normuon = true;
    auto want = run_layout<bf16>(gpt2_for_tp(true), base, true);
    for (int pp : {1, 2}) {
        LayoutCase l = base;
        l.pp = pp, l.zero = 1;
        expect_same(*run_layout<bf16>(gpt2_for_tp(true), l, true), *want, l.text());
    }
    LayoutCase near = base;
    near.zero = 3, near.near = true;
    LayoutCase same = base;
    same.zero = 2;
    expect_same(*run_layout<bf16>(gpt2_for_tp(true), near, true),
                *run_layout<bf16>(gpt2_for_tp(true), same, true), near.text());
}

// Context parallelism, with every other axis, agrees with one rank: with documents, sliding
// windows, ALiBi, learned positions, and heads of which a part rotates.
TEST(Layouts, ContextParallelRanksAreOneComputation) {
    // List layouts. Gathering and Ulysses take turns; each layout also runs as a ring, and those of
    // four dp and cp ranks as a hybrid, in which two ranks exchange heads.
    std::vector<LayoutCase> all, rings;
    for (auto [dp, tp, pp, cp] :
         {std::array{1, 1, 1, 2}, {1, 1, 1, 3}, {1, 1, 1, 4}, {2, 1, 1, 2}, {1, 2, 1, 2},
          {1, 1, 2, 2}, {2, 1, 1, 3}, {1, 2, 1, 3}, {1, 1, 3, 2}, {2, 2, 1, 2}, {2, 1, 2, 2},
          {1, 2, 2, 2}, {2, 2, 2, 2}})
        for (int zero = 0; zero <= 3; zero++) {
            LayoutCase l{dp, tp, pp};
            int i = int(all.size());
            take_turns(l, i);
            l.cp = cp, l.cp_order = ContextOrder(i % 3), l.zero = zero, l.T = 24;
            l.cp_method = ContextMethod((i + i / 4) % 2);
            l.shards = i % 4 == 1 ? cp : dp * cp, l.document_end = i % 2 ? 105 : -1;
            l.near = zero == 3 && l.shards < dp * cp;
            all.push_back(l);
            l.cp_method = ContextMethod::RING, l.cp_order = ContextOrder((i + i / 4) % 3);
            rings.push_back(l);
            if (dp * cp != 4) continue;
            l.dp = 1, l.cp = 4, l.cp_heads = l.shards = 2; // a hybrid
            l.cp_method = (i + zero) % 2 ? ContextMethod::RING : ContextMethod::GATHER;
            rings.push_back(l);
        }
    all.insert(all.end(), rings.begin(), rings.end());

    // Run each with three families: GPT-2 or one of its kin, Llama, and a model with experts.
    std::map<std::tuple<int, bool, int, int>, OneRank> one_rank;
    Cell worst;
    int number = 0;
    for (LayoutCase l : all)
        for (int family = 0; family < 3; family++) {
            if (left_out(&number)) continue;
            bool tied = (l.dp + l.pp + l.zero / 2) % 2, llama = family > 0;
            bool experts = family == 2, alibi = !llama && l.zero == 1;
            bool neox = !llama && !tied && !alibi;
            if (experts && number / 6 % 2) continue; // half of them: attention comes before experts

            // Choose the model. Experts are distributed over the cp ranks too.
            Shape shape = experts ? mixtral_for_tp(tied)
                          : llama ? llama_for_tp(tied)
                          : neox  ? neox_for_tp()
                                  : gpt2_for_tp(tied);
            if (alibi) shape.embedding.position = Position::ALIBI;
            if (experts) {
                shape.experts.E = 6, l.ep = l.dp * l.cp % 3 ? l.dp * l.cp % 2 ? 1 : 2 : 3;
                l.shards = 0;
            }

            // Give Ulysses enough heads: Llama has eight key/value heads, or two that ranks share.
            int exchange = l.cp_method == ContextMethod::ULYSSES ? l.cp : l.cp_heads;
            bool ulysses = exchange > 1;
            bool few = ulysses && llama && l.zero % 2;
            if (ulysses) {
                shape.NH = llama ? 8 : 12, shape.NKV = few ? 2 : shape.NH;
                if (!llama) shape.HS = neox ? 4 : 2;
                if (!cp_divides(shape, size_t(l.tp), size_t(exchange))) continue;
            }

            // Compare with one rank.
            bool adamw = number % 2;
            OneRank& one = one_rank[{2 * family + tied + 6 * alibi + 12 * (ulysses + few), adamw,
                                     l.micro_batches * l.dp, l.document_end}];
            Cell cell = compare(one, shape, l, adamw);
            ASSERT_EQ(cell.wrong, "") << l.text();
            add_worst(worst, cell);
        }
    print_worst(worst);
}

// Actions read and write what they declare, also if keys come from other ranks.
TEST(Layouts, ContextParallelActionsTouchWhatTheyDeclare) {
    LayoutCase l;
    l.cp = 2, l.recompute = three_levels(37), l.document_end = 105, l.micro_batches = 1;
    for (const Shape& shape : {gpt2_shape(2, 2, 16, 61, 32), small_llama()})
        for (int i = 0; i < 4; i++) {
            // Take the three methods in turn, then a hybrid.
            l.cp = i == 3 ? 4 : 2, l.cp_heads = i == 3 ? 2 : 1;
            l.cp_method = ContextMethod(i % 3), l.zero = (i + (shape.NKV < shape.NH)) % 2 * 3;
            l.poisoned = false;
            auto want = run_layout<float>(shape, l, true);
            l.poisoned = true;
            expect_same(*run_layout<float>(shape, l, true), *want, l.text());
        }
}

// Documents stay apart in every layout: without the mask the result must differ.
TEST(Layouts, DocumentsAreThoseOfOneRank) {
    for (bool llama : {false, true}) {
        Shape shape = llama ? llama_for_tp(false) : gpt2_for_tp(false);
        LayoutCase l{2, 2, 2}, unmasked = l;
        l.zero = 2, l.sequence_parallel = !llama, l.document_end = 105;
        OneRank one, whole = run_one_rank(shape, unmasked, true);
        EXPECT_EQ(compare(one, shape, l, true).wrong, "");
        EXPECT_NE(compare(errors_of(*whole.result, *one.result), one).wrong, "");
    }
}

// A collective may take place at any time between its start and its end. Results are the same if
// all take place at their start, or at their end, with NaN until then in the buffers that they
// write, and a check that nobody changes those that they read.
TEST(Layouts, TimingChangesNothing) {
    // Choose layouts in which collectives overlap with actions.
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

    // Run each at both extremes.
    int number = 0;
    auto run_both = [&](const Shape& shape, const LayoutCase& l) {
        if (left_out(&number)) return;
        auto want = run_layout<float>(shape, l, true);
        for (Moment moment : {Moment::EARLIEST, Moment::LATEST})
            expect_same(*run_layout<float>(shape, l, true, moment), *want, l.text());
    };
    for (const Shape& shape : {gpt2_for_tp(true), llama_for_tp(false)})
        for (const LayoutCase& l : layouts) run_both(shape, l);

    // Let tokens travel to experts beside a shared expert.
    for (bool exchange : {false, true})
        for (bool whole : {false, true}) {
            LayoutCase l{2, 2};
            l.ep = 2, l.exchange = l.split = exchange, l.whole_experts = whole;
            l.sequence_parallel = exchange || whole;
            l.recompute = three_levels(exchange ? 124 : 62);
            Shape shape = shared_for_tp();
            shape.experts.E = 6;
            run_both(shape, l);
        }
}

// If a rank does not arrive, the watchdog names the collective that its peer waits for, and not the
// action at which the peer has arrived since it started that collective.
TEST(Layouts, TheWatchdogNamesWhatIsWaitedFor) {
    LayoutCase l;
    l.dp = 2, l.zero = 2;
    std::string failure;
    LocalSettings settings;
    settings.timeout_s = 2, settings.failure = &failure;

    // Rank 0 runs the whole plan, rank 1 only its first two actions.
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

    // The message names the reduction of a block, its group, and the rank that is missing.
    EXPECT_NE(failure.find("s in reduce-scatter on 'shard' during action WAIT REDUCE(block.2): "
                           "rank 1 has not arrived"),
              std::string::npos)
        << failure;
}

// A reduction made twice, and a gather of weights that are whole already, are refused: each rank
// has a table of how its buffers are placed.
TEST(Layouts, CollectivesAreGivenWhatTheyMustBe) {
    for (bool twice : {true, false}) {
        LocalSettings settings;
        settings.placements = true, settings.timeout_s = 60;
        testing::internal::CaptureStderr();

        // Run a step, then its last collective of a block once more.
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

        // The error says what the buffer holds.
        EXPECT_EQ(run_local_ranks(2, settings, body), 1);
        std::string said = testing::internal::GetCapturedStderr();
        EXPECT_NE(said.find(twice ? "grad(block.0) is replicated, it must be partial"
                                  : "weight(block.0) is replicated, it must be sharded"),
                  std::string::npos)
            << said;
    }
}

// The order in which the grid numbers its ranks changes no bit.
TEST(Layouts, TheGridsOrderChangesNothing) {
    // Train in all six orders of tp, pp and dp.
    LayoutCase l;
    l.dp = 2, l.tp = 2, l.pp = 3, l.zero = 2, l.sequence_parallel = true;
    auto want = run_layout<float>(llama_for_tp(true), l, true);
    for (const char* order : {"tp-dp-pp", "pp-tp-dp", "pp-dp-tp", "dp-tp-pp", "dp-pp-tp"}) {
        l.order = order;
        expect_same(*run_layout<float>(llama_for_tp(true), l, true), *want, order);
    }

    // With cp the sharding group has ranks of dp and cp: try orders that count them differently.
    LayoutCase shared;
    shared.dp = 2, shared.cp = 2, shared.tp = 2, shared.zero = 2;
    want = run_layout<float>(llama_for_tp(true), shared, true);
    for (const char* order : {"dp-tp-pp", "pp-dp-tp"}) {
        shared.order = order;
        expect_same(*run_layout<float>(llama_for_tp(true), shared, true), *want, order);
    }

    // Whole experts count the ranks of tp, cp and dp.
    LayoutCase experts{3, 2};
    experts.cp = 2, experts.ep = 3, experts.zero = 2;
    experts.whole_experts = experts.sequence_parallel = true;
    want = run_layout<float>(small_mixtral(), experts, true);
    for (const char* order : {"dp-tp-pp", "pp-dp-tp"}) {
        experts.order = order;
        expect_same(*run_layout<float>(small_mixtral(), experts, true), *want, order);
    }

    // The first axis of the order varies fastest in the ranks' numbers.
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

// --seed draws the same initial weights in every layout.
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

                // Gather each parameter, and compare it with one rank's.
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
