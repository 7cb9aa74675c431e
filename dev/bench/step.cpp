// step.cpp - a whole GPT-2 124M training step against the rate of its own products
//   ceiling: the FLOP-weighted rate of the step's products on this machine, in this run, in their
//            three forms: out = x W^T, dx = dout W, dW = dout^T x. Each takes the fastest of
//            oneDNN's layouts: plain strides, layouts of oneDNN's own choice with the packing left
//            out, and the inner-product primitives
//   share = (6 parameters + 6 L C T) FLOPs a token * tokens a second / ceiling
//   roofline: the time of an action whose products and attention run at the ceiling, and whose bytes
//            move at the rate of a large copy, without overlap (planner/layer_cost.h, cost.h)
//   usage: bench_step [fp32|bf16] [T] ...
#include <cstdio>
#include <cstring>
#include <random>
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

static double best_seconds(const std::function<void()>& f) {
    double best = 1e30;
    for (int i = 0; i < 4; i++) {
        double start = clock_seconds();
        f();
        if (i > 0) best = std::min(best, clock_seconds() - start);
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
    dnnl::matmul::desc d({{M, K}, in, a}, {{K, N}, in, b}, {{M, N}, out, Tag::ab});
    dnnl::matmul::primitive_desc pd(d, e);
    return time_primitive(dnnl::matmul(pd),
                          {{DNNL_ARG_SRC, filled(pd.src_desc(), e)},
                           {DNNL_ARG_WEIGHTS, filled(pd.weights_desc(), e)},
                           {DNNL_ARG_DST, filled(pd.dst_desc(), e)}},
                          e);
}

// form 0: forward, 1: dx, 2: dW, of a layer (OC,IC) on N rows
static double inner_product_seconds(int form, long N, long OC, long IC, DataType in,
                                    const engine& e) {
    // Leave every layout to oneDNN. Backward primitives ask for forward's description as a hint.
    memory::desc x({N, IC}, in, Tag::any), w({OC, IC}, in, Tag::any), y({N, OC}, in, Tag::any);
    memory::desc dw({OC, IC}, DataType::f32, Tag::any);
    inner_product_forward::primitive_desc f({prop_kind::forward_training, x, w, y}, e);

    // Time one form, with operands in the layouts that it has chosen.
    auto room = [&](const memory::desc& d) { return filled(d, e); };
    if (form == 0)
        return time_primitive(inner_product_forward(f),
                              {{DNNL_ARG_SRC, room(f.src_desc())},
                               {DNNL_ARG_WEIGHTS, room(f.weights_desc())},
                               {DNNL_ARG_DST, room(f.dst_desc())}},
                              e);

    if (form == 1) {
        inner_product_backward_data::primitive_desc b({x, w, y}, e, f);
        return time_primitive(inner_product_backward_data(b),
                              {{DNNL_ARG_DIFF_SRC, room(b.diff_src_desc())},
                               {DNNL_ARG_WEIGHTS, room(b.weights_desc())},
                               {DNNL_ARG_DIFF_DST, room(b.diff_dst_desc())}},
                              e);
    }

    inner_product_backward_weights::primitive_desc b({x, dw, y}, e, f);
    return time_primitive(inner_product_backward_weights(b),
                          {{DNNL_ARG_SRC, room(b.src_desc())},
                           {DNNL_ARG_DIFF_WEIGHTS, room(b.diff_weights_desc())},
                           {DNNL_ARG_DIFF_DST, room(b.diff_dst_desc())}},
                          e);
}

// A layer's three products in the step: our linear, and the fastest layout of oneDNN.
template <typename T>
static void layer_rates(const char* name, size_t N, size_t OC, size_t IC, int times, double* flops,
                        double* fastest, double* ours) {
    // Take the operands of one layer.
    engine e(engine::kind::cpu, 0);
    DataType in = dnnl_type(type_of<T>());
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
        *flops += times * f;
        *fastest += times * best;
        *ours += times * own;
    }
}

// Bytes a second of a copy that no cache holds, read and written.
static double copy_rate() {
    size_t n = size_t(1) << 28;
    std::vector<unsigned char> from(n, 1), to(n);
    double seconds = best_seconds([&] {
        constexpr size_t PART = 1 << 20;
#pragma omp parallel for
        for (size_t i = 0; i < n; i += PART) memcpy(to.data() + i, from.data() + i, PART);
    });
    return 2 * double(n) / seconds;
}

// A machine that reaches the ceiling in products and attention, and the copy rate elsewhere.
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
    double flops = 0, fastest = 0, ours = 0;
    printf("GPT-2 124M, B %zu, T %zu, %s, %d threads\n", B, T_, type_name(type_of<T>()),
           threads_here(Cpu{}));
    layer_rates<T>("qkv", N, 3 * s.C, s.C, 12, &flops, &fastest, &ours);
    layer_rates<T>("att proj", N, s.C, s.C, 12, &flops, &fastest, &ours);
    layer_rates<T>("fc", N, s.F, s.C, 12, &flops, &fastest, &ours);
    layer_rates<T>("fc proj", N, s.C, s.F, 12, &flops, &fastest, &ours);
    layer_rates<T>("head", chunk, s.Vp(), s.C, int(N / chunk), &flops, &fastest, &ours);
    printf("  ceiling %.1f GFLOP/s; our products alone %.1f%% of it\n", flops / fastest / 1e9,
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
    // Time each action, and keep the fastest step.
    struct Row {
        double seconds = 0;
        Times ideal;
    };
    Machine machine = ideal_machine(flops / fastest, copy_rate());
    CostModel cost = run_costs<T>(machine, t.model, Cpu{});
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
            bool head = a.layer == t.model.head();
            const char* where = a.layer == 0 ? " embedding" : head ? " head" : " blocks";
            Row& row = now[op_name(a.op) + std::string(a.layer < 0 ? "" : where)];
            row.seconds += clock_seconds() - before;
            add_times(row.ideal, action_seconds(cost, t.plans[0], t.model, a));
        }
        if (i > 0 && clock_seconds() - start < best) best = clock_seconds() - start, rows = now;
    }
    double model_flops =
        (6.0 * double(parameter_count(t.model)) + 6.0 * double(s.L * s.C * T_)) * double(N);
    printf("  step %.1f ms, %.1f GFLOP/s of the model's own: %.1f%% of the ceiling\n", best * 1e3,
           model_flops / best / 1e9, 100 * model_flops / best / (flops / fastest));

    // Print each kind of action beside its roofline.
    printf("  copies %.1f GB/s\n  %-14s %9s %5s %9s %9s %9s %6s\n", machine.memory_rate() / 1e9, "",
           "ms", "step", "GFLOP", "GB", "roofline", "share");
    double ideal = 0;
    for (auto& [what, row] : rows) {
        double computes = row.ideal.products + row.ideal.attention;
        double moves = row.ideal.memory + row.ideal.update;
        ideal += computes + moves;
        printf("    %-12s %9.1f %4.1f%% %9.1f %9.2f %9.1f %5.1f%%\n", what.c_str(),
               row.seconds * 1e3, 100 * row.seconds / best,
               computes * machine.gemm_rate(sizeof(T)) / 1e9, moves * machine.memory_rate() / 1e9,
               (computes + moves) * 1e3, 100 * (computes + moves) / row.seconds);
    }
    printf("    %-12s %9.1f %15s %9s %9.1f %5.1f%%\n", "all", best * 1e3, "", "", ideal * 1e3,
           100 * ideal / best);
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
