// attention_forward.cu - a ladder: attention, from three passes to tensor cores - arXiv:2205.14135
//   s_ij = q_i.k_j / sqrt(HS) for j <= i,   p_i = softmax(s_i),   out_i = sum_j p_ij v_j
//   q, k, v, out (B,T,NH,HS) float, in rung 6 bf16   lse (B,NH,T): log of the sum of exp
//   The work: 4 HS FLOPs for each (query, key) seen, 2 HS for the score and 2 HS for its share of
//   out: 2 B NH HS T (T + 1). The operands are 16 B T NH HS bytes, T / 8 FLOPs to the byte: limited
//   by arithmetic, if only the scores stay on the chip. On paper 67 TFLOP/s in float, 989 in bf16.
//
//   rung                                             at most  H200, TFLOP/s,
//                                                             B = 16, T = 1024, NH = 12, HS = 64
//     1  three passes over a row of scores                  1
//     2  a thread a score                                  36
//     3  online softmax                                    45
//     4  tiles of keys in shared memory                    67
//     5  llmc/ops/attention.cuh in float                   17
//     6  llmc/ops/attention.cuh in bf16, tensor cores     830
//
//   make ladders, or by hand
//     g++ -std=c++20 -O1 -DEMULATE -x c++ dev/cuda/attention_forward.cu -lpthread    checks
//     nvcc -std=c++20 -O3 -arch=sm_90a dev/cuda/attention_forward.cu -lcublasLt      and measures
#include "../../llmc/ops/attention.cuh"
#include "../../test/kernels/attention_inputs.h"
#include "ladder.h"

using namespace llmc;

constexpr int HS = 64; // known to the compiler: a head's channels are registers in rungs 3 and 4

template <typename E> struct Attention {
    E* out;                           // (B,T,NH,HS)
    float* lse;                       // (B,NH,T)
    const E *q, *k, *v;               // (B,T,NH,HS)
    const int *positions, *doc_start; // (B,T), what llmc asks in place of an index
    float* scores;                    // (B,NH,T,T), in rungs 1 and 2
    void* scratch;                    // of llmc's
    size_t B, T, NH;
    __device__ size_t at(size_t b, size_t t, size_t h) const { return ((b * T + t) * NH + h) * HS; }
};
typedef Attention<float> Floats;

constexpr float SCALE = 0.125f; // 1 / sqrt(HS)

// A query's number, as lse counts: (b, h, i), i fastest.
struct Query {
    size_t b, h, i;
    __device__ Query(size_t n, const Floats& a)
        : b(n / a.T / a.NH), h(n / a.T % a.NH), i(n % a.T) {}
};

__device__ inline float larger(float x, float y) { return x > y ? x : y; }

// ----------------------------------------------------------------------------
// 1. Three passes: a thread a query, its row of scores in global memory.
//   Scores and their maximum; exponentials and their sum; the sum of values. The row is written
//   twice and read 1 + HS times; lanes are queries, T floats apart: each access is a sector of its
//   own, one a clock and SM: 6.8e9 of them take 26 ms. k and v are the same for a warp's lanes, one
//   sector. B NH T threads are 1500 an SM.

__global__ void three_passes_kernel(Floats a) {
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= a.B * a.NH * a.T) return;
    Query my(n, a);
    const float* q = a.q + a.at(my.b, my.i, my.h);
    float *p = a.scores + n * a.T, most = -INFINITY, sum = 0;

    // Scores and their maximum.
    for (size_t j = 0; j <= my.i; j++) {
        p[j] = dot(q, a.k + a.at(my.b, j, my.h), HS) * SCALE;
        most = larger(p[j], most);
    }

    // Exponentials and their sum.
    for (size_t j = 0; j <= my.i; j++) {
        p[j] = expf(p[j] - most);
        sum += p[j];
    }

    // The values' sum.
    for (int e = 0; e < HS; e++) {
        float x = 0;
        for (size_t j = 0; j <= my.i; j++) x += p[j] * a.v[a.at(my.b, j, my.h) + e];
        a.out[a.at(my.b, my.i, my.h) + e] = x / sum;
    }
    a.lse[n] = most + logf(sum);
}

static void three_passes(const Floats& a, cudaStream_t stream) {
    launch(three_passes_kernel, unsigned(ceil_div(a.B * a.NH * a.T, 128)), 128, stream, a);
}

// ----------------------------------------------------------------------------
// 2. A thread a score: a kernel a pass, T or HS times the threads.
//   Lanes are now neighbours in the row of scores: its accesses are whole lines. They remain: the
//   causal half is written, read, written and read, 8 T^2 bytes a head, 1.6 GB here: 0.33 ms at
//   4.8 TB/s, nearly as long as all FLOPs take in float. The kernels do the two in turn.

__global__ void scores_kernel(Floats a) {
    size_t j = size_t(blockIdx.y) * blockDim.x + threadIdx.x, n = blockIdx.x;
    Query my(n, a);
    if (j > my.i) return;
    const float *q = a.q + a.at(my.b, my.i, my.h), *k = a.k + a.at(my.b, j, my.h);
    a.scores[n * a.T + j] = dot(q, k, HS) * SCALE;
}

__global__ void softmax_kernel(Floats a) { // a warp a row
    Query my(blockIdx.x, a);
    float *p = a.scores + blockIdx.x * a.T, most = -INFINITY, sum = 0;
    for (size_t j = threadIdx.x; j <= my.i; j += 32) most = larger(p[j], most);
    most = warp_max(most);
    for (size_t j = threadIdx.x; j <= my.i; j += 32) sum += expf(p[j] - most);
    sum = warp_sum(sum);
    for (size_t j = threadIdx.x; j <= my.i; j += 32) p[j] = expf(p[j] - most) / sum;
    if (threadIdx.x == 0) a.lse[blockIdx.x] = most + logf(sum);
}

__global__ void values_kernel(Floats a) { // a thread a channel
    Query my(blockIdx.x, a);
    const float *p = a.scores + blockIdx.x * a.T, *v = a.v + a.at(my.b, 0, my.h) + threadIdx.x;
    float x = 0;
    for (size_t j = 0; j <= my.i; j++) x += p[j] * v[j * a.NH * HS];
    a.out[a.at(my.b, my.i, my.h) + threadIdx.x] = x;
}

static void thread_a_score(const Floats& a, cudaStream_t stream) {
    unsigned queries = unsigned(a.B * a.NH * a.T);
    launch(scores_kernel, dim3(queries, unsigned(ceil_div(a.T, 128))), 128, stream, a);
    launch(softmax_kernel, queries, 32, stream, a);
    launch(values_kernel, queries, HS, stream, a);
}

// ----------------------------------------------------------------------------
// 3. Online softmax: one pass, no scores in memory.
//   A sum under an old maximum m, times exp(m - m'), is the sum under the new one, m'. So a thread
//   goes over the keys once, with q and the sum of values in registers: 2 HS floats. Memory sees
//   the operands alone. The price of a key is HS multiplications more, for the rescaling: 3 HS
//   instructions for 4 HS FLOPs, and HS / 2 loads of 16 bytes, which a warp's lanes share.

// q.k, by four sums that do not wait for each other
__device__ inline float score(const float (&q)[HS], const float* k) {
    float sum[4] = {};
    #pragma unroll
    for (int e = 0; e < HS; e += 4) {
        Pack<float, 4> p = load<4>(k + e);
        for (int i = 0; i < 4; i++) sum[i] += q[e + i] * p.v[i];
    }
    return (sum[0] + sum[1] + (sum[2] + sum[3])) * SCALE;
}

// sum = sum * rescale + p v
__device__ inline void add_values(float (&sum)[HS], float rescale, float p, const float* v) {
    #pragma unroll
    for (int e = 0; e < HS; e += 4) {
        Pack<float, 4> x = load<4>(v + e);
        for (int i = 0; i < 4; i++) sum[e + i] = sum[e + i] * rescale + p * x.v[i];
    }
}

__device__ inline void store_query(const Floats& a, Query my, const float (&sum)[HS], float most,
                                   float total) {
    for (int e = 0; e < HS; e++) a.out[a.at(my.b, my.i, my.h) + e] = sum[e] / total;
    a.lse[(my.b * a.NH + my.h) * a.T + my.i] = most + logf(total);
}

__global__ void online_softmax_kernel(Floats a) {
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= a.B * a.NH * a.T) return;
    Query my(n, a);
    float q[HS], sum[HS] = {}, most = -INFINITY, total = 0;
    for (int e = 0; e < HS; e++) q[e] = a.q[a.at(my.b, my.i, my.h) + e];
    for (size_t j = 0; j <= my.i; j++) {
        float s = score(q, a.k + a.at(my.b, j, my.h)), now = larger(s, most);
        float rescale = expf(most - now), p = expf(s - now);
        total = total * rescale + p;
        most = now;
        add_values(sum, rescale, p, a.v + a.at(my.b, j, my.h));
    }
    store_query(a, my, sum, most, total);
}

static void online_softmax(const Floats& a, cudaStream_t stream) {
    launch(online_softmax_kernel, unsigned(ceil_div(a.B * a.NH * a.T, 128)), 128, stream, a);
}

// ----------------------------------------------------------------------------
// 4. Tiles of keys in shared memory, for the 128 queries of a block.
//   A key's 512 bytes leave L2 once a block; in rung 3 it was luck whether four warps were close
//   enough to share them in L1. A tile has one maximum: the sums are rescaled once for KEYS keys,
//   HS / KEYS multiplications a key in place of HS: 2 HS instructions for 4 HS FLOPs.

constexpr int QUERIES = 128, KEYS = 16, TILE = KEYS * HS; // of a block, of a tile

__global__ void __launch_bounds__(QUERIES) key_tiles_kernel(Floats a) {
    LLMC_SHARED(float, k, TILE);
    LLMC_SHARED(float, v, TILE);
    size_t i0 = size_t(blockIdx.x) * QUERIES, i = i0 + threadIdx.x;
    bool real = i < a.T; // the others load tiles with the block
    Query my((size_t(blockIdx.z) * a.NH + blockIdx.y) * a.T + (real ? i : 0), a);
    size_t end = i0 + QUERIES < a.T ? i0 + QUERIES : a.T; // no query of the block sees more
    float q[HS], sum[HS] = {}, most = -INFINITY, total = 0;
    for (int e = 0; e < HS; e++) q[e] = a.q[a.at(my.b, my.i, my.h) + e];

    for (size_t j0 = 0; j0 < end; j0 += KEYS) {
        // Copy a tile, 16 bytes a thread at a time.
        __syncthreads(); // the tile before is read
        for (int c = threadIdx.x * 4; c < TILE; c += QUERIES * 4) {
            size_t j = j0 + c / HS, from = a.at(my.b, j < a.T ? j : 0, my.h) + c % HS;
            store(k + c, load<4>(a.k + from));
            store(v + c, load<4>(a.v + from));
        }
        __syncthreads(); // this one is there
        if (!real || j0 > i) continue;

        // Scores, and the maximum so far.
        float s[KEYS], now = most;
        #pragma unroll
        for (int j = 0; j < KEYS; j++) {
            s[j] = j0 + j <= i ? score(q, k + j * HS) : -INFINITY;
            now = larger(s[j], now);
        }

        // Move the sums to it; add the values.
        float rescale = expf(most - now);
        total *= rescale;
        most = now;
        for (float& x : sum) x *= rescale;
        #pragma unroll
        for (int j = 0; j < KEYS; j++) {
            float p = expf(s[j] - now);
            total += p;
            add_values(sum, 1, p, v + j * HS);
        }
    }
    if (real) store_query(a, my, sum, most, total);
}

static void key_tiles(const Floats& a, cudaStream_t stream) {
    dim3 grid(unsigned(ceil_div(a.T, QUERIES)), unsigned(a.NH), unsigned(a.B));
    launch(key_tiles_kernel, grid, QUERIES, stream, a);
}

// ----------------------------------------------------------------------------
// 5. and 6. The project's own.
//   In float any head size, groups of heads, documents, windows, slopes: a warp owns 4 queries, a
//   lane a key, so each multiply-add reads shared memory, a quarter of its rate, and rung 4, which
//   does less, is the faster. In bf16 the two products run on tensor cores: by mma.sync, or on
//   Hopper by wgmma, where exponentials are the limit, 84% of the peak (dev/results/sass.md). Keys
//   come while the tile before is worked on, and p goes from one product to the next in registers.

template <typename E> void library(const Attention<E>& a, cudaStream_t stream) {
    AttentionDims d = {a.B, a.T, a.T, a.NH, a.NH, HS, a.NH * HS, a.NH * HS};
    AttentionOperands<E> x = {a.q,         a.k,         a.v,     nullptr, a.positions,
                              a.positions, a.doc_start, nullptr, d};
    attention_forward(a.out, a.lse, x, a.scratch, stream);
}

// ----------------------------------------------------------------------------
// the ladder

template <typename E> using Run = void (*)(const Attention<E>&, cudaStream_t);

static const Rung<Run<float>> in_float[] = {
    {"three passes over a row of scores", three_passes},
    {"a thread a score", thread_a_score},
    {"online softmax", online_softmax},
    {"tiles of keys in shared memory", key_tiles},
    {"llmc/ops/attention.cuh in float", library<float>},
};
static const Rung<Run<bf16>> in_bf16[] = {
    {"llmc/ops/attention.cuh in bf16, tensor cores", library<bf16>},
};

struct Shape {
    size_t B, T, NH;
    AttentionDims dims() const { return {B, T, T, NH, NH, HS, NH * HS, NH * HS}; }
};

// Memory where kernels run.
template <typename E> struct Operands {
    Shape s;
    size_t rows = s.B * s.T, n = rows * s.NH * HS;
    Array<E> out{n}, q{n}, k{n}, v{n};
    Array<float> lse{rows * s.NH}, scores{rows * s.NH * s.T};
    Array<int> positions{rows}, doc_start{rows};
    Array<unsigned char> scratch{attention_scratch_bytes<E>(s.dims(), 1, cudaStream_t{})};
    void run(Run<E> f) {
        f({out.data, lse.data, q.data, k.data, v.data, positions.data, doc_start.data, scores.data,
           scratch.data, s.B, s.T, s.NH},
          nullptr);
    }
    void prepare() { // positions count from 0 in each sequence, which is one document
        auto position = [this](size_t n) { return int(n % s.T); };
        fill_memory(positions.data, rows, position, cudaStream_t{});
        device_zero(doc_start.data, rows * sizeof(int), cudaStream_t{});
    }
};

template <typename E> void check(Check& c, Run<E> run, Shape s) {
    size_t n = s.B * s.T * s.NH * HS;
    auto q = rounded<E>(normals(c, n)), k = rounded<E>(normals(c, n)),
         v = rounded<E>(normals(c, n));
    std::vector<double> want(n), want_lse(s.B * s.NH * s.T);
    std::vector<int> positions(s.B * s.T), doc_start(s.B * s.T);
    for (size_t n = 0; n < s.B * s.T; n++) positions[n] = int(n % s.T);

    // The definition, in double.
    AttentionOperands<double> x = {q.data(),         k.data(),         v.data(),         nullptr,
                                   positions.data(), positions.data(), doc_start.data(), nullptr,
                                   s.dims()};
    attention_forward_reference(want.data(), want_lse.data(), x);

    every_order(c, [&](Outputs& o) {
        Operands<E> x{s};
        x.prepare();
        fill(x.q, q);
        fill(x.k, k);
        fill(x.v, v);
        x.run(run);
        // two sums after each other; in bf16 the exponentials are rounded too
        o.add("out", x.out, want, tolerance<E>(HS + s.T, sizeof(E) < 4 ? 2 : 0));
        o.add("lse", x.lse, want_lse, tolerance<float>(HS + s.T));
    });
}

template <typename E, size_t N> int climb_in(int first, const Rung<Run<E>> (&ladder)[N]) {
    const Shape large = {16, 1024, 12};
    auto check_shapes = [](Check& c, Run<E> run) {
        for (Shape s : {Shape{2, 1, 1}, Shape{2, 37, 3}, Shape{1, 150, 1}}) check(c, run, s);
    };
    auto seconds = [&](Run<E> run) {
        Operands<E> x{large};
        x.prepare();
        for (Array<E>* operand : {&x.q, &x.k, &x.v}) fill_random(*operand);
        return gpu_seconds([&] { x.run(run); }, 20, nullptr);
    };
    double pairs = double(large.B * large.NH) * double(large.T * (large.T + 1) / 2);
    return climb(first, ladder, check_shapes, {4.0 * HS * pairs, 1e12, "TFLOP/s"}, seconds);
}

int main() { return climb_in(1, in_float) + climb_in(6, in_bf16) > 0; }
