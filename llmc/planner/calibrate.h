// calibrate.h - --calibrate FILE: measure this machine, fit the numbers of its row, write FILE
//   1. MEASURE  the trainer's own linear layers, attention, updates, norms and activations; copies,
//               launches of almost nothing, all-reduces and messages: among the ranks of a machine,
//               and among those at the same place of several machines, where each machine has as
//               many. Every rank measures at the same time; a measurement is the median of a tenth
//               of a second's runs (of LINK_RUNS all-reduces), and the mean over ranks. How far a
//               product's time differs between ranks is their jitter. Shares differ between element
//               types, so they are those of --precision
//   2. FIT      a rate is a peak times a share. The peak is the data sheet's where the table has
//               this GPU (machine.h), else the fastest product or copy seen; a link's is the rate
//               of the longest all-reduce. The share s minimises
//                 n (log(s x)/ROW)^2 + (log(s / prior)/PRIOR)^2,   x = median of t_i / t_i(s = 1)
//               over n measured seconds t_i and those of the cost model: ridge regression in logs.
//               A slow moment of the machine does not move a median, nor a few rows a prior
//   3. WRITE    `name = value` lines, with each measurement and the fit's error as comments
//   Ranks as threads share a card, as machine_here.h divides it: rates are those of all together.
//   Not measured: copies to the host, disks. They keep the base row's numbers, as do links that no
//   two ranks have.
//   Cost: seconds. Noise of other programs goes into the fit, so measure a machine that is idle.
#pragma once
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../comm/nccl.h"
#include "../comm/rank_status.h"
#include "../context.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/machine.h"
#include "../io/machines.h"
#include "../ops/adamw.cuh"
#include "../ops/attention.cuh"
#include "../ops/attention_types.h"
#include "../ops/element_type.h"
#include "../ops/gelu.cuh"
#include "../ops/gpu.h"
#include "../ops/linear.cuh"
#include "../ops/matmul.cuh"
#include "../ops/memory.h"
#include "../ops/step_scale.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "layer_cost.h"
#include "machine_here.h"

namespace llmc {

// ----------------------------------------------------------------------------
// fit

// One measurement: its seconds, and those of the cost model if runs reached the whole peak.
struct Measured {
    std::string name;
    double seconds, whole;
};

// Standard deviations of logs: of a measurement around the model, and of a share around its prior.
constexpr double ROW_SIGMA = 0.15, PRIOR_SIGMA = 0.5;

// The share that fits measurements best.
inline double fit_share(double prior, const std::vector<Measured>& rows) {
    // Without rows the prior stays.
    if (rows.empty()) return prior;
    std::vector<double> logs;
    for (const Measured& m : rows)
        logs.push_back(std::log(m.whole / m.seconds));

    // Take the middle one; of an even number of them, the mean of both in the middle.
    std::sort(logs.begin(), logs.end());
    double middle = (logs[logs.size() / 2] + logs[(logs.size() - 1) / 2]) / 2;

    // Weigh logs by the inverse of their variance.
    double measured = double(rows.size()) / (ROW_SIGMA * ROW_SIGMA);
    double before = 1 / (PRIOR_SIGMA * PRIOR_SIGMA);
    double sum = measured * middle + before * std::log(prior);
    return std::clamp(std::exp(sum / (measured + before)), 0.02, 1.0);
}

// The measurements of one share, and the error of the fit for each, as comments of a machine file.
inline std::string share_text(double share, const std::vector<Measured>& rows) {
    std::string text;
    for (const Measured& m : rows) {
        double fitted = m.whole / share;
        text += formatted("#   %-44s %10.4f ms, by the fit %+6.1f%%\n", m.name.c_str(),
                          1e3 * m.seconds, 100 * (fitted / m.seconds - 1));
    }
    return text;
}

// ----------------------------------------------------------------------------
// measure

// Buffers for one measurement: zeros, or small random numbers where a GPU multiplies them.
template <typename S> struct Buffers {
    S where;
    std::vector<std::pair<void*, size_t>> taken = {};

    template <typename T> T* take(size_t n) {
        void* p = device_memory(n * sizeof(T), where);
        LLMC_USER_CHECK(p, "--calibrate: no memory for %zu bytes", n * sizeof(T));
        taken.push_back({p, n * sizeof(T)});
        if constexpr (!std::is_integral_v<T> && !std::is_same_v<S, Cpu>)
            fill_noise(static_cast<T*>(p), n, where);
        return static_cast<T*>(p);
    }
    ~Buffers() {
        wait_for(where);
        for (auto [p, bytes] : taken)
            device_free(p, bytes, where);
    }
};

// The seconds of some work on this rank: the median of some runs after one that warms up.
// With runs 0 there are as many as `span` seconds have, from 7 to 500.
template <typename S, typename F>
double timed_here(S where, F work, size_t runs = 0, double span = 0.1) {
    auto seconds_of_run = [&] {
        wait_for(where);
        double start = clock_seconds();
        work();
        wait_for(where);
        return clock_seconds() - start;
    };

    double first = seconds_of_run();
    if (runs == 0) runs = size_t(std::clamp(span / first, 7.0, 500.0));
    std::vector<double> seconds(runs);
    for (double& s : seconds)
        s = seconds_of_run();

    // The clock may tick more slowly than the work runs.
    std::nth_element(seconds.begin(), seconds.begin() + long(runs / 2), seconds.end());
    return std::max(seconds[runs / 2], 1e-9);
}
// The mean of some number over all ranks.
inline double mean_over_ranks(const Comm& world, double x) {
    all_reduce_sum(world, &x, 1, Cpu{});
    return x / world.size;
}
// The seconds of some work, on average over ranks. All of them call.
template <typename S, typename F>
double timed(const Comm& world, S where, F work, size_t runs = 0) {
    return mean_over_ranks(world, timed_here(where, work, runs));
}

// GPUs need larger sizes to be busy.
template <typename S> constexpr size_t calibrate_scale(S) {
    return std::is_same_v<S, Cpu> ? 1 : 4;
}

// The measurements of this machine, and the row that they change.
struct Measurements {
    Machine machine; // the base row, with the numbers that were measured
    bool known = false; // a GPU of the table: its data sheet counts
    std::string precision = "";
    std::vector<Measured> products = {}, attention = {}, memory = {}, elementwise = {};
    std::vector<Measured> plain = {}; // attention by plain kernels
    std::vector<Measured> link = {}, nic = {};
};

// The shares that are fitted, each to its measurements.
struct FittedShare {
    const char* rows_are;
    MachineNumber share, prior;
    std::vector<Measured> Measurements::*rows;
};
constexpr FittedShare FITTED_SHARES[] = {
    {"products", &Machine::gemm, &Machine::gemm, &Measurements::products},
    {"attention", &Machine::attention, &Machine::attention, &Measurements::attention},
    {"attention by plain kernels", &Machine::plain, &Machine::plain, &Measurements::plain},
    {"updates", &Machine::memory, &Machine::memory, &Measurements::memory},
    {"norms and activation functions", &Machine::elementwise, &Machine::memory,
     &Measurements::elementwise},
    {"all-reduces inside a machine, without their latency", &Machine::link, &Machine::link,
     &Measurements::link},
    {"all-reduces between machines, without their latency", &Machine::nic, &Machine::nic,
     &Measurements::nic},
};

// A linear layer's operands.
template <typename T, typename S> struct LinearOperands {
    Buffers<S> room;
    T *x, *y; // (N,IC), (N,OC)
    Weight w;
    Blas blas = {};

    LinearOperands(size_t N, size_t OC, size_t IC, S where) : room{where} {
        size_t bytes = linear_scratch_bytes<T>(N, OC, IC, where);
        x = room.template take<T>(N * IC);
        y = room.template take<T>(N * OC);
        w = {room.template take<T>(OC * IC), type_of<T>(), OC, IC};
        w.grad = room.template take<acc_t<T>>(OC * IC);
        blas_scratch(blas, room.template take<char>(bytes), bytes);
    }
    void forward(size_t N, S where) {
        const T* no_residual = nullptr;
        linear_forward(y, x, w, nullptr, no_residual, N, blas, where);
    }
};

// Measure linear layers: forward, and both halves of backward. The fastest rate becomes the peak,
// unless the data sheet's is known.
template <typename T, typename S>
void measure_products(Measurements& m, const Comm& world, S where) {
    struct Timed {
        size_t N, OC, IC;
        const char* pass;
        double seconds;
    };
    std::vector<Timed> all;
    for (auto [n, out, in] : {std::array<size_t, 3>{128, 512, 128}, {512, 256, 256},
                              {256, 768, 512}, {1024, 512, 768}, {512, 2048, 512}}) {
        size_t k = calibrate_scale(where), N = n * k, OC = out * k, IC = in * k;
        LinearOperands<T, S> o(N, OC, IC, where);
        all.push_back({N, OC, IC, "forward", timed(world, where, [&] { o.forward(N, where); })});
        all.push_back({N, OC, IC, "dx", timed(world, where, [&] {
                           linear_backward_input(o.x, o.y, o.w, N, false, o.blas, where);
                       })});
        all.push_back({N, OC, IC, "dw", timed(world, where, [&] {
                           linear_backward_weight(o.w, nullptr, o.y, o.x, N, true, o.blas, where);
                       })});
    }

    // The fastest one is the peak. Against it the cost model says how long each may take.
    double& tera = sizeof(T) == 2 ? m.machine.half_tf : m.machine.single_tf;
    if (!m.known) tera = 0;
    for (const Timed& t : all)
        if (!m.known)
            tera = std::max(tera, 2e-12 * double(t.N * t.OC * t.IC) / t.seconds);
    CostModel cost = {m.machine, sizeof(T)};
    cost.machine.gemm = 1;
    m.products.clear();
    for (const Timed& t : all) {
        double whole = product_seconds(cost, double(t.N), double(t.OC), double(t.IC));
        m.products.push_back({concat("linear ", type_name(type_of<T>()), " ", t.N, " x ", t.IC,
                                     " -> ", t.OC, " ", t.pass), t.seconds, whole});
    }
}

// Return the standard deviation of a time over ranks, as a share of its mean. own: of this rank.
inline double spread_over_ranks(const Comm& world, double own) {
    double ranks = world.size;
    double off = own / mean_over_ranks(world, own) - 1;
    return std::sqrt(mean_over_ranks(world, off * off) * ranks / (ranks - 1));
}

// Measure how much ranks differ in the time that one product takes them. Time it for a second: a
// slow moment of a rank must not count.
template <typename T, typename S>
void measure_jitter(Measurements& m, const Comm& world, S where) {
    if (world.size == 1) return;
    size_t N = 512 * calibrate_scale(where);
    LinearOperands<T, S> o(N, N, N, where);
    double seconds = timed_here(where, [&] { o.forward(N, where); }, 0, 1.0);
    m.machine.jitter = spread_over_ranks(world, seconds);
}

// Measure causal attention, forward and backward.
template <typename T, typename S>
void measure_attention(Measurements& m, const Comm& world, S where) {
    for (size_t tokens : {256, 1024}) {
        // Take q, k, v and their gradients, dense.
        size_t B = 2048 / tokens, NH = 4 * calibrate_scale(where), HS = 64;
        size_t n = B * tokens * NH * HS;
        Buffers<S> room = {where};
        T* x[8];
        for (T*& p : x)
            p = room.template take<T>(n);
        acc_t<T>* lse = room.template take<acc_t<T>>(B * NH * tokens);
        int* positions = room.template take<int>(B * tokens);
        int* starts = room.template take<int>(B * tokens);
        std::vector<int> order(B * tokens);
        for (size_t i = 0; i < order.size(); i++)
            order[i] = int(i % tokens);
        copy_in(positions, order.data(), order.size() * sizeof(int), where);

        // Describe the call.
        AttentionOperands<T> o = {x[0], x[1], x[2], x[3], positions, positions, starts};
        o.d.B = B;
        o.d.Tq = o.d.Tk = tokens;
        o.d.NH = o.d.NKV = NH;
        o.d.HS = HS;
        o.d.q_stride = o.d.k_stride = NH * HS;
        Blas blas;
        size_t bytes = attention_scratch_bytes<T>(completed(o.d), threads_here(where), where);
        blas_scratch(blas, room.template take<char>(bytes), bytes);

        // Say how long both passes may take. A query sees half of the keys on average, and half a
        // tile more. On a GPU floats go through plain kernels.
        bool plain = !std::is_same_v<S, Cpu> && sizeof(T) > 2;
        double flops = 4 * double(n) * (double(tokens) + ATTENTION_TILE) / 2;
        double whole = flops / m.machine.peak(sizeof(T));
        double more = plain ? PLAIN_BACKWARD : FLASH_BACKWARD;
        std::vector<Measured>& rows = plain ? m.plain : m.attention;

        std::string name = concat("attention ", type_name(type_of<T>()), " T ", tokens);
        double forward = timed(world, where,
                               [&] { attention_forward(x[4], lse, o, blas, where); });
        double backward = timed(world, where, [&] {
            attention_backward(x[5], x[6], x[7], x[4], lse, o, blas, where);
        });
        rows.push_back({name + " forward", forward, whole});
        rows.push_back({name + " backward", backward, more * whole});
    }
}

// Measure the peak of memory, by copies of more than most caches hold. A data sheet's stays.
template <typename S> void measure_copies(Measurements& m, const Comm& world, S where) {
    for (size_t mib : {16, 64}) {
        Buffers<S> room = {where};
        size_t bytes = (mib << 20) * calibrate_scale(where);
        char* from = room.template take<char>(bytes);
        char* to = room.template take<char>(bytes);
        device_zero(from, bytes, where); // pages that were never written share one
        double seconds = timed(world, where, [&] { copy_bytes(to, from, bytes, where); });
        double rate = 2e-12 * double(bytes) / seconds; // a byte read, a byte written
        if (!m.known)
            m.machine.memory_tb = std::max(m.machine.memory_tb, rate);
    }
}

// Measure what streams through memory: an update, which reads a gradient and reads and writes
// weight, master and moments.
template <typename T, typename S>
void measure_updates(Measurements& m, const Comm& world, S where) {
    for (size_t millions : {1, 4}) {
        // Take weights, masters, gradients and moments: all are 0, and stay so.
        typedef acc_t<T> A;
        size_t n = (millions << 20) * calibrate_scale(where);
        Buffers<S> room = {where};
        T* weight = room.template take<T>(n);
        float* master = sizeof(T) == 2 ? room.template take<float>(n) : nullptr;
        A* x[3]; // gradient, moments
        for (A*& p : x)
            p = room.template take<A>(n);
        device_zero(x[0], n * sizeof(A), where); // as in measure_copies(): it is only read

        // Compare with the time of so many bytes at the peak.
        size_t each = 2 * sizeof(T) + (master ? 2 * sizeof(float) : 0) + 5 * sizeof(A);
        double whole = double(n * each) / (m.machine.memory_tb * 1e12);
        AdamW h = {
            .lr = 0,
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .eps = 1e-8f,
            .decay = 0,
        };
        const StepScale* no_scale = nullptr;
        std::string name = concat("update ", type_name(type_of<T>()), " of ", n >> 20, "M");
        m.memory.push_back({name, timed(world, where, [&] {
                                adamw_update(weight, master, x[0], x[1], x[2], n, h, no_scale,
                                             where);
                            }), whole});
    }
}

// Measure a norm and an activation function: a CPU computes longer than it waits for their bytes.
template <typename T, typename S>
void measure_elementwise(Measurements& m, const Comm& world, S where) {
    // Both read a number and write one.
    for (size_t C : {256, 1024}) {
        size_t N = 2048 * calibrate_scale(where);
        Buffers<S> room = {where};
        T* x = room.template take<T>(N * C);
        T* y = room.template take<T>(N * C);
        T* weight = room.template take<T>(2 * C);
        acc_t<T>* sums = room.template take<acc_t<T>>(2 * N);

        // Compare with the time of so many bytes at the peak.
        double whole = 2 * double(N * C * sizeof(T)) / (m.machine.memory_tb * 1e12);
        std::string of = concat(" ", type_name(type_of<T>()), " ", N, " x ", C);
        m.elementwise.push_back({"norm" + of, timed(world, where, [&] {
                                     layernorm_forward(y, sums, sums + N, x, weight, weight + C,
                                                       N, C, 1e-5f, where);
                                 }), whole});
        m.elementwise.push_back({"gelu" + of, timed(world, where, [&] {
                                     gelu_forward(y, x, N * C, where);
                                 }), whole});
    }
}

constexpr size_t LINK_RUNS = 21;

// Send some numbers to the next rank of a group, and receive those of the rank before.
template <typename S>
void send_around(const Comm& group, float* out, float* in, size_t n, S where) {
    int next = (group.rank + 1) % group.size;
    int before = (group.rank + group.size - 1) % group.size;
    size_t bytes = n * sizeof(float);
    CommMessage messages[] = {
        {out, bytes, next, true},
        {in, bytes, before, false},
    };
    exchange(group, messages, 2, where);
}

// Measure all-reduces in a group, while all other groups of its kind measure too: a short one is
// all latency, the longest one is at the link's peak.
template <typename S>
void measure_link(Measurements& m, const Comm& world, Comm group, MachineNumber peak,
                  std::vector<Measured>& rows, S where) {
    if (group.size == 1) return;
    if (world.nccl) group = nccl_attach(group);
    Buffers<S> room = {where};
    float* x = room.template take<float>(size_t(4) << 20);
    auto seconds = [&](size_t count) { // ranks agree on the number of runs
        return timed(world, where, [&] { all_reduce_sum(group, x, count, where); }, LINK_RUNS);
    };

    // Keep the longest latencies: links.h has one for all groups. That of a message is measured
    // while each rank sends one to the next.
    double latency = seconds(16);
    auto send = [&] { send_around(group, x, x + 16, 16, where); };
    double message = timed(world, where, send, LINK_RUNS);
    m.machine.latency_us = std::max(m.machine.latency_us, 1e6 * latency);
    m.machine.message_us = std::max(m.machine.message_us, 1e6 * message);

    // Count what each rank sends, as links.h does, in the time beyond latency. At least a tenth is
    // taken to be beyond it: else noise could make the rate infinite.
    double n = group.size;
    double rate = 0; // bytes a second
    for (size_t count : {size_t(1) << 18, size_t(1) << 20, size_t(4) << 20}) {
        double sent = 2 * (n - 1) / n * double(count) * sizeof(float);
        double whole = seconds(count);
        double time = std::max(whole - latency, whole / 10);
        rate = sent / time;
        rows.push_back({concat("all-reduce of ", count * sizeof(float) >> 10, " KiB on '",
                               group.name, "'"), time, sent});
    }
    m.machine.*peak = rate / 1e9;
    for (Measured& row : rows)
        row.whole /= rate; // bytes become seconds at the peak
}

// Measure the links between the ranks of a machine, then those between machines.
template <typename S>
void measure_links(Measurements& m, const Comm& world, const Machines& machines, S where) {
    if (world.size == 1) return;
    m.machine.latency_us = m.machine.message_us = 0;
    int rank = world.rank;
    int here = machines.of[size_t(rank)];
    Comm inside = comm_split(world, "machine", ranks_on(machines, here));
    Comm across = comm_split(world, "machines", ranks_across(machines, rank));
    measure_link(m, world, inside, &Machine::link_gb, m.link, where);
    measure_link(m, world, across, &Machine::nic_gb, m.nic, where);
}

// Launches of a block's forward pass.
constexpr int LAUNCHES_OF_BLOCK = 12;

// Measure what a launch takes: a function of a few numbers.
template <typename S> void measure_launches(Measurements& m, const Comm& world, S where) {
    Buffers<S> room = {where};
    float* x = room.template take<float>(64);
    constexpr int MANY = 200;
    double seconds = timed(world, where, [&] {
        for (int i = 0; i < MANY; i++)
            gelu_forward(x, x, 64, where);
    });
    m.machine.launch_us = 1e6 * seconds / MANY * LAUNCHES_OF_BLOCK;
}

// ----------------------------------------------------------------------------
// write

// The machine file of some measurements. sharers: ranks that share a card, whose rates add up.
inline std::string machine_text(const Measurements& m, const std::string& base, int sharers) {
    // Fit the shares.
    Machine fit = m.machine;
    for (const FittedShare& f : FITTED_SHARES)
        fit.*f.share = fit_share(m.machine.*f.prior, m.*f.rows);
    for (MachineNumber rate : {&Machine::half_tf, &Machine::single_tf, &Machine::memory_tb})
        fit.*rate *= m.known ? 1 : sharers;

    // Write the numbers, within the ranges that a machine file may have.
    std::string text = concat("# measured by --calibrate; --machine reads it\nbase = ", base,
                              "\nprecision = ", m.precision, "\n");
    for (const MachineField& f : machine_fields()) {
        double v = std::clamp(fit.*f.field, f.least, f.most);
        text += formatted("%s = %.6g\n", f.name, v);
    }

    // Write the measurements, so that a reader sees what the shares rest on.
    for (const FittedShare& f : FITTED_SHARES)
        if (!(m.*f.rows).empty())
            text += concat("# ", f.rows_are, "\n", share_text(fit.*f.share, m.*f.rows));
    return text;
}

// Measure this machine and write --calibrate's file, on every rank that was started.
template <typename T, typename S> void calibrate_in(const Config& c, const Comm& world, S where) {
    // Links between machines are measured among ranks at the same place of each.
    Machines machines = find_machines(world);
    int each = ranks_of_each(machines);
    if (each == 0)
        or_die("--calibrate measures links between ranks at the same place of each machine, and "
               "these machines have different numbers of ranks: start as many on each");

    // Start from this GPU's row. A CPU, and a GPU without a row, start from the CPU's guesses, of
    // which there remain those that are not measured: no waves of tiles, for example.
    Measurements m;
    const Machine* row = nullptr;
    constexpr bool gpu = !std::is_same_v<S, Cpu>;
    if constexpr (gpu)
        row = machine_of_device(device_name(where));
    m.known = row != nullptr;
    m.precision = c.precision;
    std::string base = row ? row->name : "cpu";
    or_die(machine_named(&m.machine, base));
    m.machine.cards = each;
    if (gpu) m.machine.contention = 0; // not measured; its messages leave the SMs to layers
    if (!m.known) {
        // Take the memory that is there; the fastest copy will be the peak of its rate.
        m.machine.memory_gb = double(memory_left(where)) / GIB / ranks_here(world, where);
        m.machine.memory_gb *= c.local_ranks;
        m.machine.memory_tb = 0;
    }

    // Measure. Copies and products come first: they are the peaks of what follows. The last
    // products are those of T, whose share is fitted.
    measure_copies(m, world, where);
    measure_products<bf16>(m, world, where);
    measure_products<float>(m, world, where);
    if (sizeof(T) == 2)
        measure_products<T>(m, world, where);
    measure_jitter<T>(m, world, where);
    measure_attention<T>(m, world, where);
    measure_updates<T>(m, world, where);
    measure_elementwise<T>(m, world, where);
    measure_links(m, world, machines, where);
    measure_launches(m, world, where);

    // Write the file, and read it back: what --machine would refuse must not be left behind.
    if (world.rank != 0) return;
    std::string text = machine_text(m, base, c.local_ranks);
    or_die(write_text_file(c.calibrate, text));
    Machine back;
    or_die(machine_named(&back, c.calibrate));
    printf("%swritten: %s; --machine %s reads it\n", text.c_str(), c.calibrate.c_str(),
           c.calibrate.c_str());
}

// The same in the element type of --precision.
template <typename S>
void run_calibration(const Config& c, const Comm& world, S where) {
    if (c.precision == "bf16")
        return calibrate_in<bf16>(c, world, where);
    calibrate_in<float>(c, world, where);
}

// Whether the command line asks for a calibration. If so, check its flags, and make them those of
// as many ranks as were started.
inline bool wants_calibration(Config& c, const Comm& world) {
    if (c.calibrate.empty()) return false;
    for (const Flag& f : config_table()) {
        static const std::set<std::string> allowed = {"calibrate", "device", "local-ranks",
                                                      "precision", "watchdog", "fixed-order"};
        LLMC_USER_CHECK(!*f.name || !was_given(c, f.name) || allowed.count(f.name),
                        "--calibrate measures the machine, and no run: leave --%s out", f.name);
    }
    LLMC_USER_CHECK(c.precision != "fp16",
                    "--calibrate measures --precision fp32 or bf16: give bf16, which is as fast");
    or_die(try_file("calibrate", c.calibrate));
    c.dp = std::max(world.size, c.local_ranks);
    return true;
}

} // namespace llmc
