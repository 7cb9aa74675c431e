// kernels.cu - each kernel's rate on this GPU, as a share of a ceiling measured in the same run
//   ceilings: a copy of 2 GiB in device memory (bytes read plus written), and cuBLASLt's product of
//   8192^3 in bf16. Data is random: on zeros a GPU is faster.
//   GB/s counts useful bytes: an ideal kernel reads each input once and writes each result once. A
//   second pass over an input, scratch, partial sums and what the L2 cache serves count nothing. A
//   result that is added to (+=) is read and written. A row of a table that several tokens name is
//   one row. Statistics, weights of norms and other vectors beside a matrix are left out.
//   TFLOP/s counts useful FLOPs, two a multiply-add: attention 2 HS + 2 HS_v forward and
//   6 HS + 4 HS_v backward, with the scores once more, for each (query, key) of the causal half.
//   Padding, the empty rows of tiles and whatever is computed a second time count nothing.
//   usage: bench_kernels [--small] [PART ...]      no PART: all of them
//          PART: norms elementwise head optimizer attention decode products fp8 nf4 experts
//   Prints one JSON object a line: part, what, rate, unit, share.
//   --small: short lengths, each row once, untimed, for tools that look for faults; so it runs in
//   the emulator:
//     g++ -std=c++20 -O1 -DEMULATE -fsanitize=address -x c++ dev/bench/kernels.cu -lpthread
#include <cstdarg>
#include <cstdio>
#include <functional>
#include "../../llmc/ops/adamw_formats.cuh"
#include "../../llmc/ops/attention.cuh"
#include "../../llmc/ops/crossentropy.cuh"
#include "../../llmc/ops/embedding.cuh"
#include "../../llmc/ops/gelu.cuh"
#include "../../llmc/ops/grad_norm.cuh"
#include "../../llmc/ops/grouped_matmul.cuh"
#include "../../llmc/ops/latent.cuh"
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/linear.cuh"
#include "../../llmc/ops/memory.h"
#include "../../llmc/ops/moe.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../llmc/ops/rope.cuh"
#include "../../llmc/ops/swiglu.cuh"

using namespace llmc;

static const cudaStream_t STREAM = nullptr;

// ----------------------------------------------------------------------------
// sizes and memory

#if defined(__CUDACC__)
static bool small = false;
#else
static bool small = true;
template <typename F> double gpu_seconds(F, int, cudaStream_t) { return 0; } // time is not emulated
#endif

// A length, or a short one instead: a multiple of 16, as fp8 products want it.
static size_t sized(size_t n) {
    return small ? std::clamp(n / 64 / 16 * 16, size_t(16), size_t(256)) : n;
}

// A number of sequences, or one.
static size_t some(size_t n) { return small ? 1 : n; }

// Device memory that nobody has written.
struct Room {
    unsigned char* data = nullptr;
    explicit Room(size_t bytes) { LLMC_CUDA_CHECK(cudaMalloc(&data, bytes)); }
    Room(const Room&) = delete;
    ~Room() { cudaFree(data); }
    template <typename T> T* as() const { return reinterpret_cast<T*>(data); }
};

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

        // Copy them as often as they fit.
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

// Random bytes: codes of any kind.
struct Bytes {
    Integers words;
    explicit Bytes(size_t n) : words(n / 4 + 1, hashed) {}
    static int hashed(size_t i) { return int((i + 1) * 2654435761u); }
    const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(words.data); }
};

// A handle, with scratch for its products and `more` bytes.
struct Products {
    Room room;
    Blas blas;
    explicit Products(size_t more = 0) : room(PRODUCT_WORKSPACE + more) {
        blas_scratch(blas, room.data, PRODUCT_WORKSPACE + more);
#if !defined(__CUDACC__)
        blas.emulates = 90;
#endif
    }
};

// ----------------------------------------------------------------------------
// rows

static double copy_rate, product_rate;

__attribute__((format(printf, 1, 2))) static std::string text(const char* format, ...) {
    char line[160];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    return line;
}

// The median of runs of about a hundredth of a second each, or of three long ones.
template <typename F> double seconds_of(F f) {
    if (small) {
        f();
        wait_for(STREAM);
        return INFINITY; // a rate of 0
    }
    double once = gpu_seconds(f, 2, STREAM);
    int runs = std::max(1, int(0.01 / std::max(once, 1e-6)));
    std::vector<double> times(once > 0.05 ? 3 : 9);
    for (double& t : times) t = gpu_seconds(f, runs, STREAM);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static void print_row(const char* part, const std::string& what, double rate, const char* unit,
                      double share) {
    printf("{\"part\": \"%s\", \"what\": \"%s\", \"rate\": %.1f, \"unit\": \"%s\", "
           "\"share\": %.3f}\n",
           part, what.c_str(), rate, unit, small ? 0 : share);
    fflush(stdout);
}
template <typename F>
void memory_row(const char* part, const std::string& what, double bytes, F f) {
    double rate = bytes / seconds_of(f);
    print_row(part, what, rate / 1e9, "GB/s", rate / copy_rate);
}
template <typename F>
void product_row(const char* part, const std::string& what, double flops, F f) {
    double rate = flops / seconds_of(f);
    print_row(part, what, rate / 1e12, "TFLOP/s", rate / product_rate);
}

// Choose the algorithms of the products that f runs, by timing them.
template <typename F> void rehearse(Blas& blas, F f) {
    blas_rehearse(blas, true, STREAM);
    f();
    blas_rehearse(blas, false, STREAM);
}

static void measure_ceilings() {
    size_t bytes = small ? size_t(1) << 20 : size_t(2) << 30, M = sized(8192);
    {
        Buffer<float> a(bytes / 4), b(bytes / 4);
        auto copy = [&] {
            LLMC_CUDA_CHECK(
                cudaMemcpyAsync(b.data, a.data, bytes, cudaMemcpyDeviceToDevice, STREAM));
        };
        copy_rate = 2.0 * double(bytes) / seconds_of(copy);
    }

    // The product.
    Buffer<bf16> a(M * M), b(M * M), out(M * M);
    Products products;
    const bf16* none = nullptr;
    Product p = linear_forward_product(M, M, M, Type::BF16);
    auto run = [&] { matmul(out.data, a.data, b.data, none, none, p, products.blas, STREAM); };
    rehearse(products.blas, run);
    product_rate = 2.0 * double(M * M) * double(M) / seconds_of(run);
    print_row("ceilings", "copy", copy_rate / 1e9, "GB/s", 1);
    print_row("ceilings", "product 8192^3 bf16", product_rate / 1e12, "TFLOP/s", 1);
}

// ----------------------------------------------------------------------------
// norms, elementwise operators, the head, the optimizer

// Backward adds to the residual stream's gradient: dout, inp and dresidual in, dinp out.
template <typename T> void norms(const char* type) {
    size_t N = sized(32768), C = sized(4096);
    double B = double(N * C * sizeof(T));
    auto name = [&](const char* op) { return text("%s %s (%zu,%zu)", op, type, N, C); };
    Buffer<T> x(N * C), w(C), b(C), out(N * C), dout(N * C), dx(N * C);
    Buffer<float> mean(N), rstd(N), dw(C), db(C), sums(layernorm_sums(N, C, STREAM));

    memory_row("norms", name("layernorm forward"), 2 * B, [&] {
        layernorm_forward(out.data, mean.data, rstd.data, x.data, w.data, b.data, N, C, 1e-5f,
                          STREAM);
    });
    memory_row("norms", name("layernorm backward with residual"), 4 * B, [&] {
        layernorm_backward(dx.data, sums.data, out.data, dout.data, x.data, w.data, mean.data,
                           rstd.data, N, C, STREAM);
        auto parts = layernorm_parts<float>(dw.data, db.data, nullptr, sums.data, N, C, STREAM);
        column_sums<T>({}, parts, nullptr, true, STREAM);
    });

    memory_row("norms", name("rmsnorm forward"), 2 * B,
               [&] { rmsnorm_forward(out.data, rstd.data, x.data, w.data, N, C, 1e-5f, STREAM); });
    memory_row("norms", name("rmsnorm backward with residual"), 4 * B, [&] {
        rmsnorm_backward(dx.data, sums.data, out.data, dout.data, x.data, w.data, rstd.data, N, C,
                         STREAM);
        auto parts = rmsnorm_parts<float>(dw.data, sums.data, N, C, STREAM);
        column_sums<T>({}, {parts}, nullptr, true, STREAM);
    });
}

template <typename T> void elementwise(const char* type) {
    size_t N = sized(16384), C = sized(11008), n = N * C, NH = some(32), HS = 128, P = 4096;
    double B = double(n * sizeof(T));
    auto name = [&](const char* op) { return text("%s %s", op, type); };
    Buffer<T> a(n), b(n), c(n), d(n);
    Buffer<float> sums(C), parts(gelu_sums(N, C, STREAM));

    memory_row("elementwise", name("gelu forward"), 2 * B,
               [&] { gelu_forward(c.data, a.data, n, STREAM); });
    memory_row("elementwise", name("gelu backward and the bias's gradient"), 3 * B, [&] {
        gelu_backward(c.data, parts.data, b.data, a.data, N, C, STREAM);
        column_sums<T>({}, {gelu_parts<float>(sums.data, parts.data, N, C, STREAM)}, nullptr, true,
                       STREAM);
    });

    // In place or not, three matrices are read and two written.
    memory_row("elementwise", name("swiglu forward"), 3 * B,
               [&] { swiglu_forward(c.data, a.data, b.data, n, STREAM); });
    memory_row("elementwise", name("swiglu backward, in place"), 5 * B,
               [&] { swiglu_backward(c.data, d.data, c.data, a.data, b.data, n, STREAM); });

    // The table of cosines stays in the L2 cache.
    Buffer<T> heads(N * NH * HS);
    Buffer<float> table(P * HS);
    Integers positions(N, [&](size_t i) { return int(i % P); });
    memory_row("elementwise", name("rope forward"), 2.0 * double(N * NH * HS * sizeof(T)), [&] {
        rope_forward<T>({heads.data, NH, NH * HS}, {}, positions.data, table.data, N, HS, STREAM);
    });

    Room scratch(column_sums_scratch_bytes(N, C, STREAM));
    memory_row("elementwise", name("column sums"), B,
               [&] { column_sums(sums.data, a.data, scratch.data, N, C, true, STREAM); });
}

// The logits are read once, in steps twice, and their gradient is written once, over them.
template <typename T> void crossentropy(const char* type, size_t V) {
    size_t N = sized(8192), Vp = round_up(V, 128);
    double bytes = 2.0 * double(N * V * sizeof(T));
    std::string shape = text("%s (%zu,%zu)", type, N, V);
    Buffer<T> logits(N * Vp);
    Buffer<float> losses(N), max(N), sum(N), target(N);
    Integers targets(N, [&](size_t i) { return int(i * 7919 % V); });
    memory_row("head", "cross-entropy forward and backward " + shape, bytes, [&] {
        crossentropy_forward_backward(losses.data, logits.data, targets.data, 1e-4f, N, V, Vp,
                                      STREAM);
    });

    // Ranks that share a vocabulary go in steps, between which they add up their sums.
    memory_row("head", "cross-entropy in steps " + shape, 1.5 * bytes, [&] {
        crossentropy_max_sum(max.data, sum.data, target.data, logits.data, targets.data, N, V, Vp,
                             STREAM);
        crossentropy_loss(losses.data, max.data, sum.data, target.data, targets.data, N, STREAM);
        crossentropy_backward(logits.data, targets.data, max.data, sum.data, 1e-4f, N, V, Vp, 0,
                              STREAM);
    });
}

template <typename T> void head(const char* type) {
    crossentropy<T>(type, small ? 257 : 50257);
    crossentropy<T>(type, sized(131072));

    // Draw tokens, and count the rows of the table that they name.
    size_t N = sized(32768), V = sized(50304), C = sized(2048);
    auto token = [&](size_t i) { return int(i * i % (V - 47)); };
    std::vector<bool> named(V);
    for (size_t i = 0; i < N; i++)
        named[size_t(token(i))] = true;
    double rows = double(std::count(named.begin(), named.end(), true));
    Integers tokens(N, token), zero(N, [](size_t) { return 0; });

    Buffer<T> table(V * C), out(N * C);
    memory_row("head", text("embedding forward %s (%zu,%zu)", type, N, C),
               (double(N) + rows) * double(C * sizeof(T)), [&] {
                   embedding_forward(out.data, tokens.data, zero.data, zero.data, table.data,
                                     (const T*)nullptr, N, size_t(0), V, C, STREAM);
               });

    // dout is read; the gradient's rows are read and written.
    Buffer<float> grad(V * C);
    Room scratch(embedding_scratch_bytes(N, STREAM));
    memory_row("head", text("embedding backward %s (%zu,%zu), adding", type, N, C),
               double(C) * (double(N * sizeof(T)) + rows * 8), [&] {
                   embedding_backward_weight(grad.data, (float*)nullptr, out.data, tokens.data,
                                             zero.data, zero.data, scratch.data, N, size_t(0), V,
                                             size_t(0), C, true, STREAM);
               });
}

static void optimizer() {
    size_t n = sized(65536) * GRAD_NORM_CHUNK;
    Buffer<bf16> w(n);
    Buffer<float> master(n), grad(n), m(n), v(n);
    Buffer<double> sums(n / GRAD_NORM_CHUNK);
    StepScale s = {1, 1, 1, 1000};
    Room scale(sizeof(s));
    copy_in(scale.data, &s, sizeof(s), STREAM);
    wait_for(STREAM);
    StepScale* where = scale.as<StepScale>();

    // grad, master, m, v in; master, m, v, w out. Without a master w is read.
    AdamW h = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f};
    memory_row("optimizer", "adamw, bf16 weights, float master", 30.0 * double(n), [&] {
        adamw_update(w.data, master.data, grad.data, m.data, v.data, n, h, where, STREAM);
    });
    h.stochastic = true;
    TensorRow row = {0, n};
    AdamWMemory<bf16> without = {w.data, nullptr, grad.data, m.data, v.data};
    memory_row("optimizer", "adamw, bf16 weights, stochastic rounding", 24.0 * double(n), [&] {
        adamw_update(without, &row, 1, h, where, STREAM);
    });
    memory_row("optimizer", "gradient norm", 4.0 * double(n), [&] {
        grad_squares(sums.data, grad.data, n, STREAM);
        grad_norm_finish(where, sums.data, n / GRAD_NORM_CHUNK, 1.0f, STREAM, {},
                         {h.beta1, h.beta2});
    });
}

// ----------------------------------------------------------------------------
// attention

struct AttentionCase {
    size_t B, seq, NH, NKV, HS;
    size_t HS_v = HS; // fewer: v is as wide as k, with a padding that counts nothing (mla.h)
    float softcap = 0;
};

template <typename T> void attention_case(const char* type, AttentionCase s) {
    if (small) s.B = 1, s.seq = sized(s.seq), s.NH /= s.NKV, s.NKV = 1;
    std::string shape = text("%s B=%zu T=%zu NH=%zu NKV=%zu HS=%zu", type, s.B, s.seq, s.NH, s.NKV,
                             s.HS);
    if (s.HS_v != s.HS) shape += text(" HS_v=%zu", s.HS_v);
    if (s.softcap != 0) shape += text(" softcap=%g", double(s.softcap));

    // Positions count from 0 in each sequence, which is one document.
    size_t N = s.B * s.seq, Q = s.NH * s.HS, K = s.NKV * s.HS;
    AttentionDims d = {s.B, s.seq, s.seq, s.NH, s.NKV, s.HS, Q, K};
    Buffer<T> q(N * Q), k(N * K), v(N * K), dout(N * Q);
    Buffer<T> out(N * Q), dq(N * Q), dk(N * K), dv(N * K);
    Buffer<float> lse(s.B * s.NH * s.seq);
    Room room(attention_scratch_bytes<T>(d, 1, STREAM));
    Integers at(N, [&](size_t i) { return int(i % s.seq); }), zero(N, [](size_t) { return 0; });
    AttentionOperands<T> x = {q.data,  k.data,  v.data,    dout.data, at.data,
                              at.data, zero.data, nullptr, d};
    x.softcap = s.softcap;

    double pairs = double(s.B * s.NH) * double(s.seq) * double(s.seq) / 2;
    double HS = double(s.HS), HS_v = double(s.HS_v);
    product_row("attention", "attention forward " + shape, pairs * (2 * HS + 2 * HS_v),
                [&] { attention_forward(out.data, lse.data, x, room.data, STREAM); });
    product_row("attention", "attention backward " + shape, pairs * (6 * HS + 4 * HS_v), [&] {
        attention_backward(dq.data, dk.data, dv.data, out.data, lse.data, x, room.data, STREAM);
    });
}

// The last two: DeepSeek's heads, and Gemma 2 9B's.
template <typename T> void attention(const char* type) {
    for (AttentionCase s : {AttentionCase{16, 1024, 12, 12, 64},
                            {4, 4096, 16, 16, 64},
                            {2, 8192, 16, 16, 64},
                            {16, 1024, 16, 16, 128},
                            {4, 4096, 16, 16, 128},
                            {2, 8192, 16, 16, 128},
                            {2, 8192, 32, 8, 128},
                            {1, 16384, 16, 16, 128},
                            {4, 4096, 8, 8, 256},
                            {2, 4096, 16, 16, 192, 128},
                            {1, 4096, 16, 8, 256, 256, 50}})
        attention_case<T>(type, s);
}

// ----------------------------------------------------------------------------
// decoding: one token of each of B sequences, behind Tk in the cache

// Attention reads the cache: a key and a value for each token and key head.
static void decode_attention(size_t B, size_t Tk, size_t NH, size_t NKV, size_t HS) {
    B = some(B), Tk = sized(Tk);
    std::string what = text("attention bf16 B=%zu Tk=%zu NH=%zu NKV=%zu HS=%zu", B, Tk, NH, NKV,
                            HS);
    size_t KV = NKV * HS, row = 2 * KV;
    Buffer<bf16> q(B * NH * HS), cache(B * Tk * row), out(B * NH * HS);
    Buffer<float> lse(B * NH);

    // Rows of the cache hold a key, then a value.
    AttentionDims d = {B, 1, Tk, NH, NKV, HS, NH * HS, row};
    d.k_batch = d.v_batch = Tk * row;
    Room room(attention_scratch_bytes<bf16>(d, 1, STREAM));
    Integers last(B, [&](size_t) { return int(Tk - 1); }), zero(B, [](size_t) { return 0; });
    Integers at(B * Tk, [&](size_t i) { return int(i % Tk); });
    AttentionOperands<bf16> x = {q.data,  cache.data, cache.data + KV, nullptr, last.data,
                                 at.data, zero.data,  nullptr,         d};
    memory_row("decode", what, 2.0 * double(B * Tk * row),
               [&] { attention_forward(out.data, lse.data, x, room.data, STREAM); });
}

// DeepSeek-V3: a key of 512 + 64 channels serves 128 heads, whose queries absorb W_k.
static void decode_latents(size_t B, size_t Tk) {
    B = some(B), Tk = sized(Tk);
    size_t NH = some(128), P = 128, DC = 512, DR = 64, wide = DC + DR, rows = 2 * P;
    std::string shape = text("bf16 B=%zu Tk=%zu NH=%zu DC=%zu DR=%zu", B, Tk, NH, DC, DR);
    Buffer<bf16> w(NH * rows * DC), heads(B * NH * (P + DR)), q(B * NH * wide);
    Buffer<bf16> cache(B * Tk * wide), mean(B * NH * DC);

    // A head's matrix is read once, for all sequences.
    double matrix = 2.0 * double(NH * P * DC), vectors = 2.0 * double(B * NH * (P + DC));
    HeadMatrix<bf16> keys = {w.data, NH, rows, 0, P, DC, P + DR, wide};
    HeadMatrix<bf16> values = {w.data, NH, rows, P, P, DC, P, DC};
    memory_row("decode", "queries to latents " + shape, matrix + vectors,
               [&] { heads_to_latents(q.data, heads.data, keys, B, STREAM); });

    // All heads read the same cache.
    AttentionDims d = {B, 1, Tk, NH, 1, wide, NH * wide, wide};
    d.HS_v = DC;
    Integers last(B, [&](size_t) { return int(Tk - 1); }), zero(B, [](size_t) { return 0; });
    Integers at(B * Tk, [&](size_t i) { return int(i % Tk); });
    AttentionOperands<bf16> x = {q.data,  cache.data, cache.data, nullptr, last.data,
                                 at.data, zero.data,  nullptr,    d};
    memory_row("decode", "latent attention " + shape, 2.0 * double(B * Tk * wide),
               [&] { latent_attention_forward(mean.data, x, STREAM); });
    memory_row("decode", "latents to outputs " + shape, matrix + vectors,
               [&] { latents_to_heads(heads.data, mean.data, values, B, STREAM); });
}

// A product of few rows reads its weight.
static void decode_product(size_t N) {
    size_t OC = sized(14336), IC = sized(4096);
    Buffer<bf16> inp(N * IC), w(OC * IC), out(N * OC);
    Weight weight = {w.data, Type::BF16, OC, IC};
    Products products;
    auto run = [&] {
        linear_forward(out.data, inp.data, weight, nullptr, (const bf16*)nullptr, N, products.blas,
                       STREAM);
    };
    rehearse(products.blas, run);
    memory_row("decode", text("product bf16 N=%zu OC=%zu IC=%zu", N, OC, IC),
               2.0 * double(OC * IC + N * (OC + IC)), run);
}

static void decode() {
    decode_attention(16, 4096, 32, 8, 128);
    decode_attention(1, 32768, 32, 8, 128);
    decode_attention(16, 1024, 12, 12, 64);
    decode_latents(16, 4096);
    decode_product(16);
    decode_product(1);
}

// ----------------------------------------------------------------------------
// products

// A layer's three products. `what` says which layer.
static void layer_rows(const char* part, const std::string& what, const Weight& weight, size_t N,
                       Blas& blas) {
    Buffer<bf16> inp(N * weight.cols), out(N * weight.rows);
    double flops = 2.0 * double(N * weight.rows) * double(weight.cols);
    auto row = [&](const char* form, auto run) {
        rehearse(blas, run);
        product_row(part, form + what, flops, run);
    };

    row("forward ", [&] {
        linear_forward(out.data, inp.data, weight, nullptr, (const bf16*)nullptr, N, blas, STREAM);
    });
    row("backward input ",
        [&] { linear_backward_input(inp.data, out.data, weight, N, false, blas, STREAM); });
    if (weight.grad)
        row("backward weight, adding ", [&] {
            linear_backward_weight(weight, nullptr, out.data, inp.data, N, true, blas, STREAM);
        });
}

struct ProductCase {
    size_t N, OC, IC;
    ProductCase(size_t N, size_t OC, size_t IC) : N(sized(N)), OC(sized(OC)), IC(sized(IC)) {}
    std::string shape() const { return text("N=%zu OC=%zu IC=%zu", N, OC, IC); }
};

// The products of a GPT-2 124M, a 1.5B and a Llama 8B block.
static void products() {
    Products products;
    for (const ProductCase& s : {ProductCase{16384, 3072, 768},
                                 {16384, 6400, 1600},
                                 {8192, 14336, 4096},
                                 {8192, 8192, 8192}}) {
        Buffer<bf16> w(s.OC * s.IC);
        Buffer<float> grad(s.OC * s.IC);
        Weight weight = {w.data, Type::BF16, s.OC, s.IC, grad.data};
        layer_rows("products", "bf16 " + s.shape(), weight, s.N, products.blas);
    }
}

// ----------------------------------------------------------------------------
// fp8: casts, products of codes, and layers that do both

// A cast reads bf16 and writes one copy of codes, and scales.
template <typename F>
void cast_row(const char* name, size_t rows, size_t cols, Fp8Blocks blocks, bool turned,
              Fp8Late late = {}) {
    Buffer<bf16> x(rows * cols);
    Room codes(rows * cols), amax(sizeof(uint32_t));
    size_t scales = fp8_scale_bytes(rows, cols, blocks);
    Room inverse(scales);

    F* to = codes.as<F>();
    F* nowhere = nullptr;
    std::string what = text("cast %s (%zu,%zu)", name, rows, cols);
    memory_row("fp8", what, double(3 * rows * cols + scales), [&] {
        fp8_quantise<F>(turned ? nowhere : to, turned ? to : nowhere, inverse.as<float>(), x.data,
                        amax.as<uint32_t>(), rows, cols, blocks, STREAM, late);
    });
}

// The casts of each recipe's three products: inp and dout by rows or turned, W by squares.
static void fp8_casts(const ProductCase& s, Fp8Late late) {
    const Fp8Blocks WHOLE = Fp8Blocks::WHOLE;
    size_t N = s.N, OC = s.OC, IC = s.IC;
    cast_row<e4m3>("block, rows", N, IC, Fp8Blocks::ROWS, false);
    cast_row<e4m3>("block, columns, turned", N, IC, Fp8Blocks::COLUMNS, true);
    cast_row<e4m3>("block, squares", OC, IC, Fp8Blocks::SQUARES, false);
    cast_row<e4m3>("block, squares, turned", OC, IC, Fp8Blocks::SQUARES_T, true);
    cast_row<e4m3>("mx, rows", N, IC, Fp8Blocks::MX_ROWS, false);
    cast_row<e4m3>("mx, columns, turned", N, IC, Fp8Blocks::MX_COLUMNS, true);
    cast_row<e4m3>("tensor", N, IC, WHOLE, false);
    cast_row<e5m2>("tensor, gradient, turned", N, IC, WHOLE, true);
    cast_row<e4m3>("delayed", N, IC, WHOLE, false, late);
    cast_row<e5m2>("delayed, gradient, turned", N, IC, WHOLE, true, late);
}

// Codes of random numbers, with K along rows.
template <typename F> struct Codes {
    Room codes, inverse, amax;
    Fp8Operand operand;
    Codes(size_t rows, size_t K, Fp8Blocks blocks)
        : codes(rows * K), inverse(fp8_scales(rows, K, blocks) * sizeof(float)),
          amax(sizeof(uint32_t)),
          operand{codes.data, inverse.as<float>(), blocks, std::is_same_v<F, e5m2>} {
        Buffer<bf16> x(rows * K);
        fp8_quantise<F>(codes.as<F>(), (F*)nullptr, inverse.as<float>(), x.data,
                        amax.as<uint32_t>(), rows, K, blocks, STREAM);
        wait_for(STREAM);
    }
};

// One product of codes, out (M,N) = or += a (M,K) b (N,K)^T, whose a has format F.
template <typename F, typename O>
void fp8_product_row(const std::string& what, size_t M, size_t N, size_t K, Fp8Blocks a,
                     Fp8Blocks b, bool accumulate, Blas& blas) {
    Codes<F> first(M, K, a);
    Codes<e4m3> second(N, K, b);
    Buffer<O> out(M * N);
    bool wide = first.operand.wide;
    Fp8Product p = {M, N, K, a, b, wide, false, type_of<O>(), accumulate};
    if (!fp8_multiplies(p, blas, STREAM)) {
        printf("skipped: %s: cuBLASLt has no such product on this GPU\n", what.c_str());
        return;
    }

    auto run = [&] {
        fp8_matmul(out.data, first.operand, second.operand, (const bf16*)nullptr,
                   (const O*)nullptr, p, blas, STREAM);
    };
    rehearse(blas, run);
    product_row("fp8", what, 2.0 * double(M * N) * double(K), run);
}

// A layer's three products in both recipes (linear.cuh's table). G: the format of dout.
template <typename G>
void fp8_products(const char* recipe, const ProductCase& s, Fp8Blocks rows, Fp8Blocks squares,
                  Blas& blas) {
    std::string what = text(" codes %s %s", recipe, s.shape().c_str());
    fp8_product_row<e4m3, bf16>("forward" + what, s.N, s.OC, s.IC, rows, squares, false, blas);
    fp8_product_row<G, bf16>("backward input" + what, s.N, s.IC, s.OC, rows, squares, false, blas);
    fp8_product_row<G, float>("backward weight, adding" + what, s.OC, s.IC, s.N, rows, rows, true,
                              blas);
}

// A layer as a step runs it: its inputs and gradients are cast each time, W is cast already.
static void fp8_layer(const char* recipe, Fp8 fp8, const ProductCase& s, Fp8Late late) {
    Buffer<bf16> w(s.OC * s.IC);
    Buffer<float> grad(s.OC * s.IC);
    Room kept(fp8_cast_bytes(s.OC, s.IC, fp8));
    Fp8Cast cast = {kept.data};
    Weight weight = {w.data, Type::BF16, s.OC, s.IC, grad.data};
    weight.fp8 = fp8;
    weight.late = late;
    weight.cast = &cast;
    Products products(linear_fp8_bytes(s.N, s.OC, s.IC, fp8));
    layer_rows("fp8", text("layer %s %s", recipe, s.shape().c_str()), weight, s.N, products.blas);
}

// A Llama 8B block: q and o, gate and up, down.
static void fp8() {
    // No step has set the scales of inp, W and dout.
    Room scales(3 * sizeof(float)), amaxes(3 * sizeof(uint32_t));
    device_zero(scales.data, 3 * sizeof(float), STREAM);
    device_zero(amaxes.data, 3 * sizeof(uint32_t), STREAM);
    Fp8Late late = {scales.as<float>(), amaxes.as<uint32_t>()};
    ProductCase up = {8192, 14336, 4096};
    fp8_casts(up, late);

    const Fp8Blocks ROWS = Fp8Blocks::ROWS, SQUARES = Fp8Blocks::SQUARES;
    Products products;
    for (const ProductCase& s : {ProductCase{8192, 4096, 4096}, up, {8192, 4096, 14336}}) {
        fp8_products<e4m3>("block", s, ROWS, SQUARES, products.blas);
        fp8_products<e4m3>("mx", s, Fp8Blocks::MX_ROWS, Fp8Blocks::MX_ROWS, products.blas);
        fp8_products<e5m2>("tensor", s, Fp8Blocks::WHOLE, Fp8Blocks::WHOLE, products.blas);
    }

    fp8_layer("block", Fp8::BLOCK, up, {});
    fp8_layer("mx", Fp8::MX, up, {});
    fp8_layer("nvfp4", Fp8::NVFP4, up, {});
    fp8_layer("tensor", Fp8::TENSOR, up, {});
    fp8_layer("delayed", Fp8::DELAYED, up, late);
}

// ----------------------------------------------------------------------------
// NF4

// A frozen weight in 4 bits: its values alone, then products that dequantise it first.
static void nf4() {
    ProductCase s = {8192, 14336, 4096};
    size_t OC = s.OC, IC = s.IC, n = OC * IC;
    Bytes codes(n / 2), absmax(nf4_blocks(n));
    Buffer<float> table(nf4_table_floats(n));
    Buffer<bf16> wide(n);
    Narrow narrow;
    narrow.nf4 = {codes.data(), absmax.data(), table.data};
    double read = double(n / 2 + nf4_blocks(n) + 4 * nf4_table_floats(n));
    memory_row("nf4", text("dequantise to bf16 (%zu,%zu)", OC, IC), read + 2 * double(n),
               [&] { nf4_dequantize(wide.data, narrow.nf4, n, STREAM); });

    // Many rows are counted by FLOPs.
    Products products;
    products.blas.wide = wide.data;
    Weight weight = {nullptr, Type::BF16, OC, IC};
    weight.narrow = &narrow;
    layer_rows("nf4", s.shape(), weight, s.N, products.blas);

    // Few rows are counted by bytes: an ideal product reads the codes alone.
    size_t N = 16;
    Buffer<bf16> inp(N * IC), out(N * OC);
    auto run = [&] {
        linear_forward(out.data, inp.data, weight, nullptr, (const bf16*)nullptr, N, products.blas,
                       STREAM);
    };
    rehearse(products.blas, run);
    memory_row("nf4", text("forward N=%zu OC=%zu IC=%zu", N, OC, IC),
               read + 2.0 * double(N * (OC + IC)), run);
}

// ----------------------------------------------------------------------------
// experts

struct ExpertCase {
    size_t N, C, F, E, K; // N tokens choose K of E experts (F,C)
};

// The choice of experts, the sort by them, and which rows they have.
struct ExpertRows {
    size_t N, C, E, K, M;
    Integers ids, counts, starts, row_of, slot_of, rows;
    Buffer<float> logits, gates;
    Slots slots;

    explicit ExpertRows(const ExpertCase& s)
        : N(s.N), C(s.C), E(s.E), K(s.K), M(N * K), ids(M, nothing), counts(E, nothing),
          starts(E + 1, nothing), row_of(M, nothing), slot_of(M, nothing),
          rows(1, [&](size_t) { return int(M); }), logits(N * E), gates(M),
          slots{counts.data, starts.data, row_of.data, slot_of.data} {}
    static int nothing(size_t) { return 0; }
};

static void expert_moves(ExpertRows& x, const std::string& shape) {
    // Each token's logits in; its experts and their gates out.
    Routing routing = {Router::RENORMALISED, x.E, x.K};
    memory_row("experts", "route " + shape, 4.0 * double(x.N * x.E + 2 * x.M), [&] {
        route_forward(x.ids.data, x.gates.data, x.logits.data, routing, x.N, STREAM);
    });
    // ids in; both directions of the sort out.
    memory_row("experts", "sort " + shape, 12.0 * double(x.M),
               [&] { sort_slots(x.slots, x.ids.data, x.M, x.E, STREAM); });

    // A token's row is read once for all its slots, and written once from all of them.
    double bytes = 2.0 * double((x.N + x.M) * x.C);
    Buffer<bf16> tokens(x.N * x.C), sorted(x.M * x.C);
    memory_row("experts", "gather " + shape, bytes, [&] {
        gather_slots(sorted.data, tokens.data, x.slot_of.data, x.rows.data, x.M, x.K, x.C, STREAM);
    });
    memory_row("experts", "combine with residual " + shape, bytes + 2.0 * double(x.N * x.C), [&] {
        combine_slots(tokens.data, tokens.data, sorted.data, x.row_of.data, x.rows.data, x.N, x.K,
                      x.C, STREAM);
    });
}

// The three products of one of an expert's matrices, for all experts.
static void expert_products(const Groups& g, const std::string& shape) {
    Buffer<bf16> inp(g.M * g.IC), out(g.M * g.OC), w(g.E * g.OC * g.IC);
    Buffer<float> grad(g.E * g.OC * g.IC);
    Products products;
    double flops = 2.0 * double(g.M * g.OC) * double(g.IC);
    product_row("experts", "forward " + shape, flops, [&] {
        grouped_forward(out.data, inp.data, w.data, g, false, products.blas, STREAM);
    });
    product_row("experts", "backward input " + shape, flops, [&] {
        grouped_backward_input(inp.data, out.data, w.data, g, false, products.blas, STREAM);
    });
    product_row("experts", "backward weight, adding " + shape, flops, [&] {
        grouped_backward_weight(grad.data, out.data, inp.data, g, true, products.blas, STREAM);
    });
}

static void expert_gates(const ExpertRows& x, size_t F, const std::string& shape) {
    size_t n = x.M * F;
    Buffer<bf16> gate(n), up(n), h(n), dup(n);
    Buffer<float> dgates(x.M);
    memory_row("experts", "gated swiglu forward " + shape, 6.0 * double(n), [&] {
        gated_swiglu_forward(h.data, gate.data, up.data, x.gates.data, x.slot_of.data, x.rows.data,
                             x.M, F, STREAM);
    });
    memory_row("experts", "gated swiglu backward, in place " + shape, 10.0 * double(n), [&] {
        gated_swiglu_backward(h.data, dup.data, dgates.data, h.data, gate.data, up.data,
                              x.gates.data, x.slot_of.data, x.rows.data, x.M, F, STREAM);
    });
}

// A Mixtral 8x7B block, and one of many small experts.
static void experts() {
    for (ExpertCase s : {ExpertCase{4096, 4096, 14336, 8, 2}, {8192, 2048, 768, 128, 8}}) {
        s = {sized(s.N), sized(s.C), sized(s.F), s.E, s.K};
        std::string shape = text("bf16 N=%zu K=%zu E=%zu C=%zu F=%zu", s.N, s.K, s.E, s.C, s.F);
        ExpertRows x(s);
        expert_moves(x, shape);
        expert_products({x.starts.data, s.E, s.F, s.C, x.M}, shape);
        expert_gates(x, s.F, shape);
    }
}

// ----------------------------------------------------------------------------

struct Part {
    std::string name;
    std::function<void()> run;
};

int main(int argc, char** argv) {
    const std::vector<Part> parts = {
        {"norms", [] { norms<bf16>("bf16"), norms<float>("float"); }},
        {"elementwise", [] { elementwise<bf16>("bf16"); }},
        {"head", [] { head<bf16>("bf16"); }},
        {"optimizer", optimizer},
        {"attention", [] { attention<bf16>("bf16"); }},
        {"decode", decode},
        {"products", products},
        {"fp8", fp8},
        {"nf4", nf4},
        {"experts", experts}};

    // Read the arguments.
    std::vector<Part> wanted;
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        auto named = [&](const Part& p) { return p.name == word; };
        auto part = std::find_if(parts.begin(), parts.end(), named);
        LLMC_CHECK(part != parts.end() || word == "--small", "no part is called %s", argv[i]);
        if (part != parts.end())
            wanted.push_back(*part);
        else
            small = true;
    }

    // Measure.
    if (std::string why = no_gpu_because(); !why.empty()) {
        printf("skipped: %s\n", why.c_str());
        return 0;
    }
#if !defined(__CUDACC__)
    emulator::gpu = emulator::HOPPER;
#endif
    measure_ceilings();
    for (const Part& p : wanted.empty() ? parts : wanted)
        p.run();

#if !defined(__CUDACC__)
    std::vector<std::string> faults = emulator::take_messages();
    for (const std::string& fault : faults)
        printf("FAIL %s\n", fault.c_str());
    return !faults.empty();
#endif
}
