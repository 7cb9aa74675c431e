// trainer.h - one rank's state: the model's tables, their bytes in the arena, and the pointers of a layer
//   Tables are made and bound by visiting their rows (gpt2.h, llama.h): a parameter lies at its
//   offset in its bucket, an activation in the arena's place of its group. Nothing here knows how
//   many ranks there are; grid and plan do.
#pragma once
#include <functional>
#include <tuple>
#include "adamw.cuh"
#include "arena.h"
#include "gpt2.h"
#include "grad_norm.cuh"
#include "llama.h"
#include "layout.h"
#include "timeline.h"
#include "rand.h"

// ----------------------------------------------------------------------------
// the parameter table of a shape

inline Model make_model(const Shape& shape, int tp = 1) {
    Model model;
    model.shape = shape, model.tp = tp;
    model.shape.padded = round_up(shape.V, 128 * size_t(tp)); // ranks have equal rows of tables
    const Shape& s = model.shape;
    std::string prefix;
    int layer = 0, head = int(s.L) + 1;
    auto row = [&](Weight&, const char* name, std::initializer_list<size_t> shape, Init init,
                   bool decay, Shard shard, bool transposed) {
        Parameter p = {prefix + name, shape, *shape.begin(), transposed, shard, init, decay, layer};
        if (shard.axis == 0 && (layer == 0 || layer == head))
            p.file_rows = s.V; // a table over the vocabulary
        add_parameter(model, p);
    };
    bool gpt2 = s.family == Family::GPT2;
    Gpt2Embedding g;
    LlamaEmbedding e;
    add_bucket(model, "embedding", s.tied ? std::vector<int>{0, head} : std::vector<int>{0});
    gpt2 ? gpt2_embedding_parameters(g, s, row) : llama_embedding_parameters(e, s, row);
    if (s.position == Position::LEARNED) {
        add_bucket(model, "positions", {0});
        gpt2_position_parameters(g, s, row);
    }
    for (layer = 1; layer < head; layer++) {
        Gpt2Block gb;
        LlamaBlock lb;
        add_bucket(model, "block." + std::to_string(layer - 1), {layer});
        prefix = (gpt2 ? "h." : "model.layers.") + std::to_string(layer - 1) + ".";
        gpt2 ? gpt2_block_parameters(gb, s, row) : llama_block_parameters(lb, s, row);
    }
    Gpt2Head gh;
    LlamaHead lh;
    prefix = "";
    add_bucket(model, "head", {head});
    gpt2 ? gpt2_head_parameters(gh, s, row) : llama_head_parameters(lh, s, row);
    place_parameters(model);
    return model;
}

// ----------------------------------------------------------------------------
// how many bytes a datum takes

// The six groups in which the activation table's rows lie.
inline Kind activation_group(Keep keep, Last last, Recompute level) {
    bool w = last == Last::W;
    if (keep == Keep::GRADIENT) return w ? Kind::GRADIENT_W : Kind::GRADIENT_B;
    if (recomputed(keep, level)) return w ? Kind::REDO_W : Kind::REDO_B;
    return w ? Kind::KEPT_W : Kind::KEPT_B;
}

template <typename T> std::vector<Activation> activation_table(const Shape& s, size_t N) {
    std::vector<Activation> rows;
    auto row = [&](auto*& p, const char* name, size_t n, Keep keep, Last last) {
        rows.push_back({name, n, n * sizeof(*p), keep, last});
    };
    Gpt2Acts<T> gpt2;
    LlamaActs<T> llama;
    s.family == Family::GPT2 ? gpt2_block_activations(gpt2, s, N, row)
                             : llama_block_activations(llama, s, N, row);
    return rows;
}

// The shape that this plan's rank computes with.
inline Shape rank_shape(const Plan& p, const Model& model) {
    return rank_shape(model.shape, p.tp, p.tp_rank,
                      p.sequence_parallel && p.mode != Mode::GENERATE);
}

template <typename T> size_t head_bytes(const Shape& s, size_t N) {
    size_t bytes = 0;
    HeadActs<T> acts;
    head_activations(acts, s, N, [&](auto*& p, const char*, size_t n, Keep, Last) {
        bytes += round_up(n * sizeof(*p), ARENA_ALIGN);
    });
    return bytes;
}

// What the products, norms and attention of a layer need beside their operands.
template <typename T, typename S>
size_t blas_scratch_bytes(const Plan& p, const Model& model, int layer, S where) {
    const Shape s = rank_shape(p, model);
    size_t N = p.B * p.T;
    size_t most =
        std::max(layernorm_scratch_bytes(N, s.C, where), rmsnorm_scratch_bytes(N, s.C, where));
    if (layer == model.head()) {
        size_t rows = p.mode == Mode::GENERATE ? 1 : N, chunk = head_chunk_rows(s, rows, sizeof(T));
        most = std::max(most, linear_scratch_bytes<T>(chunk, s.Vp(), s.C, where));
        if (rows % chunk)
            most = std::max(most, linear_scratch_bytes<T>(rows % chunk, s.Vp(), s.C, where));
        return most;
    }
    for (const Parameter& w : model.parameters)
        if (w.layer == layer && w.shape.size() == 2)
            for (size_t rows : {N, p.mode == Mode::GENERATE ? p.B : N, N / s.row_ranks})
                most = std::max(
                    most, linear_scratch_bytes<T>(rows, w.local_rows(), w.local_cols(), where));
    for (size_t Tq : {p.T, p.mode == Mode::GENERATE ? size_t(1) : p.T}) {
        AttentionDims d = attention_shape(s, p.B, Tq, std::max(p.T, p.cache));
        most = std::max(most, attention_scratch_bytes<T>(d, threads_here(where), where));
    }
    return most;
}

// The parameters of elements [from, to) of a bucket, as the norm and the optimizer walk them, by
// their distance from `from`.
inline std::vector<TensorRow> tensor_rows(const Model& model, int bucket, size_t from, size_t to) {
    const Bucket& b = model.buckets[size_t(bucket)];
    std::vector<TensorRow> rows;
    for (int i : b.in_order) {
        const Parameter& p = model.parameters[size_t(i)];
        size_t start = std::max(p.offset, from), end = std::min(p.offset + p.local_elements(), to);
        if (start < end)
            rows.push_back({start - from, end - start, p.decay, fnv1a(p.name), start - p.offset});
    }
    return rows;
}
inline size_t norm_chunks(const Model& model, int bucket, size_t to) {
    size_t n = 0;
    for (const TensorRow& row : tensor_rows(model, bucket, 0, to)) n += chunks_of(row);
    return n;
}
inline size_t norm_chunks(const Model& model) {
    size_t n = 0;
    for (size_t b = 0; b < model.buckets.size(); b++)
        n += norm_chunks(model, int(b), model.buckets[b].elements);
    return n;
}

// What stands at the end of a layer's scratch: the head's rows, or with sequence parallelism room
// for the rows of all ranks.
template <typename T> size_t tail_bytes(const Plan& p, const Model& model, int layer) {
    const Shape s = rank_shape(p, model);
    if (layer == model.head()) return head_bytes<T>(s, p.mode == Mode::GENERATE ? 1 : p.B * p.T);
    return layer < 0 || s.row_ranks == 1 ? 0 : p.B * p.T * s.C * sizeof(T);
}

template <typename T, typename S>
size_t scratch_bytes(const Plan& p, const Model& model, int layer, S where) {
    if (layer < 0) return norm_chunks(model) * sizeof(double);
    size_t front = layer == 0 ? embedding_scratch_bytes(p.B * p.T, where)
                              : blas_scratch_bytes<T>(p, model, layer, where);
    return round_up(front, ARENA_ALIGN) + tail_bytes<T>(p, model, layer);
}

template <typename T> size_t rope_bytes(const Plan& p, const Shape& s) {
    return s.position == Position::ROPE
               ? round_up(std::max(p.T, p.cache) * s.HS * sizeof(acc_t<T>), ARENA_ALIGN)
               : 0;
}

template <typename T, typename S>
size_t data_bytes(const Plan& p, const Model& model, Data d, S where) {
    const Shape s = rank_shape(p, model);
    size_t N = p.B * p.T, elements = of_bucket(d.kind) ? kept_elements(p, model, d) : 0, bytes = 0;
    switch (d.kind) {
    case Kind::WEIGHT:
    case Kind::GATHERED: return elements * sizeof(T);
    case Kind::MASTER: return sizeof(T) < sizeof(acc_t<T>) ? elements * sizeof(float) : 0;
    case Kind::MOMENTS: return elements * 2 * sizeof(acc_t<T>);
    case Kind::GRAD:
    case Kind::PARTIAL:
    case Kind::GRAD_TIED: return elements * sizeof(acc_t<T>);
    case Kind::SCALE: return sizeof(StepScale);
    case Kind::CONSTANTS:
        return rope_bytes<T>(p, s) +
               (s.position == Position::ALIBI ? model.shape.NH * sizeof(float) : 0);
    case Kind::CACHE: return p.cache * 2 * s.NKV * s.HS * sizeof(T);
    case Kind::VALID: return 0; // a number of the trainer's
    case Kind::TOKENS: return (4 * N + p.cache) * sizeof(int);
    case Kind::STREAM:
    case Kind::DSTREAM: return N / s.row_ranks * s.C * sizeof(T);
    case Kind::LOSS: // evaluating, behind the sum what is kept of each row
        return p.mode == Mode::EVALUATE ? ARENA_ALIGN + 3 * N * sizeof(acc_t<T>) : sizeof(double);
    case Kind::LOGITS: return s.Vp() * sizeof(T);
    case Kind::SCRATCH: return scratch_bytes<T>(p, model, d.of, where);
    default: // a group of the activation table
        for (const Activation& row : activation_table<T>(s, N))
            if (activation_group(row.keep, row.last, p.recompute) == d.kind)
                bytes += round_up(row.bytes, ARENA_ALIGN);
        return bytes;
    }
}

// ----------------------------------------------------------------------------
// one rank's trainer

struct Hyper {
    bool adamw = true;
    float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0, clip = 0;
};

// tokens and targets of sample number `sample`; an error text or nothing
typedef std::function<std::string(uint64_t sample, int* tokens, int* targets)> Window;

template <typename T, typename S> struct Trainer {
    Ctx<S> ctx;
    Grid grid;
    Model model;
    std::vector<Plan> plans;
    Arena arena;
    Hyper hyper;         // of this step: the schedule has set lr
    Window window;       // where LOAD takes samples from
    uint64_t cursor = 0; // samples taken so far, over all ranks: the first of this step
    uint64_t samples_end =
        ~uint64_t(0);                  // LOAD leaves later samples out (their targets are ignored)
    int document_end = -1;             // a token: LOAD's documents end there; -1: nowhere
    int64_t valid = 0;                 // targets of this global batch that count
    Comms comms;                       // the ranks that this one works with
    S comm_stream = {};                // on NCCL: where the plan's collectives run
    int* staging = nullptr;            // where LOAD prepares the batch for a device
    int plan = 0, at = 0;              // the action that runs
    std::vector<Box>* trace = nullptr; // where actions' times go; null: not wanted
};

// The address of a datum while the current action runs; null where there is none.
template <typename P, typename T, typename S> P* address(const Trainer<T, S>& t, Data d) {
    const Place* place = arena_find(t.arena, t.plan, t.at, d);
    return place ? reinterpret_cast<P*>(t.arena.base + place->offset) : nullptr;
}

// The value of a datum, for the host; waits for it.
template <typename P, typename T, typename S> P read_value(const Trainer<T, S>& t, Data d) {
    P value = {};
    copy_out(&value, address<P>(t, d), sizeof(P), t.ctx.where);
    return value;
}

// What an evaluation keeps of each row of a micro-batch; on ranks without a head nothing.
template <typename T, typename S> RowLosses<T> row_losses(const Trainer<T, S>& t, int micro) {
    const Plan& p = t.plans[t.plan];
    size_t N = p.B * p.T;
    unsigned char* loss = address<unsigned char>(t, {Kind::LOSS, -1, micro});
    if (!loss) return {};
    acc_t<T>* rows = reinterpret_cast<acc_t<T>*>(loss + ARENA_ALIGN);
    return {rows, rows + N, rows + 2 * N};
}

// The bytes of the arena, and what LOAD prepares batches in.
template <typename T, typename S> void trainer_allocate(Trainer<T, S>& t) {
    arena_allocate(t.arena, t.ctx.where);
    size_t ints = 0;
    for (const Plan& p : t.plans)
        ints = std::max(ints, size_t(p.micro_batches) * (4 * p.B * p.T + p.cache));
    t.staging = static_cast<int*>(staging_memory(ints * sizeof(int), t.ctx.where));
    t.comm_stream = open_stream(t.ctx.where);
}

template <typename T, typename S> void trainer_free(Trainer<T, S>& t) {
    arena_free(t.arena, t.ctx.where);
    staging_free(t.staging, t.ctx.where);
    close_stream(t.comm_stream);
}

// The places of all that the plans touch; nothing is allocated.
template <typename T, typename S>
Arena place_plans(const std::vector<Plan>& plans, const Model& model, S where) {
    std::map<std::tuple<const Plan*, Kind, int>, size_t>
        known; // sizes do not depend on the micro-batch
    return arena_place(plans, model, [&](const Plan& p, Data d) {
        auto [it, fresh] = known.insert({{&p, d.kind, d.of}, 0});
        if (fresh) it->second = data_bytes<T>(p, model, d, where);
        return it->second;
    });
}

template <typename T, typename S>
void trainer_place(Trainer<T, S>& t, const Shape& shape, const std::vector<Plan>& options) {
    t.model = make_model(shape, options[0].tp);
    for (const Plan& o : options) {
        t.plans.push_back(make_plan(o, t.model));
        std::string wrong = plan_check(t.plans.back(), t.model);
        CHECK(wrong.empty(), "the plan is wrong: %s", wrong.c_str());
    }
    t.ctx.shape = rank_shape(t.plans[0], t.model);
    t.arena = place_plans<T>(t.plans, t.model, t.ctx.where);
}

// ----------------------------------------------------------------------------
// parameters whole, and as this rank keeps them

// Which elements of its piece of a parameter this rank keeps of a datum, and where the first of
// them lies.
struct KeptPart {
    size_t from, count, at; // in the piece; in what is kept
};
template <typename T, typename S>
KeptPart kept_part(const Trainer<T, S>& t, Data d, const Parameter& p) {
    size_t first = kept_first(t.plans[0], t.model, d),
           last = first + kept_elements(t.plans[0], t.model, d), from = std::max(p.offset, first),
           end = std::min(p.offset + p.local_elements(), last);
    if (from >= end || !arena_find(t.arena, t.plan, t.at, d)) return {0, 0, 0};
    return {from - p.offset, end - from, from - first};
}
// f(at, global, count): runs of them, from the first kept one on and in the whole parameter.
template <typename F> void for_each_kept(const Plan& plan, const Parameter& p, KeptPart part, F f) {
    size_t end = part.from + part.count;
    for_each_run(p, plan.tp_rank, plan.tp, [&](size_t local, size_t global, size_t count) {
        size_t from = std::max(local, part.from), to = std::min(local + count, end);
        if (from < to) f(from - part.from, global + from - local, to - from);
    });
}
template <typename T, typename S> bool keeps_any(const Trainer<T, S>& t, Kind kind) {
    for (auto& [d, place] : t.arena.lasting)
        if (d.kind == kind && place.bytes) return true;
    return false;
}

// Store what this rank keeps of a parameter into its weight and master. values(to, global, count):
// elements from `global` on, as trained: A is float or wider, padding is zero.
template <typename A, typename T, typename S, typename F>
void make_weight(Trainer<T, S>& t, const Parameter& p, F values) {
    Data weight = {Kind::WEIGHT, p.bucket}, master = {Kind::MASTER, p.bucket};
    KeptPart of_weight = kept_part(t, weight, p), of_master = kept_part(t, master, p),
             most = of_weight.count > of_master.count ? of_weight : of_master; // has the other
    std::vector<A> kept(most.count);
    for_each_kept(t.plans[0], p, most, [&](size_t at, size_t global, size_t count) {
        values(kept.data() + at, global, count);
    });
    auto store = [&](auto* to, KeptPart part, auto convert) {
        const A* from = kept.data() + (part.from - most.from);
        if (part.count)
            fill_memory(
                to + part.at, part.count, [=](size_t i) { return convert(from[i]); }, t.ctx.where);
    };
    store(address<T>(t, weight), of_weight, [](A x) { return from_acc<T>(acc_t<T>(x)); });
    store(address<float>(t, master), of_master, [](A x) { return float(x); });
}
template <typename T, typename S, typename A> // of all elements
void set_weight(Trainer<T, S>& t, const Parameter& p, const A* values) {
    make_weight<A>(
        t, p, [&](A* to, size_t global, size_t count) { std::copy_n(values + global, count, to); });
}

// Of the ranks that keep the same elements of a datum the one that gives them.
template <typename T, typename S>
bool gives_kept(const Trainer<T, S>& t, Data d, const Parameter& p) {
    const Plan& plan = t.plans[0];
    return t.comms.replica.rank == 0 && (is_sharded(plan, t.model, d) || t.comms.shard.rank == 0) &&
           plan.tp_rank % replication(p.shard, plan.tp) == 0 &&
           is_mine(plan, t.model, t.model.buckets[size_t(p.bucket)].layers.front());
}

// A parameter's values of a datum of V, from the ranks that keep them, on every rank; all ranks
// call it. second: of the moments the second ones.
template <typename V, typename T, typename S>
std::vector<V> fetch(const Trainer<T, S>& t, Data d, const Parameter& p, bool second = false) {
    std::vector<V> values(p.elements(), V{});
    KeptPart part = kept_part(t, d, p);
    if (part.count && gives_kept(t, d, p)) {
        std::vector<V> kept(part.count);
        copy_out(
            kept.data(),
            address<const V>(t, d) + (second ? kept_elements(t.plans[0], t.model, d) : 0) + part.at,
            part.count * sizeof(V), t.ctx.where);
        for_each_kept(t.plans[0], p, part, [&](size_t at, size_t global, size_t count) {
            std::copy_n(kept.data() + at, count, values.data() + global);
        });
    }
    // one rank gives each element, the others give zero bytes
    all_reduce_sum(t.comms.world, reinterpret_cast<unsigned char*>(values.data()),
                   values.size() * sizeof(V), Cpu{});
    return values;
}

// The float values of a parameter as trained: the master where there is one. All ranks call it.
template <typename T, typename S>
std::vector<float> get_weight(const Trainer<T, S>& t, const Parameter& p) {
    if (keeps_any(t, Kind::MASTER)) return fetch<float>(t, {Kind::MASTER, p.bucket}, p);
    std::vector<T> weight = fetch<T>(t, {Kind::WEIGHT, p.bucket}, p);
    std::vector<float> values(weight.size());
    for (size_t i = 0; i < values.size(); i++) values[i] = float(to_acc(weight[i]));
    return values;
}

// Weights as --seed says: counter-based, keyed by name and global element, so no layout changes
// them.
template <typename T, typename S> void init_weights(Trainer<T, S>& t, uint64_t seed) {
    for (const Parameter& p : t.model.parameters)
        make_weight<float>(t, p, [&](float* to, size_t global, size_t count) {
            size_t end = p.file_elements(), real = global < end ? std::min(count, end - global) : 0;
            std::fill_n(to, count, 0.0f); // padding
            if (p.init.std > 0)
                fill_normal(to, seed, fnv1a(p.name), global, real, p.init.std);
            else
                std::fill_n(to, real, p.init.value);
        });
}

template <typename T, typename S> void init_constants(Trainer<T, S>& t) {
    const Shape& s = t.model.shape;
    unsigned char* base = address<unsigned char>(t, {Kind::CONSTANTS});
    if (!base) return; // a rank without blocks
    size_t rows = 0;
    for (const Plan& p : t.plans) rows = std::max({rows, p.T, p.cache});
    if (s.position == Position::ROPE) {
        std::vector<acc_t<T>> table(rows * s.HS);
        rope_table(table.data(), rows, s.HS, s.rope_theta, s.rope_scaling);
        copy_in(base, table.data(), table.size() * sizeof(table[0]), t.ctx.where);
        t.ctx.rope = base;
    }
    if (s.position == Position::ALIBI) {
        std::vector<float> slopes(s.NH);
        alibi_slopes(slopes.data(), s.NH);
        copy_in(base, slopes.data(), s.NH * sizeof(float), t.ctx.where);
        const Plan& p = t.plans[0]; // of my heads
        t.ctx.slopes = (const float*)base + s.NH / size_t(p.tp) * size_t(p.tp_rank);
    }
    wait_for(t.ctx.where);
}

// ----------------------------------------------------------------------------
// binding: the pointers of one layer

template <typename T, typename S> struct BindWeights {
    const Trainer<T, S>& t;
    const Parameter* p; // the next row
    const T* weights;
    acc_t<T>* grads;
    void operator()(Weight& w, const char*, std::initializer_list<size_t>, Init, bool, Shard,
                    bool) {
        w = {const_cast<T*>(weights) + p->offset, type_of<T>(), p->local_rows(), p->local_cols(),
             grads ? grads + p->offset : nullptr, nullptr};
        p++;
    }
};

// A bucket's weights and gradients while a layer runs; frozen buckets, and plans without gradients,
// have none of these.
template <typename T, typename S> const T* weights_of(const Trainer<T, S>& t, int bucket) {
    return address<const T>(t, {weight_kind(t.plans[t.plan]), bucket});
}
template <typename T, typename S>
acc_t<T>* gradients_of(const Trainer<T, S>& t, int bucket, int layer) {
    const Plan& p = t.plans[t.plan];
    bool train = p.mode == Mode::TRAIN && t.model.buckets[size_t(bucket)].trainable;
    Data grad = {gradient_kind(p, t.model, bucket, layer), bucket};
    return train ? address<acc_t<T>>(t, grad) : nullptr;
}
template <typename T, typename S>
BindWeights<T, S> bind_bucket(const Trainer<T, S>& t, int bucket, int layer) {
    return {t, &t.model.parameters[size_t(t.model.buckets[size_t(bucket)].first)],
            weights_of(t, bucket), gradients_of(t, bucket, layer)};
}

template <typename T, typename S> struct BindActs {
    Recompute level;
    unsigned char* group[6]; // by Kind - KEPT_B; null: the action has none of it
    BindActs(const Trainer<T, S>& t, Action a) : level(t.plans[t.plan].recompute) {
        for (int k = 0; k < 6; k++)
            group[k] = address<unsigned char>(t, {Kind(int(Kind::KEPT_B) + k), a.layer, a.micro});
    }
    template <typename P>
    void operator()(P*& pointer, const char*, size_t n, Keep keep, Last last) {
        unsigned char*& next = group[int(activation_group(keep, last, level)) - int(Kind::KEPT_B)];
        pointer = reinterpret_cast<P*>(next);
        if (next) next += round_up(n * sizeof(P), ARENA_ALIGN);
    }
};

// The activations of a micro-batch lie as its plan sized them, also where a decoding step has fewer
// rows.
template <typename T, typename S> Gpt2Acts<T> gpt2_acts(const Trainer<T, S>& t, Action a) {
    Gpt2Acts<T> acts = {};
    const Plan& p = t.plans[t.plan];
    gpt2_block_activations(acts, t.ctx.shape, p.B * p.T, BindActs<T, S>(t, a));
    return acts;
}
template <typename T, typename S> LlamaActs<T> llama_acts(const Trainer<T, S>& t, Action a) {
    LlamaActs<T> acts = {};
    const Plan& p = t.plans[t.plan];
    llama_block_activations(acts, t.ctx.shape, p.B * p.T, BindActs<T, S>(t, a));
    return acts;
}
template <typename T, typename S> Gpt2Block gpt2_block(const Trainer<T, S>& t, int layer) {
    Gpt2Block w = {};
    gpt2_block_parameters(w, t.model.shape, bind_bucket(t, buckets_of(t.model, layer)[0], layer));
    return w;
}
template <typename T, typename S> LlamaBlock llama_block(const Trainer<T, S>& t, int layer) {
    LlamaBlock w = {};
    llama_block_parameters(w, t.model.shape, bind_bucket(t, buckets_of(t.model, layer)[0], layer));
    return w;
}
// A tied head is the token table, with a gradient buffer of its own.
template <typename T, typename S> Gpt2Head gpt2_head(const Trainer<T, S>& t) {
    Gpt2Head w = {};
    gpt2_head_parameters(w, t.model.shape,
                         bind_bucket(t, int(t.model.buckets.size()) - 1, t.model.head()));
    if (t.model.shape.tied)
        bind_bucket(t, 0, t.model.head())(w.lm_head, "", {}, ZEROS, false, Shard{}, false);
    return w;
}
template <typename T, typename S> LlamaHead llama_head(const Trainer<T, S>& t) {
    LlamaHead w = {};
    llama_head_parameters(w, t.model.shape,
                          bind_bucket(t, int(t.model.buckets.size()) - 1, t.model.head()));
    if (t.model.shape.tied)
        bind_bucket(t, 0, t.model.head())(w.lm_head, "", {}, ZEROS, false, Shard{}, false);
    return w;
}

// The head's rows stand in its scratch, behind what the products need.
template <typename T, typename S> HeadActs<T> head_acts(Trainer<T, S>& t, int layer) {
    const Plan& p = t.plans[t.plan];
    HeadActs<T> acts = {};
    const Place* scratch = arena_find(t.arena, t.plan, t.at, {Kind::SCRATCH, layer});
    size_t rows = p.mode == Mode::GENERATE ? 1 : p.B * p.T;
    unsigned char* next =
        t.arena.base + scratch->offset + scratch->bytes - tail_bytes<T>(p, t.model, layer);
    head_activations(
        acts, t.ctx.shape, rows, [&](auto*& pointer, const char*, size_t n, Keep, Last) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(next);
            next += round_up(n * sizeof(*pointer), ARENA_ALIGN);
        });
    return acts;
}
