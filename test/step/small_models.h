// small_models.h - tiny models, random samples and one rank's trainer, for tests of the whole step
#pragma once
#include <mutex>
#include "../../llmc/io/plan_flags.h"
#include "../../llmc/layers.h"
#include "../../llmc/family.h"

using namespace llmc;

inline Shape small_gpt2(bool tied = true, size_t heads = 3) {
    Shape s = gpt2_shape(3, heads, 24, 61, 32);
    s.embedding.tied = tied;
    return s;
}
inline Shape small_llama(bool tied = false, bool bias = false) {
    Shape s = llama_shape(3, 4, 2, 32, 44, 53, 64, 10000);
    s.embedding.tied = tied, s.attention.qkv_bias = bias, s.rope.scaling = {8, 1, 4, 16};
    s.attention.o_bias = s.block.mlp_bias = tied && bias;
    return s;
}

// Heads that are wider than C / NH, with normed q and k.
inline Shape small_qwen3() {
    Shape s = small_llama(true);
    s.hf_type = "qwen3", s.block.qk_norm = true, s.HS = 12;
    return s;
}

// A variant of Llama, with all that its blocks add to Llama's, at sizes where each addition
// changes the result.
inline Shape small_variant(Shape s, const std::string& type) {
    bool gemma = type == "gemma2" || type == "gemma3_text";
    bool relu2 = type == "track3" || type.starts_with("nanochat");
    if (relu2) s.rope.scaling = {}, s.rope.theta = 30;
    set_variant(s, type), s.hf_type = type;
    if (relu2) s.loss.softcap = 1.5f;
    if (type == "smollm3") s.rope.nope_every = 2;
    if (type == "phi3") s.rope.rotary = s.HS / 2;
    if (type == "olmo2") s.attention.o_bias = s.attention.qkv_bias = true;
    if (gemma) s.embedding.tied = true, s.attention.window = 4, s.attention.score_scalar = 10, see_all_every(s, 2);
    if (type == "gemma2") s.attention.softcap = 2, s.loss.softcap = 1.5f;
    if (type == "gemma3_text") s.rope.window_theta = 30;
    return s;
}
inline Shape small_neox(size_t L = 3, size_t NH = 3, size_t C = 24) {
    return neox_shape(L, NH, C, 61, 32);
}
constexpr const char* VARIANTS[] = {"olmo2",       "smollm3", "phi3",    "gemma2",
                                    "gemma3_text", "track3",  "nanochat",
                                    "nanochat_values"};

// A model with experts, which tensor parallelism can cut in 2 and 4. A token takes two of six
// experts; with `qwen` one of three, and q and k are normed.
inline Shape small_mixtral(bool qwen = false) {
    Shape s = qwen ? small_qwen3() : small_llama();
    s.family = Family::MIXTRAL, s.hf_type = qwen ? "qwen3_moe" : "mixtral";
    s.F = 12, s.experts.E = qwen ? 3 : 6, s.experts.K = qwen ? 1 : 2;
    s.experts.router = qwen ? Router::SOFTMAX : Router::RENORMALISED;
    s.experts.balance = 0.05, s.experts.z_loss = 0.01;
    return s;
}

// The same model, whose experts take less than an even share of a sequence's choices each, so that
// choices are dropped everywhere.
inline Shape with_capacity(Shape s, double factor = 0.75) {
    s.experts.capacity.factor = factor;
    return s;
}

// A dense block, then blocks of experts with a shared expert, which each token weighs by a gate.
inline Shape small_shared() {
    Shape s = small_mixtral();
    s.hf_type = "qwen2_moe", s.experts.router = Router::SOFTMAX, s.attention.qkv_bias = true;
    s.experts.dense_first = 1, s.experts.dense_F = 20, s.experts.shared_F = 16, s.experts.shared_gate = true;
    return s;
}

// gpt-oss: sinks, biases, windows in every other block, and a clamp that some numbers meet. Its
// first gates are about 0.1 in size.
inline Shape small_oss() {
    Shape s = small_mixtral();
    set_variant(s, "gpt_oss");
    s.family = Family::GPT_OSS;
    s.hf_type = "gpt_oss", s.attention.qkv_bias = s.attention.o_bias = true, s.experts.gate_limit = 0.05;
    s.attention.window = 4, see_all_every(s, 2);
    return s;
}

// The same shape with adapters. Their scale is no power of two, so that applying it rounds.
inline Shape with_lora(Shape s, size_t rank, const std::string& targets = "all", bool rs = false) {
    Adapters adapters;
    LoraOptions options = {rank, 3.0, rs, targets};
    LLMC_CHECK(choose_adapters(make_model(s), options, &adapters).empty(), "no adapters");
    s.tuned.adapters = std::make_shared<const Adapters>(adapters);
    return s;
}

// The same with adapters in the later blocks only: in all but the first.
inline Shape with_late_lora(Shape s, size_t rank) {
    s = with_lora(s, rank);
    Adapters late = *s.tuned.adapters;
    std::erase_if(late, [](const auto& a) { return a.first.find(".0.") != std::string::npos; });
    s.tuned.adapters = std::make_shared<const Adapters>(late);
    return s;
}

// The same with adapters from block `first` on. left_out: blocks below have none, so backward
// passes end above them. Otherwise they have adapters whose scale is 0: these change nothing and
// learn nothing, but backward passes go through them to the first block.
inline Shape upper_lora(const Shape& base, size_t rank, int first, bool left_out) {
    Shape s = with_lora(base, rank);
    Adapters upper = *s.tuned.adapters;
    for (const auto& [module, adapter] : *s.tuned.adapters)
        for (int l = 0; l < first; l++) {
            if (module.find("." + std::to_string(l) + ".") == std::string::npos) continue;
            upper[module].scale = 0;
            if (left_out) upper.erase(module);
        }
    s.tuned.adapters = std::make_shared<const Adapters>(upper);
    return s;
}

// Latent attention: heads of eight channels and four that rotate, values of six channels. Without
// `experts` queries have a latent too, and all blocks are dense; with them queries have none, and
// the blocks after the first have experts.
inline Shape small_mla(bool experts = false) {
    Shape s = llama_shape(3, 4, 4, 32, 0, 53, 64, 10000);
    s = deepseek_shape(experts ? "deepseek_v3" : "deepseek_v2", s,
                       {experts ? size_t(0) : 12, 10, 8, 4, 6}, 20);
    if (!experts) return s;
    s.F = 12, s.experts.E = 6, s.experts.K = 2, s.experts.dense_first = 1, s.experts.shared_F = 16;
    s.experts.router = Router::SIGMOID, s.experts.gate_scale = 2.5f, s.experts.choice_bias = true;
    s.experts.groups = 3, s.experts.kept_groups = 2;
    return s;
}

// A layout with these sizes of the axes. A test sets what else it varies, and layout_at() gives
// each rank its place.
inline Layout small_layout(int dp, int tp = 1, int pp = 1, int cp = 1) {
    Layout layout;
    layout.dp.size = dp;
    layout.tp.size = tp;
    layout.pp.size = pp;
    layout.cp.size = cp;
    return layout;
}

constexpr Recompute ALL_LEVELS[] = {Recompute::NONE, Recompute::SELECTIVE, Recompute::ATTN,
                                    Recompute::FFN, Recompute::FULL};

// A level for each of three blocks, from the digits of a number below 125 in base 5.
inline RecomputeLevels three_levels(int number) {
    std::vector<Recompute> levels = {Recompute::NONE}; // the embedding, which recomputes nothing
    for (int block = 0; block < 3; block++, number /= RECOMPUTE_LEVELS)
        levels.push_back(Recompute(number % RECOMPUTE_LEVELS));
    return levels;
}

inline Plan small_plan(size_t B, size_t T, int micro_batches, RecomputeLevels levels = {},
                       bool split = false) {
    Plan p;
    p.B = B, p.T = T, p.micro_batches = micro_batches, p.recompute = levels,
    p.split_backward = split;
    return p;
}

// A function that fills windows with random tokens, the same for the same sample. About one target
// in five is ignored; samples differ in how many, so that means over ranks must be weighted.
inline Window random_window(const Shape& s, size_t T) {
    return [V = s.V, T](uint64_t sample, int* tokens, int* targets) {
        for (size_t i = 0; i < T; i++) {
            tokens[i] = int(random_block(7, fnv1a("test.tokens"), sample * T + i)[0] % V);
            targets[i] = int(random_block(7, fnv1a("test.tokens"), sample * T + i + 1)[0] % V);
            if (random_block(7, fnv1a("test.ignored"), sample * T + i)[0] % (3 + sample % 4) == 0)
                targets[i] = -1;
        }
        return std::string();
    };
}

// A trainer with memory, but without weights and data.
template <typename T> struct Small {
    Trainer<T, Cpu> t;
    Small(const Shape& s, const std::vector<Plan>& plans) {
        // A run refuses any other layout: its ranks would read and write beyond their activations.
        Shape cut = s;
        cut.experts.whole = plans[0].layout.experts.whole;
        int tp = plans[0].layout.tp.size;
        LLMC_CHECK(tp_divides(cut, size_t(tp)), "%d ranks share no heads of this test's model", tp);

        t.offload.folder = "/tmp";
        trainer_place(t, s, {plans.begin(), plans.end()}, plans[0].layout);
        trainer_allocate(t);
        init_constants(t);
        t.hyper = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, {}};
    }
    ~Small() { trainer_free(t); }
};

// The normal numbers of a parameter's elements. They are drawn once and kept, because every rank of
// every layout needs the same ones.
inline const std::vector<double>& normals(uint64_t seed, const Parameter& p) {
    static std::mutex mutex;
    static std::map<std::tuple<uint64_t, std::string, size_t>, std::vector<double>> drawn;
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<double>& z = drawn[{seed, p.name, p.file_elements()}];
    for (size_t i = z.size(); i < p.file_elements(); i++)
        z.push_back(normal(seed, fnv1a(p.name), i));
    return z;
}

// A trainer with random weights and samples.
template <typename T> struct Fixture : Small<T> {
    using Small<T>::t;
    // nudge: change every weight by a random part of itself, of about this size
    Fixture(const Shape& s, const std::vector<Plan>& plans, uint64_t seed = 5, double nudge = 0)
        : Small<T>(s, plans) {
        init_weights(t, seed);
        perturb(seed, nudge);
        t.hyper.lr = 1e-2f;
        t.data.window = random_window(s, plans[0].T);
    }

    // Move the weights and biases of norms away from one and zero, and make matrices larger, so
    // that errors do not cancel by accident.
    void perturb(uint64_t seed, double nudge = 0) {
        for (const Parameter& p : t.model.parameters) {
            std::vector<double> v(p.elements());
            const std::vector<double>& z = normals(seed, p);
            const std::vector<double>& y = nudge ? normals(seed + 1, p) : z;
            for (size_t i = 0; i < p.file_elements(); i++) {
                double x = float(p.shape.size() == 2 ? 0.2 : 0.1) * float(z[i]);
                v[i] = (p.init.value + float(x)) * (1 + nudge * y[i]);
            }
            set_weight(t, p, v.data());
        }
    }

    // Run a step, move on in the data, and return the loss.
    double step(int plan = 0) {
        run_plan(t, plan);
        t.data.cursor += t.plans[plan].B * size_t(t.plans[plan].micro_batches);
        return plan_loss(t).mean();
    }
    T* weight(const Parameter& p) { return address<T>(t, {Kind::WEIGHT, p.bucket}) + p.offset; }
    acc_t<T>* grad(const Parameter& p) {
        return address<acc_t<T>>(t, {Kind::GRAD, p.bucket}) + p.offset;
    }

    // All persistent bytes: weights, masters, moments, gradients.
    std::vector<unsigned char> state() {
        return {t.arena.device().base, t.arena.device().base + t.arena.device().persistent_bytes};
    }
};

// Every kind of block and position that the trainer knows, as small models.
inline std::vector<Shape> all_shapes() {
    Shape alibi = small_gpt2(), qwen = small_llama(true, true), rope = small_gpt2();
    alibi.embedding.position = Position::ALIBI, rope.embedding.position = Position::ROPE;
    qwen.attention.window = 4, qwen.attention.full_layers[1] = true;
    qwen.rope.scaling = {4, 1, 4, 8, RopeKind::YARN, 8, 1, true, 1.25f};
    std::vector<Shape> all = {small_gpt2(), small_gpt2(false), small_llama(), qwen,
                              alibi,        rope,              small_qwen3(),
                              small_mixtral(), small_mixtral(true), small_shared(),
                              small_oss(), small_mla(), small_mla(true)};
    for (const char* type : VARIANTS)
        all.push_back(small_variant(small_llama(), type));
    all.push_back(small_neox());
    return all;
}
