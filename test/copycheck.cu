// copycheck.cu - a stranger's project: names of its own, one copied file, and calls of its launchers
//   test/copycheck.sh compiles it for each file with a "To copy" line: -DCOPIED='"gelu.cuh"' -DCOPY_gelu.
//   nvcc instantiates the calls with float, bf16, __nv_bfloat16 and __half; the emulator runs them,
//   on the CPU and as kernels; plain g++ runs the CPU's alone. The narrow types must come near
//   float, within their rounding; __nv_bfloat16 must give bf16's bits.
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

// A host project may have these: a CHECK of one argument, and these names, with its own meaning.
inline int host_checks = 0;
#define CHECK(x) host_checks += (x) ? 1 : 1000
enum class Type { HOST = 7 };
struct Pack {
    int low, high;
};
template <typename X> X load(const X* p) { return *p; }
template <typename X> void store(X* p, X x) { *p = x; }
inline int pack(int low, int high) { return low | high << 8; }
inline int launch(int x) { return x + 1; }
inline int die(int x) { return x + 2; }

#include COPIED

static void host_still_means_its_own() {
    int x = 3;
    store(&x, load(&x) + 1);
    Pack p = {x, 1};
    CHECK(x == 4);
    CHECK(pack(p.low, p.high) == 260);
    CHECK(int(Type::HOST) == 7);
    CHECK(launch(1) == 2 && die(1) == 3);
}

// ----------------------------------------------------------------------------
// what a call is given, and its results

// Multiples of 1/4 that every type holds exactly; equal for equal seeds.
template <typename T> std::vector<T> numbers(size_t n, unsigned seed);

// All that the calls of a file wrote, as double, array by array.
struct Results {
    std::vector<std::vector<double>> arrays;
    template <typename... X> void add(const std::vector<X>&... x);
};

#if defined(COPY_pipeline)

// Five lines of a planner: schedules, their transfers, their proof.
static int copied_calls() {
    using llmc::Pipeline;
    int failed = 0;
    for (Pipeline kind : {Pipeline::GPIPE, Pipeline::ONE_F_ONE_B, Pipeline::ZERO_BUBBLE}) {
        std::vector<llmc::Schedule> all = llmc::schedules_of(kind, 4, 1, 8);
        std::string fault = llmc::check_schedule(all, 4, 1, 8);
        if (all.size() != 4 || !fault.empty()) failed++;
    }
    return failed;
}

#elif defined(COPY_fp8)

// A matrix as codes and scales, and back: within half a unit of 3 bits, where it is no subnormal.
template <typename S> static int quantise_and_back(S where) {
    const size_t rows = 5, cols = 131;
    std::vector<llmc::bf16> x(rows * cols);
    for (size_t i = 0; i < x.size(); i++) x[i] = llmc::from_acc<llmc::bf16>(float(i % 7) + 1);
    std::vector<llmc::e4m3> codes(x.size()), transposed(x.size());
    std::vector<float> inverse(llmc::fp8_scales(rows, cols, llmc::Fp8Blocks::ROWS));
    uint32_t amax = 0;
    llmc::fp8_quantise<llmc::e4m3>(codes.data(), transposed.data(), inverse.data(), x.data(), &amax,
                                   rows, cols, llmc::Fp8Blocks::ROWS, where);
    int failed = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            float value = llmc::to_float(x[r * cols + c]);
            float back = llmc::to_float(codes[r * cols + c]) * inverse[c / 128 * rows + r];
            failed += std::fabs(back - value) > value / 16;
            failed += transposed[c * rows + r].bits != codes[r * cols + c].bits;
        }
    return failed;
}
static int copied_calls() {
    int failed = quantise_and_back(llmc::Cpu{});
#if LLMC_KERNELS
    cudaStream_t stream = {};
    failed += quantise_and_back(stream);
#endif
    return failed;
}

#elif __has_include("types.h")
#include "types.h"

template <typename T> std::vector<T> numbers(size_t n, unsigned seed) {
    std::vector<T> x(n);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = llmc::from_acc<T>(float(int(seed >> 27) - 16) / 4 + 0.25f);
    }
    return x;
}
template <typename... X> void Results::add(const std::vector<X>&... x) {
    auto add_one = [&](const auto& array) {
        arrays.emplace_back();
        for (auto v : array) arrays.back().push_back(double(llmc::to_acc(v)));
    };
    (add_one(x), ...);
}

#endif

// ----------------------------------------------------------------------------
// the calls of each file: S is llmc::Cpu or cudaStream_t

[[maybe_unused]] constexpr size_t N = 6, C = 40; // rows, channels
typedef std::vector<float> Floats;

#if defined(COPY_layernorm)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> x = numbers<T>(N * C, 1), w = numbers<T>(C, 2), b = numbers<T>(C, 3);
    std::vector<T> out(N * C), dout = numbers<T>(N * C, 4), dx(N * C);
    Floats mean(N), rstd(N), dw(C), db(C), dj(C), sums(llmc::layernorm_sums(N, C, where));
    llmc::layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N,
                            C, 1e-5f, where);
    llmc::layernorm_backward(dx.data(), sums.data(), x.data(), dout.data(), x.data(), w.data(),
                             mean.data(), rstd.data(), N, C, where);
    llmc::add_parts(llmc::layernorm_parts<float>(dw.data(), db.data(), dj.data(), sums.data(), N, C,
                                                 where),
                    false, where);
    r.add(out, dx, dw, db, dj);
}

#elif defined(COPY_rmsnorm)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> x = numbers<T>(N * C, 1), w = numbers<T>(C, 2);
    std::vector<T> out(N * C), dout = numbers<T>(N * C, 4), dx(N * C);
    Floats rstd(N), dw(C), sums(llmc::rmsnorm_sums(N, C, where));
    llmc::rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), N, C, 1e-5f, where);
    llmc::rmsnorm_backward(dx.data(), sums.data(), x.data(), dout.data(), x.data(), w.data(),
                           rstd.data(), N, C, where);
    llmc::add_parts<float>({llmc::rmsnorm_parts<float>(dw.data(), sums.data(), N, C, where)}, false,
                           where);
    r.add(out, dx, dw);
}

#elif defined(COPY_gelu)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> x = numbers<T>(N * C, 1), out(N * C), dout = numbers<T>(N * C, 2), dx(N * C);
    Floats sums(llmc::gelu_sums(N, C, where)), db(C);
    llmc::gelu_forward(out.data(), x.data(), N * C, where);
    llmc::gelu_backward(dx.data(), sums.data(), dout.data(), x.data(), N, C, where);
    llmc::add_parts<float>({llmc::gelu_parts<float>(db.data(), sums.data(), N, C, where)}, false,
                           where);
    r.add(out, dx, db);
}

#elif defined(COPY_column_sums)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> x = numbers<T>(N * C, 1);
    std::vector<char> scratch(llmc::column_sums_scratch_bytes(N, C, where) + 1);
    Floats sums(C);
    llmc::column_sums<T>({{sums.data(), x.data(), N, C}}, {}, scratch.data(), false, where);
    r.add(sums);
}

#elif defined(COPY_swiglu)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> gate = numbers<T>(N * C, 1), up = numbers<T>(N * C, 2), out(N * C);
    std::vector<T> dout = numbers<T>(N * C, 3), dgate(N * C), dup(N * C);
    llmc::swiglu_forward(out.data(), gate.data(), up.data(), N * C, where);
    llmc::swiglu_backward(dgate.data(), dup.data(), dout.data(), gate.data(), up.data(), N * C,
                          where);
    r.add(out, dgate, dup);
}

#elif defined(COPY_moe)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    // Route N tokens to K of E experts each, and sort their slots by expert.
    const size_t E = 4, K = 2, M = N * K;
    Floats logits = numbers<float>(N * E, 1), gates(M), dgates(M);
    std::vector<int> ids(M), counts(E), starts(E + 1), row_of(M), slot_of(M);
    llmc::Routing routing = {llmc::Router::RENORMALISED, E, K};
    const int rows = int(M);
    llmc::Slots slots = {counts.data(), starts.data(), row_of.data(), slot_of.data()};
    llmc::route_forward(ids.data(), gates.data(), logits.data(), routing, N, where);
    llmc::sort_slots(slots, ids.data(), M, E, where);

    // Forward: each slot gets a row, and a token's rows are added. The gathered rows stand for the
    // gate's products, which are not made here.
    std::vector<T> x = numbers<T>(N * C, 1), up = numbers<T>(M * C, 2), xs(M * C), h(M * C);
    std::vector<T> out(N * C), dgate(M * C), dup(M * C), dlogits(N * E);
    llmc::gather_slots(xs.data(), x.data(), slot_of.data(), &rows, M, K, C, where);
    llmc::gated_swiglu_forward(h.data(), xs.data(), up.data(), gates.data(), slot_of.data(),
                               &rows, M, C, where);
    llmc::combine_slots(out.data(), x.data(), h.data(), row_of.data(), &rows, N, K, C, where);

    // Rows of the tokens that chose one of two ranks' experts, there and back.
    std::vector<int> tokens(2 * N), lengths(2);
    llmc::list_tokens(tokens.data(), lengths.data(), ids.data(), {2, N, K, E / 2, 0}, where);
    llmc::gather_slots(xs.data(), x.data(), tokens.data(), lengths.data(), N, 1, C, where);
    llmc::scatter_slots(x.data(), xs.data(), tokens.data(), lengths.data(), N, 1, C, where);

    // Backward: from rows to gates, and from gates to the router's logits.
    llmc::gated_swiglu_backward(dgate.data(), dup.data(), dgates.data(), up.data(), xs.data(),
                                up.data(), gates.data(), slot_of.data(), &rows, M, C, where);
    llmc::route_backward(dlogits.data(), dgates.data(), logits.data(), ids.data(), routing,
                         llmc::BalanceTerms{}, N, where);

    r.add(out, dgate, dup, dlogits);
}

#elif defined(COPY_grouped_matmul)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<int> starts = {0, 0, int(N)};
    llmc::Groups groups = {starts.data(), 2, C, C, N};
    std::vector<T> x = numbers<T>(N * C, 1), w = numbers<T>(2 * C * C, 2), y(N * C), dx(N * C);
    Floats dw(2 * C * C);
    std::vector<char> scratch(llmc::grouped_scratch_bytes<T>(groups, where) + 1);
    llmc::Blas blas;
    llmc::blas_scratch(blas, scratch.data(), scratch.size());
    llmc::grouped_forward(y.data(), x.data(), w.data(), groups, false, blas, where);
    llmc::grouped_backward_input(dx.data(), x.data(), w.data(), groups, false, blas, where);
    llmc::grouped_backward_weight(dw.data(), x.data(), y.data(), groups, false, blas, where);
    r.add(y, dx, dw);
}

#elif defined(COPY_nf4)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> x = numbers<T>(N * C, 1), out(N * C);
    std::vector<uint8_t> codes(N * C), scales(N * C);
    std::vector<int8_t> whole(N * C);
    Floats absmax(N * C), table(llmc::nf4_table_floats(N * C));
    size_t blocks = llmc::nf4_blocks(N * C);
    llmc::nf4_quantize(codes.data(), absmax.data(), x.data(), N * C, llmc::Cpu{});
    llmc::nf4_begin_table(table.data(), absmax.data(), blocks);
    llmc::nf4_quantize_scales(scales.data(), table.data(), absmax.data(), blocks, llmc::Cpu{});
    llmc::nf4_dequantize(out.data(), {codes.data(), scales.data(), table.data()}, N * C, where);
    r.add(out);
    llmc::int8_quantize(whole.data(), absmax.data(), x.data(), N, C, llmc::Cpu{});
    llmc::int8_dequantize(out.data(), whole.data(), absmax.data(), N, C, where);
    r.add(out);
    llmc::int4_quantize(codes.data(), absmax.data(), x.data(), N, C, llmc::Cpu{});
    llmc::int4_dequantize(out.data(), codes.data(), absmax.data(), N, C, where);
    r.add(out);
}

#elif defined(COPY_rope)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t NH = 5, HS = 8;
    Floats table(N * HS);
    llmc::rope_table(table.data(), N, HS, 10000.0, {});
    std::vector<int> positions = {5, 4, 3, 2, 1, 0};
    std::vector<T> x = numbers<T>(N * C, 1), dx = numbers<T>(N * C, 2);
    llmc::rope_forward<T>({x.data(), NH, C}, {}, positions.data(), table.data(), N, HS, where);
    llmc::rope_backward<T>({dx.data(), NH, C}, {}, positions.data(), table.data(), N, HS, where);
    r.add(x, dx);
}

#elif defined(COPY_embedding)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t V = 9, P = 7;
    std::vector<int> tokens = {8, 0, 3, 3, 3, 1}, positions = {0, 1, 2, 3, 4, 6}, starts(N, 0);
    std::vector<T> wte = numbers<T>(V * C, 1), wpe = numbers<T>(P * C, 2), out(N * C);
    std::vector<T> dout = numbers<T>(N * C, 3);
    Floats dwte(V * C), dwpe(P * C);
    std::vector<int> scratch(llmc::embedding_scratch_bytes(N, where) / sizeof(int) + 1);
    llmc::embedding_forward(out.data(), tokens.data(), positions.data(), starts.data(), wte.data(),
                            wpe.data(), N, 0, V, C, where);
    llmc::embedding_backward_weight(dwte.data(), dwpe.data(), dout.data(), tokens.data(),
                                    positions.data(), starts.data(), scratch.data(), N, 0, V, P, C,
                                    false, where);
    r.add(out, dwte, dwpe);
}

#elif defined(COPY_crossentropy)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t V = 37;
    std::vector<T> logits = numbers<T>(N * C, 1), fused = logits;
    std::vector<int> targets = {0, 36, -1, 7, 7, 20};
    Floats row_max(N), sum_exp(N), target(N), losses(N), fused_losses(N);

    // In steps, as a sharded vocabulary needs them;
    llmc::crossentropy_max(row_max.data(), logits.data(), N, V, C, where);
    llmc::crossentropy_sum(sum_exp.data(), target.data(), logits.data(), targets.data(),
                           row_max.data(), N, V, C, 0, where);
    llmc::crossentropy_max_sum(row_max.data(), sum_exp.data(), target.data(), logits.data(),
                               targets.data(), N, V, C, where);
    llmc::crossentropy_loss(losses.data(), row_max.data(), sum_exp.data(), target.data(),
                            targets.data(), N, where);
    llmc::crossentropy_backward(logits.data(), targets.data(), row_max.data(), sum_exp.data(), 0.5f,
                                N, V, C, 0, where);
    r.add(losses, logits);

    // and in one call.
    llmc::crossentropy_forward_backward(fused_losses.data(), fused.data(), targets.data(), 0.5f, N,
                                        V, C, where);
    std::vector<double> total(1);
    llmc::crossentropy_total(total.data(), fused_losses.data(), N, where);
    r.add(fused_losses, fused);
    r.add(Floats{float(total[0])});
}

#elif defined(COPY_objective)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    // A pair of three rows each, of which the first asks.
    std::vector<int> targets = {-1, 3, 4, -1, 5, 6}, starts = {0, 0, 0, 3, 3, 3};
    Floats losses = {0, 1, 2, 0, 1.5f, 3}, feedback = {0, 0, 0, 1, 1, 1}, reference(N);
    Floats coefficient(N), value(N), margin(N), correct(N);
    llmc::ObjectiveRows<float> rows = {
        coefficient.data(), value.data(), margin.data(), correct.data(), losses.data(),
        targets.data(), starts.data(), feedback.data(), reference.data(), N};
    llmc::objective(rows, {llmc::LossKind::DPO}, N, where);
    r.add(coefficient, value);
}

#elif defined(COPY_adamw)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t n = N * C;
    llmc::AdamW h = {0.125f, 0.9f, 0.95f, 1e-8f, 0.1f};
    std::vector<T> w = numbers<T>(n, 1), rounded = w, plain = w;
    Floats grad = numbers<float>(n, 2), master, m(n), v(n), m2(n), v2(n);
    for (T x : w) master.push_back(llmc::to_float(x));

    // With masters; without; and plain SGD. None has a StepScale.
    for (h.step = 1; h.step <= 2; h.step++)
        llmc::adamw_update(w.data(), master.data(), grad.data(), m.data(), v.data(), n, h, nullptr,
                           where);
    h.step = 1;
    llmc::adamw_update(rounded.data(), nullptr, grad.data(), m2.data(), v2.data(), n, h, nullptr,
                       where);
    llmc::TensorRow row = {0, n};
    llmc::sgd_update(plain.data(), nullptr, grad.data(), &row, 1, 0.125f, 0.1f, nullptr, where);
    r.add(w, rounded, plain);
}

#elif defined(COPY_adamw_formats)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t n = N * C;
    std::vector<T> before = numbers<T>(n, 1), steps = before;
    Floats grad = numbers<float>(n, 2), m(n), v(n);
    llmc::TensorRow row = {0, n};

    // Rounded at random, small steps are not lost: some weights have moved, not all.
    llmc::AdamW tiny = {1e-5f, 0.9f, 0.95f, 1e-8f, 0};
    tiny.stochastic = true;
    llmc::AdamWMemory<T> without = {steps.data(), nullptr, grad.data(), m.data(), v.data()};
    llmc::adamw_update(without, &row, 1, tiny, nullptr, where);
    size_t moved = 0;
    for (size_t i = 0; i < n; i++) moved += llmc::to_float(steps[i]) != llmc::to_float(before[i]);
    r.add(Floats{moved > 0 ? 1.0f : 0.0f});

    // bf16 with remainders: the bits of float masters.
    if constexpr (llmc::type_of<T>() == llmc::Type::BF16) {
        llmc::AdamW h = {0.125f, 0.9f, 0.95f, 1e-8f, 0.1f};
        std::vector<T> w = before, split = before;
        std::vector<uint16_t> remainders(n);
        Floats master, m2(n), v2(n), m3(n), v3(n), joined;
        for (T x : w) master.push_back(llmc::to_float(x));
        llmc::AdamWMemory<T> memory = {split.data(), remainders.data(), grad.data(), m3.data(),
                                       v3.data(),    llmc::Masters::REMAINDER};
        for (h.step = 1; h.step <= 2; h.step++) {
            llmc::adamw_update(w.data(), master.data(), grad.data(), m2.data(), v2.data(), n, h,
                               nullptr, where);
            llmc::adamw_update(memory, &row, 1, h, nullptr, where);
        }
        for (size_t i = 0; i < n; i++)
            joined.push_back(llmc::join_float({llmc::bits_as<uint16_t>(split[i]), remainders[i]}));
        r.add(joined);
        r.add(Floats{joined == master ? 1.0f : 0.0f});
    }
}

#elif defined(COPY_small_states)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S) {
    Floats joined;
    for (float x : numbers<float>(N * C, 1))
        joined.push_back(llmc::join_float(llmc::split_float(x * 1.2345f)));
    r.add(joined);
}

#elif defined(COPY_grad_norm)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t n = 5000;
    Floats grad = numbers<float>(n, 1), other = numbers<float>(n, 2);
    std::vector<double> sums(llmc::ceil_div(n, llmc::GRAD_NORM_CHUNK));
    llmc::StepScale scale = {};
    llmc::add_gradients(grad.data(), other.data(), n, where);
    llmc::grad_squares(sums.data(), grad.data(), n, where);
    llmc::grad_norm_finish(&scale, sums.data(), sums.size(), 1.0f, where);
    r.add(Floats{float(scale.norm), scale.scale, float(scale.finite), float(scale.step)});
}

#elif defined(COPY_fp8_delayed)

// Two steps of a slot: 448 / 2, then 448 / 2 still, for the larger maximum is remembered.
template <typename S> static int two_steps(S where) {
    llmc::Fp8Rule rule;
    std::vector<unsigned char> bytes(llmc::fp8_history_bytes(3, rule));
    llmc::Fp8History h = llmc::fp8_history_at(bytes.data(), 3, rule);
    for (float most : {2.0f, 1.0f}) {
        h.amax[0] = llmc::fp8_magnitude(most);
        llmc::fp8_next_scales(h, rule, where);
    }
    return h.scale[0] != 224 || h.scale[1] != 0;
}
static int copied_calls() {
    int failed = two_steps(llmc::Cpu{});
#if LLMC_KERNELS && defined(EMULATE)
    failed += two_steps(cudaStream_t{});
#endif
    return failed;
}

#elif defined(COPY_fp8_sent)

// Two ranks' parts of two shards: whole numbers up to 7 have codes, so their sums are exact.
template <typename S> static int packed_sums(S where) {
    const size_t d = 2, n = llmc::FP8_PACKET_ALIGN, bytes = llmc::fp8_packet_bytes(n);
    std::vector<float> whole(d * n), mine(n);
    std::vector<uint8_t> packets(d * bytes);
    for (size_t i = 0; i < d * n; i++) whole[i] = float(i % 8);
    llmc::fp8_pack_gradients(packets.data(), whole.data(), d, n, where);
    llmc::fp8_sum_gradients(mine.data(), packets.data(), d, n, where);
    int failed = 0;
    for (size_t i = 0; i < n; i++) failed += mine[i] != whole[i] + whole[n + i];
    return failed;
}
// Two parts of a matrix, cut within a row: whole numbers up to 7 come back as they were.
template <typename S> static int parts_and_back(S where) {
    const size_t rows = 3, cols = 131, n = rows * cols, cut = 200;
    std::vector<llmc::bf16> x(n), values(n);
    for (size_t i = 0; i < n; i++) x[i] = llmc::from_acc<llmc::bf16>(float(i % 8));
    std::vector<llmc::e4m3> codes(n);
    std::vector<uint32_t> maxima(llmc::fp8_piece_blocks(rows, cols, false));
    const llmc::Fp8Piece parts[] = {{rows, cols, 0, cut, false}, {rows, cols, cut, n - cut, false}};
    for (const llmc::Fp8Piece& p : parts)
        llmc::fp8_piece_maxima(maxima.data(), x.data() + p.first, p, where);
    for (const llmc::Fp8Piece& p : parts) {
        llmc::fp8_piece_cast(codes.data() + p.first, x.data() + p.first, maxima.data(), p, where);
        llmc::fp8_piece_cast(values.data() + p.first, codes.data() + p.first, maxima.data(), p,
                               where);
    }
    int failed = 0;
    for (size_t i = 0; i < n; i++) failed += values[i].bits != x[i].bits;
    return failed;
}
static int copied_calls() {
    int failed = packed_sums(llmc::Cpu{}) + parts_and_back(llmc::Cpu{});
#if LLMC_KERNELS && defined(EMULATE)
    failed += packed_sums(cudaStream_t{}) + parts_and_back(cudaStream_t{});
#endif
    return failed;
}

#elif defined(COPY_fp8_matmul)

// The rules hold on any machine; where there are kernels, both kinds of outputs compile.
static int copied_calls() {
    llmc::Fp8Blocks whole = llmc::Fp8Blocks::WHOLE;
    llmc::Fp8Product p = {16, 16, 32, whole, whole, false, false, llmc::Type::F32};
    int failed = llmc::fp8_refuses(p, 89, 120000) != nullptr;
    failed += llmc::fp8_refuses(p, 80, 120000) == nullptr;
#if LLMC_KERNELS
    auto narrow = &llmc::fp8_matmul<llmc::bf16, llmc::bf16>;
    auto wide = &llmc::fp8_matmul<llmc::bf16, float>;
    failed += !narrow || !wide;
#endif
    return failed;
}

#elif defined(COPY_matmul)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t K = 24;
    std::vector<T> a = numbers<T>(N * K, 1), b = numbers<T>(K * C, 2), bias = numbers<T>(C, 3);
    std::vector<T> residual = numbers<T>(N * C, 4), out(N * C);
    Floats sums(N * C);
    llmc::Product p = {N, C, K, {K, 1}, {C, 1}, C};
    std::vector<char> scratch(size_t(64) << 20);
    llmc::Blas blas;
    llmc::blas_scratch(blas, scratch.data(), scratch.size());
    const T* no_bias = nullptr;
    const float* no_residual = nullptr;
    llmc::matmul(out.data(), a.data(), b.data(), bias.data(), residual.data(), p, blas, where);
    llmc::matmul(sums.data(), a.data(), b.data(), no_bias, no_residual, p, blas, where);
    r.add(out, sums);
}

#elif defined(COPY_linear)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t IC = 24;
    std::vector<T> x = numbers<T>(N * IC, 1), w = numbers<T>(C * IC, 2), b = numbers<T>(C, 3);
    std::vector<T> dout = numbers<T>(N * C, 4), out(N * C), dx(N * IC);
    Floats dw(C * IC), db(C);
    llmc::Weight weight = {w.data(), llmc::type_of<T>(), C, IC, dw.data(), nullptr};
    llmc::Weight bias = {b.data(), llmc::type_of<T>(), C, 1, db.data(), nullptr};
    std::vector<char> scratch(llmc::linear_scratch_bytes<T>(N, C, IC, where));
    llmc::Blas blas;
    llmc::blas_scratch(blas, scratch.data(), scratch.size());
    const T* no_residual = nullptr;
    llmc::linear_forward(out.data(), x.data(), weight, &bias, no_residual, N, blas, where);
    llmc::linear_backward_input(dx.data(), dout.data(), weight, N, false, blas, where);
    llmc::linear_backward_weight(weight, &bias, dout.data(), x.data(), N, false, blas, where);
    r.add(out, dx, dw, db);
}

#elif defined(COPY_lora)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t IC = 24, rank = 4;
    std::vector<T> x = numbers<T>(N * IC, 1), a = numbers<T>(rank * IC, 2);
    std::vector<T> b = numbers<T>(C * rank, 3), dout = numbers<T>(N * C, 4);
    std::vector<T> out(N * C), dx(N * IC), room(N * rank);
    Floats da(rank * IC), db(C * rank);
    llmc::Lora lora = {a.data(), b.data(), da.data(), db.data(), rank, 0.5};
    std::vector<char> scratch(llmc::lora_scratch_bytes<T>(N, C, IC, rank, where));
    llmc::Blas blas;
    llmc::blas_scratch(blas, scratch.data(), scratch.size());
    llmc::lora_forward(out.data(), x.data(), lora, room.data(), N, C, IC, blas, where);
    llmc::lora_backward_input(dx.data(), dout.data(), lora, room.data(), N, C, IC, blas, where);
    llmc::lora_backward_weight(lora, dout.data(), x.data(), room.data(), N, C, IC, false, blas,
                               where);
    r.add(out, dx, da, db);
}

#elif defined(COPY_lora_grouped)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    // Two experts, of which the first has no rows, each with its adapter.
    const size_t rank = 8;
    std::vector<int> starts = {0, 0, int(N)};
    llmc::Groups groups = {starts.data(), 2, C, C, N};
    std::vector<T> x = numbers<T>(N * C, 1), a = numbers<T>(2 * rank * C, 2);
    std::vector<T> b = numbers<T>(2 * C * rank, 3), dout = numbers<T>(N * C, 4);
    std::vector<T> out(N * C), dx(N * C), room(N * rank);
    Floats da(2 * rank * C), db(2 * C * rank);
    llmc::Lora lora = {a.data(), b.data(), da.data(), db.data(), rank, 0.5};

    // The products of all experts share one scratch.
    std::vector<char> scratch(llmc::lora_grouped_scratch_bytes<T>(groups, rank, where) + 1);
    llmc::Blas blas;
    llmc::blas_scratch(blas, scratch.data(), scratch.size());

    llmc::lora_grouped_forward(out.data(), x.data(), lora, room.data(), groups, blas, where);
    llmc::lora_grouped_backward_input(dx.data(), dout.data(), lora, room.data(), groups, blas,
                                      where);
    llmc::lora_grouped_backward_weight(lora, dout.data(), x.data(), room.data(), groups, false,
                                       blas, where);

    r.add(out, dx, da, db);
}

#elif defined(COPY_elementwise)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<T> a = numbers<T>(N * C, 1), b = numbers<T>(N * C, 2), out(N * C);
    llmc::add_forward(out.data(), a.data(), b.data(), N * C, where);
    llmc::softcap_forward(out.data(), N * C, 2, where);
    r.add(out);
    llmc::round_rows(a.data(), C, b.data(), C, N, C, where);
    r.add(a);
}

#elif defined(COPY_attention_join)
#define HAS_CALLS
template <typename T, typename S> void calls_of_joined(Results& r, S where);
template <typename T, typename S> void calls(Results& r, S where) {
    const size_t NH = 5, HS = 8; // N rows of C channels
    Floats out = numbers<float>(N * C, 1), lse = numbers<float>(NH * N, 2);
    std::vector<T> part = numbers<T>(N * C, 3);
    Floats part_lse = numbers<float>(NH * N, 4);
    llmc::attention_merge(out.data(), lse.data(), part.data(), part_lse.data(), 1, N, NH, HS,
                          where);
    r.add(out, lse);
    calls_of_joined<T>(r, where);
}
template <typename T, typename S> void calls_of_joined(Results& r, S where) {
    const size_t NH = 5, n = 3; // N rows of C channels
    std::vector<T> q = numbers<T>(N * C, 1), k = numbers<T>(n * C, 2), v = numbers<T>(n * C, 3);
    std::vector<T> out = numbers<T>(N * C, 4), dout = numbers<T>(N * C, 5), dq(N * C);
    Floats lse = numbers<float>(NH * N, 6), dk(n * C), dv(n * C);
    llmc::AttentionOperands<T> x;
    x.q = q.data(), x.dout = dout.data(), x.d = {1, N, N, NH, NH, C / NH, C, C};

    // A prefix, and sinks.
    llmc::PrefixRows rows = {k.data(), v.data(), dk.data(), dv.data(), n};
    std::vector<T> s = numbers<T>(NH, 3);
    Floats sums(llmc::sink_parts(where) * NH), ds(NH);
    llmc::Sinks<T> sinks = {s.data(), sums.data(), NH};
    llmc::join_keys(out.data(), lse.data(), x, rows, sinks, where);
    llmc::join_keys_backward(dq.data(), out.data(), lse.data(), x, rows, sinks, where);
    for (size_t i = 0; i < sums.size(); i++) ds[i % NH] += sums[i];
    r.add(out, lse, dq, dk, ds);
}

#elif defined(COPY_grouped_bias)
#define HAS_CALLS
template <typename T, typename S> void calls(Results& r, S where) {
    std::vector<int> starts = {0, 0, int(N)}, slot_of(N);
    for (size_t i = 0; i < N; i++) slot_of[i] = int(N - 1 - i);
    std::vector<T> x = numbers<T>(N * C, 1), bias = numbers<T>(2 * C, 2);
    Floats gates = numbers<float>(N, 3), dgates(N), dbias(2 * C);
    llmc::GroupedBias<float> b = {{starts.data(), 2, C, 1, N}, gates.data(), slot_of.data()};
    llmc::grouped_bias_backward(dbias.data(), x.data(), b, false, where);
    llmc::grouped_bias_backward_gates(dgates.data(), x.data(), bias.data(), b, where);
    llmc::grouped_bias_forward(x.data(), bias.data(), b, where);
    r.add(x, dbias, dgates);
}

#elif defined(COPY_attention) || defined(COPY_attention_cpu) || defined(COPY_attention_tiled) || \
    defined(COPY_attention_sm80) || defined(COPY_attention_sm90)
#define HAS_CALLS

// Two heads of queries on one of keys; every query sees the keys up to its own.
template <typename T> struct Sequence {
    static constexpr size_t L = 33, NH = 2, HS = 64;
    std::vector<T> q = numbers<T>(L * NH * HS, 1), k = numbers<T>(L * HS, 2);
    std::vector<T> v = numbers<T>(L * HS, 3), dout = numbers<T>(L * NH * HS, 4);
    std::vector<T> out = std::vector<T>(L * NH * HS), dq = out;
    std::vector<T> dk = std::vector<T>(L * HS), dv = dk;
    Floats lse = Floats(NH * L);
    std::vector<int> positions, starts = std::vector<int>(L, 0);
    std::vector<char> scratch = std::vector<char>(size_t(4) << 20);
    llmc::AttentionOperands<T> x;
    Sequence() {
        for (size_t i = 0; i < L; i++) positions.push_back(int(i));
        x.q = q.data();
        x.k = k.data();
        x.v = v.data();
        x.dout = dout.data();
        x.q_positions = positions.data();
        x.k_positions = positions.data();
        x.doc_start = starts.data();
        x.d = {1, L, L, NH, 1, HS, NH * HS, HS};
        x.scale = 1.0f / 64;
    }
    void give(Results& r) const {
        r.add(out, lse, dq, dk, dv);
    }
};

#if defined(COPY_attention_cpu)
template <typename T, typename S> void calls(Results& r, S) {
    if constexpr (!std::is_same_v<S, llmc::Cpu>) return;
    Sequence<T> s;
    llmc::attention_forward_reference(s.out.data(), s.lse.data(), s.x);
    llmc::attention_backward_reference(s.dq.data(), s.dk.data(), s.dv.data(), s.out.data(),
                                       s.lse.data(), s.x);
    s.give(r);
}

#elif defined(COPY_attention_tiled)
template <typename T, typename S> void calls(Results& r, S where) {
    if constexpr (std::is_same_v<S, llmc::Cpu>) {
        Sequence<T> s;
        llmc::Blas blas;
        llmc::blas_scratch(blas, s.scratch.data(), s.scratch.size());
        llmc::attention_forward(s.out.data(), s.lse.data(), s.x, blas, where);
        llmc::attention_backward(s.dq.data(), s.dk.data(), s.dv.data(), s.out.data(), s.lse.data(),
                                 s.x, blas, where);
        s.give(r);
    }
}

#elif !LLMC_KERNELS
template <typename T, typename S> void calls(Results&, S) {}

#else
// Kernels alone: each file's own launchers; those for tensor cores take 16-bit types only.
#if defined(COPY_attention)
#define ATTENTION(direction) llmc::attention_##direction
#define TAKES(T) true
#elif defined(COPY_attention_sm80)
#define ATTENTION(direction) llmc::attention_mma_##direction
#define TAKES(T) sizeof(T) == 2
#else
#define ATTENTION(direction) llmc::attention_hopper_##direction
#define TAKES(T) sizeof(T) == 2
#endif
template <typename T, typename S> void calls(Results& r, S where) {
    if constexpr (!std::is_same_v<S, llmc::Cpu> && TAKES(T)) {
        Sequence<T> s;
        ATTENTION(forward)(s.out.data(), s.lse.data(), s.x, s.scratch.data(), where);
        ATTENTION(backward)(s.dq.data(), s.dk.data(), s.dv.data(), s.out.data(), s.lse.data(), s.x,
                            s.scratch.data(), where);
        s.give(r);
    }
}
#endif
#endif

// ----------------------------------------------------------------------------
// comparing

#if defined(HAS_CALLS)

template <typename T, typename S> Results run(S where) {
    Results r;
    calls<T>(r, where);
    return r;
}

// Differences in units of each array's largest number; returns how many arrays are off.
static int compare(const char* what, const Results& got, const Results& want, double allowed) {
    int failed = 0;
    if (got.arrays.empty() || want.arrays.empty()) return 0; // a file of one of the two
    for (size_t k = 0; k < want.arrays.size(); k++) {
        double most = 1e-30, worst = 0;
        for (double x : want.arrays[k]) most = std::fmax(most, std::fabs(x));
        for (size_t i = 0; i < want.arrays[k].size(); i++) {
            double error = std::fabs(got.arrays[k][i] - want.arrays[k][i]) / most;
            if (!(error <= worst)) worst = error;
        }
        if (worst <= allowed) continue;
        printf("%s: array %zu is off by %.2g, %.2g allowed\n", what, k, worst, allowed);
        failed++;
    }
    return failed;
}

// A few roundings are allowed: to bf16, of 8 significant bits, and to fp16, of 11.
template <typename S> int compare_types(S where) {
    Results f = run<float>(where), b = run<llmc::bf16>(where), h = run<llmc::fp16>(where);
    int failed = compare("bf16", b, f, 4.0 / 256) + compare("fp16", h, f, 4.0 / 2048);
#if defined(__CUDA_BF16_H__)
    failed += compare("__nv_bfloat16, bf16", run<__nv_bfloat16>(where), b, 0);
    failed += compare("__half, fp16", run<__half>(where), h, 0);
#endif
    printf("%zu arrays compared\n", b.arrays.size());
    return failed;
}

static int copied_calls() {
    int failed = compare_types(llmc::Cpu{});
#if LLMC_KERNELS
    cudaStream_t stream = {};
    failed += compare_types(stream);
    failed += compare("kernels, CPU", run<float>(stream), run<float>(llmc::Cpu{}), 1e-5);
#endif
    return failed;
}

#elif !defined(COPY_pipeline) && !defined(COPY_fp8) && !defined(COPY_fp8_delayed) && \
    !defined(COPY_fp8_sent) && !defined(COPY_fp8_matmul)
static int copied_calls() { return 0; } // a file without launchers of its own
#endif

int main() {
    host_still_means_its_own();
    int failed = copied_calls() + (host_checks != 4);
    printf("%s: %s\n", COPIED, failed ? "FAIL" : "right");
    return failed > 0;
}
