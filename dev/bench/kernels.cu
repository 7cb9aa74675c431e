// kernels.cu - each kernel's rate on this GPU, as a share of a ceiling measured in the same run
//   ceilings: a copy of 2 GiB in device memory (bytes read plus written), and cuBLASLt's product of
//   8192^3 in bf16. Data is random: on zeros a GPU is faster.
//   usage: bench_kernels [part]      one JSON object a line: part, what, rate, unit, share
#include <cstdio>
#include "../../llmc/adamw.cuh"
#include "../../llmc/attention.cuh"
#include "../../llmc/crossentropy.cuh"
#include "../../llmc/embedding.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/layernorm.cuh"
#include "../../llmc/linear.cuh"
#include "../../llmc/memory.h"
#include "../../llmc/rmsnorm.cuh"
#include "../../llmc/rope.cuh"
#include "../../llmc/swiglu.cuh"

using namespace llmc;

static const cudaStream_t STREAM = nullptr;

// Device memory of random numbers: a million of them, over and over.
template <typename T> struct Buffer {
    T* data = nullptr;
    explicit Buffer(size_t n, float scale = 1) {
        LLMC_CUDA_CHECK(cudaMalloc(&data, n * sizeof(T)));
        std::vector<T> part(n < 1000003 ? n : 1000003);
        uint64_t x = 88172645463325252ull;
        for (T& v : part) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            v = from_acc<T>(scale * float(double(x >> 11) * 0x1p-52 - 1));
        }
        for (size_t at = 0; at < n; at += part.size())
            copy_in(data + at, part.data(), std::min(part.size(), n - at) * sizeof(T), STREAM);
        wait_for(STREAM);
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
};
struct Integers {
    int* data = nullptr;
    template <typename F> Integers(size_t n, F value) {
        LLMC_CUDA_CHECK(cudaMalloc(&data, n * sizeof(int)));
        fill_memory(data, n, value, STREAM);
    }
    Integers(const Integers&) = delete;
    ~Integers() { cudaFree(data); }
};

static double copy_rate, product_rate;

// The median of runs of about a hundredth of a second each.
template <typename F> double seconds_of(F f) {
    int runs = std::max(1, int(0.01 / std::max(gpu_seconds(f, 2, STREAM), 1e-6)));
    std::vector<double> times(9);
    for (double& t : times) t = gpu_seconds(f, runs, STREAM);
    std::sort(times.begin(), times.end());
    return times[4];
}
template <typename F> void memory_row(const char* part, const char* what, double bytes, F f) {
    double rate = bytes / seconds_of(f);
    printf(
        "{\"part\": \"%s\", \"what\": \"%s\", \"rate\": %.1f, \"unit\": \"GB/s\", \"share\": "
        "%.3f}\n",
        part, what, rate / 1e9, rate / copy_rate);
    fflush(stdout);
}
template <typename F> void product_row(const char* part, const char* what, double flops, F f) {
    double rate = flops / seconds_of(f);
    printf(
        "{\"part\": \"%s\", \"what\": \"%s\", \"rate\": %.1f, \"unit\": \"TFLOP/s\", \"share\": "
        "%.3f}\n",
        part, what, rate / 1e12, rate / product_rate);
    fflush(stdout);
}

static void with_scratch(Blas& blas, Buffer<float>& room, size_t bytes) {
    blas_scratch(blas, room.data, bytes);
}

static void measure_ceilings() {
    size_t bytes = size_t(2) << 30, M = 8192;
    {
        Buffer<float> a(bytes / 4), b(bytes / 4);
        copy_rate = 2.0 * double(bytes) / seconds_of([&] {
                        LLMC_CUDA_CHECK(cudaMemcpyAsync(b.data, a.data, bytes, cudaMemcpyDeviceToDevice,
                                                   STREAM));
                    });
    }
    Buffer<bf16> a(M * M), b(M * M), out(M * M);
    Buffer<float> room(PRODUCT_WORKSPACE / 4);
    Blas blas;
    with_scratch(blas, room, PRODUCT_WORKSPACE);
    const bf16* none = nullptr;
    Product p = linear_forward_product(M, M, M, Type::BF16);
    blas_rehearse(blas, true, STREAM);
    auto run = [&] { matmul(out.data, a.data, b.data, none, none, p, blas, STREAM); };
    run();
    blas_rehearse(blas, false, STREAM);
    product_rate = 2.0 * M * M * M / seconds_of(run);
    printf(
        "{\"part\": \"ceilings\", \"what\": \"copy\", \"rate\": %.1f, \"unit\": \"GB/s\", "
        "\"share\": 1}\n",
        copy_rate / 1e9);
    printf(
        "{\"part\": \"ceilings\", \"what\": \"product 8192^3 bf16\", \"rate\": %.1f, \"unit\": "
        "\"TFLOP/s\", \"share\": 1}\n",
        product_rate / 1e12);
    fflush(stdout);
}

template <typename T> void norms(const char* type) {
    size_t N = 32768, C = 4096, B = N * C * sizeof(T);
    char what[100];
    auto name = [&](const char* op) {
        return snprintf(what, sizeof(what), "%s %s (%zu,%zu)", op, type, N, C), what;
    };
    Buffer<T> x(N * C), w(C), b(C), out(N * C), dout(N * C), dx(N * C);
    Buffer<float> mean(N), rstd(N), dw(C), db(C), sums(layernorm_sums(N, C, STREAM));
    memory_row("norms", name("layernorm forward"), 2.0 * B, [&] {
        layernorm_forward(out.data, mean.data, rstd.data, x.data, w.data, b.data, N, C, 1e-5f,
                          STREAM);
    });
    memory_row("norms", name("layernorm backward with residual"), 4.0 * B, [&] {
        layernorm_backward(dx.data, sums.data, out.data, dout.data, x.data, w.data, mean.data,
                           rstd.data, N, C, STREAM);
        auto parts = layernorm_parts<float>(dw.data, db.data, nullptr, sums.data, N, C, STREAM);
        column_sums<T>({}, parts, nullptr, true, STREAM);
    });
    memory_row("norms", name("rmsnorm forward"), 2.0 * B,
               [&] { rmsnorm_forward(out.data, rstd.data, x.data, w.data, N, C, 1e-5f, STREAM); });
    memory_row("norms", name("rmsnorm backward with residual"), 4.0 * B, [&] {
        rmsnorm_backward(dx.data, sums.data, out.data, dout.data, x.data, w.data, rstd.data, N, C,
                         STREAM);
        auto parts = rmsnorm_parts<float>(dw.data, sums.data, N, C, STREAM);
        column_sums<T>({}, {parts}, nullptr, true, STREAM);
    });
}

template <typename T> void elementwise(const char* type) {
    size_t N = 16384, C = 11008, n = N * C, NH = 32, HS = 128, P = 4096;
    double B = double(n * sizeof(T));
    char what[100];
    auto name = [&](const char* op) {
        return snprintf(what, sizeof(what), "%s %s", op, type), what;
    };
    Buffer<T> a(n), b(n), c(n), d(n);
    memory_row("elementwise", name("gelu forward"), 2 * B,
               [&] { gelu_forward(c.data, a.data, n, STREAM); });
    Buffer<float> sums(C), parts(gelu_sums(N, C, STREAM));
    memory_row("elementwise", name("gelu backward and the bias's gradient"), 3 * B, [&] {
        gelu_backward(c.data, parts.data, b.data, a.data, N, C, STREAM);
        column_sums<T>({}, {gelu_parts<float>(sums.data, parts.data, N, C, STREAM)}, nullptr, true,
                       STREAM);
    });
    memory_row("elementwise", name("swiglu forward"), 3 * B,
               [&] { swiglu_forward(c.data, a.data, b.data, n, STREAM); });
    memory_row("elementwise", name("swiglu backward, in place"), 5 * B,
               [&] { swiglu_backward(c.data, d.data, c.data, a.data, b.data, n, STREAM); });
    Buffer<float> table(P * HS);
    Integers positions(N, [&](size_t i) { return int(i % P); });
    memory_row("elementwise", name("rope forward"), 2.0 * double(N * NH * HS * sizeof(T)), [&] {
        rope_forward(a.data, positions.data, table.data, N, NH, HS, NH * HS, STREAM);
    });
    memory_row("elementwise", name("column sums"), B,
               [&] { column_sums(sums.data, a.data, parts.data, N, C, true, STREAM); });
}

template <typename T> void head(const char* type) {
    char what[100];
    for (size_t V : {size_t(50257), size_t(131072)}) {
        size_t N = 8192, Vp = round_up(V, 128);
        Buffer<T> logits(N * Vp);
        Buffer<float> m(N), s(N), t(N), loss(N);
        Integers targets(N, [&](size_t i) { return int(i * 7919 % V); });
        snprintf(what, sizeof(what), "cross-entropy forward and backward %s (%zu,%zu)", type, N, V);
        // the logits are read twice and written once
        memory_row("head", what, 3.0 * double(N * V * sizeof(T)), [&] {
            crossentropy_max_sum(m.data, s.data, t.data, logits.data, targets.data, N, V, Vp,
                                 STREAM);
            crossentropy_loss(loss.data, m.data, s.data, t.data, targets.data, N, STREAM);
            crossentropy_backward(logits.data, targets.data, m.data, s.data, 1e-4f, N, V, Vp, 0,
                                  STREAM);
        });
    }
    size_t N = 32768, V = 50304, C = 2048;
    Buffer<T> table(V * C), out(N * C);
    Buffer<float> grad(V * C), scratch(embedding_scratch_bytes(N, STREAM) / 4 + 1);
    Integers tokens(N, [&](size_t i) { return int(i * i % 50257); }),
        zero(N, [](size_t) { return 0; });
    snprintf(what, sizeof(what), "embedding forward %s (%zu,%zu)", type, N, C);
    memory_row("head", what, 2.0 * double(N * C * sizeof(T)), [&] {
        embedding_forward(out.data, tokens.data, zero.data, zero.data, table.data,
                          (const T*)nullptr, N, size_t(0), V, C, STREAM);
    });
    snprintf(what, sizeof(what), "embedding backward %s (%zu,%zu), adding", type, N, C);
    memory_row("head", what, double(N * C) * (sizeof(T) + 8), [&] {
        embedding_backward_weight(grad.data, (float*)nullptr, out.data, tokens.data, zero.data,
                                  zero.data, scratch.data, N, size_t(0), V, size_t(0), C, true, STREAM);
    });
}

static void optimizer() {
    size_t n = size_t(256) << 20;
    Buffer<bf16> w(n);
    Buffer<float> master(n), grad(n), m(n), v(n);
    Buffer<double> sums(n / GRAD_NORM_CHUNK);
    StepScale s = {1, 1, 1, 1000};
    Buffer<float> scale(sizeof(s) / 4);
    copy_in(scale.data, &s, sizeof(s), STREAM);
    StepScale* where = reinterpret_cast<StepScale*>(scale.data);
    AdamW h = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f};
    memory_row("optimizer", "adamw, bf16 weights, float master", 30.0 * double(n), [&] {
        adamw_update(w.data, master.data, grad.data, m.data, v.data, n, h, where, STREAM);
    });
    h.stochastic = true;
    memory_row("optimizer", "adamw, bf16 weights, stochastic rounding", 24.0 * double(n), [&] {
        adamw_update(w.data, (float*)nullptr, grad.data, m.data, v.data, n, h, where, STREAM);
    });
    memory_row("optimizer", "gradient norm", 4.0 * double(n), [&] {
        grad_squares(sums.data, grad.data, n, STREAM);
        grad_norm_finish(where, sums.data, n / GRAD_NORM_CHUNK, 1.0f, STREAM, {},
                         {h.beta1, h.beta2});
    });
}

// FLOPs: 4 forward and 10 backward for each (query, key, channel) of the causal half.
template <typename T> void attention(const char* type) {
    struct Case {
        size_t B, seq, NH, NKV, HS;
    };
    for (Case s :
         {Case{16, 1024, 12, 12, 64}, Case{4, 4096, 16, 16, 64}, Case{2, 8192, 16, 16, 64},
          Case{16, 1024, 16, 16, 128}, Case{4, 4096, 16, 16, 128}, Case{2, 8192, 16, 16, 128},
          Case{2, 8192, 32, 8, 128}, Case{1, 16384, 16, 16, 128}, Case{4, 4096, 8, 8, 256}}) {
        size_t N = s.B * s.seq, Q = s.NH * s.HS, K = s.NKV * s.HS;
        AttentionDims d = {s.B, s.seq, s.seq, s.NH, s.NKV, s.HS, Q, K};
        Buffer<T> q(N * Q), k(N * K), v(N * K), out(N * Q), dout(N * Q), dq(N * Q), dk(N * K),
            dv(N * K);
        Buffer<float> lse(s.B * s.NH * s.seq);
        size_t need = attention_scratch_bytes<T>(d, 1, STREAM);
        Buffer<float> room(need / 4 + 1);
        Integers at(N, [&](size_t i) { return int(i % s.seq); }), zero(N, [](size_t) { return 0; });
        AttentionOperands<T> x = {q.data,  k.data,  v.data,    dout.data, at.data,
                                  at.data, zero.data, nullptr, d};
        double pairs = double(s.B * s.NH * s.HS) * double(s.seq) * double(s.seq) / 2;
        char what[120];
        snprintf(what, sizeof(what), "attention forward %s B=%zu T=%zu NH=%zu NKV=%zu HS=%zu", type,
                 s.B, s.seq, s.NH, s.NKV, s.HS);
        product_row("attention", what, 4 * pairs, [&] {
            attention_forward(out.data, lse.data, x, room.data, STREAM);
        });
        snprintf(what, sizeof(what), "attention backward %s B=%zu T=%zu NH=%zu NKV=%zu HS=%zu",
                 type, s.B, s.seq, s.NH, s.NKV, s.HS);
        product_row("attention", what, 10 * pairs, [&] {
            attention_backward(dq.data, dk.data, dv.data, out.data, lse.data, x, room.data, STREAM);
        });
    }
}

// The products of a GPT-2 124M, a 1.5B and a Llama 8B block, in their three forms.
static void products() {
    struct Case {
        size_t N, OC, IC;
    };
    Buffer<float> room(PRODUCT_WORKSPACE / 4);
    for (Case s : {Case{16384, 3072, 768}, Case{16384, 6400, 1600}, Case{8192, 14336, 4096},
                   Case{8192, 8192, 8192}}) {
        Buffer<bf16> inp(s.N * s.IC), w(s.OC * s.IC), out(s.N * s.OC);
        Buffer<float> grad(s.OC * s.IC);
        Weight weight = {w.data, Type::BF16, s.OC, s.IC, grad.data, nullptr};
        Blas blas;
        with_scratch(blas, room, PRODUCT_WORKSPACE);
        auto row = [&](const char* form, auto run) {
            char what[100];
            snprintf(what, sizeof(what), "%s bf16 N=%zu OC=%zu IC=%zu", form, s.N, s.OC, s.IC);
            blas_rehearse(blas, true, STREAM);
            run();
            blas_rehearse(blas, false, STREAM);
            product_row("products", what, 2.0 * double(s.N * s.OC) * double(s.IC), run);
        };
        row("forward", [&] {
            linear_forward(out.data, inp.data, weight, nullptr, (const bf16*)nullptr, s.N, blas,
                           STREAM);
        });
        row("backward input",
            [&] { linear_backward_input(inp.data, out.data, weight, s.N, false, blas, STREAM); });
        row("backward weight, adding", [&] {
            linear_backward_weight(weight, nullptr, out.data, inp.data, s.N, true, blas, STREAM);
        });
    }
}

int main(int argc, char** argv) {
    std::string part = argc > 1 ? argv[1] : "";
    if (std::string why = no_gpu_because(); !why.empty()) {
        printf("skipped: %s\n", why.c_str());
        return 0;
    }
    struct Part {
        const char* name;
        void (*run)();
    } parts[] = {{"norms", [] { norms<bf16>("bf16"), norms<float>("float"); }},
                 {"elementwise", [] { elementwise<bf16>("bf16"); }},
                 {"head", [] { head<bf16>("bf16"); }},
                 {"optimizer", optimizer},
                 {"attention", [] { attention<bf16>("bf16"); }},
                 {"products", products}};
    measure_ceilings();
    for (const Part& p : parts)
        if (part.empty() || part == p.name) p.run();
}
