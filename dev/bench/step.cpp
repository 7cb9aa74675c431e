// step.cpp - a whole GPT-2 124M training step against the rate of its own products
//   ceiling: the FLOP-weighted rate of the step's products on this machine, in this run, in their
//            three forms: out = x W^T, dx = dout W, dW = dout^T x. Each takes the fastest of
//            oneDNN's layouts: plain strides, layouts of oneDNN's own choice with the packing left
//            out, and the inner-product primitives. oneDNN 2.6 has those of bf16 on AVX-512 alone:
//            elsewhere the ceiling of bf16 is float's
//   share = (6 parameters + 6 L C T) FLOPs a token * tokens a second / ceiling
//   roofline: the time of an action whose products run at the ceiling of their own forms, with
//            attention beside them, and whose bytes move at the rate of memory, without overlap
//            (planner/layer_cost.h, cost.h). The last line is the step's: the sum of its actions'
//   memory:  the faster of a copy and of an update in place, which reads no line that it only
//            writes. An action above 100% found its operands in a cache, or the machine was busy
//   usage: bench_step [fp32|bf16] [T] ...
#include <cstdio>
#include <cstring>
#include <numeric>
#include "../../llmc/io/machine.h"
#include "../../llmc/io/mfu.h"
#include "../../llmc/layers.h"
#include "../../llmc/parameters.h"
#include "../../llmc/family.h"
#include "../../llmc/planner/cost.h"

using namespace llmc;

using namespace dnnl;
typedef memory::format_tag Tag;
typedef memory::data_type DataType;

// The best of as many runs as 0.2 s hold, of three at least, after one to warm up.
static double best_seconds(const std::function<void()>& f) {
    f();
    double best = 1e30, spent = 0;
    for (int i = 0; i < 3 || spent < 0.2; i++) {
        double start = clock_seconds();
        f();
        double seconds = clock_seconds() - start;
        best = std::min(best, seconds);
        spent += seconds;
    }
    return best;
}

static memory filled(const memory::desc& d, const engine& e) {
    memory m(d, e);
    memset(m.get_data_handle(), 0, d.get_size());
    return m;
}

static double time_primitive(const primitive& p, const std::unordered_map<int, memory>& args,
                             const engine& e) {
    stream s(e);
    return best_seconds([&] { p.execute(s, args); });
}

// out (M,N) = a (M,K) b (K,N): with given tags, or oneDNN's own (any)
static double matmul_seconds(long M, long N, long K, DataType in, DataType out, Tag a, Tag b,
                             const engine& e) {
    memory::desc x({M, K}, in, a), w({K, N}, in, b), y({M, N}, out, Tag::ab);
    dnnl::matmul::primitive_desc pd = onednn_product(e, {}, x, w, y);
    return time_primitive(dnnl::matmul(pd),
                          {{DNNL_ARG_SRC, filled(pd.src_desc(), e)},
                           {DNNL_ARG_WEIGHTS, filled(pd.weights_desc(), e)},
                           {DNNL_ARG_DST, filled(pd.dst_desc(), e)}},
                          e);
}

// Describe a primitive to oneDNN 2 or 3. Backward ones take forward's description as a hint.
template <typename Primitive, typename... Hint>
static typename Primitive::primitive_desc
describe(const engine& e, const memory::desc& a, const memory::desc& b, const memory::desc& c,
         const Hint&... hint) {
    constexpr bool forward = sizeof...(hint) == 0;
#if DNNL_VERSION_MAJOR < 3
    if constexpr (forward)
        return {{prop_kind::forward_training, a, b, c}, e};
    else
        return {{a, b, c}, e, hint...};
#else
    if constexpr (forward)
        return {e, prop_kind::forward_training, a, b, c};
    else
        return {e, a, b, c, hint...};
#endif
}

// form 0: forward, 1: dx, 2: dW, of a layer (OC,IC) on N rows
static double inner_product_seconds(int form, long N, long OC, long IC, DataType in,
                                    const engine& e) {
    // Leave every layout to oneDNN.
    memory::desc x({N, IC}, in, Tag::any), w({OC, IC}, in, Tag::any), y({N, OC}, in, Tag::any);
    memory::desc dw({OC, IC}, DataType::f32, Tag::any);
    auto f = describe<inner_product_forward>(e, x, w, y);

    // Time one form, with operands in the layouts that it has chosen.
    auto room = [&](const memory::desc& d) { return filled(d, e); };
    if (form == 0)
        return time_primitive(inner_product_forward(f),
                              {{DNNL_ARG_SRC, room(f.src_desc())},
                               {DNNL_ARG_WEIGHTS, room(f.weights_desc())},
                               {DNNL_ARG_DST, room(f.dst_desc())}},
                              e);

    if (form == 1) {
        auto b = describe<inner_product_backward_data>(e, x, w, y, f);
        return time_primitive(inner_product_backward_data(b),
                              {{DNNL_ARG_DIFF_SRC, room(b.diff_src_desc())},
                               {DNNL_ARG_WEIGHTS, room(b.weights_desc())},
                               {DNNL_ARG_DIFF_DST, room(b.diff_dst_desc())}},
                              e);
    }

    auto b = describe<inner_product_backward_weights>(e, x, dw, y, f);
    return time_primitive(inner_product_backward_weights(b),
                          {{DNNL_ARG_SRC, room(b.src_desc())},
                           {DNNL_ARG_DIFF_WEIGHTS, room(b.diff_weights_desc())},
                           {DNNL_ARG_DIFF_DST, room(b.diff_dst_desc())}},
                          e);
}

// Products by their form: FLOPs of a step, and its seconds in the fastest layout and in ours.
struct Products {
    double flops[3] = {}, fastest[3] = {}, ours[3] = {};
    // The rate of forms `from` to `to`.
    double rate(int from, int to) const {
        double f = std::accumulate(flops + from, flops + to + 1, 0.0);
        return f / std::accumulate(fastest + from, fastest + to + 1, 0.0);
    }
    Products operator+(const Products& o) const {
        Products sum = *this;
        for (int i = 0; i < 3; i++) {
            sum.flops[i] += o.flops[i];
            sum.fastest[i] += o.fastest[i];
            sum.ours[i] += o.ours[i];
        }
        return sum;
    }
};

// A layer's three products in the step: our linear, and the fastest layout of oneDNN.
template <typename T>
static Products layer_rates(const char* name, size_t N, size_t OC, size_t IC, int times) {
    // Take the operands of one layer.
    Products products;
    engine e(engine::kind::cpu, 0);
    DataType in = onednn_takes(type_of<T>(), IC) ? dnnl_type(type_of<T>()) : DataType::f32;
    long n = long(N), oc = long(OC), ic = long(IC);
    std::vector<T> x(N * IC), w(OC * IC), y(N * OC);
    std::vector<float> dw(OC * IC);
    std::vector<unsigned char> scratch(linear_scratch_bytes<T>(N, OC, IC, Cpu{}) + 64);
    Blas blas;
    blas_scratch(blas, scratch.data(), scratch.size());
    Weight W = {w.data(), type_of<T>(), OC, IC, dw.data(), nullptr};

    for (int form = 0; form < 3; form++) {
        // Time the form as the trainer runs it.
        double own = best_seconds([&] {
            if (form == 0)
                linear_forward(y.data(), x.data(), W, nullptr, (const T*)nullptr, N, blas, Cpu{});
            if (form == 1) linear_backward_input(x.data(), y.data(), W, N, false, blas, Cpu{});
            if (form == 2)
                linear_backward_weight(W, nullptr, y.data(), x.data(), N, false, blas, Cpu{});
        });

        // Time it in layouts of oneDNN's choice, which a trainer would have to pack into.
        double packed = form == 0 ? matmul_seconds(n, oc, ic, in, in, Tag::any, Tag::any, e)
                        : form == 1
                            ? matmul_seconds(n, ic, oc, in, in, Tag::any, Tag::any, e)
                            : matmul_seconds(oc, ic, n, in, DataType::f32, Tag::any, Tag::any, e);
        double inner = inner_product_seconds(form, n, oc, ic, in, e);

        // Report the rates. The layer counts `times` times in the step.
        double best = std::min({own, packed, inner});
        double f = 2.0 * double(N) * double(OC) * double(IC);
        const char* forms[] = {"forward", "dx", "dW"};
        printf("  %-8s %-8s ours %7.1f  packed %7.1f  inner product %7.1f GFLOP/s\n", name,
               forms[form], f / own / 1e9, f / packed / 1e9, f / inner / 1e9);
        products.flops[form] = times * f;
        products.fastest[form] = times * best;
        products.ours[form] = times * own;
    }
    return products;
}

// Bytes a second, read and written, of what no cache holds: the faster of a copy, whose stores may
// first read what they replace, and of an update in place.
static double memory_rate() {
    size_t n = size_t(1) << 26;
    std::vector<float> from(n, 1), to(n);
    double copied = best_seconds([&] {
        constexpr size_t PART = 1 << 18;
        #pragma omp parallel for
        for (size_t i = 0; i < n; i += PART)
            memcpy(to.data() + i, from.data() + i, PART * sizeof(float));
    });
    double updated = best_seconds([&] {
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++)
            to[i] *= 0.5f;
    });
    double bytes = 2 * double(n * sizeof(float));
    printf("  copies %.1f, updates in place %.1f GB/s\n", bytes / copied / 1e9,
           bytes / updated / 1e9);
    return bytes / std::min(copied, updated);
}

// A machine that reaches a rate in products and attention, and that of memory elsewhere.
static Machine ideal_machine(double flop_rate, double byte_rate) {
    Machine m = machines().back();
    m.half_tf = m.single_tf = flop_rate / 1e12;
    m.memory_tb = byte_rate / 1e12;
    m.gemm = m.attention = m.memory = 1;
    m.elementwise = m.launch_us = 0;
    return m;
}

template <typename T> static void bench(size_t B, size_t T_) {
    Shape s = with_logits(gpt2_shape(12, 12, 768), Cpu{});
    size_t N = B * T_, chunk = head_chunk_rows(s, N, sizeof(T));
    printf("GPT-2 124M, B %zu, T %zu, %s, %d threads\n", B, T_, type_name(type_of<T>()),
           threads_here(Cpu{}));
    Products head = layer_rates<T>("head", chunk, s.Vp(), s.C, int(N / chunk));
    Products blocks = layer_rates<T>("qkv", N, 3 * s.C, s.C, 12) +
                      layer_rates<T>("att proj", N, s.C, s.C, 12) +
                      layer_rates<T>("fc", N, s.F, s.C, 12) +
                      layer_rates<T>("fc proj", N, s.C, s.F, 12);
    Products all = head + blocks;
    double ceiling = all.rate(0, 2);
    double fastest = std::accumulate(all.fastest, all.fastest + 3, 0.0);
    double ours = std::accumulate(all.ours, all.ours + 3, 0.0);
    printf("  ceiling %.1f GFLOP/s; our products alone %.1f%% of it\n", ceiling / 1e9,
           100 * fastest / ours);

    Trainer<T, Cpu> t;
    Plan p;
    p.B = B, p.T = T_;
    trainer_place(t, s, {p});
    trainer_allocate(t);
    init_constants(t);
    init_weights(t, 1);
    t.hyper = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
        for (size_t i = 0; i < T_; i++)
            tokens[i] = int((sample * 31 + i * 7) % s.V),
            targets[i] = int((sample * 31 + (i + 1) * 7) % s.V);
        return std::string();
    };

    // The costs of an action, at the rate of its own products: the head's B makes all three forms.
    double bytes_rate = memory_rate();
    auto costs_of = [&](const Action& a) {
        bool of_head = a.layer == t.model.head();
        double rate = of_head ? head.rate(0, 2)
                      : a.op == Op::F ? blocks.rate(0, 0) : blocks.rate(1, 2);
        return run_costs<T>(ideal_machine(rate, bytes_rate), t.model, Cpu{});
    };

    // Time each action, and keep the fastest step.
    struct Row {
        double seconds = 0, flops = 0, bytes = 0, ideal = 0;
    };
    int runs = T_ > 256 ? 3 : 8;
    double best = 1e30;
    std::map<std::string, Row> rows;
    for (int i = 0; i <= runs; i++) {
        std::map<std::string, Row> now;
        double start = clock_seconds();
        t.plan = 0;
        for (t.at = 0; t.at < int(t.plans[0].actions.size()); t.at++) {
            Action a = t.plans[0].actions[size_t(t.at)];
            double before = clock_seconds();
            run_action(t, a);
            double seconds = clock_seconds() - before;

            // Add the action to its row.
            CostModel cost = costs_of(a);
            Times ideal = action_seconds(cost, t.plans[0], t.model, a);
            double computes = ideal.products + ideal.attention;
            double moves = ideal.memory + ideal.update;
            bool of_head = a.layer == t.model.head();
            const char* where = a.layer == 0 ? " embedding" : of_head ? " head" : " blocks";
            Row& row = now[op_name(a.op) + std::string(a.layer < 0 ? "" : where)];
            row.seconds += seconds;
            row.flops += computes * cost.machine.gemm_rate(sizeof(T));
            row.bytes += moves * bytes_rate;
            row.ideal += computes + moves;
        }
        if (i > 0 && clock_seconds() - start < best) best = clock_seconds() - start, rows = now;
    }
    double model_flops =
        (6.0 * double(parameter_count(t.model)) + 6.0 * double(s.L * s.C * T_)) * double(N);
    printf("  step %.1f ms, %.1f GFLOP/s of the model's own: %.1f%% of the ceiling\n", best * 1e3,
           model_flops / best / 1e9, 100 * model_flops / best / ceiling);

    // Print each kind of action beside its roofline, then the sum.
    printf("  %-14s %9s %5s %9s %9s %9s %6s\n", "", "ms", "step", "GFLOP", "GB", "roofline",
           "share");
    Row sum;
    auto print = [&](const char* what, const Row& row) {
        printf("    %-12s %9.1f %4.1f%% %9.1f %9.2f %9.1f %5.1f%%\n", what, row.seconds * 1e3,
               100 * row.seconds / best, row.flops / 1e9, row.bytes / 1e9, row.ideal * 1e3,
               100 * row.ideal / row.seconds);
    };
    for (auto& [what, row] : rows) {
        sum.flops += row.flops;
        sum.bytes += row.bytes;
        sum.ideal += row.ideal;
        if (row.ideal > 0) print(what.c_str(), row);
    }
    sum.seconds = best;
    print("step", sum);
    trainer_free(t);
}

int main(int argc, char** argv) {
    for (const char* type : {"bf16", "fp32"})
        for (size_t T : {1024, 64}) {
            bool wanted = argc == 1;
            for (int i = 1; i + 1 < argc; i += 2)
                wanted |= !strcmp(argv[i], type) && strtoul(argv[i + 1], nullptr, 10) == T;
            if (wanted) !strcmp(type, "bf16") ? bench<bf16>(4, T) : bench<float>(4, T);
        }
    return 0;
}
